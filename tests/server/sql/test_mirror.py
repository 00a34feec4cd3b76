"""The mirror follows every change of the index, at once, and costs nothing when there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from server.index import mirror as module
from server.index.db import next_mark
from server.index.tables import metrics, runs, trajectories
from stepwell.messages import Capacity
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec()


def ids(world: Any) -> list[str]:
    return [row[0] for row in world.rows("select id from trajectories order by seq", limit=100_000)]


def test_a_post_is_seen_by_the_next_query(make_world: Callable[..., Any]) -> None:
    world = make_world(sql_workers=1)
    world.create("d", SPEC)
    for seed in range(5):
        world.post("d", [make_trajectory(SPEC, seed=seed)], seal=seed % 2 == 0)
        assert ids(world) == [t.id for t in world.stored["d"]]
        assert len(world.rows("select distinct trajectory_id from steps")) == 1 + seed // 2 * 2


def test_a_changed_label_is_seen(make_world: Callable[..., Any]) -> None:
    world = make_world(sql_workers=1)
    world.create("d", SPEC)
    world.post("d", [make_trajectory(SPEC, seed=s) for s in range(3)])
    assert world.rows("select count(*) from trajectories where 'x' in tags") == [[0]]
    with world.service.db.write() as c:
        c.execute(
            sa.update(trajectories)
            .where(trajectories.c.id == world.stored["d"][1].id)
            .values(tags='["x"]', partition="protected", mark=next_mark(c))
        )
    rows = world.rows("select id, partition from trajectories where 'x' in tags")
    assert rows == [[world.stored["d"][1].id, "protected"]]


def test_what_fifo_evicts_is_gone_from_both_tables(
    make_world: Callable[..., Any], monkeypatch: Any
) -> None:
    """Also rows that were removed for good between two looks (evicted before they were sealed)."""
    monkeypatch.setattr(module, "PIECE", 4)
    world = make_world(sql_workers=1)
    world.create("d", SPEC, capacity=Capacity(trajectories=5))
    for round_ in range(6):
        world.post("d", [make_trajectory(SPEC, seed=10 * round_ + s) for s in range(3)], seal=False)
        if round_ % 2:
            world.service.ingest.flush()  # drops what was evicted unsealed, tombstones it
        living = [t.id for t in world.stored["d"]][-5:]
        assert ids(world) == living
    steps = world.rows("select distinct trajectory_id from steps")
    assert sorted(row[0] for row in steps) == sorted(living)


def test_rows_removed_unseen_leave_no_ghosts(
    make_world: Callable[..., Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "PIECE", 4)
    world = make_world(sql_workers=1)
    world.create("d", SPEC, capacity=Capacity(trajectories=100))
    world.post("d", [make_trajectory(SPEC, seed=s) for s in range(10)], seal=False)
    assert len(ids(world)) == 10
    from server import datasets
    from stepwell.messages import PatchDataset

    datasets.patch(world.service.db, "d", PatchDataset(capacity=Capacity(trajectories=3)))
    world.service.ingest.flush()
    with world.service.db.read() as c:
        assert c.execute(sa.select(sa.func.count()).select_from(trajectories)).scalar() == 3
    assert ids(world) == [t.id for t in world.stored["d"]][-3:]


def test_a_deleted_dataset_takes_its_rows_along(make_world: Callable[..., Any]) -> None:
    from server import datasets

    world = make_world(sql_workers=1)
    for name in ("a", "b"):
        world.create(name, SPEC)
        world.post(name, [make_trajectory(SPEC, seed=s) for s in range(3)])
    assert len(ids(world)) == 6
    datasets.delete(world.service.db, world.service.ingest, "a", "test")
    assert world.rows("select dataset, count(*) from trajectories group by 1") == [["b", 3]]
    assert world.rows("select name from datasets") == [["b"]]
    assert world.rows("select count(*) from steps") == [[18]]


def test_metrics_and_runs_follow(make_world: Callable[..., Any]) -> None:
    world = make_world(sql_workers=1)
    with world.service.db.write() as c:
        pk = c.execute(
            sa.insert(runs)
            .values(name="r1", kind="train", status="running", created_at=1.0, heartbeat_at=1.0)
            .returning(runs.c.pk)
        ).scalar_one()
    for step in range(3):
        with world.service.db.write() as c:
            c.execute(
                sa.insert(metrics).values(run_pk=pk, key="loss", step=step, time=step, value=0.5)
            )
        assert world.rows("select run, count(*), max(step) from metrics group by 1") == [
            ["r1", step + 1, step]
        ]
    with world.service.db.write() as c:
        c.execute(sa.update(metrics).where(metrics.c.step == 1).values(value=9.0))
        c.execute(sa.update(runs).values(status="finished"))
    assert world.rows("select max(value) from metrics") == [[9.0]]
    assert world.rows("select status from runs") == [["finished"]]


def test_nothing_is_written_when_nothing_changed(make_world: Callable[..., Any]) -> None:
    world = make_world(sql_workers=1)
    world.create("d", SPEC)
    world.post("d", [make_trajectory(SPEC)])
    mirror = world.service.mirror
    first = mirror.state()
    directory = world.service.settings.data / "mirror"
    before = {p: p.stat().st_mtime_ns for p in directory.iterdir()}
    assert mirror.state() == first
    assert {p: p.stat().st_mtime_ns for p in directory.iterdir()} == before


def test_replaced_files_stay_for_running_queries_and_then_go(
    make_world: Callable[..., Any], monkeypatch: Any
) -> None:
    world = make_world(sql_workers=1)
    world.create("d", SPEC)
    for seed in range(3):
        world.post("d", [make_trajectory(SPEC, seed=seed)], seal=False)
        world.service.mirror.state()
    directory = world.service.settings.data / "mirror"
    assert len(list(directory.glob("trajectories_*"))) == 3
    monkeypatch.setattr(module, "KEEP_SECONDS", 0.0)
    time.sleep(0.01)
    world.service.mirror.state()
    assert len(list(directory.glob("trajectories_*"))) == 1
