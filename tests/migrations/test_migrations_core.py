"""A new index is what tables.py says; an older one becomes it by migrations, or is refused."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.config import Config
from alembic.script import ScriptDirectory

from server.index import db as module
from server.index.db import MIGRATIONS, Database, IndexUnusable, revision, upgrade
from server.index.dialect import TRIGGERS, connect
from server.index.tables import REVISION, counters

FIRST = "0009"
GOLDEN = Path(__file__).parents[1] / "golden" / f"index_{FIRST}.sql"
"""A dump of an empty index of the first release; it never changes."""
NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "9998", "{before}", None, None


def upgrade():
    op.add_column("datasets", sa.Column("owner", sa.Text(), nullable=False, server_default=""))
    {then}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.sqlite"


@pytest.fixture
def first(path: Path) -> Path:
    """An index of the first release with a dataset in it."""
    with closing(sqlite3.connect(path)) as index:
        index.executescript(GOLDEN.read_text())
        index.execute(
            "INSERT INTO datasets (pk, name, spec, spec_digest, created_at)"
            " VALUES (3, 'a', '{}', '', 0)"
        )
        index.execute(
            "INSERT INTO partition_stats (dataset_pk, bucket, trajectories, steps)"
            " VALUES (3, 'fifo', 2, 40), (3, 'protected', 1, 20), (3, 'eval', 1, 9)"
        )
        index.execute(
            "INSERT INTO runs (pk, name, kind, status, notes, created_at, heartbeat_at)"
            " VALUES (7, 'r', 'train', 'finished', 'kept', 0, 0)"
        )
        index.commit()
    return path


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This program with one migration more."""
    folder = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(module, "MIGRATIONS", folder)
    monkeypatch.setattr(module, "REVISION", "9998")
    yield folder / "versions" / "9998_owner.py"


def schema(path: Path) -> dict[str, object]:
    """Every table with its columns, every index and trigger with its text; in any order."""
    found: dict[str, object] = {}
    with closing(sqlite3.connect(path)) as index:
        for kind, name, text in index.execute("SELECT type, name, sql FROM sqlite_master"):
            found[f"{kind} {name}"] = " ".join((text or "").split())
            if kind == "table":
                columns = index.execute(f"PRAGMA table_info({name})").fetchall()
                found[f"{kind} {name}"] = sorted(column[1:] for column in columns)
                found[f"keys of {name}"] = index.execute(
                    f"PRAGMA foreign_key_list({name})"
                ).fetchall()
    return found


def test_the_code_expects_the_newest_revision_and_there_is_one_head() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_heads() == [REVISION]


def test_a_new_index_has_its_guards_and_counters(path: Path) -> None:
    assert upgrade(path) == REVISION == revision(path)
    engine = connect(path)
    with engine.connect() as c:
        rows = c.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        found = {row[0]: " ".join(row[1].split()) for row in rows}
        assert found == {name: " ".join(text.split()) for name, text in TRIGGERS.items()}
        values = dict(c.execute(sa.select(counters.c.name, counters.c.value)).all())
        assert values.pop("store") > 0
        assert values == {"change_id": 0, "dataset": 0, "epoch": 0, "uptime": 0, "serial": 0}
        checks = sa.inspect(c).get_check_constraints("trajectories")
        assert {check["name"] for check in checks} == {
            "ck_trajectories_partition",
            "ck_trajectories_state",
            "ck_trajectories_purpose",
        }
    engine.dispose()


def test_an_index_of_the_first_release_becomes_what_tables_say(first: Path, tmp_path: Path) -> None:
    """Who changes tables.py without a migration is told here."""
    upgrade(first)
    new = tmp_path / "new.sqlite"
    upgrade(new)
    assert schema(first) == schema(new)
    db = Database(first)
    with db.read() as c:
        assert c.exec_driver_sql("SELECT name FROM datasets").scalars().all() == ["a"]
        run = c.exec_driver_sql("SELECT pk, name, notes, alarms FROM runs").one()
        assert tuple(run) == (7, "r", "kept", "[]")
    db.close()


def test_a_migration_keeps_rows_and_guards(first: Path, later: Path) -> None:
    """Batch operations on SQLite rebuild tables and silently lose their triggers: none is used."""
    later.write_text(NEXT.format(before=REVISION, then=""))
    before = schema(first)
    assert upgrade(first) == "9998" == revision(first)
    after = schema(first)
    changed = {name for name in before if after.get(name) != before[name]}
    owned = ("datasets", "runs", "launches", "evaluations", "workers", "jobs", "tokens", "audit")
    assert changed == {*(f"table {name}" for name in owned), "index ix_audit_action_subject"}
    new = after.keys() - before.keys()
    made = (
        *("consumers", "videos", "version", "saved_queries", "programs", "annotat"),
        *("deleted_files", "ix_audit", "lost_rows"),
    )
    assert all(any(what in name for what in made) for name in new)
    with closing(sqlite3.connect(first)) as index:
        found = index.execute("SELECT name, owner, inserted_steps FROM datasets").fetchall()
    assert found == [("a", "", 60)], "its training steps, of both partitions"


def test_a_migration_that_fails_changes_nothing(first: Path, later: Path) -> None:
    """One transaction for all steps: a file is at one revision or at another."""
    later.write_text(NEXT.format(before=REVISION, then="raise RuntimeError('power cut')"))
    before = schema(first)
    with pytest.raises(RuntimeError, match="power cut"):
        upgrade(first)
    assert (schema(first), revision(first)) == (before, FIRST)


def test_an_index_of_an_earlier_revision_is_refused_and_cured_by_the_command(
    first: Path, later: Path
) -> None:
    later.write_text(NEXT.format(before=REVISION, then=""))
    with pytest.raises(IndexUnusable, match="stepwell db upgrade"):
        Database(first)
    upgrade(first)
    Database(first).close()


@pytest.mark.parametrize(
    ("at", "cure"), [("0008", "stepwell fsck --rebuild"), ("9999", "install that version")]
)
def test_an_index_that_no_migration_knows_is_refused(first: Path, at: str, cure: str) -> None:
    """From before the first release, or from after this one. It is left as it is."""
    with closing(sqlite3.connect(first)) as index:
        index.execute("UPDATE alembic_version SET version_num = ?", (at,))
        index.commit()
    before = schema(first)
    for refuse in (upgrade, Database):
        with pytest.raises(IndexUnusable, match=f"{at}.*{cure}"):
            refuse(first)
    assert (schema(first), revision(first)) == (before, at)


def test_connections_wait_for_the_disk_and_write_one_at_a_time(path: Path) -> None:
    """WAL, every commit synced, foreign keys on; a write inside a write is our own mistake."""
    upgrade(path)
    db = Database(path)
    with db.read() as c:
        pragmas = [
            c.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert pragmas == ["wal", 2, 1]
    with db.write():
        with pytest.raises(AssertionError):
            with db.write():
                pass
    with pytest.raises(RuntimeError):
        with db.write() as c:
            c.execute(sa.update(counters).values(value=77))
            raise RuntimeError
    with db.read() as c:
        assert 77 not in c.execute(sa.select(counters.c.value)).scalars().all()
    db.close()
