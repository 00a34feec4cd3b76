"""Marks that tell an index from an older one, and the files that are to be deleted."""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the counters serial and store, and the table deleted_files."""
    op.create_table(
        "deleted_files",
        sa.Column("folder", sa.String(32), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("folder", "name", name="pk_deleted_files"),
    )
    counters = sa.table("counters", sa.column("name"), sa.column("value"))
    op.bulk_insert(
        counters,
        [{"name": "serial", "value": 0}, {"name": "store", "value": secrets.randbits(62)}],
    )
