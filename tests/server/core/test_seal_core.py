"""Shards: their layout, sizes and footers; and when a segment becomes one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from server.storage.checksums import Source
from server.storage.shards import (
    ShardDamaged,
    read_batches,
    read_footer,
)
from stepwell.codec import HEADER_KEY, from_batch
from stepwell.spaces import Box, EnvSpec
from stepwell.testing import make_spec, make_trajectory, wait_until
from stepwell.trajectory import Trajectory
from tests.shard_reading import read_trajectory, write_trajectories
from tests.specs import make_rich_spec

SPEC = make_spec(observation=3, action=2)


def test_every_kind_of_space_survives_a_shard(tmp_path: Path) -> None:
    """One by one and front to back, the digests are those that went in."""
    spec = make_rich_spec()
    sent = [make_trajectory(spec, length=n, seed=n) for n in (1, 40, 3, 25)]
    write_trajectories(tmp_path / "s.parquet", spec, sent, group_rows=30)
    again = [read_trajectory(Source(tmp_path / "s.parquet"), i) for i in range(4)]
    assert [t.digest for t in again] == [t.digest for t in sent]
    streamed = [
        from_batch(b, {HEADER_KEY: json.dumps(e.header).encode()}, spec).digest
        for e, b in read_batches(Source(tmp_path / "s.parquet"))
    ]
    assert streamed == [t.digest for t in sent]


def test_row_groups_hold_whole_trajectories_and_only_giants_are_split(tmp_path: Path) -> None:
    sent = [make_trajectory(SPEC, length=n, seed=n) for n in (9, 9, 9, 70_000, 9)]
    entries = write_trajectories(tmp_path / "s.parquet", SPEC, sent, group_rows=20)
    metadata = pq.read_metadata(tmp_path / "s.parquet")
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert rows == [20, 10, 65_536, 4_465, 10]
    assert [entry.row_start for entry in entries] == [0, 10, 20, 30, 70_031]
    giant = read_trajectory(Source(tmp_path / "s.parquet"), 3)
    assert giant.digest == sent[3].digest


def test_a_shard_is_read_in_the_memory_of_a_row_group(tmp_path: Path) -> None:
    """Not in that of 65,536 rows, which wide ones make gigabytes: compaction reads whole shards."""
    spec = make_spec(observation=4096)
    sent = [make_trajectory(spec, length=63, seed=n) for n in range(24)]
    write_trajectories(tmp_path / "s.parquet", spec, sent, group_rows=64)
    assert pq.read_metadata(tmp_path / "s.parquet").num_row_groups == 24
    before, most = pa.total_allocated_bytes(), 0
    for _, batch in read_batches(Source(tmp_path / "s.parquet")):
        most = max(most, pa.total_allocated_bytes() - before)
        one = batch.nbytes
    assert one <= most < 6 * one


def test_columns_are_encoded_as_measured(tmp_path: Path) -> None:
    """Float vectors split by byte, others plain; statistics of scalars only; zstd throughout."""
    spec = EnvSpec.of(
        {"f": Box((3,)), "d": Box((2,), "float64"), "h": Box((2,), "float16"),
         "image": Box((4, 4), "uint8", 0.0, 255.0), "i": Box((2,), "int16", -9.0, 9.0)},
        Box((2,), low=-1.0, high=1.0),
    )  # fmt: skip
    write_trajectories(tmp_path / "s.parquet", spec, [make_trajectory(spec, length=50)])
    metadata = pq.read_metadata(tmp_path / "s.parquet")
    group = metadata.row_group(0)
    columns = {c.path_in_schema: c for c in (group.column(i) for i in range(group.num_columns))}
    split = {name for name, c in columns.items() if "BYTE_STREAM_SPLIT" in c.encodings}
    assert split == {"obs.f.list.item", "obs.d.list.item", "action.list.item"}
    assert {c.compression for c in columns.values()} == {"ZSTD"}
    with_statistics = {name for name, c in columns.items() if c.is_stats_set}
    assert with_statistics == {
        "traj_idx", "t", "reward", "terminated", "truncated", "is_last",
    }  # fmt: skip
    assert columns["obs.image"].physical_type == "FIXED_LEN_BYTE_ARRAY"
    assert columns["traj_idx"].statistics.max == 0


def test_mujoco_like_floats_take_at_most_four_fifths_of_their_raw_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    spec = make_spec(observation=17, action=6)
    sent = []
    for seed in range(20):
        walk = np.cumsum(rng.normal(0, 0.05, (1001, 17)), axis=0).astype(np.float32)
        t = make_trajectory(spec, length=1000, seed=seed)
        actions = np.tanh(np.cumsum(rng.normal(0, 0.1, (1000, 6)), axis=0)).astype(np.float32)
        sent.append(
            Trajectory(obs={"observation": walk}, actions={"action": actions}, rewards=t.rewards)
        )
    write_trajectories(tmp_path / "s.parquet", spec, sent)
    raw = sum(t.nbytes for t in sent)
    assert (tmp_path / "s.parquet").stat().st_size <= 0.80 * raw


def test_the_footer_describes_itself(tmp_path: Path) -> None:
    sent = [make_trajectory(SPEC, length=3, seed=i, tags=("a",), policy="p/1") for i in range(3)]
    write_trajectories(tmp_path / "s.parquet", SPEC, sent)
    footer = read_footer(Source(tmp_path / "s.parquet"))
    assert (footer.dataset, footer.spec) == ("d", SPEC)
    assert [e.header for e in footer.entries] == [t.header() for t in sent]
    assert [(e.seq, e.digest) for e in footer.entries] == [
        (i + 1, t.digest) for i, t in enumerate(sent)
    ]


def test_a_flipped_bit_in_a_page_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    write_trajectories(path, SPEC, [make_trajectory(SPEC, length=500)])
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ShardDamaged):
        read_trajectory(Source(path), 0)


def test_segments_seal_when_idle_and_when_large(start: Callable[..., Any]) -> None:
    """Nobody has to ask: SQL `steps` sees fresh data within seconds."""
    live = start(seal_idle=0.1)
    live.create()
    first = make_trajectory(SPEC)
    live.post([first])
    wait_until(lambda: live.info(first)["state"] == "sealed")
    live = start(seal_bytes=10_000)
    large = make_trajectory(SPEC, length=1000)
    live.post([large])
    wait_until(lambda: live.info(large)["state"] == "sealed")
    assert live.service.store.names("segments") == []


def test_datasets_and_partitions_get_shards_of_their_own(live: Any) -> None:
    live.create("d")
    live.create("e")
    sent = [make_trajectory(SPEC, seed=i) for i in range(4)]
    live.post(sent[:1])
    live.post(sent[1:2], partition="protected")
    live.post(sent[2:], "e")
    live.http.patch(f"/v1/trajectories/{sent[2].id}", json={"partition": "protected"})
    assert live.flush("d") == {"sealed": 2, "shards": 2}
    folders = {p.parent.name for p in (live.data / "shards").glob("*/*.parquet")}
    assert folders == {"fifo", "protected"}
    assert len(list((live.data / "shards").glob("*/*.parquet"))) == 4
    assert live.flush("d") == {"sealed": 0, "shards": 0}


def test_stopping_seals_what_is_acknowledged(start: Callable[..., Any]) -> None:
    live = start()
    live.create()
    sent = make_trajectory(SPEC)
    live.post([sent])
    live = start()
    assert live.info(sent)["state"] == "sealed"
    assert live.service.store.names("segments") == []


def test_a_trajectory_of_many_bytes_is_split_into_groups_and_pages_of_few(tmp_path: Path) -> None:
    """So that it is read, here and in SQL, in the memory of a group, or of a page."""
    spec = EnvSpec.of(Box((64, 64, 3), "uint8"), Box((2,), low=-1.0, high=1.0))
    t = make_trajectory(spec, length=999)
    write_trajectories(tmp_path / "s.parquet", spec, [t], group_bytes=4 << 20)
    metadata = pq.read_metadata(tmp_path / "s.parquet")
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    assert len(groups) == 3 and all(g.total_byte_size < 5 << 20 for g in groups)
    assert read_trajectory(Source(tmp_path / "s.parquet"), 0).digest == t.digest
