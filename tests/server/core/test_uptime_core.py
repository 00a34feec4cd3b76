"""What waits counts monotonic time over all lives of the service; no wall clock shortens it.

Only time in which a renewal could be answered counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

from server.app import create_app
from server.index.db import MAX_GAP, TICK_EVERY, Clock, Database, upgrade
from server.index.tables import programs, snapshots
from server.maintenance.unknown_files import UnknownFileSweeper
from server.settings import Settings
from stepwell.messages import PutLease
from stepwell.testing import make_spec, make_trajectory, wait_until

SPEC = make_spec(observation=3, action=2)
DAY = 86_400.0


class Hands(Clock):
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.wall_now, self.monotonic_now = 1.8e9, 1000.0

    def wall(self) -> float:
        return self.wall_now

    def monotonic(self) -> float:
        return self.monotonic_now

    def serve(self, db: Database, seconds: float) -> None:
        """Time passes while the service answers."""
        until = self.monotonic_now + seconds
        while self.monotonic_now < until:
            db.tick()
            self.monotonic_now = min(self.monotonic_now + TICK_EVERY, until)
        db.tick()


@pytest.fixture
def index(tmp_path: Path) -> Path:
    path = tmp_path / "index.sqlite"
    upgrade(path)
    return path


def test_uptime_goes_on_where_the_last_life_stopped(index: Path) -> None:
    """Whatever both clocks say then; without a word at the end it begins a little earlier."""
    clock = Hands()
    db = Database(index, clock)
    assert db.uptime() == 0.0
    clock.serve(db, 50.0)
    db.save_uptime()
    clock.serve(db, 7.0)
    assert db.uptime() == 57.0
    db.close()
    clock.monotonic_now, clock.wall_now = 3.0, 0.0  # the machine was started anew
    db = Database(index, clock)
    assert db.uptime() == 50.0, "what was not saved does not count"
    clock.serve(db, 1.0)
    assert db.uptime() == 51.0
    db.close()


def test_uptime_is_kept_along_with_what_is_written_anyway(index: Path) -> None:
    clock = Hands()
    db = Database(index, clock)
    clock.serve(db, 30.0)
    with db.write():
        pass
    db.close()
    db = Database(index, clock)
    assert db.uptime() == 30.0
    db.close()


def test_a_gap_between_ticks_is_left_out(index: Path) -> None:
    """A stopped process, a suspended machine, a blocked event loop; threads see it at once."""
    clock = Hands()
    db = Database(index, clock)
    clock.serve(db, 10.0)
    clock.monotonic_now += MAX_GAP
    assert db.uptime() == 10.0 + MAX_GAP
    clock.monotonic_now += DAY
    assert db.uptime() == 10.0 + MAX_GAP, "before the first tick after the gap"
    db.tick()
    assert db.uptime() == 10.0 + MAX_GAP, "and after it"
    clock.serve(db, 5.0)
    assert db.uptime() == 15.0 + MAX_GAP
    db.close()


def test_ticks_that_are_late_count_in_full(index: Path) -> None:
    """A busy service answers, late: its leases end all the same."""
    clock = Hands()
    db = Database(index, clock)
    for _ in range(100):
        clock.monotonic_now += 0.9 * MAX_GAP
        db.tick()
    assert db.uptime() == pytest.approx(90 * MAX_GAP)
    db.close()


def test_without_a_tick_nothing_counts(index: Path) -> None:
    """A service that recovers for hours before it serves; fsck."""
    clock = Hands()
    db = Database(index, clock)
    clock.monotonic_now += DAY
    assert db.uptime() == MAX_GAP
    clock.serve(db, 1.0)
    assert db.uptime() == MAX_GAP + 1.0
    db.close()


def test_time_in_which_nothing_can_be_written_does_not_count(index: Path) -> None:
    """The index is full: a renewal fails, though the event loop runs."""
    clock = Hands()
    db = Database(index, clock)
    with db.write() as c:
        pages = c.exec_driver_sql("PRAGMA page_count").scalar_one()
        c.exec_driver_sql(f"PRAGMA max_page_count = {pages}")  # of this connection, which is kept
    clock.serve(db, 10.0)
    with pytest.raises(sa.exc.OperationalError, match="full"), db.write() as c:
        row = {"worker_id": "w", "role": "r", "document": "x" * 10**6, "updated_at": 0.0}
        c.execute(sa.insert(programs).values(row))
    assert db.write_failed
    clock.serve(db, DAY)
    assert db.uptime() == 10.0 + MAX_GAP
    db.save_uptime()
    assert not db.write_failed
    clock.serve(db, 5.0)
    assert db.uptime() == 15.0 + MAX_GAP
    db.close()


def test_time_behind_a_write_that_hangs_does_not_count(index: Path) -> None:
    """A disk that hangs: a renewal would wait for it."""
    clock = Hands()
    db = Database(index, clock)
    with db.write():
        clock.serve(db, DAY)
        assert db.uptime() <= 2 * MAX_GAP
    clock.serve(db, 5.0)
    assert 5.0 < db.uptime() <= 5.0 + 2 * MAX_GAP
    db.close()


def test_a_service_that_serves_ticks_and_one_that_starts_does_not(tmp_path: Path) -> None:
    app = create_app(Settings(data=tmp_path, sql_workers=0, maintenance_interval=0))
    with TestClient(app):
        db = app.state.service.db
        (before, _), began = db._ticked, time.monotonic()
        wait_until(lambda: db._ticked[0] > before + 3 * TICK_EVERY, what="ticks of the event loop")
        assert db._ticked[0] - before <= time.monotonic() - began + TICK_EVERY


def test_maintenance_tries_again_to_write(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or leases would never end where nothing else is written; and it deletes what is marked."""
    db, failing = live.service.db, True
    write = db._save_uptime

    def save(connection: Any) -> None:
        if failing:
            raise sa.exc.OperationalError("", {}, Exception("database or disk is full"))
        write(connection)

    monkeypatch.setattr(db, "_save_uptime", save)
    with pytest.raises(sa.exc.OperationalError):
        db.save_uptime()
    live.service.maintenance.round()
    assert db.write_failed
    failing = False
    live.service.maintenance.round()
    assert not db.write_failed


