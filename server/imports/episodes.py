"""The protocol of all formats: episodes of named arrays → trajectories, one episode at a time. The
module of a format makes an `Episodes` object; here the spec is chosen and rows are fitted to it.

The spec is that of the existing dataset, else the one that `stepwell export` wrote, else the spaces
that the file declares, else one derived from the data (spec.py). Declared bounds that
the actions leave, or that are infinite, give way to derived ones. Texts become ids of their words,
in lower case, with the words of all episodes as vocabulary.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np
import uuid_utils
from numpy.typing import NDArray

from server.imports.raw_file import (
    Array,
    ImportOptions,
    ImportRefused,
    Reading,
    same_name,
    why_dropped,
)
from server.imports.spec import (
    action_space,
    cast,
    check_inside,
    element_order,
    fitting_names,
    observation_space,
    unknown_info,
)
from stepwell._wording import pluralize
from stepwell.errors import InvalidData, InvalidTrajectory
from stepwell.rounding import narrowed, rounded
from stepwell.spaces import (
    DEFAULT_ACTION,
    DEFAULT_OBSERVATION,
    DTYPES,
    MAX_ELEMENTS,
    Box,
    EnvSpec,
    MultiBinary,
    MultiDiscrete,
    Space,
    all_finite,
    why_outside,
)
from stepwell.trajectory import Trajectory, TrajectoryMetadata
from stepwell.vocabulary import Vocabulary, words_of

NAMESPACE = uuid_utils.UUID("5b0f8f0e-6f6e-5c1c-9d0a-3c9d4b1f7a10")
"""Namespace of the ids of imported trajectories: same dataset, file and place → same id."""
MAX_DIMENSIONS = 8
"""Of a row, as in a spec."""
MOST_LINES = 40
"""Most warnings about single infos."""
REWARDS = Box((), "float32")
DEFAULTS = {"observation": DEFAULT_OBSERVATION, "action": DEFAULT_ACTION, "info": ""}
"""Keys of arrays without a name."""
TEXT = "text"
Declared = Space | str
"""A space that the file declares, or `TEXT`: its vocabulary comes from the data."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of every episode."""

    path: str
    """In its episode, as the format calls it."""
    shape: tuple[int, ...] | None
    """Shape of one row; None for texts and encoded images."""
    dtype: np.dtype[Any]
    kind: str = "numbers"
    """"numbers", "texts" or "frames" (encoded images)."""
    names: tuple[str, ...] = ()
    """Names of a vector's elements, if the file has them."""


Leaves = dict[str, dict[str, Leaf]]
"""By role ("observation", "action", "info") and key."""


