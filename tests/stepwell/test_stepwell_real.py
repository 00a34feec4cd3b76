"""The client against the real service, resource by resource, as a user would write it."""

from __future__ import annotations

import hashlib
import threading
import time

import httpx2
import numpy as np
import pyarrow.parquet
import pytest

from stepwell import (
    BadRequest,
    Busy,
    Client,
    Conflict,
    Gone,
    JobFailed,
    NotFound,
    Outbox,
    ServiceError,
    ServiceUnreachable,
    Unauthorized,
    new_id,
)
from stepwell.manifest import id_bytes, id_texts
from stepwell.messages import Dataset, MetricPoint, Page
from stepwell.schema import arrow_schema
from stepwell.testing import make_spec, make_trajectory
from tests.specs import assert_same, make_rich_spec

SPEC = make_spec(env="Test-v1")


@pytest.fixture
def dataset(client, name):
    return client.create_dataset(name, SPEC, description="for a test", tags=["t"])


def d4rl(path, episodes=5, length=20, **changes):
    rng = np.random.default_rng(0)
    rows = episodes * length
    ends = np.arange(rows) % length == length - 1
    arrays = {
        "observations": rng.standard_normal((rows, 3), np.float32),
        "actions": rng.uniform(-1, 1, (rows, 2)).astype(np.float32),
        "rewards": np.ones(rows, np.float32),
        "terminals": ends,
        "timeouts": np.zeros(rows, np.bool_),
    }
    np.savez(path, **{**arrays, **changes})
    return path


# --- datasets ---------------------------------------------------------------------------------


def test_a_dataset_lives_and_dies(client, name):
    made = client.create_dataset(name, SPEC, capacity={"trajectories": 5}, description="d")
    assert made.capacity.trajectories == 5 and made.spec_digest == SPEC.digest
    assert client.dataset(name).description == "d"
    assert name in [d.name for d in client.datasets()]
    assert client.spec(name) == SPEC
    changed = client.patch_dataset(name, capacity={"steps": 100}, tags=["a"], description="e")
    assert (changed.capacity.steps, changed.capacity.trajectories) == (100, None)
    assert (changed.tags, changed.description) == (["a"], "e")
    client.delete_dataset(name)
    with pytest.raises(NotFound):
        client.dataset(name)
    with pytest.raises(NotFound):
        client.delete_dataset(name)


def test_the_same_layout_again_is_fine_if_asked_for_and_another_never(client, dataset, name):
    assert client.create_dataset(name, SPEC, exist_ok=True).created_at == dataset.created_at
    says = "already exists, with the same layout; expected another name, or exist_ok=True"
    with pytest.raises(Conflict, match=says) as caught:
        client.create_dataset(name, SPEC)
    assert (caught.value.code, caught.value.got) == ("dataset_exists", None)
    with pytest.raises(Conflict, match="with another layout; expected another name$"):
        client.create_dataset(name, make_spec(action=3))
    with pytest.raises(Conflict, match="another layout"):
        client.create_dataset(name, make_spec(action=3), exist_ok=True)


def test_many_datasets_come_over_several_pages(client, name):
    wanted = [f"{name}-{i}" for i in range(3)]
    for one in wanted:
        client.create_dataset(one, SPEC)
    first = client.ask(Page[Dataset], "GET", "/v1/datasets", params={"limit": 2})
    names = [d.name for d in client.items(Dataset, "/v1/datasets", limit=2)]
    assert len(first.items) == 2 and first.next is not None
    assert set(wanted) <= set(names) and len(names) == len(set(names))


