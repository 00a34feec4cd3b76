"""Titles of runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add runs.title."""
    op.add_column("runs", sa.Column("title", sa.String(200)))
