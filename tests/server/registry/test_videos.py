"""Videos of evaluations: played by browsers, harmless in them. That they never change:
test_stored_files.py."""

from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from stepwell import Client, NotFound
from tests.server.registry.conftest import data_of

MP4, GIF = "video/mp4", "image/gif"
FILM = b"\0\0\0\x20ftypisom" + bytes(1000)
ANIMATION = b"GIF89a" + b"frames" * 100
SCORES = {"mean": 1.0, "iqm": 1.0, "ci_low": 1.0, "ci_high": 1.0}


def evaluate(app: TestClient, seeds: tuple[int, ...] = (5, 6, 7)) -> str:
    """The address of a new evaluation's videos."""
    body = {"policy": "a/1", "env": "e", "seeds": list(seeds), "returns": [1.0] * len(seeds)}
    made = app.post("/v1/evaluations", json=body | SCORES).json()
    return f"/v1/evaluations/{made['id']}/videos"


@pytest.fixture
def videos(app: TestClient) -> str:
    return evaluate(app)


def put(
    app: TestClient, videos: str, seed: object, data: Any, kind: str = MP4, **shown: object
) -> httpx2.Response:
    params = {"return": 2.5, "length": 9} | shown
    return app.put(f"{videos}/{seed}", params=params, content=data, headers={"content-type": kind})


def files(app: TestClient) -> list[Path]:
    return [p for folder in ("videos", "tmp") for p in (data_of(app) / folder).iterdir()]


def nothing_stored(app: TestClient, videos: str) -> bool:
    return files(app) == [] and app.get(videos).json()["items"] == []


def test_a_video_is_described_found_and_deleted(client: Client) -> None:
    shown = {"total_reward": 1.0, "length": 2, "media_type": GIF}
    made = client.create_evaluation(policy="p", env="e", seeds=[3], returns=[1.0], **SCORES)
    client.put_video(made.id, 3, ANIMATION, **shown)
    (video,) = client.videos(made.id)
    assert (video.evaluation, video.seed, video.bytes) == (made.id, 3, len(ANIMATION))
    assert {name: getattr(video, name) for name in shown} == shown
    assert client.video(made.id, 3) == ANIMATION
    query = "select seed, return, length, bytes from videos where evaluation = ?"
    assert client.sql(query, [made.id]).rows == [(3, 1.0, 2, len(ANIMATION))]
    client.delete_video(made.id, 3)
    assert client.videos(made.id) == []
    with pytest.raises(NotFound):
        client.delete_video(made.id, 3)


def test_a_browser_is_told_to_do_nothing_with_it_but_play_it(app: TestClient, videos: str) -> None:
    """It may be anybody's file, with a page behind its first bytes."""
    page = b"GIF89a<script>alert(1)</script>"
    assert put(app, videos, 5, page, GIF).status_code == 201
    got = app.get(f"{videos}/5")
    assert (got.content, got.headers["content-type"]) == (page, GIF)
    assert got.headers["x-content-type-options"] == "nosniff"
    assert got.headers["content-security-policy"].startswith("default-src 'none';")
    assert "script" not in got.headers["content-security-policy"]
    assert got.headers["cross-origin-resource-policy"] == "same-origin"


def test_a_video_of_another_episode_is_refused(app: TestClient, videos: str) -> None:
    assert put(app, videos, 5, FILM).status_code == 201
    for data, kind, shown in ((ANIMATION, GIF, {}), (FILM, MP4, {"length": 8})):
        refused = put(app, videos, 5, data, kind, **shown)
        assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
    assert len(files(app)) == 1


def test_the_list_has_pages_and_no_videos_of_others(app: TestClient, videos: str) -> None:
    other = evaluate(app)
    for seed in (7, 5):
        assert put(app, videos, seed, ANIMATION, GIF).status_code == 201
    assert put(app, other, 6, ANIMATION, GIF).status_code == 201
    assert [v["seed"] for v in app.get(videos).json()["items"]] == [7, 5]
    page = app.get(videos, params={"limit": 1}).json()
    rest = app.get(videos, params={"limit": 1, "cursor": page["next"]}).json()
    assert [v["seed"] for v in page["items"] + rest["items"]] == [7, 5]
    assert rest["next"] is None
    assert [v["seed"] for v in app.get(other).json()["items"]] == [6]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        *((b"", kind) for kind in (MP4, GIF)),
        *((b"<html><script>", kind) for kind in (MP4, GIF)),
        *((ANIMATION, MP4), (FILM[:100], GIF), (b"ftypisom", MP4), (b"GIF90a", GIF)),
    ],
    ids=["none", "none-gif", "html", "html-gif", "gif-as-mp4", "mp4-as-gif", "late-ftyp", "gif90a"],
)
def test_bytes_of_another_type_are_refused(
    app: TestClient, videos: str, data: bytes, kind: str
) -> None:
    answer = put(app, videos, 5, data, kind)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_video")
    assert nothing_stored(app, videos)


@pytest.mark.parametrize("kind", ["video/webm", "image/svg+xml", "application/octet-stream"])
def test_other_media_types_are_refused(app: TestClient, videos: str, kind: str) -> None:
    answer = put(app, videos, 5, FILM, kind)
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
    assert answer.json()["expected"] == "video/mp4 or image/gif"
    assert nothing_stored(app, videos)


@pytest.mark.parametrize(
    "shown", [{"return": "nan"}, {"return": "inf"}, {"return": ""}, {"length": 0}, {"steps": 3}]
)
def test_numbers_that_are_none_are_refused(
    app: TestClient, videos: str, shown: dict[str, object]
) -> None:
    answer = put(app, videos, 5, ANIMATION, GIF, **shown)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_error")
    assert nothing_stored(app, videos)


@pytest.mark.parametrize("seed", [4, -1, "x", 2**63])
def test_a_seed_that_the_evaluation_does_not_have_is_refused(
    app: TestClient, videos: str, seed: object
) -> None:
    answer = put(app, videos, seed, ANIMATION, GIF)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_error")
    assert nothing_stored(app, videos)


def test_an_unknown_evaluation_or_video_is_404(app: TestClient, videos: str) -> None:
    ghost = "/v1/evaluations/ev_ghost/videos"
    assert put(app, ghost, 5, ANIMATION, GIF).status_code == 404
    for path in (ghost, f"{ghost}/5", f"{videos}/5"):
        answer = app.get(path)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert "--videos" in answer.json()["detail"]
    assert nothing_stored(app, videos)
