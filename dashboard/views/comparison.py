"""A comparison of recipes, as `stepwell compare` prints it: a part of the evaluation page."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, charts, components


def section() -> None:
    """A menu of the comparisons, and what is chosen in it; nothing where there are none."""
    names = api.comparisons()
    if not names:
        return
    name = components.choose(
        "Comparison of recipes", names, "comparison", index=None, placeholder="none chosen",
        help="Made by `stepwell compare`; a tag of its runs",
    )  # fmt: skip
    if name is None:
        return
    found = api.comparison(name)
    own = charts.run_colours(found.numbers)
    colours = {row.recipe: own.get(row.recipe, charts.QUIET) for row in found.rows}
    _intervals(found.rows, colours)
    _table(found, colours)
    if found.published:
        scores = ", ".join(f"{name} {score:.1f}" for name, score in found.published.items())
        st.caption(
            f"Published by CORL for this dataset (normalised, last checkpoint, 4 seeds, in D4RL's "
            f"own environment, whose physics may be another version's): {scores}"
        )
    if len({point.updates for point in found.curves}) > 1:
        _curves(found.curves, colours)
    st.divider()


def _intervals(rows: list[Any], colours: dict[str, str]) -> None:
    bars = [
        {
            "label": f"{row.recipe} ({row.seeds} seeds)" if row.seeds else row.recipe,
            "run": row.recipe,
            "value": row.mean,
            "low": row.interval.low if row.interval else row.mean,
            "high": row.interval.high if row.interval else row.mean,
            "episodes": row.episodes,
        }
        for row in rows
        if row.mean is not None
    ]
    if bars:
        mine = {name: colours[name] for name in sorted(bar["run"] for bar in bars)}
        title = "return (mean, 95% interval)"
        chart = charts.intervals(pd.DataFrame(bars), x_title=title, colours=mine)
        st.vega_lite_chart(*chart, key="comparison_intervals")


def _range(interval: Any) -> str:
    return f"{interval.low:.2f} … {interval.high:.2f}" if interval else ""


def _table(found: Any, colours: dict[str, str]) -> None:
    rows = [
        {
            "recipe": row.recipe,
            "seeds": row.seeds or None,
            "mean": row.mean,
            "IQM": row.iqm,
            "interval of the mean": _range(row.interval),
            "interval of the IQM": _range(row.iqm_interval),
            "normalised": row.normalised,
            "episodes": row.episodes or None,
            "updates": row.updates,
            "seconds": row.seconds,
            "alarms": "; ".join(row.alarms),
            "not included": "; ".join(row.problems),
        }
        for row in found.rows
    ]
    columns = {
        "seeds": components.WHOLE,
        "episodes": components.WHOLE,
        "mean": components.HUNDREDTHS,
        "IQM": st.column_config.NumberColumn(
            format="%.2f", help="Interquartile mean over all episodes of all training seeds"
        ),
        "normalised": st.column_config.NumberColumn(
            format="%.1f", help=f"0 = random, 100 = expert, D4RL's reference of {found.reference}"
        ),
        "seconds": st.column_config.NumberColumn(
            format="%.0f", help="Mean training time of a run, without start-up and pauses"
        ),
    }
    marks = [colours[row.recipe] for row in found.rows]
    components.table(
        rows, "comparison_table", sql=found.sql, columns=columns, colours=marks,
        sparse=["normalised", "alarms", "not included"],
    )  # fmt: skip


def _curves(points: list[Any], colours: dict[str, str]) -> None:
    rows = [{"recipe": p.recipe, "updates": p.updates, "mean": p.interval.value} for p in points]
    mine = {name: colours[name] for name in sorted({point.recipe for point in points})}
    chart = charts.lines(
        pd.DataFrame(rows).sort_values("updates"), x="updates", y="mean", x_title="updates",
        y_title="mean return", colour="recipe", colours=mine,
    )  # fmt: skip
    st.vega_lite_chart(*chart, key="comparison_curves")
