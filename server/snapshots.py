"""Snapshots: a frozen selection of trajectories. The same id means the same trajectories, for ever.

    SQL → rows of the mirror → blocks (selection.py), ordered by (component, dataset, seq)
      → DIR/snapshots/<file>.arrow (put once) → one transaction: snapshot, its shards, first lease

A refresh (`since`) asks the SQL of what changed since then, and writes the blocks that differ; one
that finds the same selection again gives back the earlier snapshot itself.

Where a trajectory lies may change (compaction); what it is may not. The file keeps both; when one
of its shards is gone and its trajectories live on elsewhere, the places are looked up anew. A lease
is a promise not to delete the shards that the file names; it counts uptime (index/db.py).
"""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server import manifest_files
from server.checksums import Corrupt, Source
from server.failpoints import failpoint
from server.index.db import Database
from server.index.mirror import Mirror
from server.index.tables import datasets, leases, shards, snapshot_shards, snapshots
from server.ingest.damage import Inspector
from server.ingest.validate import difference as layouts_differ
from server.problems import ProblemError, not_found
from server.selection import (
    Blocks,
    Component,
    Damaged,
    Difference,
    Rules,
    all_of,
    difference,
    digest_of,
    select_all,
    select_changed,
    sources_of,
)
from server.sql.pool import Selected
from server.storage.store import Store, new_name
from stepwell.manifest import DIGEST_KEY, ID_KEY, SHARES_KEY
from stepwell.messages import CreateSnapshot, Excluded, Lease, PutLease, Snapshot, SnapshotPage
from stepwell.spaces import EnvSpec

log = structlog.get_logger("stepwell.snapshots")
FIRST_TTL = 120.0
"""Seconds of the lease that comes with a new snapshot."""
MAX_TRAJECTORIES = 20_000_000
MANY_CHANGES = 0.25
"""When a larger part of the trajectories has changed, all are asked again."""
MOST_CHANGES = 200_000
"""And when so many have: they are taken into memory at once."""
RECENT, RECENT_ROWS = 16, 4_000_000
"""Snapshots whose blocks are kept at hand, for their refresh; and their rows, of some 80 bytes."""


class Selector(Protocol):
    """What snapshots need of the SQL service."""

    def select_rows(self, select: str, dataset: str | None = None) -> Selected: ...

    def select_among(self, select: str, rows: pa.Table, dataset: str | None = None) -> Selected: ...


@dataclass(frozen=True, slots=True)
class _Found:
    """A selection as it was found at one moment of the index."""

    blocks: Blocks
    mark: int
    epoch: int
    reads: tuple[frozenset[str] | None, ...]
    """Per component: the columns it reads, where it looks at one row at a time."""
    damaged: Damaged
    """Rows that were left out because their shards are damaged."""


@dataclass(frozen=True, slots=True)
class _Recent:
    """A snapshot at hand."""

    pk: int
    blocks: Blocks
    """What its file says."""
    sources: tuple[Component, ...]
    rules: Rules | None = None
    found: _Found | None = None
    """What its selection was when it was last asked: later than the file, or unknown."""


class _Moved(Exception):
    """What was selected was moved or deleted while the snapshot was made."""


