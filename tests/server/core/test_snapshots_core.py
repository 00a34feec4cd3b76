"""A snapshot is the same for ever; shards travel whole or in ranges; selections must agree."""

from __future__ import annotations

import hashlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stepwell.manifest import id_bytes, id_texts
from stepwell.messages import ARROW
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory

SPEC = make_spec(observation=3, action=2)
pytestmark = pytest.mark.sql_worker


def make(count: int, first: int = 0, **options: Any) -> list[Trajectory]:
    return [make_trajectory(SPEC, length=4 + i, seed=first + i, **options) for i in range(count)]


def create(live: Any, **body: Any) -> dict[str, Any]:
    response = live.http.post("/v1/snapshots", json=body)
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    return found


def manifest(live: Any, snapshot: dict[str, Any]) -> pa.Table:
    response = live.http.get(f"/v1/snapshots/{snapshot['id']}/manifest")
    assert response.headers["content-type"] == ARROW
    return pa.ipc.open_stream(response.content).read_all()


def test_everything_acknowledged_can_be_selected_and_found_in_its_shard(live: Any) -> None:
    """The manifest's place holds the very rows, in the columns that the schema names."""
    live.create()
    sent = make(5)
    live.post(sent)  # not sealed: the service does that first
    snapshot = create(live, dataset="d", holder="t")
    assert (snapshot["trajectories"], snapshot["datasets"]) == (5, ["d"])
    assert snapshot["steps"] == sum(len(t) for t in sent)
    assert snapshot["spec"] == SPEC.to_json()
    assert snapshot["leased_until"] is not None
    table = manifest(live, snapshot)
    assert table.schema.metadata[b"snapshot"].decode() == snapshot["id"]
    assert table.schema.metadata[b"shares"] == b"[1.0]"
    assert id_texts(id_bytes(table.column("id"))) == [t.id for t in sent]
    for row, trajectory in zip(table.to_pylist(), sent, strict=True):
        data = live.http.get(f"/v1/shards/{row['shard']}").content
        rows = pq.read_table(pa.BufferReader(data))
        piece = rows.slice(row["row_start"], row["length"] + 1)
        assert piece.column_names[:3] == ["traj_idx", "t", "obs.observation"]
        assert piece.column("traj_idx").to_pylist() == [row["traj_idx"]] * (len(trajectory) + 1)
        assert piece.column("t").to_pylist() == list(range(len(trajectory) + 1))
        assert piece.column("reward").to_pylist()[:-1] == trajectory.rewards.tolist()
        assert piece.column("reward").to_pylist()[-1] is None
        assert (row["return"], row["env"]) == (trajectory.total_reward, "Test-v0")
        assert row["content"] == int(trajectory.digest[:16], 16)


def test_the_same_selection_has_the_same_digest_and_new_data_does_not_change_it(live: Any) -> None:
    live.create()
    live.post(make(3))
    first = create(live, dataset="d")
    before = manifest(live, first)
    again = create(live, dataset="d", where="length > 0")
    assert again["digest"] == first["digest"] and again["id"] != first["id"]
    live.post(make(2, first=10))
    assert manifest(live, first).equals(before)
    grown = create(live, dataset="d", since=first["id"])
    assert (grown["added"], grown["removed"]) == (2, 0)
    assert grown["digest"] != first["digest"]
    listed = live.http.get("/v1/snapshots").json()["items"]
    assert [s["id"] for s in listed] == [grown["id"], again["id"], first["id"]]


def test_a_mixture_keeps_shares_weights_and_order(live: Any) -> None:
    """Rows are ordered by component, dataset and seq, whatever the SQL's order was."""
    live.create("d")
    live.create("e")
    live.post(make(3))
    live.post(make(2, first=10), "e")
    snapshot = create(
        live,
        **{
            "from": [
                {
                    "select": "SELECT id, length AS weight FROM trajectories WHERE dataset = 'd'"
                    " ORDER BY seq DESC",
                    "share": 0.75,
                },
                {"select": "SELECT id FROM trajectories", "share": 0.25},
            ]
        },
    )
    table = manifest(live, snapshot)
    assert table.schema.metadata[b"shares"] == b"[0.75, 0.25]"
    assert table.column("component").to_pylist() == [0] * 3 + [1] * 5
    assert table.column("dataset").to_pylist() == list("ddd" + "dddee")
    assert table.column("seq").to_pylist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert table.column("weight").to_pylist() == [4.0, 5.0, 6.0] + [1.0] * 5


