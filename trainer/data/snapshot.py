"""Snapshots: the fixed selection that a trainer reads, its manifest, and the leases that keep it.

A manifest is one row per trajectory, as arrays (no Python object per row):

    component  shard  traj_idx  row_start  length  first_step  terminated truncated final_obs_valid
    0          2      17        3417       200     0           F          T         T

row_start is a row of the shard; the trajectory's rows are row_start … row_start + length.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stepwell import EnvSpec, manifest
from stepwell._background import BackgroundLoop
from stepwell._files import whole_file
from stepwell._sql import literal, version_condition
from stepwell.client import Client
from stepwell.errors import Gone, NotFound, ServiceError, StepwellError
from stepwell.failpoints import failpoint
from stepwell.messages import split_version
from trainer.config import TrainConfig
from trainer.errors import TrainerError

log = logging.getLogger(__name__)
LEASE_SECONDS = 120.0
LONGEST_CHAIN = 32
"""Maximum number of consecutive manifests stored as changes to the previous one."""
_SPEC = b"trainer.spec"

Ints = NDArray[np.int64]


class DataError(TrainerError):
    """The data cannot be used for training; the message contains the reason and a remedy."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a snapshot, one row per trajectory; see the table above."""

    snapshot: str
    digest: str
    """Digest of the selection: equal digests mean equal rows in the same order."""
    spec: EnvSpec
    shares: tuple[float, ...]
    """Share of each component of the mixture, if the shares are constant; they sum to 1."""
    ids: NDArray[np.void]
    """Each trajectory's UUID, 16 bytes; `trajectory_ids` converts them to text."""
    shards: tuple[str, ...]
    """Names of all shards; the column `shard` indexes them."""
    component: NDArray[np.int16]
    weight: NDArray[np.float64]
    shard: NDArray[np.int32]
    traj_idx: NDArray[np.int32]
    row_start: Ints
    length: Ints
    first_step: Ints
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_obs_valid: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.length)

    def trajectory_ids(self, rows: Ints | Sequence[int]) -> list[str]:
        """The ids of some rows as text, for messages and SQL."""
        return manifest.id_texts(self.ids[np.asarray(rows)])

    @property
    def steps(self) -> int:
        """Total number of transitions, those of several components several times."""
        return int(self.length.sum())

    @property
    def distinct_steps(self) -> int:
        """Total number of transitions, each trajectory once."""
        return int(self.length[self.distinct].sum())

    @cached_property  # sorts all ids
    def distinct(self) -> NDArray[np.intp]:
        """One row of each trajectory: several components of a mixture may have it."""
        return np.unique(self.ids, return_index=True)[1]

    @cached_property
    def later_steps(self) -> Ints:
        """[n] how many steps of the same component were stored after each trajectory."""
        later = np.empty(len(self), np.int64)
        for component in range(len(self.shares)):
            rows = np.flatnonzero(self.component == component)  # in the order of arrival
            stored = self.length[rows].cumsum()
            later[rows] = stored[-1:] - stored
        return later

    def without(self, shards: Sequence[str]) -> Manifest:
        """The manifest without shards that cannot be read. Returns self if `shards` is empty."""
        bad = set(shards) & set(self.shards)
        if not bad:
            return self
        keep = ~np.isin(self.shard, [i for i, name in enumerate(self.shards) if name in bad])
        return self.only(keep, "\n".join(sorted(bad)))

    def only(self, keep: NDArray[np.bool_], why: str) -> Manifest:
        """The manifest of the trajectories where `keep` [n] is True; `why` enters its digest."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        columns: Any = {k: v[keep] for k, v in found.items() if isinstance(v, np.ndarray)}
        # Another selection has another sample order, so it needs another digest.
        mixed = hashlib.sha256(f"{self.digest}\n{why}".encode()).hexdigest()
        return replace(self, digest=mixed, **columns)


def manifest_from_table(table: pa.Table, spec: EnvSpec) -> Manifest:
    """Convert a manifest from the service's format. Raises `DataError` if it is empty."""
    metadata = {k: v.decode() for k, v in (table.schema.metadata or {}).items()}
    if not table.num_rows:
        raise DataError("the snapshot selects no trajectory; look with: stepwell sql")
    column_of_shards = _encoded(table["shard"])
    shards = [str(name) for name in column_of_shards.dictionary.to_pylist()]
    if missing := {manifest.ID_KEY, manifest.DIGEST_KEY, manifest.SHARES_KEY} - metadata.keys():
        raise DataError(f"the manifest lacks {missing}; it has {sorted(metadata)}")
    shares = json.loads(metadata[manifest.SHARES_KEY])

    def column(name: str, dtype: Any) -> NDArray[Any]:
        return np.ascontiguousarray(table[name].to_numpy(), dtype=dtype)

    return Manifest(
        snapshot=metadata[manifest.ID_KEY],
        digest=metadata[manifest.DIGEST_KEY],
        spec=spec,
        shares=tuple(float(share) / sum(shares) for share in shares),
        ids=manifest.id_bytes(table["id"]),
        shards=tuple(shards),
        component=column("component", np.int16),
        weight=column("weight", np.float64),
        shard=column_of_shards.indices.to_numpy().astype(np.int32, copy=False),
        traj_idx=column("traj_idx", np.int32),
        row_start=column("row_start", np.int64),
        length=column("length", np.int64),
        first_step=column("first_step", np.int64),
        terminated=column("terminated", np.bool_),
        truncated=column("truncated", np.bool_),
        final_obs_valid=column("final_obs_valid", np.bool_),
    )


