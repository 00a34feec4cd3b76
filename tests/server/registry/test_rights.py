"""Who may do what: every route, with every kind of token, to objects of its own, of another, of
nobody.

EXPECTED is written by hand, and not from the code: a new route, or a changed right, has to say here
what it means.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from server.auth import OPEN
from server.index.tables import audit
from server.rights import RIGHTS, Principal, right_of
from tests.server.registry.conftest import client_of
from tests.server.registry.rights_world import OPERATOR, OWNED, World, bearer

# Kinds of tokens. Datasets are kitchen and garden, the run is demo.
KINDS = {
    "read": ["read"],
    "sql": ["sql"],
    "train": ["train"],
    "ingest": ["ingest"],
    "kitchen": ["ingest:kit*"],
    "garden": ["ingest:garden"],
    "play": ["play:demo"],
    "play-other": ["play:other*"],
    "admin": ["admin"],
}
READERS = "read train"
ROBOTS = "ingest kitchen garden"
IN_KITCHEN = "ingest kitchen"
LISTS = {
    "GET /v1/datasets": '"kitchen"',
    "GET /v1/runs": '"demo"',
    "GET /v1/jobs": '"job_1"',
    "GET /v1/evaluations": '"ev_1"',
    "GET /v1/workers": '"w"',
}
"""What a caller sees in a list if it may; others get a list without it, or 403."""

# route: (who may do it to every object, who only to its own). An admin may everything.
EXPECTED: dict[str, tuple[str, str]] = {
    "GET /openapi.json": (f"{READERS} sql {ROBOTS} play play-other", ""),
    "GET /metrics": (READERS, ""),
    "POST /v1/datasets": ("ingest", ""),
    "GET /v1/datasets": (f"{READERS} {IN_KITCHEN}", ""),
    "GET /v1/datasets/{name}": (f"{READERS} {IN_KITCHEN}", ""),
    "PATCH /v1/datasets/{name}": ("", ""),
    "DELETE /v1/datasets/{name}": ("", ""),
    "POST /v1/datasets/{name}/flush": (IN_KITCHEN, ""),
    "POST /v1/datasets/{name}/versions": ("train", ""),
    "GET /v1/datasets/{name}/versions": (READERS, ""),
    "GET /v1/datasets/{name}/versions/{version}": (READERS, ""),
    "GET /v1/datasets/{name}/versions/{version}/diff": (READERS, ""),
    "DELETE /v1/datasets/{name}/versions/{version}": ("", ""),
    "POST /v1/datasets/{name}/annotations": ("train", ""),
    "POST /v1/datasets/{name}/annotations/values": ("train", ""),
    "GET /v1/datasets/{name}/annotations": (READERS, ""),
    "DELETE /v1/datasets/{name}/annotations": ("", ""),
    "GET /v1/datasets/{name}/consumers": (f"{READERS} {IN_KITCHEN}", ""),
    "PUT /v1/datasets/{name}/consumers/{consumer}": ("train", ""),
    "PATCH /v1/datasets/{name}/consumers/{consumer}": ("train", ""),
    "DELETE /v1/datasets/{name}/consumers/{consumer}": ("train", ""),
    "POST /v1/datasets/{name}/trajectories": (IN_KITCHEN, ""),
    "GET /v1/datasets/{name}/trajectories": (f"{READERS} {IN_KITCHEN}", ""),
    "GET /v1/trajectories/{trajectory_id}": (f"{READERS} {IN_KITCHEN}", ""),
    "GET /v1/trajectories/{trajectory_id}/steps": (f"{READERS} {IN_KITCHEN}", ""),
    "PATCH /v1/trajectories/{trajectory_id}": ("", ""),
    "POST /v1/trajectories/labels": ("", ""),
    "POST /v1/trajectories/{trajectory_id}/demote": ("", ""),
    "POST /v1/datasets/{name}/imports": (IN_KITCHEN, ""),
    "GET /v1/jobs": (READERS, ROBOTS),
    "GET /v1/jobs/{job_id}": (READERS, ROBOTS),
    "POST /v1/jobs/check_index": ("", ""),
    "DELETE /v1/jobs/{job_id}": ("", ROBOTS),
    "POST /v1/query": ("sql", ""),
    "GET /v1/query/schema": ("sql read", ""),
    "GET /v1/queries": (f"sql {READERS}", ""),
    "GET /v1/queries/{name}": (f"sql {READERS}", ""),
    "PUT /v1/queries/{name}": ("", "sql"),
    "DELETE /v1/queries/{name}": ("", "sql"),
    "POST /v1/snapshots": ("train", ""),
    "GET /v1/snapshots": (READERS, ""),
    "GET /v1/snapshots/{snapshot_id}": (READERS, ""),
    "GET /v1/snapshots/{snapshot_id}/manifest": (READERS, ""),
    "PUT /v1/snapshots/{snapshot_id}/lease": ("train", ""),
    "DELETE /v1/snapshots/{snapshot_id}/lease": ("train", ""),
    "GET /v1/shards/{shard_id}": (READERS, ""),
    "HEAD /v1/shards/{shard_id}": (READERS, ""),
    "POST /v1/runs": (f"train {ROBOTS}", ""),
    "POST /v1/runs #again": ("train", ROBOTS),
    "POST /v1/runs #train": ("train", ""),
    "POST /v1/runs #parent": ("train", ROBOTS),
    "GET /v1/runs": (READERS, ROBOTS),
    "GET /v1/runs/{name}": (READERS, ROBOTS),
    "PATCH /v1/runs/{name}": ("train", ROBOTS),
    "PATCH /v1/runs/{name} #heartbeat": ("train", ROBOTS),
    "DELETE /v1/runs/{name}": ("", ""),
    "POST /v1/runs/{name}/metrics": ("train", ROBOTS),
    "GET /v1/runs/{name}/metrics": (READERS, ROBOTS),
    "GET /v1/runs/{name}/log": (READERS, ROBOTS),
    "PUT /v1/runs/{name}/policies/{version}": ("train", ""),
    "GET /v1/runs/{name}/policies": (f"{READERS} play", ROBOTS),
    "GET /v1/runs/{name}/policies/{which}": (f"{READERS} play", ROBOTS),
    "HEAD /v1/runs/{name}/policies/{which}": (f"{READERS} play", ROBOTS),
    "PUT /v1/runs/{name}/aliases/{alias}": ("train", ""),
    "POST /v1/evaluations": (f"train {ROBOTS}", ""),
    "POST /v1/evaluations #run": ("train", ROBOTS),
    "POST /v1/evaluations #policy": ("train", ROBOTS),
    "POST /v1/evaluations #later policy": ("train", ""),
    "POST /v1/evaluations #dataset": (f"train {IN_KITCHEN}", ""),
    "GET /v1/evaluations": (READERS, ROBOTS),
    "PUT /v1/evaluations/{evaluation_id}/videos/{seed}": ("train", ROBOTS),
    "GET /v1/evaluations/{evaluation_id}/videos": (READERS, ROBOTS),
    "GET /v1/evaluations/{evaluation_id}/videos/{seed}": (READERS, ROBOTS),
    "HEAD /v1/evaluations/{evaluation_id}/videos/{seed}": (READERS, ROBOTS),
    "DELETE /v1/evaluations/{evaluation_id}/videos/{seed}": ("", ""),
    "PUT /v1/workers/{worker_id}": ("train", ROBOTS),
    "PUT /v1/workers/{worker_id} #new": (f"train {ROBOTS}", ""),
    "PUT /v1/workers/{worker_id} #launcher": ("train", ""),
    "PUT /v1/workers/{worker_id} #run": ("train", ROBOTS),
    "GET /v1/workers": (READERS, ROBOTS),
    "POST /v1/workers/{worker_id}/command": ("", ""),
    "PUT /v1/workers/{worker_id}/programs/{role}": ("train", ""),
    "GET /v1/workers/{worker_id}/programs/{role}": (READERS, ""),
    "POST /v1/launches": ("", ""),
    "GET /v1/launches": (READERS, ""),
    "GET /v1/launches/{launch_id}": (READERS, ""),
    "GET /v1/launches/{launch_id}/log": (READERS, ""),
    "POST /v1/launches/claim": ("train", ""),
    "PATCH /v1/launches/{launch_id}": ("", "train"),
    "DELETE /v1/launches/{launch_id}": ("", ""),
    "POST /v1/tokens": ("", ""),
    "GET /v1/tokens": ("", ""),
    "PATCH /v1/tokens/{token_id}": ("", ""),
    "DELETE /v1/tokens/{token_id}": ("", ""),
    "GET /v1/audit": ("", ""),
}


OWNED_PATHS = (
    "/v1/jobs",
    "/v1/queries",
    "/v1/runs",
    "/v1/evaluations",
    "/v1/workers",
    "/v1/launches",
)


class Callers:
    """Two tokens of each kind: an object's owner is the one that asks, or the other."""

    def __init__(self, world: World):
        self.heads, self.ids, self.others = {}, {}, {}
        for kind, scopes in KINDS.items():
            for where in (self.ids, self.others):
                body = {"name": kind, "scopes": scopes}
                made = world.ask("POST", "/v1/tokens", json=body).json()
                where[kind] = made["id"]
                if where is self.ids:
                    self.heads[kind] = bearer(made["token"])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with client_of(tmp_path_factory.mktemp("rights") / "data", token=OPERATOR) as app:
        yield World(app)


