"""Defects that are planted into clean datasets for the doctor.

A plant changes some episodes of a clean dataset in place, and says which ones it made wrong (None:
the dataset as a whole).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.workbench.doctor_clean import EPISODES, Episode

Wrong = list[int] | None


@dataclass(frozen=True, slots=True)
class Plant:
    """A defect in some episodes of a clean dataset."""

    kind: str
    base: str
    where: str
    """Which episodes, in words."""
    change: Callable[[list[Episode]], Wrong]


def _vector(episode: Episode) -> Any:
    obs = episode["obs"]
    return next(iter(obs.values())) if isinstance(obs, dict) else obs


def _cut(episode: Episode, steps: int) -> Episode:
    obs = episode["obs"]
    cut = {k: v[: steps + 1] for k, v in obs.items()} if isinstance(obs, dict) else obs[: steps + 1]
    return {
        **episode,
        "obs": cut,
        "actions": episode["actions"][:steps],
        "rewards": episode["rewards"][:steps],
    }


def glue(*wrong: int) -> Callable[[list[Episode]], Wrong]:
    """Half of an episode and half of another one become one."""

    def change(episodes: list[Episode]) -> Wrong:
        for i in wrong:
            other = episodes[(i + 7) % EPISODES]
            a, b = _vector(episodes[i]), _vector(other)
            half = len(a) // 2
            rest = b[-(len(a) - half) :]
            if len(rest) == len(a) - half:
                a[half:] = rest + (4.0 if np.abs(rest).max() < 2 else 0.0)
        return list(wrong)

    return change


def each(*wrong: int, **changes: Any) -> Callable[[list[Episode]], Wrong]:
    """Other arguments of some episodes; a callable gets the episode."""

    def change(episodes: list[Episode]) -> Wrong:
        for i in wrong:
            for name, value in changes.items():
                episodes[i][name] = value(episodes[i]) if callable(value) else value
        return list(wrong)

    return change


def apply(
    function: Callable[[Episode], object], *wrong: int, whole: bool = False
) -> Callable[[list[Episode]], Wrong]:
    """Change some episodes (all, if none is named) in place."""

    def change(episodes: list[Episode]) -> Wrong:
        chosen = list(wrong) or list(range(EPISODES))
        for i in chosen:
            function(episodes[i])
        return None if whole else chosen

    return change


def copy(target: int, source: int, steps: int | None = None) -> Callable[[list[Episode]], Wrong]:
    """One episode has the content of another one, or only its first steps."""

    def change(episodes: list[Episode]) -> Wrong:
        kept = {k: episodes[target][k] for k in ("purpose", "seed", "episode_id")}
        if steps is None:
            episodes[target] = {**episodes[source], **kept}
        else:
            _vector(episodes[target])[: steps + 1] = _vector(episodes[source])[: steps + 1]
            episodes[target]["actions"][:steps] = episodes[source]["actions"][:steps]
        return [target]

    return change


def borrow(target: int, source: int) -> Callable[[list[Episode]], Wrong]:
    """One episode has the steps 5 … 30 of another one, in another place."""

    def change(episodes: list[Episode]) -> Wrong:
        _vector(episodes[target])[8:33] = _vector(episodes[source])[5:30]
        episodes[target]["actions"][8:33] = episodes[source]["actions"][5:30]
        return [target]

    return change


def again(first: int, last: int, *wrong: int) -> Callable[[list[Episode]], Wrong]:
    """A piece of an episode is there a second time, right after it."""

    def change(episodes: list[Episode]) -> Wrong:
        for i in wrong:
            arrays = [_vector(episodes[i]), episodes[i]["actions"], episodes[i]["rewards"]]
            for array in arrays:
                array[last : 2 * last - first] = array[first:last]
        return list(wrong)

    return change


def _pieces(order: Callable[[Any], Any]) -> Callable[[Episode], object]:
    """Observations, actions and rewards in another order; the last observation stays."""

    def change(episode: Episode) -> None:
        rows = order(np.arange(len(episode["rewards"])))
        for array in (_vector(episode), episode["actions"], episode["rewards"]):
            array[: len(rows)] = array[rows]

    return change


def _backwards(first: int, last: int) -> Callable[[Episode], object]:
    return _pieces(lambda r: np.r_[r[:first], r[first:last][::-1], r[last:]])


def _exchanged(first: int, middle: int, last: int) -> Callable[[Episode], object]:
    return _pieces(lambda r: np.r_[r[:first], r[middle:last], r[first:middle], r[last:]])


def shorten(steps: int, *wrong: int) -> Callable[[list[Episode]], Wrong]:
    def change(episodes: list[Episode]) -> Wrong:
        for i in wrong:
            episodes[i] = _cut(episodes[i], steps)
        return list(wrong)

    return change


def overlapping(first: int, second: int) -> Callable[[list[Episode]], Wrong]:
    def change(episodes: list[Episode]) -> Wrong:
        episodes[second] |= {"episode_id": episodes[first]["episode_id"], "first_step": 5}
        return [first]

    return change


def next_first(episodes: list[Episode]) -> Wrong:
    for now, following in zip(episodes, episodes[1:], strict=False):
        _vector(now)[-1] = _vector(following)[0]
    return list(range(EPISODES - 1))


def _set(row: Any, value: Any) -> Callable[[Episode], object]:
    def function(episode: Episode) -> None:
        _vector(episode)[row] = value

    return function


def _repeat(at: int) -> Callable[[Episode], object]:
    def function(episode: Episode) -> None:
        obs = episode["obs"]
        for array in obs.values() if isinstance(obs, dict) else [obs]:
            array[at] = array[at - 1]

    return function


def _hold(what: str, first: int, steps: int, number: Any = np.s_[:]) -> Callable[[Episode], object]:
    """A number, or all, of observations, actions or rewards stand still for some steps."""

    def function(episode: Episode) -> None:
        array = _vector(episode) if what == "obs" else episode[what]
        array = array[:, None] if array.ndim == 1 else array
        array[first : first + steps + 1, number] = array[first, number]

    return function


def _freeze(episode: Episode) -> None:
    obs = episode["obs"]
    for array in obs.values() if isinstance(obs, dict) else [obs]:
        array[:] = array[0]


def _rewards(function: Callable[[Any], Any]) -> Callable[[Episode], object]:
    def change(episode: Episode) -> None:
        episode["rewards"] = np.asarray(function(episode["rewards"]), np.float32)

    return change


def _at(index: int, value: float) -> Callable[[Any], Any]:
    def function(rewards: Any) -> Any:
        rewards = rewards.copy()
        rewards[index] = value
        return rewards

    return function


def _act(value: Any) -> Callable[[Episode], object]:
    def function(episode: Episode) -> None:
        episode["actions"][:] = value

    return function


LAST, MIDDLE = EPISODES - 1, 20
PLANTS = [
    Plant("teleport", "pendulum", "one in the middle", glue(MIDDLE)),
    Plant("teleport", "cart", "the first for training", glue(4)),
    Plant("teleport", "lander", "the last", glue(LAST)),
    Plant("teleport", "goals", "a dict", glue(MIDDLE)),
    Plant("teleport", "lander", "two numbers of six", apply(
        lambda e: e["obs"].__setitem__(np.s_[15:, :2], e["obs"][15:, :2] + 5), MIDDLE)),
    Plant("final_jump", "pendulum", "two", apply(_set(-1, 30.0), 9, 30)),
    Plant("final_jump", "lander", "one", apply(_set(-1, 30.0), 12)),
    Plant("duplicate", "pendulum", "one", copy(MIDDLE, 10)),
    Plant("duplicate", "images", "images", copy(MIDDLE, 10)),
    Plant("duplicate", "goals", "the last, a dict", copy(LAST, 5)),
    Plant("near_duplicate", "pendulum", "one", copy(MIDDLE, 10, 15)),
    Plant("near_duplicate", "cart", "discrete actions", copy(LAST, 8, 11)),
    Plant("near_duplicate", "pendulum", "most steps, shifted by three", borrow(MIDDLE, 10)),
    Plant("repeated_piece", "rover", "one", again(40, 61, MIDDLE)),
    Plant("repeated_piece", "goals", "a dict, two", again(3, 15, 4, LAST)),
    Plant("repeated_piece", "film", "images", again(20, 40, 11)),
    Plant("reordered_piece", "rover", "backwards", apply(_backwards(40, 61), MIDDLE)),
    Plant("reordered_piece", "lander", "backwards", apply(_backwards(5, 25), LAST)),
    Plant("reordered_piece", "rover", "exchanged", apply(_exchanged(30, 50, 80), 9)),
    Plant("reordered_piece", "contacts", "exchanged", apply(_exchanged(6, 18, 30), 12)),
    Plant("reordered_piece", "goals", "backwards, a dict", apply(_backwards(8, 30), 8)),
    Plant("content_leak", "lander", "one", copy(MIDDLE, 2)),
    Plant("content_leak", "images", "images", copy(LAST, 0)),
    Plant("seed_leak", "pendulum", "one", each(MIDDLE, seed=1001)),
    Plant("seed_leak", "grid", "two", each(10, LAST, seed=1003)),
    Plant("open_end", "cart", "one", each(MIDDLE, terminated=False, truncated=False)),
    Plant("open_end", "grid", "the last", each(LAST, terminated=False, truncated=False)),
    Plant("one_step", "lander", "one", shorten(1, MIDDLE)),
    Plant("unmarked_timeout", "cart", "all that are cut off",
          lambda e: [i for i, x in enumerate(e) if x["truncated"] and (
              x.update(terminated=True, truncated=False) or True)]),
    Plant("early_truncation", "pendulum", "two", shorten(17, 11, 25)),
    Plant("early_truncation", "goals", "one", shorten(9, MIDDLE)),
    Plant("overlap", "pendulum", "two pieces", overlapping(10, 11)),
    Plant("unknown_last_observation", "lander", "three", each(5, 6, 7, final_obs_valid=False)),
    Plant("constant_episode", "pendulum", "one", apply(_freeze, MIDDLE)),
    Plant("constant_episode", "images", "images", apply(_freeze, 8)),
    Plant("constant_episode", "goals", "a dict", apply(_freeze, LAST)),
    Plant("stuck_number", "pendulum", "one of three numbers",
          apply(_set(np.s_[:, 2], 0.7), MIDDLE)),
    Plant("stuck_number", "lander", "the first number", apply(_set(np.s_[:, 0], 0.0), 33)),
    Plant("frozen_number", "rover", "one number", apply(_hold("obs", 35, 30, 0), MIDDLE)),
    Plant("frozen_number", "rover", "all numbers, in two", apply(_hold("obs", 50, 40), 4, LAST)),
    Plant("frozen_number", "lander", "at the end", apply(_hold("obs", 9, 100, 5), 7)),
    Plant("frozen_number", "goals", "a dict", apply(_hold("obs", 3, 31, 1), 12)),
    Plant("frozen_image", "film", "one, an image in a dict", apply(
        _hold("obs", 21, 30), MIDDLE)),
    Plant("frozen_image", "film", "two", apply(_hold("obs", 3, 40), 4, LAST)),
    Plant("flat_image", "images", "black, one", apply(_set(17, 0), MIDDLE)),
    Plant("flat_image", "images", "a colour, in two", apply(
        _set(np.s_[9:12], [200, 3, 90]), 4, LAST)),
    Plant("scaled_image", "images", "one", apply(
        lambda e: e.update(obs=(e["obs"] > 30).astype(np.uint8)), MIDDLE)),
    Plant("scaled_image", "film", "a piece of two", apply(
        lambda e: e["obs"]["camera"].__setitem__(
            np.s_[20:40], e["obs"]["camera"][20:40] % 7 // 5), 10, 30)),
    Plant("frozen_action", "rover", "all numbers", apply(_hold("actions", 61, 30), MIDDLE)),
    Plant("frozen_action", "rover", "one number, in two", apply(
        _hold("actions", 5, 35, 1), 9, 31)),
    Plant("frozen_action", "goals", "one", apply(_hold("actions", 2, 32), 5)),
    Plant("frozen_reward", "rover", "one", apply(_hold("rewards", 70, 30), MIDDLE)),
    Plant("frozen_reward", "lander", "zeros, in two", apply(
        _rewards(lambda r: np.r_[r[:10], np.zeros(32)[: len(r) - 10], r[42:]]), 2, LAST)),
    Plant("last_is_next_first", "pendulum", "all", next_first),
    Plant("last_is_next_first", "lander", "all", next_first),
    Plant("last_is_copy", "pendulum", "all", apply(_repeat(-1))),
    Plant("last_is_copy", "images", "all, images", apply(_repeat(-1))),
    Plant("last_is_copy", "goals", "one, a dict", apply(_repeat(-1), MIDDLE)),
    Plant("last_is_zero", "pendulum", "all", apply(_set(-1, 0.0))),
    Plant("last_is_zero", "cart", "one", apply(_set(-1, 0.0), MIDDLE)),
    Plant("repeated_observation", "pendulum", "one", apply(_repeat(20), MIDDLE)),
    Plant("repeated_observation", "lander", "two", apply(_repeat(12), 9, LAST)),
    Plant("sentinel", "pendulum", "-999 once", apply(_set((7, 1), -999.0), MIDDLE)),
    Plant("sentinel", "goals", "1e6 in two", apply(_set((3, 0), 1e6), 9, 21)),
    Plant("constant_number", "lander", "all", apply(_set(np.s_[:, 3], 1.5), whole=True)),
    Plant("units", "pendulum", "all", apply(
        lambda e: e["obs"].__setitem__(np.s_[:, 0], e["obs"][:, 0] * 1e-8), whole=True)),
    Plant("dark_image", "images", "all", apply(
        lambda e: e.update(obs=(e["obs"] > 100).astype(np.uint8)), whole=True)),
    Plant("constant_action", "pendulum", "one", apply(_act(0.3), MIDDLE)),
    Plant("constant_action", "goals", "two", apply(_act(0.0), 6, 36)),
    Plant("unused_action", "lander", "one of four", apply(
        lambda e: e.update(actions=e["actions"] % 3), whole=True)),
    Plant("missing_rewards", "rover", "one", apply(_rewards(np.zeros_like), MIDDLE)),
    Plant("missing_rewards", "cart", "two, elsewhere always 1", apply(
        _rewards(np.zeros_like), 4, LAST)),
    Plant("zero_rewards", "lander", "all", apply(_rewards(np.zeros_like), whole=True)),
    Plant("reward_outlier", "pendulum", "one", apply(_rewards(_at(5, 5000.0)), MIDDLE)),
    Plant("reward_outlier", "images", "the last", apply(_rewards(_at(3, -900.0)), LAST)),
    Plant("reward_scale", "pendulum", "a tenth", apply(
        _rewards(lambda r: 100 * r), 8, 18, 28, 38)),
    Plant("reward_sign", "pendulum", "two", apply(_rewards(np.negative), 10, 30)),
    Plant("reward_baseline", "rover", "one, half of the range higher", apply(
        _rewards(lambda r: r + 0.07), MIDDLE)),
    Plant("reward_baseline", "pendulum", "one, half of the range lower", apply(
        _rewards(lambda r: r - 6.5), LAST)),
    Plant("reward_baseline", "rover", "a fourth, by the range", apply(
        _rewards(lambda r: r - 0.15), *range(4, 14))),
    Plant("reward_baseline", "cart", "one, elsewhere always 1", apply(
        _rewards(lambda r: r - 0.5), MIDDLE)),
    Plant("reward_baseline", "images", "two, by the range", apply(
        _rewards(lambda r: r + 8), 10, 11)),
    Plant("last_reward_missing", "pendulum", "all", apply(
        _rewards(lambda r: np.append(r[1:], 0.0)))),
    Plant("first_reward_missing", "goals", "all", apply(
        _rewards(lambda r: np.insert(r[:-1], 0, 0.0)), whole=True)),
]  # fmt: skip