def create_snapshot(
    client: Client, config: TrainConfig, holder: str, since: str | None = None
) -> str:
    """Create the snapshot that the config selects, or use the one that it names; returns the id.

    `holder` gets the first lease of a new snapshot. Raises `BadRequest` if the selection is empty.
    """
    if config.snapshot:
        return config.snapshot
    config.require_data()
    snapshot = client.create_snapshot(
        **_selection(config), since=since, include_eval=config.data.include_eval, holder=holder
    )
    return snapshot.id


def sql_condition(config: TrainConfig) -> str:
    """The SQL condition over `trajectories` of the dataset and `where` of a config."""
    dataset, version = split_version(config.dataset)
    condition = f"dataset = {literal(dataset)}"
    if version:
        condition += f" and {version_condition(config.dataset)}"
    if not config.data.include_eval:
        condition += " and purpose = 'train'"
    where = config.where.replace("{dataset}", dataset)
    return f"{condition} and ({where})" if where else condition


def best_condition(condition: str, fraction: float) -> str:
    """The SQL condition of the `fraction` with the highest returns among the trajectories of a
    `condition`, and of those with the same return as the last of them.

    If these are five times as many or more, because most returns are equal, it is that of the
    trajectories with higher returns: with rare successes, of the successes. Where there are no
    higher ones, all with the highest return are the best.
    """

    def over(statistic: str) -> str:
        return f"(select {statistic} from trajectories where {condition})"

    last, limit = (f'quantile_cont("return", {max(0.0, 1 - n * fraction):g})' for n in (1, 5))
    higher = f'"return" > {over(limit)} or {over(f"""{limit} >= max("return")""")}'
    return f'"return" >= {over(last)} and ({higher})'


def _selection(config: TrainConfig) -> dict[str, Any]:
    """The arguments of `Client.create_snapshot` that select trajectories."""
    data = config.data
    if data.best_share:
        condition = sql_condition(config)
        select = f"select id from trajectories where {condition}"
        best = f"{select} and {best_condition(condition, data.best_fraction)}"
        shares = [(select, 1.0 - data.best_share), (best, data.best_share)]
        return {"sources": [{"select": sql, "share": share} for sql, share in shares]}
    # A share that is 0 now may grow later: the snapshot includes all components that may ever be
    # drawn.
    sources = [{"select": s.select, "share": s.share or s.last_share} for s in config.sources]
    return {
        "dataset": config.dataset or None,
        "where": config.where.replace("{dataset}", split_version(config.dataset)[0]) or None,
        "sources": sources or None,
    }


def load_manifest(client: Client, snapshot_id: str, folder: Path, since: str = "") -> Manifest:
    """The manifest of a snapshot, read from `folder` if this run has kept it there.

    With `since`, an earlier snapshot whose manifest `folder` has, only what differs is fetched and
    kept. Raises `stepwell.errors.Gone` for an expired snapshot that was never kept here.
    """
    path = _kept(folder, snapshot_id)
    if path.exists():
        table = _read(folder, snapshot_id)
        spec = EnvSpec.from_json(json.loads(table.schema.metadata[_SPEC]))
        return manifest_from_table(table, spec)
    snapshot = client.snapshot(snapshot_id)
    fresh, table = _fetch(client, snapshot_id, folder, since)
    # Locations may move when shards are compacted; what this run sampled from must not.
    metadata = {**(fresh.schema.metadata or {}), _SPEC: json.dumps(snapshot.spec).encode()}
    folder.mkdir(parents=True, exist_ok=True)
    with (
        whole_file(path) as file,
        pa.ipc.new_stream(file, fresh.schema.with_metadata(metadata)) as w,
    ):
        for batch in fresh.to_batches():
            w.write_batch(batch)
        failpoint("manifest.before_rename")
    return manifest_from_table(table, EnvSpec.from_json(snapshot.spec))


