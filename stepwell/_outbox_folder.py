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
    """Position in the sending order."""
    id: str
    """A trajectory's id, a policy's version, or a step."""
    crc: int
    path: Path
    size: int

    @property
    def kind(self) -> str:
        """The kind, a key of `_outbox_kinds.KINDS`."""
        return self.path.suffix[1:]


def entry(path: Path) -> Entry | None:
    """The entry that a file name describes; None for any other file. Raises OSError."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    return Entry(int(match[1]), match[2], int(match[3], 16), path, path.stat().st_size)


def entries(folder: Path) -> list[Entry]:
    """Return the waiting items of `folder` in sending order."""
    found = [e for path in folder.glob("*.*") if (e := entry(path)) is not None]
    return sorted(found, key=lambda e: e.number)


def place(folder: Path, number: int, id: str, crc: int, kind: str) -> Path:  # noqa: A002
    """Return the path of a waiting item in `folder`."""
    return folder / f"{number:012d}-{id}-{crc:08x}.{kind}"


@dataclass(frozen=True, slots=True)
class Destination:
    """The destination of the items of an outbox."""

    dataset: str = ""
    """Dataset of the trajectories; "" in the outbox of a training run."""
    partition: str = "fifo"
    url: str = ""
    """URL of the service when the outbox was last opened; "" if unknown."""
    created_at: float | None = None
    """Creation time of the dataset, which distinguishes it from one of the same name on another
    service."""
    run: str = ""
    """The training run whose metrics, log and policies wait here."""

    @classmethod
    def read(cls, folder: Path) -> Destination | None:
        """Read the destination; None if `folder` is not an outbox. Raises `OutboxError`."""
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
        """Whether both are the same dataset: same names, and same URL (an unknown URL counts as the
        same) or same creation time. A service may move, and another service may have a dataset of
        the same name."""
        same_url = not self.url or not other.url or self.url == other.url
        same_birth = self.created_at is not None and self.created_at == other.created_at
        return self.names_the_same(other) and (same_url or same_birth)


_DESTINATION = TypeAdapter(Destination)


def lock(folder: Path) -> IO[str]:
    """Lock an outbox until the returned file is closed. Raises `OutboxInUse`, OSError."""
    return take_lock(
        folder / LOCK,
        lambda pid: OutboxInUse(f"the outbox {folder} is used by process {pid or '?'}"),
    )


# --- summaries ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """The contents of one outbox."""

    folder: Path
    destination: Destination
    waiting: int
    bytes: int
    kinds: dict[str, int]
    """Number of waiting items of each kind."""
    oldest: float | None
    """Unix time at which the oldest of them was queued."""
    rejected: int
    reasons: dict[str, int]
    """Number of rejected items by the reason for refusal."""
    damaged: int
    held_by: int | None


def summarise(folder: Path) -> Summary | None:
    """Summarise an outbox; None if `folder` is not an outbox. Raises `OutboxError`."""
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
            continue  # sent in the meantime
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
    """Return the items in rejected/ or damaged/, without the files that give the reasons."""
    return [p for p in sorted(folder.glob("*.*")) if p.suffix != ".json" and p.name[0] != "."]


def reason_of(rejected: Path) -> str:
    """Return why an item in rejected/ was refused, from its .json file."""
    try:
        problem = json.loads(rejected.with_suffix(".json").read_text())
        return str(problem.get("detail") or problem.get("code") or "no reason given")
    except (OSError, ValueError, AttributeError):
        return "no reason noted"


def find_outboxes(root: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield `root` if it is an outbox, and every outbox below it, except in hidden folders."""
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
    """Return the default folder of outboxes: STEPWELL_OUTBOX, or ./stepwell-outbox."""
    return Path(os.environ.get(ROOT) or DEFAULT_ROOT)
