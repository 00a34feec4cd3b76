"""Mutation testing with mutmut: the share of small defects that the tests detect.

    make mutants                                        every group, every mutant: hours
    make mutants ARGS='--groups auth order'             some groups
    make mutants ARGS='--groups sql --sample 200'       a random sample of each group's mutants

mutmut changes one expression at a time and runs the tests that reach the changed function. A
mutant is killed if a test fails, or if the tests exceed a timeout of several times their usual
duration. Lines that only log or only contain a string (messages) are not mutated. Each group is
tested in a copy of the checkout under build/mutants/. To print the diff of a survivor:

    cd build/mutants/GROUP && PYTHONPATH=mutants ../../../.venv/bin/mutmut show NAME

Writes benchmarks/results/mutants.json: the results of the measured groups; those of other groups
are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, ROOT, provenance

BUILD = ROOT / "build" / "mutants"
PACKAGES = ("stepwell", "server", "collector", "trainer", "dashboard", "amago_model", "migrations")
GOAL = 0.85
KILLED = {1, 3, 24, -24, 36, 152, 255, -11, -9}
"""Exit codes of a mutant's tests that count as killed: failure, timeout, crash. The same as in
mutmut."""


@dataclass(frozen=True)
class Group:
    sources: tuple[str, ...]
    """Glob patterns of the files to mutate."""
    tests: tuple[str, ...]


INGEST = (
    "test_bulk_insert_units.py",
    "test_integrity_units.py",
    "test_ingest_units.py",
    "test_ingest_core.py",
    "test_recovery_core.py",
    "test_seal_core.py",
    "test_damage_core.py",
    "test_disk_core.py",
    "test_datasets_core.py",
    "test_retention_core.py",
    "test_received_bytes.py",
    "test_threads_core.py",
)
"""The tests of ingest in tests/server/core; the other tests there query stored data."""

GROUPS = {
    "auth": Group(
        ("server/auth.py", "server/rights.py", "server/quotas.py"),
        tuple(f"tests/server/registry/test_{name}.py" for name in ("auth", "rights", "quotas")),
    ),
    "ingest": Group(("server/ingest/*.py",), tuple(f"tests/server/core/{name}" for name in INGEST)),
    "storage": Group(("server/storage/*.py",), ("tests/server/core",)),
    "sql": Group(
        ("server/sql/*.py",),
        ("tests/server/sql", "tests/server/test_query.py", "tests/server/test_sandbox_calls.py"),
    ),
    "outbox": Group(
        ("stepwell/outbox.py", "stepwell/_outbox_folder.py", "stepwell/_outbox_kinds.py"),
        (
            "tests/stepwell/test_outbox_units.py",
            "tests/stepwell/test_stepwell_outbox.py",
            "tests/collector/test_outbox_failpoints.py",
        ),
    ),
    "order": Group(("trainer/data/sampler.py",), ("tests/trainer/test_sampler.py",)),
    "checkpoint": Group(("trainer/checkpoint.py",), ("tests/trainer/test_checkpoint.py",)),
    "losses": Group(
        (
            "amago_model/losses/actor_losses.py",
            "amago_model/losses/critic_losses.py",
            "amago_model/losses/filters.py",
            "amago_model/losses/td_targets.py",
            "amago_model/heads/popart.py",
        ),
        (
            "tests/amago_model/test_loss_formulas.py",
            "tests/amago_model/test_value_and_returns.py",
            "tests/amago_model/test_value_heads.py",
            "tests/amago_model/test_slow_reference.py",
        ),
    ),
}


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    figures = _earlier()
    for name in options.groups:
        print(f"--- {name}", flush=True)
        figures[name] = measure(name, GROUPS[name], options.sample, options.seed, options.jobs)
        RESULTS.joinpath("mutants.json").write_text(json.dumps(figures, indent=2) + "\n")
    short = 0
    for name in options.groups:
        one = figures[name]
        print(f"{name:11} {one['killed']:5} of {one['tested']:5} killed: {one['share']:.1%}")
        short += one["share"] < GOAL
    return 1 if short else 0


def measure(name: str, group: Group, sample: int, seed: int, jobs: int) -> dict[str, Any]:
    """Test the mutants of one group. Returns the counts and the names of the survivors."""
    began = time.monotonic()
    folder = _checkout(name, group)
    environment = os.environ | {
        "PYTHONPATH": str(folder / "mutants"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    run = [sys.executable, "-m", "mutmut"]
    generate = "from mutmut.__main__ import *; copy_src_dir(); create_mutants(1)"
    subprocess.run([sys.executable, "-c", generate], cwd=folder, env=environment, check=True)
    names = sorted(_results(folder))
    chosen = names
    if 0 < sample < len(names):
        chosen = sorted(random.Random(seed).sample(names, sample))
    words = chosen if len(chosen) < len(names) else []
    subprocess.run(
        [*run, "run", "--max-children", str(jobs), *words], cwd=folder, env=environment, check=True
    )
    outcome = _results(folder)
    killed = [n for n in chosen if outcome[n] in KILLED]
    untested = [n for n in chosen if outcome[n] in (5, 33)]
    survived = [n for n in chosen if n not in set(killed) and n not in set(untested)]
    return {
        **provenance(),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "mutants": len(names),
        "tested": len(chosen),
        "killed": len(killed),
        "share": round(len(killed) / len(chosen), 4),
        "reached_by_no_test": untested,
        "survived": survived,
    }


def _checkout(name: str, group: Group) -> Path:
    """Make a new copy of the working tree, without files that git ignores, and with mutmut's
    settings."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for relative in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / relative, folder / relative
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    lists = {
        "source_paths": PACKAGES,
        "only_mutate": group.sources,
        "also_copy": ("benchmarks", "examples", "docs", "README.md", "CHANGELOG.md"),
        "pytest_add_cli_args_test_selection": group.tests,
        "pytest_add_cli_args": (
            "--all",
            "-p",
            "benchmarks.mutants_plugin",
            "-p",
            "no:cacheprovider",
        ),
        "do_not_mutate_patterns": (
            r"\blog\.(debug|info|warning|error|exception)\(",
            r"^\s*[rf]?\"[^\"]*\"[,)]*$",
        ),
    }
    text = "[mutmut]\nprocess_isolation=forkserver\ntimeout_constant=5\nuse_setproctitle=false\n"
    text += "debug=true\n"  # otherwise a failure without mutants does not name the test
    for key, values in lists.items():
        text += f"{key}=\n" + "".join(f"    {value}\n" for value in values)
    (folder / "setup.cfg").write_text(text)
    return folder


def _results(folder: Path) -> dict[str, int | None]:
    """The exit code of every mutant; None if it was not tested."""
    found: dict[str, int | None] = {}
    for path in (folder / "mutants").rglob("*.py.meta"):
        found |= json.loads(path.read_text())["exit_code_by_key"]
    return found


def _earlier() -> dict[str, Any]:
    try:
        return dict(json.loads(RESULTS.joinpath("mutants.json").read_text()))
    except FileNotFoundError:
        return {}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--groups", nargs="+", choices=sorted(GROUPS), default=sorted(GROUPS))
    parser.add_argument("--sample", type=int, default=0, help="mutants per group; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample")
    parser.add_argument(
        "--jobs", type=int, default=4, help="mutants in parallel; can exceed the CPU cores"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
