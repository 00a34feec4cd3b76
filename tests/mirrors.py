"""What a mirror says, to compare one that goes on from a base with one that reads everything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from server.index.mirror import Mirror
from server.index.mirror_base import KEPT
from server.storage.checksums import Source


def content(mirror: Mirror) -> dict[str, list[Any]]:
    """All rows of the tables that a base keeps, and the locations, through the checksums."""
    state, root = mirror.state(), mirror._directory.parent
    found: dict[str, list[Any]] = {}
    for name in KEPT:
        rows = []
        for file in state.tables[name]:
            source = Source(root / file, checksums=state.checksums[file])
            rows += pq.read_table(pa.BufferReader(source.read())).to_pylist()
        found[name] = sorted(rows, key=repr)
    found["locations"] = []
    for file in state.locations.values():
        found["locations"] += mirror.read_locations(state, file).to_pylist()
    return found


@contextlib.contextmanager
def fresh(index: Path, directory: Path) -> Iterator[Mirror]:
    """A mirror without a base."""
    mirror = Mirror(index, directory)
    try:
        yield mirror
    finally:
        mirror.close()
