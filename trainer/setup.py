"""The set-up of a run: processes, earlier attempt, data, agent, and the run at the service.

Every process of a run takes these steps in the same order, up to `TrainingRun`: what the loop in
`trainer/loop.py` works with.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any

import torch

from amago_model.agent import Agent, make_agent
from amago_model.config import Spaces
from amago_model.encoders.modalities import unused_settings
from amago_model.encoders.timestep import TimestepEncoder
from stepwell import EnvSpec
from stepwell._plugins import import_plugins
from stepwell._settings import flatten
from stepwell._signals import stop_signals
from stepwell._wording import pluralize
from stepwell.client import Client
from trainer import checkpoint as checkpoints
from trainer.config import TrainConfig
from trainer.data.loader import Loader
from trainer.data.snapshot import create_snapshot
from trainer.data.snapshot_views import SnapshotViews
from trainer.derive.dataset_profile import read_profile
from trainer.derive.derived import Derived, apply_settings
from trainer.derive.history import read_gain_of_history
from trainer.derive.rules import derive_settings
from trainer.distributed import World
from trainer.errors import SettingError
from trainer.first_data import starts_untrained, wait_for_data
from trainer.health import Health
from trainer.learner import Learner, make_accelerator
from trainer.rate_limit import RateLimiter
from trainer.recipes import own_settings
from trainer.run_reporter import CONTINUE, STOP, WAIT, RunInfo, RunReporter

log = logging.getLogger(__name__)

MAY_CHANGE = ("output", "resume", "schedule.", "data.cache", "data.prefetch", "processes")
"""Settings that a resumed run may change without a warning."""

MOST_RANDOM_STEPS = 20
"""How many times data.ratio.min_size random steps are waited for until episodes differ."""
ALIKE = """
with found as (select "return" as r from trajectories where dataset = ? and purpose = 'train')
select count(*) filter (r <> (select median(r) from found)) < 3 from found"""


class Requests:
    """What the service, a signal or the ratio to collected steps asks of the run."""

    def __init__(self, reporter: RunReporter) -> None:
        self.stopped = threading.Event()
        """Set by SIGINT and SIGTERM."""
        self.limiter: RateLimiter | None = None
        self._reporter = reporter

    def newest(self) -> int:
        """STOP after a signal, else the service's request, else WAIT while the ratio permits no
        further update, else CONTINUE."""
        if self.stopped.is_set():
            return STOP
        waits = self.limiter is not None and not self.limiter.may_draw()
        return self._reporter.request or (WAIT if waits else CONTINUE)


@dataclass
class TrainingRun:
    """A run that is ready for its next update."""

    config: TrainConfig
    world: World
    requests: Requests
    reporter: RunReporter
    data: SnapshotViews
    loader: Loader
    agent: Agent
    learner: Learner
    health: Health
    derived: list[dict[str, Any]]
    """The settings derived from the dataset, for checkpoints."""
    update: int
    """Completed updates."""


class Setup:
    """Sets up a run. `closing` gets what must be closed when the run ends."""

    def __init__(
        self,
        config: TrainConfig,
        client: Client,
        info: RunInfo,
        echo: Callable[[str], None],
        closing: ExitStack,
    ) -> None:
        """Processes, the run's folder, and the checkpoint of an earlier attempt.

        Raises:
            SettingError: the folder cannot be used, or the run exists and may not be resumed.
        """
        torch.set_num_threads(config.threads)
        self.config, self.client, self.info, self.closing = config, client, info, closing
        self.accelerator = make_accelerator(config)
        self.world = world = World(self.accelerator)
        self.home = home = config.output / config.run
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"output: {home} cannot be used: {error}") from error
        self.show = echo if world.is_main else (lambda _: None)
        """Prints a line, on the main process."""
        main = client if world.is_main else None
        self.reporter = RunReporter(config, main, info, home, world, self.show)
        self.echo = self.reporter.log
        """Prints a line and stores it in the run's log."""
        self.known_here = world.broadcast((home / "run.json").exists())
        self.resumed = checkpoints.find(config.resume, home, world, self.echo)
        if self.resumed is None and config.resume == "auto":
            world.on_main(lambda: checkpoints.refuse_second_start(config.run, home, client))
        self.requests = Requests(self.reporter)
        closing.enter_context(stop_signals(self.requests.stopped.set))
        import_plugins(config.plugin, SettingError)
        self.lease = f"train/{config.run}"
        self._said_few_steps = self._said_alike = False
        # Optimisers load torch's compiler, which takes two seconds: meanwhile, data may arrive.
        self._compiler = threading.Thread(
            target=import_module, args=("torch._dynamo",), daemon=True
        )
        self._compiler.start()

    def run(self) -> TrainingRun | None:
        """The run; None after a request to stop before there was data. All ranks call this."""
        if self.resumed is not None:
            _refuse_other_data(self.resumed.state["config"], self.config)
        derived = self._derive()
        if derived is None:
            return None
        data = SnapshotViews(self.config, self.client, self.world, self.home, self.lease, self.echo)
        self.closing.callback(data.close)
        untrained = self.resumed is None and starts_untrained(self.config)
        spec = self._spec_of_dataset() if untrained else self._spec_of_data(data)
        if spec is None:
            return None
        agent, learner = self._make_learner(spec)
        update, health, same_ratio = self._restore(agent, learner)

        self.world.on_main(lambda: self.reporter.open(data, spec.env, resumed=self.known_here))
        self.closing.push(self.reporter.close)  # receives the exception, if there is one
        self._limit_rate(update, keep=same_ratio)
        if not update and self.config.data.wait_for_data and not self.reporter.has_policy(0):
            self.reporter.publish(agent, 0, data)  # with `derive`: once its shape is known
        if untrained:
            if (snapshot := self._wait_for(self._select_enough)) is None:
                return None
            data.begin(snapshot)
            self.reporter.report_snapshots(data)
        for line in data.summary():
            self.echo(line)
        self.reporter.report_alarms(update, health.standing.values(), (), ())
        self.client.retry_for = 0.0  # from here on an unreachable service does not block training
        loader = data.loader(update, self.accelerator.device)
        self.closing.callback(loader.close)
        return TrainingRun(
            self.config,
            self.world,
            self.requests,
            self.reporter,
            data,
            loader,
            agent,
            learner,
            health,
            derived,
            update,
        )

    # --- the data ---------------------------------------------------------------------------------

    def _derive(self) -> list[dict[str, Any]] | None:
        """Derive settings from the dataset and apply them; those of an earlier attempt are kept,
        whatever the dataset is now. None after a request to stop."""
        derived: list[dict[str, Any]] = []
        if self.resumed is not None:
            derived = self.resumed.state.get("derived", [])
        elif self.config.derive != "off":
            waits = self.config.data.wait_for_data
            if waits and self._wait_for(self._select_for_deriving) is None:
                return None
            self._compiler.join()  # not two imports of parts of torch at once
            derived = self.world.on_main(
                lambda: _derived(self.config, self.info.origins, self.client, self.echo)
            )
        self.config, settings = apply_settings(
            self.config,
            self.info.origins,
            own_settings(self.config.recipe),
            [Derived(**d) for d in derived],
            self.echo,
        )
        self.config.require_target_return()
        self.reporter.add_derived(self.config, settings)
        return derived

    def _spec_of_dataset(self) -> EnvSpec | None:
        """The spec of a dataset that may have no trajectory yet; None after a request to stop."""
        document = self._wait_for(lambda: self.client.spec(self.config.dataset).to_json())
        return None if document is None else EnvSpec.from_json(document)

    def _spec_of_data(self, data: SnapshotViews) -> EnvSpec | None:
        """Open the first snapshot, or those of the checkpoint, which need no service; their spec.

        None after a request to stop.
        """
        if self.resumed is not None:
            self.client.retry_for = 0.0
            state = self.resumed.state
            data.resume(state["snapshot_views"], int(state["update"]))
        else:
            if (snapshot := self._wait_for(self._select)) is None:
                return None
            data.begin(snapshot)
        return data.manifest.spec

    def _wait_for(self, attempt: Callable[[], Any]) -> Any:
        """The result of `attempt` once there is data; None after a request to stop."""
        seconds = self.config.data.wait_for_data
        found = wait_for_data(attempt, seconds, self.world, lambda: self.requests.newest() == STOP)
        if found is None:
            self.reporter.status = "stopped"
            self.show(f"run {self.config.run} stopped before there was data")
        return found

    def _select(self) -> str:
        return self.info.snapshot or create_snapshot(self.client, self.config, self.lease)

    def _select_for_deriving(self) -> str | None:
        """The selection that settings are derived from: not before data.ratio.min_size."""
        config = self.config
        if config.data.ratio is not None and config.dataset:
            found, enough = self.client.dataset(config.dataset), config.data.ratio.min_size
            if (steps := found.fifo.steps + found.protected.steps) < enough:
                if not self._said_few_steps:
                    wanted = pluralize(enough, "step")
                    self.show(f"waiting for {wanted} to derive settings from: {steps:,} now")
                    self._said_few_steps = True
                return None
            if config.derive == "online" and steps < MOST_RANDOM_STEPS * enough:
                if self._all_alike(steps):
                    return None
        return self._select()

    def _all_alike(self, steps: int) -> bool:
        """Whether nearly all episodes have the same return, so that nothing can be learned yet."""
        dataset = self.config.dataset
        alike = self.client.sql(ALIKE, [dataset], timeout=60.0).one()
        if alike and not self._said_alike:
            self.show(
                f"waiting for an episode that differs: after {pluralize(steps, 'random step')} all "
                "have the same return"
            )
            self._said_alike = True
        return bool(alike)

    def _select_enough(self) -> str | None:
        """The selection, once the ratio permits an update."""
        limiter = self.requests.limiter
        if limiter is None or limiter.may_draw():
            return self._select()
        self.reporter.set_state("waiting", limiter.reason)
        return None

    # --- the agent --------------------------------------------------------------------------------

    def _make_learner(self, spec: EnvSpec) -> tuple[Agent, Learner]:
        config, device = self.config, self.accelerator.device
        self._compiler.join()
        spaces = Spaces.of_spec(spec.to_json())
        if unused := unused_settings(config.agent, spaces):
            self.echo(f"warning: settings without effect for these spaces: {', '.join(unused)}")
        if self.resumed is not None:
            for line in _differences(self.resumed.state["config"], config, quiet=MAY_CHANGE):
                self.echo(f"warning: {line} from here on")
        torch.manual_seed(config.seed)
        agent = make_agent(config.agent, spaces).to(device)
        if isinstance(rows := agent.policy.timestep_encoder, TimestepEncoder):
            self.echo(f"observations: {'; '.join(rows.describe())}")
        self.reporter.kernels = agent.policy.kernels(device, _compute_dtype(config))
        for what, name in self.reporter.kernels.items():
            self.echo(f"{what} by {name}, on {device.type}")
        learner = Learner(
            agent,
            config.optimizer,
            self.accelerator,
            seed=config.seed,
            updates=config.updates,
            compiling=config.compile,
            window=config.data.window,
            echo=self.echo,
        )
        if learner.graphs is not None:
            self.echo("updates are replayed as CUDA graphs")
        return agent, learner

    def _restore(self, agent: Agent, learner: Learner) -> tuple[int, Health, bool]:
        """Completed updates, health, and whether data.ratio is that of the earlier attempt."""
        resumed, self.resumed = self.resumed, None  # its tensors are freed
        if resumed is None:
            return 0, Health(self.config), False
        state = resumed.state
        checkpoints.restore(resumed, agent, learner.optimizer)
        update = int(state["update"])
        learner.skipped = int(state["skipped"])
        health = Health(self.config, state.get("alarms", ()), state.get("first_medians"))
        self.echo(f"resumed after {pluralize(update, 'update')}, from {resumed.path}")
        before = state["config"]["data"].get("ratio")
        return update, health, before == self.config.to_dict()["data"]["ratio"]

    def _limit_rate(self, update: int, *, keep: bool) -> None:
        if self.config.data.ratio is None or not self.world.is_main:
            return
        self.requests.limiter = RateLimiter(self.client, self.config, update, keep=keep)
        self.closing.callback(self.requests.limiter.close)


