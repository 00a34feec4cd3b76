"""Datasets for the doctor: clean ones of many kinds, and defects that are planted into them.

An episode is a dict of arguments of `Client.add`. A plant changes some episodes of a clean dataset
in place, and says which ones it made wrong (None: the dataset as a whole).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepwell import Box, Discrete, EnvSpec

Episode = dict[str, Any]
Wrong = list[int] | None


def _finished(obs: Any, actions: Any, rewards: Any, *, terminated: bool, **more: Any) -> Episode:
    return {
        "obs": obs,
        "actions": actions,
        "rewards": np.asarray(rewards, np.float32),
        "terminated": terminated,
        "truncated": not terminated,
        "env": "Clean-v0",
        **more,
    }


def pendulum(rng: np.random.Generator) -> Episode:
    """Swings under noisy torques; cut off after 40 steps."""
    angle, speed = rng.uniform(-3, 3), rng.uniform(-1, 1)
    actions = rng.uniform(-2, 2, (40, 1)).astype(np.float32)
    rows, rewards = [[np.cos(angle), np.sin(angle), speed]], []
    for (torque,) in actions:
        rewards.append(-(angle**2) - 0.1 * speed**2 - 0.001 * torque**2)
        speed = np.clip(speed + 0.4 * np.sin(angle) + 0.1 * torque, -8, 8)
        angle = (angle + 0.05 * speed + np.pi) % (2 * np.pi) - np.pi
        rows.append([np.cos(angle), np.sin(angle), speed])
    return _finished(np.asarray(rows, np.float32), actions, rewards, terminated=False)


def cart(rng: np.random.Generator) -> Episode:
    """Falls after a while, at most 50 steps; a reward of 1 for each."""
    steps = int(min(50, rng.integers(12, 80)))
    rows = np.cumsum(rng.normal(0, 0.05, (steps + 1, 4)), axis=0).astype(np.float32)
    actions = rng.integers(0, 2, steps)
    return _finished(rows, actions, np.ones(steps), terminated=steps < 50)


def grid(rng: np.random.Generator) -> Episode:
    """A walk over 25 cells to the goal, which alone has a reward."""
    cell, cells, actions = int(rng.integers(0, 12)), [], []
    cells.append(cell)
    while cell != 24:
        action = int(rng.integers(0, 4))
        x, y = cell % 5, cell // 5
        x = min(max(x + (action == 0) - (action == 2), 0), 4)
        y = min(max(y + (action == 1) - (action == 3), 0), 4)
        cell = 5 * y + x
        cells.append(cell)
        actions.append(action)
    rewards = np.zeros(len(actions))
    rewards[-1] = 1.0
    return _finished(np.asarray(cells), np.asarray(actions), rewards, terminated=True)


def images(rng: np.random.Generator) -> Episode:
    """A square that drifts over a noisy picture."""
    frames = rng.integers(0, 60, (31, 8, 8, 3)).astype(np.uint8)
    place = np.clip(np.cumsum(rng.integers(-1, 2, (31, 2)), axis=0) + 4, 0, 6)
    for frame, (i, j) in zip(frames, place, strict=True):
        frame[i : i + 2, j : j + 2] = 250
    return _finished(frames, rng.integers(0, 3, 30), rng.normal(size=30), terminated=False)


def film(rng: np.random.Generator) -> Episode:
    """A scene of another brightness in each episode, which moves by a pixel at each step and fades
    to black at the end."""
    steps = 70
    scene = rng.integers(0, 60, (12, 12 + steps, 3)) + rng.integers(0, 150)
    frames = np.stack([scene[:, t : t + 12] for t in range(steps + 1)])
    frames[-6:] //= np.asarray([2, 4, 8, 16, 50, 1000])[:, None, None, None]
    return _finished(
        {"camera": frames.astype(np.uint8)}, rng.uniform(-1, 1, (steps, 1)).astype(np.float32),
        rng.normal(size=steps), terminated=True,
    )  # fmt: skip


def bang_bang(rng: np.random.Generator) -> Episode:
    """Full force to one side or the other, a small cost, and a reward of 100 at the goal."""
    place, speed, rows, actions = rng.uniform(-0.6, -0.4), 0.0, [], []
    rows.append([place, speed])
    while place < 0.5 and len(actions) < 200:
        action = 1.0 if speed >= 0 else -1.0
        if rng.random() < 0.1:
            action = -action
        speed = np.clip(speed + 0.0015 * action - 0.0025 * np.cos(3 * place), -0.07, 0.07)
        place = max(place + speed, -1.2)
        rows.append([place, speed])
        actions.append([action])
    rewards = np.full(len(actions), -0.1)
    rewards[-1] += 100.0
    return _finished(
        np.asarray(rows, np.float32), np.asarray(actions, np.float32), rewards, terminated=True
    )


def lander(rng: np.random.Generator) -> Episode:
    """Dense rewards, and ±100 at the end."""
    steps = int(rng.integers(30, 70))
    rows = np.cumsum(rng.normal(0, 0.1, (steps + 1, 6)), axis=0).astype(np.float32)
    rewards = rng.normal(0, 2, steps)
    rewards[-1] = rng.choice([-100.0, 100.0])
    return _finished(rows, rng.integers(0, 4, steps), rewards, terminated=True)


def goals(rng: np.random.Generator) -> Episode:
    """A dict: a moving point, and a goal that stays for the episode."""
    steps = 40
    point = np.cumsum(rng.normal(0, 0.1, (steps + 1, 3)), axis=0).astype(np.float32)
    goal = np.repeat(rng.normal(size=(1, 2)), steps + 1, axis=0).astype(np.float32)
    rewards = -np.linalg.norm(point[1:, :2] - goal[1:], axis=1)
    actions = rng.uniform(-1, 1, (steps, 2)).astype(np.float32)
    return _finished({"point": point, "goal": goal}, actions, rewards, terminated=False)


def corridor(rng: np.random.Generator) -> Episode:
    """Memory: a cue in the first observation, and nothing to see until the end."""
    steps = 25
    rows = np.zeros((steps + 1, 3), np.float32)
    rows[0, 0] = rng.choice([-1.0, 1.0])
    rows[-2:, 1] = 1.0
    actions = rng.integers(0, 3, steps)
    rewards = np.zeros(steps)
    rewards[-1] = float(rng.random() < 0.5)
    return _finished(rows, actions, rewards, terminated=True)


def contacts(rng: np.random.Generator) -> Episode:
    """A ball that bounces: its speed jumps, its place does not; and an angle that wraps."""
    steps, rows, angle = 60, [], rng.uniform(0, 6)
    place, speed = rng.uniform(1, 2, 2), rng.uniform(0.04, 0.06, 2)
    for t in range(steps + 1):
        speed = speed + [0.0002, -0.0004] + rng.normal(0, 0.0001, 2)
        if t == 40 and rng.random() < 0.3:
            speed = speed * [-0.9, -1.0]
        place, angle = place + speed, (angle + 0.05) % (2 * np.pi)
        rows.append([*place, *speed, angle])
    return _finished(
        np.asarray(rows, np.float32), rng.uniform(-1, 1, (steps, 1)), rng.normal(size=steps),
        terminated=False,
    )  # fmt: skip


def maze(rng: np.random.Generator) -> Episode:
    """A corridor of real numbers that a good policy walks: whole episodes repeat by chance."""
    cue, wrong = float(rng.choice([-1.0, 1.0])), int(rng.integers(0, 40))
    rows = np.zeros((22, 2), np.float32)
    rows[0, 1], rows[-1, 0] = cue, 1.0
    actions = np.zeros(21, np.int64)
    if wrong < 21:
        actions[wrong] = rng.integers(1, 3)
    rewards = np.zeros(21)
    rewards[-1] = float(actions[-1] == 0)
    return _finished(rows, actions, rewards, terminated=True)


def attempts(rng: np.random.Generator) -> Episode:
    """Several attempts in one episode: the point is set back to its start every ten steps."""
    parts = [np.cumsum(rng.normal(0, 0.1, (10, 2)), axis=0) for _ in range(4)]
    rows = np.concatenate([*parts, parts[0][:1] + 0.01]).astype(np.float32)
    return _finished(rows, rng.integers(0, 2, 40), rng.normal(size=40), terminated=True)


def _stream(rng: np.random.Generator, steps: int, width: int) -> Any:
    """Smooth noise between about -1 and 1."""
    noise = rng.normal(size=(steps + 20, width))
    return np.stack([np.convolve(x, np.full(20, 0.2), "valid")[:steps] for x in noise.T], axis=1)


def rover(rng: np.random.Generator) -> Episode:
    """Drives over a field with a wall on one side, steered by a noisy policy whose actions are
    clipped; its speed is clipped, a light stays on for long, and the reward is what it covers."""
    steps = 120
    actions = np.clip(0.6 * _stream(rng, steps, 2), -1, 1).astype(np.float32)
    place, speed = rng.uniform(-1.5, 1.5, 2), rng.normal(0, 0.05, 2)
    rows, rewards = [], []
    for t in range(steps + 1):
        rows.append([*place, *speed, float(place[1] > 0)])
        if t < steps:
            speed = np.clip(0.95 * speed + 0.02 * actions[t], -0.1, 0.1)
            place = place + speed + rng.normal(0, 0.002, 2)
            place[0] = max(place[0], -2.0)
            rewards.append(float(np.hypot(*speed) - 0.01 * np.square(actions[t]).sum()))
    return _finished(np.asarray(rows, np.float32), actions, rewards, terminated=False)


def parking(rng: np.random.Generator) -> Episode:
    """Comes to rest by a policy without noise; few episodes last until it has."""
    place, goal = rng.uniform(1, 3, (2, 2)).astype(np.float32)
    rows, actions, rewards = [], [], []
    steps = 70 if rng.random() < 0.04 else int(rng.integers(15, 25))
    for _ in range(steps):
        rows.append(place)
        actions.append(np.float32([-0.1, -0.4]) * np.tanh(place - goal))
        place = place + actions[-1]
        rewards.append(-np.abs(place - goal).sum())
    return _finished(
        np.asarray([*rows, place], np.float32), np.asarray(actions, np.float32), rewards,
        terminated=False,
    )  # fmt: skip


CLEAN: dict[str, tuple[Callable[[np.random.Generator], Episode], EnvSpec]] = {
    "pendulum": (pendulum, EnvSpec.of(Box((3,)), Box((1,), low=-2.0, high=2.0))),
    "cart": (cart, EnvSpec.of(Box((4,)), Discrete(2))),
    "grid": (grid, EnvSpec.of(Discrete(25), Discrete(4))),
    "images": (images, EnvSpec.of(Box((8, 8, 3), "uint8", 0, 255), Discrete(3))),
    "film": (
        film,
        EnvSpec.of({"camera": Box((12, 12, 3), "uint8", 0, 255)}, Box((1,), low=-1.0, high=1.0)),
    ),
    "bang_bang": (bang_bang, EnvSpec.of(Box((2,)), Box((1,), low=-1.0, high=1.0))),
    "lander": (lander, EnvSpec.of(Box((6,)), Discrete(4))),
    "goals": (
        goals,
        EnvSpec.of({"point": Box((3,)), "goal": Box((2,))}, Box((2,), low=-1.0, high=1.0)),
    ),
    "corridor": (corridor, EnvSpec.of(Box((3,)), Discrete(3))),
    "contacts": (contacts, EnvSpec.of(Box((5,)), Box((1,), low=-1.0, high=1.0))),
    "maze": (maze, EnvSpec.of(Box((2,)), Discrete(3))),
    "rover": (rover, EnvSpec.of(Box((5,)), Box((2,), low=-1.0, high=1.0))),
    "parking": (parking, EnvSpec.of(Box((2,)), Box((2,)))),
    "attempts": (attempts, EnvSpec.of(Box((2,)), Discrete(2))),
}
EPISODES = 40


def make(name: str, seed: int = 0) -> list[Episode]:
    """The episodes of a clean dataset; the first four are for evaluation."""
    rng = np.random.default_rng(seed)
    episodes = [CLEAN[name][0](rng) for _ in range(EPISODES)]
    for number, episode in enumerate(episodes):
        episode |= {"purpose": "eval" if number < 4 else "train", "seed": 1000 + number}
        episode["episode_id"] = f"{name}-{number}"
    return episodes


# --- defects --------------------------------------------------------------------------------------


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
