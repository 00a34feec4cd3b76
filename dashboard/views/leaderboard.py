"""The ranking of one environment's policies: a part of the evaluation page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, charts, components, formatting, ranking

DRAWN = 40
"""Maximum number of bars in the chart."""
PAIRS = 8
"""Rows in the table of probabilities of improvement."""
SQL = (
    "SELECT policy, run, env, episodes, mean, iqm, ci_low, ci_high, confidence, normalised,"
    " dataset, created_at\nFROM evaluations WHERE env = {env} ORDER BY created_at DESC"
)
STATISTICS = {"mean": "mean", "IQM": "interquartile mean"}


def controls() -> tuple[ranking.Pick, str]:
    """Which version of a run counts, and which statistic is drawn."""
    pick = st.segmented_control(
        "Version of each run", ["newest", "best"], default="newest", key="pick",
        required=True, bind="query-params",
        help="The best of many noisy scores flatters; the newest is what training ended with",
    )  # fmt: skip
    statistic = st.segmented_control(
        "Statistic", list(STATISTICS), default="mean", key="statistic", required=True,
        bind="query-params", help="IQM: the mean of the middle half of all episodes",
    )  # fmt: skip
    return "best" if pick == "best" else "newest", str(statistic)


def draw(env: str, pick: ranking.Pick, statistic: str) -> None:
    """Policies and references of one environment, with intervals of what is drawn."""
    rows = ranking.leaderboard(env, pick)
    labels, colours = looks(rows)
    _chart(rows, env, statistic, labels, colours)
    _table(rows, env, labels, colours)
    _improvement([row for row in rows if row.evaluations][:PAIRS], labels)


def looks(rows: Sequence[Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The text of each row, by its name, and its colour."""
    known = api.known_runs(run for row in rows for run in row.runs)
    return {row.name: _titled(row, known) for row in rows}, _colours(rows, known)


def _titled(row: Any, known: dict[str, Any]) -> str:
    """The name of a row with the title that all of its runs have."""
    titles = {run.title for run in map(known.get, row.runs) if run is not None}
    title = titles.pop() if len(titles) == 1 else None
    return f"{title} ({row.name})" if title else str(row.name)


def _colours(rows: Sequence[Any], known: dict[str, Any]) -> dict[str, str]:
    """Name of a row → the colour of the oldest of its runs; references have none of their own."""
    found = {row.name: [known[run].number for run in row.runs if run in known] for row in rows}
    own = charts.run_colours({name: min(numbers) for name, numbers in found.items() if numbers})
    return {row.name: own.get(row.name, charts.QUIET) for row in rows}


def _chart(
    rows: list[Any], env: str, statistic: str, labels: dict[str, str], colours: dict[str, str]
) -> None:
    found = [(row, ranking.interval_of(row, statistic)) for row in rows]
    known = [(row, one) for row, one in found if one is not None]
    shown = sorted(known, key=lambda pair: pair[1].value, reverse=True)[:DRAWN]
    bars = [
        {
            "label": _label(row, labels),
            "env": env,
            "run": row.name,
            "value": one.value,
            "low": one.low,
            "high": one.high,
            "episodes": one.n or None,
        }
        for row, one in shown
    ]
    mine = {row.name: colours[row.name] for row, _ in shown}
    title = f"return ({STATISTICS[statistic]}, 95% interval)"
    chart = charts.intervals(pd.DataFrame(bars), x_title=title, colours=mine)
    st.vega_lite_chart(*chart, key="leaderboard_chart")
    if len(known) > DRAWN:
        st.caption(f"The first {DRAWN} of {len(known):,}; the table has all.")


def _width(row: Any, interval: Any) -> str | None:
    """An interval as text; a reference that nobody played has none."""
    return f"{interval.low:.2f} … {interval.high:.2f}" if row.evaluations else None


def _label(row: Any, labels: dict[str, str]) -> str:
    seeds = len(row.evaluations)
    return labels[row.name] + (f" ({seeds} seeds)" if seeds > 1 else "")


def _table(rows: list[Any], env: str, labels: dict[str, str], colours: dict[str, str]) -> None:
    cells = [
        {
            "policy": labels[row.name],
            "seeds": len(row.evaluations) or None,
            "mean": row.mean.value,
            "interval of the mean": _width(row, row.mean),
            "IQM": row.iqm.value if row.iqm else None,
            "interval of the IQM": _width(row, row.iqm),
            "normalised": row.normalised(env),
            "episodes": row.mean.n or None,
            "policies": ", ".join(row.policies),
            "evaluated": max((e.created_at for e in row.evaluations), default=None),
        }
        for row in rows
    ]
    columns = {
        "seeds": components.WHOLE,
        "episodes": components.WHOLE,
        "mean": components.HUNDREDTHS,
        "IQM": components.HUNDREDTHS,
        "normalised": st.column_config.NumberColumn(
            format="%.1f", help="0 = random, 100 = expert, on the D4RL scale"
        ),
    }
    components.table(
        cells, "leaderboard", sql=SQL.format(env=formatting.literal(env)), columns=columns,
        colours=[colours[row.name] for row in rows], times=["evaluated"], sparse=["normalised"],
    )  # fmt: skip


def _improvement(rows: list[Any], labels: dict[str, str]) -> None:
    if len(rows) < 2:
        return

    def draw_table() -> None:
        st.caption(
            "How likely an episode of the row has a higher return than one of the column; "
            "50% means no difference. In brackets the 95% interval over seeds and episodes."
        )
        cells = {row.name: ranking.improvements(row, rows) for row in rows}
        shown = [
            {"policy": labels[name]} | {labels[n]: text for n, text in found.items()}
            for name, found in cells.items()
        ]
        components.table(shown, "improvement")

    label = "Who is better? Probability of improvement"
    components.folder(label, "improvement", draw_table)
