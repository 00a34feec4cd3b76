"""Traffic with a ledger: what the service acknowledged, written down on the client's side.

A service may die at any moment; then the ledger is the judge, read back through the API: nothing
acknowledged is lost, nothing is there twice, and what was not answered may be sent again.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.settings import Settings
from stepwell import Client
from stepwell.codec import decode, encode
from stepwell.errors import StepwellError
from stepwell.messages import ARROW, GIF
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.conftest import ServiceProcess
from tests.forks import Fork
from tests.mirrors import content, fresh

SPEC = make_spec(observation=3, action=1)
KEPT, RING, RING_SIZE = "kept", "ring", 4
IMPORTED_STEPS = 12
VIDEO = b"GIF89a" + b"frames" * 1000
SHOWN: dict[str, Any] = {"media_type": GIF, "total_reward": 1.5, "length": 7}
EAGER = {
    "STEPWELL_SHARD_GRACE": "0",
    "STEPWELL_COMPACT_AFTER": "0",
    "STEPWELL_MAINTENANCE_INTERVAL": "0.1",
    "STEPWELL_MIRROR_INTERVAL": "0.05",
    "STEPWELL_SQL_WORKERS": "1",
}
"""Maintenance that does at once what it would do in an hour."""


@dataclass
class Ledger:
    """What the service said, by id."""

    kept: dict[str, str] = field(default_factory=dict)
    """Acknowledged in KEPT: id → digest. Never evicted."""
    ring: dict[str, str] = field(default_factory=dict)
    """Acknowledged in RING, which holds the last RING_SIZE."""
    unknown: list[Trajectory] = field(default_factory=list)
    """Sent to KEPT, not answered."""
    policies: dict[int, str] = field(default_factory=dict)
    videos: list[str] = field(default_factory=list)
    """Evaluations of which VIDEO was stored, for seed 0."""
    snapshots: dict[str, int] = field(default_factory=dict)
    versions: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Acknowledged versions of KEPT: name → digest and number of trajectories."""
    annotations: set[str] = field(default_factory=set)
    """Acknowledged names of annotations of KEPT; each is of one trajectory."""
    doubtful: set[str] = field(default_factory=set)
    """Versions whose creation or deletion was not answered."""
    imports: list[str] = field(default_factory=list)
    """Datasets whose import was reported as succeeded."""

    def write(self, dataset: str, trajectories: list[Trajectory], items: list[Any]) -> None:
        book = self.kept if dataset == KEPT else self.ring
        for trajectory, item in zip(trajectories, items, strict=True):
            assert item.id == trajectory.id
            assert item.status in ("stored", "duplicate", "evicted"), item
            book[trajectory.id] = trajectory.digest


