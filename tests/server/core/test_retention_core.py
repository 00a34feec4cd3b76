"""The oldest go, exactly; what is protected stays; bytes go only when nobody needs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from server.fsck import main as fsck
from server.fsck.checks import check_totals
from server.index.tables import audit, shards, tombstones, trajectories
from server.ingest import seal
from server.ingest.evict import EVICTABLE
from server.maintenance.compaction import compact
from server.maintenance.shard_deletion import apply_retention
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.shard_reading import write_shard_of_format_1

SPEC = make_spec(observation=3, action=2)


def make(count: int, length: int = 5, **options: Any) -> list[Trajectory]:
    return [make_trajectory(SPEC, length=length, seed=i, **options) for i in range(count)]


def alive(live: Any, name: str = "d") -> list[int]:
    return [item["seq"] for item in live.listing(name, limit=1000)]


def states(live: Any) -> list[str]:
    with live.service.db.read() as c:
        return list(c.execute(sa.select(shards.c.state).order_by(shards.c.pk)).scalars())


def maintenance_round(live: Any, later: float = 0.0) -> int:
    service = live.service
    return apply_retention(service.settings, service.db, service.store, service.db.uptime() + later)


def test_fifo_holds_exactly_its_capacity_and_the_oldest_go(live: Any) -> None:
    """By number, whether spooled or sealed, in one body or many."""
    live.create(capacity={"trajectories": 3})
    live.post(make(2))
    live.flush()
    live.post(make(5))
    assert alive(live) == [5, 6, 7]
    dataset = live.dataset()
    assert dataset["fifo"] == {"trajectories": 3, "steps": 15, "bytes": 3 * make(1)[0].nbytes}
    assert dataset["evicted"] == 4


def test_neither_names_nor_strangers_files_matter_to_what_goes(live: Any) -> None:
    """No file's name says what is old: not of ours, and not of what somebody put beside them."""
    live.create("a_b__c", capacity={"trajectories": 2})
    live.post(make(3, env="Some_Env__with_underscores-v0", tags=("_", "a_b_c_d")), "a_b__c")
    live.flush("a_b__c")
    folders = sorted({path.parent for path in live.data.rglob("*.parquet")})
    assert folders
    for folder in folders:
        for name in ("my_notes.txt", "a_b_c_d.parquet", "1.2.parquet.bak"):
            (folder / name).write_text("not yours")
    live.post(make(5)[3:], "a_b__c")
    maintenance_round(live, later=1e6)
    assert alive(live, "a_b__c") == [4, 5]
    for folder in folders:
        assert (folder / "my_notes.txt").read_text() == "not yours"


@pytest.mark.parametrize("limit", ["steps", "bytes"])
def test_capacity_in_steps_and_bytes_is_never_exceeded_and_never_overdone(
    live: Any, limit: str
) -> None:
    """As many of the newest as fit, and not one less."""
    sent = [make_trajectory(SPEC, length=n, seed=n) for n in (5, 9, 2, 7, 3, 4)]
    sizes = [len(t) if limit == "steps" else t.nbytes for t in sent]
    capacity = sizes[-1] + sizes[-2] + sizes[-3] + 1
    live.create(capacity={limit: capacity})
    for trajectory in sent:
        live.post([trajectory])
        assert live.dataset()["fifo"][limit] <= capacity
    assert alive(live) == [4, 5, 6]


def test_a_trajectory_larger_than_the_capacity_is_refused_not_swallowed(live: Any) -> None:
    live.create(capacity={"steps": 10})
    live.post(make(1, length=10))
    answer = live.post(make(1, length=11))
    assert answer == [("refused", None)]
    assert alive(live) == [1]


def test_what_is_protected_neither_counts_nor_goes(live: Any) -> None:
    """Neither training nor evaluation; the other two displace only themselves."""
    live.create(capacity={"trajectories": 2})
    live.post(make(3), partition="protected")
    live.post(make(3, purpose="eval"), partition="protected")
    live.post(make(3, purpose="eval"))
    live.post(make(4))
    assert alive(live) == [1, 2, 3, 4, 5, 6, 8, 9, 12, 13]
    dataset = live.dataset()
    assert [dataset[b]["trajectories"] for b in ("fifo", "protected", "eval")] == [2, 3, 5]
    assert dataset["evicted"] == 3