# --- trajectories -----------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, make_rich_spec(), make_spec(discrete=4, infos=True)])
def test_what_is_posted_comes_back_bit_by_bit(client, name, spec):
    """Before and after it was sealed."""
    client.create_dataset(name, spec)
    sent = [
        make_trajectory(spec, length=7, seed=1, tags=("a",), metrics={"m": 0.5}, policy="p/1"),
        make_trajectory(spec, length=3, truncated=True, seed=2, final_obs_valid=False),
        make_trajectory(spec, length=1, terminated=False, episode_id="e", first_step=3),
    ]
    result = client.post(name, sent)
    assert [i.status for i in result.items] == ["stored"] * 3
    assert [i.seq for i in result.items] == sorted(i.seq for i in result.items)
    for trajectory in sent:
        assert_same(client.steps(trajectory.id), trajectory)
    client.flush(name)
    for trajectory in sent:
        assert_same(client.steps(trajectory.id), trajectory)
        info = client.trajectory(trajectory.id)
        assert (info.state, info.digest, info.length) == (
            "sealed",
            trajectory.digest,
            len(trajectory),
        )
        assert info.total_reward == pytest.approx(trajectory.total_reward)
        assert info.tags == list(trajectory.metadata.tags)
    assert client.dataset(name).fifo.steps == 11


def test_exactly_once_whatever_is_repeated(client, dataset, name):
    one, two = make_trajectory(SPEC), make_trajectory(SPEC)
    assert client.post(name, [one, one, two]).items[1].status == "duplicate"
    assert [i.status for i in client.post(name, [two, one]).items] == ["duplicate"] * 2
    other = make_trajectory(SPEC, seed=9, id=one.id)
    item = client.post(name, [other]).items[0]
    assert item.status == "conflict" and item.problem is not None
    assert client.dataset(name).fifo.trajectories == 2
    with pytest.raises(Conflict):
        client.add(
            name,
            obs=other.obs["observation"],
            actions=other.actions["action"],
            rewards=other.rewards,
            id=one.id,
        )


