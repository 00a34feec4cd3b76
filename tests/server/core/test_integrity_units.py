"""The integrity checker by itself: what it says of each stored file, and what it does about it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import sqlalchemy as sa

from server import integrity as module
from server.index.sql_tables import EXCLUDED
from server.index.tables import policies, shards
from server.integrity import IntegrityChecker, checked, damaged_shard, excluded, gone
from server.problems import ProblemError
from server.storage import store as storage
from server.storage.checksums import Corrupt, Source, examine
from stepwell.testing import make_spec, make_trajectory
from tests.server.core.conftest import flip

SPEC = make_spec(observation=3, action=2)


@pytest.fixture
def stored(live: Any) -> Any:
    """A live service with two shards (three and one trajectories) and two policies."""
    live.create()
    for seeds in ((1, 2, 3), (4,)):
        live.post([make_trajectory(SPEC, length=20, seed=seed) for seed in seeds])
        live.flush()
    live.run()
    for version in (1, 2):
        assert live.publish(version, b"policy" * 50).status_code == 201
    return live


def shard_rows(live: Any) -> list[Any]:
    with live.service.db.read() as connection:
        return list(connection.execute(sa.select(shards).order_by(shards.c.pk)))


def policy_rows(live: Any) -> list[Any]:
    with live.service.db.read() as connection:
        return list(connection.execute(sa.select(policies).order_by(policies.c.pk)))


def shard_file(live: Any, row: Any) -> Path:
    return Path(live.data / "shards" / row.partition / f"{row.id}.parquet")


def change(live: Any, table: sa.Table, pk: int, **values: Any) -> None:
    with live.service.db.write() as connection:
        connection.execute(sa.update(table).where(table.c.pk == pk).values(**values))


def give_up(live: Any, pk: int) -> None:
    """As retention does: nothing alive is in it."""
    with live.service.db.write() as connection:
        connection.exec_driver_sql(f"UPDATE trajectories SET state='evicted' WHERE shard_pk = {pk}")
    change(live, shards, pk, state="deleted")


def test_a_whole_shard_is_verified_and_the_time_noted(stored: Any) -> None:
    first, second = shard_rows(stored)
    for row in (first, second):
        change(stored, shards, row.pk, verified_at=1.0, checksums=b"")
    steps: list[tuple[int, int, int]] = []
    assert stored.service.integrity.verify_shard(first.pk, lambda *step: steps.append(step))
    after, other = shard_rows(stored)
    assert after.verified_at > 1.0 and after.checksums == first.checksums
    assert (other.verified_at, other.checksums) == (1.0, b"")
    assert steps, "a long read tells how far it is"


def test_a_damaged_shard_goes_out_of_circulation_once(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = stored.service.integrity
    passed: list[str] = []
    monkeypatch.setattr(module, "failpoint", lambda name: passed.append(name))
    first, second = shard_rows(stored)
    flip(shard_file(stored, first))
    assert not checker.verify_shard(first.pk)
    assert passed == ["quarantine.before_commit", "quarantine.after_commit"]
    assert checker.quarantined == {first.id}
    assert [row.state for row in shard_rows(stored)] == ["quarantined", "live"]
    with pytest.raises(ProblemError) as failed:
        checker.shard(first.id)
    assert (failed.value.status, failed.value.code) == (410, "damaged")
    assert checker.verify_shard(first.pk), "it is no shard in circulation any more"
    assert checker.recheck_shard(first.id)
    assert not checker.recheck_shard(second.id) and not checker.recheck_shard("sh_never")
    assert checker.verify_shard(999)
    with stored.service.db.read() as connection:
        (named,) = excluded(connection)
        assert (named.dataset, named.trajectories) == ("d", 3)
        assert named.file == first.id


def test_what_is_excluded_is_found_without_reading_all_trajectories(stored: Any) -> None:
    """Every list of datasets asks for it."""
    with stored.service.db.read() as connection:
        plan = [row[-1] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {EXCLUDED}")]
    assert any("SEARCH t USING INDEX ix_trajectories_segment_pk" in line for line in plan)
    assert not any(line.startswith("SCAN t") for line in plan)


def test_a_missing_shard_is_damage_unless_it_was_deleted(stored: Any) -> None:
    checker = stored.service.integrity
    first, second = shard_rows(stored)
    shard_file(stored, first).unlink()
    assert checker.recheck_shard(first.id) and checker.quarantined == {first.id}
    shard_file(stored, second).unlink()
    give_up(stored, second.pk)
    assert not checker.recheck_shard(second.id)
    with pytest.raises(ProblemError) as failed:
        checker.shard(second.id)
    assert (failed.value.status, failed.value.code) == (410, "snapshot_expired")


def test_a_shard_that_goes_while_it_is_read_is_no_damage(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = stored.service.integrity
    first, _ = shard_rows(stored)

    def deleted_meanwhile(folder: str, name: str, step: Any) -> None:
        give_up(stored, first.pk)

    monkeypatch.setattr(stored.service.integrity, "_examined", deleted_meanwhile)
    assert checker.verify_shard(first.pk)
    assert checker.quarantined == set()


def test_what_workers_could_not_read_is_looked_at(stored: Any) -> None:
    first, second = shard_rows(stored)
    flip(shard_file(stored, first))
    names = [f"shards/fifo/{row.id}.parquet" for row in (second, first)]
    stored.service.integrity.recheck_files(["mirror/trajectories-0.parquet", *names])
    assert stored.service.integrity.quarantined == {first.id}


def test_a_disk_that_cannot_be_read_now_condemns_nothing(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, say. What the disk itself cannot read back (EIO) is damage."""
    checker = stored.service.integrity
    first, _ = shard_rows(stored)
    monkeypatch.setattr(storage, "examine", Mock(side_effect=OSError(errno.EMFILE, "too many")))
    with pytest.raises(OSError, match="too many"):
        checker.verify_shard(first.pk)
    with pytest.raises(OSError, match="too many"):
        checker.verify_file(policies, policy_rows(stored)[0].pk)
    assert checker.quarantined == set() == checker.damaged_files
    monkeypatch.setattr(storage, "examine", Mock(side_effect=OSError(errno.EIO, "bad sector")))
    assert not checker.verify_shard(first.pk)
    assert not checker.verify_file(policies, policy_rows(stored)[0].pk)


