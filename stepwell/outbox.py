"""A durable queue on local disk between whoever acts and the service.

    outbox = Outbox("outbox", client, "my-data", spec)
    outbox.put(trajectory)      # returns once it is on disk; the service may be down
    outbox.close()

Its directory, in which every file is there whole or not at all:

    outbox.json                          where its trajectories go
    lock                                 held by the one process that uses it
    000000000017-<id>-<crc32>.arrow      waiting, one trajectory each, sent in this order
    rejected/<the same name>             what the service refused, with the reason in <name>.json
    damaged/<the same name>              what no longer reads back (a disk's fault, not a crash's)

A trajectory leaves when the service has said of its id: stored, duplicate or evicted. Sending one
twice is harmless, because its id makes it exactly once; so a crash at any moment loses and doubles
nothing. What a process left behind is taken over by `adopt`, or sent by `stepwell outbox send`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import math
import os
import random
import shlex
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from stepwell._files import TEMPORARY, sync_folder, whole_file
from stepwell._outbox_folder import (
    Destination,
    Entry,
    entries,
    place,
    reason_of,
    take_lock,
)
from stepwell.codec import decode, encode
from stepwell.errors import (
    BadRequest,
    Busy,
    CodecError,
    Conflict,
    InvalidData,
    OutboxError,
    OutboxInUse,
    ServiceError,
    StepwellError,
    TooLarge,
)
from stepwell.failpoints import failpoint
from stepwell.messages import IngestItem
from stepwell.spaces import EnvSpec
from stepwell.trajectory import Trajectory

if TYPE_CHECKING:
    from stepwell.client import Client

log = logging.getLogger(__name__)

GROUP_TRAJECTORIES = 16
GROUP_BYTES = 8 << 20
FIRST_WAIT, LONGEST_WAIT = 0.2, 30.0
LONGEST_ASKED = 300.0
"""Seconds of patience that a service may ask for (Retry-After)."""
_TAKEN = ("stored", "duplicate", "evicted")
# Statuses of a refused item that speak of the service's state, not of the trajectory.
_PASSING = (408, 429, 503, 507)
# Errors of this process or machine, not of the file that it could not read.
_PASSING_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
# Statuses of a whole body that speak of what is in it.
_CULPRIT = (400, 409, 413, 422)


class Outbox:
    """See the head of this file. One process per directory, any number of threads.

    `max_bytes` bounds what waits on disk; a `put` beyond it raises `OutboxError`, or waits for
    room with when_full="block". Without a `spec` it only sends what is there. `created_at` of the
    dataset tells it from one of the same name at another service. Raises `OutboxInUse` where
    another process uses the directory or another dataset's trajectories wait in it, `OutboxError`
    where it cannot be used.
    """

    def __init__(
        self,
        directory: str | Path,
        client: Client,
        dataset: str,
        spec: EnvSpec | None,
        *,
        partition: str = "fifo",
        max_bytes: int = 8 << 30,
        when_full: Literal["raise", "block"] = "raise",
        created_at: float | None = None,
    ):
        self.directory = Path(directory)
        self.dataset, self.spec, self.partition = dataset, spec, partition
        self.destination = Destination(dataset, partition, _url(client), created_at)
        self.max_bytes, self.when_full = max_bytes, when_full
        self.sent = 0
        """Trajectories that the service has taken since this object was made."""
        self.last_error = ""
        """Why the last attempt to send failed; empty after one that did not."""
        self._client = client
        self._changed = threading.Condition()
        self._waiting: deque[Entry] = deque()
        self._bytes = 0
        self._refused = self._damaged = 0
        self._refusal = self._death = ""
        self._asked: float | None = None
        self._hurry = False
        self._closing = self._released = False
        try:
            for folder in (self.directory, self._rejected_folder, self._damaged_folder):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.directory)
            try:
                self._claim()
                self._load()
                self._rejected = sum(1 for _ in self._rejected_folder.glob("*.arrow"))
            except BaseException:
                self._lock.close()
                raise
        except OSError as error:
            raise OutboxError(f"cannot use the outbox {self.directory}: {error}") from error
        self._thread = threading.Thread(target=self._run, name="stepwell-outbox", daemon=True)
        self._thread.start()
        self._process = os.getpid()
        atexit.register(self._at_exit)

    # --- for whoever acts -------------------------------------------------------------------

    def put(self, trajectory: Trajectory) -> None:
        """Queue one trajectory; when this returns, it survives a crash of process and machine.

        Raises `InvalidTrajectory` where it does not fit the spec, `OutboxError` where the disk or
        `max_bytes` is full.
        """
        if self.spec is None:
            raise OutboxError(f"the outbox {self.directory} was opened to send what is there")
        data = encode([trajectory], self.spec)
        with self._changed:
            self._make_room(len(data))
            number = self._next
            self._next += 1
            self._bytes += len(data)  # reserved before the slow part, which needs no lock
        crc = zlib.crc32(data)
        path = place(self.directory, number, trajectory.id, crc)
        try:
            with whole_file(path) as file:
                file.write(data)
                failpoint("outbox.before_rename")
            failpoint("outbox.after_put")
        except BaseException as error:
            with self._changed:
                self._bytes -= len(data)
                self._changed.notify_all()
            if not isinstance(error, OSError):
                raise
            raise OutboxError(f"cannot write to the outbox {self.directory}: {error}") from error
        with self._changed:
            _insert(self._waiting, Entry(number, trajectory.id, crc, path, len(data)))
            self._changed.notify_all()

    def flush(self, timeout: float = 30.0) -> bool:
        """Try to send everything now; True once nothing waits, False if `timeout` passes first."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            while self._waiting and self._thread.is_alive():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(min(remaining, 0.5))
            self._hurry = False
            return not self._waiting

    @property
    def pending(self) -> int:
        """Trajectories that wait on disk."""
        return len(self._waiting)

    @property
    def pending_bytes(self) -> int:
        return self._bytes

    @property
    def rejected(self) -> int:
        """Trajectories in rejected/, of this and earlier runs."""
        return self._rejected

    @property
    def reason(self) -> str:
        """Why what waits is still here; empty where nothing waits."""
        if not self._waiting:
            return ""
        if self._death:
            return self._death
        if self.last_error:
            return self.last_error
        if (asked := self._asked) is not None:
            seconds = time.monotonic() - asked
            return f"{self.destination.url or 'the service'} has not answered for {seconds:.0f} s"
        return "there was no time to send them"

    def undelivered(self) -> str:
        """What the service has not taken since this object was made, why, and what to do about it:
        one sentence for people. Empty where it has taken all."""
        where, parts = self.directory.absolute(), []
        if self._waiting:
            parts.append(
                f"{_trajectories(self.pending)} for dataset {self.dataset} not delivered "
                f"({self.reason}); they wait in {where}: the next collector of the dataset that "
                f"keeps its outbox beside it sends them, or: stepwell outbox send "
                f"{shlex.quote(str(where))}"
            )
        if self._refused:
            parts.append(
                f"{_trajectories(self._refused)} refused by the service ({self._refusal}): "
                f"see {where / 'rejected'}"
            )
        if self._damaged:
            parts.append(
                f"{_trajectories(self._damaged)} could not be read back from this disk: "
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

    def retry_rejected(self) -> int:
        """Queue again what was rejected, for instance after the dataset was corrected."""
        moved = 0
        for old in entries(self._rejected_folder):
            self._take_over(old)
            failpoint("outbox.after_requeue")
            old.path.with_suffix(".json").unlink(missing_ok=True)
            self._rejected -= 1
            moved += 1
        sync_folder(self.directory)
        sync_folder(self._rejected_folder)
        return moved

    def adopt(self, directory: str | Path) -> int:
        """Take over what waits in another outbox, behind what waits here; how many there were.

        Each file moves by one rename under the other's lock: whoever dies on the way leaves every
        trajectory in one of the two. Raises `OutboxInUse` where a process uses that outbox or it
        belongs to another dataset, `OutboxError` where it cannot be used.
        """
        folder = Path(directory)
        moved = 0
        try:
            lock = take_lock(folder)
            try:
                failpoint("adopt.after_lock")
                theirs = Destination.read(folder)
                if theirs is None or not theirs.is_the_same(self.destination):
                    raise OutboxInUse(
                        f"the outbox {folder} holds trajectories for "
                        f"{theirs or 'nobody knows what'}, not for {self.destination}"
                    )
                for old in entries(folder):
                    self._take_over(old)
                    failpoint("adopt.after_rename")
                    moved += 1
                sync_folder(self.directory)
                failpoint("adopt.after_sync")
                sync_folder(folder)
            finally:
                lock.close()
        except OSError as error:
            raise OutboxError(f"cannot take over the outbox {folder}: {error}") from error
        return moved

    def _take_over(self, old: Entry) -> None:
        """Let a file wait here, behind all others."""
        with self._changed:
            number = self._next
            self._next += 1
            path = place(self.directory, number, old.id, old.crc)
            os.replace(old.path, path)
            self._waiting.append(Entry(number, old.id, old.crc, path, old.size))
            self._bytes += old.size
            self._changed.notify_all()

    def close(self, timeout: float = 10.0) -> bool:
        """Try to send the rest for `timeout` seconds, then stop; True if nothing is left.

        What is left stays on disk for the next Outbox on this directory.
        """
        drained = self.flush(timeout) if timeout > 0 else not self._waiting
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # An attempt that hangs on the network may outlive us: it can only send once more.
        self._thread.join(1.0)
        with self._changed:
            self._released = True
        self._lock.close()
        atexit.unregister(self._at_exit)
        return drained

    def __enter__(self) -> Outbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.close():
            log.warning("outbox: %s", self.undelivered())

    def _at_exit(self) -> None:
        """Nobody closed it, and the process ends: say what waits."""
        if self._process == os.getpid() and (text := self.undelivered()):
            print(f"stepwell: {text}", file=sys.stderr, flush=True)

    # --- disk -------------------------------------------------------------------------------

    @property
    def _rejected_folder(self) -> Path:
        return self.directory / "rejected"

    @property
    def _damaged_folder(self) -> Path:
        return self.directory / "damaged"

    def _claim(self) -> None:
        """Refuse a directory that holds another dataset's trajectories."""
        theirs = Destination.read(self.directory)
        waits = any(self.directory.glob("*.arrow"))
        if theirs is None and waits:
            raise OutboxError(f"{self.directory} holds Arrow files that no outbox wrote")
        if theirs is not None and waits and not theirs.names_the_same(self.destination):
            raise OutboxInUse(
                f"the outbox {self.directory} still holds trajectories for dataset "
                f"{theirs.dataset!r}, partition {theirs.partition!r}; wanted {self.dataset!r}, "
                f"{self.partition!r}: use another directory, or send them first with: "
                f"stepwell outbox send {shlex.quote(str(self.directory))}"
            )
        self.destination.write(self.directory)

    def _load(self) -> None:
        """Take up what an earlier process left."""
        for path in self.directory.glob(f".*{TEMPORARY}"):
            path.unlink(missing_ok=True)  # a put that never returned
        self._waiting.extend(entries(self.directory))
        self._bytes = sum(e.size for e in self._waiting)
        self._next = self._waiting[-1].number + 1 if self._waiting else 1

    def _make_room(self, size: int) -> None:
        """Called with the lock held."""
        while self._bytes + size > self.max_bytes and not self._closing:
            if self.when_full == "raise" or size > self.max_bytes:
                raise OutboxError(
                    f"the outbox {self.directory} is full: {self._bytes} bytes wait in "
                    f"{len(self._waiting)} trajectories, {size} more exceed {self.max_bytes}; "
                    f"last error: {self.last_error or 'none'}"
                )
            self._changed.wait(0.5)
        if self._closing:
            raise OutboxError(f"the outbox {self.directory} is closed")

    def _read(self, entry: Entry) -> tuple[EnvSpec, Trajectory] | None:
        """The trajectory of a file, or None after putting a damaged one aside."""
        try:
            data = entry.path.read_bytes()
            if zlib.crc32(data) != entry.crc:
                raise CodecError("checksum differs", expected=f"{entry.crc:08x}")
            spec, trajectories = decode(data)
            (trajectory,) = trajectories
            if trajectory.id != entry.id:
                raise CodecError("another trajectory", expected=entry.id, got=trajectory.id)
            return spec, trajectory
        except (OSError, ValueError) as error:  # StepwellError of the codec is a ValueError too
            if getattr(error, "errno", None) in _PASSING_ERRORS:
                raise OutboxError(f"cannot read the outbox now: {error}") from error
            log.error("outbox: %s cannot be read back (%s); put aside", entry.path, error)
            with contextlib.suppress(OSError):
                os.replace(entry.path, self._damaged_folder / entry.path.name)
                sync_folder(self._damaged_folder)
            self._damaged += 1
            return None

    # --- the sender -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            wait = FIRST_WAIT
            while self._wait_for_work():
                try:
                    self._send_some()
                    self.last_error, wait = "", FIRST_WAIT
                except Exception as error:  # the thread must outlive every error, ours included
                    self._note(error)
                    self._pause(max(_asked(error), wait * random.uniform(0.5, 1.0)))
                    wait = min(wait * 2.0, LONGEST_WAIT)
        except BaseException as error:
            self._death = f"the thread that sends has died: {error or type(error).__name__}"
            raise
        finally:
            with self._changed:
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Until something waits; False once it is closed."""
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            return not self._closing

    def _note(self, error: Exception) -> None:
        """Why an attempt failed, for whoever asks; a defect, and the first of a row, in the log."""
        before, self.last_error = self.last_error, str(error) or type(error).__name__
        if self._closing:
            return  # whoever closes us may have closed our client, too
        if not isinstance(error, StepwellError | OSError) and self.last_error != before:
            log.exception("outbox: defect while sending")
        elif not before:
            log.warning("outbox: %d trajectories wait: %s", self.pending, error)

    def _pause(self, seconds: float) -> None:
        """Sleep, but wake up for somebody who flushes or closes."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._closing and (remaining := deadline - time.monotonic()) > 0:
                if self._hurry and seconds - remaining >= FIRST_WAIT:
                    return
                self._changed.wait(min(remaining, FIRST_WAIT) if self._hurry else remaining)

    def _send_some(self) -> None:
        """One group from the front, settled item by item. Raises what should be tried again."""
        group, spec = self._next_group()
        if group:
            assert spec is not None
            self._send(group, spec)

    def _next_group(self) -> tuple[list[tuple[Entry, Trajectory]], EnvSpec | None]:
        """Neighbours of one spec; damaged files are dropped on the way."""
        group: list[tuple[Entry, Trajectory]] = []
        spec: EnvSpec | None = None
        size = 0
        with self._changed:
            candidates = [e for e, _ in zip(self._waiting, range(GROUP_TRAJECTORIES), strict=False)]
        for entry in candidates:
            if group and size + entry.size > GROUP_BYTES:
                break
            if any(entry.id == other.id for other, _ in group):
                break  # the answer is matched by id
            read = self._read(entry)
            if read is None:
                self._forget([entry])
                continue
            if spec is not None and read[0] != spec:
                break
            spec = read[0]
            group.append((entry, read[1]))
            size += entry.size
        return group, spec

    def _send(self, group: list[tuple[Entry, Trajectory]], spec: EnvSpec) -> None:
        trajectories = [trajectory for _, trajectory in group]
        self._asked = time.monotonic()
        try:
            result = self._client.post(
                # Without retries: ours are seen in `last_error`, and end when somebody closes.
                self.dataset,
                trajectories,
                spec=spec,
                partition=self.partition,
                retry=False,
            )
        except (BadRequest, TooLarge, Conflict, InvalidData) as error:
            if isinstance(error, ServiceError) and error.status not in _CULPRIT:
                raise  # it says nothing of the trajectories: another server, a proxy, a setting
            # The body was refused whole. Alone, each shows whether it was the culprit.
            if len(group) > 1:
                for member in group:
                    self._send([member], spec)
                return
            problem = getattr(error, "problem", {"code": "invalid", "detail": str(error)})
            self._reject(group[0][0], problem)
            return
        finally:
            self._asked = None
        failpoint("outbox.after_answer")
        if not self._released:  # another process may use the directory by now
            self._settle([entry for entry, _ in group], result.items)

    def _settle(self, group: Sequence[Entry], items: Sequence[IngestItem]) -> None:
        """What the service said of each trajectory, by its id. What it did not speak of waits."""
        said: dict[str, IngestItem] = {}
        contradicted: set[str] = set()
        for item in items:
            if said.setdefault(item.id, item).status != item.status:
                contradicted.add(item.id)
        later, unclear = "", 0
        for entry in group:
            if entry.id not in said or entry.id in contradicted:
                unclear += 1
                continue
            item = said[entry.id]
            if item.status in _TAKEN:
                entry.path.unlink(missing_ok=True)
                failpoint("outbox.after_unlink")
                self.sent += 1
                self._forget([entry])
                continue
            problem = item.problem.model_dump() if item.problem else {"code": item.status}
            if problem.get("status") in _PASSING:
                later = later or f"not now: {problem.get('detail') or problem['code']}"
            else:
                self._reject(entry, problem)
        if unclear:
            raise OutboxError(
                f"the service did not say what became of {unclear} of {len(group)} trajectories; "
                f"is {self.destination.url or 'it'} a Stepwell service?"
            )
        if later:
            raise OutboxError(later)

    def _reject(self, entry: Entry, problem: dict[str, Any]) -> None:
        """Aside with it and the reason, so that the ones behind it are not held up."""
        log.error("outbox: rejected %s: %s", entry.path.name, problem.get("detail") or problem)
        target = self._rejected_folder / entry.path.name
        with whole_file(target.with_suffix(".json")) as file:
            file.write(json.dumps(problem, indent=1, default=str).encode())
        failpoint("outbox.after_reason")
        os.replace(entry.path, target)
        failpoint("outbox.after_reject")
        sync_folder(self._rejected_folder)
        self._rejected += 1
        self._refused += 1
        self._refusal = self._refusal or reason_of(target)
        self._forget([entry])

    def _forget(self, gone: list[Entry]) -> None:
        with self._changed:
            for entry in gone:
                self._waiting.remove(entry)
                self._bytes -= entry.size
            self._changed.notify_all()


def _insert(waiting: deque[Entry], entry: Entry) -> None:
    """In order of number: two threads may finish writing in the other order."""
    if not waiting or waiting[-1].number < entry.number:
        waiting.append(entry)
        return
    at = next(i for i, other in enumerate(waiting) if other.number > entry.number)
    waiting.insert(at, entry)


def _asked(error: Exception) -> float:
    """Seconds that the service asked us to wait; 0 where it did not, or asked what cannot be."""
    seconds = error.retry_after if isinstance(error, Busy) else None
    if seconds is None or not math.isfinite(seconds):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_ASKED)


def _trajectories(count: int) -> str:
    return "1 trajectory" if count == 1 else f"{count} trajectories"


def _url(client: Any) -> str:
    return str(getattr(client, "url", ""))


def reopen(directory: str | Path, client: Client) -> Outbox:
    """An outbox that some process left, to send what is in it. Raises `OutboxError`."""
    about = Destination.read(Path(directory))
    if about is None:
        raise OutboxError(f"{directory} is no outbox: it holds no outbox.json")
    return Outbox(
        directory,
        client,
        about.dataset,
        None,
        partition=about.partition,
        created_at=about.created_at,
    )


def read_outbox(directory: str | Path) -> Iterator[tuple[Path, Trajectory]]:
    """Every trajectory that waits or was rejected in `directory`, to look at; takes no lock."""
    folder = Path(directory)
    for path in sorted(folder.glob("*.arrow")) + sorted((folder / "rejected").glob("*.arrow")):
        for trajectory in decode(path.read_bytes())[1]:
            yield path, trajectory
