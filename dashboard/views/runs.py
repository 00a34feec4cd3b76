"""Runs: executions of trainers, collectors and evaluators, their curves and their results."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, charts, components, formatting

METRICS_SQL = (
    "SELECT run, key, step, time, value FROM metrics\nWHERE run IN ({runs}) ORDER BY run, key, step"
)
AXES = {"step": "step (updates or episodes)", "time": "time since its start (minutes)"}
MOST_RUNS = 12
LOG_LINES = 200
CURVES = "_curves"
PER_SECTION = 12
"""Number of curves drawn per section at a time."""
OPEN = 10
"""Number of curves in sections that are expanded initially."""


@components.view("Runs", "One row per execution; select some to compare their curves.")
def show() -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        kind = st.selectbox(
            "Kind", ["", "train", "collect", "eval"], key="kind", bind="query-params",
            format_func=lambda k: k or "all",
        )  # fmt: skip
        status = st.selectbox(
            "Status", ["", "running", "silent", "finished", "stopped", "failed"], key="status",
            bind="query-params", format_func=lambda s: s or "all",
            help="silent: running, but no heartbeat for 45 s",
        )  # fmt: skip
        text = st.text_input("Name or tag contains", key="search", bind="query-params")
    pages = components.Pages("runs", (kind, status, text))

    def look() -> Any:
        search = (text or "").strip()[:200]
        if status == "silent":
            return api.runs(
                kind=kind, status="running", alive=False, search=search, cursor=pages.cursor
            )
        return api.runs(kind=kind, status=status, search=search, cursor=pages.cursor)

    found = look()
    if not found.total:
        if kind or status or text:
            components.empty("No run matches these filters.")
        else:
            components.empty(
                "No run yet. Start a learner on a dataset:",
                "stepwell train pendulum_stitch --run first --dataset NAME",
            )
        return
    components.live(lambda: _table(look().items), lambda: any(r.alive for r in look().items))
    pages.draw(len(found.items), found.next, found.total)
    chosen = _choose(found.items)
    if not chosen:
        st.caption("Choose at least one run.")
        return
    components.live(lambda: _alarms(chosen), lambda: _any_alive(chosen))
    # In the order of selection, so that adding a run does not change the colours of others.
    colours = charts.colours(chosen)
    # Only expanded parts are read and drawn.
    curves, details = st.tabs(["Curves", "Details"], key="part", bind="query-params")
    with curves:
        if curves.open:
            _controls()
            components.live(lambda: _curves(chosen, colours), lambda: _any_alive(chosen))
    with details:
        if details.open:
            name = chosen[0]
            if len(chosen) > 1:
                name = st.selectbox("Run", chosen, key="detail_run")
            components.guarded(lambda: _details(name))


def _choose(listed: list[Any]) -> list[str]:
    """Runs on this page of the list, and those selected before or by a link, on any page."""
    names = [r.name for r in listed]
    asked = st.session_state.get("run", st.query_params.get_all("run"))
    # Old links and deleted runs: keep what still exists.
    kept = [n for n in dict.fromkeys(asked[:MOST_RUNS]) if n in names or _exists(n)]
    known = "run" in st.session_state
    if known and kept != asked:
        st.session_state["run"] = kept
    return st.multiselect(
        "Runs to show", list(dict.fromkeys([*kept, *names])), key="run", bind="query-params",
        default=None if known else _first(listed), max_selections=MOST_RUNS,
        help="Those of the rows above; others are found by the filters or an address with ?run=",
    )  # fmt: skip


def _exists(name: str) -> bool:
    try:
        api.run(name)
    except api.ServiceUnreachable:
        raise
    except api.StepwellError:
        return False
    return True


def _any_alive(names: list[str]) -> bool:
    return any(api.run(name).alive for name in names)


def _first(runs: list[Any]) -> list[str]:
    """The default selection: the newest trainers."""
    learners = [r.name for r in runs if r.kind == "train"]
    return learners[:3] or [r.name for r in runs[:1]]


def _table(runs: list[Any]) -> None:
    frame = pd.DataFrame(
        [
            {
                "run": r.name,
                "kind": r.kind,
                "status": components.run_mark(r),
                "alarms": r.alarm_summary,
                "heartbeat": formatting.ago(r.heartbeat_at),
                "started": formatting.ago(r.created_at),
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
    # Wide enough for one alarm and the number of others.
    wide = {"alarms": st.column_config.TextColumn(width=190)}
    height = min(320, 38 + 35 * len(frame))
    components.table(frame, "runs", sql=sql, columns=wide, height=height)


def _alarms(chosen: list[str]) -> None:
    """What the health checks of the selected runs have found."""
    for run in map(api.run, chosen):
        if run.alarms:
            one = "1 alarm" if len(run.alarms) == 1 else f"{len(run.alarms)} alarms"
            st.warning(f"Run `{run.name}` has {one}:", icon=":material/warning:")
            text = "\n".join(f"{a.key}, since update {a.update:,}: {a.message}" for a in run.alarms)
            st.code(text, language=None, wrap_lines=True)


# --- curves ---------------------------------------------------------------------------------------


def _controls() -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.segmented_control(
            "Across", list(AXES), default="step", key="x", required=True, bind="query-params"
        )
        st.slider("Smoothing", 0.0, 0.99, 0.0, 0.01, key="smooth", bind="query-params")
        st.toggle("Log scale", key="log", bind="query-params")
        st.text_input("Metric contains", key="metric", bind="query-params")


def _curves(chosen: list[str], colours: dict[str, str]) -> None:
    """Metrics in sections by the part of their key before the first slash, as W&B users know."""
    runs = [api.run(name) for name in chosen]
    words = (st.session_state.get("metric") or "").strip().lower()
    every = sorted({key for run in runs for key in run.latest_steps})
    keys = [key for key in every if words in key.lower()]
    if not every:
        components.empty("These runs have reported no metric yet.")
    elif not keys:
        components.empty(f"None of {len(every):,} metrics has such a name.")
    store: api.Curves = st.session_state.setdefault(CURVES, api.Curves())
    store.keep(runs)
    drawn = 0
    for section, members in _sections(keys):
        # Expand the most used sections; the others are collapsed to keep the page short.
        size = min(len(members), PER_SECTION)
        folder = st.expander(
            f"{section} ({len(members)})", expanded=not drawn or drawn + size <= OPEN,
            key=f"section_{section}", on_change="rerun",
        )  # fmt: skip
        drawn += size
        with folder:
            # A collapsed section makes no request and draws no chart.
            if folder.open:
                _section(section, members, runs, store, colours)
    names = ", ".join(formatting.literal(name) for name in chosen)
    components.sql_note(METRICS_SQL.format(runs=names))


def _sections(keys: list[str]) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for key in keys:
        section = key.split("/", 1)[0] if "/" in key else "general"
        found.setdefault(section, []).append(key)
    # A lone curve needs no section of its own.
    lone = [members.pop() for members in found.values() if len(members) == 1]
    if lone:
        found["general"] = sorted([*found.get("general", []), *lone])
    return [(name, found[name]) for name in sorted(found, key=_interest) if found[name]]


def _interest(section: str) -> tuple[int, str]:
    """Sort key: scores first, then losses, then other sections."""
    for rank, word in enumerate(("evaluation", "estimate", "return", "loss", "general")):
        if word in section.lower():
            return rank, section
    return 9, section


def _section(
    name: str, members: list[str], runs: list[Any], store: Any, colours: dict[str, str]
) -> None:
    pages = -(-len(members) // PER_SECTION)
    key = f"section_page_{name}"
    if st.session_state.get(key, 1) > pages:
        st.session_state[key] = 1
    number = st.pagination(pages, key=key) if pages > 1 else 1
    shown = members[(number - 1) * PER_SECTION :][:PER_SECTION]
    series = {run.name: store.get(run, shown) for run in runs}
    grid = st.columns(2, gap="medium")
    for i, member in enumerate(shown):
        with grid[i % 2]:
            _curve(member, series, colours)


def _curve(key: str, series: dict[str, Any], colours: dict[str, str]) -> None:
    axis = st.session_state.get("x") or "step"
    weight = float(st.session_state.get("smooth", 0.0))
    parts = []
    for name, found in series.items():
        if key not in found:
            continue
        one = found[key]
        x = one.steps if axis == "step" else (one.times - one.times[0]) / 60
        values = charts.smooth(pd.Series(one.values), weight)
        parts.append(pd.DataFrame({axis: x, "value": values, "run": name}))
    data = pd.concat(parts, ignore_index=True).dropna(subset=["value"]) if parts else pd.DataFrame()
    st.markdown(f"`{key}`")
    if data.empty:
        st.caption("no finite value yet")
        return
    present = set(data["run"])
    chart = charts.lines(
        data, x=axis, y="value", colour="run", x_title=AXES[axis],
        colours={name: colours[name] for name in series if name in present},
        y_title=key.rsplit("/", 1)[-1], log=bool(st.session_state.get("log", False)), height=260,
    )  # fmt: skip
    st.vega_lite_chart(*chart, key=f"curve_{key}")


# --- details --------------------------------------------------------------------------------------


def _details(name: str) -> None:
    run = api.run(name)
    error = run.error.strip().splitlines()[-1] if run.error.strip() else ""
    components.numbers(
        [
            ("Status", components.run_mark(run), error),
            ("Heartbeat", formatting.ago(run.heartbeat_at), ""),
            ("Policies", formatting.count(run.policies), "Published"),
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
        components.live(lambda: _log(name), lambda: api.run(name).alive)
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
    estimates = api.estimates(name)
    estimated = {
        v: f"{value:.5g} ({low:.5g} … {high:.5g})" for v, (value, low, high) in estimates.items()
    }
    frame = pd.DataFrame(
        [
            {
                "version": p.version,
                "aliases": ", ".join(p.aliases),
                **({"estimate (95 %)": estimated.get(p.version, "")} if estimated else {}),
                "step": p.step,
                "size": formatting.size(p.bytes),
                "published": formatting.ago(p.created_at),
                "sha256": p.sha256[:16],
            }
            for p in found
        ]
    )
    sql = f"SELECT * FROM policies WHERE run = {formatting.literal(name)} ORDER BY version DESC"
    components.table(frame, "policies", sql=sql, height=min(280, 38 + 35 * len(frame)))
    st.code(
        f"stepwell evaluate --policy {name} --env ENV\n"
        f"stepwell estimate {name}\n"
        f"stepwell collect --policy {name} --env ENV --dataset NAME",
        language=None,
    )
    with st.form("alias", border=True):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            alias = st.text_input("Alias", "best", key="alias_name")
            version = st.selectbox("means version", [p.version for p in found], key="alias_of")
            sent = st.form_submit_button("Set", key="alias_go")
    if sent and components.attempt(
        lambda: api.client().set_alias(name, alias, int(version)),
        f"{name}/{alias} is version {version}",
    ):
        st.rerun()


def _log(name: str) -> None:
    st.markdown("**Log**")
    text = api.run_log(name)
    if not text.strip():
        st.caption("No lines.")
        return
    lines = text.splitlines()
    st.code("\n".join(lines[-LOG_LINES:]), language=None, height=280)
    if len(lines) > LOG_LINES:
        st.download_button(
            f"The last {LOG_LINES} of {len(lines):,} lines; download them all", text,
            file_name=f"{name}.log", key="log_all", icon=":material/download:", type="tertiary",
            on_click="ignore",
        )  # fmt: skip


def _manage(run: Any) -> None:
    with st.form("run_settings", border=True):
        tags = st.text_input("Tags, separated by commas", ", ".join(run.tags), key="run_tags")
        notes = st.text_area("Notes", run.notes, key="run_notes", height=80)
        if st.form_submit_button("Save", key="run_save") and components.attempt(
            lambda: api.client().patch_run(run.name, tags=components.tags_of(tags), notes=notes),
            "saved",
        ):
            st.rerun()
    mine = [w for w in api.workers() if w.run == run.name and w.alive]
    with st.container(horizontal=True):
        for what, icon in (("pause", "pause"), ("resume", "play_arrow"), ("stop", "stop")):
            if st.button(what.capitalize(), icon=f":material/{icon}:", key=f"run_{what}",
                         disabled=not mine):  # fmt: skip
                components.attempt(
                    lambda what=what: [api.client().command(w.id, what) for w in mine],  # type: ignore[misc]
                    f"{what}: sent",
                )
    if not mine:
        st.caption("No live process of this run reports here.")
    if run.command:
        st.caption("Started by; run it again, with the same run name, to resume:")
        st.code(run.command, language=None, wrap_lines=True)
    components.confirm_delete(
        "run", run.name, "delete_run", lambda: api.client().delete_run(run.name)
    )
