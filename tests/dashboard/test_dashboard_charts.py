"""Charts: every axis is named, colours are the caller's, odd names do not break Vega."""

import altair
import pandas as pd
import pytest

from dashboard import charts

FRAME = pd.DataFrame({"x": [1, 2, 3], "y": [1.0, 4.0, 9.0], "run": ["a", "a", "b"]})
INTERVALS = pd.DataFrame(
    {"label": ["a/1", "b/2"], "run": ["a", "b"], "value": [1.0, 2.0], "low": [0.5, 1.5],
     "high": [1.5, 2.5]}
)  # fmt: skip
TITLES = {"x_title": "time (minutes)", "y_title": "return (sum of rewards)"}


def axes(chart: charts.Chart) -> set[str]:
    """Titles of all axes."""
    found = set()
    for layer in chart[1]["layer"]:
        for channel in ("x", "y"):
            title = layer.get("encoding", {}).get(channel, {}).get("title")
            if title:
                found.add(title)
    return found


@pytest.mark.parametrize("draw", [charts.lines, charts.bars, charts.dots])
def test_axes_carry_their_titles(draw) -> None:
    assert axes(draw(FRAME, x="x", y="y", **TITLES)) >= set(TITLES.values())


def test_a_histogram_counts_from_zero() -> None:
    bins = pd.DataFrame({"low": [0.0, 1.0], "high": [1.0, 2.0], "n": [3, 4]})
    chart = charts.histogram(bins, title="return", unit="sum of rewards")
    assert axes(chart) == {"return (sum of rewards)", "trajectories (count)"}
    assert chart[1]["layer"][0]["encoding"]["y2"] == {"datum": 0}


def test_runs_get_the_colours_they_are_given() -> None:
    colours = {"a": "#0b5cad", "b": "#17703b"}
    _, chart = charts.lines(FRAME, x="x", y="y", colour="run", colours=colours, **TITLES)
    scale = chart["layer"][0]["encoding"]["color"]["scale"]
    assert dict(zip(scale["domain"], scale["range"], strict=True)) == colours


def test_intervals_show_a_bar_and_a_dot() -> None:
    _, chart = charts.intervals(INTERVALS, x_title="return")
    assert [layer["mark"]["type"] for layer in chart["layer"]] == ["rule", "point"]
    assert chart["layer"][0]["encoding"]["x2"] == {"field": "high"}
    # Vega-Lite joins the titles of layers that differ.
    assert {layer["encoding"]["x"]["title"] for layer in chart["layer"]} == {"return"}


def test_a_cursor_is_drawn_where_it_is_asked_for() -> None:
    _, with_cursor = charts.lines(FRAME, x="x", y="y", cursor=2.0, **TITLES)
    _, without = charts.lines(FRAME, x="x", y="y", **TITLES)
    assert len(with_cursor["layer"]) == len(without["layer"]) + 1


@pytest.mark.parametrize("name", ["train/loss", "a.b", "obs[0]", "x:y", "back\\slash", "x"])
def test_names_with_vega_syntax_are_taken_literally(name: str) -> None:
    """A column called obs[0] would otherwise silently draw nothing."""
    frame = pd.DataFrame({name: FRAME["y"], "step": FRAME["x"], "y": 0})
    for draw in (charts.lines, charts.bars, charts.dots):
        rows, chart = draw(frame, x="step", y=name, **TITLES)
        encoding = chart["layer"][0]["encoding"]
        assert rows[encoding["y"]["field"]].tolist() == FRAME["y"].tolist()
        assert encoding["tooltip"][-1]["title"] == name


def test_smoothing_is_an_unbiased_moving_average() -> None:
    values = pd.Series([1.0, 3.0, 5.0])
    assert charts.smooth(values, 0.0).tolist() == values.tolist()
    half = charts.smooth(values, 0.5).tolist()
    assert half == pytest.approx([1.0, (3 + 0.5) / 1.5, (5 + 1.5 + 0.25) / 1.75])


def test_every_picture_is_valid_vega_lite() -> None:
    """Against the schema that altair carries."""
    bins = pd.DataFrame({"low": [0.0, 1.0], "high": [1.0, 2.0], "n": [3, 4]})
    colours = {"a": "#0b5cad", "b": "#17703b"}
    named = {"x": "x", "y": "y", **TITLES}
    for data, spec in (
        charts.lines(FRAME, colour="run", colours=colours, log=True, cursor=1.0, **named),
        charts.histogram(bins, title="return", unit="sum of rewards"),
        charts.intervals(INTERVALS, x_title="return", colours=colours),
        charts.bars(FRAME, **named),
        charts.dots(FRAME, **named),
    ):
        rows = {"values": data.to_dict("records")}
        altair.LayerChart.from_dict({"data": rows, **spec}, validate=True)
