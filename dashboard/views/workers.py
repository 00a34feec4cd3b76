"""Workers: current collectors, trainers and evaluators; pause, stop and start them."""

from __future__ import annotations

from typing import Any

import pandas as pd
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
    _lines()
    components.guarded(_launches)


def _table() -> None:
    rows = []
    for w in sorted(api.workers(), key=lambda w: w.heartbeat_at, reverse=True):
        silent = not w.alive and w.state not in ("stopped", "failed")
        counters = " · ".join(f"{k} {v:,.6g}" for k, v in sorted(w.counters.items()))
        rows.append(
            {
                "worker": w.id,
                "role": w.role,
                "state": components.mark("lost" if silent else w.state),
                "heartbeat": formatting.ago(w.heartbeat_at),
                "command": "" if w.command == "none" else w.command,
                "run": w.run or "",
                "policy": w.policy,
                "counters": counters,
                "host": w.host,
                "pid": w.pid,
                "error": (w.last_error.strip().splitlines() or [""])[-1],
            }
        )
    components.table(pd.DataFrame(rows), "workers", sql=SQL)


def _commands(found: list[Any]) -> None:
    able = [w for w in found if w.state not in ("stopped", "failed")]
    if not able:
        st.caption("None of them is running.")
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.multiselect(
            "Send a command to", [w.id for w in able], key="command", placeholder="choose workers"
        )
        for what, (icon, note) in COMMANDS.items():
            if st.button(what.capitalize(), icon=f":material/{icon}:", help=note,
                         key=f"command_{what}", disabled=not chosen):  # fmt: skip
                done = components.attempt(
                    lambda what=what: [api.client().command(w, what) for w in chosen],  # type: ignore[misc]
                    f"{what}: sent to {len(chosen)}",
                )
                if done:
                    st.rerun()
    errors = [w for w in found if w.last_error.strip()]
    for w in errors:
        with st.expander(f"Last error of {w.id}", icon=":material/error:"):
            st.code(w.last_error, language=None, wrap_lines=True)


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


def _launches() -> None:
    st.subheader("Launches")
    st.caption("Work that waits for a launcher (`stepwell launcher`) on some machine to claim it.")
    pages = components.Pages("launches")
    found, following = api.launches(pages.cursor)
    if found:
        frame = pd.DataFrame(
            [
                {
                    "launch": launch.id,
                    "role": launch.role,
                    "recipe": launch.recipe,
                    "state": components.mark(launch.state),
                    "count": launch.count,
                    "claimed by": launch.claimed_by,
                    "run": launch.run,
                    "error": launch.error,
                    "created": formatting.ago(launch.created_at),
                    "arguments": components.show_json(launch.args),
                }
                for launch in found
            ]
        )
        components.table(frame, "launches", height=min(280, 38 + 35 * len(frame)))
        pages.draw(len(found), following)
        open_ones = [x.id for x in api.open_launches()]
        if open_ones:
            with st.container(horizontal=True, vertical_alignment="bottom"):
                launch_id = st.selectbox("Launch", open_ones, key="launch_cancel")
                if st.button("Cancel it", key="launch_cancel_go", icon=":material/cancel:"):
                    if components.attempt(
                        lambda: api.client().cancel_launch(str(launch_id)), "cancelled"
                    ):
                        st.rerun()
    else:
        st.caption("No launch yet.")
    with st.expander("New launch", icon=":material/rocket_launch:"):
        _new_launch()


def _new_launch() -> None:
    with st.form("launch", border=False):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            role = st.selectbox("Role", ["train", "collect", "evaluate"], key="launch_role")
            recipe = st.text_input("Recipe", key="launch_recipe", placeholder="pendulum_stitch")
            copies = st.number_input("Copies", 1, 64, 1, key="launch_count")
        lines = st.text_area(
            "Options, one per line",
            key="launch_args",
            placeholder="agent.losses.gamma = 0.99\nseed = 1",
        )
        sent = st.form_submit_button("Launch", type="primary", key="launch_go")
    if not sent:
        return
    try:
        args = parse_args(lines or "")
    except ValueError as error:
        st.error(str(error))
        return
    if components.attempt(
        lambda: api.client().create_launch(str(role), recipe or "", args, int(copies)),
        "waiting for a launcher",
    ):
        st.rerun()


def parse_args(text: str) -> dict[str, str | int | float | bool]:
    """ "a.b = 1" per line → {"a.b": 1}; values are numbers, true, false or text."""
    args: dict[str, str | int | float | bool] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not name or not equals or not value:
            raise ValueError(f"line {number}: expected `option = value`, got {line!r}")
        args[name.lstrip("-")] = formatting.value_of(value)
    return args
