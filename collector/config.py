"""Settings of `stepwell collect` and `stepwell evaluate`; a field's docstring is its help text.

stepwell/_settings.py builds a config from files and flags.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import Self

from amago_model.config.base import Settings
from collector.episode_recorder import MAX_STEPS
from collector.exploration import EpsilonConfig, NoExplorationConfig
from stepwell import _settings
from stepwell.errors import InvalidData, StepwellError
from stepwell.policies import split_reference

C = TypeVar("C", bound=Settings)
MOST_PROCESSES = 256
"""Environments of one collector that have a process each."""
Reference = Annotated[str, AfterValidator(lambda text: text.replace(":", "/", 1))]
"""RUN:VERSION, kept as RUN/VERSION, the id of a policy in data; that will do, too."""


class UsageError(StepwellError, ValueError):
    """The command line or a config file contains contradictory settings, named by the message."""

    exit_status = 2


class EnvironmentConfig(Settings):
    """Settings of the environment, the device and the service."""

    error: ClassVar[type[Exception]] = UsageError
    root: ClassVar[bool] = True

    env: str
    """Gymnasium id, e.g. Pendulum-v1 or my.module:Name-v0."""
    env_args: tuple[str, ...] = ()
    """Arguments of the environment, as KEY=VALUE with values in JSON: delay=8 symbols=4."""
    envs: int = Field(8, ge=1)
    """Number of parallel environments in this process."""
    vectorization: Literal["sync", "async", "native"] = "sync"
    """sync: one environment after the other; async: each in a process of its own, for slow ones;
    native: the environment's own batched implementation (gymnasium's vector_entry_point)."""
    plugin: tuple[str, ...] = ()
    """Modules to import first, so that they can register environments."""
    roles: tuple[str, ...] = ()
    """Roles of observations, as KEY=ROLE: action_mask=mask state=critic."""
    keep_float64: bool = False
    """Store float64 without conversion to float32 (new datasets only)."""
    device: str = "cpu"
    """Device of the policy: cpu, cuda, cuda:1."""
    threads: int = Field(1, ge=1)
    """Number of torch threads; 1 is fastest for small networks on one core."""
    nice: int = Field(0, ge=0, le=19)
    """Niceness of this process: with 5 a trainer on the same machine goes first; 19 uses only what
    others leave."""
    url: str | None = None
    """URL of the service; default: STEPWELL_URL, or http://127.0.0.1:8000."""
    token: str | None = None
    """Token of the service; default: STEPWELL_TOKEN."""

    @model_validator(mode="after")
    def _not_too_many_processes(self) -> Self:
        if self.vectorization == "async" and self.envs > MOST_PROCESSES:
            raise ValueError(f"envs: at most {MOST_PROCESSES} with async, got {self.envs}")
        return self


