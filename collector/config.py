"""Settings of `stepwell collect` and `stepwell evaluate`: the text under a field is its help.

How files and flags become a config: stepwell/_settings.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from amago_model.config.base import Settings
from collector.episode_recorder import MAX_STEPS
from collector.exploration import EpsilonConfig, NoExplorationConfig
from stepwell import _settings
from stepwell.errors import StepwellError

C = TypeVar("C", bound=Settings)


class UsageError(StepwellError, ValueError):
    """The command line or a config file contradicts itself; the message names the flag."""

    exit_status = 2


class EnvironmentConfig(Settings):
    """What is played, and where the service is."""

    error: ClassVar[type[Exception]] = UsageError
    root: ClassVar[bool] = True

    env: str
    """Gymnasium id, for instance Pendulum-v1, or my.module:Name-v0."""
    env_args: tuple[str, ...] = ()
    """Arguments of the environment, as KEY=VALUE with values in JSON: delay=8 symbols=4."""
    envs: int = Field(8, ge=1)
    """Environments played side by side in this process."""
    plugin: tuple[str, ...] = ()
    """Modules to import first, so that they can register environments."""
    roles: tuple[str, ...] = ()
    """Who may see an observation, as KEY=ROLE: action_mask=mask state=critic."""
    keep_float64: bool = False
    """Store float64 as it is instead of as float32 (new datasets only)."""
    device: str = "cpu"
    """Where the policy is computed: cpu, cuda, cuda:1."""
    threads: int = Field(1, ge=1)
    """Threads of torch; small networks on one core are fastest with 1."""
    url: str | None = None
    """Address of the service; default: STEPWELL_URL, or http://127.0.0.1:8000."""
    token: str | None = None
    """Token for it; default: STEPWELL_TOKEN."""


class CollectConfig(EnvironmentConfig):
    """Play an environment, by a published policy or at random, and send every episode to a dataset.

    The outbox keeps episodes on disk until the service has them: stop the service, and collecting
    goes on. Ctrl-C ends cleanly.

      stepwell collect --env Pendulum-v1 --dataset swing --random --episodes 100
      stepwell collect --env Pendulum-v1 --dataset swing --policy demo --wait-for-policy
      stepwell collect --env Hopper-v5 --dataset hops --policy demo/best --epsilon.kind greedy
    """

    dataset: str
    """Dataset that the episodes go to; made from the environment's spaces if there is none."""
    policy: str = ""
    """Who plays: RUN (its newest policy, followed as it improves), RUN/ALIAS or RUN/VERSION."""
    random: bool = False
    """Draw every action from the action space instead."""
    wait_for_policy: bool = False
    """Wait until the run has published a policy, however long that takes."""
    episodes: int = Field(0, ge=0)
    """Stop after this many episodes; 0 for no limit."""
    steps: int = Field(0, ge=0)
    """Stop after this many steps; 0 for no limit. Running episodes are kept, cut and tagged."""
    sample: bool = True
    """Draw actions from the policy; --no-sample takes its most likely ones."""
    epsilon: EpsilonConfig = Field(default_factory=NoExplorationConfig)
    """Exploration on top of the policy."""
    partition: Literal["fifo", "protected"] = "fifo"
    """fifo: the oldest go when the dataset is full; protected: never deleted by the system."""
    create: bool = True
    """Make the dataset if there is none."""
    infos: tuple[str, ...] = ()
    """Single numbers of the environment's info to keep beside the observations, for SQL
    or to say which steps to learn from. A dataset that exists must have a place for them."""
    capacity_trajectories: int = Field(0, ge=0)
    """Of a dataset made here: how many fifo trajectories it keeps; 0 for all."""
    capacity_steps: int = Field(0, ge=0)
    """Of a dataset made here: how many fifo steps it keeps; 0 for all."""
    run: str = ""
    """Name of this collect run; one that exists is taken up again. Default: a new name."""
    seed: int | None = None
    """Makes episodes and exploration repeatable; default: a new one, noted in the run. Collectors
    side by side on one machine play different ones all the same, unless each has its --outbox."""
    tags: tuple[str, ...] = ()
    """Labels for every trajectory."""
    max_steps: int = Field(MAX_STEPS, ge=1)
    """Longer episodes are stored in pieces of this many steps."""
    outbox: Path | None = None
    """Where episodes wait for the service; default: stepwell-outbox/DATASET/<first free number>,
    below the current folder or STEPWELL_OUTBOX. What a collector that is no more left beside it,
    for the same dataset, is sent too."""
    outbox_bytes: int = Field(8 << 30, ge=1)
    """Most that may wait there; collecting pauses when it is full."""
    poll_every: float = Field(5.0, gt=0)
    """Seconds between two looks for a newer policy."""
    heartbeat_every: float = Field(5.0, gt=0)
    """Seconds between two heartbeats; pause, resume, drain and stop come with the answers."""
    drain_timeout: float = 10.0
    """Seconds that the outbox may take at the end. What is left then stays on disk, the exit status
    is 1, and the run has failed."""
    progress: bool = True
    """Show a progress bar (a line now and then where the output is no terminal)."""

    @model_validator(mode="after")
    def _one_player(self) -> Self:
        if bool(self.policy) == self.random:
            raise ValueError("who plays? give either --policy RUN[/VERSION] or --random")
        if self.wait_for_policy and self.random:
            raise ValueError("wait_for_policy: --random plays without a policy; leave out one")
        return self


