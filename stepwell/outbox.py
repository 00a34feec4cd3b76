"""A durable queue on local disk between a program and the service.

    outbox = Outbox("outbox", client, "my-data", spec)
    outbox.put(trajectory)      # returns once it is on disk; the service may be down
    outbox.close()

Collectors queue trajectories; a trainer queues the metrics, log and policies of its run
(`Outbox(folder, client, run="first")`). Its directory, in which every file is written atomically:

    outbox.json                            the destination of its items
    lock                                   held by the one process that uses it
    000000000017-<key>-<crc32>.<kind>      waiting, one item each, sent in this order
    rejected/<the same name>               refused by the service, with the reason in <name>.json
    damaged/<the same name>                fails its checksum or cannot be read (a disk fault)

An item is deleted after the service has acknowledged it. Sending it twice is harmless, so a crash
at any moment neither loses nor duplicates an item. Items of an ended process can be taken over with
`adopt`, or sent with `stepwell outbox send`.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import errno
import json
import logging
import os
import shlex
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stepwell._background import FIRST_WAIT, BackgroundLoop
from stepwell._files import remove_unfinished, sync_folder, whole_file
from stepwell._outbox_folder import (
    Destination,
    Entry,
    entries,
    lock,
    place,
    reason_of,
    set_aside,
)
from stepwell._outbox_kinds import KINDS, as_json, describe, policy_item
from stepwell._wording import pluralize
from stepwell.codec import encode
from stepwell.errors import (
    NOT_OWNER,
    BadRequest,
    Busy,
    CodecError,
    Conflict,
    InvalidData,
    OutboxError,
    OutboxInUse,
    ServiceError,
    ServiceUnreachable,
    StepwellError,
    TooLarge,
    Unauthorized,
)
from stepwell.failpoints import failpoint
from stepwell.messages import IngestItem
from stepwell.spaces import EnvSpec
from stepwell.trajectory import Trajectory

if TYPE_CHECKING:
    from stepwell.client import Client

log = logging.getLogger(__name__)

GROUP_BYTES = 8 << 20
IDLE = 1.0
"""Seconds between checks for items when the thread is not woken."""
_number = attrgetter("number")
_TAKEN = ("stored", "duplicate", "evicted")
_RETRY_LATER = (408, 429, 503, 507)
"""Statuses of a refused item that describe the service's state, not the item."""
_TRANSIENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
"""Read errors caused by this process or machine, not by the file."""
_FINAL = (400, 409, 413, 415, 422)
"""Statuses of a request that a retry cannot fix."""