class CollectConfig(EnvironmentConfig):
    """Collect episodes of an environment with a published or random policy, and send them to a
    dataset.

    The outbox keeps episodes on disk until the service acknowledges them, so collecting continues
    while the service is stopped. Ctrl-C stops cleanly.

      stepwell collect --env Pendulum-v1 --dataset swing --random --episodes 100
      stepwell collect --env Pendulum-v1 --dataset swing --policy demo --wait-for-policy
      stepwell collect --env Hopper-v5 --dataset hops --policy demo:best --epsilon.kind greedy
    """

    dataset: str
    """Dataset for the episodes; if it does not exist, it is created from the environment's
    spaces."""
    policy: Reference = ""
    """Policy to act with: RUN (always its newest policy), RUN:ALIAS or RUN:VERSION."""
    random: bool = False
    """Sample actions uniformly from the action space instead of using a policy."""
    wait_for_policy: bool = False
    """Wait, without a time limit, until the run has published a policy."""
    warm_up_steps: int = Field(0, ge=0)
    """Steps of this collector, over all its sessions, with uniformly random actions before the
    policy acts; up to 20 times as many while all episodes have the same return."""
    episodes: int = Field(0, ge=0)
    """Stop after this many episodes; 0: no limit."""
    steps: int = Field(0, ge=0)
    """Stop after this many steps; 0: no limit. Unfinished episodes are truncated, tagged and
    kept."""
    sample: bool = True
    """Sample actions from the policy; --greedy (or --no-sample) takes its greedy actions."""
    epsilon: EpsilonConfig = Field(default_factory=NoExplorationConfig)
    """Exploration in addition to sampling from the policy."""
    partition: Literal["fifo", "protected"] = "fifo"
    """fifo: the oldest trajectories are evicted when the dataset is full; protected: the system
    never deletes them."""
    create: bool = True
    """Create the dataset if it does not exist."""
    infos: tuple[str, ...] = ()
    """Scalars of the environment's info to record as observations, for SQL or as loss masks. An
    existing dataset must have them in its spec."""
    capacity_trajectories: int = Field(0, ge=0)
    """Capacity in fifo trajectories of a dataset that this command creates; 0: unlimited."""
    capacity_steps: int = Field(0, ge=0)
    """Capacity in fifo steps of a dataset that this command creates; 0: unlimited."""
    run: str = ""
    """Name of this collect run; an existing run is resumed. Default: a new name."""
    seed: int | None = None
    """Seed of episodes and exploration; default: a new seed, recorded in the run. Collectors with
    the same seed on one machine collect different episodes, unless each has its own --outbox."""
    tags: tuple[str, ...] = ()
    """Tags of all trajectories."""
    out_of_bounds: Literal["keep", "refuse"] = "keep"
    """What to do with observations beyond the bounds of their Box. keep: store them, and say so
    once; refuse: break the episode off, as for NaN."""
    max_steps: int = Field(MAX_STEPS, ge=1)
    """Longer episodes are stored in pieces of this many steps."""
    outbox: Path | None = None
    """Folder in which episodes wait for the service; default: stepwell-outbox/DATASET/<first free
    number>, in the current folder or STEPWELL_OUTBOX. Episodes for the same dataset that an ended
    collector left in a neighbouring folder are sent, too."""
    outbox_bytes: int = Field(8 << 30, ge=1)
    """Maximum size of the outbox; collecting pauses when it is full."""
    poll_every: float = Field(5.0, gt=0)
    """Seconds between checks for a newer policy."""
    heartbeat_every: float = Field(5.0, gt=0)
    """Seconds between heartbeats; their responses contain the commands pause, resume, drain and
    stop."""
    when_ahead: Literal["wait", "spool", "drop-oldest"] = "wait"
    """What to do while a trainer that keeps a ratio (data.ratio) is behind. wait: begin no episode;
    spool: play on, and send later; drop-oldest: play on, and keep only the newest episode of each
    environment to send later."""
    drain_timeout: float = 10.0
    """Seconds to wait at the end while the service takes nothing of the outbox. Then the rest stays
    on disk, the exit status is 1, and the run has failed."""
    progress: bool = True
    """Show a progress bar (or periodic lines, if the output is not a terminal)."""

    @model_validator(mode="after")
    def _one_player(self) -> Self:
        if bool(self.policy) == self.random:
            raise ValueError("policy: give either --policy RUN[:VERSION] or --random")
        if self.wait_for_policy and self.random:
            raise ValueError("wait_for_policy: has no effect with --random; leave out one of them")
        if self.warm_up_steps and self.random:
            raise ValueError("warm_up_steps: has no effect with --random; leave out one of them")
        return self


