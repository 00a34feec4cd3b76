"""The bodies of the HTTP API, version 1. These names are the API: docs/http.md lists them by route.

    names, limits, errors · datasets · ingest · trajectories · jobs · SQL · snapshots
    runs · policies · evaluations · workers · launches · tokens · health

Requests forbid unknown fields, so a typo is an error; responses may grow, so clients ignore what
they do not know. Times are Unix seconds (float). Names of datasets and runs match `NAME`.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

# --- names, limits, errors ------------------------------------------------------------------------

NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME)]
RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Alias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9._-]{0,63}$")]
Text = Annotated[str, StringConstraints(max_length=4096)]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Partition = Literal["fifo", "protected"]
MAX_DEPTH = 64
"""Of objects in objects: more than any configuration has, less than any reader's recursion."""


def storable(document: dict[str, Any]) -> dict[str, Any]:
    """Refuse what could be stored and then never be answered: it would break every list it is in.

    Raises ValueError, which becomes a 422.
    """
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
            elif isinstance(value, str):
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise ValueError("half a surrogate pair, which UTF-8 cannot say") from None
        if not below:
            return document
        level = below
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


Json = dict[str, Any]
Document = Annotated[Json, AfterValidator(storable)]
"""A JSON object of the caller, stored as it is."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
Number = Annotated[int, Field(ge=0, le=2**53)]
"""A step or a version: what every reader of JSON keeps exact."""
Limit = Annotated[int, Field(ge=1, le=2**53)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]

ARROW = "application/vnd.apache.arrow.stream"
PROBLEM = "application/problem+json"


T = TypeVar("T")


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Response(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Problem(Response):
    """RFC 9457. Every error of every route has this shape (application/problem+json)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    code: str
    """Stable, machine-readable, for instance "schema_mismatch"; docs/http.md lists them."""
    expected: Any = None
    got: Any = None
    errors: list[Json] | None = None


class Page(Response, Generic[T]):
    """A part of a list."""

    items: list[T]
    next: str | None = None
    """Cursor of the next page (?cursor=), or null at the end."""


class Excluded(Response):
    """A damaged file, and what the answer therefore lacks."""

    dataset: str
    file: str
    """A shard (sh_…), or a segment whose records could not be sealed (sg_…)."""
    trajectories: int
    """Living ones in it."""


# --- datasets ----------------------------------------------------------------------------------


class Capacity(Request):
    """Limits of the fifo partition; the oldest trajectories go when any one is exceeded.

    They hold for training and for evaluation (purpose 'eval') separately: neither displaces the
    other. Nothing protected counts, and nothing protected goes.
    """

    trajectories: Limit | None = None
    steps: Limit | None = None
    bytes: Limit | None = None


class CreateDataset(Request):
    name: Name
    spec: Document
    """An EnvSpec as JSON: {"observations": {...}, "actions": {...}, "env": "..."}."""
    capacity: Capacity = Capacity()
    description: Text = ""
    tags: list[Tag] = []


class PatchDataset(Request):
    """Only the fields given change; works while data flows in."""

    capacity: Capacity | None = None
    description: Text | None = None
    tags: list[Tag] | None = None


class PartitionStats(Response):
    trajectories: int = 0
    steps: int = 0
    """Transitions, not rows."""
    bytes: int = 0
    """Array bytes before compression."""


class Dataset(Response):
    name: str
    spec: Json
    spec_digest: str
    capacity: Capacity
    description: str = ""
    tags: list[str] = []
    created_at: float
    fifo: PartitionStats = PartitionStats()
    """Training trajectories of the fifo partition: what counts against `capacity`."""
    protected: PartitionStats = PartitionStats()
    eval: PartitionStats = PartitionStats()
    """Trajectories of purpose 'eval', of both partitions; those of fifo are held to `capacity` by
    themselves. Never in a training snapshot unless asked for."""
    evicted: int = 0
    unsealed: int = 0
    """Acknowledged and durable, but not yet in a shard (so not yet in SQL `steps`)."""
    shards: int = 0
    stored_bytes: int = 0
    """Bytes of the Parquet shards on disk."""
    return_mean: float | None = None
    return_min: float | None = None
    return_max: float | None = None
    length_mean: float | None = None
    last_ingest_at: float | None = None
    excluded: list[Excluded] = []
    """Damaged files, whose trajectories are in no `steps` and no new snapshot."""


