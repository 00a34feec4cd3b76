"""`stepwell estimate RUN`: the values of a run's policies from its data, without an environment.

    data of the run ── for each version: its actions in the data's states ── fitted Q evaluation
    ── stored as metrics estimate/… of the run ── table, and the alias `best`

Every estimate is stored as soon as it is known, so the same command continues a stopped one.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell import terminal
from stepwell._progress import CommandProgress
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.messages import MetricPoint, Policy, Run
from trainer.errors import SettingError
from trainer.offline_evaluation import policy_commands

if TYPE_CHECKING:
    from trainer.offline_evaluation.fitted_q import Estimate
    from trainer.offline_evaluation.policy_transitions import RunData

KEYS = ("estimate/return", "estimate/low", "estimate/high", "estimate/gamma", "estimate/steps")
"""Metrics of an estimate; their step is the version of the policy."""
MAX_STEPS = 100_000
MAX_POINTS = 10_000

ABOUT = """\
Estimate the value of a run's published policies from the data it was trained on, by fitted Q
evaluation (Le et al. 2019), and let the alias RUN:best name the best one. No environment is needed.

estimate  expected discounted return from the data's initial states, in the environment's units
interval  95 % bootstrap interval over trajectories. It does not contain the error of Q where a
          policy acts unlike the data: such policies are often overestimated

