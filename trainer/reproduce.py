"""`stepwell reproduce RUN`: train a run again, with its configuration, seed and data, and compare.

    run's row ── settings, snapshot ── what differs here: printed ── training of NEW ── its curves
    beside those of RUN, step by step

With --dry-run it ends after the differences.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amago_model.errors import AmagoError
from stepwell import terminal
from stepwell._exit_message import fail
from stepwell._git import git_commit
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import Gone, NotFound, StepwellError
from stepwell.messages import Run
from trainer.config import TrainConfig, default_cache
from trainer.errors import SettingError
from trainer.main import train_here

NOT_SETTINGS = ("origins", "kernels", "claim", "versions", "hardware")
"""Keys of a run's config that are no settings."""
MAIN = ("loss/", "validation/")
"""Beginnings of the keys of the metrics that are compared."""
TIMES = ("progress/", "data/wait_fraction")
"""Metrics of time, which never repeat."""
MAX_POINTS = 10_000
LONGEST_NAME = 128
UNKNOWN = "not recorded"
ABOUT = """\
Train a run again: with the same settings (also those that were derived from its data), the same
seed and the same trajectories, those of the snapshot that the run recorded. Before, it prints what
differs here: commit, versions of packages, device, data. Afterwards it compares the losses of both
runs step by step, and names the first and the largest difference.

On one CPU model, with the same commit and versions, the curves are equal bit by bit. The new run is
an ordinary one, whose `parent` is the first. With --name the same command resumes a stopped one."""
EXAMPLES = """\
  stepwell reproduce first --dry-run
  stepwell reproduce first --name first-again"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something in which the new run cannot, or may not, be like the first."""

    what: str
    then: str
    now: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The run to train: its settings and data, and what differs from the first."""

    config: TrainConfig
    origins: dict[str, str]
    snapshot: str
    """The recorded snapshot; empty: the settings select from the data of now."""
    differences: list[Difference]


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of both runs, at the steps that both have. A NaN or infinite value is None."""

    key: str
    steps: int
    """Number of steps compared."""
    missing: int
    """Number of steps that only one of the runs has."""
    first: int | None = None
    """The first step with different values; None if all are equal."""
    first_values: tuple[float | None, float | None] = (None, None)
    largest: float = 0.0
    """The largest absolute difference; infinite where only one value is finite."""
    largest_at: int | None = None
    largest_values: tuple[float | None, float | None] = (None, None)


def main(argv: list[str] | None = None) -> int:
    """Print the differences, train, compare; returns the exit status of the training."""
    args = _parse(argv)
    try:
        with terminal.connect(args) as client:
            return _reproduce(client, args)
    except (StepwellError, AmagoError) as error:
        return fail("stepwell reproduce", error)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = terminal.parser("reproduce", ABOUT, EXAMPLES)
    add = parser.add_argument
    add("run", metavar="RUN", help="a training run")
    add("--dry-run", action="store_true", help="only print what differs; train nothing")
    add("--name", default="", metavar="NEW", help="name of the new run (default: RUN-again)")
    add("--output", type=Path, default=Path("runs"),
        help="folder of its local files (default: %(default)s)")  # fmt: skip
    terminal.add_connection(parser)
    return parser.parse_args(argv)


