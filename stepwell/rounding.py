"""Warnings for numbers that change when they are stored in a narrower type."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

ROUNDED = "{}: {} stored as {}, which rounds them"


def rounded(what: str, values: Any, stored: np.dtype[Any] | type) -> str:
    """The warning for values that change when they are stored as floats of type `stored`; "" if
    none does. `what`: observations, actions, rewards or infos."""
    array, target = np.asarray(values), np.dtype(stored)
    if target.kind != "f" or array.dtype == target or array.dtype.kind not in "iufO":
        return ""
    if array.dtype.kind == "O" and not all(isinstance(value, int) for value in array.flat):
        return ""  # else integers of more than 64 bits
    if array.dtype.itemsize <= 2 and target.itemsize >= 4:
        return ""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = array.astype(target)
    changed = (narrow != array) & ~np.isnan(narrow)
    return ROUNDED.format(what, array.dtype, target) if bool(changed.any()) else ""


def narrowed(what: str, given: np.dtype[Any], stored: np.dtype[Any] | type | str) -> str:
    """The warning for floats that are stored as floats of fewer bits, whatever their values; "" for
    other types."""
    target = np.dtype(stored)
    narrow = given.kind == target.kind == "f" and target.itemsize < given.itemsize
    return f"{what}: {given} stored as {target}" if narrow else ""


def warn(text: str, stacklevel: int = 2) -> None:
    """A Python warning in the caller's caller, as imports give in their job's result."""
    if text:
        warnings.warn(text, stacklevel=stacklevel + 1)