@pytest.mark.sql_worker
@pytest.mark.parametrize("jump", [3600.0, -3600.0, DAY, -DAY])
def test_a_jump_moves_what_is_told_and_not_what_is_held(live: Any, jump: float) -> None:
    clock = Hands()
    db = live.service.db
    db.clock, db._ticked = clock, (db.uptime(), clock.monotonic_now)
    live.create()
    live.post([make_trajectory(SPEC)])
    snapshot = live.http.post("/v1/snapshots", json={"dataset": "d", "holder": "h"}).json()
    held = live.service.snapshots.lease(snapshot["id"], PutLease(holder="h", ttl=300.0))
    assert (held.ttl, held.expires_at) == (300.0, clock.wall_now + 300.0)
    clock.wall_now += jump
    clock.serve(db, 100.0)
    told = live.http.get(f"/v1/snapshots/{snapshot['id']}").json()["leased_until"]
    assert told == pytest.approx(clock.wall_now + 200.0, abs=1e-3)
    clock.serve(db, 201.0)
    assert live.http.get(f"/v1/snapshots/{snapshot['id']}").json()["leased_until"] is None


@pytest.mark.sql_worker
def test_the_newest_snapshot_is_the_one_made_last(live: Any) -> None:
    """Also when the clock was put back between: ids are ordered by the clock."""
    live.create()
    live.post([make_trajectory(SPEC)])
    made = [live.http.post("/v1/snapshots", json={"dataset": "d"}).json()["id"] for _ in range(4)]
    renamed = [f"sn_{9 - i}" for i in range(4)]
    with live.service.db.write() as c:
        for old, new in zip(made, renamed, strict=True):
            c.execute(sa.update(snapshots).where(snapshots.c.id == old).values(id=new))
    listed, cursor = [], {}
    for _ in range(2):
        page = live.http.get("/v1/snapshots", params={"limit": 2, **cursor}).json()
        listed += [item["id"] for item in page["items"]]
        cursor = {"cursor": page["next"]}
    assert listed == renamed[::-1]


def test_a_new_file_is_not_unknown_because_the_clock_has_jumped(
    start: Callable[..., Any],
) -> None:
    """A file lies there before its transaction names it; its own time says nothing."""
    live = start()
    service, clock = live.service, Hands()
    db = service.db
    db.clock, db._ticked = clock, (db.uptime(), clock.monotonic_now)
    sweeper = UnknownFileSweeper(service.db, service.store)
    stored = service.store.put("snapshots", "snap_new.arrow", b"of this moment")
    os.utime(live.data / "snapshots" / stored.name, (0.0, 0.0))
    assert sweeper.round(3600.0) == 0
    clock.monotonic_now += DAY  # the process is stopped before its transaction
    assert sweeper.round(3600.0) == 0
    clock.serve(db, 3590.0)
    assert sweeper.round(3600.0) == 0
    clock.serve(db, 10.0)
    assert sweeper.round(3600.0) == 1 and not service.store.exists("snapshots", stored.name)
    assert service.store.quarantined("snapshots") == ["snap_new.arrow"]
