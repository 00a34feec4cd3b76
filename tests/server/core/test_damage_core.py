"""Damage is noticed before anybody is handed wrong bytes, named, and kept from the rest."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from server.fsck import main as fsck
from server.maintenance.compaction import compact
from server.maintenance.rebuild import rebuild
from stepwell.codec import encode
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.index_file import write_index
from tests.server.core.conftest import flip

SPEC = make_spec(observation=3, action=2)


def make(count: int, first: int = 0) -> list[Trajectory]:
    return [make_trajectory(SPEC, length=4 + i, seed=first + i) for i in range(count)]


def two_shards(live: Any) -> tuple[list[Trajectory], list[Path]]:
    """One trajectory in each of two shards."""
    live.create()
    sent = make(2)
    for trajectory in sent:
        live.post([trajectory])
        live.flush()
    files = sorted((live.data / "shards" / "fifo").iterdir())
    assert len(files) == 2
    return sent, files


@pytest.mark.sql_worker
def test_a_damaged_shard_is_never_handed_out_and_training_goes_on_without_it(
    start: Callable[..., Any],
) -> None:
    live = start()
    sent, (bad, good) = two_shards(live)
    held = live.http.post("/v1/snapshots", json={"dataset": "d"}).json()
    backup = bad.read_bytes()
    flip(bad, len(backup) // 2)
    for _ in range(2):
        response = live.http.get(f"/v1/shards/{bad.stem}")
        assert (response.status_code, response.json()["code"]) == (410, "damaged")
    assert live.http.get(f"/v1/shards/{good.stem}").content == good.read_bytes()
    manifest = live.http.get(f"/v1/snapshots/{held['id']}/manifest")
    assert manifest.status_code == 200, "the trainer goes on with the rest of what it holds"
    fresh = live.http.post("/v1/snapshots", json={"dataset": "d"})
    assert (fresh.status_code, fresh.json()["trajectories"]) == (201, 1)
    health = live.http.get("/readyz")
    assert health.status_code == 200 and bad.stem in health.json()["detail"]
    live = start()
    assert bad.stem in live.http.get("/healthz").json()["detail"], "also after a start"
    bad.write_bytes(backup)
    live = start()
    assert live.http.get("/healthz").json()["status"] == "ok", "restored, so taken back"
    assert live.http.get(f"/v1/shards/{bad.stem}").content == backup
    assert live.steps(sent[0]).digest == sent[0].digest


@pytest.mark.sql_worker
def test_when_everything_selected_is_damaged_the_snapshot_says_so(live: Any) -> None:
    _, files = two_shards(live)
    for file in files:
        file.unlink()
        assert live.http.get(f"/v1/shards/{file.stem}").json()["code"] == "damaged"
    response = live.http.post("/v1/snapshots", json={"dataset": "d"})
    assert (response.status_code, response.json()["code"]) == (410, "damaged")


def test_compaction_takes_out_what_is_damaged_and_only_that(start: Callable[..., Any]) -> None:
    live = start(compact_after=0.0)
    live.create()
    sent = make(4)
    for trajectory in sent:
        live.post([trajectory])
        live.flush()
    files = sorted((live.data / "shards" / "fifo").iterdir())
    flip(files[1], 200)
    s = live.service
    now = time.time() + 1
    assert compact(s.settings, s.db, s.store, s.ingest, s.integrity, now) == 0
    assert s.integrity.quarantined == {files[1].stem}
    assert live.http.get(f"/v1/trajectories/{sent[1].id}/steps").json()["code"] == "damaged"
    for one in (sent[0], sent[2], sent[3]):
        assert live.steps(one).digest == one.digest


def test_a_read_that_failed_once_does_not_condemn_a_good_file(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files looks like damage to a reader; the file itself has the last word."""
    sent, files = two_shards(live)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("server.storage.shards.pq.ParquetFile", fail)
    assert live.http.get(f"/v1/trajectories/{sent[0].id}/steps").status_code == 410
    monkeypatch.undo()
    assert live.service.integrity.quarantined == set()
    assert live.steps(sent[0]).digest == sent[0].digest


