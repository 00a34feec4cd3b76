"""What one can do with the answer of a query: look, draw, download, train on it, take it along."""

from __future__ import annotations

import functools
import shlex
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from dashboard import api, charts, components, formatting
from dashboard.views import launches

FILES = {
    "CSV": ("csv", "text/csv"),
    "Parquet": ("parquet", "application/vnd.apache.parquet"),
    "Arrow": ("arrow", "application/vnd.apache.arrow.file"),
}
MOST_COLOURS = 20
MOST_LINKS = 5
"""Maximum number of links to datasets that an answer is from."""
MOST_TEXT = 4096
"""Maximum length of the description of a version."""
ROWS, SECONDS = 1000, 5.0
"""What `Client.sql` and `stepwell sql` ask for unless they are told otherwise."""
KINDS = ("line", "bars", "dots", "histogram")


def draw(
    query: str,
    params: dict[str, Any],
    dataset: str | None,
    answer: api.Answer,
    *,
    limit: int,
    seconds: float,
) -> None:
    """`answer`: its first rows, as far as they were asked for by `limit`, within `seconds`."""
    frame = answer.frame
    more = " · more rows exist than were asked for" if answer.truncated else ""
    st.caption(f"{formatting.pluralize(len(frame), 'row')} in {answer.elapsed_ms:.0f} ms{more}")
    components.excluded_warning(answer.excluded)
    components.table(frame, "result", missing="NULL")
    _download(query, params, dataset)
    _chart(frame)
    if "id" in frame.columns:
        chosen = formatting.with_values(query, params)
        components.folder("Train on this", "train", lambda: _train(chosen, frame), "school")
        components.folder(
            "Make a version", "version", lambda: _version(chosen, frame, dataset), "bookmark_add"
        )
    components.folder(
        "Python and command line", "python",
        lambda: _as_python(query, params, dataset, limit, seconds), "code",
    )  # fmt: skip


def _download(query: str, params: dict[str, Any], dataset: str | None) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption("All rows")
        for name, (suffix, mime) in FILES.items():
            components.download(
                name, functools.partial(api.whole_answer, query, params, dataset, suffix),
                f"answer.{suffix}", mime, f"whole_{suffix}",
                help=f"Asks again, for up to {api.MOST_ROWS:,} rows",
            )  # fmt: skip


# --- a chart, whose settings are in the URL -------------------------------------------------------


def _chart(frame: pd.DataFrame) -> None:
    numeric = [c for c in frame.columns if pd.api.types.is_numeric_dtype(frame[c])]
    if len(frame) < 2 or not numeric:
        return
    # An older link only says how the chart is.
    opened = f"chart{components.OPEN}"
    known = opened in st.session_state or opened in st.query_params
    if not known and any(name.startswith("chart") for name in st.query_params):
        st.session_state[opened] = True
    components.folder(
        "Chart", "chart", lambda: _chart_of(frame, numeric), "show_chart", linked=True
    )


def _chart_of(frame: pd.DataFrame, numeric: list[str]) -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        kind = st.segmented_control(
            "Kind", KINDS, default="line", key="chart", required=True, bind="query-params"
        )
        x = components.choose("Across", list(frame.columns), "chart_x")
        y = components.choose("Up", numeric, "chart_y", index=min(1, len(numeric) - 1))
        groups = ["", *(c for c in frame.columns if c not in numeric)]
        by = components.choose("Colour", groups, "chart_by", "none") if kind == "line" else ""
    data = frame.head(charts.MAX_POINTS)
    if len(data) < len(frame):
        st.caption(f"The first {len(data):,} of {len(frame):,} rows.")
    st.vega_lite_chart(*_drawn(data, str(kind), x, y, by, numeric), key="drawn")


def _drawn(
    data: pd.DataFrame, kind: str, x: str, y: str, by: str, numeric: list[str]
) -> charts.Chart:
    if kind == "histogram":
        counts, edges = np.histogram(data[y].dropna().astype(float), bins=30)
        bins = pd.DataFrame({"low": edges[:-1], "high": edges[1:], "n": counts})
        return charts.histogram(bins, title=y, unit="of the column", what="rows")
    if kind == "bars" or x not in numeric:
        return charts.bars(data, x=x, y=y, x_title=x, y_title=y)
    if kind == "dots":
        return charts.dots(data, x=x, y=y, x_title=x, y_title=y)
    if not by:
        return charts.lines(data, x=x, y=y, x_title=x, y_title=y)
    data = data.assign(**{by: data[by].astype(str)})
    colours = charts.colours(sorted(set(data[by]))[:MOST_COLOURS])
    if by == "run":
        colours |= components.run_colours(api.known_runs(tuple(colours)).values())
    data = data[data[by].isin(colours)]
    return charts.lines(data, x=x, y=y, x_title=x, y_title=y, colour=by, colours=colours)


