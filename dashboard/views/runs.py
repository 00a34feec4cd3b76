"""Runs: executions of trainers, collectors and evaluators. The table, and tabs of those selected.

The selection is in the address (`?run=`, repeated), so that a link shows what one sees.
"""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard import api, components, formatting
from dashboard.views import runs_config, runs_curves, runs_details, runs_table

ARCHIVED = "archived"
"""Tag of runs that the list leaves out."""
MOST_RUNS = 50
KINDS = ("", "train", "collect", "eval")
STATES = ("", "running", "silent", "finished", "stopped", "failed")
TAB, TABS = "part", ("Curves", "Config", "Details")
"""The open tab in the address, and all."""


@components.view("Runs", "One row per execution; select some to compare them.")
def show() -> None:
    found, look, pages, bar = _listed()
    if not found.total:
        if any(st.session_state.get(key) for key in ("kind", "status", "search", "where")):
            components.empty("No run matches these filters.")
        elif api.runs(limit=1).total:
            components.empty("Every run is archived; Filters shows them.")
        else:
            components.empty(
                "No run yet. Start a learner on a dataset:",
                "stepwell train pendulum_stitch --run first --dataset NAME",
            )
        return
    asked = _asked(found.items)
    runs = api.chosen_runs(asked)
    # Old links and deleted runs: what still exists is kept.
    chosen = [run.name for run in runs]
    colours = components.run_colours(runs)

    def alive() -> bool:
        return any(run.alive for run in api.chosen_runs(chosen))

    if components.open_tab(TABS, TAB) == TABS[0]:
        runs_curves.prefetch(runs)
    with bar:
        runs_table.menus(tuple(run.name for run in found.items), runs)
    components.live(
        lambda: _pick(look().items, chosen, colours), lambda: any(r.alive for r in look().items)
    )
    pages.draw(len(found.items), found.next, found.total)
    if not chosen:
        st.caption("Select at least one run.")
        return
    _selection(chosen, [run.name for run in found.items], ARCHIVED)
    components.live(lambda: _alarms(chosen), alive)

    def curves() -> None:
        runs_curves.controls(runs)
        components.live(lambda: runs_curves.draw(api.chosen_runs(chosen), colours), alive)

    def details() -> None:
        name = chosen[0]
        if len(chosen) > 1:
            labels = {run.name: run.label for run in runs}
            name = st.selectbox(
                "Run", chosen, key="detail_run", format_func=lambda n: labels.get(n, n)
            )
        runs_details.draw(name)

    draws = (curves, lambda: runs_config.draw(runs), details)
    components.tabs(dict(zip(TABS, draws, strict=True)), TAB)


def _listed() -> tuple[Any, Any, components.Pages, Any]:
    """One page of the list by the filters, the function that reads it, and the bar of filters."""
    bar = st.container(horizontal=True, vertical_alignment="bottom")
    with bar:
        text = st.text_input("Name, title or tag contains", key="search", bind="query-params")
        where = st.text_input(
            "Settings and metrics", key="where", bind="query-params", max_chars=2000,
            placeholder="agent.discount = 0.99 and eval/return > 200",
            help="Conditions with = != < <= > >=, joined by `and`. A name is a setting of the "
            "config or a metric, of which the newest value counts; the menu Columns lists both. "
            "A text with spaces stands in quotes",
        )  # fmt: skip
        kind = components.choose("Kind", KINDS, "kind", "all", width=120)
        status = components.choose(
            "Status", STATES, "status", "all", width=120,
            help="silent: running, but no heartbeat for 45 s",
        )  # fmt: skip
        archived = st.toggle("Archived too", key="archived", bind="query-params")
    pages = components.Pages("runs", (kind, status, text, where, archived))
    silent = status == "silent"
    filters = {
        "kind": kind,
        "status": "running" if silent else status,
        "alive": False if silent else "",
        "search": (text or "").strip()[:200],
        "where": (where or "").strip(),
        "without_tag": "" if archived else ARCHIVED,
        "cursor": pages.cursor,
    }

    def look() -> Any:
        return api.runs(**filters, keys=runs_table.keys())

    return look(), look, pages, bar


# --- the selection --------------------------------------------------------------------------------


def _asked(listed: list[Any]) -> list[str]:
    """Names in the address; without any, the newest trainers. `?run=` alone: none."""
    asked = list(dict.fromkeys(st.query_params.get_all("run")))[:MOST_RUNS]
    if asked:
        return [name for name in asked if name]
    learners = [r.name for r in listed if r.kind == "train"]
    return learners[:3] or [r.name for r in listed[:1]]


def choose(names: list[str]) -> None:
    """Make these the selection, and draw the page again."""
    st.query_params["run"] = names[:MOST_RUNS] or ""
    st.rerun()


def _pick(listed: list[Any], chosen: list[str], colours: dict[str, str]) -> None:
    """Draw the table. A click on its rows changes the selection; runs selected on other pages of
    the list stay selected."""
    names = [run.name for run in listed]
    # Streamlit keeps the positions of selected rows: other rows are another table.
    key = f"runs_{components.digest(names)}"
    wanted = [i for i, name in enumerate(names) if name in chosen]
    state: Any = st.session_state.get(key)
    drawn: dict[str, list[int]] = st.session_state.setdefault("_runs_drawn", {})
    if state is not None:
        rows = sorted(state["selection"]["rows"])
        if key in drawn and rows != drawn[key]:
            drawn[key] = rows
            marked = [names[i] for i in rows if i < len(names)]
            kept = [name for name in chosen if name not in names or name in marked]
            choose([*kept, *(name for name in marked if name not in kept)])
        if rows != wanted:
            st.session_state[key] = {"selection": {"rows": wanted}}
    drawn.clear()
    drawn[key] = wanted
    runs_table.draw(listed, key, wanted, colours)


def _selection(chosen: list[str], listed: list[str], archived: str) -> None:
    """What can be done with all selected runs at once."""
    elsewhere = [name for name in chosen if name not in listed]
    with st.container(horizontal=True, vertical_alignment="center"):
        more = f", {len(elsewhere):,} of them not in these rows" if elsewhere else ""
        st.caption(f"{len(chosen):,} selected{more}")
        if st.button("None", key="select_none", type="tertiary"):
            choose([])
        if st.button("All listed", key="select_all", type="tertiary"):
            choose(list(dict.fromkeys([*chosen, *listed])))
        with st.popover("Tags of all selected", icon=":material/sell:", type="tertiary"):
            runs_details.tag_all(chosen, archived)


def _alarms(chosen: list[str]) -> None:
    """What the health checks of the selected runs have found."""
    for run in api.chosen_runs(chosen):
        if run.alarms:
            alarms = formatting.pluralize(len(run.alarms), "alarm")
            st.warning(f"Run {formatting.code(run.label)} has {alarms}:", icon=":material/warning:")
            text = "\n".join(f"{a.key}, since update {a.update:,}: {a.message}" for a in run.alarms)
            st.code(text, language=None, wrap_lines=True)