@pytest.mark.parametrize("locations", [(3,), (20,), (3, 20)])
def test_a_segment_with_a_damaged_head_does_not_keep_the_service_from_starting(
    start: Callable[..., Any], tmp_path: Path, locations: tuple[int, ...]
) -> None:
    """Of one dataset's acknowledged data, not of all: what is lost is named, new data is taken."""
    live = start()
    live.create()
    sent = make(3)
    live.post(sent)
    data = live.as_killed(tmp_path / "copy")
    (segment,) = (data / "segments").iterdir()
    for place in locations:
        flip(segment, place)
    live = start(data=data)
    assert live.post(make(1, 50)) == [("stored", 4)]
    live.flush()
    assert live.post(sent[:1]) == [("duplicate", 1)]
    start(data=tmp_path / "elsewhere")  # frees the directory for fsck
    problems = [f for f in fsck.check(data).problems if not f.note]
    if locations == (3,):
        assert problems == [], "the records behind the first bytes are whole"
    if locations == (3, 20):
        assert problems and all(segment.name in f.where for f in problems)


def test_a_segment_that_vanishes_does_not_block_sealing_of_others(live: Any) -> None:
    live.create()
    live.post(make(1))
    (segment,) = (live.data / "segments").iterdir()
    segment.unlink()
    live.flush()
    live.post(make(1, 50))
    assert live.flush()["sealed"] == 1
    assert live.http.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("UPDATE trajectories SET segment_pk = NULL", "spooled but in no segment"),
        ("UPDATE datasets SET next_seq = 1", "sequence number twice"),
    ],
)
def test_fsck_sees_what_would_lose_or_double_data_later(
    start: Callable[..., Any], tmp_path: Path, statement: str, what: str
) -> None:
    live = start()
    live.create()
    live.post(make(2))
    data = live.as_killed(tmp_path / "copy")
    with write_index(data / "index.sqlite") as index:
        index.execute(statement)
    found = [f for f in fsck.check(data).problems if not f.note]
    assert found and all(what in f.what for f in found)


def test_fsck_sees_a_living_trajectory_in_a_shard_that_is_given_up(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    live = start()
    two_shards(live)
    data = live.as_killed(tmp_path / "copy")
    with write_index(data / "index.sqlite") as index:
        index.execute("DROP TRIGGER living_shard")
        index.execute("UPDATE shards SET state = 'deleted' WHERE pk = 1")
    found = [f.what for f in fsck.check(data).problems if not f.note]
    assert any("its shard is missing or about to be deleted" in what for what in found)
    assert "the trigger living_shard is missing" in found


def test_a_rebuild_takes_the_newer_of_two_datasets_that_had_one_trajectory(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """A deleted dataset's files stay a while; the same trajectories may be elsewhere by then."""
    live = start()
    live.create("old")
    live.create("new")
    sent = make(3)
    live.post(sent, "old")
    live.flush("old")
    assert live.http.delete("/v1/datasets/old").status_code == 204
    live.post(sent[:2], "new")
    live.flush("new")
    data = live.as_killed(tmp_path / "copy")
    result = rebuild(data)
    assert (result.trajectories, result.unreadable) == (3, [])
    live = start(data=data)
    assert live.info(sent[0])["dataset"] == "new"
    assert live.info(sent[2])["dataset"] == "old"
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]


def test_a_rebuild_leaves_out_an_import_that_never_committed(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    live = start()
    _, files = two_shards(live)
    data = live.as_killed(tmp_path / "copy")
    (data / "uploads" / f"{files[1].stem}.pending").write_bytes(b"shards/fifo")
    assert rebuild(data).trajectories == 1


def test_a_damaged_index_is_named_while_the_service_runs(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = start()
    live.create()

    def fail(*_: Any, **__: Any) -> None:
        cause = sqlite3.DatabaseError("database disk image is malformed")
        raise sa.exc.DatabaseError("SELECT", {}, cause)

    monkeypatch.setattr("server.registry.datasets._message", fail)
    response = live.http.get("/v1/datasets/d")
    assert (response.status_code, response.json()["code"]) == (500, "index_damaged")
    monkeypatch.setattr("sqlalchemy.engine.Connection.exec_driver_sql", fail)
    live.service.maintenance._look_at_index()
    monkeypatch.undo()
    assert "malformed" in live.http.get("/healthz").json()["detail"]
    assert live.send(encode(make(1), SPEC)).status_code == 200
