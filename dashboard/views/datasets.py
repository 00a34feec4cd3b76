"""Datasets: the list, statistics of one dataset, and operations on a whole dataset."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, charts, components, formatting
from dashboard.views import jobs, uploads, versions

WARNED = 5
"""Number of newest jobs whose warnings are shown in full; the table has the warnings of all."""
POLICIES = 100
TAB = "dataset_tab"
"""The open tab, in the address."""
SPREADS = (('"return"', "return", "sum of rewards"), ("length", "length", "transitions"))
"""Column, title and unit of the histograms."""
LIST_SQL = (
    "SELECT dataset, count(*) AS trajectories, sum(length) AS transitions,\n"
    "       avg(\"return\") FILTER (WHERE purpose = 'train') AS mean_return\n"
    "FROM trajectories GROUP BY dataset ORDER BY dataset"
)


@components.view("Datasets", "Trajectories under one schema, in two partitions: `fifo` (the oldest "
                 "go when it is full) and `protected` (never deleted by the system).")  # fmt: skip
def show() -> None:
    found = api.datasets()
    with st.container(horizontal=True):
        uploads.popover([d.name for d in found])
        with st.popover("Create an empty dataset", icon=":material/add:", width="content"):
            _create()
    uploads.follow()
    if not found:
        components.empty(
            "No dataset yet. Upload a D4RL or .npz file here, or from a terminal:",
            "curl -T hopper-medium-v2.hdf5 -X POST \\\n"
            "  -H 'Content-Type: application/octet-stream' \\\n"
            f"  '{api.address()}/v1/datasets/hopper/imports?format=d4rl&create=true&env=Hopper-v5'",
        )
        return
    names = [d.name for d in found]
    asked = st.session_state.get("dataset") or st.query_params.get("dataset")
    name = asked if asked in names else names[0]
    if "version" in st.query_params and TAB not in {*st.session_state, *st.query_params}:
        st.session_state[TAB] = "Versions"  # a link to one shows it
    summary = components.open_tab(PARTS, TAB) == "Summary"
    api.prefetch(_read_figures, *(_summary_reads(name) if summary else ()))
    _table(found)
    chosen = components.choose("Dataset", names, "dataset")
    _detail(next(d for d in found if d.name == chosen))


def _read_figures() -> pd.DataFrame:
    return api.sql(LIST_SQL, limit=100_000).frame


def _table(found: list[Any]) -> None:
    figures = _read_figures().set_index("dataset")
    rows = []
    for d in found:
        limits = [
            (d.fifo.trajectories, d.capacity.trajectories),
            (d.fifo.steps, d.capacity.steps),
            (d.fifo.bytes, d.capacity.bytes),
        ]
        full = [have / limit for have, limit in limits if limit]
        rows.append(
            {
                "dataset": d.name,
                "env": d.spec.get("env", ""),
                "fifo": d.fifo.trajectories,
                "protected": d.protected.trajectories,
                "eval": d.eval.trajectories,
                "transitions": figures["transitions"].get(d.name, 0),
                "fifo filled": max(full) if full else None,
                "mean return": figures["mean_return"].get(d.name),
                "on disk": d.stored_bytes,
                "not sealed": d.unsealed,
                "last arrival": d.last_ingest_at,
                "tags": d.tags,
            }
        )
    columns = {
        "fifo filled": components.SHARE,
        "mean return": components.HUNDREDTHS,
        "transitions": components.GROUPED,
    }
    components.table(
        rows, "datasets", sql=LIST_SQL, columns=columns, times=["last arrival"], sizes=["on disk"]
    )


def _detail(dataset: Any) -> None:
    st.subheader(f"`{dataset.name}`")
    components.excluded_warning(dataset.excluded)
    if dataset.description:
        st.write(dataset.description)
    with st.container(horizontal=True):
        for tag in dataset.tags:
            st.badge(tag)
    components.tabs({name: functools.partial(draw, dataset) for name, draw in PARTS.items()}, TAB)


# --- summary and schema ---------------------------------------------------------------------------


def _training(name: str) -> str:
    return f"dataset = {formatting.literal(name)} AND purpose = 'train'"


def _totals_sql(name: str) -> str:
    return (
        "SELECT count(*) AS n, sum(length) AS steps, avg(length) AS length,\n"
        '       avg("return") AS mean, min("return") AS least, max("return") AS most,\n'
        "       avg(CAST(terminated AS INTEGER)) AS terminated\n"
        f"FROM trajectories WHERE {_training(name)}"
    )


def _policies_sql(name: str) -> str:
    return (
        "SELECT policy, source, purpose, count(*) AS trajectories,\n"
        '       avg("return") AS mean_return, avg(length) AS mean_length\n'
        f"FROM trajectories WHERE dataset = {formatting.literal(name)}\n"
        "GROUP BY ALL ORDER BY trajectories DESC"
    )


def _summary_reads(name: str) -> list[Callable[[], object]]:
    """What `_summary` will read."""
    where = _training(name)
    queries = [components.histogram_sql(column, where) for column, _, _ in SPREADS]
    return [
        *(functools.partial(api.sql, query) for query in (_totals_sql(name), *queries)),
        lambda: api.sql(_policies_sql(name), limit=POLICIES),
    ]


def _summary(dataset: Any) -> None:
    sql, where = _totals_sql(dataset.name), _training(dataset.name)
    row = api.sql(sql).frame.astype(float).fillna(float("nan")).iloc[0]
    extent = f"{formatting.decimal(row['least'])} … {formatting.decimal(row['most'])}"
    components.numbers(
        [
            ("Trajectories", formatting.count(row["n"]), "For training"),
            ("Transitions", formatting.count(row["steps"]), "For training"),
            ("Mean return", formatting.decimal(row["mean"]), f"From {extent}"),
            ("Mean length", formatting.decimal(row["length"], 1), "Transitions"),
            ("Terminated", formatting.percent(row["terminated"]), "The others were cut off"),
            ("Evaluation", formatting.count(dataset.eval.trajectories), "Never used for training"),
            ("Evicted", formatting.count(dataset.evicted), "Ever, from fifo"),
            ("Shards", formatting.count(dataset.shards), formatting.size(dataset.stored_bytes)),
        ]
    )
    components.sql_note(sql, "numbers")
    for place, (column, title, unit) in zip(st.columns(2, gap="large"), SPREADS, strict=True):
        with place:
            histogram = components.histogram_sql(column, where)
            bins = api.sql(histogram).frame
            if bins.empty:
                st.caption(f"No {title}s to show yet.")
            else:
                st.vega_lite_chart(
                    *charts.histogram(bins, title=title, unit=unit), key=f"h_{title}"
                )
            components.sql_note(histogram, f"h_{title}")
    sql = _policies_sql(dataset.name)
    st.markdown("**By policy**")
    by_policy = api.sql(sql, limit=POLICIES)
    components.table(by_policy.frame, "by_policy", sql=sql)
    if by_policy.truncated:
        st.caption(f"The first {POLICIES}; the SQL shows all.")


def _schema(dataset: Any) -> None:
    rows = []
    spec = dataset.spec
    for group in ("observations", "actions", "infos"):
        for key, space in (spec.get(group) or {}).items():
            rows.append(
                {
                    "group": group,
                    "key": key,
                    "kind": space.get("type", space.get("kind", "")),
                    "shape": str(space.get("shape", "")),
                    "dtype": space.get("dtype", ""),
                    "role": (spec.get("roles") or {}).get(key, ""),
                }
            )
    components.table(rows, "spaces")
    components.json_note("As JSON (what POST /v1/datasets takes)", spec, "spec")
    st.caption(f"digest of the layout: {dataset.spec_digest}")


def _snapshots(dataset: Any) -> None:
    mine = [s for s in api.snapshots() if dataset.name in s.datasets]
    if not mine:
        components.empty("No snapshot of this dataset: a trainer takes one when it starts.")
        return
    rows = [
        {
            "snapshot": s.id,
            "taken": s.created_at,
            "trajectories": s.trajectories,
            "transitions": s.steps,
            "shards": s.shards,
            "to fetch": s.bytes,
            "lease": "leased" if s.leased_until else "no lease",
            "selection": components.show_json(s.selection),
        }
        for s in mine
    ]
    components.table(rows, "snapshots", times=["taken"], sizes=["to fetch"])


def _imports(_dataset: Any) -> None:
    """Show the imports of all datasets: a job may be the one that creates its dataset."""
    jobs.draw("jobs", _jobs)


def _jobs(listed: list[Any]) -> None:
    newest = listed[:WARNED]
    # Shown in full below the table, because a cell would truncate them.
    for job in newest:
        for warning in jobs.warnings(job):
            st.warning(f"{job.message or job.kind} ({formatting.ago(job.created_at)}): {warning}",
                       icon=":material/warning:")  # fmt: skip
    for job in newest:
        label = f"{components.mark(job.state)}: {job.dataset or job.kind}"
        if st.button(
            f"{label}, {formatting.ago(job.created_at)}", key=f"open_{job.id}", type="tertiary",
            icon=":material/open_in_new:",
        ):  # fmt: skip
            st.query_params[uploads.JOB] = job.id
            st.rerun()


# --- create, change, delete -----------------------------------------------------------------------


def _create() -> None:
    with st.form("create_dataset", border=False):
        name = st.text_input("Name", key="new_name", placeholder="my-data")
        env = st.text_input("Environment", key="new_env", placeholder="Pendulum-v1")
        width = st.number_input("Observation: numbers per step", 1, 100_000, 3, key="new_obs")
        kind = st.segmented_control(
            "Action", ["continuous", "discrete"], default="continuous", key="new_kind",
            required=True,
        )  # fmt: skip
        size = st.number_input("Action: dimensions, or number of choices", 1, 10_000, 1,
                               key="new_size")  # fmt: skip
        bound = st.number_input("Continuous actions lie within ±", 0.01, 1e6, 1.0, key="new_bound")
        capacity = st.number_input(
            "Capacity of fifo (transitions, 0 = unlimited)", 0, 10**12, 0, key="new_capacity"
        )
        description = st.text_input("Description", key="new_description")
        tags = st.text_input("Tags, separated by commas", key="new_tags")
        st.caption("Images, dicts and other spaces: `Client.create_dataset(name, spec)`.")
        sent = st.form_submit_button("Create", type="primary", key="new_go")
    if sent:
        spec = api.vector_spec(int(width), str(kind), int(size), float(bound), env)
        components.change(
            lambda: api.client().create_dataset(
                name, spec, capacity={"steps": int(capacity)} if capacity else {},
                description=description, tags=components.tags_of(tags),
            ),
            f"dataset {name} created",
        )  # fmt: skip


def _manage(dataset: Any) -> None:
    left, right = st.columns(2, gap="large")
    with left:
        _settings(dataset)
    with right:
        _protect(dataset)
        if st.button("Seal now", key="seal", help="Make everything visible in SQL `steps`"):
            components.attempt(lambda: api.client().flush(dataset.name), "sealed")
        held = formatting.pluralize(
            dataset.protected.trajectories, "protected trajectory", "protected trajectories"
        )
        protected = bool(dataset.protected.trajectories) and st.checkbox(
            f"When deleting the dataset, delete its {held}, too", key="delete_dataset_protected"
        )
        components.confirm_delete(
            "dataset",
            dataset.name,
            "delete_dataset",
            lambda: api.client().delete_dataset(dataset.name, protected=protected),
        )


def _settings(dataset: Any) -> None:
    with st.form("dataset_settings", border=True):
        st.markdown("**Settings**, which work while data flows in")
        description = st.text_area("Description", dataset.description, key="set_description")
        tags = st.text_input("Tags, separated by commas", ", ".join(dataset.tags), key="set_tags")
        st.caption("Capacity of fifo; empty = unlimited. The oldest go when any is exceeded.")
        given = {
            field: st.number_input(
                f"At most … {field}", min_value=1, value=getattr(dataset.capacity, field),
                step=1, key=f"set_{field}",
            )
            for field in ("trajectories", "steps", "bytes")
        }  # fmt: skip
        if st.form_submit_button("Save", type="primary", key="set_go"):
            capacity = {k: int(v) for k, v in given.items() if v}
            components.change(
                lambda: api.client().patch_dataset(
                    dataset.name, description=description, tags=components.tags_of(tags),
                    capacity=capacity,
                ),
                "saved",
            )  # fmt: skip


def _protect(dataset: Any) -> None:
    """Move the best of fifo to protected."""
    with st.form("protect", border=True):
        st.markdown("**Protect** trajectories of fifo, so that they are never evicted")
        least = st.number_input(
            "With a return of at least", value=float(dataset.return_mean or 0.0), key="protect_min"
        )
        most = st.number_input("At most … of them, the best first", 1, 10_000, 100,
                               key="protect_n")  # fmt: skip
        sent = st.form_submit_button("Protect", icon=":material/shield:", key="protect_go")
    sql = (
        f"SELECT id FROM trajectories WHERE dataset = {formatting.literal(dataset.name)}\n"
        f"  AND partition = 'fifo' AND \"return\" >= {least!r}\n"
        f'ORDER BY "return" DESC LIMIT {int(most)}'
    )
    components.sql_note(sql, "protect", label="SQL of what would be protected")
    if sent:
        ids = [str(value) for value in api.sql(sql, limit=10_000).frame["id"]]
        if not ids:
            st.info("Nothing in fifo has such a return.")
            return
        components.change(
            lambda: api.client().label_trajectories(ids, protect=True), f"{len(ids)} protected"
        )


PARTS: dict[str, Callable[[Any], None]] = {
    "Summary": _summary,
    "Schema": _schema,
    "Versions": versions.show,
    "Snapshots": _snapshots,
    "Imports": _imports,
    "Manage": _manage,
}
"""Tabs of one dataset."""
