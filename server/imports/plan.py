"""Episodes (episodes.py) → trajectories, one at a time.

Chooses the spec (episode_spec.py), says what is lost or left out, and fits rows to the spec.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import uuid_utils

from server.imports.episode_spec import choose_spec
from server.imports.episodes import Episodes, Layout, Leaf
from server.imports.raw_file import (
    Array,
    ImportOptions,
    ImportRefused,
    Reading,
)
from server.imports.spec import (
    REWARDS,
    cast,
    fit_to,
    unknown_info,
)
from stepwell.errors import InvalidSpace, InvalidTrajectory
from stepwell.rounding import narrowed, rounded
from stepwell.spaces import (
    DTYPES,
    MAX_ELEMENTS,
    EnvSpec,
    Space,
)
from stepwell.trajectory import Trajectory
from stepwell.vocabulary import Vocabulary

NAMESPACE = uuid_utils.UUID("5b0f8f0e-6f6e-5c1c-9d0a-3c9d4b1f7a10")
"""Namespace of the ids of imported trajectories: same dataset, file and place → same id."""
MAX_DIMENSIONS = 8
"""Of a row, as in a spec."""
MOST_LINES = 40
"""Most warnings about single infos."""


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
    try:
        spec = choose_spec(source, options, memory)
    except InvalidSpace as error:  # of what the file declares, or of bounds that somebody gave
        raise ImportRefused(
            f"no env spec can be made of the file: {error}", expected=error.expected, got=error.got
        ) from None
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


def trajectory_id(options: ImportOptions, index: int) -> str:
    return str(uuid_utils.uuid5(NAMESPACE, f"{options.dataset}/{options.sha256}/{index}"))


def _trajectories(source: Episodes, spec: EnvSpec, options: ImportOptions) -> Iterator[Trajectory]:
    """The episodes in order. Raises `ImportRefused` for an invalid one."""
    layout = source.layout
    came_from = f"{options.format}:{options.sha256}"
    columns = _columns(source, spec)
    for index, (number, steps) in enumerate(layout.episodes):
        name = f"episode {number}"
        try:
            about = source.about(number)
            name = about.name
            infos = {
                key: unknown_info(key, space, steps + 1, layout.dropped[key])
                for key, space in spec.infos.items()
                if key not in layout.infos
            }
            infos |= _fitted(source, number, name, columns["info"])
            rewards = cast("rewards", np.asarray(about.rewards), REWARDS)
            said = about.metadata
            yield Trajectory(
                obs=_fitted(source, number, name, columns["observation"]),
                actions=_fitted(source, number, name, columns["action"]),
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
                source.check_finite(number)  # says more
            if isinstance(error, ImportRefused):
                raise
            raise ImportRefused(
                f"{name}: {error}", expected=error.expected, got=error.got
            ) from None


@dataclass(frozen=True, slots=True)
class _Column:
    """An array of every episode that the spec has too."""

    role: str
    key: str
    leaf: Leaf
    space: Space
    vocabulary: Vocabulary | None
    fits: bool
    """Its rows come as the space wants them."""


def _columns(source: Episodes, spec: EnvSpec) -> dict[str, list[_Column]]:
    """By role."""
    layout = source.layout
    found: dict[str, list[_Column]] = {"observation": [], "action": [], "info": []}
    for role, leaves, spaces in (
        ("observation", layout.observations, spec.observations),
        ("action", layout.actions, spec.actions),
        ("info", layout.infos, spec.infos),
    ):
        for key in [k for k in leaves if k in spaces]:
            leaf, space = leaves[key], spaces[key]
            plain = leaf.kind == "numbers" and leaf.path not in layout.orders
            fits = plain and source.fit_whole(leaf, space, role)
            words = spec.vocabularies.get(key)
            found[role].append(_Column(role, key, leaf, space, words, fits))
    return found


def _fitted(
    source: Episodes, number: int, name: str, columns: Sequence[_Column]
) -> dict[str, Array]:
    """Arrays of one episode by key."""
    fitted = {}
    for column in columns:
        leaf, where = column.leaf, f"{name}/{column.leaf.path}"
        if column.fits:
            fitted[column.key] = source.rows(number, leaf)
        elif leaf.kind != "texts" or column.role == "info":
            array = source.numbers(number, leaf, name)
            fitted[column.key] = fit_to(column.space, column.role, where, array)
        elif column.vocabulary is not None:
            texts, length = source.rows(number, leaf), column.space.shape[0]
            fitted[column.key] = _ids(texts, column.vocabulary, length)
        else:
            raise ImportRefused(
                f"{where} is a text", expected="numbers", got="texts", code="schema_mismatch"
            )
    return fitted


def _ids(texts: Array, vocabulary: Vocabulary, length: int) -> Array:
    known = {text: vocabulary.encode(text, length) for text in {*texts}}
    return np.stack([known[text] for text in texts])
