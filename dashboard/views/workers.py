"""Workers: current collectors, trainers, evaluators and launchers; pause and stop them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import streamlit as st

from dashboard import api, components, formatting

SQL = (
    "SELECT id, role, run, state, policy, host, pid, heartbeat_at, counters, last_error\n"
    "FROM workers ORDER BY heartbeat_at DESC"
)
COMMANDS = {
    "pause": ("pause", "Stop acting or learning until resumed"),
    "resume": ("play_arrow", "Go on after a pause"),
    "drain": ("hourglass_bottom", "Finish running episodes or updates, send, end"),
    "stop": ("stop", "End now; queued data is still sent"),
}
LINES = {
    "Service": "stepwell serve --data ./stepwell-data",
    "Collect": "stepwell collect --env {env} --dataset {dataset} --policy {run}",
    "Train": "stepwell train pendulum_stitch --run {run} --dataset {dataset}",
    "Train, two processes": "stepwell train pendulum_stitch --run {run} --dataset {dataset}"
    " --processes 2",
    "Evaluate": "stepwell evaluate --policy {run} --env {env} --episodes 30",
    "Launcher": "stepwell launcher --roles train collect evaluate",
}


@components.view("Workers", "Every process that reports here. Commands are picked up with a "
                 "worker's next heartbeat.")  # fmt: skip
def show() -> None:
    found = api.workers()
    if found:
        components.live(_table, lambda: any(w.alive for w in api.workers()))
        _commands(found)
    else:
        components.empty("No worker has reported yet. Start one on any machine:")
    components.link("start", "Start one on a machine with a launcher", "rocket_launch")
    _lines()


def _table() -> None:
    rows = []
    known = api.known_runs(w.run for w in api.workers())
    colours = components.run_colours(known.values())
    marks = []
    for w in sorted(api.workers(), key=lambda w: w.heartbeat_at, reverse=True):
        silent = not w.alive and w.state not in ("stopped", "failed")
        counters = " · ".join(f"{k} {v:,.6g}" for k, v in sorted(w.counters.items()))
        marks.append(colours.get(w.run or "", ""))
        rows.append(
            {
                "worker": w.id,
                "role": w.role,
                "state": components.mark("lost" if silent else w.state),
                "heartbeat": w.heartbeat_at,
                "command": "" if w.command == "none" else w.command,
                "run": api.label(w.run or "", known),
                "policy": api.label(w.policy, known),
                "counters": counters,
                "host": w.host,
                "pid": w.pid,
                "error": formatting.last_line(w.last_error),
            }
        )
    components.table(rows, "workers", sql=SQL, colours=marks, times=["heartbeat"])


def _commands(found: list[Any]) -> None:
    able = [w for w in found if w.state not in ("stopped", "failed")]
    if not able:
        st.caption("None of them is running.")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.multiselect(
            "Send a command to", [w.id for w in able], key="command", placeholder="choose workers"
        )
        buttons(COMMANDS, chosen, "command")
    errors = [w for w in found if w.last_error.strip()]
    for w in errors:
        with st.expander(f"Last error of {w.id}", icon=":material/error:"):
            st.code(w.last_error, language=None, wrap_lines=True)


def buttons(commands: Iterable[str], chosen: Sequence[str], key: str) -> None:
    """A button for each command to these workers."""
    for what in commands:
        icon, note = COMMANDS[what]
        if st.button(what.capitalize(), icon=f":material/{icon}:", help=note, key=f"{key}_{what}",
                     disabled=not chosen):  # fmt: skip
            components.change(
                lambda what=what: [api.client().command(w, what) for w in chosen],  # type: ignore[misc]
                f"{what}: sent to {len(chosen)}",
            )


def _lines() -> None:
    """Show the command of each role, with names that exist at this service."""
    st.subheader("Start one by hand")
    datasets, runs = api.datasets(), api.runs(kind="train", limit=1).items
    known = {
        "dataset": datasets[0].name if datasets else "NAME",
        "env": next((d.spec["env"] for d in datasets if d.spec.get("env")), "ENV"),
        "run": runs[0].name if runs else "RUN",
    }
    prefix = "" if api.address() == api.DEFAULT_URL else f"export STEPWELL_URL={api.address()}\n"
    for tab, (name, line) in zip(st.tabs(list(LINES)), LINES.items(), strict=True):
        with tab:
            st.code(("" if name == "Service" else prefix) + line.format(**known), language=None)
