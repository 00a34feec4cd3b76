"""A whole trajectory as a relabeler sees it.

    row t    | obs[t]   action[t]   reward[t]      T = len(episode) transitions, T + 1 observations
    0        | o0       a0          r0             r0 is what a0 earned on the way to o1
    ...      |
    T-1      | oT-1     aT-1        rT-1
    T        | oT       -           -

The reward for what is achieved in observation t+1 is reward[t]. Observation 0 has no reward,
because no action precedes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """Columns of one trajectory. Recorded arrays are read-only: create new ones to change them."""

    obs: Mapping[str, Array]
    """Key → [T+1, *shape]. Includes keys of role `relabel`, which are never passed to the agent."""
    action: Array
    """[T, *shape] in the format of the environment."""
    reward: NDArray[np.float32]
    """[T] float32."""
    terminated: bool
    """The task ended with the last transition."""
    truncated: bool
    """The episode was cut off after the last transition, though the task had not ended."""
    final_obs_valid: bool = True
    """False where the last observation only repeats the one before."""
    first_step: int = 0
    """Steps of the episode before row 0; above 0 for a piece from the middle of one."""
    action_known: NDArray[np.bool_] | None = None
    """[T] bool, or None for all known."""
    actor_mask: NDArray[np.bool_] | None = None
    """[T] bool: the actor may learn from the transition; None: from all."""
    critic_mask: NDArray[np.bool_] | None = None
    """[T] bool: the critics may learn from the transition; None: from all."""
    id: str = ""
    """Id of the trajectory, for messages."""
    goals_replaced: int = 0
    """Number of goals replaced so far; used only as a metric."""

    def __len__(self) -> int:
        """T, the number of transitions."""
        return len(self.reward)

    @property
    def complete(self) -> bool:
        """Whether it starts at the beginning of its episode and has a valid last observation."""
        return self.first_step == 0 and self.final_obs_valid

    def replace(self, **changes: Any) -> Episode:
        """A copy with changed fields; `obs` replaces only the keys that it contains."""
        if "obs" in changes:
            changes["obs"] = {**self.obs, **changes["obs"]}
        return replace(self, **changes)

    def terminated_at(self, length: int) -> Episode:
        """The first `length` (1 … T) transitions; the last one ends the task."""
        assert 1 <= length <= len(self), (length, len(self))

        def cut(column: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
            return None if column is None else column[:length]

        return replace(
            self,
            obs={key: rows[: length + 1] for key, rows in self.obs.items()},
            action=self.action[:length],
            reward=self.reward[:length],
            terminated=True,
            truncated=False,
            # Every observation except the last one is always valid.
            final_obs_valid=self.final_obs_valid or length < len(self),
            action_known=cut(self.action_known),
            actor_mask=cut(self.actor_mask),
            critic_mask=cut(self.critic_mask),
        )
