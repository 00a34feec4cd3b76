"""A mirror that goes on from a base says what one says that reads the whole index."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from server.index import mirror as module
from server.index import mirror_base
from server.index.db import Database
from server.index.mirror import Mirror
from server.index.tables import tombstones
from server.maintenance.compaction import compact
from server.maintenance.rebuild import rebuild
from server.maintenance.shard_deletion import apply_retention
from stepwell.testing import make_spec, make_trajectory
from tests.index_file import write_index
from tests.mirrors import content, fresh
from tests.server.core.conftest import Live, serving

SPEC = make_spec(observation=3, action=2)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    make_pieces_small(monkeypatch)


def make_pieces_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 4)
    monkeypatch.setattr(module, "RUNS_PER_PIECE", 2)


def make(count: int, first: int, **options: Any) -> list[Any]:
    return [
        make_trajectory(SPEC, length=3 + i % 3, seed=first + i, **options) for i in range(count)
    ]


@contextmanager
def killed(live: Any, folder: Path) -> Iterator[tuple[Mirror, bool]]:
    """The mirror of a service that starts on what a kill at this moment leaves on the disk, and
    whether it found a base. It is closed as a killed one is: not at all."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(live.data / "mirror", folder / "mirror")
    (folder / "mirror" / "unfinished").write_bytes(b"half of a pie")
    index = folder / "index.sqlite"
    with closing(sqlite3.connect(live.data / "index.sqlite")) as source:
        with closing(sqlite3.connect(index)) as target:
            source.backup(target)
    db = Database(index)
    mirror = Mirror(index, folder / "mirror", db)
    try:
        yield mirror, mirror._change_id >= 0
    finally:
        mirror._marks = None
        mirror.close()
        db.close()


def everything(live: Any, folder: Path) -> dict[str, list[Any]]:
    with fresh(live.data / "index.sqlite", folder) as mirror:
        return content(mirror)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_histories_with_kills(start: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    """Whatever happens between a base and a kill: no row is wrong, none is missing."""
    options = {"compact_after": 0.0, "shard_grace": 0.0, "mirror_interval": 0.0, "sql_workers": 1}
    live = start(**options)
    live.create("d", capacity={"trajectories": 12})
    live.create("e")
    rng, number, bases = random.Random(seed), 0, 0
    names = ["post", "post", "post", "flush", "label", "protect", "compact", "retention"]
    names += [
        "forget",
        "dataset",
        "metrics",
        "metrics",
        "run",
        "version",
        "save",
        "save",
        "restart",
    ]
    for step in range(30):
        service, what = live.service, rng.choice(names)
        number += 10
        if what == "post":
            live.post(make(rng.randrange(1, 6), number), rng.choice("de"))
        elif what == "flush":
            live.flush("d")
        elif what in ("label", "protect") and (rows := live.listing(rng.choice("de"))):
            edit = {"tags": ["x"]} if what == "label" else {"partition": "protected"}
            url = f"/v1/trajectories/{rng.choice(rows)['id']}"
            live.http.patch(url, json=edit).raise_for_status()
        elif what == "compact":
            args = (service.settings, service.db, service.store, service.ingest)
            compact(*args, service.integrity, time.time() + 1)
        elif what in ("retention", "forget"):
            settings = service.settings
            if what == "forget":
                settings = settings.model_copy(update={"tombstone_days": 0.0})
            apply_retention(settings, service.db, service.store, service.db.uptime() + 1)
        elif what == "dataset":
            live.http.delete("/v1/datasets/e?protected=true")
            if live.http.get("/v1/datasets/e").status_code == 404:
                live.create("e")
        elif what == "metrics":
            run = f"r{rng.randrange(4)}"
            live.http.put(f"/v1/runs/{run}", json={"kind": "train"})
            live.http.post("/v1/runs", json={"name": run, "kind": "train"})
            points = [{"key": "a", "step": number, "value": rng.random(), "time": 1.0}]
            live.http.post(f"/v1/runs/{run}/metrics", json={"points": points}).raise_for_status()
        elif what == "run":
            live.http.delete(f"/v1/runs/r{rng.randrange(4)}")
        elif what == "version":
            url = f"/v1/datasets/{rng.choice('de')}/versions"
            if live.http.post(url, json={"name": f"v{step}"}).status_code != 201:
                for one in live.http.get(url).json()["items"]:
                    live.http.delete(f"{url}/{one['name']}").raise_for_status()
        elif what == "save":
            service.mirror.save()
        elif what == "restart":
            live = start(**options)
        if rng.random() < 0.3:
            live.service.mirror.state()
        if rng.random() < 0.5:
            wanted = everything(live, tmp_path / "fresh" / "mirror")
            with killed(live, tmp_path / "killed") as (mirror, found):
                bases += found
                assert content(mirror) == wanted, (seed, step, what)
    assert bases, "no kill left a base"


def test_a_restart_reads_what_has_changed_alone(start: Callable[..., Any]) -> None:
    live = start(mirror_interval=0.0)
    live.create()
    live.post(make(20, 0))
    live.flush()
    live.run()
    points = [{"key": "a", "step": 1, "value": 1.0, "time": 1.0}]
    live.http.post("/v1/runs/r/metrics", json={"points": points}).raise_for_status()
    live.service.mirror.state()
    live = start(mirror_interval=0.0)
    live.post(make(1, 100))
    asked: list[str] = []
    live.service.mirror._db.set_trace_callback(asked.append)
    state = live.service.mirror.state()
    live.service.mirror._db.set_trace_callback(None)
    read = [sql for sql in asked if "ORDER BY t.pk" in sql]
    assert len(read) == 1 and "BETWEEN 20 AND 23" in read[0], "the piece of the new one"
    assert not [sql for sql in asked if "FROM metrics AS m" in sql and "m.value" in sql]
    assert len(state.tables["trajectories"]) == 6 and len(state.tables["metrics"]) == 1


def with_base(live: Live) -> Live:
    """A running service with a base of ten trajectories."""
    live.create()
    live.post(make(10, 0))
    live.flush()
    live.service.mirror.save()
    return live


@pytest.fixture
def based(start: Callable[..., Any]) -> Live:
    return with_base(start(mirror_interval=0.0))


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Any]]:
    """Such a service, and what its mirror must say."""
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        make_pieces_small(patch)
        live = with_base(stack.enter_context(serving(folder / "data", mirror_interval=0.0)))
        yield live, everything(live, folder / "fresh" / "mirror")


