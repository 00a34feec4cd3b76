"""Gymnasium's spaces and values as Stepwell's, and back.

    gymnasium space          EnvSpec                            the agent
    Box, any shape, dtype    Box                                observation; action if bounded
    Discrete                 Discrete                           observation as one-hot; action
    MultiDiscrete, -Binary   the same, flat                     observation; action
    Text, missions, words    MultiDiscrete and a Vocabulary     observation, as tokens (texts.py)
    Dict, Tuple of those     one key each: "arm/angle", "arm/0" observations: those of role `policy`
    all others               an error that contains the key

float64 is stored as float32 by default, as in D4RL: this halves the data, and networks use float32.
The spec contains the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces

from amago_model.config import ActionSpace, ObsSpace
from amago_model.config.names import join_key
from stepwell.errors import InvalidSpace
from stepwell.flags import describe
from stepwell.spaces import (
    Array,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    why_outside,
)
from stepwell.trajectory import refuse_masked
from stepwell.vocabulary import Vocabulary

Arrays = dict[str, Array]
"""One observation or action, by key."""
Leaf = tuple[str, tuple[str | int, ...], gym_spaces.Space[Any]]
"""(key in the spec, keys and indices down to it in nested Dicts and Tuples, the space there)."""


def layout_of(space: ObsSpace | ActionSpace) -> dict[str, object]:
    """A space without its dtype and bounds, which may differ between recordings."""
    fields = ("kind", "shape", "n", "nvec", "start", "starts", "vocabulary")
    return {name: value for name in fields if (value := getattr(space, name, None))}


def root_key(space: gym_spaces.Space[Any], default: str) -> str:
    """The key of `space` itself: the members of a Dict have names of their own."""
    return "" if isinstance(space, gym_spaces.Dict) else default


def _children(space: gym_spaces.Space[Any]) -> list[tuple[Any, gym_spaces.Space[Any]]]:
    """The members of a Dict or Tuple."""
    if isinstance(space, gym_spaces.Dict):
        return list(space.spaces.items())
    return list(enumerate(space.spaces)) if isinstance(space, gym_spaces.Tuple) else []


def leaves(space: gym_spaces.Space[Any], default: str) -> Iterator[Leaf]:
    """All spaces below `space` that are neither Dict nor Tuple. The key of `space` itself is
    `default`; those of a Tuple's members begin with it."""

    def below(
        space: gym_spaces.Space[Any], key: str, path: tuple[str | int, ...]
    ) -> Iterator[Leaf]:
        if not isinstance(space, gym_spaces.Dict | gym_spaces.Tuple):
            yield key, path, space
        for part, child in _children(space):
            yield from below(child, join_key(key, part), (*path, part))

    yield from below(space, root_key(space, default), ())


def undeclared(space: gym_spaces.Space[Any], value: Any, prefix: str = "") -> list[str]:
    """The members of a value, and of those in it, for which Dict and Tuple spaces have no place."""
    if not isinstance(space, gym_spaces.Dict | gym_spaces.Tuple):
        return []
    members: Iterable[Any] = ()
    if isinstance(value, Mapping):
        members = value
    elif isinstance(space, gym_spaces.Tuple):
        members = range(len(value))
    declared = dict(_children(space))
    found = [f"{prefix}{part}" for part in members if part not in declared]
    for part, child in declared.items():
        found += undeclared(child, value[part], f"{prefix}{part}/")
    return found


def named_spaces(
    space: gym_spaces.Space[Any],
    default: str,
    keep_float64: bool,
    env_id: str,
    texts: Mapping[str, tuple[Vocabulary, int]],
) -> dict[str, Space]:
    named: dict[str, Space] = {}
    for key, _, leaf in leaves(space, default):
        if key in named:
            raise InvalidSpace(f"{env_id}: two arrays would both be named {key!r}")
        if key in texts:
            vocabulary, length = texts[key]
            named[key] = MultiDiscrete((vocabulary.n,) * length)
        else:
            try:
                named[key] = _space(leaf, keep_float64)
            except InvalidSpace as error:
                raise error.within(f"{env_id}: {key!r}") from None
    return named


