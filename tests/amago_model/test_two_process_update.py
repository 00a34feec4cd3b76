"""Two processes on halves of a batch make the same update as one process on the whole of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

# Discrete, with every critic in each target: the one update without random draws.
PROGRAM = """
import datetime, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from amago_model import (
    ActionSpace, ActorConfig, Agent, AgentConfig, Batch, CriticConfig, LossConfig, ObsSpace, Spaces,
    TimestepEncoderConfig, TrajectoryEncoderConfig,
)
rank, world, meeting, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
if world > 1:
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=limit
    )
    assert dist.get_world_size() == world
torch.manual_seed(0)
agent = Agent(
    AgentConfig(
        timestep_encoder=TimestepEncoderConfig(d_hidden=8, d_output=8),
        trajectory_encoder=TrajectoryEncoderConfig(kind="identity"),
        actor=ActorConfig(d_hidden=8),
        critic=CriticConfig(n_critics=2, d_hidden=8),
        losses=LossConfig(extra_gammas=(0.9,), reward_multiplier=1.0),
    ),
    Spaces(
        observations={"observation": ObsSpace(shape=(3,), dtype="float32")},
        action=ActionSpace(kind="discrete", n=3),
    ),
)
model = agent if world == 1 else DistributedDataParallel(agent, broadcast_buffers=False)
optimizer = torch.optim.SGD(agent.trainable_parameters(), lr=0.05)
for _ in range(3):
    b, t = 6, 5
    mask = torch.arange(t) < torch.tensor([5, 1, 2, 5, 4, 3])[:, None]  # halves of unlike weight
    whole = Batch(
        obs={"observation": torch.randn(b, t + 1, 3)},
        prev_action=torch.randint(0, 3, (b, t + 1)),
        prev_reward=torch.randn(b, t + 1),
        time_idx=torch.arange(t + 1).expand(b, -1),
        terminated=torch.zeros_like(mask),
        truncated=torch.zeros_like(mask),
        next_obs_valid=mask,
        mask=mask,
        action_known=mask,
    )
    counts = {k: float(v) / world for k, v in Agent.loss_counts(whole).items()}
    share = b // world
    batch = whole._map(lambda x: x[rank * share : (rank + 1) * share])
    loss, _ = model(batch, counts=counts)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    agent.update_targets()
torch.save(agent.state_dict(), f"{out}/{world}-{rank}.pt")
"""


def test_two_processes_update_as_one(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    env = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, (rank, world, tmp_path / "meet", tmp_path))],
            env=env,
        )
        for rank, world in ((0, 1), (0, 2), (1, 2))
    ]
    try:
        assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    finally:
        for process in started:
            process.kill()
    one, left, right = (
        torch.load(tmp_path / name, weights_only=True) for name in ("1-0.pt", "2-0.pt", "2-1.pt")
    )
    for name, value in one.items():
        assert torch.equal(left[name], right[name]), name
        torch.testing.assert_close(left[name], value, rtol=1e-4, atol=1e-6, msg=name)
