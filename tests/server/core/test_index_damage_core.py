"""A damaged index: what is lost is named and left out, the rest is right, a rebuild cures it."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from server.fsck import main as fsck
from server.index import row_checksums
from server.index.db import IndexUnusable, upgrade
from server.index.dialect import connect
from server.index.schema_copy import keep_schema, mend_schema
from server.index.table_reader import TableReader, wrong_rows
from server.index.tables import metadata, tokens
from server.index.wal import mend_wal
from server.maintenance.clean_stop import mark_clean, take_mark
from server.maintenance.index_repair import damage
from stepwell.codec import encode
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.index_file import change_bytes, damage_rows, write_index
from tests.server.core.conftest import serving

SPEC = make_spec(observation=3, action=2)
HEADER = "Stepwell-Index-Damaged"


def make(count: int, first: int = 0) -> list[Trajectory]:
    return [make_trajectory(SPEC, length=4, seed=first + i) for i in range(count)]


@pytest.fixture(scope="module")
def sent() -> list[Trajectory]:
    return make(4)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, sent: list[Trajectory]) -> Path:
    """The directory of a stopped service with two datasets, and a run with two policies."""
    data = tmp_path_factory.mktemp("stopped") / "data"
    with serving(data) as live:
        for name in ("kitchen", "garden"):
            live.create(name)
        live.post(sent, "kitchen")
        live.flush("kitchen")
        live.post(make(2, 50), "garden")
        live.run()
        for version in (1, 2):
            live.publish(version, b"w" * version).raise_for_status()
        return stop(live).parent


@pytest.fixture
def index(stopped: Path, tmp_path: Path) -> Path:
    """Its index, which the test may damage."""
    return shutil.copytree(stopped, tmp_path / "data") / "index.sqlite"


def stop(live: Any) -> Path:
    """Stop the service; returns the index in a copy of the directory, which the test may damage."""
    live.service.close()
    copy: Path = live.as_killed(live.data.with_name(f"{live.data.name}-stopped"))
    return copy / "index.sqlite"


# --- checksums of rows ----------------------------------------------------------------------------


def test_every_column_of_every_table_is_covered(tmp_path: Path) -> None:
    """Who adds a column without `protect_rows` is told here."""
    path = tmp_path / "index.sqlite"
    upgrade(path)
    with closing(sqlite3.connect(path)) as plain:
        assert row_checksums.tables(plain) == sorted(metadata.tables)
        for name, table in metadata.tables.items():
            text = plain.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()
            covered = text[0].partition("(row_crc(")[2].partition(")) STORED")[0]
            assert sorted(covered.split(", ")) == sorted(f'"{c.name}"' for c in table.c), name


def test_a_row_is_verified_as_it_was_written(tmp_path: Path) -> None:
    """Also what SQLite converts: whole numbers in a column of floats, truth values, JSON."""
    path = tmp_path / "index.sqlite"
    upgrade(path)
    engine = connect(path)
    with engine.connect().execution_options(stepwell_write=True) as c:
        values = {"name": "é\x00\U0001f600", "hash": "", "scopes": ["a"], "created_at": 3}
        c.execute(sa.insert(tokens).values(id="t", **values))
        c.execute(sa.update(tokens).values(expires_at=-0.0, revoked_at=2**60))
        c.commit()
    engine.dispose()
    with closing(sqlite3.connect(path)) as plain:
        assert list(wrong_rows(plain, "tokens")) == []
    damage_rows(path, "UPDATE tokens SET scopes = '[\"admin\"]'")
    with closing(sqlite3.connect(path)) as plain:
        assert list(wrong_rows(plain, "tokens")) == [("t",)]
    assert damage(path) == ["tokens ['t']: the row is not what was written"]


def test_a_text_that_is_none_any_more_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    upgrade(path)
    path.write_bytes(path.read_bytes().replace(b"epoch", b"\xffpoch"))
    assert damage(path) == ["a text of counters is not what was written"]


def test_a_column_that_is_added_later_is_covered_when_the_table_is_protected_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "index.sqlite"
    upgrade(path)
    with write_index(path) as plain:
        plain.execute("UPDATE counters SET value = 5 WHERE name = 'epoch'")
        plain.execute("ALTER TABLE counters ADD COLUMN more INTEGER NOT NULL DEFAULT 7")
        row_checksums.protect_rows(plain, ["counters"])
        assert list(wrong_rows(plain, "counters")) == []
        crc = "SELECT crc FROM counters WHERE name = 'epoch'"
        assert plain.execute(crc).fetchone()[0] == row_checksums.row_crc(7, "epoch", 5)
        triggers = plain.execute("SELECT count(*) FROM sqlite_master WHERE type = 'trigger'")
        assert triggers.fetchone()[0] > 5


# --- a start over damage --------------------------------------------------------------------------


@pytest.mark.sql_worker
def test_a_damaged_trajectory_is_left_out_named_and_back_after_a_rebuild(
    index: Path, sent: list[Trajectory], start: Callable[..., Any], capsys: Any
) -> None:
    damage_rows(index, "UPDATE trajectories SET length = 400 WHERE seq = 2 AND dataset_pk = 1")
    live = start(data=index.parent)
    lost, others = sent[1], [sent[0], *sent[2:]]
    assert [item["id"] for item in live.listing("kitchen")] == [t.id for t in others]
    assert [live.steps(t).digest for t in others] == [t.digest for t in others]
    excluded = [{"dataset": "kitchen", "file": "index.sqlite", "trajectories": 1}]
    found = live.query("SELECT sum(length) FROM trajectories WHERE dataset = 'kitchen'")
    assert (found["rows"], found["excluded"]) == ([[12]], excluded)
    found = live.query('SELECT count(*) FROM "kitchen".steps')
    assert (found["rows"], found["excluded"]) == ([[15]], excluded)
    assert live.query('SELECT 1 FROM "garden".steps')["excluded"] == []
    made = live.http.post("/v1/snapshots", json={"dataset": "kitchen"}).json()
    assert (made["trajectories"], made["excluded"]) == (3, excluded)
    assert live.dataset("kitchen")["excluded"] == excluded
    assert live.dataset("kitchen")["fifo"]["steps"] == 12
    for what in ("", "/steps"):
        refused = live.http.get(f"/v1/trajectories/{lost.id}{what}")
        assert (refused.status_code, refused.json()["code"]) == (500, "index_damaged")
        assert "fsck --rebuild" in refused.json()["detail"]
    assert live.http.get("/v1/trajectories/unknown").status_code == 404
    health = live.http.get("/readyz").json()
    assert health["status"] == "degraded" and "1 of trajectories (kitchen)" in health["detail"]
    assert "stepwell_index_lost_rows 1.0" in live.http.get("/metrics").text
    assert live.http.get("/v1/runs").headers[HEADER] == "1 of trajectories (kitchen)"
    index = stop(live)
    capsys.readouterr()
    assert fsck.main(["--data", str(index.parent)]) == 1
    said = capsys.readouterr().out
    assert f"a row of trajectories is lost: {lost.id} of dataset kitchen" in said
    assert "accept the loss" not in said and "fsck --rebuild" in said
    assert fsck.main(["--data", str(index.parent), "--rebuild"]) == 0
    assert f"trajectories: the row {lost.id} was damaged" in capsys.readouterr().out
    live = start(data=index.parent)
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]
    assert HEADER not in live.http.get("/v1/runs").headers


def test_fsck_before_a_start_blames_the_index_and_not_the_file(
    index: Path, sent: list[Trajectory]
) -> None:
    damage_rows(
        index,
        "UPDATE trajectories SET digest = 'x' WHERE seq = 2",
        "UPDATE shards SET sha256 = 'x'",
        "UPDATE policies SET sha256 = 'x'",
    )
    report = fsck.check(index.parent)
    assert not report.clean
    assert {p.cure for p in report.problems if not p.note} == {"stepwell fsck --rebuild --data DIR"}


@pytest.mark.sql_worker
def test_a_damaged_dataset_takes_no_other_away_and_nothing_is_deleted(
    index: Path, sent: list[Trajectory], start: Callable[..., Any]
) -> None:
    damage_rows(index, "UPDATE datasets SET description = 'x' WHERE name = 'kitchen'")
    files = {path.name for path in index.parent.glob("*/fifo/*")}
    live = start(data=index.parent)
    for path in ("/v1/datasets/kitchen", f"/v1/trajectories/{sent[0].id}"):
        assert live.http.get(path).json()["code"] == "index_damaged"
    body = {"name": "kitchen", "spec": SPEC.to_json()}
    assert live.http.post("/v1/datasets", json=body).json()["code"] == "index_damaged"
    assert live.send(encode(make(1, 90), SPEC), "kitchen").status_code == 500
    assert live.http.get("/v1/datasets/unknown").status_code == 404
    assert [one["name"] for one in live.http.get("/v1/datasets").json()["items"]] == ["garden"]
    found = live.query("SELECT dataset, count(*) FROM trajectories GROUP BY 1")
    assert found["rows"] == [["garden", 2]]
    assert found["excluded"] == [{"dataset": "kitchen", "file": "index.sqlite", "trajectories": 4}]
    assert live.post(make(1, 70), "garden") == [("stored", 3)]
    assert live.flush("garden")["sealed"] == 1
    live.service.maintenance.round()
    index = stop(live)
    assert files <= {path.name for path in index.parent.glob("*/fifo/*")}
    assert fsck.main(["--data", str(index.parent), "--rebuild"]) == 0
    live = start(data=index.parent)
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]


def test_what_waits_to_be_sealed_waits_on_where_its_dataset_is_lost(
    start: Callable[..., Any], sent: list[Trajectory], tmp_path: Path
) -> None:
    live = start()
    for name in ("kitchen", "garden"):
        live.create(name)
    live.post(sent, "kitchen")
    other = make(1, 60)
    live.post(other, "garden")
    data = live.as_killed(tmp_path / "killed")
    damage_rows(data / "index.sqlite", "UPDATE datasets SET tags = '[1]' WHERE name = 'kitchen'")
    live = start(data=data)
    live.flush("garden")
    assert [item["state"] for item in live.listing("garden")] == ["sealed"]
    assert live.steps(other[0]).digest == other[0].digest
    data = stop(live).parent
    assert fsck.main(["--data", str(data), "--rebuild"]) == 0
    live = start(data=data)
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]


def test_a_damaged_token_lets_nobody_in(start: Callable[..., Any]) -> None:
    live = start()
    made = live.http.post("/v1/tokens", json={"name": "me", "scopes": ["admin"]}).json()
    live.service.close()
    damage_rows(live.data / "index.sqlite", 'UPDATE tokens SET scopes = \'["admin", "sql"]\'')
    live = start()
    with_it = {"authorization": f"Bearer {made['token']}"}
    assert live.http.get("/v1/datasets").status_code == 401, "damage opens no access"
    assert live.http.get("/v1/datasets", headers=with_it).status_code == 401


def test_an_alias_is_not_answered_with_another_policy(
    index: Path, start: Callable[..., Any]
) -> None:
    damage_rows(index, "UPDATE policies SET step = 5 WHERE version = 2")
    live = start(data=index.parent)
    assert live.http.get("/v1/runs/r/policies/1").content == b"w"
    for which in ("2", "latest"):
        assert live.http.get(f"/v1/runs/r/policies/{which}").json()["code"] == "index_damaged"
    (listed,) = live.http.get("/v1/runs/r/policies").json()["items"]
    assert (listed["version"], listed["aliases"]) == (1, [])
    again = live.publish(2, b"other")
    assert again.json()["code"] == "index_damaged", "a version never changes"


def test_an_older_policy_that_is_lost_hides_no_newer_one(
    index: Path, start: Callable[..., Any]
) -> None:
    damage_rows(index, "UPDATE policies SET step = 5 WHERE version = 1")
    live = start(data=index.parent)
    (listed,) = live.http.get("/v1/runs/r/policies").json()["items"]
    assert (listed["version"], listed["aliases"]) == (2, ["latest"])


def test_a_new_row_does_not_inherit_what_belonged_to_a_lost_one(
    index: Path, start: Callable[..., Any]
) -> None:
    """SQLite gives a number again when its row is gone."""
    damage_rows(index, "UPDATE runs SET notes = 'x'")
    live = start(data=index.parent)
    live.run("new")
    assert live.http.get("/v1/runs/new/policies").json()["items"] == []
    assert live.http.post("/v1/runs", json={"name": "r", "kind": "train"}).status_code == 500


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("UPDATE shards SET sha256 = 'x', bytes = 1", "shards"),
        ("UPDATE partition_stats SET steps = 1", "totals"),
        ("UPDATE snapshot_shards SET shard_pk = 77", "snapshot_shards"),
    ],
)
def test_what_other_rows_or_files_prove_is_put_back(
    index: Path, sent: list[Trajectory], start: Callable[..., Any], statement: str, what: str
) -> None:
    damage_rows(index, statement)
    live = start(data=index.parent)
    assert not live.service.db.lost, what
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]
    assert live.dataset("kitchen")["fifo"]["steps"] == 16
    index = stop(live)
    assert fsck.check(index.parent, deep=True).problems == []


def test_an_index_of_sqlite_that_misses_a_row_stores_nothing_twice(
    index: Path, sent: list[Trajectory], start: Callable[..., Any]
) -> None:
    """The id stands in the row and in the b-tree by which ids are looked up."""
    wrong = sent[1].id[:-1] + ("0" if sent[1].id[-1] != "0" else "1")
    with closing(sqlite3.connect(index)) as plain:
        page = plain.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_trajectories_2'"
        ).fetchone()[0]
    content = index.read_bytes()
    which = [
        content.count(sent[1].id.encode(), 0, place)
        for place in range((page - 1) * 4096, page * 4096)
        if content.startswith(sent[1].id.encode(), place)
    ]
    change_bytes(index, sent[1].id.encode(), wrong.encode(), which=which[0])
    live = start(data=index.parent)
    assert live.post(sent, "kitchen") == [("duplicate", n) for n in (1, 2, 3, 4)]
    assert not live.service.db.lost
    index = stop(live)
    assert fsck.check(index.parent).problems == []


def test_a_page_that_cannot_be_read_costs_its_own_rows(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    upgrade(path)
    with write_index(path) as plain:
        rows = [(f"run{n:04d}", "x" * 300) for n in range(400)]
        plain.executemany(
            "INSERT INTO runs (name, notes, kind, status, created_at, heartbeat_at)"
            " VALUES (?, ?, 'train', 'running', 0, 0)",
            rows,
        )
    content = bytearray(path.read_bytes())
    page = content.index(b"run0200") // 4096
    content[page * 4096] ^= 0xFF
    path.write_bytes(content)
    with closing(sqlite3.connect(path)) as plain:
        reader = TableReader(plain, "runs")
        found = {row["name"] for row in reader.rows()}
        lost = {row["name"] for row in reader.lost()}
        assert reader.unread and not reader.nameless()
    assert found | lost == {name for name, _ in rows} and not found & lost
    assert "run0200" in lost and len(lost) < 20


def test_an_index_that_cannot_name_its_loss_is_refused_with_the_cure(
    index: Path, sent: list[Trajectory], start: Callable[..., Any]
) -> None:
    index.write_bytes(index.read_bytes()[: 4096 * 12])
    with pytest.raises(IndexUnusable, match=r"fsck --rebuild --data"):
        start(data=index.parent)
    assert fsck.main(["--data", str(index.parent), "--rebuild"]) == 0
    live = start(data=index.parent)
    assert [live.steps(t).digest for t in sent] == [t.digest for t in sent]


# --- the mark of a clean stop, the schema, the log ------------------------------------------------


def test_the_mark_of_a_clean_stop_fits_the_very_bytes_and_is_used_once(index: Path) -> None:
    assert take_mark(index)
    assert not take_mark(index), "it is gone, whatever happens next"
    mark_clean(index)
    content = bytearray(index.read_bytes())
    content[len(content) // 2] ^= 1
    index.write_bytes(content)
    assert not take_mark(index)


def test_a_start_after_a_clean_stop_reads_no_row(
    index: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> list[str]:
        raise AssertionError("every row was read")

    monkeypatch.setattr("server.maintenance.index_repair.damage", fail)
    start(data=index.parent)


def test_flipped_bits_of_the_schema_are_put_back(index: Path) -> None:
    keep_schema(index)
    whole, rng = index.read_bytes(), random.Random(1)
    places = [n for n, byte in enumerate(whole) if whole.startswith(b"CREATE T", n) and byte]
    for place in places:
        content = bytearray(whole)
        content[place + rng.randrange(8)] ^= 1 << rng.randrange(8)
        index.write_bytes(content)
        mend_schema(index)
        assert index.read_bytes() == whole
    index.write_bytes(whole[:100] + bytes(3000) + whole[3100:])
    mend_schema(index)
    assert index.read_bytes()[100:3100] == bytes(3000), "another file's pages are not its own"


def test_no_flipped_bit_of_the_log_undoes_a_commit(tmp_path: Path) -> None:
    original, copy = tmp_path / "index.sqlite", tmp_path / "copy" / "index.sqlite"
    copy.parent.mkdir()
    with closing(sqlite3.connect(original, isolation_level=None)) as plain:
        plain.execute("PRAGMA journal_mode = WAL")
        plain.execute("CREATE TABLE t (a)")
        for n in range(30):
            plain.execute("INSERT INTO t VALUES (?)", (n,))
        whole, main = (tmp_path / "index.sqlite-wal").read_bytes(), original.read_bytes()
    rng, log = random.Random(2), copy.with_name("index.sqlite-wal")
    for number in range(60):
        content = bytearray(whole)
        content[number if number < 30 else rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        copy.write_bytes(main)
        log.write_bytes(content)
        assert not mend_wal(copy).trouble
        with closing(sqlite3.connect(copy)) as plain:
            assert plain.execute("SELECT count(*) FROM t").fetchone() == (30,)
    for size in (len(whole) - 1, len(whole) - 4096, 5000, 33):
        torn = whole[:size]
        log.write_bytes(torn)
        assert not mend_wal(copy).trouble and log.read_bytes() == torn, "an unfinished end stays"
