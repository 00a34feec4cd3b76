"""The registry's tests talk to the real app in process, on an empty data directory.

app         one app for the tests of a module; what a test stores there is removed after it
start_app   a function that starts further ones, for a test that restarts, or sets something;
            without workers for SQL, whose start costs more than the rest
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

from server.app import create_app
from server.index.tables import (
    evaluations,
    launches,
    metrics,
    policies,
    policy_aliases,
    programs,
    runs,
    saved_queries,
    videos,
    workers,
)
from server.settings import Settings

URL = "http://127.0.0.1:8000"
STORED = (policy_aliases, policies, metrics, runs, videos, evaluations, programs, workers, launches,
          saved_queries)  # fmt: skip
"""Tables whose rows a test may leave in `app`."""


def client_of(data: Path, **settings: object) -> TestClient:
    """A client of an app on a data directory, which starts when the client is entered."""
    settings = {"maintenance_interval": 0, "sql_workers": 1} | settings
    made = Settings(data=data, **settings)  # type: ignore[arg-type]
    # UncaughtErrors should be answered as the real server would, not raised into the test.
    return TestClient(create_app(made), base_url=URL, raise_server_exceptions=False)


def opened(data: Path, **settings: object) -> Iterator[TestClient]:
    """The rest of a fixture: one app, until the fixture ends."""
    with client_of(data, **settings) as client:
        yield client


@pytest.fixture
def start_app(tmp_path: Path) -> Iterator[Callable[..., TestClient]]:
    """Start the app; settings as keywords. The same directory each time within one test."""
    running: list[TestClient] = []

    def start(**settings: object) -> TestClient:
        while running:
            running.pop().__exit__(None, None, None)
        client = client_of(tmp_path / "data", **{"sql_workers": 0} | settings)
        client.__enter__()
        running.append(client)
        return client

    yield start
    while running:
        running.pop().__exit__(None, None, None)


@pytest.fixture(scope="module")
def shared_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """One app for tests that store nothing, or what stays for the whole module."""
    yield from opened(tmp_path_factory.mktemp("shared") / "data")


@pytest.fixture
def app(shared_app: TestClient) -> Iterator[TestClient]:
    yield shared_app
    with shared_app.app.state.service.db.write() as c:  # type: ignore[attr-defined]
        for table in STORED:
            c.execute(sa.delete(table))
    for folder in ("policies", "videos"):
        for file in (data_of(shared_app) / folder).iterdir():
            file.unlink()


def data_of(app: TestClient) -> Path:
    """The data directory of an app."""
    return Path(app.app.state.settings.data)  # type: ignore[attr-defined]
