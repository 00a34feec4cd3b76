"""The dashboard's tests draw real pages (AppTest) over a real service."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from dashboard import api, components


def draw(view: str) -> None:
    """Runs inside AppTest, as a script of its own."""
    import importlib

    importlib.import_module(f"dashboard.views.{view}").show()


def open_folders(page: AppTest) -> AppTest:
    """Draw the page again with all its folders open."""
    for key in list(page.session_state):
        if key.endswith(components.OPEN):
            page.session_state[key] = True
    return page.run()


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


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AppTest]:
    """page(view, url, **query): that view, drawn once over what the service at `url` has now."""

    def open_page(view: str, url: str, **query: str) -> AppTest:
        api.refresh()
        monkeypatch.setenv("STEPWELL_URL", url)
        test = AppTest.from_function(draw, args=(view,), default_timeout=120)
        for key, value in query.items():
            test.query_params[key] = value
        return test.run()

    return open_page
