"""Files as DuckDB reads them in a SQL worker: shards of many trajectories, and damaged ones."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.sql import worker
from server.sql.checked_files import CheckedFileSystem
from server.storage.checksums import CheckedFile, checksums_of
from server.storage.shards import Entry, write_shard
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


def test_duckdb_reads_rows_and_footer_and_not_the_table_of_trajectories(
    put: Any, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory would have no room for the tables of 100,000 trajectories."""
    files = put(content)
    real, read = CheckedFile.read_at, []

    def read_at(file: CheckedFile, start: int, count: int) -> bytes:
        read.append(count)
        return real(file, start, count)

    monkeypatch.setattr(CheckedFile, "read_at", read_at)
    connection = worker._connect(64 << 20, files)
    rows = connection.execute("select count(*), sum(t) from read_parquet('stored://a')").fetchall()
    assert rows == [(2 * COUNT, COUNT)]
    said = "select max(octet_length(value)) from parquet_kv_metadata('stored://a')"
    assert connection.execute(said).fetchall()[0][0] < 10_000
    connection.close()
    assert sum(read) < 100_000 < 200 * COUNT < len(content)


def test_any_part_of_a_file_is_read_and_damage_is_found_where_it_is_read(
    put: Any, content: bytes
) -> None:
    files = put(content)
    assert files.info("a")["size"] == len(content)
    with files.open("a") as file:
        for start, count in ((0, 4), (len(content) - 8, 8), (70_000, 80_000)):
            file.seek(start)
            assert file.read(count) == content[start : start + count]
        file.seek(-8, io.SEEK_END)
        assert file.read() == content[-8:]
    at = len(content) - 40
    files = put(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], content)
    with files.open("a") as file:
        assert file.read(100) == content[:100]
        assert files.damaged == set()
        file.seek(-8, io.SEEK_END)
        with pytest.raises(OSError):
            file.read()
    assert files.damaged == {"a"}


def test_what_is_learned_again_has_the_checksums_learned_last(put: Any, tmp_path: Path) -> None:
    files = put(b"x" * 2000)
    (tmp_path / "a").write_bytes(b"y" * 1000)
    files.learn({"a": base64.b64encode(checksums_of(b"y" * 1000)).decode()})
    assert (files.info("a")["size"], files.open("a").read()) == (1000, b"y" * 1000)
