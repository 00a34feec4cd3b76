"""An index of one time over a directory of another: nothing that either needs is deleted."""

from __future__ import annotations

import hashlib
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from server.backup.backup import back_up
from server.backup.target import Target
from server.fsck import main as fsck
from server.index.db import IndexUnusable
from server.index.index_file import read_index_mark, refuse_wrong_index
from server.main import db_main
from server.storage.index_mark import Mark, read_mark, write_mark
from stepwell.testing import make_spec, make_trajectory
from tests.server.core.conftest import serving

SPEC = make_spec(observation=3, action=2)
pytestmark = pytest.mark.sql_worker
FOLDERS = ("segments", "shards", "policies", "videos", "versions", "annotations", "descriptions")


def grow(live: Any, number: int) -> None:
    """Some of everything; call it with 1, 2, …"""
    if number == 1:
        live.create()
        live.run()
    for part in range(2):
        seed = 100 * number + 10 * part
        live.post([make_trajectory(SPEC, length=4 + i, seed=seed + i) for i in range(3)])
        live.flush()
    live.publish(number, f"policy {number}".encode() * 50).raise_for_status()
    points = {"points": [{"key": "loss", "step": number, "value": 0.5, "time": 1.0}]}
    live.http.post("/v1/runs/r/metrics", json=points).raise_for_status()
    live.put_video(live.evaluate(), b"GIF89a %d" % number).raise_for_status()
    live.http.post("/v1/datasets/d/versions", json={"name": f"v{number}"}).raise_for_status()
    chosen = live.listing()[-1]
    values = dict.fromkeys(("q", "v", "advantage", "weight"), [0.5] * chosen["length"])
    body = {
        "name": f"critic{number}",
        "policy": "r/1",
        "trajectories": [{"trajectory": chosen["id"], **values}],
    }
    live.http.post("/v1/datasets/d/annotations", json=body).raise_for_status()


def state(live: Any) -> dict[str, Any]:
    """Everything that was acknowledged, read back through the API; damage is an error."""
    http = live.http
    ids = sorted(one["id"] for one in live.listing(limit=1000))
    for one in ids:
        http.get(f"/v1/trajectories/{one}/steps").raise_for_status()
    policies = http.get("/v1/runs/r/policies").json()["items"]
    for policy in policies:
        got = http.get(f"/v1/runs/r/policies/{policy['version']}").raise_for_status()
        assert hashlib.sha256(got.content).hexdigest() == policy["sha256"]
    videos = []
    for evaluation in http.get("/v1/evaluations").json()["items"]:
        for video in http.get(f"/v1/evaluations/{evaluation['id']}/videos").json()["items"]:
            url = f"/v1/evaluations/{evaluation['id']}/videos/{video['seed']}"
            videos.append(http.get(url).raise_for_status().content)
    return {
        "ids": ids,
        "in steps": live.query("select count(distinct trajectory_id) from d.steps")["rows"],
        "policies": sorted((p["version"], p["sha256"]) for p in policies),
        "videos": sorted(videos),
        "versions": sorted(
            (v["name"], v["digest"], v["missing"])
            for v in http.get("/v1/datasets/d/versions").json()["items"]
        ),
        "annotations": sorted(
            a["name"] for a in http.get("/v1/datasets/d/annotations").json()["items"]
        ),
    }


def contents(data: Path) -> set[str]:
    """Hashes of all data files, wherever they are in the directory."""
    return {
        hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in (*FOLDERS, *(f"quarantine/{name}" for name in FOLDERS))
        for path in (data / folder).rglob("*")
        if path.is_file()
    }


Times = tuple[list[Path], list[dict[str, Any]]]
"""A directory at several times, and what it held."""


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Times:
    """At two times, each after a clean stop."""
    folder = tmp_path_factory.mktemp("times")
    found, states = [], []
    for number, name in ((1, "early"), (2, "late")):
        with serving(folder / "data", sql_workers=1, compact_after=0.0, shard_grace=0.0) as live:
            grow(live, number)
            if number == 2:
                live.service.maintenance.round()  # compacts: files of the early time are deleted
                live.service.maintenance.round()
            states.append(state(live))
        found.append(shutil.copytree(folder / "data", folder / name))
    return found, states


@pytest.fixture
def times(closed: Times, tmp_path: Path) -> tuple[Path, Path, list[dict[str, Any]]]:
    """The directory at two times, and what it held."""
    early, late = (shutil.copytree(path, tmp_path / path.name) for path in closed[0])
    return early, late, closed[1]


