"""Required scores of the demo: three training seeds on Pendulum and on LunarLander.

    python -m benchmarks.demo_gate [--env pendulum|lunarlander|all] [--seeds 0 1 2]

Runs `stepwell demo` once per seed and writes the reports to benchmarks/results/. The gate is a
minimum mean return of Stepwell's agent: -250 on pendulum-stitch, 200 on lunarlander-cont-noisy.
Exits 1 if a seed is below it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import write

GATES = {"pendulum": -250.0, "lunarlander": 200.0}


def run(env: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run the demo once and return its JSON report."""
    report = folder / f"{env}-{seed}.json"
    command = [sys.executable, "-m", "stepwell.cli", "demo", "--exit", "--no-dashboard"]
    command += ["--data", str(folder / f"{env}-{seed}"), "--seed", str(seed), "--json", str(report)]
    if env == "lunarlander":
        data = folder / "lunarlander-cont-noisy.hdf5"
        if not data.exists():
            generate = [sys.executable, "-m", "collector.builtin", "lunarlander-noisy", str(data)]
            subprocess.run(generate, check=True)
        command += ["--dataset", str(data), "--env", "LunarLanderContinuous-v3"]
    subprocess.run(command, check=True)
    result: dict[str, Any] = json.loads(report.read_text())
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", choices=[*GATES, "all"], default="all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory() as temporary:
        for env in GATES if args.env == "all" else [args.env]:
            reports = [run(env, seed, Path(temporary)) for seed in args.seeds]
            ours = [report["scores"]["our agent"]["mean"] for report in reports]
            missed += [f"{env}: {value:.1f} < {GATES[env]}" for value in ours if value < GATES[env]]
            path = write(
                f"demo_{env}",
                {
                    "gate": GATES[env],
                    "our_agent_per_seed": ours,
                    "median": statistics.median(ours),
                    "passed": min(ours) >= GATES[env],
                    "runs": reports,
                },
            )
            print(f"{env}: our agent {ours}, gate {GATES[env]}; written to {path}")
    for line in missed:
        print("missed the gate:", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
