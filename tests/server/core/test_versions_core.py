"""A version means the same trajectories for ever: nothing evicts, deletes or changes them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from server.fsck import main as fsck
from server.maintenance.rebuild import rebuild
from server.service import Service
from server.settings import Settings
from server.storage.checksums import Source
from server.storage.version_file import VersionDamaged, read_version
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.index_file import write_index

SPEC = make_spec(observation=3, action=2)
pytestmark = pytest.mark.sql_worker


def make(count: int, first: int = 0, **options: Any) -> list[Trajectory]:
    return [make_trajectory(SPEC, length=4 + i, seed=first + i, **options) for i in range(count)]


def create(live: Any, name: str, dataset: str = "d", **body: Any) -> dict[str, Any]:
    response = live.http.post(f"/v1/datasets/{dataset}/versions", json={"name": name, **body})
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    return found


def refused(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["code"]


def ask(live: Any, sql: str) -> list[list[Any]]:
    rows: list[list[Any]] = live.query(sql)["rows"]
    return rows


def snapshot(live: Any, **body: Any) -> dict[str, Any]:
    response = live.http.post("/v1/snapshots", json=body)
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_version_is_what_the_condition_selected_once(live: Any) -> None:
    live.create()
    sent = make(5, env="E-v0", policy="p/1")
    live.post(sent[::-1])  # the digest does not depend on the order of arrival
    live.post(make(1, 50, purpose="eval"))
    made = create(live, "v1", where="length > 5 -- three", licence="CC0-1.0", description="good")
    kept = sorted((t for t in sent if len(t) > 5), key=lambda t: t.id)
    assert (made["version"], made["dataset"], made["name"]) == ("d@v1", "d", "v1")
    lines = "".join(f"{t.id} {t.digest}\n" for t in kept)
    assert made["digest"] == hashlib.sha256(lines.encode()).hexdigest(), "as versions.md says"
    assert (made["licence"], made["description"], made["created_by"]) == (
        "CC0-1.0",
        "good",
        "local",
    )
    assert (made["spec"], made["parent"], made["missing"]) == (SPEC.to_json(), None, 0)
    numbers = made["statistics"]
    assert (numbers["trajectories"], numbers["steps"]) == (3, 6 + 7 + 8)
    assert numbers["lengths"]["median"] == 7 and numbers["lengths"]["max"] == 8
    mean = sum(float(t.rewards.sum()) for t in kept) / 3
    assert numbers["returns"]["mean"] == pytest.approx(mean, abs=1e-5)
    assert (numbers["envs"], numbers["policies"]) == ({"E-v0": 3}, {"p/1": 3})
    live.post(make(3, 20))  # longer than 5, too: the selection is not run again
    again = live.http.get("/v1/datasets/d/versions/v1").json()
    assert again == made
    ids = ask(live, made["select"] + " ORDER BY id")
    assert [row[0] for row in ids] == [t.id for t in kept]
    assert create(live, "all", include_eval=True)["statistics"]["trajectories"] == 9
    listed = live.http.get("/v1/datasets/d/versions", params={"limit": 1}).json()
    assert [one["name"] for one in listed["items"]] == ["all"]
    after = {"limit": 1, "cursor": listed["next"]}
    rest = live.http.get("/v1/datasets/d/versions", params=after).json()
    assert [one["name"] for one in rest["items"]] == ["v1"] and rest["next"] is None


def test_neither_capacity_nor_demotion_nor_deletion_takes_a_trajectory_away(live: Any) -> None:
    live.create(capacity={"trajectories": 3})
    sent = make(3)
    live.post(sent)
    create(live, "v1", where="length < 6")
    dataset = live.dataset()
    assert (dataset["fifo"]["trajectories"], dataset["protected"]["trajectories"]) == (1, 2)
    assert dataset["protected"]["steps"] == 4 + 5
    live.post(make(6, 30))
    left = {one["id"] for one in live.listing()}
    assert {t.id for t in sent[:2]} <= left and sent[2].id not in left
    first = f"/v1/trajectories/{sent[0].id}"
    answer = live.http.post(f"{first}/demote")
    assert refused(answer) == (409, "versioned") and "d@v1" in answer.json()["detail"]
    for query in ("", "?protected=true"):
        answer = live.http.delete(f"/v1/datasets/d{query}")
        assert refused(answer) == (409, "versioned") and "d@v1" in answer.json()["detail"]
    labels = {"tags": ["good"], "notes": "labels are not content"}
    assert live.http.patch(first, json=labels).status_code == 200
    assert live.http.delete("/v1/datasets/d/versions/v1").status_code == 204
    assert live.info(sent[0])["partition"] == "protected", "demoting is another step"
    assert list((live.data / "versions").iterdir()) == []
    assert live.http.post(f"{first}/demote").status_code in (200, 204)
    assert live.http.delete("/v1/datasets/d?protected=true").status_code == 204


def test_the_database_itself_refuses_what_a_defect_would_do(live: Any) -> None:
    live.create()
    live.post(make(2))
    create(live, "v1", where="length = 4")
    db = live.service.db
    with db.write() as c:
        c.exec_driver_sql(
            "INSERT INTO audit (time, who, action, subject)"
            " SELECT 0, 'x', 'demote', id FROM trajectories"
        )
    member = "pk = (SELECT trajectory_pk FROM version_trajectories)"
    for statement in (
        f"UPDATE trajectories SET partition = 'fifo' WHERE {member}",
        f"UPDATE trajectories SET digest = 'x' WHERE {member}",
        f"UPDATE trajectories SET state = 'evicted' WHERE {member}",
        f"DELETE FROM trajectories WHERE {member}",
        "INSERT INTO version_trajectories SELECT 1, pk FROM trajectories WHERE partition = 'fifo'",
        "DELETE FROM datasets",
    ):
        with pytest.raises(sa.exc.IntegrityError), db.write() as c:
            c.exec_driver_sql(statement)


def test_a_name_is_given_once(live: Any) -> None:
    live.create()
    live.post(make(2))
    create(live, "v1")
    url = "/v1/datasets/d/versions"
    assert refused(live.http.post(url, json={"name": "v1"})) == (409, "version_exists")
    assert live.http.delete(f"{url}/v1").status_code == 204
    answer = live.http.post(url, json={"name": "v1"})
    assert refused(answer) == (409, "version_exists") and "deleted" in answer.json()["detail"]
    assert list((live.data / "versions").iterdir()) == []


def test_what_cannot_be_a_version_is_refused_and_leaves_nothing(live: Any) -> None:
    live.create()
    live.post(make(2))
    url = "/v1/datasets/d/versions"
    for body, wanted in (
        ({"name": "V 1"}, (422, "validation_error")),
        ({"name": "v1", "where": "length > 99"}, (422, "empty_selection")),
        ({"name": "v1", "where": "nonsense"}, (422, "sql_error")),
        ({"name": "v1", "where": "true) OR (dataset = 'other'"}, (201, "")),
        ({"name": "v2", "parent": "v9"}, (404, "not_found")),
    ):
        answer = live.http.post(url, json=body)
        assert answer.status_code == wanted[0], answer.text
        assert answer.json().get("code", "") == wanted[1]
    assert refused(live.http.post("/v1/datasets/no/versions", json={"name": "v"}))[0] == 404
    for path in ("v9", "v9/diff?before=v1", "v1/diff?before=v9"):
        assert refused(live.http.get(f"{url}/{path}")) == (404, "not_found")
    assert refused(live.http.delete(f"{url}/v9")) == (404, "not_found")
    assert len(list((live.data / "versions").iterdir())) == 1


def test_what_two_versions_differ_in(live: Any) -> None:
    live.create()
    sent = make(6)
    live.post(sent)
    create(live, "v1", where="length < 8")
    second = create(live, "v2", where="length > 5", parent="v1")
    assert second["parent"] == "d@v1"
    found = live.http.get("/v1/datasets/d/versions/v2/diff", params={"before": "v1"}).json()
    assert (found["before"], found["after"]) == ("d@v1", "d@v2")
    for part, lengths in (("kept", [6, 7]), ("added", [8, 9]), ("removed", [4, 5])):
        assert found[part]["statistics"]["steps"] == sum(lengths)
        shown = ask(live, f"SELECT length FROM ({found[part]['sql']}) ORDER BY length")
        assert [row[0] for row in shown] == lengths, part
    same = live.http.get("/v1/datasets/d/versions/v1/diff", params={"before": "v1"}).json()
    assert same["added"]["statistics"]["trajectories"] == 0
    assert same["added"]["statistics"]["returns"] is None


def test_a_snapshot_of_a_version_is_always_the_same(live: Any) -> None:
    live.create()
    live.post(make(4))
    create(live, "v1", where="length > 5")
    first = snapshot(live, dataset="d@v1")
    assert (first["trajectories"], first["datasets"]) == (2, ["d"])
    assert first["selection"]["dataset"] == "d@v1"
    live.post(make(4, 30))
    assert snapshot(live, dataset="d@v1")["digest"] == first["digest"]
    assert snapshot(live, dataset="d@v1", since=first["id"])["id"] == first["id"]
    part = snapshot(live, dataset="d@v1", where="length = 6 OR length < 5")
    assert part["trajectories"] == 1, "the condition narrows the version"
    answer = live.http.post("/v1/snapshots", json={"dataset": "d@v7"})
    assert refused(answer) == (404, "not_found")
    answer = live.http.post("/v1/snapshots", json={"dataset": "d@"})
    assert refused(answer) == (422, "validation_error")


def test_sql_sees_versions_as_they_come_and_go(live: Any) -> None:
    live.create()
    live.post(make(3))
    create(live, "v1", licence="MIT")
    rows = "SELECT version, count(*) FROM version_trajectories GROUP BY version ORDER BY version"
    assert ask(live, rows) == [["d@v1", 3]]
    create(live, "v2", where="length < 6", parent="v1")
    assert ask(live, rows) == [["d@v1", 3], ["d@v2", 2]]
    table = ask(live, "SELECT version, parent, trajectories, licence FROM versions ORDER BY name")
    assert table == [["d@v1", None, 3, "MIT"], ["d@v2", "d@v1", 2, ""]]
    assert live.http.delete("/v1/datasets/d/versions/v2").status_code == 204
    assert ask(live, rows) == [["d@v1", 3]]
    create(live, "v3", where="length = 4")  # takes the key of v2 in the index
    assert ask(live, rows) == [["d@v1", 3], ["d@v3", 1]]
    inside = "id IN (SELECT trajectory FROM version_trajectories WHERE version = 'd@v1')"
    assert ask(live, f"SELECT sum(length) FROM trajectories WHERE {inside}") == [[4 + 5 + 6]]


def test_compaction_moves_the_data_and_the_version_stays(start: Callable[..., Any]) -> None:
    live = start(compact_after=0.0, shard_grace=0.0)
    live.create()
    for i in range(4):
        live.post(make(2, 10 * i))
        live.flush()
    made = create(live, "v1", where="length = 4")
    live.service.maintenance.round()
    held = ask(live, f"SELECT count(DISTINCT shard) FROM ({made['select'].replace('id', '*', 1)})")
    assert held == [[1]], "in one shard, which it did not share before"
    assert snapshot(live, dataset="d@v1")["trajectories"] == 4
    live.service.close()
    assert fsck.check(live.data, deep=True).clean


# --- files, damage, rebuild -----------------------------------------------------------------------


def test_the_file_says_everything_to_any_reader(live: Any) -> None:
    live.create()
    sent = make(3)
    live.post(sent)
    made = create(live, "v1", where="length < 6", description="d", licence="l")
    (path,) = (live.data / "versions").iterdir()
    table = pq.read_table(path)
    wanted = sorted((t.id, t.digest) for t in sent[:2])
    assert list(zip(*table.to_pydict().values(), strict=True)) == wanted
    header = read_version(Source(path)).header
    assert (header.dataset, header.name, header.condition) == ("d", "v1", "length < 6")
    assert header.digest == made["digest"]
    assert header.statistics.model_dump() == made["statistics"]


def lose_index(live: Any) -> Path:
    live.service.close()
    data: Path = live.data
    for path in data.glob("index.sqlite*"):
        path.unlink()
    return data


@pytest.mark.parametrize("lost", [True, False])
def test_a_rebuild_restores_versions_before_any_capacity_applies(
    start: Callable[..., Any], lost: bool
) -> None:
    live = start()
    live.create(capacity={"trajectories": 3})
    sent = make(3)
    live.post(sent)
    made = create(live, "v1", where="length < 6", licence="MIT")
    live.flush()
    live.post(make(3, 20))
    if lost:
        lose_index(live)
    else:
        live.service.close()
    result = rebuild(live.data)
    assert result.versions == 1
    assert fsck.check(live.data, deep=True).problems == []
    again = start()
    found = again.http.get("/v1/datasets/d/versions/v1").json()
    assert found == made
    assert {again.info(t)["partition"] for t in sent[:2]} == {"protected"}
    assert snapshot(again, dataset="d@v1")["trajectories"] == 2
    assert refused(again.http.post(f"/v1/trajectories/{sent[0].id}/demote")) == (409, "versioned")


def test_a_rebuild_says_what_a_version_has_lost(start: Callable[..., Any]) -> None:
    live = start()
    live.create()
    live.post(make(2))
    live.flush()
    (shard,) = (live.data / "shards" / "fifo").iterdir()
    live.post(make(2, 20))
    create(live, "v1")
    lose_index(live)
    shard.unlink()
    result = rebuild(live.data)
    assert "2 of 4 trajectories of version d@v1" in result.lost
    problems = [problem.where for problem in fsck.check(live.data).problems]
    assert problems == ["version d@v1"]
    again = start()
    assert again.http.get("/v1/datasets/d/versions/v1").json()["missing"] == 2
    answer = again.http.post("/v1/snapshots", json={"dataset": "d@v1"})
    assert refused(answer) == (410, "damaged") and "2 of its" in answer.json()["detail"]


def test_a_rebuild_sets_aside_what_belongs_to_nothing(start: Callable[..., Any]) -> None:
    live = start()
    live.create()
    live.post(make(1))
    create(live, "v1")
    data = lose_index(live)
    (path,) = (data / "versions").iterdir()
    (data / "versions" / "vn_torn.parquet").write_bytes(path.read_bytes()[:-40])
    (copy,) = [(data / "versions" / "vn_0.parquet")]
    copy.write_bytes(path.read_bytes())
    result = rebuild(data)
    assert result.versions == 1
    assert [p.name for p in (data / "versions").iterdir()] == [path.name], "the newer of two"
    aside = sorted(p.name for p in (data / "quarantine" / "versions").iterdir())
    assert aside == ["vn_0.parquet", "vn_torn.parquet"]
    assert any("vn_torn" in line for line in result.lost)


def test_a_changed_file_or_row_is_noticed(start: Callable[..., Any]) -> None:
    live = start()
    live.create()
    live.post(make(2))
    create(live, "v1")
    live.service.close()
    (path,) = (live.data / "versions").iterdir()
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    whole = path.read_bytes()
    path.write_bytes(content)
    assert [p.where for p in fsck.check(live.data).problems] == [f"versions/{path.name}"]
    path.write_bytes(whole)
    with write_index(live.data / "index.sqlite") as index:
        index.execute("DELETE FROM version_trajectories WHERE trajectory_pk = 1")
    assert [p.where for p in fsck.check(live.data).problems] == ["version d@v1"]
    path.write_bytes(b"PAR1")
    with pytest.raises(VersionDamaged, match=path.name):
        read_version(Source(path))


def test_an_index_is_not_begun_anew_beside_versions(live: Any, tmp_path: Path) -> None:
    live.create()
    live.post(make(1))
    create(live, "v1")
    shutil.copytree(live.data / "versions", tmp_path / "other" / "versions")
    with pytest.raises(RuntimeError, match="rebuild"):
        Service(Settings(data=tmp_path / "other", sql_workers=0))


def test_no_version_has_damaged_trajectories(live: Any) -> None:
    live.create()
    live.post(make(2))
    live.flush()
    (shard,) = (live.data / "shards" / "fifo").iterdir()
    live.post(make(2, 20))
    live.flush()
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    live.service.integrity.recheck_shard(shard.stem)
    answer = live.http.post("/v1/datasets/d/versions", json={"name": "v1"})
    assert refused(answer) == (410, "damaged")
    made = create(live, "v1", where=f"shard <> '{shard.stem}'")
    assert made["statistics"]["trajectories"] == 2
