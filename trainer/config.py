"""Every setting of a training run, as frozen dataclasses; the sentence under a field is its help.

A config is complete when constructed and refuses contradictions by field name. How files and flags
become one is options.py; ready-made ones are recipes.py. The agent's own settings are
amago_model/config/.
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from amago_model.config import AgentConfig
from trainer.errors import SettingError


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One component of a mixture."""

    select: str
    """SELECT id[, weight] FROM trajectories WHERE … ; in SQL, over the service's tables."""
    share: float = 1.0
    """Share of every batch that comes from it; the shares of all sources sum to 1."""
    share_end: float | None = None
    """Share after data.ramp_updates updates, to which it moves in a straight line from `share`;
    these sum to 1 as well. None: it stays as it is."""

    @property
    def last_share(self) -> float:
        """The share where the ramp ends, which is where it begins if there is none."""
        return self.share if self.share_end is None else self.share_end

    def __post_init__(self) -> None:
        for name, share in (("share", self.share), ("share_end", self.last_share)):
            if not 0 <= share <= 1:
                raise SettingError(f"sources.{name}: expected a share from 0 to 1, got {share:g}")
        if not (self.share or self.last_share):
            raise SettingError(
                "sources.share: nothing would ever be drawn from a source with share 0; take it "
                "out, or give it a share_end"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How windows are drawn from the snapshot, and where its columns are kept."""

    batch: int = 24
    """Windows in one update, over all processes together; the processes must divide it."""
    window: int = 128
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
    ramp_updates: int = 0
    """Updates over which the sources' shares move from `share` to `share_end`; 0: they stay."""
    refresh_every: int = 0
    """Updates between looks for new trajectories; 0 trains on one fixed snapshot."""
    include_eval: bool = False
    """Also learn from evaluation episodes. They are left out for a reason."""
    cache: Path = field(default_factory=lambda: default_cache())
    """Folder of this node's copy of the shards, as columns; shared by all runs and processes."""
    cache_gb: float = 50.0
    """Largest size of that folder in GB; what was used least recently goes first."""
    prefetch: int = 2
    """Batches prepared ahead by a thread."""
    wait_for_data: float = 0.0
    """Seconds to wait for the first trajectory where none is selected yet."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "batch", "window", "prefetch")
        _at_least(self, 0, "ramp_updates", "refresh_every", "wait_for_data")
        if self.cache_gb <= 0:
            raise SettingError(f"data.cache_gb: expected a positive number, got {self.cache_gb}")
        if self.mask_row != "arrival" and not (self.actor_mask or self.critic_mask):
            raise SettingError(
                f"data.mask_row: {self.mask_row!r}, but no info is a mask; name one in "
                "data.actor_mask or data.critic_mask, or leave it at 'arrival'"
            )
        if self.epochs and self.draw == "steps":
            raise SettingError(
                "data.epochs: an epoch counts trajectories or windows; set data.draw to one of "
                "these, or unset data.epochs"
            )
        if self.epochs and self.refresh_every:
            raise SettingError(
                "data.epochs: growing data has no epochs; set data.refresh_every to 0, or unset it"
            )
        if self.epochs and self.relabel and self.draw == "windows":
            raise SettingError(
                "data.epochs: an epoch over windows counts those of the recorded trajectories, and "
                "data.relabel may shorten these; set data.draw to trajectories, or unset epochs"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and, if wanted, a decay to nothing."""

    learning_rate: float = 1e-4
    """Step size after the warm-up."""
    warmup: int = 500
    """Updates over which the step size rises from nearly 0."""
    warmup_from_zero: bool = False
    """As published: it rises from 0 itself, so that the first update changes no weight."""
    decay: Literal["none", "cosine"] = "none"
    """cosine: the step size falls to 0 at the last update, which steadies the last policy."""
    weight_decay: float = 1e-3
    """Decoupled decay of the trained weights."""
    grad_clip: float = 1.0
    """Largest norm of the gradient over all trained weights; 0 does not clip."""
    accumulate: int = 1
    """Parts into which each process's share of a batch is cut, to fit memory; the update is the
    same, but for what dropout and image augmentation draw."""
    max_bad_updates: int = 10
    """Updates with a NaN or infinite gradient that are skipped before training stops."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "accumulate", "max_bad_updates")
        _at_least(self, 0, "warmup", "weight_decay", "grad_clip")
        if not self.learning_rate > 0:
            raise SettingError(
                f"optimizer.learning_rate: expected a positive number, got {self.learning_rate}"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """What happens once in a while. All in updates; 0 means never."""

    log_every: int = 50
    """Metrics."""
    publish_every: int = 1000
    """A policy for the service; the last one is published in any case."""
    checkpoint_every: int = 1000
    """A checkpoint at home; the end and SIGTERM write one in any case."""
    keep_checkpoints: int = 2
    """Checkpoints kept; older ones go."""
    drain_timeout: float = 30.0
    """Seconds to wait at the end for an absent service to take the last metrics and policy."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "log_every", "publish_every", "checkpoint_every", "drain_timeout")
        _at_least(self, 1, "keep_checkpoints")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run."""

    recipe: str = "default"
    """The recipe that this config began as."""
    run: str = ""
    """Name of the run: its address everywhere. Empty makes one up from recipe and time."""
    dataset: str = ""
    """Dataset to learn from, with `where`; or use `sources`, or `snapshot`."""
    where: str = ""
    """SQL condition over `trajectories`, for instance "return > 50"; {dataset} is its name."""
    sources: Annotated[tuple[SourceConfig, ...], tyro.conf.Suppress] = ()
    """A mixture instead of one dataset (config files and recipes only)."""
    snapshot: str = ""
    """Id of an existing snapshot instead: the very same trajectories."""
    seed: int = 0
    """Of weights, sample order and noise."""
    updates: int = 1000
    """Updates to make in all."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Take up the run's newest whole checkpoint: if there is one, never, or fail without one."""
    output: Path = Path("runs")
    """Folder for what this machine keeps of its runs: checkpoints, metrics, policies."""
    plugin: tuple[str, ...] = ()
    """Modules to import first: they register encoders, heads, filters, losses, agents and
    relabelers."""
    processes: int = 0
    """Processes to train with; 0 takes what the launcher gives, any other number is insisted on."""
    threads: int = 1
    """Threads of torch in each process; results are bit-equal only at the same number."""
    device: Literal["auto", "cpu"] = "auto"
    """auto takes GPUs where there are any."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision of the forward pass."""
    compile: Literal["off", "auto", "on", "graphs"] = "off"
    """Compile the update with torch.compile, which takes minutes once: on, or it says why not; auto
    does on a GPU where it can; graphs also replays CUDA graphs."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """The agent."""
    data: DataConfig = field(default_factory=DataConfig)
    """Windows and cache."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The step."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Once in a while."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "updates", "processes")
        _at_least(self, 1, "threads")
        if self.run and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", self.run):
            raise SettingError(
                "run: expected letters, digits, '.', '_' and '-', beginning with a letter or "
                f"digit, got {self.run!r}"
            )
        if self.processes > 1 and self.data.batch % self.processes:
            raise SettingError(
                f"data.batch: {self.data.batch} windows cannot be shared by {self.processes} "
                "processes; choose a batch that processes divides"
            )
        given = [name for name in ("dataset", "sources", "snapshot") if getattr(self, name)]
        if len(given) > 1:
            raise SettingError(f"{given[0]} and {given[1]} both say what to learn from; give one")
        if self.where and not self.dataset and given:
            raise SettingError("where: a condition belongs to `dataset`; put it into the select")
        self._check_unused()
        self._check_shares()
        if self.data.epochs and len(self.sources) > 1:
            raise SettingError("data.epochs: a mixture has no epochs; give one source, or unset it")

    def _check_unused(self) -> None:
        plain = DataConfig()
        names = ("refresh_every", "include_eval", "wait_for_data")
        set_so = [name for name in names if getattr(self.data, name) != getattr(plain, name)]
        if self.snapshot and set_so:
            raise SettingError(
                f"{', '.join(f'data.{name}' for name in set_so)}: set, but snapshot "
                f"{self.snapshot!r} is what it is, whatever arrives later; leave out the one or "
                "the other"
            )
        if self.data.critic_mask and not self.agent.losses.trains_critic:
            raise SettingError(
                f"data.critic_mask: {self.data.critic_mask!r}, but there is no critic with "
                "behavior_cloning and dpg_weight=0; leave it out, or name it in data.actor_mask"
            )

    def _check_shares(self) -> None:
        for name in ("share", "last_share"):
            total = sum(getattr(source, name) for source in self.sources)
            if self.sources and abs(total - 1.0) > 1e-6:
                after = "" if name == "share" else " at the end of the ramp (share_end)"
                raise SettingError(f"sources: the shares sum to {total:g}{after}; expected 1")
        ramp = self.data.ramp_updates
        if ramp and all(source.last_share == source.share for source in self.sources):
            raise SettingError(
                f"data.ramp_updates: {ramp} updates, but no source has a share_end that differs "
                "from its share; give some, or set data.ramp_updates to 0"
            )
        if not ramp and any(source.share_end is not None for source in self.sources):
            raise SettingError(
                "sources.share_end: set, but with data.ramp_updates=0 shares stay as they are; set "
                "data.ramp_updates to the updates that the way there takes, or leave it out"
            )

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


# ------------------------------------------------------------------------------ to and from JSON


def to_json(config: Any) -> Any:
    """A config as plain JSON types."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Path):
        return str(config)
    if isinstance(config, tuple | list):
        return [to_json(item) for item in config]
    return config


def flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"agent": {"losses": {"gamma": .9}}} to {"agent.losses.gamma": .9}."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def replace(config: Any, changes: dict[str, Any], where: str = "") -> Any:
    """A copy of a config with (nested) changes from JSON or TOML.

    Raises `SettingError` for an unknown setting, naming the nearest known one, or a wrong type.
    """
    hints = typing.get_type_hints(type(config))
    known = {f.name for f in dataclasses.fields(config)}
    values: dict[str, Any] = {}
    for raw, value in changes.items():
        key = raw.replace("-", "_")
        if key not in known:
            raise unknown_setting(where + raw)
        current = getattr(config, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise SettingError(f"{where}{raw}: expected a table of settings, got {value!r}")
            values[key] = replace(current, value, f"{where}{raw}.")
        else:
            values[key] = _coerce(hints[key], value, where + raw)
    return dataclasses.replace(config, **values)


def unknown_setting(path: str) -> SettingError:
    """The error for a key that nobody consumes: it names the nearest one that somebody does."""
    import difflib

    known = list(flatten(to_json(TrainConfig())))
    leaf = path.replace("-", "_").rsplit(".", 1)[-1]
    same = [k for k in known if k.rsplit(".", 1)[-1] == leaf]
    near = same or difflib.get_close_matches(path.replace("-", "_"), known, n=1, cutoff=0.0)
    return SettingError(f"unknown setting {path!r}; the nearest known one is {near[0]!r}")


def _coerce(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in args:
            return value
        raise SettingError(f"{where}: expected one of {', '.join(map(str, args))}, got {value!r}")
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _coerce(next(a for a in args if a is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise SettingError(f"{where}: expected a list, got {value!r}")
        return tuple(_coerce(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if hint is SourceConfig:
        known = typing.get_type_hints(SourceConfig)
        if not isinstance(value, dict) or "select" not in value:
            raise SettingError(f"{where}: expected a table with `select` and `share`")
        if extra := set(value) - set(known):
            raise SettingError(f"{where}: unknown {sorted(extra)}; expected {', '.join(known)}")
        given = {key: _coerce(known[key], item, f"{where}.{key}") for key, item in value.items()}
        return SourceConfig(**given)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise SettingError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value


def _at_least(config: Any, least: float, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= least:
            section = type(config).__name__.removesuffix("Config").lower()
            path = name if section == "train" else f"{section}.{name}"
            raise SettingError(f"{path}: expected at least {least}, got {getattr(config, name)}")
