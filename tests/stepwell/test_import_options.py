"""One table of options: for the command, the route and the dashboard."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import pyarrow as pa
import pyarrow.parquet
import pytest

from server.imports.column_map import USUAL
from server.routes import imports
from stepwell import import_options, messages
from stepwell.table_columns import columns_of
from workbench.commands import imports as command

GENERAL = {
    "service",
    "access",
    "request",
    "response",
    "wait",
    "name",
    "format",
    "partition",
    "create",
    "env",
    "columns",
}


def test_the_route_has_these_options_and_no_others() -> None:
    assert set(inspect.signature(imports.upload).parameters) - GENERAL == set(
        import_options.OPTIONS
    )
    assert {*import_options.FORMATS, "zip"} == set(messages.FORMATS)


def test_roles_of_columns_are_those_of_the_importer() -> None:
    roles = (*import_options.ARRAY_ROLES, *import_options.COLUMN_ROLES)
    assert sorted(roles) == sorted(USUAL)


def test_the_command_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = capsys.readouterr().out
    for name in import_options.OPTIONS:
        assert f"{name.replace('_', '-')}=" in "".join(shown.split()), name


@pytest.fixture
def table() -> pa.Table:
    pose = pa.array([{"x": 1.0, "deep": {"y": 2}}])
    image = pa.array([{"bytes": b"", "path": ""}])
    return pa.table({"pose": pose, "view": image, "r": [1.0]})


def test_columns_of_files(tmp_path: Path, table: pa.Table) -> None:
    expected = ["pose.x", "pose.deep.y", "view", "r"]
    paths = [tmp_path / name for name in ("a.parquet", "a.arrow", "b.arrow", "c.zip")]
    pyarrow.parquet.write_table(table, paths[0])
    with pa.ipc.new_file(paths[1], table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_stream(paths[2], table.schema) as writer:
        writer.write_table(table)
    with zipfile.ZipFile(paths[3], "w") as archive:
        archive.writestr("README.md", "plays")
        archive.write(paths[0], "data/train-00000-of-00001.parquet")
    assert [columns_of(str(path)) for path in paths] == [expected] * 4
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file.create_dataset("obs/pos", data=[1.0])
        file.create_dataset("rewards", data=[1.0])
        file.create_dataset("metadata/ends", data=[1])
        file["elsewhere"] = h5py.ExternalLink("b.hdf5", "/x")
    assert columns_of(str(tmp_path / "a.hdf5")) == ["obs/pos", "rewards"]
    line = [sys.executable, "-m", "stepwell.table_columns", str(paths[0])]
    assert json.loads(subprocess.run(line, capture_output=True, check=True).stdout) == expected
