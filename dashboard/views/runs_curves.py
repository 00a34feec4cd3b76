"""Curves of the selected runs, in sections by the first part of a metric's key. Each run has a
line, or each group of runs the mean of its runs and the interval of that mean."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from dashboard import api, charts, components, formatting
from dashboard.curve_cache import Curves
from dashboard.views import runs_config

METRICS_SQL = (
    "SELECT run, key, step, time, value FROM metrics\nWHERE run IN ({runs}) ORDER BY run, key, step"
)
AXES = {"step": "step (updates or episodes)", "time": "time since its start (minutes)"}
COUNTS = ("epoch", "epochs", "env_steps", "environment_steps", "inserted_steps", "frames")
"""Last parts of the keys of metrics that can be the horizontal axis."""
CURVES = "_curves"
FIRST = 4
"""Number of curves drawn per section at first: twelve took the browser 3.3 seconds."""
PER_SECTION = 12
"""Number of curves drawn per section at a time, if all are asked for."""
ALL = "all"
"""Sections of which all curves are asked for: a key of the address."""
OPEN = 6
"""Number of curves in sections that are expanded initially."""
GRID = 150
"""Points of a mean: runs rarely have points at the same place."""
LITTLE = 0.02
"""Share of the axis that a mean may lack without a word: the last points of runs differ."""
MOST_IN_LEGEND = 6
EACH = ""
"""No groups: a line per run."""


def controls(runs: list[Any]) -> None:
    keys = sorted({key for run in runs for key in run.latest_steps})
    axes = [*AXES, *(key for key in keys if key.rsplit("/", 1)[-1] in COUNTS)]
    configs = {run.name: api.flatten(run.config) for run in runs}
    settings = runs_config.differing(configs)
    by = [EACH, runs_config.SEEDS, *settings]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        components.choose("Across", axes, "x", width=150)
        components.choose(
            "Mean over runs with equal", by, "group", "(a line per run)", width=200,
            help="The settings in which the selected runs differ. The band is the 95 % interval of "
            "the mean, by a bootstrap over runs",
        )  # fmt: skip
        st.text_input("Metric contains", key="metric", bind="query-params", width=150)
        st.slider("Smoothing", 0.0, 0.99, 0.0, 0.01, key="smooth", bind="query-params", width=130)
        st.toggle("Log scale", key="log", bind="query-params")


def prefetch(runs: list[Any]) -> None:
    """Read what `draw` will show first, of all runs at once."""
    wanted = [
        key
        for section, members, expanded in _sections(_keys(runs))
        if st.session_state.get(f"section_{section}", expanded)
        for key in _wanted(section, members)
    ]
    store = _store(runs)
    api.prefetch(*(functools.partial(store.get, run, wanted) for run in runs))


def draw(runs: list[Any], colours: dict[str, str]) -> None:
    """Metrics in sections by the part of their key before the first slash, as W&B users know."""
    every, keys = {key for run in runs for key in run.latest_steps}, _keys(runs)
    if not every:
        components.empty("These runs have reported no metric yet.")
    elif not keys:
        components.empty(f"None of {len(every):,} metrics has such a name.")
    store = _store(runs)
    for section, members, expanded in _sections(keys):
        folder = st.expander(
            f"{section} ({len(members)})", expanded, key=f"section_{section}", on_change="rerun"
        )
        with folder:
            # A collapsed section makes no request and draws no chart.
            if folder.open:
                _section(section, members, runs, store, colours)
    names = ", ".join(formatting.literal(run.name) for run in runs)
    components.sql_note(METRICS_SQL.format(runs=names), "curves")


def _store(runs: list[Any]) -> Curves:
    """The curves of this session, without those of other runs."""
    store: Curves = st.session_state.setdefault(CURVES, Curves())
    store.keep(runs)
    return store


def _keys(runs: list[Any]) -> list[str]:
    """Metrics of the runs whose names have the words that are searched for."""
    words = (st.session_state.get("metric") or st.query_params.get("metric", "")).strip().lower()
    return sorted(
        key for key in {k for run in runs for k in run.latest_steps} if words in key.lower()
    )


def _sections(keys: list[str]) -> list[tuple[str, list[str], bool]]:
    """Sections by interest: name, metrics, and whether it is expanded at first."""
    found: dict[str, list[str]] = {}
    for key in keys:
        section = key.split("/", 1)[0] if "/" in key else "general"
        found.setdefault(section, []).append(key)
    # A lone curve needs no section of its own.
    lone = [members.pop() for members in found.values() if len(members) == 1]
    if lone:
        found["general"] = sorted([*found.get("general", []), *lone])
    drawn, sections = 0, []
    for name in sorted(found, key=_interest):
        if members := found[name]:
            # The most used ones; the others are collapsed to keep the page short.
            size = min(len(members), PER_SECTION if _is_whole(name) else FIRST)
            sections.append((name, members, not drawn or drawn + size <= OPEN))
            drawn += size
    return sections


def _interest(section: str) -> tuple[int, str]:
    """Sort key: scores first, then losses, then other sections."""
    for rank, word in enumerate(("evaluation", "estimate", "return", "loss", "general")):
        if word in section.lower():
            return rank, section
    return 9, section


def _section(
    name: str, members: list[str], runs: list[Any], store: Curves, colours: dict[str, str]
) -> None:
    pages = -(-len(members) // PER_SECTION)
    if _is_whole(name) and pages > 1:
        key = _page_key(name)
        if st.session_state.get(key, 1) > pages:
            st.session_state[key] = 1
        st.pagination(pages, key=key)
    shown, wanted = _shown(name, members), _wanted(name, members)
    axis = _axis()
    series = {run.name: store.get(run, wanted) for run in runs}
    labels = {run.name: run.label for run in runs}
    by = st.session_state.get("group") or EACH
    numbers = {run.name: run.number for run in runs}
    groups = runs_config.groups(runs, by) if by else {}
    groups = {label: sorted(names, key=numbers.__getitem__) for label, names in groups.items()}
    grid = st.columns(2, gap="medium")
    for i, member in enumerate(shown):
        with grid[i % 2]:
            st.markdown(f"`{member}`")
            lines = {name: line(found, member, axis) for name, found in series.items()}
            lines = {name: one for name, one in lines.items() if len(one)}
            if not lines:
                st.caption("no finite value yet")
                continue
            if groups:
                _means(member, lines, axis, groups, colours)
                continue
            st.vega_lite_chart(*_chart(member, lines, axis, colours, labels), key=_key(member))
    if len(members) > FIRST:
        label = f"Show {FIRST}" if _is_whole(name) else f"Show all {len(members)}"
        st.button(label, key=f"section_all_{name}", on_click=_turn, args=(name,))


def _is_whole(section: str) -> bool:
    return section in st.query_params.get_all(ALL)


def _turn(section: str) -> None:
    """Ask for all curves of a section, or no more."""
    asked = st.query_params.get_all(ALL)
    others = [name for name in asked if name != section]
    st.query_params[ALL] = others if section in asked else [*others, section]


def _page_key(section: str) -> str:
    return f"section_page_{section}"


def _shown(section: str, members: list[str]) -> list[str]:
    """The first ones, or those of the page that the viewer chose."""
    if not _is_whole(section):
        return members[:FIRST]
    number = st.session_state.get(_page_key(section), 1)
    if (number - 1) * PER_SECTION >= len(members):  # a filter left fewer pages
        number = 1
    return members[(number - 1) * PER_SECTION :][:PER_SECTION]


def _wanted(section: str, members: list[str]) -> list[str]:
    """Metrics to read for a section: those shown, and the horizontal axis if it is one."""
    shown, axis = _shown(section, members), _axis()
    return shown if axis in AXES or axis in shown else [*shown, axis]


def _axis() -> str:
    return str(st.session_state.get("x") or st.query_params.get("x") or "step")


def _key(member: str) -> str:
    return f"curve_{member}"


def _style(member: str, axis: str) -> dict[str, Any]:
    return {
        "x_title": AXES.get(axis, axis),
        "y_title": member.rsplit("/", 1)[-1],
        "log": bool(st.session_state.get("log", False)),
        "height": 260,
    }


def _chart(
    member: str,
    lines: dict[str, pd.DataFrame],
    axis: str,
    colours: dict[str, str],
    labels: dict[str, str],
) -> charts.Chart:
    parts = [one.assign(run=labels[name]) for name, one in lines.items()]
    data = pd.concat(parts, ignore_index=True)
    mine = {labels[name]: colours[name] for name in lines}
    # The table above shows the colours too.
    legend = len(mine) <= MOST_IN_LEGEND
    return charts.lines(
        data, x="x", y="value", colour="run", colours=mine, legend=legend, **_style(member, axis)
    )


def _means(
    member: str,
    lines: dict[str, pd.DataFrame],
    axis: str,
    groups: dict[str, list[str]],
    colours: dict[str, str],
) -> None:
    """A line per group, and below it where a group's line ends before some of its runs do."""
    parts, mine, notes = [], {}, []
    for label, names in groups.items():
        members = [lines[name] for name in names if name in lines]
        if not members:
            continue
        of = "" if len(members) == len(names) else f" of {len(names)}"
        named = f"{label} ({len(members)}{of} run{'s' if len(names) > 1 else ''})"
        folded = fold(members)
        parts.append(folded.assign(group=named))
        # A group has the colour of its oldest run, which no other group can have.
        mine[named] = colours[names[0]]
        if note := _ends(members, folded):
            notes.append(f"{formatting.code(label)} {note}")
    data = pd.concat(parts, ignore_index=True)
    if len(data):
        st.vega_lite_chart(
            *charts.bands(data, colours=mine, **_style(member, axis)), key=_key(member)
        )
    if notes:
        st.caption(f"Drawn where all runs of a mean have values: {'; '.join(notes)}")


