"""`stepwell backup` and `stepwell restore`: whole, verified, incremental, resumable."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.backup.backup import back_up
from server.backup.main import main as backup
from server.backup.main import restore_main as restore
from server.backup.target import Target
from server.fsck import main as fsck
from server.index import index_file
from server.index.db import IndexUnusable
from server.storage.hold import DeletionHold, deleting
from server.storage.index_mark import Mark
from server.storage.store import DirectoryInUse
from stepwell.errors import InvalidData
from stepwell.testing import make_spec, make_trajectory
from tests.server.core.test_index_and_files import contents, grow, state

pytestmark = pytest.mark.sql_worker
SPEC = make_spec(observation=3, action=2)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "backups"


def files(target: Path) -> dict[str, int]:
    """Files of the target's pool, and when they were written."""
    root = target / "files"
    return {str(p.relative_to(root)): p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file()}


def test_a_backup_of_a_running_service_holds_everything(
    start: Callable[..., Any], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = start()
    grow(live, 1)
    live.http.post("/v1/tokens", json={"name": "me", "scopes": ["admin"]}).raise_for_status()
    token = live.http.get("/v1/tokens").status_code
    assert token == 401, "from now on a token is needed"
    live.service.ingest.post  # noqa: B018
    assert backup([str(target), "--data", str(live.data)]) == 0
    assert "backup 2" in capsys.readouterr().out
    data = tmp_path / "restored"
    assert restore([str(target), "--data", str(data)]) == 0
    assert f"stepwell serve --data {data}" in capsys.readouterr().out
    assert contents(data) == contents(live.data)
    report = fsck.check(data, deep=True)
    assert report.problems == [] and report.checked["annotations"] == 1
    again = start(data=data)
    assert again.http.get("/v1/tokens").status_code == 401, "tokens are kept"


def test_the_index_of_a_running_service_is_read_and_never_mended(
    start: Callable[..., Any], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks damaged in its log is a write that is under way."""
    live = start()
    grow(live, 1)

    def mend(index: Path) -> str:
        assert index.parent != live.data, f"{index} is in use"
        return ""

    read = index_file.read_index_mark

    def then_it_goes_on(index: Path, **options: bool) -> Mark | None:
        found = read(index, **options)
        if index == live.data / "index.sqlite":
            live.service.db.save_uptime()
        return found

    monkeypatch.setattr(index_file, "read_index_mark", then_it_goes_on)
    with monkeypatch.context() as patch:
        patch.setattr(index_file, "mend", mend)
        with contextlib.closing(Target(target, create=True)) as backups:
            back_up(live.data, backups)
        with pytest.raises(DirectoryInUse):
            fsck.check(live.data)


def test_a_restored_service_answers_as_the_first_one(
    start: Callable[..., Any], target: Path, tmp_path: Path
) -> None:
    live = start()
    grow(live, 1)
    sent = [make_trajectory(SPEC, length=5, seed=900 + i) for i in range(7)]
    live.post(sent)  # in a segment
    expected = None
    assert backup([str(target), "--data", str(live.data)]) == 0
    live.flush()
    expected = state(live)
    assert restore([str(target), "--data", str(tmp_path / "restored")]) == 0
    again = start(data=tmp_path / "restored")
    again.flush()
    assert state(again) == expected
    assert again.post(sent) == [("duplicate", seq) for _, seq in live_items(again, sent)]


def live_items(live: Any, sent: list[Any]) -> list[tuple[str, int]]:
    return [("", live.info(one)["seq"]) for one in sent]


def test_the_next_backup_copies_new_files_only(
    start: Callable[..., Any], target: Path, tmp_path: Path
) -> None:
    live = start()
    grow(live, 1)
    assert backup([str(target), "--data", str(live.data)]) == 0
    first = files(target)
    grow(live, 2)
    expected = state(live)
    live.service.close()  # also of a stopped service
    assert backup([str(target), "--data", str(live.data), "--verify"]) == 0
    second = files(target)
    assert first.items() < second.items(), "none was written again"
    for at, versions in ((0, ["v1"]), (1, ["v1", "v2"])):
        made = sorted(p.name for p in (target / "backups").iterdir())[at]
        assert restore([str(target), "--data", str(tmp_path / made), "--at", made]) == 0
        again = start(data=tmp_path / made)
        assert [name for name, _, _ in state(again)["versions"]] == versions
    assert state(again) == expected


def test_deletions_wait_for_the_backup(start: Callable[..., Any]) -> None:
    live = start(compact_after=0.0, shard_grace=0.0)
    live.create()
    for seed in range(4):
        live.post([make_trajectory(SPEC, length=5, seed=seed)])
        live.flush()
    hold = DeletionHold(live.data)
    with deleting(live.data) as allowed:
        assert not allowed
    before = contents(live.data)
    live.post([make_trajectory(SPEC, length=5, seed=9)])
    live.flush()
    for _ in range(3):
        live.service.maintenance.round()
    assert before <= contents(live.data)
    assert len(list((live.data / "segments").iterdir())) == 1, "sealed, and kept"
    hold.close()
    live.service.maintenance.round()
    assert list((live.data / "segments").iterdir()) == []
    assert len(list((live.data / "shards" / "fifo").iterdir())) < 5


def test_damaged_and_missing_files_are_named_and_the_rest_is_kept(
    start: Callable[..., Any], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = start()
    grow(live, 1)
    live.service.close()
    shard = sorted((live.data / "shards" / "protected").rglob("*.parquet") or [])
    shard = shard or sorted((live.data / "shards").rglob("*.parquet"))
    content = bytearray(shard[0].read_bytes())
    content[40] ^= 1
    shard[0].write_bytes(content)
    (policy,) = (live.data / "policies").iterdir()
    policy.unlink()
    assert backup([str(target), "--data", str(live.data)]) == 1
    said = capsys.readouterr().err
    assert f"{shard[0].name} is damaged" in said and f"{policy.name} is missing" in said
    data = tmp_path / "restored"
    assert restore([str(target), "--data", str(data)]) == 1
    again = start(data=data)
    assert again.http.get("/readyz").json()["status"] == "degraded"
    problems = {p.where.rsplit("/", 1)[-1] for p in fsck_of(again, data) if not p.note}
    assert problems == {shard[0].name, policy.name}


def fsck_of(live: Any, data: Path) -> list[fsck.checks.FsckProblem]:
    live.service.close()
    return fsck.check(data).problems


def test_a_restore_verifies_what_it_copies(
    start: Callable[..., Any], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = start()
    grow(live, 1)
    live.service.close()
    assert backup([str(target), "--data", str(live.data)]) == 0
    (path,) = (target / "files" / "policies").iterdir()
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    assert restore([str(target), "--data", str(tmp_path / "a")]) == 1
    assert f"{path.name} is damaged in the backup" in capsys.readouterr().err
    assert backup([str(target), "--data", str(live.data), "--verify"]) == 0, "copied again"
    assert restore([str(target), "--data", str(tmp_path / "b")]) == 0


def test_a_restore_overwrites_nothing(
    start: Callable[..., Any], target: Path, tmp_path: Path
) -> None:
    live = start()
    live.create()
    assert backup([str(target), "--data", str(live.data)]) == 0
    live.service.close()
    with pytest.raises(InvalidData, match="not empty"):
        restore([str(target), "--data", str(live.data)])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(InvalidData, match="not empty"):
        restore([str(target), "--data", str(tmp_path / "other")])


def test_a_directory_that_is_being_restored_is_not_served(
    start: Callable[..., Any], target: Path, tmp_path: Path
) -> None:
    live = start()
    grow(live, 1)
    assert backup([str(target), "--data", str(live.data)]) == 0
    data = tmp_path / "restored"
    assert restore([str(target), "--data", str(data)]) == 0
    (data / "restoring").write_text("{}")
    with pytest.raises(IndexUnusable, match="stepwell restore"):
        start(data=data)
    assert restore([str(target), "--data", str(data)]) == 0, "goes on, and ends"
    assert start(data=data).http.get("/readyz").json()["status"] == "ok"


def test_what_is_no_folder_of_backups_is_refused(start: Callable[..., Any], tmp_path: Path) -> None:
    live = start()
    live.create()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"x")
    with pytest.raises(InvalidData, match="not a folder of backups"):
        backup([str(tmp_path / "photos"), "--data", str(live.data)])
    with pytest.raises(InvalidData, match="not a folder of backups"):
        restore([str(tmp_path / "nothing"), "--data", str(tmp_path / "new")])
    with pytest.raises(InvalidData, match="lost with it"):
        backup([str(live.data / "backups"), "--data", str(live.data)])
    with pytest.raises(InvalidData, match="has no index"):
        backup([str(tmp_path / "b"), "--data", str(tmp_path / "photos")])


def test_a_manifest_cannot_name_a_file_outside(
    start: Callable[..., Any], target: Path, tmp_path: Path
) -> None:
    live = start()
    live.create()
    assert backup([str(target), "--data", str(live.data)]) == 0
    (path,) = (target / "backups").glob("*/manifest.json")
    document = json.loads(path.read_text())
    for wrong in ("../../etc/passwd", "/etc/passwd", "policies/../lock", "index.sqlite", ""):
        document["files"] = [[wrong, 1, "0" * 64]]
        path.write_text(json.dumps(document))
        with pytest.raises(InvalidData):
            restore([str(target), "--data", str(tmp_path / "new")])


def test_a_damaged_index_is_not_backed_up_over_the_good_ones(
    start: Callable[..., Any], target: Path
) -> None:
    live = start()
    grow(live, 1)
    live.service.close()
    assert backup([str(target), "--data", str(live.data)]) == 0
    path = live.data / "index.sqlite"
    content = bytearray(path.read_bytes())
    content[4096 * 3 : 4096 * 5] = b"\xff" * 8192
    path.write_bytes(content)
    with pytest.raises((InvalidData, SystemExit)):
        backup([str(target), "--data", str(live.data)])
    assert len(list((target / "backups").glob("*/manifest.json"))) == 1


def test_old_backups_are_deleted_on_request_only(
    start: Callable[..., Any], target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = start()
    grow(live, 1)
    for _ in range(3):
        assert backup([str(target), "--data", str(live.data)]) == 0
    capsys.readouterr()
    assert backup([str(target), "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3
    live.http.delete("/v1/runs/r").raise_for_status()
    assert backup([str(target), "--data", str(live.data), "--keep", "1"]) == 0
    assert backup([str(target), "--list"]) == 0
    assert len(list((target / "backups").iterdir())) == 1
    assert not list((target / "files" / "policies").iterdir()), "no backup needs it any more"


def test_hashes_of_tokens_are_for_the_owner_only(start: Callable[..., Any], target: Path) -> None:
    live = start()
    live.create()
    assert backup([str(target), "--data", str(live.data)]) == 0
    (index,) = (target / "backups").glob("*/index.sqlite")
    assert index.stat().st_mode & 0o077 == 0


def test_an_interrupted_backup_is_no_backup(
    start: Callable[..., Any],
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = start()
    grow(live, 1)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("server.backup.target.Target.write_manifest", fail)
        with pytest.raises(SystemExit):
            backup([str(target), "--data", str(live.data)])
    copied = files(target)
    assert copied
    with pytest.raises(InvalidData, match="no complete backup"):
        restore([str(target), "--data", str(target.parent / "new")])
    assert backup([str(target), "--data", str(live.data)]) == 0
    again = files(target)
    named = ("policies", "videos", "versions", "annotations", "shards")
    for path, written in copied.items():
        if path.split("/")[0] in named:
            assert again[path] == written, "it was used"
