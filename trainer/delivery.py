"""Lines that must reach the service: first into a local file, then there from a thread.

    <name>.jsonl or .log    lines, appended
    <name>.sent             how many bytes of them the service has acknowledged

The service may be away for as long as it likes; what was not sent is sent later, by this process or
by the next life of the run. What is sent, and how, is for those that derive from `LineSpool`.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from stepwell._files import whole_file
from stepwell.client import Client
from stepwell.errors import StepwellError

log = logging.getLogger(__name__)
LONGEST_WAIT = 10.0


class LineSpool(ABC):
    """Append lines; a thread delivers them. Closing waits a while for the rest to be delivered."""

    what: str
    """Of these lines, for people."""
    at_once: int
    """Most lines in one request."""

    def __init__(self, path: Path, client: Client | None, run: str, *, every: float = 1.0):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._sent_path = path, path.with_suffix(".sent")
        self._client, self._run, self._every = client, run, every
        _cut_torn_line(path)
        self._file = path.open("ab")
        self._sent = self._read_sent()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if client is not None:
            self._thread = threading.Thread(target=self._deliver, name=self.what, daemon=True)
            self._thread.start()

    @abstractmethod
    def send(self, client: Client, lines: Sequence[bytes]) -> None:
        """Deliver these lines, each with its end. Raises errors of the service: then again."""

    def append(self, lines: Sequence[str]) -> None:
        """On disk (not fsynced) when this returns."""
        self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._file.flush()

    @property
    def unsent(self) -> int:
        """Bytes that the service has not acknowledged."""
        return self.path.stat().st_size - self._sent

    def close(self, timeout: float = 10.0) -> bool:
        """Deliver the rest, within `timeout` seconds; whether all was delivered."""
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            self._stop.set()
            while self.unsent and time.monotonic() < deadline and self._thread.is_alive():
                time.sleep(0.01)
            self._client = None  # the thread gives up at its next look
            self._thread.join(1.0)
        self._file.close()
        return not self.unsent

    def _deliver(self) -> None:
        wait = self._every
        while (client := self._client) is not None:
            self._stop.wait(wait)
            try:
                while self._send_some(client):
                    pass
                wait = self._every
            except (StepwellError, OSError) as error:  # OSError: our own disk is full
                wait = min(2 * wait, LONGEST_WAIT)
                log.info("%s wait for the service (%d bytes): %s", self.what, self.unsent, error)
                time.sleep(0.1 if self._stop.is_set() else 0.0)
            if self._stop.is_set() and not self.unsent:
                return

    def _send_some(self, client: Client) -> bool:
        """Send the next lines; whether there may be more."""
        with self.path.open("rb") as file:
            file.seek(self._sent)
            lines: list[bytes] = []
            for line in file:
                if not line.endswith(b"\n") or len(lines) == self.at_once:
                    break
                lines.append(line)
        if not lines:
            return False
        self.send(client, lines)
        self._sent += sum(map(len, lines))
        with whole_file(self._sent_path) as sent:
            sent.write(str(self._sent).encode())
        return True

    def _read_sent(self) -> int:
        try:
            return min(int(self._sent_path.read_text()), self.path.stat().st_size)
        except (OSError, ValueError):
            return 0


def _cut_torn_line(path: Path) -> None:
    """A process that was killed may have left half a line; the next one must not join it."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
