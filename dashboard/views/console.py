"""SQL console: the service runs one SELECT in a child process with a deadline."""

from __future__ import annotations

import time
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, completion, components, formatting
from dashboard.views import answer, saved

EXAMPLES = {
    "What is there": (
        "SELECT dataset, partition, purpose, count(*) AS trajectories,\n"
        '       sum(length) AS transitions, avg("return") AS mean_return\n'
        "FROM trajectories GROUP BY ALL ORDER BY ALL"
    ),
    "Best trajectories": (
        'SELECT id, dataset, env, length, "return", policy\n'
        'FROM trajectories ORDER BY "return" DESC LIMIT 20'
    ),
    "Return by policy": (
        'SELECT policy, purpose, count(*) AS episodes, avg("return") AS mean_return,\n'
        '       quantile_cont("return", 0.5) AS median_return\n'
        "FROM trajectories GROUP BY ALL ORDER BY mean_return DESC"
    ),
    "Reward by step of the episode": (
        "SELECT t, avg(reward) AS mean_reward, count(reward) AS rows\n"
        "FROM steps WHERE NOT is_last GROUP BY t ORDER BY t"
    ),
    "Return by length": (
        'SELECT id, dataset, length, "return", policy\nFROM trajectories\n'
        "WHERE env = $env AND length >= $shortest ORDER BY length"
    ),
    "Last loss of every run": (
        "SELECT run, key, max(step) AS step, arg_max(value, step) AS value\n"
        "FROM metrics GROUP BY run, key ORDER BY run, key"
    ),
}
DEFAULT = EXAMPLES["What is there"]
HISTORY = "sql_history"
EVERY = "all datasets"


@components.view("SQL", "One SELECT over everything the service knows. Rows of `steps` are T+1 "
                 "per trajectory; `trajectories.length` is T.")  # fmt: skip
def show() -> None:
    api.prefetch(api.datasets, api.query_schema, api.saved_queries)
    if name := st.query_params.get("saved"):
        components.guarded(lambda: saved.open_linked(name))
    # The editor starts with the query in the URL, else with the first example.
    if "q" not in st.session_state and "q" not in st.query_params:
        st.session_state["q"] = DEFAULT
    st.html("<style>.st-key-q textarea { font-family: monospace; }</style>")
    left, right = st.columns([3, 1], gap="large")
    with right:
        _examples()
        _schema()
    with left:
        query = st.text_area("Query", key="q", height=180, bind="query-params")
        with st.container(horizontal=True, vertical_alignment="bottom"):
            names = [d.name for d in api.datasets()]
            dataset = components.choose(
                "Bare `steps` means", [None, *names], "dataset", EVERY, placeholder=EVERY,
                help="Without one, `steps` has only the columns that all datasets have",
            )  # fmt: skip
            limit = st.number_input(
                "Rows at most", 1, 100_000, 1000, key="limit", bind="query-params"
            )
            seconds = st.number_input(
                "Seconds at most",
                0.5,
                60.0,
                api.CONSOLE_SECONDS,
                key="timeout",
                bind="query-params",
            )
        completion.draw("q", api.query_schema().tables, query, dataset)
        params = _params(query)
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button(
                "Run", type="primary", icon=":material/play_arrow:", key="run", shortcut="mod+enter"
            )
            saved.menu(query, params, dataset)
        if missing := [f"${name}" for name, value in params.items() if value == ""]:
            st.info(f"Give {' and '.join(missing)} a value.", icon=":material/edit:")
        elif query.strip():
            components.guarded(lambda: _answer(query, params, dataset, int(limit), float(seconds)))
        else:
            components.empty("Write a query, or take an example from the right.")


def _params(query: str) -> dict[str, Any]:
    """A field for each $name of the query; its value is in the URL."""
    names = formatting.placeholders(query)
    if not names:
        return {}
    params = {}
    with st.container(horizontal=True, vertical_alignment="bottom"):
        for name in names:
            text = st.text_input(f"${name}", key=f"param_{name}", bind="query-params")
            params[name] = formatting.value_of(text)
    return params


def _answer(
    query: str, params: dict[str, Any], dataset: str | None, limit: int, seconds: float
) -> None:
    found = api.sql(query, params or None, dataset=dataset, limit=limit, timeout=seconds)
    _remember(query, found)
    answer.draw(query, params, dataset, found, limit=limit, seconds=seconds)


def _remember(query: str, found: api.Answer) -> None:
    history: list[tuple[float, str, int]] = st.session_state.setdefault(HISTORY, [])
    if not history or history[-1][1] != query:
        history.append((time.time(), query, len(found.frame)))
        del history[:-20]


def _take(query: str) -> None:
    st.session_state["q"] = query


def _examples() -> None:
    st.subheader("Examples")
    for name, query in EXAMPLES.items():
        st.button(name, key=f"example_{name}", on_click=_take, args=(query,), width="stretch")
    history: list[tuple[float, str, int]] = st.session_state.get(HISTORY, [])
    if len(history) > 1:
        with st.expander("History"):
            for moment, query, rows in reversed(history):
                st.button(
                    f"{' '.join(query.split())[:60]} ({formatting.pluralize(rows, 'row')})",
                    key=f"history_{moment}", on_click=_take, args=(query,), type="tertiary",
                )  # fmt: skip


def _schema() -> None:
    """One table at a time: a service may have a thousand datasets."""
    tables = {table.name: table for table in api.query_schema().tables}
    name = st.selectbox("Tables and their columns", list(tables), key="schema")
    table = tables[name]
    if table.description:
        st.caption(table.description)
    st.dataframe(
        pd.DataFrame([(c.name, c.type) for c in table.columns], columns=["column", "type"]),
        hide_index=True, key="schema_columns",
    )  # fmt: skip
