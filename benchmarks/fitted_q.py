"""How well fitted Q evaluation ranks policies: estimates against returns in the environment.

    stepwell compare hopper --env Hopper-v5 --every-policy     for each dataset, at STEPWELL_URL
    python -m benchmarks.fitted_q [--comparisons NAME …] [--fewest 3]

Takes every training run of the comparisons (default: all at the service) of which at least
`--fewest` versions were evaluated in an environment, and estimates each of these versions by
`stepwell estimate`'s method. Per run, and per dataset over all runs with the same discount, it
reports

    spearman   rank correlation of estimates and mean returns (1: the same order)
    regret     return of the best version minus that of the version with the highest estimate,
               as a share of the range of returns (regret@1; 0: the best was chosen, 1: the worst)
    best       the same for the version that `stepwell estimate` calls best
    last       the same for the last version, which is used without an estimate

Writes benchmarks/results/fitted_q.json after every run; the same command continues from it and
repeats no estimate with the same evaluation. Nothing is written to the service.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from benchmarks.report import RESULTS, write
from stepwell import Client
from trainer.offline_evaluation.estimate import MAX_STEPS, choose_best, estimate_run
from trainer.offline_evaluation.fitted_q import Estimate
from workbench.analysis.comparison import NAMES_SQL, read_comparison, recipe_of

NAME = "fitted_q"


def ranks(values: ArrayLike) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Ranks from 0; equal values have their mean rank."""
    array = np.asarray(values, np.float64)
    below = (array[None] < array[:, None]).sum(1)
    return below + ((array[None] == array[:, None]).sum(1) - 1) / 2


def spearman(a: ArrayLike, b: ArrayLike) -> float | None:
    """Rank correlation; None where all values of one are equal."""
    x, y = ranks(a), ranks(b)
    if x.std() == 0 or y.std() == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def regret(returns: ArrayLike, chosen: int) -> float | None:
    """Regret of a choice as a share of the range; None where all returns are equal."""
    array = np.asarray(returns, np.float64)
    spread = float(array.max() - array.min())
    return float(array.max() - array[chosen]) / spread if spread > 0 else None


def agreement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The scores of some policies, in order of their versions."""
    estimates = [row["estimate"] for row in rows]
    returns = [row["return"] for row in rows]
    return {
        "policies": len(rows),
        "spearman": spearman(estimates, returns),
        "regret": regret(returns, int(np.argmax(estimates))),
        "best": regret(returns, [row["version"] for row in rows].index(_best(rows))),
        "last": regret(returns, len(rows) - 1),
    }


def _best(rows: list[dict[str, Any]]) -> int:
    found = {row["version"]: Estimate(row["estimate"], *row["interval"]) for row in rows}
    return choose_best(found, {})[0]


def summary(policies: dict[str, dict[str, Any]], fewest: int) -> dict[str, Any]:
    """Scores per run, per dataset and discount, and their means over runs and datasets."""
    by_run, by_dataset = defaultdict(list), defaultdict(list)
    for row in sorted(policies.values(), key=lambda row: (row["run"], row["version"])):
        by_run[row["run"]].append(row)
        by_dataset[f"{row['dataset']}, discount {row['gamma']:g}"].append(row)
    runs = {
        run: {"dataset": rows[0]["dataset"], "recipe": rows[0]["recipe"], **agreement(rows)}
        for run, rows in by_run.items()
        if len(rows) >= fewest
    }
    datasets = {
        name: {key: value for key, value in agreement(rows).items() if key not in ("best", "last")}
        for name, rows in by_dataset.items()
        if len(rows) >= fewest and len({row["run"] for row in rows}) > 1
    }
    means = {}
    for what, found in (("runs", runs), ("datasets", datasets)):
        for key in ("spearman", "regret", "best", "last"):
            known = [row[key] for row in found.values() if row.get(key) is not None]
            if known:
                means[f"{key}, mean over {len(known)} {what}"] = float(np.mean(known))
    return {"mean": means, "runs": runs, "datasets": datasets}


def measure(client: Client, names: list[str], fewest: int, steps: int, path: Path) -> None:
    """Estimate what is missing in the results at `path`, and write them."""
    before = json.loads(path.read_text()) if path.exists() else {}
    policies: dict[str, dict[str, Any]] = before.get("policies", {})
    for name in names:
        comparison = read_comparison(client, name)
        for run in comparison.runs:
            evaluated = comparison.versions(run.name)
            if len(evaluated) < fewest:
                continue
            todo = [
                version
                for version, e in evaluated.items()
                if policies.get(f"{run.name}/{version}", {}).get("evaluation") != e.id
            ]
            if todo:
                found = estimate_run(client, run, todo, max_steps=steps, store=False)
                for version, estimate in found.estimates.items():
                    e = evaluated[version]
                    policies[f"{run.name}/{version}"] = {
                        "run": run.name,
                        "version": version,
                        "dataset": comparison.dataset,
                        "recipe": recipe_of(run),
                        "env": e.env,
                        "gamma": found.gamma,
                        "steps": found.steps,
                        "data": found.data,
                        "estimate": estimate.value,
                        "interval": [estimate.low, estimate.high],
                        "return": e.mean,
                        "return_interval": [e.ci_low, e.ci_high],
                        "evaluation": e.id,
                    }
                # Only whole runs are written, with all scores so far.
                write(NAME, {**summary(policies, fewest), "policies": policies})
            rows = [policies[f"{run.name}/{version}"] for version in evaluated]
            print(f"{run.name:40} {_shown(agreement(rows))}", flush=True)
    if not policies:
        print(f"no run has {fewest} evaluated versions; see: stepwell compare --every-policy")
        return
    write(NAME, {**summary(policies, fewest), "policies": policies})
    for key, value in summary(policies, fewest)["mean"].items():
        print(f"{key:40} {value:.2f}")


def _shown(scores: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {'-' if value is None else f'{value:.2f}' if key != 'policies' else value}"
        for key, value in scores.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comparisons", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--fewest", type=int, default=3, help="evaluated versions of a run")
    parser.add_argument("--steps", type=int, default=MAX_STEPS, help="of a dataset, at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with Client() as client:
        every = [name for (name,) in client.sql(NAMES_SQL, timeout=60).rows]
        if unknown := set(args.comparisons or ()) - set(every):
            parser.error(f"no comparison {sorted(unknown)}; there are {', '.join(every) or 'none'}")
        path = RESULTS / f"{NAME}.json"
        measure(client, args.comparisons or every[::-1], args.fewest, args.steps, path)


if __name__ == "__main__":
    main()
