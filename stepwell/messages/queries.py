"""SQL, and snapshots: selections that are frozen."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, StringConstraints

from stepwell.messages.base import Excluded, Json, Name, Request, Response, Text

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
    """A frozen selection. The same id means the same trajectories, for ever."""

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


class SnapshotPage(Response):
    items: list[Snapshot]
    next: str | None = None


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
