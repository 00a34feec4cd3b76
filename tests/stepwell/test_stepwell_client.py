"""The client against a transport that misbehaves on purpose: retries, errors, digests, bodies."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time

import httpx2
import numpy as np
import pyarrow as pa
import pytest

import stepwell
from stepwell import (
    BadRequest,
    Busy,
    Client,
    CodecError,
    Conflict,
    InvalidData,
    InvalidTrajectory,
    JobFailed,
    ServiceFault,
    ServiceUnreachable,
)
from stepwell.codec import decode, encode
from stepwell.messages import ARROW, PROBLEM, MetricPoint
from stepwell.testing import make_spec, make_trajectory
from tests.specs import assert_same

SPEC = make_spec()


class Script:
    """Answers requests in order, and keeps them."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests: list[httpx2.Request] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        request.read()
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, Exception):
            raise answer
        return answer


def connect(*answers, **options):
    script = Script(*answers)
    options.setdefault("retry_for", 2.0)
    client = Client("http://test", "secret", transport=httpx2.MockTransport(script), **options)
    return client, script


def ok(data, **headers):
    return lambda _: httpx2.Response(200, json=data, headers=headers)


def problem(status, code="bad", headers=None, **more):
    body = {"title": code, "status": status, "code": code, "detail": "because", **more}
    sent = {"Content-Type": PROBLEM, **(headers or {})}
    return lambda _: httpx2.Response(status, content=json.dumps(body), headers=sent)


HEALTH = {"status": "ok", "version": "1"}
DATASET = {
    "name": "d",
    "spec": SPEC.to_json(),
    "spec_digest": SPEC.digest,
    "capacity": {},
    "created_at": 0.0,
}
JOB = {"id": "j", "kind": "import", "state": "running", "created_at": 0.0}
RUN = {"name": "r", "kind": "train", "status": "running", "created_at": 0.0, "heartbeat_at": 0.0}


def item(request, status="stored", **more):
    _, trajectories = decode(request.content)
    items = [{"id": t.id, "status": status, "seq": i, **more} for i, t in enumerate(trajectories)]
    return httpx2.Response(200, json={"dataset": "d", "partition": "fifo", "items": items})


# --- addresses and tokens ---------------------------------------------------------------------


def test_the_token_goes_with_every_call_and_the_environment_is_asked(monkeypatch):
    client, script = connect(ok(HEALTH))
    assert client.health().status == "ok"
    assert script.requests[0].headers["Authorization"] == "Bearer secret"
    monkeypatch.setenv("STEPWELL_URL", "http://elsewhere:1/")
    monkeypatch.setenv("STEPWELL_TOKEN", "other\n")
    with Client() as other:
        assert other.url == "http://elsewhere:1"
        assert other._http.headers["Authorization"] == "Bearer other"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://[::1", "/path"])
def test_an_address_that_cannot_be_is_refused(url):
    with pytest.raises(InvalidData, match="address"):
        Client(url)


def test_a_token_that_no_header_can_carry_is_refused():
    for token in ("a\nb", "schlüssel"):
        with pytest.raises(InvalidData, match="token"):
            Client(token=token)


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with Client("http://127.0.0.1:8000") as local:
        assert not local._http._mounts
    with Client("http://stepwell.example") as remote:
        assert remote._http._mounts


def test_no_service_tells_how_to_start_one():
    with Client("http://127.0.0.1:9", retry_for=0.0) as client:
        with pytest.raises(ServiceUnreachable, match="start one with: stepwell serve"):
            client.datasets()
        assert client.ready() is False
        with pytest.raises(ServiceUnreachable, match="not ready within"):
            client.wait_ready(0.1)


# --- retries ----------------------------------------------------------------------------------


def test_what_can_be_repeated_is_until_it_works():
    broken = httpx2.ReadError("reset")
    client, script = connect(broken, problem(429, "busy"), httpx2.ConnectError("no"), ok(DATASET))
    assert client.dataset("d").name == "d"
    assert len(script.requests) == 4


def test_posting_trajectories_is_repeated_with_the_same_bytes():
    client, script = connect(ok(DATASET), httpx2.ReadError("reset"), problem(503), item)
    sent = [make_trajectory(SPEC, seed=i) for i in range(3)]
    result = client.post("d", sent)
    assert [i.status for i in result.items] == ["stored"] * 3
    bodies = [r.content for r in script.requests[1:]]
    assert len(bodies) == 3 and len(set(bodies)) == 1
    assert script.requests[-1].headers["Content-Type"] == ARROW
    for a, b in zip(decode(bodies[0])[1], sent, strict=True):
        assert_same(a, b)


