"""Write to an index behind the service's back, as no operator does: rows keep their checksums."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
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
