"""The order of a comparison's work: per recipe and seed train, then evaluate; several at a time.

What is left to do is read from the service before every job, so a comparison that was stopped or
killed continues where it was, and nothing that has finished is done twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stepwell._exit_message import PARTIAL
from stepwell._settings import flatten
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import NotFound, ServiceUnreachable, StepwellError
from stepwell.messages import Run
from stepwell.spaces import env_name
from workbench.analysis.comparison import RATE, TAG, read_comparison
from workbench.processes import Job, Processes, stop

POLL = 0.2
LOOK = 3.0
"""Seconds between two looks at the progress of the runs."""
GIVEN = ("command line", "file ")
"""Origins of settings that somebody gave, as opposed to a recipe's."""
ADDED_SQL = """\
SELECT count(*) FROM trajectories
WHERE dataset = ? AND purpose = 'train' AND created_at > ?"""
FREE = frozenset(
    "recipe run tags seed output resume plugin threads processes device data.cache".split()
)
"""Settings that do not decide what is compared, or are part of a run's name."""


class OtherSettings(StepwellError):
    """A run of this comparison was trained with other settings, or on other data."""

    exit_status = 2


@dataclass
class Recipe:
    """A recipe with the settings that every run of it gets."""

    name: str
    words: list[str]
    """Arguments of `stepwell train` after the recipe, which all its seeds share."""
    updates: int
    publish_every: int
    given: dict[str, object]
    """Settings of files and flags, by dotted name."""
    typical_rate: float | None = None
    """Updates per second on the machine of docs/reference/training.md's table."""


@dataclass
class Chain:
    """One training run and its evaluations."""

    recipe: Recipe
    seed: int
    run: str
    job: Job | None = None
    doing: str = ""
    """Name of the current job."""
    problem: str = ""
    """Why it has failed; nothing more is done for it."""
    done: bool = False
    trained: int = 0
    """Updates made."""
    rate: float | None = None
    """Updates per second."""
    evaluated: int = 0


@dataclass
class Schedule:
    """Runs all chains. `say` prints a line about what has happened."""

    name: str
    dataset: str
    env: str
    seeds: range
    """Seeds of the evaluation episodes."""
    every_policy: bool
    evaluate_words: list[str]
    """Arguments that all evaluations share, besides policy, run, dataset, tag and seeds."""
    client: Client
    processes: Processes
    chains: list[Chain]
    jobs: int
    say: Callable[[str], None] = print
    tick: Callable[[], None] = lambda: None
    """Called a few times per second."""
    interrupted: bool = False
    evaluation_seconds: list[float] = field(default_factory=list)
    _looked: float = -math.inf

    def interrupt(self) -> None:
        self.interrupted = True

    def hurry(self) -> None:
        """Interrupt once more: children end at once, without a checkpoint."""
        for chain in self.chains:
            if chain.job is not None:
                chain.job.process.terminate()

    def check(self) -> None:
        """Raise `OtherSettings` for another environment, for a run that was trained with other
        settings than these, or for further runs on data that have grown since the first."""
        before = read_comparison(self.client, self.name)
        if before.env not in ("", env_name(self.env)):
            raise OtherSettings(
                f"comparison {self.name} evaluates in {before.env}, not in {self.env}; choose "
                "another --name"
            )
        new = ""
        for chain in self.chains:
            try:
                run = self.client.run(chain.run)
            except NotFound:
                new = chain.run
                continue
            if TAG + self.name not in run.tags:
                raise OtherSettings(
                    f"there is already a run {chain.run} that is not of this comparison; choose "
                    "another --name"
                )
            was, now = given(run), chain.recipe.given
            changed = [
                key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)
            ]
            if changed:
                key = changed[0]
                raise OtherSettings(
                    f"run {chain.run} of this comparison was trained with {key} = "
                    f"{was.get(key, 'the default')}, now it is {now.get(key, 'the default')}; "
                    "choose another --name"
                )
        if new and before.runs:
            self._require_same_data(before.runs[0], new)

    def _require_same_data(self, first: Run, new: str) -> None:
        added = self.client.sql(ADDED_SQL, [self.dataset, first.created_at], timeout=60.0).rows[0][
            0
        ]
        if added:
            count = pluralize(added, "trajectory was", "trajectories were")
            raise OtherSettings(
                f"{count} added to {self.dataset} after run {first.name} of this comparison had "
                f"read it, so {new} would learn from other data; choose another --name"
            )

    def run(self) -> None:
        """Work until every chain is done or has failed. Raises KeyboardInterrupt after
        `interrupt`, when all children have stopped."""
        try:
            while not all(chain.done or chain.problem for chain in self.chains):
                if self.interrupted:
                    raise KeyboardInterrupt
                try:
                    self._step()
                except ServiceUnreachable:
                    pass  # trainers continue without the service; ask again
                self.tick()
                time.sleep(POLL)
        finally:
            stop([chain.job for chain in self.chains if chain.job is not None])

    def _step(self) -> None:
        for chain in self.chains:
            if chain.job is not None and chain.job.process.poll() is not None:
                self._finish(chain, chain.job)
        if time.monotonic() - self._looked > LOOK:
            self._looked = time.monotonic()
            self._look()
        for chain in self.chains:
            if sum(c.job is not None for c in self.chains) >= self.jobs:
                break
            if chain.job is None and not chain.done and not chain.problem:
                self._start(chain)

    def _start(self, chain: Chain) -> None:
        todo = self.next_job(chain)
        if todo is None:
            chain.done = True
            return
        name, words = todo
        if name == chain.doing:
            # It has ended well, and yet the service has no result of it.
            chain.problem = self._why_unfinished(chain)
            self.say(f"{chain.run} failed: {chain.problem}")
            return
        if not self.processes.is_running(name):
            chain.job = self.processes.start(name, words)
            chain.doing = name

    def next_job(self, chain: Chain) -> tuple[str, list[str]] | None:
        """The next job of a chain and its command, from what the service has; None at the end."""
        try:
            trained = self.client.run(chain.run).status == "finished"
        except NotFound:
            trained = False
        if not trained:
            words = ["train", chain.recipe.name, "--run", chain.run, "--seed", str(chain.seed)]
            return chain.run, [*words, *chain.recipe.words]
        policies = sorted(p.version for p in self.client.policies(chain.run))
        comparison = read_comparison(self.client, self.name, self.seeds, self.env)
        scored = comparison.versions(chain.run)
        chain.evaluated = len(scored)
        for version in policies if self.every_policy else policies[-1:]:
            if version not in scored:
                return f"{chain.run}-eval-{version}", self.evaluate(
                    f"{chain.run}-eval-{version}", "--policy", f"{chain.run}/{version}"
                )
        return None

    def evaluate(self, run: str, *who: str) -> list[str]:
        """The command of an evaluation; `who`: its policy."""
        return [
            *("evaluate", *who, "--run", run, "--dataset", self.dataset),
            *("--seeds", str(self.seeds[0]), "--episodes", str(len(self.seeds))),
            *("--tags", TAG + self.name, *self.evaluate_words),
        ]

    def _finish(self, chain: Chain, job: Job) -> None:
        chain.job = None
        version = chain.doing.removeprefix(f"{chain.run}-eval-")
        what = "trained" if chain.doing == chain.run else f"evaluated at {version} updates"
        if job.process.returncode in (0, PARTIAL):  # played again episodes that broke
            if chain.doing != chain.run:
                self.evaluation_seconds.append(job.seconds)
            self.say(f"{chain.run} {what}, {job.seconds:.0f} s")
        elif not self.interrupted:
            chain.problem = job.reason()
            self.say(f"{chain.run} failed: {chain.problem}    (log: {job.log})")

    def _why_unfinished(self, chain: Chain) -> str:
        if chain.doing != chain.run:
            return "its evaluation ended without a score"
        run = self.client.run(chain.run)
        return f"{run.status} before its last update; the same command continues it"

    def _look(self) -> None:
        """Read how far the runs are."""
        runs = self.client.items(Run, "/v1/runs", tag=TAG + self.name, kind="train", limit=1000)
        found = {run.name: run for run in runs}
        for chain in self.chains:
            if (run := found.get(chain.run)) is not None:
                chain.rate = run.latest.get(RATE) or None
                chain.trained = int(run.latest.get("progress/updates", 0))
                chain.recipe.updates = int(run.config.get("updates") or chain.recipe.updates)


