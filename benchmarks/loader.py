"""Speed of the trainer's data loader, relative to a plain memory copy of as many bytes.

    python -m benchmarks.loader [--trajectories 1000] [--shards 8]

The data are 1000 trajectories of 1000 steps, with 17 float observations and 6 float actions, in 8
shards that are read through the trainer's cache. Each round measures in alternation:

    copy            the limit: draw random positions, then copy a batch's bytes from a random
                    position in memory, one block per field, into one of four buffers
    loader          batches made by the loader in this thread
    loader_thread   batches from the loader's prefetch thread

The ratio to the copy is computed in each round; the result is the median over rounds. The files are
in the page cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.report import write
from stepwell import Box, EnvSpec
from stepwell.codec import to_batch
from stepwell.schema import arrow_schema
from stepwell.testing import make_trajectory
from trainer.config import DataConfig
from trainer.data.cache import Cache
from trainer.data.fields import Field, fields_of
from trainer.data.loader import Loader, open_view
from trainer.data.sampler import WindowSampler
from trainer.data.snapshot import Manifest, manifest_from_table

SPEC = EnvSpec.of(Box((17,)), Box((6,), low=-1.0, high=1.0))
LENGTH = 1000
SHAPES = ((32, 128), (256, 8), (24, 32), (8, 512))
ROUNDS, REPEATS = 15, 200


class Folder:
    """The part of a client that the cache needs: access to shard files."""

    def __init__(self, folder: Path):
        self.folder = folder

    def download_shard(self, shard: str, path: Path) -> Path:
        return Path(shutil.copyfile(self.folder / shard, path))


def build(folder: Path, trajectories: int, shards: int) -> Manifest:
    """Write shard files like the service's, and return the manifest of all trajectories."""
    schema, rows = arrow_schema(SPEC), []
    for shard in range(shards):
        tables = []
        for index in range(trajectories // shards):
            trajectory = make_trajectory(SPEC, length=LENGTH, seed=shard * 10_000 + index)
            batch = to_batch(trajectory, SPEC, schema)
            place = [np.full(LENGTH + 1, index, np.int32), np.arange(LENGTH + 1, dtype=np.int32)]
            names = ["traj_idx", "t", *batch.schema.names]
            tables.append(pa.table([*map(pa.array, place), *batch.columns], names=names))
            rows.append({"id": trajectory.id, "shard": f"s{shard}", "traj_idx": index})
            rows[-1] |= {"row_start": index * (LENGTH + 1), "length": LENGTH, "first_step": 0}
            rows[-1] |= {"component": 0, "weight": 1.0, "terminated": False, "truncated": True}
            rows[-1] |= {"final_obs_valid": True}
        pq.write_table(pa.concat_tables(tables), folder / f"s{shard}", compression="zstd")
    metadata = {"snapshot": "sn", "digest": "benchmark", "shares": "[1.0]"}
    return manifest_from_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), SPEC)


def limit(fields: tuple[Field, ...], rows: int, batch: int, window: int) -> Callable[[int], None]:
    """The reference: copy a batch's bytes from a random place in memory, one block per field."""
    n = batch * (window + 1)
    sources = [np.ones((rows, f.size), f.dtype) for f in fields]
    ring = [[np.zeros((n, f.size), f.dtype) for f in fields] for _ in range(4)]
    rng = np.random.default_rng(0)

    def copy(step: int) -> None:
        place = rng.integers(0, rows - n, batch)
        for source, target in zip(sources, ring[step % 4], strict=True):
            np.copyto(target, source[place[0] : place[0] + n])

    return copy


def seconds(work: Callable[[int], Any], first: int) -> float:
    began = time.perf_counter()
    for step in range(first, first + REPEATS):
        work(step)
    return (time.perf_counter() - began) / REPEATS


def measure(cache: Cache, manifest: Manifest, batch: int, window: int) -> dict[str, Any]:
    fields = fields_of(SPEC)
    config = DataConfig(batch=batch, window=window)

    def loader() -> Loader:
        return Loader([open_view(cache, fields, WindowSampler(manifest, config, 0))], config)

    with closing(loader()) as here, closing(loader()) as ahead:
        contenders: dict[str, Callable[[int], Any]] = {
            "copy": limit(fields, manifest.steps, batch, window),
            "loader": here.load,
            "loader_thread": lambda _: next(ahead),
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for round_ in range(ROUNDS + 2):
            for name, work in contenders.items():
                taken = seconds(work, round_ * REPEATS)
                if round_ >= 2:  # the first two rounds are a warm-up
                    times[name].append(taken)
    ratios = {
        name: statistics.median(c / t for c, t in zip(times["copy"], times[name], strict=True))
        for name in contenders
        if name != "copy"
    }
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        "batch": batch,
        "window": window,
        "bytes": sum(f.row_bytes for f in fields) * batch * (window + 1),
        "microseconds": {name: round(1e6 * value, 1) for name, value in middle.items()},
        "transitions_per_second": {n: round(batch * window / v) for n, v in middle.items()},
        "of_the_copy": {name: round(value, 3) for name, value in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        manifest = build(folder, args.trajectories, args.shards)
        cache = Cache(folder / "cache", 1e12, Folder(folder))  # type: ignore[arg-type]
        began = time.perf_counter()
        cache.ensure(manifest, fields_of(SPEC))
        built = time.perf_counter() - began
        began = time.perf_counter()
        again = Cache(folder / "cache", 1e12, None)
        again.ensure(manifest, fields_of(SPEC))
        checked = time.perf_counter() - began
        results = [measure(again, manifest, *shape) for shape in SHAPES]
    path = write(
        "loader",
        {
            "steps": manifest.steps,
            "shards": args.shards,
            "build_seconds": round(built, 2),
            "seconds_to_check_columns_on_disk": round(checked, 2),
            "shapes": results,
        },
    )
    for result in results:
        print(result)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
