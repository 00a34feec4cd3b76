"""Datasets and their trajectories over HTTP: made, described, listed, labelled, deleted."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from server.index.db import find_pk
from server.index.tables import audit, datasets, shards
from server.ingest import pipeline
from stepwell.codec import encode
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec(observation=3, action=2)


def test_a_new_dataset_is_empty_and_knows_its_layout(live: Any) -> None:
    body = {
        "name": "hopper-medium",
        "spec": SPEC.to_json(),
        "capacity": {"steps": 1000},
        "description": "what it is",
        "tags": ["a"],
    }
    response = live.http.post("/v1/datasets", json=body)
    assert response.status_code == 201
    found = response.json()
    assert found == live.dataset("hopper-medium")
    assert (found["spec"], found["spec_digest"]) == (SPEC.to_json(), SPEC.digest)
    assert found["capacity"] == {"trajectories": None, "steps": 1000, "bytes": None}
    assert (found["fifo"]["trajectories"], found["return_mean"]) == (0, None)


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"name": "Upper"}, 422, "validation_error"),
        ({"name": "../etc"}, 422, "validation_error"),
        ({"name": ""}, 422, "validation_error"),
        ({"spec": {"observations": {}}}, 422, "invalid_data"),
        ({"spec": {"observations": {"o": {"type": "Text"}}}}, 422, "invalid_data"),
        ({"capacity": {"steps": 0}}, 422, "validation_error"),
        ({"capacity": {"episodes": 5}}, 422, "validation_error"),
        ({"fork_of": "sn_1"}, 422, "validation_error"),
        ({"name": "taken"}, 409, "dataset_exists"),
    ],
)
def test_a_dataset_that_cannot_be_is_refused(
    live: Any, change: dict[str, Any], status: int, code: str
) -> None:
    live.create("taken")
    body = {"name": "x", "spec": SPEC.to_json(), **change}
    response = live.http.post("/v1/datasets", json=body)
    assert (response.status_code, response.json()["code"]) == (status, code), response.text
    assert [d["name"] for d in live.http.get("/v1/datasets").json()["items"]] == ["taken"]


def test_datasets_are_listed_by_name_in_pages(live: Any) -> None:
    for name in ("c", "a", "b"):
        live.create(name)
    page = live.http.get("/v1/datasets", params={"limit": 2}).json()
    assert [d["name"] for d in page["items"]] == ["a", "b"]
    rest = live.http.get("/v1/datasets", params={"limit": 2, "cursor": page["next"]}).json()
    assert ([d["name"] for d in rest["items"]], rest["next"]) == (["c"], None)


def test_a_dataset_counts_what_is_in_it(live: Any) -> None:
    live.create()
    sent = [make_trajectory(SPEC, length=n, seed=n) for n in (4, 6)]
    live.post(sent)
    live.post([make_trajectory(SPEC, length=5, purpose="eval")])
    found = live.dataset()
    returns = [t.total_reward for t in sent]
    assert found["fifo"]["trajectories"] == 2 and found["fifo"]["steps"] == 10
    assert found["eval"]["steps"] == 5
    assert (found["unsealed"], found["shards"]) == (3, 0)
    assert found["length_mean"] == 5
    assert found["return_min"] <= min(returns) and found["return_max"] >= max(returns)
    live.flush()
    found = live.dataset()
    assert (found["unsealed"], found["shards"]) == (0, 1)
    assert found["stored_bytes"] > 0 and found["last_ingest_at"] is not None


def test_trajectories_are_filtered_ordered_and_paged(live: Any) -> None:
    live.create()
    for i in range(7):
        env = "a" if i % 2 else "b"
        metadata = {"env": env, "policy": f"p/{i}", "run": "r", "tags": (f"t{i % 3}",)}
        live.post([make_trajectory(SPEC, length=3 + i % 3, seed=i, **metadata)])
    assert [i["seq"] for i in live.listing(env="a")] == [2, 4, 6]
    assert [i["seq"] for i in live.listing(policy="p/3")] == [4]
    assert [i["seq"] for i in live.listing(tag="t1")] == [2, 5]
    assert live.listing(run="other") == []
    assert [i["seq"] for i in live.listing(order="-seq", limit=2)] == [7, 6]
    by_return = [i["return"] for i in live.listing(order="-return")]
    assert by_return == sorted(by_return, reverse=True)
    seen: list[int] = []
    cursor: dict[str, str] = {}
    while True:  # lengths repeat: seq decides, nothing is skipped or shown twice
        page = live.http.get(
            "/v1/datasets/d/trajectories", params={"order": "-length", "limit": 2, **cursor}
        ).json()
        seen += [i["seq"] for i in page["items"]]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert seen == [6, 3, 5, 2, 7, 4, 1]
    for bad in ({"order": "digest"}, {"cursor": "zzz"}, {"limit": 0}):
        response = live.http.get("/v1/datasets/d/trajectories", params=bad)
        assert (response.status_code, response.json()["code"]) == (422, "validation_error")


def test_steps_come_as_json_rows_when_asked(live: Any) -> None:
    """T+1 rows, the last with an observation only."""
    live.create()
    sent = make_trajectory(SPEC, length=3)
    live.post([sent])
    body = live.http.get(
        f"/v1/trajectories/{sent.id}/steps", headers={"accept": "application/json"}
    ).json()
    names = ["t", "obs.observation", "action", "reward", "terminated", "truncated", "is_last"]
    assert body["columns"] == names
    assert len(body["rows"]) == 4
    assert body["rows"][-1][2:] == [None, None, False, False, True]
    assert [row[4] for row in body["rows"]] == [False, False, True, False]


def test_a_dataset_is_deleted_with_its_trajectories_unless_some_are_protected(live: Any) -> None:
    live.create()
    kept, other = make_trajectory(SPEC, seed=1), make_trajectory(SPEC, seed=2)
    live.post([kept], partition="protected")
    live.post([other])
    refused = live.http.delete("/v1/datasets/d")
    assert (refused.status_code, refused.json()["code"]) == (409, "protected")
    assert live.http.post(f"/v1/trajectories/{kept.id}/demote").status_code == 200
    assert live.http.delete("/v1/datasets/d").status_code == 204
    assert live.http.get("/v1/datasets/d").status_code == 404
    assert live.http.get(f"/v1/trajectories/{other.id}").status_code == 404
    assert live.http.delete("/v1/datasets/d").status_code == 404
    live.create()  # the name is free again, and so are the ids
    assert live.post([other]) == [("stored", 1)]


def test_a_dataset_is_deleted_with_its_protected_trajectories_if_that_is_said(live: Any) -> None:
    """All of it at once, and each of them in the audit log; those of other datasets stay."""
    live.create()
    kept = [make_trajectory(SPEC, seed=seed) for seed in range(3)]
    live.post(kept, partition="protected")
    live.post([make_trajectory(SPEC, seed=9)])
    live.create("e")
    live.post([other := make_trajectory(SPEC, seed=4)], name="e", partition="protected")
    refused = live.http.delete("/v1/datasets/d", params={"protected": "false"})
    assert refused.status_code == 409 and "stepwell datasets delete d" in refused.json()["detail"]
    assert live.http.delete("/v1/datasets/d", params={"protected": "true"}).status_code == 204
    assert live.http.get("/v1/datasets/d").status_code == 404
    assert live.http.get(f"/v1/trajectories/{other.id}").json()["partition"] == "protected"
    with live.service.db.read() as connection:
        rows = connection.execute(
            sa.select(audit.c.subject).where(audit.c.action == "demote")
        ).scalars()
        assert sorted(rows) == sorted(t.id for t in kept)
    live.create()
    assert live.post(kept, partition="protected") == [("stored", 1), ("stored", 2), ("stored", 3)]


def test_a_post_to_a_deleted_dataset_never_reaches_the_next_of_its_name(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted and made anew, with another layout, while the body was being read."""
    live.create()
    real, other = pipeline.read_body, make_spec(observation=5, action=1)

    def slow(body: Any, dataset: Any) -> Any:
        if dataset.spec.digest == SPEC.digest:
            assert live.http.delete("/v1/datasets/d").status_code == 204
            live.create(spec=other)
        return real(body, dataset)

    monkeypatch.setattr(pipeline, "read_body", slow)
    response = live.send(encode([make_trajectory(SPEC)], SPEC))
    assert (response.status_code, response.json()["code"]) == (404, "not_found")
    assert live.listing() == []
    mine = make_trajectory(other)
    assert live.post([mine], spec=other) == [("stored", 1)]
    assert live.steps(mine).digest == mine.digest


