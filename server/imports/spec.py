"""Derives spaces from data, and converts arrays to them.

Observations   floats: a Box without bounds, float64 converted to float32 (agents compute in
               float32; a warning says so); integers [N] from 0: Discrete(largest + 1), or as many
               as `?observation=discrete:M` or `metadata/discrete_observations = M` says; other
               uint8: a Box 0 … 255; other integers: an unbounded Box of their type;
               `?observation=box` is always a Box
Actions        integers [N] or [N, 1]: Discrete(largest + 1), from another number than 0 with
               `?action=discrete:N:START`; integers [N, A]: MultiDiscrete;
               booleans: Discrete(2), and MultiBinary [N, A], since a policy's 0.3 would be
               neither; whole numbers stored as floats: only with `?action=discrete:N`, since a
               robot may move by 1.0; other floats: a Box with guessed bounds: ±1 where all within
               (as in D4RL), else per dimension the largest magnitude rounded up to 1, 2, 3 or
               5 × 10^k; where at least 1,000 rows fill less than 3% of that, their own range (a
               warning says so); `?action_low=&action_high=` set them
Infos          a Box without bounds, in the file's own type

A file that `stepwell export` wrote has its spec; options that derive another take precedence.
An existing dataset's spec takes precedence over all: arrays are cast to it, or refused with their
name. An info that the file has but that cannot be kept becomes NaN in a dataset of floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.imports.raw_file import Array, ImportOptions, ImportRefused
from stepwell._wording import shown
from stepwell.spaces import (
    MAX_NAME,
    MAX_NAMES,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    space_to_json,
    unnamed,
    why_outside,
)

REWARDS = Box((), "float32")
MAX_DISCRETE = 100_000
MOST_STATES = 4096
"""Integers [N] up to here are taken for states: each becomes an input of its own."""
FILLED = 0.03
"""Guessed symmetric bounds are too wide if the actions fill a smaller share of them: a policy's
outputs are scaled to the bounds, so it could hardly tell such actions apart."""
USUAL, ENOUGH = (0.001, 0.999), 1000
"""Quantiles between which actions are usual, and how many rows show that: those of a small file
say little of the files that follow it into the dataset."""


def fitting_names(
    names: Mapping[str, tuple[str, ...]],
    observations: Mapping[str, Space],
    actions: Mapping[str, Space],
) -> dict[str, tuple[str, ...]]:
    """Keep the names that a spec can have: one for each element of a vector, each once."""
    spaces = {f"observation/{k}": s for k, s in observations.items()}
    spaces |= {f"action/{k}": s for k, s in actions.items()}
    return {
        key: found
        for key, found in names.items()
        if spaces[key].shape == (len(found),)
        and len({*found}) == len(found) <= MAX_NAMES
        and all(0 < len(name) <= MAX_NAME for name in found)
    }


def element_order(
    where: str, known: tuple[str, ...], here: tuple[str, ...], warnings: list[str]
) -> NDArray[np.int64] | None:
    """The places in the file of the elements of a dataset's vector; None: they are in its order.

    Raises `ImportRefused` if the file lacks or adds one.
    """
    if not known or not here:
        if known:
            warnings.append(unnamed(where, known, "this file"))
        return None
    if {*known} != {*here}:
        lacks = [name for name in known if name not in here]
        adds = [name for name in here if name not in known]
        raise ImportRefused(
            f"{where} has other elements than the dataset: "
            + "; ".join(
                f"{word} {shown(names, 20)}"
                for word, names in (("lacks", lacks), ("adds", adds))
                if names
            ),
            expected=shown(known),
            got=shown(here),
            code="schema_mismatch",
        )
    if known == here:
        return None
    warnings.append(f"{where} is put in the dataset's order: {shown(known, 20)}")
    place = {name: number for number, name in enumerate(here)}
    return np.array([place[name] for name in known], np.int64)


def check_inside(name: str, array: Array, space: Space) -> None:
    if why := why_outside(space, array):
        raise ImportRefused(
            f"{name} are outside their space: {why}",
            expected=space_to_json(space),
            got=why,
            code="schema_mismatch",
        )


def fit_to(space: Space, role: str, where: str, array: Array) -> Array:
    """Rows [N, …] as the space wants them. Raises `ImportRefused`.

    Bounds of observations in floats are often wrong in environments, so these may leave them.
    """
    array = cast(where, array, space)
    floats = isinstance(space, Box) and array.dtype.kind not in "iu"
    if role == "action" or (role == "observation" and not floats):
        check_inside(where, array, space)
    return array


def unknown_info(key: str, space: Space, rows: int, why: str) -> Array:
    """NaN for an info of the dataset that is dropped. Raises `ImportRefused` for a dtype that
    cannot represent unknown values."""
    if np.dtype(space.dtype).kind != "f":
        raise ImportRefused(
            f"infos/{key} cannot be kept ({why}), and its type in the dataset has no NaN",
            expected=space_to_json(space),
            got="an info that is dropped",
            code="schema_mismatch",
        )
    return np.full((rows, *space.shape), np.nan, space.dtype)


def observation_space(obs: Array, options: ImportOptions, warnings: list[str]) -> Space:
    """The space of observations [N, …]."""
    kind, _, count = options.observation.partition(":")
    if kind == "discrete":
        return Discrete(_count("observation", count))
    if kind not in ("", "box"):
        raise ImportRefused(
            "?observation=", expected="box or discrete:N", got=options.observation[:50]
        )
    if kind == "" and obs.ndim == 1 and obs.dtype.kind in "iu":
        largest = int(obs.max())
        if int(obs.min()) >= 0 and largest < MOST_STATES:
            warnings.append(
                f"observations are whole numbers, 0 … {largest}: stored as Discrete({largest + 1})"
                "; if the environment has more states, ?observation=discrete:N; if the numbers are "
                "amounts, ?observation=box"
            )
            return Discrete(largest + 1)
    dtype = "float32" if obs.dtype == np.float64 else obs.dtype.name
    shape = obs.shape[1:] or (1,)
    if dtype == "uint8":
        return Box(shape, dtype, 0, 255)
    return Box(shape, dtype)


def action_space(actions: Array, options: ImportOptions, warnings: list[str]) -> Space:
    kind, _, count = options.action.partition(":")
    if kind == "discrete":
        count, _, start = count.partition(":")
        if start and re.fullmatch(r"-?\d{1,9}", start) is None:
            raise ImportRefused(
                "?action=discrete:N:START", expected="a whole number as START", got=start[:50]
            )
        return Discrete(_count("action", count), int(start or 0))
    if kind not in ("", "box"):
        raise ImportRefused(
            "?action=", expected="box or discrete:N[:START]", got=options.action[:50]
        )
    if actions.dtype.kind in "iu" and kind == "":
        return _whole(actions)
    if actions.dtype.kind == "b" and kind == "" and actions.ndim <= 2:
        size = actions[0].size
        return Discrete(2) if size == 1 else MultiBinary(size)
    flat = actions.reshape(len(actions), -1)
    shape = actions.shape[1:] if flat.shape[1] > 1 else (1,)
    return Box(shape, "float32", *_bounds(flat, options, warnings))


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_DISCRETE:
        raise ImportRefused(
            f"?{option}=discrete:N", expected=f"N in 1 … {MAX_DISCRETE}", got=text[:50]
        )
    return int(text)


def _whole(actions: Array) -> Space:
    flat = actions.reshape(len(actions), -1)
    low, high = int(flat.min()), flat.max(axis=0)
    if low < 0 or int(high.max()) >= MAX_DISCRETE:
        count = int(high.max()) - low + 1
        choices = flat.shape[1] == 1 and count <= MAX_DISCRETE
        raise ImportRefused(
            "integer actions are not small choices",
            expected=f"0 … {MAX_DISCRETE - 1}, or ?action=box"
            + (f", or ?action=discrete:{count}:{low} if they are {count} choices" * choices),
            got=f"{low} … {int(high.max())}",
        )
    if flat.shape[1] == 1:
        return Discrete(int(high[0]) + 1)
    return MultiDiscrete(tuple(int(n) + 1 for n in high))


def _bounds(flat: Array, options: ImportOptions, warnings: list[str]) -> tuple[Any, Any]:
    size = flat.shape[1]
    given = []
    for name, values in (("action_low", options.action_low), ("action_high", options.action_high)):
        if values and len(values) not in (1, size):
            raise ImportRefused(f"?{name}=", expected=f"1 or {size} numbers", got=len(values))
        given.append(values[0] if len(values) == 1 else values)
    if not np.isfinite(flat).all():
        raise ImportRefused("actions has invalid numbers", expected="finite", got="NaN or infinite")
    least, most = (found.astype(np.float32) for found in (flat.min(axis=0), flat.max(axis=0)))
    high = [_nice(float(x)) for x in np.maximum(np.abs(least), np.abs(most))]
    low = [-x for x in high]
    for i in range(size) if given == [(), ()] and len(flat) >= ENOUGH else ():
        column, width = flat[:, i], high[i] - low[i]
        if 0.0 < (share := (most[i] - least[i]) / width) < FILLED:
            warnings.append(
                f"actions[{i}] fill {share:.2g} of ±{high[i]:g}: their own range is their bounds, "
                f"{least[i]:.6g} … {most[i]:.6g}; others: ?action_low=&action_high="
            )
            low[i], high[i] = float(least[i]), float(most[i])
        elif 0.0 < (share := np.ptp(np.quantile(column, USUAL)) / width) < FILLED:
            row = int(np.abs(column).argmax())
            warnings.append(
                f"actions[{i}] are within {share:.2g} of ±{high[i]:g} in nearly all rows, so a "
                f"policy could hardly tell them apart: extreme ones set the bounds (row {row}: "
                f"{column[row]:.6g}). Are these mistakes? Then repair or remove them"
            )
    chosen = [
        bound if bound != () else (guess[0] if len(set(guess)) == 1 else tuple(guess))
        for bound, guess in zip(given, (low, high), strict=True)
    ]
    return chosen[0], chosen[1]


def _nice(value: float) -> float:
    """`value` rounded up to 1, 2, 3 or 5 times a power of ten; at least 1."""
    if value <= 1.0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    # Rounding errors beyond a bound do not raise it.
    return next(scale * n for n in (1, 2, 3, 5, 10) if value <= scale * n * (1 + 1e-5))


def cast(name: str, array: Array, space: Space) -> Array:
    target = np.dtype(space.dtype)
    rows = len(array)
    flat = isinstance(space, MultiDiscrete | MultiBinary) and array.ndim > 2
    if flat and math.prod(array.shape[1:]) == math.prod(space.shape):
        array = array.reshape(rows, *space.shape)  # a spec has them flat
    if array.shape[1:] != space.shape:
        if math.prod(array.shape[1:]) != 1 or math.prod(space.shape) != 1:
            raise ImportRefused(
                f"{name} has another shape than the dataset",
                expected=list(space.shape),
                got=list(array.shape[1:]),
                code="schema_mismatch",
            )
        array = array.reshape(rows, *space.shape)
    if array.dtype == target:
        return array
    if target.kind in "iub" and (array.dtype.kind == "f" or not _holds(array, target)):
        if not bool((array == np.rint(array)).all()) or not _holds(array, target):
            raise ImportRefused(
                f"{name} does not fit its type",
                expected=target.name,
                got=str(array.dtype),
                code="schema_mismatch",
            )
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(target)


def _holds(array: Array, target: np.dtype[Any]) -> bool:
    """Whether every value is in the range of an integer type."""
    if target.kind == "b":
        return bool(((array == 0) | (array == 1)).all())
    limits = np.iinfo(target)
    return bool((array >= limits.min).all()) and bool((array <= limits.max).all())
