"""One update: forward, backward, clip, step, target networks.

An update does not depend on how its batch is split over processes or micro-batches: statistics are
updated with the whole batch first, each part's losses are divided by the counts of the whole, and
each part gets its share of the whole's noise (only dropout and image augmentation are drawn per
part). Noise is a function of (seed, update), so a resumed run draws the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn

from amago_model.agent import Agent
from amago_model.config import CustomConfig
from amago_model.data.batch import Batch
from amago_model.dormant_units import dormant_units
from amago_model.running_statistics import freeze_statistics
from amago_model.runtime.compiling import bucket, compiled
from amago_model.runtime.cuda_graphs import CudaRecorder, GraphedUpdates, Recorder
from amago_model.runtime.devices import why_no_device
from amago_model.runtime.host_memory import keep_freed_memory
from amago_model.runtime.micro_batches import update_statistics
from amago_model.runtime.optimizer import (
    clip_gradients,
    forget_gradients,
    gradient_norm,
    step_adamw,
)
from stepwell._wording import pluralize
from trainer.config import OptimizerConfig, TrainConfig
from trainer.errors import SettingError, TrainerError

Metrics = dict[str, Tensor]
GRADIENT_NORM = "optimizer/gradient_norm"
_FINITE = "optimizer/finite"
DORMANT_TRANSITIONS = 512
"""Approximate number of transitions over which a dormant unit is always zero."""


class WorldError(TrainerError):
    """The number of processes differs from the setting `processes`."""


class TrainingDiverged(TrainerError):
    """Too many gradients were NaN or infinite, or the agent's statistics are."""


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator of this process.

    Raises:
        WorldError: the number of processes differs from `config.processes`.
        SettingError: there is no such GPU.
    """
    if config.device.startswith("cuda"):
        _use_gpu(config)
    cpu = config.device == "cpu" or not torch.cuda.is_available()
    if cpu:
        keep_freed_memory()
    # The agent's statistics are computed over the batches of all ranks, so they are already equal:
    # broadcasting them in each forward pass would take time and hide errors.
    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        # A custom agent may leave weights out of its loss.
        find_unused_parameters=config.agent.custom != CustomConfig(),
    )
    accelerator = Accelerator(cpu=cpu, mixed_precision=config.precision, kwargs_handlers=[ddp])
    world = accelerator.num_processes
    if config.processes and world != config.processes:
        raise WorldError(
            f"expected {pluralize(config.processes, 'process', 'processes')} (--processes), but "
            f"{pluralize(world, 'process runs', 'processes run')}; start them "
            f"with: stepwell train … --processes {config.processes} (some forms of `accelerate "
            "launch` on CPU silently start one)"
        )
    return accelerator


def _use_gpu(config: TrainConfig) -> None:
    """Let accelerate use one GPU. Raises `SettingError`."""
    if config.processes > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingError(
            f"device: {config.device} is one GPU, and several processes have one each; choose them"
            " with CUDA_VISIBLE_DEVICES"
        )
    if why := why_no_device(config.device):
        raise SettingError(f"device: {why}")
    os.environ["ACCELERATE_TORCH_DEVICE"] = config.device


class UpdateResult:
    """The result of one update. Tensors stay on the device: reading one is a synchronisation."""

    def __init__(self, metrics: Metrics, finite: Tensor) -> None:
        self.metrics = metrics
        self._finite, self._arrived = finite, None
        if finite.device.type == "cuda":
            self._finite = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._finite.copy_(finite, non_blocking=True)
            self._arrived = torch.cuda.Event(blocking=True)
            self._arrived.record()

    @property
    def skipped(self) -> bool:
        """Whether its gradient was not finite and it changed no weight. Waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return not bool(self._finite)


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
        compiling: str = "off",
        window: int | None = None,
        echo: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`compiling`: TrainConfig.compile. `window`: transitions of the longest window."""
        self.agent, self.config, self.seed, self.updates = agent, config, seed, updates
        self.accelerator, self._window = accelerator, window
        agent.train()
        if compiling == "on":
            agent.forward = compiled(agent, accelerator.device, longest=window)  # type: ignore[method-assign]
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
        self._parts = _parameters_by_part(agent)
        self.skipped = 0
        self.defers_check = accelerator.device.type == "cuda"
        """On a GPU an update is checked after the next one is queued: the CPU runs ahead."""
        self._rate: Tensor | None = None
        self.graphs: GraphedUpdates | None = None
        """Replays updates as CUDA graphs, with the learning rate as a tensor."""
        if self._wants_graphs(compiling):
            recorder = CudaRecorder(accelerator.device)
            self.use_graphs(recorder, required=compiling == "graphs", echo=echo)

    def use_graphs(
        self, recorder: Recorder, *, required: bool, echo: Callable[[str], None] = lambda _: None
    ) -> None:
        """From now on, replay updates that the recorder has recorded."""
        self.agent.policy.fixed_shapes = True
        self._rate = torch.zeros((), device=self.accelerator.device)
        self.graphs = GraphedUpdates(self._recorded, recorder, required=required, say=echo)

    def _wants_graphs(self, compiling: str) -> bool:
        """Whether a setting replays updates as CUDA graphs. Raises `SettingError` for "graphs"
        where that is not possible."""
        if compiling not in ("auto", "graphs"):
            return False
        why = None
        if self.accelerator.device.type != "cuda":
            why = f"the device is {self.accelerator.device}"
        elif self.world > 1:
            why = f"{self.world} processes exchange gradients"
        elif self.config.accumulate > 1:
            why = "optimizer.accumulate splits batches"
        elif self.scaler is not None:
            why = "the scale of fp16 follows the gradients"
        if why is None and compiling == "auto":
            with self.accelerator.autocast():
                return not self.agent.policy.skips_padding(self.accelerator.device)
        if why is not None and compiling == "graphs":
            raise SettingError(f"compile: CUDA graphs cannot be used: {why}. Set compile to 'auto'")
        return why is None

    def learning_rate(self, update: int) -> float:
        """Return the rate at an update: a linear warm-up times a constant or cosine decay to 0."""
        config = self.config
        rate = config.learning_rate * min(1.0, (update + 1) / max(config.warmup, 1))
        if config.decay == "cosine":
            rate *= 0.5 * (1 + math.cos(math.pi * min(1.0, update / max(self.updates, 1))))
        return rate

    def update(self, update: int, batch: Batch, *, detailed: bool = False) -> UpdateResult:
        """Learn from this process's share of the batch of an update.

        Skips the step where the gradient is not finite, on every process alike; see `check_finite`.
        """
        rate = self.learning_rate(update)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._seed_noise(self.seed, update, 0, 0)
        if self.graphs is None:
            metrics = self._compute_gradients(update, batch, detailed) | self._step(detailed)
        else:
            assert self._rate is not None
            self._rate.fill_(rate)
            batch = batch.padded(bucket(batch.mask.shape[1], self._window))
            metrics = self.graphs(self._with_noise(batch), detailed)
        finite = metrics.pop(_FINITE)
        if detailed:
            with self._evaluating():
                few = max(1, DORMANT_TRANSITIONS // batch.mask.shape[1])
                metrics |= dormant_units(self.agent, batch.windows(0, few))
        return UpdateResult(metrics, finite)

    def _compute_gradients(self, update: int, batch: Batch, detailed: bool) -> Metrics:
        """Forward and backward passes over all micro-batches of this process's batch."""
        parts, counts = [batch], None
        if self.world > 1 or self.config.accumulate > 1:
            counts = self._counts(batch)
            batch = self._with_noise(batch)
            parts = _split(batch, self.config.accumulate)
        if len(parts) > 1:
            with self.accelerator.autocast():
                update_statistics(self.agent, batch)
        seen: list[Metrics] = []
        with freeze_statistics(self.agent) if len(parts) > 1 else contextlib.nullcontext():
            for index, part in enumerate(parts):
                last = index == len(parts) - 1
                if part.noise is not None:
                    rank = self.accelerator.process_index
                    self._seed_noise(self.seed, update, rank, index + 1)
                with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                    loss, shown = self.model(part, detailed=detailed, counts=counts)
                    self._backward(loss)
                seen.append(shown)
        return _merge_parts(seen)

    def _recorded(self, batch: Batch, detailed: bool) -> Metrics:
        """The whole update of one batch with noise, as a CUDA graph repeats it."""
        metrics: Metrics
        loss, metrics = self.model(batch, detailed=detailed)
        self._backward(loss)
        return metrics | self._step(detailed)

    def _step(self, detailed: bool) -> Metrics:
        """Clip the gradient, step and update the targets, unless the gradient is not finite."""
        norm, norms = self._clip(detailed)
        finite = torch.isfinite(norm)
        skip = (~finite).to(torch.float32) if self.defers_check else None
        if skip is not None or bool(finite):
            early = self.agent.config.losses.targets_before_step  # as published; see presets.py
            if early:
                self.agent.update_targets(skip)
            self.agent.update_lagged_critics(skip)
            step_adamw(self.optimizer, skip, self._rate)
            if not early:
                self.agent.update_targets(skip)
            self.agent.update_average(skip)
        forget_gradients(self.parameters)
        return norms | {GRADIENT_NORM: norm, _FINITE: finite}

    def validate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The losses of held-back windows by name, as means over all batches.

        Changes no weight, no statistics and no state of the random number generators. The noise is
        the same in each call.
        """
        total: dict[str, float] = {}
        counts: dict[str, float] = {}
        for batch in batches:
            for name, count in self.agent.loss_counts(batch).items():
                counts[name] = counts.get(name, 0.0) + float(count)
        with self._evaluating():
            for index, batch in enumerate(batches):
                self._seed_noise(0, index, 0, 0)
                # Not the compiled one: evaluation mode would compile it again.
                forward = type(self.agent).forward
                _, shown = forward(self.agent, batch, detailed=False, counts=counts)
                for name, value in shown.items():
                    total[name] = total.get(name, 0.0) + float(value)
        return total

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; statistics and random numbers stay as they are."""
        device = self.accelerator.device
        devices = [device] if device.type == "cuda" else []
        self.agent.eval()
        try:
            with (
                torch.no_grad(),
                freeze_statistics(self.agent),
                torch.random.fork_rng(devices),
                self.accelerator.autocast(),
            ):
                yield
        finally:
            self.agent.train()

    def check_finite(
        self, update: int, result: UpdateResult
    ) -> tuple[bool, TrainingDiverged | None]:
        """Whether an update was skipped, and the error that ends training if it was one too many.

        Called once for each update, in order, by every process.
        """
        if not result.skipped:
            return False, None
        for name in [name for name in result.metrics if name.startswith(GRADIENT_NORM)]:
            del result.metrics[name]  # no number that can be shown
        self.skipped += 1
        for name, value in self.agent.named_buffers():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                return True, TrainingDiverged(
                    f"update {update}: the statistics {name} are no longer finite. Resume from a "
                    "checkpoint with a lower optimizer.learning_rate or reward multiplier"
                )
        if self.skipped >= self.config.max_bad_updates:
            return True, TrainingDiverged(
                f"{pluralize(self.skipped, 'update')} had a NaN or infinite gradient, the last one "
                f"{update}; lower optimizer.learning_rate, or look at the samples named above"
            )
        return True, None

    @property
    def world(self) -> int:
        return int(self.accelerator.num_processes)

    def _backward(self, loss: Tensor) -> None:
        # Not accelerator.backward, which divides by its count of accumulation steps: this loss is
        # already averaged over the whole batch.
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def _clip(self, detailed: bool) -> tuple[Tensor, Metrics]:
        """Clip the gradient. Returns its norm before, and if `detailed` that of each part."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            self.scaler.update()
        norms: Metrics = {}
        if detailed:
            parts = self._parts.items()
            norms = {f"{GRADIENT_NORM}_{name}": gradient_norm(part) for name, part in parts}
        return clip_gradients(self.parameters, self.config.grad_clip or math.inf), norms

    def _with_noise(self, batch: Batch) -> Batch:
        """This process's part of a batch, with its part of the noise of the whole batch."""
        n, t = batch.mask.shape
        first = self.accelerator.process_index * n
        noise = self.agent.draw_noise(self.world * n, t)[first : first + n]
        return dataclasses.replace(batch, noise=noise)

    def _seed_noise(self, seed: int, update: int, rank: int, part: int) -> None:
        words = np.random.SeedSequence((seed, update, rank, part)).generate_state(1, np.uint64)
        if self.accelerator.device.type == "cpu":
            # torch.manual_seed also queues the seeds of GPUs, with a stack trace: 0.24 instead of
            # 0.001 ms, where a small update takes 9.
            torch.default_generator.manual_seed(int(words[0]))
        else:
            torch.manual_seed(int(words[0]))  # seeds all devices

    def _counts(self, batch: Batch) -> dict[str, float]:
        """The counts that the losses of all parts are divided by; DDP averages the gradients."""
        names = sorted(counts := self.agent.loss_counts(batch))
        total = torch.stack([counts[name] for name in names]).to(torch.float64)
        if self.world > 1:
            dist.all_reduce(total)
        return dict(zip(names, (total / self.world).tolist(), strict=True))