class FlushResult(Response):
    sealed: int
    """Trajectories moved into shards by this call."""
    shards: int


# --- ingest ------------------------------------------------------------------------------------

ItemStatus = Literal["stored", "duplicate", "evicted", "conflict", "refused"]


class IngestItem(Response):
    """What became of one trajectory of the body. `stored` and `duplicate` are durable."""

    id: str
    status: ItemStatus
    seq: int | None = None
    """The service's order within the dataset."""
    problem: Problem | None = None


class IngestResult(Response):
    dataset: str
    partition: Partition
    items: list[IngestItem]
    sealed: bool = False
    """True when ?wait=sealed was asked and done."""


# --- trajectories ------------------------------------------------------------------------------


class TrajectoryInfo(Response):
    """A row of the index; the same columns as SQL `trajectories`."""

    id: str
    seq: int
    dataset: str
    partition: Partition
    state: Literal["spooled", "sealed"]
    env: str = ""
    length: int
    """T, transitions."""
    total_reward: float = Field(alias="return", serialization_alias="return")
    terminated: bool
    truncated: bool
    final_obs_valid: bool
    success: bool | None = None
    purpose: Literal["train", "eval"] = "train"
    policy: str = ""
    run: str = ""
    collector: str = ""
    seed: int | None = None
    episode_id: str = ""
    first_step: int = 0
    tags: list[str] = []
    flags: list[str] = []
    notes: str = ""
    source: str = ""
    digest: str
    bytes: int
    started_at: float | None = None
    created_at: float
    shard: str | None = None
    traj_idx: int | None = None
    metrics: dict[str, float] = {}

    model_config = ConfigDict(extra="ignore", populate_by_name=True)


class PatchTrajectory(Request):
    """Labels, and the move fifo → protected. The way back is an admin's, and audited."""

    tags: list[Tag] | None = None
    flags: list[Tag] | None = None
    notes: Text | None = None
    partition: Partition | None = None


# --- jobs --------------------------------------------------------------------------------------

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]


class Job(Response):
    id: str
    kind: str
    state: JobState
    progress: float = 0.0
    """0 … 1."""
    message: str = ""
    """What it is doing now, for a person."""
    result: Json | None = None
    error: Problem | None = None
    created_at: float
    finished_at: float | None = None


class JobAccepted(Response):
    job: Job


# --- SQL ---------------------------------------------------------------------------------------


class Query(Request):
    sql: Annotated[str, StringConstraints(min_length=1, max_length=100_000)]
    params: list[Any] | Json | None = None
    """Values for ? or $name placeholders."""
    dataset: Name | None = None
    """What bare `steps` means; without one, bare `steps` has only the columns common to all."""
    limit: Annotated[int, Field(ge=0, le=1_000_000)] = 1000
    timeout: Annotated[float, Field(gt=0, le=60)] = 5.0
    """Seconds; the query is killed at its deadline."""


class Column(Response):
    name: str
    type: str


class QueryResult(Response):
    columns: list[Column]
    rows: list[list[Any]]
    truncated: bool = False
    """There were more rows than `limit`."""
    elapsed_ms: float
    excluded: list[Excluded] = []
    """Damaged files whose rows are not in `steps`, if the query reads it."""


class Table(Response):
    name: str
    columns: list[Column]
    description: str = ""


class QuerySchema(Response):
    tables: list[Table]


# --- snapshots ---------------------------------------------------------------------------------


class Source(Request):
    """One component of a mixture."""

    select: Annotated[str, StringConstraints(min_length=1, max_length=20_000)]
    """SELECT id[, weight] FROM trajectories WHERE …"""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0


