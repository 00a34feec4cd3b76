"""The choices of an update beyond the default: actors, filters, targets."""

from __future__ import annotations

import pytest
import torch

from amago_model import (
    Agent,
    AgentConfig,
    BinaryFilterConfig,
    ConfigError,
    LeakyReLUFilterConfig,
    LossConfig,
    MLPActorConfig,
    ResidualActorConfig,
)
from amago_model.heads.actor import Actor
from amago_model.losses.td_targets import clipped_target

# ------------------------------------------------------------------------------------------- actor


def test_a_residual_actor_is_its_formula_and_learns(make_spaces) -> None:
    """Stem, blocks x + N(W2 act(N(W1 x))), a linear map: parameters counted by hand."""
    config = ResidualActorConfig(d_feature=6, d_ff=10, n_blocks=2)
    space = make_spaces("continuous").action
    actor = Actor(config, space, d_state=5, n_gammas=3)
    stem, block = (5 * 6 + 6) + (6 * 6 + 6), (6 * 10 + 10 + 20) + (10 * 6 + 6 + 12)
    assert sum(p.numel() for p in actor.parameters()) == stem + 2 * block + 6 * 12 + 12
    x = actor.mlp[0](torch.randn(4, 5))
    w1, n1, act, _, w2, n2 = actor.mlp[1].branch
    torch.testing.assert_close(actor.mlp[1](x), x + n2(w2(act(n1(w1(x))))))
    d = actor(torch.randn(4, 5))
    d.log_prob(torch.zeros(4, 1, 2)).sum().backward()
    assert all(p.grad is not None for p in actor.parameters())


def test_sizes_that_the_actor_would_not_use_are_refused() -> None:
    with pytest.raises(ConfigError, match="ResidualActorConfig: unknown setting 'd_hidden'"):
        ResidualActorConfig(d_hidden=32)
    with pytest.raises(ConfigError, match="MLPActorConfig: unknown setting 'd_ff'"):
        MLPActorConfig(d_ff=8)


# ----------------------------------------------------------------------------------------- filters


# ----------------------------------------------------------------------------------------- targets


def test_targets_stay_within_their_bounds(make_spaces, make_config, make_batch) -> None:
    """Bounds are in the environment's units, whatever the reward multiplier."""
    losses = {"target_low": -0.1, "target_high": 0.2, "reward_multiplier": 10.0}
    agent = Agent(make_config(losses=losses), make_spaces())
    _, metrics = agent(make_batch(agent.spaces))
    assert float(metrics["value/target_min"]) == pytest.approx(-0.1)
    assert float(metrics["value/target_max"]) == pytest.approx(0.2)
    inside = make_config(losses={"target_high": 1e6, "reward_multiplier": 10.0})
    far = Agent(inside, agent.spaces)(make_batch(agent.spaces))[1]
    assert 0 < float(metrics["value/target_at_bound"]) <= 1 and far["value/target_at_bound"] == 0
    assert (
        "value/target_at_bound"
        not in Agent(make_config(), agent.spaces)(make_batch(agent.spaces))[1]
    )
    y = torch.tensor([-3.0, 0.0, 3.0])
    assert clipped_target(y, None, 1.0).tolist() == [-3.0, 0.0, 1.0]
    assert clipped_target(y, None, None) is y


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (
            lambda: LossConfig(td_lambda=0.9, n_step=3),
            "n_step: expected 1 with td_lambda=0.9, got 3",
        ),
        (lambda: LossConfig(td_lambda=1.5), "td_lambda"),
        (lambda: LossConfig(target_low=1.0, target_high=0.0), "target_low"),
        (lambda: BinaryFilterConfig(slope=0.1), "slope"),
        (lambda: LeakyReLUFilterConfig(beta=0.0), "beta"),
    ],
)
def test_targets_and_filters_that_contradict_are_refused(make, field: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=field):
        make()


def test_options_of_an_update_survive_json() -> None:
    config = AgentConfig(
        actor=ResidualActorConfig(n_blocks=1),
        losses=LossConfig(td_lambda=0.9, target_high=2.0, filter=LeakyReLUFilterConfig(slope=0.1)),
    )
    assert AgentConfig.from_dict(config.to_dict()) == config
