"""Selected trajectories on this machine's disk: what `stepwell.torch` cuts its tensors from.

    FOLDER/<shard>.arrow     observations, actions, rewards: one uncompressed Arrow batch, memory-
                             mapped, so that a window is a slice; then its crc32, 4 bytes

A selection is frozen as a snapshot and leased while the object lives. Each shard is downloaded once
and converted; later selections find it there, and other processes may use the same folder. A file
gets its name only when it is complete. The folder can be deleted when nothing uses it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import struct
import uuid
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from typing_extensions import TypedDict

from stepwell import manifest
from stepwell._background import BackgroundLoop
from stepwell._files import whole_file
from stepwell.client import Client
from stepwell.errors import BadRequest, CodecError, InvalidData, StepwellError
from stepwell.schema import ACTION_KNOWN, REWARD, column_names
from stepwell.spaces import DEFAULT_ACTION, DEFAULT_OBSERVATION, Box, EnvSpec

log = logging.getLogger(__name__)
LEASE_SECONDS = 120.0
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SUM = struct.Struct("<I")

Array = NDArray[Any]
Arrays = dict[str, "Array | dict[str, Array]"]


class Chosen(TypedDict, total=False):
    """Arguments of a selection besides `dataset`."""

    where: str | None
    select: str | None
    snapshot: str | None
    include_eval: bool
    url: str | None
    token: str | None
    folder: str | Path | None


class Selection:
    """A frozen selection: one row per trajectory, and the arrays of each.

    Raises `NotFound` for an unknown dataset or snapshot, `BadRequest` for a wrong or empty
    selection, `Gone` for an expired snapshot, `CodecError` for a damaged shard.
    """

    def __init__(
        self,
        dataset: str | None = None,
        *,
        where: str | None = None,
        select: str | None = None,
        snapshot: str | None = None,
        include_eval: bool = False,
        url: str | None = None,
        token: str | None = None,
        folder: str | Path | None = None,
    ):
        if sum(bool(one) for one in (dataset, select, snapshot)) != 1 or (where and not dataset):
            raise InvalidData(
                "which trajectories",
                expected="a dataset (and where=), or select=, or snapshot=",
                got=f"{dataset=}, {where=}, {select=}, {snapshot=}",
            )
        self.folder = Path(folder or default_folder()).expanduser().absolute()
        self._arrays: dict[str, list[tuple[_Column, Array]]] = {}
        """The columns of each shard; opened by each process for itself."""
        client = Client(url, token)
        holder = f"stepwell.torch-{uuid.uuid4().hex[:8]}"
        try:
            if snapshot is None:
                snapshot = _freeze(client, dataset, where, select, include_eval, holder)
            self.snapshot = snapshot
            """The id of the snapshot: the same trajectories as long as it is kept."""
            self._lease(client, holder)
            self._read_manifest(client)
            self._fetch(client)
        except BaseException:
            self.close()
            client.close()
            raise

    def __len__(self) -> int:
        return len(self.length)

    def __getstate__(self) -> dict[str, Any]:
        """For the workers of a DataLoader: without maps and lease, which stays with its owner."""
        return {**self.__dict__, "_arrays": {}, "_finish": None}

    @property
    def ids(self) -> list[str]:
        """The id of each trajectory."""
        return manifest.id_texts(self._ids)

    def close(self) -> None:
        """Give the lease back. What is on disk remains usable."""
        finish = getattr(self, "_finish", None)
        if finish is not None:
            finish()

    def cut(self, row: int, start: int, length: int, padded: int) -> Arrays:
        """Copies of `length` steps of a trajectory from `start` on, then zeros up to `padded`.

        [padded + 1, …] of observations and `time_idx`, [padded, …] of everything of steps.
        """
        first = int(self._row_start[row]) + start
        at_end = start + length == int(self.length[row])
        found: Arrays = {}
        for column, values in self._columns(self._shards[self._shard[row]]):
            more = column.group == "obs"
            part = np.zeros((padded + more, *column.shape), column.given)
            part[: length + more] = values[first : first + length + more]
            if column.key:
                nested = found.setdefault(column.group, {})
                assert isinstance(nested, dict)
                nested[column.key] = part
            else:
                found[column.group] = part
        flags = np.zeros((4, padded), np.bool_)
        terminated, truncated, next_obs_valid, mask = flags
        mask[:length] = next_obs_valid[:length] = True
        if at_end:
            terminated[length - 1] = self._terminated[row]
            truncated[length - 1] = self._truncated[row]
            next_obs_valid[length - 1] = self._final_obs_valid[row]
        time_idx = np.zeros(padded + 1, np.int64)
        time_idx[: length + 1] = np.arange(length + 1) + int(self._first_step[row]) + start
        return found | {
            "terminated": terminated,
            "truncated": truncated,
            "next_obs_valid": next_obs_valid,
            "mask": mask,
            "time_idx": time_idx,
        }

    def _lease(self, client: Client, holder: str) -> None:
        client.lease(self.snapshot, holder, LEASE_SECONDS)

        def renew() -> None:
            try:
                client.lease(snapshot, holder, LEASE_SECONDS)
            except StepwellError as error:  # what is read lies on disk
                log.warning("lease of snapshot %s not renewed: %s", snapshot, error)

        snapshot, every = self.snapshot, LEASE_SECONDS / 4
        loop = BackgroundLoop("lease", renew, every=every, at_once=False).start()
        # Not a method: it would keep this object alive.
        self._finish = weakref.finalize(
            self, _give_back, os.getpid(), loop, client, snapshot, holder
        )

    def _read_manifest(self, client: Client) -> None:
        self.spec = EnvSpec.from_json(client.snapshot(self.snapshot).spec)
        table = client.manifest(self.snapshot)

        def column(name: str, dtype: Any) -> Array:
            return np.ascontiguousarray(table[name].to_numpy(), dtype)

        names = table["shard"].cast(pa.string()).combine_chunks().dictionary_encode()
        self._shards = [str(name) for name in names.dictionary.to_pylist()]
        self._shard = names.indices.to_numpy()
        self._ids = manifest.id_bytes(table["id"])
        self.component, self.weight = column("component", np.int64), column("weight", np.float64)
        shares = json.loads((table.schema.metadata or {})[manifest.SHARES_KEY])
        self.share: Array = np.asarray(shares, np.float64)
        """Per component of a mixture: its share of the samples."""
        self.length = column("length", np.int64)
        self._row_start = column("row_start", np.int64)
        self._first_step = column("first_step", np.int64)
        self._terminated = column("terminated", np.bool_)
        self._truncated = column("truncated", np.bool_)
        self._final_obs_valid = column("final_obs_valid", np.bool_)

    def _fetch(self, client: Client) -> None:
        """Download and convert the shards that are missing or damaged."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for index, shard in enumerate(self._shards):
            path = self._path(shard)
            if not _is_whole(path):
                log.info("fetching shard %d of %d", index + 1, len(self._shards))
                _convert(client, shard, path, self.spec)
            rows = len(self._columns(shard)[0][1])
            mine = self._shard == index
            if bool((self._row_start[mine] + self.length[mine] >= rows).any()):
                raise CodecError(
                    f"shard {shard} does not hold what the snapshot says",
                    expected=f"{int((self._row_start + self.length)[mine].max()) + 1} rows",
                    got=str(rows),
                )

    def _path(self, shard: str) -> Path:
        if not _SHARD.fullmatch(shard):
            raise CodecError("the manifest", expected="the name of a shard", got=repr(shard))
        return self.folder / f"{shard}.arrow"

    def _columns(self, shard: str) -> list[tuple[_Column, Array]]:
        found = self._arrays.get(shard)
        if found is None:
            try:
                with pa.memory_map(str(self._path(shard))) as source:
                    batch = pa.ipc.open_stream(source).read_next_batch()
            except FileNotFoundError:
                raise InvalidData(
                    f"shard {shard} is no longer in {self.folder}; create the dataset again"
                ) from None
            found = [(c, _values(batch[c.name], c)) for c in _layout(self.spec)]
            self._arrays[shard] = found
        return found


