"""What strangers send: each gets a typed problem that says why, and nothing is stored."""

import pickle
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import h5py
import httpx2
import numpy as np
import pytest

from stepwell import Client
from stepwell.codec import encode
from stepwell.errors import BadRequest, InvalidTrajectory, JobFailed, ServiceError
from stepwell.messages import ARROW, PROBLEM
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec(observation=3, action=1)
GOOD = encode([make_trajectory(SPEC, length=9, seed=i) for i in range(3)], SPEC)


def _changed(**changes: object) -> bytes:
    """A body whose spec differs from the dataset's."""
    spec = make_spec(**{"observation": 3, "action": 1, **changes})
    return encode([make_trajectory(spec, length=9, seed=0)], spec)


def _with_nan() -> bytes:
    """A NaN that the SDK would refuse, put in behind its back."""
    trajectory = make_trajectory(SPEC, length=9, seed=0)
    body = bytearray(encode([trajectory], SPEC))
    needle = trajectory.obs["observation"].astype(np.float32).tobytes()
    place = bytes(body).index(needle)
    body[place : place + 4] = np.float32("nan").tobytes()
    return bytes(body)


BODIES: dict[str, Callable[[], bytes]] = {
    "wrong observation shape": lambda: _changed(observation=4),
    "wrong action shape": lambda: _changed(action=2),
    "NaN": _with_nan,
    "truncated in a batch": lambda: GOOD[: len(GOOD) // 2],
    "truncated between batches": lambda: GOOD[:-8],
    "empty": lambda: b"",
    "a pickle": lambda: pickle.dumps({"obs": [1, 2, 3]}),
    "JSON": lambda: b'{"obs": [[0, 0, 0]]}',
    "random bytes": lambda: np.random.default_rng(0).bytes(4096),
}


def _stored(client: Client, name: str) -> int:
    state = client.dataset(name)
    return state.fifo.trajectories + state.protected.trajectories + state.unsealed


@pytest.mark.parametrize("what", BODIES)
def test_a_bad_body_is_refused(what: str, client: Client, name: str) -> None:
    """Refused whole or item by item, always with a code and a reason, and the count stays zero."""
    client.create_dataset(name, SPEC)
    answer = httpx2.post(
        f"{client.url}/v1/datasets/{name}/trajectories",
        content=BODIES[what](),
        headers={"Content-Type": ARROW},
    )
    if answer.status_code == 200:
        problems = [item["problem"] for item in answer.json()["items"]]
        assert problems and all(item["status"] == "refused" for item in answer.json()["items"])
    else:
        assert 400 <= answer.status_code < 500
        assert answer.headers["content-type"].startswith(PROBLEM)
        problems = [answer.json()]
    for problem in problems:
        assert problem["code"] not in ("", "unknown", "internal_error")
        assert problem["expected"] is not None, problem
    assert _stored(client, name) == 0


def test_an_oversized_body_is_refused_before_it_is_read(
    start_service: Callable[..., object], name: str
) -> None:
    """413 with the limit, both for an honest Content-Length and for a body that never says."""
    service = start_service(env={"STEPWELL_MAX_BODY": "100000"})
    client = service.client()
    client.create_dataset(name, SPEC)
    url = f"{service.url}/v1/datasets/{name}/trajectories"
    body = b"x" * 300_000
    for content in (body, (body[i : i + 1000] for i in range(0, len(body), 1000))):
        answer = httpx2.post(url, content=content, headers={"Content-Type": ARROW})
        assert answer.status_code == 413
        assert answer.json()["code"] == "body_too_large"
        assert "100" in str(answer.json()["expected"])
    assert _stored(client, name) == 0


def test_the_sdk_refuses_before_anything_is_sent(client: Client, name: str) -> None:
    """A mistake in arrays is an exception at home, naming the array, what was expected and came."""
    client.create_dataset(name, SPEC)
    good = {"obs": np.zeros((4, 3)), "actions": np.zeros((3, 1)), "rewards": np.zeros(3)}
    bad = {
        "rows": {**good, "obs": np.zeros((7, 3))},
        "shape": {**good, "obs": np.zeros((4, 2))},
        "nan": {**good, "rewards": [0.0, float("nan"), 0.0]},
        "bounds": {**good, "actions": np.full((3, 1), 1e9)},
        "flags": {**good, "terminated": [True, False, False]},
    }
    for arrays in bad.values():
        with pytest.raises(InvalidTrajectory) as caught:
            client.add(name, **arrays)
        assert caught.value.expected is not None
        assert caught.value.got is not None
    assert _stored(client, name) == 0


def _external_link(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["observations"] = h5py.ExternalLink("/etc/hostname", "/observations")
        file["actions"] = np.zeros((4, 1), "f4")
        file["rewards"] = np.zeros(4, "f4")
        file["terminals"] = np.zeros(4, bool)


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps([1, 2, 3]))


def _cut_short(path: Path) -> None:
    with h5py.File(path, "w") as file:
        for key in ("observations", "actions", "rewards", "terminals"):
            file[key] = np.random.default_rng(0).normal(size=(1000, 3))
    path.write_bytes(path.read_bytes()[:20_000])


def _object_npz(path: Path) -> None:
    buffer = BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(path, "w") as archive:
        for key in ("observations", "actions", "rewards", "terminals"):
            archive.writestr(f"{key}.npy", buffer.getvalue())


@pytest.mark.parametrize("make", [_external_link, _pickle, _cut_short, _object_npz])
def test_a_hostile_file_is_refused_and_leaves_no_dataset(
    make: Callable[[Path], None], client: Client, name: str, tmp_path: Path
) -> None:
    """The job fails with a reason; the dataset that it would have made does not exist."""
    path = tmp_path / ("file.npz" if make is _object_npz else "file.hdf5")
    make(path)
    with pytest.raises((JobFailed, ServiceError)) as caught:
        client.upload(name, path, env="X-v0")
    problem = caught.value.job.error if isinstance(caught.value, JobFailed) else caught.value
    assert problem.code
    assert problem.detail
    assert name not in {dataset.name for dataset in client.datasets()}


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE trajectories",
        "DELETE FROM trajectories",
        "SELECT 1; DROP TABLE trajectories",
        "COPY (SELECT 1) TO '/tmp/stepwell-was-here'",
        "ATTACH '/tmp/stepwell-was-here.db'",
        "SELECT * FROM read_text('/etc/passwd')",
        "SET threads = 8",
        "",
    ],
)
def test_sql_only_reads(sql: str, client: Client, name: str) -> None:
    """Whatever is not one SELECT over the tables is refused, and the tables are still there."""
    client.create_dataset(name, SPEC)
    client.post(name, [make_trajectory(SPEC, length=5, seed=1)])
    with pytest.raises((BadRequest, ValueError)):
        client.sql(sql)
    assert client.sql("select count(*) from trajectories where dataset = ?", [name]).one() == 1
    assert not list(Path("/tmp").glob("stepwell-was-here*"))
