"""Overview: stored data, incoming data, active workers and runs, and problems."""

from __future__ import annotations

import functools
import time
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, charts, components, formatting

TOTALS = (
    "SELECT count(*) AS trajectories, coalesce(sum(length), 0) AS transitions,\n"
    "       coalesce(sum(bytes), 0) AS raw_bytes,\n"
    "       count(*) FILTER (WHERE partition = 'protected') AS protected,\n"
    "       count(*) FILTER (WHERE state = 'spooled') AS unsealed,\n"
    "       max(created_at) AS last_ingest\nFROM trajectories"
)
INFLOW = (
    "SELECT floor(({now} - created_at) / 60) AS minutes_ago, count(*) AS trajectories,\n"
    "       sum(length) AS transitions\n"
    "FROM trajectories WHERE created_at > {now} - 3600 GROUP BY 1 ORDER BY 1 DESC"
)


DAY = 86_400
NAMED = 10
"""Maximum items listed per kind of problem; the others are only counted."""
RECENT = 8


@components.view("Overview")
def show() -> None:
    api.prefetch(
        lambda: api.sql(TOTALS),
        _recent,
        lambda: api.sql(_inflow_sql()),
        *(api.datasets, api.health, api.workers, _failed),
        *(lambda: _running(alive=True), lambda: _running(alive=False)),
        lambda: api.jobs(state="failed"),
    )
    if not api.datasets() and not api.runs(limit=1).total:
        components.empty(
            "The service is empty. Upload an offline dataset on the Datasets page, or let the "
            "demo fill it:",
            "stepwell demo",
        )
    components.live(_figures, _active)
    components.live(_alerts, _active)
    left, right = st.columns([2, 3], gap="large")
    with left:
        components.live(_inflow, _active)
    with right:
        components.live(_active_runs, _active)


def _active() -> bool:
    """Whether a worker or a run has a recent heartbeat."""
    return any(w.alive for w in api.workers()) or _running(alive=True).total > 0


def _running(alive: bool) -> Any:
    """Runs of status running with a recent heartbeat, or without one."""
    return api.runs(status="running", alive=alive)


