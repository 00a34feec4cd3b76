"""The bodies of the HTTP API, version 1. These names are the API: docs/reference/http.md lists them
by route.

    names, limits, errors · datasets · versions · annotations · consumers · ingest · trajectories
    jobs · SQL · snapshots · runs · policies · evaluations · videos · workers · launches · tokens
    health

Requests forbid unknown fields, so a typo is an error. Responses may gain fields, so clients ignore
unknown ones. Times are Unix seconds (float). Names of datasets and runs match `NAME`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from typing_extensions import Self

# --- names, limits, errors ------------------------------------------------------------------------

NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"
VERSIONED = r"^[a-z0-9][a-z0-9._-]{0,63}(@[a-z0-9][a-z0-9._-]{0,63})?$"
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
ANNOTATION_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$"
SCOPE = r"^(read|sql|train|admin|ingest(:[a-z0-9._*-]+)?|play(:[A-Za-z0-9._*-]+)?)$"
Name = Annotated[str, StringConstraints(pattern=NAME)]
Versioned = Annotated[str, StringConstraints(pattern=VERSIONED)]
"""A dataset, or a version of it: "hopper" or "hopper@v3"."""
RunName = Annotated[str, StringConstraints(pattern=RUN_NAME)]
Alias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9._-]{0,63}$")]
Text = Annotated[str, StringConstraints(max_length=4096)]
Tag = Annotated[str, StringConstraints(min_length=1, max_length=128)]


def one_line(text: str) -> str:
    """Refuse control characters and line breaks. Raises ValueError, which becomes a 422."""
    for letter in text:
        if unicodedata.category(letter) in ("Cc", "Zl", "Zp"):
            raise ValueError(f"one line without control characters; this has {letter!r}")
    return text


Title = Annotated[
    str, StringConstraints(strip_whitespace=True, max_length=200), AfterValidator(one_line)
]
Partition = Literal["fifo", "protected"]
Format = Literal["d4rl", "npz", "minari", "amago", "rlds", "lerobot", "parquet", "zip"]
"""Format of an uploaded file; zip is a folder whose format is recognised by its content."""
FORMATS: tuple[str, ...] = get_args(Format)
PARTIALLY_OBSERVABLE = "partially-observable"
"""Tag of a dataset whose single observations do not show the state: learning needs memory."""
MAX_DEPTH = 64
"""Maximum nesting of JSON objects: enough for configurations, below recursion limits of parsers."""


_RULES = {
    NAME: "a name has at most 64 of a-z, 0-9, '.', '_' and '-', and begins with a letter or digit",
    VERSIONED: "a dataset, or dataset@version; a name has at most 64 of a-z, 0-9, '.', '_' and '-',"
    " and begins with a letter or digit",
    ANNOTATION_NAME: "a name has at most 200 of a-z, A-Z, 0-9, '.', '_', '/' and '-', a letter or"
    " digit first",
    RUN_NAME: "a name has at most 128 of a-z, A-Z, 0-9, '.', '_' and '-', a letter or digit first",
}


def reason_of(error: Mapping[str, Any]) -> str:
    """What is wrong, from one of the `errors()` of a pydantic `ValidationError`: of names in words,
    instead of a pattern."""
    pattern = error.get("ctx", {}).get("pattern", "")
    return _RULES.get(pattern, str(error["msg"]))


def split_version(name: str) -> tuple[str, str]:
    """The dataset and the version of "dataset@version"; the version is "" for a dataset."""
    dataset, _, version = name.partition("@")
    return dataset, version


def storable(document: dict[str, Any]) -> dict[str, Any]:
    """Refuse a document that could be stored but not returned, because every list with it fails.

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
"""A JSON object from the caller, stored unchanged."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
Number = Annotated[int, Field(ge=0, le=2**53)]
"""A step or a version, limited to integers that every JSON parser represents exactly."""
Limit = Annotated[int, Field(ge=1, le=2**53)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
PageLimit = Annotated[int, Field(ge=1, le=1000, description="rows of this page")]
Cursor = Annotated[int | None, Field(ge=0, lt=2**63, description="`next` of the previous page")]

ARROW = "application/vnd.apache.arrow.stream"
MP4, GIF = "video/mp4", "image/gif"
"""Media types of videos."""
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
    """Stable, machine-readable, for instance "schema_mismatch"; docs/reference/http.md lists
    them."""
    expected: Any = None
    got: Any = None
    errors: list[Json] | None = None


class Page(Response, Generic[T]):
    """A part of a list."""

    items: list[T]
    next: str | None = None
    """Cursor of the next page (?cursor=), or null at the end."""


class Excluded(Response):
    """A damaged file, and what is missing from the response because of it."""

    dataset: str
    file: str
    """A shard (sh_…), or a segment whose records could not be sealed (sg_…)."""
    trajectories: int
    """Trajectories in the file that are not deleted."""


# --- datasets ----------------------------------------------------------------------------------


class Capacity(Request):
    """Limits of the fifo partition. The oldest trajectories are evicted when any is exceeded.

    The limits apply separately to training and to evaluation (purpose 'eval') trajectories, so
    neither evicts the other. Protected trajectories do not count and are never evicted.
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
    """Only the given fields change. Allowed while data is being written."""

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
    """Training trajectories of the fifo partition, which count against `capacity`."""
    protected: PartitionStats = PartitionStats()
    eval: PartitionStats = PartitionStats()
    """Trajectories of purpose 'eval', in both partitions. `capacity` applies separately to those in
    fifo. Training snapshots exclude them unless `include_eval` is set."""
    evicted: int = 0
    unsealed: int = 0
    """Trajectories that are durable but not yet in a shard, and so not yet in SQL `steps`."""
    shards: int = 0
    stored_bytes: int = 0
    """Bytes of the Parquet shards on disk."""
    return_mean: float | None = None
    return_min: float | None = None
    return_max: float | None = None
    length_mean: float | None = None
    last_ingest_at: float | None = None
    excluded: list[Excluded] = []
    """Damaged files. Their trajectories are excluded from SQL `steps` and from new snapshots."""
    created_by: str = ""
    """Who created it, as in the audit log; "" if that is unknown."""


