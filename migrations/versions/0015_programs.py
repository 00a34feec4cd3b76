"""What a launcher can be asked to start, and the end of a launch's output."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table programs, and launches.log."""
    op.create_table(
        "programs",
        sa.Column("worker_id", sa.String(128), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("worker_id", "role", name="pk_programs"),
    )
    op.add_column("launches", sa.Column("log", sa.Text(), nullable=False, server_default=""))
