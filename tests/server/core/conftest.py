"""The core's tests talk to the real app in process, on an empty data directory of their own."""

from __future__ import annotations

import os
import shutil
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
from stepwell.messages import ARROW, GIF
from stepwell.spaces import EnvSpec
from stepwell.testing import make_spec
from stepwell.trajectory import Trajectory

URL = "http://127.0.0.1:8000"
SPEC = make_spec(observation=3, action=2)
OCTETS = {"content-type": "application/octet-stream"}


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

    def query(self, sql: str) -> Any:
        response = self.http.post("/v1/query", json={"sql": sql, "timeout": 60})
        assert response.status_code == 200, response.text
        return response.json()

    def run(self, name: str = "r") -> None:
        body = {"name": name, "kind": "train"}
        self.http.post("/v1/runs", json=body).raise_for_status()

    def publish(self, version: int, data: bytes) -> Any:
        """The answer to a policy of the run r."""
        url = f"/v1/runs/r/policies/{version}"
        return self.http.put(url, content=data, headers=OCTETS)

    def evaluate(self, seed: int = 0) -> str:
        """The place of the video of a new evaluation."""
        scores = {"mean": 1, "iqm": 1, "ci_low": 1, "ci_high": 1}
        body = {"policy": "r/1", "env": "e", "seeds": [seed], "returns": [1], **scores}
        made = self.http.post("/v1/evaluations", json=body).raise_for_status().json()
        return f"/v1/evaluations/{made['id']}/videos/{seed}"

    def put_video(self, url: str, data: bytes) -> Any:
        params, headers = {"return": 1, "length": 1}, {"content-type": GIF}
        return self.http.put(url, content=data, params=params, headers=headers)

    def as_killed(self, to: Path) -> Path:
        """A copy of the directory as a kill would leave it now."""
        ignore = shutil.ignore_patterns("lock", "mirror")
        return shutil.copytree(self.data, to, ignore=ignore)

    def steps(self, trajectory: Trajectory) -> Trajectory:
        response = self.http.get(f"/v1/trajectories/{trajectory.id}/steps").raise_for_status()
        return decode(response.content)[1][0]


def flip(path: Path, place: int | None = None) -> None:
    """One bit, in place, at this byte or in the middle; the times stay as they were."""
    before = path.stat()
    with open(path, "r+b") as file:
        at = before.st_size // 2 if place is None else place % before.st_size
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


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
