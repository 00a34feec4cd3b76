"""Saved queries: kept for everybody, changed by their owner."""

from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.maintenance.rebuild import rebuild
from server.settings import Settings

URL = "http://127.0.0.1:8000"

SQL = "SELECT id FROM trajectories WHERE length >= $low AND env = $env"


def save(app: TestClient, name: str = "q", **fields: object) -> dict:
    answer = app.put(f"/v1/queries/{name}", json={"sql": SQL} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_query_is_kept_replaced_and_deleted(app: TestClient) -> None:
    params = {"low": 100, "env": "Hopper-v5", "high": 1.5, "all": True, "none": None}
    made = save(app, params=params, description="long", dataset="d")
    assert (made["params"], made["owner"], made["dataset"]) == (params, "local", "d")
    assert type(made["params"]["all"]) is bool and type(made["params"]["low"]) is int
    assert app.get("/v1/queries/q").json() == made
    later = save(app, sql="SELECT 1")
    assert (later["sql"], later["params"], later["description"]) == ("SELECT 1", {}, "")
    assert later["created_at"] == made["created_at"] and later["updated_at"] > made["updated_at"]
    save(app, "r")
    first = app.get("/v1/queries", params={"limit": 1}).json()
    rest = app.get("/v1/queries", params={"cursor": first["next"]}).json()
    assert [q["name"] for q in first["items"] + rest["items"]] == ["r", "q"]
    assert app.delete("/v1/queries/q").status_code == 204
    missing = app.get("/v1/queries/q")
    assert missing.status_code == 404 and "there is no saved query 'q'" in missing.json()["detail"]
    assert app.delete("/v1/queries/q").status_code == 404
    log = [(e["action"], e["subject"]) for e in app.get("/v1/audit").json()["items"]]
    assert log[0] == ("saved_query.delete", "q") and log[-1] == ("saved_query.save", "q")


@pytest.mark.parametrize(
    "wrong",
    [
        {"sql": ""},
        {"params": {"a b": 1}},
        {"params": {"x": [1]}},
        {"params": {"x": {"y": 1}}},
        {"dataset": "../x"},
        {"owner": "me"},
    ],
)
def test_what_cannot_be_kept_is_refused(app: TestClient, wrong: dict) -> None:
    assert app.put("/v1/queries/q", json={"sql": SQL} | wrong).status_code == 422
    assert app.put("/v1/queries/No Name", json={"sql": SQL}).status_code == 422
    assert app.get("/v1/queries").json()["items"] == []


def test_only_its_owner_and_admins_change_it(start_app: Callable[..., TestClient]) -> None:
    app = start_app(token="operator-secret-of-32-characters!")
    operator = {"authorization": "Bearer operator-secret-of-32-characters!"}

    def token(*scopes: str) -> dict[str, str]:
        body = {"name": "t", "scopes": list(scopes)}
        made = app.post("/v1/tokens", json=body, headers=operator).json()
        return {"authorization": f"Bearer {made['token']}"}

    mine, other = token("sql"), token("sql", "train")
    body = {"sql": SQL}
    assert app.put("/v1/queries/q", json=body, headers=mine).status_code == 200
    assert app.put("/v1/queries/q", json=body, headers=mine).status_code == 200
    for refused in (
        app.put("/v1/queries/q", json={"sql": "SELECT 2"}, headers=other),
        app.delete("/v1/queries/q", headers=other),
    ):
        assert (refused.status_code, refused.json()["code"]) == (403, "not_owner")
    assert app.get("/v1/queries/q", headers=other).json()["sql"] == SQL
    owner = app.get("/v1/queries/q", headers=mine).json()["owner"]
    assert app.put("/v1/queries/q", json=body, headers=operator).json()["owner"] == owner
    assert app.delete("/v1/queries/q", headers=mine).status_code == 204


def test_a_rebuilt_index_has_them(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path / "data", maintenance_interval=0)
    with TestClient(create_app(settings), base_url=URL) as app:
        made = save(app, params={"low": 1})
    rebuild(settings.data)
    with TestClient(create_app(settings), base_url=URL) as app:
        assert app.get("/v1/queries").json()["items"] == [made]
