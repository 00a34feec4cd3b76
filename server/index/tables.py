"""The whole SQL schema of the index. A new index is created from it, an older one migrated.

    datasets ─┬─< trajectories >─┬── segments     spooled: where the record is stored
              │                  └── shards       sealed: which file, which rows
              ├─< partition_stats                 running totals, updated in the same transaction
              ├─< consumers                       what samples from it, at which rate
              ├─< tombstones                      ids of removed trajectories, to recognise retries
              ├─< annotations ─< annotated        values of steps, and of which trajectories
               └─< versions ─< version_trajectories >── trajectories   protected, for ever
    snapshots ─┬─< snapshot_shards >── shards     what must not be deleted …
               └─< leases                         … while one of these is unexpired
    runs ─┬─< metrics                             workers   launches   tokens   jobs   audit
          ├─< policies ─< policy_aliases          counters  (change_id, epoch, …)
          └─< evaluations ─< videos               saved_queries   deleted_files
    programs                                      what a launcher can be asked to start
    lost_rows                                     rows that were damaged and are left out

Every table also has a column `crc`, which no statement names: row_checksums.py.

Times (`_at`) are Unix seconds, for people. Deadlines are in the service's uptime (`_uptime`,
seconds; db.py), which no jump of the wall clock changes. JSON is stored as text; it is a `Text`
column where the text is passed on unchanged.
`pk` is internal; `id` and `name` are public.
Every change of a trajectory sets the next `change_id`, so the SQL mirror reads only rows with
`change_id > last`; removing rows in bulk increments `epoch`, and the mirror is rebuilt.
Counter `dataset` is the newest dataset's key; `serial` and `store` tell this index from an older or
another one (storage/index_mark.py). Triggers enforce invariants: dialect.py:TRIGGERS.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from server.index.dialect import STORED_BY_KEY, only_where

REVISION = "0021"
"""The migration this code expects; a test holds it equal to the newest file in migrations."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# --- data -------------------------------------------------------------------------------------

counters = Table(
    "counters",
    metadata,
    Column("name", String(32), primary_key=True),  # db.COUNTERS
    Column("value", BigInteger, nullable=False),
)

datasets = Table(
    "datasets",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("spec", JSON, nullable=False),  # EnvSpec.to_json()
    Column("spec_digest", String(64), nullable=False),  # of the layout, without env
    Column("capacity_trajectories", BigInteger),
    Column("capacity_steps", BigInteger),
    Column("capacity_bytes", BigInteger),
    Column("description", Text, nullable=False, server_default=""),
    Column("tags", JSON, nullable=False, server_default="[]"),
    Column("next_seq", BigInteger, nullable=False, server_default="1"),
    Column("evicted", BigInteger, nullable=False, server_default="0"),  # total so far
    Column("inserted_steps", BigInteger, nullable=False, server_default="0"),  # of training, total
    Column("created_at", Float, nullable=False),
    Column("last_ingest_at", Float),
    Column("created_by", Text, nullable=False, server_default=""),
)

partition_stats = Table(
    "partition_stats",
    metadata,
    Column("dataset_pk", ForeignKey("datasets.pk"), nullable=False),
    # fifo and protected count training data; purpose 'eval' of both partitions is a third bucket.
    Column("bucket", String(16), nullable=False),
    Column("trajectories", BigInteger, nullable=False, server_default="0"),
    Column("steps", BigInteger, nullable=False, server_default="0"),
    Column("bytes", BigInteger, nullable=False, server_default="0"),
    Column("return_sum", Float, nullable=False, server_default="0"),
    PrimaryKeyConstraint("dataset_pk", "bucket"),
    CheckConstraint("bucket IN ('fifo', 'protected', 'eval')", name="bucket"),
)

consumers = Table(
    "consumers",
    metadata,
    Column("dataset_pk", ForeignKey("datasets.pk"), nullable=False),
    Column("name", String(128), nullable=False),
    Column("samples_per_insert", Float, nullable=False),
    Column("buffer", Float, nullable=False),
    Column("min_size", BigInteger, nullable=False),
    Column("samples", BigInteger, nullable=False),  # drawn so far
    Column("base", Float, nullable=False),  # inserted steps from which inserts are counted
    Column("min_samples_per_insert", Float),  # below which collectors wait, if it is another ratio
    Column("min_base", Float),  # its base
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("updated_uptime", Float, nullable=False),
    PrimaryKeyConstraint("dataset_pk", "name"),
)

