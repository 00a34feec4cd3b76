"""Tiny problems that must be solved: an exit code proves nothing about learning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from amago_model import (
    ActionSpace,
    Agent,
    AgentConfig,
    Batch,
    BehaviorCloningConfig,
    ConfigError,
    GRUConfig,
    IdentityConfig,
    LossConfig,
    MambaConfig,
    MLPActorConfig,
    ObsSpace,
    ScalarCriticConfig,
    Spaces,
    TimestepEncoderConfig,
    TransformerConfig,
    make_agent,
)
from tests.amago_model.settings import configured

NO_MEMORY = AgentConfig(
    timestep_encoder=TimestepEncoderConfig(d_hidden=32, d_output=32, hide_previous=True),
    trajectory_encoder=IdentityConfig(),
    actor=MLPActorConfig(d_hidden=32),
    critic=ScalarCriticConfig(n_critics=2, d_hidden=32),
    losses=LossConfig(gamma=0.5, auxiliary_gammas=(), reward_multiplier=1.0, tau=0.05),
)


def _windows(obs: torch.Tensor, action: torch.Tensor, reward: torch.Tensor) -> Batch:
    """Whole episodes that end the task: obs [B, L, F], action and reward [B, T, ...]."""
    b, t = reward.shape
    yes = torch.ones(b, t, dtype=torch.bool)
    ends = torch.zeros_like(yes)
    ends[:, -1] = True
    return Batch(
        obs={"observation": obs},
        prev_action=torch.cat((torch.zeros_like(action[:, :1]), action), dim=1),
        prev_reward=torch.cat((torch.zeros(b, 1), reward), dim=1),
        time_idx=torch.arange(t + 1).expand(b, -1),
        terminated=ends,
        truncated=torch.zeros_like(yes),
        next_obs_valid=~ends,
        mask=yes,
        action_known=yes,
    )


def _spaces(action: ActionSpace, features: int) -> Spaces:
    obs = {"observation": ObsSpace(shape=(features,), dtype="float32")}
    return Spaces(observations=obs, action=action)


def _train(
    agent: Agent,
    make: Callable[[], Batch],
    updates: int,
    solved: Callable[[], bool] = lambda: False,
    lr: float = 3e-3,
) -> None:
    """At most so many updates; every fortieth asks whether more are needed."""
    optimizer = torch.optim.AdamW(agent.trainable_parameters(), lr=lr)
    for update in range(1, updates + 1):
        loss, _ = agent(make(), detailed=False)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.trainable_parameters(), 1.0)
        optimizer.step()
        agent.update_targets()
        if update % 40 == 0:
            agent.eval()
            if solved():
                return
            agent.train()
    agent.eval()


def _act(agent: Agent, obs: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    n = obs.shape[0]
    zeros = torch.zeros(n)
    hidden = agent.policy.initial_hidden(n)
    previous = torch.zeros((n, *like.shape[2:]), dtype=like.dtype)
    return agent.policy.act(
        {"observation": obs}, previous, zeros, zeros.long(), hidden, sample=False
    )[0]


def test_behaviour_cloning_recovers_the_action_of_the_data() -> None:
    box = ActionSpace(kind="continuous", shape=(2,), low=(-3.0, 0.0), high=(3.0, 1.0))
    losses = LossConfig(
        gamma=0.5,
        auxiliary_gammas=(),
        filter=BehaviorCloningConfig(),
        dpg_weight=0.0,
        bc_weight=1.0,
    )
    cloning = NO_MEMORY.replace(critic=None, losses=losses)
    agent = Agent(cloning, _spaces(box, 3))

    def wise(obs: torch.Tensor) -> torch.Tensor:
        return torch.stack((2 * obs[..., 0].tanh(), obs[..., 1].sigmoid()), dim=-1)

    def make() -> Batch:
        obs = torch.randn(16, 9, 3)
        return _windows(obs, wise(obs[:, :-1]), torch.zeros(16, 8))

    def loss() -> float:
        return float(agent(make())[1]["loss/bc"])

    def recovered() -> bool:
        error = (_act(agent, obs, torch.zeros(1, 1, 2)) - wise(obs)).abs().mean(0)
        return float(error[0]) < 0.3 and float(error[1]) < 0.1

    first, obs = loss(), torch.randn(200, 3)
    _train(agent, make, 250, lambda: recovered() and loss() < first - 2)
    assert loss() < first - 2 and recovered()


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_random_data_gives_a_policy_better_than_what_it_shows(kind: str) -> None:
    # Reward for matching the sign of the observation; the data matches it half of the time.
    if kind == "discrete":
        action = ActionSpace(kind="discrete", n=2)
    else:
        action = ActionSpace(kind="continuous", shape=(1,), low=(-1.0,), high=(1.0,))
    losses = NO_MEMORY.losses.replace(dpg_weight=0.3, bc_weight=1.0)
    agent = Agent(NO_MEMORY.replace(losses=losses), _spaces(action, 1))

    def make() -> Batch:
        obs = torch.randn(16, 9, 1)
        right = obs[:, :-1, 0] > 0
        if kind == "discrete":
            taken = torch.randint(0, 2, right.shape)
            return _windows(obs, taken, (taken == right).float())
        taken = torch.rand(16, 8, 1) * 2 - 1
        return _windows(obs, taken, taken[..., 0] * torch.where(right, 1.0, -1.0))

    obs, middle = torch.randn(200, 1), 0.5 if kind == "discrete" else 0.0

    def solved() -> bool:
        chosen = _act(agent, obs, make().prev_action).reshape(-1)
        return float(((chosen > middle) == (obs[:, 0] > 0)).float().mean()) > 0.9

    _train(agent, make, 250, solved)
    assert solved()


@pytest.mark.parametrize(
    ("kind", "critic", "algorithm"),
    [
        ("discrete", "twohot", "multitask"),
        ("discrete", "hlgauss", "agent"),
        ("multi_binary", "scalar", "agent"),
        ("multi_discrete", "scalar", "agent"),
        ("multi_discrete", "twohot", "agent"),
    ],
)
def test_every_head_finds_the_better_action(kind: str, critic: str, algorithm: str) -> None:
    """Reward for each part that matches the sign of its observation; the data is random."""
    action = {
        "discrete": ActionSpace(kind="discrete", n=2),
        "multi_binary": ActionSpace(kind="multi_binary", n=2),
        "multi_discrete": ActionSpace(kind="multi_discrete", nvec=(2, 2)),
    }[kind]
    width = 1 if kind == "discrete" else 2
    bins = {"n_bins": 33, "min_return": -5.0, "max_return": 5.0}
    config = configured(
        NO_MEMORY,
        algorithm=algorithm,
        critic={"kind": critic} | ({} if critic == "scalar" else bins),
        losses={"dpg_weight": 0.3, "bc_weight": 1.0},
    )
    agent = make_agent(config, _spaces(action, width))

    def make() -> Batch:
        obs = torch.randn(16, 9, width)
        right = obs[:, :-1] > 0
        taken = torch.randint(0, 2, right.shape)
        reward = (taken == right).float().sum(-1)
        return _windows(obs, taken.squeeze(-1) if kind == "discrete" else taken, reward)

    obs = torch.randn(200, width)

    def solved() -> bool:
        chosen = _act(agent, obs, make().prev_action).reshape(200, width)
        return float(((chosen > 0) == (obs > 0)).float().mean()) > 0.9

    _train(agent, make, 500, solved)
    assert solved()


CLONING = {"filter": {"kind": "behavior_cloning"}}
BASELINES: dict[str, dict[str, Any]] = {
    "iql": {
        "value_expectile": 0.9,
        "target_reduction": "min",
        "dpg_weight": 0.0,
        "filter": {"kind": "exp", "beta": 3.0, "batch_norm": True},
    },
    "awac": {
        "target_reduction": "min",
        "dpg_weight": 0.0,
        "filter": {"kind": "exp", "batch_norm": True},
    },
    "td3bc": {"dpg_weight": 2.5, "dpg_normalization": "mean_abs_q", **CLONING},
    "rebrac": {
        "dpg_weight": 1.0,
        "bc_weight": 0.05,
        "bc_target_penalty": 0.05,
        "dpg_normalization": "mean_abs_q",
        **CLONING,
    },
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_stitches_the_best_of_two_steps(name: str, kind: str) -> None:
    """The first step pays 0.1, or leads where the best action pays 1 and random ones 0 on average.
    The second step pays only there. The data is random, so only a value of the best actions
    prefers the second way, and only its advantages find them."""
    action = {
        "discrete": ActionSpace(kind="discrete", n=5),
        "continuous": ActionSpace(kind="continuous", shape=(1,), low=(-1.0,), high=(1.0,)),
    }[kind]
    config = configured(NO_MEMORY, losses={"gamma": 0.9, "bc_weight": 1.0})
    if name in ("td3bc", "rebrac"):
        config = configured(config, actor={"continuous": {"kind": "deterministic"}})
        if kind == "discrete":
            with pytest.raises(ConfigError, match="use recipe iql, awac or crr"):
                make_agent(config, _spaces(action, 2))
            return
    config = configured(config, losses=BASELINES[name], critic={"layer_norm": name == "rebrac"})
    agent = make_agent(config, _spaces(action, 2))

    def make() -> Batch:
        if kind == "discrete":
            taken = torch.randint(0, 5, (64, 2))
            there, pay = taken[:, 0] == 3, torch.where(taken[:, 1] == 1, 1.0, -0.25)
        else:
            taken = torch.rand(64, 2, 1) * 2 - 1
            there, pay = taken[:, 0, 0] > 0, taken[:, 1, 0]
        obs = torch.zeros(64, 3, 2)
        obs[:, 1, 0] = 1.0
        obs[:, 1, 1] = there * 2.0 - 1.0
        reward = torch.stack((torch.where(there, 0.0, 0.1), there * pay), dim=1)
        return _windows(obs, taken, reward)

    steps = torch.tensor([[0.0, 0.0], [1.0, 1.0]])

    def solved() -> bool:
        chosen = _act(agent, steps, make().prev_action).flatten().tolist()
        return chosen == [3, 1] if kind == "discrete" else min(chosen) > 0.1

    _train(agent, make, 600, solved)
    assert solved()


MEMORIES = {
    "transformer": TransformerConfig(
        d_model=32, n_heads=2, d_ff=64, n_layers=1, context=9, dropout_emb=0.0
    ),
    "mamba": MambaConfig(d_model=32, d_state=8, n_layers=1),
    "gru": GRUConfig(d_hidden=32, d_output=32, n_layers=1),
    "identity": IdentityConfig(),
}


@pytest.mark.parametrize("kind", MEMORIES)
def test_recall_is_solved_with_memory_and_not_without(kind: str) -> None:
    """A cue is shown at step 0 only; after H steps the action that names it earns 1."""
    horizon, encoder = 8, MEMORIES[kind]
    low, high = (0.3, 0.7) if kind == "identity" else (0.97, 1.0)
    config = AgentConfig(
        timestep_encoder=TimestepEncoderConfig(d_hidden=32, d_output=32, n_layers=1),
        trajectory_encoder=encoder,
        actor=MLPActorConfig(d_hidden=32),
        critic=ScalarCriticConfig(n_critics=2, d_hidden=32),
        losses=LossConfig(gamma=0.9, auxiliary_gammas=(), dpg_weight=0.0, bc_weight=1.0, tau=0.05),
    )
    agent = Agent(config, _spaces(ActionSpace(kind="discrete", n=2), 2))

    def observe(cue: torch.Tensor) -> torch.Tensor:
        obs = torch.zeros(cue.shape[0], horizon + 1, 2)
        obs[:, 0, 0] = cue * 2.0 - 1.0
        obs[:, horizon - 1, 1] = 1.0  # the question
        return obs

    def make() -> Batch:
        cue = torch.randint(0, 2, (32,))
        action = torch.randint(0, 2, (32, horizon))
        reward = torch.zeros(32, horizon)
        reward[:, -1] = (action[:, -1] == cue).float()
        return _windows(observe(cue), action, reward)

    def score() -> float:
        cue = torch.arange(64) % 2
        obs, hidden = observe(cue), agent.policy.initial_hidden(64)
        action, reward = torch.zeros(64, dtype=torch.int64), torch.zeros(64)
        for t in range(horizon):
            action, hidden = agent.policy.act(
                *({"observation": obs[:, t]}, action, reward, torch.full((64,), t), hidden),
                sample=False,
            )
        return float((action == cue).float().mean())

    _train(agent, make, 120 if kind == "identity" else 300, lambda: score() >= 0.97)
    assert low <= score() <= high