def test_what_cannot_be_repeated_is_not_once_it_may_have_arrived():
    client, script = connect(httpx2.ReadError("reset"), ok({}))
    with pytest.raises(ServiceUnreachable, match="broke"):
        client.create_token("t", ["read"])
    assert len(script.requests) == 1


def test_what_cannot_be_repeated_is_where_it_certainly_had_no_effect():
    token = {"id": "1", "name": "t", "scopes": ["read"], "created_at": 0.0, "token": "s"}
    client, script = connect(httpx2.ConnectError("no"), problem(429), ok(token))
    assert client.create_token("t", ["read"]).token == "s"
    assert len(script.requests) == 3


def test_other_errors_are_typed_and_not_retried():
    for kind, statuses in (
        (BadRequest, (400, 415, 422)),
        (stepwell.Unauthorized, (401, 403)),
        (stepwell.NotFound, (404,)),
        (Conflict, (409,)),
        (stepwell.Gone, (410,)),
        (stepwell.TooLarge, (413,)),
        (ServiceFault, (500, 502)),
        (stepwell.StorageFull, (507,)),
    ):
        for status in statuses:
            client, script = connect(problem(status))
            with pytest.raises(stepwell.ServiceError) as caught:
                client.dataset("d")
            assert (type(caught.value), caught.value.status) == (kind, status)
            assert len(script.requests) == 1


@pytest.fixture
def slept(monkeypatch):
    """Every sleep, in seconds. None takes any time, but the clock goes on by it."""
    sleeps = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(sleeps))
    return sleeps


def test_retry_after_is_honoured_and_a_long_one_is_not_waited_for(slept):
    client, script = connect(problem(429, headers={"Retry-After": "0.3"}), ok(DATASET))
    client.dataset("d")
    (pause,) = slept
    assert 0.3 <= pause <= 0.375
    client, script = connect(problem(503, headers={"Retry-After": "3600"}))
    with pytest.raises(Busy) as caught:
        client.dataset("d")
    assert len(slept) == 1 and len(script.requests) == 1
    assert caught.value.retry_after == 3600.0


def test_retry_after_may_be_a_date_or_nonsense():
    for value, low, high in (
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0, 0.0),
        ("Fri, 31 Dec 2100 23:59:59 GMT", 1e6, 1e10),
    ):
        client, _ = connect(problem(503, headers={"Retry-After": value}), retry_for=0.0)
        with pytest.raises(Busy) as caught:
            client.dataset("d")
        assert low <= caught.value.retry_after <= high
    for nonsense in ("soon", "nan", "inf", "-inf"):
        client, _ = connect(problem(503, headers={"Retry-After": nonsense}), retry_for=0.0)
        with pytest.raises(Busy) as caught:
            client.dataset("d")
        assert caught.value.retry_after is None


def test_retries_end(slept):
    client, script = connect(httpx2.ConnectError("no"), retry_for=10.0)
    with pytest.raises(ServiceUnreachable):
        client.dataset("d")
    assert 5.0 <= sum(slept) < 10.0 and len(script.requests) == len(slept) + 1
    assert slept[0] < slept[3] <= 5.0, "ever longer"


def test_a_timeout_says_how_long():
    client, _ = connect(httpx2.ReadTimeout("slow"), timeout=7.0, retry_for=0.0)
    with pytest.raises(ServiceUnreachable, match="within 7 s"):
        client.dataset("d")


def test_a_heartbeat_does_not_hold_up_who_acts():
    client, script = connect(httpx2.ConnectError("no"), retry_for=60.0)
    with pytest.raises(ServiceUnreachable):
        client.heartbeat("w", role="collect")
    assert len(script.requests) == 1


# --- answers ----------------------------------------------------------------------------------


def test_a_problem_becomes_its_error_with_expected_and_got():
    client, _ = connect(problem(422, "schema_mismatch", expected="float32", got="float64"))
    with pytest.raises(BadRequest) as caught:
        client.dataset("d")
    error = caught.value
    assert (error.code, error.expected, error.got) == ("schema_mismatch", "float32", "float64")
    assert "expected float32; got float64" in str(error)


