"""Snapshots: a frozen selection of trajectories. The same id means the same trajectories, for ever.

    SQL → ids → rows of the index, ordered by (component, dataset, seq)
      → DIR/snapshots/<file>.arrow (put once) → one transaction: snapshot, its shards, first lease

Where a trajectory lies may change (compaction); what it is may not. The file keeps both; when one
of its shards is gone and its trajectories live on elsewhere, the places are looked up anew. A lease
is a promise not to delete the shards that the file names.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import pyarrow as pa
import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server.failpoints import failpoint
from server.index.db import Database
from server.index.tables import (
    datasets,
    leases,
    shards,
    snapshot_shards,
    snapshots,
)
from server.ingest.rows import chunks
from server.ingest.validate import difference
from server.problems import ProblemError, not_found
from server.selection import digest_of, read_table, rows_of, sources_of, table_of
from server.storage.store import Store, new_name
from stepwell.messages import CreateSnapshot, Lease, PutLease, Snapshot, SnapshotPage
from stepwell.spaces import EnvSpec

log = structlog.get_logger("stepwell.snapshots")
FIRST_TTL = 120.0
"""Seconds of the lease that comes with a new snapshot."""
MAX_TRAJECTORIES = 20_000_000
ID_KEY, DIGEST_KEY, SHARES_KEY = b"snapshot", b"digest", b"shares"
_PLACE = ("shard", "traj_idx", "row_start")


class Selector(Protocol):
    """What snapshots need of the SQL service."""

    def select_ids(
        self, select: str, dataset: str | None = None
    ) -> list[tuple[str, float | None]]: ...


class Snapshots:
    """Creating, describing, leasing. `flush` seals what was acknowledged."""

    def __init__(
        self,
        db: Database,
        store: Store,
        flush: Callable[[], object],
        selector: Callable[[], Selector],
    ):
        self._db, self._store = db, store
        self._flush, self._selector = flush, selector
        self._moving = threading.Lock()

    # --- create, in the order it happens --------------------------------------------------------

    def create(self, body: CreateSnapshot) -> Snapshot:
        """Freeze a selection. Raises 404, 422 (SQL, nothing selected, layouts that differ)."""
        sources = sources_of(body)
        before = None if body.since is None else self._ids_of(body.since)
        self._flush()
        chosen = [
            self._selector().select_ids(select, dataset) for select, dataset, _share in sources
        ]
        selected, spec = self._resolve(chosen, include_eval=body.include_eval)
        shares = [share for _, _, share in sources]
        table = table_of(selected)
        digest = digest_of(selected, shares)
        snapshot_id = new_name("sn")
        table = table.replace_schema_metadata(
            {
                ID_KEY: snapshot_id.encode(),
                DIGEST_KEY: digest.encode(),
                SHARES_KEY: json.dumps(shares).encode(),
            }
        )
        added = removed = None
        if before is not None:
            now_in = {row["id"] for row in selected}
            added, removed = len(now_in - before), len(before - now_in)
        name = new_name("snap", ".arrow")
        self._put(name, table)
        failpoint("snapshot.after_rename")
        with self._db.write() as connection:
            files = _live(connection, {row["shard"] for row in selected})
            if len(files) != len({row["shard"] for row in selected}):
                raise _moved()
            pk = connection.execute(
                sa.insert(snapshots)
                .values(
                    id=snapshot_id,
                    digest=digest,
                    selection=json.dumps(
                        body.model_dump(mode="json", by_alias=True, exclude_none=True)
                    ),
                    spec=json.dumps(spec.to_json()),
                    datasets=json.dumps(sorted({row["dataset"] for row in selected})),
                    file=name,
                    trajectories=len(selected),
                    steps=sum(row["length"] for row in selected),
                    shards=len(files),
                    bytes=sum(size for _, size in files.values()),
                    added=added,
                    removed=removed,
                    created_at=time.time(),
                )
                .returning(snapshots.c.pk)
            ).scalar_one()
            _hold(connection, pk, [key for key, _ in files.values()])
            connection.execute(
                sa.insert(leases).values(
                    snapshot_pk=pk, holder=body.holder, expires_at=time.time() + FIRST_TTL
                )
            )
            failpoint("snapshot.before_commit")
        failpoint("snapshot.after_commit")
        return self.get(snapshot_id)

    def _resolve(
        self, chosen: list[list[tuple[str, float | None]]], *, include_eval: bool
    ) -> tuple[list[dict[str, Any]], EnvSpec]:
        """Rows of the index for the chosen ids, ordered; all sealed, all of one layout."""
        for attempt in range(3):
            selected: list[dict[str, Any]] = []
            spooled = False
            with self._db.read() as connection:
                for component, ids in enumerate(chosen):
                    rows = rows_of(connection, [i for i, _ in ids])
                    weights = dict(ids)
                    for row in rows:
                        spooled |= row["state"] == "spooled"
                        if row["purpose"] == "eval" and not include_eval:
                            continue
                        weight = weights[row["id"]]
                        row["component"] = component
                        row["weight"] = 1.0 if weight is None else float(weight)
                        selected.append(row)
            # Something may have arrived between the flush and the query: seal that too.
            if not spooled or attempt == 2:
                break
            self._flush()
        sealed = [row for row in selected if row["state"] == "sealed"]
        selected = [row for row in sealed if row["shard_state"] != "quarantined"]
        if len(selected) < len(sealed):
            # One bad file must not stop all training: it is named in the log, /readyz and fsck.
            log.warning("damaged shards are left out", trajectories=len(sealed) - len(selected))
        if sealed and not selected:
            raise ProblemError(
                410, "damaged", "everything selected lies in damaged shards; see: stepwell fsck"
            )
        if not selected:
            raise ProblemError(
                422,
                "empty_selection",
                "the query selects no trajectory to train on (those of purpose 'eval' are left out"
                " unless include_eval is set)",
                expected="at least one trajectory",
                got=f"{sum(map(len, chosen))} ids",
            )
        if len(selected) > MAX_TRAJECTORIES:
            raise ProblemError(
                422,
                "selection_too_large",
                "select less, or make several snapshots",
                expected=f"at most {MAX_TRAJECTORIES} trajectories",
                got=len(selected),
            )
        selected.sort(key=lambda row: (row["component"], row["dataset"], row["seq"]))
        return selected, self._common_spec({row["dataset"] for row in selected})

    def _common_spec(self, names: set[str]) -> EnvSpec:
        d = datasets.c
        with self._db.read() as connection:
            found = connection.execute(
                sa.select(d.name, d.spec, d.spec_digest)
                .where(d.name.in_(names))
                .order_by(d.created_at, d.pk)
            ).all()
        if not found:
            raise _moved()
        first = found[0]
        spec = EnvSpec.from_json(json.loads(first.spec))
        for other in found[1:]:
            if other.spec_digest != first.spec_digest:
                where, expected, got = difference(spec, EnvSpec.from_json(json.loads(other.spec)))
                raise ProblemError(
                    422,
                    "schema_mismatch",
                    f"a snapshot has one layout, but datasets {first.name!r} and {other.name!r}"
                    f" differ in {where}",
                    expected={first.name: expected},
                    got={other.name: got},
                )
        return spec

    def _put(self, name: str, table: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        self._store.put("snapshots", name, memoryview(sink.getvalue()))

    # --- look -----------------------------------------------------------------------------------

    def get(self, snapshot_id: str) -> Snapshot:
        with self._db.read() as connection:
            return _message(connection, _row(connection, snapshot_id))

    def page(self, *, limit: int, cursor: str | None) -> SnapshotPage:
        """Newest first."""
        statement = sa.select(snapshots).order_by(snapshots.c.id.desc()).limit(limit + 1)
        if cursor is not None:
            statement = statement.where(snapshots.c.id < cursor)
        with self._db.read() as connection:
            rows = connection.execute(statement).mappings().all()
            items = [_message(connection, row) for row in rows[:limit]]
        return SnapshotPage(items=items, next=items[-1].id if len(rows) > limit else None)

    def manifest(self, snapshot_id: str) -> pa.Table:
        """A row of `COLUMNS` per trajectory, pointing at shards that exist. Raises 404, 410."""
        with self._db.read() as connection:
            row = dict(_row(connection, snapshot_id))
            gone = _gone(connection, row["pk"])
        if gone:
            with self._moving, self._db.write() as connection:
                row["file"] = self._relocate(connection, row["pk"], snapshot_id)
        return read_table(self._store.path("snapshots", row["file"]))

    def _ids_of(self, snapshot_id: str) -> set[str]:
        with self._db.read() as connection:
            row = _row(connection, snapshot_id)
            path = self._store.path("snapshots", row["file"])
        return set(read_table(path).column("id").to_pylist())

    # --- leases ---------------------------------------------------------------------------------

    def lease(self, snapshot_id: str, body: PutLease) -> Lease:
        """Hold, or go on holding, what the snapshot needs. Raises 410 when it is gone already."""
        expires = time.time() + body.ttl
        with self._moving, self._db.write() as connection:
            row = _row(connection, snapshot_id)
            if _gone(connection, row["pk"]):
                self._relocate(connection, row["pk"], snapshot_id)
            connection.execute(
                sa.delete(leases).where(
                    leases.c.snapshot_pk == row["pk"], leases.c.holder == body.holder
                )
            )
            connection.execute(
                sa.insert(leases).values(
                    snapshot_pk=row["pk"], holder=body.holder, expires_at=expires
                )
            )
        return Lease(snapshot=snapshot_id, holder=body.holder, expires_at=expires)

    def release(self, snapshot_id: str, holder: str) -> None:
        with self._db.write() as connection:
            row = _row(connection, snapshot_id)
            connection.execute(
                sa.delete(leases).where(
                    leases.c.snapshot_pk == row["pk"], leases.c.holder == holder
                )
            )

    def _relocate(self, connection: Connection, pk: int, snapshot_id: str) -> str:
        """Find the places of a snapshot's trajectories anew; returns the new file's name."""
        name = connection.execute(
            sa.select(snapshots.c.file).where(snapshots.c.pk == pk)
        ).scalar_one()
        if not _gone(connection, pk):
            return str(name)
        table = read_table(self._store.path("snapshots", name))
        wanted = table.column("shard").to_pylist()
        there = set(_live(connection, set(wanted)))
        lost = [
            i
            for i, shard in zip(table.column("id").to_pylist(), wanted, strict=True)
            if shard not in there
        ]
        places = {row["id"]: row for row in rows_of(connection, lost, evicted=True)}
        usable = set(_live(connection, {row["shard"] for row in places.values() if row["shard"]}))
        missing = [i for i in lost if i not in places or places[i]["shard"] not in usable]
        if missing:
            raise ProblemError(
                410,
                "snapshot_expired",
                f"snapshot {snapshot_id} was not leased, and {len(missing)} of its trajectories"
                " were evicted and deleted meanwhile; make a new snapshot",
                expected="an unexpired lease",
                got=f"{len(missing)} of {table.num_rows} trajectories gone",
            )
        columns = {field: table.column(field).to_pylist() for field in _PLACE}
        for i, identity in enumerate(table.column("id").to_pylist()):
            if (place := places.get(identity)) is not None:
                for field in _PLACE:
                    columns[field][i] = place[field]
        for field in _PLACE:
            index = table.schema.get_field_index(field)
            values = pa.array(columns[field], table.schema.field(index).type)
            table = table.set_column(index, table.schema.field(index), values)
        fresh = new_name("snap", ".arrow")
        self._put(fresh, table)
        files = _live(connection, set(columns["shard"]))
        connection.execute(sa.delete(snapshot_shards).where(snapshot_shards.c.snapshot_pk == pk))
        _hold(connection, pk, [key for key, _ in files.values()])
        connection.execute(
            sa.update(snapshots)
            .where(snapshots.c.pk == pk)
            .values(
                file=fresh,
                shards=len(files),
                bytes=sum(size for _, size in files.values()),
            )
        )
        return fresh


def _live(connection: Connection, ids: set[str]) -> dict[str, tuple[int, int]]:
    """Those of the shards whose files exist: id → (pk, bytes)."""
    s = shards.c
    found: dict[str, tuple[int, int]] = {}
    for some in chunks(sorted(ids)):
        rows = connection.execute(
            sa.select(s.id, s.pk, s.bytes).where(s.id.in_(some), s.state.in_(("live", "retired")))
        )
        found |= {row[0]: (row[1], row[2]) for row in rows}
    return found


def _gone(connection: Connection, pk: int) -> bool:
    """Whether a file of the snapshot was deleted."""
    s, held = shards.c, snapshot_shards.c
    return bool(
        connection.execute(
            sa.select(sa.func.count())
            .select_from(snapshot_shards.join(shards, s.pk == held.shard_pk))
            .where(held.snapshot_pk == pk, s.state.in_(("deleting", "deleted")))
        ).scalar_one()
    )


def _hold(connection: Connection, pk: int, shard_pks: list[int]) -> None:
    connection.execute(
        sa.insert(snapshot_shards), [{"snapshot_pk": pk, "shard_pk": key} for key in shard_pks]
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


def _message(connection: Connection, row: Any) -> Snapshot:
    leased = connection.execute(
        sa.select(sa.func.max(leases.c.expires_at)).where(leases.c.snapshot_pk == row["pk"])
    ).scalar()
    values = dict(row)
    for name in ("selection", "spec", "datasets"):
        values[name] = json.loads(values[name])
    if leased is not None and leased > time.time():
        values["leased_until"] = leased
    return Snapshot.model_validate(values)


def _moved() -> ProblemError:
    return ProblemError(
        503,
        "selection_moved",
        "what was selected was evicted or moved while the snapshot was made; ask again",
        headers={"Retry-After": "1"},
    )
