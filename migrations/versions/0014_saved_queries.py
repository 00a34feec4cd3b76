"""Saved queries: SQL under a name, with the values of its parameters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table saved_queries."""
    op.create_table(
        "saved_queries",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("sql", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.Column("dataset", sa.String(64)),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("pk", name="pk_saved_queries"),
        sa.UniqueConstraint("name", name="uq_saved_queries_name"),
    )
