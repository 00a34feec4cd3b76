"""The core's tests talk to the real app in process, on an empty data directory of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.main import configure_logging
from server.service import Service
from server.settings import Settings
from stepwell.codec import decode, encode
from stepwell.messages import ARROW
from stepwell.spaces import EnvSpec
from stepwell.testing import make_spec
from stepwell.trajectory import Trajectory

URL = "http://127.0.0.1:8000"
SPEC = make_spec(observation=3, action=2)


@dataclass
class Live:
    """A running app with short words for what tests do all day."""

    http: TestClient
    service: Service
    data: Path

    def create(self, name: str = "d", spec: EnvSpec = SPEC, **fields: Any) -> None:
        body = {"name": name, "spec": spec.to_json(), **fields}
        assert self.http.post("/v1/datasets", json=body).status_code == 201

    def post(
        self, trajectories: list[Trajectory], name: str = "d", spec: EnvSpec = SPEC, **params: str
    ) -> list[tuple[str, int | None]]:
        """(status, seq) of each item."""
        response = self.send(encode(trajectories, spec), name, **params)
        assert response.status_code == 200, response.text
        return [(item["status"], item["seq"]) for item in response.json()["items"]]

    def send(self, body: bytes, name: str = "d", **params: str) -> Any:
        return self.http.post(
            f"/v1/datasets/{name}/trajectories",
            params=params,
            content=body,
            headers={"content-type": ARROW},
        )

    def flush(self, name: str = "d") -> dict[str, int]:
        result: dict[str, int] = self.http.post(f"/v1/datasets/{name}/flush").json()
        return result

    def dataset(self, name: str = "d") -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/v1/datasets/{name}").json()
        return found

    def listing(self, name: str = "d", **params: Any) -> list[dict[str, Any]]:
        response = self.http.get(
            f"/v1/datasets/{name}/trajectories", params={"order": "seq", **params}
        )
        items: list[dict[str, Any]] = response.raise_for_status().json()["items"]
        return items

    def info(self, trajectory: Trajectory) -> dict[str, Any]:
        found: dict[str, Any] = (
            self.http.get(f"/v1/trajectories/{trajectory.id}").raise_for_status().json()
        )
        return found

    def steps(self, trajectory: Trajectory) -> Trajectory:
        response = self.http.get(f"/v1/trajectories/{trajectory.id}/steps").raise_for_status()
        return decode(response.content)[1][0]


@pytest.fixture(autouse=True, scope="session")
def _plain_log() -> None:
    """As the program logs; structlog's own default draws tracebacks for seconds."""
    configure_logging("info")


@contextmanager
def serving(data: Path, **settings: Any) -> Iterator[Live]:
    """The app on this directory, until the block ends."""
    values = {"maintenance_interval": 0, "seal_idle": 60.0, "seal_age": 60.0, "sql_workers": 0}
    app = create_app(Settings(**{"data": data, **values, **settings}))
    with TestClient(app, base_url=URL, raise_server_exceptions=False) as client:
        yield Live(client, app.state.service, app.state.settings.data)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One app for all tests of a module that leave nothing in it which others would find."""
    with serving(tmp_path_factory.mktemp("shared") / "data") as live:
        yield live


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Live]]:
    """Start the app, or start it again on the same directory; settings as keywords.

    A SQL worker costs half a second: only tests with the mark `sql_worker` have one.
    """
    workers = int(request.node.get_closest_marker("sql_worker") is not None)
    with ExitStack() as running:

        def run(**settings: Any) -> Live:
            running.close()
            values = {"data": tmp_path / "data", "sql_workers": workers, **settings}
            return running.enter_context(serving(**values))

        yield run


@pytest.fixture
def live(start: Callable[..., Live]) -> Live:
    return start()
