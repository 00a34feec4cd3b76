"""True and False as environments, files and people write them: the one place that reads them.

    bool, numpy.bool_; 0 and 1 of any type of number                      that flag
    an array of any shape, or a list, of exactly one of these             that flag
    None, as an end (terminated, truncated)                               False: nothing ended
    2, 0.5, NaN, "true", no value, two values, …                          InvalidTrajectory

gymnasium lets an environment return any of them: its checker only warns.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import InvalidTrajectory


def as_bool(name: str, value: Any, *, end: bool = False) -> bool:
    """The flag that `value` is; with `end` it says whether an episode ended, and None that it did
    not. Raises `InvalidTrajectory` with the name if it is none."""
    if type(value) is bool:
        return value
    flags = _flags(value, end)
    if flags is None or flags.size != 1:
        expected = f"a bool, 0 or 1{', None' if end else ''}, or an array of one of them"
        raise InvalidTrajectory(name, expected=expected, got=describe(value))
    return bool(flags.reshape(-1)[0])


def as_bools(name: str, values: Any, *, end: bool = False) -> NDArray[np.bool_]:
    """`as_bool` of each value, in the shape of `values`."""
    flags = _flags(values, end)
    if flags is None:
        expected = f"bools, 0 or 1{', or None' if end else ''}"
        raise InvalidTrajectory(name, expected=expected, got=describe(values))
    return flags


def describe(value: Any) -> str:
    """A value and its type, for a message."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        kind = f"{value.dtype} {list(value.shape)}"
    return f"{' '.join(repr(value).split())[:80]} ({kind})"


def _flags(values: Any, end: bool) -> NDArray[np.bool_] | None:
    """None if a value is no flag."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError):  # rows of several lengths; tensors of a GPU
        return None
    if array.dtype == np.bool_:
        return array
    if array.dtype.kind in "iuf":
        return array != 0 if bool(((array == 0) | (array == 1)).all()) else None
    if array.dtype.kind != "O":
        return None
    found = [_of_object(value, end) for value in array.reshape(-1).tolist()]
    return None if None in found else np.array(found, np.bool_).reshape(array.shape)


def _of_object(value: Any, end: bool) -> bool | None:
    if value is None:
        return False if end else None
    if isinstance(value, np.ndarray | np.generic):
        flags = _flags(value, end) if value.size == 1 else None
        return None if flags is None else bool(flags.reshape(-1)[0])
    return bool(value) if isinstance(value, numbers.Real) and value in (0, 1) else None
