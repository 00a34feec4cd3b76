"""Snapshots: frozen selections of trajectories. An id always means the same trajectories.

    SQL → rows of the mirror → blocks (selection.py), ordered by (component, dataset, seq)
      → DIR/snapshots/<file>.arrow (immutable) → one transaction: snapshot, its shards, first lease

A repeated selection reads only what changed since, and only the blocks that differ are written
(snapshot_cache.py). A refresh (`since`) with the same result returns the earlier snapshot.

Compaction may change the location of a trajectory, never its content. The file stores both; if a
shard was deleted and its trajectories moved to others, the locations are looked up again. A lease
is a promise not to delete the shards that the file names; it counts uptime (index/db.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server.index.db import Database, count_audit, find_pk, first_rows, write_audit
from server.index.deleted_files import give_up_files
from server.index.lost_rows import as_documents
from server.index.mirror import Mirror
from server.index.tables import datasets, leases, shards, snapshot_shards, snapshots, versions
from server.ingest.validate import difference as layouts_differ
from server.integrity import IntegrityChecker
from server.problems import ProblemError, not_found
from server.snapshots import manifests
from server.snapshots.selection import (
    Blocks,
    Component,
    Damaged,
    SelectionRules,
    difference,
    digest_of,
    sources_of,
)
from server.snapshots.snapshot_cache import (
    CachedSnapshot,
    SelectionMoved,
    SelectionResult,
    SelectionRunner,
    SnapshotCache,
)
from server.sql.pool import SqlPool
from server.storage.checksums import Corrupt
from server.storage.store import Store, new_name
from stepwell.failpoints import failpoint
from stepwell.manifest import DIGEST_KEY, ID_KEY, SHARES_KEY
from stepwell.messages import (
    CreateSnapshot,
    Excluded,
    Lease,
    Page,
    PutLease,
    Snapshot,
    split_version,
)
from stepwell.spaces import EnvSpec

log = structlog.get_logger("stepwell.snapshots")
FIRST_TTL = 120.0
"""Seconds of the first lease of a new snapshot."""
MAX_TRAJECTORIES = 20_000_000


class Snapshots:
    """Creates, describes and leases snapshots. `flush` seals what was acknowledged."""

    def __init__(
        self,
        db: Database,
        store: Store,
        flush: Callable[[], object],
        sql: SqlPool,
        mirror: Mirror,
        integrity: IntegrityChecker,
    ):
        self._db, self._store, self._integrity = db, store, integrity
        self._flush = flush
        self._finder = SelectionRunner(sql, mirror)
        self.cache = SnapshotCache(self._finder, self._rules)
        self._moving = threading.Lock()

    # --- create, in order of execution ----------------------------------------------------------

    def create(self, body: CreateSnapshot, who: str = "local") -> Snapshot:
        """Freeze a selection. Raises 404, 422 (SQL error, empty selection, layouts that differ).

        With `since`, an unchanged selection returns that snapshot.
        """
        sources = tuple(sources_of(body))
        if body.dataset is not None:
            with self._db.read() as connection:
                _require_version(connection, *split_version(body.dataset))
        if body.since is not None:
            self._cached(body.since)
        self._flush()
        for attempt in range(3):
            try:
                return self._create(body, sources, who, again=attempt > 0)
            except SelectionMoved:
                log.info("selected data moved while it was frozen", attempt=attempt)
        raise ProblemError(
            503,
            "selection_moved",
            "selected data was evicted or moved while the snapshot was created; try again",
            headers={"Retry-After": "1"},
        )

    def _lost(self, sources: tuple[Component, ...]) -> list[dict[str, Any]]:
        """What the index has lost of the datasets that the sources read."""
        named = {source.dataset for source in sources}
        found = self._db.lost.excluded("trajectories") if self._db.lost else []
        return as_documents(one for one in found if None in named or one[0] in (*named, ""))

    def _create(
        self, body: CreateSnapshot, sources: tuple[Component, ...], who: str, *, again: bool
    ) -> Snapshot:
        rules = self._rules(body.include_eval)
        base = body.since
        if base is None and not again:
            base = self.cache.latest_like(sources, rules)
        earlier = None if base is None else self._cached(base)
        found = self._finder.changed(sources, rules, earlier) or self._finder.all(sources, rules)
        _check_size(found)
        spec = self._common_spec({dataset for _, dataset, _ in found.blocks})
        shares = [source.share for source in sources]
        digest = digest_of(found.blocks, shares)
        if earlier is not None and body.since is not None:
            before = self.get(body.since)
            if before.digest == digest:
                self.cache.put(body.since, replace(earlier, found=found))
                self._hold_at_least(body.since, body.holder, who)
                return before.model_copy(update={"added": 0, "removed": 0})
        snapshot_id, name = new_name("sn"), new_name("snap", ".arrow")
        metadata = _metadata(snapshot_id, digest, shares)
        counts, chain = self._write(name, found.blocks, metadata, base, earlier)
        failpoint("snapshot.after_rename")
        with self._db.write() as connection:
            if "base_pk" in chain and not _exists(connection, chain["base_pk"]):
                raise SelectionMoved
            pk = self._insert(
                connection,
                found.blocks,
                id=snapshot_id,
                digest=digest,
                selection=body.model_dump(mode="json", by_alias=True, exclude_none=True),
                spec=spec.to_json(),
                datasets=sorted({dataset for _, dataset, _ in found.blocks}),
                file=name,
                **(counts if body.since is not None else {}),
                excluded=_excluded(found.damaged) + self._lost(sources),
                **chain,
            )
            expires = self._db.uptime() + FIRST_TTL
            connection.execute(
                sa.insert(leases).values(snapshot_pk=pk, holder=body.holder, expires_uptime=expires)
            )
            write_audit(connection, who, "snapshot.create", snapshot_id, holder=body.holder)
            failpoint("snapshot.before_commit")
        failpoint("snapshot.after_commit")
        self.cache.put(snapshot_id, CachedSnapshot(pk, found.blocks, found))
        return self.get(snapshot_id)

    def _rules(self, include_eval: bool) -> SelectionRules:
        with self._db.read() as connection:
            found = sa.select(shards.c.id).where(shards.c.state == "quarantined")
            quarantined = frozenset(connection.execute(found).scalars())
        return SelectionRules(include_eval, quarantined)

    def _common_spec(self, names: set[str]) -> EnvSpec:
        d = datasets.c
        with self._db.read() as connection:
            found = connection.execute(
                sa.select(d.name, d.spec, d.spec_digest).where(d.name.in_(names)).order_by(d.pk)
            ).all()
        if not found:
            raise SelectionMoved
        first = found[0]
        spec = EnvSpec.from_json(first.spec)
        for other in found[1:]:
            if other.spec_digest != first.spec_digest:
                theirs = EnvSpec.from_json(other.spec)
                where, expected, got = layouts_differ(spec, theirs)
                raise ProblemError(
                    422,
                    "schema_mismatch",
                    f"a snapshot needs one layout, but datasets {first.name!r} and {other.name!r}"
                    f" differ in {where}",
                    expected={first.name: expected},
                    got={other.name: got},
                )
        return spec

    def _write(
        self,
        name: str,
        blocks: Blocks,
        metadata: Mapping[bytes, bytes],
        base: str | None,
        earlier: CachedSnapshot | None,
    ) -> tuple[dict[str, int], dict[str, Any]]:
        """Write the manifest, or only the changes since `base`.

        Returns the numbers of added and removed rows, and the columns that describe the file.
        """
        counts = {}
        if base is not None and earlier is not None:
            change = difference(earlier.blocks, blocks)
            counts = {"added": change.added, "removed": change.removed}
            with self._db.read() as connection:
                before = _row(connection, base)
            depth = before["depth"] + 1
            rows = before["delta_rows"] + sum(map(len, change.changed.values()))
            if depth < manifests.LONGEST_CHAIN and 2 * rows <= sum(map(len, blocks.values())):
                table = manifests.changed(change.changed, change.gone, base, metadata)
                stored = manifests.write(self._store, name, table)
                chain = {"base_pk": earlier.pk, "depth": depth, "delta_rows": rows}
                return counts, {**chain, "checksums": stored.checksums}
        stored = manifests.write(self._store, name, manifests.whole(blocks, metadata))
        return counts, {"checksums": stored.checksums}

    def _insert(self, connection: Connection, blocks: Blocks, **values: Any) -> int:
        """Insert a snapshot and the shards it needs; `SelectionMoved` if one was deleted."""
        names = frozenset[str]().union(*(block.shards for block in blocks.values()))
        count, size = _existing(connection, names)
        if count != len(names):
            raise SelectionMoved
        pk = connection.execute(
            sa.insert(snapshots)
            .values(
                trajectories=sum(map(len, blocks.values())),
                steps=sum(block.steps for block in blocks.values()),
                shards=count,
                bytes=size,
                created_at=self._db.clock.wall(),
                created_uptime=self._db.uptime(),
                **values,
            )
            .returning(snapshots.c.pk)
        ).scalar_one()
        _hold(connection, pk, names)
        return int(pk)

    def _cached(self, snapshot_id: str) -> CachedSnapshot:
        recent = self.cache.get(snapshot_id)
        with self._db.read() as connection:
            row = _row(connection, snapshot_id)
            if recent is not None:
                return recent
            blocks = self._load(connection, row)
        return self.cache.put(snapshot_id, CachedSnapshot(row["pk"], blocks))

    def _load(self, connection: Connection, row: Any) -> Blocks:
        """The blocks in the files of a snapshot. Raises 410 `damaged`."""
        try:
            return manifests.load(self._store, connection, row)
        except Corrupt as error:
            raise self._integrity.damaged_file(f"snapshots/{Path(error.path).name}") from None

    # --- read -----------------------------------------------------------------------------------

    def get(self, snapshot_id: str) -> Snapshot:
        with self._db.read() as connection:
            return self._message(connection, _row(connection, snapshot_id))

    def page(self, *, limit: int, cursor: str | None) -> Page[Snapshot]:
        """Sorted by creation, newest first, whatever the clock said."""
        n = snapshots.c
        statement = sa.select(snapshots).order_by(n.pk.desc())
        if cursor is not None:
            before = sa.select(n.pk).where(n.id == cursor).scalar_subquery()
            statement = statement.where(n.pk < before)
        with self._db.read() as connection:
            rows, last = first_rows(connection, statement, limit)
            items = [self._message(connection, row) for row in rows]
        return Page[Snapshot](items=items, next=None if last is None else last["id"])

    def manifest(self, snapshot_id: str, since: str | None = None) -> pa.Table:
        """One row per trajectory with an existing shard; a chunk per block. Raises 404, 410.

        With `since`, another snapshot's id: the blocks that differ (stepwell/manifest.py).
        """
        with self._db.read() as connection:
            row = dict(_row(connection, snapshot_id))
            gone = _gone(connection, row["pk"])
        if gone:
            with self._moving, self._db.write() as connection:
                self._relocate(connection, row["pk"], snapshot_id)
        shares = [source.share for source in sources_of(_request(row))]
        metadata = _metadata(snapshot_id, row["digest"], shares)
        blocks = self._cached(snapshot_id).blocks
        if since is None:
            return manifests.whole(blocks, metadata)
        change = difference(self._cached(since).blocks, blocks)
        return manifests.changed(change.changed, change.gone, since, metadata)

    def _message(self, connection: Connection, row: Any) -> Snapshot:
        longest = connection.execute(
            sa.select(sa.func.max(leases.c.expires_uptime)).where(leases.c.snapshot_pk == row["pk"])
        ).scalar()
        snapshot = Snapshot(**row)
        if longest is not None and (left := longest - self._db.uptime()) > 0:
            snapshot.leased_until = self._db.clock.wall() + left
        return snapshot

    # --- leases ---------------------------------------------------------------------------------

    def lease(self, snapshot_id: str, body: PutLease, who: str = "local") -> Lease:
        """Create or renew a lease on the snapshot's data. Raises 410 if the data was deleted."""
        with self._moving, self._db.write() as connection:
            row = _row(connection, snapshot_id)
            if _gone(connection, row["pk"]):
                self._relocate(connection, row["pk"], snapshot_id)
            _put_lease(connection, row["pk"], body.holder, self._db.uptime() + body.ttl)
            count_audit(connection, who, "lease.renew", snapshot_id)
        return Lease(
            snapshot=snapshot_id,
            holder=body.holder,
            ttl=body.ttl,
            expires_at=self._db.clock.wall() + body.ttl,
        )

    def _hold_at_least(self, snapshot_id: str, holder: str, who: str) -> None:
        """Give an existing snapshot at least the first lease of a new one."""
        with self._db.read() as connection:
            held = connection.execute(
                sa.select(leases.c.expires_uptime)
                .join(snapshots, snapshots.c.pk == leases.c.snapshot_pk)
                .where(snapshots.c.id == snapshot_id, leases.c.holder == holder)
            ).scalar()
        if held is None or held < self._db.uptime() + FIRST_TTL:
            self.lease(snapshot_id, PutLease(holder=holder, ttl=FIRST_TTL), who)

    def release(self, snapshot_id: str, holder: str, who: str = "local") -> None:
        with self._db.write() as connection:
            row = _row(connection, snapshot_id)
            connection.execute(
                sa.delete(leases).where(
                    leases.c.snapshot_pk == row["pk"], leases.c.holder == holder
                )
            )
            count_audit(connection, who, "lease.release", snapshot_id)

    def _relocate(self, connection: Connection, pk: int, snapshot_id: str) -> None:
        """Look up the locations of a snapshot's trajectories and rewrite its manifest."""
        if not _gone(connection, pk):
            return
        row = _row(connection, snapshot_id)
        blocks = self._load(connection, row)
        total = sum(map(len, blocks.values()))
        moved, missing = manifests.relocated(connection, blocks)
        if missing:
            raise ProblemError(
                410,
                "snapshot_expired",
                f"snapshot {snapshot_id} was not leased, and {missing} of its trajectories"
                " were evicted and deleted; make a new snapshot",
                expected="an unexpired lease",
                got=f"{missing} of {total} trajectories deleted",
            )
        fresh = new_name("snap", ".arrow")
        shares = [source.share for source in sources_of(_request(row))]
        table = manifests.whole(moved, _metadata(snapshot_id, row["digest"], shares))
        stored = manifests.write(self._store, fresh, table)
        names = frozenset[str]().union(*(block.shards for block in moved.values()))
        count, size = _existing(connection, names)
        give_up_files(connection, "snapshots", [row["file"]])
        connection.execute(sa.delete(snapshot_shards).where(snapshot_shards.c.snapshot_pk == pk))
        _hold(connection, pk, names)
        connection.execute(
            sa.update(snapshots)
            .where(snapshots.c.pk == pk)
            .values(
                file=fresh,
                checksums=stored.checksums,
                shards=count,
                bytes=size,
                base_pk=None,
                depth=0,
                delta_rows=0,
            )
        )
        self.cache.forget(snapshot_id)


