"""Parts that several pages are made of: the page frame, tables with export, SQL notes, dialogs.

Each is a function of data; what a page shows when the service is down or empty is decided here
once. Nothing a stranger wrote (names, notes, logs) is ever rendered as HTML.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, state

LIVE_SECONDS = 5.0


def view(title: str, subtitle: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Frame of a page: its title, and what stands there when the service refuses or is away."""

    def wrap(function: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(function)
        def show() -> None:
            st.title(title)
            if subtitle:
                st.caption(subtitle)
            guarded(function)

        return show

    return wrap


def guarded(function: Callable[[], None]) -> None:
    """Run a part of a page; a refusal becomes a message in its place, never a traceback."""
    try:
        function()
    except api.ServiceUnreachable:
        down()
    except api.StepwellError as error:
        problem(error)


def down() -> None:
    st.error(f"No answer from the service at {api.address()}.", icon=":material/cloud_off:")
    st.write("Start it, or point this dashboard elsewhere with `stepwell dash --url URL`:")
    st.code("stepwell serve --data ./stepwell-data", language=None)
    if st.button("Try again", key="try_again"):
        api.refresh()
        st.rerun()


def problem(error: Exception) -> None:
    """A typed refusal: what was expected and what came are part of its text."""
    st.error(str(error), icon=":material/error:")


def attempt(action: Callable[[], Any], done: str) -> bool:
    """Do a write from a button: a toast when it worked, the refusal's text when not."""
    try:
        action()
    except api.ServiceUnreachable:
        down()
        return False
    except api.StepwellError as error:
        problem(error)
        return False
    st.toast(done, icon=":material/check:")
    return True


def empty(message: str, command: str | None = None) -> None:
    """The empty state of a part: what is missing and the line that brings it."""
    st.info(message, icon=":material/inbox:")
    if command:
        st.code(command, language=None)


def live_interval() -> float | None:
    """Seconds between refreshes of the live parts, or None when the switch is off."""
    return LIVE_SECONDS if st.session_state.get("live", True) else None


def live(function: Callable[[], None]) -> None:
    """Draw a part that refreshes by itself while the sidebar's switch is on."""
    st.fragment(run_every=live_interval())(functools.partial(guarded, function))()


# --- tables and the SQL behind them --------------------------------------------------------------


def sql_note(sql: str, *, dataset: str | None = None, label: str = "SQL") -> None:
    """The query that made a number or a table, ready to copy or to open in the console."""
    # Compact: every table has one. No highlighting here or below: its colours are too pale.
    with st.expander(label, type="compact"):
        st.code(sql, language=None, wrap_lines=True)
        console = state.page("sql")
        if console is not None:
            query = {"q": sql, "dataset": dataset} if dataset else {"q": sql}
            st.page_link(console, label="Open in the SQL console", query_params=query)


def table(
    frame: pd.DataFrame,
    key: str,
    *,
    sql: str | None = None,
    select: str | None = None,
    columns: Mapping[str, Any] | None = None,
    height: int | str = "auto",
    dataset: str | None = None,
) -> list[int]:
    """A table with CSV export and its SQL. Returns positions of the rows selected.

    `select`: None, "single-row" or "multi-row".
    """
    chosen: list[int] = []
    options: dict[str, Any] = {"hide_index": True, "column_config": columns, "height": height}
    if select is None:
        st.dataframe(frame, key=key, **options)
    else:
        event = st.dataframe(frame, key=key, on_select="rerun", selection_mode=select, **options)
        chosen = [int(row) for row in event["selection"]["rows"] if row < len(frame)]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.download_button(
            "CSV",
            frame.to_csv(index=False).encode(),
            file_name=f"{key}.csv",
            mime="text/csv",
            key=f"{key}_csv",
            icon=":material/download:",
            on_click="ignore",
            type="tertiary",
        )
        st.caption(f"{len(frame):,} row{'' if len(frame) == 1 else 's'}")
    if sql is not None:
        sql_note(sql, dataset=dataset)
    return chosen


def numbers(items: Sequence[tuple[str, str, str]]) -> None:
    """A row of figures: (label, value, help)."""
    per_row = len(items) if len(items) <= 5 else -(-len(items) // 2)
    for start in range(0, len(items), per_row):
        for place, (label, value, note) in zip(
            st.columns(per_row), items[start : start + per_row], strict=False
        ):
            place.metric(label, value, help=note or None, border=True)


def histogram_sql(column: str, where: str, bins: int = 30) -> str:
    """Counts of `column` of trajectories in equal bins: columns low, high, n."""
    return (
        f"WITH v AS (SELECT {column} AS x FROM trajectories WHERE {where}),\n"
        f"     w AS (SELECT CASE WHEN max(x) > min(x) THEN min(x) ELSE min(x) - 0.5 END AS lo,\n"
        f"            CASE WHEN max(x) > min(x) THEN (max(x) - min(x)) / {bins} ELSE 1 END AS width"
        " FROM v)\n"
        "SELECT lo + i * width AS low, lo + (i + 1) * width AS high, count(*) AS n\n"
        f"FROM (SELECT *, least(floor((x - lo) / width), {bins - 1}) AS i FROM v, w"
        " WHERE x IS NOT NULL)\n"
        "GROUP BY lo, width, i ORDER BY low"
    )


# --- small pieces ---------------------------------------------------------------------------------

STATE_MARKS = {
    "running": "● running",
    "starting": "◌ starting",
    "paused": "‖ paused",
    "draining": "◌ draining",
    "finished": "✓ finished",
    "stopped": "■ stopped",
    "failed": "✕ failed",
    "lost": "? silent",
    "queued": "… queued",
    "claimed": "◌ claimed",
    "cancelled": "■ cancelled",
    "succeeded": "✓ succeeded",
}


def mark(name: str) -> str:
    """A state as a sign and a word: never by colour alone."""
    return STATE_MARKS.get(name, name)


def confirm_delete(what: str, name: str, key: str, action: Callable[[], None]) -> bool:
    """Deleting asks for the name to be typed: there is no way back."""
    with st.form(key=f"{key}_form", border=True):
        st.write(f"Delete {what} **`{name}`** for ever.")
        typed = st.text_input(f"Type the name of the {what} to confirm", key=f"{key}_name")
        if st.form_submit_button("Delete", icon=":material/delete:", key=f"{key}_go"):
            if typed != name:
                st.warning(f"Nothing deleted: expected the name {name!r}, got {typed!r}.")
                return False
            return attempt(action, f"{what} {name} deleted")
    return False


def tags_of(text: str) -> list[str]:
    """ "a, b" → ["a", "b"]."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def show_json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, default=str)


def excluded_warning(excluded: list[Any]) -> None:
    """Say which damaged files are left out, and how much lies in them."""
    if not excluded:
        return
    lost = sum(one.trajectories for one in excluded)
    names = ", ".join(f"`{one.file}` ({one.trajectories} of {one.dataset})" for one in excluded[:5])
    more = f" and {len(excluded) - 5} more" if len(excluded) > 5 else ""
    st.warning(
        f"{lost:,} trajectories are left out, because their files are damaged: {names}{more}."
        " Restore these files from a backup; `stepwell fsck` names the cure.",
        icon=":material/heart_broken:",
    )
