"""Clean datasets of many kinds for the doctor. An episode has arguments of `Client.add`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stepwell import Box, Discrete, EnvSpec

Episode = dict[str, Any]


def _single(values: Any) -> Any:
    """float32 in place of float64, as the datasets have it."""
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _finished(obs: Any, actions: Any, rewards: Any, *, terminated: bool, **more: Any) -> Episode:
    return {
        "obs": {k: _single(v) for k, v in obs.items()} if isinstance(obs, dict) else _single(obs),
        "actions": _single(actions),
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
TRAINING = 36
"""The others, the first ones, are for evaluation."""


def make(name: str, seed: int = 0) -> list[Episode]:
    """The episodes of a clean dataset."""
    rng = np.random.default_rng(seed)
    episodes = [CLEAN[name][0](rng) for _ in range(EPISODES)]
    for number, episode in enumerate(episodes):
        episode |= {
            "purpose": "eval" if number < EPISODES - TRAINING else "train",
            "seed": 1000 + number,
        }
        episode["episode_id"] = f"{name}-{number}"
    return episodes
