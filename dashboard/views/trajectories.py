"""Trajectories: search, view step by step, and label."""

from __future__ import annotations

from functools import partial

import pandas as pd
import streamlit as st

from dashboard import api, components, formatting
from dashboard.views import episode, labels, launches, thumbnails

PAGE = 100
ORDERS = {
    "newest": "created_at DESC, seq DESC",
    "oldest": "created_at, seq",
    "best return": '"return" DESC',
    "worst return": '"return"',
    "longest": "length DESC",
    "shortest": "length",
}
COLUMNS = (
    'id, dataset, seq, "return", length, terminated, truncated, partition, purpose,'
    " env, policy, run, tags, flags, notes, state, created_at"
)


@components.view(
    "Trajectories", "Filter, open one or two, play them; label one, or all that match."
)
def show() -> None:
    where = _filters()
    count = f"SELECT count(*) AS n FROM trajectories WHERE {where}"
    opened = [
        read
        for one in _opened()
        for read in (partial(api.trajectory, one), partial(api.steps, one))
    ]
    api.prefetch(lambda: api.sql(count), lambda: api.sql(_page_sql(where)), *opened)
    total = int(api.sql(count).frame["n"][0])
    if total == 0:
        components.empty(
            "No trajectory matches." if where != "TRUE" else "No trajectory has arrived yet.",
            None if where != "TRUE" else "stepwell collect --env Pendulum-v1 --random --dataset x",
        )
    else:
        _list(where, total)
    _viewer()


