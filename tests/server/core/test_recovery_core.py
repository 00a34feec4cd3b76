"""What a start makes of the remains of a crash; and an index rebuilt from files alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from server.fsck import main as fsck
from server.index import row_checksums
from server.index.db import IndexUnusable
from server.index.tables import segments, trajectories
from server.maintenance.rebuild import rebuild
from server.service import Service
from server.storage.store import DirectoryInUse
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.index_file import write_index
from tests.server.core.conftest import Live, serving
from tests.specs import make_rich_spec

SPEC = make_spec(observation=3, action=2)


def make(count: int, first: int = 0) -> list[Trajectory]:
    return [make_trajectory(SPEC, length=4 + i, seed=first + i) for i in range(count)]


def segment_of(data: Path) -> Path:
    (found,) = (data / "segments").iterdir()
    return found


@pytest.fixture(scope="module")
def unsealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trajectory]]:
    """What a crash leaves of a service with five acknowledged, none sealed; and these."""
    folder = tmp_path_factory.mktemp("unsealed")
    with serving(folder / "data") as live:
        live.create()
        sent = make(5)
        live.post(sent[:3])
        live.post(sent[3:])
        return live.as_killed(folder / "crashed"), sent


@pytest.fixture
def crashed(
    unsealed: tuple[Path, list[Trajectory]], tmp_path: Path
) -> tuple[Path, list[Trajectory]]:
    """A copy of it."""
    return shutil.copytree(unsealed[0], tmp_path / "crashed"), unsealed[1]


def test_unsealed_trajectories_are_there_after_a_crash_and_get_sealed(
    start: Callable[..., Any], crashed: tuple[Path, list[Trajectory]]
) -> None:
    data, sent = crashed
    live = start(data=data)
    assert [item["id"] for item in live.listing()] == [t.id for t in sent]
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]
    live.flush()
    assert {item["state"] for item in live.listing()} == {"sealed"}
    assert live.post(sent) == [("duplicate", i) for i in range(1, 6)]


@pytest.mark.parametrize("keep", [1, 7, 100])
def test_a_torn_tail_is_cut_off(
    start: Callable[..., Any], crashed: tuple[Path, list[Trajectory]], keep: int
) -> None:
    """Half a record after the last acknowledged one: never spoken of again."""
    data, sent = crashed
    path = segment_of(data)
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(whole[16 : 16 + keep])
    live = start(data=data)
    live.flush()
    assert [item["id"] for item in live.listing()] == [t.id for t in sent]
    live.service.close()
    assert fsck.check(data, deep=True).problems == []


def test_a_whole_record_without_a_row_is_indexed_once(
    start: Callable[..., Any], crashed: tuple[Path, list[Trajectory]]
) -> None:
    """Died between fsync and commit: its sender was told nothing and will be told `duplicate`."""
    data, sent = crashed
    with write_index(data / "index.sqlite") as index:
        index.execute("DELETE FROM trajectories WHERE seq > 3")
        index.execute("UPDATE datasets SET next_seq = 4")
        index.execute("UPDATE partition_stats SET trajectories = 3, steps = 15, bytes = 0")
        size = index.execute("SELECT sum(bytes) FROM trajectories").fetchone()[0]
        index.execute("UPDATE partition_stats SET bytes = ?", (size,))
    live = start(data=data)
    assert [(i["id"], i["seq"]) for i in live.listing()] == [
        (t.id, n) for n, t in enumerate(sent, 1)
    ]
    assert live.post(sent[3:]) == [("duplicate", 4), ("duplicate", 5)]
    live.flush()
    live.service.close()
    assert fsck.check(data, deep=True).problems == []


def test_a_segment_that_is_all_new_to_the_index_is_taken_in(
    start: Callable[..., Any], crashed: tuple[Path, list[Trajectory]]
) -> None:
    """Died before the first commit: not even the segment's own row exists."""
    data, sent = crashed
    with write_index(data / "index.sqlite") as index:
        index.execute("DELETE FROM trajectories")
        index.execute("DELETE FROM segments")
        index.execute("DELETE FROM partition_stats")
    live = start(data=data)
    assert [item["id"] for item in live.listing()] == [t.id for t in sent]
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]


