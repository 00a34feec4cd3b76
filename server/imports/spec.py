"""Derives the spaces of a flat file's arrays, and converts the arrays to them.

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

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.imports.column_map import element_names
from server.imports.flat_arrays import SPEC, RawFile
from server.imports.raw_file import Array, ImportOptions, ImportRefused
from stepwell._wording import shown
from stepwell.rounding import narrowed, rounded
from stepwell.spaces import (
    DTYPES,
    MAX_NAME,
    MAX_NAMES,
    Box,
    Discrete,
    EnvSpec,
    MultiBinary,
    MultiDiscrete,
    Space,
    space_to_json,
    unnamed,
    why_outside,
)

MAX_DISCRETE = 100_000
MAX_SPEC = 4 << 20
"""Bytes of a file's own spec."""
MOST_STATES = 4096
"""Integers [N] up to here are taken for states: each becomes an input of its own."""
FILLED = 0.03
"""Guessed symmetric bounds are too wide if the actions fill a smaller share of them: a policy's
outputs are scaled to the bounds, so it could hardly tell such actions apart."""
USUAL, ENOUGH = (0.001, 0.999), 1000
"""Quantiles between which actions are usual, and how many rows show that: those of a small file
say little of the files that follow it into the dataset."""


Arrays = dict[str, Array]
"""By key: "observation", or several names."""


def choose_spec(
    obs: Arrays,
    actions: Arrays,
    next_obs: Arrays | None,
    infos: Arrays,
    source: RawFile,
    options: ImportOptions,
    warnings: list[str],
) -> EnvSpec:
    """The dataset's spec if it exists, else the file's own, else one derived from the data.

    Raises `ImportRefused`.
    """
    if options.spec is not None:
        _check_names(options.spec, obs, actions, infos, source.dropped, warnings)
        return options.spec
    forced = any((options.observation, options.action, options.action_low, options.action_high))
    if SPEC in source.arrays and not forced:
        written = written_spec(source)
        kept = {key: space for key, space in written.infos.items() if key in infos}
        spec = replace(written, infos=kept, env=options.env or written.env)
        _check_names(spec, obs, actions, infos, source.dropped, warnings)
        return spec
    if forced and (len(obs) > 1 or len(actions) > 1):
        raise ImportRefused(
            "options for spaces need one observation and one action",
            expected="no observation=, action=, action_low= or action_high=",
            got=", ".join([*obs, *actions]),
        )
    for key, array in obs.items():
        if array.dtype.name not in DTYPES:
            raise ImportRefused(
                f"{_word('observations', key, obs)} has an unsupported type",
                expected=", ".join(DTYPES),
                got=str(array.dtype),
            )
    states = source.metadata.get("discrete_observations")
    observations = {
        key: observation_space(
            [array] if next_obs is None else [array, next_obs[key]], states, options, warnings
        )
        for key, array in obs.items()
    }
    chosen = {key: action_space(array, options, warnings) for key, array in actions.items()}
    return EnvSpec.of(
        observations,
        chosen,
        infos={key: Box(a.shape[1:], a.dtype.name) for key, a in infos.items()},
        env=options.env,
        names=fitting_names(
            {
                f"{what}/{key}": names_of(source, what, key)
                for what, arrays in (("observation", obs), ("action", actions))
                for key in arrays
            },
            observations,
            chosen,
        ),
    )


def in_order(
    spec: EnvSpec | None, source: RawFile, what: str, arrays: Arrays, warnings: list[str]
) -> Arrays:
    """The vectors with their elements in the order of the dataset's names."""
    found = {}
    for key, array in arrays.items():
        known = () if spec is None else spec.names.get(f"{what}/{key}", ())
        order = element_order(f"{what}/{key}", known, names_of(source, what, key), warnings)
        fits = order is not None and array.shape[1:] == order.shape
        found[key] = array[:, order] if fits else array
    return found


def names_of(source: RawFile, what: str, key: str) -> tuple[str, ...]:
    """The names of a vector's elements in the file: of its columns, or in its own spec."""
    found = source.map.arrays[what].get(key, ())
    if source.map.named_elements(what, key):
        widths = [source.arrays[name][:1].size for name in found]
        return element_names(found, widths) if sum(widths) <= MAX_NAMES else ()
    if SPEC in source.arrays and what not in source.map.given:
        return written_spec(source).names.get(f"{what}/{key}", ())
    return ()


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


