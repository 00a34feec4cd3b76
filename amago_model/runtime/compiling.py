"""torch.compile for an agent's update.

Forward and backward become a few generated kernels. A new shape compiles anew, for minutes, so the
windows of a batch are padded to one of a few lengths (`bucket`). Where a part cannot be compiled,
torch logs a warning and that part runs uncompiled. A compiled update has no sizes that depend on
the data, by which a CPU is faster (no padding, critics of a subset alone).
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
    """Why torch.compile cannot be used on this device: the error of a trial; None if it can."""
    try:
        x = torch.ones(8, device=device_type)
        torch.compile(_trial, dynamic=False)(x)
    except Exception as error:  # noqa: BLE001 a compiler that is broken raises whatever it likes
        reason = str(error).strip().splitlines()
        return f"{type(error).__name__}: {reason[0] if reason else 'no message'}"
    return None


def _trial(x: Tensor) -> Tensor:
    return (x * 2.0).sin().sum()


def wants_compiling(setting: str, device: torch.device | str) -> bool:
    """Whether off, auto, on or graphs means to compile on this device. On a CPU auto does not: an
    update with sizes that depend on the data is faster."""
    if setting == "auto":
        kind = torch.device(device).type
        return kind == "cuda" and compile_obstacle(kind) is None
    return setting != "off"


def bucket(n_transitions: int, longest: int | None = None) -> int:
    """The length to which a batch of so many transitions is padded: the next of 8, 16, 32, …, but
    never more than the longest window there is."""
    size = max(8, 1 << max(n_transitions - 1, 0).bit_length())
    return size if longest is None else max(n_transitions, min(size, longest))


def compiled(
    agent: Agent,
    device: torch.device | str,
    *,
    graphs: bool = False,
    longest: int | None = None,
) -> Callable[..., Any]:
    """The agent's forward pass, compiled, with the arguments of Agent.forward.

    Args:
        graphs: record the kernels of an update once for each shape and replay them (CUDA graphs),
            which saves the time of launching them.
        longest: transitions of the longest possible window, if known.

    Raises:
        ConfigError: this machine cannot compile, with the reason.
    """
    kind = torch.device(device).type
    if why := compile_obstacle(kind):
        raise ConfigError(f"torch.compile cannot be used on device '{kind}': {why}. Do without it")
    if graphs and kind != "cuda":
        raise ConfigError(f"CUDA graphs cannot be used on device '{kind}'; compile without them")
    mode = "reduce-overhead" if graphs else None
    forward = torch.compile(agent.forward, dynamic=False, mode=mode)

    def run(
        batch: Batch, detailed: bool = True, counts: dict[str, float] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # Noise is drawn outside, so it is the same as without a compiler; and counts are tensors,
        # or every other number would compile anew.
        batch = batch.padded(bucket(batch.mask.shape[1], longest))
        if batch.noise is None:
            batch = dataclasses.replace(batch, noise=agent.draw_noise(*batch.mask.shape))
        if counts is not None:
            counts = {k: torch.as_tensor(v, device=device) for k, v in counts.items()}  # type: ignore[misc]
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with warnings.catch_warnings(), torch._dynamo.config.patch(suppress_errors=True):
            # Caches are traced through; ours hold constants.
            warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools")
            loss, metrics = forward(batch, detailed=detailed, counts=counts)
        # A replayed graph writes its results into the same memory every time.
        return loss, {k: v.clone() for k, v in metrics.items()} if graphs else metrics

    return run
