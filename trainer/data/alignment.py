"""Windows of stored rows become a Batch: the one place where "reward after action" becomes
"previous action and reward, known on arrival at the observation".

    stored row (trajectory.py)   s-1      s        s+1      s+2
                                 a(s-1)   o(s)     o(s+1)   o(s+2)
                                 r(s-1)   a(s)     a(s+1)   a(s+2)
                                          r(s)     r(s+1)   r(s+2)
    window of 2 from row s                row 0    row 1    row 2
      obs         = rows s   …            o(s)     o(s+1)   o(s+2)
      prev_action = rows s-1 …            a(s-1)   a(s)     a(s+1)
      prev_reward = rows s-1 …            r(s-1)   r(s)     r(s+1)
      transition                          a(s) r(s), a(s+1) r(s+1)

So the shift is one number, where a field is read from: FIRST_ROW. Before a trajectory's row 0 lies
its neighbour's last row, which holds "nothing" (fields.py); a trajectory that begins in the middle
of its episode thus shows no previous step rather than a wrong one. What lies behind a window's end
is zero and masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amago_model.data.batch import LOSS_MASKS, Batch
from trainer.data.fields import Field
from trainer.data.sampler import Ints, Windows


class Trajectories(Protocol):
    """What is told of trajectories besides their rows: a manifest, or relabeled episodes."""

    @property
    def length(self) -> Ints: ...
    @property
    def first_step(self) -> Ints: ...
    @property
    def terminated(self) -> NDArray[np.bool_]: ...
    @property
    def truncated(self) -> NDArray[np.bool_]: ...
    @property
    def final_obs_valid(self) -> NDArray[np.bool_]: ...


def first_row(field: Field) -> int:
    """Where a window's rows of a field begin, counted from the window's start."""
    return 0 if field.name.startswith("obs.") else -1


@lru_cache(maxsize=8)
def _count(n: int) -> Ints:
    return np.arange(n)


def collate(
    trajectories: Trajectories,
    windows: Windows,
    rows: Mapping[str, Tensor],
    unknown_action: Tensor | None = None,
) -> Batch:
    """A Batch of B windows from the rows gathered for them.

    Args:
        trajectories: those that windows.trajectory counts.
        rows: by field name, [B, L, *shape], each from its own `first_row` on; T = L - 1 is at
            least the longest window.
        unknown_action: what is shown for an action that was not recorded (fields.py: fill);
            needed where `rows` has action_known.

    Loss masks among the rows hold above 0 where there is something to learn.
    """
    which, start, length = windows.trajectory, windows.start, windows.length
    b, n_rows = rows["reward"].shape
    t = _count(n_rows)
    flags = np.zeros((4, b, n_rows - 1), np.bool_)
    mask, next_obs_valid, terminated, truncated = flags
    np.less(t[:-1], length[:, None], out=mask)
    next_obs_valid[:] = mask
    # Windows that reach their trajectory's end, and where; most do not.
    ending = np.flatnonzero(start + length == trajectories.length[which])
    if len(ending):
        of, column = which[ending], length[ending] - 1
        terminated[ending, column] = trajectories.terminated[of]
        truncated[ending, column] = trajectories.truncated[of]
        next_obs_valid[ending, column] = trajectories.final_obs_valid[of]
    exists, next_exists, done, cut = torch.from_numpy(flags).unbind()
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
        time_idx=torch.from_numpy((trajectories.first_step[which] + start)[:, None] + t),
        terminated=done,
        truncated=cut,
        next_obs_valid=next_exists,
        mask=exists,
        action_known=known,
        **{name: rows[name][:, 1:] > 0 for name in LOSS_MASKS if name in rows},
    )
