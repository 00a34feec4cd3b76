"""SIGKILL at random moments of live traffic, again and again, judged by the clients' ledgers."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from server.fsck import main as fsck
from stepwell import Client
from stepwell.codec import encode
from stepwell.errors import Busy, ServiceUnreachable
from stepwell.messages import ARROW, IngestResult
from stepwell.testing import make_spec, make_trajectory, wait_until
from stepwell.trajectory import Trajectory

KILLS = int(os.environ.get("STEPWELL_KILLS", "6"))
CLIENTS = 4
BETWEEN = 20
"""Acknowledgements between two kills, at least."""
SPEC = make_spec(observation=8, action=2)


class Poster(threading.Thread):
    """A client that posts known content and repeats whatever was not answered."""

    def __init__(self, url: str, number: int, stop: threading.Event):
        super().__init__(daemon=True)
        self.url, self.number, self.stopping = url, number, stop
        self.acknowledged: dict[str, str] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with Client(self.url, retry_for=0.0, timeout=60.0) as client:
                serial = 0
                while not self.stopping.is_set():
                    serial += 1
                    count = 1 + serial % 3
                    self.send(client, [self.make(serial, i) for i in range(count)])
        except BaseException as error:
            self.error = error

    def make(self, serial: int, i: int) -> Trajectory:
        seed = self.number * 1_000_000 + serial * 10 + i
        return make_trajectory(SPEC, length=1 + seed % 60, seed=seed)

    def send(self, client: Client, group: list[Trajectory]) -> None:
        body = encode(group, SPEC)
        while not self.stopping.is_set():
            try:
                result = client.ask(
                    IngestResult,
                    "POST",
                    "/v1/datasets/d/trajectories",
                    content=body,
                    headers={"Content-Type": ARROW},
                )
            except (ServiceUnreachable, Busy):
                self.stopping.wait(0.01)
                continue
            for trajectory, item in zip(group, result.items, strict=True):
                assert item.status in ("stored", "duplicate"), item
                self.acknowledged[trajectory.id] = trajectory.digest
            return


@pytest.mark.timeout(300 + 60 * KILLS)
def test_sigkill_of_a_busy_server_loses_and_doubles_nothing(
    start_service: Callable[..., Any], eager: dict[str, str]
) -> None:
    """All that was acknowledged before and between the kills is there once, byte for byte."""
    service = start_service(env={**eager, "STEPWELL_SEAL_IDLE": "0.3", "STEPWELL_SEAL_AGE": "0.5"})
    with Client(service.url) as client:
        client.create_dataset("d", SPEC)
    stop = threading.Event()
    posters = [Poster(service.url, number, stop) for number in range(CLIENTS)]
    for poster in posters:
        poster.start()
    chance = random.Random(os.environ.get("STEPWELL_SEED", "7"))

    def acknowledged() -> int:
        assert [p.error for p in posters if p.error] == []
        return sum(len(p.acknowledged) for p in posters)

    def progress() -> None:
        goal = acknowledged() + BETWEEN
        wait_until(lambda: acknowledged() >= goal, 120, what="traffic goes on", pause=0.002)

    for _ in range(KILLS):
        progress()
        stop.wait(chance.uniform(0.0, 0.4))  # nobody sets it: anywhere within what goes on
        service.kill()
        service.start()
    progress()
    stop.set()
    for poster in posters:
        poster.join(120)
        assert not poster.is_alive()
    ledger = {i: d for poster in posters for i, d in poster.acknowledged.items()}
    assert acknowledged() >= (KILLS + 1) * BETWEEN

    with Client(service.url) as client:
        here: list[tuple[str, str]] = []
        cursor = None
        while True:
            page = client.trajectories("d", order="seq", limit=1000, cursor=cursor)
            here += [(item.id, item.digest) for item in page.items]
            if (cursor := page.next) is None:
                break
        assert len({i for i, _ in here}) == len(here), "something is there twice"
        missing = ledger.keys() - dict(here).keys()
        assert not missing, f"{len(missing)} acknowledged trajectories are lost"
        assert all(dict(here)[i] == digest for i, digest in ledger.items())
        for trajectory_id in random.Random(1).sample(sorted(ledger), min(200, len(ledger))):
            assert client.steps(trajectory_id).digest == ledger[trajectory_id]
    assert service.stop() == 0, service.tail()
    report = fsck.check(service.data, deep=True)  # every digest, of every trajectory
    assert report.clean, report.problems  # a copy of a killed write is kept aside: a note
