"""A durable queue on local disk between whoever acts and the service.

    outbox = Outbox("outbox", client, "my-data", spec)
    outbox.put(trajectory)      # returns once it is on disk; the service may be down
    outbox.close()

Its directory, in which every file is there whole or not at all:

    outbox.json                          which dataset and partition it belongs to
    lock                                 held by the one process that uses it
    000000000017-<id>-<crc32>.arrow      waiting, one trajectory each, sent in this order
    rejected/<the same name>             what the service refused, with the reason in <name>.json
    damaged/<the same name>              what no longer reads back (a disk's fault, not a crash's)

A trajectory leaves when the service has said stored, duplicate or evicted. Sending one twice is
harmless, because its id makes it exactly once; so a crash at any moment loses and doubles nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from stepwell._files import TEMPORARY, sync_folder, whole_file
from stepwell.codec import decode, encode
from stepwell.errors import (
    BadRequest,
    Busy,
    CodecError,
    Conflict,
    InvalidData,
    OutboxError,
    ServiceError,
    StepwellError,
    TooLarge,
)
from stepwell.failpoints import failpoint
from stepwell.messages import IngestItem
from stepwell.spaces import EnvSpec
from stepwell.trajectory import Trajectory

try:
    import fcntl
except ImportError:  # Windows: two processes on one outbox are not kept apart there
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from stepwell.client import Client

log = logging.getLogger(__name__)

GROUP_TRAJECTORIES = 16
GROUP_BYTES = 8 << 20
FIRST_WAIT, LONGEST_WAIT = 0.2, 30.0
_NAME = re.compile(r"(\d{12})-([0-9a-f-]{36})-([0-9a-f]{8})\.arrow")
# Statuses of a refused item that speak of the service's state, not of the trajectory.
_PASSING = (408, 429, 503, 507)
# Errors of this process or machine, not of the file that it could not read.
_PASSING_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)
# Statuses of a whole body that speak of what is in it.
_CULPRIT = (400, 409, 413, 422)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One waiting file."""

    number: int
    path: Path
    size: int


