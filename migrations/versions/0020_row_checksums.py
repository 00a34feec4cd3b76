"""Every row carries a checksum; the rows that were lost to damage have a table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from server.index import row_checksums

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table lost_rows, and the column crc to all tables."""
    op.create_table(
        "lost_rows",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("table_name", sa.String(64), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("dataset", sa.Text(), nullable=False),
        sa.Column("found_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("pk", name="pk_lost_rows"),
    )
    connection = op.get_bind().connection.driver_connection
    assert connection is not None
    row_checksums.protect_rows(connection, row_checksums.tables(connection))
