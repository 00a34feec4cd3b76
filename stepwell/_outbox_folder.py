"""The folder of an outbox: file names, the lock, the destination, and summaries for people.

    outbox.json                            dataset or run, and the service that it was opened for
    lock                                   held by the process that uses it; contains its pid
    000000000017-<key>-<crc32>.<kind>      waiting (stepwell/_outbox_kinds.py lists the kinds)
    rejected/ damaged/                     set aside

`summarise` changes nothing. Only outbox.py moves and deletes items.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter, ValidationError

from stepwell._files import whole_file
from stepwell._locks import held_by, take_lock
from stepwell.errors import OutboxError, OutboxInUse

ABOUT, LOCK = "outbox.json", "lock"
ROOT = "STEPWELL_OUTBOX"
"""Environment variable: the folder in which collectors keep their outboxes."""
DEFAULT_ROOT = "stepwell-outbox"
DEPTH = 4
"""How many levels below a folder `find_outboxes` searches."""
_NAME = re.compile(
    r"(\d{12})-([0-9a-zA-Z-]{1,64})-([0-9a-f]{8})\.(arrow|metrics|log|policy|ending)"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One waiting file."""

    number: int
    """Its place in the order of sending."""
    id: str
    """A trajectory's id, a policy's version, or a step."""
    crc: int
    path: Path
    size: int

    @property
    def kind(self) -> str:
        """A key of `_outbox_kinds.KINDS`."""
        return self.path.suffix[1:]


def entry(path: Path) -> Entry | None:
    """The entry that a file name describes; None for any other file. Raises OSError."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    return Entry(int(match[1]), match[2], int(match[3], 16), path, path.stat().st_size)


def entries(folder: Path) -> list[Entry]:
    """What waits in `folder`, in the order of sending."""
    found = [e for path in folder.glob("*.*") if (e := entry(path)) is not None]
    return sorted(found, key=lambda e: e.number)


def place(folder: Path, number: int, id: str, crc: int, kind: str) -> Path:  # noqa: A002
    """Where an item waits in `folder`."""
    return folder / f"{number:012d}-{id}-{crc:08x}.{kind}"


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the items of an outbox go."""

    dataset: str = ""
    """Of trajectories; "" in the outbox of a training run."""
    partition: str = "fifo"
    url: str = ""
    """Of the service, when the outbox was last opened; "" if unknown."""
    created_at: float | None = None
    """Of the dataset: it tells it from one of the same name at another service."""
    run: str = ""
    """The training run whose metrics, log and policies wait here."""

    @classmethod
    def read(cls, folder: Path) -> Destination | None:
        """The destination of an outbox; None where `folder` is none. Raises `OutboxError`."""
        path = folder / ABOUT
        try:
            return _DESTINATION.validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            raise OutboxError(f"{path} cannot be parsed; is this an outbox?") from None
        except OSError as error:
            raise OutboxError(f"cannot read {path}: {error.strerror}") from None

    @property
    def name(self) -> str:
        return f"run {self.run}" if self.run else f"dataset {self.dataset}"

    def __str__(self) -> str:
        where = f" at {self.url}" if self.url else ""
        if self.run:
            return f"run {self.run!r}{where}"
        return f"dataset {self.dataset!r}, partition {self.partition!r}{where}"

    def write(self, folder: Path) -> None:
        with whole_file(folder / ABOUT) as file:
            file.write(_DESTINATION.dump_json(self))

    def names_the_same(self, other: Destination) -> bool:
        """Whether run, dataset and partition have the same names."""
        mine, theirs = ((d.run, d.dataset, d.partition) for d in (self, other))
        return mine == theirs

    def is_the_same(self, other: Destination) -> bool:
        """Whether it is one dataset: at the same address, or created at the same moment. A service
        may move, and another one may have a dataset of the same name."""
        same_url = not self.url or not other.url or self.url == other.url
        same_birth = self.created_at is not None and self.created_at == other.created_at
        return self.names_the_same(other) and (same_url or same_birth)


_DESTINATION = TypeAdapter(Destination)


def lock(folder: Path) -> IO[str]:
    """The lock of an outbox, held until the file is closed. Raises `OutboxInUse`, OSError."""
    return take_lock(
        folder / LOCK,
        lambda pid: OutboxInUse(f"the outbox {folder} is used by process {pid or '?'}"),
    )


# --- looking --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """What lies in one outbox."""

    folder: Path
    destination: Destination
    waiting: int
    bytes: int
    kinds: dict[str, int]
    """How many items of each kind wait."""
    oldest: float | None
    """When the oldest of them was queued, in Unix seconds."""
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
    kinds: Counter[str] = Counter()
    oldest, size = None, 0
    for path in folder.glob("*.*"):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # sent meanwhile
        kinds[match[4]] += 1
        size += status.st_size
        oldest = status.st_mtime if oldest is None else min(oldest, status.st_mtime)
    reasons = Counter(reason_of(path) for path in set_aside(folder / "rejected"))
    return Summary(
        folder=folder,
        destination=destination,
        waiting=kinds.total(),
        bytes=size,
        kinds=dict(kinds),
        oldest=oldest,
        rejected=reasons.total(),
        reasons=dict(reasons),
        damaged=len(set_aside(folder / "damaged")),
        held_by=held_by(folder / LOCK),
    )


def set_aside(folder: Path) -> list[Path]:
    """The items in rejected/ or damaged/, without the reasons beside them."""
    return [p for p in sorted(folder.glob("*.*")) if p.suffix != ".json" and p.name[0] != "."]


def reason_of(rejected: Path) -> str:
    """Why an item in rejected/ was refused, as the note beside it says."""
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
    """Where collectors keep their outboxes by default: STEPWELL_OUTBOX, or ./stepwell-outbox."""
    return Path(os.environ.get(ROOT) or DEFAULT_ROOT)
