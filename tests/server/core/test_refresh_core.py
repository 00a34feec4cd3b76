"""A refresh looks at what changed alone, and finds what a look at everything finds."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sqlalchemy as sa

from benchmarks.snapshots import add, fill
from server.index.tables import shards
from server.index.tables import snapshots as table
from server.maintenance.compaction import compact
from server.maintenance.shard_deletion import apply_retention
from server.service import Service
from server.settings import Settings
from server.snapshots import manifests, selection, snapshot_cache
from server.storage.checksums import Source
from stepwell import manifest
from stepwell.messages import CreateSnapshot
from stepwell.testing import make_spec, make_trajectory, wait_until

SPEC = make_spec(observation=3, action=2)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few trajectories fill several."""
    for module in (manifest, selection):
        monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr("server.index.mirror.PIECE", 5)


def make(count: int, first: int, **options: Any) -> list[Any]:
    return [
        make_trajectory(SPEC, length=3 + i % 5, seed=first + i, **options) for i in range(count)
    ]


def create(live: Any, **body: Any) -> Any:
    return live.service.snapshots.create(CreateSnapshot.model_validate(body))


def rows(live: Any, snapshot: Any, since: str | None = None) -> pa.Table:
    url = f"/v1/snapshots/{snapshot.id}/manifest"
    response = live.http.get(url, params={} if since is None else {"since": since})
    assert response.status_code == 200, response.text
    return pa.ipc.open_stream(response.content).read_all()


def plain(found: pa.Table) -> list[Any]:
    return [found.schema.metadata[b"digest"], found.to_pylist()]


def who(found: pa.Table) -> list[Any]:
    """Without where it lies: an earlier snapshot may hold locations from before a compaction."""
    return plain(found.drop_columns(["shard", "traj_idx", "row_start"]))


def held(live: Any, snapshot: Any) -> int:
    with live.service.db.read() as c:
        return int(
            c.execute(sa.select(table.c.depth).where(table.c.id == snapshot.id)).scalar_one()
        )


