"""Does `stepwell run` learn, and how soon? Small tasks on two cores, from an empty folder.

    python -m benchmarks.learn_checks [ID …] [--seeds 0-2] [--keep FOLDER]

Each check runs `stepwell run` with the recipe `online` and the words of the check, and stops it as
soon as a policy has the return that the check asks for, or when its time is over. The clock starts
with the command: starting the service, collecting and evaluating count. Where memory is what a
task tests, the first seed runs again without memory, for twice the time of the slowest seed, and
must stay below a bound; where attempts in one place do, the last must succeed more often than the
first. Exit status 1 if a check fails.
Results replace those of the same checks in benchmarks/results/learn_checks.json.

The ids are those of a list of fifteen; the offline ones, C7 to C11, are rows of
`python -m benchmarks.offline_field`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, provenance
from stepwell import Client
from stepwell._files import whole_file
from stepwell._ports import free_port
from stepwell._wording import pluralize
from stepwell.errors import StepwellError

NAME = "learn_checks"
EPISODES = 20
LOOK_EVERY = 0.5
STOP_SECONDS = 60.0
WITHOUT_MEMORY_FACTOR = 2.0
"""How much longer than the slowest run the one without memory may take to the target."""
UPDATES = 20_000
"""More than any check makes, so that exploration ends and versions are spaced as in a long run."""
WITHOUT_MEMORY = [
    *("--train.agent.trajectory-encoder.context", "1"),
    *("--train.agent.timestep-encoder.hide-previous", "true"),
]
POPGYM = "popgym"
SCORES = """
select version, mean, ci_low, ci_high, details, created_at from (
    select cast(split_part(policy, '/', 2) as integer) as version, * from evaluations
    where split_part(policy, '/', 1) = ?
) order by created_at
"""
FRAMES = """
select coalesce(sum(length), 0) from trajectories
where purpose = 'train' and dataset = ? and created_at <= ?
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One task: what a policy must reach, and in how many seconds."""

    key: str
    task: str
    target: float
    """Mean return over EPISODES episodes."""
    seconds: float
    """When a run is stopped without it."""
    amago: tuple[tuple[float, float], ...]
    """(seconds, mean return) of AMAGO v3.3 on two cores; empty: not measured. One seed in another
    machine-hour, so no ratios."""
    words: tuple[str, ...]
    """The environment and settings, as words of `stepwell run`."""
    memory: tuple[str, ...] = ()
    """More settings, of the memory: the run without memory leaves them out."""
    without_memory: float | None = None
    """Without memory, every policy has a mean return below this."""
    rises: tuple[str, str, float] | None = None
    """Two metrics of an episode: in the policy that has the target the second is above the first by
    at least this much."""
    package: str = ""
    """What the environment needs."""
    metric: str = ""
    """A metric of an episode that must have the target, instead of the return."""
    at_most: bool = False
    """The target is an upper bound: errors."""
    updates: int = UPDATES
    every: int = 200
    """Updates between scored versions."""
    plain: bool = False
    """Nothing is set but the environment."""

    @property
    def common(self) -> list[str]:
        """Words of every run of this check."""
        if self.plain:
            return []
        return [
            *("--train.updates", str(self.updates)),
            *("--train.schedule.checkpoint-every", str(self.updates)),
            *("--evaluate.every", str(self.every), "--episodes", str(EPISODES)),
        ]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of an episode that it looks at, besides the return."""
        return tuple(n for n in dict.fromkeys((self.metric, *(self.rises or ())[:2])) if n)

    def value(self, score: dict[str, Any]) -> float:
        """What is compared with the target."""
        return float(score[self.metric or "mean"])

    def has_target(self, score: dict[str, Any]) -> bool:
        if self.rises is not None:
            first, last, rise = self.rises
            if score[last] - score[first] < rise:
                return False
        value = self.value(score)
        return value <= self.target if self.at_most else value >= self.target


def exploring(steps: int) -> tuple[str, ...]:
    """Epsilon-greedy over this many steps."""
    return ("--collect.epsilon.kind", "greedy", "--collect.epsilon.steps", str(steps))


MEMORY, LOSSES = "--train.agent.trajectory-encoder", "--train.agent.losses"
POPART = "--train.agent.critic.popart"
GRU = (
    *(f"{MEMORY}.kind=gru", f"{MEMORY}.d-hidden=128", f"{MEMORY}.d-output=64"),
    f"{MEMORY}.n-layers=1",
)

CARTPOLE = (
    *exploring(10_000),
    # Most trajectories are the short first ones; without these, policies swing between versions.
    *("--train.data.draw=steps", f"{LOSSES}.gamma=0.995", f"{LOSSES}.n-step=5"),
)


