"""fsck notices what does not fit, says where, and names a cure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.fsck import main as fsck
from stepwell.testing import make_spec, make_trajectory
from tests.index_file import write_index
from tests.server.core.conftest import Live, flip, serving

SPEC = make_spec(observation=3, action=2)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed directory with two shards, a snapshot, a policy and a video."""
    path = tmp_path_factory.mktemp("fsck") / "data"
    with serving(path, sql_workers=1) as live:
        fill(live)
    return path


@pytest.fixture
def data(filled: Path, tmp_path: Path) -> Path:
    """A copy of it, on which `start` starts."""
    return shutil.copytree(filled, tmp_path / "data")


def fill(live: Live) -> None:
    live.create(capacity={"trajectories": 10})
    for i in range(2):
        live.post([make_trajectory(SPEC, length=20, seed=10 * i + j) for j in range(3)])
        live.flush()
    live.http.post("/v1/snapshots", json={"dataset": "d"})
    live.run()
    assert live.publish(1, b"weights").is_success
    assert live.put_video(live.evaluate(), b"GIF89a frames").is_success


def first(data: Path, pattern: str) -> Path:
    return sorted(data.glob(pattern))[0]


def sql(data: Path, statement: str) -> None:
    with write_index(data / "index.sqlite") as index:
        index.execute(statement)


def test_a_good_directory_is_clean_and_says_what_was_looked_at(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fsck.main(["--data", str(data), "--deep"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("clean: ") and "2 shards" in out and "6 sealed" in out
    assert fsck.main(["--data", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clean"] is True


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit flipped in a shard": (lambda d: flip(first(d, "shards/fifo/*")), "sha256"),
    "shard missing": (lambda d: first(d, "shards/fifo/*").unlink(), "missing"),
    "snapshot missing": (lambda d: first(d, "snapshots/*").unlink(), "cannot be read"),
    "policy damaged": (lambda d: flip(first(d, "policies/*")), "damaged"),
    "policy missing": (lambda d: first(d, "policies/*").unlink(), "missing"),
    "video damaged": (lambda d: flip(first(d, "videos/*")), "damaged"),
    "video missing": (lambda d: first(d, "videos/*").unlink(), "missing"),
    "row moved": (lambda d: sql(d, "UPDATE trajectories SET row_start = 5 WHERE seq = 2"), "foot"),
    "digest changed": (lambda d: sql(d, "UPDATE trajectories SET digest = 'x'"), "footer"),
    "totals wrong": (lambda d: sql(d, "UPDATE partition_stats SET steps = 1"), "totals"),
    "trigger dropped": (lambda d: sql(d, "DROP TRIGGER protected_delete"), "trigger"),
    "row lost": (lambda d: sql(d, "DELETE FROM trajectories WHERE seq = 1"), "totals"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_fit_is_found_and_has_a_cure(
    name: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, word = BROKEN[name]
    damage(data)
    assert fsck.main(["--data", str(data), "--deep"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM" in out and "cure:" in out and word in out
    report = fsck.check(data)
    assert all(f.cure for f in report.problems)


def test_a_lost_shard_row_is_a_note_and_the_next_start_makes_it_again(
    data: Path, start: Callable[..., Any]
) -> None:
    sql(data, "UPDATE shards SET id = 'sh_0' WHERE pk = 1")
    report = fsck.check(data)
    assert report.clean and {f.note for f in report.problems} == {True}
    live = start()
    assert len(live.listing()) == 6
    for one in live.listing():
        assert live.http.get(f"/v1/trajectories/{one['id']}/steps").is_success
    live.service.close()
    assert fsck.check(data, deep=True).problems == []


def test_an_unknown_file_is_a_note_and_the_next_start_quarantines_it(
    data: Path, start: Callable[..., Any]
) -> None:
    """Known trajectories in an unknown file: a copy that a crash left behind."""
    shard = first(data, "shards/fifo/*")
    copy = shard.with_name("sh_00000000-0000-7000-8000-000000000000.parquet")
    copy.write_bytes(shard.read_bytes())
    report = fsck.check(data)
    assert [(f.where.endswith(copy.name), f.note) for f in report.problems] == [(True, True)]
    start().service.close()
    assert not copy.exists() and shard.exists()
    kept = data / "quarantine" / "shards" / "fifo" / copy.name
    assert kept.read_bytes() == shard.read_bytes()
    report = fsck.check(data)
    assert report.clean and [f.where for f in report.problems] == [str(kept.relative_to(data))]


def test_a_shard_of_unknown_trajectories_is_kept_and_a_rebuild_takes_it(
    data: Path, start: Callable[..., Any]
) -> None:
    """It may be all that is left after the index was restored from an older backup."""
    sql(data, "DELETE FROM trajectories WHERE shard_pk = 1")
    sql(data, "DELETE FROM snapshot_shards WHERE shard_pk = 1")
    sql(data, "DELETE FROM shards WHERE pk = 1")
    report = fsck.check(data)
    assert [f.cure for f in report.problems if "does not know" in f.what and f.note]
    live = start()
    assert len(live.listing()) == 3
    live.service.close()
    assert len(list(data.glob("quarantine/shards/fifo/*"))) == 1
    (problem,) = (f for f in fsck.check(data).problems if not f.note and "holds" in f.what)
    assert "3 trajectories" in problem.what and "--rebuild" in problem.cure
    assert fsck.main(["--data", str(data), "--rebuild"]) == 0
    assert len(start().listing()) == 6


def test_a_damaged_index_is_refused_with_the_command_that_cures_it(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / "index.sqlite").write_bytes(b"this is not a database, not at all" * 100)
    assert fsck.main(["--data", str(data)]) == 2
    assert "--rebuild" in capsys.readouterr().err
    assert fsck.main(["--data", str(data), "--rebuild"]) == 0
    assert fsck.main(["--data", str(data), "--deep"]) in (0, 1)
    assert "6 sealed" in capsys.readouterr().out


def test_without_a_directory_or_an_index_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STEPWELL_DATA", raising=False)
    assert fsck.main([]) == 2
    assert "--data" in capsys.readouterr().err
    assert fsck.main(["--data", str(tmp_path)]) == 2
    assert "no index" in capsys.readouterr().err


def test_the_sandbox_report_names_confinements(capsys: pytest.CaptureFixture[str]) -> None:
    assert fsck.main(["--sandbox", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found and all(isinstance(active, bool) for active in found.values())
