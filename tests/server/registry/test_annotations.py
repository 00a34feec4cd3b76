"""Annotations: a critic's values of steps, stored once, shown in SQL while their steps live."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from server.fsck import main as fsck
from server.maintenance.rebuild import rebuild
from stepwell import Box, Client, Discrete, EnvSpec, Trajectory
from stepwell.codec import CodecError
from stepwell.errors import BadRequest, Conflict, NotFound, ServiceError, ServiceUnreachable
from stepwell.messages import ARROW, PostAnnotations
from stepwell.step_values import SCHEMA, decode
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec(observation=2, action=1)
LENGTHS = (3, 5, 4)


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


@dataclass(frozen=True)
class Sent:
    """A dataset of three trajectories, the first two annotated."""

    client: Client
    dataset: str
    made: list[Trajectory]

    def annotate(
        self, which: slice, level: float, name: str = "critic", policy: str = "r/1"
    ) -> tuple[int, int]:
        """Trajectories that were stored, and that were known."""
        given = [values(t, level) for t in self.made[which]]
        result = self.client.annotate(self.dataset, name, policy, given)
        return result.stored, result.known

    def means(self, name: str = "critic") -> list[tuple[str, float, int]]:
        """Trajectory, mean advantage and number of steps of each that is annotated."""
        rows = self.client.sql(
            "SELECT trajectory, avg(advantage), count(*) AS steps FROM annotations"
            f" WHERE name = '{name}' AND dataset = '{self.dataset}'"
            " GROUP BY trajectory ORDER BY steps"
        ).rows
        return [(str(id_), mean, steps) for id_, mean, steps in rows]


def send(client: Client, dataset: str) -> Sent:
    client.create_dataset(dataset, SPEC)
    sent = Sent(client, dataset, [make_trajectory(SPEC, length=n) for n in LENGTHS])
    client.post(dataset, sent.made)
    assert sent.annotate(slice(0, 1), 0.0) == sent.annotate(slice(1, 2), 1.0) == (1, 0)
    return sent


@pytest.fixture
def sent(client: Client, name: str) -> Sent:
    return send(client, name)


@pytest.fixture
def alone(fresh_service: Any) -> Sent:
    """The same in a service of its own."""
    return send(fresh_service.client(retry_for=0.0), "d")


def files(service: Any) -> list[Path]:
    return list((service.data / "annotations").iterdir())


def test_values_of_steps_are_a_table_of_sql(sent: Sent) -> None:
    client, made = sent.client, sent.made
    assert sent.means() == [(made[0].id, 0.0, 3), (made[1].id, 1.0, 5)]
    rows = client.sql(
        "SELECT dataset, step, policy, q, v, advantage, weight FROM annotations"
        f" WHERE trajectory = '{made[0].id}' ORDER BY step"
    ).rows
    assert rows[0] == (sent.dataset, 0, "r/1", 0.0, 1.0, 0.0, 1.0)
    assert rows[2] == (sent.dataset, 2, "r/1", 2.0, 1.0, None, 1.0)
    second = f"SELECT step, q FROM annotations WHERE trajectory = '{made[1].id}' ORDER BY step"
    assert client.sql(second).rows == [(t, 1.0 + t) for t in range(5)]
    (shown,) = client.annotations(sent.dataset)
    assert (shown.name, shown.policy, shown.trajectories, shown.steps) == ("critic", "r/1", 2, 8)


def test_json_does_the_same(sent: Sent) -> None:
    body = PostAnnotations(name="critic", policy="r/1", trajectories=[values(sent.made[2], 2)])
    path = f"/v1/datasets/{sent.dataset}/annotations"
    assert sent.client.call("POST", path, body=body).json()["stored"] == 1
    assert sent.means()[1] == (sent.made[2].id, 2.0, 4)


def test_a_trajectory_of_a_million_steps(client: Client, name: str) -> None:
    """More than a request of JSON holds, and than a row group."""
    client = client.with_options(timeout=240.0)
    client.create_dataset(name, EnvSpec.of(Box((1,)), Discrete(2)))
    steps = 1_000_000
    item = client.add(
        name, obs=np.zeros((steps + 1, 1), np.float32), actions=np.zeros(steps, np.int64),
        rewards=np.zeros(steps, np.float32), truncated=True,
    )  # fmt: skip
    q = np.arange(steps, dtype=np.float32)
    given = {"trajectory": item.id, "q": q, **dict.fromkeys(("v", "advantage", "weight"), q)}
    assert client.annotate(name, "critic", "r/1", [given]).stored == 1
    query = "SELECT count(*), sum(q = step)::BIGINT, max(step), min(step) FROM annotations"
    query += f" WHERE trajectory = '{item.id}'"
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


def test_a_bad_request_is_refused(sent: Sent) -> None:
    path = f"/v1/datasets/{sent.dataset}/annotations/values"
    params = {"annotation": "c", "policy": "r/1"}
    for kind, body, status, code in (
        (ARROW, BAD["NaN"], 422, "invalid_stream"),
        ("application/octet-stream", b"{}", 415, "unsupported_media_type"),
    ):
        with pytest.raises(ServiceError) as error:
            headers = {"Content-Type": kind}
            sent.client.call("POST", path, params=params, content=body, headers=headers)
        assert (error.value.status, error.value.code) == (status, code)


def test_a_trajectory_is_annotated_once_under_a_name(sent: Sent) -> None:
    assert sent.annotate(slice(3), 9.0) == (1, 2)
    assert [row[1] for row in sent.means()] == [0.0, 9.0, 1.0]
    sent.annotate(slice(1), 7.0, "other", "r/2")
    assert [row[1] for row in sent.means("other")] == [7.0]
    with pytest.raises(Conflict, match="another policy"):
        sent.annotate(slice(2, 3), 9.0, policy="r/2")


def test_what_does_not_fit_is_refused_whole(service: Any, sent: Sent) -> None:
    client, one = sent.client, values(sent.made[2], 0.0)
    before = len(files(service))
    for dataset, given, error, says in (
        (sent.dataset, [{**one, "q": [0.0]}], BadRequest, "4 of each kind"),
        (sent.dataset, [one, one], BadRequest, "twice"),
        ("ghost", [one], NotFound, "ghost"),
    ):
        with pytest.raises(error, match=says):
            client.annotate(dataset, "critic", "r/1", given)
    ghost = {**one, "trajectory": "ghost"}
    assert client.annotate(sent.dataset, "critic", "r/1", [ghost]).gone == 1
    assert len(files(service)) == before


def test_a_snapshot_is_selected_and_weighted_by_mean_advantage(sent: Sent) -> None:
    client = sent.client
    client.flush(sent.dataset)
    select = (
        "SELECT t.id, 1 + avg(a.advantage) AS weight FROM trajectories AS t"
        " JOIN annotations AS a ON a.trajectory = t.id AND a.name = 'critic'"
        f" WHERE t.dataset = '{sent.dataset}' GROUP BY t.id HAVING avg(a.advantage) > "
    )
    snapshot = client.create_snapshot(sources=[{"select": f"{select} -1", "share": 1.0}])
    rows = client.manifest(snapshot.id)["weight"].to_pylist()
    assert sorted(rows) == [1.0, 2.0]
    only = client.create_snapshot(sources=[{"select": f"{select} 0.5"}])
    assert only.trajectories == 1


def test_annotations_go_with_their_trajectories_and_dataset(service: Any, sent: Sent) -> None:
    client, dataset, before = sent.client, sent.dataset, len(files(service))
    client.patch_dataset(dataset, capacity={"trajectories": 2})  # evicts the first
    assert [row[0] for row in sent.means()] == [sent.made[1].id]
    sent.annotate(slice(2, 3), 0.0, "other", "r/2")
    left = len(files(service))
    client.delete_annotations(dataset, "other")
    with pytest.raises(NotFound):
        client.delete_annotations(dataset, "other")
    assert len(files(service)) == left - 1
    client.delete_dataset(dataset)
    assert len(files(service)) == before - 2
    assert sent.means() == []


def test_a_crash_stores_or_deletes_all_or_nothing(fresh_service: Any, alone: Sent) -> None:
    """Each start shows what the crash before it left, and crashes at the next point."""

    def store() -> tuple[int, int]:
        return alone.annotate(slice(2, 3), 2.0)

    def delete() -> None:
        alone.client.delete_annotations("d", "critic")

    def shown() -> int:
        return sum(one.trajectories for one in alone.client.annotations("d"))

    left = 2
    for point, act, then in (
        ("annotation.after_tmp_fsync", store, 2),
        ("annotation.after_rename", store, 2),
        ("annotation.before_commit", store, 2),
        ("annotation.after_commit", store, 3),
        ("annotation.before_delete", delete, 3),
        ("annotation.after_delete", delete, 0),
    ):
        fresh_service.restart(env={"STEPWELL_FAILPOINT": point})
        assert len(files(fresh_service)) == shown() == left, f"at {point}"
        if left == 3:
            assert store() == (0, 1)
        with pytest.raises(ServiceUnreachable):
            act()
        assert fresh_service.wait_exit() == -signal.SIGKILL
        left = then
    fresh_service.restart()
    assert len(files(fresh_service)) == shown() == len(alone.means()) == left


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)


def test_damaged_files_are_given_up_and_annotated_again(fresh_service: Any, alone: Sent) -> None:
    for file in files(fresh_service):
        damage(file)
    assert alone.means() == []
    assert alone.client.annotations("d") == []
    assert alone.annotate(slice(3), 4.0) == (3, 0)
    assert [row[1] for row in alone.means()] == [4.0, 4.0, 4.0]


def test_fsck_names_a_damaged_file_and_rebuilds_from_the_others(
    fresh_service: Any, alone: Sent
) -> None:
    before, data = alone.means(), fresh_service.data
    alone.annotate(slice(2, 3), 0.0, "other", "r/2")
    fresh_service.stop()
    assert fsck.check(data, deep=True).checked["annotations"] == 3
    damage(max(data.joinpath("annotations").iterdir()))
    (problem,) = fsck.check(data, deep=True).problems
    assert problem.where.startswith("annotations/") and problem.what == "damaged"
    (data / "index.sqlite").unlink()
    assert rebuild(data).annotations == 2
    assert len(list((data / "quarantine" / "annotations").iterdir())) == 1
    fresh_service.restart()
    assert alone.means() == before
    assert [one.name for one in alone.client.annotations("d")] == ["critic"]
