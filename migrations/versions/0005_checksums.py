"""Checksums of the blocks of stored files, and when each file was last verified as a whole."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# The large ones last: SQLite reads past a column to reach the next.
COLUMNS: dict[str, list[sa.Column[object]]] = {
    "shards": [sa.Column("verified_at", sa.Float()), sa.Column("checksums", sa.LargeBinary())],
    "policies": [sa.Column("verified_at", sa.Float()), sa.Column("checksums", sa.LargeBinary())],
    "snapshots": [
        sa.Column("excluded", sa.Text(), nullable=False, server_default="[]"),
        sa.Column("checksums", sa.LargeBinary()),
    ],
}


def upgrade() -> None:
    # Plain ADD COLUMN: a batch operation would rebuild the table and lose its triggers.
    for table, columns in COLUMNS.items():
        for column in columns:
            op.add_column(table, column)


def downgrade() -> None:
    for table, columns in COLUMNS.items():
        for column in columns:
            op.drop_column(table, column.name)
