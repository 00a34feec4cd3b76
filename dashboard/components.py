"""Components shared by pages: the page frame, tables with export, SQL notes, dialogs.

Each is a function of data. This module also defines what pages show when the service is down or
empty. Text from users (names, notes, logs) is never rendered as HTML.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import pandas as pd
import streamlit as st

from dashboard import api, charts, login
from dashboard.formatting import code, pluralize

LIVE_SECONDS = 5.0
IDLE_SECONDS = 30.0
"""Seconds between refreshes of a live part without activity."""
RETRY_SECONDS = 3.0
"""Seconds between checks whether the service is available again."""
FIGURE = 160
"""Width of a figure in pixels: two fit on a telephone."""
OPEN = "_open"
"""End of the keys of folders only; such a key is true in the session's state while it is open."""
MARK = "⬤"
# Not pinned: Streamlit draws pinned columns pale, and the colour would be another.
MARK_COLUMN = st.column_config.TextColumn("", width=34, help="The colour of the run in charts")
WHEN = st.column_config.DatetimeColumn(format="distance")
"""A column of times, drawn as "2 hours ago": it sorts by time, unlike such a text."""
SIZE = st.column_config.NumberColumn(format="bytes")
"""A column of bytes, drawn as "1.2MB"."""
WHOLE = st.column_config.NumberColumn(format="%d")
HUNDREDTHS = st.column_config.NumberColumn(format="%.2f")
GROUPED = st.column_config.NumberColumn(format="localized")
SHARE = st.column_config.ProgressColumn(format="percent", min_value=0.0, max_value=1.0)
"""A column of numbers from 0 to 1, drawn as a bar."""
_AWAY, _PAGES, _REFUSED = "_away", "_pages", "_refused"


def remember_pages(pages: dict[str, Any]) -> None:
    """Store page name → st.Page, so that views can link to one another. Called by the router."""
    st.session_state[_PAGES] = pages


def link(page: str, label: str, icon: str = "", **query: str) -> None:
    """A link to another page; nothing if a view is run without the router (as in tests)."""
    found = st.session_state.get(_PAGES, {}).get(page)
    if found is not None:
        st.page_link(found, label=label, icon=_icon(icon), query_params=query)


def _icon(name: str) -> str | None:
    return f":material/{name}:" if name else None


