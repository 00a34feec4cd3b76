"""What an outbox holds: how an item of each kind is written, read back, and sent.

    kind     a file contains                                          one request takes
    arrow    a trajectory (codec.py)                                  16 of one schema
    metrics  {"run", "points": [MetricPoint, …]} of one step          1 MB of one run
    log      {"run", "text"}: lines of a run's log                    40 of one run
    policy   {"run", "version", "metadata"} and a newline, the bytes  one
    ending   {"run", "status", "error", "at"}: how a run ended        one

`parse` returns (what items must share to travel together, the content). Sending an item twice is
harmless: by id, by (key, step), by version; of log lines the service is asked what it has already.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stepwell._outbox_folder import Destination, Entry
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
    """For people: what one item is called."""
    many: str
    most: int
    """Items in one request, at most."""
    parse: Callable[[Entry, bytes], Parsed]
    """(shared, content). Raises ValueError where the bytes are not such an item."""
    send: Send
    """(client, destination, shared, contents, repeated) → what became of each by id, or None where
    the service has taken all of them. `repeated`: an earlier attempt may have reached the service.
    Raises errors of the service."""

    def count(self, number: int) -> str:
        return f"{number} {self.one if number == 1 else self.many}"


def as_json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def policy_item(run: str, version: int, data: bytes, metadata: dict[str, Any]) -> bytes:
    return as_json(run=run, version=version, metadata=metadata) + b"\n" + data


def _parse_trajectory(entry: Entry, data: bytes) -> Parsed:
    """(schema, batch): `put` has encoded it, so it is sent as it is."""
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
    """Appending is not idempotent: after a lost answer the service is asked what it has."""
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
    """Unless the run has gone on since, or is gone."""
    del destination, repeated
    (content,) = contents
    try:
        row = client.run(run)
    except NotFound:
        return
    if row.status == "running" and row.heartbeat_at <= float(content["at"]):
        client.patch_run(run, status=content["status"], error=content["error"])


KINDS = {
    # First: what else arrives for a run says that the run is alive.
    "ending": Kind("end of a run", "ends of runs", 1, _parse_json, _send_ending),
    "arrow": Kind("trajectory", "trajectories", 16, _parse_trajectory, _send_trajectories),
    "metrics": Kind("step of metrics", "steps of metrics", 500, _parse_json, _send_metrics),
    "log": Kind("log entry", "log entries", 40, _parse_json, _send_log),
    "policy": Kind("policy", "policies", 1, _parse_policy, _send_policy),
}
"""By suffix of the file, in the order in which they are sent."""


def describe(kinds: dict[str, int]) -> str:
    """For people, for instance "3 steps of metrics, 1 policy"."""
    return ", ".join(KINDS[kind].count(kinds[kind]) for kind in KINDS if kinds.get(kind))