@dataclass(slots=True)
class Layout:
    """What a dataset has."""

    episodes: list[tuple[int, int]] = field(default_factory=list)
    """(number, T), in order."""
    observations: dict[str, Leaf] = field(default_factory=dict)
    actions: dict[str, Leaf] = field(default_factory=dict)
    infos: dict[str, Leaf] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    """Infos that are not read: name → reason."""
    warnings: list[str] = field(default_factory=list)
    skipped: int = 0
    """Episodes without a step."""
    orders: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Path → the elements of its vectors in the order of the dataset's names."""

    def check_skipped(self) -> None:
        """Tell of episodes without a step; raises `ImportRefused` if there are no others."""
        if self.skipped and not self.episodes:
            raise ImportRefused(
                "no episode has a step",
                expected="an episode with at least one",
                got=pluralize(self.skipped, "episode"),
            )
        if self.skipped:
            self.warnings.append(f"{pluralize(self.skipped, 'episode')} without a step left out")

    def place(
        self, here: Leaves, role: str, key: str, leaf: Leaf | str, where: str, drop: Sequence[str]
    ) -> None:
        """Put an array of an episode into `here`; a text says why it cannot be read. An info that
        is not kept is dropped. Raises `ImportRefused` for others."""
        why = leaf if isinstance(leaf, str) else ""
        if role == "info":
            texts = isinstance(leaf, Leaf) and leaf.kind != "numbers"
            why = why_dropped(key, drop) or why or ("not plain numbers" if texts else "")
        if isinstance(leaf, Leaf) and not why:
            put(here.setdefault(role, {}), key, leaf, self.dropped if role == "info" else None)
        elif role == "info":
            self.dropped[key] = why
        else:
            raise ImportRefused(f"{where[:250]}: {why}", expected="numbers or texts")

    def add(self, number: int, steps: int, name: str, here: Leaves) -> None:
        """One more episode; raises `ImportRefused` if its arrays differ from those before it."""
        observations, actions = here.get("observation", {}), here.get("action", {})
        infos = {k: leaf for k, leaf in here.get("info", {}).items() if k not in self.dropped}
        if not observations or not actions:
            raise ImportRefused(
                f"{name} has no {'actions' if observations else 'observations'}",
                expected="numbers, images or texts",
                got=_words(observations | actions | infos),
            )
        if not self.episodes:
            self.observations, self.actions, self.infos = observations, actions, infos
        for what, known, found in (
            ("observations", self.observations, observations),
            ("actions", self.actions, actions),
        ):
            if found != known:
                raise ImportRefused(
                    f"{what} of {name} differ from those of the episodes before",
                    expected=_words(known),
                    got=_words(found),
                )
        for key in [k for k in self.infos if infos.get(k) != self.infos[k]]:
            self.dropped[key] = f"missing or different in {name}"
            del self.infos[key]
        for key in infos.keys() - self.infos.keys() - self.dropped.keys():
            self.dropped[key] = f"not in the episodes before {name}"
        self.episodes.append((number, steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """One episode without its named arrays."""

    name: str
    """For messages."""
    rewards: Array
    """[T]."""
    terminated: bool
    truncated: bool
    final_obs_valid: bool = True
    metadata: TrajectoryMetadata = TrajectoryMetadata()
    """env, source and an empty episode_id are filled in."""
    rows: NDArray[np.int64] | None = None
    """[T]: where the file is a table, the row of each step."""


class Episodes(ABC):
    """An opened dataset; each format has a class of its own, and in its module a context manager
    `opened(file, options, memory, max_rows)` that gives one and raises `ImportRefused`."""

    layout: Layout
    env = ""
    metadata: Mapping[str, Any] = MappingProxyType({})
    """Of the whole file, for the job's result and the description of a new dataset."""

    def declared(self, what: str) -> Mapping[str, Declared]:  # noqa: ARG002
        """Spaces by key; `what` is "observation" or "action"."""
        return {}

    def written_spec(self) -> EnvSpec | None:
        """The spec that `stepwell export` wrote into it. Raises `ImportRefused` if it is broken."""
        return None

    @abstractmethod
    def rows(self, number: int, leaf: Leaf) -> Array:
        """One array of one episode: numbers [rows, …] (images as pixels), texts as objects."""

    @abstractmethod
    def about(self, number: int) -> About:
        """Rewards, ends and metadata of one episode."""

    def every(self, leaf: Leaf) -> Iterator[Array]:
        """All rows of an array of numbers, in parts; those of one episode each."""
        return (_number(self, n, leaf, f"episode {n}") for n, _ in self.layout.episodes)


def plan(source: Episodes, options: ImportOptions, memory: int, max_rows: int) -> Reading:
    """Check all arrays and choose the spec. Raises `ImportRefused`."""
    layout = source.layout
    for key, leaf in [*layout.infos.items()]:
        if refusal := _unfit(leaf):
            del layout.infos[key]
            layout.dropped[key] = f"{refusal.detail.removeprefix(f'{leaf.path} ')} ({refusal.got})"
    for leaf in (*layout.observations.values(), *layout.actions.values()):
        if refusal := _unfit(leaf):
            raise refusal
    steps = sum(steps for _, steps in layout.episodes)
    if steps > max_rows:
        raise ImportRefused("too many steps", expected=f"≤ {max_rows}", got=steps)
    spec = _choose(source, options, memory)
    _drop_unfitting(layout, spec)
    _warn_of_rounding(source, spec)
    layout.warnings += _left_out(layout, options)
    return Reading(
        format=options.format,
        spec=spec,
        steps=steps,
        count=len(layout.episodes),
        warnings=layout.warnings,
        dropped=layout.dropped,
        metadata=dict(source.metadata),
        trajectories=_trajectories(source, spec, options),
    )


def _unfit(leaf: Leaf) -> ImportRefused | None:
    """Why no space can hold such numbers, if so."""
    shape = leaf.shape or ()
    if 0 in shape or math.prod(shape) > MAX_ELEMENTS:
        return ImportRefused(
            f"{leaf.path} has rows of an invalid size",
            expected=f"1 … {MAX_ELEMENTS} elements in each row",
            got=f"shape {list(shape)}",
        )
    if len(shape) > MAX_DIMENSIONS:
        return ImportRefused(
            f"{leaf.path} has too many dimensions",
            expected=f"≤ {MAX_DIMENSIONS} of each row",
            got=f"shape {list(shape)}",
        )
    if leaf.kind == "numbers" and leaf.dtype.name not in DTYPES:
        return ImportRefused(
            f"{leaf.path} has an unsupported type",
            expected=", ".join(DTYPES),
            got=str(leaf.dtype),
        )
    return None


def _warn_of_rounding(source: Episodes, spec: EnvSpec) -> None:
    """Note types that lose digits; integers and rewards are read up to the first that does."""
    layout = source.layout
    for what, leaves, spaces in (
        ("observations", layout.observations, spec.observations),
        ("actions", layout.actions, spec.actions),
        ("infos", layout.infos, spec.infos),
    ):
        for key, leaf in leaves.items():
            if leaf.kind != "numbers" or key not in spaces:
                continue
            word = what if len(leaves) == 1 and what != "infos" else f"{what}/{key}"
            stored = np.dtype(spaces[key].dtype)
            note = narrowed(word, leaf.dtype, stored)
            if leaf.dtype.kind in "iu" and leaf.dtype.itemsize > 2 and stored.kind == "f":
                notes = (rounded(word, array, stored) for array in source.every(leaf))
                note = next(filter(None, notes), "")
            layout.warnings += [note] if note else []
    for number, _ in source.layout.episodes:
        try:
            rewards = np.asarray(source.about(number).rewards)
        except InvalidTrajectory:
            return  # said when the episode is stored
        if rewards.dtype == np.float32 or rewards.dtype.itemsize <= 2:
            return  # none is rounded, and the other episodes have the same type
        if warning := rounded("rewards", rewards, np.float32):
            source.layout.warnings.append(warning)
            return


def _drop_unfitting(layout: Layout, spec: EnvSpec) -> None:
    """Drop the infos that the spec has with another shape."""
    for key in spec.infos.keys() & layout.infos.keys():
        leaf = layout.infos[key]
        try:
            cast(f"infos/{key}", np.zeros((1, *(leaf.shape or ())), leaf.dtype), spec.infos[key])
        except ImportRefused as error:
            layout.dropped[key] = f"{error.detail} (expected {error.expected}, got {error.got})"
            del layout.infos[key]


def _left_out(layout: Layout, options: ImportOptions) -> list[str]:
    """A warning for each info that is dropped, and for each unknown name in drop_infos."""
    lines = [f"info {name[:80]!r} left out: {why}" for name, why in sorted(layout.dropped.items())]
    if (more := len(lines) - MOST_LINES) > 0:
        lines = [*lines[:MOST_LINES], f"… and {more} more infos"]
    known = [*layout.dropped, *layout.infos]
    for requested in options.drop_infos:
        if requested != "*" and not any(
            name == requested or name.startswith(f"{requested}/") for name in known
        ):
            near = difflib.get_close_matches(requested, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            lines.append(f"drop_infos: the file has no info {requested[:80]!r}{hint}")
    return lines


def join(key: str, part: str) -> str:
    """A name that a spec allows: other characters, such as spaces, become "_"."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", part)
    return f"{key}/{name}" if key else name


def array_name(role: str, parts: Sequence[str]) -> str:
    """The key of an array in the groups `parts` below those of its role: the members of a Tuple are
    numbered, as a collector numbers them."""
    key = DEFAULTS[role] if not parts or parts[0].isdecimal() else ""
    for part in parts:
        key = join(key, part)
    return key


def put(leaves: dict[str, Any], key: str, leaf: Any, dropped: dict[str, str] | None = None) -> None:
    """Add a leaf by its name. Of infos that have one name all go into `dropped`; others raise
    `ImportRefused`."""
    if key in leaves:
        error = same_name(key, leaves[key].path, leaf.path, "other names in the file")
        if dropped is None:
            raise error
        dropped[key] = error.detail
    leaves[key] = leaf


def parsed_spec(where: str, written: Any) -> EnvSpec:
    """The spec that `stepwell export` wrote, or its JSON. Raises `ImportRefused`."""
    try:
        return EnvSpec.from_json(json.loads(written) if isinstance(written, bytes) else written)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ImportRefused(
            f"{where} cannot be read: {str(error)[:200]}", expected="an env spec as JSON"
        ) from None


def trajectory_id(options: ImportOptions, index: int) -> str:
    return str(uuid_utils.uuid5(NAMESPACE, f"{options.dataset}/{options.sha256}/{index}"))


def _trajectories(source: Episodes, spec: EnvSpec, options: ImportOptions) -> Iterator[Trajectory]:
    """The episodes in order. Raises `ImportRefused` for an invalid one."""
    layout = source.layout
    came_from = f"{options.format}:{options.sha256}"
    for index, (number, steps) in enumerate(layout.episodes):
        name = f"episode {number}"
        try:
            about = source.about(number)
            name = about.name
            infos = {
                key: cast(f"infos/{key}", _number(source, number, layout.infos[key], name), space)
                if key in layout.infos
                else unknown_info(key, space, steps + 1, layout.dropped[key])
                for key, space in spec.infos.items()
            }
            rewards = cast("rewards", np.asarray(about.rewards), REWARDS)
            said = about.metadata
            yield Trajectory(
                obs=_fitted(source, number, layout.observations, spec.observations, spec, about),
                actions=_fitted(source, number, layout.actions, spec.actions, spec, about),
                rewards=rewards,
                terminated=about.terminated,
                truncated=about.truncated,
                final_obs_valid=about.final_obs_valid,
                infos=infos,
                metadata=replace(
                    said,
                    env=options.env or said.env or spec.env,
                    episode_id=said.episode_id or f"{options.sha256[:12]}/{number}",
                    source=came_from,
                ),
                id=trajectory_id(options, index),
            )
        except (InvalidTrajectory, ImportRefused) as error:
            with suppress(InvalidTrajectory):
                _check_finite(source, number)  # says more
            if isinstance(error, ImportRefused):
                raise
            raise ImportRefused(
                f"{name}: {error}", expected=error.expected, got=error.got
            ) from None


# --- the spec -------------------------------------------------------------------------------------


def _choose(source: Episodes, options: ImportOptions, memory: int) -> EnvSpec:
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
                _check_finite(source, number)  # says which
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


# --- one episode ----------------------------------------------------------------------------------


def _fitted(
    source: Episodes,
    number: int,
    leaves: Mapping[str, Leaf],
    spaces: Mapping[str, Space],
    spec: EnvSpec,
    about: About,
) -> dict[str, Array]:
    fitted = {}
    acts = leaves is source.layout.actions
    for key, leaf in leaves.items():
        space, where = spaces[key], f"{about.name}/{leaf.path}"
        if leaf.kind == "texts":
            vocabulary = spec.vocabularies.get(key)
            if vocabulary is None:
                raise ImportRefused(
                    f"{where} is a text", expected="numbers", got="texts", code="schema_mismatch"
                )
            fitted[key] = _ids(source.rows(number, leaf), vocabulary, space.shape[0])
            continue
        array = _number(source, number, leaf, about.name)
        array = cast(where, array, space)
        if array.dtype.kind in "iu" or not isinstance(space, Box) or acts:
            check_inside(where, array, space)
        fitted[key] = array
    return fitted


def _ids(texts: Array, vocabulary: Vocabulary, length: int) -> Array:
    known = {text: vocabulary.encode(text, length) for text in {*texts}}
    return np.stack([known[text] for text in texts])


def _number(source: Episodes, number: int, leaf: Leaf, name: str) -> Array:
    if leaf.kind == "texts":
        raise ImportRefused(f"{name}/{leaf.path} is a text", expected="numbers", got="texts")
    array = source.rows(number, leaf)
    if (order := source.layout.orders.get(leaf.path)) is not None:
        if array.shape[1:] != order.shape:
            raise ImportRefused(
                f"{name}/{leaf.path} has another shape than its names",
                expected=list(order.shape),
                got=list(array.shape[1:]),
            )
        array = array[:, order]
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))


def _check_finite(source: Episodes, number: int) -> None:
    """Refuse an episode with NaN or infinite numbers, with the row of the first."""
    about, layout = source.about(number), source.layout
    leaves = [*layout.observations.values(), *layout.actions.values()]
    arrays = {
        leaf.path: _number(source, number, leaf, about.name)
        for leaf in leaves
        if leaf.kind != "texts"
    }
    arrays["rewards"] = cast("rewards", np.asarray(about.rewards), REWARDS)
    for path, array in arrays.items():
        if array.dtype.kind != "f" or all_finite(array):
            continue
        invalid = ~np.isfinite(array.reshape(len(array), -1))
        step = int(invalid.any(axis=1).argmax())
        where = f"step {step}"
        if about.rows is not None and step < len(about.rows):
            where = f"row {about.rows[step]}"
        raise ImportRefused(
            f"{about.name}/{path} contains invalid numbers",
            expected="finite",
            got=f"{int(invalid.sum())} NaN or infinite, the first in {where}",
        )


def _words(leaves: Mapping[str, Leaf]) -> str:
    shown = (f"{k} {leaf.dtype} {leaf.shape or leaf.kind}" for k, leaf in sorted(leaves.items()))
    return ", ".join(shown)[:300] or "none"
