"""A shard's file by itself: what it says, and what is made of one that says something else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from server.storage import shards
from server.storage.checksums import Source
from server.storage.shards import DIGEST_KEY, TRAJECTORIES_KEY, Entry, ShardDamaged
from stepwell import shard_rows
from stepwell.codec import to_batch
from stepwell.schema import arrow_schema
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.shard_reading import read_trajectory

SPEC = make_spec(observation=3, action=2)


@pytest.fixture
def made() -> list[Trajectory]:
    return [make_trajectory(SPEC, length=5 + i, seed=i) for i in range(3)]


def write(path: Path, made: list[Trajectory], less: int = 0, **options: int) -> list[Entry]:
    """A shard of these, with the rows of the last `less` missing."""
    entries = [
        Entry(
            header=t.header(),
            digest=t.digest,
            seq=number,
            partition="fifo",
            total_reward=float(t.rewards.sum()),
            bytes=1,
            created_at=0.0,
        )
        for number, t in enumerate(made)
    ]
    batches = [to_batch(t, SPEC, arrow_schema(SPEC)) for t in made[: len(made) - less]]
    return shards.write_shard(path, "d", SPEC, entries, iter(batches), **options)


@pytest.fixture
def shard(tmp_path: Path, made: list[Trajectory]) -> Path:
    path = tmp_path / "shard.parquet"
    write(path, made)
    return path


@pytest.fixture
def rewritten(shard: Path) -> Callable[..., Source]:
    """The same rows, with something else said of them, or cut into groups of so many."""

    def write(change: Mapping[bytes, bytes | None], group: int = 1000) -> Source:
        table = pq.read_table(shard)
        said = {**pq.read_metadata(shard).metadata, **change}
        kept = {key: value for key, value in said.items() if value is not None}
        kept.pop(b"ARROW:schema", None)
        path = shard.with_name("other.parquet")
        pq.write_table(table.replace_schema_metadata(kept), path, row_group_size=group)
        return Source(path)

    return write


def table_of(source: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(pq.read_metadata(source).metadata[TRAJECTORIES_KEY])
    return found


def groups_of(path: Path) -> list[int]:
    found = pq.read_metadata(path)
    return [found.row_group(number).num_rows for number in range(found.num_row_groups)]


def test_a_row_group_ends_where_the_next_would_be_too_much(tmp_path: Path) -> None:
    """In rows, or in bytes; at the limit it goes in, and one alone always does."""
    alike = [make_trajectory(SPEC, length=9, seed=i) for i in range(5)]
    path, size = tmp_path / "groups.parquet", to_batch(alike[0], SPEC, arrow_schema(SPEC)).nbytes
    for options, groups in (
        ({"group_rows": 20}, [20, 20, 10]),
        ({"group_rows": 19}, [10] * 5),
        ({"group_rows": 1}, [10] * 5),
        ({"group_bytes": 2 * size}, [20, 20, 10]),
        ({"group_bytes": 2 * size - 1}, [10] * 5),
        ({"group_bytes": 3 * size}, [30, 20]),
        ({}, [50]),
    ):
        placed = write(path, alike, **options)
        assert groups_of(path) == groups, options
        assert [entry.row_start for entry in placed] == [0, 10, 20, 30, 40]


def test_descriptions_without_their_rows_are_refused(tmp_path: Path) -> None:
    made = [make_trajectory(SPEC, length=4, seed=i) for i in range(3)]
    with pytest.raises(ValueError, match="shorter"):
        write(tmp_path / "short.parquet", made, less=1)


def test_a_footer_says_what_was_written(shard: Path, made: list[Trajectory]) -> None:
    footer = shards.read_footer(Source(shard))
    assert (footer.dataset, footer.spec) == ("d", SPEC)
    assert [entry.id for entry in footer.entries] == [t.id for t in made]
    assert [entry.row_start for entry in footer.entries] == [0, 6, 13]


def test_a_footer_of_an_earlier_version_has_no_digest(rewritten: Callable[..., Source]) -> None:
    assert len(shards.read_footer(rewritten({DIGEST_KEY: None})).entries) == 3


def test_a_footer_that_was_changed_is_refused(
    shard: Path, rewritten: Callable[..., Source]
) -> None:
    table = table_of(shard)
    table[1]["seq"] = 7
    changed = rewritten({TRAJECTORIES_KEY: json.dumps(table).encode()})
    with pytest.raises(ShardDamaged, match=r"cannot be read \(its digest differs\)"):
        shards.read_footer(changed)


@pytest.mark.parametrize("group", [1000, 7, 2, 1])
def test_a_trajectory_is_one_piece_however_its_rows_are_grouped(
    made: list[Trajectory], rewritten: Callable[..., Source], group: int
) -> None:
    source = rewritten({}, group)
    shards.contents_of.cache_clear()
    for number, t in enumerate(made):
        assert read_trajectory(source, number).digest == t.digest
    read = list(shards.read_batches(source))
    assert [entry.id for entry, _ in read] == [t.id for t in made]
    for (entry, batch), t in zip(read, made, strict=True):
        assert batch.equals(
            pa.record_batch(to_batch(t, SPEC, arrow_schema(SPEC)).columns, schema=batch.schema)
        )
        shards.check_digest(entry, batch, SPEC)


def test_a_footer_may_have_numbers_that_strict_json_has_not(
    shard: Path, made: list[Trajectory], rewritten: Callable[..., Source]
) -> None:
    """Python's json writes them."""
    table = table_of(shard)
    table[1]["total_reward"] = math.nan
    source = rewritten({TRAJECTORIES_KEY: json.dumps(table).encode(), DIGEST_KEY: None})
    found = shards.read_footer(source).entries
    assert math.isnan(found[1].total_reward)
    shards.contents_of.cache_clear()
    for number, t in enumerate(made):
        assert read_trajectory(source, number).digest == t.digest


