"""`stepwell.load_policy`: the same actions as a collector's, in a program of one's own."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from rich.console import Console

import stepwell
from amago_model.acting import ActingPolicy
from amago_model.config import AgentConfig, Spaces
from amago_model.errors import BatchError
from amago_model.player import Player
from amago_model.policy_file import save_policy
from collector.builtin import RECALL_ID
from collector.config import EvaluateConfig
from collector.envs import make
from collector.evaluate import run_evaluation
from collector.interface import interface_of
from stepwell.errors import InvalidData, NotFound

SMALL = {
    "timestep_encoder": {"kind": "any", "d_hidden": 16, "d_output": 16},
    "trajectory_encoder": {"kind": "gru", "d_hidden": 8, "d_output": 8},
}


def acting_policy(env_id: str) -> ActingPolicy:
    torch.manual_seed(3)
    spaces = Spaces.of_spec(interface_of(make(env_id), env_id).spec.to_json())
    return ActingPolicy(AgentConfig.from_dict(SMALL), spaces).eval()


@pytest.mark.parametrize("env_id", ["Pendulum-v1", RECALL_ID, "CartPole-v1", "tests/Odd-v0"])
def test_it_plays_what_an_evaluation_plays(env_id: str, tmp_path: Path) -> None:
    """Memory, previous action and reward included: whole episodes have the same returns."""
    file = tmp_path / "policy.safetensors"
    file.write_bytes(save_policy(acting_policy(env_id)))
    config = EvaluateConfig(env=env_id, file=file, episodes=3, envs=1, seeds=5, upload=False)
    result, _ = run_evaluation(config, Console(quiet=True))
    policy = stepwell.load_policy(file)
    env = make(env_id)
    returns = []
    for seed in (5, 6, 7):
        obs, _ = env.reset(seed=seed)
        policy.reset()
        total, reward, done = 0.0, 0.0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(policy.act(obs, float(reward)))
            total += float(reward)
            done = terminated or truncated
        returns.append(total)
    assert returns == pytest.approx(result.returns, rel=1e-4)


class Odd(gymnasium.Env[Any, Any]):
    """A scalar action, and arrays in dicts and tuples."""

    observation_space = gymnasium.spaces.Dict(
        {
            "arm": gymnasium.spaces.Tuple(
                (gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(3))
            ),
            "2 eyes": gymnasium.spaces.Box(-1, 1, ()),
        }
    )
    action_space = gymnasium.spaces.Box(-2.0, 2.0, ())

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(np.asarray(action, np.float32))
        self.steps += 1
        return self.observation_space.sample(), float(action), self.steps == 5, False, {}


gymnasium.register("tests/Odd-v0", Odd)


def test_from_a_service_by_name_version_and_alias(service: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("STEPWELL_URL", service.url)
    monkeypatch.setenv("STEPWELL_TOKEN", service.token or "")
    client, run = service.client(), "loaded"
    client.create_run(run, "train")
    client.publish_policy(run, 4, save_policy(acting_policy("CartPole-v1"), step=4))
    client.set_alias(run, "best", 4)
    obs = np.zeros(4, np.float32)
    actions = {
        int(stepwell.load_policy(reference, client=client).act(obs))
        for reference in (run, f"{run}/4", f"{run}/best", f"{run}:best")
    }
    assert len(actions) == 1 and actions <= {0, 1}
    with pytest.raises(NotFound):
        stepwell.load_policy(f"{run}/5")
    with pytest.raises(InvalidData, match="expected RUN, RUN:VERSION or RUN:ALIAS"):
        stepwell.load_policy("a/b/c")


MEMORIES = [
    {"kind": "identity"},
    {"kind": "gru", "d_hidden": 8, "d_output": 8},
    {"kind": "mamba", "d_model": 8, "n_layers": 1},
    {"kind": "transformer", "d_model": 8, "n_heads": 2, "d_ff": 8, "n_layers": 2, "context": 5},
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("memory", "differences"),
    [*((memory, False) for memory in MEMORIES), (MEMORIES[1], True)],
    ids=[*(memory["kind"] for memory in MEMORIES), "gru, differences"],
)
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1"])
def test_an_exported_program_acts_with_torch_alone(
    env_id: str, memory: dict[str, Any], differences: bool, tmp_path: Path
) -> None:
    """Longer than the context of a Transformer; its arguments stay as they are."""
    torch.manual_seed(3)
    spaces = Spaces.of_spec(interface_of(make(env_id), env_id).spec.to_json())
    config = AgentConfig.from_dict({**SMALL, "trajectory_encoder": memory})
    encoder = config.timestep_encoder.replace(differences=differences)
    policy = Player(ActingPolicy(config.replace(timestep_encoder=encoder), spaces))
    (tmp_path / "policy.pt2").write_bytes(policy.export())
    program = torch.export.load(tmp_path / "policy.pt2")
    act = program.module()
    (obs, action, reward, time, *hidden), _ = program.example_inputs
    rng = np.random.default_rng(0)
    for step in range(12):
        seen = rng.normal(size=spaces.observations["observation"].shape).astype(np.float32)
        reward = torch.tensor([float(rng.normal())])
        before = [tensor.clone() for tensor in hidden]
        given = {"observation": torch.from_numpy(seen[None])}
        action, *after = act(given, action, reward, torch.tensor([step]), *hidden)
        assert all(torch.equal(a, b) for a, b in zip(before, hidden, strict=True))
        hidden = after
        np.testing.assert_allclose(action[0], policy.act(seen, float(reward)), rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    player = Player(acting_policy("Pendulum-v1"))
    with pytest.raises(BatchError, match=r"obs\['observation'\]: expected the shape \(3,\), got"):
        player.act(np.zeros(4))
    with pytest.raises(BatchError, match="missing"):
        player.act({"position": np.zeros(3)})
    with pytest.raises(BatchError, match=r"obs\['observation'\] is a text; .*\(3,\) ids"):
        player.act("go to the red ball")
    with pytest.raises(BatchError, match=r"obs\['observation'\] holds NaN"):
        player.act(np.full(3, np.nan))
    bad = tmp_path / "x.safetensors"
    bad.write_bytes(b"no policy")
    with pytest.raises(InvalidData, match=r"x\.safetensors"):
        stepwell.load_policy(bad)
    with pytest.raises(OSError):
        stepwell.load_policy(tmp_path / "none")


def test_samples_follow_the_seed_and_actions_stay_within_bounds() -> None:
    policy = acting_policy("Pendulum-v1")
    space = gymnasium.make("Pendulum-v1").action_space
    players = [Player(policy, sample=True, seed=seed) for seed in (1, 1, 2)]
    played = [[player.act(np.ones(3, np.float32)) for _ in range(4)] for player in players]
    assert np.array_equal(played[0], played[1]) and not np.array_equal(played[0], played[2])
    assert all(space.contains(action) for action in played[0])
