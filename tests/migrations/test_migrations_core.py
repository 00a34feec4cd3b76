"""Migrations make exactly the schema in tables.py, forwards and back, and keep the guards."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from server.index.db import (
    ROOT,
    Database,
    IndexUnusable,
    connect,
    next_change_id,
    next_dataset_pk,
    revision,
    upgrade,
)
from server.index.tables import REVISION, TRIGGERS, counters, metadata, tombstones


def config(path: Path) -> Config:
    made = Config()
    made.set_main_option("script_location", str(ROOT / "migrations"))
    made.attributes["path"] = path
    return made


REVISIONS = [
    script.revision
    for script in reversed(list(ScriptDirectory.from_config(config(Path())).walk_revisions()))
]


def test_the_code_expects_the_newest_revision_and_there_is_one_head() -> None:
    scripts = ScriptDirectory.from_config(config(Path()))
    assert scripts.get_heads() == [REVISION]


@pytest.mark.parametrize("step", REVISIONS)
def test_the_guards_exist_after_every_revision(step: str, tmp_path: Path) -> None:
    """Batch operations on SQLite rebuild tables and silently lose their triggers."""
    path = tmp_path / "index.sqlite"
    command.upgrade(config(path), step)
    engine = connect(path)
    with engine.connect() as c:
        rows = c.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        found = {row[0]: " ".join(row[1].split()) for row in rows}
    engine.dispose()
    assert {"protected_update", "protected_delete"} <= found.keys() <= TRIGGERS.keys()
    if step == REVISION:
        assert found == {name: " ".join(text.split()) for name, text in TRIGGERS.items()}


def test_the_migrated_schema_is_the_one_in_tables(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    upgrade(path)
    engine = connect(path)
    with engine.connect() as c:
        assert compare_metadata(MigrationContext.configure(c), metadata) == []
        checks = sa.inspect(c).get_check_constraints("trajectories")
        assert {check["name"] for check in checks} == {
            "ck_trajectories_partition",
            "ck_trajectories_state",
            "ck_trajectories_purpose",
        }
        names = c.execute(sa.select(counters.c.name)).scalars().all()
        assert sorted(names) == ["change_id", "dataset", "epoch", "uptime"]
    engine.dispose()


def test_down_to_nothing_and_up_again(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    upgrade(path)
    command.downgrade(config(path), "base")
    assert revision(path) is None
    assert upgrade(path) == REVISION
    db = Database(path)
    with db.write() as c:
        assert c.execute(sa.select(sa.func.count()).select_from(counters)).scalar() == 4
    db.close()


def test_keys_of_datasets_are_counted_from_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    command.upgrade(config(path), "0005")
    engine = connect(path)
    with engine.begin() as c:
        c.exec_driver_sql(
            "INSERT INTO datasets (pk, name, spec, spec_digest, created_at)"
            " VALUES (3, 'a', '{}', '', 0), (7, 'b', '{}', '', 0)"
        )
    engine.dispose()
    upgrade(path)
    db = Database(path)
    with db.write() as c:
        assert next_dataset_pk(c) == 8
    db.close()


def test_workers_that_start_launches_get_their_new_role(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    command.upgrade(config(path), "0006")
    engine = connect(path)
    with engine.begin() as c:
        c.exec_driver_sql(
            "INSERT INTO workers (id, role, host, policy, state, counters, last_error, command,"
            " started_at, heartbeat_at) VALUES ('a', 'agent', '', '', 'running', '{}', '', 'none',"
            " 0, 0), ('b', 'train', '', '', 'running', '{}', '', 'none', 0, 0)"
        )
    upgrade(path)
    with engine.connect() as c:
        roles = c.exec_driver_sql("SELECT role FROM workers ORDER BY id").scalars().all()
    assert roles == ["launcher", "train"]
    engine.dispose()


def test_marks_become_change_ids(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    command.upgrade(config(path), "0007")
    engine = connect(path)
    with engine.begin() as c:
        c.exec_driver_sql("UPDATE counters SET value = 41 WHERE name = 'mark'")
        c.exec_driver_sql(
            "INSERT INTO datasets (pk, name, spec, spec_digest, created_at)"
            " VALUES (1, 'a', '{}', '', 0)"
        )
        c.exec_driver_sql(
            "INSERT INTO tombstones (id, dataset_pk, seq, digest, evicted_uptime, mark)"
            " VALUES ('x', 1, 1, '', 0, 40)"
        )
    engine.dispose()
    upgrade(path)
    db = Database(path)
    with db.write() as c:
        assert next_change_id(c) == 42
        assert c.execute(sa.select(tombstones.c.change_id)).scalars().all() == [40]
    db.close()
    command.downgrade(config(path), "0007")
    engine = connect(path)
    with engine.begin() as c:
        assert c.exec_driver_sql("SELECT mark FROM tombstones").scalar() == 40
    engine.dispose()


def test_an_older_index_is_refused_by_the_door_and_cured_by_the_command(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    connect(path).connect().close()
    with pytest.raises(IndexUnusable, match="stepwell db upgrade"):
        Database(path)
    upgrade(path)
    Database(path).close()


def test_connections_wait_for_the_disk_and_write_one_at_a_time(tmp_path: Path) -> None:
    """WAL, every commit synced, foreign keys on; a write inside a write is our own mistake."""
    path = tmp_path / "index.sqlite"
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