Where policies of the run have been evaluated in an environment, `best` follows these evaluations.
Estimates are stored as metrics of the run (estimate/return, estimate/low, estimate/high), in SQL
and on the dashboard. The same command continues a stopped one; known estimates are not repeated.
A policy takes about five seconds of CPU time for 100,000 steps."""
EXAMPLES = """\
  stepwell estimate first
  stepwell estimate first --versions 1000,2000 --gamma 0.95
  stepwell evaluate first:best --env Hopper-v5"""


@dataclass(slots=True)
class RunEstimates:
    """The estimates of a run's policies on the same data."""

    run: str
    gamma: float
    snapshot: str
    trajectories: int
    steps: int
    data: float
    """Mean discounted return of the data from its initial states."""
    estimates: dict[int, Estimate] = field(default_factory=dict)
    """By version, in order."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """The possible returns, to which values are limited."""


def main(argv: list[str] | None = None) -> int:
    """Estimate, store, print; returns the exit status."""
    return policy_commands.run("estimate", _run, _parse(argv))


def _run(client: Client, args: argparse.Namespace) -> int:
    name, slash, _ = args.run.partition("/")
    if slash:
        raise SettingError(
            f"{args.run} names a policy; expected a run: stepwell estimate {name}, and --versions "
            "for some of its policies"
        )
    run = client.run(name)
    published = [policy.version for policy in client.policies(name)]
    with CommandProgress(quiet=args.json) as bar:
        task = bar.add_task(f"estimate {run.name}", total=1.0)
        found = estimate_run(
            client,
            run,
            args.versions,
            gamma=args.gamma,
            max_steps=args.steps,
            again=args.again,
            cache=args.cache,
            on_progress=lambda share, text: bar.update(task, completed=share, description=text),
        )
    evaluated = evaluated_versions(client, run.name, published)
    best, reason = None, ""
    if evaluated or max(published) in found.estimates:
        best, reason = choose_best(found.estimates, evaluated)
        if args.alias:
            client.set_alias(run.name, "best", best)
    if args.json:
        terminal.print_json({**asdict(found), "best": best, "best_by": reason})
        return 0
    _print(found, evaluated, best, published, set_alias=args.alias)
    return 0


def estimate_run(
    client: Client,
    run: Run,
    versions: Sequence[int] | None = None,
    *,
    gamma: float | None = None,
    max_steps: int = MAX_STEPS,
    again: bool = False,
    store: bool = True,
    cache: Path | None = None,
    on_progress: Callable[[float, str], None] = lambda _share, _text: None,
) -> RunEstimates:
    """Estimate the values of a run's policies, and store each as metrics of the run.

    Args:
        versions: None: all. Others that have been estimated alike are in the result, too.
        gamma: discount; None: the one that the run's policies act for.
        again: repeat stored estimates.
        store: write metrics. If False, stored ones are not read, either.
        cache: folder of this node's columns; None: that of training.

    Raises:
        SettingError: the run has no policy, or not these versions, or cannot be estimated.
        StepwellError, AmagoError: data or policies cannot be read.
    """
    from amago_model.policy_file import load_policy
    from trainer.data.snapshot import LeaseKeeper
    from trainer.offline_evaluation.fitted_q import estimate_value
    from trainer.offline_evaluation.policy_transitions import open_run_data, policy_transitions

    wanted = _policies(client, run, versions)
    gamma = _gamma(run) if gamma is None else gamma
    leases = LeaseKeeper(client, f"estimate/{run.name}")
    try:
        on_progress(0.0, f"data of {run.name}")
        data = open_run_data(client, run, leases, max_steps, cache)
        known = _stored(client, run.name, gamma, data.steps) if store and not again else {}
        todo = [policy for policy in wanted if policy.version not in known]
        bounds = data.bounds(gamma)
        for index, policy in enumerate(todo):
            name = f"{run.name}/{policy.version}"

            def tick(share: float, index: int = index, name: str = name) -> None:
                on_progress((index + share) / len(todo), name)

            tick(0.0)
            downloaded = client.download_policy(run.name, policy.version)
            assert downloaded is not None
            transitions = policy_transitions(load_policy(downloaded.data), data)
            if not len(transitions.reward):
                raise SettingError(
                    f"the data of run {run.name} have no step whose action and next observation "
                    "are both known, so nothing can be estimated from them"
                )
            estimate = estimate_value(transitions, gamma, bounds, on_progress=tick)
            known[policy.version] = estimate
            if store:
                _store(client, run.name, policy.version, estimate, gamma, data)
    finally:
        leases.close()
    on_progress(1.0, run.name)
    return RunEstimates(
        run=run.name,
        gamma=gamma,
        snapshot=data.snapshot,
        trajectories=data.trajectories,
        steps=data.steps,
        data=data.value(gamma),
        estimates=dict(sorted(known.items())),
        bounds=bounds,
    )


def _policies(client: Client, run: Run, versions: Sequence[int] | None) -> list[Policy]:
    """The policies to estimate, oldest first."""
    if run.kind != "train":
        raise SettingError(
            f"run {run.name} is a run of kind {run.kind!r}; policies are published by trainers: "
            "stepwell runs list --kind train"
        )
    published = {policy.version: policy for policy in client.policies(run.name)}
    if not published:
        raise SettingError(f"run {run.name} has published no policy yet")
    if missing := [version for version in versions or () if version not in published]:
        raise SettingError(
            f"--versions: run {run.name} has no version {missing[0]}; it has "
            f"{', '.join(map(str, sorted(published)))}"
        )
    return [published[version] for version in sorted(versions or published)]


def _gamma(run: Run) -> float:
    try:
        return float(run.config["agent"]["losses"]["gamma"])
    except (KeyError, TypeError, ValueError):
        raise SettingError(f"run {run.name} names no discount; give one with --gamma") from None


def _stored(client: Client, run: str, gamma: float, steps: int) -> dict[int, Estimate]:
    """The stored estimates with this discount, from as many steps."""
    from trainer.offline_evaluation.fitted_q import Estimate

    series = client.metrics(run, KEYS, points=MAX_POINTS)
    columns: list[Mapping[int, float | None]] = [
        dict(zip(series[key].steps, series[key].values, strict=True)) if key in series else {}
        for key in KEYS
    ]
    existing = {policy.version for policy in client.policies(run)}
    found = {}
    for version in existing.intersection(*columns):
        value, low, high, with_gamma, with_steps = (column[version] for column in columns)
        if None not in (value, low, high) and (with_gamma, with_steps) == (gamma, steps):
            found[version] = Estimate(value, low, high)  # type: ignore[arg-type]
    return found


def _store(
    client: Client, run: str, version: int, estimate: Estimate, gamma: float, data: RunData
) -> None:
    values = (estimate.value, estimate.low, estimate.high, gamma, float(data.steps))
    now = time.time()
    points = [
        MetricPoint(key=key, step=version, value=value, time=now)
        for key, value in zip(KEYS, values, strict=True)
    ]
    client.log_metrics(run, points)  # one request: all of an estimate or nothing


def evaluated_versions(client: Client, run: str, versions: Sequence[int]) -> dict[int, float]:
    """The mean return of each version that was evaluated in an environment: its newest evaluation,
    in the environment in which most versions were evaluated."""
    by_env: dict[str, dict[int, float]] = {}
    for version in versions:
        for e in client.evaluations(policy=f"{run}/{version}"):  # newest first
            by_env.setdefault(e.env, {}).setdefault(version, e.mean)
    return max(by_env.values(), key=len, default={})


def choose_best(
    estimates: Mapping[int, Estimate], evaluated: Mapping[int, float]
) -> tuple[int, str]:
    """The best version, and by what: "evaluation" if there is any, else "estimate".

    By estimate it is the newest, unless the whole interval of another one is above the newest's:
    on 36 runs the newest was closer to the best than the highest estimate
    (benchmarks/fitted_q.py). Of equal ones the newest.
    """
    if evaluated:
        return max(evaluated, key=lambda version: (evaluated[version], version)), "evaluation"
    newest = max(estimates)
    above = [v for v, e in estimates.items() if e.low > estimates[newest].high]
    best = max(above, key=lambda version: (estimates[version].value, version), default=newest)
    return best, "estimate"


def _print(
    found: RunEstimates,
    evaluated: Mapping[int, float],
    best: int | None,
    published: Sequence[int],
    *,
    set_alias: bool,
) -> None:
    rows: list[tuple[Any, ...]] = [
        (
            str(version),
            float(f"{e.value:.5g}"),
            f"{e.low:.5g} … {e.high:.5g}",
            evaluated.get(version),
            "best" if version == best else "",
        )
        for version, e in found.estimates.items()
    ]
    rows.append(("data", float(f"{found.data:.5g}"), None, None, ""))
    discounted = f"estimate, discounted by {found.gamma:g}"
    columns = ["version", discounted, "95 % interval", "evaluated, not discounted", ""]
    if not evaluated:
        columns.pop(3)
        rows = [row[:3] + row[4:] for row in rows]
    terminal.print_table(columns, rows)
    print(
        f"\nestimate: expected return from initial states, discounted by {found.gamma:g}; from "
        f"{pluralize(found.trajectories, 'trajectory', 'trajectories')}, "
        f"{pluralize(found.steps, 'step')}"
    )
    if evaluated:
        print("evaluated: mean return of whole episodes; compare their order, not their size")
    if limited := _limited(found):
        low, high = found.bounds
        print(
            f"at the limit of possible returns (those of the data and a margin, {low:.5g} … "
            f"{high:.5g}), so the true value may be beyond: {', '.join(map(str, limited))}"
        )
    if found.trajectories == 1:
        print("one trajectory shows no interval; these are the possible returns")
    chosen = None if evaluated or best is None else found.estimates[best]
    if chosen is not None:
        alike = [v for v, e in found.estimates.items() if v != best and e.high >= chosen.low]
        if alike:
            print(f"the intervals do not separate {best} from {', '.join(map(str, alike))}")
    done = f"{found.run}:best is version {best}, by " if set_alias else f"best: version {best}, by "
    if best is None:
        print(
            "none is called best: nothing was evaluated in an environment, and the newest version, "
            f"{max(published)}, is not estimated"
        )
    elif evaluated:
        count = f"{len(evaluated)} of {pluralize(len(published), 'version')}"
        print(f"{done}evaluation in an environment ({count})")
    else:
        print(
            f"{done}the estimates, as nothing was evaluated in an environment (the newest, unless "
            "the interval of another is above its)"
        )


def _limited(found: RunEstimates) -> list[int]:
    """The versions whose values are at a limit in all initial states."""
    low, high = found.bounds
    margin = 1e-6 * (high - low)
    return [
        version
        for version, e in found.estimates.items()
        if low < high and not low + margin < e.value < high - margin
    ]


# --- the command line -----------------------------------------------------------------------------


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = terminal.parser("estimate", ABOUT, EXAMPLES)
    add = parser.add_argument
    add("run", metavar="RUN", help="a training run that has published policies")
    add("--versions", type=_versions, default=None, metavar="V,V,…|all",
        help="versions to estimate (default: all)")  # fmt: skip
    add("--gamma", type=_discount, default=None,
        help="discount of the return (default: that of the run, agent.losses.gamma)")  # fmt: skip
    add("--steps", type=_positive, default=MAX_STEPS,
        help="of more data, some trajectories are used (default: %(default)s)")  # fmt: skip
    add("--again", action="store_true", help="repeat stored estimates")
    add("--no-alias", dest="alias", action="store_false", help="do not set RUN:best")
    policy_commands.add_options(parser)
    return parser.parse_args(argv)


def _versions(text: str) -> list[int] | None:
    if text == "all":
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers of updates, as 1000,2000, or all; got {text!r}"
        ) from None


def _discount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to below 1, got {text!r}")
    return value


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive number of steps, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
