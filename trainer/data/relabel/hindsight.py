"""Relabeling of a single goal with one that was achieved later in the same episode.

Hindsight experience replay (Andrychowicz et al., NeurIPS 2017) for whole trajectories: the goal is
the same in all rows, so it is chosen once per trajectory and not once per transition.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from stepwell import EnvSpec
from trainer.data.relabel.episode import Episode
from trainer.data.relabel.registry import (
    Relabeler,
    register,
    require_observations,
    require_one_dtype,
)
from trainer.data.snapshot import DataError


@register("hindsight")
class Hindsight(Relabeler):
    """Replace the goal with one achieved at a later row, and recompute the rewards.

    Partial episodes, and episodes whose last observation is unknown, are not changed.
    """

    goal: str = "goal"
    """Observation that shows the goal, [T+1, *shape], the same in all rows."""
    achieved: str = "achieved"
    """Observation that says what is achieved on arrival, in the goal's shape."""
    strategy: Literal["final", "future"] = "future"
    """Which achieved goal: the last row's, or that of a row drawn uniformly from 1 … T."""
    probability: float = Field(0.8, ge=0, le=1)
    """Share of samples that are relabeled; the others stay as recorded."""
    tolerance: float = Field(1e-3, ge=0)
    """A goal counts as achieved within this Euclidean distance."""
    success_reward: float = 1.0
    """Reward of a transition that arrives at the goal."""
    step_reward: float = 0.0
    """Reward of any other."""
    terminates: bool = True
    """The task ends when the goal is achieved: the trajectory is cut there, as terminated."""

    def check(self, spec: EnvSpec) -> None:
        require_observations(spec, "hindsight", self.goal, self.achieved)
        goal, achieved = spec.observations[self.goal], spec.observations[self.achieved]
        if goal.shape != achieved.shape:
            raise DataError(
                f"data.relabel: hindsight compares {self.achieved!r} {achieved.shape} with "
                f"{self.goal!r} {goal.shape}; expected equal shapes"
            )
        require_one_dtype(spec, "hindsight", achieved=self.achieved, goal=self.goal)

    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:
        steps = len(episode)
        if not episode.complete or rng.random() >= self.probability:
            return episode
        row = steps if self.strategy == "final" else int(rng.integers(1, steps + 1))
        achieved, recorded = episode.obs[self.achieved], episode.obs[self.goal]
        goal = achieved[row].astype(recorded.dtype)
        # reward[t] is for arriving at row t+1; row 0 has no reward.
        away = (achieved[1:].astype(np.float64) - achieved[row]).reshape(steps, -1)
        there = np.linalg.norm(away, axis=1) <= self.tolerance
        if not there[row - 1]:  # the achieved value is NaN and cannot be a goal
            return episode
        relabeled = episode.replace(
            obs={self.goal: np.broadcast_to(goal, recorded.shape)},
            reward=np.where(there, self.success_reward, self.step_reward).astype(np.float32),
            goals_replaced=episode.goals_replaced + 1,
        )
        return relabeled.terminated_at(int(there.argmax()) + 1) if self.terminates else relabeled
