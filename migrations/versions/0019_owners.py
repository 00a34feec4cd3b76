"""Who made what: owners of rows, quotas of tokens, rows of the audit log that count."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

OWNED = ("runs", "evaluations", "workers", "jobs", "launches")


def upgrade() -> None:
    """Add owners, quotas and counts; what is there already has no owner."""
    for table in OWNED:
        op.add_column(table, sa.Column("owner", sa.Text(), nullable=False, server_default=""))
    op.add_column("launches", sa.Column("claimer", sa.Text(), nullable=False, server_default=""))
    op.add_column("datasets", sa.Column("created_by", sa.Text(), nullable=False, server_default=""))
    op.add_column("tokens", sa.Column("bytes_per_day", sa.BigInteger()))
    op.add_column("tokens", sa.Column("requests_per_minute", sa.BigInteger()))
    op.add_column("tokens", sa.Column("bytes_used", sa.Float(), nullable=False, server_default="0"))
    op.add_column("tokens", sa.Column("bytes_used_at", sa.Float()))
    op.add_column("audit", sa.Column("count", sa.BigInteger(), nullable=False, server_default="1"))
    op.add_column("audit", sa.Column("until", sa.Float()))
    op.drop_index("ix_audit_action_subject", "audit")
    op.create_index("ix_audit_action_subject_who", "audit", ["action", "subject", "who"])
