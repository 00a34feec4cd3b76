"""What /openapi.json promises is what comes: schemathesis tries every operation, in process.

Bounded (EXAMPLES per operation) and deterministic (derandomized, no example database). Where a path
wants a name, half of the requests use one that exists: else everything would be 404.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from server.app import create_app
from server.main import configure_logging
from server.settings import Settings
from stepwell.codec import encode
from stepwell.messages import ARROW, PROBLEM, Problem
from stepwell.testing import make_spec, make_trajectory

EXAMPLES = int(os.environ.get("STEPWELL_OPENAPI_EXAMPLES", "16"))
CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# Their answers close the service to the test itself, or take what the others need.
LEFT_OUT = {("post", "/v1/tokens")}
DOCUMENT = create_app(Settings(data=Path("/nowhere"))).openapi()
OPERATIONS = [
    (method, path)
    for path, item in DOCUMENT["paths"].items()
    for method in item
    if (method, path) not in LEFT_OUT
]
SPEC = make_spec()


@schemathesis.serializer(ARROW)
def _raw(_context: Any, value: Any) -> bytes:
    """Arrow bodies are strings of bytes to the document; sound ones are made by other tests."""
    return value if isinstance(value, bytes) else str(value).encode()


@schemathesis.serializer("video/mp4", "image/gif")
def _video(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    configure_logging("error")
    data = tmp_path_factory.mktemp("openapi") / "data"
    app = create_app(Settings(data=data, maintenance_interval=0, sql_workers=1))
    with TestClient(
        app, base_url="http://127.0.0.1", raise_server_exceptions=False, follow_redirects=False
    ) as client:
        yield client


@pytest.fixture(scope="module")
def schema() -> Any:
    return schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def names() -> dict[str, str]:
    """What `populate` has answered; nothing after a deletion."""
    return {}


def populate(http: TestClient) -> dict[str, str]:
    """Something of every kind; the names that paths may want. Harmless when it is there already."""
    http.post("/v1/datasets", json={"name": "d", "spec": SPEC.to_json()})
    one = make_trajectory(SPEC, seed=1)
    http.post(
        "/v1/datasets/d/trajectories?wait=sealed&partition=protected",
        content=encode([one], SPEC),
        headers={"content-type": ARROW},
    )
    http.post("/v1/datasets/d/versions", json={"name": "1"})
    http.post("/v1/runs", json={"name": "d", "kind": "train"})
    point = {"key": "loss", "step": 1, "value": 0.5, "time": 1.0}
    http.post("/v1/runs/d/metrics", json={"points": [point]})
    raw = {"content-type": "application/octet-stream"}
    http.put("/v1/runs/d/policies/1", content=b"weights", headers=raw)
    evaluations = http.get("/v1/evaluations").json()["items"]
    scores = {"returns": [1], "mean": 1, "iqm": 1, "ci_low": 1, "ci_high": 1}
    scored = {"policy": "d/1", "env": "e", "seeds": [0], **scores}
    evaluations = evaluations or [http.post("/v1/evaluations", json=scored).json()]
    url = f"/v1/evaluations/{evaluations[0]['id']}/videos/0?return=1&length=1"
    http.put(url, content=b"GIF89a", headers={"content-type": "image/gif"})
    http.put("/v1/workers/d", json={"role": "train"})
    launches = http.get("/v1/launches").json()["items"]
    launch = launches[0] if launches else http.post("/v1/launches", json={"role": "train"}).json()
    snapshots = http.get("/v1/snapshots").json()["items"]
    if not snapshots:
        snapshots = [http.post("/v1/snapshots", json={"dataset": "d"}).json()]
    info = http.get("/v1/datasets/d/trajectories").json()["items"][0]
    return {
        **{"name": "d", "worker_id": "d", "alias": "best", "version": "1", "which": "latest"},
        **{"trajectory_id": info["id"], "shard_id": str(info["shard"])},
        **{"snapshot_id": snapshots[0]["id"], "launch_id": launch["id"]},
        **{"evaluation_id": evaluations[0]["id"], "seed": "0"},
    }


@pytest.mark.sample(16)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_operation_keeps_its_promises(
    http: TestClient, schema: Any, names: dict[str, str], method: str, path: str
) -> None:
    """No 5xx; a declared status and content type; the body of its schema; errors as problems."""
    operation = schema[path][method.upper()]
    if not names:
        names.update(populate(http))

    @given(case=operation.as_strategy(), existing=st.booleans())
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def attempt(case: Any, existing: bool) -> None:
        if existing:
            for name in case.path_parameters:
                case.path_parameters[name] = names.get(name, case.path_parameters[name])
        sent = case.as_transport_kwargs(base_url="http://127.0.0.1")
        response = http.request(
            sent["method"],
            sent["url"],
            params=sent.get("params"),
            headers=dict(sent["headers"]),
            content=_content(sent),
            cookies=None,
        )
        if response.status_code >= 400:
            assert response.headers["content-type"] == PROBLEM
            assert Problem.model_validate_json(response.content).status == response.status_code
        case.validate_response(response, checks=CHECKS)

    attempt()
    if method == "delete":
        names.clear()


def _content(sent: dict[str, Any]) -> bytes | None:
    """The body as bytes, whatever the generator made of it."""
    if sent.get("json") is not None:
        return json.dumps(sent["json"]).encode()
    data = sent.get("data")
    return data.encode() if isinstance(data, str) else data


def test_the_document_promises_problems_and_nothing_of_the_frameworks_own() -> None:
    text = str(DOCUMENT)
    assert "HTTPValidationError" not in text
    for item in DOCUMENT["paths"].values():
        for operation in item.values():
            assert list(operation["responses"]["default"]["content"]) == [PROBLEM]
