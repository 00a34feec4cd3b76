"""Arrow files, and folders that Hugging Face's `save_to_disk` writes: the same as from Parquet."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

from server.imports.raw_file import ImportRefused
from stepwell import Discrete
from tests.server.imports.test_imports_parquet import ROWS, columns, read, write
from tests.specs import assert_same

BATCH = 3


def table_of(made: dict[str, Any]) -> pa.Table:
    return pa.table({k: v if isinstance(v, pa.Array) else pa.array(v) for k, v in made.items()})


def write_stream(path: Path, table: pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"options": pa.ipc.IpcWriteOptions(**options)} if options else {}
    with pa.ipc.new_stream(path, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=BATCH)
    return path


def save(folder: Path, table: pa.Table, files: int = 2, **state: Any) -> Path:
    """As `Dataset.save_to_disk` (datasets 4.8) does."""
    names = [f"data-{i:05}-of-{files:05}.arrow" for i in range(files)]
    for i, name in enumerate(names):
        start, stop = i * ROWS // files, (i + 1) * ROWS // files
        write_stream(folder / name, table[start:stop])
    state = {"_data_files": [{"filename": name} for name in names], "_split": None} | state
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def expected(tmp_path: Path, made: dict[str, Any]) -> list[Any]:
    return read(write(tmp_path / "expected.parquet", made))[1]


def same(got: list[Any], wanted: list[Any]) -> None:
    assert len(got) == len(wanted) > 1
    for one, other in zip(got, wanted, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_a_stream_is_read_as_parquet_is(tmp_path: Path, compression: str | None) -> None:
    made = columns()
    stream = write_stream(tmp_path / "a.arrow", table_of(made), compression=compression)
    same(read(stream)[1], expected(tmp_path, made))


def test_rows_of_a_stream_may_come_in_any_order(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(ROWS)
    table = table_of(columns()).take(pa.array(order))
    mixed = {name: table[name].combine_chunks() for name in table.column_names}
    same(read(write_stream(tmp_path / "a.arrow", pa.table(mixed)))[1], expected(tmp_path, mixed))


def test_a_file_with_dictionaries_is_read(tmp_path: Path) -> None:
    """Feather, as pandas writes it."""
    made = columns()
    table = table_of(made | {"action": pa.array(made["action"]).dictionary_encode()})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=BATCH)
    same(read(tmp_path / "a.arrow")[1], expected(tmp_path, made))
    with pytest.raises(ImportRefused, match="dictionary-encoded"):
        read(write_stream(tmp_path / "b.arrow", table))


def test_a_dataset_that_was_saved_to_disk(tmp_path: Path) -> None:
    made = columns()
    features = {"action": {"names": ["l", "r", "u", "d"], "_type": "ClassLabel"}}
    schema = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    folder = save(tmp_path / "saved", table_of(made).replace_schema_metadata(schema))
    # A file of the cache that is no part of it.
    write_stream(folder / "cache-0123.arrow", table_of(made))
    found, got = read(folder)
    same(got, expected(tmp_path, made))
    assert found.spec.actions["action"] == Discrete(4)


def test_splits_that_were_saved_to_disk(tmp_path: Path) -> None:
    test = columns(reward=np.arange(ROWS, dtype=np.float32))
    save(tmp_path / "saved/train", table_of(columns()))
    save(tmp_path / "saved/test", table_of(test))
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ImportRefused, match="several splits") as error:
        read(tmp_path / "saved")
    assert error.value.got == "test, train"
    same(read(tmp_path / "saved", split="test")[1], expected(tmp_path, test))


def test_splits_of_the_hub_s_parquet_branch(tmp_path: Path) -> None:
    """Its files are called 0000.parquet; the folder above is the split."""
    write(tmp_path / "hub/default/train/0000.parquet", columns())
    write(tmp_path / "hub/default/test/0000.parquet", columns())
    with pytest.raises(ImportRefused, match="several splits"):
        read(tmp_path / "hub")
    assert len(read(tmp_path / "hub", split="train")[1]) == 3


def test_configurations_are_not_mixed(tmp_path: Path) -> None:
    for name in ("medium", "expert"):
        write(tmp_path / f"hub/{name}/train-00000-of-00001.parquet", columns())
    with pytest.raises(ImportRefused, match="several configurations") as error:
        read(tmp_path / "hub")
    assert error.value.got == "expert, medium"
    assert len(read(tmp_path / "hub/expert")[1]) == 3


def test_folders_that_lack_rows_are_refused(tmp_path: Path) -> None:
    table = table_of(columns())
    folder = save(tmp_path / "chosen", table, _indices_data_files=[{"filename": "i.arrow"}])
    with pytest.raises(ImportRefused, match="by indices"):
        read(folder)
    folder = save(tmp_path / "cut", table)
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ImportRefused, match="data-00001-of-00002.arrow is missing"):
        read(folder)
    for state in ('{"_data_files": [3]}', '{"_data_files": [{"filename": "../../etc/passwd"}]}'):
        folder = save(tmp_path / "odd", table)
        (folder / "state.json").write_text(state)
        with pytest.raises(ImportRefused, match="lists no files|is missing"):
            read(folder)


def test_damaged_streams_are_refused(tmp_path: Path) -> None:
    """Every cut, also between two batches, and many wrong bits: refused, or read as numbers."""
    path = write_stream(tmp_path / "a.arrow", table_of(columns()))
    whole = path.read_bytes()
    for cut in range(8, len(whole), 8):
        path.write_bytes(whole[:cut])
        with pytest.raises(ImportRefused):
            read(path)
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(whole)
        broken[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(broken)
        try:
            read(path)
        except (ImportRefused, MemoryError):
            continue


def test_through_the_service(importing: Any, tmp_path: Path) -> None:
    """In the sandbox; the zip is recognised as a folder of Arrow files."""
    save(tmp_path / "saved", table_of(columns()))
    packed = tmp_path / "folder.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for file in sorted((tmp_path / "saved").iterdir()):
            archive.write(file, f"saved/{file.name}")
    job = importing.run(packed, "saved", format="zip")
    assert job.state == "succeeded", job
    assert (job.result["trajectories"], job.result["steps"]) == (3, ROWS)