def pair(index: Path, files: Path, to: Path, *, mark: bool = True) -> Path:
    shutil.copytree(files, to)
    shutil.copy(index / "index.sqlite", to / "index.sqlite")
    if not mark:
        (to / "mark").unlink()
    return to


def test_an_older_index_is_refused_and_the_command_merges_it(
    times: Any, start: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    early, late, states = times
    data = pair(early, late, tmp_path / "pair")
    before = contents(data)
    with pytest.raises(IndexUnusable, match="older than the files.*fsck --rebuild"):
        start(data=data)
    assert contents(data) == before
    assert fsck.main(["--data", str(data)]) == 2
    assert f"fsck --rebuild --data {data}" in capsys.readouterr().err
    assert fsck.main(["--data", str(data), "--rebuild"]) == 0
    assert before <= contents(data)
    live = start(data=data)
    assert state(live) == states[1]
    (loss,) = live.http.get("/v1/runs/r/metrics").json()["series"]
    assert loss["steps"] == [1], "of the old index; the newer point was in no file"


def test_an_older_index_without_a_mark_deletes_nothing_and_the_command_merges_it(
    times: Any, start: Callable[..., Any], tmp_path: Path
) -> None:
    """As before the first start of this version, or with the mark removed by hand."""
    early, late, states = times
    data = pair(early, late, tmp_path / "pair", mark=False)
    before = contents(data)
    live = start(data=data)
    assert live.http.get("/healthz").is_success
    assert set(states[0]["ids"]) <= {one["id"] for one in live.listing(limit=1000)}
    health = live.http.get("/readyz").json()
    assert health["status"] == "degraded" and "quarantine" in health["detail"]
    live.service.maintenance.round()
    live.service.close()
    assert before <= contents(data)
    assert fsck.main(["--data", str(data), "--rebuild"]) == 0
    assert before <= contents(data)
    assert state(start(data=data)) == states[1]


def test_an_index_newer_than_its_files_finds_what_they_hold(
    times: Any, start: Callable[..., Any], tmp_path: Path
) -> None:
    """The shards of the early time were compacted since; the index names files that are gone."""
    early, late, states = times
    data = pair(late, early, tmp_path / "pair")
    before = contents(data)
    live = start(data=data)
    for one in states[0]["ids"]:
        live.http.get(f"/v1/trajectories/{one}/steps").raise_for_status()
    later = [one for one in states[1]["ids"] if one not in states[0]["ids"]]
    assert {live.http.get(f"/v1/trajectories/{one}/steps").status_code for one in later} == {410}
    live.flush()
    answer = live.query("select distinct trajectory_id from d.steps")
    assert sorted(row[0] for row in answer["rows"]) == states[0]["ids"]
    assert sum(one["trajectories"] for one in answer["excluded"]) == len(later)
    health = live.http.get("/readyz").json()
    assert health["status"] == "degraded"
    live.service.close()
    gone = before - contents(data)
    assert not gone or gone <= contents(early), "segments may have been sealed into new shards"
    problems = [p for p in fsck.check(data).problems if not p.note]
    assert problems and all(p.cure and "accept" not in p.cure for p in problems)


@pytest.mark.parametrize("mark", [True, False])
def test_an_empty_index_over_data_is_refused(
    times: Any, start: Callable[..., Any], tmp_path: Path, mark: bool
) -> None:
    _, late, states = times
    data = shutil.copytree(late, tmp_path / "empty")
    (data / "index.sqlite").write_bytes(b"")
    if not mark:
        (data / "mark").unlink()
    before = contents(data)
    with pytest.raises(IndexUnusable, match="is empty.*fsck --rebuild"):
        start(data=data)
    assert contents(data) == before
    assert fsck.main(["--data", str(data), "--rebuild"]) == 0
    assert before <= contents(data)
    assert state(start(data=data)) == states[1]


def test_an_index_that_was_copied_before_its_files_finds_them(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """The trajectories were in a segment then, and are in a shard of which it knows nothing."""
    live = start()
    grow(live, 1)
    sent = [make_trajectory(SPEC, length=5, seed=900 + i) for i in range(30)]
    live.post(sent)
    copied = tmp_path / "copy.sqlite"
    with (
        closing(sqlite3.connect(live.data / "index.sqlite")) as source,
        closing(sqlite3.connect(copied)) as made,
    ):
        source.backup(made)
    live.flush()
    expected = state(live)
    live.service.close()
    data = shutil.copytree(live.data, tmp_path / "restored")
    shutil.copy(copied, data / "index.sqlite")
    with pytest.raises(IndexUnusable, match="copied before them"):
        start(data=data)
    (data / "mark").unlink()
    assert fsck.check(data).clean, "the next start finds everything"
    assert state(start(data=data)) == expected


def test_marks_tell_an_index_from_another_directorys(
    times: Any, start: Callable[..., Any], tmp_path: Path
) -> None:
    early, _, _ = times
    other = start(data=tmp_path / "other")
    other.create()
    other.service.close()
    shutil.copy(tmp_path / "other" / "index.sqlite", early / "index.sqlite")
    with pytest.raises(IndexUnusable, match="another directory"):
        refuse_wrong_index(early, early / "index.sqlite")


def test_a_mark_is_never_ahead_of_its_index(start: Callable[..., Any]) -> None:
    live = start()
    live.create()
    for seed in range(3):
        live.post([make_trajectory(SPEC, length=3, seed=seed)])
        mark, index = read_mark(live.data), read_index_mark(live.data / "index.sqlite")
        assert mark is not None and index is not None
        assert (mark.store, mark.serial) == (index.store, index.serial)


def test_a_torn_mark_is_none(tmp_path: Path) -> None:
    write_mark(tmp_path, Mark(7, 123))
    assert read_mark(tmp_path) == Mark(7, 123)
    text = (tmp_path / "mark").read_text()
    for changed in (text.replace("123", "124"), text[:30], ""):
        (tmp_path / "mark").write_text(changed)
        assert read_mark(tmp_path) is None


def test_files_of_the_index_that_lie_under_another_name_are_adopted(
    start: Callable[..., Any],
) -> None:
    live = start()
    grow(live, 1)
    expected = state(live)
    live.service.close()
    for folder in ("policies", "videos", "versions", "annotations"):
        (path,) = (live.data / folder).iterdir()
        path.rename(path.with_name(f"found{path.suffix}"))
    again = start()
    assert state(again) == expected
    again.service.close()
    assert fsck.check(live.data, deep=True).problems == []


def test_deleted_files_do_not_come_back(start: Callable[..., Any]) -> None:
    """What the index gave up is deleted, also by the next start; it is not unknown."""
    from server.storage.hold import DeletionHold

    live = start()
    grow(live, 1)
    hold = DeletionHold(live.data)
    live.http.delete("/v1/runs/r").raise_for_status()
    live.http.delete("/v1/datasets/d/annotations?annotation=critic1").raise_for_status()
    assert len(list((live.data / "policies").iterdir())) == 1, "a backup may be reading it"
    live.service.maintenance.round()
    assert len(list((live.data / "annotations").iterdir())) == 1
    live.service.close()
    hold.close()
    again = start()
    for folder in ("policies", "annotations"):
        assert list((live.data / folder).iterdir()) == []
    assert not (live.data / "quarantine").exists()
    assert len(list((live.data / "descriptions").iterdir())) == 1, "the video's"
    assert again.http.get("/readyz").json()["status"] == "ok"


def test_a_damaged_file_beside_a_good_one_of_its_name_keeps_no_service_from_starting(
    start: Callable[..., Any],
) -> None:
    """The index names neither; the good one, in quarantine, cannot take the other's place."""
    live = start()
    grow(live, 1)
    count = len(live.listing())
    live.service.close()
    for shard in sorted((live.data / "shards").rglob("*.parquet")):
        aside = live.data / "quarantine" / shard.relative_to(live.data).parent
        aside.mkdir(parents=True, exist_ok=True)
        name = shard.name.replace("sh_", "sh_f")
        shutil.copy(shard, aside / name)
        shard.with_name(name).write_bytes(shard.read_bytes()[:-40])
        shard.unlink()
    again = start()
    assert len(again.listing()) == count
    assert again.http.get("/readyz").json()["status"] == "degraded"


# --- the log beside the index ---------------------------------------------------------------------


def checkpoint(live: Any) -> None:
    """SQLite copies the log into the file; the next transaction begins the log anew."""
    with closing(sqlite3.connect(live.data / "index.sqlite")) as plain:
        assert plain.execute("PRAGMA wal_checkpoint(FULL)").fetchone()[0] == 0


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Times:
    """At three times, each with a log of its own; and what it held at the last."""
    folder = tmp_path_factory.mktemp("logs")
    found = []
    with serving(folder / "data", sql_workers=1) as live:
        for number in (1, 2, 3):
            grow(live, number)
            checkpoint(live)
            sent = [make_trajectory(SPEC, length=4, seed=1000 * number + i) for i in range(3)]
            for one in sent:
                live.post([one])
            found.append(live.as_killed(folder / f"time{number}"))
        live.flush()  # it does so for `steps` anyway
        return found, [state(live)]


@pytest.fixture
def killed(crashed: Times, tmp_path: Path) -> tuple[list[Path], dict[str, Any]]:
    """The directory at three times, each with a log of its own; and what it held at the last."""
    return [shutil.copytree(path, tmp_path / path.name) for path in crashed[0]], crashed[1][0]


def test_an_index_with_its_own_log_is_no_other(killed: Any, start: Callable[..., Any]) -> None:
    times, expected = killed
    for data in times:
        refuse_wrong_index(data, data / "index.sqlite")
    live = start(data=times[2])
    live.flush()
    assert state(live) == expected


@pytest.mark.sample(2)
@pytest.mark.parametrize(("index", "log"), [(0, 1), (1, 2), (0, 2), (1, 0), (2, 0), (2, 1)])
def test_the_log_of_another_time_is_refused_and_the_command_recovers_everything(
    killed: Any,
    start: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    index: int,
    log: int,
) -> None:
    """SQLite would take the pages that both hold from one time, and the others from another."""
    times, expected = killed
    data = shutil.copytree(times[2], tmp_path / "pair")
    for time, suffix in ((index, ""), (log, "-wal")):
        shutil.copy(times[time] / f"index.sqlite{suffix}", data / f"index.sqlite{suffix}")
    (data / "index.sqlite-shm").unlink()
    before = contents(data)
    own = [(data / f"index.sqlite{suffix}").read_bytes() for suffix in ("", "-wal")]
    which = "(which is older)" if index < log else "(which is newer|cannot be applied)"
    with pytest.raises(IndexUnusable, match=f"sqlite-wal .*{which}.*fsck --rebuild"):
        start(data=data)
    for command in (fsck.main, lambda options: db_main(["upgrade", *options])):
        assert command(["--data", str(data)]) != 0
        assert f"fsck --rebuild --data {data}" in capsys.readouterr().err
    with closing(Target(tmp_path / "backup", create=True)) as target:
        with pytest.raises(IndexUnusable, match=r"fsck --rebuild"):
            back_up(data, target)
    assert [(data / f"index.sqlite{s}").read_bytes() for s in ("", "-wal")] == own
    assert contents(data) == before
    assert fsck.main(["--data", str(data), "--rebuild"]) == 0
    assert "changes that are only in index.sqlite-wal" in capsys.readouterr().out
    assert before <= contents(data)
    (kept,) = data.glob("index.sqlite.*.log")
    assert kept.read_bytes() == own[1]
    assert kept.with_suffix("").read_bytes() == own[0]
    live = start(data=data)
    live.flush()
    assert state(live) == expected
    (loss,) = live.http.get("/v1/runs/r/metrics").json()["series"]
    assert loss["steps"] == list(range(1, index + 2)), "of the index without the log"


def test_the_log_of_another_directory_is_refused(
    killed: Any, start: Callable[..., Any], tmp_path: Path
) -> None:
    times, _ = killed
    other = start(data=tmp_path / "other")
    grow(other, 1)
    shutil.copy(other.data / "index.sqlite-wal", times[0] / "index.sqlite-wal")
    (times[0] / "index.sqlite-shm").unlink()
    with pytest.raises(IndexUnusable, match=r"another directory.*fsck --rebuild"):
        refuse_wrong_index(times[0], times[0] / "index.sqlite")


def test_a_crash_while_the_log_is_copied_into_the_file_is_no_other_log(
    killed: Any, start: Callable[..., Any]
) -> None:
    """Some pages of the file are those of the log's end, whichever they are."""
    times, expected = killed
    data = times[2]
    old = (data / "index.sqlite").read_bytes()
    with closing(sqlite3.connect(data / "index.sqlite")) as plain:
        wal = (data / "index.sqlite-wal").read_bytes()
        plain.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    new = (data / "index.sqlite").read_bytes()
    old = old.ljust(len(new), b"\0")
    for seed in range(20):
        rng = random.Random(seed)
        pages = [rng.choice((old, new))[n : n + 4096] for n in range(0, len(new), 4096)]
        (data / "index.sqlite").write_bytes(b"".join(pages))
        (data / "index.sqlite-wal").write_bytes(wal)
        refuse_wrong_index(data, data / "index.sqlite")
    live = start(data=data)
    live.flush()
    assert state(live) == expected