@pytest.mark.parametrize(
    "answer",
    [
        httpx2.Response(502, html="<h1>Bad gateway</h1>"),
        httpx2.Response(404, text="not here"),
        httpx2.Response(500, json=["x"]),
        httpx2.Response(405, json={"detail": "Method Not Allowed"}),
        httpx2.Response(302, headers={"Location": "/login"}),
        httpx2.Response(200, html="<html>a web app</html>"),
        httpx2.Response(200, json={"some": "thing"}),
        httpx2.Response(200, content=b"\xff"),
    ],
    ids=lambda r: f"{r.status_code} {r.content[:12]!r}",
)
def test_another_server_at_that_address_is_called_that(answer):
    client, _ = connect(answer)
    with pytest.raises(stepwell.ServiceError, match="is http://test a Stepwell service") as caught:
        client.dataset("d")
    assert caught.value.code == "unexpected_answer"


def test_answers_may_grow():
    client, _ = connect(ok({**HEALTH, "new": 1}))
    assert client.health().status == "ok"


def test_lists_are_followed_to_their_end():
    pages = [
        {"items": [{**DATASET, "name": "a"}], "next": "c1"},
        {"items": [{**DATASET, "name": "b"}], "next": None},
    ]
    client, script = connect(*[ok(p) for p in pages])
    assert [d.name for d in client.datasets()] == ["a", "b"]
    assert script.requests[1].url.params["cursor"] == "c1"


def test_a_degraded_service_still_tells_its_health():
    client, _ = connect(lambda _: httpx2.Response(503, json={**HEALTH, "status": "degraded"}))
    assert client.health().status == "degraded"
    client, _ = connect(problem(503), retry_for=0.0)
    with pytest.raises(Busy):
        client.health()


# --- requests ---------------------------------------------------------------------------------


def test_a_bad_field_is_named_before_anything_is_sent():
    client, script = connect(ok({}))
    calls = [
        lambda: client.create_dataset("Bad Name", SPEC),
        lambda: client.create_dataset("d", SPEC, capacity={"trajectories": 0}),
        lambda: client.create_dataset("d", SPEC, capacity={"episodes": 1}),
        lambda: client.create_run("r", "sleep"),
        lambda: client.create_run("r", "train", colour="red"),
        lambda: client.sql("select 1", timeout=0),
        lambda: client.sql(""),
        lambda: client.create_launch("train", recipe="../x"),
        lambda: client.create_run("r", "train", config={"x": object()}),
        lambda: client.publish_policy("r", 1, b"", metadata={"x": object()}),
        lambda: client.publish_policy("r", 1, b"", metadata={"x": math.nan}),
        lambda: client.publish_policy("r", 1, b"", metadata={"x": "y" * 20_000}),
        lambda: client.dataset(".."),
        lambda: client.dataset(""),
    ]
    for call in calls:
        with pytest.raises(InvalidData):
            call()
    assert not script.requests


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda client: client.create_dataset("Hopper", SPEC), "64 of a-z, 0-9, "),
        (lambda client: client.create_run("a b", "train"), "128 of a-z, A-Z, 0-9, "),
    ],
    ids=["dataset", "run"],
)
def test_what_a_name_may_be_is_told_in_words(call, rule):
    client, _ = connect(ok({}))
    with pytest.raises(InvalidData, match=f"name: a name has at most {rule}.* a letter or digit"):
        call(client)


def test_a_name_never_leaves_its_place_in_the_path():
    client, script = connect(ok(DATASET))
    client.dataset("a/../../b?x=1#y")
    assert script.requests[0].url.raw_path == b"/v1/datasets/a%2F..%2F..%2Fb%3Fx%3D1%23y"


def test_only_what_is_given_is_sent():
    client, script = connect(ok(DATASET))
    client.patch_dataset("d", tags=[])
    client.patch_dataset("d", capacity={"steps": 5})
    bodies = [json.loads(r.content) for r in script.requests]
    assert bodies == [{"tags": []}, {"capacity": {"steps": 5}}]


def test_numpy_paths_and_nan_become_json(tmp_path):
    client, script = connect(ok(RUN))
    config = {
        "lr": np.float32(0.5),
        "n": np.int64(3),
        "w": np.arange(2),
        "p": tmp_path,
        "in": {1: {2}},
    }
    client.create_run("r", "train", config={**config, "nan": math.nan})
    assert json.loads(script.requests[0].content)["config"] == {
        "lr": 0.5,
        "n": 3,
        "w": [0, 1],
        "p": str(tmp_path),
        "in": {"1": [2]},
        "nan": None,
    }