@pytest.mark.sql_worker
def test_random_histories(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens between two looks: changes alone give what everything gives, and applied to
    the manifest of before they give the manifest of now."""
    live = start(compact_after=0.0, shard_grace=1e9)
    live.create("d", capacity={"trajectories": 20})
    live.create("e")
    rng, seed = random.Random(5), 0
    asked = 0
    every = snapshot_cache.SelectionRunner.all

    def counted(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return every(*args)

    monkeypatch.setattr(snapshot_cache.SelectionRunner, "all", counted)
    monkeypatch.setattr(snapshot_cache, "CATCH_UP_BEHIND", 1)
    select = "SELECT id, length AS weight FROM trajectories WHERE not list_contains(tags, 'no')"
    body = {
        "from": [{"select": select}, {"select": "SELECT id FROM trajectories WHERE length > 4"}]
    }
    live.post(make(9, 0), "d")
    last, before = create(live, **body), None
    before = rows(live, last)
    for step in range(25):
        service = live.service
        for _ in range(rng.randrange(3)):
            what = rng.choice(["post", "post", "label", "protect", "compact", "eval", "none"])
            seed += 10
            if what == "post":
                live.post(make(rng.randrange(1, 7), seed), rng.choice("de"))
            elif what == "eval":
                live.post(make(2, seed, purpose="eval"), "d")
                live.post(make(1, seed + 5, env='a "b",\n,c'), "e")
            elif what in ("label", "protect"):
                chosen = rng.choice(live.listing("d"))["id"]
                edit = {"tags": rng.choice([["no"], []])} if what == "label" else {}
                edit = edit or {"partition": "protected"}
                live.http.patch(f"/v1/trajectories/{chosen}", json=edit).raise_for_status()
            elif what == "compact":
                args = (service.settings, service.db, service.store, service.ingest)
                compact(*args, service.integrity, time.time() + 1)
                apply_retention(service.settings, service.db, service.store, service.db.uptime())
            if rng.random() < 0.5:
                service.snapshots.cache.catch_up()
        asked = 0
        now = create(live, **body, since=last.id)
        latest_like = create(live, **body)
        assert asked == 0, "the refresh looked at everything"
        with monkeypatch.context() as patch:
            patch.setattr(snapshot_cache.SnapshotCache, "latest_like", lambda *_: None)
            whole = create(live, **body)
        assert asked == len(body["from"]) - 1, "the whole was not looked at"
        assert who(rows(live, now)) == who(rows(live, whole)) == who(rows(live, latest_like)), step
        assert (latest_like.added, latest_like.removed) == (None, None)
        assert now.id == last.id or now.digest == whole.digest != last.digest
        if now.id != last.id:
            ids = [set(t["id"].to_pylist()) for t in (before, rows(live, now))]
            if ids[0] | ids[1] != ids[0] & ids[1]:
                assert now.added or now.removed
        changes = rows(live, now, since=last.id)
        before = manifest.apply(before, changes)
        assert plain(before) == plain(rows(live, now))
        last = now
    live = start(compact_after=0.0, shard_grace=1e9)  # nothing at hand: it comes from the files
    assert plain(rows(live, last)) == plain(before)


@pytest.mark.sql_worker
def test_a_whole_dataset_needs_no_question(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anything of another dataset come in with it."""
    live.create("d")
    live.create("e")
    live.post(make(5, 0), "d")
    first = create(live, dataset="d")
    live.post(make(3, 10), "e")
    live.post(make(3, 20), "d")
    with monkeypatch.context() as patch:
        patch.setattr(live.service.snapshots._finder, "_sql", None)
        second = create(live, dataset="d", since=first.id)
    assert (second.added, second.datasets) == (3, ["d"])
    assert plain(rows(live, second)) == plain(rows(live, create(live, dataset="d")))


@pytest.mark.sql_worker
def test_a_selection_in_use_is_followed(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changed is read ahead of the next look, as soon as it is much; an error shows, and is
    no end."""
    monkeypatch.setattr(snapshot_cache, "CATCH_UP_BEHIND", 3)
    live.create("d")
    live.post(make(5, 0), "d")
    body = {"dataset": "d", "where": "length > 0"}
    first = create(live, **body)
    cache, looks = live.service.snapshots.cache, []
    really = snapshot_cache.SelectionRunner.changed

    def seen(*args: Any) -> Any:
        looks.append(args)
        return really(*args)

    monkeypatch.setattr(snapshot_cache.SelectionRunner, "changed", seen)
    live.post(make(2, 10), "d")
    live.service.ingest.flush()
    cache.catch_up()
    assert not looks, "two are read in no time when they are asked for"

    def broken(*_: Any) -> Any:
        raise KeyError("unexpected")

    live.post(make(1, 20), "d")
    live.service.ingest.flush()
    monkeypatch.setattr(snapshot_cache, "CATCH_UP_BEHIND", 1)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot_cache.SelectionRunner, "behind", broken)
        wait_until(lambda: "unexpected" in cache.trouble, what="the error is shown")
        assert "unexpected" in live.http.get("/readyz").text
    finder = live.service.snapshots._finder
    wait_until(lambda: not cache.trouble, what="the loop went on")
    wait_until(lambda: finder.behind(cache.get(first.id).found, 1) == 0, what="it caught up")

    changes = live.service.mirror.changes
    read, counts = changes.read, []

    def counted(*args: Any) -> Any:
        found = read(*args)
        counts.append(found.locations.num_rows)
        return found

    monkeypatch.setattr(changes, "read", counted)
    second = create(live, **body, since=first.id)
    assert (second.added, counts) == (3, [0])

    monkeypatch.setattr(snapshot_cache, "CATCH_UP_FOR", -1.0)
    cache.close()
    looks.clear()
    live.post(make(4, 30), "d")
    live.service.ingest.flush()
    cache.catch_up()
    assert not looks, "nobody has asked for it for a long time"


@pytest.mark.sql_worker
def test_who_is_left_far_behind_is_not_followed(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is asked again when the next snapshot is made, and not before."""
    live.create("d")
    live.post(make(5, 0), "d")
    body = {"dataset": "d", "where": "length > 0"}
    first = create(live, **body)
    monkeypatch.setattr(snapshot_cache, "CATCH_UP_BEHIND", 1)
    monkeypatch.setattr(snapshot_cache, "MOST_CHANGES", 2)
    cache = live.service.snapshots.cache
    live.post(make(3, 10), "d")
    live.service.ingest.flush()
    wait_until(lambda: cache.get(first.id).found is None, what="it is given up")
    second = create(live, **body, since=first.id)
    assert (second.added, second.trajectories) == (3, 8)
    assert cache.get(second.id).found is not None


@pytest.mark.sql_worker
def test_the_same_selection_again_shares_what_is_at_hand(live: Any) -> None:
    """As when ten learners begin with one dataset: it is looked at, kept and written once."""
    live.create("d")
    live.post(make(9, 0), "d")
    found = [create(live, dataset="d", where="length > 3") for _ in range(3)]
    assert len({one.id for one in found}) == 3 and len({one.digest for one in found}) == 1
    blocks = [live.service.snapshots.cache.get(one.id).blocks for one in found]
    assert all(a is b for a, b in zip(blocks[0].values(), blocks[2].values(), strict=True))
    assert [held(live, one) for one in found] == [0, 1, 2]
    assert who(rows(live, found[0])) == who(rows(live, found[2]))
    other = create(live, dataset="d", where="length > 4")
    assert held(live, other) == 0 and other.trajectories < found[0].trajectories


@pytest.mark.sql_worker
def test_a_growing_dataset_s_snapshots_take_the_room_of_a_few(start: Callable[..., Any]) -> None:
    """Files hold what changed; a chain of them begins anew when it has become heavy."""
    live = start()
    live.create()
    live.post(make(40, 0))
    made = [create(live, dataset="d")]
    for i in range(30):
        live.post(make(1, 100 + i))
        made.append(create(live, dataset="d", since=made[-1].id))
    depths = [held(live, snapshot) for snapshot in made]
    assert depths[:4] == [0, 1, 2, 3] and depths.count(0) < 6
    files = live.data / "snapshots"
    held_rows = sum(manifests.read(Source(path)).num_rows for path in files.iterdir())
    assert held_rows < sum(s.trajectories for s in made) / 3
    live = start()
    assert [rows(live, s).num_rows for s in made] == [s.trajectories for s in made]


@pytest.mark.sql_worker
def test_nothing_new_is_the_same_snapshot_and_no_other_is_made(live: Any) -> None:
    live.create()
    live.post(make(5, 0))
    first = create(live, dataset="d", holder="a")
    again = create(live, dataset="d", since=first.id, holder="b")
    assert (again.id, again.added, again.removed) == (first.id, 0, 0)
    live.http.delete(f"/v1/snapshots/{first.id}/lease", params={"holder": "a"})
    assert live.service.snapshots.get(first.id).leased_until is not None, "b holds it"
    assert len(list((live.data / "snapshots").iterdir())) == 1
    other = create(live, dataset="d", where="length > 3", since=first.id)
    assert other.removed == 1 and other.id != first.id


@pytest.mark.sql_worker
def test_a_shard_that_is_found_damaged_leaves_with_its_trajectories(live: Any) -> None:
    """Its rows did not change, only its state: everything is asked again."""
    live.create()
    live.post(make(4, 0))
    live.flush()
    live.post(make(4, 10))
    first = create(live, dataset="d")
    with live.service.db.write() as c:
        pk = c.execute(sa.select(sa.func.min(shards.c.pk))).scalar()
        c.execute(sa.update(shards).where(shards.c.pk == pk).values(state="quarantined"))
    second = create(live, dataset="d", since=first.id)
    assert (second.trajectories, second.removed) == (4, 4)
    with live.service.db.write() as c:
        c.execute(sa.update(shards).where(shards.c.pk == pk).values(state="live"))
    third = create(live, dataset="d", since=second.id)
    assert (third.trajectories, third.added) == (8, 4) and third.digest == first.digest


@pytest.mark.sql_worker
def test_a_deleted_dataset_is_noticed_by_the_refresh(live: Any) -> None:
    live.create("d")
    live.create("e")
    live.post(make(4, 0), "d")
    live.post(make(4, 10), "e")
    body = {"from": [{"select": "SELECT id FROM trajectories"}]}
    first = create(live, **body)
    live.http.delete("/v1/datasets/e").raise_for_status()
    second = create(live, **body, since=first.id)
    assert (second.trajectories, second.added, second.removed) == (4, 0, 4)


def test_ids_are_written_as_they_came() -> None:
    sent = [t.id for t in make(50, 0)]
    raw = manifest.id_bytes(pa.array(sent))
    assert manifest.id_texts(raw) == sent
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), 50, [None, pa.py_buffer(raw)])
    assert manifest.id_texts(manifest.id_bytes(column.slice(7, 5))) == sent[7:12]
    assert manifest.id_texts(np.zeros(0, "V16")) == []