@pytest.mark.parametrize("limit", ["steps", "bytes"])
def test_evaluation_has_the_capacity_for_itself(live: Any, limit: str) -> None:
    """In steps and bytes, exactly; a smaller capacity works at once; the totals stay true."""
    size = 5 if limit == "steps" else make(1)[0].nbytes
    live.create(capacity={limit: 3 * size})
    live.post(make(2))
    live.post(make(5, purpose="eval"))
    live.flush()
    assert alive(live) == [1, 2, 5, 6, 7]
    too_long = [make_trajectory(SPEC, length=30, purpose="eval")]
    assert live.post(too_long) == [("refused", None)]
    live.http.patch("/v1/datasets/d", json={"capacity": {limit: size}})
    assert alive(live) == [2, 7]
    dataset = live.dataset()
    assert (dataset["fifo"]["steps"], dataset["eval"]["steps"]) == (5, 5)
    with live.service.db.read() as c:
        assert list(check_totals(c)) == []


@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_what_eviction_walks_is_an_index_alone(live: Any, purpose: str) -> None:
    """However much of the other purpose lies before it."""
    t = trajectories.c
    query = sa.select(t.pk).where(t.dataset_pk == 1, EVICTABLE[purpose]).order_by(t.seq)
    with live.service.db.read() as c:
        text = str(query.compile(c, compile_kwargs={"literal_binds": True}))
        plan = " ".join(str(row) for row in c.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}"))
    name = {"train": "ix_trajectories_fifo", "eval": "ix_trajectories_eval"}[purpose]
    assert name in plan and "TEMP B-TREE" not in plan


def test_a_smaller_capacity_takes_effect_at_once(live: Any) -> None:
    live.create()
    live.post(make(6))
    changed = live.http.patch("/v1/datasets/d", json={"capacity": {"trajectories": 2}})
    assert changed.json()["fifo"]["trajectories"] == 2
    assert alive(live) == [5, 6]


def test_a_retry_of_an_evicted_trajectory_is_told_so_before_and_after_its_bytes_are_gone(
    start: Callable[..., Any],
) -> None:
    """Exactly once also holds after eviction: it is not stored again as new."""
    live = start(shard_grace=0.0)
    live.create(capacity={"trajectories": 1})
    old, new = make(2)
    live.post([old])
    live.flush()
    live.post([new])
    assert live.post([old]) == [("evicted", 1)]
    response = live.http.get(f"/v1/trajectories/{old.id}")
    assert (response.status_code, response.json()["code"]) == (410, "evicted")
    assert maintenance_round(live) == 1
    with live.service.db.read() as c:
        assert c.execute(sa.select(tombstones.c.id)).scalars().all() == [old.id]
        assert c.execute(sa.select(sa.func.count()).select_from(trajectories)).scalar() == 1
    assert live.post([old]) == [("evicted", 1)]
    assert live.http.get(f"/v1/trajectories/{old.id}").status_code == 410
    assert maintenance_round(live, later=31 * 86_400) == 0
    assert live.post([old]) == [("stored", 3)]  # forgotten after 30 days, as promised


def test_a_trajectory_evicted_before_it_was_sealed_leaves_only_a_tombstone(live: Any) -> None:
    live.create(capacity={"trajectories": 1})
    sent = make(3)
    live.post(sent)
    assert live.flush() == {"sealed": 1, "shards": 1}
    assert live.post(sent) == [("evicted", 1), ("evicted", 2), ("duplicate", 3)]


@pytest.mark.sql_worker
def test_a_shard_is_deleted_only_when_dead_unleased_and_past_its_grace(
    start: Callable[..., Any],
) -> None:
    live = start(shard_grace=100.0)
    live.create(capacity={"trajectories": 2})
    sent = make(2)
    live.post(sent)
    live.flush()
    snapshot = live.http.post("/v1/snapshots", json={"dataset": "d", "holder": "h"}).json()
    lease = f"/v1/snapshots/{snapshot['id']}/lease"
    live.http.put(lease, json={"holder": "h", "ttl": 1000})
    live.post(make_more())
    live.flush()
    assert maintenance_round(live) == 0
    assert states(live) == ["retired", "live"]
    assert maintenance_round(live, later=200) == 0, "leased"
    manifest = live.http.get(
        f"/v1/snapshots/{snapshot['id']}/manifest", headers={"accept": "application/json"}
    ).json()
    shard = manifest["rows"][0][[c["name"] for c in manifest["columns"]].index("shard")]
    assert live.http.get(f"/v1/shards/{shard}").status_code == 200
    live.http.delete(lease, params={"holder": "h"})
    assert maintenance_round(live, later=50) == 0, "within its grace"
    assert maintenance_round(live, later=200) == 1
    assert states(live) == ["deleted", "live"]
    gone = live.http.get(f"/v1/shards/{shard}")
    assert (gone.status_code, gone.json()["code"]) == (410, "snapshot_expired")
    renewed = live.http.put(lease, json={})
    assert (renewed.status_code, renewed.json()["code"]) == (410, "snapshot_expired")


