"""A service with one object of each kind, whose owner a test chooses; and a request for each route.

For test_rights.py and test_audit.py.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import sqlalchemy as sa
from starlette.testclient import TestClient

from server.index.tables import evaluations, jobs, launches, runs, saved_queries, videos, workers
from stepwell.codec import encode
from stepwell.messages import ARROW
from stepwell.step_values import encode as encode_values
from stepwell.testing import make_spec, make_trajectory

OPERATOR = "operator-secret"
SPEC = make_spec()
GIF = b"GIF89a, and what follows"
ENDED = 1e9
"""Rows of these times are as good as any."""
PROGRAM: dict[str, Any] = {"version": "1", "settings": {}}
OWNED = (runs, evaluations, workers, jobs, launches, saved_queries)

SCORES: dict[str, Any] = {
    **{"env": "E", "seeds": [1], "returns": [1.0], "lengths": [5]},
    **dict.fromkeys(("mean", "iqm", "ci_low", "ci_high"), 1.0),
}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


class World:
    """Objects are made by the operator; `own` gives the rows of some to somebody."""

    def __init__(self, app: TestClient):
        self.app, self.head = app, bearer(OPERATOR)
        self._numbers = itertools.count(1)
        for name in ("kitchen", "garden"):
            self.ask("POST", "/v1/datasets", json={"name": name, "spec": SPEC.to_json()})
        self.trajectory = self.post("kitchen")
        self.post("garden")
        self.ask("POST", "/v1/datasets/kitchen/flush")
        snapshot = self.ask("POST", "/v1/snapshots", json={"dataset": "kitchen"})
        self.snapshot = snapshot.json()["id"]
        manifest = self.ask(
            "GET",
            f"/v1/snapshots/{self.snapshot}/manifest",
            headers={"accept": "application/json"},
        ).json()
        column = [c["name"] for c in manifest["columns"]].index("shard")
        self.shard = manifest["rows"][0][column]
        self.consumer()

    def ask(self, method: str, url: str, **options: Any) -> Any:
        headers = self.head | options.pop("headers", {})
        answer = self.app.request(method, url, headers=headers, **options)
        assert answer.status_code < 300, (method, url, answer.text)
        return answer

    def number(self) -> int:
        return next(self._numbers)

    def body(self) -> bytes:
        return encode([make_trajectory(SPEC, seed=self.number())], SPEC)

    def post(self, dataset: str) -> str:
        url, kind = f"/v1/datasets/{dataset}/trajectories", {"content-type": ARROW}
        answer = self.ask("POST", url, content=self.body(), headers=kind)
        return str(answer.json()["items"][0]["id"])

    def consumer(self) -> None:
        ratio = {"samples_per_insert": 1.0, "buffer": 10.0, "min_size": 1}
        self.ask("PUT", "/v1/datasets/kitchen/consumers/c", json={"samples": 0, "ratio": ratio})

    def own(self, owner: str) -> None:
        """Make whatever is missing, and give it to `owner`."""
        service = self.app.app.state.service  # type: ignore[attr-defined]
        times = {"created_at": ENDED}
        with service.db.write() as c:
            for table in (workers, launches, jobs, saved_queries):
                c.execute(sa.delete(table))
            beats = {"started_at": ENDED, "heartbeat_at": ENDED}
            c.execute(sa.insert(workers).values(id="w", role="collect", state="running", **beats))
            launch = {"role": "collect", "count": 1, "state": "claimed"}
            c.execute(sa.insert(launches).values(id="la_1", claimer=owner, **launch, **times))
            job = {"kind": "import", "state": "succeeded"}
            c.execute(sa.insert(jobs).values(id="job_1", **job, **times))
            query = {"sql": "select 1", "owner": "", "updated_at": ENDED}
            query |= {"description": "", "params": {}}
            c.execute(sa.insert(saved_queries).values(name="q", **query, **times))
            there = c.execute(sa.select(runs.c.pk).where(runs.c.name == "demo")).first()
        if there is None:
            self.ask("POST", "/v1/runs", json={"name": "demo", "kind": "collect"})
            raw = {"content-type": "application/octet-stream"}
            self.ask("PUT", "/v1/runs/demo/policies/1", content=b"weights", headers=raw)
        with service.db.write() as c:
            if not c.execute(sa.select(evaluations.c.pk).where(evaluations.c.id == "ev_1")).first():
                row = {**SCORES, "policy": "free", "episodes": 1, "confidence": 0.95}
                c.execute(sa.insert(evaluations).values(id="ev_1", **row, **times))
            for table in OWNED:
                if table is not launches:
                    c.execute(sa.update(table).values(owner=owner))
            video = c.execute(sa.select(videos.c.pk)).first()
        if video is None:
            self.put_video()

    def put_video(self) -> None:
        url, kind = "/v1/evaluations/ev_1/videos/1?return=1&length=5", {"content-type": "image/gif"}
        self.ask("PUT", url, content=GIF, headers=kind)

    def spare(self) -> str:
        """The id of a token that may be revoked."""
        body = {"name": "spare", "scopes": ["read"]}
        return str(self.ask("POST", "/v1/tokens", json=body).json()["id"])

    def new_version(self) -> str:
        name = f"v{self.number()}"
        self.ask("POST", "/v1/datasets/kitchen/versions", json={"name": name})
        return name

    def new_dataset(self) -> str:
        name = f"scratch-{self.number()}"
        self.ask("POST", "/v1/datasets", json={"name": name, "spec": SPEC.to_json()})
        return name

    def values(self) -> dict[str, Any]:
        """Values of the steps of the trajectory."""
        length = self.ask("GET", f"/v1/trajectories/{self.trajectory}").json()["length"]
        names = ("q", "v", "advantage", "weight")
        return {"trajectory": self.trajectory, **{n: [0.0] * length for n in names}}

    def annotation(self) -> str:
        """The name of annotations that exist."""
        name = f"a{self.number()}"
        body = {"name": name, "policy": "demo/1", "trajectories": [self.values()]}
        self.ask("POST", "/v1/datasets/kitchen/annotations", json=body)
        return name

    def request(self, route: str) -> dict[str, Any]:
        """A request for a route, with what it has to say to change something; "ROUTE #WHAT" is
        another one of the same route."""
        method, path = route.partition(" #")[0].split()
        options = self._bodies(route)
        url = options.pop("url", None) or path.format(
            name="demo" if path.startswith("/v1/runs") else "q" if "queries" in path else "kitchen",
            version=options.pop("version", 1),
            which="latest",
            alias="best",
            consumer="c",
            trajectory_id=self.trajectory,
            job_id="job_1",
            snapshot_id=self.snapshot,
            shard_id=self.shard,
            evaluation_id="ev_1",
            seed=1,
            worker_id="w",
            role="train",
            launch_id="la_1",
            token_id=options.pop("token", ""),
        )
        return {"method": method, "url": url, **options}

    def _bodies(self, route: str) -> dict[str, Any]:
        """Options of the request of a route, once what it changes or reads has been made."""
        match route:
            case "DELETE /v1/datasets/{name}":
                return {"url": f"/v1/datasets/{self.new_dataset()}"}
            case "POST /v1/datasets/{name}/flush":
                self.post("kitchen")
            case "GET /v1/datasets/{name}/versions/{version}":
                return {"version": self.new_version()}
            case "GET /v1/datasets/{name}/versions/{version}/diff":
                before, after = self.new_version(), self.new_version()
                return {"version": after, "params": {"before": before}}
            case "DELETE /v1/datasets/{name}/versions/{version}":
                return {"version": self.new_version()}
            case "DELETE /v1/datasets/{name}/annotations":
                return {"params": {"annotation": self.annotation()}}
            case "POST /v1/datasets/{name}/annotations":
                given = {"name": f"a{self.number()}", "policy": "demo/1"}
                return {"json": {**given, "trajectories": [self.values()]}}
            case "POST /v1/datasets/{name}/annotations/values":
                given = {"annotation": f"a{self.number()}", "policy": "demo/1"}
                return {"params": given, "content": encode_values([self.values()]), **_as(ARROW)}
            case "POST /v1/trajectories/labels":
                return {"json": {"ids": [self.trajectory], "add_tags": [f"t{self.number()}"]}}
            case "POST /v1/datasets/{name}/trajectories":
                return {"content": self.body(), **_as(ARROW)}
            case "POST /v1/trajectories/{trajectory_id}/demote":
                spare = self.post("garden")
                self.ask("PATCH", f"/v1/trajectories/{spare}", json={"partition": "protected"})
                return {"url": f"/v1/trajectories/{spare}/demote"}
            case "GET /v1/workers/{worker_id}/programs/{role}":
                self.ask("PUT", "/v1/workers/w/programs/train", json=PROGRAM)
            case "POST /v1/launches/claim":
                self.ask("POST", "/v1/launches", json={"role": "collect"})
            case "PATCH /v1/tokens/{token_id}" | "DELETE /v1/tokens/{token_id}":
                return {"token": self.spare(), **_options(route, 0)}
            case _ if "/consumers/" in route:
                self.consumer()
        return _options(route, self.number())


def _as(kind: str) -> dict[str, Any]:
    return {"headers": {"content-type": kind}}


def _options(route: str, number: int) -> dict[str, Any]:
    """A body for each route that takes one and needs nothing else; `number` makes it a new one."""
    raw, run, worker = _as("application/octet-stream"), f"run-{number}", f"/v1/workers/w-{number}"
    point = {"key": "k", "step": 1, "value": -999.0, "time": time.time()}
    again = {"name": "demo", "kind": "collect", "exist_ok": True, "tags": ["x"]}
    bodies: dict[str, dict[str, Any]] = {
        "POST /v1/datasets": {"name": f"new-{number}", "spec": SPEC.to_json()},
        "PATCH /v1/datasets/{name}": {"description": "changed"},
        "POST /v1/datasets/{name}/versions": {"name": f"v{number}"},
        "PUT /v1/datasets/{name}/consumers/{consumer}": {"samples": number},
        "PATCH /v1/datasets/{name}/consumers/{consumer}": {"buffer": 100.0 + number},
        "PATCH /v1/trajectories/{trajectory_id}": {"notes": f"note {number}"},
        "POST /v1/query": {"sql": "select 1"},
        "PUT /v1/queries/{name}": {"sql": "select 2"},
        "POST /v1/snapshots": {"dataset": "kitchen"},
        "PUT /v1/snapshots/{snapshot_id}/lease": {"ttl": 60},
        "POST /v1/runs": {"name": run, "kind": "collect"},
        "POST /v1/runs #again": again,
        "POST /v1/runs #train": {"name": run, "kind": "train"},
        "POST /v1/runs #parent": {"name": run, "kind": "collect", "parent": "demo"},
        "PATCH /v1/runs/{name}": {"status": "failed", "title": "changed"},
        "PATCH /v1/runs/{name} #heartbeat": {},
        "POST /v1/runs/{name}/metrics": {"points": [point]},
        "PUT /v1/runs/{name}/aliases/{alias}": {"version": 1},
        "POST /v1/evaluations": {**SCORES, "policy": "random"},
        "POST /v1/evaluations #run": {**SCORES, "policy": "random", "run": "demo"},
        "POST /v1/evaluations #policy": {**SCORES, "policy": "demo/1"},
        "POST /v1/evaluations #later policy": {**SCORES, "policy": f"later-{number}/1"},
        "POST /v1/evaluations #dataset": {**SCORES, "policy": "random", "dataset": "kitchen"},
        "PUT /v1/workers/{worker_id}": {"role": "collect", "state": "failed"},
        "PUT /v1/workers/{worker_id} #new": {"role": "eval"},
        "PUT /v1/workers/{worker_id} #launcher": {"role": "launcher"},
        "PUT /v1/workers/{worker_id} #run": {"role": "collect", "run": "demo"},
        "POST /v1/workers/{worker_id}/command": {"command": "pause"},
        "PUT /v1/workers/{worker_id}/programs/{role}": PROGRAM,
        "POST /v1/launches": {"role": "collect"},
        "POST /v1/launches/claim": {"worker": "me"},
        "PATCH /v1/launches/{launch_id}": {"state": "finished", "log": "all fine"},
        "POST /v1/tokens": {"name": "t", "scopes": ["read"]},
        "PATCH /v1/tokens/{token_id}": {"requests_per_minute": 9},
    }
    others: dict[str, dict[str, Any]] = {
        "POST /v1/datasets/{name}/imports": {"params": {"format": "npz"}, "content": b"x", **raw},
        "PUT /v1/runs/{name}/policies/{version}": {"version": number + 1, "content": b"w", **raw},
        "PUT /v1/evaluations/{evaluation_id}/videos/{seed}": {
            "params": {"return": 1, "length": 5}, "content": GIF, **_as("image/gif"),
        },
    }  # fmt: skip
    options = others.get(route, {}) | ({"json": bodies[route]} if route in bodies else {})
    new = route.startswith("PUT /v1/workers/{worker_id} #")
    return {**options, "url": worker} if new else options
