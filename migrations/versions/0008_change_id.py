"""The stamp of a trajectory's latest change is called `change_id` (it was `mark`)."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TABLES = ("trajectories", "tombstones")


def upgrade() -> None:
    _rename("mark", "change_id")


def downgrade() -> None:
    _rename("change_id", "mark")


def _rename(old: str, new: str) -> None:
    for table in TABLES:
        op.drop_index(f"ix_{table}_{old}", table_name=table)
        # Plain RENAME COLUMN: a batch operation would rebuild the table and lose its triggers.
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")
        op.create_index(f"ix_{table}_{new}", table, [new])
    op.execute(f"UPDATE counters SET name = '{new}' WHERE name = '{old}'")