def default_folder() -> Path:
    """Where shards are kept: in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stepwell" / "shards"


def _freeze(
    client: Client,
    dataset: str | None,
    where: str | None,
    select: str | None,
    include_eval: bool,
    holder: str,
) -> str:
    what: dict[str, Any] = {"dataset": dataset, "where": where}
    if select is not None:
        what = {"sources": [{"select": select}]}
    try:
        made = client.create_snapshot(**what, include_eval=include_eval, holder=holder)
    except BadRequest as error:
        if error.code != "empty_selection":
            raise
        query = select or f"SELECT id FROM trajectories WHERE dataset = '{dataset}'"
        query += f" AND ({where})" if where else ""
        problem: Mapping[str, Any] = {**error.problem, "detail": f"{error.detail}: {query}"}
        raise BadRequest(dict(problem)) from None
    for file in made.excluded:
        log.warning("%d trajectories are left out: %s is damaged", file.trajectories, file.file)
    return made.id


def _give_back(
    owner: int, loop: BackgroundLoop, client: Client, snapshot: str, holder: str
) -> None:
    if os.getpid() != owner:  # in a worker that was forked
        return
    loop.stop(5.0)
    try:
        client.with_options(timeout=5.0, retry_for=0.0).release(snapshot, holder)
    except (StepwellError, RuntimeError) as error:  # closed already; it expires by itself
        log.debug("lease of %s not given back: %s", snapshot, error)
    client.close()


class _Column(NamedTuple):
    """A column of the shards that is read."""

    group: str
    """"obs", "actions", "rewards" or "action_known"."""
    key: str
    """Its name in the group; empty for a lone array, which is the group itself."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    given: str
    """The dtype that is given: numbers that name choices are int64, as torch's losses ask for."""


