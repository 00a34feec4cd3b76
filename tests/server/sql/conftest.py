"""A service in this process with a little data in it, for tests that ask it in SQL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import orjson
import pytest

from server.memory_budget import Reservation
from server.routes import datasets
from server.service import Service
from server.settings import Settings
from server.sql import worker
from stepwell.codec import encode
from stepwell.messages import CreateDataset
from stepwell.spaces import EnvSpec
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.specs import make_rich_spec


@dataclass
class World:
    """A running service and what was put into it."""

    service: Service
    stored: dict[str, list[Trajectory]] = field(default_factory=dict)

    def create(self, name: str, spec: EnvSpec, **fields: Any) -> None:
        datasets.create_dataset(
            self.service, CreateDataset(name=name, spec=spec.to_json(), **fields), "local"
        )

    def post(
        self, name: str, trajectories: list[Trajectory], *, seal: bool = True, to: str = "fifo"
    ) -> None:
        spec = self.service.ingest.registry.get(name).spec
        body = encode(trajectories, spec)
        reservation = Reservation(self.service.body_memory)
        reservation.add(len(body))
        result = self.service.ingest.post(name, to, body, reservation, wait_sealed=seal)  # type: ignore[arg-type]
        reservation.release()
        assert {item.status for item in result.items} == {"stored"}
        self.stored.setdefault(name, []).extend(trajectories)

    def rows(self, sql: str, params: Any = None, **options: Any) -> list[list[Any]]:
        """The answer, on a machine of any speed; a test of deadlines says its own `timeout`."""
        result = self.service.sql.query(sql, params, **{"timeout": 60.0, **options})
        return list(orjson.loads(result.payload))


@contextmanager
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., World]]:
    """A function that starts a service; all of them are closed in the end."""
    with ExitStack() as stack:

        def make(**settings: Any) -> World:
            data: Path = tmp_path_factory.mktemp("world") / "data"
            service = Service(Settings(data=data, seal_idle=1000, seal_age=1000, **settings))
            service.start()
            stack.callback(service.close)
            return World(service)

        yield make


@pytest.fixture(scope="module")
def make_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., World]]:
    with worlds(tmp_path_factory) as make:
        yield make


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two datasets of other layouts; one trajectory of `plain` is not sealed. Only read it."""
    with worlds(tmp_path_factory) as make:
        yield fill(make())


def fill(world: World) -> World:
    plain, rich = make_spec(observation=4, action=2, env="Plain-v0"), make_rich_spec()
    world.create("plain", plain, description="for tests", tags=["a", "b"])
    world.create("rich", rich)
    for seed in range(6):
        world.post(
            "plain",
            [
                make_trajectory(
                    plain,
                    length=3 + seed,
                    seed=seed,
                    terminated=seed % 2 == 0,
                    truncated=seed % 2 == 1,
                    policy=f"run/{seed % 3}",
                    tags=("even",) if seed % 2 == 0 else (),
                    metrics={"success": seed / 10},
                )
            ],
        )
    world.post("rich", [make_trajectory(rich, length=4, seed=s) for s in range(3)])
    world.post("plain", [make_trajectory(plain, length=20, seed=99, purpose="eval")], seal=False)
    return world


@pytest.fixture(scope="module")
def parser() -> Iterator[Any]:
    """DuckDB's own reading of SQL, as a worker has it."""
    connection = duckdb.connect(":memory:", config=worker.THREADS)
    yield connection
    connection.close()
