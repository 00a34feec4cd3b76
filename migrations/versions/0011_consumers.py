"""Consumers of datasets: the ratio of samples to inserted steps that each keeps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add datasets.inserted_steps, from the steps that are stored now, and the table consumers."""
    column = sa.Column("inserted_steps", sa.BigInteger(), nullable=False, server_default="0")
    op.add_column("datasets", column)
    op.execute(
        "UPDATE datasets SET inserted_steps = coalesce((SELECT sum(steps) FROM partition_stats"
        " WHERE dataset_pk = datasets.pk AND bucket <> 'eval'), 0)"
    )
    op.create_table(
        "consumers",
        sa.Column("dataset_pk", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("samples_per_insert", sa.Float(), nullable=False),
        sa.Column("buffer", sa.Float(), nullable=False),
        sa.Column("min_size", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("base", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.Column("updated_uptime", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_pk"], ["datasets.pk"], name="fk_consumers_dataset_pk_datasets"
        ),
        sa.PrimaryKeyConstraint("dataset_pk", "name", name="pk_consumers"),
    )