def test_a_key_that_became_another_file_s_keeps_its_own_checksums(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is deleted while it is read, and the next one gets its key."""
    first, _ = shard_rows(stored)
    real = examine

    def renamed(path: Path, step: Any) -> Any:
        found = real(path, step)
        change(stored, shards, first.pk, id="sh_new", sha256="0" * 64, checksums=b"own")
        return found

    monkeypatch.setattr(storage, "examine", renamed)
    assert stored.service.integrity.verify_shard(first.pk)
    assert shard_rows(stored)[0].checksums == b"own"


def test_policies_are_refused_while_damaged_and_forgiven_when_restored(
    stored: Any, tmp_path: Path
) -> None:
    checker = stored.service.integrity
    first, second = policy_rows(stored)
    path = stored.data / "policies" / first.file
    shutil.copy(path, tmp_path / "good")
    change(stored, policies, first.pk, verified_at=1.0)
    change(stored, policies, second.pk, verified_at=1.0)
    flip(path)
    assert not checker.verify_file(policies, first.pk) and checker.verify_file(policies, second.pk)
    assert checker.damaged_files == {f"policies/{first.file}"}
    assert [row.verified_at == 1.0 for row in policy_rows(stored)] == [True, False]
    path.unlink()
    assert not checker.verify_file(policies, first.pk)
    shutil.copy(tmp_path / "good", path)
    steps: list[Any] = []
    assert checker.verify_file(policies, first.pk, lambda *step: steps.append(step)) and steps
    assert checker.damaged_files == set() and policy_rows(stored)[0].verified_at > 1.0
    assert checker.verify_file(policies, 999)


@pytest.mark.parametrize("fate", ["deleted", "published anew"])
def test_a_policy_that_changes_while_it_is_read_is_no_damage(
    stored: Any, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    first, _ = policy_rows(stored)

    def meanwhile(folder: str, name: str, step: Any) -> None:
        if fate == "published anew":
            change(stored, policies, first.pk, file="pol_new.bin")
            return
        with stored.service.db.write() as connection:
            connection.exec_driver_sql(f"DELETE FROM policy_aliases WHERE policy_pk = {first.pk}")
            connection.execute(sa.delete(policies).where(policies.c.pk == first.pk))

    monkeypatch.setattr(stored.service.integrity, "_examined", meanwhile)
    assert stored.service.integrity.verify_file(policies, first.pk)
    assert stored.service.integrity.damaged_files == set()


def test_a_start_takes_back_what_was_restored_and_nothing_else(stored: Any, tmp_path: Path) -> None:
    service = stored.service
    first, second = shard_rows(stored)
    for row in (first, second):
        shutil.copy(shard_file(stored, row), tmp_path / row.id)
        flip(shard_file(stored, row))
        assert not service.integrity.verify_shard(row.pk)
    change(stored, shards, first.pk, retired_uptime=5.0, verified_at=1.0, checksums=b"")
    shutil.copy(tmp_path / first.id, shard_file(stored, first))
    service.integrity.restore_quarantined()
    again = IntegrityChecker(service.db, service.store)
    assert again.quarantined == service.integrity.quarantined == {second.id}
    after, other = shard_rows(stored)
    assert (after.state, after.retired_uptime, after.checksums) == ("live", None, first.checksums)
    assert after.verified_at > 1.0 and other.state == "quarantined"
    assert again.shard(first.id)[0].read() == (tmp_path / first.id).read_bytes()


def test_damaged_segments_are_named_at_a_start_while_something_was_in_them(live: Any) -> None:
    live.create()
    live.post([make_trajectory(SPEC, seed=1)])
    (name,) = live.service.store.names("segments")
    service = live.service
    assert IntegrityChecker(service.db, service.store).damaged_files == set()
    with service.db.write() as connection:
        connection.exec_driver_sql("UPDATE segments SET state = 'damaged'")
    assert IntegrityChecker(service.db, service.store).damaged_files == {f"segments/{name}"}
    with service.db.write() as connection:
        connection.exec_driver_sql("UPDATE trajectories SET state = 'evicted'")
    assert IntegrityChecker(service.db, service.store).damaged_files == set()


def test_refusals_say_what_to_do(stored: Any) -> None:
    checker = stored.service.integrity
    for problem, code, words in (
        (
            checker.damaged_file("snapshots/x"),
            "damaged",
            "snapshots/x is damaged: restore the file",
        ),
        (damaged_shard("sh_1"), "damaged", "shard sh_1 is damaged and quarantined"),
        (gone("sh_2"), "snapshot_expired", "shard sh_2 was deleted: no lease held it"),
    ):
        assert (problem.status, problem.code) == (410, code)
        assert words in problem.detail
    assert checker.damaged_files == {"snapshots/x"}
    assert checker.damaged_file("snapshots/x").expected == "the bytes that were written"
    assert damaged_shard("x").expected == "the bytes that were written"


def test_a_small_file_is_read_whole_or_is_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 100)
    found = examine(path)
    source = Source(path, 100, found.checksums)
    assert checked(source) == b"x" * 100
    flip(path, 50)
    with pytest.raises(Corrupt):
        checked(source)
    path.unlink()
    with pytest.raises(Corrupt, match="missing"):
        checked(source)
    for number, kind in ((errno.EIO, Corrupt), (errno.EMFILE, OSError)):
        broken = Mock(spec=Source, path=path)
        broken.read.side_effect = OSError(number, "odd")
        with pytest.raises(kind, match="odd"):
            checked(broken)


def test_twenty_that_fail_together_hash_the_file_once(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another, and the later ones see what the first found out."""
    import threading

    first, _ = shard_rows(stored)
    flip(shard_file(stored, first))
    calls: list[Path] = []
    real: Callable[..., Any] = examine

    def counted(path: Path, step: Any) -> Any:
        calls.append(path)
        return real(path, step)

    monkeypatch.setattr(storage, "examine", counted)
    found: list[bool] = []
    suspect = stored.service.integrity.recheck_shard
    threads = [threading.Thread(target=lambda: found.append(suspect(first.id))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20 and len(calls) == 1
