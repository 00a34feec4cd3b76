"""What the service stores, how much it may store, its jobs, and the check of its index."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard import api, components, formatting
from dashboard.views import jobs

FILES_SQL = (
    "SELECT 'policy' AS kind, count(*) AS files, coalesce(sum(bytes), 0) AS size FROM policies\n"
    "UNION ALL SELECT 'video', count(*), coalesce(sum(bytes), 0) FROM videos"
)
PLURALS = {"policy": "policies", "video": "videos"}
LIMITS = ("trajectories", "steps", "bytes")
CHECK = "check_index"


def stored() -> None:
    """Disk by dataset, with the limits of each, and by kind of file."""
    found = api.datasets()
    if not found:
        components.empty("Nothing is stored yet: datasets appear here with their limits.")
        return
    rows: list[dict[str, Any]] = [
        {
            "dataset": d.name,
            "on disk": d.stored_bytes,
            "fifo steps": d.fifo.steps,
            "limit of steps": d.capacity.steps,
            "fifo size": d.fifo.bytes,
            "limit of size": d.capacity.bytes,
            "fifo trajectories": d.fifo.trajectories,
            "limit of trajectories": d.capacity.trajectories,
            "protected steps": d.protected.steps,
            "evicted": d.evicted,
        }
        for d in found
    ]
    sizes = ["on disk", "fifo size", "limit of size"]
    components.table(rows, "stored", most_height=280, sizes=sizes)
    st.caption(
        "Limits are of the fifo partition, before compression, and empty where there is none: the "
        "oldest trajectories are evicted beyond them. Protected ones never are."
    )
    _change({d.name: d for d in found})
    components.guarded(_files)


def _files() -> None:
    frame = api.sql(FILES_SQL).frame
    parts = [
        f"{formatting.pluralize(row.files, row.kind, PLURALS[row.kind])} "
        f"({formatting.size(row.size)})"
        for row in frame.itertuples()
    ]
    st.caption(f"Besides: {', '.join(parts)}.")


def _change(datasets: dict[str, Any]) -> None:
    with st.expander("Change the limits of a dataset", icon=":material/data_usage:"):
        name = str(st.selectbox("Dataset", list(datasets), key="limits_of"))
        now = datasets[name].capacity
        with st.form(f"limits_{name}", border=False):
            given = {}
            for place, what in zip(st.columns(3), LIMITS, strict=True):
                given[what] = place.number_input(
                    what.capitalize(), min_value=1, value=getattr(now, what), step=1,
                    placeholder="no limit", key=f"limit_{what}_{name}",
                )  # fmt: skip
            st.caption("A smaller limit evicts the oldest trajectories at once, for ever.")
            sure = st.checkbox("Evict what is too much", key=f"limits_sure_{name}")
            sent = st.form_submit_button("Change", key="limits_go")
        if not sent:
            return
        if _evicts(datasets[name], given) and not sure:
            st.warning("Nothing changed: this evicts trajectories. Tick the box to do it.")
            return
        components.change(
            lambda: api.client().patch_dataset(name, capacity=given), f"limits of {name} changed"
        )


def _evicts(dataset: Any, limits: dict[str, Any]) -> bool:
    """Whether less than what is stored may stay. Evaluation trajectories have the same limits."""
    return any(
        limit is not None and max(getattr(dataset.fifo, w), getattr(dataset.eval, w)) > limit
        for w, limit in limits.items()
    )


def index_and_jobs() -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("Check the index", icon=":material/rule:", key="check_index"):
            components.change(api.client().check_index, "the check has begun")
        st.caption(
            "SQLite's own checks, the triggers and the totals, while the service runs. For the "
            "files and for repairs, stop it: `stepwell fsck --data DIR`, `--deep`, `--rebuild`."
        )
    jobs.draw("admin_jobs", _jobs)


def _jobs(listed: list[Any]) -> None:
    _report(next((j for j in listed if j.kind == CHECK and j.result is not None), None))
    running = {job.id: f"{job.kind} {job.dataset} ({job.id})" for job in api.open_jobs()}
    if not running:
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox("Job", list(running), key="job", format_func=running.__getitem__)
        components.confirm(
            "Cancel", "cancel", "It stops, and nothing of it remains.", "job_cancel_go",
            lambda: api.client().cancel_job(str(chosen)), "cancelled",
        )  # fmt: skip


def _report(job: Any) -> None:
    """The result of the newest check."""
    if job is None:
        return
    problems = job.result.get("problems", [])
    when = formatting.ago(job.finished_at)
    if not problems:
        st.success(f"The index was clean {when}.", icon=":material/check:")
        return
    st.error(f"{formatting.pluralize(len(problems), 'problem')} in the index, {when}:")
    components.table(problems, "index_problems")