def test_nan_metrics_are_sent_as_null_and_many_points_in_several_bodies():
    client, script = connect(
        lambda r: httpx2.Response(200, json={"stored": len(json.loads(r.content)["points"])})
    )
    points = [MetricPoint(key="k", step=i, value=1.0, time=0.0) for i in range(10_001)]
    points[0] = MetricPoint(key="k", step=0, value=math.nan, time=0.0)
    assert client.log_metrics("r", points) == 10_001
    assert [len(json.loads(r.content)["points"]) for r in script.requests] == [10_000, 1]
    assert json.loads(script.requests[0].content)["points"][0]["value"] is None


def test_creating_what_exists_with_the_same_layout_is_fine_if_asked_for():
    client, _ = connect(problem(409, "dataset_exists"), ok(DATASET))
    assert client.create_dataset("d", SPEC, exist_ok=True).name == "d"
    client, _ = connect(problem(409, "dataset_exists"), ok(DATASET))
    with pytest.raises(Conflict, match="another layout"):
        client.create_dataset("d", make_spec(action=2), exist_ok=True)
    client, _ = connect(problem(409, "dataset_exists"))
    with pytest.raises(Conflict):
        client.create_dataset("d", SPEC)


# --- trajectories -----------------------------------------------------------------------------


def test_large_posts_travel_in_several_bodies_and_answer_as_one():
    spec = make_spec(observation=10_000)
    client, script = connect(item)
    sent = [make_trajectory(spec, length=200, seed=i) for i in range(5)]
    result = client.post("d", sent, spec=spec)
    assert len(script.requests) > 1
    assert [i.id for i in result.items] == [t.id for t in sent]


def test_nothing_is_sent_where_one_trajectory_does_not_fit():
    client, script = connect(item)
    with pytest.raises(InvalidTrajectory):
        client.post("d", [make_trajectory(SPEC), make_trajectory(make_spec(action=2))], spec=SPEC)
    assert not script.requests
    with pytest.raises(InvalidData, match="nothing to post"):
        client.post("d", [], spec=SPEC)


def test_add_takes_plain_lists_asks_for_the_spec_once_and_raises_refusals():
    client, script = connect(ok(DATASET), item)
    plain = {"obs": [[0, 0, 0], [1, 1, 1]], "actions": [[0.5]], "rewards": [1]}
    assert client.add("d", **plain, terminated=True).status == "stored"
    assert client.add("d", **plain, seed=3).status == "stored"
    assert [r.method for r in script.requests] == ["GET", "POST", "POST"]
    (sent,) = decode(script.requests[1].content)[1]
    assert sent.terminated and sent.metadata.env == "Test-v0"
    refusal = {"title": "no", "status": 422, "code": "invalid_trajectory", "detail": "NaN"}
    for status, error in (("refused", BadRequest), ("conflict", Conflict)):
        number = 422 if status == "refused" else 409
        answer = lambda r, s=status, n=number: item(r, s, problem={**refusal, "status": n})  # noqa: E731
        client, _ = connect(ok(DATASET), answer)
        with pytest.raises(error, match="NaN"):
            client.add("d", **plain)


def test_steps_come_back_whole_or_not():
    wanted = make_trajectory(SPEC)
    client, script = connect(lambda _: httpx2.Response(200, content=encode([wanted], SPEC)))
    assert_same(client.steps(wanted.id), wanted)
    assert script.requests[0].headers["Accept"] == ARROW
    client, _ = connect(lambda _: httpx2.Response(200, content=encode([wanted], SPEC)[:-9]))
    with pytest.raises(CodecError):
        client.steps(wanted.id)
    client, _ = connect(lambda _: httpx2.Response(200, content=encode([], SPEC)))
    with pytest.raises(CodecError, match="something else"):
        client.steps(wanted.id)


# --- files ------------------------------------------------------------------------------------


def test_an_upload_streams_with_progress_and_waits_for_its_job(tmp_path):
    file = tmp_path / "x.HDF5"
    file.write_bytes(bytes(range(256)) * 10_000)
    seen = []
    client, script = connect(
        ok({"job": {**JOB, "state": "queued"}}), ok(JOB), ok({**JOB, "state": "succeeded"})
    )
    job = client.upload("d", file, env="E-v1", progress=lambda *p: seen.append(p), action_low=-2)
    assert job.state == "succeeded"
    sent = script.requests[0]
    assert sent.content == file.read_bytes()
    assert sent.headers["Content-Length"] == str(file.stat().st_size)
    assert "Transfer-Encoding" not in sent.headers
    assert sent.headers["Content-Type"] == "application/x-hdf5"
    assert dict(sent.url.params) == {
        "format": "d4rl",
        "partition": "protected",
        "create": "true",
        "env": "E-v1",
        "action_low": "-2",
    }
    assert seen[-1] == (file.stat().st_size, file.stat().st_size) and len(seen) == 3


