"""Which spec the episodes of a file get.

The spec is that of the existing dataset, else the one that `stepwell export` wrote, else the spaces
that the file declares, else one derived from the data (spec.py). Declared bounds that
the actions leave, or that are infinite, give way to derived ones. Texts become ids of their words,
in lower case, with the words of all episodes as vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from server.imports.episodes import TEXT, Declared, Episodes, Layout, Leaf
from server.imports.raw_file import (
    Array,
    ImportOptions,
    ImportRefused,
)
from server.imports.spec import (
    action_space,
    element_order,
    fitting_names,
    observation_space,
)
from stepwell._wording import pluralize
from stepwell.errors import InvalidData
from stepwell.spaces import (
    Box,
    EnvSpec,
    MultiBinary,
    MultiDiscrete,
    Space,
    all_finite,
    why_outside,
)
from stepwell.vocabulary import Vocabulary, words_of


def choose_spec(source: Episodes, options: ImportOptions, memory: int) -> EnvSpec:
    layout = source.layout
    if options.spec is not None:
        _check_names(options.spec, layout)
        for what, leaves in (("observation", layout.observations), ("action", layout.actions)):
            for key, leaf in leaves.items():
                known = options.spec.names.get(f"{what}/{key}", ())
                order = element_order(f"{what}/{key}", known, leaf.names, layout.warnings)
                if order is not None:
                    layout.orders[leaf.path] = order
        return options.spec
    forced = {
        "observation": bool(options.observation),
        "action": any((options.action, options.action_low, options.action_high)),
    }
    written = source.written_spec()
    if written is not None and not any(forced.values()):
        kept = {key: space for key, space in written.infos.items() if key in layout.infos}
        spec = replace(written, infos=kept, env=options.env or written.env)
        _check_names(spec, layout)
        return spec
    if any(forced.values()) and (len(layout.observations) > 1 or len(layout.actions) > 1):
        raise ImportRefused(
            "options for spaces need one observation and one action",
            expected="no observation=, action=, action_low= or action_high=",
            got=", ".join([*layout.observations, *layout.actions]),
        )
    declared = {what: {} if said else source.declared(what) for what, said in forced.items()}
    vocabularies: dict[str, Vocabulary] = {}
    observations: dict[str, Space] = {}
    for key, leaf in layout.observations.items():
        said = declared["observation"].get(key)
        if leaf.kind == "texts" or said == TEXT:
            observations[key], vocabularies[key] = _text(source, key, leaf)
        elif isinstance(said, Space):
            observations[key] = said
        else:
            array = _every(source, leaf, memory, enough=_tells_little(leaf))
            observations[key] = observation_space(array, options, layout.warnings)
    actions: dict[str, Space] = {}
    for key, leaf in layout.actions.items():
        actions[key] = _action(source, leaf, declared["action"].get(key), options, memory)
    infos = {key: Box(leaf.shape or (), leaf.dtype.name) for key, leaf in layout.infos.items()}
    names = {
        f"{what}/{key}": leaf.names
        for what, leaves in (("observation", layout.observations), ("action", layout.actions))
        for key, leaf in leaves.items()
    }
    return EnvSpec.of(
        observations,
        actions,
        infos=infos,
        env=options.env or source.env,
        vocabularies=vocabularies,
        names=fitting_names(names, observations, actions),
    )


def _action(
    source: Episodes, leaf: Leaf, said: Declared | None, options: ImportOptions, memory: int
) -> Space:
    """The declared space if it has bounds that all actions keep, else one derived from them."""
    array = _every(source, leaf, memory)
    if isinstance(said, MultiDiscrete | MultiBinary):  # flat, whatever shape the file has
        array = array.reshape(len(array), -1)
    endless = isinstance(said, Box) and not np.isfinite(said.bounds()).all()
    why = why_outside(said, array) if isinstance(said, Space) and not endless else ""
    if isinstance(said, Space) and not endless and not why:
        return said
    if isinstance(said, Space):
        reason = why or "they are infinite"
        source.layout.warnings.append(f"bounds of the actions come from the data: {reason}")
    return action_space(array, options, source.layout.warnings)


def _check_names(spec: EnvSpec, layout: Layout) -> None:
    for what, spaces, leaves in (
        ("observations", spec.observations, layout.observations),
        ("actions", spec.actions, layout.actions),
    ):
        if spaces.keys() != leaves.keys():
            raise ImportRefused(
                f"the file has other {what} than the dataset",
                expected=sorted(spaces),
                got=sorted(leaves),
                code="schema_mismatch",
            )
    for key in spec.infos:
        if key not in layout.infos and key not in layout.dropped:
            raise ImportRefused(
                f"infos/{key} is missing",
                expected=f"infos of the dataset: {', '.join(spec.infos)}",
                got=", ".join(sorted(layout.infos)) or "none",
                code="schema_mismatch",
            )
    if more := sorted(set(layout.infos) - set(spec.infos)):
        layout.warnings.append(f"infos that the dataset does not have, dropped: {', '.join(more)}")


def _tells_little(leaf: Leaf) -> bool:
    """Whether the space follows from one episode: only that of whole numbers needs them all."""
    return leaf.kind == "frames" or leaf.dtype.kind == "f" or leaf.dtype == np.bool_


def _every(source: Episodes, leaf: Leaf, memory: int, *, enough: bool = False) -> Array:
    """All rows; with `enough`, the first part of them."""
    size, parts = 0, []
    for array in islice(source.every(leaf), 1 if enough else None):
        if array.dtype.kind == "f" and not all_finite(array):
            for number, _ in source.layout.episodes:
                source.check_finite(number)  # says which
        parts.append(array)
        size += array.nbytes
        if size > memory:
            raise ImportRefused(
                f"{leaf.path} needs more memory than an import may have (STEPWELL_IMPORT_MEMORY)",
                expected=f"at most {memory} bytes, or metadata that declare its space",
                got=f"{size} bytes or more",
                code="body_too_large",
                status=413,
            )
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _text(source: Episodes, key: str, leaf: Leaf) -> tuple[MultiDiscrete, Vocabulary]:
    if leaf.kind != "texts":
        raise ImportRefused(f"{leaf.path} is declared a text", expected="strings", got="numbers")
    words: set[str] = set()
    longest = 1
    for number, _ in source.layout.episodes:
        for text in {*source.rows(number, leaf)}:
            split = words_of(text)
            words.update(split)
            longest = max(longest, len(split))
    source.layout.warnings.append(
        f"{key}: texts are stored as ids of {pluralize(len(words), 'word')}, in lower case"
    )
    try:
        vocabulary = Vocabulary(tuple(sorted(words)))
        return MultiDiscrete((vocabulary.n,) * longest), vocabulary
    except InvalidData as error:
        raise ImportRefused(f"{leaf.path} cannot be split into words: {error}") from None
