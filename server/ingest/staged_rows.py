"""The rows of a bulk insert until its transaction, in a file: there may be millions of them.

    one block per shard    length u32 | JSON list of rows (index_rows.py:row_of, with locations)

Temporary: in DIR/tmp, which every start empties.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

_LENGTH = struct.Struct("<I")


class StagedRows:
    """Add blocks, then read them back, any number of times. Not thread-safe."""

    def __init__(self, path: Path):
        self._path = path

    def add(self, rows: list[dict[str, Any]]) -> None:
        block = orjson.dumps(rows)
        with open(self._path, "ab") as file:
            file.write(_LENGTH.pack(len(block)))
            file.write(block)

    def blocks(self) -> Iterator[list[dict[str, Any]]]:
        if self._path.exists():
            with open(self._path, "rb") as file:
                while head := file.read(_LENGTH.size):
                    yield orjson.loads(file.read(_LENGTH.unpack(head)[0]))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