def test_an_empty_segment_and_leftovers_in_tmp_are_removed(
    start: Callable[..., Any], crashed: tuple[Path, list[Trajectory]]
) -> None:
    data, sent = crashed
    (data / "segments" / "sg_00000000-0000-7000-8000-000000000000.seg").write_bytes(b"STEP")
    unfinished = data / "tmp" / "unfinished.parquet"
    unfinished.write_bytes(b"PAR1")
    live = start(data=data)
    assert not unfinished.exists()
    assert len(live.listing()) == len(sent)
    live.flush()
    assert not list((data / "segments").iterdir())


def test_an_acknowledged_record_with_a_flipped_bit_is_named_and_the_others_are_sealed(
    start: Callable[..., Any], crashed: tuple[Path, list[Trajectory]]
) -> None:
    data, sent = crashed
    live = reopen_without_sealing(data)
    path = segment_of(data)
    content = bytearray(path.read_bytes())
    with live.connect() as c:
        offset = c.execute(
            sa.select(trajectories.c.segment_offset).where(trajectories.c.id == sent[1].id)
        ).scalar_one()
    live.dispose()
    content[offset + 60] ^= 1
    path.write_bytes(bytes(content))
    assert not fsck.check(data).clean
    served = start(data=data)
    served.flush()
    assert [i["state"] for i in served.listing()] == ["sealed", "spooled", *["sealed"] * 3]
    response = served.http.get(f"/v1/trajectories/{sent[1].id}/steps")
    assert (response.status_code, response.json()["code"]) == (410, "damaged")
    with served.service.db.read() as c:
        assert c.execute(sa.select(segments.c.state)).scalars().all() == ["damaged"]
    served.service.close()
    report = fsck.check(data)
    assert [sent[1].id in f.what for f in report.problems] == [True]


def reopen_without_sealing(data: Path) -> sa.Engine:
    return sa.create_engine(f"sqlite:///{data / 'index.sqlite'}")


def test_a_lost_index_is_rebuilt_from_shards_and_segments(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """Every trajectory comes back with its data, seq and partition; the service then runs on it."""
    rich = make_rich_spec()
    live = start()
    live.create("d")
    live.create("rich", spec=rich)
    first, second = make(4), make(3, first=50)
    camera = [make_trajectory(rich, length=3, seed=i) for i in range(3)]
    live.post(first[:2])
    live.post(first[2:], partition="protected")
    live.post(camera, "rich", spec=rich)
    live.flush()
    live.post(second)
    before = live.listing() + live.listing("rich")
    data = live.as_killed(tmp_path / "lost")
    for path in data.glob("index.sqlite*"):
        path.unlink()
    with pytest.raises(IndexUnusable, match="--rebuild"):
        start(data=data)
    assert fsck.main(["--rebuild", "--data", str(data)]) == 0
    report = fsck.check(data, deep=True)
    assert report.problems == []
    live = start(data=data)
    after = live.listing() + live.listing("rich")
    keys = ("id", "seq", "dataset", "partition", "digest", "return", "length", "env")
    assert [[i[k] for k in keys] for i in after] == [[i[k] for k in keys] for i in before]
    for trajectory in first + second + camera:
        assert live.steps(trajectory).digest == trajectory.digest
    assert live.post(first[:1]) == [("duplicate", 1)]


@pytest.mark.parametrize(
    "left",
    [
        *("shards/d/sh_1.parquet", "segments/seg_1.seg", "policies/p.bin", "videos/v.gif"),
        "annotations/an_1.parquet",
    ],
)
def test_no_empty_index_is_made_over_data(
    start: Callable[..., Any], tmp_path: Path, left: str
) -> None:
    path = tmp_path / "data" / left
    path.parent.mkdir(parents=True)
    path.write_bytes(b"data")
    with pytest.raises(IndexUnusable, match=f"{path.parent.name}.* holds data.*--rebuild"):
        start()
    assert path.exists() and not (tmp_path / "data" / "index.sqlite").exists()


def test_rebuilding_over_a_good_index_keeps_it_and_gives_the_same(
    start: Callable[..., Any], crashed: tuple[Path, list[Trajectory]]
) -> None:
    data, sent = crashed
    result = rebuild(data)
    assert (result.datasets, result.trajectories, result.unreadable) == (1, 5, [])
    assert len([p for p in data.glob("index.sqlite.*") if p.suffix.strip(".").isdigit()]) == 1
    live = start(data=data)
    assert [item["id"] for item in live.listing()] == [t.id for t in sent]


# --- what is not in the data files ----------------------------------------------------------------


def policy_file(run: str, version: int) -> bytes:
    """Bytes as a trainer publishes them, but for the tensors."""
    extra = {"run": run, "snapshot": "sn_1", "training": {"seed": 3}}
    about = {"config": {}, "spaces": {}, "step": version, "extra": extra}
    header = json.dumps({"__metadata__": {"stepwell_policy": "1", "policy": json.dumps(about)}})
    return len(header).to_bytes(8, "little") + header.encode()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trajectory]]:
    """The directory that a crash leaves of a service with runs, policies, metrics, an evaluation
    with a video, and labels given after the fact; and what was sent."""
    folder = tmp_path_factory.mktemp("registry")
    with serving(folder / "data") as live:
        sent = fill(live)
        return live.as_killed(folder / "crashed"), sent


