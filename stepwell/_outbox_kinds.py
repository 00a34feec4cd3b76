"""The kinds of items in an outbox: how each is written, read and sent.

    kind     a file contains                                          limit of one request
    arrow    a trajectory (codec.py)                                  16 of one schema
    metrics  {"run", "points": [MetricPoint, …]} of one step          1 MB of one run
    log      {"run", "text"}: lines of a run's log                    40 of one run
    policy   {"run", "version", "metadata"} and a newline, the bytes  one
    ending   {"run", "status", "error", "at"}: how a run ended        one

`parse` returns (shared, content): items in one request must have equal `shared`. Sending an item
twice is harmless, because the service matches it by id, (key, step) or version. Log lines are
compared with the log on the service first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepwell._outbox_folder import Destination, Entry
from stepwell._wording import pluralize
from stepwell.codec import END_OF_STREAM, TrajectoryStream, read_header
from stepwell.errors import CodecError, InvalidData, NotFound
from stepwell.messages import IngestItem, MetricPoint

if TYPE_CHECKING:
    from stepwell.client import Client

Parsed = tuple[Hashable, Any]
Send = Callable[["Client", Destination, Any, Sequence[Any], bool], list[IngestItem] | None]


@dataclass(frozen=True, slots=True)
class Kind:
    """How items of one kind are read and sent."""

    one: str
    """Display name of one item."""
    many: str
    most: int
    """Maximum number of items in one request."""
    parse: Callable[[Entry, bytes], Parsed]
    """Returns (shared, content). Raises ValueError if the bytes are not such an item."""
    send: Send
    """(client, destination, shared, contents, repeated) → the result of each item by id, or None if
    the service has accepted all of them. `repeated`: an earlier attempt may have reached the
    service. Raises errors of the service."""

    def count(self, number: int) -> str:
        return pluralize(number, self.one, self.many)


def as_json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def policy_item(run: str, version: int, data: bytes, metadata: dict[str, Any]) -> bytes:
    return as_json(run=run, version=version, metadata=metadata) + b"\n" + data


def _parse_trajectory(entry: Entry, data: bytes) -> Parsed:
    """Return (schema, batch). `put` has already encoded the trajectory."""
    stream = TrajectoryStream(data)
    ((_, metadata),) = stream.batches()
    if (found := read_header(metadata).get("id")) != entry.id:
        raise CodecError("another trajectory", expected=entry.id, got=str(found))
    return stream.head, stream.body


def _send_trajectories(
    client: Client, destination: Destination, head: Any, contents: Sequence[Any], repeated: bool
) -> list[IngestItem]:
    del repeated
    stream = b"".join([head, *contents, END_OF_STREAM])
    return client.post_stream(destination.dataset, stream, partition=destination.partition).items


def _parse_json(entry: Entry, data: bytes) -> Parsed:  # noqa: ARG001
    document = json.loads(data)
    return str(document["run"]), document


def _send_metrics(
    client: Client, destination: Destination, run: Any, contents: Sequence[Any], repeated: bool
) -> None:
    del destination, repeated
    try:
        points = [MetricPoint.model_validate(p) for content in contents for p in content["points"]]
    except ValueError as error:
        raise InvalidData(f"not a metric point: {error}") from None
    client.log_metrics(run, points)


def _send_log(
    client: Client, destination: Destination, run: Any, contents: Sequence[Any], repeated: bool
) -> None:
    """Append log lines. Since appending is not idempotent, compare with the log after a retry."""
    del destination
    there, texts = client.run_log(run) if repeated else "", [str(c["text"]) for c in contents]
    known = (n for n in range(len(texts), 0, -1) if there.endswith("".join(texts[:n])))
    if missing := "".join(texts[next(known, 0) :]):
        client.patch_run(run, log=missing)


def _parse_policy(entry: Entry, data: bytes) -> Parsed:  # noqa: ARG001
    head, _, weights = data.partition(b"\n")
    document = json.loads(head)
    return str(document["run"]), (int(document["version"]), document["metadata"], weights)


def _send_policy(
    client: Client, destination: Destination, run: Any, contents: Sequence[Any], repeated: bool
) -> None:
    del destination, repeated
    ((version, metadata, weights),) = contents
    client.publish_policy(run, version, weights, step=version, metadata=metadata)


def _send_ending(
    client: Client, destination: Destination, run: Any, contents: Sequence[Any], repeated: bool
) -> None:
    """Report how a run ended, unless the run was resumed or deleted since."""
    del destination, repeated
    (content,) = contents
    try:
        row = client.run(run)
    except NotFound:
        return
    if row.status == "running" and row.heartbeat_at <= float(content["at"]):
        client.patch_run(run, status=content["status"], error=content["error"])


KINDS = {
    # First, because any other request for a run counts as its heartbeat.
    "ending": Kind("end of a run", "ends of runs", 1, _parse_json, _send_ending),
    "arrow": Kind("trajectory", "trajectories", 16, _parse_trajectory, _send_trajectories),
    "metrics": Kind("step of metrics", "steps of metrics", 500, _parse_json, _send_metrics),
    "log": Kind("log entry", "log entries", 40, _parse_json, _send_log),
    "policy": Kind("policy", "policies", 1, _parse_policy, _send_policy),
}
"""Kinds by file suffix, in the order in which they are sent."""


def describe(kinds: dict[str, int]) -> str:
    """Return a description such as "3 steps of metrics, 1 policy"."""
    return ", ".join(KINDS[kind].count(kinds[kind]) for kind in KINDS if kinds.get(kind))
