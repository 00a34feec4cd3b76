"""The wall clock of a real service jumps, while it runs and while it does not: nothing leased goes.

The service's own `time.time` jumps, in its process: a `sitecustomize` on its path adds what a file
says to it. A service that is stopped for a while, as by a paused container, keeps what is leased.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import stepwell
from stepwell import Client
from stepwell._background import BackgroundLoop
from stepwell.codec import encode
from stepwell.errors import StepwellError
from stepwell.messages import ARROW
from stepwell.testing import make_spec, make_trajectory, wait_until

SPEC = make_spec(observation=3, action=1)
HOUR, DAY = 3600.0, 86_400.0
GRACE = 0.5
JUMPING = """
import os, time
_real, _file = time.time, os.environ["CLOCK_OFFSET_FILE"]
time.time = lambda: _real() + float(open(_file).read())
"""


class Jumping:
    """A service whose wall clock is set by `jump`."""

    def __init__(self, start_service: Callable[..., Any], folder: Path):
        (folder / "sitecustomize.py").write_text(JUMPING)
        self._offset = folder / "offset"
        self.jump(0.0)
        root = Path(stepwell.__file__).parents[1]
        self.service = start_service(
            env={
                "PYTHONPATH": os.pathsep.join([str(folder), str(root)]),
                "CLOCK_OFFSET_FILE": str(self._offset),
                "STEPWELL_SHARD_GRACE": str(GRACE),
                "STEPWELL_MAINTENANCE_INTERVAL": "0.1",
                "STEPWELL_SQL_WORKERS": "1",
            },
            command=True,
        )
        self._made = 0

    def jump(self, seconds: float) -> None:
        unfinished = self._offset.with_suffix(".new")
        unfinished.write_text(str(seconds))
        unfinished.rename(self._offset)

    def files(self) -> set[str]:
        return {path.stem for path in (self.service.data / "shards" / "fifo").glob("*.parquet")}

    def dead_shard(self, client: Client, holder: str | None = None) -> tuple[str, str]:
        """A shard of which nothing is alive any more, and the snapshot of it, leased or not."""
        self._made += 1
        name = f"d{self._made}"
        client.create_dataset(name, SPEC, capacity={"trajectories": 1})
        client.post(name, [make_trajectory(SPEC, seed=1)])
        snapshot = client.create_snapshot(dataset=name, holder=holder or "")
        (shard,) = set(client.manifest(snapshot.id)["shard"].to_pylist())
        if holder is None:
            client.release(snapshot.id)
        client.post(name, [make_trajectory(SPEC, seed=2)])
        client.flush(name)
        return snapshot.id, shard

    def rounds_pass(self, client: Client) -> None:
        """Until maintenance has deleted what nobody holds; it would delete what is held, too."""
        _, shard = self.dead_shard(client)
        wait_until(lambda: shard not in self.files(), what=f"maintenance deletes {shard}")


@pytest.fixture
def jumping(start_service: Callable[..., Any], tmp_path: Path) -> Jumping:
    return Jumping(start_service, tmp_path)


def test_a_jump_of_the_wall_clock_takes_nothing_that_is_leased(jumping: Jumping) -> None:
    """Running: ±1 h, ±1 day. The service tells the new time, and the lease does not feel it."""
    with jumping.service.client(timeout=60.0) as client:
        snapshot, shard = jumping.dead_shard(client, "trainer")
        client.lease(snapshot, "trainer", ttl=600.0)
        for offset in (HOUR, -HOUR, DAY, -DAY, 0.0):
            jumping.jump(offset)
            told = client.create_snapshot(dataset="d1").created_at
            assert abs(told - time.time() - offset) < 300.0, "the jump did not reach the service"
            jumping.rounds_pass(client)
            assert shard in jumping.files()
            left = client.lease(snapshot, "somebody else", ttl=1.0)
            assert left.ttl == 1.0 and abs(left.expires_at - time.time() - offset) < 300.0
        path = client.download_shard(shard, jumping.service.data.parent / "shard.parquet")
        assert pq.read_metadata(path).num_rows > 0


@pytest.mark.parametrize("offset", [HOUR, -HOUR, DAY, -DAY])
def test_a_lease_survives_a_restart_at_another_time(jumping: Jumping, offset: float) -> None:
    """Killed, and started an hour or a day later or earlier, as its clock says."""
    with jumping.service.client(timeout=60.0) as client:
        snapshot, shard = jumping.dead_shard(client, "trainer")
        client.lease(snapshot, "trainer", ttl=600.0)
    jumping.service.kill()
    jumping.jump(offset)
    jumping.service.start()
    with jumping.service.client(timeout=60.0) as client:
        jumping.rounds_pass(client)
        assert shard in jumping.files()
        assert client.manifest(snapshot).num_rows == 1


def test_no_lease_is_for_ever(jumping: Jumping) -> None:
    """It ends TTL after its last renewal, with a clock put back and a restart between; F14 grants
    ten seconds more. The deadline is five times that."""
    with jumping.service.client(timeout=60.0) as client:
        snapshot, shard = jumping.dead_shard(client, "trainer")
        client.lease(snapshot, "trainer", ttl=8.0)
    jumping.service.kill()
    jumping.jump(-DAY)
    jumping.service.start()
    within = 5 * (8.0 + GRACE + 10.0)
    wait_until(lambda: shard not in jumping.files(), within, what="the lease ends")
    with jumping.service.client(timeout=60.0) as client:
        with pytest.raises(stepwell.Gone):
            client.manifest(snapshot)


LEASE = 15.0
"""Seconds; more than fivefold what of a stop counts as uptime (server/index/db.py)."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("meanwhile", [True, False])
def test_a_stopped_service_keeps_what_its_trainer_would_have_renewed(
    jumping: Jumping, meanwhile: bool
) -> None:
    """SIGSTOP for longer than the lease, then SIGCONT.

    The trainer's tries to renew wait in the service's socket then, or its next one comes after
    maintenance has had its rounds.
    """
    with jumping.service.client(timeout=60.0) as client:
        snapshot, shard = jumping.dead_shard(client, "trainer")
        client.lease(snapshot, "trainer", ttl=LEASE)
        os.kill(jumping.service.pid, signal.SIGSTOP)
        try:
            with _trying(jumping.service.url, snapshot) if meanwhile else contextlib.nullcontext():
                awake = time.monotonic() + 1.5 * LEASE
                wait_until(lambda: time.monotonic() > awake, what="the lease would have ended")
        finally:
            os.kill(jumping.service.pid, signal.SIGCONT)
        jumping.rounds_pass(client)
        assert shard in jumping.files()
        client.lease(snapshot, "trainer", ttl=LEASE)
        assert client.manifest(snapshot).num_rows == 1
        within = 5 * (LEASE + GRACE + 10.0)
        wait_until(lambda: shard not in jumping.files(), within, what="the lease ends")


