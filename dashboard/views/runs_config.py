"""Configs of the selected runs: the settings in which they differ, and groups by a setting."""

from __future__ import annotations

import json
from typing import Any

import streamlit as st

from dashboard import api, components

SEEDS = "all but the seed"
"""Groups runs whose configs differ in nothing but the seed and names."""
ABSENT = "–"
PROVENANCE = ("claim", "origins.")
"""Who started a run, and where its settings came from: no settings themselves."""


def draw(runs: list[Any]) -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        words = st.text_input(
            "Setting contains", key="config_search", bind="query-params", width=260
        )
        every = st.toggle("Equal settings too", key="config_all", bind="query-params")
    configs = {run.name: api.flatten(run.config) for run in runs}
    keys = sorted({key for config in configs.values() for key in config})
    different = [key for key in differing(configs) if not key.startswith(PROVENANCE)]
    shown = keys if every else different
    shown = [key for key in shown if (words or "").strip().lower() in key.lower()]
    if not shown:
        one = "There is one run; with a second one, this shows what differs."
        components.empty(one if len(runs) == 1 else "No setting differs.")
        return
    labels = {run.name: run.label for run in runs}
    rows = [
        {"setting": key, **{labels[n]: text(config.get(key)) for n, config in configs.items()}}
        for key in shown
    ]
    columns = {"setting": st.column_config.TextColumn(pinned=True)}
    components.table(rows, "config_diff", columns=columns, most_height=600)


def differing(configs: dict[str, dict[str, Any]]) -> list[str]:
    """Settings that have not the same value in all configs; one that is absent differs too."""
    keys = sorted({key for config in configs.values() for key in config})
    return [k for k in keys if len({_exact(c.get(k), k in c) for c in configs.values()}) > 1]


def groups(runs: list[Any], by: str) -> dict[str, list[str]]:
    """Label → names of its runs, by one setting or by all but the seed."""
    configs = {run.name: api.flatten(run.config) for run in runs}
    found: dict[str, list[str]] = {}
    if by != SEEDS:
        leaf = by.rsplit(".", 1)[-1]
        for name, config in configs.items():
            found.setdefault(f"{leaf} = {text(config.get(by))}", []).append(name)
        return found
    kept = {
        name: {k: v for k, v in config.items() if not api.SEED_NAMES & {*k.split(".")}}
        for name, config in configs.items()
    }
    differ = differing(kept)
    for name, config in kept.items():
        parts = [f"{key.rsplit('.', 1)[-1]} = {text(config.get(key))}" for key in differ]
        # A run without a config stands alone, as in the leaderboard.
        found.setdefault((", ".join(parts) or "all") if config else name, []).append(name)
    return found


def text(value: Any) -> str:
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _exact(value: Any, present: bool) -> str:
    return json.dumps(value, sort_keys=True, default=str) if present else ""
