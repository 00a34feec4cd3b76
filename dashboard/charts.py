"""Charts: functions that convert a data frame to the arguments of `st.vega_lite_chart`.

Every axis has a title with its unit. The caller passes the colours of runs, so that a run has the
same colour on every page. Text has the colours of the theme, light or dark (.streamlit/), and the
marks stand out on both. Specifications are dicts: building one with altair takes 25 ms, and a page
has many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st
from numpy.typing import NDArray

Chart = tuple[pd.DataFrame, dict[str, Any]]
"""Data and Vega-Lite specification."""

INK = {"light": "#3d4652", "dark": "#c3ccd7"}
"""Colour of texts, by theme: Streamlit's own grey is too light."""
MAIN = "#126fd9"
QUIET = "#647287"
"""Colour of references, such as other people's results."""
CURSOR = "#cb450b"
FEW = 80
"""Up to this many points are drawn with marks, because a single point has no visible line."""
POINT = {"type": "point", "filled": True, "size": 28}
LINE = {"type": "line", "strokeWidth": 1.8, "aria": False}
"""A line is one element: Vega says of all of it, in words and in the tooltip, what is true of its
first point. So neither has more than what is the same at all points."""
SHORT_NAME, LONG_NAME = 24, 44
"""Characters of a name that has room in one of two columns, and most of any name."""
MAX_POINTS = 5000
"""Maximum points of a chart. Callers down-sample first, because Vega draws in the browser."""


PALETTE = tuple(
    "#126fd9 #cb450b #178244 #9a4bd2 #d61f8a #077d8d #9b6508 #c030d2 #6a60d7 #62770d".split()
)
"""Colours of lines and marks: a contrast of at least 4.5 : 1 on white and 3.5 : 1 on the dark
ground."""
RUN_PALETTE = (
    *PALETTE,
    *(
        "#ff4b64 #a08c00 #9673b9 #b45aff #699100 #c80046 #c8556e #4146ff #eb0f5f #a04b32 "
        "#fa5a00 #4164a5 #2daa00 #9b4b69 #e100c8 #b48c64 #ff46af #7d23ff #6496d2 #d269dc "
        "#ff00ff #0f87c3 #7d9b78 #648264 #d77d00 #05a069 #af50a0 #c300ff #1e8cff #f50005 "
        "#6e6446 #d76e5a #78559b #9b736e #8c8ca0 #b400af #d75fa5 #00a0aa #967dff #c37d96 "
    ).split(),
)
"""Fifty colours of runs, at least 0.06 apart in OKLab, whose neighbours differ most: a contrast of
at least 3 : 1 on both grounds."""


def run_colours(numbers: Mapping[str, int]) -> dict[str, str]:
    """Name of a run → colour, by its number in order of creation.

    So a run has one colour on every page and in every selection, and any fifty that were created
    one after another differ. Only where two of those shown have the same colour, the later one
    takes the next free one there.
    """
    count = len(RUN_PALETTE)
    found: dict[str, int] = {}
    moved: list[str] = []
    for name in sorted(numbers, key=lambda name: numbers[name]):
        if (own := numbers[name] % count) in found.values():
            moved.append(name)
        else:
            found[name] = own
    for name in moved:
        following = ((numbers[name] + i) % count for i in range(count))
        taken = set(found.values())
        found[name] = next((i for i in following if i not in taken), numbers[name] % count)
    return {name: RUN_PALETTE[found[name]] for name in numbers}


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
    legend: bool = True,
    cursor: float | None = None,
) -> Chart:
    """Line(s) of `y` over `x`; a single point is drawn as a mark. `cursor`: a vertical rule."""
    named = {"x": x, "y": y} | ({"colour": colour} if colour else {})
    encoding = {
        "x": _number("x", x_title, axis={"grid": False}),
        "y": _number("y", y_title, scale={"type": "symlog"} if log else {"zero": False}),
        "color": _colour("colour" if colour else None, colours, legend=legend),
    }
    named_only = _tips({"colour": named["colour"]}) if colour else None
    layers = _line(data, encoding, named_only, _tips(named))
    if cursor is not None:
        rule = {"type": "rule", "color": CURSOR, "strokeWidth": 2}
        at = {"x": {"field": "at", "type": "quantitative"}}
        layers.append({"data": {"values": [{"at": cursor}]}, "mark": rule, "encoding": at})
    return _renamed(data, named), _layered(layers, height)