class Traffic:
    """One client that does a bit of everything, until the service dies."""

    def __init__(self, client: Client, ledger: Ledger, directory: Path):
        self.client, self.ledger, self.directory = client, ledger, directory
        self._seed = 0

    def prepare(self) -> None:
        self.client.create_dataset(KEPT, SPEC, exist_ok=True)
        self.client.create_dataset(RING, SPEC, capacity={"trajectories": RING_SIZE}, exist_ok=True)
        self.client.create_run("r", "train", exist_ok=True)

    def make(self, count: int) -> list[Trajectory]:
        self._seed += 1
        return [make_trajectory(SPEC, length=5 + i, seed=self._seed) for i in range(count)]

    def post(self, dataset: str, count: int, **options: Any) -> None:
        trajectories = self.make(count)
        if dataset == KEPT:
            self.ledger.unknown += trajectories
        items = self.client.post(dataset, trajectories, **options).items
        self.ledger.write(dataset, trajectories, items)
        self.ledger.unknown.clear()

    def round(self, number: int) -> None:
        """Raises `StepwellError` when the service is gone."""
        self.post(KEPT, 3)
        self.post(RING, 3)
        self.post(KEPT, 1, partition="protected")
        self.client.flush(KEPT)
        data = f"policy {number}".encode() * 100
        self.client.publish_policy("r", number, data)
        self.ledger.policies[number] = hashlib.sha256(data).hexdigest()
        self.put_video(self.evaluate())
        snapshot = self.client.create_snapshot(dataset=KEPT)
        self.ledger.snapshots[snapshot.id] = snapshot.trajectories
        self.client.release(snapshot.id)
        self.make_version(f"v{number}")
        self.make_version(f"gone{number}")
        self.drop_version(f"gone{number}")
        self.annotate(f"critic{number}")
        self.annotate(f"dropped{number}")
        self.ledger.annotations.discard(f"dropped{number}")
        self.client.delete_annotations(KEPT, f"dropped{number}")
        if number == 1:
            self.upload("imported-1")
        self.post(RING, 2)
        self.client.flush(RING)

    def make_version(self, name: str) -> None:
        self.ledger.doubtful.add(name)
        made = self.client.create_version(KEPT, name)
        self.ledger.versions[name] = (made.digest, made.statistics.trajectories)
        self.ledger.doubtful.remove(name)

    def drop_version(self, name: str) -> None:
        self.ledger.doubtful.add(name)
        self.client.delete_version(f"{KEPT}@{name}")
        del self.ledger.versions[name]
        self.ledger.doubtful.remove(name)

    def annotate(self, name: str) -> None:
        chosen = self.client.trajectory(next(iter(self.ledger.kept)))
        values = dict.fromkeys(("q", "v", "advantage", "weight"), [0.5] * chosen.length)
        self.client.annotate(KEPT, name, "r/1", [{"trajectory": chosen.id, **values}])
        self.ledger.annotations.add(name)

    def evaluate(self) -> str:
        """The id of a new evaluation."""
        scores = {"mean": 1.0, "iqm": 1.0, "ci_low": 1.0, "ci_high": 1.0}
        made = self.client.create_evaluation(
            policy="p/1", env="E-v0", seeds=[0], returns=[1.0], **scores
        )
        return made.id

    def put_video(self, evaluation: str) -> None:
        self.client.put_video(evaluation, 0, VIDEO, **SHOWN)
        self.ledger.videos.append(evaluation)

    def upload(self, name: str) -> None:
        rng = np.random.default_rng(0)
        path = self.directory / f"{name}.npz"
        ends = np.zeros(IMPORTED_STEPS, bool)
        ends[3::4] = True
        np.savez(
            path,
            observations=rng.normal(size=(IMPORTED_STEPS, 3)).astype(np.float32),
            actions=rng.uniform(-1, 1, (IMPORTED_STEPS, 1)).astype(np.float32),
            rewards=np.ones(IMPORTED_STEPS, np.float32),
            terminals=ends,
            timeouts=np.zeros(IMPORTED_STEPS, bool),
        )
        job = self.client.upload(name, path, env="Test-v0", timeout=300)
        assert job.state == "succeeded"
        self.ledger.imports.append(name)

    def until_death(self, rounds: int = 30) -> bool:
        """Whether it died before the rounds were over."""
        try:
            self.prepare()
            for number in range(1, rounds + 1):
                self.round(number)
        except StepwellError as error:
            if type(error).__name__ in ("ServiceUnreachable", "JobFailed"):
                return True
            raise
        return False


def listing(app: TestClient, dataset: str) -> list[dict[str, Any]]:
    """All living trajectories of a dataset."""
    return pages(app, f"/v1/datasets/{dataset}/trajectories", order="seq")


def pages(app: TestClient, path: str, **params: str) -> list[dict[str, Any]]:
    """All rows of a list, page by page."""
    items: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        page = app.get(path, params={**params, "limit": 1000, **cursor}).raise_for_status()
        items += page.json()["items"]
        if page.json()["next"] is None:
            return items
        cursor = {"cursor": page.json()["next"]}


