"""A collector's process is killed wherever it touches the disk; nothing it was promised is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from collector.stats import CollectorStatistics, load_clock, save_clock
from stepwell import Client
from stepwell.codec import decode
from stepwell.outbox import Outbox
from stepwell.testing import make_spec
from tests.failpoints import failpoints_of

PLAYER = """
import sys
from pathlib import Path
from stepwell import Client
from stepwell.outbox import Outbox
from stepwell.testing import make_spec, make_trajectory
url, dataset, folder, clash = sys.argv[1:]
spec = make_spec(action=1)
with Client(url) as client:
    outbox = Outbox(Path(folder) / "outbox", client, dataset, spec)
    with (Path(folder) / "promised").open("a") as promised:
        for i in range(8):
            t = make_trajectory(spec, length=5, seed=i, id=(clash or None) if i == 3 else None)
            outbox.put(t)
            promised.write(f"{t.id} {t.digest}\\n")
            promised.flush()
    outbox.flush(60.0)
    if clash:
        outbox.retry_rejected()
    outbox.close(60.0)
"""


def die_at(name: str, code: str, *args: str) -> None:
    env = {**os.environ, "STEPWELL_FAILPOINT": name, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == -9, (name, done.stderr)


DROPPER = """
import sys
from stepwell import Client
from stepwell.outbox import Outbox
from stepwell.testing import make_spec, make_trajectory
url, dataset, folder = sys.argv[1:]
spec = make_spec(action=1)
outbox = Outbox(folder, Client(url), dataset, spec)
outbox.held = True
for seed in range(6):
    outbox.put(make_trajectory(spec, length=5, seed=seed, policy=str(seed)))
outbox.drop_oldest(2)
"""


def test_dropping_the_oldest_leaves_the_newest_wherever_it_dies(
    client: Client, service, tmp_path: Path
) -> None:
    spec = make_spec(action=1)
    client.create_dataset("dropper", spec)
    die_at("outbox.after_drop:3", DROPPER, service.url, "dropper", str(tmp_path))
    outbox = Outbox(tmp_path, client, "dropper", spec)
    assert outbox.close(60.0)
    left = [i.policy for i in client.trajectories("dropper", order="seq").items]
    assert left == ["3", "4", "5"], "three were deleted; the fourth it had not reached"


OF_PUTTING = [
    name
    for name in failpoints_of("stepwell")
    if name.startswith("outbox.") and name != "outbox.after_drop"
]


@pytest.mark.parametrize("name", OF_PUTTING)
def test_an_outbox_keeps_its_promise_wherever_it_dies(
    client: Client, service, name: str, tmp_path: Path
):
    """Killed, then opened again: every trajectory whose `put` returned arrives, once, unchanged."""
    spec, dataset = make_spec(action=1), f"outbox-{name.split('.')[1].replace('_', '-')}"
    client.create_dataset(dataset, spec)
    clash = ""
    if name in (
        "outbox.after_reason",
        "outbox.after_reject",
        "outbox.after_requeue",
    ):  # one that the service refuses
        clash = client.add(
            dataset, obs=[[9.0] * 3] * 2, actions=[[0.0]], rewards=[0.0], terminated=True
        ).id
    third = name in ("outbox.before_rename", "outbox.after_put", "outbox.after_unlink")
    die_at(f"{name}:3" if third else name, PLAYER, service.url, dataset, str(tmp_path), clash)
    outbox = Outbox(tmp_path / "outbox", client, dataset, spec)
    outbox.close(60.0)
    assert outbox.pending == 0
    promised = dict(line.split() for line in (tmp_path / "promised").read_text().splitlines())
    refused = promised.pop(clash, None)
    stored = {i.id: i.digest for i in client.trajectories(dataset).items if i.id != clash}
    assert promised.items() <= stored.items()
    assert len(stored) <= len(promised) + 1, "at most the one whose put had not returned"
    assert len(client.trajectories(dataset).items) == len(stored) + bool(clash)
    if clash:
        assert refused is not None
        (path,) = (tmp_path / "outbox" / "rejected").glob("*.arrow")
        _, (kept,) = decode(path.read_bytes())
        assert kept.id == clash and json.loads(path.with_suffix(".json").read_text())["code"]
    assert not list((tmp_path / "outbox").glob(".*")), "no litter"


@pytest.mark.parametrize("name", [n for n in failpoints_of("collector") if n.startswith("clock.")])
def test_a_clock_is_the_old_one_or_the_new_one(name: str, tmp_path: Path):
    """Killed while writing it: it reads back, and a session was counted at least once."""
    save_clock(tmp_path, CollectorStatistics(earlier_steps=100, earlier_sessions=1))
    code = (
        "import sys; from pathlib import Path\n"
        "from collector.stats import CollectorStatistics, save_clock\n"
        "save_clock(Path(sys.argv[1]), CollectorStatistics(200, 2))\n"
    )
    die_at(name, code, str(tmp_path))
    stats = load_clock(tmp_path)
    assert (stats.earlier_steps, stats.earlier_sessions) in ((100, 2), (200, 3))