class Snapshots:
    """Creating, describing, leasing. `flush` seals what was acknowledged."""

    def __init__(
        self,
        db: Database,
        store: Store,
        flush: Callable[[], object],
        selector: Callable[[], Selector],
        mirror: Callable[[], Mirror],
        inspector: Inspector,
    ):
        self._db, self._store, self._inspector = db, store, inspector
        self._flush, self._selector, self._mirror = flush, selector, mirror
        self._moving = threading.Lock()
        self._recent: OrderedDict[str, _Recent] = OrderedDict()
        self._recent_lock = threading.Lock()

    # --- create, in the order it happens --------------------------------------------------------

    def create(self, body: CreateSnapshot) -> Snapshot:
        """Freeze a selection. Raises 404, 422 (SQL, nothing selected, layouts that differ).

        With `since`, and nothing else selected than there: that snapshot.
        """
        sources = tuple(sources_of(body))
        earlier = None if body.since is None else self._at_hand(body.since)
        self._flush()
        for attempt in range(3):
            try:
                return self._create(body, sources, earlier)
            except _Moved:
                log.info("the selection moved while it was frozen", attempt=attempt)
        raise ProblemError(
            503,
            "selection_moved",
            "what was selected was evicted or moved while the snapshot was made; ask again",
            headers={"Retry-After": "1"},
        )

    def _create(
        self, body: CreateSnapshot, sources: tuple[Component, ...], earlier: _Recent | None
    ) -> Snapshot:
        rules = Rules(body.include_eval, self._quarantined())
        found = self._changed(sources, rules, earlier) or self._all(sources, rules)
        _check_size(found)
        spec = self._common_spec({dataset for _, dataset, _ in found.blocks})
        shares = [source.share for source in sources]
        digest = digest_of(found.blocks, shares)
        if earlier is not None and body.since is not None:
            before = self._described(body.since)
            if before.digest == digest:
                self._remember(
                    body.since, replace(earlier, sources=sources, rules=rules, found=found)
                )
                self._hold_at_least(body.since, body.holder)
                return before.model_copy(update={"added": 0, "removed": 0})
        change = None if earlier is None else difference(earlier.blocks, found.blocks)
        snapshot_id, name = new_name("sn"), new_name("snap", ".arrow")
        table = manifest_files.whole(found.blocks, _metadata(snapshot_id, digest, shares))
        chain = self._write(name, table, body.since, earlier, change)
        failpoint("snapshot.after_rename")
        with self._db.write() as connection:
            if "base_pk" in chain and not _exists(connection, chain["base_pk"]):
                raise _Moved
            pk = self._insert(
                connection,
                found.blocks,
                id=snapshot_id,
                digest=digest,
                selection=json.dumps(
                    body.model_dump(mode="json", by_alias=True, exclude_none=True)
                ),
                spec=json.dumps(spec.to_json()),
                datasets=json.dumps(sorted({dataset for _, dataset, _ in found.blocks})),
                file=name,
                added=None if change is None else change.added,
                removed=None if change is None else change.removed,
                excluded=json.dumps(_excluded(found.damaged)),
                **chain,
            )
            expires = self._db.uptime() + FIRST_TTL
            connection.execute(
                sa.insert(leases).values(snapshot_pk=pk, holder=body.holder, expires_uptime=expires)
            )
            failpoint("snapshot.before_commit")
        failpoint("snapshot.after_commit")
        if "base_pk" not in chain:
            # As the file has it, it takes the least memory.
            path = self._store.path("snapshots", name)
            written = manifest_files.read(Source(path, checksums=chain["checksums"]))
            found = replace(found, blocks=_remapped(found.blocks, written))
        self._remember(snapshot_id, _Recent(pk, found.blocks, sources, rules, found))
        return self.get(snapshot_id)

    def _all(self, sources: Sequence[Component], rules: Rules) -> _Found:
        """Ask for everything that is selected."""
        blocks: Blocks = {}
        reads: list[frozenset[str] | None] = []
        marks, epochs, damaged = [], set(), Counter[tuple[str, str]]()
        for component, source in enumerate(sources):
            selected = self._selector().select_rows(source.select, source.dataset)
            assert selected.state is not None
            try:
                some, spoiled = select_all(self._mirror(), component, selected, rules)
            except FileNotFoundError as error:  # the answer took longer than the mirror keeps files
                raise _Moved from error
            except Corrupt as error:
                log.error("a file of the mirror is damaged and made anew", error=str(error))
                self._mirror().discard([f"mirror/{Path(error.path).name}"])
                raise _Moved from error
            blocks |= some
            damaged += spoiled
            reads.append(None if selected.reads is None else frozenset(selected.reads))
            marks.append(selected.state.mark)
            epochs.add(selected.state.epoch)
        if len(epochs) > 1:
            raise _Moved
        return _Found(blocks, min(marks), epochs.pop(), tuple(reads), damaged)

    def _changed(
        self, sources: tuple[Component, ...], rules: Rules, earlier: _Recent | None
    ) -> _Found | None:
        """The same, of what changed since `earlier` alone; None where that does not do."""
        if earlier is None or earlier.found is None or not earlier.blocks:
            return None
        last = earlier.found
        if earlier.sources != sources or earlier.rules != rules:
            return None
        reads = frozenset({"dataset"}).union(*(names or () for names in last.reads))
        if None in last.reads:
            return None
        count = self._mirror().count_changes(last.mark, last.epoch)
        total = sum(map(len, last.blocks.values()))
        if count is None or count > min(MOST_CHANGES, max(1000, MANY_CHANGES * total)):
            return None
        changes = self._mirror().changes(last.mark, last.epoch, sorted(reads))
        if changes is None:
            return None

        def among(component: int) -> Selected:
            source = sources[component]
            if source.all:
                return all_of(source.dataset, changes.places)
            return self._selector().select_among(source.select, changes.columns, source.dataset)

        try:
            blocks = select_changed(last.blocks, changes, len(sources), among, rules)
        except ProblemError as error:
            log.info("changes could not be asked alone", error=error.detail[:200])
            return None
        return replace(last, blocks=blocks, mark=changes.mark)

    def _quarantined(self) -> frozenset[str]:
        with self._db.read() as connection:
            found = sa.select(shards.c.id).where(shards.c.state == "quarantined")
            return frozenset(connection.execute(found).scalars())

    def _common_spec(self, names: set[str]) -> EnvSpec:
        d = datasets.c
        with self._db.read() as connection:
            found = connection.execute(
                sa.select(d.name, d.spec, d.spec_digest).where(d.name.in_(names)).order_by(d.pk)
            ).all()
        if not found:
            raise _Moved
        first = found[0]
        spec = EnvSpec.from_json(json.loads(first.spec))
        for other in found[1:]:
            if other.spec_digest != first.spec_digest:
                theirs = EnvSpec.from_json(json.loads(other.spec))
                where, expected, got = layouts_differ(spec, theirs)
                raise ProblemError(
                    422,
                    "schema_mismatch",
                    f"a snapshot has one layout, but datasets {first.name!r} and {other.name!r}"
                    f" differ in {where}",
                    expected={first.name: expected},
                    got={other.name: got},
                )
        return spec

    def _write(
        self,
        name: str,
        table: pa.Table,
        since: str | None,
        earlier: _Recent | None,
        change: Difference | None,
    ) -> dict[str, Any]:
        """Put the manifest, or only what changed; the columns that say which."""
        if earlier is not None and since is not None and change is not None:
            with self._db.read() as connection:
                before = _row(connection, since)
            depth = before["depth"] + 1
            rows = before["delta_rows"] + sum(map(len, change.changed.values()))
            if depth < manifest_files.LONGEST_CHAIN and 2 * rows <= table.num_rows:
                metadata = dict(table.schema.metadata)
                changes = manifest_files.changed(change.changed, change.gone, since, metadata)
                stored = manifest_files.write(self._store, name, changes)
                chain = {"base_pk": earlier.pk, "depth": depth, "delta_rows": rows}
                return {**chain, "checksums": stored.checksums}
        return {"checksums": manifest_files.write(self._store, name, table).checksums}

    def _insert(self, connection: Connection, blocks: Blocks, **values: Any) -> int:
        """The row of a snapshot, and what it needs. Raises `_Moved` when some of that is gone."""
        names = frozenset[str]().union(*(block.shards for block in blocks.values()))
        count, size = _existing(connection, names)
        if count != len(names):
            raise _Moved
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

    # --- at hand --------------------------------------------------------------------------------

    def _at_hand(self, snapshot_id: str) -> _Recent:
        with self._recent_lock:
            if (recent := self._recent.get(snapshot_id)) is not None:
                self._recent.move_to_end(snapshot_id)
        with self._db.read() as connection:
            row = _row(connection, snapshot_id)
            if recent is not None:
                return recent
            blocks = self._load(connection, row)
        return self._remember(snapshot_id, _Recent(row["pk"], blocks, ()))

    def _load(self, connection: Connection, row: Any) -> Blocks:
        """What the files of a snapshot hold. Raises 410 `damaged`."""
        try:
            return manifest_files.load(self._store, connection, row)
        except Corrupt as error:
            raise self._inspector.refuse(f"snapshots/{Path(error.path).name}") from None

    def _remember(self, snapshot_id: str, recent: _Recent) -> _Recent:
        with self._recent_lock:
            self._recent[snapshot_id] = recent
            self._recent.move_to_end(snapshot_id)
            while len(self._recent) > 1 and (
                len(self._recent) > RECENT or _rows_at_hand(self._recent.values()) > RECENT_ROWS
            ):
                self._recent.popitem(last=False)
        return recent

    def _forget(self, snapshot_id: str) -> None:
        with self._recent_lock:
            self._recent.pop(snapshot_id, None)

    # --- look -----------------------------------------------------------------------------------

    def get(self, snapshot_id: str) -> Snapshot:
        return self._described(snapshot_id)

    def _described(self, snapshot_id: str) -> Snapshot:
        with self._db.read() as connection:
            return self._message(connection, _row(connection, snapshot_id))

    def page(self, *, limit: int, cursor: str | None) -> SnapshotPage:
        """Newest first, in the order in which they were made, whatever the clock said."""
        n = snapshots.c
        statement = sa.select(snapshots).order_by(n.pk.desc()).limit(limit + 1)
        if cursor is not None:
            before = sa.select(n.pk).where(n.id == cursor).scalar_subquery()
            statement = statement.where(n.pk < before)
        with self._db.read() as connection:
            rows = connection.execute(statement).mappings().all()
            items = [self._message(connection, row) for row in rows[:limit]]
        return SnapshotPage(items=items, next=items[-1].id if len(rows) > limit else None)

    def manifest(self, snapshot_id: str, since: str | None = None) -> pa.Table:
        """A row per trajectory, pointing at shards that exist; a chunk per block. Raises 404, 410.

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
        blocks = self._at_hand(snapshot_id).blocks
        if since is None:
            return manifest_files.whole(blocks, metadata)
        change = difference(self._at_hand(since).blocks, blocks)
        return manifest_files.changed(change.changed, change.gone, since, metadata)

    def _message(self, connection: Connection, row: Any) -> Snapshot:
        longest = connection.execute(
            sa.select(sa.func.max(leases.c.expires_uptime)).where(leases.c.snapshot_pk == row["pk"])
        ).scalar()
        values = dict(row)
        for name in ("selection", "spec", "datasets", "excluded"):
            values[name] = json.loads(values[name])
        if longest is not None and (left := longest - self._db.uptime()) > 0:
            values["leased_until"] = self._db.clock.wall() + left
        return Snapshot.model_validate(values)

    # --- leases ---------------------------------------------------------------------------------

    def lease(self, snapshot_id: str, body: PutLease) -> Lease:
        """Hold, or go on holding, what the snapshot needs. Raises 410 when it is gone already."""
        with self._moving, self._db.write() as connection:
            row = _row(connection, snapshot_id)
            if _gone(connection, row["pk"]):
                self._relocate(connection, row["pk"], snapshot_id)
            _put_lease(connection, row["pk"], body.holder, self._db.uptime() + body.ttl)
        return Lease(
            snapshot=snapshot_id,
            holder=body.holder,
            ttl=body.ttl,
            expires_at=self._db.clock.wall() + body.ttl,
        )

    def _hold_at_least(self, snapshot_id: str, holder: str) -> None:
        """The lease that comes with a new snapshot, for one that was there already."""
        with self._db.read() as connection:
            held = connection.execute(
                sa.select(leases.c.expires_uptime)
                .join(snapshots, snapshots.c.pk == leases.c.snapshot_pk)
                .where(snapshots.c.id == snapshot_id, leases.c.holder == holder)
            ).scalar()
        if held is None or held < self._db.uptime() + FIRST_TTL:
            self.lease(snapshot_id, PutLease(holder=holder, ttl=FIRST_TTL))

    def release(self, snapshot_id: str, holder: str) -> None:
        with self._db.write() as connection:
            row = _row(connection, snapshot_id)
            connection.execute(
                sa.delete(leases).where(
                    leases.c.snapshot_pk == row["pk"], leases.c.holder == holder
                )
            )

    def _relocate(self, connection: Connection, pk: int, snapshot_id: str) -> None:
        """Find the places of a snapshot's trajectories anew, and write its manifest anew."""
        if not _gone(connection, pk):
            return
        row = _row(connection, snapshot_id)
        blocks = self._load(connection, row)
        total = sum(map(len, blocks.values()))
        moved, missing = manifest_files.relocated(connection, blocks)
        if missing:
            raise ProblemError(
                410,
                "snapshot_expired",
                f"snapshot {snapshot_id} was not leased, and {missing} of its trajectories"
                " were evicted and deleted meanwhile; make a new snapshot",
                expected="an unexpired lease",
                got=f"{missing} of {total} trajectories gone",
            )
        fresh = new_name("snap", ".arrow")
        shares = [source.share for source in sources_of(_request(row))]
        table = manifest_files.whole(moved, _metadata(snapshot_id, row["digest"], shares))
        stored = manifest_files.write(self._store, fresh, table)
        names = frozenset[str]().union(*(block.shards for block in moved.values()))
        count, size = _existing(connection, names)
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
        self._forget(snapshot_id)


