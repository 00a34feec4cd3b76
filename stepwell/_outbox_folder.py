"""The folder of an outbox: the names of its files, who holds it, where its trajectories go.

    outbox.json                          dataset and partition, and the service that it was made for
    lock                                 held by the one process that uses it; says its number
    000000000017-<id>-<crc32>.arrow      waiting
    rejected/ damaged/                   put aside
    ending.json                          of a run, when the service was not there to be told

Looking (`summarise`, `held_by`) changes nothing. What waits moves and leaves in outbox.py only.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from stepwell._files import whole_file
from stepwell.errors import Busy, OutboxError, OutboxInUse, ServiceUnreachable, StepwellError

if TYPE_CHECKING:
    from stepwell.client import Client

try:
    import fcntl
except ImportError:  # Windows: two processes on one outbox are not kept apart there
    fcntl = None  # type: ignore[assignment]

ABOUT, LOCK, ENDING = "outbox.json", "lock", "ending.json"
ROOT = "STEPWELL_OUTBOX"
"""Environment variable: the folder below which collectors keep their outboxes."""
DEFAULT_ROOT = "stepwell-outbox"
DEPTH = 4
"""How far below a folder outboxes are looked for."""
LOCK_SECONDS = 1.0
"""Whoever only looks holds a lock for an instant: nobody is refused for that."""
_NAME = re.compile(r"(\d{12})-([0-9a-f-]{36})-([0-9a-f]{8})\.arrow")


@dataclass(frozen=True, slots=True)
class Entry:
    """One waiting file."""

    number: int
    """Its place in the order of sending."""
    id: str
    """Of the trajectory in it."""
    crc: int
    path: Path
    size: int


def entry(path: Path) -> Entry | None:
    """What the name of a file says; None for one that no outbox wrote. Raises OSError."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    return Entry(int(match[1]), match[2], int(match[3], 16), path, path.stat().st_size)


def entries(folder: Path) -> list[Entry]:
    """What waits in `folder`, in the order of sending."""
    found = [e for path in folder.glob("*.arrow") if (e := entry(path)) is not None]
    return sorted(found, key=lambda e: e.number)


