"""A shard's file by itself: what it says, and what is made of one that says something else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from server.storage import shards
from server.storage.checksums import Source
from server.storage.shards import DIGEST_KEY, ShardDamaged
from stepwell import shard_rows
from stepwell.codec import to_batch
from stepwell.errors import CodecError
from stepwell.schema import FORMAT_KEY, arrow_schema
from stepwell.shard_rows import TRAJECTORIES_KEY
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.shard_reading import read_trajectory, table_of, write_format_1, write_trajectories
from tests.specs import make_rich_spec

SPEC = make_spec(observation=3, action=2)
GOLDEN = Path(__file__).parents[2] / "golden" / "shard_v1.parquet"
GOLDEN_DIGESTS = [
    "1cd5b2bce3c000118c0f829d805d3a45fca2fe51c48c456f9453f9deb1dc2f92",
    "61509dcb62fc8faeffe740d9ddffb01c4a33f8ae6830716507cea675d8428a25",
    "6552503e16e7515d27e31149a211389b2684d219b0d8820f7fb98f9da7dcd05f",
]


@pytest.fixture
def made() -> list[Trajectory]:
    return [make_trajectory(SPEC, length=5 + i, seed=i) for i in range(3)]


@pytest.fixture
def shard(tmp_path: Path, made: list[Trajectory]) -> Path:
    path = tmp_path / "shard.parquet"
    write_trajectories(path, SPEC, made)
    return path


@pytest.fixture
def rewritten(shard: Path) -> Callable[..., Source]:
    """The same rows in format 1, with something else said of them, or in groups of so many."""

    def write(*about: Any) -> Source:
        shards.contents_of.cache_clear()
        path = shard.with_name("other.parquet")
        write_format_1(shard, path, *about)
        return Source(path)

    return write


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
        placed = write_trajectories(path, SPEC, alike, **options)
        assert groups_of(path) == groups, options
        assert [entry.row_start for entry in placed] == [0, 10, 20, 30, 40]


def test_descriptions_without_their_rows_are_refused(tmp_path: Path) -> None:
    made = [make_trajectory(SPEC, length=4, seed=i) for i in range(3)]
    with pytest.raises(ValueError, match="shorter"):
        write_trajectories(tmp_path / "short.parquet", SPEC, made, less=1)


def test_a_shard_of_format_1_is_read_for_ever() -> None:
    """Of the rich spec, written before there was a format 2."""
    spec = make_rich_spec()
    footer = shards.read_footer(Source(GOLDEN))
    assert (footer.dataset, footer.spec) == ("d", spec)
    assert [(entry.seq, entry.row_start) for entry in footer.entries] == [(1, 0), (2, 4), (3, 9)]
    for entry, batch in shards.read_batches(Source(GOLDEN)):
        shards.check_digest(entry, batch, spec)
    assert [entry.digest for entry in footer.entries] == GOLDEN_DIGESTS
    assert [t.digest for t in shard_rows.read_shard(GOLDEN, range(3))] == GOLDEN_DIGESTS
    assert [read_trajectory(Source(GOLDEN), i).digest for i in range(3)] == GOLDEN_DIGESTS


def test_a_shard_of_a_newer_format_is_refused_by_its_number(
    rewritten: Callable[..., Source],
) -> None:
    source = rewritten({FORMAT_KEY: b"3", DIGEST_KEY: None})
    with pytest.raises(ShardDamaged, match="unknown format"):
        shards.read_footer(source)
    with pytest.raises(CodecError, match="unknown format") as caught:
        list(shard_rows.read_shard(source.path, [0]))
    assert caught.value.expected == "1 … 2 (upgrade stepwell to read more)"


def test_the_footer_does_not_grow_with_the_number_of_trajectories(
    tmp_path: Path, rewritten: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of format 1 it did: such footers are found, but for small ones."""
    many = [make_trajectory(SPEC, length=1, seed=i) for i in range(200)]
    write_trajectories(tmp_path / "many.parquet", SPEC, many)
    write_format_1(tmp_path / "many.parquet", tmp_path / "old.parquet")
    sizes = [pq.read_metadata(tmp_path / f"{n}.parquet").serialized_size for n in ("many", "old")]
    assert sizes[0] < 8_000 and sizes[1] > shards.SMALL_FOOTER
    names = ("many", "old", "shard")
    found = [shards.table_in_footer(Source(tmp_path / f"{n}.parquet")) for n in names]
    assert found == [False, True, False]
    assert not shards.table_in_footer(rewritten())
    (tmp_path / "no.parquet").write_bytes(b"PAR1")
    assert not shards.table_in_footer(Source(tmp_path / "no.parquet"))
    shards.table_in_footer.cache_clear()
    monkeypatch.setattr(shards, "SMALL_FOOTER", 0)  # of many columns and groups it is large, too
    assert not shards.table_in_footer(Source(tmp_path / "many.parquet"))


def test_a_footer_of_an_earlier_version_has_no_digest(rewritten: Callable[..., Source]) -> None:
    assert len(shards.read_footer(rewritten({DIGEST_KEY: None})).entries) == 3


def test_a_footer_that_was_changed_is_refused(
    shard: Path, rewritten: Callable[..., Source]
) -> None:
    table = table_of(shard)
    changed = rewritten({TRAJECTORIES_KEY: table.replace(b'"seq":1', b'"seq":7')})
    with pytest.raises(ShardDamaged, match=r"cannot be read \(its digest differs\)"):
        shards.read_footer(changed)
    shard.write_bytes(shard.read_bytes().replace(b'"seq":1', b'"seq":7'))
    with pytest.raises(ShardDamaged, match=r"cannot be read \(its digest differs\)"):
        shards.read_footer(Source(shard))


@pytest.mark.parametrize("group", [1000, 7, 2, 1])
def test_a_trajectory_is_one_piece_however_its_rows_are_grouped(
    made: list[Trajectory], rewritten: Callable[..., Source], group: int
) -> None:
    source = rewritten({}, group)
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
    table = json.loads(table_of(shard))
    table[1]["total_reward"] = math.nan
    source = rewritten({TRAJECTORIES_KEY: json.dumps(table).encode(), DIGEST_KEY: None})
    found = shards.read_footer(source).entries
    assert math.isnan(found[1].total_reward)
    for number, t in enumerate(made):
        assert read_trajectory(source, number).digest == t.digest


def test_an_entry_that_lacks_something_is_damage(
    shard: Path, rewritten: Callable[..., Source]
) -> None:
    table = json.loads(table_of(shard))
    del table[1]["digest"]
    source = rewritten({TRAJECTORIES_KEY: json.dumps(table).encode(), DIGEST_KEY: None})
    with pytest.raises(ShardDamaged, match="footer cannot be read"):
        read_trajectory(source, 1)


def test_rows_of_another_trajectory_are_refused(
    shard: Path, rewritten: Callable[..., Source]
) -> None:
    """Its rows are one too far, or there are fewer than it should have."""
    for change in ({"row_start": 1}, {"row_start": 19}):
        table = json.loads(table_of(shard))
        table[0 if change["row_start"] == 1 else 2] |= change
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
