"""A whole trajectory as a relabeler sees it.

    row t    | obs[t]   action[t]   reward[t]      T = len(episode) transitions, T + 1 observations
    0        | o0       a0          r0             r0 is what a0 earned on the way to o1
    ...      |
    T-1      | oT-1     aT-1        rT-1
    T        | oT       -           -

So what observation t+1 says was achieved is paid by reward[t], and nothing pays for what
observation 0 says: no action led there.
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
    """Columns of one trajectory. Those that were recorded are read-only: make new ones."""

    obs: Mapping[str, Array]
    """By key [T+1, *shape]; the keys of role `relabel` are here, and never reach the agent."""
    action: Array
    """[T, *shape] as the environment takes them."""
    reward: NDArray[np.float32]
    """[T] float32."""
    terminated: bool
    """The task ended with the last transition."""
    truncated: bool
    """Somebody stopped watching after the last transition."""
    final_obs_valid: bool = True
    """False where the last observation only repeats the one before."""
    first_step: int = 0
    """Steps of the episode before row 0; above 0 for a piece from the middle of one."""
    action_known: NDArray[np.bool_] | None = None
    """[T] bool, or None for all known."""
    actor_mask: NDArray[np.bool_] | None = None
    """[T] bool: the actor may learn from the transition; None: from all."""
    critic_mask: NDArray[np.bool_] | None = None
    """[T] bool: critics may."""
    id: str = ""
    """Of the trajectory: names it for people."""
    goals_replaced: int = 0
    """Goals put in so far; only a metric."""

    def __len__(self) -> int:
        """T, the number of transitions."""
        return len(self.reward)

    @property
    def complete(self) -> bool:
        """Whether it begins where its episode does and its last observation exists."""
        return self.first_step == 0 and self.final_obs_valid

    def replace(self, **changes: Any) -> Episode:
        """A copy with other fields; `obs` given here replaces the named keys only."""
        if "obs" in changes:
            changes["obs"] = {**self.obs, **changes["obs"]}
        return replace(self, **changes)

    def terminated_at(self, length: int) -> Episode:
        """The first `length` transitions, 1 … T, of a task that ends with the last of them."""
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
            # An observation that another one follows was recorded.
            final_obs_valid=self.final_obs_valid or length < len(self),
            action_known=cut(self.action_known),
            actor_mask=cut(self.actor_mask),
            critic_mask=cut(self.critic_mask),
        )