def _derived(
    config: TrainConfig,
    origins: Mapping[str, str],
    client: Client,
    echo: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The settings derived from the dataset, as JSON."""
    if not config.dataset:
        echo("note: settings are only derived from one dataset; the recipe's own values are used")
        return []
    profile, own = read_profile(client, config), own_settings(config.recipe)
    if config.derive == "online" and config.memory == "auto" and not profile.partially_observable:
        gain = read_gain_of_history(client, config, profile.spaces)
        profile = replace(profile, history_gain=gain)
    return [asdict(d) for d in derive_settings(profile, config, origins, own, echo)]


def _differences(
    before: dict[str, object], now: TrainConfig, quiet: tuple[str, ...] = ()
) -> list[str]:
    """A line "KEY was OLD, is NEW" for each change of a key that begins with none of `quiet`."""
    old, new = flatten(before), flatten(now.to_dict())
    return [
        f"{key} was {old.get(key)!r}, is {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(quiet)
    ]


def _refuse_other_data(before: dict[str, object], config: TrainConfig) -> None:
    """Raise `SettingError` for settings that a resumed run would not follow: it keeps its data,
    unless it looks for new data, and what was derived from them."""
    keys = ("derive", "memory", "snapshot", "dataset", "where", "sources")
    now = config.to_dict()
    for key in keys[: 3 if config.data.refresh_every else None]:
        if before.get(key) != now[key]:
            raise SettingError(
                f"{key}: run {config.run} began with {before.get(key)!r}, which cannot change to "
                f"{now[key]!r} when it is resumed; train under another --run, or begin this one "
                "anew with --resume never"
            )


def _compute_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of the forward pass's large operations."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return half.get(config.precision, torch.float32)
