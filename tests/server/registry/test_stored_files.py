"""Policies and videos are files that are put once, never changed, and fetched cheaply."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from tests.server.registry.conftest import data_of
from tests.server.registry.rights_world import GIF, SCORES


@dataclass(frozen=True)
class Kind:
    folder: str
    media_type: str
    begins: bytes
    """How its bytes have to begin."""
    limit: str
    """The setting that limits its bytes."""
    point: str
    """The failpoint between file and row."""

    def url(self, app: Any) -> str:
        """Where one may be put: of a new run, or of a new evaluation."""
        if self.folder == "policies":
            app.post("/v1/runs", json={"name": "a", "kind": "train"})
            return "/v1/runs/a/policies/1"
        made = app.post("/v1/evaluations", json=SCORES | {"policy": "a/1"}).json()
        return f"/v1/evaluations/{made['id']}/videos/1"

    def put(self, app: Any, url: str, data: Any) -> httpx2.Response:
        params = {"return": 2.5, "length": 9} if self.folder == "videos" else {}
        headers = {"content-type": self.media_type}
        return app.put(url, params=params, content=data, headers=headers)


KINDS = [
    Kind("policies", "application/octet-stream", b"", "max_policy", "policy.after_rename"),
    Kind("videos", "image/gif", GIF, "max_video", "video.after_rename"),
]
each = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.folder)


def files(app: TestClient, kind: Kind) -> list[Path]:
    return [p for folder in (kind.folder, "tmp") for p in (data_of(app) / folder).iterdir()]


def items(app: Any, url: str) -> list[dict[str, Any]]:
    return app.get(url.rpartition("/")[0]).json()["items"]


@each
def test_the_bytes_come_back_as_they_went(app: TestClient, kind: Kind) -> None:
    """Three megabytes in several chunks; whole, in part, and not at all if they are known."""
    data, url = kind.begins + os.urandom(3_000_001), kind.url(app)
    made = kind.put(app, url, data)
    digest = hashlib.sha256(data).hexdigest()
    assert (made.status_code, made.json()["sha256"]) == (201, digest)
    assert made.json()["bytes"] == len(data)
    got = app.get(url)
    assert got.content == data
    assert (got.headers["etag"], got.headers["content-type"]) == (f'"{digest}"', kind.media_type)
    part = app.get(url, headers={"range": "bytes=100-199"})
    assert (part.status_code, part.content) == (206, data[100:200])
    head = app.head(url)
    assert (head.status_code, head.content) == (200, b"")
    assert {**head.headers} == {**got.headers}
    for known in (f'"{digest}"', f'"x", W/"{digest}"', "*"):
        again = app.get(url, headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == f'"{digest}"'


@each
def test_one_never_changes(app: TestClient, kind: Kind) -> None:
    """The same bytes again are fine (a retry); others are refused, and leave no file behind."""
    url, one, other = kind.url(app), kind.begins + b"one", kind.begins + b"two"
    assert [kind.put(app, url, one).status_code for _ in range(2)] == [201, 200]
    refused = kind.put(app, url, other)
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert hashlib.sha256(other).hexdigest() in str(refused.json()["got"])
    assert app.get(url).content == one
    assert len(files(app, kind)) == 1


@each
def test_a_body_that_is_empty_or_beyond_the_limit_stores_nothing(
    start_app: Callable[..., TestClient], kind: Kind
) -> None:
    """Also when no length was announced: it is counted while it streams."""
    app = start_app(**{kind.limit: 1000})
    url, long = kind.url(app), kind.begins + bytes(5000)
    chunks = (long[i : i + 100] for i in range(0, len(long), 100))
    for body, status in ((b"", 422), (long, 413), (chunks, 413)):
        assert kind.put(app, url, body).status_code == status
    assert files(app, kind) == items(app, url) == []


@each
def test_one_outlives_a_restart_and_can_be_deleted(
    start_app: Callable[..., TestClient], kind: Kind
) -> None:
    """A policy with its run; of a video, the score stays."""
    app = start_app()
    url, data = kind.url(app), kind.begins + b"one"
    kind.put(app, url, data)
    app = start_app()
    assert app.get(url).content == data
    assert app.delete("/v1/runs/a" if kind.folder == "policies" else url).status_code == 204
    assert files(app, kind) == []
    assert app.get(url).status_code == 404
    assert len(app.get("/v1/evaluations").json()["items"]) == (kind.folder == "videos")


@each
def test_dying_between_file_and_row_loses_nothing_twice(
    start_service: Callable[..., Any], kind: Kind
) -> None:
    """The sender got no answer and sends again: one row, and the orphan is removed."""
    service, data = start_service(env={"STEPWELL_FAILPOINT": kind.point}), kind.begins + b"one"
    folder = service.data / kind.folder
    with httpx2.Client(base_url=service.url, timeout=60.0) as app:
        url = kind.url(app)
        with pytest.raises(httpx2.RequestError):
            kind.put(app, url, data)
        assert service.wait_exit() == -signal.SIGKILL
        assert len(list(folder.iterdir())) == 1
        service.env.clear()
        service.restart()
        assert items(app, url) == list(folder.iterdir()) == []
        assert kind.put(app, url, data).status_code == 201
        assert app.get(url).content == data