class CreateSnapshot(Request):
    """Either `from`, or the sugar `dataset` (+ `where`, a SQL condition over `trajectories`)."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    sources: list[Source] | None = Field(default=None, alias="from", serialization_alias="from")
    dataset: Name | None = None
    where: Annotated[str, StringConstraints(max_length=20_000)] | None = None
    since: str | None = None
    """Id of an earlier snapshot; `added` and `removed` are counted from it. Nothing new: it is
    the answer itself, and no other is made."""
    include_eval: bool = False
    holder: Text = ""
    """Who asks; becomes the holder of the first lease."""


class Snapshot(Response):
    """A frozen selection: the same id always means the same trajectories."""

    id: str
    digest: str
    """sha256 over the ordered selection: equal digests mean equal selections."""
    selection: Json
    """The request, as it was resolved."""
    spec: Json
    """The EnvSpec that all selected trajectories share."""
    datasets: list[str]
    trajectories: int
    steps: int
    shards: int
    bytes: int
    """Bytes of the shards to fetch."""
    created_at: float
    leased_until: float | None = None
    added: int | None = None
    removed: int | None = None
    excluded: list[Excluded] = []
    """Damaged files whose trajectories were selected and left out."""


class PutLease(Request):
    holder: Text = ""
    ttl: Annotated[float, Field(gt=0, le=86_400)] = 120.0


class Lease(Response):
    snapshot: str
    holder: str
    ttl: float
    """Seconds from now, of the service's running time: no jump of a clock shortens them."""
    expires_at: float
    """When that is about, for people."""


# --- runs --------------------------------------------------------------------------------------

RunKind = Literal["train", "collect", "eval"]
RunStatus = Literal["running", "finished", "failed", "stopped"]


class CreateRun(Request):
    name: RunName
    kind: RunKind
    config: Document = {}
    """The complete resolved configuration."""
    parent: RunName | None = None
    seed: Int64 | None = None
    git_commit: Text = ""
    host: Text = ""
    snapshots: list[str] = []
    tags: list[Tag] = []
    command: Text = ""
    exist_ok: bool = False
    """Resume: an existing run of the same kind is taken up again instead of answered 409."""


class PatchRun(Request):
    """Also the heartbeat: an empty body only says that the run is alive."""

    status: RunStatus | None = None
    snapshots: list[str] | None = None
    tags: list[Tag] | None = None
    notes: Text | None = None
    error: Annotated[str, StringConstraints(max_length=20_000)] | None = None
    log: Annotated[str, StringConstraints(max_length=200_000)] | None = None
    """Lines to append to the run's log."""


class Run(Response):
    name: str
    kind: RunKind
    status: RunStatus
    config: Json = {}
    parent: str | None = None
    seed: int | None = None
    git_commit: str = ""
    host: str = ""
    snapshots: list[str] = []
    tags: list[str] = []
    notes: str = ""
    command: str = ""
    error: str = ""
    created_at: float
    heartbeat_at: float
    finished_at: float | None = None
    policies: int = 0
    latest: dict[str, float] = {}
    """Newest value of every metric, where it is finite."""
    latest_steps: dict[str, int] = {}
    """Step of the newest point of every metric: who has it need not read the curve again."""
    alive: bool = True
    """Its status is running, and it was heard of within the last 45 seconds."""


class RunPage(Page[Run]):
    total: int = 0
    """Runs that match, on all pages together."""


class MetricPoint(Request):
    key: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    step: Number
    value: float | None
    """null stands for NaN or infinity, which JSON cannot say."""
    time: Finite


class PostMetrics(Request):
    points: Annotated[list[MetricPoint], Field(max_length=10_000)]


class MetricsAccepted(Response):
    stored: int


class Series(Response):
    key: str
    steps: list[int]
    times: list[float]
    values: list[float | None]
    total: int
    """Points stored (beyond `after`, where one was given); fewer come when down-sampled."""


class MetricSeries(Response):
    run: str
    series: list[Series]


# --- policies ----------------------------------------------------------------------------------


class Policy(Response):
    run: str
    version: int
    sha256: str
    bytes: int
    step: int | None = None
    created_at: float
    aliases: list[str] = []
    metadata: Json = {}


