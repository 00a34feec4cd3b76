"""The table of runs: real times and numbers, so that it sorts; progress and expected end; columns
of metrics and settings that the viewer adds."""

from __future__ import annotations

import time
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, components, formatting

DONE, TOTAL, RATE = "progress/updates", "progress/total", "progress/updates_per_second"
MOST_COLUMNS = 20
MOST_OF_NAME, PER_CHARACTER, PADDING, LEAST_WIDTH = 40, 7.2, 20, 120
"""Characters drawn of a run's name; their width in pixels; those of a column."""
SQL = (
    "SELECT r.*, (SELECT count(*) FROM policies p WHERE p.run = r.name) AS policies\n"
    "FROM runs r ORDER BY created_at DESC"
)
METRIC_SQL = (
    "SELECT r.*, m.newest FROM runs r LEFT JOIN (\n"
    "  SELECT run, map(list(key), list(value)) AS newest FROM (\n"
    "    SELECT run, key, arg_max(value, step) AS value FROM metrics\n"
    "    WHERE key IN ({keys}) GROUP BY run, key)\n"
    "  GROUP BY run) m ON m.run = r.name\nORDER BY r.created_at DESC"
)
SPARSE = ("title", "alarms", "tags", "notes", "commit", "snapshots")
COLUMNS = {
    components.MARK: components.MARK_COLUMN,
    "title": st.column_config.TextColumn(width=200),
    "progress": components.SHARE,
    "ends": st.column_config.DatetimeColumn(
        format="distance", help="By its updates per second, if it is running"
    ),
    "heartbeat": components.WHEN,
    "started": components.WHEN,
    "tags": st.column_config.ListColumn(),
    "snapshots": st.column_config.ListColumn(),
    # Wide enough for one alarm and the number of others.
    "alarms": st.column_config.TextColumn(width=190),
}


def keys() -> tuple[str, ...]:
    """Metrics whose newest values the list has to have."""
    return (DONE, TOTAL, RATE, *_shown("metrics"))


def _shown(which: str) -> list[str]:
    """Columns that the viewer added: "metrics" or "settings"."""
    # When a link is opened, the menus are not drawn yet and only the address knows them.
    asked = st.session_state.get(which, st.query_params.get_all(which)) or []
    return [name for name in asked if name][:MOST_COLUMNS]


def menus(names: tuple[str, ...], chosen: list[Any]) -> None:
    """Menus of the columns to add, of what the runs have."""
    columns = st.popover("Columns", icon=":material/view_column:", key="columns", on_change="rerun")
    # The names of all metrics and settings are read only for who looks at them. Menus that are not
    # drawn would forget what was chosen.
    if not (columns.open or _shown("metrics") or _shown("settings")):
        return
    with columns:
        sample = chosen or api.chosen_runs(names[:1])
        metrics = sorted({key for run in sample for key in run.latest_steps})
        st.multiselect(
            "Metrics (newest value)", list(dict.fromkeys([*metrics, *_shown("metrics")])),
            key="metrics", bind="query-params", max_selections=MOST_COLUMNS,
            accept_new_options=True, help="Of the selected runs; others can be typed",
        )  # fmt: skip
        settings = sorted({key for config in api.configs(names).values() for key in config})
        st.multiselect(
            "Settings of their config", list(dict.fromkeys([*settings, *_shown("settings")])),
            key="settings", bind="query-params", max_selections=MOST_COLUMNS,
            accept_new_options=True,
        )  # fmt: skip


def draw(runs: list[Any], key: str, rows: list[int], colours: dict[str, str]) -> None:
    names = tuple(run.name for run in runs)
    metrics, settings = _shown("metrics"), _shown("settings")
    frame = table(runs, metrics, settings, api.configs(names) if settings else {})
    added = {f"{key} ": st.column_config.NumberColumn(key, format="%.5g") for key in metrics}
    for key in settings:
        name = f"config {key}"
        if pd.api.types.is_numeric_dtype(frame[name]):
            added[name] = st.column_config.NumberColumn(format="%.5g")
    short = formatting.shortened(names, MOST_OF_NAME)
    width = round(PER_CHARACTER * max(map(len, short.values()))) + PADDING
    run = {"run": st.column_config.TextColumn(width=max(width, LEAST_WIDTH))}
    shown = components.marked(frame, [colours.get(name, "") for name in names])
    # The cell has the whole name: it is copied, exported, and seen after a double click.
    st.dataframe(
        shown.format(short.__getitem__, subset=["run"]),
        key=key, hide_index=True, column_config=COLUMNS | run | added, placeholder="",
        height=components.height_of(frame, 390),
        on_select="rerun", selection_mode="multi-row",
        selection_default={"selection": {"rows": rows}},
    )  # fmt: skip
    sql = SQL
    if metrics:
        sql = METRIC_SQL.format(keys=", ".join(map(formatting.literal, metrics)))
    components.export(frame, "runs", sql=sql)


def table(
    runs: list[Any], metrics: list[str], settings: list[str], configs: dict[str, dict[str, Any]]
) -> pd.DataFrame:
    """Sorts by each column as what it is."""
    rows = []
    for run in runs:
        done, total = run.latest.get(DONE), run.latest.get(TOTAL)
        config = configs.get(run.name, {})
        rows.append(
            {
                "run": run.name,
                "title": run.title or "",
                "status": components.run_mark(run),
                "progress": min(done / total, 1.0) if done is not None and total else None,
                "ends": _ends(run),
                # Named apart: a metric, a setting and a column of every run may have one name.
                **{f"{key} ": run.latest.get(key) for key in metrics},
                **{f"config {key}": config.get(key) for key in settings},
                "alarms": run.alarm_summary,
                "started": run.created_at,
                "heartbeat": run.heartbeat_at,
                "kind": run.kind,
                "policies": run.policies,
                "seed": run.seed,
                "tags": run.tags,
                "notes": run.notes,
                "commit": run.git_commit[:10],
                "snapshots": run.snapshots,
            }
        )
    frame = pd.DataFrame(rows)
    for column in ("ends", "started", "heartbeat"):
        frame[column] = components.moments(frame[column])
    frame["progress"] = frame["progress"].astype(float)
    frame["seed"] = frame["seed"].astype("Int64")
    for key in metrics:
        frame[f"{key} "] = frame[f"{key} "].astype(float)
    for key in settings:
        frame[f"config {key}"] = _column(frame[f"config {key}"])
    if not any(run.latest.get(TOTAL) for run in runs):
        frame = frame.drop(columns=["progress", "ends"])
    elif not frame["ends"].notna().any():
        frame = frame.drop(columns="ends")
    return components.without_empty(frame, SPARSE)


def _ends(run: Any) -> float | None:
    done, total, rate = (run.latest.get(key) for key in (DONE, TOTAL, RATE))
    if not (run.alive and done is not None and total and rate) or done >= total:
        return None
    # Rounded, so that the table does not change with each look.
    return float(round((time.time() + (total - done) / rate) / 10) * 10)


def _column(values: pd.Series) -> pd.Series:
    """Numbers stay numbers, so that they sort; everything else is text."""
    present = [v for v in values if v is not None]
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in present):
        return values.astype(float)
    return values.map(lambda v: "" if v is None else v if isinstance(v, str) else str(v))