def test_an_entry_that_lacks_something_is_damage(
    shard: Path, rewritten: Callable[..., Source]
) -> None:
    table = table_of(shard)
    del table[1]["digest"]
    source = rewritten({TRAJECTORIES_KEY: json.dumps(table).encode(), DIGEST_KEY: None})
    shards.contents_of.cache_clear()
    with pytest.raises(ShardDamaged, match="footer cannot be read"):
        read_trajectory(source, 1)


def test_rows_of_another_trajectory_are_refused(
    shard: Path, rewritten: Callable[..., Source]
) -> None:
    """Its rows are one too far, or there are fewer than it should have."""
    for change in ({"row_start": 1}, {"row_start": 19}):
        table = table_of(shard)
        table[0 if change["row_start"] == 1 else 2] |= change
        shards.contents_of.cache_clear()
        source = rewritten({TRAJECTORIES_KEY: json.dumps(table).encode(), DIGEST_KEY: None})
        number = 0 if change["row_start"] == 1 else 2
        with pytest.raises(ShardDamaged, match=f"are not trajectory {number}"):
            read_trajectory(source, number)


def test_pages_have_checksums_of_their_own(shard: Path) -> None:
    """Where no others are known: a flipped bit in any page is no value."""
    content = bytearray(shard.read_bytes())
    column = pq.read_metadata(shard).row_group(0).column(2)
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 4
    shard.write_bytes(content)
    shards.contents_of.cache_clear()
    with pytest.raises(ShardDamaged):
        list(shards.read_batches(Source(shard)))
    with pytest.raises(ShardDamaged):
        read_trajectory(Source(shard), 0)


def test_a_vector_that_is_missing_has_no_elements() -> None:
    """Parquet hands out elements that are NULL; ours are none."""
    kind = pa.list_(pa.float32(), 2)
    column = pa.chunked_array([pa.array([[1, 2], None], kind), pa.array([None, [3, 4]], kind)])
    whole = shard_rows._whole(column)
    assert whole.to_pylist() == [[1, 2], None, None, [3, 4]]
    assert whole.values.null_count == 0 and len(whole.values) == 8
    assert np.array_equal(whole.values.to_numpy()[:2], [1, 2])
