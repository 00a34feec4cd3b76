"""torch.compile for an agent's update.

Forward and backward become a few generated kernels. Each new shape needs a compilation of minutes,
so the windows of a batch are padded to one of a few lengths (`bucket`). If a part cannot be
compiled, torch logs a warning and runs it uncompiled. Shapes in a compiled update do not depend on
the data, so it lacks optimisations that make a CPU faster (removed padding, evaluation of only the
sampled critics).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from amago_model.agent import Agent
from amago_model.data.batch import Batch
from amago_model.errors import ConfigError


@lru_cache(maxsize=8)
def compile_obstacle(device_type: str) -> str | None:
    """Why torch.compile does not work on this device: the error of a trial; None if it works."""
    try:
        x = torch.ones(8, device=device_type)
        torch.compile(_trial, dynamic=False)(x)
    except Exception as error:  # noqa: BLE001 a broken compiler may raise any exception
        reason = str(error).strip().splitlines()
        return f"{type(error).__name__}: {reason[0] if reason else 'no message'}"
    return None


def _trial(x: Tensor) -> Tensor:
    return (x * 2.0).sin().sum()


def bucket(n_transitions: int, longest: int | None = None) -> int:
    """The padded length of a batch of n transitions: the next of 8, 16, 32, …, but at most
    `longest`, the longest window of the data."""
    size = max(8, 1 << max(n_transitions - 1, 0).bit_length())
    return size if longest is None else max(n_transitions, min(size, longest))


def compiled(
    agent: Agent, device: torch.device | str, *, longest: int | None = None
) -> Callable[..., Any]:
    """The agent's compiled forward pass, with the arguments of Agent.forward.

    Args:
        agent: the agent to compile.
        device: the device of the agent.
        longest: transitions of the longest possible window, if known.

    Raises:
        ConfigError: torch.compile does not work on this machine; the message contains the reason.
    """
    kind = torch.device(device).type
    if why := compile_obstacle(kind):
        raise ConfigError(f"torch.compile does not work on device '{kind}': {why}. Disable it")
    forward = torch.compile(agent.forward, dynamic=False)

    def run(
        batch: Batch, detailed: bool = True, counts: dict[str, float] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # Noise is drawn outside, so it equals that of an uncompiled update. Counts are tensors,
        # because each new Python number would cause a recompilation.
        batch = batch.padded(bucket(batch.mask.shape[1], longest))
        if batch.noise is None:
            batch = dataclasses.replace(batch, noise=agent.draw_noise(*batch.mask.shape))
        if counts is not None:
            counts = {k: torch.as_tensor(v, device=device) for k, v in counts.items()}  # type: ignore[misc]
        with warnings.catch_warnings(), torch._dynamo.config.patch(suppress_errors=True):
            # Dynamo traces through lru_cache; the cached values are constants.
            warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools")
            loss, metrics = forward(batch, detailed=detailed, counts=counts)
        return loss, metrics

    return run
