"""Sequences of goals ("instructions"): missed goals are replaced with goals achieved by chance.

Algorithm 1 of AMAGO (Grigsby et al., ICLR 2024); docs/reference/relabeling.md has the pseudocode.
In an episode that completed n of its k goals, h of the k - n missing goals are replaced with goals
achieved at h other rows, which are merged with the completed goals in order of time. Rewards,
displayed goals and the end of the episode are then recomputed for the new goals.

Goals are shown in K slots, k of them at the right, one active at a time:

    slots     | 0      1      2      3        K slots, k goals at the right; pads at the left
    row 0     | pad    A      B      C        A is active
    row t1    | pad    done   B      C        A was achieved on arrival at row t1; now B is
    row t2    | pad    done   done   C

At most one goal is completed per step, and none at row 0, which no action precedes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr

from stepwell import EnvSpec
from trainer.data.relabel.episode import Array, Episode
from trainer.data.relabel.rarity import Rarity, reweighted
from trainer.data.relabel.registry import (
    Relabeler,
    register,
    require_observations,
    require_one_dtype,
)
from trainer.data.snapshot import DataError


@register("instructions")
class Instructions(Relabeler):
    """Goal sequences of any kind: tokens, sets of achieved goals per step, vectors.

    Partial episodes, and episodes whose last observation is unknown, are not changed. Raises
    `DataError` if the goals recorded in an episode do not follow this rule.
    """

    goals: str = "goals"
    """Observation with the goals [K, d]: k of them at the right, pads at the left."""
    achieved: str = "achieved"
    """Observation with what was achieved on arrival: [d], or a set of up to m goals [m, d]."""
    strategy: Literal["none", "some", "all", "all_or_nothing"] = "some"
    """How many missing goals are replaced: none, a uniform number, as many as can be, or
    as many as can be in a share `probability` of the samples."""
    probability: float = Field(0.8, ge=0, le=1)
    """With all_or_nothing: the share of samples that is relabeled."""
    pad: float = -1.0
    """Every number of a slot that holds no goal, among goals and among achieved ones."""
    completed: float = -3.0
    """Every number of a slot whose goal is completed."""
    tolerance: float = Field(1e-3, ge=0)
    """Goals are equal when each of their numbers is, within this."""
    reward: float = 1.0
    """What completing a goal earns. Whatever else the recorded rewards hold stays."""
    steps_after: int = Field(2, ge=0)
    """Steps that are kept behind the completion of the last goal; the task ends with the last."""
    distinct: bool = True
    """No goal comes twice in a new sequence."""
    hide_plan: bool = False
    """Show the active goal alone, in the last slot, of data that shows the whole plan."""
    rarity: Literal["none", "rows", "episodes", "both"] = "none"
    """Prefer goals that are rare in the snapshot: among all rows, among all episodes, or one of
    the two by a coin for each sample."""
    rarity_power: float = Field(4.0, ge=0)
    """Weight of a goal: (-log10 of its share) to this power."""
    _rarity: Rarity | None = PrivateAttr(None)

    @property
    def _ranks(self) -> bool:
        """Whether goals are weighted by their rarity."""
        return self.rarity != "none" and self.strategy != "none"

    def check(self, spec: EnvSpec) -> None:
        require_observations(spec, self.registered_as, self.goals, self.achieved)
        goals, achieved = (spec.observations[key].shape for key in (self.goals, self.achieved))
        if len(goals) != 2 or len(achieved) not in (1, 2) or goals[-1:] != achieved[-1:]:
            raise DataError(
                f"data.relabel: {self.registered_as} expects {self.goals!r} of shape (K, d) and "
                f"{self.achieved!r} of shape (d,) or (m, d), got {goals} and {achieved}"
            )
        require_one_dtype(spec, self.registered_as, achieved=self.achieved, goal=self.goals)
        dtype = np.dtype(spec.observations[self.goals].dtype)
        for name in ("pad", "completed"):
            mark = np.float64(getattr(self, name))
            limits = np.iinfo(dtype) if dtype.kind in "iu" else None
            if limits and not (mark == np.rint(mark) and limits.min <= mark <= limits.max):
                raise DataError(
                    f"data.relabel: {self.registered_as}:{name}: {mark:g} is no {dtype}, the dtype "
                    f"of {self.goals!r}"
                )

    def fit(self, episodes: Iterable[Episode]) -> Relabeler:
        if not self._ranks:
            return self
        counted = (self._achieved(episode) for episode in episodes)
        rarity = Rarity(
            ((sets[1:], there[1:]) for sets, there in counted),
            power=self.rarity_power,
            tolerance=self.tolerance,
        )
        ready = self.model_copy()
        ready._rarity = rarity
        return ready

    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:
        if not episode.complete or (self.strategy == "none" and not self.hide_plan):
            return episode
        recorded = episode.obs[self.goals]
        plan = goals_in_slots(recorded[0], self.pad)
        achieved, there = self._achieved(episode)
        before = completion_rows(plan, achieved, self.tolerance)
        self._recognise(episode, plan, before)
        wanted = self._how_many(len(plan) - len(before), rng)
        chosen = self._choose(plan[: len(before)], before, achieved, there, wanted, rng)
        if not chosen and not self.hide_plan:
            return episode
        new = self._merge(plan, before, chosen)
        after = completion_rows(new, achieved, self.tolerance)
        relabeled = episode.replace(
            obs={self.goals: self._shown(new, after, recorded)},
            reward=self._paid(episode.reward, before, after),
            goals_replaced=episode.goals_replaced + len(chosen),
        )
        if chosen and len(after) == len(new):
            return relabeled.terminated_at(min(after[-1] + self.steps_after, len(episode)))
        return relabeled

    # ------------------------------------------------------------------------------ its steps

    def _achieved(self, episode: Episode) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Achieved goals [T+1, m, d], and a mask [T+1, m] that is False for pads."""
        goals = episode.obs[self.goals]
        sets = as_sets(episode.obs[self.achieved].astype(goals.dtype), goals.shape[-1])
        return sets, ~(sets == self.pad).all(axis=-1)

    def _recognise(self, episode: Episode, plan: Array, completed: list[int]) -> None:
        recorded = episode.obs[self.goals]
        expected = fill_slots(plan, completed, recorded, self.pad, self.completed)
        if np.array_equal(expected, recorded):
            return
        row = int((expected != recorded).any(axis=(1, 2)).argmax())
        raise DataError(
            f"data.relabel: {self.registered_as} does not know the rule of these goals: trajectory "
            f"{episode.id} shows {recorded[row].tolist()} in row {row} of {self.goals!r}, expected "
            f"{expected[row].tolist()}; look at {self.registered_as}:pad, completed and tolerance"
        )

    def _how_many(self, missing: int, rng: np.random.Generator) -> int:
        """h: the number of missing goals to replace."""
        if self.strategy == "some":
            return int(rng.integers(0, missing + 1))
        if self.strategy == "all":
            return missing
        return (
            missing if self.strategy == "all_or_nothing" and rng.random() < self.probability else 0
        )

    def _choose(
        self,
        done: Array,
        completed: list[int],
        achieved: NDArray[np.float64],
        there: NDArray[np.bool_],
        wanted: int,
        rng: np.random.Generator,
    ) -> list[tuple[int, Array]]:
        """Up to `wanted` pairs (row, goal) at rows that completed no goal, one per row."""
        if not wanted:
            return []
        free = there.copy()
        free[0] = False
        free[completed] = False
        if self.distinct:
            for goal in done:
                free &= ~matches(achieved, goal, self.tolerance)
        weight_of_row, weight_of_goal = self._weights(achieved, free, rng)
        # Weighted sampling without replacement: the smallest exponential times (Efraimidis and
        # Spirakis, 2006).
        times = rng.standard_exponential(len(free)) / weight_of_row
        chosen: list[tuple[int, Array]] = []
        while len(chosen) < wanted and bool(free.any()):
            row = int(np.where(free.any(axis=1), times, np.inf).argmin())
            weights = np.where(free[row], weight_of_goal[row], 0.0)
            pick = int(np.searchsorted(np.cumsum(weights), rng.random() * weights.sum(), "right"))
            goal = achieved[row, min(pick, int(np.flatnonzero(weights)[-1]))]
            chosen.append((row, goal))
            free[row] = False
            if self.distinct:
                free &= ~matches(achieved, goal, self.tolerance)
        return chosen

    def _weights(
        self, achieved: NDArray[np.float64], free: NDArray[np.bool_], rng: np.random.Generator
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Weight of each row [T+1] and of each goal within its row [T+1, m]."""
        of_row, of_goal = np.ones(len(free)), np.ones(free.shape)
        if self._rarity is None or not free.any():
            return of_row, of_goal
        table = {"rows": 0, "episodes": 1}.get(self.rarity, int(rng.integers(2)))
        weights = np.zeros(free.shape)
        weights[free] = self._rarity.weights(achieved[free], table)  # type: ignore[arg-type]
        rows = free.any(axis=1)
        of_row[rows] = reweighted(weights.sum(axis=1)[rows], rng)
        of_goal[free] = reweighted(weights[free], rng)
        return of_row, of_goal

    def _merge(self, plan: Array, completed: list[int], chosen: list[tuple[int, Array]]) -> Array:
        """The new plan [k, d]: completed and chosen goals in order of time, then the last of the
        goals still missing. With `distinct`, a goal is repeated only if there is no other."""
        done = list(zip(completed, plan, strict=False))
        first = [goal for _, goal in sorted(done + chosen, key=lambda pair: pair[0])]
        rest = list(plan[len(completed) :])
        if self.distinct:
            rest.sort(key=lambda g: not any(matches(g, f, self.tolerance) for f in first))
        kept = len(plan) - len(first)
        return np.array([*first, *rest[len(rest) - kept :]], plan.dtype).reshape(plan.shape)

    def _shown(self, plan: Array, completed: list[int], recorded: Array) -> Array:
        if self.hide_plan:
            return fill_last_slot(plan, completed, recorded, self.pad)
        return fill_slots(plan, completed, recorded, self.pad, self.completed)

    def _paid(
        self, reward: NDArray[np.float32], before: list[int], after: list[int]
    ) -> NDArray[np.float32]:
        """Rewards minus those of goals completed at rows `before`, plus those at rows `after`."""
        paid = reward.copy()
        paid[np.asarray(before, np.int64) - 1] -= self.reward
        paid[np.asarray(after, np.int64) - 1] += self.reward
        return paid


@register("mazerunner")
class MazeRunnerGoals(Instructions):
    """The rule of `stepwell/MazeRunner-v0`: whole numbers, and the end with the last goal."""

    completed: float = -1.0
    """Every number of a slot whose goal is completed: as empty slots."""
    tolerance: float = Field(0.0, ge=0)
    """Cells are equal or not."""
    steps_after: int = Field(0, ge=0)
    """The environment ends with the last goal."""


@register("crafter")
class CrafterGoals(Instructions):
    """The rule of `stepwell/Crafter-v0`: words, and by default a preference for rare deeds, for
    most of what chance achieves is to stand somewhere."""

    tolerance: float = Field(0.0, ge=0)
    """Words are equal or not."""
    rarity: Literal["none", "rows", "episodes", "both"] = "both"
    """Prefer goals that are rare in the snapshot: among all rows, among all episodes, or one of
    the two by a coin for each sample."""


# ------------------------------------------------------------------------ goals and their slots


def as_sets(achieved: Array, width: int) -> NDArray[np.float64]:
    """[T+1, m, d] from achieved goals [T+1, d], or sets of them [T+1, m, d]; d is `width`."""
    return achieved.reshape(len(achieved), -1, width).astype(np.float64)


def matches(achieved: Array, goal: Array, tolerance: float) -> NDArray[np.bool_]:
    """[T+1, m]: which achieved goals are `goal` [d], each element within `tolerance`."""
    close: NDArray[np.bool_] = (np.abs(achieved - goal) <= tolerance).all(axis=-1)
    return close


def goals_in_slots(shown: Array, pad: float) -> Array:
    """The goals [k, d] in the slots [K, d] of row 0, without pads."""
    real: Array = shown[~(shown == pad).all(axis=-1)]
    return real


def completion_rows(plan: Array, achieved: Array, tolerance: float) -> list[int]:
    """Rows 1 … T at which the goals of a plan [k, d] are completed, one per goal, in order."""
    rows: list[int] = []
    for goal in plan:
        after = rows[-1] + 1 if rows else 1
        found = matches(achieved[after:], goal, tolerance).any(axis=1)
        if not found.any():
            break
        rows.append(after + int(found.argmax()))
    return rows


def fill_slots(
    plan: Array, completed: Sequence[int], recorded: Array, pad: float, done: float
) -> Array:
    """[T+1, K, d] like `recorded`: the plan, with each goal set to `done` once it is completed."""
    shown = np.full(recorded.shape, pad, recorded.dtype)
    first = recorded.shape[1] - len(plan)
    shown[:, first:] = plan
    for slot, row in enumerate(completed, first):
        shown[row:, slot] = done
    return shown


def fill_last_slot(plan: Array, completed: Sequence[int], recorded: Array, pad: float) -> Array:
    """[T+1, K, d] like `recorded`: the active goal in the last slot, pads elsewhere."""
    shown = np.full(recorded.shape, pad, recorded.dtype)
    begin = 0
    for goal, row in zip(plan, [*completed, len(recorded)], strict=False):
        shown[begin:row, -1] = goal
        begin = row
    return shown