class PutAlias(Request):
    version: Number


# --- evaluations -------------------------------------------------------------------------------


class CreateEvaluation(Request):
    """What a policy scored with fixed seeds; its episodes lie in `dataset` as purpose eval."""

    run: RunName | None = None
    policy: Text
    """run/version, or a free name for a scripted actor."""
    env: Text
    seeds: Annotated[list[Int64], Field(max_length=100_000)]
    returns: Annotated[list[float], Field(min_length=1, max_length=100_000)]
    lengths: list[Int64] = []
    dataset: Name | None = None
    mean: float
    iqm: float
    ci_low: float
    ci_high: float
    confidence: float = 0.95
    normalised: float | None = None
    """0 … 100 on the D4RL scale where a reference exists."""
    details: Document = {}


class Evaluation(CreateEvaluation):
    model_config = ConfigDict(extra="ignore")

    id: str
    created_at: float


# --- workers and launches -------------------------------------------------------------------------

WorkerRole = Literal["collect", "train", "eval", "launcher"]
Command = Literal["none", "pause", "resume", "drain", "stop"]


class PutWorker(Request):
    """A heartbeat."""

    role: WorkerRole
    run: RunName | None = None
    host: Text = ""
    pid: Int64 | None = None
    policy: Text = ""
    state: Literal["starting", "running", "paused", "draining", "stopped", "failed"] = "running"
    counters: dict[str, float] = {}
    """Named numbers: env_steps, episodes, steps_per_second, outbox, …"""
    last_error: Annotated[str, StringConstraints(max_length=20_000)] = ""


class Worker(PutWorker):
    model_config = ConfigDict(extra="ignore")

    id: str
    command: Command = "none"
    """What the worker is asked to do; it gets it with the response to its next heartbeat."""
    started_at: float
    heartbeat_at: float
    alive: bool = True


class PostCommand(Request):
    command: Command


LaunchRole = Literal["train", "collect", "evaluate"]


class CreateLaunch(Request):
    """What "start" in the dashboard does: a launcher on some machine claims it."""

    role: LaunchRole
    recipe: Annotated[str, StringConstraints(max_length=128, pattern=r"^[A-Za-z0-9._-]*$")] = ""
    args: Annotated[dict[str, str | int | float | bool], AfterValidator(storable)] = {}
    """Option → value, for instance {"agent.losses.gamma": 0.99}; never a shell string."""
    count: Annotated[int, Field(ge=1, le=64)] = 1


class ClaimLaunch(Request):
    worker: Text
    roles: list[LaunchRole] = ["train", "collect", "evaluate"]


class PatchLaunch(Request):
    """The claiming launcher's report."""

    state: Literal["running", "finished", "failed", "cancelled"]
    error: Annotated[str, StringConstraints(max_length=20_000)] = ""
    run: Text = ""


class Launch(Response):
    id: str
    role: LaunchRole
    recipe: str = ""
    args: Json = {}
    count: int = 1
    state: Literal["queued", "claimed", "running", "finished", "failed", "cancelled"] = "queued"
    claimed_by: str = ""
    error: str = ""
    run: str = ""
    created_at: float


class Claimed(Response):
    launch: Launch | None = None


# --- tokens and health ----------------------------------------------------------------------------


class CreateToken(Request):
    name: Text
    scopes: Annotated[
        list[
            Annotated[
                str, StringConstraints(pattern=r"^(read|sql|train|admin|ingest(:[a-z0-9._*-]+)?)$")
            ]
        ],
        Field(min_length=1),
    ]
    expires_in: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds from now; null for no end."""


class Token(Response):
    id: str
    name: str
    scopes: list[str]
    created_at: float
    expires_at: float | None = None
    last_used_at: float | None = None
    token: str | None = None
    """The secret, shown once, in the answer to its creation."""


class Health(Response):
    status: Literal["ok", "degraded"]
    version: str
    database_revision: str = ""
    writable: bool = True
    detail: str = ""
    """Why it is degraded."""
