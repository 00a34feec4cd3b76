"""The folder that backups are kept in. Several backups share the files that they have in common.

    TARGET/stepwell-backup.json                   says what the folder is
    TARGET/files/<folder>/<name>                  immutable data files, each once
    TARGET/backups/<id>/index.sqlite, segments/   what changes between backups
    TARGET/backups/<id>/manifest.json             written last: a backup without it is incomplete

Files appear under their names when they are whole (temporary name, fsync, rename).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from server.storage.checksums import STEP, Checksummer
from server.storage.sealed import replace_file
from server.storage.store import FOLDERS, NAME, QUARANTINE, sync_directory
from stepwell._locks import take_lock
from stepwell.errors import InvalidData

FORMAT = 1
ABOUT = "stepwell-backup.json"
Progress = Callable[[int], None]
"""Called with the number of bytes that were copied."""


class Damaged(Exception):
    """The bytes of a file differ from those that were written."""


@dataclass(frozen=True, slots=True)
class Item:
    """One file of a backup: `path` is relative to the data directory."""

    path: str
    bytes: int
    sha256: str


@dataclass(slots=True)
class Manifest:
    """What a complete backup holds."""

    id: str
    created_at: float
    serial: int
    """Serial number of the index (storage/index_mark.py)."""
    index_sha256: str
    files: list[Item] = field(default_factory=list)
    """In TARGET/files."""
    segments: list[Item] = field(default_factory=list)
    """In the backup's own folder."""
    problems: list[str] = field(default_factory=list)
    """Files that were damaged or missing when it was made."""

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in (*self.files, *self.segments))


class Target:
    """Opened by one process at a time."""

    def __init__(self, root: Path, *, create: bool):
        """Raises `InvalidData` if it is something else, or in use."""
        self.root = root
        about = root / ABOUT
        if not about.exists():
            if not create or (root.exists() and any(root.iterdir())):
                raise InvalidData(
                    f"{root} is not a folder of backups",
                    expected="a new or empty folder, or one that `stepwell backup` made"
                    if create
                    else "a folder that `stepwell backup` made",
                    got="other files" if root.exists() else "nothing there",
                )
            root.mkdir(parents=True, exist_ok=True)
            about.write_text(json.dumps({"format": FORMAT}) + "\n")
            sync_directory(root)
        found = _json(about).get("format")
        if found != FORMAT:
            raise InvalidData(
                f"{root} was written by another version", expected=f"format {FORMAT}", got=found
            )
        self._lock = take_lock(
            root / "lock",
            lambda pid: InvalidData(f"{root} is in use by process {pid or 'unknown'}; wait for it"),
        )

    def close(self) -> None:
        self._lock.close()

    def file(self, path: str) -> Path:
        return self.root / "files" / path

    def folder(self, backup: str) -> Path:
        return self.root / "backups" / backup

    def backups(self) -> list[Manifest]:
        """All complete ones, oldest first."""
        found = []
        for path in sorted((self.root / "backups").glob("*/manifest.json")):
            document = _json(path)
            for name in ("files", "segments"):
                document[name] = [_item(path, *one) for one in document[name]]
            found.append(Manifest(**document))
        return found

    def write_manifest(self, manifest: Manifest) -> None:
        """Makes the backup complete."""
        document = asdict(manifest)
        for name in ("files", "segments"):
            document[name] = [[i["path"], i["bytes"], i["sha256"]] for i in document[name]]
        path = self.folder(manifest.id) / "manifest.json"
        points = ("backup.before_manifest", "backup.after_manifest")
        replace_file(path, json.dumps(document).encode(), points)
        sync_directory(path.parent.parent)

    def remove_incomplete(self) -> None:
        """What an interrupted backup left, but for the data files, which the next one uses."""
        for folder in (self.root / "backups").glob("*"):
            if not (folder / "manifest.json").exists():
                shutil.rmtree(folder)
        for part in (self.root / "files").rglob("*.part"):
            part.unlink()

    def keep(self, count: int) -> int:
        """Delete all but the newest `count` backups, and the files that no other one needs; the
        number of deleted backups."""
        found = self.backups()
        old = found[: max(0, len(found) - count)]
        for manifest in old:
            (self.folder(manifest.id) / "manifest.json").unlink()
            shutil.rmtree(self.folder(manifest.id))
        needed = {item.path for manifest in found[len(old) :] for item in manifest.files}
        for path in (self.root / "files").rglob("*"):
            if path.is_file() and str(path.relative_to(self.root / "files")) not in needed:
                path.unlink()
        return len(old)


def new_id() -> str:
    """In the order of time."""
    now = time.time()
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"


def copy_file(source: Path, target: Path, sha256: str | None, progress: Progress) -> Item:
    """Copy a file, verified on the way and durable; `target` appears when it is whole.

    Raises `Damaged` if the bytes are not those of `sha256` (None: unknown), OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".part")
    sha, size = hashlib.sha256(), 0
    try:
        with source.open("rb", buffering=0) as reading, temporary.open("wb") as writing:
            while data := reading.read(STEP):
                sha.update(data)
                writing.write(data)
                size += len(data)
                progress(len(data))
            writing.flush()
            os.fsync(writing.fileno())
        if sha256 is not None and sha.hexdigest() != sha256:
            raise Damaged(f"{source} is not what was written")
        os.rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(target.parent)
    return Item("", size, sha.hexdigest())


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums_fit(path: Path, checksums: bytes) -> bool:
    """Whether a file has these block checksums (server/storage/checksums.py)."""
    summer = Checksummer()
    with path.open("rb") as file:
        while data := file.read(STEP):
            summer.update(data)
    return summer.result() == checksums


def _item(manifest: Path, path: str, size: int, sha256: str) -> Item:
    """Raises `InvalidData` for a path that is not one of a data directory."""
    parts = PurePosixPath(path).parts
    folder = "/".join(parts[:-1]).removeprefix(QUARANTINE + "/")
    if folder not in FOLDERS or not NAME.fullmatch(parts[-1]):
        raise InvalidData(f"{manifest} names a file that no backup holds", got=path[:200])
    return Item(path, size, sha256)


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidData(
            f"{path} cannot be read ({error})", expected="what stepwell backup wrote"
        ) from None
