"""Outbox slots: each collector on a machine uses one, and takes over those of ended collectors.

    stepwell-outbox/my-data/0    locked by a running collector
    stepwell-outbox/my-data/1    free: the next collector's slot
    stepwell-outbox/my-data/2    left by an ended collector: the next one sends the queued data

The root is STEPWELL_OUTBOX, or stepwell-outbox in the current directory. A collector with a
configured directory also searches that directory's siblings for outboxes to take over.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from stepwell._outbox_folder import Destination, default_root, entries
from stepwell.client import Client
from stepwell.errors import OutboxError, OutboxInUse
from stepwell.outbox import Outbox
from stepwell.spaces import EnvSpec

log = logging.getLogger(__name__)
MAX_SLOTS = 1000


def open_outbox(
    client: Client,
    dataset: str,
    spec: EnvSpec,
    *,
    directory: str | Path | None = None,
    partition: str = "fifo",
    max_bytes: int = 8 << 30,
    say: Callable[[str], object] = log.info,
) -> Outbox:
    """Open an outbox in `directory`, or in the first free slot. It takes over the data that ended
    collectors of this dataset left. Raises `OutboxError`."""
    created_at = client.dataset(dataset).created_at
    wanted = Destination(dataset, partition, client.url, created_at)

    def at(folder: Path) -> Outbox:
        return Outbox(
            folder,
            client,
            dataset,
            spec,
            partition=partition,
            max_bytes=max_bytes,
            created_at=created_at,
        )

    outbox = at(Path(directory)) if directory else _first_free(default_root() / dataset, wanted, at)
    for folder in _beside(outbox.directory, default_root() / dataset):
        try:
            if not _left_for(folder, outbox.destination):
                continue
            if count := outbox.adopt(folder):
                say(f"took over {count} items that waited in {folder}")
        except OutboxInUse:
            continue  # in use, or another collector was faster
        except OutboxError as error:
            say(f"{error}; see: stepwell outbox list {folder}")
    return outbox


def _first_free(parent: Path, wanted: Destination, at: Callable[[Path], Outbox]) -> Outbox:
    """Open the first slot below `parent` that is not in use and has no data of other datasets."""
    for number in range(MAX_SLOTS):
        folder = parent / str(number)
        try:
            stored = Destination.read(folder)
            if stored is None or stored.is_the_same(wanted) or not entries(folder):
                return at(folder)
        except OutboxInUse:
            continue
    raise OutboxError(f"{MAX_SLOTS} collectors hold outboxes in {parent}; name one with --outbox")


def _beside(directory: Path, default: Path) -> Iterator[Path]:
    """Folders that may be outboxes of ended collectors."""
    own = directory.resolve()
    for parent in dict.fromkeys((own.parent, default.resolve())):
        with contextlib.suppress(OSError):
            yield from (folder for folder in sorted(parent.iterdir()) if folder != own)


def _left_for(folder: Path, destination: Destination) -> bool:
    """Whether `folder` is an outbox of the same user and dataset with queued data."""
    try:
        if os.name != "nt" and folder.stat().st_uid != os.getuid():
            return False  # do not send other users' data with this token
        stored = Destination.read(folder)
        return bool(entries(folder)) and stored is not None and stored.is_the_same(destination)
    except (OSError, OutboxError):
        return False