# --- elsewhere ------------------------------------------------------------------------------------


def _train(query: str, frame: pd.DataFrame) -> None:
    where = selection(query)
    found = _datasets_of(where) or _datasets(frame)
    name = found[0] if len(found) == 1 else "DATASET"
    st.caption("These trajectories, as the selection of a run. It is resolved when it starts.")
    with st.container(horizontal=True):
        for one in found[:MOST_LINKS]:
            label = "Train on it" if len(found) == 1 else f"Train on those of {one}"
            launches.train_link(one, where, label)
    st.code(
        f"stepwell train offline --dataset {shlex.quote(name)} --where {shlex.quote(where)}",
        language=None, wrap_lines=True,
    )  # fmt: skip
    st.caption("Or in a training script of your own, with torch's DataLoader:")
    st.code(
        "from stepwell.torch import Windows\n"
        f'windows = Windows(select=r"""SELECT id FROM (\n{_query(query)}\n)""", length=64)',
        language=None, wrap_lines=True,
    )  # fmt: skip


def _datasets_of(where: str) -> list[str]:
    """The datasets that a selection is from; none if that is not known."""
    sql = f"SELECT DISTINCT dataset FROM trajectories WHERE {where} ORDER BY dataset"
    try:
        return _datasets(api.sql(sql, limit=MOST_LINKS + 1).frame)
    except api.StepwellError:
        return []


def _datasets(frame: pd.DataFrame) -> list[str]:
    return [str(name) for name in frame["dataset"].unique()] if "dataset" in frame.columns else []


def _version(query: str, frame: pd.DataFrame, dataset: str | None) -> None:
    names = _datasets(frame) or [d.name for d in api.datasets()]
    with st.form("make_version", border=False):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            of = st.selectbox(
                "Of the dataset", names, key="make_version_of",
                index=names.index(dataset) if dataset in names else 0,
            )  # fmt: skip
            name = st.text_input("Name", key="make_version_name", placeholder="v1")
            licence = st.text_input("Licence", key="make_version_licence")
        with_eval = st.checkbox("With evaluation episodes", key="make_version_eval")
        st.caption(
            "Those of its trajectories whose ids the whole query returns now. They become "
            "protected while the version exists; its description is the query."
        )
        sent = st.form_submit_button("Create", type="primary", key="make_version_go")
    if sent and not name.strip():
        st.warning("Give it a name, such as v1.")
    elif sent and components.attempt(
        lambda: api.client().create_version(
            str(of), name.strip(), where=selection(query), description=query[:MOST_TEXT],
            licence=licence, include_eval=with_eval,
        ),
        f"version {of}@{name.strip()} created",
    ):  # fmt: skip
        _made(str(of), name.strip())


def _made(dataset: str, name: str) -> None:
    made = api.client().version(f"{dataset}@{name}")
    many = formatting.trajectories(made.statistics.trajectories)
    st.success(f"`{made.version}` has {many}.", icon=":material/check:")
    components.link("datasets", "Open it", "database", dataset=dataset, version=name)


def selection(query: str) -> str:
    """A condition for the trajectories whose ids a query returns."""
    # On lines of its own: a comment at its end must not hide the parenthesis.
    return f"id IN (SELECT id FROM (\n{_query(query)}\n))"


def _query(text: str) -> str:
    return text.strip().rstrip(";")


def _as_python(
    query: str, params: dict[str, Any], dataset: str | None, limit: int, seconds: float
) -> None:
    # As far as they differ from what the client and the command take by themselves.
    options: dict[str, Any] = {"dataset": dataset} if dataset else {}
    if limit != ROWS:
        options["limit"] = limit
    if seconds != SECONDS:
        options["timeout"] = seconds
    more = f", {params!r}" if params else ""
    more += "".join(f", {name}={value!r}" for name, value in options.items())
    st.code(
        "import stepwell\n"
        f"with stepwell.Client({api.address()!r}) as client:\n"
        f'    frame = client.sql("""\n{query}\n"""{more}).to_pandas()',
        language=None, wrap_lines=True,
    )  # fmt: skip
    words = f"stepwell sql {shlex.quote(query)}"
    words += "".join(f" --{name} {shlex.quote(str(value))}" for name, value in options.items())
    words += "".join(f" --param {shlex.quote(f'{k}={v}')}" for k, v in params.items())
    st.code(words, language=None, wrap_lines=True)