def _ends(lines: list[pd.DataFrame], folded: pd.DataFrame) -> str:
    """How much of the longest line the mean lacks, if it is more than a little."""
    if folded.empty:
        return "nowhere"
    first, last = min(one["x"].min() for one in lines), max(one["x"].max() for one in lines)
    end = folded["x"].iloc[-1]
    return f"until {end:,.6g} of {last:,.6g}" if last - end > LITTLE * (last - first) else ""


def line(found: dict[str, Any], key: str, axis: str) -> pd.DataFrame:
    """Columns x and value of one metric of one run, smoothed, without values that are not finite.

    Across another metric, x is that metric's value at the same step, between its points by
    straight lines.
    """
    one = found.get(key)
    if one is None:
        return pd.DataFrame({"x": [], "value": []})
    if axis == "time":
        x = (one.times - one.times[0]) / 60
    elif axis == "step":
        x = one.steps
    elif axis in found:
        other = found[axis]
        known = np.isfinite(other.values)
        if not known.any():
            return pd.DataFrame({"x": [], "value": []})
        x = np.interp(one.steps, other.steps[known], other.values[known], left=np.nan, right=np.nan)
    else:
        return pd.DataFrame({"x": [], "value": []})
    weight = float(st.session_state.get("smooth", 0.0))
    values = charts.smooth(pd.Series(one.values), weight)
    return pd.DataFrame({"x": x, "value": values}).dropna()


def fold(lines: list[pd.DataFrame]) -> pd.DataFrame:
    """The mean of lines, where all of them have values: columns x, value, low, high and n, the
    number of lines. Beyond the end of one line, the mean of the others would jump."""
    first, last = max(one["x"].min() for one in lines), min(one["x"].max() for one in lines)
    places = np.unique(np.concatenate([one["x"].to_numpy(float) for one in lines]))
    places = places[(places >= first) & (places <= last)]
    if not len(places):
        return pd.DataFrame(columns=["x", "value", "low", "high", "n"], dtype=float)
    if len(places) > GRID:
        places = np.linspace(places[0], places[-1], GRID)
    rows = []
    for one in lines:
        order = one.sort_values("x")
        x, y = order["x"].to_numpy(float), order["value"].to_numpy(float)
        rows.append(np.interp(places, x, y))
    mean, low, high = api.bootstrap_mean_curve(rows)
    return pd.DataFrame({"x": places, "value": mean, "low": low, "high": high, "n": len(lines)})
