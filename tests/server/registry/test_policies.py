"""Policies: fetched by version or alias. That they never change: test_stored_files.py."""

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

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


def test_a_policy_is_described(app: TestClient, run: str) -> None:
    metadata = {"X-Stepwell-Metadata": json.dumps({"step": 500, "x": [1]})}
    said = put(app, run, 1, b"one", **metadata).json()
    assert (said["step"], said["metadata"]) == (500, {"step": 500, "x": [1]})
    assert said["aliases"] == ["latest"]
    assert app.get(f"{run}/policies/1").headers["x-stepwell-version"] == "1"
    assert app.get(run).json()["policies"] == 1


def test_latest_is_the_greatest_version_whatever_came_last(app: TestClient, run: str) -> None:
    for version in (1, 9, 10, 3):
        put(app, run, version, str(version).encode())
    assert app.get(f"{run}/policies/latest").content == b"10"
    page = app.get(f"{run}/policies").json()["items"]
    assert [(p["version"], p["aliases"]) for p in page] == [
        (10, ["latest"]), (9, []), (3, []), (1, []),
    ]  # fmt: skip


def test_what_is_new_is_answered_with_its_bytes(app: TestClient, run: str) -> None:
    """What a collector asks every few seconds."""
    put(app, run, 1, b"one")
    known = {"If-None-Match": app.get(f"{run}/policies/latest").headers["etag"]}
    assert app.get(f"{run}/policies/latest", headers=known).status_code == 304
    put(app, run, 2, b"two")
    fresh = app.get(f"{run}/policies/latest", headers=known)
    assert (fresh.status_code, fresh.content) == (200, b"two")


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
