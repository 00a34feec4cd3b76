"""The mirror follows every change of the index, at once, and costs nothing when there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import sqlalchemy as sa
from fastapi import Response

from server.index import mirror as module
from server.index.db import next_change_id
from server.index.tables import trajectories
from server.rights import LOCAL, Access, Right
from server.routes import run_metrics, runs
from stepwell.messages import Alarm, Capacity, CreateRun, MetricPoint, PatchRun, PostMetrics
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
            .values(tags='["x"]', partition="protected", change_id=next_change_id(c))
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
    from server.routes import datasets
    from stepwell.messages import PatchDataset

    smaller = PatchDataset(capacity=Capacity(trajectories=3))
    datasets.patch_dataset(world.service, "d", smaller, "")
    world.service.ingest.flush()
    with world.service.db.read() as c:
        assert c.execute(sa.select(sa.func.count()).select_from(trajectories)).scalar() == 3
    assert ids(world) == [t.id for t in world.stored["d"]][-3:]


def test_a_deleted_dataset_takes_its_rows_along(make_world: Callable[..., Any]) -> None:
    from server.routes import datasets

    world = make_world(sql_workers=1)
    for name in ("a", "b"):
        world.create(name, SPEC)
        world.post(name, [make_trajectory(SPEC, seed=s) for s in range(3)])
    assert len(ids(world)) == 6
    datasets.delete_dataset(world.service, "a", "test")
    assert world.rows("select dataset, count(*) from trajectories group by 1") == [["b", 3]]
    assert world.rows("select name from datasets") == [["b"]]
    assert world.rows("select count(*) from steps") == [[18]]


ACCESS = Access(LOCAL, Right("POST", "/v1/runs"))


def point(step: int, value: float) -> PostMetrics:
    return PostMetrics(points=[MetricPoint(key="loss", step=step, value=value, time=1.0)])


def test_metrics_and_runs_follow(make_world: Callable[..., Any]) -> None:
    world = make_world(sql_workers=1)
    service = world.service
    runs.create_run(service, CreateRun(name="r1", kind="train"), Response(), ACCESS)
    for step in range(3):
        run_metrics.post_metrics(service, "r1", point(step, 0.5), ACCESS)
        assert world.rows("select run, count(*), max(step) from metrics group by 1") == [
            ["r1", step + 1, step]
        ]
    run_metrics.post_metrics(service, "r1", point(1, 9.0), ACCESS)  # an older step again
    runs.patch_run(service, "r1", PatchRun(status="finished"), ACCESS)
    assert world.rows("select max(value) from metrics") == [[9.0]]
    assert world.rows("select status, alarms from runs") == [["finished", "[]"]]
    alarm = Alarm(key="td_error", message="wrong", update=3, value=2.0)
    runs.patch_run(service, "r1", PatchRun(alarms=[alarm]), ACCESS)
    asked = "select alarms->0->>'key', json_array_length(alarms) from runs"
    assert world.rows(asked) == [["td_error", 1]]
    runs.delete_run(service, "r1", "local")
    assert world.rows("select count(*) from metrics") == [[0]]
    runs.create_run(
        service, CreateRun(name="r2", kind="train"), Response(), ACCESS
    )  # SQLite gives it the key of r1
    run_metrics.post_metrics(service, "r2", point(0, 1.0), ACCESS)
    assert world.rows("select run, value from metrics") == [["r2", 1.0]]


def test_metrics_of_runs_that_were_not_heard_of_are_not_read_again(
    make_world: Callable[..., Any], monkeypatch: Any
) -> None:
    """A million points of finished runs cost a query nothing."""
    monkeypatch.setattr(module, "RUNS_PER_PIECE", 1)
    world = make_world(sql_workers=1)
    service, mirror = world.service, world.service.mirror
    for name in ("done", "live"):
        runs.create_run(service, CreateRun(name=name, kind="train"), Response(), ACCESS)
        run_metrics.post_metrics(service, name, point(0, 0.5), ACCESS)
    mirror.state()
    asked: list[str] = []
    mirror._db.set_trace_callback(asked.append)
    run_metrics.post_metrics(service, "live", point(1, 0.5), ACCESS)
    assert len(mirror.state("select * from metrics").tables["metrics"]) == 2
    runs.patch_run(service, "live", PatchRun(), ACCESS)  # a heartbeat alone: looked at, not written
    version = mirror.state("select * from metrics").version
    world.create("d", SPEC)  # something else altogether
    assert mirror.state("select * from metrics").version == version
    mirror._db.set_trace_callback(None)
    read = [sql for sql in asked if "FROM metrics" in sql]
    assert len(read) == 3 and all("BETWEEN 2 AND 2" in sql for sql in read)


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
    monkeypatch.setattr(module, "KEEP_SECONDS", -1.0)
    world.service.mirror.state()
    assert len(list(directory.glob("trajectories_*"))) == 1


def test_the_shard_with_the_most_rows_comes_first(make_world: Callable[..., Any]) -> None:
    """DuckDB estimates the rows of all from the first, and holds the smaller side of a join in
    memory: with a small shard first that was every step, at 100,000 trajectories too many."""
    world = make_world(sql_workers=1)
    world.create("d", SPEC)
    lengths = (2, 40, 3)
    for seed, length in enumerate(lengths):
        world.post("d", [make_trajectory(SPEC, length=length, seed=seed)])
    state = world.service.mirror.state("steps")
    (small, large, last) = sorted(state.shards["d"])
    assert state.shards["d"] == [large, small, last] and state.most_rows == {"d": 41}
    assert world.rows("select count(*) from steps") == [[sum(lengths) + 3]]


def test_other_tables_do_not_wait_until_the_mirror_is_filled(
    make_world: Callable[..., Any], monkeypatch: Any
) -> None:
    """It is filled a few pieces at a time, and no state is told before all are written."""
    monkeypatch.setattr(module, "PIECE", 2)
    monkeypatch.setattr(module, "AT_ONCE", 1)
    world = make_world(sql_workers=0)
    world.create("d", SPEC)
    world.post("d", [make_trajectory(SPEC, seed=s) for s in range(7)], seal=False)
    mirror, read, looks = world.service.mirror, module.Mirror._read_piece, []

    def slow(self: Any, number: int) -> Any:
        looks.append(number)
        return read(self, number)

    def between(_seconds: float) -> None:
        seen = mirror.state("select * from runs")  # would wait for the lock for ever
        looks.append(sum(len(seen.tables[name]) for name in ("runs", "trajectories")))
        world.post("d", [make_trajectory(SPEC, seed=100 + len(looks))], seal=False)

    monkeypatch.setattr(module.Mirror, "_read_piece", slow)
    calls = 0

    def counted(seconds: float) -> None:
        nonlocal calls
        calls += 1
        if calls <= 3:
            between(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(module.time, "sleep", counted)
        state = mirror.state("select * from trajectories")
    assert calls >= 3 and looks[:4] == [0, 1, 1, 2]
    root = world.service.settings.data
    rows = [pq.read_metadata(root / file).num_rows for file in state.tables["trajectories"]]
    assert sum(rows) == 7 + 3