def judge(app: TestClient, ledger: Ledger) -> None:
    """The ledger against the API: every acknowledged thing once, byte for byte."""
    if app.get(f"/v1/datasets/{KEPT}").status_code == 404:
        assert not ledger.kept
        return
    here = [item["id"] for item in listing(app, KEPT)]
    assert len(here) == len(set(here)), "something is there twice"
    maybe = {t.id for t in ledger.unknown}
    assert set(ledger.kept) <= set(here) <= set(ledger.kept) | maybe
    for trajectory_id, digest in ledger.kept.items():
        steps = app.get(f"/v1/trajectories/{trajectory_id}/steps").raise_for_status()
        assert decode(steps.content)[1][0].digest == digest
    if ledger.unknown:  # a client that was not answered sends again, and must not make a copy
        body = encode(ledger.unknown, SPEC)
        again = app.post(
            f"/v1/datasets/{KEPT}/trajectories", content=body, headers={"content-type": ARROW}
        ).raise_for_status()
        assert {i["status"] for i in again.json()["items"]} <= {"stored", "duplicate"}
        here = [item["id"] for item in listing(app, KEPT)]
        assert sorted(here) == sorted({*ledger.kept, *maybe})
    ring = listing(app, RING)
    assert len(ring) == min(RING_SIZE, len(ledger.ring)) or len(ring) == RING_SIZE
    for version, sha256 in ledger.policies.items():
        data = app.get(f"/v1/runs/r/policies/{version}").raise_for_status().content
        assert hashlib.sha256(data).hexdigest() == sha256
    for evaluation in ledger.videos:
        video = app.get(f"/v1/evaluations/{evaluation}/videos/0").raise_for_status()
        assert video.content == VIDEO
    for snapshot_id, count in ledger.snapshots.items():
        manifest = app.get(
            f"/v1/snapshots/{snapshot_id}/manifest", headers={"accept": "application/json"}
        ).raise_for_status()
        assert len(manifest.json()["rows"]) == count
    noted = app.get(f"/v1/datasets/{KEPT}/annotations").raise_for_status().json()["items"]
    assert {one["name"] for one in noted} >= ledger.annotations
    assert all(one["trajectories"] == 1 for one in noted)
    judge_versions(app, ledger)
    imported = app.get("/v1/datasets/imported-1")
    if imported.status_code == 200:  # all or nothing
        assert imported.json()["protected"]["trajectories"] in (0, IMPORTED_STEPS // 4)
    assert imported.status_code == 200 or not ledger.imports


def judge_mirror(app: TestClient) -> None:
    """The mirror, which went on from a base if there was one, says what the index says."""
    service: Any = app.app.state.service  # type: ignore[attr-defined]
    service.ingest.flush()  # nothing changes any more
    with tempfile.TemporaryDirectory() as folder:
        with fresh(service.settings.index_file, Path(folder) / "mirror") as wanted:
            assert content(service.mirror) == content(wanted)


def judge_versions(app: TestClient, ledger: Ledger) -> None:
    """Every acknowledged version is there, whole and protected; no other, but the doubtful."""
    url = f"/v1/datasets/{KEPT}"
    found = {v["name"]: v for v in app.get(f"{url}/versions").raise_for_status().json()["items"]}
    assert set(ledger.versions) - ledger.doubtful <= set(found)
    assert set(found) <= set(ledger.versions) | ledger.doubtful
    for name in set(found) & set(ledger.versions):
        made = found[name]
        numbers = made["digest"], made["statistics"]["trajectories"]
        assert (numbers, made["missing"]) == (ledger.versions[name], 0)
    if ledger.versions:
        most = max(count for _, count in ledger.versions.values())
        protected = app.get(url).raise_for_status().json()["protected"]["trajectories"]
        assert protected >= most


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ledger]:
    """The directory of a killed service with something of each kind, some of it not sealed yet, and
    what it acknowledged."""
    directory = tmp_path_factory.mktemp("killed")
    ledger = Ledger()
    service = ServiceProcess(directory, env={"STEPWELL_SQL_WORKERS": "1"}).start()
    try:
        with Client(service.url, retry_for=0.0, timeout=120.0) as client:
            traffic = Traffic(client, ledger, directory)
            traffic.prepare()
            traffic.round(1)
            traffic.post(KEPT, 2)
    finally:
        service.close()
    return service.data, ledger


@pytest.fixture
def filled(killed: tuple[Path, Ledger], ledger: Ledger, tmp_path: Path) -> Iterator[ServiceProcess]:
    """A service to be started on a copy of it; `ledger` holds what it acknowledged."""
    service = ServiceProcess(tmp_path, env={"STEPWELL_SQL_WORKERS": "1"})
    shutil.copytree(killed[0], service.data)
    vars(ledger).update(vars(copy.deepcopy(killed[1])))
    yield service
    service.close()


def run_command(module: str, *args: object, failpoint: str = "", **env: str) -> tuple[int, str]:
    """The exit status of a command of ours, and what it printed."""
    variables = {**os.environ, "STEPWELL_FAILPOINT": failpoint, **env}
    with tempfile.NamedTemporaryFile() as output:
        fork = Fork(module, [*map(str, args)], env=variables, output=Path(output.name))
        return fork.wait(300), fork.said()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def traffic(ledger: Ledger, tmp_path: Path) -> Iterator[Callable[[Any], Traffic]]:
    """Make traffic for a service process; clients are closed afterwards."""
    clients: list[Client] = []

    def make(service: Any) -> Traffic:
        client = Client(service.url, retry_for=0.0, timeout=120.0)
        clients.append(client)
        return Traffic(client, ledger, tmp_path)

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def eager() -> dict[str, str]:
    return dict(EAGER)


@pytest.fixture
def reopen() -> Callable[[Path, Ledger], None]:
    """Restart on the directory, let the ledger judge through the API, and stop cleanly."""

    def run(data: Path, ledger: Ledger) -> None:
        settings = Settings(data=data, sql_workers=0, maintenance_interval=0)
        with TestClient(create_app(settings), base_url="http://127.0.0.1") as app:
            judge(app, ledger)
            judge_mirror(app)

    return run