def t_maze(length: int, batch: int, steps: int, ratio: float) -> tuple[str, ...]:
    """AMAGO's settings of exploration: greedy actions, and in the corridor epsilon 0.5 / length."""
    window = [*("first", 1), *("last", length - 3), *("inside", 0.5 / length), *("end", 0.01)]
    names, values = window[::2], window[1::2]
    epsilon = [f"--collect.epsilon.{n}={v}" for n, v in zip(names, values, strict=True)]
    return (
        *("stepwell/TMazePassive-v0", "--env-args", f"corridor_length={length}"),
        *(f"--train.data.window={length + 2}", f"--train.data.batch={batch}"),
        *(f"--train.agent.trajectory-encoder.context={length + 4}", f"--updates-per-step={ratio}"),
        *("--collect.no-sample", "--collect.epsilon.kind=window", *epsilon),
        f"--collect.epsilon.steps={steps}",
    )


CHECKS = (
    Check(
        *("c1", "CartPole", 400.0, 150.0, ((101, 341), (123, 356))),
        ("CartPole-v1", *CARTPOLE),
        memory=GRU,
    ),
    Check(
        *("c2", "CartPole without velocities", 473.0, 180.0, ((46, 473),)),
        ("stepwell/CartPolePosition-v0", *CARTPOLE),
        memory=(*GRU, "--train.agent.timestep-encoder.differences=true"),
        without_memory=100.0,
    ),
    Check(
        *("c3", "CartPole without positions", 300.0, 180.0, ()),
        ("stepwell/CartPoleVelocity-v0", *CARTPOLE),
        memory=GRU,
    ),
    Check(
        *("c4", "Pendulum", -169.0, 240.0, ((124, -295), (152, -169))),
        (
            *("Pendulum-v1", *exploring(50_000), "--updates-per-step=0.15", "--min-size=500"),
            *(f"{LOSSES}.gamma=0.95", f"{LOSSES}.n-step=5", f"{LOSSES}.reward-multiplier=0.1"),
            "--train.data.window=32",
        ),
        every=100,
    ),
    Check(
        *("c5", "T-Maze, 20 steps", 1.0, 90.0, ((39, 1.0),)),
        t_maze(20, 24, 20_000, 0.2),
        without_memory=0.9,
    ),
    Check(
        *("c6", "T-Maze, 100 steps", 1.0, 360.0, ((112, 0.5), (144, 1.0))),
        t_maze(100, 12, 40_000, 0.1),
        without_memory=0.9,
    ),
    Check(
        *("c12", "POPGym RepeatPreviousEasy", 0.9, 480.0, ()),
        ("popgym:popgym-RepeatPreviousEasy-v0", *exploring(50_000)),
        without_memory=0.0,
        package=POPGYM,
    ),
    Check(
        *("c13", "POPGym RepeatFirstEasy", 0.95, 300.0, ()),
        ("popgym:popgym-RepeatFirstEasy-v0", *exploring(50_000)),
        without_memory=0.0,
        package=POPGYM,
    ),
    Check(
        *("c14", "Meta-Frozen-Lake 3 x 3, 5 attempts", 3.8, 300.0, ((15, 2.8), (59, 3.8))),
        (
            *("stepwell/MetaFrozenLake-v0", "--env-args", "size=3", "attempts=5"),
            *(*exploring(50_000), f"{POPART}.preserve-outputs=true"),
        ),
        rises=("success_0", "success_4", 0.15),
    ),
    Check(
        *("c15", "Dark Key-to-Door 4 x 4, 100 steps", 10.0, 600.0, ((171, 7.2), (376, 7.7))),
        (
            *("stepwell/DarkKeyDoor-v0", "--env-args", "size=4", "limit=20", "horizon=100"),
            *(*exploring(20_000), "--updates-per-step=0.2"),
            *(f"{LOSSES}.gamma=0.95", f"{LOSSES}.n-step=1", f"{POPART}.beta=0.005"),
            *(f"{LOSSES}.auxiliary-gammas", "0.1", "0.5", "0.8", "0.9"),
            *(f"{MEMORY}.dropout-ff=0", f"{MEMORY}.dropout-emb=0"),
            *(f"{MEMORY}.position.kind=rotary", "--train.optimizer.learning-rate=3e-4"),
        ),
    ),
)
BY_KEY = {check.key: check for check in CHECKS}


def result(check: Check, run: dict[str, Any]) -> str:
    """What a run reached, as a few words."""
    if (reached := run["reached"]) is None:
        tried = pluralize(len(run["scores"]), "scored version")
        return f"{check.target:g} not reached; best {run['best']} of {tried}"
    return f"{check.target:g} at {reached['seconds']:.0f} s, {reached['frames']:,} steps"


