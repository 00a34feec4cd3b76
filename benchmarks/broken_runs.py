"""Do the alarms ring? Healthy runs and deliberately broken ones, on data made in seconds.

    python -m benchmarks.broken_runs [--only WORD …] [--keep FOLDER]

Starts a service in a temporary folder, imports a sparse gridworld and a pendulum, and trains each
case of CASES, in small networks. Exit status 1 if no alarm that is expected begins in a
broken run, or if any alarm begins in a healthy run. Without --only, writes
benchmarks/results/broken_runs.json.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import write
from collector.builtin import GRIDWORLD_ID
from stepwell import Client
from stepwell._ports import free_port
from trainer.main import main as train

DATA = {
    "grid": ("gridworld-random --episodes 500", GRIDWORLD_ID),
    "pendulum": ("pendulum-mixed --steps 20000", "Pendulum-v1"),
}
"""name: (arguments of the generator, environment)."""
BEGUN = re.compile(r"^warning: (\w+) at update", re.MULTILINE)
UPDATES = 400
SMALL = """--data.batch 16 --agent.actor.d-hidden 64 --agent.critic.d-hidden 64
--schedule.log-every 10 --optimizer.warmup 50 --device cpu""".split()
UNBOUNDED = "--agent.losses.target-low none --agent.losses.target-high none"
UNSCALED = """--agent.critic.popart.init-mean 0 --agent.critic.popart.init-nu 100
--agent.critic.init-scale 1"""
"""First values that know nothing of the data: networks of usual size, and a scale of 10."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    name: str
    dataset: str
    words: str = "offline"
    """Recipe and flags."""
    expected: frozenset[str] = frozenset()
    """Alarms of which at least one must begin; none for a healthy run."""


def _broken(name: str, dataset: str, flags: str, *expected: str) -> Case:
    return Case(name, dataset, f"offline {flags}", frozenset(expected))


CASES = (
    *(
        Case(f"healthy {recipe}", "pendulum", recipe)
        for recipe in ("offline", "iql", "td3bc", "bc")
    ),
    *(Case(f"healthy {name}", "grid", name) for name in ("offline", "bc10")),
    _broken(
        "unbounded Q",
        "grid",
        f"{UNBOUNDED} {UNSCALED} --agent.losses.reward-multiplier 0.1",
        "q_above_data",
    ),
    _broken(
        "rewards too small",
        "grid",
        f"{UNSCALED} --agent.losses.reward-multiplier 0.01",
        "rewards_too_small",
    ),
    _broken(
        "rewards too small",
        "pendulum",
        f"{UNSCALED} --agent.losses.reward-multiplier 1e-5",
        "rewards_too_small",
    ),
    _broken(
        "rewards too large",
        "pendulum",
        "--agent.losses.reward-multiplier 1e6",
        "rewards_too_large",
    ),
    _broken("tau 1", "grid", "--agent.losses.tau 1", "targets_follow"),
    _broken("tau 1", "pendulum", f"--agent.losses.tau 1 {UNBOUNDED}", "targets_follow"),
    _broken(
        "learning rate too high",
        "pendulum",
        "--optimizer.learning-rate 0.3",
        *("td_error", "q_above_data", "q_below_data", "dormant_critic", "dormant_actor"),
    ),
    _broken(
        "learning rate too high",
        "grid",
        "--optimizer.learning-rate 0.3",
        *("td_error", "q_above_data", "q_below_data", "dormant_critic", "dormant_actor"),
    ),
    _broken(
        "bounds of another scale",
        "pendulum",
        "--agent.losses.target-low -1 --agent.losses.target-high 0",
        "targets_at_bound",
    ),
    _broken(
        "a filter that accepts nothing",
        "pendulum",
        "--agent.losses.filter.threshold 1000",
        "filter_rejects",
    ),
    _broken(
        "DPG without cloning",
        "pendulum",
        "--agent.losses.bc-weight 0 --agent.losses.dpg-weight 1 --updates 1500",
        "actions_saturated",
    ),
)


def measure(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """Train all cases on a service in `folder`. Returns a row for each."""
    url = f"http://127.0.0.1:{free_port()}"
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "STEPWELL_URL": url}
    cli = [sys.executable, "-m", "stepwell.cli"]
    serve = [*cli, "serve", "--data", str(folder / "data"), "--port", url.rpartition(":")[2]]
    with (folder / "service.log").open("wb") as log:
        service = subprocess.Popen(serve, env=environment, stdout=log, stderr=log)
    rows = []
    try:
        with Client(url) as client:
            client.wait_ready()
            for name in sorted({case.dataset for case in cases}):
                words, env = DATA[name]
                kind, *options = words.split()
                file = folder / f"{name}.hdf5"
                generate = [sys.executable, "-m", "collector.builtin", kind, str(file), *options]
                subprocess.run(generate, check=True, stdout=subprocess.DEVNULL, env=environment)
                client.upload(name, file, env=env)
            os.environ["STEPWELL_URL"] = url
            for number, case in enumerate(cases):
                run, began = f"case-{number}", time.monotonic()
                words = [*_words(case), "--dataset", case.dataset, "--run", run]
                words += ["--output", str(folder / "runs")]
                with redirect_stdout(io.StringIO()) as output:
                    status = train([*words, "--data.cache", str(folder / "cache")])
                seconds = time.monotonic() - began
                rows.append(_row(case, client, run, output.getvalue(), seconds))
                rows[-1]["right"] &= status == 0
                print(_line(rows[-1]), flush=True)
    finally:
        service.terminate()
        service.wait(60)
    return rows


def _words(case: Case) -> list[str]:
    recipe, *flags = case.words.split()
    return [recipe, "--updates", str(UPDATES), *SMALL, *flags]


def _row(case: Case, client: Client, run: str, output: str, seconds: float) -> dict[str, Any]:
    begun = sorted(set(BEGUN.findall(output)))
    standing = {alarm.key: alarm for alarm in client.run(run).alarms}
    right = bool(case.expected & set(begun)) if case.expected else not begun
    return {
        "case": case.name,
        "dataset": case.dataset,
        "command": " ".join(["stepwell train", *_words(case)]),
        "expected": sorted(case.expected),
        "begun": begun,
        "standing": [alarm.message for alarm in standing.values()],
        "right": right,
        "seconds": round(seconds, 1),
    }


def _line(row: dict[str, Any]) -> str:
    verdict = "right" if row["right"] else "WRONG"
    rang = ", ".join(row["begun"]) or "silent"
    return f"{verdict}  {row['case']:32} {row['dataset']:10} {row['seconds']:5.0f} s  {rang}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose name contains one")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep service and runs here")
    args = parser.parse_args()
    cases = [c for c in CASES if not args.only or any(word in c.name for word in args.only)]
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        rows = measure(cases, folder)
    for message in (m for row in rows for m in row["standing"]):
        print(f"  {message}")
    if not args.only:
        print(f"written: {write('broken_runs', {'cases': rows}).name}")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
