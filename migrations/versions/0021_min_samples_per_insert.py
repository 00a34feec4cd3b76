"""Consumers may have a second, lower ratio, below which collectors wait."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from server.index import row_checksums

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add consumers.min_samples_per_insert and min_base: null where there is one ratio."""
    op.add_column("consumers", sa.Column("min_samples_per_insert", sa.Float()))
    op.add_column("consumers", sa.Column("min_base", sa.Float()))
    connection = op.get_bind().connection.driver_connection
    assert connection is not None
    row_checksums.protect_rows(connection, ["consumers"])
