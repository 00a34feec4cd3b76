"""This node's copy of the shards, as memory-mapped columns. They are built once per shard.

    ROOT/columns/<shard>/<field>.npy     [1 + rows, *shape], one file per field; row 0 is `fill`
    ROOT/columns/<shard>/starts.npy      [trajectories + 1] rows at which trajectories begin
    ROOT/columns/<shard>/list.json       size and crc32 of each; unlisted files are ignored
    ROOT/locks/<shard>                   locked while a shard's columns are built or deleted
    ROOT/in_use/<shard>                  locked, shared, by each process that uses the shard
    ROOT/quarantine/<shard>.*            files that could not be read

A file gets its name only when it is complete. The cache holds complete shards, not selections: all
snapshots and runs on this node share them. The folder can be deleted; its contents are fetched
again. A process checks each column once, on first use, which also loads it into the page cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import resource
import shutil
import threading
import zlib
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, finalize

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stepwell._files import TEMPORARY, whole_file
from stepwell._sql import quoted
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import CodecError, Gone, NotFound, ServiceUnreachable
from stepwell.failpoints import failpoint
from trainer.data.alignment import LEADING_ROWS
from trainer.data.fields import Field
from trainer.data.snapshot import DataError, Manifest

log = logging.getLogger(__name__)
ROWS_AT_ONCE = 65_536
LIST = "list.json"
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ShardUnreadable(DataError):
    """A shard was damaged in two attempts to fetch it."""


class Cache:
    """Columns of shards, fetched through `client` on first use; shared by many processes.

    Other processes do not delete the shards that this object uses until `release`, or until the
    object is deleted.
    """

    def __init__(self, root: Path, limit_bytes: float, client: Client | None):
        self.root, self.limit, self._client = root, int(limit_bytes), client
        try:
            for name in ("columns", "locks", "in_use", "quarantine", "downloads"):
                (root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(root, error) from error
        _allow_many_files()
        self._in_use: dict[str, int] = {}
        """Shard → descriptor of the file that holds the shared lock."""
        self._in_use_lock = threading.Lock()
        finalize(self, _close_all, self._in_use)
        self._checked: set[Path] = set()
        self._mapped: WeakValueDictionary[Path, NDArray[Any]] = WeakValueDictionary()
        """Mapped columns, shared by successive views of growing data."""

    def ensure(
        self,
        manifest: Manifest,
        fields: Sequence[Field],
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, str]:
        """Build the missing columns of the snapshot's shards. Returns the shards that could not be
        read, with the reason.

        Raises `DataError` if no shard can be read, or if the disk is full.
        """
        used = np.unique(manifest.shard)
        unreadable: dict[str, str] = {}
        for done, index in enumerate(used):
            shard = manifest.shards[index]
            try:
                self.build(shard, fields)
                self._check(manifest, int(index))
            except ShardUnreadable as error:
                log.error("%s; its trajectories are left out", error)
                unreadable[shard] = str(error)
            if progress is not None:
                progress(done + 1, len(used))
        if len(unreadable) == len(used):
            every = pluralize(len(used), "shard")
            raise DataError(
                f"{len(used)} of {every} of the snapshot cannot be read; the first: "
                f"{next(iter(unreadable.values()))}"
            )
        return unreadable

    def column(self, shard: str, field: Field) -> NDArray[Any]:
        """A field of a shard, mapped read-only: [1 + rows, *shape]. Built first if missing.

        The array stays readable even if the file is deleted.
        """
        path = self._path(shard, field)
        mapped = self._mapped.get(path)
        if mapped is None:
            try:
                mapped = _load(path)
            except (OSError, ValueError):
                self._checked.discard(path)
                self.build(shard, [field])
                mapped = _load(path)
            self._mapped[path] = mapped
        return mapped

    def release(self, shards: Set[str]) -> None:
        """Mark these shards as no longer in use, so that they may be deleted."""
        with self._in_use_lock:
            _close_all({s: self._in_use.pop(s) for s in shards if s in self._in_use})
        for path in tuple(self._checked):
            if path.parent.name in shards:
                self._checked.discard(path)

    def build(self, shard: str, fields: Sequence[Field]) -> None:
        """Build the columns of a shard that are missing or damaged.

        Raises `ShardUnreadable`, or `DataError` if the cache cannot be written.
        """
        folder = self._folder(shard)
        paths = {self._path(shard, field): field for field in fields}
        try:
            self._use(shard)  # before the lock, which a process that evicts this shard may hold
            with (self.root / "locks" / shard).open("w") as lock:
                # The kernel releases a flock when its process ends: a killed builder cannot block
                # other processes.
                fcntl.flock(lock, fcntl.LOCK_EX)
                missing = [paths[path] for path in self._missing(folder, list(paths))]
                for field in missing:
                    self._mapped.pop(self._path(shard, field), None)
                if missing:
                    self._make_room(shard)
                    self._fetch_and_convert(shard, folder, missing)
                os.utime(folder)
        except OSError as error:
            raise _unusable(self.root, error) from error
        self._checked.update(paths)

    def _use(self, shard: str) -> None:
        """Prevent other processes from deleting a shard's columns."""
        with self._in_use_lock:
            if shard not in self._in_use:
                file = os.open(self.root / "in_use" / shard, os.O_CREAT | os.O_RDWR, 0o644)
                self._in_use[shard] = file
                fcntl.flock(file, fcntl.LOCK_SH)

    def _missing(self, folder: Path, paths: Sequence[Path]) -> list[Path]:
        """The columns that are missing or damaged. Damaged ones are moved to quarantine."""
        listed = _listed(folder)
        starts = folder / "starts.npy"
        bad = []
        for path in (starts, *paths):
            if path in self._checked and path.exists():
                continue
            if path.name in listed and path.exists() and _sums(path) == listed[path.name]:
                self._checked.add(path)
                continue
            if path.name in listed and path.exists():
                aside = self.root / "quarantine" / f"{folder.name}.{path.name}"
                log.error("cached column %s is damaged; moved to %s, built anew", path, aside)
                path.replace(aside)
            bad.append(path)
        return list(paths) if starts in bad else bad

    def _fetch_and_convert(self, shard: str, folder: Path, fields: Sequence[Field]) -> None:
        download = self.root / "downloads" / f"{shard}.parquet"
        for litter in (*folder.glob(f".*{TEMPORARY}"), *download.parent.glob(f".{shard}.*")):
            litter.unlink(missing_ok=True)  # left by a process that was killed
        for attempt in (1, 2):
            try:
                if self._client is None:
                    raise ShardUnreadable(f"shard {shard} is not in the cache, without a service")
                self._client.download_shard(shard, download)
                failpoint("cache.after_download")
                convert(download, folder, fields, self._path)
                download.unlink()
                return
            except (Gone, NotFound) as error:
                raise ShardUnreadable(f"shard {shard} is no more: {error}") from None
            except ServiceUnreachable as error:
                # The service closes the connection if it finds damage while sending; its response
                # to the next request reports the error.
                if attempt == 2:
                    raise
                log.warning("shard %s did not arrive, fetching it again: %s", shard, error)
            except (CodecError, duckdb.Error, pa.ArrowException, DataError) as error:
                if attempt == 2 or isinstance(error, ShardUnreadable):
                    if download.exists():
                        download.replace(self.root / "quarantine" / download.name)
                    raise ShardUnreadable(f"shard {shard} cannot be read: {error}") from None
                log.warning("shard %s cannot be read, fetching it again: %s", shard, error)

    def _check(self, manifest: Manifest, index: int) -> None:
        """Check that the manifest's rows are starts of trajectories with the stated lengths."""
        shard = manifest.shards[index]
        rows = np.flatnonzero(manifest.shard == index)
        starts = _load(self._folder(shard) / "starts.npy")
        which = manifest.traj_idx[rows]
        inside = (which >= 0) & (which < len(starts) - 1)
        fits = inside.copy()
        fits[inside] = (starts[which[inside]] == manifest.row_start[rows][inside]) & (
            starts[which[inside] + 1] - starts[which[inside]] == manifest.length[rows][inside] + 1
        )
        if not bool(fits.all()):
            bad = manifest.trajectory_ids(rows[~fits][:3])
            raise ShardUnreadable(
                f"shard {shard} does not hold the trajectories that the manifest says, "
                f"among them {', '.join(map(str, bad))}"
            )

    def _make_room(self, wanted: str) -> None:
        """Delete the least recently used shards, except those that a process uses."""
        found = []
        for folder in (self.root / "columns").iterdir():
            try:  # another process may be deleting it right now
                size = sum(path.stat().st_size for path in folder.iterdir())
                found.append((folder.stat().st_mtime, size, folder))
            except (FileNotFoundError, NotADirectoryError):
                continue
        total = sum(size for _, size, _ in found)
        for _, size, folder in sorted(found):
            if total <= self.limit:
                return
            if folder.name != wanted and self._evict(folder):
                total -= size
        if total > self.limit:
            log.warning(
                "the cache holds %.1f GB, more than data.cache_gb allows; all of it is in use",
                total / 1e9,
            )

    def _evict(self, folder: Path) -> bool:
        """Delete a shard's columns unless a process uses, builds or deletes them."""
        with (
            (self.root / "locks" / folder.name).open("w") as building,
            (self.root / "in_use" / folder.name).open("w") as using,
        ):
            try:
                fcntl.flock(building, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(using, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            # The list is deleted first: a folder without it counts as empty.
            (folder / LIST).unlink(missing_ok=True)
            failpoint("cache.after_eviction")
            shutil.rmtree(folder, ignore_errors=True)
            return True

    def _folder(self, shard: str) -> Path:
        if not _SHARD.fullmatch(shard):
            raise DataError(f"the manifest names a shard {shard!r}, which is no shard's name")
        return self.root / "columns" / shard

    def _path(self, shard: str, field: Field) -> Path:
        # A digest, because a key may contain slashes. It includes the fill, which is in the file.
        text = json.dumps([field.column, field.dtype, field.shape, field.fill])
        return self._folder(shard) / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.npy"


def convert(
    shard_file: Path,
    folder: Path,
    fields: Sequence[Field],
    path_of: Callable[[str, Field], Path],
) -> None:
    """Read `fields` of a Parquet shard through DuckDB and write their columns atomically.

    Raises `duckdb.Error`, `pa.ArrowException` or `DataError` if the file is not a valid shard.
    """
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("SET enable_progress_bar = false")  # it would print to stdout
        # row_start depends on the insertion order, which DuckDB preserves by default.
        source = "read_parquet($path)"
        params = {"path": str(shard_file)}
        count = connection.sql(f"SELECT count(*) FROM {source}", params=params).fetchall()
        rows = int(count[0][0])
        names = ", ".join(quoted(name) for name in ["traj_idx", "t", *(f.column for f in fields)])
        reader = connection.sql(f"SELECT {names} FROM {source}", params=params).to_arrow_reader(
            ROWS_AT_ONCE
        )
        columns = [_filled(field, LEADING_ROWS + rows) for field in fields]
        place = np.empty((rows, 2), np.int64)
        at = 0
        for batch in reader:
            n = batch.num_rows
            place[at : at + n, 0] = batch.column(0).to_numpy(zero_copy_only=False)
            place[at : at + n, 1] = batch.column(1).to_numpy(zero_copy_only=False)
            for i, (field, column) in enumerate(zip(fields, columns, strict=True)):
                _copy(batch.column(i + 2), field, column[LEADING_ROWS + at :][:n])
            at += n
    if at != rows:
        raise DataError(f"expected {rows} rows, read {at}")
    folder.mkdir(parents=True, exist_ok=True)
    listed = _listed(folder)
    starts = folder / "starts.npy"
    listed[starts.name] = _save(starts, _starts(place))
    for field, column in zip(fields, columns, strict=True):
        path = path_of(folder.name, field)
        listed[path.name] = _save(path, column)
        failpoint("cache.after_column")
    failpoint("cache.before_list")
    with whole_file(folder / LIST) as file:
        file.write(json.dumps(listed).encode())
    failpoint("cache.after_list")


def _starts(place: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first row of each trajectory, and the end. Checks that rows are dense and in order."""
    traj_idx, t = place[:, 0], place[:, 1]
    starts = np.flatnonzero(t == 0)
    length = np.diff(np.append(starts, len(t)))
    dense = np.array_equal(traj_idx, np.repeat(np.arange(len(starts)), length)) and (
        np.array_equal(t, np.arange(len(t)) - np.repeat(starts, length))
    )
    if not dense or not len(starts) or starts[0] != 0:
        raise DataError("rows are not sorted by (traj_idx, t) without gaps")
    return np.append(starts, len(t)).astype(np.int64)


def _filled(field: Field, rows: int) -> NDArray[Any]:
    column = np.zeros((rows, *field.shape), field.dtype)
    if any(field.fill):
        column[:] = field.fill_array
    return column


def _copy(source: pa.Array, field: Field, target: NDArray[Any]) -> None:
    """Copy the non-null values of an Arrow array, cast; elsewhere `target` keeps its fill."""
    present = ~source.is_null().to_numpy(zero_copy_only=False)
    if field.shape == ():
        values = source.drop_null().to_numpy(zero_copy_only=False)
    elif pa.types.is_binary(source.type):
        values = np.frombuffer(b"".join(source.drop_null().to_pylist()), np.uint8)
    else:
        values = source.flatten().to_numpy(zero_copy_only=False)
    count = int(present.sum())
    if values.size != count * field.size:
        raise DataError(f"column {field.column} has rows that are not {field.size} numbers long")
    flat = target.reshape(len(target), field.size)
    flat[present] = values.reshape(count, field.size).astype(field.dtype, copy=False)


def _save(path: Path, array: NDArray[Any]) -> list[int]:
    """Write a column and return its size and crc32."""
    with whole_file(path) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)
    # Computed from the written file, not from memory, to detect write errors.
    return _sums(path)


def _sums(path: Path) -> list[int]:
    """[size, crc32] of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _listed(folder: Path) -> dict[str, list[int]]:
    try:
        listed = json.loads((folder / LIST).read_bytes())
    except (OSError, ValueError):
        return {}
    return listed if isinstance(listed, dict) else {}


def _close_all(files: dict[str, int]) -> None:
    for file in files.values():
        os.close(file)


def _allow_many_files() -> None:
    """Raise the limit on open files: each mapped column holds one open, and many systems allow
    1024 per process by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _unusable(root: Path, error: OSError) -> DataError:
    return DataError(
        f"the cache {root} cannot be used: {error}; make room there, or choose another folder with "
        "data.cache"
    )


def _load(path: Path) -> NDArray[Any]:
    array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array
