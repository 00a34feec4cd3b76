"""Pictures: plain functions from a data frame to an altair chart. They fetch nothing.

Every axis has a title with its unit; colours of runs come from the caller, so that a run looks
the same on every page. Text and marks keep a contrast of 4.5 on white (theme in .streamlit/).
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import altair as alt
import pandas as pd

INK = "#1b2430"
MAIN = "#0b5cad"
QUIET = "#5a6675"
CURSOR = "#b23a0e"
FEW = 80
"""Points that get a mark each, or a lone one would not be seen."""
MAX_POINTS = 5000
"""Of one chart; callers down-sample before. Vega draws in the browser."""


PALETTE = (
    "#0b5cad",
    "#c2410c",
    "#12703a",
    "#7a2aa8",
    "#b3126f",
    "#007080",
    "#7a4a00",
    "#3f4a5a",
    "#5145cd",
    "#56620a",
)
"""Colours of lines and marks: each at least 4.5 : 1 on white, and told apart when colour-blind."""


def colours(names: Iterable[str]) -> dict[str, str]:
    """Name → colour, for names in order of creation: earlier ones keep theirs.

    The hash of the name proposes a colour; a later name takes the next free one, so that adding a
    run never recolours another. Beyond the palette's length colours repeat.
    """
    taken: dict[str, str] = {}
    for name in dict.fromkeys(names):
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        order = [PALETTE[(start + i) % len(PALETTE)] for i in range(len(PALETTE))]
        free = [c for c in order if c not in taken.values()]
        taken[name] = free[0] if free else order[0]
    return taken


def lines(
    data: pd.DataFrame,
    *,
    x: str,
    y: str,
    x_title: str,
    y_title: str,
    colour: str | None = None,
    colours: Mapping[str, str] | None = None,
    height: int = 240,
    log: bool = False,
    cursor: float | None = None,
) -> alt.LayerChart:
    """Line(s) of `y` over `x`; a lone point gets a mark of its own. `cursor`: a vertical rule."""
    named = {"x": x, "y": y} | ({"colour": colour} if colour else {})
    scale = alt.Scale(type="symlog") if log else alt.Scale(zero=False)
    base = alt.Chart(_renamed(data, named)).encode(
        x=alt.X("x:Q", title=x_title, axis=alt.Axis(grid=False)),
        y=alt.Y("y:Q", title=y_title, scale=scale),
        color=_colour("colour" if colour else None, colours),
        tooltip=[alt.Tooltip(short, title=name) for short, name in named.items()],
    )
    layers: list[alt.Chart] = [base.mark_line(strokeWidth=1.8)]
    if len(data) <= FEW:
        layers.append(base.mark_point(filled=True, size=28))
    if cursor is not None:
        rule = alt.Chart(pd.DataFrame({"at": [cursor]}))
        layers.append(rule.mark_rule(color=CURSOR, strokeWidth=2).encode(x="at:Q"))
    return _finish(alt.layer(*layers).properties(height=height))


def line_spec(
    data: pd.DataFrame,
    *,
    x: str,
    y: str,
    colour: str,
    colours: Mapping[str, str],
    x_title: str,
    y_title: str,
    height: int,
    log: bool,
) -> tuple[dict[str, Any], pd.DataFrame]:
    """The picture of `lines`, for st.vega_lite_chart: specification, and data beside it.

    A page of many curves that refreshes cannot afford altair's checks of every one of them each
    time (25 ms, against 2 ms): what the curves have in common is made once.
    """
    named = {"x": x, "y": y, "colour": colour}
    few = len(data) <= FEW
    about = (tuple(named.items()), tuple(colours.items()), x_title, y_title, height, log, few)
    return copy.deepcopy(_line_spec(*about)), _renamed(data, named)


@functools.lru_cache(maxsize=512)
def _line_spec(
    named: tuple[tuple[str, str], ...],
    colours: tuple[tuple[str, str], ...],
    x_title: str,
    y_title: str,
    height: int,
    log: bool,
    few: bool,
) -> dict[str, Any]:
    names = dict(named)
    rows = pd.DataFrame({names["x"]: [0.0], names["y"]: [0.0], names["colour"]: [""]})
    made = lines(
        rows if few else pd.concat([rows] * (FEW + 1)), x=names["x"], y=names["y"],
        colour=names["colour"], colours=dict(colours), x_title=x_title, y_title=y_title,
        height=height, log=log,
    ).to_dict()  # fmt: skip
    for part in (made, *made["layer"]):
        part.pop("data", None)
    made.pop("datasets")
    return made


def histogram(
    bins: pd.DataFrame, *, title: str, unit: str, what: str = "trajectories", height: int = 200
) -> alt.LayerChart:
    """Bars from counted bins: columns low, high, n (the counting is SQL's, not the browser's)."""
    chart = alt.Chart(bins).mark_bar(color=MAIN, stroke="#ffffff", strokeWidth=0.5)
    chart = chart.encode(
        x=alt.X(
            "low:Q",
            title=f"{title} ({unit})",
            scale=alt.Scale(zero=False),
            axis=alt.Axis(grid=False, labelOverlap=True),
        ),
        x2="high:Q",
        y=alt.Y("n:Q", title=f"{what} (count)", axis=alt.Axis(tickMinStep=1, format="d")),
        y2=alt.datum(0),
        tooltip=[alt.Tooltip("low:Q", format=".4~g"), alt.Tooltip("high:Q", format=".4~g"), "n:Q"],
    )
    return _finish(alt.layer(chart).properties(height=height))


def intervals(
    data: pd.DataFrame, *, x_title: str, colours: Mapping[str, str] | None = None
) -> alt.LayerChart:
    """Rows of label, mean, iqm, ci_low, ci_high [, run]: a bar of the interval, dots on it."""
    order = list(dict.fromkeys(data["label"]))
    base = alt.Chart(data).encode(
        y=alt.Y("label:N", title=None, sort=order, axis=alt.Axis(labelOverlap=False))
    )
    colour = _colour("run" if colours else None, colours, legend=False)
    x = alt.X("ci_low:Q", title=x_title, scale=alt.Scale(zero=False))
    bar = base.mark_rule(strokeWidth=5, opacity=0.55).encode(x=x, x2="ci_high:Q", color=colour)
    tips = ["label", "env", "mean", "iqm", "ci_low", "ci_high", "episodes"]
    tooltip = [c for c in tips if c in data.columns]
    mean = base.mark_point(filled=True, size=110, opacity=1).encode(
        x="mean:Q", color=colour, tooltip=tooltip
    )
    iqm = base.mark_tick(thickness=2, size=18, color=INK).encode(x="iqm:Q", tooltip=tooltip)
    # The height is the picture's, with axis and title: those take about 70 pixels.
    height = 70 + 32 * max(2, len(order))
    return _finish(alt.layer(bar, mean, iqm).properties(height=height))


def bars(
    data: pd.DataFrame, *, x: str, y: str, x_title: str, y_title: str, height: int = 220
) -> alt.LayerChart:
    """A bar for each category of `x`."""
    frame = _renamed(data, {"x": x, "y": y})
    chart = alt.Chart(frame.assign(x=frame["x"].astype(str))).mark_bar(color=MAIN)
    chart = chart.encode(
        x=alt.X("x:N", title=x_title, sort=None),
        y=alt.Y("y:Q", title=y_title),
        tooltip=[alt.Tooltip("x:N", title=x), alt.Tooltip("y:Q", title=y)],
    )
    return _finish(alt.layer(chart).properties(height=height))


def dots(
    data: pd.DataFrame, *, x: str, y: str, x_title: str, y_title: str, height: int = 260
) -> alt.LayerChart:
    """A scatter of two numeric columns."""
    chart = alt.Chart(_renamed(data, {"x": x, "y": y}))
    chart = chart.mark_circle(color=MAIN, size=36, opacity=0.65).encode(
        x=alt.X("x:Q", title=x_title, scale=alt.Scale(zero=False)),
        y=alt.Y("y:Q", title=y_title, scale=alt.Scale(zero=False)),
        tooltip=[alt.Tooltip("x:Q", title=x), alt.Tooltip("y:Q", title=y)],
    )
    return _finish(alt.layer(chart).properties(height=height))


def smooth(values: pd.Series, weight: float) -> pd.Series:
    """Exponential moving average without start-up bias; weight 0 leaves the series alone."""
    return values if weight <= 0 else values.ewm(alpha=1 - weight, adjust=True).mean()


def _colour(
    field: str | None, colours: Mapping[str, str] | None, *, legend: bool = True
) -> alt.Color | alt.ColorValue:
    if field is None:
        return alt.ColorValue(MAIN)
    scale: Any = alt.Undefined
    if colours:
        scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    key = None
    if legend:
        key = alt.Legend(
            title=None, orient="bottom", labelLimit=260, columns=3, symbolOpacity=1,
            symbolType="stroke", symbolStrokeWidth=3,
        )  # fmt: skip
    return alt.Color(f"{field}:N", scale=scale, legend=key)


def _renamed(data: pd.DataFrame, named: Mapping[str, str]) -> pd.DataFrame:
    """The columns needed, under plain names: Vega reads dots, brackets and colons as syntax."""
    return pd.DataFrame({short: data[name] for short, name in named.items()})


def _finish(chart: alt.LayerChart | alt.FacetChart) -> alt.LayerChart:
    finished: alt.LayerChart = (
        chart.configure_axis(
            labelColor=INK, titleColor=INK, gridColor="#e3e8ee", domainColor=QUIET, labelLimit=260
        )
        .configure_legend(labelColor=INK, titleColor=INK)
        .configure_view(stroke=None)
    )
    return finished