class Outbox:
    """A durable queue. One process per directory, any number of threads.

    `max_bytes` limits the trajectories on disk, and the policies. When it is reached, `put` raises
    `OutboxError`, or with when_full="block" waits for space. Without a `spec`, the outbox sends
    existing items and accepts no trajectories. `run` names a training run instead of a dataset.
    `created_at` of the dataset distinguishes it from a dataset of the same name on another service.
    Items may wait `linger` seconds, so that one request contains more of them. Raises `OutboxInUse`
    if another process uses the directory or it holds items for another destination, `OutboxError`
    if the directory cannot be used.
    """

    def __init__(
        self,
        directory: str | Path,
        client: Client,
        dataset: str = "",
        spec: EnvSpec | None = None,
        *,
        run: str = "",
        partition: str = "fifo",
        max_bytes: int = 8 << 30,
        when_full: Literal["raise", "block"] = "raise",
        created_at: float | None = None,
        linger: float = 0.0,
    ):
        self.directory = Path(directory)
        self._rejected_folder = self.directory / "rejected"
        self._damaged_folder = self.directory / "damaged"
        self.dataset, self.spec, self.partition = dataset, spec, partition
        url = str(getattr(client, "url", ""))
        self.destination = Destination(dataset, partition, url, created_at, run)
        self.max_bytes, self.when_full = max_bytes, when_full
        self.held = False
        """While set, trajectories stay on disk and are not sent. `flush` ends it."""
        self.sent = 0
        """Items that the service has accepted since this object was created."""
        # The client does not retry. The retries of the outbox set `last_error` and end on close.
        self._client = client.with_options(retry_for=0.0)
        self._linger = linger
        self._changed = threading.Condition()
        self._waiting: list[Entry] = []
        self._in_flight: list[Entry] = []
        self.pending_bytes = self.rejected = 0
        """Bytes waiting on disk; number of items in rejected/, also of earlier processes."""
        self._uncertain = set(KINDS)
        """Kinds of which the service may have received more than it has acknowledged."""
        self._refused: Counter[str] = Counter()
        self._damaged: Counter[str] = Counter()
        self._refusal = self._refused_file = ""
        self._asked: float | None = None
        self._closing = self._released = self._unreachable = False
        try:
            for folder in (self.directory, self._rejected_folder, self._damaged_folder):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.directory)
            try:
                self._claim()
                self._load()
                self.rejected = len(set_aside(self._rejected_folder))
            except BaseException:
                self._lock.close()
                raise
        except OSError as error:
            raise OutboxError(f"cannot use the outbox {self.directory}: {error}") from error
        self._loop = BackgroundLoop(
            "outbox",
            self._send_all,
            every=linger or IDLE,
            expected=(StepwellError, OSError),  # the service is down; this disk is full
        )
        self._loop.start()  # its thread reads `_loop`
        self._process = os.getpid()
        atexit.register(self._at_exit)

    # --- put ------------------------------------------------------------------------------------

    def put(self, trajectory: Trajectory) -> None:
        """Queue one trajectory. After return, it survives a crash of the process or the machine.

        Raises `InvalidTrajectory` if it does not fit the spec, `OutboxError` if the disk is full or
        `max_bytes` is reached.
        """
        if self.spec is None:
            raise OutboxError(f"the outbox {self.directory} was opened without a spec")
        self._put("arrow", trajectory.id, encode([trajectory], self.spec))

    def drop_oldest(self, keep: int) -> int:
        """Delete all but the newest `keep` trajectories that wait here, except those that are being
        sent; returns their number."""
        with self._changed:
            found = [entry for entry in self._waiting if entry.kind == "arrow"]
            old = [e for e in found[: max(0, len(found) - keep)] if e not in self._in_flight]
        self._forget(old)
        for entry in old:
            entry.path.unlink(missing_ok=True)
            failpoint("outbox.after_drop")
        return len(old)

    def put_metrics(self, run: str, step: int, values: Mapping[str, float | None]) -> None:
        """Queue the metrics of one step. Like log lines, they survive a crash of the process, but
        not of the machine."""
        now = time.time()
        points = [{"key": k, "step": step, "value": v, "time": now} for k, v in values.items()]
        self._put("metrics", str(step), as_json(run=run, points=points), durable=False)

    def put_log(self, run: str, text: str) -> None:
        """Queue newline-terminated lines to append to the log of a run."""
        self._put("log", "0", as_json(run=run, text=text), durable=False)

    def put_policy(
        self, run: str, version: int, data: bytes, metadata: Mapping[str, Any]
    ) -> list[int]:
        """Queue the bytes of a policy file as run/version. A version already queued or rejected is
        not changed. If more than `max_bytes` of policies wait, drops the oldest and returns their
        versions."""
        known = [*list(self._waiting), *entries(self._rejected_folder)]
        if any(e.kind == "policy" and e.id == str(version) for e in known):
            return []
        item, dropped = policy_item(run, version, data, dict(metadata)), []
        for old in [e for e in list(self._waiting) if e.kind == "policy"]:
            if self.waiting("policy") + len(item) <= self.max_bytes:
                break
            self._forget([old])
            old.path.unlink(missing_ok=True)
            dropped.append(int(old.id))
        self._put("policy", str(version), item)
        return dropped

    def end_run(self, run: str, status: str, error: str = "") -> None:
        """Report how a run ended. If the service does not respond, queue the report."""
        error = error[:20_000]
        try:
            if self._client.ready():  # one attempt, so that program exit is not delayed
                self._client.patch_run(run, status=status, error=error)
                return
        except (ServiceUnreachable, Busy):
            pass
        except StepwellError as refused:
            log.warning("the service does not record that run %s %s: %s", run, status, refused)
            return
        ending = as_json(run=run, status=status, error=error, at=time.time())
        with contextlib.suppress(OutboxError):
            self._put("ending", "0", ending)

    def _put(self, kind: str, key: str, data: bytes, *, durable: bool = True) -> None:
        with self._changed:
            if kind == "arrow":
                self._make_room(len(data))
            if self._closing:
                raise OutboxError(f"the outbox {self.directory} is closed")
            number = self._next
            self._next += 1
            self.pending_bytes += len(data)  # reserved before the slow write, outside the lock
        crc = zlib.crc32(data)
        path = place(self.directory, number, key, crc, kind)
        try:
            with whole_file(path, durable=durable) as file:
                file.write(data)
                failpoint("outbox.before_rename")
            failpoint("outbox.after_put")
        except BaseException as error:
            with self._changed:
                self.pending_bytes -= len(data)
                self._changed.notify_all()
            if not isinstance(error, OSError):
                raise
            raise OutboxError(f"cannot write to the outbox {self.directory}: {error}") from error
        with self._changed:
            # Sorted by number, because threads may finish writing in a different order.
            bisect.insort(self._waiting, Entry(number, key, crc, path, len(data)), key=_number)
            self._changed.notify_all()
        if not self._linger and not self._loop.trouble:
            self._loop.wake()

    # --- state ----------------------------------------------------------------------------------

    def flush(self, timeout: float = 30.0) -> bool:
        """Try to send everything now, for at most `timeout` seconds.

        Returns True if the service has accepted everything since this object was created. False:
        something waits, was refused (`rejected/`) or could not be read; `undelivered` says what.
        """
        self.held, deadline = False, time.monotonic() + timeout
        with self._changed:
            while self._waiting and self._loop.alive:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._loop.wake()
                self._changed.wait(min(remaining, FIRST_WAIT))
            return self._delivered

    def drain(self, timeout: float) -> bool:
        """As `flush`, but for as long as the service takes something every `timeout` seconds."""
        before = self.pending + 1
        while not (delivered := self.flush(timeout)) and 0 < self.pending < before:
            before = self.pending
        return delivered

    @property
    def _delivered(self) -> bool:
        return not (self._waiting or self._refused or self._damaged)

    @property
    def pending(self) -> int:
        """Number of items waiting on disk."""
        return len(self._waiting)

    def waiting(self, kind: str) -> int:
        """Bytes of one kind waiting on disk."""
        return sum(entry.size for entry in list(self._waiting) if entry.kind == kind)

    @property
    def last_error(self) -> str:
        """Error of the last attempt to send; empty if it succeeded."""
        return self._loop.last_error

    @property
    def trouble(self) -> str:
        """Error of the sending thread, for a heartbeat; empty if there is none."""
        return self._loop.trouble

    @property
    def reason(self) -> str:
        """Why items are still waiting; empty if none are."""
        if not self._waiting:
            return ""
        if self.last_error:
            return self.last_error
        if (asked := self._asked) is not None:
            seconds = time.monotonic() - asked
            return f"{self.destination.url or 'the service'} has not answered for {seconds:.0f} s"
        return "there was no time to send them"

    def undelivered(self) -> str:
        """A sentence that states what the service has not accepted since this object was created,
        why, and what to do. Empty if it has accepted everything."""
        where, parts = self.directory.absolute(), []
        if self._waiting:
            owner = self.destination
            others = "the next trainer of the run sends them"
            if not owner.run:
                others = (
                    "the next collector of the dataset that keeps its outbox beside it sends them"
                )
            waiting = describe(Counter(entry.kind for entry in list(self._waiting)))
            parts.append(
                f"{waiting} {'of' if owner.run else 'for'} {owner.name} not delivered "
                f"({self.reason}); they wait in {where}: {others}, or: stepwell outbox send "
                f"{shlex.quote(str(where))}"
            )
        if self._refused:
            kept = [self._refused_file] if self._refused.total() == 1 else []
            parts.append(
                f"{describe(self._refused)} refused by the service ({self._refusal}): "
                f"see {where.joinpath('rejected', *kept)}"
            )
        if self._damaged:
            parts.append(
                f"{describe(self._damaged)} could not be read back from this disk: "
                f"see {where / 'damaged'}"
            )
        return "; ".join(parts)

    def counters(self) -> dict[str, float]:
        """Numbers for a worker's heartbeat."""
        return {
            "outbox": float(self.pending),
            "outbox_bytes": float(self.pending_bytes),
            "outbox_sent": float(self.sent),
            "outbox_rejected": float(self.rejected),
        }

    # --- taking over ----------------------------------------------------------------------------

    def retry_rejected(self) -> int:
        """Queue rejected items again, for instance after the dataset was corrected."""
        moved = 0
        for old in entries(self._rejected_folder):
            self._take_over(old)
            failpoint("outbox.after_requeue")
            old.path.with_suffix(".json").unlink(missing_ok=True)
            self.rejected -= 1
            moved += 1
        self._refused.clear()
        self._refusal = ""
        sync_folder(self.directory)
        sync_folder(self._rejected_folder)
        return moved

    def adopt(self, directory: str | Path) -> int:
        """Append the items of another outbox to this queue. Returns their number.

        Each file is moved by one rename under the lock of the other outbox, so a crash leaves every
        item in exactly one of the two. Raises `OutboxInUse` if a process uses the other outbox or
        it has another destination, `OutboxError` if it cannot be used.
        """
        folder = Path(directory)
        moved = 0
        try:
            stored_lock = lock(folder)
            try:
                failpoint("adopt.after_lock")
                stored = Destination.read(folder)
                if stored is None or not stored.is_the_same(self.destination):
                    raise OutboxInUse(
                        f"the outbox {folder} holds items for {stored or 'an unknown destination'},"
                        f" not for {self.destination}"
                    )
                for old in entries(folder):
                    self._take_over(old)
                    failpoint("adopt.after_rename")
                    moved += 1
                sync_folder(self.directory)
                failpoint("adopt.after_sync")
                sync_folder(folder)
            finally:
                stored_lock.close()
        except OSError as error:
            raise OutboxError(f"cannot take over the outbox {folder}: {error}") from error
        self._loop.wake()
        return moved

    def _take_over(self, old: Entry) -> None:
        """Move a file to the end of this queue."""
        with self._changed:
            number = self._next
            self._next += 1
            path = place(self.directory, number, old.id, old.crc, old.kind)
            os.replace(old.path, path)
            self._waiting.append(Entry(number, old.id, old.crc, path, old.size))
            self.pending_bytes += old.size
            self._uncertain.add(old.kind)
            self._changed.notify_all()

    def close(self, timeout: float = 10.0) -> bool:
        """Try to send the rest for up to `timeout` seconds, then stop. True as of `flush`.

        Remaining items stay on disk for the next Outbox on this directory.
        """
        delivered = self.flush(timeout) if timeout > 0 else self._delivered
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # A blocked request may finish after this returns; at most it sends items a second time.
        self._loop.stop(1.0)
        with self._changed:
            self._released = True
        self._lock.close()
        atexit.unregister(self._at_exit)
        return delivered

    def __enter__(self) -> Outbox:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.close():
            log.warning("outbox: %s", self.undelivered())

    def _at_exit(self) -> None:
        """Report waiting items when the process exits without closing the outbox."""
        if self._process == os.getpid() and (text := self.undelivered()):
            print(f"stepwell: {text}", file=sys.stderr, flush=True)

    # --- disk -----------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Refuse a directory that holds items for another destination."""
        stored = Destination.read(self.directory)
        waits = bool(entries(self.directory))
        if stored is None and any(self.directory.glob("*.arrow")):
            raise OutboxError(f"{self.directory} holds Arrow files that no outbox wrote")
        if stored is not None and waits and not stored.names_the_same(self.destination):
            raise OutboxInUse(
                f"the outbox {self.directory} still holds items for {stored}; wanted "
                f"{self.destination}: use another directory, or send them first with: "
                f"stepwell outbox send {shlex.quote(str(self.directory))}"
            )
        self.destination.write(self.directory)

    def _load(self) -> None:
        """Load the items that an earlier process left."""
        remove_unfinished(self.directory, self._rejected_folder, self._damaged_folder)
        self._waiting.extend(entries(self.directory))
        self.pending_bytes = sum(e.size for e in self._waiting)
        self._next = self._waiting[-1].number + 1 if self._waiting else 1

    def _make_room(self, size: int) -> None:
        """Ensure space for `size` bytes. The caller holds the lock."""
        while self.pending_bytes + size > self.max_bytes and not self._closing:
            if self.when_full == "raise" or size > self.max_bytes:
                raise OutboxError(
                    f"the outbox {self.directory} is full: {self.pending_bytes} bytes wait in "
                    f"{pluralize(len(self._waiting), 'item')}, {size} more exceed "
                    f"{self.max_bytes}; "
                    f"last error: {self.last_error or 'none'}"
                )
            self._changed.wait(0.5)

    def _read(self, entry: Entry) -> tuple[Any, Any] | None:
        """Return (shared, content) of a file, or None after moving a damaged file to damaged/."""
        try:
            data = entry.path.read_bytes()
            if zlib.crc32(data) != entry.crc:
                raise CodecError("checksum differs", expected=f"{entry.crc:08x}")
            return KINDS[entry.kind].parse(entry, data)
        except (OSError, ValueError, KeyError, TypeError) as error:  # CodecError is a ValueError
            if isinstance(error, FileNotFoundError) and entry not in self._waiting:
                return None  # it was dropped meanwhile
            if getattr(error, "errno", None) in _TRANSIENT_ERRNOS:
                raise OutboxError(f"cannot read the outbox now: {error}") from error
            log.error("outbox: %s cannot be read back (%s); set aside", entry.path, error)
            with contextlib.suppress(OSError):
                os.replace(entry.path, self._damaged_folder / entry.path.name)
                sync_folder(self._damaged_folder)
            self._damaged[entry.kind] += 1
            return None

    # --- the sender -----------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Send all waiting items. If one kind cannot be sent, the other kinds still are."""
        first: Exception | None = None
        for kind in KINDS:
            try:
                while not self._closing and self._send_some(kind):
                    if self._unreachable:  # no longer; this may go on for long
                        self._unreachable = False
                        self._loop.forget_error()
            except Exception as error:
                first = first or error
                if isinstance(error, ServiceUnreachable):
                    self._unreachable = True
                    break
        if first is not None:
            if not self._loop.trouble and not self._closing:
                waiting = Counter(entry.kind for entry in list(self._waiting))
                log.warning("outbox: not delivered yet: %s (%s)", describe(waiting), first)
            raise first

    def _send_some(self, kind: str) -> bool:
        """Send one group from the front and handle the result of each item. Returns False if no
        item waits. Raises errors that should be retried."""
        try:
            group, shared = self._next_group(kind)
            if group:
                self._send(kind, group, shared)
            return bool(group)
        finally:
            self._in_flight = []

    def _next_group(self, kind: str) -> tuple[list[tuple[Entry, Any]], Any]:
        """Return consecutive items of one kind that fit in one request, without damaged files."""
        group: list[tuple[Entry, Any]] = []
        shared: Any = None
        size = 0
        with self._changed:
            found = (entry for entry in self._waiting if entry.kind == kind)
            candidates = [e for e, _ in zip(found, range(KINDS[kind].most), strict=False)]
            if self.held and kind == "arrow":
                candidates = []
            self._in_flight = candidates
        for entry in candidates:
            if group and size + entry.size > GROUP_BYTES:
                break
            if kind == "arrow" and any(entry.id == other.id for other, _ in group):
                break  # the response is matched by id
            read = self._read(entry)
            if read is None:
                self._forget([entry])
                continue
            if group and read[0] != shared:
                break
            shared = read[0]
            group.append((entry, read[1]))
            size += entry.size
        return group, shared

    def _send(self, kind: str, group: Sequence[tuple[Entry, Any]], shared: Any) -> None:
        self._asked = time.monotonic()
        repeated = kind in self._uncertain
        self._uncertain.add(kind)
        try:
            contents = [content for _, content in group]
            items = KINDS[kind].send(self._client, self.destination, shared, contents, repeated)
        except (BadRequest, TooLarge, Conflict, InvalidData, Unauthorized) as error:
            # Another token may be set tomorrow, but who made the run does not change.
            final = isinstance(error, ServiceError) and (
                error.status in _FINAL or error.code == NOT_OWNER
            )
            if isinstance(error, ServiceError) and not final:
                raise  # not caused by the items, but by another server, a proxy or a setting
            # The whole request was refused; bisect it to find the refused items.
            if len(group) > 1:
                half = len(group) // 2
                self._send(kind, group[:half], shared)
                self._send(kind, group[half:], shared)
                return
            problem = getattr(error, "problem", {"code": "invalid", "detail": str(error)})
            self._reject(group[0][0], problem)
            return
        finally:
            self._asked = None
        self._uncertain.discard(kind)
        failpoint("outbox.after_answer")
        if not self._released:  # another process may use the directory by now
            self._settle([entry for entry, _ in group], items)

    def _settle(self, group: Sequence[Entry], items: Sequence[IngestItem] | None) -> None:
        """Handle the result of each item, matched by id; None means that all were accepted. Items
        missing from the response keep waiting."""
        answers: dict[str, IngestItem] = {}
        contradicted: set[str] = set()
        for item in items or ():
            if answers.setdefault(item.id, item).status != item.status:
                contradicted.add(item.id)
        later, unclear = "", 0
        for entry in group:
            answer = answers.get(entry.id)
            if items is None or (
                answer is not None and answer.status in _TAKEN and entry.id not in contradicted
            ):
                entry.path.unlink(missing_ok=True)
                failpoint("outbox.after_unlink")
                self.sent += 1
                self._forget([entry])
                continue
            if answer is None or entry.id in contradicted:
                unclear += 1
                continue
            problem = answer.problem.model_dump() if answer.problem else {"code": answer.status}
            if problem.get("status") in _RETRY_LATER:
                later = later or f"not now: {problem.get('detail') or problem['code']}"
            else:
                self._reject(entry, problem)
        if unclear:
            raise OutboxError(
                f"the service did not say what became of {unclear} of "
                f"{pluralize(len(group), 'item')}; "
                f"is {self.destination.url or 'it'} a Stepwell service?"
            )
        if later:
            raise OutboxError(later)

    def _reject(self, entry: Entry, problem: dict[str, Any]) -> None:
        """Move an item to rejected/ with the reason, so that it does not block later items."""
        # Errors are appended to the log of a run. An error about a refused log line would itself
        # be refused.
        level = logging.INFO if entry.kind == "log" else logging.ERROR
        reason = problem.get("detail") or problem
        log.log(level, "outbox: rejected %s: %s", entry.path.name, reason)
        target = self._rejected_folder / entry.path.name
        with whole_file(target.with_suffix(".json")) as file:
            file.write(json.dumps(problem, indent=1, default=str).encode())
        failpoint("outbox.after_reason")
        os.replace(entry.path, target)
        failpoint("outbox.after_reject")
        sync_folder(self._rejected_folder)
        self.rejected += 1
        self._refused[entry.kind] += 1
        if not self._refusal:
            self._refusal, self._refused_file = reason_of(target), target.name
        self._forget([entry])

    def _forget(self, gone: list[Entry]) -> None:
        with self._changed:
            for entry in gone:
                if entry in self._waiting:  # it may have been dropped meanwhile
                    self._waiting.remove(entry)
                    self.pending_bytes -= entry.size
            self._changed.notify_all()


def reopen(directory: str | Path, client: Client) -> Outbox:
    """Open the outbox of an ended process to send its items. Raises `OutboxError`."""
    about = Destination.read(Path(directory))
    if about is None:
        raise OutboxError(f"{directory} is no outbox: it holds no outbox.json")
    return Outbox(
        directory,
        client,
        about.dataset,
        run=about.run,
        partition=about.partition,
        created_at=about.created_at,
    )
