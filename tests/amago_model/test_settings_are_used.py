"""Every setting of the agent changes what it does.

Each setting is changed in each of a number of small agents. Two updates and a few actions must then
differ from those of the agent unchanged, in one of them at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from amago_model import (
    ActionSpace,
    AgentConfig,
    AugmentConfig,
    Batch,
    BehaviorCloningConfig,
    FeedForwardConfig,
    GRUConfig,
    IdentityConfig,
    ImageTimestepEncoderConfig,
    ImpalaImageConfig,
    LearnablePositionConfig,
    LossConfig,
    MambaConfig,
    MLPActorConfig,
    ObsSpace,
    PlainImageConfig,
    ScalarCriticConfig,
    Spaces,
    TimestepEncoderConfig,
    TrajectoryEncoderConfig,
    TransformerConfig,
    make_agent,
)
from amago_model.config import GoalConfig, TokenConfig
from amago_model.errors import AmagoError
from stepwell._settings import options
from tests.amago_model.settings import changed, configured, leaves, others, value_at

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
NARROW = {"n_bins": 9, "min_return": -30.0, "max_return": 40.0}
BASE = AgentConfig(
    timestep_encoder=TimestepEncoderConfig(n_layers=1, d_hidden=16, d_output=8),
    trajectory_encoder=IdentityConfig(),
    actor=MLPActorConfig(d_hidden=8, n_layers=1),
    critic=ScalarCriticConfig(n_critics=3, d_hidden=8, n_layers=1),
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
    return Scenario(configured(BASE, algorithm=algorithm, **parts), action, tried)


def cloning(action: str) -> Scenario:
    losses = LossConfig(filter=BehaviorCloningConfig(), dpg_weight=0.0, auxiliary_gammas=(0.5,))
    actor = BASE.actor.replace(**ODDS.get(action, {}))
    config = BASE.replace(critic=None, losses=losses, actor=actor)
    return Scenario(config, action)


def conditioned() -> Scenario:
    scenario = cloning("continuous")
    given = {"return_conditioning": {"target_return": 2.0}}
    return Scenario(configured(scenario.config, **given), "continuous", ("return_conditioning.",))


def memory(encoder: TrajectoryEncoderConfig) -> Scenario:
    return Scenario(BASE.replace(trajectory_encoder=encoder), tried=("trajectory_encoder.",))


def rows(obs: str, tried: str = "timestep_encoder.", **changes: Any) -> Scenario:
    encoder = BASE.timestep_encoder.replace(d_output=6, **changes)
    return Scenario(BASE.replace(timestep_encoder=encoder), tried=(tried,), obs=obs)


SMALL_TRANSFORMER = TransformerConfig(d_model=16, n_heads=2, d_ff=16, n_layers=1, context=4)
SCENARIOS = {
    "discrete": heads(),
    "continuous": heads("continuous"),
    "multi-binary": heads("multi_binary"),
    "multi-discrete": heads("multi_discrete"),
    "continuous, beta": heads(
        "continuous", tried=("actor.",), actor={"continuous": {"kind": "beta"}}
    ),
    "continuous, Gaussian": heads(
        "continuous", tried=("actor.",), actor={"continuous": {"kind": "gaussian"}}
    ),
    "continuous, mixture": heads(
        "continuous",
        tried=("actor.",),
        actor={"continuous": {"kind": "gmm", "modes": 2}},
        losses={"dpg_weight": 0.0},
    ),
    "continuous, deterministic": heads(
        "continuous",
        tried=("actor.continuous.", "losses.bc_target_penalty", "losses.dpg_normalization"),
        actor={"continuous": {"kind": "deterministic"}},
    ),
    "actor of default size": heads(
        tried=("actor.kind",), actor={"d_hidden": MLPActorConfig().d_hidden, "n_layers": 2}
    ),
    "residual actor": heads(
        tried=("actor.",),
        actor={"kind": "residual", "d_feature": 8, "d_ff": 8, "n_blocks": 1},
    ),
    "two-hot": heads("continuous", tried=("critic.",), critic={"kind": "twohot", **NARROW}),
    "HL-Gauss": heads(tried=("critic.",), critic={"kind": "hlgauss", **NARROW}),
    "no PopArt": heads(tried=("critic.",), critic={"popart": None}),
    "multitask": heads(algorithm="multitask", critic={"kind": "twohot", **NARROW}),
    "exponential filter": heads(tried=("losses.",), losses={"filter": {"kind": "exp"}}),
    "leaky filter": heads(tried=("losses.",), losses={"filter": {"kind": "leaky_relu"}}),
    "lambda returns": heads(tried=("losses.",), losses={"td_lambda": 0.7}),
    "no filter": heads(tried=("losses.",), losses={"filter": {"kind": "behavior_cloning"}}),
    "DPG alone": heads("continuous", losses={"bc_weight": 0.0}),
    "cloning alone": cloning("continuous"),
    "cloning alone, discrete": cloning("discrete"),
    "cloning alone, multi-binary": cloning("multi_binary"),
    "cloning alone, multi-discrete": cloning("multi_discrete"),
    "return conditioning": conditioned(),
    "identity": memory(IdentityConfig()),
    "feed-forward": memory(FeedForwardConfig(d_model=16)),
    "gru": memory(GRUConfig(d_hidden=8, d_output=8, n_layers=1)),
    "mamba": memory(MambaConfig(d_model=8, d_state=4, n_layers=1)),
    "transformer": memory(SMALL_TRANSFORMER),
    "transformer with sinks": memory(
        SMALL_TRANSFORMER.replace(context=2, n_sinks=1, attention="math")
    ),
    "transformer, learned positions": memory(
        SMALL_TRANSFORMER.replace(position=LearnablePositionConfig(max_time=5))
    ),
    "rows": rows("plain"),
    "rows of anything": rows(
        "anything",
        images=PlainImageConfig(d_output=8),
        goals=GoalConfig(keys=("goals",), d_output=8),
        tokens=TokenConfig(keys=("letters",), d_hidden=8, d_output=8),
    ),
    "one image": Scenario(
        BASE.replace(
            timestep_encoder=ImageTimestepEncoderConfig(
                d_output=6,
                images=PlainImageConfig(d_output=8, augment=AugmentConfig(share=0.8)),
            )
        ),
        tried=("timestep_encoder.",),
        obs="image",
    ),
    "impala": rows(
        "anything",
        "timestep_encoder.images.",
        images=ImpalaImageConfig(d_output=8, block_depths=(4,), augment=AugmentConfig(share=0.8)),
    ),
}

# Looked at outside of the agent, or by what is not installed: see the tests named.
ELSEWHERE = {
    "actor.continuous.bound_gradient": "tests/amago_model/test_bounds.py",
    "losses.targets_before_step": "tests/trainer/test_learner.py",
    "trajectory_encoder.scan": "tests/amago_model/test_mamba.py",
    "custom.timestep_encoder": "tests/amago_model/test_custom_modules.py",
    "custom.trajectory_encoder": "tests/amago_model/test_custom_modules.py",
    "custom.actor": "tests/amago_model/test_custom_modules.py",
    "custom.critic": "tests/amago_model/test_custom_modules.py",
    "custom.filter": "tests/amago_model/test_custom_modules.py",
    "custom.losses": "tests/amago_model/test_custom_modules.py",
    "custom.loss_weights": "tests/amago_model/test_custom_modules.py",
    "custom.agent": "tests/amago_model/test_custom_modules.py",
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
        return_to_go=torch.arange(t + 1.0).expand(b, -1),
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
    hidden = agent.policy.initial_hidden(3)
    for sample in (True, False):
        torch.manual_seed(3)
        now = {key: x[:, 0] for key, x in batch.obs.items()}
        time = torch.zeros(3, dtype=torch.int64)
        first = batch.prev_action[:, 0], batch.prev_reward[:, 0]
        seen[f"act {sample}"], hidden = agent.policy.act(now, *first, time, hidden, sample)
    return {name: value.detach().clone() for name, value in seen.items()}


def _differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() != b.keys() or any(not torch.equal(a[name], b[name]) for name in a)


@cache
def used(name: str) -> set[str]:
    """The settings tried in a scenario that make a difference."""
    scenario = SCENARIOS[name]
    plain = _life(scenario.config, scenario.spaces)
    return {
        leaf
        for leaf, option in leaves(scenario.config).items()
        if leaf.startswith(scenario.tried) and leaf not in ELSEWHERE
        if any(
            _differ(life, plain)
            for value in others(option, value_at(scenario.config, leaf))
            if (life := _changed_life(scenario, leaf, value)) is not None
        )
    }


def _changed_life(scenario: Scenario, leaf: str, value: Any) -> dict[str, torch.Tensor] | None:
    """None where it is refused."""
    try:
        return _life(changed(scenario.config, leaf, value), scenario.spaces)
    except AmagoError:
        return None


@pytest.mark.parametrize(
    ("name", "section"),
    [
        (name, "trajectory_encoder.")
        for name in ("feed-forward", "gru", "mamba", "transformer with sinks")
    ]
    + [("two-hot", "critic."), ("continuous, beta", "actor.continuous.")],
)
def test_no_setting_of_a_kind_is_ignored(name: str, section: str) -> None:
    of_kind = {leaf for leaf in leaves(SCENARIOS[name].config) if leaf.startswith(section)}
    assert not of_kind - used(name) - ELSEWHERE.keys() - ONLY_SOMETIMES


ONLY_SOMETIMES = {
    "critic.soften_data_actions",  # of discrete actions
    "trajectory_encoder.kind",  # what a kind needs may be missing
}


@pytest.mark.long
def test_every_setting_is_used_somewhere() -> None:
    everywhere = {leaf for name in SCENARIOS for leaf in used(name)}
    assert not all_settings() - everywhere - ELSEWHERE.keys()


def all_settings() -> set[str]:
    return {name for name, option in options(AgentConfig).items() if not option.section}
