"""What dead collectors left is delivered once, whoever dies while taking it over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collector.outbox_slots import open_outbox
from stepwell import Client
from stepwell._outbox_folder import find_outboxes, summarise
from stepwell.errors import ServiceUnreachable
from stepwell.outbox import Outbox
from stepwell.testing import make_spec, make_trajectory
from tests.failpoints import failpoints_of

SPEC = make_spec(action=1)
COLLECTOR = """
import sys
from collector.outbox_slots import open_outbox
from stepwell import Client
from stepwell.testing import make_spec

with Client(sys.argv[1]) as client:
    print("ready", flush=True)
    sys.stdin.readline()
    outbox = open_outbox(client, sys.argv[2], make_spec(action=1))
    left = outbox.pending
    done = outbox.flush(120.0)
    print(outbox.directory.name, left, outbox.sent, flush=True)
    sys.stdin.readline()
    outbox.close(0.0)
    sys.exit(not done)
"""


class Away:
    """Where a collector writes while the service is away."""

    url = ""

    def with_options(self, **_: object) -> Away:
        return self

    def post_stream(self, *_: object, **__: object) -> None:
        raise ServiceUnreachable("away")


def leave(folder: Path, dataset: str, slots: int, each: int) -> dict[str, str]:
    """Outboxes of dead collectors: id → digest of what waits in them."""
    made: dict[str, str] = {}
    for slot in range(slots):
        outbox = Outbox(folder / str(slot), Away(), dataset, SPEC)  # type: ignore[arg-type]
        for number in range(each):
            trajectory = make_trajectory(SPEC, length=4, seed=100 * slot + number)
            outbox.put(trajectory)
            made[trajectory.id] = trajectory.digest
        outbox.close(0.0)
    return made


def start(url: str, dataset: str, root: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COLLECTOR, url, dataset],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "STEPWELL_OUTBOX": str(root), **env},
    )


def say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("name", [n for n in failpoints_of("stepwell") if n.startswith("adopt.")])
def test_whoever_dies_while_taking_over_loses_and_doubles_nothing(
    client: Client, service, name: str, tmp_path: Path
):
    """Killed at each step, at the second file of the second outbox too; the next one delivers."""
    dataset = f"adopt-{name.split('.')[1].replace('_', '-')}"
    client.create_dataset(dataset, SPEC)
    promised = leave(tmp_path / dataset, dataset, slots=5, each=3)
    points = [name, f"{name}:5"] if name == "adopt.after_rename" else [name, f"{name}:2"]
    for point in points:
        process = start(service.url, dataset, tmp_path, STEPWELL_FAILPOINT=point)
        assert hear(process) == "ready"
        _, errors = process.communicate("go\n\n", timeout=300)
        assert process.returncode == -9, (point, errors)
    outbox = open_outbox(client, dataset, SPEC, directory=tmp_path / dataset / "0")
    assert outbox.close(60.0)
    stored = [(i.id, i.digest) for i in client.trajectories(dataset).items]
    assert dict(stored) == promised and len(stored) == len(promised)
    for folder in find_outboxes(tmp_path):
        summary = summarise(folder)
        assert summary is not None and not summary.waiting and not summary.rejected


def test_collectors_that_start_together_take_each_outbox_over_once(
    client: Client, service, tmp_path: Path
):
    """Four at the same moment, five left outboxes: all delivered, each held by one."""
    dataset = "adopt-together"
    client.create_dataset(dataset, SPEC)
    promised = leave(tmp_path / dataset, dataset, slots=5, each=4)
    processes = [start(service.url, dataset, tmp_path) for _ in range(4)]
    assert [hear(p) for p in processes] == ["ready"] * 4
    for process in processes:
        say(process, "go\n")
    answers = [hear(p).split() for p in processes]
    for process in processes:
        say(process, "\n")
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    assert len({slot for slot, _, _ in answers}) == 4, "each has a slot of its own"
    assert sum(int(sent) for _, _, sent in answers) == len(promised), "each is sent by one"
    stored = [(i.id, i.digest) for i in client.trajectories(dataset).items]
    assert dict(stored) == promised and len(stored) == len(promised)
