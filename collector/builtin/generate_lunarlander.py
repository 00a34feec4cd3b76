"""lunarlander-noisy: gymnasium's own landing heuristic, disturbed, some episodes more than others.

Each episode draws a noise level; the higher it is, the more often a random action is held for a few
steps. Copying everything crashes, the better episodes land. Needs Box2D, which nothing else does.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from collector.builtin.generate import Progress, Summary, generate
from stepwell.errors import StepwellError

ENV_ID = "LunarLanderContinuous-v3"

_NOISE_LEVELS = (0.1, 0.3, 0.6, 1.0)
_LEVEL_PROBABILITIES = (0.1, 0.25, 0.35, 0.3)
_SLIP_STEPS = (2, 6)  # an action drawn, then held for one to five steps more


Heuristic = Callable[[Any, NDArray[np.float32]], NDArray[np.float64]]


class Box2DMissing(StepwellError, ImportError):
    """LunarLander needs the Box2D physics, which is not installed; the message says how to."""


def lunarlander_noisy(
    path: str | Path, steps: int = 100_000, seed: int = 0, progress: Progress | None = None
) -> Summary:
    """Write at least `steps` steps (whole episodes) of LunarLanderContinuous-v3 to `path`.

    observations float32 (N, 8), actions float32 (N, 2) in [-1, 1]; an episode ends in a terminal
    (landed, crashed) or, at 1000 steps, a timeout. With the default number of steps mean
    return about +30, best decile above about 277, which is what the undisturbed heuristic earns.

    Raises Box2DMissing (an ImportError) when Box2D is not installed.
    """
    heuristic = _import_heuristic()
    env = gymnasium.make(ENV_ID)
    return generate(
        path,
        env,
        _NoisyHeuristic(env.unwrapped, heuristic),
        algorithm="heuristic+eps",
        steps=steps,
        seed=seed,
        progress=progress,
    )


def _import_heuristic() -> Heuristic:
    try:
        with warnings.catch_warnings():
            # Box2D's SWIG types warn as they are created. Where warnings are errors (`-W error`,
            # our tests) that is no exception but a segmentation fault: they must not warn at all.
            warnings.simplefilter("ignore", DeprecationWarning)
            from gymnasium.envs.box2d.lunar_lander import heuristic
    except (ImportError, DependencyNotInstalled) as error:
        raise Box2DMissing(
            "LunarLander needs Box2D, which is not installed. Install it with:\n"
            '    pip install "gymnasium[box2d]"'
        ) from error
    found: Heuristic = heuristic
    return found


class _NoisyHeuristic:
    """With probability 0.35 x level, a uniform random action takes over for 2 to 6 steps."""

    def __init__(self, env: Any, heuristic: Heuristic) -> None:
        self._env = env
        self._heuristic = heuristic

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng
        level = float(rng.choice(_NOISE_LEVELS, p=_LEVEL_PROBABILITIES))
        self._slip_probability = 0.35 * level
        self._held_steps = 0
        self._held_action = np.zeros(2, np.float32)

    def act(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._held_steps == 0 and self._rng.random() < self._slip_probability:
            self._held_steps = int(self._rng.integers(*_SLIP_STEPS, endpoint=True))
            self._held_action = self._rng.uniform(-1.0, 1.0, 2).astype(np.float32)
        if self._held_steps > 0:
            self._held_steps -= 1
            return self._held_action
        action = np.clip(self._heuristic(self._env, observation), -1.0, 1.0)
        return action.astype(np.float32)