def bands(
    data: pd.DataFrame,
    *,
    x_title: str,
    y_title: str,
    colours: Mapping[str, str],
    height: int = 240,
    log: bool = False,
) -> Chart:
    """Rows of x, group, value, low, high, n: a line of each group's mean in its interval."""
    x = _number("x", x_title, axis={"grid": False})
    scale = {"type": "symlog"} if log else {"zero": False}
    colour = _colour("group", colours)
    tips = ("x", "group", "value", "low", "high", "n")
    area = {"x": x, "y": _number("low", y_title, scale=scale), "y2": {"field": "high"}}
    line = {"x": x, "y": _number("value", y_title, scale=scale), "color": colour}
    shade = {"type": "area", "opacity": 0.2, "aria": False}
    layers = [{"mark": shade, "encoding": {**area, "color": colour}}]
    layers += _line(data, line, [{"field": "group"}], [{"field": tip} for tip in tips])
    return data, _layered(layers, height)


def _line(
    data: pd.DataFrame, encoding: dict[str, Any], line_tips: Any, point_tips: Any
) -> list[dict[str, Any]]:
    """A line, and marks where there are few points."""
    layers = [{"mark": LINE, "encoding": {**encoding, "tooltip": line_tips}}]
    if len(data) <= FEW:
        layers.append({"mark": POINT, "encoding": {**encoding, "tooltip": point_tips}})
    return layers


def histogram(
    bins: pd.DataFrame, *, title: str, unit: str, what: str = "trajectories", height: int = 200
) -> Chart:
    """Bars from bin counts, with columns low, high, n (counted in SQL, not in the browser)."""
    flat = {"grid": False, "labelOverlap": True}
    encoding = {
        "x": _number("low", f"{title} ({unit})", scale={"zero": False}, axis=flat),
        "x2": {"field": "high"},
        "y": _number("n", f"{what} (count)", axis={"tickMinStep": 1, "format": "d"}),
        "y2": {"datum": 0},
        "tooltip": [_number("low", format=".4~g"), _number("high", format=".4~g"), _number("n")],
    }
    mark = {"type": "bar", "color": MAIN, "binSpacing": 1}
    return bins, _layered([{"mark": mark, "encoding": encoding}], height)


def intervals(
    data: pd.DataFrame, *, x_title: str, colours: Mapping[str, str] | None = None
) -> Chart:
    """Rows of label, value, low, high [, run]: a bar of the interval, and a dot on it."""
    order = list(dict.fromkeys(data["label"]))
    label = _category(
        "label", None, sort=order, axis={"labelOverlap": False, "labelExpr": _middle(LONG_NAME)}
    )
    colour = _colour("run" if colours else None, colours, legend=False)
    tips = ("label", "env", "value", "low", "high", "episodes")
    tooltip = [{"field": c} for c in tips if c in data.columns]
    bar = {
        "x": _number("low", x_title, scale={"zero": False}),
        "x2": {"field": "high"},
        "color": colour,
    }
    dot = {"x": _number("value", x_title), "color": colour, "tooltip": tooltip}
    marks: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"type": "rule", "strokeWidth": 5, "opacity": 0.55}, bar),
        ({"type": "point", "filled": True, "size": 110, "opacity": 1}, dot),
    ]
    layers = [{"mark": mark, "encoding": {"y": label, **at}} for mark, at in marks]
    # The height is that of the whole chart; axis and title use about 70 pixels of it.
    return data, _layered(layers, 70 + 32 * max(2, len(order)))


def bars(
    data: pd.DataFrame, *, x: str, y: str, x_title: str, y_title: str, height: int = 220
) -> Chart:
    """A bar for each category of `x`."""
    named = {"x": x, "y": y}
    encoding = {
        # Whole ids would fill the chart.
        "x": _category("x", x_title, sort=None, axis={"labelLimit": 70}),
        "y": _number("y", y_title),
        "tooltip": _tips(named),
    }
    frame = _renamed(data, named)
    layer = {"mark": {"type": "bar", "color": MAIN}, "encoding": encoding}
    return frame.assign(x=frame["x"].astype(str)), _layered([layer], height)