def test_a_base_is_of_one_state_of_one_index(based: Any, tmp_path: Path) -> None:
    """An index put back from a backup goes another way, up to the same numbers and beyond."""
    index = based.data / "index.sqlite"
    with (
        closing(sqlite3.connect(index)) as source,
        closing(sqlite3.connect(tmp_path / "backup")) as target,
    ):
        source.backup(target)
    with killed(based, tmp_path / "same") as (mirror, found):
        assert found and len(content(mirror)["trajectories"]) == 10
    based.post(make(3, 50))
    based.service.mirror.save()  # the backup holds the mark of an older base
    with write_index(tmp_path / "backup") as c:
        for _ in range(20):
            c.execute("UPDATE counters SET value = value + 1 WHERE name = 'change_id'")
    folder = tmp_path / "restored"
    shutil.copytree(based.data / "mirror", folder / "mirror")
    shutil.copy(tmp_path / "backup", folder / "index.sqlite")
    with fresh(folder / "index.sqlite", folder / "other") as wanted:
        db = Database(folder / "index.sqlite")
        mirror = Mirror(folder / "index.sqlite", folder / "mirror", db)
        assert mirror._change_id == -1, "the base of another history was taken"
        assert content(mirror) == content(wanted)
        mirror.close()
        db.close()


def test_a_rebuilt_index_has_no_base(start: Callable[..., Any], based: Any) -> None:
    data = based.data
    based.http.__exit__(None, None, None)
    assert (data / "mirror" / mirror_base.NAME).exists()
    rebuild(data)
    db = Database(data / "index.sqlite")
    mirror = Mirror(data / "index.sqlite", data / "mirror", db)
    assert mirror._change_id == -1 and not list((data / "mirror").iterdir())
    assert len(content(mirror)["trajectories"]) == 10
    mirror.close()
    db.close()