def _require_version(connection: Connection, dataset: str, name: str) -> None:
    """Raise 404 if there is no such version, 410 if a part of it was lost. "": no version."""
    if not name:
        return
    n, pk = versions.c, find_pk(connection, datasets, dataset)
    missing = connection.scalar(sa.select(n.missing).where(n.dataset_pk == pk, n.name == name))
    if missing is None:
        known = connection.execute(sa.select(n.name).where(n.dataset_pk == pk)).scalars()
        raise not_found(f"version of {dataset}", name, known)
    if missing:
        raise ProblemError(
            410,
            "damaged",
            f"{dataset}@{name} has lost {missing} of its trajectories; train on another version,"
            " or on what is left of it, by SQL over version_trajectories",
            expected="a complete version",
            got=f"{missing} trajectories missing",
        )


def _excluded(damaged: Damaged) -> list[dict[str, Any]]:
    return [
        Excluded(dataset=dataset, file=shard, trajectories=count).model_dump()
        for (dataset, shard), count in sorted(damaged.items())
    ]


def _check_size(found: SelectionResult) -> None:
    if not found.blocks and found.damaged:
        raise ProblemError(
            410, "damaged", "all selected data is in damaged shards; see: stepwell fsck"
        )
    if found.damaged:
        # One damaged file must not stop training: the response, /readyz and fsck name it.
        log.warning("damaged shards are left out", trajectories=found.damaged.total())
    if not found.blocks:
        raise ProblemError(
            422,
            "empty_selection",
            "the query selects no trajectory to train on (those of purpose 'eval' are left out"
            " unless include_eval is set)",
            expected="at least one trajectory",
            got="none",
        )
    if (count := sum(map(len, found.blocks.values()))) > MAX_TRAJECTORIES:
        raise ProblemError(
            422,
            "selection_too_large",
            "select less, or make several snapshots",
            expected=f"at most {MAX_TRAJECTORIES} trajectories",
            got=count,
        )