def _parameters_by_part(agent: Agent) -> dict[str, list[nn.Parameter]]:
    """The trainable parameters of the actor, the critics and the encoders; empty parts left out."""
    parts: dict[str, list[nn.Parameter]] = {"actor": [], "critic": [], "encoder": []}
    for name, parameter in agent.named_parameters():
        if parameter.requires_grad:
            beginnings = {"policy.actor.": "actor", "critics.online.": "critic"}
            part = next((p for start, p in beginnings.items() if name.startswith(start)), "encoder")
            parts[part].append(parameter)
    return {name: part for name, part in parts.items() if part}


def _split(batch: Batch, parts: int) -> list[Batch]:
    """A batch as up to `parts` micro-batches of nearly equal size."""
    n = len(batch.mask)
    if parts == 1 or n == 1:
        return [batch]
    edges = [n * i // parts for i in range(parts + 1)]
    return [batch.windows(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


# The count that a metric is a mean (or an extreme) over, by the beginning of its name.
_MEAN_OVER = {
    "value/advantage_mean": "count/bc",
    "value/": "count/critic",
    "policy/entropy": "count/transitions",
    "policy/": "count/bc",
}


def _merge_parts(parts: list[Metrics]) -> Metrics:
    """Metrics of the whole batch from those of its parts. Losses use the counts of the whole batch,
    so they are summed; unknown metrics have the value of the last part."""
    whole = dict(parts[-1])
    common = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    for name in common:
        each = torch.stack([part[name] for part in parts])
        if name.startswith(("loss/", "count/")):
            whole[name] = each.sum()
        elif (count := _counted_by(name)) in common:
            whole[name] = _mean_or_extreme(name, each, torch.stack([part[count] for part in parts]))
    return whole


def merge_ranks(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the whole batch from those of all ranks; unknown metrics are averaged. A rank's
    losses are those of its part times the number of ranks."""
    if len(ranks) == 1:
        return dict(ranks[0])
    parts = [{k: torch.tensor(v, dtype=torch.float64) for k, v in rank.items()} for rank in ranks]
    whole = _merge_parts(parts)
    for name in whole:
        if not name.startswith("count/") and _counted_by(name) not in whole:
            whole[name] = torch.stack([part[name] for part in parts]).mean()
    return {name: float(value) for name, value in whole.items()}


def _counted_by(name: str) -> str:
    found = (count for prefix, count in _MEAN_OVER.items() if name.startswith(prefix))
    return next(found, "")


def _mean_or_extreme(name: str, each: Tensor, n: Tensor) -> Tensor:
    """A mean or an extreme over parts of n transitions each; 0 without transitions."""
    if name.endswith("_min"):
        return torch.where(n.any(), torch.where(n > 0, each, torch.inf).amin(), 0.0)
    if name.endswith("_max"):
        return torch.where(n.any(), torch.where(n > 0, each, -torch.inf).amax(), 0.0)
    return (each * n).sum() / n.sum().clamp(min=1)
