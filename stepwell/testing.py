"""Small, valid and deterministic specs and trajectories for tests.

spec = make_spec(observation=17, action=6)
trajectory = make_trajectory(spec, length=100, seed=1, env="Hopper-v5")
wait_until(lambda: client.dataset("d").unsealed == 0, what="everything sealed")
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from stepwell.spaces import Array, Box, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Space
from stepwell.trajectory import Trajectory

T = TypeVar("T")


def make_spec(
    *,
    observation: int = 3,
    action: int = 1,
    discrete: int | None = None,
    image: tuple[int, ...] | None = None,
    infos: bool = False,
    action_known: bool = False,
    env: str = "Test-v0",
) -> EnvSpec:
    """Return a spec with a float32 vector observation and a Box action in -1 … 1.

    `discrete` makes the action Discrete(n) instead. `image` adds a uint8 observation "image" of
    that shape. `infos` adds a float64 vector and an integer info.
    """
    observations: dict[str, Space] = {"observation": Box((observation,))}
    if image is not None:
        observations["image"] = Box(image, "uint8", 0.0, 255.0)
    return EnvSpec.of(
        observations,
        Box((action,), low=-1.0, high=1.0) if discrete is None else Discrete(discrete),
        infos={"position": Box((2,), "float64"), "room": Discrete(9)} if infos else None,
        action_known=action_known,
        env=env,
    )


def make_trajectory(
    spec: EnvSpec | None = None,
    *,
    length: int = 5,
    seed: int = 0,
    terminated: bool = True,
    truncated: bool = False,
    final_obs_valid: bool = True,
    id: str | None = None,  # noqa: A002 - the word of the API
    **metadata: Any,
) -> Trajectory:
    """Return a random trajectory of `length` transitions that fits `spec`. `seed` sets its arrays.

    Other keywords are passed to `TrajectoryMetadata` (`env` defaults to that of the spec).
    """
    spec = spec or make_spec()
    rng = np.random.default_rng([length, seed])
    if truncated:
        terminated = False
    metadata.setdefault("env", spec.env)
    obs = {k: random_values(s, length + 1, rng) for k, s in spec.observations.items()}
    if not final_obs_valid:
        for array in obs.values():
            array[-1] = array[-2]
    return Trajectory.from_arrays(
        obs=obs,
        actions={k: random_values(s, length, rng) for k, s in spec.actions.items()},
        rewards=rng.standard_normal(length, np.float32),
        terminated=terminated,
        truncated=truncated,
        final_obs_valid=final_obs_valid,
        action_known=rng.random(length) < 0.8 if spec.action_known else None,
        infos={k: random_values(s, length + 1, rng) for k, s in spec.infos.items()},
        id=id,
        **metadata,
    )


def random_values(space: Space, rows: int, rng: np.random.Generator) -> Array:
    """Return random values [rows, *shape] inside `space`, in its dtype."""
    shape, dtype = (rows, *space.shape), np.dtype(space.dtype)
    if isinstance(space, Discrete):
        return rng.integers(space.start, space.start + space.n, shape, np.int64)
    if isinstance(space, MultiDiscrete):
        return np.asarray(space.start) + rng.integers(0, np.asarray(space.nvec), shape, np.int64)
    if isinstance(space, MultiBinary):
        return rng.integers(0, 2, shape, np.int8)
    low, high = space.bounds()
    if dtype.kind == "f":
        # An infinite bound is replaced by ±3, which keeps the values small.
        low, high = np.where(np.isfinite(low), low, -3.0), np.where(np.isfinite(high), high, 3.0)
        return (low + (high - low) * rng.random(shape)).astype(dtype)
    least, most = (bound.astype(np.int64) for bound in space.held_bounds())
    return rng.integers(least, most, shape, np.int64, endpoint=True).astype(dtype)


def wait_until(
    condition: Callable[[], T], seconds: float = 240.0, *, what: str = "", pause: float = 0.02
) -> T:
    """Call a condition repeatedly and return its first true value. Fails after `seconds`.

    Use it to wait for another thread or process; the failure message contains `what`. The timeout
    is generous, so that a test does not fail on a busy machine. An exception of the condition is
    not caught.
    """
    deadline = time.monotonic() + seconds
    while True:
        # Read the clock before the call, so that the last call happens after the deadline.
        over = time.monotonic() >= deadline
        answer = condition()
        if answer:
            return answer
        if over:
            name = what or getattr(condition, "__name__", "it")
            raise AssertionError(f"{name}: not within {seconds:g} s, the last answer is {answer!r}")
        time.sleep(pause)
