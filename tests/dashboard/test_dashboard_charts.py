"""Charts: every axis is named, colours are the caller's, odd names do not break Vega."""

import altair
import numpy as np
import pandas as pd
import pytest

from dashboard import charts

FRAME = pd.DataFrame({"x": [1, 2, 3], "y": [1.0, 4.0, 9.0], "run": ["a", "a", "b"]})
INTERVALS = pd.DataFrame(
    {"label": ["a/1", "b/2"], "run": ["a", "b"], "value": [1.0, 2.0], "low": [0.5, 1.5],
     "high": [1.5, 2.5]}
)  # fmt: skip
BANDS = pd.DataFrame(
    {"x": [0, 1], "group": ["a", "b"], "value": [1.0, 2.0], "low": [0.5, 1.5], "high": [1.5, 2.5],
     "n": [3, 3]}
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


def oklab(colour: str) -> np.ndarray:
    """Ottosson 2020: equal distances look about equally different; 0.02 is just seen."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_cones = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_cones) @ linear)


def test_fifty_runs_and_the_references_have_colours_that_one_can_tell_apart() -> None:
    places = [oklab(colour) for colour in charts.RUN_PALETTE]
    assert len(places) == 50
    pairs = [(i, j) for i in range(50) for j in range(i)]
    assert min(np.linalg.norm(places[i] - places[j]) for i, j in pairs) > 0.06
    near = [(i, (i + k) % 50) for i in range(50) for k in (1, 2, 3)]
    assert min(np.linalg.norm(places[i] - places[j]) for i, j in near) > 0.07
    reference = oklab(charts.QUIET)
    assert min(np.linalg.norm(place - reference) for place in places) > 0.06


def test_a_run_has_its_colour_in_every_selection() -> None:
    numbers = {f"run-{n}": n for n in range(7, 57)}
    whole = charts.run_colours(numbers)
    assert len(set(whole.values())) == 50
    for some in (["run-9"], ["run-50", "run-8"], list(numbers)[::3]):
        alone = charts.run_colours({name: numbers[name] for name in some})
        assert alone == {name: whole[name] for name in some}


def test_of_two_runs_with_one_colour_the_later_one_moves() -> None:
    """With more than fifty runs colours repeat; never in one picture of at most fifty."""
    found = charts.run_colours({"late": 53, "early": 3, "next": 4})
    assert found["early"] == charts.RUN_PALETTE[3]
    assert found["next"] == charts.RUN_PALETTE[4]
    assert found["late"] == charts.RUN_PALETTE[5]
    many = charts.run_colours({str(n): n for n in range(0, 100, 2)})
    assert len(set(many.values())) == 50
    assert len(charts.run_colours({str(n): n for n in range(60)})) == 60


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
        encoding = chart["layer"][-1]["encoding"]
        assert rows[encoding["y"]["field"]].tolist() == FRAME["y"].tolist()
        assert encoding["tooltip"][-1]["title"] == name


@pytest.mark.parametrize("points", [charts.FEW, charts.FEW + 1])
def test_a_line_says_only_what_is_true_of_all_its_points(points: int) -> None:
    """Vega has one tooltip for a whole line, made of its first point."""
    frame = pd.DataFrame({"x": range(points), "y": 1.0, "run": "a"})
    rows = frame.rename(columns={"run": "group", "y": "value"}).assign(low=0.0, high=2.0, n=3)
    drawn = charts.lines(frame, x="x", y="y", colour="run", colours={"a": "red"}, **TITLES)
    for _, chart in (drawn, charts.bands(rows, colours={"a": "red"}, **TITLES)):
        layers = {layer["mark"]["type"]: layer for layer in chart["layer"]}
        tips = [tip["field"] for tip in layers["line"]["encoding"]["tooltip"]]
        assert tips in (["colour"], ["group"])
        assert ("point" in layers) == (points <= charts.FEW)
        if "point" in layers:
            marked = [tip["field"] for tip in layers["point"]["encoding"]["tooltip"]]
            assert set(tips) < set(marked) and "x" in marked


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
        charts.bands(BANDS, colours=colours, log=True, **TITLES),
        charts.bars(FRAME, **named),
        charts.dots(FRAME, **named),
    ):
        rows = {"values": data.to_dict("records")}
        altair.LayerChart.from_dict({"data": rows, **spec}, validate=True)


def test_few_points_are_all_drawn() -> None:
    assert charts.extremes(np.zeros(50), 50).tolist() == list(range(50))


@pytest.mark.parametrize("place", [0, 1, 17_003, 39_998, 39_999])
@pytest.mark.parametrize("value", [1.0, -1.0])
def test_a_single_peak_of_many_points_is_drawn(place: int, value: float) -> None:
    values = np.zeros(40_000, np.float32)
    values[place] = value
    kept = charts.extremes(values, charts.MAX_POINTS)
    assert place in kept
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    assert (np.diff(kept) > 0).all()
    assert len(kept) <= charts.MAX_POINTS


def test_the_range_of_what_is_drawn_is_that_of_all() -> None:
    values = np.random.default_rng(0).normal(size=12_345)
    values[::7] = np.nan
    for most in (1, 2, 10, 625):
        kept = values[charts.extremes(values, most)]
        assert (np.nanmin(kept), np.nanmax(kept)) == (np.nanmin(values), np.nanmax(values))
        assert len(kept) <= max(most, 4)
    assert len(charts.extremes(np.full(100, np.nan), 10)) <= 10
    assert len(charts.extremes(np.tile([True, False], 50), 10)) <= 10


@pytest.mark.parametrize(("length", "columns"), [(24, 2), (25, 1)])
def test_a_legend_of_long_names_has_room_for_both_of_their_ends(length: int, columns: int) -> None:
    name = "x" * length
    frame = FRAME.assign(run=name)
    _, chart = charts.lines(frame, x="x", y="y", colour="run", colours={name: "#000000"}, **TITLES)
    legend = chart["layer"][0]["encoding"]["color"]["legend"]
    assert legend["columns"] == columns
    assert ("labelExpr" in legend) == (columns == 1)
    _, chart = charts.intervals(INTERVALS, x_title="return")
    cut = chart["layer"][0]["encoding"]["y"]["axis"]["labelExpr"]
    assert cut.startswith("length(datum.label) > 44 ? slice(datum.label, 0, 14)")
    assert cut.endswith("slice(datum.label, -29) : datum.label")
