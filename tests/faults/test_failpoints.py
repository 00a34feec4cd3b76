"""The server is killed at every place where it touches the disk; nothing acknowledged is lost."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.fsck import main as fsck
from server.index.db import IndexUnusable
from server.ingest import seal
from server.settings import Settings
from server.storage.checksums import Source
from server.storage.shards import table_in_footer
from stepwell.codec import encode
from stepwell.errors import Gone, ServiceUnreachable
from stepwell.messages import ARROW
from stepwell.testing import make_trajectory, wait_until
from tests.conftest import ServiceProcess
from tests.failpoints import failpoints_of
from tests.faults.conftest import KEPT, RING, SHOWN, SPEC, VIDEO, run_command
from tests.index_file import damage_rows
from tests.shard_reading import write_shard_of_format_1

ON_DAMAGE = (
    *("quarantine.before_commit", "quarantine.after_commit"),
    *("policy.after_replace", "video.after_replace"),
)
"""Reached only where a file is damaged."""
ON_MISSING = ("adopt.before_commit", "adopt.after_commit", "unknown.after_move")
"""Reached only where files are missing or unknown."""
ON_COPY = tuple(n for n in failpoints_of("server") if n.split(".")[0] in ("backup", "restore"))
"""Of the commands; test_backup.py."""
ON_REBUILD = tuple(name for name in failpoints_of("server") if name.startswith("rebuild."))
ON_START = tuple(
    name
    for name in failpoints_of("server")
    if name.split(".")[0] in ("clean", "repair", "schema", "wal")
)
"""Of a start that looks for damage of the index, and of a stop."""


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "name",
    sorted(
        {*failpoints_of("server")} - {*ON_DAMAGE, *ON_REBUILD, *ON_MISSING, *ON_COPY, *ON_START}
    ),
)
def test_dying_at_a_failpoint_loses_nothing_and_doubles_nothing(
    name: str,
    start_service: Callable[..., Any],
    traffic: Callable[[Any], Any],
    reopen: Callable[[Path, Any], None],
    ledger: Any,
    eager: dict[str, str],
) -> None:
    """Live traffic until it dies there; the index may then need a start, but never a repair."""
    service = start_service(env={**eager, "STEPWELL_FAILPOINT": name})
    assert traffic(service).until_death(), f"nothing in the traffic passes {name}"
    assert service.wait_exit() == -9, service.tail()
    died = fsck.check(service.data, deep=True)
    assert [f for f in died.problems if not f.note] == []
    reopen(service.data, ledger)
    restarted = fsck.check(service.data, deep=True)
    assert [f for f in restarted.problems if not f.where.startswith("quarantine/")] == []
    assert restarted.clean, "what is in quarantine holds nothing that the index misses"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [n for n in failpoints_of("server") if n.startswith("compact.")])
def test_dying_while_shards_of_format_1_are_rewritten_leaves_each_trajectory_once(
    name: str,
    tmp_path: Path,
    reopen: Callable[[Path, Any], None],
    ledger: Any,
    eager: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = [make_trajectory(SPEC, length=1, seed=i, source="a" * 1000) for i in range(60)]
    settings = Settings(data=tmp_path / "data", sql_workers=0, maintenance_interval=0)
    monkeypatch.setattr(seal, "write_shard", write_shard_of_format_1)
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as app:
        for dataset in (KEPT, RING):
            body = {"name": dataset, "spec": SPEC.to_json()}
            app.post("/v1/datasets", json=body).raise_for_status()
        url = f"/v1/datasets/{KEPT}/trajectories"
        posted = app.post(url, content=encode(sent, SPEC), headers={"content-type": ARROW})
        posted.raise_for_status()
    ledger.kept = {t.id: t.digest for t in sent}
    (old,) = settings.data.glob("shards/fifo/*")
    service = ServiceProcess(tmp_path, env={**eager, "STEPWELL_FAILPOINT": name})
    assert service.start(wait=False).wait_exit() == -9, service.tail()
    assert [f for f in fsck.check(settings.data, deep=True).problems if not f.note] == []
    reopen(settings.data, ledger)
    service.start(wait=False, env={"STEPWELL_FAILPOINT": ""})
    wait_until(lambda: not old.exists(), 100)
    assert service.stop() == 0, service.tail()
    (new,) = settings.data.glob("shards/fifo/*")
    assert not table_in_footer(Source(new))
    assert fsck.check(settings.data, deep=True).clean


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ON_DAMAGE)
def test_dying_while_damage_is_dealt_with_leaves_nothing_wrong(
    name: str,
    start_service: Callable[..., Any],
    traffic: Callable[[Any], Any],
    ledger: Any,
) -> None:
    """Whatever the index says of the damaged file by then, nothing wrong is read from it."""
    service = start_service(env={"STEPWELL_FAILPOINT": name, "STEPWELL_SQL_WORKERS": "1"})
    before = traffic(service)
    before.prepare()
    before.post("kept", 2)
    before.client.flush("kept")
    before.client.publish_policy("r", 1, b"weights" * 1000)
    evaluation = before.evaluate()
    before.put_video(evaluation)
    (policy,) = (service.data / "policies").iterdir()
    (video,) = (service.data / "videos").iterdir()
    (shard,) = (service.data / "shards" / "fifo").iterdir()
    for path in (policy, video, shard):
        content = bytearray(path.read_bytes())
        content[-100] ^= 4
        path.write_bytes(content)
    with pytest.raises(ServiceUnreachable):
        before.client.publish_policy("r", 1, b"weights" * 1000)
        before.put_video(evaluation)
        before.client.sql("select sum(reward) from kept.steps")
    assert service.wait_exit() == -9, service.tail()
    with service.start(env={"STEPWELL_FAILPOINT": ""}).client() as client:
        client.publish_policy("r", 1, b"weights" * 1000)
        assert client.download_policy("r", 1).data == b"weights" * 1000
        client.put_video(evaluation, 0, VIDEO, **SHOWN)
        assert client.video(evaluation, 0) == VIDEO
        answer = client.sql("select count(*) from kept.steps", timeout=30)
        assert (answer.one(), [one.trajectories for one in answer.excluded]) == (0, [2])
        for trajectory_id in ledger.kept:
            with pytest.raises(Gone):
                client.steps(trajectory_id)
    assert service.stop() == 0, service.tail()
    problems = [f.where for f in fsck.check(service.data).problems if not f.note]
    assert problems == [f"shards/fifo/{shard.name}"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*ON_START, "rebuild.before_rename", "rebuild.after_rename"])
def test_a_start_that_dies_over_a_damaged_index_leaves_one_that_the_next_start_mends(
    name: str,
    filled: Any,
    reopen: Callable[[Path, Any], None],
    ledger: Any,
) -> None:
    """What is damaged here can be put back: everything is served, by the next start, too."""
    service = filled
    files = data_files(service.data)
    dies = {"STEPWELL_FAILPOINT": name}
    if name in ("clean.before_rename", "clean.after_rename"):
        service.start(env=dies)
        assert service.stop() == -9, service.tail()
        files = data_files(service.data)  # the stop has sealed
    else:
        if name == "clean.after_unlink":
            assert service.start().stop() == 0
            files = data_files(service.data)
        damage_index(service.data / "index.sqlite", name)
        service.start(env=dies, wait=False)
        assert service.wait_exit() == -9, service.tail()
    assert files <= data_files(service.data)
    reopen(service.data, ledger)
    assert files - data_files(service.data) <= {n for n in files if n.startswith("segments/")}
    assert fsck.check(service.data, deep=True).clean


def damage_index(index: Path, name: str) -> None:
    """What leads a start to this failpoint."""
    if name in ("schema.before_rename", "schema.after_rename"):
        index.with_name("index.sqlite.schema").unlink()
    elif name == "schema.after_write":
        content = bytearray(index.read_bytes())
        for text in (b"CREATE TABLE counters", b"CREATE TABLE datasets"):
            content[content.index(text)] ^= 1
        index.write_bytes(content)
    elif name.startswith("wal."):
        log = index.with_name("index.sqlite-wal")
        content = bytearray(log.read_bytes())
        place = content.index(bytes(200), 32 + 24) + 50  # in an empty part of a page
        content[place] ^= 1
        content[place + 8] ^= 1  # two bits: which they are is not known
        log.write_bytes(content)
    elif not name.startswith("clean."):
        damage_rows(index, "UPDATE partition_stats SET steps = 1")


def data_files(data: Path) -> set[str]:
    folders = ("segments", "shards", "policies", "videos", "versions")
    found = (path for folder in folders for path in (data / folder).rglob("*"))
    return {str(path.relative_to(data)) for path in found if path.is_file()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ON_REBUILD)
def test_a_rebuild_that_dies_leaves_the_old_index_or_the_new_one(
    name: str,
    filled: Any,
    reopen: Callable[[Path, Any], None],
    ledger: Any,
) -> None:
    data = filled.data
    ledger.snapshots.clear()  # trainers create new ones
    assert (data / "index.sqlite-wal").stat().st_size, "the newest commits are in the WAL only"
    (data / "policies" / "pol_stray.bin").write_bytes(b"stray")
    (data / "videos" / "vid_stray.gif").write_bytes(b"GIF89a stray")

    assert rebuild(data, name) == -9
    assert [f for f in fsck.check(data, deep=True).problems if not f.note] == []
    reopen(data, ledger)
    assert rebuild(data) == 0
    assert fsck.check(data, deep=True).clean
    reopen(data, ledger)
    aside = data / "quarantine"
    assert (aside / "policies" / "pol_stray.bin").read_bytes() == b"stray"
    assert (aside / "videos" / "vid_stray.gif").read_bytes() == b"GIF89a stray"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ON_REBUILD)
def test_a_rebuild_of_an_index_with_the_log_of_another_may_die_too(
    name: str,
    start_service: Callable[..., Any],
    traffic: Callable[[Any], Any],
    reopen: Callable[[Path, Any], None],
    ledger: Any,
) -> None:
    service = start_service(env={"STEPWELL_SQL_WORKERS": "1"})
    data, before = service.data, traffic(service)
    index = data / "index.sqlite"
    before.prepare()
    for _ in range(3):
        before.post("kept", 2)
        before.client.flush("kept")
        with closing(sqlite3.connect(index)) as plain:
            plain.execute("PRAGMA wal_checkpoint(FULL)")
        if not data.with_name("old").exists():
            shutil.copy(index, data.with_name("old"))
    before.post("kept", 1)
    service.kill()
    shutil.copy(data.with_name("old"), index)
    with pytest.raises(IndexUnusable, match="which is older"):
        fsck.check(data)
    files = data_files(data)
    assert rebuild(data, name) == -9
    assert rebuild(data) == 0
    assert files <= data_files(data)
    reopen(data, ledger)
    assert fsck.check(data, deep=True).clean


def rebuild(data: Path, failpoint: str = "") -> int:
    return run_command("server.fsck.main", "--rebuild", "--data", data, failpoint=failpoint)[0]