@pytest.mark.sql_worker
def test_a_leased_snapshot_survives_the_deletion_of_its_dataset(live: Any) -> None:
    live.create()
    live.post([make_trajectory(SPEC)])
    snapshot = live.http.post("/v1/snapshots", json={"dataset": "d"}).json()
    live.http.delete("/v1/datasets/d")
    rows = live.http.get(
        f"/v1/snapshots/{snapshot['id']}/manifest", headers={"accept": "application/json"}
    ).json()
    shard = rows["rows"][0][[c["name"] for c in rows["columns"]].index("shard")]
    assert live.http.get(f"/v1/shards/{shard}").status_code == 200


@pytest.mark.sql_worker
def test_what_is_not_there_is_404_in_one_shape(live: Any) -> None:
    paths = [
        "/v1/datasets/x",
        "/v1/datasets/x/trajectories",
        "/v1/trajectories/00000000-0000-7000-8000-000000000000",
        "/v1/trajectories/nonsense/steps",
        "/v1/snapshots/x",
        "/v1/snapshots/x/manifest",
        "/v1/shards/x",
        "/v1/nothing",
    ]
    for path in paths:
        response = live.http.get(path)
        assert response.status_code == 404, path
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["code"] == "not_found"


def test_a_page_of_many_costs_as_many_statements_as_one_of_few(live: Any) -> None:
    for number in range(12):
        live.create(f"d{number:02}")
        live.post([make_trajectory(SPEC, length=3 + number, seed=number)], f"d{number:02}")
    live.flush("d00")
    asked: list[str] = []

    def see(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        asked.append(statement)

    sa.event.listen(live.service.db.engine, "before_cursor_execute", see)
    try:
        counts = []
        for limit in (1, 12):
            asked.clear()
            page = live.http.get("/v1/datasets", params={"limit": limit}).json()
            counts.append(len(asked))
            assert len(page["items"]) == limit
    finally:
        sa.event.remove(live.service.db.engine, "before_cursor_execute", see)
    assert counts[0] == counts[1]
    assert page["items"] == [live.dataset(f"d{number:02}") for number in range(12)]
    assert [one["fifo"]["steps"] for one in page["items"]] == list(range(3, 15))


def test_each_of_a_page_has_what_is_its_own(live: Any) -> None:
    """Totals, returns, unsealed, shards and damage of one dataset are not another's."""
    live.create("empty")
    for name, count in (("a", 2), ("b", 3)):
        live.create(name)
        live.post([make_trajectory(SPEC, seed=s) for s in range(count)], name)
    live.flush("a")
    unsealed = make_trajectory(SPEC, seed=50, purpose="eval")
    live.post([unsealed], "b")
    with live.service.db.write() as c:
        c.execute(
            sa.update(shards)
            .where(shards.c.dataset_pk == find_pk(c, datasets, "a"))
            .values(state="quarantined")
        )
    a, b, empty = live.http.get("/v1/datasets").json()["items"]
    assert [one["name"] for one in (a, b, empty)] == ["a", "b", "empty"]
    assert [(one["shards"], one["unsealed"]) for one in (a, b, empty)] == [(1, 0), (1, 1), (0, 0)]
    assert [len(one["excluded"]) for one in (a, b, empty)] == [1, 0, 0]
    assert (b["eval"]["steps"], a["eval"]["steps"]) == (5, 0)
    assert empty["return_min"] is None and empty["stored_bytes"] == 0
    files = {p.stat().st_size for p in live.data.glob("shards/*/*.parquet")}
    assert {a["stored_bytes"], b["stored_bytes"]} == files
    returns = [make_trajectory(SPEC, seed=s).total_reward for s in range(3)]
    assert (a["return_min"], a["return_max"]) == (min(returns[:2]), max(returns[:2]))
    assert b["return_max"] == max(*returns, unsealed.total_reward)
