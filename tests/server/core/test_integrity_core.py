"""What is read is what was written, or it is refused: block by block, whoever reads."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from server.maintenance import scrub as scrubbing
from server.maintenance.rebuild import rebuild
from server.maintenance.scrub import Scrubber
from server.sql.checked_files import CheckedFileSystem
from server.storage.checksums import (
    BLOCK,
    STEP,
    CheckedFile,
    Checksummer,
    Corrupt,
    checksums_of,
    examine,
)
from server.storage.store import Store
from stepwell.codec import encode
from stepwell.messages import ARROW
from stepwell.testing import make_spec, make_trajectory, wait_until
from stepwell.trajectory import Trajectory
from tests.server.core.conftest import flip, serving

SPEC = make_spec(observation=3, action=2)


def sealed(live: Any, count: int = 2, length: int = 20) -> tuple[list[Trajectory], list[Path]]:
    """So many trajectories, each in a shard of its own, oldest first."""
    live.create()
    sent = [make_trajectory(SPEC, length=length, seed=i) for i in range(count)]
    for trajectory in sent:
        live.post([trajectory])
        live.flush()
    return sent, sorted((live.data / "shards" / "fifo").iterdir())


# --- the checksums themselves ---------------------------------------------------------------------


def test_checksums_do_not_depend_on_the_pieces_that_pass_by(tmp_path: Path) -> None:
    rng = random.Random(1)
    for size in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 77, 2 * STEP + 3):
        data = rng.randbytes(size)
        summer, at = Checksummer(), 0
        while at < size:
            step = rng.randrange(1, 3 * BLOCK)
            summer.update(data[at : at + step])
            at += step
        (tmp_path / "f").write_bytes(data)
        assert summer.result() == checksums_of(data) == examine(tmp_path / "f").checksums
        assert len(checksums_of(data)) == 4 * -(-size // BLOCK)


def test_any_read_gives_the_right_bytes_or_none(tmp_path: Path) -> None:
    rng = random.Random(2)
    data = rng.randbytes(4 * BLOCK + 100)
    path = tmp_path / "f"
    path.write_bytes(data)
    with CheckedFile(str(path), len(data), checksums_of(data)) as file:
        for _ in range(200):
            start, count = rng.randrange(len(data) + 10), rng.randrange(2 * BLOCK)
            assert file.read_at(start, count) == data[start : start + count]
        assert (file.seek(-7, os.SEEK_END), file.read()) == (len(data) - 7, data[-7:])
        flip(path, 2 * BLOCK + 5)
        assert file.read_at(0, 2 * BLOCK) == data[: 2 * BLOCK], "the others are still good"
        for start, count in ((2 * BLOCK, 1), (3 * BLOCK - 1, 1), (0, len(data))):
            with pytest.raises(Corrupt):
                file.read_at(start, count)
    for size in (len(data) - 1, BLOCK, 0, len(data) + 1):
        path.write_bytes((data + b"x")[:size])
        with pytest.raises(Corrupt):
            CheckedFile(str(path), len(data), checksums_of(data)).read()
        with pytest.raises(Corrupt):
            CheckedFile(str(path), -1, checksums_of(data)).read()


def test_threads_that_share_a_file_do_not_share_its_position(tmp_path: Path) -> None:
    """DuckDB seeks, then reads; between the two another thread may do the same."""
    data = random.Random(3).randbytes(8 * BLOCK)
    (tmp_path / "f").write_bytes(data)
    with CheckedFile(str(tmp_path / "f"), len(data), checksums_of(data)) as file:
        file.seek(5 * BLOCK)
        other = threading.Thread(target=lambda: (file.seek(BLOCK), file.read(10)))
        other.start()
        other.join()
        assert file.read(3) == data[5 * BLOCK : 5 * BLOCK + 3]


def test_a_worker_opens_only_what_it_knows_and_only_for_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "secret").write_bytes(b"secret")
    files = CheckedFileSystem()
    files.learn({"a": base64.b64encode(checksums_of(b"content")).decode()})
    assert files.open("stored://a").read() == b"content"
    for path, mode in (("stored://secret", "rb"), ("stored://../etc/passwd", "rb"), ("a", "wb")):
        with pytest.raises(PermissionError):
            files.open(path, mode)
    assert files.damaged == set()
    files.learn({}, forget=["a"])
    with pytest.raises(PermissionError):
        files.open("stored://a")


# --- who is told ----------------------------------------------------------------------------------


@pytest.mark.sql_worker
def test_every_answer_says_what_it_lacks(live: Any) -> None:
    sent, (bad, good) = sealed(live)
    flip(bad, 200)
    lost = {"dataset": "d", "file": bad.stem, "trajectories": 1}
    question = {"sql": "select distinct trajectory_id from steps", "timeout": 30}
    answer = live.http.post("/v1/query", json=question)
    assert answer.json()["rows"] == [[sent[1].id]], answer.text
    assert answer.json()["excluded"] == [lost]
    arrow = live.http.post("/v1/query", json=question, headers={"accept": ARROW})
    metadata = pa.ipc.open_stream(arrow.content).read_all().schema.metadata
    assert json.loads(metadata[b"excluded"]) == [lost]
    # Of `trajectories` nothing is missing, so nothing is said.
    every = live.query("select count(*) from trajectories")
    assert (every["rows"], every["excluded"]) == ([[2]], [])
    assert live.dataset()["excluded"] == [lost]
    made = live.http.post("/v1/snapshots", json={"dataset": "d"}).json()
    assert (made["trajectories"], made["excluded"]) == (1, [lost])
    again = live.http.get(f"/v1/snapshots/{made['id']}").json()
    assert again["excluded"] == [lost]
    assert bad.stem in live.http.get("/readyz").json()["detail"]
    assert "stepwell_quarantined_shards 1.0" in live.http.get("/metrics").text
    assert live.http.get(f"/v1/shards/{good.stem}").content == good.read_bytes()


def test_a_range_is_checked_block_by_block(live: Any) -> None:
    _, (file,) = sealed(live, 1, length=20_000)
    content = file.read_bytes()
    assert len(content) > 4 * BLOCK
    flip(file, 3 * BLOCK + 1)
    whole = {"range": f"bytes=0-{BLOCK - 1}"}
    assert live.http.get(f"/v1/shards/{file.stem}", headers=whole).content == content[:BLOCK]
    touched = {"range": f"bytes={2 * BLOCK}-{3 * BLOCK}"}
    for _ in range(2):
        response = live.http.get(f"/v1/shards/{file.stem}", headers=touched)
        assert (response.status_code, response.json()["code"]) == (410, "damaged")


@pytest.mark.sql_worker
def test_a_damaged_piece_of_the_mirror_is_made_anew(live: Any) -> None:
    sealed(live)
    ask = "select count(*), bit_xor(hash(t)) from trajectories as t"
    truth = live.query(ask)["rows"]
    for _ in range(3):
        (piece,) = (live.data / "mirror").glob("trajectories_*.parquet")
        flip(piece, piece.stat().st_size // 2)
        assert live.query(ask)["rows"] == truth
        live.service.mirror._garbage.clear()
        piece.unlink()
    assert live.http.get("/readyz").json()["status"] == "ok"


@pytest.mark.sql_worker
def test_checksums_that_are_damaged_themselves_condemn_no_good_file(live: Any) -> None:
    sent, (first, _) = sealed(live)
    with live.service.db.write() as connection:
        connection.exec_driver_sql(
            "UPDATE shards SET checksums = x'00000000' WHERE id = ?", (first.stem,)
        )
    assert live.query("select count(distinct trajectory_id) from steps")["rows"] == [[2]]
    assert live.steps(sent[0]).digest == sent[0].digest
    assert live.http.get(f"/v1/shards/{first.stem}").content == first.read_bytes()
    assert live.service.integrity.quarantined == set()


def test_a_damaged_policy_is_refused_and_publishing_it_again_cures_it(live: Any) -> None:
    live.run()
    url, data = "/v1/runs/r/policies/1", random.Random(4).randbytes(300_000)
    assert live.publish(1, data).status_code == 201
    (file,) = (live.data / "policies").iterdir()
    for spoil in (lambda path: flip(path, 250_000), Path.unlink):
        spoil(file)
        response = live.http.get(url)
        assert (response.status_code, response.json()["code"]) == (410, "damaged")
        assert file.name in live.http.get("/readyz").json()["detail"]
        assert live.publish(1, data).status_code == 200
        assert live.http.get(url).content == data
        assert live.http.get("/readyz").json()["status"] == "ok"
        (file,) = (live.data / "policies").iterdir()
    assert live.publish(1, data).status_code == 200
    assert [file] == list((live.data / "policies").iterdir()), "a good one is not replaced"


def test_a_damaged_video_is_refused_and_storing_it_again_cures_it(
    start: Callable[..., Any],
) -> None:
    """The scrub finds it, too, and goes on."""
    live = start(scrub_rate=1 << 40)
    live.service.scrub.close()
    url, data = live.evaluate(), b"GIF89a" + bytes(300_000)
    assert live.put_video(url, data).status_code == 201
    (file,) = (live.data / "videos").iterdir()
    flip(file, 250_000)
    response = live.http.get(url, headers={"range": "bytes=249000-251000"})
    assert (response.status_code, response.json()["code"]) == (410, "damaged")
    s = live.service
    s.integrity.damaged_files.clear()
    with s.db.write() as connection:
        connection.exec_driver_sql("UPDATE videos SET verified_at = 1")
    assert Scrubber(s.settings, s.db, s.integrity, s.telemetry).run_once(time.time()) == 1
    assert s.integrity.damaged_files == {f"videos/{file.name}"}
    assert file.name in live.http.get("/readyz").json()["detail"]
    assert live.put_video(url, data).status_code == 200
    assert live.http.get(url).content == data
    assert live.http.get("/readyz").json()["status"] == "ok"
    assert len(list((live.data / "videos").iterdir())) == 1


@pytest.mark.sql_worker
def test_a_damaged_snapshot_is_refused_by_name(live: Any) -> None:
    sealed(live)
    made = live.http.post("/v1/snapshots", json={"dataset": "d"}).json()
    (file,) = (live.data / "snapshots").iterdir()
    flip(file, file.stat().st_size // 2)
    live.service.snapshots.cache.clear()  # from memory it would be right
    response = live.http.get(f"/v1/snapshots/{made['id']}/manifest")
    assert (response.status_code, response.json()["code"]) == (410, "damaged")
    assert file.name in response.json()["detail"]
    fresh = live.http.post("/v1/snapshots", json={"dataset": "d"})
    assert fresh.status_code == 201, "a new one can be made"


# --- the scrub ------------------------------------------------------------------------------------


def due(live: Any) -> None:
    """Everything was verified long ago, the first shard longest."""
    with live.service.db.write() as connection:
        connection.exec_driver_sql("UPDATE shards SET verified_at = pk")


def test_the_scrub_finds_damage_that_nobody_reads(start: Callable[..., Any]) -> None:
    live = start(scrub_rate=1 << 40)
    _, (first, second) = sealed(live)
    live.service.scrub.close()
    flip(second, 100)
    s = live.service
    scrub = Scrubber(s.settings, s.db, s.integrity, s.telemetry)
    assert scrub.run_once(time.time()) == 0, "verified when it was written"
    due(live)
    assert "stepwell_scrub_oldest_seconds 1" in live.http.get("/metrics").text
    assert scrub.run_once(time.time()) == 2
    assert live.service.integrity.quarantined == {second.stem}
    metrics = live.http.get("/metrics").text
    assert 'stepwell_scrub_files_total{result="damaged"} 1.0' in metrics
    assert f"stepwell_scrub_bytes_total {first.stat().st_size + second.stat().st_size}.0" in metrics
    assert scrub.run_once(time.time()) == 0


def test_the_scrub_runs_by_itself_and_goes_on_after_a_restart(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubbing, "LOOK_EVERY", 0.05)
    live = start()
    sealed(live, 3)
    due(live)

    def verified() -> int:
        with live.service.db.read() as connection:
            sql = "SELECT count(*) FROM shards WHERE verified_at > 1000"
            return int(connection.exec_driver_sql(sql).scalar())

    # A small file takes as long as a step: stopped between the first and the last.
    live = start(scrub_rate=STEP)
    wait_until(lambda: verified() >= 1, what="the first file")
    live = start()
    before = verified()
    assert before >= 1
    live = start(scrub_rate=STEP)
    wait_until(lambda: verified() == 3, what="the rest")
    with live.service.db.read() as connection:
        order = "SELECT pk FROM shards ORDER BY verified_at"
        assert connection.exec_driver_sql(order).scalars().all() == [1, 2, 3]


def test_a_large_file_neither_blocks_the_scrub_nor_its_end(start: Callable[..., Any]) -> None:
    live = start()
    live.run()
    live.publish(1, bytes(8 * STEP))
    with live.service.db.write() as connection:
        connection.exec_driver_sql("UPDATE policies SET verified_at = 1")
    service = live.service
    slow = service.settings.model_copy(update={"scrub_rate": STEP // 60})  # a minute a step
    scrub = Scrubber(slow, service.db, service.integrity, service.telemetry)
    scrub.start()
    wait_until(lambda: service.telemetry.scrub_bytes._value.get() >= STEP, what="the first step")
    began = time.monotonic()
    scrub.close()
    assert time.monotonic() - began < 30, "it does not wait for the file, nor for the step"
    with service.db.read() as connection:
        sql = "SELECT verified_at FROM policies"
        assert connection.exec_driver_sql(sql).scalar() == 1, "it was not read to its end"


# --- what other ends left behind ------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trajectory]]:
    """The directory of a stopped service with two shards, and what they hold."""
    data = tmp_path_factory.mktemp("stopped") / "data"
    with serving(data) as live:
        sent, _ = sealed(live)
    return data, sent


@pytest.mark.sample(5)
@pytest.mark.parametrize("place", range(100, 4000, 300))
def test_a_rebuild_takes_in_nothing_that_is_damaged(
    stopped: tuple[Path, list[Trajectory]], tmp_path: Path, start: Callable[..., Any], place: int
) -> None:
    """Of a lost index nothing says any more what was written, but the files themselves."""
    sent, data = stopped[1], shutil.copytree(stopped[0], tmp_path / "data")
    bad = min((data / "shards" / "fifo").iterdir())
    flip(bad, place * bad.stat().st_size // 4000)
    result = rebuild(data)
    live = start(sql_workers=0)
    here = {item["id"]: item["digest"] for item in live.listing()}
    assert here.items() <= {t.id: t.digest for t in sent}.items() and sent[1].id in here
    assert all(live.steps(t).digest == t.digest for t in sent if t.id in here)
    assert (sent[0].id in here) or result.unreadable == [bad.name]


def test_a_rebuild_names_a_damaged_record_and_takes_those_behind_it(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    live = start()
    live.create()
    sent = [make_trajectory(SPEC, length=20, seed=i) for i in range(4)]
    for trajectory in sent:
        live.post([trajectory])
    with live.service.db.read() as connection:
        sql = "SELECT segment_offset FROM trajectories ORDER BY seq"
        offsets = connection.exec_driver_sql(sql).scalars().all()
    for number, inside in enumerate((0, 60, 700)):  # the length word, the head, the body
        data = live.as_killed(tmp_path / f"copy{number}")
        (segment,) = (data / "segments").iterdir()
        flip(segment, offsets[1] + inside)
        result = rebuild(data)
        assert result.trajectories == 3
        assert result.unreadable == [f"{segment.name}: bytes {offsets[1]} to {offsets[2]}"]


# --- mutations that survived ----------------------------------------------------------------------


def test_every_name_is_made_durable_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename, a new file and a deletion are on the disk only once their folder is synced."""
    store = Store(tmp_path / "data")
    done: list[tuple[str, str]] = []
    really = {name: getattr(os, name) for name in ("fsync", "rename", "unlink")}

    def fsync(fd: int) -> None:
        done.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        really["fsync"](fd)

    def rename(source: Any, target: Any) -> None:
        done.append(("rename", str(target)))
        really["rename"](source, target)

    monkeypatch.setattr("server.storage.store.os.fsync", fsync)
    monkeypatch.setattr("server.storage.store.os.rename", rename)
    root = str((tmp_path / "data").resolve())
    stored = store.put("policies", "pol_x.bin", b"content")
    assert [what for what, _ in done] == ["fsync", "rename", "fsync"]
    assert done[0][1].startswith(f"{root}/tmp/"), "the content before the name"
    assert done[1] == ("rename", f"{root}/policies/{stored.name}")
    assert done[2] == ("fsync", f"{root}/policies"), "the name before anybody relies on it"
    done.clear()
    store.append_to("segments", "sg_x.seg").close()
    assert done == [("fsync", f"{root}/segments")]
    done.clear()
    assert store.delete("policies", "pol_x.bin")
    assert done == [("fsync", f"{root}/policies")]
    done.clear()
    Store(tmp_path / "fresh")
    synced = {Path(path).name for what, path in done if what == "fsync"}
    assert {"fresh", "shards"} <= synced and tmp_path.name in synced


@pytest.mark.parametrize("before", [0, 2])
def test_a_group_that_was_refused_does_not_come_back_after_a_crash(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Its records are in the segment, whole; its sender was told that nothing was stored."""
    live = start()
    live.create()
    good = [make_trajectory(SPEC, seed=i) for i in range(before)]
    if good:
        live.post(good)

    def fail(name: str) -> None:
        if name == "index.before_commit":
            raise RuntimeError("a defect")

    with live.service.ingest.sealer.lock:  # the sealer would remove the segment
        monkeypatch.setattr("server.ingest.commit.failpoint", fail)
        refused = make_trajectory(SPEC, seed=77)
        assert live.send(encode([refused], SPEC)).status_code == 500
        monkeypatch.undo()
        copy = live.as_killed(tmp_path / "copy")
    live = start(data=copy)
    assert [item["id"] for item in live.listing()] == [t.id for t in good]
    assert live.post([refused]) == [("stored", before + 1)]