class Outbox:
    """See the head of this file. One process per directory, any number of threads.

    `max_bytes` bounds what waits on disk; a `put` beyond it raises `OutboxError`, or waits for
    room with when_full="block". Raises `OutboxError` where the directory cannot be used.
    """

    def __init__(
        self,
        directory: str | Path,
        client: Client,
        dataset: str,
        spec: EnvSpec,
        *,
        partition: str = "fifo",
        max_bytes: int = 8 << 30,
        when_full: Literal["raise", "block"] = "raise",
    ):
        self.directory = Path(directory)
        self.dataset, self.spec, self.partition = dataset, spec, partition
        self.max_bytes, self.when_full = max_bytes, when_full
        self.sent = 0
        """Trajectories that the service has taken since this object was made."""
        self.last_error = ""
        """Why the last attempt to send failed; empty after one that did not."""
        self._client = client
        self._changed = threading.Condition()
        self._waiting: deque[_Entry] = deque()
        self._bytes = 0
        self._hurry = False
        self._closing = False
        try:
            for folder in (self.directory, self._rejected_folder, self._damaged_folder):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
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

    # --- for whoever acts -------------------------------------------------------------------

    def put(self, trajectory: Trajectory) -> None:
        """Queue one trajectory; when this returns, it survives a crash of process and machine.

        Raises `InvalidTrajectory` where it does not fit the spec, `OutboxError` where the disk or
        `max_bytes` is full.
        """
        data = encode([trajectory], self.spec)
        with self._changed:
            self._make_room(len(data))
            number = self._next
            self._next += 1
            self._bytes += len(data)  # reserved before the slow part, which needs no lock
        path = self.directory / f"{number:012d}-{trajectory.id}-{zlib.crc32(data):08x}.arrow"
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
            _insert(self._waiting, _Entry(number, path, len(data)))
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
        for path in sorted(self._rejected_folder.glob("*.arrow")):
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            with self._changed:
                number = self._next
                self._next += 1
                target = self.directory / f"{number:012d}-{match[2]}-{match[3]}.arrow"
                size = path.stat().st_size
                os.replace(path, target)
                path.with_suffix(".json").unlink(missing_ok=True)
                _insert(self._waiting, _Entry(number, target, size))
                self._bytes += size
                self._rejected -= 1
                self._changed.notify_all()
            moved += 1
        sync_folder(self.directory)
        return moved

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
        self._lock.close()
        return drained

    def __enter__(self) -> Outbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- disk -------------------------------------------------------------------------------

    @property
    def _rejected_folder(self) -> Path:
        return self.directory / "rejected"

    @property
    def _damaged_folder(self) -> Path:
        return self.directory / "damaged"

    def _take_lock(self) -> Any:
        file = (self.directory / "lock").open("a+")
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                holder = file.read().strip()
                file.close()
                raise OutboxError(
                    f"the outbox {self.directory} is used by process {holder or '?'}; "
                    "give every collector its own directory"
                ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return file

    def _claim(self) -> None:
        """Refuse a directory that holds another dataset's trajectories."""
        path = self.directory / "outbox.json"
        mine = {"dataset": self.dataset, "partition": self.partition}
        theirs = mine
        if path.exists():
            try:
                theirs = json.loads(path.read_text())
            except ValueError:
                raise OutboxError(f"{path} is not JSON; is this an outbox?") from None
        elif any(self.directory.glob("*.arrow")):
            raise OutboxError(f"{self.directory} holds Arrow files that no outbox wrote")
        if theirs != mine and any(self.directory.glob("*.arrow")):
            raise OutboxError(
                f"the outbox {self.directory} still holds trajectories for {theirs}; "
                f"wanted {mine}: use another directory"
            )
        with whole_file(path) as file:
            file.write(json.dumps(mine).encode())

    def _load(self) -> None:
        """Take up what an earlier process left."""
        for path in self.directory.glob(f".*{TEMPORARY}"):
            path.unlink(missing_ok=True)  # a put that never returned
        found = [(m, p) for p in self.directory.iterdir() if (m := _NAME.fullmatch(p.name))]
        entries = [_Entry(int(m[1]), p, p.stat().st_size) for m, p in found]
        self._waiting.extend(sorted(entries, key=lambda e: e.number))
        self._bytes = sum(e.size for e in entries)
        self._next = max((e.number for e in entries), default=0) + 1

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

    def _read(self, entry: _Entry) -> tuple[EnvSpec, Trajectory] | None:
        """The trajectory of a file, or None after putting a damaged one aside."""
        match = _NAME.fullmatch(entry.path.name)
        assert match is not None, entry.path
        try:
            data = entry.path.read_bytes()
            if zlib.crc32(data) != int(match[3], 16):
                raise CodecError("checksum differs", expected=match[3])
            spec, trajectories = decode(data)
            (trajectory,) = trajectories
            return spec, trajectory
        except (OSError, ValueError) as error:  # StepwellError of the codec is a ValueError too
            if getattr(error, "errno", None) in _PASSING_ERRORS:
                raise OutboxError(f"cannot read the outbox now: {error}") from error
            log.error("outbox: %s cannot be read back (%s); put aside", entry.path, error)
            with contextlib.suppress(OSError):
                os.replace(entry.path, self._damaged_folder / entry.path.name)
                sync_folder(self._damaged_folder)
            return None

    # --- the sender -------------------------------------------------------------------------

    def _run(self) -> None:
        wait = FIRST_WAIT
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
            try:
                self._send_some()
                self.last_error, wait = "", FIRST_WAIT
            except Exception as error:  # the thread must outlive every error, ours included
                if not isinstance(error, StepwellError):
                    log.exception("outbox: defect while sending")
                if not self.last_error:
                    log.warning("outbox: %d trajectories wait: %s", self.pending, error)
                self.last_error = str(error) or type(error).__name__
                asked = error.retry_after if isinstance(error, Busy) else None
                self._pause(max(asked or 0.0, wait * random.uniform(0.5, 1.0)))
                wait = min(wait * 2.0, LONGEST_WAIT)

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

    def _next_group(self) -> tuple[list[tuple[_Entry, Trajectory]], EnvSpec | None]:
        """Neighbours of one spec; damaged files are dropped on the way."""
        group: list[tuple[_Entry, Trajectory]] = []
        spec: EnvSpec | None = None
        size = 0
        with self._changed:
            candidates = [e for e, _ in zip(self._waiting, range(GROUP_TRAJECTORIES), strict=False)]
        for entry in candidates:
            if group and size + entry.size > GROUP_BYTES:
                break
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

    def _send(self, group: list[tuple[_Entry, Trajectory]], spec: EnvSpec) -> None:
        trajectories = [trajectory for _, trajectory in group]
        try:
            result = self._client.post(
                self.dataset, trajectories, spec=spec, partition=self.partition
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
        failpoint("outbox.after_answer")
        if [item.id for item in result.items] != [t.id for t in trajectories]:
            raise OutboxError("the service did not say, in order, what became of each trajectory")
        for (entry, _), item in zip(group, result.items, strict=True):
            self._settle(entry, item)

    def _settle(self, entry: _Entry, item: IngestItem) -> None:
        if item.status in ("stored", "duplicate", "evicted"):
            entry.path.unlink(missing_ok=True)
            failpoint("outbox.after_unlink")
            self.sent += 1
            self._forget([entry])
            return
        problem = item.problem.model_dump() if item.problem else {"code": item.status}
        if problem.get("status") in _PASSING:
            raise OutboxError(f"not now: {problem.get('detail') or problem['code']}")
        self._reject(entry, problem)

    def _reject(self, entry: _Entry, problem: dict[str, Any]) -> None:
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
        self._forget([entry])

    def _forget(self, entries: list[_Entry]) -> None:
        with self._changed:
            for entry in entries:
                self._waiting.remove(entry)
                self._bytes -= entry.size
            self._changed.notify_all()


def _insert(waiting: deque[_Entry], entry: _Entry) -> None:
    """In order of number: two threads may finish writing in the other order."""
    if not waiting or waiting[-1].number < entry.number:
        waiting.append(entry)
        return
    at = next(i for i, other in enumerate(waiting) if other.number > entry.number)
    waiting.insert(at, entry)


def read_outbox(directory: str | Path) -> Iterator[tuple[Path, Trajectory]]:
    """Every trajectory that waits or was rejected in `directory`, to look at; takes no lock."""
    folder = Path(directory)
    for path in sorted(folder.glob("*.arrow")) + sorted((folder / "rejected").glob("*.arrow")):
        for trajectory in decode(path.read_bytes())[1]:
            yield path, trajectory