def outcome(check: Check, seed: int, folder: Path, *, memory: bool = True) -> dict[str, Any]:
    """Run a check once, until its target or the end of its time. Returns the first score with the
    target (None if there was none), the steps collected until then, the best mean and all scores.

    Raises `RuntimeError` if `stepwell run` ends by itself.
    """
    port, name = free_port(), f"{check.key}-{seed}"
    settings = check.memory if memory else WITHOUT_MEMORY
    words = ["run", *check.words, *check.common, *settings, "--run", name, "--data", str(folder)]
    words += ["--port", str(port), "--seed", str(seed)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STEPWELL_")}
    folder.mkdir(parents=True)  # one that exists would continue its run, with this clock
    begun, found = time.time(), list[dict[str, Any]]()
    reached: dict[str, Any] | None = None
    with (folder / "run.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "stepwell.cli", *words], stdout=log, stderr=log, env=environment
        )
    try:
        with Client(f"http://127.0.0.1:{port}", retry_for=0.0) as client:
            while reached is None and time.time() - begun < check.seconds:
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended by itself: see {folder / 'run.log'}")
                time.sleep(LOOK_EVERY)
                try:
                    rows = client.sql(SCORES, [name]).rows
                except StepwellError:  # the service is starting
                    continue
                for version, mean, low, high, details, created in rows[len(found) :]:
                    score = {"version": version, "seconds": round(created - begun, 1)}
                    metrics = json.loads(details)["metrics"] if check.metrics else {}
                    compared = {name: metrics[name] for name in check.metrics}
                    found.append(score | {"mean": mean, "low": low, "high": high} | compared)
                    if reached is None and check.has_target(found[-1]):
                        frames = client.sql(FRAMES, [name, created]).rows[0][0]
                        reached = found[-1] | {"frames": frames}
    finally:
        _stop(process)
    extreme = min if check.at_most else max
    best = extreme((check.value(score) for score in found), default=None)
    return {"seed": seed, "reached": reached, "best": best, "scores": found}


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure(check: Check, seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    """All runs of a check, and whether it passed."""
    runs, without = [], []
    for seed in seeds:
        run = outcome(check, seed, folder / f"{check.key}-{seed}")
        runs.append(run)
        print(f"{check.key} {check.task}, seed {seed}: {result(check, run)}", flush=True)
    passed = all(run["reached"] is not None for run in runs)
    if check.without_memory is not None:
        times = [run["reached"]["seconds"] if run["reached"] else check.seconds for run in runs]
        longest = min(check.seconds, WITHOUT_MEMORY_FACTOR * max(times))
        limited = dataclasses.replace(check, seconds=longest)
        run = outcome(limited, seeds[0], folder / f"{check.key}-without", memory=False)
        without.append(run)
        passed &= run["best"] is not None and run["best"] < check.without_memory
        print(f"{check.key} without memory: best {run['best']}", flush=True)
    return {
        **{"task": check.task, "target": check.target, "amago": check.amago, "passed": passed},
        **{
            "words": " ".join([*check.words, *check.common, *check.memory]),
            "without_memory_below": check.without_memory,
        },
        **{"runs": runs, "without_memory": without, **provenance()},
    }


def add(found: dict[str, Any], path: Path) -> None:
    """Add the results of checks to those that are recorded."""
    recorded = json.loads(path.read_text()) if path.exists() else {}
    with whole_file(path) as file:
        file.write((json.dumps(recorded | found, indent=2) + "\n").encode())


def chosen_checks(
    parser: argparse.ArgumentParser, checks: Sequence[Check]
) -> tuple[list[Check], argparse.Namespace]:
    """Those that the command line names, or all, without those whose package is absent; and all
    arguments. Adds IDs and --keep to the parser."""
    keys = [check.key for check in checks]
    parser.add_argument("keys", nargs="*", metavar="ID", help=f"of {', '.join(keys)}; all")
    parser.add_argument("--keep", type=Path, help="new folder in which everything is kept")
    args = parser.parse_args()
    if unknown := set(args.keys) - set(keys):
        parser.error(f"no check {sorted(unknown)}; there are {', '.join(keys)}")
    if args.keep is not None and args.keep.exists() and any(args.keep.iterdir()):
        parser.error(f"--keep {args.keep} is not empty: its runs would continue; name a new folder")
    able = []
    for check in checks:
        if args.keys and check.key not in args.keys:
            continue
        if check.package and importlib.util.find_spec(check.package) is None:
            print(f"{check.key} {check.task}: skipped, {check.package} is not installed")
        else:
            able.append(check)
    return able, args


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=seeds_of, default=range(3), help="e.g. 0-2 (default: 0-2)")
    checks, args = chosen_checks(parser, CHECKS)
    failed = []
    with tempfile.TemporaryDirectory(prefix="stepwell-checks-") as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        for check in checks:
            found = measure(check, args.seeds, folder)
            add({check.key: found}, RESULTS / f"{NAME}.json")
            failed += [] if found["passed"] else [check.key]
    if failed:
        print(f"{pluralize(len(failed), 'check')} failed: {', '.join(failed)}")
    return 1 if failed else 0


def seeds_of(text: str) -> range:
    """The seeds of an option, as "0-2" or "7"."""
    first, _, last = text.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        found = range(0)
    if not found:
        raise argparse.ArgumentTypeError(f"expected seeds as 0-2, got {text!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