class FlushResult(Response):
    sealed: int
    """Trajectories moved into shards by this call."""
    shards: int


# --- versions ----------------------------------------------------------------------------------


class CreateVersion(Request):
    """Freeze a selection of a dataset's trajectories under a name, for ever."""

    name: Name
    where: Annotated[str, StringConstraints(max_length=100_000)] | None = None
    """SQL condition over `trajectories`; without it, all trajectories of the dataset."""
    description: Text = ""
    licence: Text = ""
    """Licence of the data, such as CC-BY-4.0."""
    parent: Name | None = None
    """Name of the version of this dataset from which this one was made."""
    include_eval: bool = False
    """Also trajectories of purpose 'eval'."""


class Spread(Response):
    """The distribution of a number."""

    mean: float
    std: float
    min: float
    q25: float
    median: float
    q75: float
    max: float


class VersionStatistics(Response):
    trajectories: int = 0
    steps: int = 0
    """Transitions, not rows."""
    bytes: int = 0
    """Array bytes before compression."""
    returns: Spread | None = None
    """None without trajectories."""
    lengths: Spread | None = None
    terminated: int = 0
    truncated: int = 0
    success: int | None = None
    """Number that succeeded; None if no environment reports it."""
    envs: dict[str, int] = {}
    """Name → trajectories."""
    policies: dict[str, int] = {}
    """The most frequent ones."""


class Version(Response):
    """A named selection that never changes."""

    version: str
    """dataset@name."""
    dataset: str
    name: str
    digest: str
    """sha256 over the sorted ids and content digests (docs/reference/versions.md)."""
    parent: str | None = None
    """The version that this one was made from, as dataset@name."""
    where: str = ""
    """The condition that was run once, when the version was created."""
    include_eval: bool = False
    select: str
    """The SQL that selects its trajectories, now and later."""
    description: str = ""
    licence: str = ""
    spec: Json
    statistics: VersionStatistics
    missing: int = 0
    """Trajectories that were lost before the index was rebuilt."""
    created_by: str = ""
    created_at: float


