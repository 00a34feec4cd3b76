"""Launches: queued in order, claimed by exactly one, ended once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.testclient import TestClient


def launch(app: TestClient, **fields: object) -> dict:
    answer = app.post("/v1/launches", json={"role": "train", "recipe": "pendulum"} | fields)
    assert answer.status_code == 201, answer.text
    return answer.json()


def claim(app: TestClient, worker: str = "launcher", **fields: object) -> dict | None:
    return app.post("/v1/launches/claim", json={"worker": worker} | fields).json().get("launch")


def test_a_launch_waits_with_its_arguments(app: TestClient) -> None:
    args = {"agent.gamma": 0.99, "steps": 500, "resume": True, "name": "x"}
    made = launch(app, args=args, count=3)
    assert (made["state"], made["args"], made["count"]) == ("queued", args, 3)
    assert app.get("/v1/launches").json()["items"] == [made]
    assert app.get(f"/v1/launches/{made['id']}").json() == made


def test_the_oldest_of_the_wanted_roles_is_claimed(app: TestClient) -> None:
    first, second = launch(app), launch(app, role="collect")
    third = launch(app)
    assert claim(app, roles=["collect"])["id"] == second["id"]
    taken = claim(app, "me")
    assert (taken["id"], taken["state"], taken["claimed_by"]) == (first["id"], "claimed", "me")
    assert claim(app)["id"] == third["id"]
    assert claim(app) is None


def test_many_launchers_never_get_the_same_launch(app: TestClient) -> None:
    """Two learners under one launch would write one run."""
    made = {launch(app)["id"] for _ in range(12)}
    with ThreadPoolExecutor(6) as pool:
        taken = [t["id"] for t in pool.map(lambda i: claim(app, f"w{i}"), range(20)) if t]
    assert len(taken) == len(set(taken)) == 12
    assert set(taken) == made


def test_the_launcher_reports_until_the_end(app: TestClient) -> None:
    path = f"/v1/launches/{launch(app)['id']}"
    claim(app)
    running = app.patch(path, json={"state": "running", "run": "r1"}).json()
    assert (running["state"], running["run"]) == ("running", "r1")
    failed = app.patch(path, json={"state": "failed", "error": "boom"}).json()
    assert (failed["state"], failed["run"], failed["error"]) == ("failed", "r1", "boom")
    late = app.patch(path, json={"state": "running"})
    assert (late.status_code, late.json()["got"]) == (409, "failed")


def test_an_unclaimed_launch_cannot_run(app: TestClient) -> None:
    path = f"/v1/launches/{launch(app)['id']}"
    assert app.patch(path, json={"state": "running"}).status_code == 409


def test_a_cancelled_launch_is_never_claimed_and_its_launcher_is_told(app: TestClient) -> None:
    queued, claimed = launch(app), launch(app)
    assert app.delete(f"/v1/launches/{queued['id']}").json()["state"] == "cancelled"
    assert claim(app)["id"] == claimed["id"]
    app.delete(f"/v1/launches/{claimed['id']}")
    assert claim(app) is None
    told = app.patch(f"/v1/launches/{claimed['id']}", json={"state": "running"})
    assert (told.status_code, told.json()["got"]) == (409, "cancelled")
    assert app.delete(f"/v1/launches/{claimed['id']}").status_code == 200


def test_what_has_ended_cannot_be_cancelled(app: TestClient) -> None:
    path = f"/v1/launches/{launch(app)['id']}"
    claim(app)
    app.patch(path, json={"state": "finished"})
    assert app.delete(path).status_code == 409


def test_lists_filter_by_role_and_state(app: TestClient) -> None:
    launch(app), launch(app, role="collect")
    claim(app, roles=["train"])
    found = app.get("/v1/launches", params={"state": "queued"}).json()["items"]
    assert [item["role"] for item in found] == ["collect"]
    found = app.get("/v1/launches", params={"role": "train"}).json()["items"]
    assert [item["state"] for item in found] == ["claimed"]


@pytest.mark.parametrize(
    "bad",
    [{"recipe": "a; rm -rf /"}, {"recipe": "../x"}, {"count": 0}, {"args": {"a": [1]}},
     {"role": "root"}],
)  # fmt: skip
def test_nothing_like_a_shell_string_gets_in(app: TestClient, bad: dict) -> None:
    answer = app.post("/v1/launches", json={"role": "train", "recipe": "pendulum"} | bad)
    assert answer.status_code == 422
    assert app.get("/v1/launches").json()["items"] == []


def test_the_log_of_a_launch_is_read_apart_from_lists(app: TestClient) -> None:
    """A list of launches is read every few seconds, and their logs are long."""
    made = launch(app)
    claim(app)
    app.patch(f"/v1/launches/{made['id']}", json={"state": "running", "log": "one\ntwo"})
    assert app.get(f"/v1/launches/{made['id']}/log").text == "one\ntwo"
    assert "log" not in app.get("/v1/launches").json()["items"][0]
    app.patch(f"/v1/launches/{made['id']}", json={"state": "finished"})
    assert app.get(f"/v1/launches/{made['id']}/log").text == "one\ntwo"
    assert app.get("/v1/launches/la_none/log").status_code == 404
