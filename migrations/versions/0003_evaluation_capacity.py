"""What eviction walks among evaluation episodes, which have the capacity of fifo for themselves."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

NAME = "ix_trajectories_eval"
WHERE = sa.text("purpose = 'eval' AND state <> 'evicted'")


def upgrade() -> None:
    columns = ["dataset_pk", "partition", "seq"]
    op.create_index(NAME, "trajectories", columns, unique=False, sqlite_where=WHERE)


def downgrade() -> None:
    op.drop_index(NAME, table_name="trajectories", sqlite_where=WHERE)
