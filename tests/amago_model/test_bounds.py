"""Bounds of a distribution's parameters: their values, and gradients that lead back inside."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amago_model import ActorConfig, MLPActorConfig
from amago_model.config import ActionSpace, BetaConfig, GMMConfig
from amago_model.heads.actor import make_distribution
from amago_model.heads.continuous import SOFTPLUS_EDGE, TANH_EDGE, bounded_exp, bounded_softplus
from tests.amago_model.cases import make

unhurried = settings(deadline=None)
NUMBERS = st.lists(st.floats(-60, 60), min_size=1, max_size=6)
ACTION = ActionSpace(kind="continuous", shape=(1,), low=(-1.0,), high=(1.0,))


def softplus(x: float) -> float:
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gradient_of(f: object, x: list[float], sign: float, **options: object) -> tuple[Tensor, Tensor]:
    """Values, and the gradient where every value should become smaller (sign 1) or larger (-1)."""
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    y = f(leaf, **options)  # type: ignore[operator]
    (sign * y).sum().backward()
    assert leaf.grad is not None
    return y.detach(), leaf.grad


@unhurried
@given(NUMBERS, st.sampled_from([1.0, -1.0]), st.sampled_from([None, 0.015, 0.7, 5.0]))
def test_softplus_has_its_values_and_lets_go_of_both_ends(
    x: list[float], sign: float, high: float | None
) -> None:
    low = 0.01
    top = math.inf if high is None else math.log(math.expm1(high - low))
    bottom = min(SOFTPLUS_EDGE, top)
    y, gradient = gradient_of(bounded_softplus, x, sign, low=low, high=high, gradient=True)
    for at, value, slope in zip(x, y.tolist(), gradient.tolist(), strict=True):
        assert value == pytest.approx(min(softplus(at) + low, high or math.inf), abs=1e-8)
        outward = (at < bottom and sign > 0) or (at > top and sign < 0)
        expected = 0.0 if outward else sign * sigmoid(min(max(at, bottom), top))
        assert slope == pytest.approx(expected, abs=1e-8)


@unhurried
@given(NUMBERS, st.sampled_from([1.0, -1.0]))
def test_deviations_have_their_values_and_let_go_of_both_ends(x: list[float], sign: float) -> None:
    low, high = 0.1, 2.0
    half = 0.5 * math.log(high / low)
    y, gradient = gradient_of(bounded_exp, x, sign, low=low, high=high, gradient=True)
    for at, value, slope in zip(x, y.tolist(), gradient.tolist(), strict=True):
        assert value == pytest.approx(low * math.exp(half * (1 + math.tanh(at))), abs=1e-8)
        outward = (at < -TANH_EDGE and sign > 0) or (at > TANH_EDGE and sign < 0)
        near = math.tanh(min(max(at, -TANH_EDGE), TANH_EDGE))
        expected = sign * low * math.exp(half * (1 + near)) * half * (1 - near * near)
        assert slope == pytest.approx(0.0 if outward else expected, abs=1e-8)


@unhurried
@given(NUMBERS, st.sampled_from([1.0, -1.0]))
def test_as_published_they_are_plain_functions(x: list[float], sign: float) -> None:
    y, gradient = gradient_of(bounded_softplus, x, sign, low=0.5, high=None, gradient=False)
    plain, expected = gradient_of(lambda x: torch.nn.functional.softplus(x) + 0.5, x, sign)
    assert torch.equal(y, plain) and torch.equal(gradient, expected)
    y, gradient = gradient_of(bounded_exp, x, sign, low=0.5, high=3.0, gradient=False)
    half = 0.5 * math.log(6.0)
    plain, expected = gradient_of(lambda x: 0.5 * (half * (1 + x.tanh())).exp(), x, sign)
    torch.testing.assert_close(y, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-30)


@pytest.mark.parametrize("bound_gradient", [True, False])
@pytest.mark.parametrize(
    ("config", "frozen"),
    [
        (MLPActorConfig(continuous=BetaConfig()), [-20.0, -20.0]),
        (MLPActorConfig(continuous=BetaConfig(high=30.0)), [50.0, 50.0]),
        (MLPActorConfig(), [0.7, -20.0]),
        (MLPActorConfig(), [0.7, 20.0]),
        (MLPActorConfig(continuous=GMMConfig(modes=1)), [0.0, 0.7, -40.0]),
        (MLPActorConfig(continuous=GMMConfig(modes=1, std_high=2.0)), [0.0, 0.7, 20.0]),
    ],
    ids=["beta flat", "beta narrow", "spike", "wide", "gmm spike", "gmm wide"],
)
def test_a_frozen_policy_learns_again(
    config: ActorConfig, frozen: list[float], bound_gradient: bool
) -> None:
    """Cloning of actions around 0.6 from parameters that a bad start has driven far out."""
    family = config.continuous.replace(bound_gradient=bound_gradient)
    config = config.replace(continuous=family)
    torch.manual_seed(0)
    action = (0.6 + 0.2 * torch.randn(64, 1)).clamp(-1, 1)
    x = torch.tensor(frozen, requires_grad=True)

    def loss() -> Tensor:
        d = make_distribution(config, ACTION, x.expand(len(action), -1), None)
        return -d.log_prob(action).mean()

    # Not by Adam, which makes steps even of gradients of 1e-7.
    for step in np.linspace(0.4, 0.02, 300).tolist():
        (gradient,) = torch.autograd.grad(loss(), x)
        with torch.no_grad():
            x -= step * (100.0 * gradient).clamp(-1.0, 1.0)
    moved = abs(x[-1].item() - frozen[-1]) > 10
    assert moved is bound_gradient
    assert (loss().item() < 0.4) is bound_gradient  # a uniform distribution has 0.69


@pytest.mark.parametrize(("dpg", "cloning"), [(-3.0, 1.0), (3.0, -1.0), (1.0, 1.0), (-1.0, -1.0)])
@pytest.mark.parametrize("at", [-20.0, -1.0, 2.0, 20.0])
def test_two_losses_meet_a_bound_as_their_sum_does(at: float, dpg: float, cloning: float) -> None:
    """One pass of the actor serves both: what leads further out is what their sum wants, so that
    descending it is descending the sum from the bound."""
    sum_of_both = dpg + cloning
    for bound, edges, options in (
        (bounded_exp, (-TANH_EDGE, TANH_EDGE), {"low": 0.1, "high": 2.0}),
        (bounded_softplus, (SOFTPLUS_EDGE, math.log(math.expm1(4.9))), {"low": 0.1, "high": 5.0}),
    ):
        x = torch.tensor([at], dtype=torch.float64, requires_grad=True)
        y = bound(x, gradient=True, **options)
        (dpg * y + cloning * y).sum().backward()
        near = torch.tensor([min(max(at, edges[0]), edges[1])], dtype=torch.float64)
        _, slope = gradient_of(bound, near.tolist(), 1.0, gradient=True, **options)
        outward = (at < edges[0] and sum_of_both > 0) or (at > edges[1] and sum_of_both < 0)
        torch.testing.assert_close(x.grad, 0.0 * slope if outward else sum_of_both * slope)


@pytest.mark.parametrize("bound_gradient", [True, False])
@pytest.mark.parametrize("deviation", [-20.0, 20.0], ids=["spike", "wide"])
def test_an_agent_frozen_far_out_learns_again_by_dpg_and_cloning(
    deviation: float, bound_gradient: bool
) -> None:
    """Through whole updates: the data's deviations are between the bounds, and cloning wants them.
    As published nothing brings them back."""
    torch.manual_seed(0)
    agent, windows = make(
        {
            "kind": "continuous",
            "actor": {"continuous": {"bound_gradient": bound_gradient}},
            "losses": {"dpg_weight": 0.1, "bc_weight": 1.0, "filter": {"kind": "behavior_cloning"}},
        }
    )
    last = agent.policy.actor.mlp[-1]
    spread = torch.tensor([False, True]).repeat_interleave(2).repeat(len(agent.gammas))
    with torch.no_grad():
        last.weight[spread], last.bias[spread] = 0.0, deviation
    batch = windows([4, 4, 4], 4)
    (gradient,) = torch.autograd.grad(agent(batch)[0], last.bias)
    towards = gradient[spread] * math.copysign(1.0, deviation)
    if bound_gradient:
        assert bool((towards > 0).all())
    else:
        assert float(towards.abs().max()) < 1e-12
