"""hopper-…, halfcheetah-…, walker2d-…: linear policies trained by random search in the generator.

    medium          the first policy with half of the final return, with noise on its actions
    expert          the best policy, with the same noise
    medium-expert   medium and expert episodes alternate
    replay          the perturbed policies of the whole training, from the first to the last
    early           the same of the first third of the training

The training (collector/builtin/ars.py) has a fixed seed and number of iterations, so all datasets
of an environment come from the same policies. It takes one to three CPU minutes; with a folder for
snapshots, only once per environment.
"""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from collector.builtin.ars import ACTION_NOISE, Settings, Snapshots, load_or_train
from collector.builtin.generate import Behaviour

HALFCHEETAH = Settings(
    env_id="HalfCheetah-v5",
    iterations=80,
    directions=16,
    top=8,
    step_size=0.02,
    noise=0.03,
    alive_bonus=False,
)
HOPPER = Settings(
    env_id="Hopper-v5", iterations=45, directions=16, top=8, step_size=0.02, noise=0.03
)
WALKER2D = Settings(
    env_id="Walker2d-v5",
    iterations=160,
    directions=16,
    top=8,
    step_size=0.04,
    noise=0.04,
    seed=1,
)


class ArsBehaviour(Behaviour):
    """Plays snapshots of one training. `snapshots` is a folder to read them from or write them to.

    observations float32 (N, 11 or 17), actions float32 (N, 3 or 6) in [-1, 1]. An episode ends with
    a terminal (Hopper and Walker2d fell) or, at 1000 steps, a timeout.
    """

    training: ClassVar[Settings]
    quality: ClassVar[str]
    algorithm = "ARS-V2"
    package = "gymnasium[mujoco]"

    def __init__(self, env: Any, snapshots: Path | None = None) -> None:
        super().__init__(env)
        self._snapshots: Snapshots = load_or_train(self.training, snapshots)
        self._episodes = 0

    def begin(self, rng: np.random.Generator) -> None:
        self._rng = rng
        kept = self._snapshots
        perturbation: NDArray[np.float64] | float = 0.0
        self._noise = ACTION_NOISE
        if self.quality in ("replay", "early"):
            last = len(kept.returns) if self.quality == "replay" else len(kept.returns) // 3
            k = int(rng.integers(last))
            perturbation = self.training.noise * rng.standard_normal(kept.weights[k].shape)
            self._noise = 0.0
        elif self.quality == "medium" or (self.quality != "expert" and self._episodes % 2 == 0):
            k = kept.medium
        else:
            k = kept.expert
        self._matrix, self._offset = kept.policy(k, perturbation)
        self._episodes += 1

    def act(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        action = self._matrix @ observation + self._offset
        if self._noise:
            action = action + self._noise * self._rng.standard_normal(len(action))
        return np.clip(action, -1.0, 1.0).astype(np.float32)


_ABOUT = {
    "medium": "a policy with half of the best return",
    "replay": "the policies of a whole training",
    "early": "the policies of the first third of a training",
    "expert": "the best policy of a training",
    "medium-expert": "medium and expert episodes",
}


def ars_kind(training: Settings, quality: str) -> type[Behaviour]:
    """A behaviour that plays the policies of `training`; `quality` as at the top."""
    body = {
        "env_id": training.env_id,
        "training": training,
        "quality": quality,
        "about": f"{training.env_id}; {_ABOUT[quality]} (needs MuJoCo)",
    }
    return type("ArsBehaviour", (ArsBehaviour,), body)


ARS_KINDS: dict[str, type[Behaviour]] = {
    f"{training.env_id.split('-')[0].lower()}-{quality}": ars_kind(training, quality)
    for training in (HOPPER, HALFCHEETAH, WALKER2D)
    for quality in _ABOUT
}
"""Behaviours by the name of their dataset: hopper-medium, halfcheetah-replay, …"""
