"""Annotations: a critic's values of steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables annotations and annotated."""
    op.create_table(
        "annotations",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("dataset_pk", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("trajectories", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("file", sa.String(128), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("verified_at", sa.Float()),
        sa.Column("checksums", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_pk"], ["datasets.pk"], name="fk_annotations_dataset_pk_datasets"
        ),
        sa.PrimaryKeyConstraint("pk", name="pk_annotations"),
    )
    op.create_index("ix_annotations_dataset_pk", "annotations", ["dataset_pk", "name"])
    op.create_table(
        "annotated",
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("trajectory", sa.String(36), nullable=False),
        sa.Column("annotation_pk", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["annotation_pk"], ["annotations.pk"], name="fk_annotated_annotation_pk_annotations"
        ),
        sa.PrimaryKeyConstraint("name", "trajectory", name="pk_annotated"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_annotated_annotation_pk", "annotated", ["annotation_pk"])