def delete_manifests(folder: Path, keep: Sequence[str]) -> int:
    """Delete the kept manifests except those of the snapshots `keep` and what these build on.

    Returns the number of files deleted. No checkpoint may name the others any more.
    """
    needed = set()
    for snapshot_id in keep:
        path = _kept(folder, snapshot_id)
        while path.exists() and path not in needed:
            needed.add(path)
            if before := _since(path):
                path = _kept(folder, before)
    count = 0
    for path in set(folder.glob("*.arrow")) - needed:
        path.unlink(missing_ok=True)
        count += 1
    return count


def _fetch(client: Client, snapshot_id: str, folder: Path, since: str) -> tuple[pa.Table, pa.Table]:
    """The part of a manifest to store, and the complete manifest."""
    before = _read(folder, since) if since and _kept(folder, since).exists() else None
    if before is not None and before.schema.equals(manifest.SCHEMA):  # else: an older version
        try:
            changes = client.manifest(snapshot_id, since=since)
            table = manifest.apply(before, changes)
            # A chain of changes is read from its beginning, so its length and size are limited.
            if _depth(folder, since) < LONGEST_CHAIN and 2 * changes.num_rows <= table.num_rows:
                return changes, table
            return table, table
        except NotFound as error:
            log.info("the service has forgotten snapshot %s: %s", since, error.detail)
    table = client.manifest(snapshot_id)
    return table, table


def _read(folder: Path, snapshot_id: str) -> pa.Table:
    """A stored manifest, memory-mapped from its files."""
    path = _kept(folder, snapshot_id)
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        table = reader.read_all()
    if manifest.is_changes(table):
        table = manifest.apply(_read(folder, _since(path)), table)
    return table


def _since(path: Path) -> str:
    """The snapshot that a stored file's changes refer to; "" for a complete manifest."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        metadata = reader.schema.metadata or {}
    return str(metadata.get(manifest.SINCE_KEY, b"").decode())


def _depth(folder: Path, snapshot_id: str) -> int:
    depth = 0
    while snapshot_id := _since(_kept(folder, snapshot_id)):
        depth += 1
    return depth


def _kept(folder: Path, snapshot_id: str) -> Path:
    return folder / f"{hashlib.sha256(snapshot_id.encode()).hexdigest()[:16]}.arrow"


def _encoded(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Encode names as one dictionary with indices."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    array = column.unify_dictionaries().combine_chunks()
    return array.chunk(0) if isinstance(array, pa.ChunkedArray) else array


class LeaseKeeper:
    """Renews the leases of the snapshots in use from a thread, also after outages of the service.

    Training continues if a lease is lost: columns in the cache stay readable.
    """

    def __init__(self, client: Client, holder: str, ttl: float = LEASE_SECONDS):
        self._client, self._holder, self._ttl = client, holder, ttl
        self._held: set[str] = set()
        self._dropped: list[str] = []
        self._lock = threading.Lock()
        self._loop = BackgroundLoop(
            "leases", self._renew_all, every=ttl / 4, at_once=False, longest_wait=ttl / 4
        ).start()

    @property
    def trouble(self) -> str:
        """Why leases are not renewed; empty if they are, or if the service is unreachable."""
        return self._loop.trouble

    def hold(self, snapshot_id: str) -> None:
        with self._lock:
            self._held.add(snapshot_id)
        self._renew(snapshot_id)

    def drop(self, snapshot_id: str) -> None:
        """Release a lease in the background."""
        with self._lock:
            self._held.discard(snapshot_id)
            self._dropped.append(snapshot_id)
        self._loop.wake()

    def close(self) -> None:
        """Release all leases and stop the thread."""
        self._loop.stop(5.0)
        self._dropped += sorted(self._held)
        self._give_back()

    def _give_back(self) -> None:
        while self._dropped:
            snapshot_id = self._dropped.pop()
            try:
                self._client.release(snapshot_id, self._holder)
            except StepwellError as error:  # the lease expires without a release
                log.debug("lease of %s not given back: %s", snapshot_id, error)

    def _renew_all(self) -> None:
        self._give_back()
        with self._lock:
            held = sorted(self._held)
        for snapshot_id in held:
            if self._loop.stopping:
                return
            self._renew(snapshot_id)

    def _renew(self, snapshot_id: str) -> None:
        try:
            self._client.lease(snapshot_id, self._holder, self._ttl)
        except Gone:
            log.warning("snapshot %s has expired; training continues from the cache", snapshot_id)
            with self._lock:
                self._held.discard(snapshot_id)
        except (ServiceError, StepwellError) as error:
            log.warning("lease of %s not renewed, will try again: %s", snapshot_id, error)
