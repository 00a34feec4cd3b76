"""Backups under load, killed anywhere, restored: nothing acknowledged before one began is lost."""

from __future__ import annotations

import copy
import os
import random
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.fsck import main as fsck
from server.settings import Settings
from stepwell.codec import decode
from stepwell.errors import ServiceUnreachable
from stepwell.testing import wait_until
from tests.failpoints import failpoints_of
from tests.faults.conftest import Ledger, Traffic, listing, pages, run_command

BACKUPS = int(os.environ.get("STEPWELL_BACKUPS", "3"))
ROUNDS = 2
"""Rounds of traffic before the first backup."""
EAGER = {
    "STEPWELL_SHARD_GRACE": "0",
    "STEPWELL_COMPACT_AFTER": "0",
    "STEPWELL_MAINTENANCE_INTERVAL": "0.1",
    "STEPWELL_SEAL_IDLE": "0.2",
    "STEPWELL_SQL_WORKERS": "1",
}


def command(name: str, *args: object, failpoint: str = "", **env: str) -> tuple[int, str]:
    """Its exit status, and what it printed."""
    return run_command("stepwell.cli", name, *args, failpoint=failpoint, **env)


def succeed(name: str, *args: object, **env: str) -> None:
    status, printed = command(name, *args, **env)
    assert status == 0, printed


class Load(threading.Thread):
    """Traffic until it is told to stop."""

    def __init__(self, traffic: Traffic):
        super().__init__(daemon=True)
        self.traffic, self.stopping = traffic, threading.Event()
        self.started_rounds = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.started_rounds += 1
                self.traffic.round(self.started_rounds + 100)
        except ServiceUnreachable:
            pass
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self.stopping.set()
        self.join(120)
        if self.error is not None:
            raise self.error


def judge_restored(app: Any, before: Ledger, read: Collection[str] | None = None) -> None:
    """Everything of the ledger is there, byte for byte; later things may be there, too.

    `read`: the trajectories of which the steps are compared, all by default; `fsck --deep` compares
    those of all with the digests of the index.
    """
    found = listing(app, "kept")
    here = {item["id"]: item["digest"] for item in found}
    assert len(here) == len(found), "something is there twice"
    assert before.kept.items() <= here.items()
    for trajectory_id in before.kept if read is None else read:
        digest = before.kept[trajectory_id]
        steps = app.get(f"/v1/trajectories/{trajectory_id}/steps").raise_for_status()
        assert decode(steps.content)[1][0].digest == digest
    for version in before.policies:
        app.get(f"/v1/runs/r/policies/{version}").raise_for_status()
    for evaluation in before.videos:
        app.get(f"/v1/evaluations/{evaluation}/videos/0").raise_for_status()
    noted = app.get("/v1/datasets/kept/annotations").raise_for_status().json()["items"]
    assert {one["name"] for one in noted} >= before.annotations
    versions = {one["name"] for one in pages(app, "/v1/datasets/kept/versions")}
    assert set(before.versions) - before.doubtful <= versions


def check_restored(data: Path, before: Ledger, read: Collection[str] | None = None) -> None:
    assert [p for p in fsck.check(data, deep=True).problems if not p.note] == []
    settings = Settings(data=data, sql_workers=0, maintenance_interval=0)
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as app:
        judge_restored(app, before, read)
        assert app.get("/readyz").json()["status"] == "ok"


def frozen(ledger: Ledger) -> Ledger:
    """A copy of what was acknowledged so far; another thread may be adding to it."""
    while True:
        try:
            return copy.deepcopy(ledger)
        except RuntimeError:  # it changed meanwhile
            continue


def test_backups_under_load_lose_nothing(
    start_service: Callable[..., Any],
    traffic: Callable[[Any], Traffic],
    ledger: Ledger,
    tmp_path: Path,
) -> None:
    """At random moments, beside sealing, eviction, compaction and deletion without any grace."""
    rng = random.Random(BACKUPS)
    service = start_service(env=EAGER)
    client = traffic(service)
    client.prepare()
    for number in range(1, ROUNDS + 1):
        client.round(number)
    load = Load(client)
    load.start()
    target = tmp_path / "backups"
    judged: set[str] = set()
    for number in range(BACKUPS):
        some_more = len(ledger.kept) + rng.randrange(12)
        wait_until(lambda: len(ledger.kept) >= some_more or not load.is_alive(), 120)  # noqa: B023
        before = frozen(ledger)
        succeed("backup", target, "--data", service.data)
        data = tmp_path / f"restored{number}"
        succeed("restore", target, "--data", data)
        new = before.kept.keys() - judged
        check_restored(data, before, new | set(rng.sample(sorted(judged), min(50, len(judged)))))
        judged |= new
        shutil.rmtree(data)
    load.finish()


