"""Episodes of a Minari dataset → trajectories, one at a time; the spec is chosen before the first.

The spec is that of the existing dataset, else the one that `stepwell export` wrote, else the spaces
that metadata.json declares, else one derived from the data as for D4RL (spec.py). Declared bounds
that the actions leave, or that are infinite, give way to derived ones. Texts become ids of their
words, in lower case, with the words of all episodes as vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np

from server.imports.episodes import trajectory_id
from server.imports.minari import METADATA, Layout, Leaf, read_leaf, survey
from server.imports.minari_spaces import TEXT, Declared, declared_spaces
from server.imports.raw_file import Array, ImportOptions, ImportRefused
from server.imports.spec import (
    action_space,
    cast,
    check_inside,
    fit_info,
    observation_space,
)
from stepwell._plural import pluralize
from stepwell.errors import InvalidData, InvalidTrajectory
from stepwell.spaces import (
    DEFAULT_ACTION,
    DEFAULT_OBSERVATION,
    Box,
    EnvSpec,
    MultiDiscrete,
    Space,
    why_outside,
)
from stepwell.trajectory import Trajectory, TrajectoryMetadata
from stepwell.vocabulary import Vocabulary, words_of

SPEC = "stepwell_spec"


@dataclass(slots=True)
class MinariPlan:
    """The plan of an import."""

    spec: EnvSpec
    layout: Layout
    exported: bool
    """Whether `stepwell export` wrote it, so that an episode without an end goes on elsewhere."""

    @property
    def steps(self) -> int:
        return sum(steps for _, steps in self.layout.episodes)

    @property
    def warnings(self) -> list[str]:
        return self.layout.warnings


def plan(
    h5: h5py.File,
    metadata: dict[str, Any],
    options: ImportOptions,
    memory: int,
    max_rows: int,
) -> MinariPlan:
    """Check all arrays and choose the spec. Raises `ImportRefused`."""
    layout = survey(h5, metadata, options.size, memory, options)
    found = MinariPlan(EnvSpec.of(Box((1,)), Box((1,))), layout, SPEC in metadata)
    if found.steps > max_rows:
        raise ImportRefused("too many steps", expected=f"≤ {max_rows}", got=found.steps)
    said = metadata.get("total_steps", found.steps)
    if said != found.steps:
        raise ImportRefused(
            "steps are missing", expected=f"total_steps = {said} in {METADATA}", got=found.steps
        )
    found.spec = _choose(h5, found, options, memory)
    for key, why in sorted(layout.dropped.items())[:40]:
        layout.warnings.append(f"info {key[:80]!r} left out: {why}")
    if any(leaf.kind == "frames" for leaf in layout.observations.values()):
        layout.warnings.append(
            "images were stored as JPEG, which changes pixels: what is stored "
            "here is what the JPEG shows"
        )
    return found


def trajectories(h5: h5py.File, found: MinariPlan, options: ImportOptions) -> Iterator[Trajectory]:
    """The episodes in the order of their numbers. Raises `ImportRefused` for an invalid one."""
    spec, layout = found.spec, found.layout
    source = f"{options.format}:{options.sha256}"
    for index, (number, steps) in enumerate(layout.episodes):
        group = h5[f"episode_{number}"]
        name = f"episode_{number}"
        terminated, truncated = _ends(group, name, found.exported)
        infos = {
            key: fit_info(
                key,
                _number(group, layout.infos[key], name) if key in layout.infos else None,
                space,
                steps + 1,
                dict(layout.dropped),
            )
            for key, space in spec.infos.items()
        }
        with np.errstate(over="ignore"):
            rewards = np.asarray(group["rewards"][()]).astype(np.float32)
        try:
            yield Trajectory(
                obs=_fitted(group, layout.observations, spec.observations, spec, name),
                actions=_fitted(group, layout.actions, spec.actions, spec, name),
                rewards=rewards,
                terminated=terminated,
                truncated=truncated,
                final_obs_valid=bool(group.attrs.get("final_obs_valid", True)),
                infos=infos,
                metadata=TrajectoryMetadata(
                    env=options.env or spec.env,
                    episode_id=f"{options.sha256[:12]}/{number}",
                    seed=_seed(group),
                    source=source,
                ),
                id=trajectory_id(options, index),
            )
        except InvalidTrajectory as error:
            raise ImportRefused(
                f"{name}: {error}", expected=error.expected, got=error.got
            ) from None


# --- the spec -------------------------------------------------------------------------------------


def _choose(h5: h5py.File, found: MinariPlan, options: ImportOptions, memory: int) -> EnvSpec:
    layout = found.layout
    if options.spec is not None:
        _check_names(options.spec, layout)
        return options.spec
    forced = any((options.observation, options.action, options.action_low, options.action_high))
    if found.exported and not forced:
        spec = _written(layout)
        _check_names(spec, layout)
        return spec
    if forced and (len(layout.observations) > 1 or len(layout.actions) > 1):
        raise ImportRefused(
            "options for spaces need one observation and one action",
            expected="no observation=, action=, action_low= or action_high=",
            got=", ".join([*layout.observations, *layout.actions]),
        )
    declared: dict[str, dict[str, Declared]] = {"observation": {}, "action": {}}
    for what, default in (("observation", DEFAULT_OBSERVATION), ("action", DEFAULT_ACTION)):
        text = layout.metadata.get(f"{what}_space")
        if text is not None and not forced:
            declared[what] = declared_spaces(text, f"{what}_space", default)
    vocabularies: dict[str, Vocabulary] = {}
    observations: dict[str, Space] = {}
    for key, leaf in layout.observations.items():
        said = declared["observation"].get(key)
        if leaf.kind == "texts" or said == TEXT:
            observations[key], vocabularies[key] = _text(h5, layout, key, leaf)
        elif isinstance(said, Space):
            observations[key] = said
        else:
            array = _every(h5, layout, leaf, memory, enough=_tells_little(leaf))
            observations[key] = observation_space([array], None, options, layout.warnings)
    actions: dict[str, Space] = {}
    for key, leaf in layout.actions.items():
        array = _every(h5, layout, leaf, memory)
        said = declared["action"].get(key)
        endless = isinstance(said, Box) and not np.isfinite(said.bounds()).all()
        why = why_outside(said, array) if isinstance(said, Space) and not endless else ""
        if isinstance(said, Space) and not endless and not why:
            actions[key] = said
            continue
        if isinstance(said, Space):
            reason = why or "they are infinite"
            layout.warnings.append(f"bounds of the actions come from the data: {reason}")
        actions[key] = action_space(array, options, layout.warnings)
    for what, leaves in (("observations", layout.observations), ("actions", layout.actions)):
        if any(leaf.dtype == np.float64 for leaf in leaves.values()):
            layout.warnings.append(f"{what}: float64 stored as float32")
    infos = {key: Box(leaf.shape or (), leaf.dtype.name) for key, leaf in layout.infos.items()}
    return EnvSpec.of(
        observations,
        actions,
        infos=infos,
        env=options.env or _env(layout.metadata),
        vocabularies=vocabularies,
    )


def _written(layout: Layout) -> EnvSpec:
    try:
        spec = EnvSpec.from_json(layout.metadata[SPEC])
    except InvalidData as error:
        raise ImportRefused(f"{SPEC} in {METADATA} cannot be read: {error}") from None
    return replace(spec, infos={k: s for k, s in spec.infos.items() if k in layout.infos})


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


def _every(
    h5: h5py.File, layout: Layout, leaf: Leaf, memory: int, *, enough: bool = False
) -> Array:
    """The rows of all episodes; with `enough`, of the first."""
    episodes = layout.episodes[:1] if enough else layout.episodes
    rows, parts = 0, []
    for number, _ in episodes:
        parts.append(_number(h5[f"episode_{number}"], leaf, f"episode_{number}"))
        rows += parts[-1].nbytes
        if rows > memory:
            raise ImportRefused(
                f"{leaf.path} needs more memory than an import may have (STEPWELL_IMPORT_MEMORY)",
                expected=f"at most {memory} bytes, or a {METADATA} that declares its space",
                got=f"{rows} bytes or more",
                code="body_too_large",
                status=413,
            )
    return np.concatenate(parts)


def _text(h5: h5py.File, layout: Layout, key: str, leaf: Leaf) -> tuple[MultiDiscrete, Vocabulary]:
    if leaf.kind != "texts":
        raise ImportRefused(f"{leaf.path} is declared a text", expected="strings", got="numbers")
    words: set[str] = set()
    longest = 1
    for number, _ in layout.episodes:
        for text in {*read_leaf(h5[f"episode_{number}"], leaf)}:
            split = words_of(text)
            words.update(split)
            longest = max(longest, len(split))
    layout.warnings.append(
        f"{key}: texts are stored as ids of {pluralize(len(words), 'word')}, in lower case"
    )
    try:
        vocabulary = Vocabulary(tuple(sorted(words)))
        return MultiDiscrete((vocabulary.n,) * longest), vocabulary
    except InvalidData as error:
        raise ImportRefused(f"{leaf.path} cannot be split into words: {error}") from None


def _env(metadata: Mapping[str, Any]) -> str:
    """The environment's id, out of gymnasium's JSON."""
    text = metadata.get("env_spec")
    if not isinstance(text, str):
        return ""
    try:
        written = json.loads(text)
        return str(written.get("id", ""))[:256] if isinstance(written, dict) else ""
    except (ValueError, RecursionError):
        return ""


# --- one episode ----------------------------------------------------------------------------------


def _fitted(
    group: h5py.Group,
    leaves: Mapping[str, Leaf],
    spaces: Mapping[str, Space],
    spec: EnvSpec,
    name: str,
) -> dict[str, Array]:
    fitted = {}
    for key, leaf in leaves.items():
        space, where = spaces[key], f"{name}/{leaf.path}"
        if leaf.kind == "texts":
            vocabulary = spec.vocabularies.get(key)
            if vocabulary is None:
                raise ImportRefused(
                    f"{where} is a text", expected="numbers", got="texts", code="schema_mismatch"
                )
            fitted[key] = _ids(read_leaf(group, leaf), vocabulary, space.shape[0])
            continue
        array = cast(where, _number(group, leaf, name), space)
        if array.dtype.kind in "iu" or not isinstance(space, Box) or leaf.path.startswith("act"):
            check_inside(where, array, space)
        fitted[key] = array
    return fitted


def _ids(texts: Array, vocabulary: Vocabulary, length: int) -> Array:
    known = {text: vocabulary.encode(text, length) for text in {*texts}}
    return np.stack([known[text] for text in texts])


def _number(group: h5py.Group, leaf: Leaf, name: str) -> Array:
    if leaf.kind == "texts":
        raise ImportRefused(f"{name}/{leaf.path} is a text", expected="numbers", got="texts")
    array = read_leaf(group, leaf)
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))


def _ends(group: h5py.Group, name: str, exported: bool) -> tuple[bool, bool]:
    """(terminated, truncated). Raises `ImportRefused` for flags before the last step."""
    flags = [np.asarray(group[column][()]) != 0 for column in ("terminations", "truncations")]
    for column, array in zip(("terminations", "truncations"), flags, strict=True):
        if bool(array[:-1].any()):
            raise ImportRefused(
                f"{name}/{column} is set before the last step",
                expected="one episode in each group",
                got=f"step {int(array.argmax())} of {len(array)}",
            )
    terminated, truncated = (bool(array[-1]) for array in flags)
    # Nobody says that it goes on, so it was cut off.
    open_end = not terminated and not truncated and not exported
    return terminated, (truncated and not terminated) or open_end


def _seed(group: h5py.Group) -> int | None:
    seed = group.attrs.get("seed")
    fits = isinstance(seed, int | np.integer) and -(2**63) <= int(seed) < 2**63
    return int(seed) if fits else None
