"""Sequences of goals, one active at a time: how they are followed and how they are shown.

    slots     | 0      1      2      3        K slots, k goals at the right; pads at the left
    row 0     | pad    A      B      C        A is active
    row t1    | pad    done   B      C        A was achieved on arrival at row t1; now B is
    row t2    | pad    done   done   C

At most one goal is completed in a step, and none at row 0: no action led there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.data.relabel.episode import Array


def as_sets(achieved: Array, width: int) -> NDArray[np.float64]:
    """[T+1, m, d] from achieved goals [T+1, d], or sets of them [T+1, m, d]; d is `width`."""
    return achieved.reshape(len(achieved), -1, width).astype(np.float64)


def matches(achieved: Array, goal: Array, tolerance: float) -> NDArray[np.bool_]:
    """[T+1, m]: which achieved goals are `goal` [d], each element within `tolerance`."""
    close: NDArray[np.bool_] = (np.abs(achieved - goal) <= tolerance).all(axis=-1)
    return close


def plan_of(shown: Array, pad: float) -> Array:
    """The goals [k, d] among the slots [K, d] of row 0: those that are not pads."""
    real: Array = shown[~(shown == pad).all(axis=-1)]
    return real


def follow(plan: Array, achieved: Array, tolerance: float) -> list[int]:
    """Rows 1 … T at which the goals of a plan [k, d] are completed, in order; as many as are."""
    rows: list[int] = []
    for goal in plan:
        after = rows[-1] + 1 if rows else 1
        found = matches(achieved[after:], goal, tolerance).any(axis=1)
        if not found.any():
            break
        rows.append(after + int(found.argmax()))
    return rows


def show(plan: Array, completed: Sequence[int], recorded: Array, pad: float, done: float) -> Array:
    """[T+1, K, d] like `recorded`: the plan, each goal marked `done` from its completion on."""
    shown = np.full(recorded.shape, pad, recorded.dtype)
    first = recorded.shape[1] - len(plan)
    shown[:, first:] = plan
    for slot, row in enumerate(completed, first):
        shown[row:, slot] = done
    return shown


def show_active(plan: Array, completed: Sequence[int], recorded: Array, pad: float) -> Array:
    """[T+1, K, d] like `recorded`: the active goal in the last slot, pads elsewhere."""
    shown = np.full(recorded.shape, pad, recorded.dtype)
    begin = 0
    for goal, row in zip(plan, [*completed, len(recorded)], strict=False):
        shown[begin:row, -1] = goal
        begin = row
    return shown
