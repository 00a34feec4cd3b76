"""Runs: every execution of a trainer, collector or evaluator, their curves, and what they left."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, charts, components, state

METRICS_SQL = (
    "SELECT run, key, step, time, value FROM metrics\nWHERE run IN ({runs}) ORDER BY run, key, step"
)
AXES = {"step": "step (updates or episodes)", "time": "time since its start (minutes)"}
MOST_RUNS = 12
OPEN = 10
"""Curves in sections that stand open from the start."""


@components.view("Runs", "One row per execution; select some to compare their curves.")
def show() -> None:
    found = api.runs()
    if not found:
        components.empty("No run yet. Start a learner on a dataset:",
                         "stepwell train pendulum_stitch --run first --dataset NAME")  # fmt: skip
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        kind = st.selectbox(
            "Kind", ["", "train", "collect", "eval"], key="kind", bind="query-params",
            format_func=lambda k: k or "all",
        )  # fmt: skip
        status = st.selectbox(
            "Status", ["", "running", "finished", "stopped", "failed"], key="status",
            bind="query-params", format_func=lambda s: s or "all",
        )  # fmt: skip
        text = st.text_input("Name or tag contains", key="search", bind="query-params")
    matching = [r for r in found if _matches(r, kind, status, text)]
    if not matching:
        components.empty("No run matches these filters.")
        return
    _table(matching)
    names = [r.name for r in matching]
    # Old links and deleted runs: keep what still exists.
    if "run" in st.session_state:
        st.session_state["run"] = [n for n in st.session_state["run"] if n in names]
    chosen = st.multiselect(
        "Runs to show", names, default=_first(matching), key="run", bind="query-params",
        max_selections=MOST_RUNS,
    )  # fmt: skip
    if not chosen:
        st.caption("Choose at least one run.")
        return
    colours = state.colours(r.name for r in reversed(found))
    curves, details = st.tabs(["Curves", "Details"])
    with curves:
        _controls()
        components.live(lambda: _curves(chosen, colours))
    with details:
        name = chosen[0]
        if len(chosen) > 1:
            name = st.selectbox("Run", chosen, key="detail_run")
        components.guarded(lambda: _details(name))


def _first(runs: list[Any]) -> list[str]:
    """What one most likely came for: the newest learners, side by side."""
    learners = [r.name for r in runs if r.kind == "train"]
    return learners[:3] or [runs[0].name]


def _matches(run: Any, kind: str, status: str, text: str | None) -> bool:
    words = (text or "").lower()
    return (
        (not kind or run.kind == kind)
        and (not status or run.status == status)
        and (not words or words in run.name.lower() or any(words in t.lower() for t in run.tags))
    )


def _status(run: Any) -> str:
    if run.status == "running" and not run.alive:
        return components.mark("lost")
    return components.mark(run.status)


def _table(runs: list[Any]) -> None:
    frame = pd.DataFrame(
        [
            {
                "run": r.name,
                "kind": r.kind,
                "status": _status(r),
                "heartbeat": state.ago(r.heartbeat_at),
                "started": state.ago(r.created_at),
                "policies": r.policies,
                "seed": "" if r.seed is None else str(r.seed),
                "commit": r.git_commit[:10],
                "snapshots": ", ".join(r.snapshots),
                "tags": r.tags,
                "notes": r.notes,
            }
            for r in runs
        ]
    )
    sql = (
        "SELECT r.*, (SELECT count(*) FROM policies p WHERE p.run = r.name) AS policies\n"
        "FROM runs r ORDER BY created_at DESC"
    )
    components.table(frame, "runs", sql=sql, height=min(320, 38 + 35 * len(frame)))


# --- curves ---------------------------------------------------------------------------------------


def _controls() -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.segmented_control(
            "Across", list(AXES), default="step", key="x", required=True, bind="query-params"
        )
        st.slider("Smoothing", 0.0, 0.99, 0.0, 0.01, key="smooth", bind="query-params")
        st.toggle("Log scale", key="log", bind="query-params")


def _curves(chosen: list[str], colours: dict[str, str]) -> None:
    """Metrics in sections by the part of their key before the first slash, as W&B users know."""
    series = {name: api.metrics(name) for name in chosen}
    keys = sorted({key for one in series.values() for key in one})
    if not keys:
        components.empty("These runs have reported no metric yet.")
        return
    sections: dict[str, list[str]] = {}
    for key in keys:
        section = key.split("/", 1)[0] if "/" in key else "general"
        sections.setdefault(section, []).append(key)
    # A lone curve needs no section of its own.
    lone = [members.pop() for members in sections.values() if len(members) == 1]
    if lone:
        sections["general"] = sorted([*sections.get("general", []), *lone])
    drawn = 0
    for section in sorted((name for name in sections if sections[name]), key=_interest):
        members = sections[section]
        # Open what most people came for; the rest unfolds, or the page would be a wall.
        with st.expander(f"{section} ({len(members)})", expanded=drawn + len(members) <= OPEN):
            grid = st.columns(2, gap="medium")
            for i, key in enumerate(members):
                with grid[i % 2]:
                    _curve(key, series, colours)
        drawn += len(members)
    names = ", ".join(state.literal(name) for name in chosen)
    components.sql_note(METRICS_SQL.format(runs=names))


def _interest(section: str) -> tuple[int, str]:
    """Scores before losses before the rest."""
    for rank, word in enumerate(("evaluation", "return", "loss", "general")):
        if word in section.lower():
            return rank, section
    return 9, section


def _curve(key: str, series: dict[str, Any], colours: dict[str, str]) -> None:
    axis = st.session_state.get("x") or "step"
    parts = []
    for name, found in series.items():
        if key not in found:
            continue
        one = found[key]
        frame = pd.DataFrame({"step": one.steps, "value": one.values, "run": name})
        frame["time"] = [(moment - one.times[0]) / 60 for moment in one.times]
        frame["value"] = charts.smooth(
            frame["value"].astype(float), float(st.session_state.get("smooth", 0.0))
        )
        parts.append(frame)
    data = pd.concat(parts, ignore_index=True).dropna(subset=["value"])
    st.markdown(f"`{key}`")
    if data.empty:
        st.caption("no finite value yet")
        return
    shown = {name: colours[name] for name in series if name in set(data["run"])}
    st.altair_chart(
        charts.lines(
            data, x=axis, y="value", colour="run", colours=shown, x_title=AXES[axis],
            y_title=key.rsplit("/", 1)[-1], log=bool(st.session_state.get("log", False)),
            height=260,
        ),
        key=f"curve_{key}",
    )  # fmt: skip


# --- details --------------------------------------------------------------------------------------


def _details(name: str) -> None:
    run = api.run(name)
    components.numbers(
        [
            ("Status", _status(run), run.error.strip().splitlines()[-1] if run.error else ""),
            ("Heartbeat", state.ago(run.heartbeat_at), ""),
            ("Policies", state.count(run.policies), "Published"),
            ("Seed", "–" if run.seed is None else str(run.seed), ""),
            ("Commit", run.git_commit[:7] or "–", "Of the code it ran"),
            ("Host", run.host or "–", ""),
        ]
    )
    if run.error:
        st.error("It ended with an error:")
        st.code(run.error, language=None, wrap_lines=True)
    left, right = st.columns(2, gap="large")
    with left:
        _policies(name)
        components.live(lambda: _log(name))
    with right:
        _manage(run)
        with st.expander("Configuration, complete"):
            st.code(components.show_json(run.config), language=None)
        with st.expander("Newest value of every metric"):
            latest = pd.DataFrame(sorted(run.latest.items()), columns=["metric", "value"])
            components.table(latest, "latest")


def _policies(name: str) -> None:
    st.markdown("**Policies**")
    found = api.policies(name)
    if not found:
        st.caption("None published yet.")
        return
    frame = pd.DataFrame(
        [
            {
                "version": p.version,
                "aliases": ", ".join(p.aliases),
                "step": p.step,
                "size": state.size(p.bytes),
                "published": state.ago(p.created_at),
                "sha256": p.sha256[:16],
            }
            for p in found
        ]
    )
    sql = f"SELECT * FROM policies WHERE run = {state.literal(name)} ORDER BY version DESC"
    components.table(frame, "policies", sql=sql, height=min(280, 38 + 35 * len(frame)))
    st.code(
        f"stepwell evaluate --policy {name} --env ENV\n"
        f"stepwell collect --policy {name} --env ENV --dataset NAME",
        language=None,
    )
    with st.form("alias", border=True):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            alias = st.text_input("Alias", "best", key="alias_name")
            version = st.selectbox("means version", [p.version for p in found], key="alias_of")
            sent = st.form_submit_button("Set", key="alias_go")
    if sent and components.attempt(
        lambda: api.set_alias(name, alias, int(version)), f"{name}/{alias} is version {version}"
    ):
        st.rerun()


def _log(name: str) -> None:
    st.markdown("**Log**")
    text = api.run_log(name)
    if text.strip():
        st.code("\n".join(text.splitlines()[-200:]), language=None, height=280)
    else:
        st.caption("It has written nothing.")


def _manage(run: Any) -> None:
    with st.form("run_settings", border=True):
        tags = st.text_input("Tags, separated by commas", ", ".join(run.tags), key="run_tags")
        notes = st.text_area("Notes", run.notes, key="run_notes", height=80)
        if st.form_submit_button("Save", key="run_save") and components.attempt(
            lambda: api.patch_run(run.name, tags=components.tags_of(tags), notes=notes), "saved"
        ):
            st.rerun()
    mine = [w for w in api.workers() if w.run == run.name and w.alive]
    with st.container(horizontal=True):
        for what, icon in (("pause", "pause"), ("resume", "play_arrow"), ("stop", "stop")):
            if st.button(what.capitalize(), icon=f":material/{icon}:", key=f"run_{what}",
                         disabled=not mine):  # fmt: skip
                components.attempt(
                    lambda what=what: [api.command(w.id, what) for w in mine],  # type: ignore[misc]
                    f"asked to {what}",
                )
    if not mine:
        st.caption("No live process of this run reports here, so there is nothing to stop.")
    if run.command:
        st.caption("Started by; run it again, with the same run name, to resume:")
        st.code(run.command, language=None, wrap_lines=True)
    components.confirm_delete("run", run.name, "delete_run", lambda: api.delete_run(run.name))