def make_more() -> list[Trajectory]:
    return [make_trajectory(SPEC, length=6, seed=100 + i) for i in range(2)]


@pytest.mark.sql_worker
def test_small_neighbours_become_one_shard_and_nothing_changes_for_readers(
    start: Callable[..., Any],
) -> None:
    live = start(compact_after=0.0, shard_grace=0.0)
    live.create()
    sent = make(6)
    for trajectory in sent:
        live.post([trajectory])
        live.flush()
    snapshot = live.http.post("/v1/snapshots", json={"dataset": "d"}).json()
    url = f"/v1/snapshots/{snapshot['id']}"
    service = live.service
    args = (
        service.settings,
        service.db,
        service.store,
        service.ingest,
        service.integrity,
        time.time() + 1,
    )
    assert compact(*args) == 6
    assert compact(*args) == 0
    assert states(live) == ["retired"] * 6 + ["live"]
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]
    before = live.http.get(f"{url}/manifest", headers={"accept": "application/json"}).json()
    assert maintenance_round(live, later=1) == 0, "the snapshot's first lease holds the old files"
    live.http.delete(f"{url}/lease")
    assert maintenance_round(live, later=1) == 6
    after = live.http.get(f"{url}/manifest", headers={"accept": "application/json"}).json()
    place = [c["name"] for c in after["columns"]].index("shard")
    assert len({row[place] for row in before["rows"]}) == 6
    assert len({row[place] for row in after["rows"]}) == 1, "the locations are looked up anew"
    assert after["digest"] == before["digest"]
    assert live.http.put(f"{url}/lease", json={}).status_code == 200
    assert live.post(sent[:1]) == [("duplicate", 1)]
    live = start()
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]


def test_a_half_dead_shard_is_rewritten_without_its_dead(start: Callable[..., Any]) -> None:
    live = start(compact_after=0.0, shard_grace=0.0)
    live.create(capacity={"trajectories": 4})
    sent = make(4)
    live.post(sent)
    live.flush()
    live.post(make_more())
    live.flush()
    service = live.service
    args = (
        service.settings,
        service.db,
        service.store,
        service.ingest,
        service.integrity,
        time.time() + 1,
    )
    assert compact(*args) == 1
    assert maintenance_round(live, later=1) == 1
    assert live.post(sent[:2]) == [("evicted", 1), ("evicted", 2)]
    assert [live.steps(t).digest for t in sent[2:]] == [t.digest for t in sent[2:]]