def _remapped(blocks: Blocks, table: pa.Table) -> Blocks:
    """The same blocks, whose batches lie in a file: with what was computed of them."""
    made: Blocks = {}
    for (key, block), batch in zip(blocks.items(), table.to_batches(), strict=True):
        made[key] = block.at(batch)
    return made


def _rows_at_hand(recent: Iterable[_Recent]) -> int:
    """Blocks that several snapshots share count once."""
    found = {id(block): len(block) for one in recent for block in one.blocks.values()}
    return sum(found.values())


def _excluded(damaged: Damaged) -> list[dict[str, Any]]:
    return [
        Excluded(dataset=dataset, file=shard, trajectories=count).model_dump()
        for (dataset, shard), count in sorted(damaged.items())
    ]


def _check_size(found: _Found) -> None:
    if not found.blocks and found.damaged:
        raise ProblemError(
            410, "damaged", "everything selected lies in damaged shards; see: stepwell fsck"
        )
    if found.damaged:
        # One bad file must not stop all training: it is named in the answer, /readyz and fsck.
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
    """What the snapshot was made from."""
    return CreateSnapshot.model_validate(json.loads(row["selection"]))


def _existing(connection: Connection, names: frozenset[str]) -> tuple[int, int]:
    """How many of the shards have their files, and how many bytes these are."""
    total = sa.func.coalesce(sa.func.sum(shards.c.bytes), 0)
    row = connection.execute(
        sa.select(sa.func.count(), total).where(manifest_files.existing(names))
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
            sa.select(sa.literal(pk), shards.c.pk).where(manifest_files.existing(names)),
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
