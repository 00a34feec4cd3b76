"""Writes results to benchmarks/results/, with command, commit, machine and date."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def provenance() -> dict[str, Any]:
    """Command, commit, machine and date. The commit has the suffix "+changes" if the checkout has
    uncommitted changes outside benchmarks/results."""
    changed = _git("status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results")
    return {
        "command": " ".join(["python", "-m", _module(), *map(_shown, sys.argv[1:])]),
        "commit": _git("rev-parse", "HEAD") + ("+changes" if changed else ""),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write(name: str, result: dict[str, Any]) -> Path:
    """Write the provenance and the result to benchmarks/results/<name>.json."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**provenance(), **result}, indent=2) + "\n")
    return path


def place(page: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found, rest = page.read_text().partition(begin)
    _, ends, tail = rest.partition(end)
    if not (found and ends):
        raise ValueError(f"{page} lacks {begin} … {end}")
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def _shown(argument: str) -> str:
    """An argument; of an absolute path only the last part, without the machine's folders."""
    return Path(argument).name if argument.startswith("/") else argument


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec else Path(sys.argv[0]).stem


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:  # git is not installed
        return "unknown" if args[0] == "rev-parse" else ""
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