class VersionPart(Response):
    """Trajectories that two versions share, or that only one of them has."""

    statistics: VersionStatistics
    sql: str
    """Selects them."""


class VersionDiff(Response):
    before: str
    after: str
    kept: VersionPart
    added: VersionPart
    """Only in `after`."""
    removed: VersionPart
    """Only in `before`."""


# --- annotations ----------------------------------------------------------------------------------

AnnotationName = Annotated[str, StringConstraints(pattern=ANNOTATION_NAME)]
StepValues = list[Finite | None]


class TrajectoryValues(Request):
    """Values of the steps 0 … T-1 of a trajectory; null where the action is unknown."""

    trajectory: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    q: StepValues
    """Value of the action taken, as a return in the environment's units."""
    v: StepValues
    """Value of the policy's actions."""
    advantage: StepValues
    """Input of the filter that weighs behaviour cloning; its unit is the filter's."""
    weight: StepValues
    """Output of that filter."""


class PostAnnotations(Request):
    """Values by one critic, of trajectories of a dataset."""

    name: AnnotationName
    policy: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """run/version; that of a name stays the same."""
    trajectories: Annotated[list[TrajectoryValues], Field(min_length=1, max_length=20_000)]


class AnnotateResult(Response):
    """What became of the trajectories of a request."""

    stored: int
    known: int
    """They have an annotation of this name, which stays."""
    gone: int
    """They are not, or no longer, in the dataset."""


class Annotation(Response):
    """All values of one name."""

    dataset: str
    name: str
    policy: str
    trajectories: int
    steps: int
    bytes: int
    created_at: float


# --- consumers: the ratio of samples to inserted steps ------------------------------------------


class SampleRatio(Request):
    """How many samples a consumer draws per inserted step (Reverb's SampleToInsertRatio).

    A sample is one window of a batch; an insert is one training step stored in the dataset. With
    d(ratio) = ratio * (inserts - min_size) - samples, the consumer may draw while
    d(samples_per_insert) >= -buffer and the dataset has min_size steps; collectors may begin
    episodes while d(min_samples_per_insert) < buffer.
    """

    samples_per_insert: Annotated[float, Field(ge=1e-9, le=1e9)]
    buffer: Annotated[float, Field(gt=0, le=1e15)]
    """Samples by which either side may be ahead, at least max(1, samples_per_insert)."""
    min_size: Annotated[int, Field(ge=1, le=2**53)] = 1
    """Steps in the dataset before the first sample."""
    min_samples_per_insert: Annotated[float, Field(ge=1e-9, le=1e9)] | None = None
    """Collectors wait only below this ratio; null: below samples_per_insert. Between the two
    nobody waits."""

    @property
    def least(self) -> float:
        """Samples per inserted step below which collectors wait."""
        low = self.min_samples_per_insert
        return self.samples_per_insert if low is None else low

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.least > self.samples_per_insert:
            raise ValueError(
                f"min_samples_per_insert: expected at most samples_per_insert = "
                f"{self.samples_per_insert:g}, got {self.least:g}"
            )
        return self

    @model_validator(mode="after")
    def _buffer_suffices(self) -> Self:
        least = max(1.0, self.samples_per_insert)
        if self.buffer < least:
            raise ValueError(
                f"buffer: expected at least max(1, samples_per_insert) = {least:g}, got "
                f"{self.buffer:g}; with less, both sides would wait for each other"
            )
        return self


class PutConsumer(Request):
    """What a consumer reports every second."""

    samples: Number
    """Samples drawn so far, in all sessions of the run."""
    ratio: SampleRatio | None = None
    """Registers the consumer, or changes its ratio from here on. Without it the consumer must be
    registered."""


