"""All settings of a training run, as frozen pydantic models; a field's docstring is its help text.

options.py and stepwell/_settings.py build a config from recipes, files and flags; recipes.py has
the recipes. The settings of the agent are in amago_model/config/.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from amago_model.config import AgentConfig, Settings
from stepwell._wording import pluralize
from trainer.errors import SettingError


class RunSettings(Settings):
    """Base class of the settings of a run."""

    error: ClassVar[type[Exception]] = SettingError


class SourceConfig(RunSettings):
    """One component of a mixture."""

    select: str
    """SQL query over the service's tables: SELECT id[, weight] FROM trajectories WHERE …"""
    share: float = Field(1.0, ge=0, le=1)
    """Fraction of each batch from this source; the shares of all sources sum to 1."""
    share_end: float | None = Field(None, ge=0, le=1)
    """Share after data.ramp_updates updates; it changes linearly from `share`. The final shares of
    all sources sum to 1. None: the share is constant."""

    @property
    def last_share(self) -> float:
        """The share at the end of the ramp; `share` without a ramp."""
        return self.share if self.share_end is None else self.share_end

    @model_validator(mode="after")
    def _ever_drawn(self) -> Self:
        if not (self.share or self.last_share):
            raise ValueError(
                "share: a source with share 0 is never sampled; remove it, or give it a share_end"
            )
        return self


class RatioConfig(RunSettings):
    """How fast to learn from data that is being collected."""

    samples_per_insert: float = Field(1.0, ge=1e-9, le=1e9)
    """Windows drawn per collected step, as Reverb's SampleToInsertRatio."""
    updates_per_step: float | None = Field(None, ge=1e-9, le=1e6)
    """Instead of samples_per_insert: updates per collected step; 0.25 makes one update for every
    four steps."""
    min_updates_per_step: float | None = Field(None, ge=1e-9, le=1e6)
    """Collectors wait only below this many updates per collected step; none: below
    updates_per_step. Between the two nobody waits: the slower side decides the ratio."""
    buffer: float | None = Field(None, gt=0, le=1e15)
    """Windows by which the trainer or the collectors may be ahead; at least samples_per_insert, 1
    and data.batch. Default: those of 1,000 steps or two batches, whichever is more."""
    min_size: int = Field(1000, ge=1)
    """Steps in the dataset before the first update."""

    @model_validator(mode="after")
    def _one_ratio(self) -> Self:
        if self.updates_per_step is not None and self.samples_per_insert != 1.0:
            raise ValueError("updates_per_step: set this or samples_per_insert, not both")
        low = self.min_updates_per_step
        if low is not None and (self.updates_per_step is None or low > self.updates_per_step):
            raise ValueError(
                "min_updates_per_step: expected updates_per_step, and at most that, got "
                f"{low:g} with updates_per_step {self.updates_per_step}"
            )
        return self

    def per_insert(self, batch: int) -> float:
        """Windows per step, with batches of `batch` windows."""
        by_updates = self.updates_per_step
        return self.samples_per_insert if by_updates is None else by_updates * batch