def _layout(spec: EnvSpec) -> list[_Column]:
    columns, found = column_names(spec), []
    for kind, group, default in (
        ("obs", "obs", DEFAULT_OBSERVATION),
        ("action", "actions", DEFAULT_ACTION),
    ):
        alone = [key for _, key, _ in columns[kind]] == [default]
        for name, key, space in columns[kind]:
            choice = kind == "action" and not isinstance(space, Box)
            given = "int64" if choice else space.dtype
            found.append(
                _Column(group, "" if alone else key, name, space.dtype, space.shape, given)
            )
    found.append(_Column("rewards", "", REWARD, "float32", (), "float32"))
    if spec.action_known:
        found.append(_Column("action_known", "", ACTION_KNOWN, "bool", (), "bool"))
    return found


def _convert(client: Client, shard: str, path: Path, spec: EnvSpec) -> None:
    """Download a shard and keep its columns as a file that can be memory-mapped."""
    names = [column.name for column in _layout(spec)]
    with TemporaryDirectory(dir=path.parent, prefix=".download-") as temporary:
        parquet = client.download_shard(shard, Path(temporary) / "shard.parquet")
        try:
            with pq.ParquetFile(parquet) as file:
                table = file.read(columns=names).select(names).combine_chunks()
        except (pa.ArrowException, KeyError) as error:
            raise CodecError(f"shard {shard} cannot be read: {error}") from None
    with whole_file(path, durable=False) as target:
        summed = _Summed(target)
        with pa.ipc.new_stream(summed, table.schema) as writer:
            writer.write_table(table)
        target.write(_SUM.pack(summed.crc))


class _Summed:
    """The file that Arrow writes to, and the crc32 of what it wrote."""

    closed = False

    def __init__(self, file: BinaryIO):
        self._file, self.crc = file, 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _is_whole(path: Path) -> bool:
    """Whether a converted shard is there, with the crc32 that was written."""
    crc, tail = 0, b""
    try:
        with path.open("rb") as file:
            while chunk := tail + file.read(1 << 20):
                if len(chunk) <= _SUM.size:
                    return chunk == _SUM.pack(crc)
                tail = chunk[-_SUM.size :]
                crc = zlib.crc32(memoryview(chunk)[: -_SUM.size], crc)
    except FileNotFoundError:
        return False
    return False


def _values(array: pa.Array, column: _Column) -> Array:
    """[rows, *shape], without a copy where the layout allows. What is under NULL is arbitrary."""
    if column.shape == ():
        if column.dtype == "bool":  # packed as bits
            return np.asarray(array.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)
        data = array.buffers()[1]
    elif column.dtype == "uint8":
        data = array.buffers()[1]
    else:
        data = array.values.buffers()[1]
    shape = (len(array), *column.shape)
    return np.frombuffer(data, column.dtype, math.prod(shape)).reshape(shape)
