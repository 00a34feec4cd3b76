"""Choices that do not begin at 0, through the real thing: the environment's own numbers everywhere.

Recorded and collected, in SQL, out and back in every format, in batches, and at a policy's act().
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from rich.console import Console

import stepwell
from collector.config import EvaluateConfig
from collector.envs import make
from collector.evaluate import run_evaluation
from collector.record import record
from stepwell import Client, MultiDiscrete, cli
from tests.recording import collect_at_random
from trainer.data import stream
from trainer.main import main as train

ENV = "tests/Offset-v0"
TINY = [
    *(
        "--device",
        "cpu",
        "--updates",
        "150",
        "--data.batch",
        "16",
        "--optimizer.learning-rate",
        "0.01",
    ),
    *("--agent.timestep-encoder.d-hidden", "32", "--agent.timestep-encoder.d-output", "32"),
]


class Offset(gymnasium.Env[Any, Any]):
    """It shows two choices and wants the same ones back, each from other numbers. 1 for each part
    that is right; an action outside its space is an error, as it is in many environments."""

    metadata = {"render_modes": []}
    observation_space = spaces.MultiDiscrete([3, 2], start=[-1, 5])
    action_space = spaces.MultiDiscrete([3, 2], start=[4, -7])

    def __init__(self) -> None:
        self.render_mode = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # noqa: ARG002
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(np.asarray(action)):
            raise ValueError(f"{action} is not in {self.action_space}")
        reward = float((np.asarray(action) == right(self.shown)).sum())
        self.time += 1
        return self._observe(), reward, False, self.time == 5, {}

    def _observe(self) -> Any:
        low, n = self.observation_space.start, self.observation_space.nvec
        self.shown = low + self.np_random.integers(0, n)
        return self.shown.copy()


def right(obs: Any) -> Any:
    return obs - Offset.observation_space.start + Offset.action_space.start


if ENV not in gymnasium.registry:
    gymnasium.register(ENV, Offset)


@pytest.fixture(scope="module")
def dataset(service: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random actions of a collector, and then right ones that were recorded."""
    folder = tmp_path_factory.mktemp("offsets")
    collect_at_random(service, "offsets", ENV, folder / "collected")
    with Client(service.url) as client:
        env = record(make(ENV), "offsets", client, tags=["right"], outbox=folder / "recorded")
        for seed in range(20):
            obs, _ = env.reset(seed=seed)
            for _ in range(5):
                obs, *_ = env.step(right(obs))
        env.close()
        client.flush("offsets")
    return "offsets"


def test_sql_and_python_show_the_environments_numbers(dataset: str, client: Client) -> None:
    spec = client.spec(dataset)
    assert spec.observations["observation"] == MultiDiscrete((3, 2), (-1, 5))
    assert spec.actions["action"] == MultiDiscrete((3, 2), (4, -7))
    for column, first, second in (("action", {4, 5, 6}, {-7, -6}), ("obs", {-1, 0, 1}, {5, 6})):
        name = "obs.observation" if column == "obs" else column
        rows = client.sql(f"select {name} from {dataset}.steps where not is_last").rows
        assert {row[0][0] for row in rows} == first and {row[0][1] for row in rows} == second
    ((best,),) = client.sql(
        "select avg(return) from trajectories where dataset = ? and tags = ['right']", [dataset]
    ).rows
    assert best == 10.0


@pytest.mark.parametrize("format_", ["npz", "d4rl", "minari", "lerobot", "parquet"])
def test_every_format_holds_them(
    dataset: str, service: Any, client: Client, tmp_path: Path, format_: str
) -> None:
    """The copy has the same spec and rows, and takes more of the same environment."""
    suffix = {"npz": ".npz", "d4rl": ".hdf5"}.get(format_, "")
    out, copy = tmp_path / f"out{suffix}", f"offsets-{format_}"
    assert cli.main(["export", dataset, str(out), "--format", format_, "--url", service.url]) == 0
    assert cli.main(["import", str(out), "--dataset", copy, "--url", service.url]) == 0
    assert client.spec(copy).digest == client.spec(dataset).digest

    def rows(name: str) -> Any:
        query = (
            "select action, obs.observation, reward from steps join trajectories "
            "on trajectory_id = id where not is_last order by trajectories.seq, t"
        )
        return client.sql(query, dataset=name).rows

    client.flush(copy)
    assert rows(copy) == rows(dataset)
    collect_at_random(service, copy, ENV, tmp_path / "outbox")
    client.flush(copy)
    counted = "select count(*) from trajectories where dataset = ?"
    assert client.sql(counted, [copy]).one() == client.sql(counted, [dataset]).one() + 12


def test_a_batch_has_them(dataset: str, client: Client, tmp_path: Path) -> None:
    select = f"select id from trajectories where dataset = '{dataset}' and tags = ['right']"
    (batch,) = stream(select, window=5, batch=8, batches=1, client=client, cache=tmp_path)
    shown, taken = batch.obs["observation"][:, :-1], batch.prev_action[:, 1:]
    wanted = torch.from_numpy(right(shown.numpy()))
    assert torch.equal(taken[batch.mask], wanted[batch.mask])
    assert batch.prev_action[:, 0].tolist() == [[3, -8]] * 8  # no choice: one below the first


def test_a_policy_takes_and_gives_them(
    dataset: str, service: Any, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained on right actions it is right, in an evaluation and in one's own program."""
    monkeypatch.setenv("STEPWELL_URL", service.url)
    threads = torch.get_num_threads()
    words = ["bc", "--dataset", dataset, "--run", "offsets-bc", "--output", str(tmp_path / "runs")]
    words += ["--where", "tags = ['right']", "--data.cache", str(tmp_path / "cache")]
    assert train([*words, *TINY]) == 0
    file = tmp_path / "policy.safetensors"
    file.write_bytes(client.download_policy("offsets-bc").data)
    policy = stepwell.load_policy(file)
    for first in (-1, 0, 1):
        for second in (5, 6):
            policy.reset()
            obs = np.array([first, second])
            assert policy.act(obs).tolist() == right(obs).tolist()
    for player in ({"policy": "offsets-bc"}, {"random": True}):
        config = EvaluateConfig(
            env=ENV, episodes=6, url=service.url, dataset=f"eval-{dataset}", **player
        )
        result, _ = run_evaluation(config, Console(quiet=True))
        assert (result.returns == [10.0] * 6) == ("policy" in player)
    torch.set_num_threads(threads)