@pytest.fixture(scope="module")
def callers(world: World) -> Callers:
    return Callers(world)


def routes_of(world: World) -> set[str]:
    """What the application serves, from its own list; /openapi.json is FastAPI's own route."""
    found: set[str] = set()
    waiting = list(world.app.app.routes)  # type: ignore[attr-defined]
    while waiting:
        route = waiting.pop()
        if (inner := getattr(route, "original_router", None)) is not None:
            waiting += inner.routes
        else:
            found |= {f"{method} {route.path}" for method in route.methods}
    return found - {"HEAD /openapi.json"}


def test_every_route_has_its_rights_here_and_in_the_code(world: World) -> None:
    """A new route has to say who may use it; a right for a path that was renamed protects
    nothing."""
    routes = {route for route in routes_of(world) if route.split()[1] not in OPEN}
    assert routes == {route.partition(" #")[0] for route in EXPECTED}
    stated = {f"{right.method} {right.path}" for right in RIGHTS}
    assert stated == {route.replace("HEAD", "GET") for route in routes}
    assert len(stated) == len(RIGHTS)


def rows(world: World) -> list[object]:
    """What may have an owner, and how much is in the log of changes."""
    service = world.app.app.state.service  # type: ignore[attr-defined]
    noted = sa.select(sa.func.count(), sa.func.sum(audit.c.count))
    with service.db.read() as c:
        found = [tuple(row) for table in OWNED for row in c.execute(sa.select(table))]
        return [*found, *map(tuple, c.execute(noted))]