def test_no_python_is_run_per_row(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen times the trajectories cost no more calls than the blocks they are in; a refresh,
    those of the blocks that changed. A deadline would ask how busy the machine is."""
    monkeypatch.undo()  # blocks of their real size

    def calls(count: int) -> tuple[int, int]:
        data = tmp_path / str(count)
        fill(data, count)
        service = Service(Settings(data=data, maintenance_interval=0, sql_workers=1))
        service.start()
        seen = 0

        def see(_frame: Any, _event: str, _arg: Any) -> None:
            nonlocal seen
            seen += 1

        def counted(body: dict[str, Any]) -> tuple[Any, int]:
            nonlocal seen
            seen = 0
            sys.setprofile(see)
            try:
                made = service.snapshots.create(CreateSnapshot.model_validate(body))
            finally:
                sys.setprofile(None)
            return made, seen

        body: dict[str, Any] = {"dataset": "d", "where": "length > 0"}
        try:
            service.mirror.state()
            first, _ = counted(body)
            first, create = counted(body)
            assert first.trajectories == count
            add(data, 500)
            second, refresh = counted({**body, "since": first.id})
            assert second.added == 500
            return create, refresh
        finally:
            service.close()

    few, many = calls(4000), calls(64_000)
    most = 60_000 // 8192 * 2000  # a call for every fourth row would be seen
    assert many[0] < few[0] + most and many[1] < few[1] + most, (few, many)