def _filters() -> str:
    """The WHERE clause of the widgets, whose values are all stored in the URL."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        names = ["", *(d.name for d in api.datasets())]
        dataset = components.choose("Dataset", names, "dataset", "all")
        partition = components.choose("Partition", ["", "fifo", "protected"], "partition", "both")
        purpose = components.choose("Purpose", ["", "train", "eval"], "purpose", "both")
        policy = st.text_input("Policy contains", key="policy", bind="query-params")
        label = st.text_input("Tag or flag", key="label", bind="query-params")
        components.choose("Order", list(ORDERS), "order", width=150)
    condition = st.text_input(
        "Further SQL condition", key="where", bind="query-params",
        placeholder="\"return\" > -300 AND length >= 200 AND env = 'Pendulum-v1'",
    )  # fmt: skip
    parts = []
    for column, value in (("dataset", dataset), ("partition", partition), ("purpose", purpose)):
        if value:
            parts.append(f"{column} = {formatting.literal(value)}")
    if policy:
        parts.append(f"contains(policy, {formatting.literal(policy)})")
    if label:
        mark = formatting.literal(label)
        parts.append(f"(list_contains(tags, {mark}) OR list_contains(flags, {mark}))")
    if condition and condition.strip():
        parts.append(f"(\n{_checked(condition.strip())}\n)")
    return " AND ".join(parts) or "TRUE"


def _checked(condition: str) -> str:
    """A condition that the parentheses around it contain.

    The service refuses it here if it is none by itself, such as `false) OR (true`, which would lift
    the other filters. On lines of its own: a comment at its end must not hide the parenthesis.
    """
    api.sql(f"SELECT id FROM trajectories WHERE\n{condition}\nLIMIT 0")
    return condition


def _cameras() -> dict[str, tuple[str, tuple[int, ...]]]:
    return thumbnails.cameras(st.session_state.get("dataset") or None)


def _rows() -> int:
    """Return the number of rows on one page of the list."""
    linked = st.query_params.get("frames", "").lower() == "true"  # before the toggle is drawn
    return thumbnails.ROWS if st.session_state.get("frames", linked) and _cameras() else PAGE


def _page_sql(where: str) -> str:
    """The query of the page of the list that is chosen."""
    asked = st.query_params.get("page", "")
    linked = max(1, int(asked)) if asked.isdecimal() and len(asked) < 9 else 1
    number, rows = st.session_state.get("page", linked), _rows()
    return (
        f"SELECT {COLUMNS}\nFROM trajectories\nWHERE {where}\n"
        f"ORDER BY {ORDERS[st.session_state.get('order', 'newest')]}\n"
        f"LIMIT {rows} OFFSET {(number - 1) * rows}"
    )


def _list(where: str, total: int) -> None:
    cameras = _cameras()
    with_frames = bool(cameras) and st.toggle(
        "First and last frames", key="frames", bind="query-params",
        help=f"Pictures of {thumbnails.ROWS} trajectories at a time",
    )  # fmt: skip
    pages = -(-total // _rows())
    if st.session_state.get("page", 1) > pages:
        st.session_state["page"] = 1
    if pages > 1:
        st.pagination(pages, key="page", bind="query-params")
    sql = _page_sql(where)
    frame = api.sql(sql).frame
    st.caption(formatting.pluralize(total, "matching trajectory", "matching trajectories"))
    chosen = components.table(
        _shown(frame), "trajectories", sql=sql, select="multi-row", most_height=320,
        columns={
            "return": st.column_config.NumberColumn(format="%.3f"),
            **thumbnails.columns(),
        },
        pictures=thumbnails.draw(frame, cameras) if with_frames else None,
        row_height=thumbnails.HEIGHT if with_frames else None, times=["arrived"],
    )  # fmt: skip
    ids = [str(frame["id"].iloc[row]) for row in chosen]
    st.session_state["trajectory_ids"] = [str(value) for value in frame["id"]]
    # A new selection opens its first row; the viewer's buttons can then change it.
    if ids != st.session_state.get("trajectory_selection", []):
        st.session_state["trajectory_selection"] = ids
        if ids:
            st.session_state["id"] = ids[0]
            st.session_state["other"] = ids[1] if len(ids) == 2 else ""
    if dataset := st.session_state.get("dataset"):
        launches.train_link(dataset, where, "Train on all that match")
    labels.many(ids, where, total)


def _shown(frame: pd.DataFrame) -> pd.DataFrame:
    ends = frame["terminated"].map({True: "terminated", False: ""})
    ends = ends.where(~frame["truncated"].astype(bool), "truncated")
    shown = frame.assign(end=ends, arrived=frame["created_at"])
    first = ["id", "dataset", "seq", "return", "length", "end", "partition", "purpose", "policy"]
    rest = [c for c in frame.columns if c not in (*first, "terminated", "truncated", "created_at")]
    return shown[[*first, *rest, "arrived"]]


def _opened() -> list[str]:
    """Ids of the trajectories that are open, before their fields are drawn too."""
    asked = (st.session_state.get(k) or st.query_params.get(k, "") for k in ("id", "other"))
    first, other = (one.strip() for one in asked)
    return [one for one in dict.fromkeys((first, other)) if one] if first else []


def _viewer() -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.text_input(
            "Trajectory", key="id", bind="query-params",
            placeholder="select a row above, or paste an id",
        )  # fmt: skip
        other = st.text_input(
            "Beside it", key="other", bind="query-params",
            placeholder="another id, to compare", help="Two selected rows are shown side by side",
        )  # fmt: skip
        listed: list[str] = st.session_state.get("trajectory_ids", [])
        at = listed.index(chosen) if chosen in listed else None
        st.button(
            "Previous", key="previous", icon=":material/chevron_left:", on_click=_open,
            args=(listed[at - 1] if at else None,), disabled=not at, shortcut="k",
        )  # fmt: skip
        last = at is None or at + 1 >= len(listed)
        st.button(
            "Next", key="next", icon=":material/chevron_right:", on_click=_open,
            args=(None if last or at is None else listed[at + 1],), disabled=last, shortcut="j",
        )  # fmt: skip
    if chosen and chosen.strip():
        components.guarded(lambda: _open_one(chosen.strip(), (other or "").strip()))


def _open(trajectory_id: str | None) -> None:
    if trajectory_id:
        st.session_state["id"] = trajectory_id


def _open_one(trajectory_id: str, other: str) -> None:
    shown = [api.trajectory(one) for one in dict.fromkeys([trajectory_id, other]) if one]
    episode.draw(shown)
    labels.one(shown[0])