class DataConfig(RunSettings):
    """Sampling of windows from the snapshot, and the cache of its columns."""

    batch: int = Field(24, ge=1)
    """Windows per update, over all processes; must be divisible by the number of processes."""
    window: int = Field(128, ge=1)
    """Transitions per window; a window has one more observation."""
    padding: Literal["none", "both", "left", "right", "center"] = "none"
    """Sides on which a window may extend beyond its trajectory, with padding: the start (left), the
    end (right), both or none. center: sample the middle of the window uniformly, then move the
    window inside the trajectory."""
    draw: Literal["trajectories", "steps", "windows"] = "trajectories"
    """Unit of uniform (times weight) sampling: trajectories, steps (long trajectories are sampled
    more often), or windows."""
    epochs: bool = False
    """Sample without replacement: each trajectory (with draw=windows: each window) once per
    epoch."""
    best_share: float = Field(0.0, ge=0, lt=1)
    """Share of each batch from the trajectories with the highest returns; the rest is from all
    trajectories. 0: no preference. In mixed data this finds good behaviour sooner, and keeps the
    rest for the critics (after Yue et al. 2022)."""
    best_fraction: float = Field(0.1, gt=0, le=1)
    """Fraction of the trajectories that best_share prefers."""
    relabel: tuple[str, ...] = ()
    """Relabelers, applied in this order to each sampled trajectory, as NAME or
    NAME:FIELD=VALUE,FIELD=VALUE. Built-in relabelers: hindsight, instructions, mazerunner, crafter;
    docs/reference/relabeling.md lists their fields."""
    actor_mask: str = ""
    """Name of a scalar info of the dataset: the actor losses include a step if its value is above
    0. Empty: all steps."""
    critic_mask: str = ""
    """Name of a scalar info of the dataset: the critic loss includes a step if its value is above
    0. Empty: all steps."""
    mask_row: Literal["arrival", "departure"] = "arrival"
    """Row that has the mask of a step: arrival: the observation after the step, as env.step returns
    infos and collectors record them; departure: the observation before it, as in most files."""
    ramp_updates: int = Field(0, ge=0)
    """Updates over which the sources' shares change from `share` to `share_end`; 0: constant."""
    refresh_every: int = Field(0, ge=0)
    """Updates between checks for new trajectories; 0: train on one fixed snapshot."""
    ratio: RatioConfig | None = None
    """Couple updates to the collection of data: the faster side waits for the other. none: do
    not."""
    include_eval: bool = False
    """Also train on evaluation episodes, which are excluded by default."""
    validation: float = Field(0.0, ge=0, le=0.5)
    """Share of trajectories that are held back from training, chosen by a hash of their ids; their
    losses are the metrics validation/…. Of fewer than 20 trajectories nothing is held back, of more
    at least one."""
    cache: Path = Field(default_factory=lambda: default_cache())
    """Folder for this node's copy of the shards, as columns; shared by all runs and processes."""
    cache_gb: float = Field(50.0, gt=0)
    """Maximum size of the cache in GB; the least recently used files are deleted first."""
    prefetch: int = Field(2, ge=1)
    """Number of batches that a thread prepares in advance."""
    wait_for_data: float = Field(0.0, ge=0)
    """Seconds to wait for the service, the dataset and its first trajectory. A new run publishes
    its untrained policy (version 0) first, so that collectors that wait for a policy can begin;
    with `derive`, which needs data, after the first trajectories."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.mask_row != "arrival" and not (self.actor_mask or self.critic_mask):
            raise ValueError(
                f"mask_row: {self.mask_row!r} has no effect without a mask; set data.actor_mask or "
                "data.critic_mask, or leave mask_row at 'arrival'"
            )
        if self.best_fraction != 0.1 and not self.best_share:
            raise ValueError("best_fraction: has no effect without data.best_share; set both")
        if self.epochs and self.best_share:
            raise ValueError(
                "epochs: a mixture has no epochs; unset data.best_share or data.epochs"
            )
        if self.epochs and self.draw == "steps":
            raise ValueError(
                "epochs: an epoch counts trajectories or windows; set data.draw to one of these, "
                "or unset data.epochs"
            )
        if self.epochs and self.refresh_every:
            raise ValueError(
                "epochs: growing data has no epochs; set data.refresh_every to 0, or unset it"
            )
        if self.ratio is not None:
            if not self.refresh_every:
                raise ValueError(
                    "ratio: needs growing data; set data.refresh_every, for instance to 20"
                )
            least = max(1.0, self.ratio.per_insert(self.batch), float(self.batch))
            if self.ratio.buffer is not None and self.ratio.buffer < least:
                raise ValueError(
                    f"ratio.buffer: expected at least max(1, samples_per_insert, data.batch) = "
                    f"{least:g}, got {self.ratio.buffer:g}; with less, trainer and collectors "
                    "would wait for each other"
                )
        if self.epochs and self.relabel and self.draw == "windows":
            raise ValueError(
                "epochs: an epoch over windows counts those of the recorded trajectories, and "
                "data.relabel may shorten these; set data.draw to trajectories, or unset epochs"
            )
        return self


class OptimizerConfig(RunSettings):
    """AdamW with a linear warm-up and an optional decay to 0."""

    learning_rate: float = Field(1e-4, gt=0)
    """Learning rate after the warm-up."""
    warmup: int = Field(500, ge=0)
    """Updates over which the learning rate rises linearly from near 0."""
    decay: Literal["none", "cosine"] = "none"
    """cosine: the learning rate falls to 0 at the last update, which stabilises the last policy."""
    weight_decay: float = Field(1e-3, ge=0)
    """Decoupled weight decay."""
    grad_clip: float = Field(1.0, ge=0)
    """Maximum norm of the gradient over all trained weights; 0: no clipping."""
    accumulate: int = Field(1, ge=1)
    """Number of micro-batches per process and update, to save memory. The update is the same,
    except for the random numbers of dropout and image augmentation."""
    max_bad_updates: int = Field(10, ge=1)
    """Number of updates skipped because of a NaN or infinite gradient before training stops."""


class ScheduleConfig(RunSettings):
    """Periodic work. Intervals are in updates; 0 means never."""

    log_every: int = Field(50, ge=0)
    """Interval of metrics."""
    validate_every: int = Field(0, ge=0)
    """Interval of the losses of held-back trajectories (data.validation), a multiple of log_every.
    0: the smallest multiple of at least 25 updates, which costs a few percent of the time."""
    publish_every: int = Field(1000, ge=0)
    """Interval of published policies; the last policy is always published."""
    checkpoint_every: int = Field(1000, ge=0)
    """Interval of local checkpoints; the end of training and SIGTERM always write one."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of checkpoints to keep; older ones are deleted."""
    drain_timeout: float = Field(30.0, ge=0)
    """Seconds to wait at the end while the service accepts none of the last metrics and policy."""

    @model_validator(mode="after")
    def _validation_is_logged(self) -> Self:
        if self.validate_every and (not self.log_every or self.validate_every % self.log_every):
            raise ValueError(
                f"validate_every: expected a multiple of schedule.log_every={self.log_every}, got "
                f"{self.validate_every}"
            )
        return self


