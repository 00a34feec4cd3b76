"""SQL console: the service runs one SELECT in a child process with a deadline."""

from __future__ import annotations

import time

import pandas as pd
import streamlit as st

from dashboard import api, charts, components, formatting

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
    "Last loss of every run": (
        "SELECT run, key, max(step) AS step, arg_max(value, step) AS value\n"
        "FROM metrics GROUP BY run, key ORDER BY run, key"
    ),
}
DEFAULT = EXAMPLES["What is there"]
HISTORY = "sql_history"


@components.view("SQL", "One SELECT over everything the service knows. Rows of `steps` are T+1 "
                 "per trajectory; `trajectories.length` is T.")  # fmt: skip
def show() -> None:
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
            dataset = st.selectbox(
                "Bare `steps` means", [None, *names], key="dataset", bind="query-params",
                format_func=lambda n: n or "all datasets (common columns)",
            )  # fmt: skip
            limit = st.number_input(
                "Rows at most", 1, 100_000, 1000, key="limit", bind="query-params"
            )
            seconds = st.number_input(
                "Seconds at most", 0.5, 60.0, api.SQL_SECONDS, key="timeout", bind="query-params"
            )
        st.button("Run", type="primary", icon=":material/play_arrow:", key="run")
        if query.strip():
            components.guarded(lambda: _answer(query, dataset, int(limit), float(seconds)))
        else:
            components.empty("Write a query, or take an example from the right.")


def _answer(query: str, dataset: str | None, limit: int, seconds: float) -> None:
    answer = api.sql(query, dataset=dataset, limit=limit, timeout=seconds)
    _remember(query, answer)
    more = " · more rows exist than were asked for" if answer.truncated else ""
    st.caption(
        f"{formatting.pluralize(len(answer.frame), 'row')} in {answer.elapsed_ms:.0f} ms{more}"
    )
    components.excluded_warning(answer.excluded)
    components.table(answer.frame, "result")
    _quick_chart(answer.frame)
    _as_python(query, dataset, limit)


def _quick_chart(frame: pd.DataFrame) -> None:
    numeric = [c for c in frame.columns if pd.api.types.is_numeric_dtype(frame[c])]
    if len(frame) < 2 or not numeric:
        return
    with st.expander("Chart", icon=":material/show_chart:"):
        kind = st.segmented_control(
            "Kind", ["line", "bars", "dots"], default="line", key="chart_kind", required=True
        )
        with st.container(horizontal=True):
            x = st.selectbox("Across", list(frame.columns), key="chart_x")
            y = st.selectbox("Up", numeric, index=min(1, len(numeric) - 1), key="chart_y")
        data = frame.head(charts.MAX_POINTS)
        if len(data) < len(frame):
            st.caption(f"The first {len(data):,} of {len(frame):,} rows.")
        if kind == "bars" or x not in numeric:
            chart = charts.bars(data, x=x, y=y, x_title=x, y_title=y)
        elif kind == "dots":
            chart = charts.dots(data, x=x, y=y, x_title=x, y_title=y)
        else:
            chart = charts.lines(data, x=x, y=y, x_title=x, y_title=y)
        st.vega_lite_chart(*chart, key="chart")


def _as_python(query: str, dataset: str | None, limit: int) -> None:
    with st.expander("Python and command line", icon=":material/code:"):
        about = f", dataset={dataset!r}" if dataset else ""
        st.code(
            "import stepwell\n"
            f"with stepwell.Client({api.address()!r}) as client:\n"
            f'    frame = client.sql("""\n{query}\n""", limit={limit}{about}).to_pandas()',
            language=None,
        )
        st.code(f"stepwell sql {_quoted(query)}", language=None, wrap_lines=True)


def _quoted(text: str) -> str:
    return "'" + " ".join(text.split()).replace("'", "'\\''") + "'"


def _remember(query: str, answer: api.Answer) -> None:
    history: list[tuple[float, str, int]] = st.session_state.setdefault(HISTORY, [])
    if not history or history[-1][1] != query:
        history.append((time.time(), query, len(answer.frame)))
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
    st.subheader("Tables")
    for table in api.query_schema().tables:
        with st.expander(f"`{table.name}`"):
            if table.description:
                st.caption(table.description)
            st.dataframe(
                pd.DataFrame([(c.name, c.type) for c in table.columns], columns=["column", "type"]),
                hide_index=True, key=f"schema_{table.name}",
            )  # fmt: skip
