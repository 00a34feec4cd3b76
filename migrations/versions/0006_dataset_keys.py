"""Keys of datasets are counted, never reused: SQLite gives a deleted row's key to the next one."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "INSERT INTO counters (name, value) SELECT 'dataset', coalesce(max(pk), 0) FROM datasets"
    )


def downgrade() -> None:
    op.execute("DELETE FROM counters WHERE name = 'dataset'")
