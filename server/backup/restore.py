"""Puts a backup back into an empty directory.

    DIR/restoring   says that DIR is incomplete: no service starts on it
      → files, each verified
      → index, as one that no other directory has; then its mark; DIR/restoring goes

An interrupted restore goes on where it stopped, when it is started again.
"""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

from server.backup.target import Damaged, Item, Manifest, Progress, Target, copy_file
from server.index.db import Database, next_epoch, renew_store, upgrade
from server.index.index_file import RESTORING, read_index_mark
from server.index.wal import into_one_file
from server.storage.index_mark import write_mark
from server.storage.store import DirectoryLock, Store, sync_directory
from stepwell.errors import InvalidData
from stepwell.failpoints import failpoint


def restore(
    target: Target, manifest: Manifest, data: Path, *, progress: Progress = lambda _: None
) -> list[str]:
    """Restore into `data`. Returns what of the backup is damaged or missing: the service starts
    without it, and names it.

    Raises `InvalidData` if the directory holds anything else, `DirectoryInUse`, OSError.
    """
    _refuse_others(data, manifest.id)
    with closing(DirectoryLock(data)):
        _begin(data, manifest.id)
        store = Store(data)
        store.clear_tmp()
        problems = list(manifest.problems)
        folder = target.folder(manifest.id)
        for item, source in (
            *((item, target.file(item.path)) for item in manifest.files),
            *((item, folder / item.path) for item in manifest.segments),
        ):
            problems += _copy(item, source, data, progress)
        _index(folder / "index.sqlite", manifest.index_sha256, data)
    return problems


def _refuse_others(data: Path, backup: str) -> None:
    """Nothing is overwritten: only an empty directory, or this restore's own, is written to."""
    if not data.exists():
        return
    begun = data / RESTORING
    if begun.exists():
        earlier = json.loads(begun.read_text() or "{}").get("backup")
        if earlier in (backup, None):
            return
        raise InvalidData(
            f"{data} holds the beginning of another restore",
            expected=f"--at {earlier}, to go on with it, or another --data",
            got=backup,
        )
    if any(path.name != "lock" for path in data.iterdir()):
        raise InvalidData(
            f"{data} is not empty; a restore never overwrites anything",
            expected="a new or empty directory",
            got=", ".join(sorted(path.name for path in data.iterdir())[:5]),
        )


def _begin(data: Path, backup: str) -> None:
    begun = data / RESTORING
    if not begun.exists():
        temporary = data / (RESTORING + ".part")
        temporary.write_text(json.dumps({"backup": backup}))
        os.rename(temporary, begun)
        sync_directory(data)
    failpoint("restore.after_begin")


def _copy(item: Item, source: Path, data: Path, progress: Progress) -> list[str]:
    """Copy one file, unless it is there; returns the problem."""
    place = data / item.path
    if place.exists() and place.stat().st_size == item.bytes:
        progress(item.bytes)  # it was verified when it was copied
        return []
    try:
        copy_file(source, place, item.sha256, progress)
    except FileNotFoundError:
        return [f"{item.path} is missing in the backup"]
    except Damaged:
        return [f"{item.path} is damaged in the backup"]
    failpoint("restore.after_file")
    return []


def _index(source: Path, sha256: str, data: Path) -> None:
    """The index takes its place last. Raises `InvalidData` if it is damaged in the backup."""
    index, made = data / "index.sqlite", data / "tmp" / "index.sqlite"
    if not index.exists():
        try:
            copy_file(source, made, sha256, lambda _: None)
        except (Damaged, FileNotFoundError):
            raise InvalidData(
                f"{source} is damaged or missing; restore another backup with --at, or rebuild the"
                f" index from the restored files: rm {data / RESTORING};"
                f" stepwell fsck --rebuild --data {data}"
            ) from None
        upgrade(made)
        with closing(Database(made)) as db, db.write() as connection:
            # What was written after the backup is another history.
            renew_store(connection)
            next_epoch(connection)
        into_one_file(made)
        failpoint("restore.before_index")
        os.rename(made, index)
        sync_directory(data)
    failpoint("restore.after_index")
    mark = read_index_mark(index)
    assert mark is not None, "just restored"
    write_mark(data, mark)
    (data / RESTORING).unlink()
    sync_directory(data)
