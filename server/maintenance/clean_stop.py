"""After a clean stop, the checksums of the whole index file are kept beside it.

    index.sqlite.clean      sha256 of the rest, then size and block checksums as JSON

The next start compares a second's worth of file instead of reading every row. The mark is taken
away before anything is written, so it never speaks of another state of the file; without it, or
where it does not fit, every row is verified.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from server.index.wal import log_of
from server.storage.checksums import examine
from server.storage.sealed import replace_file, sealed, unsealed
from server.storage.store import sync_directory
from stepwell.failpoints import failpoint


def mark_clean(index: Path) -> None:
    """Keep the checksums of an index that nothing has open."""
    if log_of(index).exists():
        return
    found = examine(index, digest=False)
    content = sealed([found.size, found.checksums.hex()])
    replace_file(_mark(index), content, ("clean.before_rename", "clean.after_rename"))


def take_mark(index: Path) -> bool:
    """Whether the index is as it was at its clean stop. The mark is gone afterwards."""
    try:
        content = _mark(index).read_bytes()
    except OSError:
        return False
    with contextlib.suppress(OSError):
        _mark(index).unlink()
        sync_directory(index.parent)
    failpoint("clean.after_unlink")
    try:
        size, checksums = unsealed(content)
    except ValueError:
        return False
    if log_of(index).exists():
        return False
    found = examine(index, digest=False)
    return (found.size, found.checksums.hex()) == (size, checksums)


def _mark(index: Path) -> Path:
    return index.with_name(f"{index.name}.clean")