class PatchConsumer(Request):
    """Only the given fields change."""

    samples_per_insert: Finite | None = None
    buffer: Finite | None = None
    min_size: Int64 | None = None
    min_samples_per_insert: Finite | None = None


class Consumer(Response):
    dataset: str
    name: str
    """Name of the run that samples."""
    ratio: SampleRatio
    samples: int
    inserted: int
    """Training steps that the dataset has received in all, also those evicted since."""
    samples_until: int
    """It may draw samples up to this total now."""
    inserts_until: int
    """Collectors may begin episodes while `inserted` is below this number."""
    may_sample: bool
    may_insert: bool
    alive: bool
    """It has reported in the last 45 s; collectors wait only for living consumers."""
    created_at: float
    updated_at: float


# --- ingest ------------------------------------------------------------------------------------

ItemStatus = Literal["stored", "duplicate", "evicted", "conflict", "refused"]


class IngestItem(Response):
    """The result for one trajectory of the body. `stored` and `duplicate` are durable."""

    id: str
    status: ItemStatus
    seq: int | None = None
    """Sequence number within the dataset, assigned by the service."""
    problem: Problem | None = None


class IngestResult(Response):
    dataset: str
    partition: Partition
    items: list[IngestItem]
    sealed: bool = False
    """True if ?wait=sealed was given and the trajectories are sealed."""


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
    """T, the number of transitions."""
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


class ListTrajectories(Request):
    """The parameters of a list of trajectories."""

    partition: Partition | None = None
    env: str | None = None
    policy: str | None = None
    run: str | None = None
    purpose: str | None = None
    state: str | None = None
    tag: str | None = None
    order: str = "-seq"
    limit: PageLimit = 100
    cursor: str | None = None


class PatchTrajectory(Request):
    """Labels, and the move fifo → protected. The reverse requires an admin and is audited."""

    tags: list[Tag] | None = None
    flags: list[Tag] | None = None
    notes: Text | None = None
    partition: Partition | None = None


class LabelTrajectories(Request):
    """Labels of many trajectories: removed ones go first, then the others are added."""

    ids: Annotated[list[Text], Field(min_length=1, max_length=10_000)]
    add_tags: list[Tag] = []
    remove_tags: list[Tag] = []
    add_flags: list[Tag] = []
    remove_flags: list[Tag] = []
    protect: bool = False
    """Move those in fifo to protected."""


class Labelled(Response):
    changed: int
    """How many were not so before."""


# --- jobs --------------------------------------------------------------------------------------

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]


JOB_ENDS = ("succeeded", "failed", "cancelled")
"""States of a job that has ended."""


class Job(Response):
    id: str
    kind: str
    dataset: str = ""
    """What it imports into."""
    state: JobState
    progress: float = 0.0
    """0 … 1."""
    message: str = ""
    """Human-readable description of the current step."""
    result: Json | None = None
    error: Problem | None = None
    created_at: float
    finished_at: float | None = None
    owner: str = ""
    """Who made it, as in the audit log; "" if that is unknown."""


class JobAccepted(Response):
    job: Job


# --- SQL ---------------------------------------------------------------------------------------


class Query(Request):
    sql: Annotated[str, StringConstraints(min_length=1, max_length=100_000)]
    params: list[Any] | Json | None = None
    """Values for ? or $name placeholders."""
    dataset: Name | None = None
    """Dataset to which the unqualified table `steps` refers. Without it, `steps` has only the
    columns common to all datasets."""
    limit: Annotated[int, Field(ge=0, le=1_000_000)] = 1000
    timeout: Annotated[float, Field(gt=0, le=60)] = 5.0
    """Seconds after which the query is cancelled."""


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


ParamName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*$", max_length=64)]
ParamValue = Text | bool | Annotated[int, Field(ge=-(2**63), lt=2**63)] | Finite | None


class SaveQuery(Request):
    """SQL to keep under a name."""

    sql: Annotated[str, StringConstraints(min_length=1, max_length=100_000)]
    description: Text = ""
    params: Annotated[dict[ParamName, ParamValue], Field(max_length=50)] = {}
    """Values of its $name placeholders, used where a caller gives none."""
    dataset: Name | None = None
    """Dataset of unqualified `steps`, as in `Query`."""


