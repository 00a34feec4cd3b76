"""The whole SQL schema of the index, readable in one sitting. Made by migrations, never from here.

    datasets ─┬─< trajectories >─┬── segments     spooled: where the record lies
              │                  └── shards       sealed: which file, which rows
              ├─< partition_stats                 running totals, kept in the same transaction
              └─< tombstones                      ids that were here: a late retry is recognised
    snapshots ─┬─< snapshot_shards >── shards     what must not be deleted …
               └─< leases                         … while one of these is unexpired
    runs ─┬─< metrics                             workers   launches   tokens   jobs   audit
          ├─< policies ─< policy_aliases          counters  (mark, epoch, …)
          └─< evaluations

What is drawn without lines (workers, launches, tokens, jobs, audit) is in work_tables.py.

Times (`_at`) are Unix seconds and for people. What something waits for is counted in the service's
uptime (`_uptime`, seconds; db.py): no jump of the wall clock shortens it. JSON columns hold text.
`pk` is ours, `id` and `name` are the world's.
Every change of a trajectory stamps it with the next `mark`, so that the SQL mirror can follow by
`mark > last`; a removal of rows in bulk raises `epoch`, which tells it to start afresh. `dataset`
is the newest dataset's key. What the index refuses by itself stands in triggers.py.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from server.index import work_tables  # noqa: F401 - of the same metadata
from server.index.metadata import metadata as metadata  # complete once this module is loaded

REVISION = "0007"
"""The migration this code expects; a test holds it equal to the newest file in migrations."""

# --- data -------------------------------------------------------------------------------------

counters = Table(
    "counters",
    metadata,
    Column("name", String(32), primary_key=True),  # "mark", "epoch", "uptime" (ms), "dataset"
    Column("value", BigInteger, nullable=False),
)

datasets = Table(
    "datasets",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("spec", Text, nullable=False),  # EnvSpec as JSON
    Column("spec_digest", String(64), nullable=False),  # of the layout, without env
    Column("capacity_trajectories", BigInteger),
    Column("capacity_steps", BigInteger),
    Column("capacity_bytes", BigInteger),
    Column("description", Text, nullable=False, server_default=""),
    Column("tags", Text, nullable=False, server_default="[]"),
    Column("next_seq", BigInteger, nullable=False, server_default="1"),
    Column("evicted", BigInteger, nullable=False, server_default="0"),  # ever
    Column("created_at", Float, nullable=False),
    Column("last_ingest_at", Float),
)

partition_stats = Table(
    "partition_stats",
    metadata,
    Column("dataset_pk", ForeignKey("datasets.pk"), nullable=False),
    # fifo and protected count training data; purpose 'eval' of either partition counts apart.
    Column("bucket", String(16), nullable=False),
    Column("trajectories", BigInteger, nullable=False, server_default="0"),
    Column("steps", BigInteger, nullable=False, server_default="0"),
    Column("bytes", BigInteger, nullable=False, server_default="0"),
    Column("return_sum", Float, nullable=False, server_default="0"),
    PrimaryKeyConstraint("dataset_pk", "bucket"),
    CheckConstraint("bucket IN ('fifo', 'protected', 'eval')", name="bucket"),
)

segments = Table(
    "segments",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("name", String(64), nullable=False, unique=True),  # file in segments/
    Column("state", String(16), nullable=False),  # open → consumed; or damaged
    Column("bytes", BigInteger, nullable=False, server_default="0"),
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
    Column("checksums", LargeBinary),  # of its blocks (server/checksums.py); NULL until computed
    Column("verified_at", Float),  # when all of it was last read and compared
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
    Column("evicted_at", Float),
    Column("mark", BigInteger, nullable=False),
    UniqueConstraint("dataset_pk", "seq"),
    CheckConstraint("partition IN ('fifo', 'protected')", name="partition"),
    CheckConstraint("state IN ('spooled', 'sealed', 'evicted')", name="state"),
    CheckConstraint("purpose IN ('train', 'eval')", name="purpose"),
    Index("ix_trajectories_segment_pk", "segment_pk"),
    Index("ix_trajectories_shard_pk", "shard_pk"),
    Index("ix_trajectories_mark", "mark"),
    # What eviction walks: the oldest training trajectories of fifo.
    Index(
        "ix_trajectories_fifo",
        "dataset_pk",
        "seq",
        sqlite_where=text("partition = 'fifo' AND purpose = 'train' AND state <> 'evicted'"),
    ),
    # And the oldest evaluation of it.
    Index(
        "ix_trajectories_eval",
        "dataset_pk",
        "partition",
        "seq",
        sqlite_where=text("purpose = 'eval' AND state <> 'evicted'"),
    ),
    Index(
        "ix_trajectories_return",
        "dataset_pk",
        "return",
        sqlite_where=text("state <> 'evicted'"),
    ),
    # Orders that lists offer: without these, each page would sort the whole dataset.
    Index(
        "ix_trajectories_length",
        "dataset_pk",
        "length",
        "seq",
        sqlite_where=text("state <> 'evicted'"),
    ),
    Index(
        "ix_trajectories_created_at",
        "dataset_pk",
        "created_at",
        "seq",
        sqlite_where=text("state <> 'evicted'"),
    ),
    # How dead each shard is, without looking at the living.
    Index("ix_trajectories_dead", "shard_pk", "length", sqlite_where=text("state = 'evicted'")),
)

ALIVE = text("trajectories.state <> 'evicted'")
"""Said in words, not with a parameter: or SQLite cannot see that the indexes above apply."""

tombstones = Table(
    "tombstones",
    metadata,
    Column("id", String(36), primary_key=True),  # of a trajectory
    Column("dataset_pk", ForeignKey("datasets.pk"), nullable=False, index=True),
    Column("seq", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("evicted_uptime", Float, nullable=False, index=True),  # when it became a tombstone
    Column("mark", BigInteger, nullable=False, index=True),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("id", String(64), nullable=False, unique=True),  # sn_<uuidv7>
    Column("digest", String(64), nullable=False),  # over the ordered selection
    Column("selection", Text, nullable=False),  # JSON: the request as resolved
    Column("spec", Text, nullable=False),
    Column("datasets", Text, nullable=False),  # JSON list of names
    Column("file", String(128), nullable=False),  # frozen rows, in snapshots/
    Column("trajectories", BigInteger, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("shards", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("added", BigInteger),
    Column("removed", BigInteger),
    Column("created_at", Float, nullable=False),
    Column("created_uptime", Float, nullable=False, server_default="0"),
    # `file` holds the changes since this snapshot; NULL: it holds everything (manifest_files.py)
    Column("base_pk", Integer, index=True),
    Column("depth", Integer, nullable=False, server_default="0"),  # files before this one …
    Column("delta_rows", BigInteger, nullable=False, server_default="0"),  # … but the first: rows
    Column("excluded", Text, nullable=False, server_default="[]"),  # JSON: damaged files left out
    Column("checksums", LargeBinary),  # as of shards; NULL: made before there were any
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

# --- who made the data, and what was made of it -------------------------------------------------

runs = Table(
    "runs",
    metadata,
    Column("pk", Integer, primary_key=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),  # train, collect, eval
    Column("status", String(16), nullable=False),  # running, finished, failed, stopped
    Column("config", Text, nullable=False, server_default="{}"),
    Column("parent", String(128)),
    Column("seed", BigInteger),
    Column("git_commit", Text, nullable=False, server_default=""),
    Column("host", Text, nullable=False, server_default=""),
    Column("snapshots", Text, nullable=False, server_default="[]"),  # JSON list of ids
    Column("tags", Text, nullable=False, server_default="[]"),
    Column("notes", Text, nullable=False, server_default=""),
    Column("command", Text, nullable=False, server_default=""),
    Column("error", Text, nullable=False, server_default=""),
    Column("log", Text, nullable=False, server_default=""),  # its tail
    Column("created_at", Float, nullable=False),
    Column("heartbeat_at", Float, nullable=False),
    Column("finished_at", Float),
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
    sqlite_with_rowid=False,
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
    Column("metadata", Text, nullable=False, server_default="{}"),
    Column("created_at", Float, nullable=False),
    Column("checksums", LargeBinary),  # as of shards
    Column("verified_at", Float),
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
    Column("seeds", Text, nullable=False),  # JSON lists
    Column("returns", Text, nullable=False),
    Column("lengths", Text, nullable=False, server_default="[]"),
    Column("episodes", BigInteger, nullable=False),
    Column("dataset", String(64)),
    Column("mean", Float, nullable=False),
    Column("iqm", Float, nullable=False),
    Column("ci_low", Float, nullable=False),
    Column("ci_high", Float, nullable=False),
    Column("confidence", Float, nullable=False),
    Column("normalised", Float),
    Column("details", Text, nullable=False, server_default="{}"),
    Column("created_at", Float, nullable=False),
)