def dots(
    data: pd.DataFrame, *, x: str, y: str, x_title: str, y_title: str, height: int = 260
) -> Chart:
    """A scatter of two numeric columns."""
    named = {"x": x, "y": y}
    encoding = {
        "x": _number("x", x_title, scale={"zero": False}),
        "y": _number("y", y_title, scale={"zero": False}),
        "tooltip": _tips(named),
    }
    mark = {"type": "circle", "color": MAIN, "size": 36, "opacity": 0.65}
    return _renamed(data, named), _layered([{"mark": mark, "encoding": encoding}], height)


def smooth(values: pd.Series, weight: float) -> pd.Series:
    """Exponential moving average without start-up bias; weight 0 leaves the series alone."""
    return values if weight <= 0 else values.ewm(alpha=1 - weight, adjust=True).mean()


def extremes(values: NDArray[Any], most: int) -> NDArray[np.int64]:
    """Which of `values` [n] to draw, in order: all, or about `most` of them.

    Then each stretch of equal length keeps its least and its largest value, so a single peak is
    seen; the first and the last value are kept, too.
    """
    if len(values) <= most:
        return np.arange(len(values))
    width = -(-len(values) // max(1, most // 2 - 1))
    flat = np.asarray(values, np.float64)
    padded = np.append(flat, np.repeat(flat[-1], -len(flat) % width)).reshape(-1, width)
    unknown = np.isnan(padded)
    least = np.where(unknown, np.inf, padded).argmin(axis=1)
    largest = np.where(unknown, -np.inf, padded).argmax(axis=1)
    starts = np.arange(len(padded)) * width
    found = np.concatenate([[0], starts + least, starts + largest, [len(flat) - 1]])
    return np.unique(np.minimum(found, len(flat) - 1))


def _number(field: str, title: str = "", **options: Any) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title or field, **options}


def _category(field: str, title: str | None, **options: Any) -> dict[str, Any]:
    return {"field": field, "type": "nominal", "title": title, **options}


def _tips(named: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"field": short, "title": name} for short, name in named.items()]


def _colour(
    field: str | None, colours: Mapping[str, str] | None, *, legend: bool = True
) -> dict[str, Any]:
    if field is None:
        return {"value": MAIN}
    found: dict[str, Any] = {"field": field, "type": "nominal", "legend": None}
    if colours:
        found["scale"] = {"domain": list(colours), "range": list(colours.values())}
    if legend:
        found["legend"] = {
            "title": None, "orient": "bottom", **_labels(colours or ()),
            "symbolOpacity": 1, "symbolType": "stroke", "symbolStrokeWidth": 3,
        }  # fmt: skip
    return found


def _labels(names: Iterable[str]) -> dict[str, Any]:
    """Two columns of a legend, or a wide one for long names."""
    if max(map(len, names), default=0) <= SHORT_NAME:
        return {"labelLimit": 150, "columns": 2}
    return {"labelLimit": 320, "columns": 1, "labelExpr": _middle(LONG_NAME)}


def _middle(most: int) -> str:
    """A Vega expression: a long label without its middle, as names of one sweep differ at their
    ends; Vega itself would cut the end."""
    front = (most - 1) // 3
    cut = f"slice(datum.label, 0, {front}) + '…' + slice(datum.label, {front + 1 - most})"
    return f"length(datum.label) > {most} ? {cut} : datum.label"


def _renamed(data: pd.DataFrame, named: Mapping[str, str]) -> pd.DataFrame:
    """The needed columns with simple names: Vega parses dots, brackets and colons as syntax."""
    return pd.DataFrame({short: data[name] for short, name in named.items()})


def ink() -> str:
    """The colour of texts in the theme of the browser."""
    return INK.get(st.context.theme.type or "light", INK["light"])


def _layered(layers: list[dict[str, Any]], height: int) -> dict[str, Any]:
    text = {"labelColor": ink(), "titleColor": ink()}
    config = {"axis": {**text, "labelLimit": 260}, "legend": text, "view": {"stroke": None}}
    return {"layer": layers, "height": height, "config": config}