class TrainConfig(RunSettings):
    """All settings of a training run."""

    root: ClassVar[bool] = True

    recipe: str = "default"
    """The recipe that this config is based on."""
    run: str = ""
    """Unique name of the run. Empty: the name is made from the recipe and the time."""
    tags: tuple[str, ...] = ()
    """Tags of the run at the service."""
    dataset: str = ""
    """Dataset to train on, or a version of it (NAME@VERSION), filtered by `where`; or use `sources`
    or `snapshot`."""
    where: str = ""
    """SQL condition over `trajectories`, such as "return > 50"; {dataset} is the dataset's name."""
    sources: tuple[SourceConfig, ...] = ()
    """A mixture of sources instead of one dataset: in a file as tables [[sources]], as words in
    JSON."""
    snapshot: str = ""
    """Id of an existing snapshot to train on, instead of a dataset."""
    derive: Literal["off", "shape", "all", "online"] = "off"
    """Derive what no file or flag sets from the dataset before training. shape: sampling, memory,
    network, length. all: also discount, reward scale, bounds and preference of good trajectories.
    online: network, sampling and returns of several steps, from the first episodes of a run.
    stepwell recommend DATASET prints them with reasons."""
    memory: Literal["auto", "none", "transformer", "gru"] = "auto"
    """The agent's memory, for `derive`: auto: none, but if the dataset has the tag
    partially-observable, a GRU or, with sparse rewards, a Transformer. Data alone cannot tell."""
    seed: int = 0
    """Seed of the weights, the sample order and the noise."""
    updates: int = Field(1000, ge=0)
    """Total number of updates."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Resume from the newest complete checkpoint of the run: auto: if there is one; never; must:
    fail if there is none."""
    output: Path = Path("runs")
    """Folder for the local files of runs: checkpoints, metrics, policies."""
    plugin: tuple[str, ...] = ()
    """Modules to import first: they register encoders, heads, filters, losses, agents and
    relabelers."""
    processes: int = Field(0, ge=0)
    """Number of processes; 0: as many as the launcher started. It is an error if another number
    runs."""
    threads: int = Field(1, ge=1)
    """torch threads per process; results are bit-equal only with the same number."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto: use GPUs if available; cpu; cuda, cuda:1: this GPU, for one process."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision of the forward pass."""
    compile: Literal["off", "auto", "on", "graphs"] = "auto"
    """How updates run: auto: on a GPU as CUDA graphs, recorded once and replayed, where updates can
    be recorded, else as they are; graphs: fail where they cannot; off: as they are; on: compiled by
    torch.compile, which takes minutes."""
    agent: AgentConfig = Field(default_factory=AgentConfig)
    """The agent."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Sampling of windows, and the cache."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimiser and learning rate."""
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """Intervals of periodic work."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in ("dataset", "sources", "snapshot") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[0]}: {given[0]} and {given[1]} are both set; set only one")
        if self.memory != "auto" and self.derive == "off":
            raise ValueError(
                f"memory: {self.memory!r} has no effect without derive; set "
                "agent.trajectory_encoder.kind, or train with the recipe offline"
            )
        if self.memory != "auto" and self.agent.return_conditioning is not None:
            raise ValueError(
                f"memory: {self.memory!r} has no effect with agent.return_conditioning, whose "
                "recipe chooses the memory; set agent.trajectory_encoder.kind"
            )
        if self.data.best_share and not self.dataset:
            raise ValueError(
                "data.best_share: it prefers trajectories of `dataset`; with sources or a snapshot "
                "leave it out, and give a source of its own to the best trajectories"
            )
        if self.data.ratio is not None and given and not self.dataset:
            raise ValueError(
                "data.ratio: counts the steps of `dataset`; set it, or leave data.ratio out"
            )
        if self.where and not self.dataset and given:
            raise ValueError("where: only applies to `dataset`; put the condition in the select")
        for name in ("refresh_every", "include_eval", "wait_for_data"):
            if self.snapshot and getattr(self.data, name):
                raise ValueError(
                    f"data.{name}: has no effect with snapshot={self.snapshot!r}, which never "
                    "changes; leave out one of them"
                )
        for name in ("refresh_every", "wait_for_data", "ratio"):
            if "@" in self.dataset and getattr(self.data, name):
                raise ValueError(
                    f"data.{name}: has no effect with dataset={self.dataset!r}, a version, which "
                    "never changes; leave it out, or train on the dataset itself"
                )
        if self.run and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", self.run):
            raise ValueError(
                "run: expected letters, digits, '.', '_' and '-', beginning with a letter or "
                f"digit, got {self.run!r}"
            )
        if self.processes > 1 and self.data.batch % self.processes:
            windows = pluralize(self.data.batch, "window is", "windows are")
            raise ValueError(
                f"data.batch: {windows} not divisible by {self.processes} processes; choose a "
                "multiple"
            )
        if self.schedule.validate_every and not self.data.validation:
            raise ValueError(
                "schedule.validate_every: has no effect with data.validation=0; set "
                "data.validation to a share such as 0.05"
            )
        if self.data.critic_mask and self.agent.critic is None:
            raise ValueError(
                f"data.critic_mask: {self.data.critic_mask!r}, but there is no critic; leave it "
                "out, or name it in data.actor_mask"
            )
        return self

    @model_validator(mode="after")
    def _shares_of_a_mixture(self) -> Self:
        if self.data.epochs and len(self.sources) > 1:
            raise ValueError("data.epochs: a mixture has no epochs; give one source, or unset it")
        for name in ("share", "last_share"):
            total = sum(getattr(source, name) for source in self.sources)
            if self.sources and abs(total - 1.0) > 1e-6:
                after = "" if name == "share" else " at the end of the ramp (share_end)"
                raise ValueError(f"sources: the shares sum to {total:g}{after}; expected 1")
        ramp = self.data.ramp_updates
        if ramp and all(source.last_share == source.share for source in self.sources):
            raise ValueError(
                f"data.ramp_updates: {pluralize(ramp, 'update')}, but no source has a share_end "
                "that differs from its share; give some, or set data.ramp_updates to 0"
            )
        if not ramp and any(source.share_end is not None for source in self.sources):
            raise ValueError(
                "sources: share_end has no effect with data.ramp_updates=0; set data.ramp_updates "
                "to the number of updates of the ramp, or leave share_end out"
            )
        return self

    def require_data(self) -> None:
        """Raise `SettingError` unless a dataset, sources or a snapshot is set."""
        if not (self.dataset or self.sources or self.snapshot):
            raise SettingError(
                "nothing to learn from: give --dataset NAME (stepwell datasets lists them)"
            )

    def require_target_return(self) -> None:
        """Raise `SettingError` if a return-conditioned policy has no return to aim at."""
        conditioning = self.agent.return_conditioning
        if conditioning is not None and conditioning.target_return is None:
            raise SettingError(
                "agent.return_conditioning.target_return: set the return that the policy aims at, "
                "and agent.return_conditioning.scale; they are derived only from the recorded "
                "rewards of one dataset, not from a mixture, a snapshot, with data.relabel or with "
                "derive=off"
            )


def default_cache() -> Path:
    """The default of data.cache: a folder in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stepwell"