@pytest.mark.sample(32)
@pytest.mark.parametrize("route", EXPECTED)
def test_rights(world: World, callers: Callers, route: str) -> None:
    """What is allowed succeeds; what is not is 403, or not in the list, and changes nothing."""
    every, own = (words.split() for words in EXPECTED[route])
    wrong = []
    for kind, head in callers.heads.items():
        owners = {"own": callers.ids[kind], "other": callers.others[kind], "nobody": ""}
        if not route.split()[1].startswith(OWNED_PATHS):
            owners = {"own": callers.ids[kind]}  # nothing of it has an owner
        for owner, who in owners.items():
            world.own(who)
            asked = world.request(route)
            before = rows(world)
            answer = world.app.request(
                **asked | {"headers": head | asked.get("headers", {})}, follow_redirects=False
            )
            allowed = answer.status_code < 300 and LISTS.get(route, "") in answer.text
            expected = kind == "admin" or kind in every or (kind in own and owner == "own")
            refused = answer.status_code == 403 or (route in LISTS and answer.status_code == 200)
            if allowed is not expected or not (allowed or refused):
                wrong.append((kind, owner, answer.status_code, answer.text[:200]))
            if not allowed and rows(world) != before:
                wrong.append((kind, owner, "something changed"))
    assert wrong == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/v1/datasets/x"),
        ("PATCH", "/v1/trajectories/x"),
        ("POST", "/v1/whatever/comes/later"),
        ("PUT", "/v1/runs/a/policies/../../x"),
        ("POST", "/v1/datasets/a/b/trajectories"),
        ("OPTIONS", "/v1/runs"),
        ("GET", "/v1/runs/a\n/log/x"),
    ],
)
def test_what_no_right_names_needs_admin(method: str, path: str) -> None:
    """Forgetting a line locks out; it never lets in."""
    assert right_of(method, path).scopes == ("admin",)


