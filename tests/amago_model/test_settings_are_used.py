"""Every setting of the agent changes what it does wherever it may be set, or is refused.

Each leaf of AgentConfig is changed in each of a number of small agents. Two updates and a few
actions must then differ from those of the agent unchanged, or construction must raise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from amago_model import (
    ActionSpace,
    ActorConfig,
    AgentConfig,
    Batch,
    BinsConfig,
    CriticConfig,
    FeedForwardConfig,
    GMMConfig,
    GRUConfig,
    LossConfig,
    MambaConfig,
    ObsSpace,
    ResidualActorConfig,
    Spaces,
    TimestepEncoderConfig,
    TrajectoryEncoderConfig,
    TransformerConfig,
    make_agent,
)
from amago_model.config import GoalConfig, ImageConfig, TokenConfig
from amago_model.errors import AmagoError
from tests.amago_model.settings import changed, leaves, others, value_at

PLAIN = {"observation": ObsSpace(shape=(3,), dtype="float32")}
IMAGE = {"image": ObsSpace(shape=(8, 8, 5), dtype="uint8")}
ANYTHING = {
    "goals": ObsSpace(shape=(2, 2), dtype="float32"),
    "map": ObsSpace(shape=(5, 5), dtype="float32"),
    "letters": ObsSpace(shape=(4,), dtype="int64"),
    "words": ObsSpace(shape=(2,), dtype="int64", n=200),
} | (PLAIN | IMAGE)
ACTIONS = {
    "discrete": ActionSpace(kind="discrete", n=3),
    "continuous": ActionSpace(kind="continuous", shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0)),
    "multi_binary": ActionSpace(kind="multi_binary", n=2),
    "multi_discrete": ActionSpace(kind="multi_discrete", nvec=(2, 3)),
}
NARROW = BinsConfig(n_bins=9, min_return=-30.0, max_return=40.0)
BASE = AgentConfig(
    timestep_encoder=TimestepEncoderConfig(n_layers=1, d_hidden=16, d_output=8),
    trajectory_encoder=TrajectoryEncoderConfig(kind="identity"),
    actor=ActorConfig(d_hidden=8, n_layers=1),
    critic=CriticConfig(n_critics=3, d_hidden=8, n_layers=1),
    losses=LossConfig(gamma=0.9, auxiliary_gammas=(0.5,), reward_multiplier=2.0),
)
# Such that some actions are less likely than that.
ODDS: dict[str, dict[str, Any]] = {
    "discrete": {"prob_low": 0.33},
    "multi_discrete": {"prob_low": 0.49},
}
HEADS = ("actor.", "critic.", "losses.", "algorithm")


@dataclass(frozen=True)
class Scenario:
    """An agent, and the settings to be tried in it."""

    config: AgentConfig
    action: str = "discrete"
    tried: tuple[str, ...] = HEADS
    obs: str = "plain"

    @property
    def spaces(self) -> Spaces:
        obs = {"plain": PLAIN, "anything": ANYTHING, "image": IMAGE}[self.obs]
        return Spaces(observations=obs, action=ACTIONS[self.action])


def heads(
    action: str = "discrete",
    algorithm: str = "agent",
    tried: tuple[str, ...] = HEADS,
    **parts: dict[str, Any],
) -> Scenario:
    parts["actor"] = ODDS.get(action, {}) | parts.get("actor", {})
    new = {name: replace(getattr(BASE, name), **changes) for name, changes in parts.items()}
    return Scenario(replace(BASE, algorithm=algorithm, **new), action, tried)  # type: ignore[arg-type]


def cloning(action: str) -> Scenario:
    losses = LossConfig(behavior_cloning=True, dpg_weight=0.0, auxiliary_gammas=(0.5,))
    actor = replace(BASE.actor, **ODDS.get(action, {}))
    config = replace(BASE, critic=CriticConfig(), losses=losses, actor=actor)
    return Scenario(config, action)


def memory(kind: str, **changes: Any) -> Scenario:
    encoder = TrajectoryEncoderConfig(kind=kind, **changes)  # type: ignore[arg-type]
    return Scenario(replace(BASE, trajectory_encoder=encoder), tried=("trajectory_encoder.",))


def rows(obs: str, tried: str = "timestep_encoder.", **changes: Any) -> Scenario:
    encoder = replace(BASE.timestep_encoder, d_output=6, **changes)
    return Scenario(replace(BASE, timestep_encoder=encoder), tried=(tried,), obs=obs)


SMALL_TRANSFORMER = TransformerConfig(d_model=16, n_heads=2, d_ff=16, n_layers=1, context=4)
SCENARIOS = {
    "discrete": heads(),
    "continuous": heads("continuous"),
    "multi-binary": heads("multi_binary"),
    "multi-discrete": heads("multi_discrete"),
    "continuous, beta": heads("continuous", tried=("actor.",), actor={"continuous": "beta"}),
    "continuous, mixture": heads(
        "continuous",
        tried=("actor.",),
        actor={"continuous": "gmm", "gmm": GMMConfig(modes=2)},
        losses={"dpg_weight": 0.0},
    ),
    "actor of default size": heads(
        tried=("actor.kind",), actor={"d_hidden": ActorConfig().d_hidden, "n_layers": 2}
    ),
    "residual actor": heads(
        tried=("actor.",),
        actor={
            "kind": "residual",
            "residual": ResidualActorConfig(d_feature=8, d_ff=8, n_blocks=1),
            "d_hidden": ActorConfig().d_hidden,
            "n_layers": ActorConfig().n_layers,
        },
    ),
    "two-hot": heads("continuous", tried=("critic.",), critic={"kind": "twohot", "bins": NARROW}),
    "HL-Gauss": heads(tried=("critic.",), critic={"kind": "hlgauss", "bins": NARROW}),
    "no PopArt": heads(tried=("critic.",), critic={"popart": False}),
    "multitask": heads(algorithm="multitask", critic={"kind": "twohot", "bins": NARROW}),
    "exponential filter": heads(tried=("losses.",), losses={"filter": "exp"}),
    "leaky filter": heads(tried=("losses.",), losses={"filter": "leaky_relu"}),
    "lambda returns": heads(tried=("losses.",), losses={"td_lambda": 0.7}),
    "no filter": heads(tried=("losses.",), losses={"behavior_cloning": True}),
    "DPG alone": heads("continuous", losses={"bc_weight": 0.0}),
    "cloning alone": cloning("continuous"),
    "cloning alone, discrete": cloning("discrete"),
    "cloning alone, multi-binary": cloning("multi_binary"),
    "cloning alone, multi-discrete": cloning("multi_discrete"),
    "identity": memory("identity"),
    "feed-forward": memory("feedforward", feedforward=FeedForwardConfig(d_model=16)),
    "gru": memory("gru", gru=GRUConfig(d_hidden=8, d_output=8, n_layers=1)),
    "mamba": memory("mamba", mamba=MambaConfig(d_model=8, d_state=4, n_layers=1)),
    "transformer": memory("transformer", transformer=SMALL_TRANSFORMER),
    "transformer with sinks": memory(
        "transformer",
        transformer=replace(SMALL_TRANSFORMER, context=2, n_sinks=1, attention="math"),
    ),
    "transformer, learned positions": memory(
        "transformer", transformer=replace(SMALL_TRANSFORMER, position="learnable", max_time=5)
    ),
    "rows": rows("plain"),
    "rows of anything": rows(
        "anything",
        images=ImageConfig(d_output=8),
        goals=GoalConfig(keys=("goals",), d_output=8),
        tokens=TokenConfig(keys=("letters",), d_hidden=8, d_output=8),
    ),
    "one image": Scenario(
        replace(
            BASE,
            timestep_encoder=TimestepEncoderConfig(
                kind="image", d_output=6, images=ImageConfig(d_output=8, augment=0.8)
            ),
        ),
        tried=("timestep_encoder.",),
        obs="image",
    ),
    "impala": rows(
        "anything",
        "timestep_encoder.images.",
        images=ImageConfig(d_output=8, kind="impala", block_depths=(4,), augment=0.8),
    ),
}

# Looked at outside of the agent, or by what is not installed: see the tests named.
ELSEWHERE = {
    "actor.bound_gradient": "tests/amago_model/test_bounds.py",
    "losses.targets_before_step": "tests/trainer/test_learner.py",
    "trajectory_encoder.mamba.scan": "tests/amago_model/test_mamba.py",
    "custom.timestep_encoder": "tests/amago_model/test_custom_parts.py",
    "custom.trajectory_encoder": "tests/amago_model/test_custom_parts.py",
    "custom.actor": "tests/amago_model/test_custom_parts.py",
    "custom.critic": "tests/amago_model/test_custom_parts.py",
    "custom.filter": "tests/amago_model/test_custom_parts.py",
    "custom.losses": "tests/amago_model/test_custom_parts.py",
    "custom.loss_weights": "tests/amago_model/test_custom_parts.py",
    "custom.agent": "tests/amago_model/test_custom_parts.py",
    "custom.settings": "tests/amago_model/test_custom_settings.py",
}


def _batch(spaces: Spaces) -> Batch:
    b, t = 3, 8
    torch.manual_seed(1)
    obs: dict[str, torch.Tensor] = {}
    for key, space in spaces.observations.items():
        shape = (b, t + 1, *space.shape)
        if space.dtype.startswith("float"):
            obs[key] = torch.randn(shape)
        else:
            top = space.n or (256 if space.dtype == "uint8" else 8)
            obs[key] = torch.randint(0, top, shape).to(getattr(torch, space.dtype))
            if space.n is None and space.dtype == "int64":
                obs[key][:, ::3] += 300  # more than the vocabulary has
    mask = torch.arange(t) < torch.tensor([8, 4, 6])[:, None]
    tops = {"discrete": (3,), "multi_binary": (2, 2), "multi_discrete": (2, 3)}
    if top := tops.get(spaces.action.kind):
        action = torch.stack([torch.randint(0, n, (b, t + 1)) for n in top], dim=-1)
        action = action.squeeze(-1) if len(top) == 1 else action
    else:
        action = torch.rand(b, t + 1, 2) * 2.0 - 1.0
        action[0, 2] = 1.0  # at its bound
    terminated = torch.zeros_like(mask)
    terminated[1, 3] = True
    return Batch(
        obs=obs,
        prev_action=action,
        prev_reward=torch.randn(b, t + 1),
        time_idx=torch.arange(t + 1).expand(b, -1),
        terminated=terminated,
        truncated=torch.zeros_like(mask),
        next_obs_valid=mask & ~terminated,
        mask=mask,
        action_known=mask,
    )


def _life(config: AgentConfig, spaces: Spaces) -> dict[str, torch.Tensor]:
    """Everything that two updates and two actions show."""
    torch.manual_seed(0)
    agent, batch = make_agent(config, spaces), _batch(spaces)
    seen: dict[str, torch.Tensor] = {}
    for turn in range(2):
        torch.manual_seed(2)
        agent.zero_grad()
        loss, metrics = agent(batch)
        loss.backward()
        with torch.no_grad():
            for p in agent.trainable_parameters():
                if p.grad is not None:
                    p -= 0.05 * p.grad
        agent.update_targets()
        seen |= {f"{turn} {name}": value for name, value in metrics.items()}
    seen |= agent.state_dict()
    hidden = agent.initial_hidden(3)
    for sample in (True, False):
        torch.manual_seed(3)
        now = {key: x[:, 0] for key, x in batch.obs.items()}
        time = torch.zeros(3, dtype=torch.int64)
        first = batch.prev_action[:, 0], batch.prev_reward[:, 0]
        seen[f"act {sample}"], hidden = agent.act(now, *first, time, hidden, sample)
    return {name: value.detach().clone() for name, value in seen.items()}


def _differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() != b.keys() or any(not torch.equal(a[name], b[name]) for name in a)


@cache
def verdicts(name: str) -> dict[str, str]:
    """For every setting tried in a scenario: used, refused or ignored."""
    scenario = SCENARIOS[name]
    plain = _life(scenario.config, scenario.spaces)
    found: dict[str, str] = {}
    for leaf, hint in leaves(scenario.config).items():
        if not leaf.startswith(scenario.tried) or leaf in ELSEWHERE:
            continue
        found[leaf] = "refused"
        for value in others(leaf, hint, value_at(scenario.config, leaf)):
            try:
                life = _life(changed(scenario.config, leaf, value), scenario.spaces)
            except AmagoError:
                continue
            found[leaf] = "used" if _differ(life, plain) else "ignored"
            if found[leaf] == "used":
                break
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_setting_is_ignored(name: str) -> None:
    assert not {leaf for leaf, verdict in verdicts(name).items() if verdict == "ignored"}


def test_every_setting_is_used_somewhere() -> None:
    used = {
        leaf for name in SCENARIOS for leaf, verdict in verdicts(name).items() if verdict == "used"
    }
    assert not leaves(BASE).keys() - used - ELSEWHERE.keys()
