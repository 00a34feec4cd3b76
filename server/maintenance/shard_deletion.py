"""Physical deletion, after logical eviction: deletes only shards that no reader can need any more.

live ── nothing alive in it ──▶ retired ── no unexpired lease, grace passed ──▶ deleting
     ──▶ unlink ──▶ deleted; its trajectories become tombstones (a late retry is recognised)

All deadlines use the service's uptime (index/db.py), because the wall clock may jump.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server.index.annotation_rows import drop_annotations
from server.index.db import SERVICE, Database, count_audit, next_change_id
from server.index.deleted_files import delete_given_up, give_up_files
from server.index.dialect import elements
from server.index.mirror_base import forget_tombstones
from server.index.tables import (
    leases,
    runs,
    shards,
    snapshot_shards,
    snapshots,
    tombstones,
    trajectories,
)
from server.ingest.index_rows import make_tombstones
from server.settings import Settings
from server.storage.shards import shard_file
from server.storage.store import Store
from stepwell.failpoints import failpoint

log = structlog.get_logger("stepwell.retention")
KEEP_LEASES = 86_400.0

_DEAD_ANNOTATIONS = sa.text(
    "NOT EXISTS (SELECT 1 FROM annotated AS a JOIN trajectories AS t ON t.id = a.trajectory"
    " WHERE a.annotation_pk = annotations.pk AND t.state <> 'evicted')"
)


def apply_retention(settings: Settings, db: Database, store: Store, now: float) -> int:
    """One round at uptime `now`; returns the number of deleted shard files."""
    _retire(db, now)
    _mark_for_deletion(db, now, settings.shard_grace)
    count = delete_marked(db, store)
    late = tombstones.c.evicted_uptime < now - settings.tombstone_days * 86_400.0
    if _any(db, tombstones, late):
        with db.write() as connection:
            forget_tombstones(connection, late)
    ended = leases.c.expires_uptime < now - KEEP_LEASES
    _write_if_any(db, sa.delete(leases).where(ended), ended)
    _delete_old_snapshots(db, store, now - settings.snapshot_days * 86_400.0)
    return count


def has_deadlines(db: Database) -> bool:
    """Whether a deadline within a day depends on uptime: leases, and retired shards."""
    with db.read() as connection:
        found = sa.or_(
            sa.exists(leases.select().where(leases.c.expires_uptime > db.uptime())),
            sa.exists(shards.select().where(shards.c.state == "retired")),
        )
        return bool(connection.execute(sa.select(found)).scalar())


def delete_marked(db: Database, store: Store) -> int:
    """Delete marked shards, including those that an earlier process marked; none while a backup
    runs. Returns their number."""
    s = shards.c
    with db.read() as connection:
        marked = connection.execute(
            sa.select(s.pk, s.id, s.partition).where(s.state == "deleting")
        ).all()
    for done, (pk, shard_id, partition) in enumerate(marked):
        failpoint("delete.after_mark")
        with store.deleting() as allowed:
            if not allowed:
                return done
            store.delete(*shard_file(partition, shard_id))
        failpoint("delete.after_unlink")
        with db.write() as connection:
            _delete_rows(connection, pk, db.uptime())
        log.info("shard deleted", shard=shard_id)
    return len(marked)


def _retire(db: Database, now: float) -> None:
    t = trajectories.c
    empty = sa.and_(
        shards.c.state == "live",
        ~sa.exists().where(t.shard_pk == shards.c.pk, t.state != "evicted"),
    )
    _write_if_any(
        db, sa.update(shards).where(empty).values(state="retired", retired_uptime=now), empty
    )


def _mark_for_deletion(db: Database, now: float, grace: float) -> None:
    """Mark shards that no reader can need; they can no longer be leased."""
    s, held = shards.c, snapshot_shards.c
    leased = (
        sa.exists()
        .where(held.shard_pk == s.pk, leases.c.snapshot_pk == held.snapshot_pk)
        .where(leases.c.expires_uptime > now)
    )
    due = sa.and_(s.state == "retired", s.retired_uptime <= now - grace, ~leased)
    _write_if_any(db, sa.update(shards).where(due).values(state="deleting"), due)


def _write_if_any(db: Database, statement: sa.Update | sa.Delete, where: Any) -> None:
    """Read first: a write costs an fsync, and most rounds find nothing to do."""
    if _any(db, statement.table, where):
        with db.write() as connection:
            connection.execute(statement)


def _any(db: Database, table: Any, where: Any) -> bool:
    with db.read() as connection:
        found = sa.exists(sa.select(sa.true()).select_from(table).where(where))
        return bool(connection.execute(sa.select(found)).scalar())


def _delete_rows(connection: Connection, pk: int, now: float) -> None:
    make_tombstones(connection, trajectories.c.shard_pk == pk, now, next_change_id(connection))
    connection.execute(sa.update(shards).where(shards.c.pk == pk).values(state="deleted"))


def _delete_old_snapshots(db: Database, store: Store, before: float) -> None:
    """Delete old snapshots: a run on a growing dataset creates one every few minutes.

    Kept: those leased within KEEP_LEASES, those that a run names (it can be replayed from them),
    and those that other manifests build on. Rows of deleted shards are removed when no snapshot
    refers to them any more.
    """
    n, built_on = snapshots.c, snapshots.alias()
    named = elements(runs.c.snapshots)
    old = sa.and_(
        n.created_uptime < before,
        n.pk.not_in(sa.select(built_on.c.base_pk).where(built_on.c.base_pk.is_not(None))),
        ~sa.exists().where(leases.c.snapshot_pk == n.pk),
        n.id.not_in(sa.select(named.c.value).select_from(runs.join(named, sa.true()))),
    )
    some = sa.select(n.pk, n.file).where(old).limit(1000)
    with db.read() as connection:
        if connection.execute(some.limit(1)).first() is None:
            return
    with db.write() as connection:
        rows = connection.execute(some).all()
        pks = [row.pk for row in rows]
        connection.execute(sa.delete(snapshot_shards).where(snapshot_shards.c.snapshot_pk.in_(pks)))
        connection.execute(sa.delete(snapshots).where(n.pk.in_(pks)))
        count_audit(connection, SERVICE, "snapshot.expire", "snapshots", snapshots=len(pks))
        s = shards.c
        connection.execute(
            sa.delete(shards).where(
                s.state == "deleted",
                s.retired_uptime < before,
                ~sa.exists().where(snapshot_shards.c.shard_pk == s.pk),
            )
        )
        give_up_files(connection, "snapshots", [row.file for row in rows])
    delete_given_up(db, store)
    log.info("snapshots forgotten", snapshots=len(rows))


def drop_dead_annotations(db: Database, store: Store) -> int:
    """Delete the files of annotations whose trajectories are all gone; returns their number."""
    with db.write() as connection:
        files = drop_annotations(connection, _DEAD_ANNOTATIONS)
    delete_given_up(db, store)
    return len(files)
