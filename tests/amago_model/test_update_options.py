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
from amago_model.losses.filters import leaky_relu_filter, normalized_advantage
from amago_model.losses.td_targets import clipped_target, lambda_returns, n_step_returns
from amago_model.running_statistics import BatchMoments

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


def test_the_leaky_filter_is_a_bent_line_and_a_step() -> None:
    """By hand at threshold .5, beta 2, slope .1, at_zero .2: below, at 0, above, at the clips."""
    config = {"threshold": 0.5, "beta": 2.0, "slope": 0.1, "at_zero": 0.2, "smallest": 0.05}
    advantage = torch.tensor([0.0, -1.0, 0.5, 2.5, -100.0, 100.0])
    bare = leaky_relu_filter(
        advantage, LeakyReLUFilterConfig(**config, largest=3.0, add_step=False)
    )
    torch.testing.assert_close(bare, torch.tensor([0.2, 0.15, 0.225, 1.225, 0.05, 3.0]))
    stepped = leaky_relu_filter(advantage, LeakyReLUFilterConfig(**config, largest=3.0))
    torch.testing.assert_close(stepped - bare, torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 1.0]))


def test_normalised_advantages_forget_scale_and_shift_and_padding() -> None:
    a = torch.randn(40, 2)
    mask = torch.rand(40) > 0.3

    def normalized(a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return normalized_advantage(a, *BatchMoments()(a, mask))

    z = normalized(a, mask)
    torch.testing.assert_close(z[mask].mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(z[mask].std(0, correction=0), torch.ones(2))
    torch.testing.assert_close(normalized(7 * a + 3, mask), z, atol=1e-4, rtol=1e-4)
    worse = torch.where(mask[:, None], a, torch.nan)
    torch.testing.assert_close(normalized(worse, mask)[mask], z[mask])
    assert bool(normalized(a, torch.zeros(40).bool()).isfinite().all())


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("name", ["binary", "exp", "leaky_relu"])
def test_every_filter_weighs_the_cloning_of_an_update(
    make_spaces, make_config, make_batch, name: str, normalised: bool
) -> None:
    """The loss is the mean of -weight x log-probability with the weight by its formula."""
    losses = {"filter": {"kind": name, "batch_norm": normalised}, "dpg_weight": 0.0}
    agent = Agent(make_config(losses=losses), make_spaces("continuous")).eval()
    batch = make_batch(agent.spaces)
    seen = {}
    original = agent.filter.forward

    def spy(advantage, mask):  # type: ignore[no-untyped-def]
        seen.update(advantage=advantage, mask=mask, weight=original(advantage, mask))
        return seen["weight"]

    agent.filter.forward = spy  # type: ignore[method-assign]
    _, metrics = agent(batch)
    a, mask = seen["advantage"].double(), seen["mask"]
    if normalised:
        a = (a - a[mask].mean(0)) / a[mask].std(0, correction=0)
    expected = {
        "binary": (a > 0).double(),
        "exp": a.exp().clamp(max=20.0),
        "leaky_relu": (
            0.01 + 0.05 * 0.01 / 2 + torch.where(a > 0.01, (a - 0.01) / 2, 0.05 * (a - 0.01) / 2)
        ).clamp(1e-7, 10.0)
        + (a > 0.01),
    }[name]
    torch.testing.assert_close(seen["weight"][mask].double(), expected[mask], atol=1e-4, rtol=1e-4)
    assert bool(metrics["loss/bc"].isfinite())


# ----------------------------------------------------------------------------------------- targets


def _case(seed: int):  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    shape = (3, 6)
    return (
        torch.randn(shape, dtype=torch.float64),
        torch.rand(shape) < 0.2,
        torch.rand(shape) < 0.8,
        torch.randn(*shape, 2, dtype=torch.float64),
        torch.tensor([0.5, 0.9], dtype=torch.float64),
    )


@pytest.mark.parametrize("lam", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lambda_returns_equal_the_weighted_sum_of_n_step_returns(seed: int, lam: float) -> None:
    """(1 - lambda) sum of lambda^(n-1) y_n, and what is left on the longest: a slow definition."""
    case = _case(seed)
    reward = case[0]
    t = reward.shape[1]
    by_n = [n_step_returns(*case, n) for n in range(1, t + 1)]
    expected = sum((1 - lam) * lam**n * y for n, y in enumerate(by_n[:-1]))
    expected = expected + lam ** (t - 1) * by_n[-1]
    torch.testing.assert_close(lambda_returns(*case, lam), expected)


def test_lambda_targets_reach_the_critic(make_spaces, make_config, make_batch) -> None:
    """lambda 0 is one step, and lambda .9 is not."""
    got = {}
    for lam in (None, 0.0, 0.9):
        torch.manual_seed(0)
        agent = Agent(make_config(losses={"td_lambda": lam}), make_spaces()).eval()
        torch.manual_seed(1)
        batch = make_batch(agent.spaces)
        got[lam] = float(agent(batch)[1]["loss/critic"])
    assert got[None] == pytest.approx(got[0.0]) and got[0.9] != pytest.approx(got[0.0])


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