class EvaluateConfig(EnvironmentConfig):
    """Play a policy greedily with fixed seeds, and record what it scored.

    The episodes go to a dataset with purpose "eval" (no training snapshot takes them unless asked),
    the score becomes an evaluation of the service. How many environments run side by side changes
    the time that it takes and nothing else. --json prints the result as JSON instead of as a table.

      stepwell evaluate --policy demo --env Pendulum-v1 --episodes 30
      stepwell evaluate --policy demo/7 --env Hopper-v5 --seeds 1000 --json
      stepwell evaluate --random --env Pendulum-v1 --no-upload
    """

    policy: str = ""
    """Who is evaluated: RUN (its newest policy), RUN/ALIAS or RUN/VERSION."""
    file: Path | None = None
    """A policy file on this disk instead."""
    random: bool = False
    """Draw every action from the action space instead: the floor to compare with."""
    episodes: int = Field(30, ge=1)
    """How many episodes, one for each seed."""
    seeds: int = Field(0, ge=0)
    """The first seed; episode i is reset with seeds + i."""
    sample: bool = False
    """Draw actions from the policy instead of taking the most likely ones."""
    dataset: str = ""
    """Where the episodes go; default: eval-<environment>, made if there is none."""
    keep: int = Field(10_000, ge=0)
    """Episodes, the newest, that a dataset made here keeps; 0 keeps all. One that is there already
    keeps to its own capacity."""
    run: str = ""
    """Name of this eval run; one that exists is taken up again. Default: a new name."""
    outbox: Path | None = None
    """Where episodes wait for the service; default: as of stepwell collect."""
    drain_timeout: float = 60.0
    """Seconds that sending the episodes may take; what is left stays on disk, the exit status is 1,
    and the run has failed."""
    upload: bool = True
    """Send episodes and score to the service; --no-upload only prints."""

    @model_validator(mode="after")
    def _one_player(self) -> Self:
        if sum((bool(self.policy), self.file is not None, self.random)) != 1:
            raise ValueError("who plays? give one of --policy RUN[/VERSION], --file, --random")
        return self


def parse_reference(reference: str) -> tuple[str, str]:
    """ "run", "run/7" or "run/best" → (run, version or alias; "latest" by default)."""
    run, _, which = reference.partition("/")
    if not run or "/" in which:
        raise UsageError(f"--policy: expected RUN, RUN/VERSION or RUN/ALIAS, got {reference!r}")
    return run, which or "latest"


def parse(kind: type[C], argv: Sequence[str], prog: str) -> C:
    """The config that a command line asks for. Raises `UsageError`; --help exits."""
    return _settings.read(kind, argv, prog=prog, about=inspect.cleandoc(kind.__doc__ or "")).config