def test_an_upload_that_cannot_start_says_why(tmp_path):
    client, script = connect(ok({}))
    for name, says in (("x.dat", "a suffix of"), ("x.csv", "duckdb"), ("x.jsonl.gz", "duckdb")):
        (tmp_path / name).touch()
        with pytest.raises(InvalidData, match=says):
            client.upload("d", tmp_path / name)
    with pytest.raises(InvalidData, match="No such file"):
        client.upload("d", tmp_path / "x.npz")
    assert not script.requests


def test_a_failed_job_is_an_error_that_carries_it():
    reason = {"title": "no", "status": 422, "code": "import_refused", "detail": "external link"}
    client, _ = connect(ok({**JOB, "state": "failed", "error": reason}))
    with pytest.raises(JobFailed, match="external link") as caught:
        client.wait_job("j")
    assert caught.value.job.state == "failed"
    client, _ = connect(ok({**JOB, "state": "cancelled"}))
    with pytest.raises(JobFailed, match="cancelled"):
        client.wait_job("j")
    client, _ = connect(ok(JOB))
    with pytest.raises(JobFailed, match="still running after"):
        client.wait_job("j", timeout=0.1)


def shard(data, etag=None):
    digest = hashlib.sha256(data).hexdigest()
    return lambda _: httpx2.Response(
        200, content=data, headers={"ETag": f'"{digest if etag is None else etag}"'}
    )


def test_a_shard_arrives_whole_or_not_at_all(tmp_path):
    data = b"PAR1" * 1000
    client, _ = connect(shard(data))
    path = client.download_shard("s", tmp_path / "s.parquet")
    assert path.read_bytes() == data
    for answer, says in (
        (shard(data, "0" * 64), "damaged"),
        (shard(data, ""), "without a digest"),
    ):
        client, _ = connect(answer)
        with pytest.raises(CodecError, match=says):
            client.download_shard("s", tmp_path / "t.parquet")
    client, _ = connect(shard(data))
    with pytest.raises(CodecError, match="damaged"):
        client.download_shard("s", tmp_path / "t.parquet", sha256="1" * 64)
    client, _ = connect(problem(410, "gone"))
    with pytest.raises(stepwell.Gone):
        client.download_shard("s", tmp_path / "t.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["s.parquet"]


def test_a_download_that_breaks_begins_again(tmp_path):
    class Breaking(httpx2.SyncByteStream):
        def __iter__(self):
            yield b"PAR1"
            raise httpx2.ReadError("cut")

    data = b"PAR1" * 1000
    digest = hashlib.sha256(data).hexdigest()
    broken = lambda _: httpx2.Response(200, stream=Breaking(), headers={"ETag": f'"{digest}"'})  # noqa: E731
    client, script = connect(broken, broken, shard(data))
    assert client.download_shard("s", tmp_path / "s.parquet").read_bytes() == data
    assert len(script.requests) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["s.parquet"]


def policy(data, **headers):
    digest = hashlib.sha256(data).hexdigest()
    return lambda _: httpx2.Response(
        200, content=data, headers={"ETag": f'"{digest}"', "X-Stepwell-Version": "7", **headers}
    )


def test_a_policy_is_checked_and_nothing_new_is_none():
    client, script = connect(policy(b"weights"), lambda _: httpx2.Response(304))
    got = client.download_policy("r")
    assert got is not None and (got.data, got.version) == (b"weights", 7)
    assert client.download_policy("r", etag=got.etag) is None
    assert script.requests[1].headers["If-None-Match"] == f'"{got.sha256}"'
    for bad in (policy(b"weights", ETag='"0"'), policy(b"w", **{"X-Stepwell-Version": "x"})):
        client, _ = connect(bad)
        with pytest.raises(CodecError):
            client.download_policy("r", 7)


def test_publishing_sends_bytes_and_describes_them():
    answer = {"run": "r", "version": 3, "sha256": "x", "bytes": 2, "created_at": 0.0}
    client, script = connect(ok(answer))
    client.publish_policy("r", 3, b"ab", step=500, metadata={"name": "größe"})
    sent = script.requests[0]
    assert (sent.method, sent.url.path, sent.content) == ("PUT", "/v1/runs/r/policies/3", b"ab")
    assert json.loads(sent.headers["X-Stepwell-Metadata"]) == {"name": "größe", "step": 500}


def test_a_video_is_checked_against_its_digest():
    digest = hashlib.sha256(b"GIF89a").hexdigest()
    about = {"evaluation": "e", "seed": 3, "return": 1.5, "length": 2, "media_type": "image/gif"}
    about |= {"sha256": digest, "bytes": 6, "created_at": 0.0}
    client, script = connect(ok(about))
    stored = client.put_video("e", 3, b"GIF89a", media_type="image/gif", total_reward=1.5, length=2)
    assert (stored.seed, stored.total_reward) == (3, 1.5)
    sent = script.requests[0]
    assert (sent.method, sent.url.path, sent.content) == (
        *("PUT", "/v1/evaluations/e/videos/3"),
        b"GIF89a",
    )
    assert dict(sent.url.params) == {"return": "1.5", "length": "2"}
    assert sent.headers["Content-Type"] == "image/gif"

    def bytes_with(etag):
        return lambda _: httpx2.Response(200, content=b"GIF89a", headers={"ETag": f'"{etag}"'})

    assert connect(bytes_with(digest))[0].video("e", 3) == b"GIF89a"
    with pytest.raises(CodecError, match="arrived damaged"):
        connect(bytes_with("0"))[0].video("e", 3)


# --- SQL --------------------------------------------------------------------------------------


def arrow(table, **metadata):
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata({k: str(v) for k, v in metadata.items()})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return lambda _: httpx2.Response(200, content=bytes(sink.getvalue()))


def test_sql_answers_in_every_shape():
    table = pa.table(
        {"n": [1, 2], "obs": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))}
    )
    client, script = connect(arrow(table, truncated="true", elapsed_ms=3.5))
    result = client.sql("select ?", [np.int64(5)], dataset="d", limit=2)
    assert result.columns == ["n", "obs"] and result.truncated and result.elapsed_ms == 3.5
    assert result.rows == [(1, [1.0, 2.0]), (2, [3.0, 4.0])] == list(result)
    assert result.to_arrow().num_rows == len(result) == 2
    assert result.to_numpy()["obs"].shape == (2, 2)
    assert list(result.to_pandas()["n"]) == [1, 2]
    assert json.loads(script.requests[0].content)["params"] == [5]
    client, _ = connect(arrow(pa.table({"n": [7]})))
    assert client.sql("select 7").one() == 7


