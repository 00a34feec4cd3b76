"""The recorded learning checks as a table and a picture.

    python -m benchmarks.learn_curves

Reads benchmarks/results/learn_checks.json, which `python -m benchmarks.learn_checks` writes, and
replaces the table of docs/reference/results.md#online and docs/images/learn_checks.svg. AMAGO's
figures are of one seed on two cores at another time: points to look at, and no ratios.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import altair as alt

from benchmarks.learn_checks import BY_KEY, NAME
from benchmarks.report import RESULTS, ROOT, place

PAGE = ROOT / "docs" / "reference" / "results.md"
PICTURE = ROOT / "docs" / "images" / "learn_checks.svg"
COLUMNS = 3
OURS, THEIRS = "stepwell run, a line per seed", "AMAGO 3.3, one seed"


def markdown(results: Mapping[str, Any]) -> str:
    """A row per check."""
    lines = [
        "| check | task | return | after | without memory | AMAGO 3.3 |",
        "|---|---|---|---|---|---|",
    ]
    for key in _keys(results):
        found, blind = results[key], results[key]["without_memory"]
        theirs = [f"{mean:g} at {seconds:g} s" for seconds, mean in BY_KEY[key].amago]
        without = f"{blind[0]['best']:.3g} at most" if blind else ""
        lines.append(
            f"| {key} | {found['task']} | {found['target']:g} | {_reached(found['runs'])} | "
            f"{without} | {', '.join(theirs)} |"
        )
    return "\n".join(lines)


def _reached(runs: list[dict[str, Any]]) -> str:
    """Of each seed when and after how many steps, or the best return and when the run ended."""
    reached = [run["reached"] for run in runs if run["reached"]]
    times = sorted(score["seconds"] for score in reached)
    steps = sorted(score["frames"] for score in reached)
    said = []
    if reached:
        said.append(f"{', '.join(f'{t:.0f}' for t in times)} s")
        said[-1] += (
            f" ({' to '.join(f'{n:,}' for n in dict.fromkeys((steps[0], steps[-1])))} steps)"
        )
    for run in runs:
        if not run["reached"]:
            said.append(
                f"**not reached**: {run['best']:.4g} in {run['scores'][-1]['seconds']:.0f} s"
            )
    return "; ".join(said)


def chart(results: Mapping[str, Any]) -> alt.ConcatChart:
    """Mean return by seconds since the command: a panel per check."""
    return alt.concat(*(_panel(key, results[key]) for key in _keys(results)), columns=COLUMNS)


def _panel(key: str, found: Mapping[str, Any]) -> alt.LayerChart:
    rows = [
        {"seconds": s["seconds"], "mean return": s["mean"], "run": f"{run['seed']}", "who": OURS}
        for run in found["runs"]
        for s in run["scores"]
    ]
    rows += [
        {"seconds": seconds, "mean return": mean, "run": "AMAGO", "who": THEIRS}
        for seconds, mean in BY_KEY[key].amago
    ]
    line = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True, strokeWidth=1.5)
        .encode(
            x=alt.X("seconds:Q", title="seconds since the command", scale=alt.Scale(domainMin=0)),
            y=alt.Y("mean return:Q", title="mean return"),
            detail="run:N",
            color=alt.Color(
                "who:N",
                scale=alt.Scale(domain=[OURS, THEIRS], range=["#1f77b4", "#d95f02"]),
                legend=alt.Legend(title=None, orient="bottom", labelLimit=300),
            ),
        )
    )
    target = (
        alt.Chart(alt.Data(values=[{"target": found["target"]}]))
        .mark_rule(strokeDash=[4, 4], color="gray")
        .encode(y=alt.Y("target:Q", title="mean return"))
    )
    return (target + line).properties(width=220, height=150, title=f"{key} {found['task']}")


def _keys(results: Mapping[str, Any]) -> list[str]:
    """The recorded checks in the order of their list."""
    return [key for key in BY_KEY if key in results]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    results = json.loads((RESULTS / f"{NAME}.json").read_text())
    place(PAGE, "learning checks", markdown(results))
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    chart(results).save(str(PICTURE))
    print(f"wrote {PAGE.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
