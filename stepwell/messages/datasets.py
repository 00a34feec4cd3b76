"""Datasets, what is stored in them, and the jobs that import files."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from stepwell.messages.base import (
    Document,
    Excluded,
    Json,
    Limit,
    Name,
    Partition,
    Problem,
    Request,
    Response,
    Tag,
    Text,
)

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


class DatasetPage(Response):
    items: list[Dataset]
    next: str | None = None
    """Cursor of the next page (?cursor=), or null at the end; the same for every list."""


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


class TrajectoryPage(Response):
    items: list[TrajectoryInfo]
    next: str | None = None


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


class JobPage(Response):
    items: list[Job]
    next: str | None = None


class JobAccepted(Response):
    job: Job