def _reproduce(client: Client, args: argparse.Namespace) -> int:
    run = client.run(args.run)
    name = args.name or _free_name(client, run.name)
    plan = make_plan(client, run, name, args.output)

    def say(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    if not args.json:
        _print_differences(run, plan)
    answer: dict[str, Any] = {
        "run": run.name,
        "new": name,
        "snapshot": plan.snapshot or None,
        "differences": [asdict(one) for one in plan.differences],
    }
    if args.dry_run:
        if args.json:
            terminal.print_json(answer)
        return 0
    words = ["stepwell", "reproduce", run.name, "--name", name, "--output", str(args.output)]
    status = train_here(
        plan.config,
        client,
        say,
        origins=plan.origins,
        command=words,
        snapshot=plan.snapshot,
        parent=run.name,
    )
    if status:
        return status
    curves = compare(client, run.name, name)
    if args.json:
        terminal.print_json(answer | {"curves": [asdict(one) for one in curves]})
    else:
        _print_curves(run.name, name, curves)
    return 0


def make_plan(client: Client, run: Run, name: str, output: Path) -> Plan:
    """The settings, the data and the differences of a reproduction of `run` called `name`.

    Raises:
        SettingError: it is no training run, needs several processes, has settings that this program
            does not know, or its data is gone.
    """
    if run.kind != "train":
        raise SettingError(f"{run.name} is a run of kind {run.kind}; expected one of kind train")
    stored = {key: value for key, value in run.config.items() if key not in NOT_SETTINGS}
    try:
        then = TrainConfig.from_dict(stored)
    except (SettingError, AmagoError) as error:
        commit = run.git_commit or "of an unknown commit"
        raise SettingError(
            f"the settings of {run.name} are not those of this program: {error}; use the program "
            f"that it was trained with: {commit}"
        ) from error
    if then.processes > 1:
        raise SettingError(
            f"{run.name} was trained by {then.processes} processes; only runs of one process can "
            f"be reproduced. Its settings: stepwell runs show {run.name} --json"
        )
    # What was derived is in the settings. Nobody collects for the new run.
    data = then.data.replace(cache=default_cache(), refresh_every=0, wait_for_data=0.0, ratio=None)
    config = then.replace(
        run=name, output=output, derive="off", memory="auto", tags=(), resume="auto", data=data
    )
    changed = ("run", "output", "derive", "memory", "tags", "resume", "data.cache",
               "data.refresh_every", "data.wait_for_data", "data.ratio")  # fmt: skip
    origins = dict(run.config.get("origins") or {}) | {key: f"run {run.name}" for key in changed}
    snapshot, about_data = find_data(client, run, config)
    differences = [*_programs(run), *_machines(run, config), *about_data]
    return Plan(config, origins, snapshot, differences)


def _free_name(client: Client, name: str) -> str:
    """NAME-again, or NAME-again-2, …, the first that no run has."""
    number = 1
    while True:
        end = "-again" if number == 1 else f"-again-{number}"
        found = name[: LONGEST_NAME - len(end)] + end
        try:
            client.run(found)
        except NotFound:
            return found
        number += 1


# ----------------------------------------------------------------------------------- what differs


def _programs(run: Run) -> list[Difference]:
    from trainer.distributed import package_versions

    found = []
    now = git_commit()
    then = run.git_commit
    if then != now or then.endswith("+") or not then:
        found.append(Difference("commit", _commit(then), _commit(now)))
    recorded: Mapping[str, str] = run.config.get("versions") or {}
    here = package_versions()
    if not recorded:
        return [*found, Difference("packages", UNKNOWN, _listed(here))]
    for package in sorted(recorded.keys() | here.keys()):
        before, after = recorded.get(package, "none"), here.get(package, "none")
        if before != after:
            found.append(Difference(package, before, after))
    return found


def _commit(commit: str) -> str:
    if commit.endswith("+"):
        return f"{commit[:-1]} with changes that are in no commit"
    return commit or UNKNOWN


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _machines(run: Run, config: TrainConfig) -> list[Difference]:
    import torch

    from trainer.distributed import hardware

    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(automatic if config.device == "auto" else config.device)
    then, now = str(run.config.get("hardware") or UNKNOWN), hardware(device)
    return [] if then == now else [Difference("device", then, now)]


def find_data(client: Client, run: Run, config: TrainConfig) -> tuple[str, list[Difference]]:
    """The snapshot to train on, empty if it has to be made anew, and what differs of the data.

    Raises `SettingError` if nothing of the data is left.
    """
    here = _matching(client, config)
    if not run.snapshots:
        return "", [Difference("data", UNKNOWN, _trajectories(here))]
    first = run.snapshots[0]
    try:
        then = client.snapshot(first).trajectories
        client.lease(first, f"reproduce/{run.name}")
    except (Gone, NotFound):
        if config.snapshot or here == 0:
            raise SettingError(
                f"the data of {run.name} is gone: snapshot {first} has expired, and no trajectory "
                "matches its selection now. A version of a dataset keeps its data: stepwell "
                "versions create"
            ) from None
        gone = f"snapshot {first}, partly deleted"
        return "", [Difference("data", gone, f"{_trajectories(here)}, selected now")]
    found = []
    if len(run.snapshots) > 1:
        all_ = f"{len(run.snapshots)} snapshots, of growing data"
        found.append(Difference("data", all_, f"the first, {_trajectories(then)}"))
    elif here is not None and not config.data.best_share and here != then:
        now = f"{_trajectories(here)}; the recorded ones are used"
        found.append(Difference("data", _trajectories(then), now))
    return first, found


def _matching(client: Client, config: TrainConfig) -> int | None:
    """Number of trajectories that the settings select now; None for a mixture or a snapshot."""
    from trainer.data.snapshot import sql_condition

    if not config.dataset:
        return None
    condition = sql_condition(config)
    return int(client.sql(f"SELECT count(*) FROM trajectories WHERE {condition}", timeout=60).one())


def _trajectories(count: int | None) -> str:
    return "unknown" if count is None else pluralize(count, "trajectory", "trajectories")


def _print_differences(run: Run, plan: Plan) -> None:
    said = f"seed {plan.config.seed}, {pluralize(plan.config.updates, 'update')}"
    data = f"snapshot {plan.snapshot}" if plan.snapshot else "data selected now"
    print(f"{run.name} again, as {plan.config.run}: {said}, {data}")
    if not plan.differences:
        print("commit, packages, device and data are those of then")
        return
    rows = [(one.what, one.then, one.now) for one in plan.differences]
    terminal.print_table(["differs", "then", "now"], rows)


# --------------------------------------------------------------------------------------- compare


def compare(client: Client, then: str, now: str) -> list[Curve]:
    """The losses of two runs, or, if they have none in common, all metrics but those of time."""
    keys = set(client.run(then).latest_steps) & set(client.run(now).latest_steps)
    chosen = sorted(key for key in keys if key.startswith(MAIN))
    chosen = chosen or sorted(key for key in keys if not key.startswith(TIMES))
    if not chosen:
        return []
    before, after = (_series(client, run, chosen) for run in (then, now))
    return [compare_curves(key, before[key], after[key]) for key in chosen]


def _series(client: Client, run: str, keys: Sequence[str]) -> dict[str, dict[int, float | None]]:
    found = client.metrics(run, None, MAX_POINTS)
    return {k: dict(zip(found[k].steps, found[k].values, strict=True)) for k in keys}


def compare_curves(
    key: str, then: Mapping[int, float | None], now: Mapping[int, float | None]
) -> Curve:
    """Compare values by step."""
    steps = sorted(then.keys() & now.keys())
    missing = len(then.keys() ^ now.keys())
    other = [step for step in steps if then[step] != now[step]]
    if not other:
        return Curve(key, len(steps), missing)

    def distance(step: int) -> float:
        a, b = then[step], now[step]
        return math.inf if a is None or b is None else abs(a - b)

    first, worst = other[0], max(other, key=distance)
    return Curve(
        key,
        len(steps),
        missing,
        first,
        (then[first], now[first]),
        distance(worst),
        worst,
        (then[worst], now[worst]),
    )


def _print_curves(then: str, now: str, curves: Sequence[Curve]) -> None:
    if not curves:
        print(f"{then} and {now} have no metric in common to compare")
        return
    steps = max(one.steps for one in curves)
    metrics = pluralize(len(curves), "metric")
    differing = [one for one in curves if one.first is not None]
    if not differing:
        print(f"equal bit by bit: {metrics} of {then} and {now}, at {pluralize(steps, 'step')}")
    else:
        first = min(differing, key=lambda one: one.first or 0)
        print(
            f"{len(differing)} of {metrics} differ, from step {first.first} on ({first.key}); "
            f"values of {then} and {now}:"
        )
        terminal.print_table(
            ["metric", "steps", "first at", "then", "now", "largest", "at", "then", "now"],
            [
                (c.key, c.steps, c.first, *map(_value, c.first_values), _value(c.largest),
                 c.largest_at, *map(_value, c.largest_values))
                for c in differing
            ],
        )  # fmt: skip
    if any(one.missing for one in curves):
        missing = max(one.missing for one in curves)
        print(f"{pluralize(missing, 'step')} of one run only, not compared")


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.9g}"


if __name__ == "__main__":
    sys.exit(main())
