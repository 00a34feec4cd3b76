"""The episode viewer: one trajectory, a step slider, and charts that follow it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from dashboard import api, charts, components, formatting

DIMENSIONS = 256
"""Maximum dimensions shown of one array; use SQL for the rest."""
MOST_LINES = 8
"""Number of dimensions drawn by default."""


def draw(info: Any) -> None:
    """Draw everything about one trajectory (`info`: its row of the index)."""
    trajectory = api.steps(info.id)
    _facts(info)
    length = info.length
    if st.session_state.get("t", 0) > length:
        st.session_state["t"] = 0
    t = st.slider(
        f"Step t of {length}", 0, length, key="t", bind="query-params",
        help="Row t holds observation t and what action t earned; row T has an observation only",
    )  # fmt: skip
    left, right = st.columns(2, gap="large")
    with left:
        _rewards(trajectory, t)
        _actions(trajectory, t)
    with right:
        _observations(trajectory, t)
        _row(trajectory, t, info)
    sql = (
        f"SELECT * FROM {formatting.quoted(info.dataset)}.steps\n"
        f"WHERE trajectory_id = {formatting.literal(info.id)} ORDER BY t"
    )
    components.sql_note(sql, label="SQL of its steps")
    st.download_button(
        "Download .npz", lambda: api.npz(trajectory), file_name=f"{info.id}.npz",
        icon=":material/download:", key="npz", on_click="ignore",
    )  # fmt: skip


def _facts(info: Any) -> None:
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
    components.numbers(
        [
            ("Return", formatting.decimal(info.total_reward, 3), "Sum of its rewards"),
            ("Length", formatting.count(info.length), f"Transitions{first}"),
            ("Seed", "–" if info.seed is None else str(info.seed), ""),
            ("Number", formatting.count(info.seq), "The service's order within the dataset"),
            ("Size", formatting.size(info.bytes), "Arrays, before compression"),
        ]
    )
    arrived = f"arrived {formatting.ago(info.created_at)}"
    env = info.env or "unknown environment"
    st.caption(f"{env} · made by {made} · {arrived} · digest {info.digest[:16]}")
    if info.metrics:
        st.caption(" · ".join(f"{k} {v:.4g}" for k, v in sorted(info.metrics.items())))


def _rewards(trajectory: Any, t: int) -> None:
    rewards = trajectory.rewards.astype(float)
    what = st.segmented_control(
        "Reward", ["per step", "so far", "to go"], default="per step", key="reward_kind",
        required=True,
    )  # fmt: skip
    if what == "so far":
        values, title = np.cumsum(rewards), "return so far"
    elif what == "to go":
        values, title = np.cumsum(rewards[::-1])[::-1], "return to go"
    else:
        values, title = rewards, "reward per step"
    frame = _long({"reward": values})
    st.vega_lite_chart(
        *charts.lines(
            frame, x="t", y="value", x_title="t (steps)", y_title=title, cursor=float(t), height=220
        ),
        key="rewards",
    )


def _actions(trajectory: Any, t: int) -> None:
    named = _dimensions(trajectory.actions)
    _cut(trajectory.actions)
    if named:
        _lines(named, t, "Actions", "action (env units)", "actions")


def _observations(trajectory: Any, t: int) -> None:
    for key, array in trajectory.obs.items():
        if _is_image(array):
            st.image(_enlarged(array[t]), caption=f"{key} at t = {t}", width=280)
    vectors = {k: a for k, a in trajectory.obs.items() if not _is_image(a)}
    named = _dimensions(vectors)
    _cut(vectors)
    if named:
        _lines(named, t, "Observations", "observation (env units)", "observations")


def _lines(named: dict[str, Any], t: int, label: str, title: str, key: str) -> None:
    names = list(named)
    if len(names) > 1:
        chosen = st.multiselect(label, names, default=names[:MOST_LINES], key=f"{key}_chosen")
    else:
        st.caption(f"{label}: {names[0]}")
        chosen = names
    if not chosen:
        return
    frame = _long({name: named[name] for name in chosen})
    palette = {name: charts.PALETTE[names.index(name) % len(charts.PALETTE)] for name in chosen}
    st.vega_lite_chart(
        *charts.lines(
            frame, x="t", y="value", colour="name" if len(names) > 1 else None,
            colours=palette, x_title="t (steps)", y_title=title, cursor=float(t), height=260,
        ),
        key=key,
    )  # fmt: skip


def _row(trajectory: Any, t: int, info: Any) -> None:
    """Show the values of row t."""
    rows: list[tuple[str, str]] = []
    for key, array in trajectory.obs.items():
        if not _is_image(array):
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
    st.dataframe(pd.DataFrame(rows, columns=["column", "value"]), hide_index=True, key="row")


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


def _is_image(array: Any) -> bool:
    shape = array.shape[1:]
    return array.dtype == np.uint8 and (
        len(shape) == 2 or (len(shape) == 3 and shape[-1] in (1, 3, 4))
    )


def _enlarged(image: Any) -> Any:
    """Enlarge small images with sharp pixels: the browser would blur them."""
    factor = max(1, 280 // max(image.shape[0], image.shape[1]))
    return image.repeat(factor, axis=0).repeat(factor, axis=1).squeeze()


def _long(series: dict[str, Any]) -> pd.DataFrame:
    """Long form for the chart, down-sampled for speed in the browser."""
    longest = max(len(values) for values in series.values())
    stride = max(1, -(-longest * len(series) // charts.MAX_POINTS))
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "t": np.arange(0, len(values), stride),
                    "value": np.asarray(values)[::stride].astype(float),
                    "name": name,
                }
            )
            for name, values in series.items()
        ],
        ignore_index=True,
    )
