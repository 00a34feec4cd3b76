"""Names of a table's columns. `python -m stepwell.table_columns FILE` prints those of a Parquet or
Arrow file, of the first one in a zip, or of the arrays in an npz or HDF5, as JSON: in a process of
its own, with little memory, because a file from elsewhere is not trusted."""

from __future__ import annotations

import json
import sys
import zipfile
from typing import Any, BinaryIO

import pyarrow as pa

MAX_DIMENSIONS = 4
MEMORY, SECONDS = 2 << 30, 10
"""Limits of the process."""
MOST = 4096
ARROW = (b"ARROW1", b"\xff\xff\xff\xff")
"""How a file and a stream of Arrow begin."""
HDF5 = b"\x89HDF"


def flattened(name: str, type_: pa.DataType, level: int = 0) -> list[tuple[str, pa.DataType]]:
    """Fields of structs as columns of their own, with dotted names."""
    if not pa.types.is_struct(type_) or is_image(type_) or level == MAX_DIMENSIONS:
        return [(name, type_)]
    fields = [type_.field(i) for i in range(type_.num_fields)]
    return [one for f in fields for one in flattened(f"{name}.{f.name}", f.type, level + 1)]


def is_image(type_: pa.DataType) -> bool:
    """Whether it is a struct with the bytes of an image, as Hugging Face has them."""
    if not pa.types.is_struct(type_):
        return False
    names = {type_.field(i).name for i in range(type_.num_fields)}
    return "bytes" in names and names <= {"bytes", "path"}


def columns_of(path: str) -> list[str]:
    """Raises what zipfile, pyarrow and h5py raise; ImportError for an HDF5 file without h5py."""
    with open(path, "rb") as file:
        if file.read(len(HDF5)) == HDF5:
            return _arrays(path)
        if not zipfile.is_zipfile(file):
            file.seek(0)
            return _columns(file)
        with zipfile.ZipFile(file) as archive:
            names = sorted(archive.namelist())
            tables = [n for n in names if n.endswith(".parquet")]
            tables = tables or [n for n in names if n.endswith(".arrow")]
            if not tables:
                return [n.removesuffix(".npy") for n in names if n.endswith(".npy")][:MOST]
            with archive.open(tables[0]) as member:
                return _columns(member)  # type: ignore[arg-type]


def _arrays(path: str) -> list[str]:
    import h5py

    found: list[str] = []

    def visit(name: str, item: Any) -> bool | None:
        # The importer reads `metadata/…` by itself.
        if isinstance(item, h5py.Dataset) and not name.startswith("metadata/"):
            found.append(name)
        return len(found) == MOST or None  # anything but None ends it

    with h5py.File(path, "r") as file:
        file.visititems(visit)  # follows no link out of the file
    return found


def _columns(file: BinaryIO) -> list[str]:
    # Imported here: the service, which imports this module, reads tables in another process.
    import pyarrow.ipc
    import pyarrow.parquet

    start = file.read(6)
    file.seek(0)
    if start.startswith(ARROW[0]):
        schema = pa.ipc.open_file(pa.PythonFile(file, mode="r")).schema
    elif start.startswith(ARROW[1]):
        schema = pa.ipc.open_stream(pa.PythonFile(file, mode="r")).schema
    else:
        schema = pyarrow.parquet.ParquetFile(pa.PythonFile(file, mode="r")).schema_arrow
    return [name for field in schema for name, _ in flattened(field.name, field.type)][:MOST]


def _confine() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


if __name__ == "__main__":
    _confine()
    print(json.dumps(columns_of(sys.argv[1])))