def _failed() -> Any:
    # Rounded to the minute, because the result is cached by its arguments.
    return api.runs(status="failed", since=time.time() // 60 * 60 - DAY)


def _recent() -> Any:
    """The newest runs, with the last steps of their metrics: a curve is read again only after a
    point is added."""
    found = api.runs(limit=RECENT, brief=False)
    api.prefetch(*(functools.partial(_trend, run) for run in found.items))
    return found


def _inflow_sql() -> str:
    # Rounded, so that the cache and the chart change every ten seconds only.
    return INFLOW.format(now=int(time.time() // 10 * 10))


def _figures() -> None:
    answer = api.sql(TOTALS)
    row = answer.frame.iloc[0]
    stored = sum(d.stored_bytes for d in api.datasets())
    alive = [w for w in api.workers() if w.alive]
    running, silent = _running(alive=True).total, _running(alive=False).total
    last = row["last_ingest"]
    components.numbers(
        [
            ("Trajectories", formatting.count(row["trajectories"]), "All partitions and purposes"),
            ("Transitions", formatting.count(row["transitions"]), "Sum of lengths T"),
            ("Array bytes", formatting.size(row["raw_bytes"]), "Before compression"),
            ("On disk", formatting.size(stored), "Parquet shards, also those to be removed"),
            ("Protected", formatting.count(row["protected"]), "Trajectories never evicted"),
            (
                "Not yet sealed",
                formatting.count(row["unsealed"]),
                "Durable, not yet in SQL `steps`",
            ),
            ("Workers", formatting.count(len(alive)), "With a recent heartbeat"),
            ("Running", formatting.count(running), "Runs with a recent heartbeat"),
            ("Silent", formatting.count(silent), "Running, but no heartbeat for 45 s"),
        ]
    )
    ago = formatting.ago(None if pd.isna(last) else float(last))
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(f"Last trajectory {ago}.", width="content")
        components.sql_note(TOTALS, "totals")


def _alerts() -> None:
    health = api.health()
    silent = _running(alive=False)
    failed = _failed()
    workers = api.workers()
    broken = [w for w in workers if w.state == "failed"]
    # A silent run is listed; its worker need not be.
    named = {r.name for r in silent.items}
    lost = [w for w in workers if not w.alive and w.state not in ("stopped", "failed")]
    lost = [w for w in lost if w.run not in named]
    jobs = [j for j in api.jobs(state="failed")[0] if j.created_at > time.time() - DAY]
    with st.container():
        trouble = silent.total or failed.total or broken or lost or jobs
        if health.status == "ok" and not trouble:
            if not _complete():
                return
            st.success("Nothing needs attention.", icon=":material/check_circle:")
            return
        st.markdown("**Needs attention**")
        if health.status != "ok":
            st.warning(f"The service is degraded: {health.detail}", icon=":material/warning:")
        _trouble(
            silent.total, "running run is", "running runs are", "silent", "runs",
            [f"{formatting.code(r.label)} ({formatting.ago(r.heartbeat_at)})"
             for r in silent.items], status="silent",
        )  # fmt: skip
        _trouble(
            failed.total, "run", "runs", "failed within a day", "runs",
            [f"{formatting.code(r.label)}: {_last_line(r.error)}" for r in failed.items],
            status="failed",
        )  # fmt: skip
        _trouble(
            len(broken), "worker", "workers", "failed", "workers",
            [f"{w.id}: {_last_line(w.last_error)}" for w in broken],
        )  # fmt: skip
        _trouble(
            len(lost), "worker is", "workers are", "silent", "workers",
            [f"{w.id} ({w.role}, {formatting.ago(w.heartbeat_at)})" for w in lost],
        )  # fmt: skip
        _trouble(
            len(jobs), "job", "jobs", "failed within a day", "datasets",
            [f"{j.kind}: {j.error.detail if j.error else j.message}" for j in jobs],
        )  # fmt: skip


def _complete() -> bool:
    """Whether the rest of the page can be read: an all-clear beside what cannot is none."""
    try:
        api.sql(TOTALS)
        api.sql(_inflow_sql())
        _recent()
    except api.ServiceUnreachable:
        raise
    except api.StepwellError:
        return False
    return True


def _trouble(
    total: int, one: str, many: str, what: str, page: str, texts: list[str], **query: str
) -> None:
    """Show the first items by name, the total count, and a link to the others."""
    if not total:
        return
    head = f"{formatting.pluralize(total, one, many)} {what}"
    rest = [f"… and {total - NAMED:,} more"] if total > NAMED else []
    st.warning("  \n".join([f"**{head}**", *texts[:NAMED], *rest]), icon=":material/warning:")
    if rest:
        components.link(page, f"All {total:,}", **query)


def _last_line(text: str) -> str:
    return formatting.last_line(text) or "no message"


def _inflow() -> None:
    st.subheader("Inflow, last hour")
    sql = _inflow_sql()
    frame = api.sql(sql).frame
    if frame.empty:
        st.caption("No trajectory arrived within the last hour.")
    else:
        frame = frame.assign(minutes_ago=-frame["minutes_ago"].astype(float))
        # Minutes without trajectories are zeros, not gaps.
        grid = pd.DataFrame({"minutes_ago": [float(-m) for m in range(60, -1, -1)]})
        frame = grid.merge(frame, how="left", on="minutes_ago").fillna(0.0)
        st.vega_lite_chart(
            *charts.lines(
                frame, x="minutes_ago", y="transitions", x_title="time (minutes, 0 = now)",
                y_title="transitions per minute",
            ),
            key="inflow",
        )  # fmt: skip
    components.sql_note(sql, "inflow")


def _active_runs() -> None:
    st.subheader("Runs")
    found = _recent()
    if not found.total:
        components.empty(
            "No run yet. Start a learner:", "stepwell train pendulum_stitch --dataset NAME"
        )
        return
    rows = [
        {
            "run": r.name,
            "title": r.title or "",
            "status": components.run_mark(r),
            "trend": _trend(r),
            "kind": r.kind,
            "heartbeat": r.heartbeat_at,
            "policies": r.policies,
        }
        for r in found.items
    ]
    components.table(
        rows, "recent_runs", colours=list(components.run_colours(found.items).values()),
        columns={"trend": st.column_config.LineChartColumn("trend", help="Of its return or loss")},
        times=["heartbeat"], sparse=["title"],
        sql=f"SELECT name, title, kind, status, heartbeat_at FROM runs ORDER BY created_at DESC"
        f" LIMIT {RECENT}",
    )  # fmt: skip
    if found.total > RECENT:
        components.link("runs", f"The newest {RECENT} of {found.total:,} runs; see all")


def _trend(run: Any) -> list[float]:
    for key in sorted(run.latest_steps, key=_interest)[:3]:
        values = api.trend(run.name, key, run.latest_steps[key])
        if len(values) > 1:
            return values
    return []


def _interest(key: str) -> tuple[int, str]:
    """Sort key: returns first, then losses, then other metrics."""
    for rank, word in enumerate(("return", "loss")):
        if word in key.lower():
            return rank, key
    return 2, key