@pytest.mark.sql_worker
def test_shards_with_large_footers_are_rewritten_once_and_nothing_changes_for_readers(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of format 1: queries have no room for them."""
    live = start(compact_after=0.0, shard_grace=0.0)
    live.create()
    small, *large = (make(n, length=1, source="a" * 1000) for n in (5, 60, 60))
    monkeypatch.setattr(seal, "write_shard", write_shard_of_format_1)
    for sent in (small, *large):
        live.post(sent)
        live.flush()
    monkeypatch.undo()
    live.http.patch(f"/v1/trajectories/{large[0][0].id}", json={"partition": "protected"})
    sent = [*small, *large[0], *large[1]]
    files = {path.stem: path.read_bytes() for path in live.data.glob("shards/fifo/*")}
    snapshot = live.http.post("/v1/snapshots", json={"dataset": "d"}).json()
    question = {"sql": "select count(*), sum(t), avg(reward) from steps", "timeout": 30}
    answer = live.http.post("/v1/query", json=question).json()["rows"]
    s = live.service
    args = (s.settings, s.db, s.store, s.ingest, s.integrity, time.time() + 1)
    with monkeypatch.context() as patch:
        sizes = sorted(map(len, files.values()))
        patch.setattr(s.store, "free", lambda: s.settings.min_free + 2 * sizes[1])
        assert compact(*args) == 0, "the disk has no room"
        patch.setattr(s.store, "free", lambda: s.settings.min_free + 2 * sizes[2] + 1)
        assert (compact(*args), compact(*args)) == (1, 0), "the one that is replaced has the rest"
    assert (compact(*args), compact(*args)) == (1, 0)
    assert states(live) == ["live", *["retired"] * 2, *["live"] * 3], "one of what is protected"
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]
    assert live.http.post("/v1/query", json=question).json()["rows"] == answer
    for shard, content in files.items():
        assert live.http.get(f"/v1/shards/{shard}").content == content, "the snapshot holds it"
    live.http.delete(f"/v1/snapshots/{snapshot['id']}/lease")
    assert maintenance_round(live, later=1) == 2
    live = start()
    assert live.post(sent) == [("duplicate", seq) for seq in range(1, len(sent) + 1)]
    live.service.close()
    assert fsck.check(live.data, deep=True).clean


def test_protecting_and_demoting_move_the_totals_and_leave_an_audit_row(live: Any) -> None:
    """fifo → protected by an edit; back only by the admin's call."""
    live.create(capacity={"trajectories": 1})
    first, second, third = make(3)
    live.post([first])
    url = f"/v1/trajectories/{first.id}"
    edited = live.http.patch(url, json={"partition": "protected", "tags": ["gold"], "notes": "!"})
    assert (edited.json()["partition"], edited.json()["tags"]) == ("protected", ["gold"])
    live.post([second, third])
    assert alive(live) == [1, 3]
    assert live.steps(first).digest == first.digest, "labels given later are not part of it"
    refused = live.http.patch(url, json={"partition": "fifo"})
    assert (refused.status_code, refused.json()["code"]) == (409, "protected")
    assert live.http.post(f"{url}/demote").status_code == 204, "fifo was full, it was the oldest"
    assert alive(live) == [3]
    with live.service.db.read() as c:
        demoted = audit.c.action == "demote"
        columns = (audit.c.who, audit.c.action, audit.c.subject)
        rows = c.execute(sa.select(*columns).where(demoted)).all()
    assert [tuple(row) for row in rows] == [("local", "demote", first.id)]


COLUMNS = ", ".join(f'"{column.name}"' for column in trajectories.c)


def test_the_database_itself_guards_what_is_protected(live: Any) -> None:
    """Even a bug in our SQL cannot: the transaction is aborted."""
    live.create()
    sent = make(1)
    live.post(sent, partition="protected")
    for statement in (
        "DELETE FROM trajectories",
        "UPDATE trajectories SET state = 'evicted'",
        "UPDATE trajectories SET partition = 'fifo'",
        f"REPLACE INTO trajectories ({COLUMNS}) SELECT {COLUMNS} FROM trajectories",
        "UPDATE segments SET state = 'consumed'",
    ):
        with pytest.raises(sa.exc.IntegrityError, match="never"), live.service.db.write() as c:
            c.execute(sa.text(statement))
        assert live.info(sent[0])["partition"] == "protected", statement


def test_fsck_finds_the_directory_clean_after_all_kinds_of_maintenance(
    start: Callable[..., Any], tmp_path: Any
) -> None:
    live = start(compact_after=0.0, shard_grace=0.0)
    live.create(capacity={"trajectories": 5})
    for i in range(8):
        live.post([make_trajectory(SPEC, length=3, seed=i)])
        if i % 2:
            live.flush()
        service = live.service
        later = time.time() + 1
        apply_retention(service.settings, service.db, service.store, service.db.uptime() + 1)
        parts = (service.db, service.store, service.ingest, service.integrity)
        compact(service.settings, *parts, later)
    data = live.data
    live.service.close()
    report = fsck.check(data, deep=True)
    assert report.problems == []
    assert report.checked["sealed"] >= 5


def test_the_database_itself_keeps_the_files_of_what_is_alive(live: Any) -> None:
    """Retention deletes what is retired: a wrong UPDATE must not retire a shard that is needed."""
    live.create()
    live.post(make(1), partition="protected")
    live.flush()
    for state in ("retired", "deleting", "deleted"):
        with pytest.raises(sa.exc.IntegrityError, match="never given up"):
            with live.service.db.write() as c:
                c.exec_driver_sql(f"UPDATE shards SET state = '{state}'")
    assert states(live) == ["live"]


@pytest.mark.sql_worker
def test_snapshots_that_nobody_comes_back_to_are_forgotten(start: Callable[..., Any]) -> None:
    """Not those that a run names, nor those leased lately; their files go too."""
    live = start(snapshot_days=1.0)
    live.create()
    live.post(make(1))
    ids = [live.http.post("/v1/snapshots", json={"dataset": "d"}).json()["id"] for _ in range(3)]
    run = {"name": "r", "kind": "train", "snapshots": [ids[0]]}
    assert live.http.post("/v1/runs", json=run).status_code == 201
    live.http.put(f"/v1/snapshots/{ids[1]}/lease", json={"holder": "late", "ttl": 86_400})
    for _ in range(2):
        maintenance_round(live, later=1.5 * 86_400)
    left = [item["id"] for item in live.http.get("/v1/snapshots").json()["items"]]
    assert left == [ids[1], ids[0]]
    assert len(list((live.data / "snapshots").iterdir())) == 2
    for _ in range(2):
        maintenance_round(live, later=4 * 86_400)
    left = [item["id"] for item in live.http.get("/v1/snapshots").json()["items"]]
    assert left == [ids[0]]