def fit(
    spec: EnvSpec,
    obs: Arrays,
    actions: Arrays,
    next_obs: Arrays | None,
    infos: Arrays,
    dropped: dict[str, str],
    warnings: list[str],
) -> tuple[Arrays, Arrays, Arrays | None, Arrays]:
    """The arrays in the shapes and types of `spec`. Raises `ImportRefused` (schema_mismatch)."""
    rows = len(next(iter(obs.values())))
    fitted = {k: fit_info(k, infos.get(k), s, rows, dropped) for k, s in spec.infos.items()}
    kept = {key: infos[key] for key in spec.infos if key in infos and key not in dropped}
    for name, arrays, spaces in (
        ("observations", obs, spec.observations),
        ("actions", actions, spec.actions),
        ("infos", kept, spec.infos),
    ):
        for key, array in arrays.items():
            word = f"infos/{key}" if name == "infos" else _word(name, key, arrays)
            stored = np.dtype(spaces[key].dtype)
            note = narrowed(word, array.dtype, stored) or rounded(word, array, stored)
            warnings += [note] if note else []
    for name, given in (("observations", obs), ("next_observations", next_obs)):
        for key, array in (given or {}).items():
            word, space = _word(name, key, obs), spec.observations[key]
            assert given is not None
            given[key] = cast(word, array, space)
            if not isinstance(space, Box):  # the bounds of observations are often wrong
                check_inside(word, given[key], space)
    for key, array in actions.items():
        word, space = _word("actions", key, actions), spec.actions[key]
        actions[key] = cast(word, array, space)
        check_inside(word, actions[key], space)
    return obs, actions, next_obs, fitted


def _word(name: str, key: str, arrays: Arrays) -> str:
    return name if len(arrays) == 1 else f"{name}/{key}"


def written_spec(source: RawFile) -> EnvSpec:
    """The spec in a file that `stepwell export` wrote. Raises `ImportRefused`."""
    return _written(source.arrays[SPEC])


def _written(array: Array) -> EnvSpec:
    """The spec in a file that `stepwell export` wrote. Raises `ImportRefused`."""
    try:
        if array.dtype != np.uint8 or array.ndim != 1 or len(array) > MAX_SPEC:
            raise ValueError(f"{array.dtype} {list(array.shape)}")
        return EnvSpec.from_json(json.loads(array.tobytes()))
    except (ValueError, RecursionError) as error:
        raise ImportRefused(
            f"{SPEC} cannot be read", expected="an env spec as JSON", got=str(error)[:200]
        ) from None


def check_inside(name: str, array: Array, space: Space) -> None:
    if why := why_outside(space, array):
        raise ImportRefused(
            f"{name} are outside their space: {why}",
            expected=space_to_json(space),
            got=why,
            code="schema_mismatch",
        )


def fit_info(
    key: str, array: Array | None, space: Space, rows: int, dropped: dict[str, str]
) -> Array:
    """The info in the dataset's type; where that fails, NaN, with the reason in `dropped`.

    Raises `ImportRefused` for a dtype that cannot represent unknown values.
    """
    if array is not None:
        try:
            return cast(f"infos/{key}", array, space)
        except ImportRefused as error:
            dropped[key] = f"{error.detail} (expected {error.expected}, got {error.got})"
    if np.dtype(space.dtype).kind != "f":
        raise ImportRefused(
            f"infos/{key} cannot be kept ({dropped[key]}), and its type in the dataset has no NaN",
            expected=space_to_json(space),
            got="an info that is dropped",
            code="schema_mismatch",
        )
    return np.full((rows, *space.shape), np.nan, space.dtype)


def _check_names(
    spec: EnvSpec,
    obs: Arrays,
    actions: Arrays,
    infos: Arrays,
    dropped: dict[str, str],
    warnings: list[str],
) -> None:
    for what, spaces, arrays in (
        ("observations", spec.observations, obs),
        ("actions", spec.actions, actions),
    ):
        if spaces.keys() != arrays.keys():
            raise ImportRefused(
                f"the dataset has other {what} than the file",
                expected=sorted(spaces),
                got=sorted(arrays),
                code="schema_mismatch",
            )
    for key in spec.infos:
        if key not in infos and key not in dropped:
            raise ImportRefused(
                f"infos/{key} is missing",
                expected=f"infos of the dataset: {', '.join(spec.infos)}",
                got=", ".join(sorted(infos)) or "none",
                code="schema_mismatch",
            )
    if more := sorted(set(infos) - set(spec.infos)):
        warnings.append(f"infos that the dataset does not have, dropped: {', '.join(more)}")


def observation_space(
    every: list[Array], states: Any, options: ImportOptions, warnings: list[str]
) -> Space:
    """The space of `every` array of observations: [N, …], and that of the next ones, if given."""
    kind, _, count = options.observation.partition(":")
    if kind == "discrete":
        return Discrete(_count("observation", count))
    if kind not in ("", "box"):
        raise ImportRefused(
            "?observation=", expected="box or discrete:N", got=options.observation[:50]
        )
    obs = every[0]
    if kind == "" and states is not None:
        if type(states) is not int or not 1 <= states <= MAX_DISCRETE:
            raise ImportRefused(
                "metadata/discrete_observations",
                expected=f"an integer in 1 … {MAX_DISCRETE}",
                got=str(states)[:50],
            )
        return Discrete(states)
    if kind == "" and obs.ndim == 1 and obs.dtype.kind in "iu":
        largest = max(int(array.max()) for array in every)
        if min(int(array.min()) for array in every) >= 0 and largest < MOST_STATES:
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
