"""Workers: heartbeats, and commands that no lost answer can lose."""

import pytest
from starlette.testclient import TestClient

from server.registry import workers


def beat(app: TestClient, **fields: object) -> dict:
    body = {"role": "collect", "pid": 1} | fields
    answer = app.put("/v1/workers/w1", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(app: TestClient, command: str) -> None:
    answer = app.post("/v1/workers/w1/command", json={"command": command})
    assert answer.status_code == 200, answer.text


def test_a_heartbeat_is_what_the_list_shows(app: TestClient) -> None:
    fields = {
        "run": "a", "host": "box", "policy": "a/3", "state": "running",
        "counters": {"env_steps": 1200.0, "outbox": 0.0}, "last_error": "",
    }  # fmt: skip
    beat(app, **fields)
    (shown,) = app.get("/v1/workers").json()["items"]
    assert {k: shown[k] for k in fields} == fields
    assert (shown["id"], shown["alive"], shown["command"]) == ("w1", True, "none")


def test_silence_ends_being_alive(app: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    beat(app)
    monkeypatch.setattr(workers, "ALIVE_SECONDS", 0.0)
    assert app.get("/v1/workers").json()["items"][0]["alive"] is False


def test_pause_stays_until_resume(app: TestClient) -> None:
    """Every answer repeats it: one that is lost on the way does no harm."""
    beat(app)
    ask(app, "pause")
    assert beat(app, state="running")["command"] == "pause"
    assert beat(app, state="paused")["command"] == "pause"
    assert beat(app, state="paused")["command"] == "pause"
    ask(app, "resume")
    assert beat(app, state="paused")["command"] == "resume"
    assert beat(app, state="running")["command"] == "none"


def test_resume_is_said_at_least_once_even_to_one_that_seems_to_run(app: TestClient) -> None:
    """It may have paused since the state it reports: without this it would pause for ever."""
    beat(app)
    ask(app, "pause")
    beat(app, state="running")
    ask(app, "resume")
    assert beat(app, state="running")["command"] == "resume"
    assert beat(app, state="running")["command"] == "none"


@pytest.mark.parametrize("command", ["stop", "drain"])
def test_an_end_is_repeated_until_it_has_come(app: TestClient, command: str) -> None:
    beat(app)
    ask(app, command)
    assert beat(app, state="running")["command"] == command
    assert beat(app, state="draining")["command"] == command
    assert beat(app, state="stopped")["command"] == "none"


def test_none_takes_back_what_was_asked(app: TestClient) -> None:
    beat(app)
    ask(app, "stop")
    ask(app, "none")
    assert beat(app)["command"] == "none"


def test_a_new_process_under_an_old_id_starts_with_no_command(app: TestClient) -> None:
    """Or a restarted collector would stop at once because its forerunner was told to."""
    started = beat(app, pid=1)["started_at"]
    ask(app, "stop")
    again = beat(app, pid=2, state="starting")
    assert again["command"] == "none"
    assert again["started_at"] > started


def test_one_that_has_ended_cannot_be_asked(app: TestClient) -> None:
    """Somebody would wait for it for ever."""
    beat(app, state="failed", last_error="boom")
    answer = app.post("/v1/workers/w1/command", json={"command": "pause"})
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    ghost = app.post("/v1/workers/ghost/command", json={"command": "pause"})
    assert ghost.status_code == 404


def test_lists_filter_and_page(app: TestClient) -> None:
    for i in range(5):
        role = "train" if i % 2 else "collect"
        app.put(f"/v1/workers/w{i}", json={"role": role, "run": f"r{i % 2}"})
    found = app.get("/v1/workers", params={"role": "train"}).json()["items"]
    assert [w["id"] for w in found] == ["w1", "w3"]
    found = app.get("/v1/workers", params={"run": "r0"}).json()["items"]
    assert [w["id"] for w in found] == ["w0", "w2", "w4"]
    first = app.get("/v1/workers", params={"limit": 3}).json()
    rest = app.get("/v1/workers", params={"limit": 3, "cursor": first["next"]}).json()
    assert [w["id"] for w in first["items"] + rest["items"]] == [f"w{i}" for i in range(5)]


def test_the_long_gone_are_forgotten_when_a_new_one_comes(
    app: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(app)
    monkeypatch.setattr(workers, "FORGET_SECONDS", 0.0)
    app.put("/v1/workers/w2", json={"role": "train"})
    assert [w["id"] for w in app.get("/v1/workers").json()["items"]] == ["w2"]


def test_counters_that_are_no_numbers_are_left_out(app: TestClient) -> None:
    """One bad counter must not cost a worker its heartbeat."""
    body = '{"role": "train", "counters": {"loss": NaN, "steps": 3}}'
    answer = app.put("/v1/workers/w1", content=body, headers={"content-type": "application/json"})
    assert answer.json()["counters"] == {"steps": 3.0}


def test_a_launcher_says_what_can_be_started(
    app: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs are replaced by newer ones, and forgotten with it."""
    url = "/v1/workers/w1/programs/train"
    program = {"version": "1", "settings": {"seed": {"type": "integer", "description": "Seed."}}}
    assert app.put(url, json=program).status_code == 404, "no such worker"
    beat(app, role="launcher")
    for version in ("1", "2"):
        assert app.put(url, json=program | {"version": version}).status_code == 200
    assert app.get(url).json()["version"] == "2"
    assert app.get(url).json()["settings"] == program["settings"]
    assert app.get("/v1/workers/w1/programs/collect").status_code == 404
    assert app.get("/v1/workers/w1/programs/serve").status_code == 422
    monkeypatch.setattr(workers, "FORGET_SECONDS", -1.0)
    app.put("/v1/workers/w2", json={"role": "launcher"})
    assert app.get(url).status_code == 404
