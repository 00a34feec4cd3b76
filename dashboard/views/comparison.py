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
    frame = pd.DataFrame(
        [
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
    )
    if len(frame):
        st.vega_lite_chart(
            *charts.intervals(
                frame, x_title="return (mean, 95% interval)",
                colours={name: colours[name] for name in sorted(frame["run"])},
            ),
            key="comparison_intervals",
        )  # fmt: skip


def _range(interval: Any) -> str:
    return f"{interval.low:.2f} … {interval.high:.2f}" if interval else ""


def _table(found: Any, colours: dict[str, str]) -> None:
    frame = pd.DataFrame(
        [
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
    )
    if found.reference is None:
        frame = frame.drop(columns="normalised")
    empty = [name for name in ("alarms", "not included") if not frame[name].any()]
    frame = frame.drop(columns=empty)
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
    components.table(frame, "comparison_table", sql=found.sql, columns=columns, colours=marks)


def _curves(points: list[Any], colours: dict[str, str]) -> None:
    frame = pd.DataFrame(
        [{"recipe": p.recipe, "updates": p.updates, "mean": p.interval.value} for p in points]
    ).sort_values("updates")
    st.vega_lite_chart(
        *charts.lines(
            frame, x="updates", y="mean", x_title="updates", y_title="mean return",
            colour="recipe", colours={name: colours[name] for name in sorted(set(frame["recipe"]))},
        ),
        key="comparison_curves",
    )  # fmt: skip
