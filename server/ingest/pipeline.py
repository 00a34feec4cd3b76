"""The write path as one object: body → checked → committed → (sealed). Routes call `post`."""

from __future__ import annotations

import time

from server.index.db import Database
from server.ingest.commit import Committer, Submission
from server.ingest.recover import recover
from server.ingest.registered import Registered, Registry
from server.ingest.seal import Sealer
from server.ingest.spool import Spool, encode_entry
from server.ingest.validate import Checked, Refused, read_body
from server.problems import ProblemError
from server.settings import Settings
from server.storage.shards import Entry
from server.storage.store import Store
from server.telemetry import Telemetry
from stepwell.codec import to_batch
from stepwell.messages import FlushResult, IngestItem, IngestResult, Partition

ANSWER_WITHIN = 60.0
"""Seconds to wait for the disk before a request is answered 503; it may be stored all the same."""


class Ingest:
    """Complete when constructed: what the last process left behind is recovered."""

    def __init__(self, settings: Settings, db: Database, store: Store, telemetry: Telemetry):
        self.registry = Registry(db)
        self._telemetry = telemetry
        self._spool = Spool(store)
        self.committer = Committer(settings, db, store, self._spool, telemetry)
        self.sealer = Sealer(settings, db, store, self.registry, self.committer, telemetry)
        for segment in recover(db, store):
            self.sealer.add(segment)

    def start(self) -> None:
        self.committer.start()
        self.sealer.start()

    def close(self) -> None:
        """Commit and seal everything acknowledged."""
        self.committer.close()
        self.sealer.close()

    def post(
        self, name: str, partition: Partition, body: bytes, *, wait_sealed: bool = False
    ) -> IngestResult:
        """Store the trajectories of `body`; answers when they are durable. Blocks.

        Raises `ProblemError`: 404, 422 (nothing stored), 429, 503, 507.
        """
        dataset = self.registry.get(name)
        found = read_body(body, dataset)
        items = self._store(dataset, partition, found)
        result = IngestResult(dataset=name, partition=partition, items=items)
        if wait_sealed:
            self.sealer.flush()
            result.sealed = True
        for item in items:
            self._telemetry.trajectories.labels(item.status).inc()
        return result

    def _store(
        self, dataset: Registered, partition: Partition, found: list[Checked | Refused]
    ) -> list[IngestItem]:
        now = time.time()
        fresh: list[tuple[Entry, bytes]] = []
        for one in found:
            if isinstance(one, Checked):
                entry = entry_of(one, partition, now)
                batch = to_batch(one.trajectory, dataset.spec, dataset.schema)
                fresh.append((entry, encode_entry(dataset.name, entry, batch)))
        settled: list[IngestItem] = []
        if fresh:
            answer = self.committer.submit(Submission(dataset, partition, fresh))
            try:
                settled = answer.result(ANSWER_WITHIN)
            except TimeoutError:
                raise ProblemError(
                    503,
                    "too_slow",
                    "the disk did not answer in time; send the same trajectories again, they are"
                    " stored once in any case",
                    headers={"Retry-After": "5"},
                ) from None
            except ProblemError as error:
                if error.status == 404:  # deleted while we looked: remember nothing of it
                    self.registry.forget(dataset.name)
                raise
        answers = iter(settled)
        return [
            IngestItem(id=one.id, status="refused", problem=one.problem)
            if isinstance(one, Refused)
            else next(answers)
            for one in found
        ]

    def flush(self, name: str | None = None) -> FlushResult:
        """Seal everything acknowledged so far; counts what belongs to `name`. Blocks."""
        pk = None if name is None else self.registry.get(name).pk
        moved = self.sealer.flush()
        counted = [m for key, m in moved.items() if pk is None or key == pk]
        return FlushResult(sealed=sum(m[0] for m in counted), shards=sum(m[1] for m in counted))


def entry_of(checked: Checked, partition: str, now: float) -> Entry:
    """The description of a trajectory that is about to be stored; its seq comes later."""
    trajectory = checked.trajectory
    return Entry(
        header=trajectory.header(),
        digest=checked.digest,
        seq=0,
        partition=partition,
        total_reward=trajectory.total_reward,
        bytes=trajectory.nbytes,
        created_at=now,
    )
