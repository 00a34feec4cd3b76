"""Policies: put once, never changed, fetched by version or alias, cheaply when nothing is new."""

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from stepwell import ServiceUnreachable
from tests.server.registry.conftest import data_of

RAW = {"content-type": "application/octet-stream"}


@pytest.fixture
def run(app: TestClient) -> str:
    app.post("/v1/runs", json={"name": "a", "kind": "train"})
    return "/v1/runs/a"


def put(app: TestClient, run: str, version: int, data: bytes, **headers: str):
    return app.put(f"{run}/policies/{version}", content=data, headers=RAW | headers)


def files(app: TestClient) -> list[Path]:
    return [p for folder in ("policies", "tmp") for p in (data_of(app) / folder).iterdir()]


def test_the_bytes_come_back_as_they_went(app: TestClient, run: str) -> None:
    """Three megabytes in several chunks, digest and metadata included."""
    data = os.urandom(3_000_001)
    answer = put(app, run, 1, data, **{"X-Stepwell-Metadata": json.dumps({"step": 500, "x": [1]})})
    assert answer.status_code == 201
    digest = hashlib.sha256(data).hexdigest()
    said = answer.json()
    assert (said["sha256"], said["bytes"], said["step"]) == (digest, len(data), 500)
    assert (said["metadata"], said["aliases"]) == ({"step": 500, "x": [1]}, ["latest"])
    got = app.get(f"{run}/policies/1")
    assert got.content == data
    assert (got.headers["etag"], got.headers["x-stepwell-version"]) == (f'"{digest}"', "1")
    assert app.get(run).json()["policies"] == 1


def test_a_version_never_changes(app: TestClient, run: str) -> None:
    """The same bytes again are fine (a retry); others are refused, and leave no file behind."""
    assert put(app, run, 1, b"one").status_code == 201
    assert put(app, run, 1, b"one").status_code == 200
    refused = put(app, run, 1, b"two")
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert hashlib.sha256(b"two").hexdigest() in refused.json()["got"]
    assert app.get(f"{run}/policies/1").content == b"one"
    assert len(files(app)) == 1


def test_latest_is_the_greatest_version_whatever_came_last(app: TestClient, run: str) -> None:
    for version in (1, 9, 10, 3):
        put(app, run, version, str(version).encode())
    assert app.get(f"{run}/policies/latest").content == b"10"
    page = app.get(f"{run}/policies").json()["items"]
    assert [(p["version"], p["aliases"]) for p in page] == [
        (10, ["latest"]), (9, []), (3, []), (1, []),
    ]  # fmt: skip


def test_nothing_new_is_answered_304_without_bytes(app: TestClient, run: str) -> None:
    """What a collector asks every few seconds."""
    put(app, run, 1, b"one")
    etag = app.get(f"{run}/policies/latest").headers["etag"]
    for known in (etag, f'"x", W/{etag}', "*"):
        again = app.get(f"{run}/policies/latest", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
    put(app, run, 2, b"two")
    fresh = app.get(f"{run}/policies/latest", headers={"If-None-Match": etag})
    assert (fresh.status_code, fresh.content) == (200, b"two")


def test_head_says_what_get_would(app: TestClient, run: str) -> None:
    put(app, run, 1, b"one")
    head, got = app.head(f"{run}/policies/1"), app.get(f"{run}/policies/1")
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-length", "x-stepwell-version"):
        assert head.headers[name] == got.headers[name]


def test_aliases_move_and_latest_cannot_be_set(app: TestClient, run: str) -> None:
    for version in (1, 2, 3):
        put(app, run, version, str(version).encode())
    for version in (1, 2):
        said = app.put(f"{run}/aliases/best", json={"version": version})
        assert (said.status_code, said.json()["version"]) == (200, version)
    assert app.get(f"{run}/policies/best").content == b"2"
    listed = app.get(f"{run}/policies").json()["items"]
    assert {p["version"]: p["aliases"] for p in listed} == {3: ["latest"], 2: ["best"], 1: []}
    assert app.put(f"{run}/aliases/latest", json={"version": 1}).status_code == 409
    assert app.put(f"{run}/aliases/best", json={"version": 99}).status_code == 404
    assert app.put(f"{run}/aliases/1abc", json={"version": 1}).status_code == 422


def test_what_is_not_there_is_a_404_that_says_what_is(app: TestClient, run: str) -> None:
    missing = app.get(f"{run}/policies/latest")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    put(app, run, 4, b"x")
    assert "latest version is 4" in app.get(f"{run}/policies/7").json()["detail"]
    assert app.get(f"{run}/policies/nobody").status_code == 404
    assert put(app, "/v1/runs/ghost", 1, b"x").status_code == 404


@pytest.mark.parametrize("version", ["-1", "x", "1.5", str(2**53 + 1)])
def test_bad_versions_are_refused(app: TestClient, run: str, version: str) -> None:
    answer = app.put(f"{run}/policies/{version}", content=b"x", headers=RAW)
    assert answer.status_code == 422


@pytest.mark.parametrize("header", ["{", "[1]", '{"step": -1}', '{"step": "x"}', '{"step": true}'])
def test_bad_metadata_stores_nothing(app: TestClient, run: str, header: str) -> None:
    answer = put(app, run, 1, b"x", **{"X-Stepwell-Metadata": header})
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_error")
    assert files(app) == []


def test_an_empty_body_stores_nothing(app: TestClient, run: str) -> None:
    assert put(app, run, 1, b"").json()["code"] == "invalid_policy"
    assert (files(app), app.get(f"{run}/policies").json()["items"]) == ([], [])


def test_a_body_beyond_the_limit_stores_nothing(start_app) -> None:
    """Also when no length was announced: it is counted while it streams."""
    app = start_app(max_policy=1000)
    app.post("/v1/runs", json={"name": "a", "kind": "train"})
    chunks = (bytes(100) for _ in range(50))
    for body in (bytes(5000), chunks):
        answer = app.put("/v1/runs/a/policies/1", content=body, headers=RAW)
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    assert files(app) == []


def test_policies_outlive_a_restart_and_go_with_their_run(start_app) -> None:
    app = start_app()
    app.post("/v1/runs", json={"name": "a", "kind": "train"})
    put(app, "/v1/runs/a", 1, b"one")
    app = start_app()
    assert app.get("/v1/runs/a/policies/1").content == b"one"
    assert app.delete("/v1/runs/a").status_code == 204
    assert files(app) == []
    assert app.get("/v1/runs/a/policies/1").status_code == 404


def test_dying_between_file_and_row_loses_nothing_twice(start_service, name: str) -> None:
    """The publisher got no answer and sends again: one row, and the orphan is nobody's policy."""
    service = start_service(env={"STEPWELL_FAILPOINT": "policy.after_rename"})
    client = service.client(retry_for=0.0)
    client.create_run(name, "train")
    with pytest.raises(ServiceUnreachable):
        client.publish_policy(name, 1, b"weights")
    assert service.wait_exit() == -signal.SIGKILL
    assert len(list((service.data / "policies").iterdir())) == 1
    service.env.clear()
    service.restart()
    assert client.policies(name) == []
    client.publish_policy(name, 1, b"weights")
    got = client.download_policy(name)
    assert got is not None and got.data == b"weights"