def test_sql_columns_of_the_same_name_and_empty_answers_are_fine():
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    client, _ = connect(arrow(table))
    assert client.sql("select 1 a, 2 a").rows == [(1, 2)]
    client, _ = connect(arrow(pa.table({"o": pa.array([], pa.list_(pa.float32()))})))
    empty = client.sql("select")
    assert empty.rows == [] and len(empty.to_numpy()["o"]) == 0


def test_an_answer_that_is_no_arrow_is_an_error_of_ours():
    client, _ = connect(lambda _: httpx2.Response(200, content=b"PK\x03\x04"))
    with pytest.raises(CodecError):
        client.sql("select 1")


def test_snapshots_are_asked_for_in_the_words_of_the_api():
    answer = {
        "id": "s",
        "digest": "x",
        "selection": {},
        "spec": {},
        "datasets": ["d"],
        "trajectories": 1,
        "steps": 1,
        "shards": 1,
        "bytes": 1,
        "created_at": 0.0,
    }
    client, script = connect(ok(answer))
    client.create_snapshot(sources=[{"select": "select id", "share": 0.5}], holder="me")
    client.create_snapshot(dataset="d", where="length > 3")
    bodies = [json.loads(r.content) for r in script.requests]
    assert bodies == [
        {"from": [{"select": "select id", "share": 0.5}], "holder": "me"},
        {"dataset": "d", "where": "length > 3"},
    ]


# --- sharing ----------------------------------------------------------------------------------


def test_one_client_serves_many_threads():
    client, script = connect(ok(DATASET))
    errors = []

    def work():
        try:
            for _ in range(20):
                client.dataset("d")
        except Exception as error:  # noqa: BLE001 - whatever it is, the test must show it
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(script.requests) == 160


def test_a_fault_of_the_service_is_called_one():
    client, _ = connect(problem(500, "internal"))
    with pytest.raises(ServiceFault, match="internal"):
        client.flush("d")