def _metadata(snapshot_id: str, digest: str, shares: Sequence[float]) -> dict[bytes, bytes]:
    return {
        ID_KEY: snapshot_id.encode(),
        DIGEST_KEY: digest.encode(),
        SHARES_KEY: json.dumps(list(shares)).encode(),
    }


def _request(row: Mapping[str, Any]) -> CreateSnapshot:
    """The request that created the snapshot."""
    return CreateSnapshot.model_validate(row["selection"])


def _existing(connection: Connection, names: frozenset[str]) -> tuple[int, int]:
    """The number of shards with existing files, and the bytes of these files."""
    total = sa.func.coalesce(sa.func.sum(shards.c.bytes), 0)
    row = connection.execute(
        sa.select(sa.func.count(), total).where(manifests.existing(names))
    ).one()
    return int(row[0]), int(row[1])


def _gone(connection: Connection, pk: int) -> bool:
    """Whether a file of the snapshot was deleted."""
    s, held = shards.c, snapshot_shards.c
    gone = (
        sa.select(held.shard_pk)
        .join(shards, s.pk == held.shard_pk)
        .where(held.snapshot_pk == pk, s.state.in_(("deleting", "deleted")))
    )
    return connection.execute(gone.limit(1)).first() is not None


def _hold(connection: Connection, pk: int, names: frozenset[str]) -> None:
    connection.execute(
        sa.insert(snapshot_shards).from_select(
            ["snapshot_pk", "shard_pk"],
            sa.select(sa.literal(pk), shards.c.pk).where(manifests.existing(names)),
        )
    )


def _exists(connection: Connection, pk: int) -> bool:
    return (
        connection.execute(sa.select(snapshots.c.pk).where(snapshots.c.pk == pk)).first()
        is not None
    )


def _put_lease(connection: Connection, pk: int, holder: str, expires: float) -> None:
    connection.execute(
        sa.delete(leases).where(leases.c.snapshot_pk == pk, leases.c.holder == holder)
    )
    connection.execute(
        sa.insert(leases).values(snapshot_pk=pk, holder=holder, expires_uptime=expires)
    )


def _row(connection: Connection, snapshot_id: str) -> Any:
    row = (
        connection.execute(sa.select(snapshots).where(snapshots.c.id == snapshot_id))
        .mappings()
        .one_or_none()
    )
    if row is None:
        raise not_found("snapshot", snapshot_id[:64])
    return row
