"""One update: forward, backward, clip, step, slow copies. Knows batches and an agent, no more.

The gradient of a batch does not depend on how it is cut: over processes and over micro-batches,
each part's losses are averaged over the counts of the whole. The noise of an update is a function
of (seed, update, rank, part), so a resumed run draws the same without having stored a generator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from amago_model.agent import Agent
from amago_model.batch import Batch
from trainer.config import OptimizerConfig, TrainerError

Metrics = dict[str, Tensor]


class TrainingDiverged(TrainerError):
    """Too many gradients were NaN or infinite, or the agent's statistics are."""


@dataclass(slots=True)
class Update:
    """What came of one update. Tensors stay on the device: reading one is a synchronisation."""

    metrics: Metrics
    skipped: bool = False


class Learner:
    """An agent, its optimiser and the arithmetic of one update."""

    def __init__(
        self,
        agent: Agent,
        config: OptimizerConfig,
        accelerator: Accelerator,
        *,
        seed: int,
        updates: int,
    ) -> None:
        self.agent, self.config, self.seed, self.updates = agent, config, seed, updates
        self.accelerator = accelerator
        agent.train()
        # Fused: one call for all parameters.
        optimizer = torch.optim.AdamW(
            agent.trainable_parameters(),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            fused=True,
        )
        # Prepare model and optimiser only: a prepared loader dispatches from rank 0, and a prepared
        # schedule steps once per process.
        self.model: nn.Module
        with warnings.catch_warnings():
            # torch 2.13 has a new word for it, which 2.6 does not know.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self.model, prepared = accelerator.prepare(agent, optimizer)
        self.optimizer: torch.optim.AdamW = getattr(prepared, "optimizer", prepared)
        self.scaler = accelerator.scaler
        self.parameters = agent.trainable_parameters()
        self.skipped = 0

    def learning_rate(self, update: int) -> float:
        """Of update 0, 1, …: a linear warm-up, times a constant or a fall to 0 at the last one."""
        config = self.config
        rate = config.learning_rate * min(1.0, (update + 1) / max(config.warmup, 1))
        if config.decay == "cosine":
            rate *= 0.5 * (1 + math.cos(math.pi * min(1.0, update / max(self.updates, 1))))
        return rate

    def update(self, update: int, batch: Batch, *, detailed: bool = False) -> Update:
        """Learn from this process's share of the batch of an update.

        Skips the step where the gradient is not finite, on every process alike; raises
        `TrainingDiverged` when that happened too often.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(update)
        parts = _cut(batch, self.config.accumulate)
        counts = self._counts(batch) if len(parts) > 1 or self.world > 1 else None
        metrics: Metrics = {}
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            _seed_noise(self.seed, update, self.accelerator.process_index, index)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                loss, seen = self.model(part, detailed=detailed, counts=counts)
                self._backward(loss)
            metrics = _summed(metrics, seen)
        norm = self._clip()
        if not bool(torch.isfinite(norm)):
            self._skip(update)
            return Update(metrics, skipped=True)
        early = self.agent.config.losses.targets_before_step  # as published; see presets.py
        if early:
            self.agent.update_targets()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not early:
            self.agent.update_targets()
        metrics["optimizer/gradient_norm"] = norm
        return Update(metrics)

    @property
    def world(self) -> int:
        return int(self.accelerator.num_processes)

    def _backward(self, loss: Tensor) -> None:
        # Not accelerator.backward: it divides by its own count of accumulation steps, and ours are
        # already averaged over the union.
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def _clip(self) -> Tensor:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            self.scaler.update()
        limit = self.config.grad_clip or float("inf")
        return nn.utils.clip_grad_norm_(self.parameters, limit)

    def _counts(self, batch: Batch) -> dict[str, float]:
        """What the losses of all parts together are means of, for gradients that DDP averages."""
        names = sorted(counts := Agent.loss_counts(batch))
        total = torch.stack([counts[name] for name in names]).to(torch.float64)
        if self.world > 1:
            dist.all_reduce(total)
        return dict(zip(names, (total / self.world).tolist(), strict=True))

    def _skip(self, update: int) -> None:
        self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        for name, value in self.agent.named_buffers():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise TrainingDiverged(
                    f"update {update}: the statistics {name} are no longer finite. Resume from a "
                    "checkpoint with a lower optimizer.learning_rate or reward multiplier"
                )
        if self.skipped >= self.config.max_bad_updates:
            raise TrainingDiverged(
                f"{self.skipped} updates had a NaN or infinite gradient, the last one {update}; "
                "lower optimizer.learning_rate, or look at the samples named above"
            )


def _cut(batch: Batch, parts: int) -> list[Batch]:
    """A batch in up to `parts` pieces of nearly equal size."""
    n = len(batch.mask)
    if parts == 1 or n == 1:
        return [batch]
    edges = [n * i // parts for i in range(parts + 1)]
    names = [f.name for f in dataclasses.fields(batch) if f.name != "obs"]

    def piece(a: int, b: int) -> Batch:
        rest: dict[str, Any] = {name: getattr(batch, name)[a:b] for name in names}
        return Batch(obs={key: value[a:b] for key, value in batch.obs.items()}, **rest)

    return [piece(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def _summed(total: Metrics, part: Metrics) -> Metrics:
    """Losses of parts add up (each is over the union's count); of the rest the last is shown."""
    added = {k: total[k] + v for k, v in part.items() if k in total and k.startswith("loss/")}
    return {**total, **part, **added}


def _seed_noise(seed: int, update: int, rank: int, part: int) -> None:
    mixed = int(np.random.SeedSequence((seed, update, rank, part)).generate_state(1, np.uint64)[0])
    torch.manual_seed(mixed)  # of every device
