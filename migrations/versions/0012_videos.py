"""Videos of evaluated episodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table videos."""
    op.create_table(
        "videos",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("evaluation_pk", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("return", sa.Float(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("media_type", sa.String(16), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("file", sa.String(128), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("verified_at", sa.Float()),
        sa.Column("checksums", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["evaluation_pk"], ["evaluations.pk"], name="fk_videos_evaluation_pk_evaluations"
        ),
        sa.PrimaryKeyConstraint("pk", name="pk_videos"),
        sa.UniqueConstraint("evaluation_pk", "seed", name="uq_videos_evaluation_pk_seed"),
    )