def test_evaluation_is_left_out_unless_asked_for(live: Any) -> None:
    live.create()
    live.post(make(2))
    live.post(make(3, first=10, purpose="eval"))
    assert create(live, dataset="d")["trajectories"] == 2
    assert create(live, dataset="d", include_eval=True)["trajectories"] == 5
    only = live.http.post("/v1/snapshots", json={"dataset": "d", "where": "purpose = 'eval'"})
    assert (only.status_code, only.json()["code"]) == (422, "empty_selection")


def test_a_selection_of_two_layouts_is_refused_naming_both(live: Any) -> None:
    other = make_spec(observation=4, action=2)
    live.create("d")
    live.create("wide", spec=other)
    live.post(make(1))
    live.post([make_trajectory(other)], "wide", spec=other)
    response = live.http.post(
        "/v1/snapshots", json={"from": [{"select": "SELECT id FROM trajectories"}]}
    )
    problem = response.json()
    assert (response.status_code, problem["code"]) == (422, "schema_mismatch")
    assert "'d'" in problem["detail"] and "'wide'" in problem["detail"]
    assert problem["expected"]["d"]["shape"] == [3] and problem["got"]["wide"]["shape"] == [4]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 422, "validation_error"),
        ({"dataset": "d", "from": [{"select": "SELECT 1"}]}, 422, "validation_error"),
        ({"from": []}, 422, "validation_error"),
        ({"dataset": "d", "where": "1 = 0"}, 422, "empty_selection"),
        ({"dataset": "d", "where": "nonsense("}, 422, "sql_error"),
        ({"dataset": "nobody"}, 404, "not_found"),
        ({"dataset": "d", "since": "sn_0"}, 404, "not_found"),
        ({"dataset": "d", "fork_of": "x"}, 422, "validation_error"),
    ],
)
def test_a_selection_that_cannot_be_is_a_typed_error(
    live: Any, body: dict[str, Any], status: int, code: str
) -> None:
    live.create()
    live.post(make(1))
    response = live.http.post("/v1/snapshots", json=body)
    assert (response.status_code, response.json()["code"]) == (status, code), response.text


def test_shards_travel_whole_in_ranges_or_not_again(live: Any) -> None:
    """The ETag is the file's sha256, so what was fetched can be checked."""
    live.create()
    live.post(make(3))
    shard = manifest(live, create(live, dataset="d")).column("shard")[0].as_py()
    whole = live.http.get(f"/v1/shards/{shard}")
    assert whole.headers["etag"] == f'"{hashlib.sha256(whole.content).hexdigest()}"'
    part = live.http.get(f"/v1/shards/{shard}", headers={"range": "bytes=4-99"})
    assert (part.status_code, part.content) == (206, whole.content[4:100])
    same = live.http.get(f"/v1/shards/{shard}", headers={"if-none-match": whole.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    beyond = live.http.get(f"/v1/shards/{shard}", headers={"range": "bytes=99999999-"})
    assert beyond.status_code == 416
    unknown = live.http.get("/v1/shards/..%2F..%2Findex.sqlite")
    assert unknown.status_code == 404


def test_leases_are_per_holder(live: Any) -> None:
    live.create()
    live.post(make(1))
    snapshot = create(live, dataset="d", holder="a")
    url = f"/v1/snapshots/{snapshot['id']}/lease"
    assert live.http.put(url, json={"holder": "b", "ttl": 500}).json()["holder"] == "b"
    live.http.delete(url, params={"holder": "b"})
    until = live.http.get(f"/v1/snapshots/{snapshot['id']}").json()["leased_until"]
    assert until == pytest.approx(snapshot["leased_until"], abs=1)
    live.http.delete(url, params={"holder": "a"})
    assert live.http.get(f"/v1/snapshots/{snapshot['id']}").json()["leased_until"] is None
    assert live.http.put("/v1/snapshots/sn_0/lease", json={}).status_code == 404
