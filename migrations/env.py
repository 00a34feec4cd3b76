"""Alembic's entry: migrates the SQLite file that `server.index.db.upgrade` names.

Run by hand (`alembic revision --autogenerate`), it compares with the index in STEPWELL_DATA.
"""

from __future__ import annotations

import os
from pathlib import Path

from alembic import context

from server.index import row_checksums
from server.index.dialect import connect, raw_of
from server.index.tables import metadata


def main() -> None:
    path = context.config.attributes.get("path")
    if path is None:
        path = Path(os.environ.get("STEPWELL_DATA", ".")) / "index.sqlite"
    engine = connect(path)
    try:
        with engine.connect().execution_options(stepwell_write=True) as connection:
            context.configure(
                connection=connection, target_metadata=metadata, transactional_ddl=True
            )
            # One transaction for all steps: a failed migration leaves the file at its old revision.
            with context.begin_transaction():
                context.run_migrations()
                row_checksums.seal_schema(raw_of(connection))
            connection.commit()
    finally:
        engine.dispose()


main()
