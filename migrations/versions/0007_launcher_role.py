"""The workers that start launches have the role launcher; "agent" means the learning agent."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("UPDATE workers SET role = 'launcher' WHERE role = 'agent'")


def downgrade() -> None:
    op.execute("UPDATE workers SET role = 'agent' WHERE role = 'launcher'")
