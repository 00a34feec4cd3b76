"""Annotations: a critic's values of steps, stored once, shown in SQL while their steps live."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from server.fsck import main as fsck
from server.maintenance.rebuild import rebuild
from stepwell import Box, Client, Discrete, EnvSpec
from stepwell.codec import CodecError
from stepwell.errors import BadRequest, Conflict, NotFound, ServiceError, ServiceUnreachable
from stepwell.messages import ARROW, PostAnnotations
from stepwell.step_values import SCHEMA, decode
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec(observation=2, action=1)
LENGTHS = (3, 5, 4)
MEANS = """
SELECT trajectory, avg(advantage) AS mean, count(*) AS steps FROM annotations
WHERE name = 'critic' GROUP BY trajectory ORDER BY steps
"""


def values(trajectory: Any, level: float) -> dict[str, Any]:
    steps = len(trajectory)
    ones = [1.0] * steps
    return {
        "trajectory": trajectory.id,
        "q": [level + t for t in range(steps)],
        "v": ones,
        "advantage": [level] * (steps - 1) + [None],
        "weight": ones,
    }


@pytest.fixture
def service(fresh_service: Any) -> Any:
    return fresh_service


@pytest.fixture
def sent(service: Any) -> tuple[Client, list[Any]]:
    """A service with three trajectories, the first two annotated."""
    client = service.client(retry_for=0.0)
    client.create_dataset("d", SPEC)
    made = [make_trajectory(SPEC, length=n, seed=n) for n in LENGTHS]
    client.post("d", made)
    result = client.annotate("d", "critic", "r/1", [values(t, i) for i, t in enumerate(made[:2])])
    assert (result.stored, result.known, result.gone) == (2, 0, 0)
    return client, made


def files(service: Any) -> list[Path]:
    return list((service.data / "annotations").iterdir())


def test_values_of_steps_are_a_table_of_sql(sent: tuple[Client, list[Any]]) -> None:
    client, made = sent
    assert client.sql(MEANS).rows == [(made[0].id, 0.0, 3), (made[1].id, 1.0, 5)]
    rows = client.sql(
        "SELECT dataset, step, policy, q, v, advantage, weight FROM annotations"
        f" WHERE trajectory = '{made[0].id}' ORDER BY step"
    ).rows
    assert rows[0] == ("d", 0, "r/1", 0.0, 1.0, 0.0, 1.0)
    assert rows[2] == ("d", 2, "r/1", 2.0, 1.0, None, 1.0)
    second = f"SELECT step, q FROM annotations WHERE trajectory = '{made[1].id}' ORDER BY step"
    assert client.sql(second).rows == [(t, 1.0 + t) for t in range(5)]
    (shown,) = client.annotations("d")
    assert (shown.name, shown.policy, shown.trajectories, shown.steps) == ("critic", "r/1", 2, 8)


def test_json_does_the_same(sent: tuple[Client, list[Any]]) -> None:
    client, made = sent
    body = PostAnnotations(name="critic", policy="r/1", trajectories=[values(made[2], 2)])
    path = "/v1/datasets/d/annotations"
    assert client.call("POST", path, body=body).json()["stored"] == 1
    assert client.sql(MEANS).rows[1] == (made[2].id, 2.0, 4)


def test_a_trajectory_of_a_million_steps(service: Any) -> None:
    """More than a request of JSON holds, and than a row group."""
    client = service.client(retry_for=0.0, timeout=240.0)
    spec = EnvSpec.of(Box((1,)), Discrete(2))
    client.create_dataset("long", spec)
    steps = 1_000_000
    client.add(
        "long", obs=np.zeros((steps + 1, 1), np.float32), actions=np.zeros(steps, np.int64),
        rewards=np.zeros(steps, np.float32), truncated=True,
    )  # fmt: skip
    id_ = client.sql("SELECT id FROM trajectories WHERE dataset = 'long'").one()
    q = np.arange(steps, dtype=np.float32)
    given = {"trajectory": id_, "q": q, **dict.fromkeys(("v", "advantage", "weight"), q)}
    assert client.annotate("long", "critic", "r/1", [given]).stored == 1
    query = "SELECT count(*), sum(q = step)::BIGINT, max(step), min(step) FROM annotations"
    assert client.sql(query).rows == [(steps, steps, steps - 1, 0)]


def stream(columns: dict[str, Any], **options: Any) -> bytes:
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, **options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


ROW = {f.name: pa.array(["x"] if f.name == "trajectory" else [[1.0]], f.type) for f in SCHEMA}
FLOATS = SCHEMA.field("q").type
BAD = {
    "no stream": b"nothing",
    "cut short": stream(ROW)[:-60],
    "other columns": stream({"trajectory": ["x"]}),
    "compressed": stream(ROW, options=pa.ipc.IpcWriteOptions(compression="zstd")),
    "NaN": stream(ROW | {"q": pa.array([[float("nan")]], FLOATS)}),
    "no list": stream(ROW | {"v": pa.array([None], FLOATS)}),
    "no id": stream(ROW | {"trajectory": pa.array([None], pa.string())}),
    "a long id": stream(ROW | {"trajectory": ["x" * 65]}),
    "no rows": stream({name: column[:0] for name, column in ROW.items()}),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_stream_is_refused(what: str) -> None:
    with pytest.raises(CodecError):
        decode(BAD[what])


def test_a_bad_request_is_refused(sent: tuple[Client, list[Any]]) -> None:
    client, _ = sent
    path, params = "/v1/datasets/d/annotations/values", {"annotation": "c", "policy": "r/1"}
    kind = {"Content-Type": ARROW}
    with pytest.raises(BadRequest) as error:
        client.call("POST", path, params=params, content=BAD["NaN"], headers=kind)
    assert error.value.code == "invalid_stream"
    kind = {"Content-Type": "application/octet-stream"}
    with pytest.raises(ServiceError) as wrong:
        client.call("POST", path, params=params, content=b"{}", headers=kind)
    assert wrong.value.status == 415


def test_a_trajectory_is_annotated_once_under_a_name(sent: tuple[Client, list[Any]]) -> None:
    client, made = sent
    again = client.annotate("d", "critic", "r/1", [values(t, 9.0) for t in made])
    assert (again.stored, again.known) == (1, 2)
    assert [row[1] for row in client.sql(MEANS).rows] == [0.0, 9.0, 1.0]
    client.annotate("d", "other", "r/2", [values(made[0], 7.0)])
    assert [row[1] for row in client.sql(MEANS.replace("critic", "other")).rows] == [7.0]
    with pytest.raises(Conflict, match="another policy"):
        client.annotate("d", "critic", "r/2", [values(made[2], 9.0)])


def test_what_does_not_fit_is_refused_whole(service: Any, sent: tuple[Client, list[Any]]) -> None:
    client, made = sent
    short = {**values(made[2], 0.0), "q": [0.0]}
    with pytest.raises(BadRequest, match="4 of each kind"):
        client.annotate("d", "critic", "r/1", [short])
    with pytest.raises(BadRequest, match="twice"):
        client.annotate("d", "critic", "r/1", [values(made[2], 0.0)] * 2)
    with pytest.raises(NotFound):
        client.annotate("ghost", "critic", "r/1", [values(made[2], 0.0)])
    ghost = {**values(made[2], 0.0), "trajectory": "ghost"}
    assert client.annotate("d", "critic", "r/1", [ghost]).gone == 1
    assert len(files(service)) == 1


def test_a_snapshot_is_selected_and_weighted_by_mean_advantage(
    sent: tuple[Client, list[Any]],
) -> None:
    client, made = sent
    client.flush("d")
    select = (
        "SELECT t.id, 1 + avg(a.advantage) AS weight FROM trajectories AS t"
        " JOIN annotations AS a ON a.trajectory = t.id AND a.name = 'critic'"
        " GROUP BY t.id HAVING avg(a.advantage) > {}"
    )
    snapshot = client.create_snapshot(sources=[{"select": select.format(-1), "share": 1.0}])
    rows = client.manifest(snapshot.id)["weight"].to_pylist()
    assert sorted(rows) == [1.0, 2.0]
    only = client.create_snapshot(sources=[{"select": select.format(0.5)}])
    assert only.trajectories == 1


def test_annotations_go_with_their_trajectories_and_dataset(
    service: Any, sent: tuple[Client, list[Any]]
) -> None:
    client, made = sent
    client.patch_dataset("d", capacity={"trajectories": 2})  # evicts the first
    assert [row[0] for row in client.sql(MEANS).rows] == [made[1].id]
    client.annotate("d", "other", "r/2", [values(made[2], 0.0)])
    client.delete_annotations("d", "other")
    with pytest.raises(NotFound):
        client.delete_annotations("d", "other")
    assert len(files(service)) == 1
    client.delete_dataset("d")
    assert files(service) == []
    assert client.sql("SELECT count(*) FROM annotations").rows == [(0,)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("point", "stored"),
    [
        ("annotation.after_tmp_fsync", 0),
        ("annotation.after_rename", 0),
        ("annotation.before_commit", 0),
        ("annotation.after_commit", 1),
    ],
)
def test_a_crash_stores_all_or_nothing(
    service: Any, sent: tuple[Client, list[Any]], point: str, stored: int
) -> None:
    client, made = sent
    service.restart(env={"STEPWELL_FAILPOINT": point})
    with pytest.raises(ServiceUnreachable):
        client.annotate("d", "critic", "r/1", [values(made[2], 2.0)])
    assert service.wait_exit() == -signal.SIGKILL
    service.restart()
    assert len(files(service)) == 1 + stored
    again = client.annotate("d", "critic", "r/1", [values(made[2], 2.0)])
    assert (again.stored, again.known) == (1 - stored, stored)
    assert len(client.sql(MEANS).rows) == 3


@pytest.mark.parametrize("point", ["annotation.before_delete", "annotation.after_delete"])
def test_a_crash_deletes_all_or_nothing(
    service: Any, sent: tuple[Client, list[Any]], point: str
) -> None:
    client, _ = sent
    service.restart(env={"STEPWELL_FAILPOINT": point})
    with pytest.raises(ServiceUnreachable):
        client.delete_annotations("d", "critic")
    assert service.wait_exit() == -signal.SIGKILL
    service.restart()
    kept = point == "annotation.before_delete"
    assert len(files(service)) == len(client.annotations("d")) == kept


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)


def test_a_damaged_file_is_given_up_and_annotated_again(
    service: Any, sent: tuple[Client, list[Any]]
) -> None:
    client, made = sent
    (file,) = files(service)
    damage(file)
    assert client.sql(MEANS).rows == []
    assert client.annotations("d") == []
    again = client.annotate("d", "critic", "r/1", [values(t, 4.0) for t in made])
    assert again.stored == 3
    assert [row[1] for row in client.sql(MEANS).rows] == [4.0, 4.0, 4.0]


def test_fsck_names_a_damaged_file_and_rebuilds_from_the_others(
    service: Any, sent: tuple[Client, list[Any]]
) -> None:
    client, made = sent
    before = client.sql(MEANS).rows
    client.annotate("d", "other", "r/2", [values(made[2], 0.0)])
    service.stop()
    data = service.data
    assert fsck.check(data, deep=True).checked["annotations"] == 2
    damage(max(data.joinpath("annotations").iterdir()))
    (problem,) = fsck.check(data, deep=True).problems
    assert problem.where.startswith("annotations/") and problem.what == "damaged"
    (data / "index.sqlite").unlink()
    assert rebuild(data).annotations == 1
    assert len(list((data / "quarantine" / "annotations").iterdir())) == 1
    service.restart()
    assert client.sql(MEANS).rows == before
    assert [one.name for one in client.annotations("d")] == ["critic"]
