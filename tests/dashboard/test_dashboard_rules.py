"""Rules of the folder: pages ask the service through few files, and names shadow nothing."""

import ast
import re
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import dashboard
from dashboard import api, curve_cache
from dashboard.curve_cache import Curves
from stepwell import Client, cli
from stepwell.messages import MetricPoint
from tests.dashboard.conftest import no_traceback

FOLDER = Path(dashboard.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
SDK = (
    *("api.py", "ranking.py", "curve_cache.py", "launching.py"),
    *("programs.py", "main.py", "host_guard.py", "formatting.py", "uploading.py"),
)
"""The first four read, programs.py knows what launchers publish, main.py is the command,
host_guard.py has the service's rule, formatting.py writes numbers as commands do, and uploading.py
knows the formats of files."""


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: `streamlit run` knows no relative imports"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_pages_do_not_import_the_sdk(path: Path) -> None:
    """What they show comes from api.py and launching.py, with the errors and caches of those."""
    uses = {name.split(".")[0] for name in imported(path)}
    assert ("stepwell" in uses) == (path.name in SDK)
    assert not uses & {"torch", "gymnasium", "duckdb", "server", "trainer", "collector"}


def test_no_string_of_the_source_is_shown_on_the_pages() -> None:
    """Streamlit's magic writes every expression that stands alone in the main script."""
    config = tomllib.loads((FOLDER / ".streamlit" / "config.toml").read_text())
    assert config["runner"]["magicEnabled"] is False
    body = ast.parse((FOLDER / "app.py").read_text()).body[1:]
    alone = [node for node in body if isinstance(node, ast.Expr)]
    assert all(isinstance(node.value, ast.Call) for node in alone)


def test_no_file_shadows_the_standard_library() -> None:
    """`streamlit run dashboard/app.py` puts this folder first on the path."""
    shadows = {p.stem for p in FOLDER.glob("*.py")} | {p.name for p in FOLDER.iterdir()}
    assert not shadows & set(sys.stdlib_module_names)


def test_nothing_is_rendered_as_html_that_a_stranger_wrote() -> None:
    for path in FILES:
        assert "unsafe_allow_html" not in path.read_text(), path


def test_cached_reads_never_answer_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same arguments, different reads, different services: all kept apart."""
    asked = []

    @api.read(60)
    def first(x: int) -> str:
        asked.append("first")
        return f"first {x}"

    @api.read(60)
    def second(x: int) -> str:
        asked.append("second")
        return f"second {x}"

    monkeypatch.setenv("STEPWELL_URL", "http://127.0.0.1:1")
    assert [first(1), second(1), first(1), first(2)] == [
        "first 1", "second 1", "first 1", "first 2",
    ]  # fmt: skip
    assert asked == ["first", "second", "first"]
    monkeypatch.setenv("STEPWELL_URL", "http://127.0.0.1:2")
    first(1)
    assert asked[-1:] == ["first"] and len(asked) == 4
    api.refresh()
    first(1)
    assert len(asked) == 5


def prefetching() -> None:
    """A page, drawn by AppTest."""
    import threading

    import streamlit as st

    from dashboard import api

    st.session_state[api.TOKEN] = "mine"
    together = threading.Barrier(2, timeout=60.0)

    @api.read(60)
    def token(number: int) -> str:
        together.wait()  # by two at once, or not at all
        return f"{number} with {api.token()}"

    @api.read(60)
    def refused() -> None:
        raise api.StepwellError("refused")

    api.prefetch(lambda: token(1), refused, lambda: token(2))
    together.abort()
    st.text(token(1))
    st.text(token(2))
    try:
        refused()
    except api.StepwellError as error:
        st.text(str(error))


def test_what_a_page_needs_is_read_at_once_before_it_is_drawn() -> None:
    """With the token of its session. What fails is asked again, by the part that tells of it."""
    drawn = AppTest.from_function(prefetching, default_timeout=120).run()
    no_traceback(drawn)
    assert [t.value for t in drawn.text] == ["1 with mine", "2 with mine", "refused"]


def test_of_what_is_fetched_first_one_failure_of_the_service_is_enough() -> None:
    asked = []

    def gone() -> None:
        asked.append(1)
        raise api.ServiceUnreachable("away")

    api.prefetch(*[gone] * 50)
    assert 1 <= len(asked) <= 3


def test_many_browsers_ask_one_after_another(
    service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are one caller to the service, which refuses a fifth query of one at a time."""
    monkeypatch.setenv("STEPWELL_URL", service.url)

    def ask(number: int) -> int:
        found = api.sql(
            f"SELECT count(*) AS n FROM range({2_000_000 + number}) WHERE range % 3 < 5"
        )
        return int(found.frame["n"][0])

    with ThreadPoolExecutor(12) as browsers:
        assert list(browsers.map(ask, range(12))) == [2_000_000 + n for n in range(12)]


def test_a_curve_is_read_whole_once_and_then_only_what_lies_beyond(
    service, client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_URL", service.url)
    asked: list[tuple[list[str], list[int] | None]] = []
    whole = curve_cache._series

    def spied(run: str, keys: list[str], points: int, after: list[int] | None = None):
        if keys:
            asked.append((keys, after))
        return whole(run, keys, points, after)

    monkeypatch.setattr(curve_cache, "_series", spied)

    def log(key: str, **values: float) -> None:
        points = [
            MetricPoint(key=key, step=int(step[1:]), value=value, time=float(step[1:]))
            for step, value in values.items()
        ]
        client.log_metrics(name, points)

    client.create_run(name, "train")
    log("a", s1=0.1, s2=0.2)
    log("b", s1=1.0)
    log("c,d", s1=3.0)
    curves, keys = Curves(), ["a", "b", "c,d", "none"]

    def values() -> dict[str, list[float]]:
        return {k: c.values.tolist() for k, c in curves.get(client.run(name), keys).items()}

    first = {"a": [0.1, 0.2], "b": [1.0], "c,d": [3.0]}
    assert values() == first
    asked.clear()
    assert values() == first
    assert asked == [], "nothing new, nothing read"
    log("a", s3=0.3)
    assert values() == {**first, "a": [0.1, 0.2, 0.3]}
    assert asked == [(["a"], [2])]
    # A resumed run says other things about steps it had: all is read again within a while.
    log("a", s2=9.0)
    assert values()["a"] == [0.1, 0.2, 0.3]
    monkeypatch.setattr(curve_cache, "WHOLE_SECONDS", -1.0)
    assert values()["a"] == [0.1, 9.0, 0.3]
    # And when it has ended.
    monkeypatch.setattr(curve_cache, "WHOLE_SECONDS", 1e9)
    log("a", s1=7.0)
    assert values()["a"] == [0.1, 9.0, 0.3]
    client.patch_run(name, status="finished")
    assert values()["a"] == [7.0, 9.0, 0.3]
    asked.clear()
    values()
    assert asked == []
    # Deleted and made anew under its name: another run.
    client.delete_run(name)
    client.create_run(name, "train")
    log("a", s1=5.0)
    assert values() == {"a": [5.0]}
    curves.keep([])
    assert curves._known == {}


def test_long_curves_do_not_grow_without_end(
    service, client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_URL", service.url)
    monkeypatch.setattr(curve_cache, "POINTS", 10)
    client.create_run(name, "train")
    curves = Curves()
    for start in range(0, 100, 5):
        points = [MetricPoint(key="a", step=start + i, value=1.0, time=0.0) for i in range(5)]
        client.log_metrics(name, points)
        curve = curves.get(client.run(name), ["a"])["a"]
        assert len(curve.steps) <= 3 * 10
        assert (curve.steps[0], curve.steps[-1]) == (0, start + 4)


def test_the_more_curves_on_a_chart_the_fewer_points_each_has(
    service, client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But at least so many that its shape is seen; a single one is read finer again."""
    monkeypatch.setenv("STEPWELL_URL", service.url)
    client.create_run(name, "train")
    points = [MetricPoint(key="a", step=i, value=float(i), time=0.0) for i in range(2000)]
    client.log_metrics(name, points)
    run, curves = client.run(name), Curves()
    lengths = []
    for others in (1, 9, 50, 1):
        curves.keep([run] * others)
        lengths.append(len(curves.get(run, ["a"])["a"].steps))
    one, some, many, again = lengths
    assert 100 >= some == many > 0 and 500 >= one == again > 4 * many


def test_lines_to_copy_name_options_that_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that the page offers and the program refuses is worse than none."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        for command, rest in re.findall(r"stepwell ([a-z]+)((?: [^\"`\\]*)?)", path.read_text()):
            found.setdefault(command, set()).update(re.findall(r"--[a-z-]+", rest))
    assert {"serve", "train", "collect", "evaluate", "import", "dash"} <= set(found)
    monkeypatch.setenv("COLUMNS", "200")
    for command, options in found.items():
        with pytest.raises(SystemExit) as ended:
            sys.exit(cli.main([command, "--help"]))
        assert not ended.value.code, command
        said = capsys.readouterr().out
        assert {option for option in options if option not in said} == set(), command
