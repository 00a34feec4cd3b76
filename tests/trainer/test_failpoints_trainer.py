"""A trainer is killed at every place where it touches the disk, life after life; the run that comes
out is, to the last bit, the one that nobody disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.testing import make_spec, make_trajectory
from tests.failpoints import failpoints_of
from tests.forks import Fork
from trainer import checkpoint as checkpoints
from trainer.data.cache import Cache
from trainer.data.fields import fields_of

UPDATES = 70
# In the order in which one run comes by them; the hit that kills where the first would teach less.
LIVES = (
    *("manifest.before_rename", "cache.after_download", "cache.after_column:2"),
    *("cache.before_list", "cache.after_list:2", "run.after_create", "run.after_note"),
    *("outbox.after_put:3", "outbox.before_rename:5"),
    *("checkpoint.before_rename", "checkpoint.after_rename"),
    *("policy.after_put", "policy.after_copy", "checkpoint.after_rotation:2"),
    # Last, since delivery runs beside the updates: how far these get depends on the machine.
    *("outbox.after_answer:2", "outbox.after_unlink:3"),
)
# The harder case of everything: a mixture whose shares move, and updates made of two parts.
MIXTURE = """
optimizer.accumulate = 2
data.ramp_updates = 60
[[sources]]
select = "SELECT id FROM trajectories WHERE dataset = 'failpoints' AND length < 11"
share = 0.0
share_end = 0.5
[[sources]]
select = "SELECT id, length AS weight FROM trajectories WHERE dataset = 'failpoints'"
share = 1.0
share_end = 0.5
"""
ELSEWHERE = (
    *("adopt.", "clock.", "cache.after_eviction"),
    *("outbox.after_reason", "outbox.after_reject", "outbox.after_requeue", "outbox.after_drop"),
)


def train(service, folder: Path, name: str, failpoint: str = "") -> tuple[int, str]:
    config = folder / "mixture.toml"
    config.write_text(MIXTURE)
    words = ["offline", "--config", str(config), "--run", name, "--updates", str(UPDATES)]
    words += ["--data.batch", "8", "--data.window", "8", "--schedule.log-every", "1"]
    words += ["--schedule.checkpoint-every", "7", "--schedule.publish-every", "10"]
    words += ["--agent.timestep-encoder.d-hidden", "16", "--agent.timestep-encoder.d-output", "16"]
    words += ["--agent.trajectory-encoder.d-model", "16", "--device", "cpu"]
    words += ["--agent.actor.d-hidden", "16", "--agent.critic.d-hidden", "16"]
    words += ["--output", str(folder / "runs"), "--data.cache", str(folder / f"cache-{name}")]
    env = {**os.environ, "STEPWELL_URL": service.url, "OMP_NUM_THREADS": "1"}
    env["STEPWELL_FAILPOINT"] = failpoint
    life = Fork("trainer.main", words, env=env, output=folder / "output")
    output, _ = life.communicate(timeout=600)
    return life.wait(), output


def curve(folder: Path, name: str, key: str) -> dict[int, float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {p["step"]: p["value"] for p in map(json.loads, lines) if p["key"] == key}


@pytest.mark.timeout(1200)
def test_a_trainer_that_dies_everywhere_ends_like_one_that_never_did(service, client, tmp_path):
    """Each life must find what the one before left, and none may need a helping hand.

    No policy is ever ahead of the newest checkpoint: the run could not go on from what others saw.
    """
    spec = make_spec(env="Tiny-v0")
    client.create_dataset("failpoints", spec)
    for part in range(2):
        items = [make_trajectory(spec, length=9 + i, seed=10 * part + i) for i in range(4)]
        client.post("failpoints", items, wait_sealed=True)
    for name in LIVES:
        status, output = train(service, tmp_path, "fp-killed", name)
        assert status == -9, (name, output)
        kept = checkpoints.newest(tmp_path / "runs" / "fp-killed" / "checkpoints")
        files = (tmp_path / "runs" / "fp-killed" / "policies").glob("*.safetensors")
        policies = [int(path.stem) for path in files]
        assert max(policies, default=0) <= (kept.state["update"] if kept else 0), name
    assert train(service, tmp_path, "fp-killed")[0] == 0
    assert train(service, tmp_path, "fp-whole")[0] == 0
    for key in ("data/sample_checksum", "loss/total", "optimizer/gradient_norm"):
        assert curve(tmp_path, "fp-killed", key) == curve(tmp_path, "fp-whole", key)
    ours, theirs = (
        checkpoints.newest(tmp_path / "runs" / name / "checkpoints")
        for name in ("fp-killed", "fp-whole")
    )
    assert ours is not None and theirs is not None
    assert all(value.equal(theirs.agent[key]) for key, value in ours.agent.items())
    assert client.run("fp-killed").status == "finished"
    steps = client.metrics("fp-killed", ["loss/total"], points=1000)["loss/total"].steps
    assert steps == list(range(1, UPDATES + 1))
    for name in ("fp-killed", "fp-whole"):
        versions = sorted(policy.version for policy in client.policies(name))
        assert versions == [*range(10, UPDATES + 1, 10)], name
    litter = [p for p in tmp_path.rglob(".*") if p.name.endswith(".part")]
    assert litter == []


def test_every_failpoint_of_clients_is_visited():
    """A name that no test dies at would be a promise without proof."""
    visited = {name.partition(":")[0] for name in LIVES}
    names = failpoints_of("stepwell", "trainer", "collector")
    assert {n for n in names if not n.startswith(ELSEWHERE)} == visited


def test_dying_while_a_shard_is_evicted_leaves_no_half_shard(fake, tmp_path):
    """What is left of it does not count: it is built anew, and reads as before."""
    service = fake(None, [[30], [30]])
    fields = fields_of(service.spec)
    Cache(tmp_path, 1e9, service).build("sh_0000", fields)
    before = Cache(tmp_path, 1e9, None).column("sh_0000", fields[0]).tobytes()
    code = (
        "import shutil, sys; from pathlib import Path\n"
        "from stepwell.testing import make_spec\n"
        "from trainer.data.cache import Cache; from trainer.data.fields import fields_of\n"
        "class Client:\n"
        "    def download_shard(self, shard, path):\n"
        f"        shutil.copyfile(Path({str(service.folder)!r}) / f'{{shard}}.parquet', path)\n"
        "Cache(Path(sys.argv[1]), 1, Client()).build('sh_0001', fields_of(make_spec()))\n"
    )
    env = {**os.environ, "STEPWELL_FAILPOINT": "cache.after_eviction"}
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, timeout=240)
    assert died.returncode == -9
    downloads = service.downloads
    again = Cache(tmp_path, 1e9, service)
    again.build("sh_0000", fields)
    assert service.downloads == downloads + 1
    assert again.column("sh_0000", fields[0]).tobytes() == before
