"""What must reach the service: first onto the local disk, then there from a thread, in order.

`Delivery` is the thread and the end of it; two queues on disk derive from it:

    LineSpool   metrics and log lines, appended to a file       (here; metrics.py, run_log.py)
    Publisher   policies, a file each                           (publish.py)

The service may be away for as long as it likes; what was not sent is sent later, by this process,
by the next life of the run, or by `stepwell deliver FOLDER`. What the service refuses, and what
cannot be read back, is set aside with the reason and holds nothing up.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from stepwell._background import BackgroundLoop
from stepwell._files import TEMPORARY, whole_file
from stepwell.client import Client
from stepwell.errors import BadRequest, Conflict, InvalidData, ServiceError, StepwellError, TooLarge
from stepwell.failpoints import failpoint
from trainer.errors import TrainerError

log = logging.getLogger(__name__)
LONGEST_WAIT = 10.0
TAIL = 1 << 16
Refused = tuple[bytes, str]
"""A line, and why it was refused."""


class Delivery(ABC):
    """Sends what waits on disk from a thread; closing waits a while for the rest."""

    what: str
    """Of what is sent, for people."""

    def __init__(self, client: Client | None, run: str, *, every: float = 1.0):
        self._client, self._run, self._closing = client, run, False
        self._loop: BackgroundLoop | None = None
        if client is not None:
            self._loop = BackgroundLoop(
                self.what,
                self._round,
                every=every,
                longest_wait=LONGEST_WAIT,
                expected=(StepwellError, OSError),  # the service is away; our own disk is full
            )

    @abstractmethod
    def send_next(self, client: Client) -> bool:
        """Send what waits in front; whether there may be more. Raises what to try again later."""

    @property
    @abstractmethod
    def unsent(self) -> int:
        """Bytes that the service has not acknowledged."""

    @property
    def trouble(self) -> str:
        """Why something waits; empty where all is well."""
        return "" if self._loop is None else self._loop.trouble

    def close(self, timeout: float = 10.0) -> bool:
        """Deliver the rest, within `timeout` seconds; whether all was delivered."""
        deadline = time.monotonic() + timeout
        if self._loop is not None:
            while self.unsent and time.monotonic() < deadline and self._loop.alive:
                self._loop.wake()
                time.sleep(0.02)
            self._closing = True
            # An attempt that hangs on the network may outlive us: it can only send once more.
            self._loop.stop(1.0)
        return not self.unsent

    def _start(self) -> None:
        """To be called when the queue on disk has been looked at."""
        if self._loop is not None:
            self._loop.start()

    def _round(self) -> None:
        assert self._client is not None
        while not self._closing and self.send_next(self._client):
            pass


class LineSpool(Delivery):
    """Append lines to a file; a thread delivers them.

        <name>.jsonl or .log    lines, appended
        <name>.sent             how many bytes of them the service has acknowledged
        <name>.refused          lines that it never will: {"line", "reason"} each

    What is sent, and how, is for those that derive from it.
    """

    at_once: int
    """Most lines in one request."""
    level = logging.WARNING
    """At which refused lines are told of."""

    def __init__(self, path: Path, client: Client | None, run: str, *, every: float = 1.0):
        super().__init__(client, run, every=every)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._sent_path = path, path.with_suffix(".sent")
        _cut_torn_line(path)
        for litter in path.parent.glob(f".{self._sent_path.name}.*{TEMPORARY}"):
            litter.unlink(missing_ok=True)  # of a life that was killed
        self._file = path.open("ab")
        self._sent = self._read_sent()
        self._start()

    @abstractmethod
    def send(self, client: Client, lines: Sequence[bytes]) -> list[Refused]:
        """Deliver these lines, each with its end; those that never will be, and why.

        Raises errors of the service: then the same lines come again.
        """

    def append(self, lines: Sequence[str]) -> None:
        """On disk (not fsynced) when this returns."""
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._file.flush()

    @property
    def unsent(self) -> int:
        return self.path.stat().st_size - self._sent

    def close(self, timeout: float = 10.0) -> bool:
        delivered = super().close(timeout)
        self._file.close()
        return delivered

    def send_next(self, client: Client) -> bool:
        with self.path.open("rb") as file:
            file.seek(self._sent)
            lines: list[bytes] = []
            for line in file:
                if not line.endswith(b"\n") or len(lines) == self.at_once:
                    break
                lines.append(line)
        if not lines:
            return False
        self._set_aside(self.send(client, lines))
        self._sent += sum(map(len, lines))
        with whole_file(self._sent_path) as sent:
            sent.write(str(self._sent).encode())
        return True

    def _set_aside(self, refused: Sequence[Refused]) -> None:
        """Killed behind it, the lines are there twice; never not at all."""
        if not refused:
            return
        path = self.path.with_suffix(".refused")
        with path.open("ab") as file:
            for line, reason in refused:
                kept = {"line": line.decode(errors="replace").rstrip("\n"), "reason": reason}
                file.write(json.dumps(kept).encode() + b"\n")
        failpoint("delivery.after_refused_lines")
        log.log(
            self.level,
            "%d of the run's %s cannot be delivered and lie in %s; the first: %s",
            *(len(refused), self.what, path, refused[0][1][:300]),
        )

    def _read_sent(self) -> int:
        try:
            return min(int(self._sent_path.read_text()), self.path.stat().st_size)
        except (OSError, ValueError):
            return 0


def is_final(error: BaseException) -> bool:
    """Whether the service, asked again with the same, would refuse it again."""
    if isinstance(error, ServiceError):
        return isinstance(error, BadRequest | Conflict | TooLarge)
    return isinstance(error, InvalidData)


def take_folder(folder: Path, run: str) -> IO[str]:
    """The folder of a run for this process alone, as long as the file that it gives is open.

    Raises `TrainerError` where another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise TrainerError(
            f"run {run}: {folder} is used by process {holder or '?'}; wait for its end, or train "
            "under another --run"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _cut_torn_line(path: Path) -> None:
    """A process that was killed may have left half a line; the next one must not join it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            begin = max(end - TAIL, 0)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        if end != size:
            file.truncate(end)
