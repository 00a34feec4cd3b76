"""Time alignment: how stored rows become a `Batch`. It is defined only in this module.

A trajectory of T transitions is stored as T + 1 rows (stepwell/trajectory.py). A step's action and
reward are stored in the row of the observation before the step. A batch shows them in the row of
the observation after the step, as the previous action and reward (amago_model/data/batch.py).
While acting, collector/policy_actor.py:ActorInputs does the same step by step.

    stored row                  s-1      s        s+1      s+2
      observation               o(s-1)   o(s)     o(s+1)   o(s+2)
      action, reward            a(s-1)   a(s)     a(s+1)   a(s+2)
      info, kept on arrival     i(s-2)   i(s-1)   i(s)     i(s+1)
      info, kept on departure   i(s-1)   i(s)     i(s+1)   i(s+2)

    window of 2 transitions from row s     row 0    row 1    row 2      read from stored row
      obs                                  o(s)     o(s+1)   o(s+2)     s + OBSERVATION
      prev_action, prev_reward             a(s-1)   a(s)     a(s+1)     s + DEPARTURE
      loss masks                           -        i(s)     i(s+1)     s + ARRIVAL or DEPARTURE
      return_to_go                         G(s)     G(s+1)   G(s+2)     s + OBSERVATION
      action, reward, every mask           transition 0, 1 = rows 1, 2

G(s) = r(s) + r(s+1) + … to the end of the whole trajectory, not of the window.

A trajectory's row 0 has no previous step. The row before it in the column is the last row of the
previous trajectory, which has no step either: a column stores `fill` (fields.py) where a row has no
action, and begins with one such row. A trajectory that begins in the middle of its episode
therefore shows no previous step. Rows after a window's end are zero and masked.

Letters: B windows, T transitions of the longest window, L = T + 1 rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amago_model.data.batch import LOSS_MASKS, Batch
from trainer.data.sampler import Ints, Windows
from trainer.data.snapshot import Manifest

OBSERVATION, DEPARTURE, ARRIVAL = 0, -1, 0
"""Offset of a field: the stored row read for a window's row 0, relative to its first stored row."""
LEADING_ROWS = 1
"""Rows of `fill` at the beginning of every column, so that an offset of -1 stays inside it."""


def stored_rows(offset: int, of_step: bool, length: Any) -> tuple[int, Any]:
    """The half-open range of a trajectory's rows that hold a field: T+1 rows for an observation
    (0, T+1), T for a field of steps (departure: 0, T; arrival: 1, T+1)."""
    return offset + of_step, offset + 1 + length


def cut_window(
    values: NDArray[Any], of_step: bool, start: int, length: int, fill: NDArray[Any], out: Any
) -> None:
    """Write one window's rows of a field into `out` [L, *shape], from a whole trajectory's values:
    T+1 observations, or T values of its steps, each at the step's index."""
    first = start + (DEPARTURE if of_step else OBSERVATION)
    before = max(-first, 0)
    out[:before] = fill
    out[before : length + 1] = values[first + before : first + length + 1]
    out[length + 1 :] = 0


def undiscounted(reward: NDArray[np.float32]) -> NDArray[np.float32]:
    """[T] rewards of a whole trajectory -> [T+1]: the sum of the rewards from each observation on.

    Nothing is added after the last reward, also where the trajectory is truncated: what would have
    followed is unknown, and an evaluation with the same limit of steps does not count it.
    """
    found = np.zeros(len(reward) + 1, np.float32)
    found[:-1] = reward[::-1].cumsum(dtype=np.float64)[::-1]
    return found


@dataclass(frozen=True, slots=True)
class Ends:
    """Length, first step within the episode, and type of end of trajectories, as in a manifest."""

    length: Ints
    first_step: Ints
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_obs_valid: NDArray[np.bool_]


def collate(
    ends: Ends | Manifest,
    which: Ints,
    windows: Windows,
    rows: Mapping[str, Tensor],
    unknown_action: Tensor | None = None,
) -> Batch:
    """A Batch of B windows from the rows gathered for them.

    Args:
        which: [B] the trajectory in `ends` that each window is cut from.
        rows: by field name, [B, L, *shape], each read from its own offset; T is at least the
            longest window. A loss mask is above 0 where the loss includes the transition.
        unknown_action: replaces actions that were not recorded; needed if `rows` has
            action_known.
    """
    start, length = windows.start, windows.length
    b, n_rows = rows["reward"].shape
    t = _arange(n_rows)
    flags = np.zeros((4, b, n_rows - 1), np.bool_)
    mask, next_obs_valid, terminated, truncated = flags
    np.less(t[:-1], length[:, None], out=mask)
    next_obs_valid[:] = mask
    # Indices and positions of the windows that reach their trajectory's end; most do not.
    ending = np.flatnonzero(start + length == ends.length[which])
    if len(ending):
        of, last = which[ending], length[ending] - 1
        terminated[ending, last] = ends.terminated[of]
        truncated[ending, last] = ends.truncated[of]
        next_obs_valid[ending, last] = ends.final_obs_valid[of]
    exists, next_exists, done, cut_off = torch.from_numpy(flags).unbind()
    action, known = rows["action"], exists
    if "action_known" in rows:
        assert unknown_action is not None
        known_row = rows["action_known"]
        known = known_row[:, 1:] & exists
        shape = (b, n_rows, *[1] * (action.ndim - 2))
        action = torch.where(known_row.reshape(shape), action, unknown_action)
    return Batch(
        obs={name[4:]: value for name, value in rows.items() if name.startswith("obs.")},
        prev_action=action,
        prev_reward=rows["reward"],
        time_idx=torch.from_numpy((ends.first_step[which] + start)[:, None] + t),
        terminated=done,
        truncated=cut_off,
        next_obs_valid=next_exists,
        mask=exists,
        action_known=known,
        return_to_go=rows.get("return_to_go"),
        **{name: rows[name][:, 1:] > 0 for name in LOSS_MASKS if name in rows},
    )


@lru_cache(maxsize=8)
def _arange(n: int) -> Ints:
    return np.arange(n)
