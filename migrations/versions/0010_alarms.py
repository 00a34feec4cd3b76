"""Alarms of runs: what the health checks of a trainer have found (trainer/health.py)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add runs.alarms; existing runs have none."""
    op.add_column("runs", sa.Column("alarms", sa.JSON(), nullable=False, server_default="[]"))