class EvaluateConfig(EnvironmentConfig):
    """Evaluate a policy with greedy actions and fixed seeds, and record its score.

    The episodes go to a dataset with purpose "eval" (training snapshots exclude them by default);
    the service stores the score as an evaluation. The number of parallel environments changes only
    the time that it takes. --json prints the result as JSON instead of a table.

      stepwell evaluate demo
      stepwell evaluate demo:best --episodes 30 --videos 3
      stepwell evaluate demo:7 --env Hopper-v5 --seeds 1000 --json
      stepwell evaluate --policy demo --env Hopper-v5 --episodes 10 --follow
      stepwell evaluate --policy demo --env Hopper-v5 --videos 3
      stepwell evaluate --random --env Pendulum-v1 --no-upload
    """

    env: str = ""
    """Gymnasium id, e.g. Pendulum-v1; default: that of the newest collector into the run's dataset,
    with its arguments, or that of the dataset."""
    policy: Reference = ""
    """Policy to evaluate: RUN (its newest policy), RUN:ALIAS, RUN:VERSION, or RUN:all: all versions
    that have no such score yet; the alias `best` then points to the best one. The first word
    of the command line is the policy, too."""
    follow: bool = False
    """Evaluate each version of --policy RUN as it is published, until the run ends."""
    every: int = Field(0, ge=0)
    """With RUN:all or --follow: leave out versions less than this many updates after the one
    before; the last version is always evaluated. 0: every version."""
    against: Reference = ""
    """Also evaluate this policy with the same seeds, and compare them seed by seed."""
    file: Path | None = None
    """Evaluate a local policy file instead of a published policy."""
    random: bool = False
    """Evaluate uniformly random actions instead of a policy, as a baseline."""
    scripted: str = ""
    """Evaluate a policy written in Python, MODULE:FUNCTION: the function gets an observation and
    returns an action. A class is a policy with memory, of which each episode calls a new instance.
    It is recorded as the policy `scripted`."""
    episodes: int = Field(30, ge=1)
    """Number of episodes, one per seed."""
    seeds: int = Field(0, ge=0, lt=2**62)
    """The first seed; episode i is reset with seeds + i."""
    videos: int = Field(0, ge=0)
    """Record videos of the first so many episodes, also of each policy with --against, RUN:all and
    --follow, there of versions that have a score, too. MP4 needs imageio-ffmpeg, else GIFs."""
    sample: bool = False
    """Sample actions from the policy instead of taking its greedy actions."""
    target_return: float | None = None
    """Return that a return-conditioned policy (recipe dt) aims at, instead of the policy's own."""
    dataset: str = ""
    """Dataset for the episodes; default: eval-<environment>, created if it does not exist."""
    keep: int = Field(10_000, ge=0)
    """Capacity in episodes of a dataset that this command creates; 0: unlimited. An existing
    dataset keeps its capacity."""
    run: str = ""
    """Name of this eval run; an existing run is resumed. Default: a new name."""
    tags: tuple[str, ...] = ()
    """Tags of this eval run and of its episodes."""
    outbox: Path | None = None
    """Folder in which episodes wait for the service; default: as for stepwell collect."""
    drain_timeout: float = 60.0
    """Seconds to wait at the end while the service takes nothing of the outbox. Then the rest stays
    on disk, the exit status is 1, and the run has failed."""
    upload: bool = True
    """Send episodes and score to the service; --no-upload only prints the score."""

    @property
    def every_version(self) -> bool:
        """Whether to evaluate all versions of a run."""
        which = self.policy.partition("/" if "/" in self.policy else ":")[2]
        return which == ALL or (self.follow and bool(self.policy) and not which)

    @model_validator(mode="after")
    def _one_player(self) -> Self:
        players = (bool(self.policy), self.file is not None, self.random, bool(self.scripted))
        if sum(players) != 1:
            given = "--policy RUN[:VERSION], --file, --random, --scripted"
            raise ValueError(f"policy: give one of {given}")
        if not self.env and not self.policy:
            raise ValueError("env: required without --policy, whose data tell it")
        if self.every_version and not self.upload:
            raise ValueError("upload: scores of all versions are kept at the service; leave it on")
        if self.follow and not self.every_version:
            raise ValueError("follow: needs --policy RUN, without a version or an alias")
        if self.every and not self.every_version:
            raise ValueError("every: needs --policy RUN:all, or --follow")
        if self.against and (self.every_version or self.against.partition("/")[2] == ALL):
            raise ValueError("against: compares two policies; leave out RUN:all and --follow")
        if self.videos and not self.upload:
            raise ValueError("videos: are kept with the score at the service; leave upload on")
        if self.videos > self.episodes:
            raise ValueError(f"videos: at most one for each of {self.episodes} episodes")
        if self.every_version and self.run:
            raise ValueError("run: each version has an eval run of its own; leave run out")
        if self.vectorization == "native":
            raise ValueError("vectorization: native environments do not reset by seed; use async")
        if self.target_return is not None and (self.random or self.scripted):
            other = "--random" if self.random else "--scripted"
            raise ValueError(f"target_return: has no effect with {other}; leave out one of them")
        return self


ALL = "all"
"""In place of a version: every version."""


def parse_reference(reference: str) -> tuple[str, str]:
    """ "run", "run/7" or "run/best" → (run, version or alias; "latest" by default)."""
    try:
        return split_reference(reference)
    except InvalidData as error:
        raise UsageError(f"--policy: {error}") from None


def parse(kind: type[C], argv: Sequence[str], prog: str) -> C:
    """Parse a command line. Raises `UsageError`; --help exits."""
    return _settings.read(kind, argv, prog=prog, about=inspect.cleandoc(kind.__doc__ or "")).config