class SavedQuery(Response):
    name: str
    sql: str
    description: str = ""
    params: Json = {}
    dataset: str | None = None
    owner: str
    """The id of the token that saved it first, "operator" or "local"."""
    created_at: float
    updated_at: float


# --- snapshots ---------------------------------------------------------------------------------


class Source(Request):
    """One component of a mixture."""

    select: Annotated[str, StringConstraints(min_length=1, max_length=20_000)]
    """SELECT id[, weight] FROM trajectories WHERE …"""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0


class CreateSnapshot(Request):
    """Either `from`, or the short form `dataset` (or dataset@version; + `where`, a condition over
    `trajectories`)."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    sources: list[Source] | None = Field(default=None, alias="from", serialization_alias="from")
    dataset: Versioned | None = None
    where: Annotated[str, StringConstraints(max_length=20_000)] | None = None
    since: str | None = None
    """Id of an earlier snapshot; `added` and `removed` are counted from it. If nothing changed,
    that snapshot is returned and no new one is created."""
    include_eval: bool = False
    holder: Text = ""
    """Holder of the first lease."""


class Snapshot(Response):
    """A frozen selection: the same id always means the same trajectories."""

    id: str
    digest: str
    """sha256 over the ordered selection: equal digests mean equal selections."""
    selection: Json
    """The resolved request."""
    spec: Json
    """The EnvSpec that all selected trajectories share."""
    datasets: list[str]
    trajectories: int
    steps: int
    shards: int
    bytes: int
    """Total bytes of the shards to download."""
    created_at: float
    leased_until: float | None = None
    added: int | None = None
    removed: int | None = None
    excluded: list[Excluded] = []
    """Damaged files whose trajectories were selected but excluded."""


class PutLease(Request):
    holder: Text = ""
    ttl: Annotated[float, Field(gt=0, le=86_400)] = 120.0


class Lease(Response):
    snapshot: str
    holder: str
    ttl: float
    """Seconds from now in which the service can answer (docs/reference/maintenance.md, Clocks)."""
    expires_at: float
    """Approximate Unix time of the expiry, for display."""


# --- runs --------------------------------------------------------------------------------------

RunKind = Literal["train", "collect", "eval"]
RunStatus = Literal["running", "finished", "failed", "stopped"]
MOST_NAMED = 100
"""Names of runs or of metrics in one request for a list."""


class Alarm(Request):
    """A health check of a training run that has failed and still does."""

    key: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """Name of the check; docs/reference/training.md lists them."""
    message: Text
    """What is wrong, with numbers and advice."""
    update: Number
    """The update at which it began."""
    value: Finite
    """The number of the check; larger is worse."""


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
    """Resume an existing run of the same kind instead of responding with 409."""


class ListRuns(Request):
    """The parameters of a list of runs: which, and what of them."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    kind: RunKind | None = None
    status: RunStatus | None = None
    tag: str | None = None
    without_tag: str | None = None
    parent: str | None = None
    search: Annotated[str, StringConstraints(max_length=200)] = ""
    """Text in the name, the title or a tag."""
    where: Annotated[str, StringConstraints(max_length=2000)] = ""
    """Conditions over settings and newest metrics: agent.discount = 0.99 and eval/return > 200."""
    alive: bool | None = None
    """false, with the status running: runs without a heartbeat."""
    since: float | None = None
    """Unix time of the oldest heartbeat."""
    name: Annotated[list[str], Field(max_length=MOST_NAMED)] | None = None
    """Repeated: only these."""
    key: Annotated[list[str], Field(max_length=MOST_NAMED)] | None = None
    """Repeated: newest metrics of these keys only."""
    brief: bool = False
    """Without config, and without newest metrics but for those of `key`."""
    limit: PageLimit = 100
    cursor: Cursor = None