def resealed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    _, _, text = path.read_bytes().partition(b"\n")
    found = json.loads(text)
    change(found)
    text = json.dumps(found).encode()
    path.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def escape(found: dict[str, Any]) -> None:
    name = next(iter(found["files"]))
    found["files"]["mirror/../index.sqlite"] = found["files"].pop(name)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"epoch": 0', b'"epoch": 1')),
        lambda path: path.unlink(),
        lambda path: next(path.parent.glob("traj*")).unlink(),
        lambda path: next(path.parent.glob("loc*")).write_bytes(b"x"),
        lambda path: resealed(path, lambda found: found.update(layout="other")),
        lambda path: resealed(path, lambda found: found.update(revision="0001")),
        lambda path: resealed(path, lambda found: found.update(change_id=10**6)),
        lambda path: resealed(path, lambda found: found.update(mark=found["mark"] ^ 1)),
        lambda path: resealed(path, lambda found: found["pieces"].pop("metrics")),
        lambda path: resealed(path, lambda found: found.update(pieces=7)),
        lambda path: resealed(path, escape),
    ],
)
def test_what_does_not_fit_is_no_base(
    unchanged: tuple[Live, Any], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    (based, wanted), copy = unchanged, tmp_path / "damaged"
    shutil.copytree(based.data / "mirror", copy / "mirror")
    damage(copy / "mirror" / mirror_base.NAME)
    db = Database(based.data / "index.sqlite")
    mirror = Mirror(based.data / "index.sqlite", copy / "mirror", db)
    mirror._marks = None
    assert mirror._change_id == -1
    assert content(mirror) == wanted
    mirror.close()
    db.close()


def test_a_damaged_piece_of_a_base_is_written_again(start: Callable[..., Any], based: Any) -> None:
    data = based.data
    based.http.__exit__(None, None, None)
    for pattern in ("traj*", "loc*"):
        path = sorted((data / "mirror").glob(pattern))[0]
        changed = bytearray(path.read_bytes())
        changed[len(changed) // 2] ^= 1
        path.write_bytes(changed)
    live = start(mirror_interval=0.0, sql_workers=1)
    answer = live.query("select count(*), count(digest), count(id) from trajectories")
    assert answer["rows"] == [[10, 10, 10]]
    made = live.http.post("/v1/snapshots", json={"dataset": "d"}).raise_for_status().json()
    assert made["trajectories"] == 10


def test_removals_that_no_tombstone_tells_of_are_seen(based: Any) -> None:
    """A tombstone is kept for days; what is older than it, reads everything."""
    service = based.service
    mirror = service.mirror
    state = mirror.state()
    based.http.patch("/v1/datasets/d", json={"capacity": {"trajectories": 2}}).raise_for_status()
    settings = service.settings.model_copy(update={"tombstone_days": 0.0, "shard_grace": 0.0})
    based.post(make(1, 90))
    based.flush()
    for more in (1, 2, 3):
        args = (service.settings.model_copy(update={"compact_after": 0.0}), service.db)
        compact(*args, service.store, service.ingest, service.integrity, time.time() + 1)
        apply_retention(settings, service.db, service.store, service.db.uptime() + more)
    with service.db.read() as c:
        assert c.execute(sa.select(sa.func.count()).select_from(tombstones)).scalar() == 0
    assert mirror.changes.count(state.change_id, state.epoch, 100) is None
    assert mirror.changes.read(state.change_id, state.epoch, []) is None
    assert len(content(mirror)["trajectories"]) == 2


def test_files_of_the_base_stay_until_the_next_one(
    based: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_SECONDS", -1.0)
    mirror = based.service.mirror
    kept = set(mirror._kept)
    for seed in (60, 70):
        based.post(make(1, seed))
        mirror.state()
        assert {f"mirror/{p.name}" for p in (based.data / "mirror").iterdir()} >= kept
    mirror.save()
    mirror.state()
    left = {f"mirror/{p.name}" for p in (based.data / "mirror").iterdir()}
    assert mirror._kept <= left and not kept <= left


def test_nothing_is_saved_when_nothing_changed(based: Any) -> None:
    path = based.data / "mirror" / mirror_base.NAME
    before = path.read_bytes()
    based.service.mirror.save()
    assert path.read_bytes() == before
    based.post(make(1, 60))
    based.service.mirror.save()
    assert path.read_bytes() != before
