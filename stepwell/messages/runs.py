"""Runs with their metrics, policies and evaluations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints

from stepwell.messages.base import (
    Document,
    Finite,
    Int64,
    Json,
    Name,
    Number,
    Request,
    Response,
    RunName,
    Tag,
    Text,
)

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


class RunPage(Response):
    items: list[Run]
    next: str | None = None
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


class PolicyPage(Response):
    items: list[Policy]
    next: str | None = None


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


class EvaluationPage(Response):
    items: list[Evaluation]
    next: str | None = None
