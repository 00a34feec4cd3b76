"""Every setting of a training run, as frozen pydantic models; the text under a field is its help.

How recipes, files and flags become one is options.py and stepwell/_settings.py; ready-made configs
are recipes.py. The agent's own settings are amago_model/config/.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from amago_model.config import AgentConfig, Settings
from trainer.errors import SettingError


class RunSettings(Settings):
    """A group of settings of a run."""

    error: ClassVar[type[Exception]] = SettingError


class SourceConfig(RunSettings):
    """One component of a mixture."""

    select: str
    """SELECT id[, weight] FROM trajectories WHERE … ; in SQL, over the service's tables."""
    share: float = Field(1.0, ge=0, le=1)
    """Share of every batch that comes from it; the shares of all sources sum to 1."""
    share_end: float | None = Field(None, ge=0, le=1)
    """Share after data.ramp_updates updates, to which it moves in a straight line from `share`;
    these sum to 1 as well. None: it stays as it is."""

    @property
    def last_share(self) -> float:
        """The share where the ramp ends, which is where it begins if there is none."""
        return self.share if self.share_end is None else self.share_end

    @model_validator(mode="after")
    def _ever_drawn(self) -> Self:
        if not (self.share or self.last_share):
            raise ValueError(
                "share: nothing would ever be drawn from a source with share 0; take it out, or "
                "give it a share_end"
            )
        return self


