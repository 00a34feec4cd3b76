"""The dashboard's tests draw real pages (AppTest) over a real service."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import streamlit as st
from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

from dashboard import api, components
from stepwell import Box, Client, Discrete, EnvSpec
from tests.conftest import ServiceProcess, service_process


def draw(view: str) -> None:
    """Runs inside AppTest, as a script of its own."""
    import importlib

    importlib.import_module(f"dashboard.views.{view}").show()


Page = Callable[..., AppTest]
"""page(view, url, **query): the fixture below."""


def no_traceback(page: AppTest) -> None:
    assert [e.message for e in page.exception] == []


def check(page: AppTest) -> None:
    """Neither a traceback nor an error of the service."""
    no_traceback(page)
    assert [e.value for e in page.error] == []


def texts(page: AppTest) -> str:
    """Everything a reader sees, but for tables and charts."""
    kinds = ("title", "subheader", "caption", "markdown", "info", "warning", "error", "success",
             "code", "text")  # fmt: skip
    return "\n".join(str(e.value) for kind in kinds for e in getattr(page, kind))


def scale(page: AppTest, chart: int = 0) -> dict[str, str]:
    """Name → colour of a chart."""
    spec = page.get("vega_lite_chart")[chart].proto.spec
    found = re.findall(r'"domain": (\[.*?\]), "range": (\[.*?\])', spec)
    return dict(zip(*map(json.loads, found[0]), strict=True))


def play(client: Client, dataset: str, env: str, *returns: float) -> None:
    """Episodes of two steps of zeros with these returns, into a new dataset."""
    client.create_dataset(dataset, EnvSpec.of(Box((1,)), Discrete(2), env=env))
    for total in returns:
        client.add(
            dataset, obs=np.zeros((3, 1), np.float32), actions=np.zeros(2, np.int64),
            rewards=np.full(2, total / 2, np.float32), terminated=True, env=env,
        )  # fmt: skip


def evaluate(
    client: Client, policy: str, env: str, returns: Sequence[float], **fields: Any
) -> None:
    """An evaluation with these returns, of the seeds from 0, unless told otherwise."""
    mean = float(np.mean(returns))
    given = {"mean": mean, "iqm": mean, "ci_low": min(returns), "ci_high": max(returns)}
    given |= {"seeds": list(range(len(returns))), **fields}
    client.create_evaluation(policy=policy, env=env, returns=list(returns), **given)


def open_folders(page: AppTest) -> AppTest:
    """Draw the page again with all its folders open."""
    for key in list(page.session_state):
        if key.endswith(components.OPEN):
            page.session_state[key] = True
    return page.run()


@pytest.fixture(autouse=True, scope="session")
def _no_foreign_components() -> Iterator[None]:
    """For each page, AppTest reads the metadata of all installed packages in search of components,
    which takes longer than most pages; ours are registered by their own code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", list)
        yield


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    """Caches are global to the process: no test may see what another one read."""
    st.cache_data.clear()
    yield
    st.cache_data.clear()
    st.cache_resource.clear()


@pytest.fixture(autouse=True)
def _main_module() -> Iterator[None]:
    """AppTest makes its script the module __main__, which processes that are spawned later would
    run again."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine, on which SQL waits its turn, is no defect of a page."""
    monkeypatch.setattr(api, "ANSWER_SECONDS", 120.0)
    monkeypatch.setattr(api, "SQL_SECONDS", 60.0)


@pytest.fixture(scope="module")
def file_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service for the tests of one file."""
    process = service_process(tmp_path_factory)
    yield process
    process.close()


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    """page(view, url, **query): that view, drawn once over what the service at `url` has now."""

    def open_page(view: str, url: str, **query: str) -> AppTest:
        api.refresh()
        monkeypatch.setenv("STEPWELL_URL", url)
        test = AppTest.from_function(draw, args=(view,), default_timeout=120)
        for key, value in query.items():
            test.query_params[key] = value
        return test.run()

    return open_page
