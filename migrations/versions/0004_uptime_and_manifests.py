"""Leases, graces and tombstones count the service's uptime; manifests are kept as changes.

What was dated by the wall clock begins anew: nothing is kept shorter than was promised.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

RENAMED = {
    "leases": ("expires_at", "expires_uptime"),
    "shards": ("retired_at", "retired_uptime"),
    "tombstones": ("evicted_at", "evicted_uptime"),
}


def upgrade() -> None:
    op.execute("INSERT INTO counters (name, value) VALUES ('uptime', 0)")
    for table, (old, new) in RENAMED.items():
        op.execute(f"DROP INDEX IF EXISTS ix_{table}_{old}")
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")
    op.create_index("ix_leases_expires_uptime", "leases", ["expires_uptime"])
    op.create_index("ix_tombstones_evicted_uptime", "tombstones", ["evicted_uptime"])
    left = "expires_uptime - strftime('%s', 'now')"
    op.execute(f"UPDATE leases SET expires_uptime = min(86400.0, max(120.0, {left}))")
    op.execute("UPDATE shards SET retired_uptime = 0 WHERE retired_uptime IS NOT NULL")
    op.execute("UPDATE tombstones SET evicted_uptime = 0")
    for column in (
        sa.Column("created_uptime", sa.Float, nullable=False, server_default="0"),
        sa.Column("base_pk", sa.Integer),
        sa.Column("depth", sa.Integer, nullable=False, server_default="0"),
        sa.Column("delta_rows", sa.BigInteger, nullable=False, server_default="0"),
    ):
        op.add_column("snapshots", column)
    op.create_index("ix_snapshots_base_pk", "snapshots", ["base_pk"])


def downgrade() -> None:
    op.drop_index("ix_snapshots_base_pk", table_name="snapshots")
    # An older service cannot read a manifest kept as changes, so it must not know of it.
    op.execute("DELETE FROM leases WHERE snapshot_pk IN (SELECT pk FROM snapshots)")
    op.execute("DELETE FROM snapshot_shards")
    op.execute("DELETE FROM snapshots")
    for name in ("delta_rows", "depth", "base_pk", "created_uptime"):
        op.drop_column("snapshots", name)
    for table, (old, new) in RENAMED.items():
        op.execute(f"DROP INDEX IF EXISTS ix_{table}_{new}")
        op.execute(f"UPDATE {table} SET {new} = strftime('%s', 'now') WHERE {new} IS NOT NULL")
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {new} TO {old}")
    op.create_index("ix_leases_expires_at", "leases", ["expires_at"])
    op.create_index("ix_tombstones_evicted_at", "tombstones", ["evicted_at"])
    op.execute("DELETE FROM counters WHERE name = 'uptime'")