def test_threads_with_one_client_store_everything_once(client, dataset, name):
    sent = [[make_trajectory(SPEC, seed=i) for i in range(10)] for _ in range(4)]
    threads = [
        threading.Thread(target=client.post, args=(name, group)) for group in [*sent, sent[0]]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.dataset(name).fifo.trajectories == 40


def test_another_layout_is_refused_by_name_and_nothing_is_stored(client, dataset, name):
    other = make_spec(observation=4)
    with pytest.raises(BadRequest) as caught:
        client.post(name, [make_trajectory(other)], spec=other)
    assert caught.value.code == "schema_mismatch" and caught.value.expected
    assert client.dataset(name).fifo.trajectories == 0
    with pytest.raises(NotFound):
        client.post(name + "-not", [make_trajectory(SPEC)], spec=SPEC)


def test_the_index_filters_sorts_and_pages(client, dataset, name):
    sent = [
        make_trajectory(
            SPEC, length=i + 1, policy=f"p/{i % 2}", tags=("even",) if i % 2 == 0 else ()
        )
        for i in range(6)
    ]
    client.post(name, sent)
    assert [t.length for t in client.trajectories(name).items] == [6, 5, 4, 3, 2, 1]
    assert [t.length for t in client.trajectories(name, order="length").items] == [1, 2, 3, 4, 5, 6]
    assert {t.length for t in client.trajectories(name, policy="p/1").items} == {2, 4, 6}
    assert {t.length for t in client.trajectories(name, tag="even").items} == {1, 3, 5}
    first = client.trajectories(name, limit=4)
    rest = client.trajectories(name, limit=4, cursor=first.next)
    assert [t.id for t in [*first.items, *rest.items]] == [t.id for t in reversed(sent)]
    assert rest.next is None
    with pytest.raises(BadRequest):
        client.trajectories(name, order="colour")


def test_labels_and_protection(client, name):
    client.create_dataset(name, SPEC, capacity={"trajectories": 2})
    sent = [make_trajectory(SPEC, seed=i) for i in range(4)]
    client.post(name, sent[:1])
    info = client.patch_trajectory(
        sent[0].id, tags=["a"], flags=["odd"], notes="look", partition="protected"
    )
    assert (info.tags, info.flags, info.notes) == (["a"], ["odd"], "look")
    assert info.partition == "protected"
    client.post(name, sent[1:])
    assert {t.id for t in client.trajectories(name).items} == {sent[i].id for i in (0, 2, 3)}
    with pytest.raises(Gone):
        client.trajectory(sent[1].id)
    assert client.post(name, [sent[1]]).items[0].status == "evicted"
    with pytest.raises(Conflict) as caught:
        client.delete_dataset(name)
    assert caught.value.code == "protected"


# --- uploads ----------------------------------------------------------------------------------


def test_a_file_becomes_a_dataset_and_twice_is_once(client, name, tmp_path):
    seen = []
    path = d4rl(tmp_path / "x.npz")
    job = client.upload(name, path, env="File-v1", progress=lambda *p: seen.append(p))
    assert job.result is not None
    assert (job.result["trajectories"], job.result["steps"]) == (5, 100)
    assert seen[-1][0] == seen[-1][1] == path.stat().st_size
    dataset = client.dataset(name)
    assert (dataset.protected.trajectories, dataset.protected.steps) == (5, 100)
    assert dataset.return_mean == 20.0
    client.upload(name, path, env="File-v1")
    assert client.dataset(name).protected.trajectories == 5
    assert job.id in [j.id for j in client.jobs()] and client.job(job.id).state == "succeeded"


def test_a_file_that_cannot_be_is_a_failed_job_and_nothing_is_stored(client, name, tmp_path):
    path = d4rl(tmp_path / "x.npz", rewards=np.full(100, np.nan, np.float32))
    with pytest.raises(JobFailed, match="rewards") as caught:
        client.upload(name, path)
    assert caught.value.job.error.code == "import_refused"
    (tmp_path / "y.hdf5").write_bytes(b"<html>not found</html>")
    with pytest.raises(JobFailed):
        client.upload(name, tmp_path / "y.hdf5")
    with pytest.raises(NotFound):
        client.dataset(name)


# --- SQL --------------------------------------------------------------------------------------


def test_sql_sees_trajectories_at_once_and_steps_once_sealed(client, dataset, name):
    sent = [make_trajectory(SPEC, length=5, seed=i) for i in range(3)]
    client.post(name, sent)
    count = "select count(*) from trajectories where dataset = $d"
    assert client.sql(count, {"d": name}).one() == 3
    client.flush(name)
    assert client.sql("select count(*) from steps", dataset=name).one() == 18
    answer = client.sql(
        "select obs.observation, reward from steps where trajectory_id = ? and t < 5 order by t",
        [sent[1].id],
        dataset=name,
    ).to_numpy()
    assert np.array_equal(np.stack(answer["observation"]), sent[1].obs["observation"][:5])
    assert np.array_equal(answer["reward"], sent[1].rewards)


# --- snapshots --------------------------------------------------------------------------------


def test_a_snapshot_its_manifest_and_its_shards(client, dataset, name, tmp_path):
    sent = [make_trajectory(SPEC, length=4 + i, seed=i) for i in range(4)]
    client.post(name, sent)
    client.post(name, [make_trajectory(SPEC, purpose="eval")])
    snapshot = client.create_snapshot(dataset=name, where="length >= 5", holder="me")
    assert (snapshot.trajectories, snapshot.steps) == (3, 5 + 6 + 7)
    manifest = client.manifest(snapshot.id)
    assert id_texts(id_bytes(manifest["id"])) == [t.id for t in sent[1:]]
    for shard in set(manifest["shard"].to_pylist()):
        path = client.download_shard(shard, tmp_path / f"{shard}.parquet")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert client.download_shard(shard, path, sha256=digest) == path
        columns = pyarrow.parquet.read_schema(path).names
        assert columns == ["traj_idx", "t", *arrow_schema(SPEC).names]
    lease = client.lease(snapshot.id, "me", ttl=60.0)
    assert lease.expires_at > time.time() + 30
    client.release(snapshot.id, "me")
    assert client.snapshot(snapshot.id).digest == snapshot.digest
    assert snapshot.id in [s.id for s in client.snapshots()]
    with pytest.raises(NotFound):
        client.download_shard("sh_nothing", tmp_path / "x")
    with pytest.raises(NotFound):
        client.snapshot("nothing")


def test_a_mixture_and_what_has_come_since(client, dataset, name):
    client.post(name, [make_trajectory(SPEC, length=i + 1) for i in range(4)])
    select = f"select id, length::double as weight from trajectories where dataset = '{name}'"
    sources = [
        {"select": f"{select} and length <= 2", "share": 0.75},
        {"select": f"{select} and length > 2", "share": 0.25},
    ]
    first = client.create_snapshot(sources=sources)
    manifest = client.manifest(first.id)
    assert manifest["component"].to_pylist() == [0, 0, 1, 1]
    assert manifest["weight"].to_pylist() == [1.0, 2.0, 3.0, 4.0]
    client.post(name, [make_trajectory(SPEC, length=9)])
    second = client.create_snapshot(sources=sources, since=first.id)
    assert (second.added, second.removed) == (1, 0)
    with pytest.raises(BadRequest):
        client.create_snapshot(sources=[{"select": "select 1 as id"}])


# --- runs, policies, evaluations --------------------------------------------------------------


def test_a_run_reports_and_is_read_back(client):
    name = f"run-{new_id()[-8:]}"
    run = client.create_run(name, "train", config={"lr": 1e-3}, seed=3, tags=["x"], host="h")
    assert (run.status, run.config, run.seed) == ("running", {"lr": 1e-3}, 3)
    with pytest.raises(Conflict):
        client.create_run(name, "train")
    assert client.create_run(name, "train", exist_ok=True).name == name
    points = [
        MetricPoint(key="loss", step=i, value=float(i), time=time.time()) for i in range(2000)
    ]
    points.append(MetricPoint(key="bad", step=0, value=float("nan"), time=time.time()))
    assert client.log_metrics(name, points) == 2001
    client.log_metrics(name, points[:5])
    series = client.metrics(name, ["loss", "bad"], points=100)
    assert series["loss"].total == 2000 and len(series["loss"].steps) <= 200
    assert series["bad"].values == [None]
    client.patch_run(name, log="line 1\n")
    client.patch_run(name, log="line 2\n", status="finished", notes="n")
    assert client.run_log(name) == "line 1\nline 2\n"
    assert client.run(name).status == "finished" and client.run(name).latest["loss"] == 1999.0
    assert name in [r.name for r in client.runs(kind="train", status="finished")]
    client.delete_run(name)
    with pytest.raises(NotFound):
        client.run(name)


def test_policies_are_immutable_and_polled_cheaply(client):
    name = f"run-{new_id()[-8:]}"
    client.create_run(name, "train")
    first = b"one"
    policy = client.publish_policy(name, 1, first, step=100, metadata={"note": "größe"})
    assert (policy.version, policy.step, policy.metadata["note"]) == (1, 100, "größe")
    assert client.publish_policy(name, 1, first, step=100).sha256 == policy.sha256
    with pytest.raises(Conflict):
        client.publish_policy(name, 1, b"two")
    got = client.download_policy(name)
    assert got is not None and (got.data, got.version) == (first, 1)
    assert client.download_policy(name, etag=got.etag) is None
    client.publish_policy(name, 2, b"two")
    newer = client.download_policy(name, etag=got.etag)
    assert newer is not None and newer.version == 2
    client.set_alias(name, "best", 1)
    best = client.download_policy(name, "best")
    assert best is not None and best.version == 1
    assert {p.version for p in client.policies(name)} == {1, 2}
    with pytest.raises(NotFound):
        client.download_policy(name, "nobody")


def test_evaluations_are_kept_and_found(client):
    env = f"Env-{new_id()[-8:]}"
    made = client.create_evaluation(
        policy="scripted",
        env=env,
        seeds=[1, 2],
        returns=[1.0, 3.0],
        mean=2.0,
        iqm=2.0,
        ci_low=1.0,
        ci_high=3.0,
    )
    assert [e.id for e in client.evaluations(env=env)] == [made.id]
    assert client.evaluations(env=env, policy="other") == []


# --- workers, launches, tokens ----------------------------------------------------------------


def test_a_launch_is_claimed_once(client):
    launch = client.create_launch("evaluate", "recipe", {"n": 3})
    assert launch.state == "queued"
    claimed = client.claim_launch("launcher-1", roles=["evaluate"])
    assert claimed is not None and claimed.id == launch.id
    assert client.claim_launch("launcher-2", roles=["evaluate"]) is None
    assert client.patch_launch(launch.id, state="finished").state == "finished"
    waiting = client.create_launch("evaluate")
    client.cancel_launch(waiting.id)
    states = {one.id: one.state for one in client.launches()}
    assert states[launch.id] == "finished" and states[waiting.id] == "cancelled"


def test_tokens_guard_what_they_name(start_service):
    service = start_service(token="operator-secret-token")
    admin = service.client()
    with Client(service.url) as nobody, pytest.raises(Unauthorized):
        nobody.datasets()
    admin.create_dataset("a", SPEC)
    admin.create_dataset("b", SPEC)
    token = admin.create_token("robot", ["ingest:a"])
    assert token.token and token.token not in str(admin.tokens())
    with Client(service.url, token.token) as robot:
        robot.post("a", [make_trajectory(SPEC)], spec=SPEC)
        with pytest.raises(Unauthorized):
            robot.post("b", [make_trajectory(SPEC)], spec=SPEC)
        admin.revoke_token(token.id)
        with pytest.raises(Unauthorized):
            robot.post("a", [make_trajectory(SPEC)], spec=SPEC)


# --- the service as a process -----------------------------------------------------------------


def test_health_and_readiness(client, service):
    health = client.health()
    assert health.status == "ok" and health.writable and health.database_revision
    assert client.ready()
    client.wait_ready(1.0)
    assert "stepwell" in httpx2.get(f"{service.url}/metrics").text


def test_a_client_rides_out_a_restart(fresh_service):
    """Killed and started again during a call that can be repeated: it just takes longer."""
    client = fresh_service.client(retry_for=30.0)
    client.create_dataset("d", SPEC)
    sent = make_trajectory(SPEC)
    client.post("d", [sent])
    fresh_service.kill()
    impatient = fresh_service.client(retry_for=0.0)
    with pytest.raises(ServiceUnreachable, match="stepwell serve"):
        impatient.datasets()
    answers = []
    caller = threading.Thread(target=lambda: answers.append(client.steps(sent.id)))
    caller.start()
    fresh_service.start()
    caller.join(240)
    assert_same(answers[0], sent)


def test_an_outbox_survives_the_service(fresh_service, tmp_path):
    """Service killed while trajectories flow, started again: all arrive, once, in order."""
    client = fresh_service.client(retry_for=0.5)
    client.create_dataset("d", SPEC)
    sent = [make_trajectory(SPEC, seed=i) for i in range(60)]
    with Outbox(tmp_path / "out", client, "d", SPEC) as outbox:
        for i, trajectory in enumerate(sent):
            outbox.put(trajectory)
            if i == 20:
                fresh_service.kill()
        fresh_service.start()
        assert outbox.flush(30)
        assert outbox.rejected == 0
    page = client.trajectories("d", order="seq", limit=1000)
    assert [t.id for t in page.items] == [t.id for t in sent]
    assert [t.digest for t in page.items] == [t.digest for t in sent]


def test_an_outbox_puts_aside_what_the_service_refuses(client, dataset, name, tmp_path):
    taken = make_trajectory(SPEC)
    client.post(name, [taken])
    with Outbox(tmp_path / "out", client, name, SPEC) as outbox:
        outbox.put(make_trajectory(SPEC, seed=5, id=taken.id))
        outbox.put(make_trajectory(SPEC, seed=6))
        assert not outbox.flush(20) and outbox.pending == 0
        assert (outbox.sent, outbox.rejected) == (1, 1)
    assert client.dataset(name).fifo.trajectories == 2


def test_too_many_queries_are_answered_and_retried(client):
    """More than the service runs at once: some wait, some are told to come again, none is lost."""
    answers, errors = [], []

    def ask():
        try:
            answers.append(client.sql("select count(*) from range(3000000)").one())
        except Busy as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers and len(answers) + len(errors) == 16
    assert all(isinstance(e, ServiceError) and e.status == 429 for e in errors)