@pytest.mark.parametrize(
    ("scope", "needed", "allowed"),
    [
        ("ingest", "ingest:hopper", True),
        ("ingest:*", "ingest:hopper", True),
        ("ingest:hopper", "ingest:hopper", True),
        ("ingest:hopper", "ingest:hopper-2", False),
        ("ingest:hop*", "ingest:hopper-2", True),
        ("ingest:hop*", "ingest:walker", False),
        ("ingest:hop*", "ingest:*", False),
        ("ingest:hop*", "ingest", True),
        ("ingest:hop*", "play:hopper", False),
        ("read", "ingest:hopper", False),
        ("sql", "ingest:hopper", False),
        ("admin", "ingest:hopper", True),
        ("play:a*", "play:a1", True),
        ("play:a*", "play:b", False),
        ("play", "play:b", True),
        ("play", "ingest", False),
        ("ingest:read", "read", False),
    ],
)
def test_names_in_scopes(scope: str, needed: str, allowed: bool) -> None:
    assert Principal("t", (scope,)).may(needed) is allowed


def test_names_of_others_are_not_hinted_at(world: World, callers: Callers) -> None:
    """Neither runs, nor settings of runs, nor datasets of which a token knows nothing."""
    world.own("")
    world.ask("POST", "/v1/runs", json={"name": "secret", "kind": "train", "config": {"hid": 1}})
    robot = callers.heads["garden"]
    for url in ("/v1/runs/secre", "/v1/runs?where=hi=1", "/v1/datasets/garde"):
        told = world.app.get(url, headers=robot).text
        assert "secret" not in told and "hid" not in told and "did you mean" not in told
    told = world.app.get("/v1/runs/secre", headers=callers.heads["read"]).text
    assert "did you mean 'secret'" in told


def test_an_import_creates_no_dataset_for_a_narrow_token(world: World, callers: Callers) -> None:
    """Though its name fits; and the refusal says who does."""
    url = "/v1/datasets/kit-new/imports?format=npz&create=true"
    raw = {"content-type": "application/octet-stream"}
    answer = world.app.post(url, content=b"x", headers=callers.heads["kitchen"] | raw)
    assert answer.status_code == 404
    assert "stepwell datasets create" in answer.json()["detail"]
    assert "create=true" not in answer.json()["detail"]
    answer = world.app.post(url, content=b"x", headers=callers.heads["ingest"] | raw)
    assert answer.status_code == 202
    body = world.body()
    for kind, says in (("kitchen", True), ("ingest", False)):
        answer = world.app.post(
            "/v1/datasets/kit-none/trajectories",
            content=body,
            headers=callers.heads[kind] | {"content-type": "application/vnd.apache.arrow.stream"},
        )
        assert answer.status_code == 404
        assert ("stepwell datasets create" in answer.json()["detail"]) is says


def test_a_worker_that_is_taken_over_listens_to_its_new_owner(
    world: World, callers: Callers
) -> None:
    """A robot that was first to a launcher's name cannot go on speaking for it."""
    world.own(callers.ids["kitchen"])
    beat = {"role": "collect"}
    assert world.app.put("/v1/workers/w", json=beat, headers=callers.heads["kitchen"]).is_success
    launcher = {"role": "launcher"}
    assert world.app.put("/v1/workers/w", json=launcher, headers=callers.heads["train"]).is_success
    answer = world.app.put("/v1/workers/w", json=beat, headers=callers.heads["kitchen"])
    assert (answer.status_code, answer.json()["code"]) == (403, "not_owner")
