"""Overview: what the service holds, what flows in, who is working, and what needs a person."""

from __future__ import annotations

import time

import pandas as pd
import streamlit as st

from dashboard import api, charts, components, state

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


@components.view("Overview")
def show() -> None:
    if not api.datasets() and not api.runs():
        components.empty(
            "The service is empty. Upload an offline dataset on the Datasets page, or let the "
            "demo fill it:",
            "stepwell demo",
        )
    components.live(_figures)
    components.live(_alerts)
    left, right = st.columns([2, 3], gap="large")
    with left:
        components.live(_inflow)
    with right:
        components.live(_active_runs)


def _figures() -> None:
    answer = api.sql(TOTALS)
    row = answer.frame.iloc[0]
    stored = sum(d.stored_bytes for d in api.datasets())
    alive = [w for w in api.workers() if w.alive]
    running = [r for r in api.runs() if r.status == "running"]
    last = row["last_ingest"]
    components.numbers(
        [
            ("Trajectories", state.count(row["trajectories"]), "All partitions and purposes"),
            ("Transitions", state.count(row["transitions"]), "Sum of lengths T"),
            ("Array bytes", state.size(row["raw_bytes"]), "Before compression"),
            ("On disk", state.size(stored), "Parquet shards, with those that wait to be removed"),
            ("Protected", state.count(row["protected"]), "Trajectories never evicted"),
            ("Not yet sealed", state.count(row["unsealed"]), "Durable, not yet in SQL `steps`"),
            ("Workers", state.count(len(alive)), "With a recent heartbeat"),
            ("Running", state.count(len(running)), "Runs of status running"),
        ]
    )
    st.caption(f"Last trajectory {state.ago(None if pd.isna(last) else float(last))}.")
    components.sql_note(TOTALS)


def _alerts() -> None:
    found: list[str] = []
    health = api.health()
    if health.status != "ok":
        found.append(f"The service is degraded: {health.detail}")
    for worker in api.workers():
        if worker.state == "failed":
            last = (worker.last_error or "no message").strip().splitlines()[-1]
            found.append(f"Worker {worker.id} failed: {last}")
        elif not worker.alive and worker.state not in ("stopped",):
            heard = state.ago(worker.heartbeat_at)
            found.append(f"Worker {worker.id} ({worker.role}) was last heard {heard}.")
    day_ago = time.time() - 86_400
    for run in api.runs():
        if run.status == "failed" and run.heartbeat_at > day_ago:
            last = (run.error or "no message").strip().splitlines()[-1]
            found.append(f"Run {run.name} failed: {last}")
    for job in api.jobs():
        if job.state == "failed" and job.created_at > day_ago:
            why = job.error.detail if job.error else job.message
            found.append(f"Job {job.kind} failed: {why}")
    if not found:
        st.success("Nothing needs attention.", icon=":material/check_circle:")
        return
    with st.container(border=True):
        st.markdown(f"**{len(found)} to look at**")
        for text in found[:10]:
            st.warning(text, icon=":material/warning:")
        if len(found) > 10:
            st.caption(f"… and {len(found) - 10} more")


def _inflow() -> None:
    st.subheader("Inflow, last hour")
    # Rounded, so that the cache and the picture change every ten seconds, not at every look.
    sql = INFLOW.format(now=int(time.time() // 10 * 10))
    frame = api.sql(sql).frame
    if frame.empty:
        st.caption("No trajectory arrived within the last hour.")
    else:
        frame = frame.assign(minutes_ago=-frame["minutes_ago"].astype(float))
        # Minutes in which nothing came are zeros, not gaps that a line would bridge.
        grid = pd.DataFrame({"minutes_ago": [float(-m) for m in range(60, -1, -1)]})
        frame = grid.merge(frame, how="left", on="minutes_ago").fillna(0.0)
        st.altair_chart(
            charts.lines(
                frame, x="minutes_ago", y="transitions", x_title="time (minutes, 0 = now)",
                y_title="transitions per minute",
            ),
            key="inflow",
        )  # fmt: skip
    components.sql_note(sql)


def _active_runs() -> None:
    st.subheader("Runs")
    runs = api.runs()[:8]
    if not runs:
        components.empty(
            "No run yet. Start a learner:", "stepwell train pendulum_stitch --dataset NAME"
        )
        return
    frame = pd.DataFrame(
        [
            {
                "run": r.name,
                "status": components.mark(r.status),
                "trend": _trend(r.name),
                "kind": r.kind,
                "heartbeat": state.ago(r.heartbeat_at),
                "policies": r.policies,
            }
            for r in runs
        ]
    )
    components.table(
        frame, "recent_runs",
        columns={"trend": st.column_config.LineChartColumn("trend", help="Of its return or loss")},
        sql="SELECT name, kind, status, heartbeat_at FROM runs ORDER BY created_at DESC LIMIT 8",
    )  # fmt: skip


def _trend(name: str) -> list[float]:
    series = api.metrics(name, 40)
    for key in sorted(series, key=_interest):
        values = [v for v in series[key].values if v is not None]
        if len(values) > 1:
            return values
    return []


def _interest(key: str) -> tuple[int, str]:
    """Returns before losses before the rest."""
    for rank, word in enumerate(("return", "loss")):
        if word in key.lower():
            return rank, key
    return 2, key