def place(folder: Path, number: int, id: str, crc: int) -> Path:  # noqa: A002 - a trajectory's id
    """Where a trajectory waits in `folder`."""
    return folder / f"{number:012d}-{id}-{crc:08x}.arrow"


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the trajectories of an outbox go."""

    dataset: str
    partition: str = "fifo"
    url: str = ""
    """Of the service, when it was last opened; "" if nobody knows."""
    created_at: float | None = None
    """Of the dataset: it tells it from one of the same name at another service."""

    @classmethod
    def read(cls, folder: Path) -> Destination | None:
        """Of an outbox; None where `folder` is none. Raises `OutboxError`."""
        path = folder / ABOUT
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            moment = data.get("created_at")
            return cls(
                str(data["dataset"]),
                str(data["partition"]),
                str(data.get("url", "")),
                None if moment is None else float(moment),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise OutboxError(f"{path} does not read; is this an outbox?") from None
        except OSError as error:
            raise OutboxError(f"cannot read {path}: {error.strerror}") from None

    def __str__(self) -> str:
        where = f" at {self.url}" if self.url else ""
        return f"dataset {self.dataset!r}, partition {self.partition!r}{where}"

    def write(self, folder: Path) -> None:
        with whole_file(folder / ABOUT) as file:
            file.write(json.dumps(asdict(self)).encode())

    def names_the_same(self, other: Destination) -> bool:
        """Whether dataset and partition are of one name."""
        return (self.dataset, self.partition) == (other.dataset, other.partition)

    def is_the_same(self, other: Destination) -> bool:
        """Whether it is one dataset: at the same address, or made in the same moment. A service may
        move, and another one may have a dataset of the same name."""
        here = not self.url or not other.url or self.url == other.url
        born = self.created_at is not None and self.created_at == other.created_at
        return self.names_the_same(other) and (here or born)


# --- who holds it ---------------------------------------------------------------------------------


def take_lock(folder: Path) -> IO[str]:
    """The lock of an outbox, held until the file is closed. Raises `OutboxInUse`, OSError."""
    file = (folder / LOCK).open("a+")
    deadline = time.monotonic() + LOCK_SECONDS
    while not _locked(file):
        holder = _number(file)
        if _lives(holder) or time.monotonic() > deadline:
            file.close()
            raise OutboxInUse(
                f"the outbox {folder} is used by process {holder or '?'}; "
                "give every collector its own directory"
            )
        time.sleep(0.01)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _locked(file: IO[str], *, shared: bool = False) -> bool:
    """Lock it, unless another process has done so."""
    if os.name == "nt":
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def held_by(folder: Path) -> int | None:
    """The process that uses an outbox, 0 if its number is not known; None if nobody does."""
    try:
        file = (folder / LOCK).open()
    except OSError:
        return None
    with file:
        return None if _locked(file, shared=True) else _number(file)


def _number(file: IO[str]) -> int:
    file.seek(0)
    text = file.read(32).strip()
    return int(text) if text.isdecimal() else 0


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return pid > 0


# --- how a run ended ------------------------------------------------------------------------------


def note_ending(folder: Path, run: str, status: str, error: str) -> None:
    """How a run ended that the service could not be told of: whoever sends the rest tells it."""
    note = {"run": run, "status": status, "error": error, "at": time.time()}
    with whole_file(folder / ENDING) as file:
        file.write(json.dumps(note).encode())


def tell_ending(folder: Path, client: Client) -> None:
    """Tell the service what `note_ending` noted, unless the run has gone on since. Once."""
    path = folder / ENDING
    try:
        note = json.loads(path.read_text())
        run = client.run(str(note["run"]))
        if run.status == "running" and run.heartbeat_at <= float(note["at"]):
            client.patch_run(run.name, status=note["status"], error=str(note["error"]))
    except (FileNotFoundError, ServiceUnreachable, Busy):
        return  # nothing to tell, or nobody to hear it yet
    except (OSError, ValueError, KeyError, TypeError, StepwellError):
        pass  # it does not read, or the run is gone: there is nothing that a later try could tell
    path.unlink(missing_ok=True)


# --- looking --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """What lies in one outbox."""

    folder: Path
    destination: Destination
    waiting: int
    bytes: int
    oldest: float | None
    """When the first of them came, as a Unix time."""
    rejected: int
    reasons: dict[str, int]
    """Why the service refused them → how many."""
    damaged: int
    held_by: int | None


def summarise(folder: Path) -> Summary | None:
    """What lies in an outbox; None where `folder` is none. Raises `OutboxError`."""
    destination = Destination.read(folder)
    if destination is None:
        return None
    waiting, oldest, size = 0, None, 0
    for path in folder.glob("*.arrow"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # sent while we look
        waiting, size = waiting + 1, size + status.st_size
        oldest = status.st_mtime if oldest is None else min(oldest, status.st_mtime)
    reasons: dict[str, int] = {}
    for path in (folder / "rejected").glob("*.arrow"):
        reason = reason_of(path)
        reasons[reason] = reasons.get(reason, 0) + 1
    return Summary(
        folder=folder,
        destination=destination,
        waiting=waiting,
        bytes=size,
        oldest=oldest,
        rejected=sum(reasons.values()),
        reasons=reasons,
        damaged=sum(1 for _ in (folder / "damaged").glob("*.arrow")),
        held_by=held_by(folder),
    )


def reason_of(rejected: Path) -> str:
    """Why a file in rejected/ was refused, as the note beside it says."""
    try:
        problem = json.loads(rejected.with_suffix(".json").read_text())
        return str(problem.get("detail") or problem.get("code") or "no reason given")
    except (OSError, ValueError, AttributeError):
        return "no reason noted"


def find_outboxes(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    """`root` if it is an outbox, and every outbox below it; not in hidden folders."""
    if (root / ABOUT).is_file():
        yield root
        return
    if depth == 0:
        return
    try:
        below = sorted(e.name for e in os.scandir(root) if e.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in below:
        if not name.startswith("."):
            yield from find_outboxes(root / name, depth - 1)


def default_root() -> Path:
    """Where collectors that were told no folder keep their outboxes: STEPWELL_OUTBOX, or
    ./stepwell-outbox."""
    return Path(os.environ.get(ROOT) or DEFAULT_ROOT)
