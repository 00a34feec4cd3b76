"""D4RL files as people have them, made small; and a service in this process to import them into."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import orjson
import pytest

from server.imports.raw_file import ImportOptions, Reading
from server.service import Service
from server.settings import Settings
from stepwell.messages import Job
from stepwell.testing import wait_until
from stepwell.trajectory import Trajectory
from tests.imported import read_file

Arrays = dict[str, Any]


def walk(rows: int, size: int = 3, seed: int = 0) -> np.ndarray:
    """Smooth observations: every step moves a little."""
    return np.cumsum(np.random.default_rng(seed).normal(0, 0.02, (rows, size)), axis=0).astype(
        np.float32
    )


def flags(rows: int, *at: int) -> np.ndarray:
    marks = np.zeros(rows, np.bool_)
    marks[list(at)] = True
    return marks


def table(rows: int, *, terminals: Any = (), timeouts: Any = None, seed: int = 0) -> Arrays:
    """A complete small file: observations [N, 3], actions [N, 2] within ±1."""
    rng = np.random.default_rng(seed + 1)
    arrays = {
        "observations": walk(rows, seed=seed),
        "actions": rng.uniform(-1, 1, (rows, 2)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        "terminals": flags(rows, *terminals),
    }
    if timeouts is not None:
        arrays["timeouts"] = flags(rows, *timeouts)
    return arrays


def write(path: Path, arrays: Arrays, **options: Any) -> Path:
    """As D4RL's own generators write: flat datasets, gzip, no attributes."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            packed = {"compression": "gzip"} | options if np.ndim(array) else {}
            file.create_dataset(name, data=array, **packed)
    return path


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., tuple[Reading, list[Trajectory]]]:
    """Write arrays to a file, read it back."""
    return lambda arrays, **options: read_file(write(tmp_path / "file.hdf5", arrays), **options)


@dataclass
class Importing:
    """A running service that takes files."""

    service: Service

    def submit(self, path: Path, dataset: str, **fields: Any) -> Job:
        data = path.read_bytes()
        upload = f"up_{hashlib.sha256(str(time.time_ns()).encode()).hexdigest()[:32]}.part"
        self.service.store.put("uploads", upload, data)
        request = ImportOptions(
            dataset=dataset,
            **{"format": "d4rl", "partition": "protected", "create": True, **fields},
        )
        digest = hashlib.sha256(data).hexdigest()
        job: Job = self.service.imports.submit(request, upload, digest, len(data))
        return job

    def wait(self, job: Job) -> Job:
        get = self.service.jobs.get
        running = ("queued", "running")
        wait_until(lambda: get(job.id).state not in running, what="the end of the job")
        ended: Job = get(job.id)
        return ended

    def run(self, path: Path, dataset: str, **fields: Any) -> Job:
        return self.wait(self.submit(path, dataset, **fields))

    def rows(self, sql: str, params: Any = None, **options: Any) -> list[list[Any]]:
        result = self.service.sql.query(sql, params, timeout=30, **options)
        return list(orjson.loads(result.payload))

    def files(self) -> set[str]:
        root = self.service.settings.data
        folders = ("shards/fifo", "shards/protected", "uploads", "tmp")
        return {str(p) for folder in folders for p in (root / folder).iterdir()}


@pytest.fixture(scope="module")
def importing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Importing]:
    data = tmp_path_factory.mktemp("importing") / "data"
    service = Service(Settings(data=data, sql_workers=1, import_memory=2 << 30))
    service.start()
    yield Importing(service)
    service.close()
