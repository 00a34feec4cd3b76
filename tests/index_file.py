"""Write to an index behind the service's back, as no operator does: rows keep their checksums."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from server.index import row_checksums


@contextmanager
def write_index(path: Path, *, timeout: float = 5.0) -> Iterator[sqlite3.Connection]:
    """A transaction; the schema is sealed again at its end."""
    connection = sqlite3.connect(path, timeout=timeout)
    row_checksums.register(connection)
    try:
        yield connection
        row_checksums.seal_schema(connection)
        connection.commit()
    finally:
        connection.close()


def damage_rows(path: Path, *statements: str) -> None:
    """Change rows as a disk does: their checksums are then wrong."""
    with closing(sqlite3.connect(path)) as connection:
        connection.create_function("row_crc", -1, lambda *_: 0, deterministic=True)
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def change_bytes(path: Path, before: bytes, after: bytes, *, which: int) -> None:
    """Write `after` over one of the places in the file that hold `before`."""
    content, place = path.read_bytes(), -1
    for _ in range(which + 1):
        place = content.index(before, place + 1)
    path.write_bytes(content[:place] + after + content[place + len(after) :])