def _space(space: gym_spaces.Space[Any], keep_float64: bool) -> Space:
    if isinstance(space, gym_spaces.Box):
        dtype = space.dtype.name
        if dtype == "float64" and not keep_float64:
            dtype = "float32"
        return Box(tuple(space.shape), dtype, _bound(space.low), _bound(space.high))
    if isinstance(space, gym_spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, gym_spaces.MultiDiscrete):
        nvec, start = space.nvec.reshape(-1).tolist(), space.start.reshape(-1).tolist()
        return MultiDiscrete(tuple(nvec), tuple(start))
    if isinstance(space, gym_spaces.MultiBinary):
        return MultiBinary(math.prod(space.shape))
    raise InvalidSpace(
        "a space that cannot be recorded; wrap the environment "
        "(gymnasium.wrappers.TransformObservation, FlattenObservation, …)",
        expected="Box, Discrete, MultiDiscrete, MultiBinary, observed texts, or Dicts and Tuples "
        "of them",
        got=" ".join(str(space).split()),
    )


def _bound(bound: Array) -> float | tuple[float, ...]:
    values = bound.astype(np.float64).reshape(-1)
    if values.size == 0:
        return 0.0  # Box refuses the empty shape by name
    return float(values[0]) if np.all(values == values[0]) else tuple(values.tolist())


def same_kind(ours: Space, theirs: Space) -> bool:
    """Whether values of the space `ours` can be recorded in the space `theirs` without loss of
    meaning."""
    if not isinstance(ours, Box) or not isinstance(theirs, Box):
        return ours == theirs
    kinds = np.dtype(ours.dtype).kind, np.dtype(theirs.dtype).kind
    exact = kinds == ("f", "f") or ours.dtype == theirs.dtype
    return ours.shape == theirs.shape and exact


def narrower(ours: Space, theirs: Space) -> str:
    """Which floats of the space `ours` the space `theirs` does not have; "" if it has all."""
    if not isinstance(ours, Box) or not isinstance(theirs, Box) or ours.dtype[0] != "f":
        return ""
    (low, high), (least, most) = ours.bounds(), theirs.bounds()
    if not ((low < least) | (high > most)).any():
        return ""
    ranges = [(float(a.min()), float(b.max())) for a, b in ((least, most), (low, high))]
    return "{:g} … {:g} instead of {:g} … {:g}".format(*ranges[0], *ranges[1])


def numbers_of(value: Any, dtype: Any) -> Array:
    """A copy in `dtype`. Raises TypeError for a text, of which numpy would make a number, and
    `InvalidTrajectory` for masked elements."""
    if type(value) is np.ndarray and value.dtype == dtype:
        return value.copy()  # as nearly all are: nothing to check, nothing to round
    refuse_masked("value", value)
    given = np.asarray(value)
    if given.dtype.kind not in "biufO":
        raise TypeError(f"{describe(value)} is no number")
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array(given, dtype)


def sizes_of(array: Array) -> list[int]:
    """The shape without dimensions of 1."""
    return [n for n in array.shape if n != 1]


def check_whole(raw: Any, array: Array, space: Space) -> None:
    """Raise ValueError for a non-integer or out-of-range integer value (2.7, 300 for a byte), or an
    invalid category. Box bounds are not checked: many environments exceed them slightly."""
    given = np.asarray(raw)
    if given.dtype != array.dtype and not np.array_equal(given, array):
        raise ValueError(f"{describe(raw)} is not of type {space.dtype}")
    if not isinstance(space, Box) and array.shape == space.shape:
        why = why_outside(space, array[None])
        if why is not None:
            raise ValueError(why)


def decoded(space: gym_spaces.Space[Any], key: str, arrays: Mapping[str, Array]) -> Any:
    if isinstance(space, gym_spaces.Dict | gym_spaces.Tuple):
        parts = [
            (part, decoded(child, join_key(key, part), arrays)) for part, child in _children(space)
        ]
        return dict(parts) if isinstance(space, gym_spaces.Dict) else tuple(v for _, v in parts)
    if isinstance(space, gym_spaces.Discrete):
        return np.int64(arrays[key])
    return np.asarray(arrays[key], dtype=space.dtype).reshape(space.shape)


def flattened(space: gym_spaces.Space[Any], value: Any) -> Any:
    """Choices of several dimensions as a spec has them. A value of another shape stays as it
    is."""
    if not isinstance(space, gym_spaces.MultiDiscrete | gym_spaces.MultiBinary):
        return value
    refuse_masked("value", value)
    array = np.asarray(value)
    return array.reshape(-1) if array.shape == space.shape else value