@pytest.mark.long
def test_a_restored_directory_is_used_by_a_collector_and_a_trainer(
    start_service: Callable[..., Any], tmp_path: Path
) -> None:
    """Those that were at work before go on with it, with their outboxes and checkpoints."""
    service = start_service(env=EAGER)
    target, data = tmp_path / "backups", tmp_path / "other" / "data"
    work = {"STEPWELL_URL": service.url, "STEPWELL_OUTBOX": str(tmp_path / "outbox")}

    def collect(episodes: int) -> None:
        words = ["--env", "CartPole-v1", "--dataset", "cart", "--random", "--envs", "2"]
        succeed("collect", *words, "--episodes", episodes, **work)

    def train(updates: int) -> None:
        words = ["bc", "--dataset", "cart", "--run", "r", "--updates", updates, "--threads", 1]
        words += ["--output", tmp_path / "runs", "--data.cache", tmp_path / "cache"]
        words += ["--data.batch", 2, "--data.window", 8, "--schedule.publish-every", 2]
        succeed("train", *words, **work)

    with service.client() as client:
        collect(4)
        train(2)
        acknowledged = {one.id: one.digest for one in client.trajectories("cart").items}
        policy = client.download_policy("r", 2).data
        succeed("backup", target, "--data", service.data)
        collect(3)
    service.kill()
    succeed("restore", target, "--data", data)
    service.data = data
    service.start()
    with service.client() as client:
        found = {one.id: one.digest for one in client.trajectories("cart").items}
        assert found == acknowledged and len(found) >= 4
        assert client.download_policy("r", 2).data == policy
        collect(3)
        train(4)
        assert client.run("r").status == "finished"
        assert len(client.policies("r")) == 2
        assert client.dataset("cart").fifo.trajectories >= len(found) + 3


ON_BACKUP = [n for n in failpoints_of("server") if n.startswith("backup.")]
ON_MISSING = ("adopt.before_commit", "adopt.after_commit", "unknown.after_move")
ON_RESTORE = [n for n in failpoints_of("server") if n.startswith("restore.")]


def test_a_backup_that_dies_anywhere_is_made_by_the_next_one(
    filled: Any, ledger: Ledger, tmp_path: Path
) -> None:
    target = tmp_path / "backups"
    filled.start(env=EAGER)
    for name in ON_BACKUP:
        died = command("backup", target, "--data", filled.data, failpoint=name)
        assert died[0] == -9, (name, died)
        whole = len(list(target.glob("backups/*/manifest.json")))
        assert whole == (name == "backup.after_manifest"), name
        succeed("backup", target, "--data", filled.data)
        data = tmp_path / name
        succeed("restore", target, "--data", data)
        check_restored(data, ledger)
        shutil.rmtree(target)
    with filled.client() as client:
        client.delete_version("kept@v1")
        assert not any((filled.data / "versions").iterdir()), "no dead backup holds deletions"


def test_a_restore_that_dies_anywhere_goes_on(filled: Any, ledger: Ledger, tmp_path: Path) -> None:
    target = tmp_path / "backups"
    succeed("backup", target, "--data", filled.start(env=EAGER).data)
    for name in ON_RESTORE:
        data = tmp_path / name
        died = command("restore", target, "--data", data, failpoint=name)
        assert died[0] == -9, (name, died)
        refused = command("fsck", "--data", data)
        assert refused[0] == 2, (name, refused)
        succeed("restore", target, "--data", data)
        check_restored(data, ledger)


@pytest.mark.parametrize("name", ON_MISSING)
def test_dying_while_missing_files_are_looked_for_loses_nothing(
    name: str, filled: Any, ledger: Ledger
) -> None:
    data = filled.data
    for shard in (data / "shards").rglob("*.parquet"):
        # Its row names a file that is not there; the data lie under a name that no row has.
        shard.rename(shard.with_name(shard.name.replace("sh_", "sh_f")))
    (data / "policies" / "pol_stray.bin").write_bytes(b"stray")
    filled.start(wait=False, env={"STEPWELL_FAILPOINT": name})
    assert filled.wait_exit() == -9, filled.tail()
    check_after(data, ledger)


def check_after(data: Path, ledger: Ledger) -> None:
    settings = Settings(data=data, sql_workers=0, maintenance_interval=0)
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as app:
        judge_restored(app, ledger)
    assert (data / "quarantine" / "policies" / "pol_stray.bin").read_bytes() == b"stray"
    assert fsck.check(data, deep=True).clean