def given(run: Run) -> dict[str, object]:
    """The settings of a training run that files and flags gave, without those of its own."""
    return given_settings(run.config, run.config.get("origins") or {})


def given_settings(config: dict[str, object], origins: dict[str, str]) -> dict[str, object]:
    values = flatten(config)
    return {
        key: values.get(key)
        for key, origin in origins.items()
        if origin.startswith(GIVEN) and key not in FREE
    }


def seconds_left(
    chains: Sequence[Chain], jobs: int, evaluation: float = 0.0, every_policy: bool = False
) -> float | None:
    """Estimated seconds until all chains are done; None while no rate is known.

    A recipe that has not been seen takes its typical time, times what the others took of theirs.
    `evaluation`: seconds per evaluation.
    """
    per_update = _seconds_per_update(chains)
    if not per_update:
        return None
    usual = sum(per_update.values()) / len(per_update)
    total, open_chains = 0.0, 0
    for chain in chains:
        if chain.done or chain.problem:
            continue
        open_chains += 1
        recipe = chain.recipe
        left = max(0, recipe.updates - chain.trained)
        total += left * per_update.get(recipe.name, usual)
        policies = 1
        if every_policy and recipe.publish_every:
            policies = max(1, math.ceil(recipe.updates / recipe.publish_every))
        total += evaluation * max(0, policies - chain.evaluated)
    return total / max(1, min(jobs, open_chains))


def _seconds_per_update(chains: Sequence[Chain]) -> dict[str, float]:
    """Return the seconds per update of each recipe for which they are known."""
    rates: dict[str, list[float]] = {}
    typical: dict[str, float] = {}
    for chain in chains:
        if chain.rate:
            rates.setdefault(chain.recipe.name, []).append(1.0 / chain.rate)
        if chain.recipe.typical_rate:
            typical[chain.recipe.name] = 1.0 / chain.recipe.typical_rate
    seen = {name: sum(values) / len(values) for name, values in rates.items()}
    slower = [seen[name] / typical[name] for name in seen if name in typical]
    factor = sum(slower) / len(slower) if slower else 1.0
    return {name: seconds * factor for name, seconds in typical.items()} | seen
