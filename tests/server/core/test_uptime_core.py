"""What waits counts monotonic time over all lives of the service; no wall clock shortens it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from server.index.db import Clock, Database, upgrade
from server.index.tables import snapshots
from server.maintenance.unknown_files import UnknownFileSweeper
from stepwell.messages import PutLease
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec(observation=3, action=2)
SQL_WORKERS = 1
DAY = 86_400.0


class Hands(Clock):
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.wall_now, self.monotonic_now = 1.8e9, 1000.0

    def wall(self) -> float:
        return self.wall_now

    def monotonic(self) -> float:
        return self.monotonic_now


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
    clock.monotonic_now += 50.0
    db.save_uptime()
    clock.monotonic_now += 7.0
    assert db.uptime() == 57.0
    db.close()
    clock.monotonic_now, clock.wall_now = 3.0, 0.0  # the machine was started anew
    db = Database(index, clock)
    assert db.uptime() == 50.0, "what was not saved does not count"
    clock.monotonic_now += 1.0
    assert db.uptime() == 51.0
    db.close()


def test_uptime_is_kept_along_with_what_is_written_anyway(index: Path) -> None:
    clock = Hands()
    db = Database(index, clock)
    clock.monotonic_now += 30.0
    with db.write():
        pass
    db.close()
    db = Database(index, clock)
    assert db.uptime() == 30.0
    db.close()


@pytest.mark.parametrize("jump", [3600.0, -3600.0, DAY, -DAY])
def test_a_jump_moves_what_is_told_and_not_what_is_held(live: Any, jump: float) -> None:
    clock = Hands()
    db = live.service.db
    db.clock, db._began = clock, clock.monotonic_now
    live.create()
    live.post([make_trajectory(SPEC)])
    snapshot = live.http.post("/v1/snapshots", json={"dataset": "d", "holder": "h"}).json()
    held = live.service.snapshots.lease(snapshot["id"], PutLease(holder="h", ttl=300.0))
    assert (held.ttl, held.expires_at) == (300.0, clock.wall_now + 300.0)
    clock.wall_now += jump
    clock.monotonic_now += 100.0
    told = live.http.get(f"/v1/snapshots/{snapshot['id']}").json()["leased_until"]
    assert told == pytest.approx(clock.wall_now + 200.0, abs=1e-3)
    clock.monotonic_now += 201.0
    assert live.http.get(f"/v1/snapshots/{snapshot['id']}").json()["leased_until"] is None


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
    service.db.clock = clock
    sweeper = UnknownFileSweeper(service.db, service.store)
    stored = service.store.put("snapshots", "snap_new.arrow", b"of this moment")
    os.utime(stored.path, (0.0, 0.0))
    assert sweeper.round(3600.0) == 0
    clock.monotonic_now += 3599.0
    assert sweeper.round(3600.0) == 0
    clock.monotonic_now += 2.0
    assert sweeper.round(3600.0) == 1 and not stored.path.exists()
    assert service.store.quarantined("snapshots") == ["snap_new.arrow"]