def view(title: str, subtitle: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Frame of a page: its title, and a message if the service returns an error or is down."""

    def wrap(function: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(function)
        def show() -> None:
            st.title(title)
            if is_away():
                notice()
                # Not a normal end of the script: the widgets' state is kept until the page returns.
                st.stop()
            if _REFUSED in st.session_state:
                _log_in()
                st.stop()
            if subtitle:
                st.caption(subtitle)
            guarded(function)

        return show

    return wrap


def guarded(function: Callable[[], None]) -> None:
    """Run a part of a page. An error of the service is shown as a message, not a traceback."""
    try:
        function()
    except api.ServiceUnreachable as error:
        away(error)
    except api.Unauthorized as error:
        if error.status != 401:
            forbidden(error)
            return
        # No token, or one that is no longer valid: the whole page is the form of a login.
        st.session_state[_REFUSED] = str(error)
        st.rerun()
    except api.StepwellError as error:
        problem(error)


def forbidden(error: api.Unauthorized) -> None:
    """One sentence in place of a part that the token may not read: that is no error."""
    needed = str(error.expected or "").removeprefix("one of ").split(", ")
    if error.code != "forbidden" or not error.got:
        problem(error)
        return
    # Not admin where less is enough.
    names = [code(name) for name in needed if name != "admin"] or [code("admin")]
    has = ", ".join(code(name) for name in str(error.got).split(", "))
    st.caption(
        f":material/lock: Not shown: this needs a token with the scope {' or '.join(names)}; "
        f"yours has {has}."
    )


def _log_in() -> None:
    if login.form():
        st.session_state.pop(_REFUSED, None)
        st.rerun()


# --- a service that is away -----------------------------------------------------------------------


def is_away() -> bool:
    return _AWAY in st.session_state


def away(error: Exception) -> NoReturn:
    """Redraw the whole page as one notice, whichever part detects the outage."""
    st.session_state[_AWAY] = (str(error), time.monotonic())
    st.rerun()


def notice() -> None:
    """Shown instead of the page until the service responds; then the page returns automatically."""
    why, _ = st.session_state[_AWAY]
    st.error(f"No answer from the service at {api.address()}.", icon=":material/cloud_off:")
    st.caption(why)
    st.write(
        "This page retries every few seconds and comes back by itself. Start the service, or "
        "point the dashboard elsewhere with `stepwell dash --url URL`:"
    )
    st.code("stepwell serve --data ./stepwell-data", language=None)
    st.button("Try again", key="try_again", on_click=_return)
    st.fragment(run_every=RETRY_SECONDS)(_retry)()


def _retry() -> None:
    # If the service is ready but the page's requests fail, wait before the next attempt.
    _, since = st.session_state.get(_AWAY, ("", 0.0))
    if time.monotonic() - since >= RETRY_SECONDS / 2 and api.is_ready():
        _return()
        st.rerun()


def _return() -> None:
    st.session_state.pop(_AWAY, None)
    api.refresh()


def problem(error: Exception) -> None:
    """Show a typed error. Its text contains the expected and the received value."""
    st.error(str(error), icon=":material/error:")


def attempt(action: Callable[[], Any], done: str) -> bool:
    """Run a write from a button. On success, show a toast and clear the cache, else the error."""
    try:
        action()
    except api.ServiceUnreachable as error:
        # The user's input is kept; the page switches to the notice at its next refresh.
        st.error(f"Not known whether this was done: {error}", icon=":material/cloud_off:")
        return False
    except api.StepwellError as error:
        problem(error)
        return False
    api.refresh()
    st.toast(done, icon=":material/check:")
    return True


def change(action: Callable[[], Any], done: str) -> None:
    """Run a write from a button; on success, draw the page anew with what it changed."""
    if attempt(action, done):
        st.rerun()


def confirm(
    label: str, icon: str, warning: str, key: str, action: Callable[[], Any], done: str
) -> None:
    """A button that says what its click does, and asks for a second one."""
    with st.popover(label, icon=_icon(icon)):
        st.write(warning)
        if st.button(f"{label} it", type="primary", key=key):
            change(action, done)


def empty(message: str, command: str | None = None) -> None:
    """The empty state of a part: what is missing, and the command that creates it."""
    st.info(message, icon=":material/inbox:")
    if command:
        st.code(command, language=None)


def commands(*lines: str) -> None:
    """Command lines beside what they are about. Not st.code, for which a browser first runs 1.5 MB
    of scripts (0.4 s)."""
    st.markdown("  \n".join(code(line) for line in lines))


def live(function: Callable[[], None], active: Callable[[], bool] = lambda: True) -> None:
    """Draw a part that refreshes automatically while the sidebar's switch is on.

    The interval is LIVE_SECONDS while `active` is true, else IDLE_SECONDS, so that an idle page
    has a low cost.
    """
    was = active()
    seconds = LIVE_SECONDS if was else IDLE_SECONDS
    drawn = False

    def part() -> None:
        nonlocal drawn
        # The interval is determined when the whole page is drawn.
        if drawn and active() != was:
            st.rerun()
        drawn = True
        function()

    interval = seconds if st.session_state.get("live", True) else None
    st.fragment(run_every=interval)(functools.partial(guarded, part))()


# --- long lists -----------------------------------------------------------------------------------


class Pages:
    """The current page of a list that the service returns by cursor.

    `filters`: the list's filters; changing a filter returns to the newest page.
    """

    def __init__(self, key: str, filters: object = None):
        self.key = key
        place: Any = st.session_state.get(f"{key}_pages")
        if place is None or place[0] != filters:
            place = (filters, [None])
        self._filters: object
        self._cursors: list[str | None]
        self._filters, self._cursors = place
        st.session_state[f"{key}_pages"] = place

    @property
    def cursor(self) -> str | None:
        return self._cursors[-1]

    def _go(self, cursors: list[str | None]) -> None:
        st.session_state[f"{self.key}_pages"] = (self._filters, cursors)

    def draw(self, shown: int, following: str | None, total: int | None = None) -> None:
        """Show the range of rows and buttons for other pages; nothing if all rows are shown."""
        newer = len(self._cursors) > 1
        if not newer and following is None:
            return
        first = api.PAGE * (len(self._cursors) - 1) + 1
        rows = f"{first:,}–{first + shown - 1:,}" if shown else "none"
        more = "; there are older ones" if following is not None else ""
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button(
                "Newer", key=f"{self.key}_newer", icon=":material/chevron_left:",
                disabled=not newer, on_click=self._go, args=(self._cursors[:-1] or [None],),
            )  # fmt: skip
            st.button(
                "Older", key=f"{self.key}_older", icon=":material/chevron_right:",
                disabled=following is None, on_click=self._go, args=([*self._cursors, following],),
            )  # fmt: skip
            of = f" of {total:,}" if total is not None else more
            st.caption(f"Rows {rows}{of}, newest first")


# --- tables and the SQL behind them --------------------------------------------------------------


def choose(
    label: str, options: Sequence[Any], key: str, none: str = "", *, linked: bool = True, **how: Any
) -> Any:
    """A menu whose choice is in the address, as `key`, if it is `linked`.

    Streamlit forgets a choice that is none of the options, as of an old link. `none`: the text of
    the option "" or None.
    """
    if none:
        how["format_func"] = lambda option: option or none
    return st.selectbox(label, options, key=key, bind="query-params" if linked else None, **how)


def menu(label: str, options: Mapping[str, str], key: str) -> str:
    """A menu of value → text, at least one. The address has the value, whatever the text is."""
    if (asked := st.query_params.get(key)) in options:
        st.session_state[key] = asked

    def write() -> None:
        st.query_params[key] = st.session_state[key]

    chosen: str = choose(
        label, list(options), key, linked=False, format_func=options.__getitem__, on_change=write
    )
    return chosen


def columns(items: Sequence[Any], count: int, **how: Any) -> Iterator[tuple[Any, Any]]:
    """Each item with its place, `count` to a row."""
    for start in range(0, len(items), count):
        yield from zip(st.columns(count, **how), items[start : start + count], strict=False)


def folder(
    label: str,
    key: str,
    draw: Callable[[], object],
    icon: str = "",
    *,
    expanded: bool = False,
    linked: bool = False,
    compact: bool = False,
) -> None:
    """An expander: what is in it is read and drawn only while it is open.

    Opening it draws nothing else again, unless it is `linked`: the address says so, too.
    """

    def part() -> None:
        bind: Any = "query-params" if linked else None
        with st.expander(
            label, expanded, key=f"{key}{OPEN}", icon=_icon(icon), on_change="rerun", bind=bind,
            type="compact" if compact else "default",
        ) as opened:  # fmt: skip
            if opened.open:
                draw()

    (part if linked else st.fragment(part))()


def tabs(parts: Mapping[str, Callable[[], None]], key: str) -> None:
    """Tabs by their labels. Only the open one is read and drawn; the address has it as `key`.

    A key of one page only: of one that two pages share, the way from one to the other would leave
    addresses in the browser's history that nobody visited.
    """
    drawn = st.tabs(list(parts), key=key, bind="query-params")
    for tab, draw in zip(drawn, parts.values(), strict=True):
        with tab:
            if tab.open:
                guarded(draw)


def open_tab(labels: Iterable[str], key: str) -> str:
    """The tab that is open, or will be when `tabs` draws it."""
    asked = st.session_state.get(key) or st.query_params.get(key)
    known = list(labels)
    return str(asked) if asked in known else known[0]


def json_note(label: str, value: Any, key: str) -> None:
    """A value as JSON, once it is opened."""
    folder(label, key, lambda: st.code(show_json(value), language=None))


def sql_note(sql: str, key: str, *, dataset: str | None = None, label: str = "SQL") -> None:
    """Show the query of a number or a table, to copy or to open in the console, once it is opened.

    `key`: one per page and note; it stays open under another query.
    """

    def draw() -> None:
        # No syntax highlighting: its contrast is too low.
        st.code(sql, language=None, wrap_lines=True)
        named = {"dataset": dataset} if dataset else {}
        link("sql", "Open in the SQL console", q=sql, **named)

    # Compact, because every table has one. Code is drawn only if it is open: for the first code of
    # a page, the browser runs 1.5 MB of scripts.
    folder(label, key, draw, compact=True)


def table(
    rows: pd.DataFrame | Sequence[Mapping[str, Any]],
    key: str,
    *,
    sql: str | None = None,
    select: str | None = None,
    columns: Mapping[str, Any] | None = None,
    most_height: int | None = None,
    dataset: str | None = None,
    pictures: pd.DataFrame | None = None,
    row_height: int | None = None,
    colours: Sequence[str] = (),
    missing: str = "",
    times: Sequence[str] = (),
    sizes: Sequence[str] = (),
    sparse: Sequence[str] = (),
) -> list[int]:
    """A table with CSV export and its SQL. Returns positions of the rows selected.

    `select`: None, "single-row" or "multi-row". `pictures`: columns drawn first, not exported.
    `most_height`: pixels of a long table, which then scrolls, whatever Streamlit's own limit is.
    `colours`: one per row, or "", of a mark drawn first. `missing`: drawn where there is no value.
    `times`, `sizes`: columns of seconds since 1970, and of bytes. `sparse`: left out where empty.
    """
    chosen: list[int] = []
    frame = without_empty(pd.DataFrame(rows), sparse)
    frame = frame.assign(**{name: moments(frame[name]) for name in times if name in frame})
    config = {**dict.fromkeys(times, WHEN), **dict.fromkeys(sizes, SIZE), **(columns or {})}
    if colours:
        config[MARK] = MARK_COLUMN
    height = "auto" if most_height is None else height_of(frame, most_height, row_height or 35)
    options: dict[str, Any] = {"hide_index": True, "column_config": config, "height": height}
    options |= {"row_height": row_height, "placeholder": missing}
    shown: Any = frame if pictures is None else pd.concat([pictures, frame], axis="columns")
    if colours:
        shown = marked(shown, colours)
    if select is None:
        st.dataframe(shown, key=key, **options)
    else:
        options |= {"on_select": "rerun", "selection_mode": select}
        event: Any = st.dataframe(shown, key=key, **options)
        chosen = [int(row) for row in event["selection"]["rows"] if row < len(frame)]
    export(frame, key, sql=sql, dataset=dataset)
    return chosen


def without_empty(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Without those of the columns `names` that say nothing in any row."""
    empty = [n for n in names if not frame[n].dropna().map(lambda v: bool(v) or v == 0).any()]
    return frame.drop(columns=empty)


def height_of(frame: pd.DataFrame, most: int, row: int = 35) -> int:
    """Pixels of a table with all its rows, or at most so many. `row`: those of one."""
    return min(most, 38 + row * len(frame))


def moments(seconds: pd.Series) -> pd.Series:
    """Seconds since 1970, or None, as times."""
    return pd.to_datetime(seconds.astype(float), unit="s", utc=True)


def marked(frame: pd.DataFrame, colours: Sequence[str]) -> Any:
    """The table with a first column of marks in these colours; "" is no mark."""
    shown = frame.copy()
    shown.insert(0, MARK, [MARK if colour else "" for colour in colours])
    paint = [f"color: {colour}" if colour else "" for colour in colours]
    return shown.style.apply(lambda _: paint, subset=[MARK])


def export(
    frame: pd.DataFrame, key: str, *, sql: str | None = None, dataset: str | None = None
) -> None:
    """What stands below a table: its CSV, its number of rows and its SQL."""
    with st.container(horizontal=True, vertical_alignment="center"):
        download(
            "CSV",
            lambda: frame.to_csv(index=False).encode(),
            f"{key}.csv",
            "text/csv",
            f"{key}_csv",
        )
        st.caption(pluralize(len(frame), "row"), width="content")
        if sql is not None:
            sql_note(sql, key, dataset=dataset)


def download(label: str, data: Any, file: str, mime: str, key: str, **how: Any) -> None:
    """A small button that saves `data`, or what it returns, as a file; it draws nothing again."""
    options: dict[str, Any] = {"type": "tertiary", "icon": ":material/download:"}
    options |= {"on_click": "ignore", **how}
    st.download_button(label, data, file, mime, key=key, **options)


def numbers(items: Sequence[tuple[str, str, str]]) -> None:
    """Figures side by side, as many to a row as fit: (label, value, help)."""
    with st.container(horizontal=True):
        for label, value, note in items:
            st.metric(label, value, help=note or None, border=True, width=FIGURE)


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
    "waiting": "◌ waiting",
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
    """A state as a symbol and a word: never indicated by colour alone."""
    return STATE_MARKS.get(name, name)


def run_colours(runs: Iterable[Any]) -> dict[str, str]:
    """Name of a run → its colour, on every page."""
    return charts.run_colours({run.name: run.number for run in runs})


def run_mark(run: Any) -> str:
    """The mark of a run's state; a running run without a recent heartbeat is shown as silent, and
    one that ended with something to tell, such as broken episodes, without its check mark."""
    if run.status == "finished" and run.error:
        return "! finished"
    return mark("lost" if run.status == "running" and not run.alive else run.status)


def confirm_delete(what: str, name: str, key: str, action: Callable[[], None]) -> bool:
    """Confirm a deletion by typing the name, because it cannot be undone."""
    with st.form(key=f"{key}_form", border=True):
        st.write(f"Delete {what} **`{name}`** for ever.")
        typed = st.text_input(f"Type the name of the {what} to confirm", key=f"{key}_name")
        if st.form_submit_button("Delete", icon=":material/delete:", key=f"{key}_go"):
            if typed != name:
                st.warning(f"Nothing deleted: expected the name {name!r}, got {typed!r}.")
                return False
            return attempt(action, f"{what} {name} deleted")
    return False


def digest(names: Sequence[str]) -> str:
    """A short key of a list of names, for the state of a table with these rows."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


def tags_of(text: str) -> list[str]:
    """ "a, b" → ["a", "b"]."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def show_json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, default=str)


def excluded_warning(excluded: list[Any]) -> None:
    """Show which damaged files are excluded, and how much data they contain."""
    if not excluded:
        return
    lost = sum(one.trajectories for one in excluded)
    names = ", ".join(f"`{one.file}` ({one.trajectories} of {one.dataset})" for one in excluded[:5])
    more = f" and {len(excluded) - 5} more" if len(excluded) > 5 else ""
    st.warning(
        f"{pluralize(lost, 'trajectory is', 'trajectories are')} left out, because "
        f"their files are damaged: {names}{more}. Restore these files from a backup; "
        "`stepwell fsck` names the cure.",
        icon=":material/heart_broken:",
    )
