"""Physical deletion, long after logical eviction: only what nobody can need any more.

live ── nothing alive in it ──▶ retired ── no unexpired lease, grace passed ──▶ deleting
     ──▶ unlink ──▶ deleted; its trajectories become tombstones (a late retry is recognised)

All waiting is counted in the service's uptime (index/db.py): the wall clock may jump.
"""

from __future__ import annotations

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from server.index.db import Database, next_change_id
from server.index.tables import (
    leases,
    runs,
    shards,
    snapshot_shards,
    snapshots,
    tombstones,
    trajectories,
)
from server.settings import Settings
from server.storage.store import Store
from stepwell.failpoints import failpoint

log = structlog.get_logger("stepwell.retention")
KEEP_LEASES = 86_400.0


def retain(settings: Settings, db: Database, store: Store, now: float) -> int:
    """One round at uptime `now`; returns how many shard files were deleted."""
    _retire(db, now)
    _doom(db, now, settings.shard_grace)
    count = finish(db, store)
    _forget(db, now, settings.tombstone_days * 86_400.0)
    _forget_snapshots(db, store, now - settings.snapshot_days * 86_400.0)
    return count


def waiting(db: Database) -> bool:
    """Whether anything here waits for uptime to pass within a day: leases, and retired shards."""
    with db.read() as connection:
        found = sa.or_(
            sa.exists(leases.select().where(leases.c.expires_uptime > db.uptime())),
            sa.exists(shards.select().where(shards.c.state == "retired")),
        )
        return bool(connection.execute(sa.select(found)).scalar())


def finish(db: Database, store: Store) -> int:
    """Delete what is marked; also what an earlier process had marked and not finished."""
    s = shards.c
    with db.read() as connection:
        doomed = connection.execute(
            sa.select(s.pk, s.id, s.partition).where(s.state == "deleting")
        ).all()
    for pk, shard_id, partition in doomed:
        failpoint("delete.after_mark")
        store.delete(f"shards/{partition}", f"{shard_id}.parquet")
        failpoint("delete.after_unlink")
        with db.write() as connection:
            _bury(connection, pk, db.uptime())
        log.info("shard deleted", shard=shard_id)
    return len(doomed)


def _retire(db: Database, now: float) -> None:
    t = trajectories.c
    empty = sa.and_(
        shards.c.state == "live",
        ~sa.exists().where(t.shard_pk == shards.c.pk, t.state != "evicted"),
    )
    with db.read() as connection:
        if not connection.execute(sa.select(sa.exists(shards.select().where(empty)))).scalar():
            return
    with db.write() as connection:
        connection.execute(
            sa.update(shards).where(empty).values(state="retired", retired_uptime=now)
        )


def _doom(db: Database, now: float, grace: float) -> None:
    """Mark what nobody can need: from here on it cannot be leased any more."""
    s, held = shards.c, snapshot_shards.c
    leased = (
        sa.exists()
        .where(held.shard_pk == s.pk, leases.c.snapshot_pk == held.snapshot_pk)
        .where(leases.c.expires_uptime > now)
    )
    due = sa.and_(s.state == "retired", s.retired_uptime <= now - grace, ~leased)
    with db.read() as connection:
        if not connection.execute(sa.select(sa.exists(shards.select().where(due)))).scalar():
            return
    with db.write() as connection:
        connection.execute(sa.update(shards).where(due).values(state="deleting"))


def _bury(connection: Connection, pk: int, now: float) -> None:
    t = trajectories.c
    names = ["id", "dataset_pk", "seq", "digest", "evicted_uptime", "change_id"]
    change_id = sa.literal(next_change_id(connection))
    gone = sa.select(t.id, t.dataset_pk, t.seq, t.digest, sa.literal(now), change_id)
    connection.execute(sa.insert(tombstones).from_select(names, gone.where(t.shard_pk == pk)))
    connection.execute(sa.delete(trajectories).where(t.shard_pk == pk))
    connection.execute(sa.update(shards).where(shards.c.pk == pk).values(state="deleted"))


def _forget(db: Database, now: float, tombstone_age: float) -> None:
    old_tombstones = tombstones.c.evicted_uptime < now - tombstone_age
    old_leases = leases.c.expires_uptime < now - KEEP_LEASES
    with db.read() as connection:
        some = connection.execute(
            sa.select(
                sa.or_(
                    sa.exists(tombstones.select().where(old_tombstones)),
                    sa.exists(leases.select().where(old_leases)),
                )
            )
        ).scalar()
    if some:
        with db.write() as connection:
            connection.execute(sa.delete(tombstones).where(old_tombstones))
            connection.execute(sa.delete(leases).where(old_leases))


def _forget_snapshots(db: Database, store: Store, before: float) -> None:
    """A growing run makes one every few minutes; nobody comes back to those it did not keep.

    Kept: what anybody leased lately (leases stay KEEP_LEASES beyond their end), and what a run
    names, since it can be replayed from there, and what other manifests build on. Rows of shards
    long deleted go when no snapshot refers to them any more.
    """
    n, built_on = snapshots.c, snapshots.alias()
    named = sa.func.json_each(runs.c.snapshots).table_valued("value")
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
        s = shards.c
        connection.execute(
            sa.delete(shards).where(
                s.state == "deleted",
                s.retired_uptime < before,
                ~sa.exists().where(snapshot_shards.c.shard_pk == s.pk),
            )
        )
    for row in rows:
        store.delete("snapshots", row.file)
    log.info("snapshots forgotten", snapshots=len(rows))
