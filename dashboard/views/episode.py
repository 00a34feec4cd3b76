"""The episode viewer: one or two trajectories, a step slider that plays, and what follows it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from dashboard import api, charts, components, formatting, frames

DIMENSIONS = 256
"""Maximum dimensions shown of one array; use SQL for the rest."""
PLAYING = "playing"
TICK = 0.5
"""Seconds between two steps while it plays: the browser draws all charts anew."""
MOST_LINES = 8
"""Number of dimensions drawn by default."""


def draw(shown: Sequence[Any]) -> None:
    """Draw one trajectory, or two side by side (`shown`: their rows of the index)."""
    for place, info in zip(st.columns(len(shown), gap="large"), shown, strict=True):
        with place:
            _facts(info, wide=len(shown) == 1)
    playing = st.session_state.get(PLAYING, False)
    drawn = False

    def part() -> None:
        nonlocal drawn
        # Drawn again by the clock, and not with the whole page: time to move on.
        if drawn and st.session_state.get(PLAYING, False):
            _advance(max(info.length for info in shown))
        drawn = True
        _steps(shown)

    every = TICK if playing else None
    st.fragment(run_every=every)(lambda: components.guarded(part))()


def _advance(last: int) -> None:
    t = st.session_state.get("t", 0) + int(st.session_state.get("pace") or 1)
    st.session_state["t"] = min(t, last)
    if t >= last:
        st.session_state[PLAYING] = False
        st.rerun()


def _play(last: int) -> None:
    playing = not st.session_state.get(PLAYING, False)
    st.session_state[PLAYING] = playing
    if playing and st.session_state.get("t", 0) >= last:
        st.session_state["t"] = 0


def _move(by: int, last: int) -> None:
    st.session_state["t"] = min(max(st.session_state.get("t", 0) + by, 0), last)


def _steps(shown: Sequence[Any]) -> None:
    """The step slider, and what follows it."""
    last = max(info.length for info in shown)
    if st.session_state.get("t", 0) > last:
        st.session_state["t"] = 0
    with st.container(horizontal=True, vertical_alignment="bottom"):
        playing = st.session_state.get(PLAYING, False)
        st.button(
            "Back", key="back", icon=":material/skip_previous:", shortcut="left",
            on_click=_move, args=(-1, last),
        )  # fmt: skip
        # The clock belongs to the fragment, which only the whole page can make anew.
        if st.button(
            "Pause" if playing else "Play", key="play", shortcut="p", on_click=_play, args=(last,),
            icon=":material/pause:" if playing else ":material/play_arrow:", type="primary",
        ):  # fmt: skip
            st.rerun()
        st.button(
            "Forward", key="forward", icon=":material/skip_next:", shortcut="right",
            on_click=_move, args=(1, last),
        )  # fmt: skip
        st.segmented_control(
            "Steps per tick", [1, 2, 5, 20], default=1, key="pace", required=True,
            help=f"While playing, {1 / TICK:g} ticks a second",
        )  # fmt: skip
    t = st.slider(
        f"Step t of {last}", 0, last, key="t", bind="query-params",
        help="Row t holds observation t and what action t earned; row T has an observation only",
    )  # fmt: skip
    if len(shown) == 1:
        left, right = st.columns(2, gap="large")
        _one(shown[0], t, (left, right, right), "")
        return
    for number, (place, info) in enumerate(
        zip(st.columns(len(shown), gap="large"), shown, strict=True)
    ):
        with place:
            _one(info, t, (place, place, place), f"_{number}")


def _one(info: Any, t: int, places: tuple[Any, Any, Any], side: str) -> None:
    """The charts, frames and numbers of one trajectory; `side` ends the keys of its widgets."""
    trajectory = api.steps(info.id)
    t = min(t, info.length)
    with places[0]:
        _rewards(trajectory, t, side)
        _actions(trajectory, t, side)
        components.guarded(lambda: _values(info, t, side))
    with places[1]:
        _images(trajectory, t, info, side)
        _observations(trajectory, t, side)
    with places[2]:
        _row(trajectory, t, info, side)
    sql = (
        f"SELECT * FROM {formatting.quoted(info.dataset)}.steps\n"
        f"WHERE trajectory_id = {formatting.literal(info.id)} ORDER BY t"
    )
    components.sql_note(sql, f"steps{side}", label="SQL of its steps")
    st.download_button(
        "Download .npz", lambda: api.npz(trajectory), file_name=f"{info.id}.npz",
        icon=":material/download:", key=f"npz{side}", on_click="ignore",
    )  # fmt: skip


def _facts(info: Any, *, wide: bool) -> None:
    with st.container(horizontal=True):
        end = "terminated" if info.terminated else "truncated" if info.truncated else "not ended"
        if end == "not ended":
            st.badge(end, color="gray")
        else:
            st.badge(end, color="green" if end == "terminated" else "orange")
        st.badge(
            info.partition, icon=":material/shield:" if info.partition == "protected" else None
        )
        st.badge(info.purpose, color="gray")
        if not info.final_obs_valid:
            st.badge("last observation unknown", color="orange")
        for tag in info.tags:
            st.badge(tag, color="violet")
        for flag in info.flags:
            st.badge(flag, color="red", icon=":material/flag:")
    first = f", from step {info.first_step}" if info.first_step else ""
    made = info.policy or info.collector or info.source or "unknown"
    facts = [
        ("Return", formatting.decimal(info.total_reward, 3), "Sum of its rewards"),
        ("Length", formatting.count(info.length), f"Transitions{first}"),
        ("Seed", "–" if info.seed is None else str(info.seed), ""),
        ("Number", formatting.count(info.seq), "The service's order within the dataset"),
        ("Size", formatting.size(info.bytes), "Arrays, before compression"),
    ]
    components.numbers(facts if wide else facts[:3])
    arrived = f"arrived {formatting.ago(info.created_at)}"
    env = info.env or "unknown environment"
    st.caption(f"{env} · made by {made} · {arrived} · digest {info.digest[:16]}")
    if info.metrics:
        st.caption(" · ".join(f"{k} {v:.4g}" for k, v in sorted(info.metrics.items())))


def _rewards(trajectory: Any, t: int, side: str) -> None:
    rewards = trajectory.rewards.astype(float)
    what = st.segmented_control(
        "Reward", ["per step", "so far", "to go"], default="per step", key=f"reward_kind{side}",
        required=True,
    )  # fmt: skip
    if what == "so far":
        values, title = np.cumsum(rewards), "return so far"
    elif what == "to go":
        values, title = np.cumsum(rewards[::-1])[::-1], "return to go"
    else:
        values, title = rewards, "reward per step"
    _chart({"reward": values}, t, title, f"rewards{side}", 220)


def _actions(trajectory: Any, t: int, side: str) -> None:
    named = _dimensions(trajectory.actions)
    _cut(trajectory.actions)
    if named:
        _lines(named, t, "Actions", "action (env units)", f"actions{side}")


def _values(info: Any, t: int, side: str) -> None:
    """Show the values of step `t` if the episode is annotated (reference/annotations.md)."""
    found = api.values_of_steps(info.id) if api.annotations_of(info.dataset) else {}
    if not found:
        return
    name = next(iter(found))
    if len(found) > 1:
        name = st.selectbox("Annotations", list(found), key=f"annotations{side}")
    else:
        st.caption(f"Annotations: {name}")
    values = found[name]
    charted = {
        "Q and V (return)": {"Q": values["q"], "V": values["v"]},
        "advantage": {"advantage": values["advantage"]},
    }
    for number, (title, series) in enumerate(charted.items()):
        palette = dict(zip(series, charts.PALETTE, strict=False)) if len(series) > 1 else None
        height = 270 if palette else 190  # a legend takes its part
        _chart(series, t, title, f"values_{number}{side}", height, palette)
    step = values[values["step"] == t]
    if len(step):
        shown = " · ".join(
            f"{column} {formatting.decimal(step[column].iloc[0], 3)}"
            for column in ("q", "v", "advantage", "weight")
        )
        st.caption(f"t = {t}: {shown}")
    sql = (
        f"SELECT * FROM annotations\nWHERE trajectory = {formatting.literal(info.id)} ORDER BY step"
    )
    components.sql_note(sql, f"annotations{side}", label="SQL of its annotations")


def _images(trajectory: Any, t: int, info: Any, side: str) -> None:
    for key, array in trajectory.obs.items():
        if not frames.is_image(array):
            continue
        st.image(frames.enlarged(array[t]), caption=f"{key} at t = {t}", width=280)
        film = functools.partial(_film, info, key, array)
        components.folder(f"All frames of {key}", f"film_{key}{side}", film)


def _film(info: Any, key: str, array: Any) -> None:
    st.image(api.film(info.id, key), caption="from the first to the last step")
    chosen = frames.strip(array)
    st.image(
        [frames.enlarged(array[one], 96) for one in chosen],
        caption=[f"t = {one}" for one in chosen], width=96,
    )  # fmt: skip


def _observations(trajectory: Any, t: int, side: str) -> None:
    vectors = {k: a for k, a in trajectory.obs.items() if not frames.is_image(a)}
    named = _dimensions(vectors)
    _cut(vectors)
    if named:
        _lines(named, t, "Observations", "observation (env units)", f"observations{side}")
    infos = {k: a for k, a in trajectory.infos.items() if a.dtype.kind in "fiub"}
    if infos:
        named_infos = _dimensions(infos)
        components.folder(
            "Infos", f"infos{side}", lambda: _lines(named_infos, t, "Infos", "info", f"info{side}")
        )


def _lines(named: dict[str, Any], t: int, label: str, title: str, key: str) -> None:
    names = list(named)
    if len(names) > 1:
        chosen = st.multiselect(label, names, default=names[:MOST_LINES], key=f"{key}_chosen")
    else:
        st.caption(f"{label}: {names[0]}")
        chosen = names
    if not chosen:
        return
    palette = None
    if len(names) > 1:
        palette = {n: charts.PALETTE[names.index(n) % len(charts.PALETTE)] for n in chosen}
    height = 320 if palette else 240  # a legend takes its part
    _chart({name: named[name] for name in chosen}, t, title, key, height, palette)


def _chart(
    series: dict[str, Any], t: int, title: str, key: str, height: int,
    palette: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """Values by step, and where step `t` is. `palette`: the colours of several series."""
    drawn = charts.lines(
        _long(series), x="t", y="value", x_title="t (steps)", y_title=title, height=height,
        colour="name" if palette else None, colours=palette, cursor=float(t),
    )  # fmt: skip
    st.vega_lite_chart(*drawn, key=key)


def _row(trajectory: Any, t: int, info: Any, side: str) -> None:
    """Show the values of row t."""
    rows: list[tuple[str, str]] = []
    for key, array in trajectory.obs.items():
        if not frames.is_image(array):
            rows.append((f"obs.{key}", _numbers(array[t])))
    if t < info.length:
        for key, array in trajectory.actions.items():
            rows.append((key if key == "action" else f"action.{key}", _numbers(array[t])))
        rows.append(("reward", f"{float(trajectory.rewards[t]):.6g}"))
        final = t == info.length - 1
        rows.append(("terminated", str(final and info.terminated)))
        rows.append(("truncated", str(final and info.truncated)))
    else:
        rows.append(("action, reward", "none: the last row is an observation only"))
    for key, array in trajectory.infos.items():
        rows.append((f"info.{key}", _numbers(array[t])))
    st.markdown(f"**Row t = {t}**")
    st.dataframe(pd.DataFrame(rows, columns=["column", "value"]), hide_index=True, key=f"row{side}")


def _numbers(value: Any) -> str:
    flat = np.asarray(value).reshape(-1)
    text = ", ".join(f"{x:.5g}" for x in flat[:32].tolist())
    return text + (f", … ({flat.size} in all)" if flat.size > 32 else "")


def _dimensions(arrays: Any) -> dict[str, Any]:
    """Every scalar series of some arrays [rows, *shape], by name: observation[0], …"""
    named: dict[str, Any] = {}
    for key, array in arrays.items():
        flat = array.reshape(len(array), -1)
        for i in range(min(flat.shape[1], DIMENSIONS)):
            named[f"{key}[{i}]" if flat.shape[1] > 1 else key] = flat[:, i]
    return named


def _cut(arrays: Any) -> None:
    """Show a caption about the dimensions that `_dimensions` omits."""
    for key, array in arrays.items():
        numbers = int(np.prod(array.shape[1:]))
        if numbers > DIMENSIONS:
            st.caption(f"The first {DIMENSIONS} of {numbers:,} numbers of {key}; SQL has all.")


def _long(series: dict[str, Any]) -> pd.DataFrame:
    """Long form for the chart, with as many points as a browser draws quickly."""
    kept = {k: charts.extremes(v, charts.MAX_POINTS // len(series)) for k, v in series.items()}
    parts = []
    for name, values in series.items():
        shown = np.asarray(values)[kept[name]].astype(float)
        parts.append(pd.DataFrame({"t": kept[name], "value": shown, "name": name}))
    return pd.concat(parts, ignore_index=True)