class PatchRun(Request):
    """Changes to a run. An empty body is a heartbeat of the run."""

    title: Title | None = None
    """Shown with the name, which never changes; "" takes it back."""
    status: RunStatus | None = None
    snapshots: list[str] | None = None
    tags: list[Tag] | None = None
    notes: Text | None = None
    alarms: Annotated[list[Alarm], Field(max_length=100)] | None = None
    """All standing alarms; replaces the earlier list."""
    error: Annotated[str, StringConstraints(max_length=20_000)] | None = None
    log: Annotated[str, StringConstraints(max_length=200_000)] | None = None
    """Lines to append to the run's log."""


class Run(Response):
    name: str
    title: str | None = None
    """What people call it; the name stays what trajectories, policies and evaluations refer to."""
    number: int = 0
    """Number in order of creation; it never changes, and determines the colour in the dashboard."""
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
    alarms: list[Alarm] = []
    """Failed health checks of a trainer."""
    command: str = ""
    error: str = ""
    created_at: float
    heartbeat_at: float
    finished_at: float | None = None
    policies: int = 0
    latest: dict[str, float] = {}
    """Newest value of every metric whose newest value is finite."""
    latest_steps: dict[str, int] = {}
    """Step of the newest point of every metric; unchanged curves need not be read again."""
    alive: bool = True
    """True if its status is running and its last heartbeat is at most 45 seconds old."""
    owner: str = ""
    """Who made it, as in the audit log; "" if that is unknown."""

    @property
    def label(self) -> str:
        """The title, if it has one, and the name."""
        return f"{self.title} ({self.name})" if self.title else self.name

    @property
    def alarm_summary(self) -> str:
        """The first alarm and the number of others, such as "q_above_data +2", for tables."""
        others = f" +{len(self.alarms) - 1}" if len(self.alarms) > 1 else ""
        return self.alarms[0].key + others if self.alarms else ""


class RunPage(Page[Run]):
    total: int = 0
    """Number of matching runs on all pages."""


class MetricPoint(Request):
    key: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    step: Number
    value: float | None
    """null represents NaN or infinity, which JSON does not support."""
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
    """Points stored (after `after`, if given); a down-sampled series contains fewer."""


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
    """Scores of a policy with fixed seeds; `dataset` has its episodes with purpose 'eval'."""

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
    """Score on the D4RL scale (0 … 100) if a reference exists."""
    details: Document = {}


class Evaluation(CreateEvaluation):
    model_config = ConfigDict(extra="ignore")

    id: str
    created_at: float
    owner: str = ""
    """Who made it, as in the audit log; "" if that is unknown."""


class Video(Response):
    """A video of one episode of an evaluation."""

    evaluation: str
    """Id of the evaluation."""
    seed: int
    total_reward: float = Field(alias="return", serialization_alias="return")
    """Return of the episode that is shown, the sum of its rewards."""
    length: int
    """Steps of the episode that is shown."""
    media_type: Literal["video/mp4", "image/gif"]
    sha256: str
    bytes: int
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
    state: Literal["starting", "running", "waiting", "paused", "draining", "stopped", "failed"] = (
        "running"
    )
    """waiting: the other side of a sample ratio is behind."""
    counters: dict[str, float] = {}
    """Named numbers: env_steps, episodes, steps_per_second, outbox, …"""
    last_error: Annotated[str, StringConstraints(max_length=20_000)] = ""


class Worker(PutWorker):
    model_config = ConfigDict(extra="ignore")

    id: str
    command: Command = "none"
    """Pending command, which the worker receives in the response to its next heartbeat."""
    started_at: float
    heartbeat_at: float
    alive: bool = True
    owner: str = ""
    """Who made it, as in the audit log; "" if that is unknown."""


class PostCommand(Request):
    command: Command


LaunchRole = Literal["train", "collect", "evaluate"]
LaunchState = Literal["queued", "claimed", "running", "finished", "failed", "cancelled"]


