"""Group commit: one thread commits all waiting requests with one fsync and one index transaction.

    collect (everything submitted while the last group was being written)
      → begin → look up ids → append → fsync → rows, totals, eviction → COMMIT
      → respond

The payload is durable before the index row, and the index row before the response. Ids are
looked up inside the transaction that adds them, so concurrent posts of one id cannot both be new.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server.index.db import Database, count_audit, next_change_id
from server.index.dialect import disk_problem
from server.index.tables import datasets
from server.ingest.dataset_registry import RegisteredDataset
from server.ingest.evict import evict_over_capacity
from server.ingest.index_rows import (
    KnownTrajectory,
    find_known,
    insert_rows,
    insert_segment,
    reserve_seqs,
    row_of,
)
from server.ingest.segments import Encoded, Segment, Spool
from server.problems import ProblemError, not_found
from server.settings import Settings
from server.storage.shards import Entry
from server.storage.store import Store
from server.telemetry import Telemetry
from stepwell._background import BackgroundLoop
from stepwell.failpoints import failpoint
from stepwell.messages import IngestItem, Problem

log = structlog.get_logger("stepwell.ingest")
READ_ONLY = (
    "nothing of this request was stored; reads still work, and writes resume by themselves when the"
    " disk accepts data again"
)
GROUP_BYTES = 4 << 20
"""Most bytes per fsync; further requests wait for the next group."""
PROBE_EVERY = 0.5
"""Seconds between attempts to write again after a disk error."""


@dataclass(slots=True)
class Submission:
    """The new trajectories of one request, and the future of its response."""

    dataset: RegisteredDataset
    partition: str
    items: list[tuple[Entry, Encoded]]
    """Entries (seq still 0) with their encoded records."""
    who: str = "local"
    """Who sent them, for the audit log."""
    answer: Future[list[IngestItem]] = field(default_factory=Future)

    @property
    def size(self) -> int:
        return sum(record.size for _, record in self.items)


@dataclass(slots=True)
class _Plan:
    """One group, classified: new trajectories by dataset, and the result of every item so far."""

    answers: list[tuple[Submission, list[IngestItem]]] = field(default_factory=list)
    fresh: dict[int, list[tuple[Entry, Encoded, IngestItem]]] = field(default_factory=dict)
    specs: dict[int, RegisteredDataset] = field(default_factory=dict)
    repeats: list[tuple[IngestItem, IngestItem]] = field(default_factory=list)
    """Duplicates inside the group: they get the seq of the first."""
    senders: dict[tuple[str, int], Counter[str]] = field(default_factory=dict)
    """What is new, by who sent it and dataset."""


class Committer:
    """Owns the spool. `submit` is thread-safe; its future completes when the data is durable."""

    def __init__(
        self, settings: Settings, db: Database, store: Store, spool: Spool, telemetry: Telemetry
    ):
        self._settings, self._db, self._store = settings, db, store
        self._spool, self._telemetry = spool, telemetry
        self._queue: queue.SimpleQueue[Submission | None] = queue.SimpleQueue()
        self._queued = 0
        self._count_lock = threading.Lock()
        self.lock = threading.Lock()
        """Held while a group is written and while a segment is rotated."""
        self.trouble: ProblemError | None = None
        """Why the service is read-only now. Copies of it are raised: each raise attaches its
        frames, which reference bodies, to the exception, and this one is kept."""
        self._probed = 0.0
        self.loop = BackgroundLoop(
            "committer", self._round, every=0.0, longest_wait=1.0, report=_defect
        )
        telemetry.writable.set(1)

    def start(self) -> None:
        self.loop.start()

    def close(self) -> None:
        """Commit what is queued, then stop."""
        self._queue.put(None)
        self.loop.join()

    def submit(self, submission: Submission) -> Future[list[IngestItem]]:
        """Queue a submission. Body memory bounds the queue (server/body_memory.py)."""
        with self._count_lock:
            self._queued += submission.size
            self._telemetry.queued_bytes.set(self._queued)
        self._queue.put(submission)
        return submission.answer

    def take_closed(self, *, force: bool) -> list[Segment]:
        """The segments to seal: closed ones, and the current one if it is due or with `force`.

        The caller holds `lock`.
        """
        current = self._spool.current
        if current is not None and current.records and (force or self.due(time.monotonic())):
            self._spool.rotate()
        closed, self._spool.closed = self._spool.closed, []
        return closed

    def due(self, now: float) -> bool:
        """Whether the current segment has waited long enough to be sealed."""
        segment = self._spool.current
        return (
            segment is not None
            and segment.records > 0
            and (
                now - segment.last_at >= self._settings.seal_idle
                or now - segment.first_at >= self._settings.seal_age
            )
        )

    def _round(self) -> None:
        """Handle one group. Drop all references to it: they would keep its bodies in memory."""
        first = self._queue.get()
        if first is None:
            self.loop.stop()
            return
        group, last = self._collect(first)
        try:
            with self._count_lock:
                self._queued -= sum(submission.size for submission in group)
                self._telemetry.queued_bytes.set(self._queued)
            self._handle(group)
        except BaseException:
            # No caller waits indefinitely; a retry of stored data gets `duplicate`.
            for submission in group:
                if not submission.answer.done():
                    submission.answer.set_exception(
                        ProblemError(500, "internal_error", "internal error; post again")
                    )
            raise
        finally:
            if last:
                self.loop.stop()

    def _collect(self, first: Submission) -> tuple[list[Submission], bool]:
        """Waiting submissions up to GROUP_BYTES. No delay: groups form during the last write."""
        group, size = [first], first.size
        while size < GROUP_BYTES:
            try:
                more = self._queue.get_nowait()
            except queue.Empty:
                break
            if more is None:
                return group, True
            group.append(more)
            size += more.size
        return group, False

    def _handle(self, group: list[Submission]) -> None:
        try:
            with self._telemetry.commit_seconds.time(), self.lock:
                self._check_disk()
                answers = self._commit(group)
        except ProblemError as error:
            for submission in group:
                if not submission.answer.done():  # one for a deleted dataset has failed already
                    submission.answer.set_exception(error.copy())
        except Exception as error:
            if len(group) > 1:  # one submission fails: retry each alone to store the others
                for submission in group:
                    if not submission.answer.done():
                        self._handle([submission])
                return
            log.error(
                "a post was not stored because of an internal error; please report it with these"
                " lines",
                dataset=group[0].dataset.name,
                exc_info=error,
            )
            group[0].answer.set_exception(
                ProblemError(500, "internal_error", "nothing of this request was stored")
            )
        else:
            for submission, items in answers:
                submission.answer.set_result(items)

    # --- one group, in order of execution -------------------------------------------------------

    def _commit(self, group: list[Submission]) -> list[tuple[Submission, list[IngestItem]]]:
        now = time.time()
        plan = _Plan()
        segment: Segment | None = None
        segment_pk: int | None = None
        written = False
        try:
            with self._db.write() as connection:
                self._sort_out(connection, group, plan)
                if plan.fresh:
                    offsets = self._append(plan)
                    written = True
                    segment = self._spool.current
                    assert segment is not None
                    segment_pk = segment.pk or insert_segment(connection, segment.name, now)
                    self._index(connection, plan, segment_pk, offsets, now)
                _note(connection, plan)
                failpoint("index.before_commit")
        except Exception as error:
            self._give_up(error, written)
        failpoint("index.after_commit")
        if segment is not None:
            segment.pk = segment_pk
            assert segment.file is not None
            if segment.file.size >= self._settings.seal_bytes:
                self._spool.rotate()
        for copy, first in plan.repeats:
            copy.seq = first.seq
        return plan.answers

    def _sort_out(self, connection: Connection, group: list[Submission], plan: _Plan) -> None:
        """Classify each item: stored, duplicate, evicted, conflict or refused."""
        remembered = find_known(connection, [e.id for s in group for e, _ in s.items])
        d = datasets.c
        rows = connection.execute(
            sa.select(d.pk, d.capacity_steps, d.capacity_bytes).where(
                d.pk.in_({s.dataset.pk for s in group})
            )
        )
        limits = {row[0]: (row[1], row[2]) for row in rows}
        firsts: dict[str, tuple[Entry, int, IngestItem]] = {}
        for submission in group:
            dataset = submission.dataset
            if dataset.pk not in limits:
                gone = not_found("dataset", dataset.name)
                submission.answer.set_exception(gone)
                continue
            items: list[IngestItem] = []
            for entry, record in submission.items:
                item = IngestItem(id=entry.id, status="stored")
                items.append(item)
                if (before := remembered.get(entry.id)) is not None:
                    answer_known(item, entry, dataset.pk, before)
                elif (first := firsts.get(entry.id)) is not None:
                    same = first[0].digest == entry.digest and first[1] == dataset.pk
                    if same:
                        item.status = "duplicate"
                        plan.repeats.append((item, first[2]))
                    else:
                        conflict(item, first[0].digest, entry.digest)
                elif (problem := exceeds_capacity(entry, limits[dataset.pk])) is not None:
                    item.status, item.problem = "refused", problem
                else:
                    firsts[entry.id] = (entry, dataset.pk, item)
                    plan.fresh.setdefault(dataset.pk, []).append((entry, record, item))
                    plan.specs[dataset.pk] = dataset
                    sums = plan.senders.setdefault((submission.who, dataset.pk), Counter())
                    sums.update(trajectories=1, steps=entry.rows - 1, bytes=entry.bytes)
            plan.answers.append((submission, items))

    def _append(self, plan: _Plan) -> list[int]:
        return self._spool.append(
            [
                (plan.specs[pk].name, plan.specs[pk].spec, [record for _, record, _ in fresh])
                for pk, fresh in plan.fresh.items()
            ]
        )

    def _index(
        self,
        connection: Connection,
        plan: _Plan,
        segment_pk: int,
        offsets: list[int],
        now: float,
    ) -> None:
        change_id = next_change_id(connection)
        locations = iter(offsets)
        for pk, fresh in plan.fresh.items():
            first = reserve_seqs(connection, pk, len(fresh), now)
            assert first is not None, "looked up in this very transaction"
            env = plan.specs[pk].spec.env
            rows: list[dict[str, Any]] = []
            for seq, (entry, _, item) in enumerate(fresh, first):
                row = row_of(entry, pk, seq, change_id, env)
                row |= {
                    "state": "spooled",
                    "segment_pk": segment_pk,
                    "segment_offset": next(locations),
                }
                rows.append(row)
                item.seq = seq
            insert_rows(connection, rows)
            self._telemetry.steps.inc(sum(row["length"] for row in rows))
            self._telemetry.ingest_bytes.inc(sum(row["bytes"] for row in rows))
            self._telemetry.evicted.inc(evict_over_capacity(connection, pk, change_id))

    # --- disk errors ----------------------------------------------------------------------------

    def _give_up(self, error: Exception, written: bool) -> NoReturn:
        """Abort the group: raises 507 or 503, or `error` if it is not a disk error."""
        problem = disk_problem(error, READ_ONLY)
        # After an I/O error it is unknown whether the commit is on the disk: the records must stay
        # until a later commit has replaced it. After other errors a restart must not recover them.
        if written and (problem is None or problem.status == 507):
            self._spool.undo()
        self._spool.rotate()  # the segment has no pk, so the sealer removes it
        if problem is None and isinstance(error, OSError):
            problem = ProblemError(503, "read_only", READ_ONLY, got=str(error.strerror or error))
        if problem is None:
            raise error
        self._enter_read_only(problem)

    def _enter_read_only(self, problem: ProblemError) -> NoReturn:
        if self.trouble is None:  # logged once, not for each refused post
            log.error(
                "read-only: free disk space, or repair the disk; writes resume by themselves",
                code=problem.code,
                got=str(problem.got)[:300],
            )
        self.trouble = problem
        self._probed = time.monotonic()
        self._telemetry.writable.set(0)
        raise problem.copy()

    def _check_disk(self) -> None:
        """Raise 507 or 503 after a disk error; periodically test whether the disk works again."""
        if self.trouble is not None and time.monotonic() - self._probed < PROBE_EVERY:
            raise self.trouble.copy()
        least = self._settings.min_free
        free = self._store.free()
        if free < least:
            self._enter_read_only(
                ProblemError(
                    507,
                    "storage_full",
                    READ_ONLY,
                    expected="free disk space",
                    got=f"{free} bytes free of at least {least}",
                    headers={"Retry-After": "5"},
                )
            )
        if self.trouble is not None:
            try:
                self._spool.open()
            except OSError as error:
                self._enter_read_only(disk_problem(error, READ_ONLY) or self.trouble)
            log.info("writable again")
            self.trouble = None
            self._telemetry.writable.set(1)

    def check_disk(self) -> None:
        """For the maintenance thread: leave read-only mode without waiting for a request."""
        with self.lock:
            self._check_disk()


def _defect(name: str, error: BaseException) -> None:
    log.error("internal error in a running thread; please report it", thread=name, exc_info=error)


# --- the result of a trajectory that is not stored --------------------------------------------


def _note(connection: Connection, plan: _Plan) -> None:
    """Who sent what, in the audit log."""
    for (who, pk), sums in plan.senders.items():
        count_audit(connection, who, "trajectories.post", plan.specs[pk].name, **sums)


def answer_known(item: IngestItem, entry: Entry, dataset_pk: int, before: KnownTrajectory) -> None:
    """Set the result for a known id: duplicate, evicted or conflict."""
    if before.digest != entry.digest or before.dataset_pk != dataset_pk:
        conflict(item, before.digest, entry.digest)
        if before.digest == entry.digest and item.problem is not None:
            item.problem.detail = "the same trajectory is already in another dataset"
        return
    item.seq = before.seq
    item.status = "evicted" if before.evicted else "duplicate"


def conflict(item: IngestItem, there: str, here: str) -> None:
    """Mark other content under a known id: `there` and `here` are the digests."""
    item.status = "conflict"
    item.problem = ProblemError(
        409,
        "conflict",
        "another trajectory is stored under this id; ids are never reused",
        expected=f"content of sha256 {there}",
        got=here,
    ).problem()


def exceeds_capacity(entry: Entry, limits: tuple[int | None, int | None]) -> Problem | None:
    """The problem of a trajectory that alone exceeds the capacity of fifo, else None."""
    if entry.partition != "fifo":
        return None
    sizes = (entry.rows - 1, entry.bytes)
    for what, limit, size in zip(("steps", "bytes"), limits, sizes, strict=True):
        if limit is not None and size > limit:
            return ProblemError(
                422,
                "exceeds_capacity",
                "this trajectory alone exceeds the dataset's fifo capacity",
                expected=f"at most {limit} {what}",
                got=size,
            ).problem()
    return None
