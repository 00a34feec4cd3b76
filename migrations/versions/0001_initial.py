"""The whole schema of version 1; tables.py explains every column."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# A copy, as everything in a migration: what tables.py says tomorrow must not change what 0001 did.
TRIGGERS = (
    """
        CREATE TRIGGER protected_update BEFORE UPDATE ON trajectories
        WHEN OLD.partition = 'protected' AND (
            NEW.state = 'evicted'
            OR (NEW.partition <> 'protected' AND NOT EXISTS (
                SELECT 1 FROM audit WHERE action = 'demote' AND subject = OLD.id)))
        BEGIN SELECT RAISE(ABORT, 'protected trajectories are never evicted'); END
    """,
    """
        CREATE TRIGGER protected_delete BEFORE DELETE ON trajectories
        WHEN OLD.partition = 'protected'
        BEGIN SELECT RAISE(ABORT, 'protected trajectories are never deleted'); END
    """,
)


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), server_default="{}", nullable=False),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_audit")),
    )
    op.create_index("ix_audit_action_subject", "audit", ["action", "subject"], unique=False)
    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_counters")),
    )
    op.create_table(
        "datasets",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("spec_digest", sa.String(length=64), nullable=False),
        sa.Column("capacity_trajectories", sa.BigInteger(), nullable=True),
        sa.Column("capacity_steps", sa.BigInteger(), nullable=True),
        sa.Column("capacity_bytes", sa.BigInteger(), nullable=True),
        sa.Column("description", sa.Text(), server_default="", nullable=False),
        sa.Column("tags", sa.Text(), server_default="[]", nullable=False),
        sa.Column("next_seq", sa.BigInteger(), server_default="1", nullable=False),
        sa.Column("evicted", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("last_ingest_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_datasets")),
        sa.UniqueConstraint("name", name=op.f("uq_datasets_name")),
    )
    op.create_table(
        "evaluations",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("run", sa.String(length=128), nullable=True),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("env", sa.Text(), nullable=False),
        sa.Column("seeds", sa.Text(), nullable=False),
        sa.Column("returns", sa.Text(), nullable=False),
        sa.Column("lengths", sa.Text(), server_default="[]", nullable=False),
        sa.Column("episodes", sa.BigInteger(), nullable=False),
        sa.Column("dataset", sa.String(length=64), nullable=True),
        sa.Column("mean", sa.Float(), nullable=False),
        sa.Column("iqm", sa.Float(), nullable=False),
        sa.Column("ci_low", sa.Float(), nullable=False),
        sa.Column("ci_high", sa.Float(), nullable=False),
        sa.Column("confidence", sa.Float(), nullable=False),
        sa.Column("normalised", sa.Float(), nullable=True),
        sa.Column("details", sa.Text(), server_default="{}", nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_evaluations")),
        sa.UniqueConstraint("id", name=op.f("uq_evaluations_id")),
    )
    op.create_index(op.f("ix_evaluations_env"), "evaluations", ["env"], unique=False)
    op.create_index(op.f("ix_evaluations_policy"), "evaluations", ["policy"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("progress", sa.Float(), server_default="0", nullable=False),
        sa.Column("message", sa.Text(), server_default="", nullable=False),
        sa.Column("payload", sa.Text(), server_default="{}", nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
    )
    op.create_index(op.f("ix_jobs_state"), "jobs", ["state"], unique=False)
    op.create_table(
        "launches",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("recipe", sa.Text(), server_default="", nullable=False),
        sa.Column("args", sa.Text(), server_default="{}", nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("claimed_by", sa.Text(), server_default="", nullable=False),
        sa.Column("claimed_at", sa.Float(), nullable=True),
        sa.Column("error", sa.Text(), server_default="", nullable=False),
        sa.Column("run", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_launches")),
        sa.UniqueConstraint("id", name=op.f("uq_launches_id")),
    )
    op.create_index(op.f("ix_launches_state"), "launches", ["state"], unique=False)
    op.create_table(
        "runs",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("config", sa.Text(), server_default="{}", nullable=False),
        sa.Column("parent", sa.String(length=128), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("git_commit", sa.Text(), server_default="", nullable=False),
        sa.Column("host", sa.Text(), server_default="", nullable=False),
        sa.Column("snapshots", sa.Text(), server_default="[]", nullable=False),
        sa.Column("tags", sa.Text(), server_default="[]", nullable=False),
        sa.Column("notes", sa.Text(), server_default="", nullable=False),
        sa.Column("command", sa.Text(), server_default="", nullable=False),
        sa.Column("error", sa.Text(), server_default="", nullable=False),
        sa.Column("log", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("heartbeat_at", sa.Float(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_runs")),
        sa.UniqueConstraint("name", name=op.f("uq_runs_name")),
    )
    op.create_table(
        "segments",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.CheckConstraint(
            "state IN ('open', 'consumed', 'damaged')", name=op.f("ck_segments_state")
        ),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_segments")),
        sa.UniqueConstraint("name", name=op.f("uq_segments_name")),
    )
    op.create_table(
        "snapshots",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("selection", sa.Text(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("datasets", sa.Text(), nullable=False),
        sa.Column("file", sa.String(length=128), nullable=False),
        sa.Column("trajectories", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("shards", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("added", sa.BigInteger(), nullable=True),
        sa.Column("removed", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_snapshots")),
        sa.UniqueConstraint("id", name=op.f("uq_snapshots_id")),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=True),
        sa.Column("last_used_at", sa.Float(), nullable=True),
        sa.Column("revoked_at", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("run", sa.String(length=128), nullable=True),
        sa.Column("host", sa.Text(), server_default="", nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("policy", sa.Text(), server_default="", nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("counters", sa.Text(), server_default="{}", nullable=False),
        sa.Column("last_error", sa.Text(), server_default="", nullable=False),
        sa.Column("command", sa.String(length=16), server_default="none", nullable=False),
        sa.Column("command_at", sa.Float(), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("heartbeat_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "leases",
        sa.Column("snapshot_pk", sa.Integer(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["snapshot_pk"], ["snapshots.pk"], name=op.f("fk_leases_snapshot_pk")
        ),
        sa.PrimaryKeyConstraint("snapshot_pk", "holder", name=op.f("pk_leases")),
    )
    op.create_index(op.f("ix_leases_expires_at"), "leases", ["expires_at"], unique=False)
    op.create_table(
        "metrics",
        sa.Column("run_pk", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["run_pk"], ["runs.pk"], name=op.f("fk_metrics_run_pk")),
        sa.PrimaryKeyConstraint("run_pk", "key", "step", name=op.f("pk_metrics")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "partition_stats",
        sa.Column("dataset_pk", sa.Integer(), nullable=False),
        sa.Column("bucket", sa.String(length=16), nullable=False),
        sa.Column("trajectories", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("steps", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("return_sum", sa.Float(), server_default="0", nullable=False),
        sa.CheckConstraint(
            "bucket IN ('fifo', 'protected', 'eval')", name=op.f("ck_partition_stats_bucket")
        ),
        sa.ForeignKeyConstraint(
            ["dataset_pk"], ["datasets.pk"], name=op.f("fk_partition_stats_dataset_pk")
        ),
        sa.PrimaryKeyConstraint("dataset_pk", "bucket", name=op.f("pk_partition_stats")),
    )
    op.create_table(
        "policies",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("run_pk", sa.Integer(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("file", sa.String(length=128), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("metadata", sa.Text(), server_default="{}", nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run_pk"], ["runs.pk"], name=op.f("fk_policies_run_pk")),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_policies")),
        sa.UniqueConstraint("run_pk", "version", name=op.f("uq_policies_run_pk_version")),
    )
    op.create_table(
        "shards",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("dataset_pk", sa.Integer(), nullable=True),
        sa.Column("partition", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("trajectories", sa.BigInteger(), nullable=False),
        sa.Column("seq_min", sa.BigInteger(), nullable=False),
        sa.Column("seq_max", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("retired_at", sa.Float(), nullable=True),
        sa.CheckConstraint("partition IN ('fifo', 'protected')", name=op.f("ck_shards_partition")),
        sa.CheckConstraint(
            "state IN ('live', 'retired', 'deleting', 'deleted', 'quarantined')",
            name=op.f("ck_shards_state"),
        ),
        sa.ForeignKeyConstraint(["dataset_pk"], ["datasets.pk"], name=op.f("fk_shards_dataset_pk")),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_shards")),
        sa.UniqueConstraint("id", name=op.f("uq_shards_id")),
    )
    op.create_index(op.f("ix_shards_dataset_pk"), "shards", ["dataset_pk"], unique=False)
    op.create_index(op.f("ix_shards_state"), "shards", ["state"], unique=False)
    op.create_table(
        "tombstones",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("dataset_pk", sa.Integer(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("evicted_at", sa.Float(), nullable=False),
        sa.Column("mark", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["dataset_pk"], ["datasets.pk"], name=op.f("fk_tombstones_dataset_pk")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tombstones")),
    )
    op.create_index(op.f("ix_tombstones_dataset_pk"), "tombstones", ["dataset_pk"], unique=False)
    op.create_index(op.f("ix_tombstones_evicted_at"), "tombstones", ["evicted_at"], unique=False)
    op.create_index(op.f("ix_tombstones_mark"), "tombstones", ["mark"], unique=False)
    op.create_table(
        "policy_aliases",
        sa.Column("run_pk", sa.Integer(), nullable=False),
        sa.Column("alias", sa.String(length=64), nullable=False),
        sa.Column("policy_pk", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["policy_pk"], ["policies.pk"], name=op.f("fk_policy_aliases_policy_pk")
        ),
        sa.ForeignKeyConstraint(["run_pk"], ["runs.pk"], name=op.f("fk_policy_aliases_run_pk")),
        sa.PrimaryKeyConstraint("run_pk", "alias", name=op.f("pk_policy_aliases")),
    )
    op.create_table(
        "snapshot_shards",
        sa.Column("snapshot_pk", sa.Integer(), nullable=False),
        sa.Column("shard_pk", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["shard_pk"], ["shards.pk"], name=op.f("fk_snapshot_shards_shard_pk")
        ),
        sa.ForeignKeyConstraint(
            ["snapshot_pk"], ["snapshots.pk"], name=op.f("fk_snapshot_shards_snapshot_pk")
        ),
        sa.PrimaryKeyConstraint("snapshot_pk", "shard_pk", name=op.f("pk_snapshot_shards")),
    )
    op.create_index(
        op.f("ix_snapshot_shards_shard_pk"), "snapshot_shards", ["shard_pk"], unique=False
    )
    op.create_table(
        "trajectories",
        sa.Column("pk", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("dataset_pk", sa.Integer(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("partition", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("env", sa.Text(), nullable=False),
        sa.Column("length", sa.BigInteger(), nullable=False),
        sa.Column("return", sa.Float(), nullable=False),
        sa.Column("terminated", sa.Boolean(), nullable=False),
        sa.Column("truncated", sa.Boolean(), nullable=False),
        sa.Column("final_obs_valid", sa.Boolean(), nullable=False),
        sa.Column("success", sa.Boolean(), nullable=True),
        sa.Column("purpose", sa.String(length=8), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("collector", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("episode_id", sa.Text(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("tags", sa.Text(), server_default="[]", nullable=False),
        sa.Column("flags", sa.Text(), server_default="[]", nullable=False),
        sa.Column("notes", sa.Text(), server_default="", nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("metrics", sa.Text(), server_default="{}", nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("segment_pk", sa.Integer(), nullable=True),
        sa.Column("segment_offset", sa.BigInteger(), nullable=True),
        sa.Column("shard_pk", sa.Integer(), nullable=True),
        sa.Column("traj_idx", sa.Integer(), nullable=True),
        sa.Column("row_start", sa.BigInteger(), nullable=True),
        sa.Column("evicted_at", sa.Float(), nullable=True),
        sa.Column("mark", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "partition IN ('fifo', 'protected')", name=op.f("ck_trajectories_partition")
        ),
        sa.CheckConstraint("purpose IN ('train', 'eval')", name=op.f("ck_trajectories_purpose")),
        sa.CheckConstraint(
            "state IN ('spooled', 'sealed', 'evicted')", name=op.f("ck_trajectories_state")
        ),
        sa.ForeignKeyConstraint(
            ["dataset_pk"], ["datasets.pk"], name=op.f("fk_trajectories_dataset_pk")
        ),
        sa.ForeignKeyConstraint(
            ["segment_pk"], ["segments.pk"], name=op.f("fk_trajectories_segment_pk")
        ),
        sa.ForeignKeyConstraint(["shard_pk"], ["shards.pk"], name=op.f("fk_trajectories_shard_pk")),
        sa.PrimaryKeyConstraint("pk", name=op.f("pk_trajectories")),
        sa.UniqueConstraint("dataset_pk", "seq", name=op.f("uq_trajectories_dataset_pk_seq")),
        sa.UniqueConstraint("id", name=op.f("uq_trajectories_id")),
    )
    op.create_index(
        "ix_trajectories_fifo",
        "trajectories",
        ["dataset_pk", "seq"],
        unique=False,
        sqlite_where=sa.text("partition = 'fifo' AND purpose = 'train' AND state <> 'evicted'"),
    )
    op.create_index("ix_trajectories_mark", "trajectories", ["mark"], unique=False)
    op.create_index(
        "ix_trajectories_return",
        "trajectories",
        ["dataset_pk", "return"],
        unique=False,
        sqlite_where=sa.text("state <> 'evicted'"),
    )
    op.create_index("ix_trajectories_segment_pk", "trajectories", ["segment_pk"], unique=False)
    op.create_index("ix_trajectories_shard_pk", "trajectories", ["shard_pk"], unique=False)
    for trigger in TRIGGERS:
        op.execute(trigger)
    op.execute("INSERT INTO counters (name, value) VALUES ('mark', 0), ('epoch', 0)")


def downgrade() -> None:
    for name in ("protected_update", "protected_delete"):
        op.execute(f"DROP TRIGGER {name}")
    op.drop_index("ix_trajectories_shard_pk", table_name="trajectories")
    op.drop_index("ix_trajectories_segment_pk", table_name="trajectories")
    op.drop_index(
        "ix_trajectories_return",
        table_name="trajectories",
        sqlite_where=sa.text("state <> 'evicted'"),
    )
    op.drop_index("ix_trajectories_mark", table_name="trajectories")
    op.drop_index(
        "ix_trajectories_fifo",
        table_name="trajectories",
        sqlite_where=sa.text("partition = 'fifo' AND purpose = 'train' AND state <> 'evicted'"),
    )
    op.drop_table("trajectories")
    op.drop_index(op.f("ix_snapshot_shards_shard_pk"), table_name="snapshot_shards")
    op.drop_table("snapshot_shards")
    op.drop_table("policy_aliases")
    op.drop_index(op.f("ix_tombstones_mark"), table_name="tombstones")
    op.drop_index(op.f("ix_tombstones_evicted_at"), table_name="tombstones")
    op.drop_index(op.f("ix_tombstones_dataset_pk"), table_name="tombstones")
    op.drop_table("tombstones")
    op.drop_index(op.f("ix_shards_state"), table_name="shards")
    op.drop_index(op.f("ix_shards_dataset_pk"), table_name="shards")
    op.drop_table("shards")
    op.drop_table("policies")
    op.drop_table("partition_stats")
    op.drop_table("metrics")
    op.drop_index(op.f("ix_leases_expires_at"), table_name="leases")
    op.drop_table("leases")
    op.drop_table("workers")
    op.drop_table("tokens")
    op.drop_table("snapshots")
    op.drop_table("segments")
    op.drop_table("runs")
    op.drop_index(op.f("ix_launches_state"), table_name="launches")
    op.drop_table("launches")
    op.drop_index(op.f("ix_jobs_state"), table_name="jobs")
    op.drop_table("jobs")
    op.drop_index(op.f("ix_evaluations_policy"), table_name="evaluations")
    op.drop_index(op.f("ix_evaluations_env"), table_name="evaluations")
    op.drop_table("evaluations")
    op.drop_table("datasets")
    op.drop_table("counters")
    op.drop_index("ix_audit_action_subject", table_name="audit")
    op.drop_table("audit")