@pytest.fixture
def left(registry: tuple[Path, list[Trajectory]], tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(registry[0], tmp_path / "left")


@pytest.fixture
def registered(
    registry: tuple[Path, list[Trajectory]], start: Callable[..., Any], tmp_path: Path
) -> tuple[Any, list[Trajectory]]:
    """A service on a copy of it, and what was sent."""
    return start(data=shutil.copytree(registry[0], tmp_path / "data")), registry[1]


def fill(live: Live) -> list[Trajectory]:
    live.create(capacity={"trajectories": 4}, tags=["gold"])
    sent = make(6)
    live.post(sent)
    live.flush()
    labels = {"tags": ["good"], "flags": ["seen"], "notes": "look", "partition": "protected"}
    assert live.http.patch(f"/v1/trajectories/{sent[5].id}", json=labels).status_code == 200
    config = {"seed": 2**70, "rate": 0.1}  # an integer beyond 64 bits
    made = live.http.post("/v1/runs", json={"name": "r", "kind": "train", "config": config})
    assert made.status_code == 201
    live.http.patch("/v1/runs/r", json={"log": "said", "status": "finished"})
    alarm = {"key": "td_error", "message": "wrong", "update": 3, "value": 2.0}
    live.http.patch("/v1/runs/r", json={"alarms": [alarm]})
    points = [{"key": "loss", "step": i, "value": i / 2, "time": 1.0} for i in range(3000)]
    assert live.http.post("/v1/runs/r/metrics", json={"points": points}).status_code == 200
    for version, body in ((5, policy_file("r", 5)), (9, b"opaque")):
        assert live.publish(version, body).status_code == 201
    assert live.http.put("/v1/runs/r/aliases/best", json={"version": 9}).status_code == 200
    scored = {"run": "r", "policy": "r/9", "env": "e", "seeds": [0], "returns": [1.0]}
    scored |= {"mean": 1.0, "iqm": 1.0, "ci_low": 1.0, "ci_high": 1.0}
    made = live.http.post("/v1/evaluations", json=scored)
    url = f"/v1/evaluations/{made.json()['id']}/videos/0?return=1&length=3"
    gif = {"content-type": "image/gif"}
    assert live.http.put(url, content=b"GIF89a frames", headers=gif).status_code == 201
    return sent


def test_a_rebuild_takes_over_what_the_old_index_still_says(
    start: Callable[..., Any], registered: tuple[Any, list[Trajectory]], tmp_path: Path
) -> None:
    """Runs, their numbers, policies and aliases; limits of datasets; labels, protection among."""
    live, sent = registered
    asked = ("/v1/runs/r", "/v1/runs/r/metrics", "/v1/runs/r/policies", "/v1/evaluations")
    (evaluation,) = live.http.get("/v1/evaluations").json()["items"]
    videos = f"/v1/evaluations/{evaluation['id']}/videos"
    asked = (*asked, videos)
    before = [live.http.get(path).json() for path in asked]
    data = live.as_killed(tmp_path / "old")
    result = rebuild(data)
    assert (result.runs, result.metrics, result.policies, result.labelled) == (1, 3000, 2, 1)
    assert (result.evaluations, result.videos) == (1, 1)
    assert fsck.check(data, deep=True).problems == []
    live = start(data=data)
    assert [live.http.get(path).json() for path in asked] == before
    assert live.http.get("/v1/runs/r/policies/best").content == b"opaque"
    assert live.http.get(f"{videos}/0").content == b"GIF89a frames"
    assert live.http.get("/v1/runs/r/log").text == "said\n"
    info, dataset = live.info(sent[5]), live.dataset()
    assert (info["partition"], info["tags"], info["flags"]) == ("protected", ["good"], ["seen"])
    assert dataset["capacity"]["trajectories"] == 4 and dataset["tags"] == ["gold"]
    assert dataset["protected"]["trajectories"] == 1 and dataset["fifo"]["trajectories"] == 3


def test_without_an_index_policies_come_back_or_are_kept_aside(
    start: Callable[..., Any],
    left: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without descriptions, as of earlier versions, a trainer's policy file says whose it is."""
    for path in (*left.glob("index.sqlite*"), *left.glob("descriptions/*")):
        path.unlink()
    assert fsck.main(["--rebuild", "--data", str(left)]) == 0
    said = capsys.readouterr().out
    assert "1 runs" in said and "1 policies" in said
    for word in ("metrics", "evaluations", "capacities", "labels", "tokens", "snapshots"):
        assert word in said.split("not restored:")[1]
    aside = left / "quarantine"
    assert [p.read_bytes() for p in (aside / "policies").iterdir()] == [b"opaque"]
    assert [p.read_bytes() for p in (aside / "videos").iterdir()] == [b"GIF89a frames"]
    assert list((left / "videos").iterdir()) == []
    report = fsck.check(left)
    assert report.clean and {p.where.split("/")[1] for p in report.problems} == {
        "policies",
        "videos",
    }
    live = start(data=left)
    run = live.http.get("/v1/runs/r").json()
    assert (run["status"], run["config"], run["snapshots"]) == ("stopped", {"seed": 3}, ["sn_1"])
    assert live.http.get("/v1/runs/r/policies/latest").content == policy_file("r", 5)


def test_without_an_index_what_is_described_comes_back(
    start: Callable[..., Any], registered: tuple[Any, list[Trajectory]], tmp_path: Path
) -> None:
    """Policies of any format, videos, and the runs and evaluations that they are of."""
    live, _ = registered
    before = live.http.get("/v1/evaluations").json()["items"]
    (video,) = live.http.get(f"/v1/evaluations/{before[0]['id']}/videos").json()["items"]
    opaque = [p for p in live.http.get("/v1/runs/r/policies").json()["items"]]
    data = live.as_killed(tmp_path / "lost")
    for path in data.glob("index.sqlite*"):
        path.unlink()
    result = rebuild(data)
    assert (result.policies, result.videos, result.evaluations) == (2, 1, 1)
    assert fsck.check(data, deep=True).problems == []
    again = start(data=data)
    assert again.http.get("/v1/evaluations").json()["items"] == before
    found = again.http.get(f"/v1/evaluations/{before[0]['id']}/videos").json()["items"]
    assert [{**one, "created_at": 0} for one in found] == [{**video, "created_at": 0}]
    assert again.http.get("/v1/runs/r").json()["kind"] == "train"
    for policy in opaque:
        data_ = again.http.get(f"/v1/runs/r/policies/{policy['version']}")
        assert data_.headers["etag"] == f'"{policy["sha256"]}"'
    listed = again.http.get("/v1/runs/r/policies").json()["items"]
    kept = ("version", "metadata", "step", "sha256")
    assert [[p[k] for k in kept] for p in listed] == [[p[k] for k in kept] for p in opaque]


def test_a_damaged_index_gives_what_can_be_read_and_says_what_cannot(
    start: Callable[..., Any], registered: tuple[Any, list[Trajectory]], tmp_path: Path
) -> None:
    live, sent = registered
    live.service.close()  # all of it in the one file
    data = live.as_killed(tmp_path / "damaged")
    path = data / "index.sqlite"
    page = 4096 * (path.read_bytes().rindex(b"loss") // 4096)
    with path.open("r+b") as file:  # one page of the metrics
        file.seek(page)
        file.write(b"\xff" * 4096)
    result = rebuild(data)
    assert (result.trajectories, result.unreadable) == (4, [])
    assert result.runs == 1 and result.policies == 2 and 0 < result.metrics < 3000
    assert any(line.startswith(f"metrics: {result.metrics} rows") for line in result.lost)
    assert fsck.check(data, deep=True).clean
    path.write_bytes(b"not a database")
    result = rebuild(data)
    assert (result.trajectories, result.runs) == (4, 1), "the run from its policy file"


def make_old(data: Path, *statements: str) -> None:
    """Make the directory one from before the first release, without checksums of policies, and
    without videos."""
    for video in (data / "videos").iterdir():
        video.unlink()
    with write_index(data / "index.sqlite") as index:
        for table in row_checksums.tables(index):
            index.execute(f"ALTER TABLE {table} DROP COLUMN crc")
        index.execute("ALTER TABLE policies DROP COLUMN checksums")
        index.execute("DROP TABLE videos")
        index.execute("UPDATE alembic_version SET version_num = '0004'")
        for statement in statements:
            index.execute(statement)
        index.commit()


@pytest.mark.parametrize("statements", [(), ("ALTER TABLE policies ADD COLUMN checksums BLOB",)])
def test_a_rebuild_takes_policies_of_an_index_without_checksums(
    start: Callable[..., Any],
    left: Path,
    capsys: pytest.CaptureFixture[str],
    statements: tuple[str, ...],
) -> None:
    make_old(left, *statements)
    assert fsck.main(["--data", str(left)]) == 2
    assert "stepwell fsck --rebuild" in capsys.readouterr().err
    result = rebuild(left)
    assert (result.runs, result.policies) == (1, 2)
    assert not any("polic" in line or line.startswith("videos") for line in result.lost)
    assert not (left / "quarantine").exists()
    assert fsck.check(left, deep=True).problems == []
    live = start(data=left)
    assert live.http.get("/v1/runs/r/policies/best").content == b"opaque"
    assert live.http.get("/v1/runs/r/policies/5").content == policy_file("r", 5)


def test_a_policy_that_differs_from_the_old_index_is_set_aside(left: Path) -> None:
    """Also if its header can still be read; its alias goes with it."""
    make_old(left, "UPDATE policy_aliases SET policy_pk = 1")
    (bad,) = (p for p in (left / "policies").iterdir() if p.read_bytes() != b"opaque")
    changed = bad.read_bytes().replace(b"sn_1", b"sn_2")
    bad.write_bytes(changed)
    result = rebuild(left)
    assert result.policies == 1
    assert any(line.startswith("policy 5: ") and bad.name in line for line in result.lost)
    assert any(line.startswith("policy_aliases: 1 of 1 rows") for line in result.lost)
    aside = left / "quarantine" / "policies"
    assert [p.read_bytes() for p in aside.iterdir()] == [changed]
    assert fsck.check(left, deep=True).clean


def test_a_rebuild_counts_the_rows_that_it_inserts(left: Path) -> None:
    """Rows that break a constraint, or refer to nothing, are named."""
    with write_index(left / "index.sqlite") as index:
        index.executescript(
            "DROP TABLE policy_aliases; CREATE TABLE policy_aliases (run_pk, alias, policy_pk);"
            "INSERT INTO policy_aliases VALUES (1, 'a', 1), (1, 'a', 2), (77, 'b', 1);"
            "CREATE TABLE loose AS SELECT * FROM policies; DROP TABLE policies;"
            "ALTER TABLE loose RENAME TO policies;"
            "INSERT INTO policies SELECT * FROM policies WHERE pk = 1"
        )
    result = rebuild(left)
    assert result.policies == 2
    assert any(line.startswith("policies: 1 of 3 rows") for line in result.lost)
    assert any(line.startswith("policy_aliases: 2 of 3 rows") for line in result.lost)
    assert fsck.check(left, deep=True).problems == []


def test_a_rebuild_that_fails_changes_nothing(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (left / "policies" / "pol_stray.bin").write_bytes(b"stray")

    def files() -> dict[str, bytes]:
        found = (*left.glob("index.sqlite*"), *(left / "policies").iterdir())
        return {path.name: path.read_bytes() for path in found if not path.name.endswith("-shm")}

    before = files()
    assert before["index.sqlite-wal"]

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("server.maintenance.rebuild.next_epoch", fail)
        with pytest.raises(OSError, match="No space"):
            rebuild(left)
    assert files() == before
    assert rebuild(left).policies == 2
    assert (left / "quarantine" / "policies" / "pol_stray.bin").read_bytes() == b"stray"
    assert not (left / "policies" / "pol_stray.bin").exists()


def test_a_rebuild_keeps_datasets_of_the_old_index_as_they_were(
    start: Callable[..., Any], registered: tuple[Any, list[Trajectory]], tmp_path: Path
) -> None:
    """Also those without files: an outbox knows its dataset by the time of its creation."""
    live, _ = registered
    live.create("empty", spec=make_rich_spec(), description="soon", capacity={"steps": 9})
    before = [live.dataset(name) for name in ("d", "empty")]
    data = live.as_killed(tmp_path / "old")
    with write_index(data / "index.sqlite") as index:
        index.execute("UPDATE datasets SET next_seq = 50 WHERE name = 'd'")
        index.commit()
    assert rebuild(data).datasets == 2
    live = start(data=data)
    after = [live.dataset(name) for name in ("d", "empty")]
    assert after[1] == before[1]
    keys = ("spec", "created_at", "last_ingest_at", "evicted", "tags", "description", "capacity")
    assert [after[0][key] for key in keys] == [before[0][key] for key in keys]
    assert live.post(make(1, first=90)) == [("stored", 50)]


def test_a_rebuild_leaves_out_files_of_an_earlier_dataset_with_another_layout(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    live = start()
    live.create()
    live.post(make(1))
    live.flush()
    live.post(make(1, first=20))
    data = live.as_killed(tmp_path / "old")
    spec = make_rich_spec()
    with write_index(data / "index.sqlite") as index:
        values = (json.dumps(spec.to_json()), spec.digest)
        index.execute("UPDATE datasets SET spec = ?, spec_digest = ?", values)
        index.commit()
    result = rebuild(data)
    assert (result.datasets, result.trajectories, len(result.unreadable)) == (1, 0, 1)
    assert any("earlier dataset" in line for line in result.lost)
    assert start(data=data).dataset()["spec"] == spec.to_json()


def test_where_protection_cannot_be_read_nothing_is_evicted(
    start: Callable[..., Any], left: Path
) -> None:
    """A limit would take what was protected; it is for a person to set again."""
    with write_index(left / "index.sqlite") as index:
        index.execute("PRAGMA foreign_keys = OFF")
        index.execute("DROP TABLE trajectories")
        index.execute("UPDATE datasets SET capacity_trajectories = 1")
    result = rebuild(left)
    assert result.trajectories == 4 and any("capacities" in line for line in result.lost)
    assert start(data=left).dataset()["capacity"]["trajectories"] is None


def test_two_services_on_one_directory_are_refused_naming_the_first(live: Any) -> None:
    with pytest.raises(DirectoryInUse, match=f"process {os.getpid()}"):
        Service(live.service.settings)
    with pytest.raises(DirectoryInUse):
        fsck.check(live.data)
