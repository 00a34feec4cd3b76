"""The registry's tests talk to the real app in process, on an empty data directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.settings import Settings

URL = "http://127.0.0.1:8000"


@pytest.fixture
def start_app(tmp_path: Path) -> Iterator[Callable[..., TestClient]]:
    """Start the app; settings as keywords. The same directory each time within one test."""
    running: list[TestClient] = []

    def start(**settings: object) -> TestClient:
        while running:
            running.pop().__exit__(None, None, None)
        made = Settings(data=tmp_path / "data", maintenance_interval=0, **settings)  # type: ignore[arg-type]
        # UncaughtErrors should be answered as the real server would, not raised into the test.
        client = TestClient(create_app(made), base_url=URL, raise_server_exceptions=False)
        client.__enter__()
        running.append(client)
        return client

    yield start
    while running:
        running.pop().__exit__(None, None, None)


@pytest.fixture
def app(start_app: Callable[..., TestClient]) -> TestClient:
    return start_app()


@pytest.fixture(scope="module")
def shared_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """One app for tests that store nothing."""
    made = Settings(data=tmp_path_factory.mktemp("shared") / "data", maintenance_interval=0)
    with TestClient(create_app(made), base_url=URL, raise_server_exceptions=False) as client:
        yield client
