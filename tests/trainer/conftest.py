"""A small honest stand-in for the service, in process: it serves snapshots and real shard files."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepwell import EnvSpec, Trajectory
from stepwell.codec import to_batch
from stepwell.errors import CodecError, ServiceUnreachable
from stepwell.schema import arrow_schema
from stepwell.testing import make_spec, make_trajectory


class FakeService:
    """What of `stepwell.Client` the trainer uses, over shard files in a folder."""

    def __init__(self, folder: Path, spec: EnvSpec):
        self.folder, self.spec = folder, spec
        self.shards: dict[str, list[Trajectory]] = {}
        self.down = False
        self.refused = 0
        self.leases: list[str] = []
        self.metrics: dict[tuple[str, int], float | None] = {}
        self.published: dict[int, bytes] = {}
        self.runs: dict[str, dict] = {}
        self.logs: dict[str, str] = {}
        self.command = "none"
        self.downloads = 0
        self._snapshots: dict[str, pa.Table] = {}

    def add_shard(self, trajectories: Sequence[Trajectory]) -> str:
        """Write a shard as the contract draws it."""
        name = f"sh_{len(self.shards):04d}"
        schema = arrow_schema(self.spec)
        tables = []
        for index, trajectory in enumerate(trajectories):
            batch = to_batch(trajectory, self.spec, schema)
            rows = batch.num_rows
            head = [
                pa.array(np.full(rows, index, np.int32)),
                pa.array(np.arange(rows, dtype=np.int32)),
            ]
            tables.append(
                pa.Table.from_arrays(
                    [*head, *batch.columns], names=["traj_idx", "t", *batch.schema.names]
                )
            )
        pq.write_table(pa.concat_tables(tables), self.folder / f"{name}.parquet")
        self.shards[name] = list(trajectories)
        return name

    def path(self, shard: str) -> Path:
        return self.folder / f"{shard}.parquet"

    def trajectories(self) -> list[Trajectory]:
        return [t for shard in self.shards.values() for t in shard]

    # ------------------------------------------------------------------ the client's side of it

    def _up(self) -> None:
        if self.down:
            self.refused += 1
            raise ServiceUnreachable("no answer; start one with: stepwell serve")

    url = "http://fake"

    def with_options(self, **_: object):
        return self

    def ready(self) -> bool:
        return not self.down

    def create_snapshot(self, *, sources=None, dataset=None, where=None, **_: object):
        """Everything there is; a source "component N of M" takes every M-th trajectory."""
        self._up()
        rows: list[dict] = []
        for component in range(len(sources or [None])):
            seq = 0
            for shard, trajectories in self.shards.items():
                start = 0
                for index, t in enumerate(trajectories):
                    if seq % len(sources or [0]) == component:
                        rows.append(
                            {
                                "id": t.id,
                                "dataset": "fake",
                                "seq": seq,
                                "component": component,
                                "weight": 1.0,
                                "shard": shard,
                                "traj_idx": index,
                                "row_start": start,
                                "length": len(t),
                                "first_step": t.metadata.first_step,
                                "return": t.total_reward,
                                "terminated": t.terminated,
                                "truncated": t.truncated,
                                "final_obs_valid": t.final_obs_valid,
                                "env": t.metadata.env,
                            }
                        )
                    seq += 1
                    start += len(t) + 1
        table = pa.Table.from_pylist(rows)
        digest = hashlib.sha256(json.dumps([r["id"] for r in rows]).encode()).hexdigest()
        name = f"sn_{digest[:12]}"
        shares = [s["share"] for s in sources] if sources else [1.0]
        self._snapshots[name] = table.replace_schema_metadata(
            {"snapshot": name, "digest": digest, "shares": json.dumps(shares)}
        )
        return self.snapshot(name)

    def snapshot(self, name: str):
        self._up()
        table = self._snapshots[name]
        digest = table.schema.metadata[b"digest"].decode()
        spec = self.spec.to_json()
        return SimpleNamespace(id=name, spec=spec, digest=digest, trajectories=table.num_rows)

    def manifest(self, name: str) -> pa.Table:
        self._up()
        return self._snapshots[name]

    def lease(self, name: str, holder: str = "", ttl: float = 120.0) -> None:
        self._up()
        self.leases.append(name)

    def release(self, name: str, holder: str = "") -> None:
        self._up()

    def download_shard(self, shard: str, path: Path, *, sha256: str | None = None) -> Path:
        self._up()
        self.downloads += 1
        source = self.path(shard)
        if not source.read_bytes().startswith(b"PAR1"):
            raise CodecError(f"shard {shard} arrived damaged")
        shutil.copyfile(source, path)
        return path

    def create_run(self, name: str, kind: str, **fields: object) -> None:
        self._up()
        self.runs[name] = {"kind": kind, "status": "running", **fields}

    def patch_run(self, name: str, **fields: object) -> None:
        self._up()
        self.logs[name] = self.logs.get(name, "") + str(fields.pop("log", ""))
        self.runs[name].update(fields)

    def run_log(self, name: str) -> str:
        self._up()
        return self.logs.get(name, "")

    def log_metrics(self, run: str, points) -> int:
        self._up()
        for point in points:
            self.metrics[point.key, point.step] = point.value
        return len(points)

    def publish_policy(self, run: str, version: int, data: bytes, **_: object) -> None:
        self._up()
        self.published[version] = data

    def policies(self, run: str) -> list[SimpleNamespace]:
        self._up()
        return [SimpleNamespace(version=version) for version in self.published]

    def heartbeat(self, worker: str, **fields: object):
        self._up()
        return SimpleNamespace(command=self.command)

    def close(self) -> None:
        pass


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., FakeService]:
    def make(spec: EnvSpec | None = None, lengths: Sequence[Sequence[int]] = ()) -> FakeService:
        """A service with one shard for each list of lengths, endings of every kind."""
        spec = spec or make_spec()
        folder = tmp_path / f"service-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        service = FakeService(folder, spec)
        seed = 0
        for shard in lengths:
            trajectories = []
            for length in shard:
                kind = seed % 4
                trajectories.append(
                    make_trajectory(
                        spec,
                        length=length,
                        seed=seed,
                        terminated=kind == 0,
                        truncated=kind == 1,
                        final_obs_valid=kind != 1,
                        first_step=7 * seed if kind == 3 else 0,
                        episode_id=f"e{seed}",
                    )
                )
                seed += 1
            service.add_shard(trajectories)
        return service

    return make
