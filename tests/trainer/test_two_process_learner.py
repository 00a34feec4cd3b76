"""Two processes that each cut their share in parts update as one process with the whole."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

PROGRAM = """
import dataclasses, os, sys
import torch
from amago_model import ActionSpace, Agent, Batch, CustomConfig, ExpFilterConfig, ObsSpace, Spaces
from amago_model import make_agent, register
from trainer.learner import Learner
from trainer.learner import make_accelerator
from trainer.recipes import recipe


@register("agent", "forgetful")
class Forgetful(Agent):
    "No loss reaches the critics."

    def terms(self, seen):
        terms = super().terms(seen)
        del terms["critic"]
        return terms


def shortened(batch, t):
    "As a loader gives it: no longer than the longest window of this process."
    rows = {"obs", "prev_action", "prev_reward", "time_idx"}
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    cut = {k: v[:, : t + (k in rows)] for k, v in fields.items() if torch.is_tensor(v)}
    return dataclasses.replace(batch, **cut, obs={k: v[:, : t + 1] for k, v in batch.obs.items()})


def learn(parts, own=""):
    config = recipe("pendulum_stitch")
    losses = config.agent.losses.replace(
        filter=ExpFilterConfig(batch_norm=True), lagged_critics=True
    )
    critic = config.agent.critic.replace(n_critics=3, n_critics_target=2)
    custom = CustomConfig(agent=own)
    agent = config.agent.replace(losses=losses, critic=critic, custom=custom)
    config = config.replace(agent=agent, device="cpu")
    accelerator = make_accelerator(config)
    rank, world = accelerator.process_index, accelerator.num_processes
    assert world == int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    action = ActionSpace(kind="continuous", shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))
    obs = {"observation": ObsSpace(shape=(3,), dtype="float32")}
    agent = make_agent(config.agent, Spaces(observations=obs, action=action)).double()
    optimizer = config.optimizer.replace(accumulate=parts)
    learner = Learner(agent, optimizer, accelerator, seed=3, updates=100)
    b, t = 6, 5
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    saved = {}
    for update in range(2):
        # The first half holds far more than the second.
        mask = torch.arange(t) < torch.tensor([5, 4, 3, 1, 0, 2])[:, None]
        whole = Batch(
            obs={"observation": normal(b, t + 1, 3)},
            prev_action=normal(b, t + 1, 2).clamp(-1, 1),
            prev_reward=normal(b, t + 1).double(),
            time_idx=torch.arange(t + 1).expand(b, -1),
            terminated=torch.zeros_like(mask),
            truncated=torch.zeros_like(mask),
            next_obs_valid=mask,
            mask=mask,
            action_known=mask,
        )
        share = b // world
        mine = whole.windows(rank * share, (rank + 1) * share)
        mine = shortened(mine, int(mine.mask.sum(1).max()))
        metrics = learner.update(update, mine).metrics
        saved[f"norm {update}"] = metrics["optimizer/gradient_norm"]
        # Ranks show the loss of their share, times their number.
        loss = metrics["loss/total"].detach().clone()
        if world > 1:
            torch.distributed.all_reduce(loss)
        saved[f"loss {update}"] = loss / world
    return saved | agent.state_dict()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    saved = {f"{own} {parts}": learn(parts, own) for own in ("", "forgetful") for parts in (1, 3)}
    torch.save(saved, f"{sys.argv[1]}/{rank}.pt")
"""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_processes_and_parts_update_as_one(tmp_path: Path) -> None:
    """Float64, sampled actions, subsets of critics, every statistic moving: equal to 1e-9."""
    root = str(Path(__file__).resolve().parents[2])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    env = os.environ | meeting | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            env=env | {"ACCELERATE_USE_CPU": "1", "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]
    try:
        here: dict = {"__name__": "one_process"}
        exec(PROGRAM, here)
        expected = {own: here["learn"](1, own) for own in ("", "forgetful")}
        assert [process.wait(timeout=240) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    left, right = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for case in left:
        whole = expected[case.partition(" ")[0]]
        assert whole.keys() == left[case].keys()
        for name, value in whole.items():
            assert torch.equal(left[case][name], right[case][name]), name
            torch.testing.assert_close(left[case][name], value, rtol=1e-7, atol=1e-9, msg=name)