@contextlib.contextmanager
def _trying(url: str, snapshot: str) -> Iterator[None]:
    """A trainer that asks a stopped service to renew its lease, again and again."""
    with Client(url, timeout=1.0, retry_for=0.0) as trainer:
        loop = BackgroundLoop(
            "leases",
            lambda: trainer.lease(snapshot, "trainer", ttl=LEASE),
            every=1.0,
            longest_wait=1.0,
            expected=(StepwellError,),
        )
        loop.start()
        try:
            wait_until(lambda: loop.failures > 0, what="a renewal that is not answered")
            yield
        finally:
            loop.stop()


BODY_TIMEOUT = 2.0


def test_a_body_that_waits_in_the_socket_of_a_stopped_service_is_not_late(
    start_service: Callable[..., Any],
) -> None:
    """Its sender was in time; the service was not."""
    service = start_service(env={"STEPWELL_BODY_TIMEOUT": str(BODY_TIMEOUT)})
    body = encode([make_trajectory(SPEC, length=100)], SPEC)
    head = (
        "POST /v1/datasets/d/trajectories HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: {ARROW}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with service.client() as client:
        client.create_dataset("d", SPEC)
        with socket.create_connection(("127.0.0.1", service.port), timeout=60.0) as sock:
            sock.sendall(head.encode() + body[:100])
            metrics = client.call
            held = "stepwell_body_held_bytes 0.0"
            wait_until(lambda: held not in metrics("GET", "/metrics", accept="text/plain").text)
            os.kill(service.pid, signal.SIGSTOP)
            try:
                sock.sendall(body[100:])
                awake = time.monotonic() + 5 * BODY_TIMEOUT
                wait_until(lambda: time.monotonic() > awake, what="the body would be late")
            finally:
                os.kill(service.pid, signal.SIGCONT)
            answer = b""
            while chunk := sock.recv(65536):
                answer += chunk
        assert answer.startswith(b"HTTP/1.1 200 ") and b'"stored"' in answer
