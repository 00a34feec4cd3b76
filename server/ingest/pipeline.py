"""The write path as one object: validate, commit and, later, seal a body. Routes call `post`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa

from server.index.db import Database
from server.ingest.commit import Committer, Submission
from server.ingest.crash_recovery import recover_segments
from server.ingest.dataset_registry import DatasetRegistry, RegisteredDataset
from server.ingest.seal import Sealer
from server.ingest.segments import Encoded, Spool, encode_entry
from server.ingest.validate import RefusedTrajectory, ValidTrajectory, entry_of, read_body
from server.memory_budget import Reservation
from server.problems import ProblemError
from server.settings import Settings
from server.storage.shards import Entry
from server.storage.store import Store
from server.telemetry import Telemetry
from stepwell.codec import to_batch
from stepwell.messages import FlushResult, IngestItem, IngestResult, Partition
from stepwell.schema import row_bytes
from stepwell.spaces import EnvSpec
from stepwell.trajectory import Trajectory

ANSWER_WITHIN = 60.0
"""Seconds to wait for the disk before the response 503; the data may still be stored."""


class Ingest:
    """Complete when constructed: the segments of the previous process are recovered."""

    def __init__(self, settings: Settings, db: Database, store: Store, telemetry: Telemetry):
        self.registry = DatasetRegistry(db)
        self._telemetry = telemetry
        self._spool = Spool(store)
        self.committer = Committer(settings, db, store, self._spool, telemetry)
        self.sealer = Sealer(db, store, self.registry, self.committer, telemetry)
        for segment in recover_segments(db, store):
            self.sealer.add(segment)

    def start(self) -> None:
        self.committer.start()
        self.sealer.start()

    def close(self) -> None:
        """Commit and seal everything acknowledged."""
        self.committer.close()
        self.sealer.close()

    def post(
        self,
        name: str,
        partition: Partition,
        body: bytes | memoryview,
        reservation: Reservation,
        *,
        wait_sealed: bool = False,
        who: str = "local",
    ) -> IngestResult:
        """Store the trajectories of `body`; returns when they are durable. Blocks.

        `reservation` already holds the memory of the body. Raises `ProblemError`: 404, 422 (nothing
        stored), 429, 503, 507.
        """
        dataset = self.registry.get(name)
        reservation.add(decoded_bytes(len(body), dataset.spec))
        found = read_body(body, dataset)
        items = self._store(dataset, partition, found, reservation, who)
        result = IngestResult(dataset=name, partition=partition, items=items)
        if wait_sealed:
            self.sealer.flush()
            result.sealed = True
        for item in items:
            self._telemetry.trajectories.labels(item.status).inc()
        return result

    def _store(
        self,
        dataset: RegisteredDataset,
        partition: Partition,
        found: Iterator[ValidTrajectory | RefusedTrajectory],
        reservation: Reservation,
        who: str,
    ) -> list[IngestItem]:
        now = time.time()
        fresh: list[tuple[Entry, Encoded]] = []
        refused: dict[int, IngestItem] = {}
        for number, one in enumerate(found):
            if isinstance(one, RefusedTrajectory):
                refused[number] = IngestItem(id=one.id, status="refused", problem=one.problem)
                continue
            entry = entry_of(one, partition, now)
            message = one.message or rebuilt(one.trajectory, dataset, reservation)
            fresh.append((entry, encode_entry(dataset.name, entry, message)))
        settled = iter(self._commit(Submission(dataset, partition, fresh, who=who), reservation))
        count = len(fresh) + len(refused)
        return [refused.get(number) or next(settled) for number in range(count)]

    def _commit(self, submission: Submission, reservation: Reservation) -> list[IngestItem]:
        """Submit and wait for the result."""
        if not submission.items:
            return []
        # The committer may need the bytes for longer than this request waits.
        reservation.retain()
        submission.answer.add_done_callback(lambda _: reservation.release())
        self.committer.submit(submission)
        answer = submission.answer
        try:
            return answer.result(ANSWER_WITHIN)
        except TimeoutError:
            raise ProblemError(
                503,
                "too_slow",
                "the disk did not respond in time; send the same trajectories again, they are"
                " stored only once",
                headers={"Retry-After": "5"},
            ) from None
        except ProblemError as error:
            if error.status == 404:  # deleted in the meantime: drop it from the cache
                self.registry.forget(submission.dataset.name)
            # A copy: the future keeps the exception, and with it every frame that a raise attaches.
            raise error.copy() from None
        finally:
            del answer, submission

    def flush(self, name: str | None = None) -> FlushResult:
        """Seal everything acknowledged so far; returns the counts of dataset `name`. Blocks."""
        pk = None if name is None else self.registry.get(name).pk
        counted = [count for key, count in self.sealer.flush() if pk in (None, key)]
        return FlushResult(sealed=sum(counted), shards=len(counted))


def decoded_bytes(size: int, spec: EnvSpec) -> int:
    """Upper bound of what decoding a body of `size` bytes adds: flags are bits and become bytes."""
    groups = (spec.observations, spec.actions, spec.infos)
    flags = spec.action_known + sum(
        space.shape == () and space.dtype == "bool" for group in groups for space in group.values()
    )
    return int(size * flags / (row_bytes(spec) + flags / 8))


def rebuilt(
    trajectory: Trajectory, dataset: RegisteredDataset, reservation: Reservation
) -> pa.Buffer:
    """The rows in the layout of our own writer, for a message with another layout."""
    reservation.add(2 * trajectory.nbytes)  # the rebuilt columns, and the message
    return to_batch(trajectory, dataset.spec, dataset.schema).serialize()
