"""What DuckDB is shown of a shard: everything but the table of trajectories in its footer."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from server.sql import checked_files, worker
from server.sql.checked_files import CheckedFileSystem, _varint
from server.storage.checksums import Corrupt, checksums_of
from server.storage.shards import TRAJECTORIES_KEY, Entry, write_shard
from stepwell.codec import to_batch
from stepwell.schema import arrow_schema
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec(observation=3, action=2)
COUNT = 800


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A shard of many short trajectories, as the service writes it."""
    path = tmp_path_factory.mktemp("shard") / "s.parquet"
    made = [
        make_trajectory(SPEC, length=1, seed=i, env="E", source="a" * 200) for i in range(COUNT)
    ]
    entries = [
        Entry(
            header=t.header(), digest=t.digest, seq=i, partition="fifo", total_reward=0.0,
            bytes=1, created_at=0.0,
        )
        for i, t in enumerate(made)
    ]  # fmt: skip
    batches = (to_batch(t, SPEC, arrow_schema(SPEC)) for t in made)
    write_shard(path, "d", SPEC, entries, batches)
    return path.read_bytes()


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], CheckedFileSystem]:
    """Stores a file as `a`, with the checksums of these bytes or of others."""
    monkeypatch.chdir(tmp_path)

    def store(data: bytes, as_written: bytes | None = None) -> CheckedFileSystem:
        (tmp_path / "a").write_bytes(data)
        files = CheckedFileSystem()
        files.learn({"a": base64.b64encode(checksums_of(as_written or data)).decode()})
        return files

    return store


def test_the_table_is_not_shown_and_all_rows_are(put: Any, content: bytes) -> None:
    files = put(content)
    with files.open("a") as file:
        shown = file.read()
        assert file.size == files.info("a")["size"] == len(shown) < len(content) - 200 * COUNT
        for start, count in ((0, 4), (len(shown) - 8, 8), (len(shown) - 400, 300)):
            file.seek(start)
            assert file.read(count) == shown[start : start + count]
        file.seek(-8, io.SEEK_END)
        assert file.read() == shown[-8:]
    whole, seen = pq.ParquetFile(io.BytesIO(content)), pq.ParquetFile(io.BytesIO(shown))
    assert seen.read().equals(whole.read()) and seen.metadata.created_by
    tables = [dict(one.metadata.metadata) for one in (whole, seen)]
    assert len(tables[0].pop(TRAJECTORIES_KEY)) > 200 * COUNT
    assert tables[1].pop(TRAJECTORIES_KEY) == b"" and tables[0] == tables[1]


def test_a_footer_that_is_found_piece_by_piece(
    put: Any, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a piece ends: also within the key."""
    expected = put(content).info("a")["size"]
    for size in range(100, 130):
        monkeypatch.setattr(checked_files, "SMALL_FOOTER", size)
        assert put(content).info("a")["size"] == expected


def test_duckdb_reads_a_shard_without_its_table(put: Any, content: bytes) -> None:
    connection = worker._connect(64 << 20, put(content))
    rows = connection.execute("select count(*), sum(t) from read_parquet('stored://a')").fetchall()
    assert rows == [(2 * COUNT, COUNT)]
    said = "select octet_length(key), octet_length(value) from parquet_kv_metadata('stored://a')"
    lengths = dict(connection.execute(said).fetchall())
    assert lengths[len(TRAJECTORIES_KEY)] == 0 and max(lengths.values()) < 10_000
    connection.close()


def test_damage_in_what_is_shown_is_found_and_only_there(put: Any, content: bytes) -> None:
    inside = len(content) - 150_000
    for at, seen in ((10, True), (inside, False), (len(content) - 40, True)):
        bad = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        files = put(bad, content)
        if seen:
            with pytest.raises(OSError), files.open("a") as file:
                file.read()
        else:
            with files.open("a") as file:
                assert len(file.read()) == files.info("a")["size"] < len(content)
        assert files.damaged == ({"a"} if seen else set())
    with pytest.raises(Corrupt):
        files.info("a")


@pytest.mark.parametrize("tail", [b"", b"PAR1", b"\xff\xff\xff\xffPAR1", b"\0\0\0\0PAR2"])
def test_what_is_no_shard_is_shown_as_it_is(put: Any, tail: bytes) -> None:
    for data in (b"x" * 200_000 + tail, b"x" + tail):
        files = put(data)
        assert files.info("a")["size"] == len(data)
        with files.open("a") as file:
            assert file.read() == data


@pytest.mark.parametrize("length", [b"\xff\xff\xff\x7f", b"\x05", b"\xff" * 10])
def test_a_table_of_another_length_is_no_table(put: Any, content: bytes, length: bytes) -> None:
    at = content.index(checked_files._TABLE) + len(checked_files._TABLE)
    bad = content[:at] + length + content[at + len(length) :]
    assert put(bad).info("a")["size"] == len(bad)


def test_what_is_learned_again_is_looked_at_again(put: Any, content: bytes, tmp_path: Path) -> None:
    files = put(content)
    assert files.info("a")["size"] < len(content)
    (tmp_path / "a").write_bytes(content[:1000])
    files.learn({"a": base64.b64encode(checksums_of(content[:1000])).decode()})
    assert files.info("a")["size"] == 1000


def test_numbers() -> None:
    assert [_varint(x) for x in (b"\0", b"\x7f", b"\x80\x01", b"\x80", b"")] == [
        *((0, 1), (127, 1), (128, 2), (0, 0), (0, 0))
    ]
