"""Guards for the files behind what is alive, and indexes for lists and compaction."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TRIGGERS = {
    "protected_replace": """
        CREATE TRIGGER protected_replace BEFORE INSERT ON trajectories
        WHEN EXISTS (SELECT 1 FROM trajectories WHERE id = NEW.id AND partition = 'protected')
            OR EXISTS (SELECT 1 FROM trajectories WHERE pk = NEW.pk AND partition = 'protected')
            OR EXISTS (SELECT 1 FROM trajectories
                WHERE dataset_pk = NEW.dataset_pk AND seq = NEW.seq AND partition = 'protected')
        BEGIN SELECT RAISE(ABORT, 'protected trajectories are never replaced'); END
    """,
    "living_shard": """
        CREATE TRIGGER living_shard BEFORE UPDATE OF state ON shards
        WHEN NEW.state IN ('retired', 'deleting', 'deleted') AND EXISTS (
            SELECT 1 FROM trajectories WHERE shard_pk = OLD.pk AND state <> 'evicted')
        BEGIN SELECT RAISE(ABORT, 'a shard that living trajectories need is never given up'); END
    """,
    "living_segment": """
        CREATE TRIGGER living_segment BEFORE UPDATE OF state ON segments
        WHEN NEW.state = 'consumed' AND EXISTS (
            SELECT 1 FROM trajectories WHERE segment_pk = OLD.pk AND state <> 'evicted')
        BEGIN SELECT RAISE(ABORT, 'a segment that living trajectories need is never given up'); END
    """,
}
ALIVE = sa.text("state <> 'evicted'")
INDEXES = (
    ("ix_trajectories_length", ["dataset_pk", "length", "seq"], ALIVE),
    ("ix_trajectories_created_at", ["dataset_pk", "created_at", "seq"], ALIVE),
    ("ix_trajectories_dead", ["shard_pk", "length"], sa.text("state = 'evicted'")),
)


def upgrade() -> None:
    for name, columns, where in INDEXES:
        op.create_index(name, "trajectories", columns, unique=False, sqlite_where=where)
    for trigger in TRIGGERS.values():
        op.execute(trigger)


def downgrade() -> None:
    for name in TRIGGERS:
        op.execute(f"DROP TRIGGER {name}")
    for name, _, where in INDEXES:
        op.drop_index(name, table_name="trajectories", sqlite_where=where)