class DataConfig(RunSettings):
    """How windows are drawn from the snapshot, and where its columns are kept."""

    batch: int = Field(24, ge=1)
    """Windows in one update, over all processes together; the processes must divide it."""
    window: int = Field(128, ge=1)
    """Transitions in a window; it shows one more observation."""
    padding: Literal["none", "both", "left", "right", "center"] = "none"
    """Windows may hang over the trajectory's start (left), end (right), both or neither; center:
    the window's middle is uniform and it is then moved inside."""
    draw: Literal["trajectories", "steps", "windows"] = "trajectories"
    """What is uniform (times weight): the trajectory, the step (long ones come more often), or the
    window."""
    epochs: bool = False
    """Every trajectory (or, with draw=windows, every window) once before any comes again."""
    relabel: tuple[str, ...] = ()
    """Relabelers, applied in this order to every trajectory that is drawn, each NAME or
    NAME:FIELD=VALUE,FIELD=VALUE. There are hindsight, instructions, mazerunner, crafter;
    docs/relabeling.md has their fields."""
    actor_mask: str = ""
    """Info of the dataset, one number a row, that says whether the actor may learn from a step: it
    may where the number is above 0. Empty: from all steps."""
    critic_mask: str = ""
    """The same for critics."""
    mask_row: Literal["arrival", "departure"] = "arrival"
    """Where these infos speak of a step: beside the observation that came with it, as env.step
    gives them and collectors keep them; or beside the one it was taken at, as in most files."""
    ramp_updates: int = Field(0, ge=0)
    """Updates over which the sources' shares move from `share` to `share_end`; 0: they stay."""
    refresh_every: int = Field(0, ge=0)
    """Updates between looks for new trajectories; 0 trains on one fixed snapshot."""
    include_eval: bool = False
    """Also learn from evaluation episodes. They are left out for a reason."""
    cache: Path = Field(default_factory=lambda: default_cache())
    """Folder of this node's copy of the shards, as columns; shared by all runs and processes."""
    cache_gb: float = Field(50.0, gt=0)
    """Largest size of that folder in GB; what was used least recently goes first."""
    prefetch: int = Field(2, ge=1)
    """Batches prepared ahead by a thread."""
    wait_for_data: float = Field(0.0, ge=0)
    """Seconds to wait for the first trajectory where none is selected yet."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.mask_row != "arrival" and not (self.actor_mask or self.critic_mask):
            raise ValueError(
                f"mask_row: {self.mask_row!r}, but no info is a mask; name one in data.actor_mask "
                "or data.critic_mask, or leave it at 'arrival'"
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
        if self.epochs and self.relabel and self.draw == "windows":
            raise ValueError(
                "epochs: an epoch over windows counts those of the recorded trajectories, and "
                "data.relabel may shorten these; set data.draw to trajectories, or unset epochs"
            )
        return self


class OptimizerConfig(RunSettings):
    """AdamW with a linear warm-up and, if wanted, a decay to nothing."""

    learning_rate: float = Field(1e-4, gt=0)
    """Step size after the warm-up."""
    warmup: int = Field(500, ge=0)
    """Updates over which the step size rises from nearly 0."""
    decay: Literal["none", "cosine"] = "none"
    """cosine: the step size falls to 0 at the last update, which steadies the last policy."""
    weight_decay: float = Field(1e-3, ge=0)
    """Decoupled decay of the trained weights."""
    grad_clip: float = Field(1.0, ge=0)
    """Largest norm of the gradient over all trained weights; 0 does not clip."""
    accumulate: int = Field(1, ge=1)
    """Parts into which each process's share of a batch is cut, to fit memory; the update is the
    same, but for what dropout and image augmentation draw."""
    max_bad_updates: int = Field(10, ge=1)
    """Updates with a NaN or infinite gradient that are skipped before training stops."""


class ScheduleConfig(RunSettings):
    """What happens once in a while. All in updates; 0 means never."""

    log_every: int = Field(50, ge=0)
    """Metrics."""
    publish_every: int = Field(1000, ge=0)
    """A policy for the service; the last one is published in any case."""
    checkpoint_every: int = Field(1000, ge=0)
    """A checkpoint at home; the end and SIGTERM write one in any case."""
    keep_checkpoints: int = Field(2, ge=1)
    """Checkpoints kept; older ones go."""
    drain_timeout: float = Field(30.0, ge=0)
    """Seconds to wait at the end for an absent service to take the last metrics and policy."""


class TrainConfig(RunSettings):
    """A whole training run."""

    root: ClassVar[bool] = True

    recipe: str = "default"
    """The recipe that this config began as."""
    run: str = ""
    """Name of the run: its address everywhere. Empty makes one up from recipe and time."""
    dataset: str = ""
    """Dataset to learn from, with `where`; or use `sources`, or `snapshot`."""
    where: str = ""
    """SQL condition over `trajectories`, for instance "return > 50"; {dataset} is its name."""
    sources: tuple[SourceConfig, ...] = ()
    """A mixture instead of one dataset (config files and recipes only)."""
    snapshot: str = ""
    """Id of an existing snapshot instead: the very same trajectories."""
    seed: int = 0
    """Of weights, sample order and noise."""
    updates: int = Field(1000, ge=0)
    """Updates to make in all."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Take up the run's newest whole checkpoint: if there is one, never, or fail without one."""
    output: Path = Path("runs")
    """Folder for what this machine keeps of its runs: checkpoints, metrics, policies."""
    plugin: tuple[str, ...] = ()
    """Modules to import first: they register encoders, heads, filters, losses, agents and
    relabelers."""
    processes: int = Field(0, ge=0)
    """Processes to train with; 0 takes what the launcher gives, any other number is insisted on."""
    threads: int = Field(1, ge=1)
    """Threads of torch in each process; results are bit-equal only at the same number."""
    device: Literal["auto", "cpu"] = "auto"
    """auto takes GPUs where there are any."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision of the forward pass."""
    compile: Literal["off", "auto", "on", "graphs"] = "off"
    """Compile the update with torch.compile, which takes minutes once: on, or it says why not; auto
    does on a GPU where it can; graphs also replays CUDA graphs."""
    agent: AgentConfig = Field(default_factory=AgentConfig)
    """The agent."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Windows and cache."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The step."""
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """Once in a while."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in ("dataset", "sources", "snapshot") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[0]}: it and {given[1]} both say what to learn from; give one")
        if self.where and not self.dataset and given:
            raise ValueError("where: a condition belongs to `dataset`; put it into the select")
        for name in ("refresh_every", "include_eval", "wait_for_data"):
            if self.snapshot and getattr(self.data, name):
                raise ValueError(
                    f"data.{name}: set, but snapshot {self.snapshot!r} is what it is, whatever "
                    "arrives later; leave out the one or the other"
                )
        if self.run and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", self.run):
            raise ValueError(
                "run: expected letters, digits, '.', '_' and '-', beginning with a letter or "
                f"digit, got {self.run!r}"
            )
        if self.processes > 1 and self.data.batch % self.processes:
            raise ValueError(
                f"data.batch: {self.data.batch} windows cannot be shared by {self.processes} "
                "processes; choose a batch that processes divides"
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
                f"data.ramp_updates: {ramp} updates, but no source has a share_end that differs "
                "from its share; give some, or set data.ramp_updates to 0"
            )
        if not ramp and any(source.share_end is not None for source in self.sources):
            raise ValueError(
                "sources: share_end is set, but with data.ramp_updates=0 shares stay as they are; "
                "set data.ramp_updates to the updates that the way there takes, or leave it out"
            )
        return self

    def require_data(self) -> None:
        """Raises `SettingError` unless the config says what to learn from."""
        if not (self.dataset or self.sources or self.snapshot):
            raise SettingError(
                "nothing to learn from: give --dataset NAME (stepwell datasets lists them)"
            )


def default_cache() -> Path:
    """Where columns go unless told: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stepwell"
