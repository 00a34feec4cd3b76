"""Versions of datasets: named, immutable selections of trajectories."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

TRIGGERS = (
    """
        CREATE TRIGGER version_update BEFORE UPDATE OF partition, digest ON trajectories
        WHEN (NEW.partition <> 'protected' OR NEW.digest <> OLD.digest) AND EXISTS (
            SELECT 1 FROM version_trajectories WHERE trajectory_pk = OLD.pk)
        BEGIN SELECT RAISE(ABORT, 'trajectories of a version stay as they are'); END
    """,
    """
        CREATE TRIGGER version_insert BEFORE INSERT ON version_trajectories
        WHEN NOT EXISTS (SELECT 1 FROM trajectories
            WHERE pk = NEW.trajectory_pk AND partition = 'protected' AND state <> 'evicted')
        BEGIN SELECT RAISE(ABORT, 'trajectories of a version are protected'); END
    """,
)


def upgrade() -> None:
    """Add the tables versions and version_trajectories, and the triggers that guard them."""
    op.create_table(
        "versions",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("dataset_pk", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("parent", sa.String(64)),
        sa.Column("condition", sa.Text(), nullable=False),
        sa.Column("include_eval", sa.Boolean(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("licence", sa.Text(), nullable=False),
        sa.Column("statistics", sa.JSON(), nullable=False),
        sa.Column("missing", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("file", sa.String(128), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("verified_at", sa.Float()),
        sa.Column("checksums", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_pk"], ["datasets.pk"], name="fk_versions_dataset_pk_datasets"
        ),
        sa.PrimaryKeyConstraint("pk", name="pk_versions"),
        sa.UniqueConstraint("dataset_pk", "name", name="uq_versions_dataset_pk_name"),
    )
    op.create_table(
        "version_trajectories",
        sa.Column("version_pk", sa.Integer(), nullable=False),
        sa.Column("trajectory_pk", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version_pk"], ["versions.pk"], name="fk_version_trajectories_version_pk_versions"
        ),
        sa.ForeignKeyConstraint(
            ["trajectory_pk"],
            ["trajectories.pk"],
            name="fk_version_trajectories_trajectory_pk_trajectories",
        ),
        sa.PrimaryKeyConstraint("version_pk", "trajectory_pk", name="pk_version_trajectories"),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_version_trajectories_trajectory_pk", "version_trajectories", ["trajectory_pk"]
    )
    for trigger in TRIGGERS:
        op.execute(trigger)
