"""Launches: what waits, runs and has ended; one of them with its output."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard import api, components, formatting, launching, programs

OPEN = ("queued", "claimed", "running")
LOG_HEIGHT = 300


def draw() -> None:
    st.subheader("Launches")
    components.live(_list, lambda: bool(api.open_launches()))


def _list() -> None:
    pages = components.Pages("launches")
    found, following = api.launches(pages.cursor)
    if not found:
        st.caption("None yet. A launch waits until a launcher on some machine claims it.")
        return
    known = api.known_runs(name for one in found for name in _runs(one))
    rows = [
        {
            "launch": launch.id,
            "state": components.mark(launch.state),
            "role": launch.role,
            "recipe": launch.recipe,
            "run": api.label(launch.run, known),
            "created": launch.created_at,
            "count": launch.count,
            "claimed by": launch.claimed_by,
            "error": formatting.last_line(launch.error),
            "arguments": components.show_json(launch.args) if launch.args else "",
        }
        for launch in found
    ]
    columns = {"launch": st.column_config.TextColumn(width=90)}
    chosen = components.table(
        rows, "launches", columns=columns, select="single-row", times=["created"], most_height=280
    )
    pages.draw(len(found), following)
    if chosen:
        _one(found[chosen[0]])
    else:
        st.caption("Select a launch to see its output, stop it or copy it.")


def _one(launch: Any) -> None:
    st.markdown(f"**`{launch.id}`** {components.mark(launch.state)}")
    st.code(programs.command_line(launch.role, launch.recipe, launch.args), language=None,
            wrap_lines=True)  # fmt: skip
    with st.container(horizontal=True, vertical_alignment="center"):
        names = _runs(launch)[:5]
        known = api.known_runs(names)
        for name in names:
            label = f"Run {formatting.code(api.label(name, known))}"
            components.link("runs", label, "show_chart", run=name)
        clone = f"launch:{launch.id}"
        components.link("start", "Copy into the form", "content_copy", clone=clone)
        if launch.state in OPEN:
            _stop(launch)
    if launch.error:
        st.error(f"```\n{launch.error[-4000:]}\n```", icon=":material/error:")
    text = launching.launch_log(launch.id)
    if text:
        with st.container(height=LOG_HEIGHT, autoscroll=True):
            st.code(text, language=None, wrap_lines=True)
    elif launch.state in OPEN:
        st.caption("No output yet.")


def train_link(dataset: str, where: str = "", label: str = "Open the form") -> None:
    """A link to the form that trains on a selection."""
    components.link("start", label, "rocket_launch", **launching.selected(dataset, where))


def _runs(launch: Any) -> list[str]:
    """The names of its runs; of several they are NAME-1 … NAME-N."""
    if launch.count == 1 or not launch.run:
        return [launch.run] if launch.run else []
    base = launch.run.partition(" … ")[0].removesuffix("-1")
    return [f"{base}-{number}" for number in range(1, launch.count + 1)]


def _stop(launch: Any) -> None:
    waits = launch.state == "queued"
    warning = (
        "It has not been started, and will not be."
        if waits
        else "Its processes are told to end: a trainer writes a checkpoint, a collector sends what "
        "it has. What they have sent stays."
    )
    components.confirm(
        "Cancel" if waits else "Stop", "stop", warning, "launch_stop_go",
        lambda: api.client().cancel_launch(launch.id), "cancelled",
    )  # fmt: skip