class ProgramRecipe(Request):
    """A recipe of `stepwell train`."""

    about: Text = ""
    values: Document = {}
    """The settings that differ from the defaults."""
    updates: float | None = None
    updates_per_second: float | None = None
    """Typical number of updates, and their speed on the machine of docs/reference/training.md."""


class Program(Request):
    """What can be set when a launcher starts `stepwell train`, `collect` or `evaluate`."""

    version: Text
    """Version of Stepwell on the launcher's machine."""
    settings: Annotated[dict[str, Document], AfterValidator(storable)]
    """JSON schema of each setting that a launch may change, by its dotted name, with `description`,
    `default`, and `kinds`: the kinds of its section that have it."""
    common: list[Text] = []
    """Names of the settings that are often changed."""
    required: list[Text] = []
    recipes: dict[Text, ProgramRecipe] = {}
    plugins: list[Text] = []
    """Modules that a launch may load, of which it loads all by default."""


class CreateLaunch(Request):
    """A request for processes, as "start" in the dashboard sends it. A launcher claims it."""

    role: LaunchRole
    recipe: Annotated[str, StringConstraints(max_length=128, pattern=r"^[A-Za-z0-9._-]*$")] = ""
    args: Annotated[dict[str, str | int | float | bool], AfterValidator(storable)] = {}
    """Option → value, for instance {"agent.losses.gamma": 0.99}; never a shell string."""
    count: Annotated[int, Field(ge=1, le=64)] = 1


class ClaimLaunch(Request):
    worker: Text
    roles: list[LaunchRole] = ["train", "collect", "evaluate"]


class PatchLaunch(Request):
    """The report of the launcher that claimed the launch."""

    state: Literal["running", "finished", "failed", "cancelled"]
    error: Annotated[str, StringConstraints(max_length=20_000)] = ""
    run: Text = ""
    log: Annotated[str, StringConstraints(max_length=20_000)] = ""
    """The end of the output of its processes."""


class Launch(Response):
    id: str
    role: LaunchRole
    recipe: str = ""
    args: Json = {}
    count: int = 1
    state: LaunchState = "queued"
    claimed_by: str = ""
    error: str = ""
    run: str = ""
    created_at: float
    owner: str = ""
    """Who made it, as in the audit log; "" if that is unknown."""
    claimer: str = ""
    """Who claimed it; `claimed_by` is the launcher's name, which anyone may choose."""


class Claimed(Response):
    launch: Launch | None = None


# --- tokens and health ----------------------------------------------------------------------------


Quota = Annotated[int, Field(ge=1, le=2**53)]


class CreateToken(Request):
    name: Text
    scopes: Annotated[
        list[Annotated[str, StringConstraints(pattern=SCOPE)]],
        Field(min_length=1),
    ]
    expires_in: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds until expiry; null for no expiry."""
    bytes_per_day: Quota | None = None
    """Quota of bytes in bodies; null for none."""
    requests_per_minute: Quota | None = None


class PatchToken(Request):
    """New quotas of a token; null takes one away."""

    bytes_per_day: Quota | None = None
    requests_per_minute: Quota | None = None


class Token(Response):
    id: str
    name: str
    scopes: list[str]
    created_at: float
    expires_at: float | None = None
    last_used_at: float | None = None
    bytes_per_day: int | None = None
    requests_per_minute: int | None = None
    token: str | None = None
    """The secret, returned only when the token is created."""


class AuditEntry(Response):
    """A change, or, of what happens often, all changes of a day by one caller to one subject."""

    time: float
    """Time of the first action."""
    who: str
    """Id of a token, "operator", "oidc:ADDRESS", "local" without tokens; "service": itself."""
    action: str
    subject: str
    """Name or id of what it was done to."""
    detail: Json = {}
    """Where several are counted, their sums."""
    count: int = 1
    until: float | None = None
    """Time of the last of those that are counted."""


class Health(Response):
    status: Literal["ok", "degraded"]
    version: str
    database_revision: str = ""
    writable: bool = True
    detail: str = ""
    """The reason if the service is degraded."""