segments = Table(
    "segments",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),  # file in segments/
    Column("state", String(16), nullable=False),  # open → consumed; or damaged
    Column("created_at", Float, nullable=False),
    CheckConstraint("state IN ('open', 'consumed', 'damaged')", name="state"),
)

shards = Table(
    "shards",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("id", String(64), nullable=False, unique=True),  # sh_<uuidv7>
    Column("dataset_pk", ForeignKey("datasets.pk"), index=True),  # NULL: dataset deleted
    Column("partition", String(16), nullable=False),  # also its directory
    # live → retired (nothing alive in it) → deleting → deleted; quarantined: damaged
    Column("state", String(16), nullable=False, index=True),
    Column("sha256", String(64), nullable=False),
    Column("bytes", BigInteger, nullable=False),  # of the file
    Column("rows", BigInteger, nullable=False),  # observations: T+1 per trajectory
    Column("trajectories", BigInteger, nullable=False),
    Column("seq_min", BigInteger, nullable=False),
    Column("seq_max", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("retired_uptime", Float),
    Column("verified_at", Float),  # when the whole file was last read and verified
    # Block checksums (server/storage/checksums.py). Last: a column is read past to reach the next.
    Column("checksums", LargeBinary, nullable=False),
    CheckConstraint("partition IN ('fifo', 'protected')", name="partition"),
    CheckConstraint(
        "state IN ('live', 'retired', 'deleting', 'deleted', 'quarantined')", name="state"
    ),
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("id", String(36), nullable=False, unique=True),
    Column("dataset_pk", ForeignKey("datasets.pk"), nullable=False),
    Column("seq", BigInteger, nullable=False),  # the service's order within the dataset
    Column("partition", String(16), nullable=False),
    Column("state", String(16), nullable=False),  # spooled → sealed; either → evicted
    Column("env", Text, nullable=False),
    Column("length", BigInteger, nullable=False),  # T, transitions
    Column("return", Float, nullable=False),
    Column("terminated", Boolean, nullable=False),
    Column("truncated", Boolean, nullable=False),
    Column("final_obs_valid", Boolean, nullable=False),
    Column("success", Boolean),
    Column("purpose", String(8), nullable=False),
    Column("policy", Text, nullable=False),
    Column("run", Text, nullable=False),
    Column("collector", Text, nullable=False),
    Column("seed", BigInteger),
    Column("episode_id", Text, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("tags", Text, nullable=False, server_default="[]"),  # JSON list
    Column("flags", Text, nullable=False, server_default="[]"),  # JSON list
    Column("notes", Text, nullable=False, server_default=""),
    Column("source", Text, nullable=False),
    Column("metrics", Text, nullable=False, server_default="{}"),  # JSON {name: number}
    Column("digest", String(64), nullable=False),
    Column("bytes", BigInteger, nullable=False),  # of its arrays, uncompressed
    Column("started_at", Float),
    Column("created_at", Float, nullable=False),  # when acknowledged
    Column("segment_pk", ForeignKey("segments.pk")),  # spooled: the record …
    Column("segment_offset", BigInteger),  # … begins at this byte
    Column("shard_pk", ForeignKey("shards.pk")),  # sealed: the file …
    Column("traj_idx", Integer),  # … its number in it
    Column("row_start", BigInteger),  # … and its first row
    Column("change_id", BigInteger, nullable=False),
    UniqueConstraint("dataset_pk", "seq"),
    CheckConstraint("partition IN ('fifo', 'protected')", name="partition"),
    CheckConstraint("state IN ('spooled', 'sealed', 'evicted')", name="state"),
    CheckConstraint("purpose IN ('train', 'eval')", name="purpose"),
    Index("ix_trajectories_segment_pk", "segment_pk"),
    Index("ix_trajectories_shard_pk", "shard_pk"),
    Index("ix_trajectories_change_id", "change_id"),
    # For eviction: the oldest training trajectories of fifo.
    Index(
        "ix_trajectories_fifo",
        "dataset_pk",
        "seq",
        **only_where("partition = 'fifo' AND purpose = 'train' AND state <> 'evicted'"),
    ),
    # For eviction: the oldest evaluation trajectories of fifo.
    Index(
        "ix_trajectories_eval",
        "dataset_pk",
        "partition",
        "seq",
        **only_where("purpose = 'eval' AND state <> 'evicted'"),
    ),
    # Orders that lists support: without these, each page would sort the whole dataset.
    *(
        Index(f"ix_trajectories_{name[0]}", "dataset_pk", *name, **only_where("state <> 'evicted'"))
        for name in (("return",), ("length", "seq"), ("created_at", "seq"))
    ),
    # Dead rows of each shard, without reading the living.
    Index("ix_trajectories_dead", "shard_pk", "length", **only_where("state = 'evicted'")),
)

ALIVE = text("trajectories.state <> 'evicted'")
"""A literal, not a parameter: with a parameter the indexes above are not used (dialect.py)."""

tombstones = Table(
    "tombstones",
    metadata,
    Column("id", String(36), primary_key=True),  # of a trajectory
    Column("dataset_pk", ForeignKey("datasets.pk"), nullable=False, index=True),
    Column("seq", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("evicted_uptime", Float, nullable=False, index=True),  # when it became a tombstone
    Column("change_id", BigInteger, nullable=False, index=True),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("id", String(64), nullable=False, unique=True),  # sn_<uuidv7>
    Column("digest", String(64), nullable=False),  # over the ordered selection
    Column("selection", JSON, nullable=False),  # the request as resolved
    Column("spec", JSON, nullable=False),
    Column("datasets", JSON, nullable=False),  # list of names
    Column("file", String(128), nullable=False),  # frozen rows, in snapshots/
    Column("trajectories", BigInteger, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("shards", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("added", BigInteger),
    Column("removed", BigInteger),
    Column("created_at", Float, nullable=False),
    Column("created_uptime", Float, nullable=False, server_default="0"),
    # `file` holds the changes since this snapshot; NULL: it holds everything (manifests.py)
    Column("base_pk", Integer, index=True),
    Column("depth", Integer, nullable=False, server_default="0"),  # number of files before it …
    Column("delta_rows", BigInteger, nullable=False, server_default="0"),  # … rows but the first's
    Column("excluded", JSON, nullable=False, server_default="[]"),  # damaged files left out
    Column("checksums", LargeBinary, nullable=False),  # like those of shards
)

snapshot_shards = Table(
    "snapshot_shards",
    metadata,
    Column("snapshot_pk", ForeignKey("snapshots.pk"), nullable=False),
    Column("shard_pk", ForeignKey("shards.pk"), nullable=False, index=True),
    PrimaryKeyConstraint("snapshot_pk", "shard_pk"),
)

leases = Table(
    "leases",
    metadata,
    Column("snapshot_pk", ForeignKey("snapshots.pk"), nullable=False),
    Column("holder", Text, nullable=False),
    Column("expires_uptime", Float, nullable=False, index=True),
    PrimaryKeyConstraint("snapshot_pk", "holder"),
)

versions = Table(
    "versions",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("dataset_pk", ForeignKey("datasets.pk"), nullable=False),
    Column("name", String(64), nullable=False),
    Column("digest", String(64), nullable=False),  # storage/version_file.py
    Column("parent", String(64)),  # name of another version, which may be deleted
    Column("condition", Text, nullable=False),  # the WHERE, "" for all
    Column("include_eval", Boolean, nullable=False),
    Column("description", Text, nullable=False),
    Column("licence", Text, nullable=False),
    Column("statistics", JSON, nullable=False),  # messages.VersionStatistics
    Column("missing", BigInteger, nullable=False, server_default="0"),  # lost before a rebuild
    Column("created_by", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("file", String(128), nullable=False),  # in versions/
    Column("bytes", BigInteger, nullable=False),
    Column("verified_at", Float),
    Column("checksums", LargeBinary, nullable=False),  # like those of shards
    UniqueConstraint("dataset_pk", "name"),
)

version_trajectories = Table(
    "version_trajectories",
    metadata,
    Column("version_pk", ForeignKey("versions.pk"), nullable=False),
    Column("trajectory_pk", ForeignKey("trajectories.pk"), nullable=False, index=True),
    PrimaryKeyConstraint("version_pk", "trajectory_pk"),
    **STORED_BY_KEY,
)

annotation_files = Table(
    "annotations",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("dataset_pk", ForeignKey("datasets.pk"), nullable=False),
    Column("name", String(200), nullable=False),  # that of many files
    Column("policy", Text, nullable=False),  # run/version
    Column("trajectories", BigInteger, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("file", String(128), nullable=False),  # in annotations/
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("verified_at", Float),
    Column("checksums", LargeBinary, nullable=False),  # like those of shards
    Index("ix_annotations_dataset_pk", "dataset_pk", "name"),
)

annotated = Table(
    "annotated",
    metadata,
    Column("name", String(200), nullable=False),  # of the annotation
    Column("trajectory", String(36), nullable=False),  # its id; it may be gone
    Column("annotation_pk", ForeignKey("annotations.pk"), nullable=False, index=True),
    PrimaryKeyConstraint("name", "trajectory"),
    **STORED_BY_KEY,
)

# --- runs, policies, evaluations, videos ----------------------------------------------------------

runs = Table(
    "runs",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("title", String(200)),
    Column("kind", String(16), nullable=False),  # train, collect, eval
    Column("status", String(16), nullable=False),  # running, finished, failed, stopped
    Column("config", JSON, nullable=False, server_default="{}"),
    Column("parent", String(128)),
    Column("seed", BigInteger),
    Column("git_commit", Text, nullable=False, server_default=""),
    Column("host", Text, nullable=False, server_default=""),
    Column("snapshots", JSON, nullable=False, server_default="[]"),  # list of ids
    Column("tags", JSON, nullable=False, server_default="[]"),
    Column("notes", Text, nullable=False, server_default=""),
    Column("alarms", JSON, nullable=False, server_default="[]"),  # messages.Alarm
    Column("command", Text, nullable=False, server_default=""),
    Column("error", Text, nullable=False, server_default=""),
    Column("log", Text, nullable=False, server_default=""),  # its tail
    Column("created_at", Float, nullable=False),
    Column("heartbeat_at", Float, nullable=False),
    Column("finished_at", Float),
    Column("owner", Text, nullable=False, server_default=""),  # who made it; "": unknown
)

metrics = Table(
    "metrics",
    metadata,
    Column("run_pk", ForeignKey("runs.pk"), nullable=False),
    Column("key", String(200), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("time", Float, nullable=False),
    Column("value", Float),  # NULL: NaN or infinite
    PrimaryKeyConstraint("run_pk", "key", "step"),
    **STORED_BY_KEY,
)

policies = Table(
    "policies",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("run_pk", ForeignKey("runs.pk"), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("file", String(128), nullable=False),  # in policies/
    Column("bytes", BigInteger, nullable=False),
    Column("step", BigInteger),
    Column("metadata", JSON, nullable=False, server_default="{}"),
    Column("created_at", Float, nullable=False),
    Column("verified_at", Float),
    Column("checksums", LargeBinary, nullable=False),  # like those of shards
    UniqueConstraint("run_pk", "version"),
)

policy_aliases = Table(
    "policy_aliases",
    metadata,
    Column("run_pk", ForeignKey("runs.pk"), nullable=False),
    Column("alias", String(64), nullable=False),  # "latest" is computed, never stored
    Column("policy_pk", ForeignKey("policies.pk"), nullable=False),
    PrimaryKeyConstraint("run_pk", "alias"),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("run", String(128)),
    Column("policy", Text, nullable=False, index=True),  # run/version, or a free name
    Column("env", Text, nullable=False, index=True),
    Column("seeds", JSON, nullable=False),  # lists
    Column("returns", JSON, nullable=False),
    Column("lengths", JSON, nullable=False, server_default="[]"),
    Column("episodes", BigInteger, nullable=False),
    Column("dataset", String(64)),
    Column("mean", Float, nullable=False),
    Column("iqm", Float, nullable=False),
    Column("ci_low", Float, nullable=False),
    Column("ci_high", Float, nullable=False),
    Column("confidence", Float, nullable=False),
    Column("normalised", Float),
    Column("details", JSON, nullable=False, server_default="{}"),
    Column("created_at", Float, nullable=False),
    Column("owner", Text, nullable=False, server_default=""),  # who made it; "": unknown
)

videos = Table(
    "videos",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("evaluation_pk", ForeignKey("evaluations.pk"), nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("return", Float, nullable=False),  # of the episode that is shown
    Column("length", BigInteger, nullable=False),
    Column("media_type", String(16), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("file", String(128), nullable=False),  # in videos/
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("verified_at", Float),
    Column("checksums", LargeBinary, nullable=False),  # like those of shards
    UniqueConstraint("evaluation_pk", "seed"),
)

FILES = (policies, videos, versions, annotation_files)
"""Tables with a row for each file of the folder of the same name."""

deleted_files = Table(
    "deleted_files",
    metadata,
    # Files that no row names any more: deleted when no backup is running, or by the next start.
    Column("folder", String(32), nullable=False),
    Column("name", String(128), nullable=False),
    PrimaryKeyConstraint("folder", "name"),
)

# --- workers, jobs, tokens, audit -----------------------------------------------------------------

workers = Table(
    "workers",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("run", String(128)),
    Column("host", Text, nullable=False, server_default=""),
    Column("pid", BigInteger),
    Column("policy", Text, nullable=False, server_default=""),
    Column("state", String(16), nullable=False),
    Column("counters", JSON, nullable=False, server_default="{}"),
    Column("last_error", Text, nullable=False, server_default=""),
    Column("command", String(16), nullable=False, server_default="none"),
    Column("command_at", Float),
    Column("started_at", Float, nullable=False),
    Column("heartbeat_at", Float, nullable=False),
    Column("owner", Text, nullable=False, server_default=""),  # who made it; "": unknown
)

launches = Table(
    "launches",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("role", String(16), nullable=False),
    Column("recipe", Text, nullable=False, server_default=""),
    Column("args", JSON, nullable=False, server_default="{}"),
    Column("count", Integer, nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("claimed_by", Text, nullable=False, server_default=""),
    Column("claimed_at", Float),
    Column("error", Text, nullable=False, server_default=""),
    Column("run", Text, nullable=False, server_default=""),
    Column("created_at", Float, nullable=False),
    Column("log", Text, nullable=False, server_default=""),  # its tail
    Column("owner", Text, nullable=False, server_default=""),  # who made it; "": unknown
    Column("claimer", Text, nullable=False, server_default=""),  # who claimed it
)

programs = Table(
    "programs",
    metadata,
    Column("worker_id", String(128), nullable=False),  # a launcher
    Column("role", String(16), nullable=False),
    Column("document", Text, nullable=False),  # messages.Program
    Column("updated_at", Float, nullable=False),
    PrimaryKeyConstraint("worker_id", "role"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("kind", String(32), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("progress", Float, nullable=False, server_default="0"),
    Column("message", Text, nullable=False, server_default=""),
    Column("payload", JSON, nullable=False, server_default="{}"),  # the arguments
    Column("result", JSON(none_as_null=True)),
    Column("error", JSON(none_as_null=True)),  # a Problem
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    Column("owner", Text, nullable=False, server_default=""),  # who made it; "": unknown
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", Text, nullable=False),
    Column("hash", String(64), nullable=False),  # sha256 of the secret
    Column("scopes", JSON, nullable=False),  # list
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("last_used_at", Float),
    Column("revoked_at", Float),
    Column("bytes_per_day", BigInteger),  # quotas; NULL: none
    Column("requests_per_minute", BigInteger),
    Column("bytes_used", Float, nullable=False, server_default="0"),  # of the quota …
    Column("bytes_used_at", Float),  # … at this time; it is forgiven evenly
)

audit = Table(
    "audit",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("time", Float, nullable=False),
    Column("who", Text, nullable=False),  # token id, "operator", "local", or "service"
    Column("action", String(64), nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", JSON, nullable=False, server_default="{}"),
    Column("count", BigInteger, nullable=False, server_default="1"),  # times from `time` …
    Column("until", Float),  # … to this one; NULL: it happened once
    Index("ix_audit_action_subject_who", "action", "subject", "who"),
)

saved_queries = Table(
    "saved_queries",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("sql", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("params", JSON, nullable=False),  # {name: default value}
    Column("dataset", String(64)),  # whose steps bare `steps` are
    Column("owner", Text, nullable=False),  # token id, or "local"
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
)

# --- damage ---------------------------------------------------------------------------------------

lost_rows = Table(
    "lost_rows",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("table_name", String(64), nullable=False),
    Column("key", Text, nullable=False),  # its primary key, a JSON list
    Column("name", Text, nullable=False),  # its public id or name; "" if it has none
    Column("dataset", Text, nullable=False),  # the name of the dataset it belongs to, or ""
    Column("found_at", Float, nullable=False),
)
