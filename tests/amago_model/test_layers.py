"""Activations and norms: their formulas, forward and backward, and where each may be used."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from amago_model import (
    ActionSpace,
    Agent,
    ConfigError,
    FeedForwardConfig,
    GRUConfig,
    MambaConfig,
    ResidualActorConfig,
    ScalarCriticConfig,
    TimestepEncoderConfig,
    TransformerConfig,
)
from amago_model.config import Activation, Norm
from amago_model.heads.critic import CriticEnsemble
from amago_model.layers import AdaptiveActivation, make_activation, make_norm

NORMS, ACTIVATIONS = get_args(Norm), get_args(Activation)


def _norm_and_gradient(name: str, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """x, g [D]: the norm of x, and the gradient of its product with g, from the formulas."""
    length, d = x.norm(), x.numel()
    match name:
        case "unitball":
            s = length + 1e-5
            return x / s, g / s - x * (g @ x) / (length * s**2)
        case "unitball_detach":
            return x / (length + 1e-5), g / (length + 1e-5)
        case "hypersphere":
            return d**0.5 * x / length, d**0.5 * (g / length - x * (g @ x) / length**3)
        case "simnorm":
            parts = [x[i : i + 8].exp() / x[i : i + 8].exp().sum() for i in range(0, d, 8)]
            groups = zip(parts, g.split(8), strict=True)
            return torch.cat(parts), torch.cat([p * (h - p @ h) for p, h in groups])
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["unitball", "unitball_detach", "hypersphere", "simnorm"])
def test_norms_equal_their_formulas_forward_and_backward(name: str) -> None:
    x = (3 * torch.randn(2, 3, 16, dtype=torch.float64)).requires_grad_()
    g, y = torch.randn_like(x), make_norm(name, 16)(x)
    gradient = torch.autograd.grad(y, x, g)[0]
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        expected = _norm_and_gradient(name, x.detach()[*index], g[*index])
        torch.testing.assert_close(y[*index], expected[0], rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(gradient[*index], expected[1], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", NORMS)
def test_zeros_have_a_finite_norm_and_gradient(name: str) -> None:
    x = torch.zeros(3, 16, requires_grad=True)
    y = make_norm(name, 16)(x)
    assert y.isfinite().all()
    assert torch.autograd.grad(y, x, torch.randn(3, 16))[0].isfinite().all()


@pytest.mark.parametrize("norm", [name for name in NORMS if name != "unitball_detach"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_any_activation_may_follow_any_norm(norm: str, activation: str) -> None:
    """Some activations write over their input, which a norm may need for its gradient."""
    layers = make_norm(norm, 8), make_activation(activation)
    x = torch.randn(5, 8, dtype=torch.float64)
    for layer in layers:
        layer.double()
    assert torch.autograd.gradcheck(
        lambda v: layers[1](layers[0](v.clone())), x.requires_grad_(), atol=1e-4
    )


def test_the_adaptive_activation_is_its_rational_function_and_begins_as_a_leaky_relu() -> None:
    activation = AdaptiveActivation().double()
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    a, b = activation.numerator, activation.denominator
    top = sum(a[i] * x**i for i in range(6))
    bottom = 1 + sum(b[i] * x ** (i + 1) for i in range(4)).abs()
    torch.testing.assert_close(activation(x), top / bottom)
    off = (activation(x) - F.leaky_relu(x, 0.01)).detach()
    assert float(off.abs().max()) < 0.065 and float(off.square().mean().sqrt()) < 0.01
    with torch.no_grad():  # wherever its coefficients go, it has no poles
        b.copy_(torch.tensor([-9.0, 5.0, -7.0, -3.0]))
    assert activation(x).isfinite().all()
    half = AdaptiveActivation()(x.bfloat16())
    assert half.dtype == torch.bfloat16 and off.abs().max() < 0.1


@pytest.mark.parametrize("n_layers", [1, 2])
def test_adaptive_critics_learn_their_activation_but_not_when_frozen(n_layers: int) -> None:
    config = ScalarCriticConfig(n_critics=3, d_hidden=8, n_layers=n_layers, activation="adaptive")
    action = ActionSpace(kind="continuous", shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))
    critic = CriticEnsemble(config, action, (0.9, 0.5), d_state=4)
    state, actions = torch.randn(5, 4), torch.randn(2, 5, 2, 2, requires_grad=True)
    for frozen in (False, True):
        part = critic.project_state(state).detach()
        loss = critic.values(part, actions, frozen=frozen).square().sum()
        wanted = (actions, critic.activation.numerator, critic.activation.denominator)
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        assert gradients[0].abs().sum() > 0
        assert all((g is None) == frozen for g in gradients[1:])


@pytest.mark.parametrize(
    ("norm", "activation"),
    [(norm, "adaptive") for norm in NORMS] + [("simnorm", name) for name in ACTIVATIONS[:-1]],
)
def test_an_agent_learns_with_each(  # type: ignore[no-untyped-def]
    make_spaces, make_config, make_batch, norm: str, activation: str
) -> None:
    both = {"norm": norm, "activation": activation}
    config = make_config(
        FeedForwardConfig(d_model=16, out_norm=norm, **both),
        encoder=TimestepEncoderConfig(d_hidden=16, d_output=16, out_norm=norm, **both),
        actor={
            "kind": "residual",
            "activation": activation,
            "d_feature": 16,
            "d_ff": 16,
            "n_blocks": 1,
            "norm": norm,
        },
        critic={"activation": activation},
        losses={"dpg_weight": 1.0, "bc_weight": 1.0},
    )
    spaces = make_spaces("continuous")
    agent = Agent(config, spaces)
    loss, _ = agent(make_batch(spaces))
    loss.backward()
    for name, p in agent.named_parameters():
        if p.requires_grad:
            assert p.grad is not None and p.grad.isfinite().all(), name


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TimestepEncoderConfig(norm="simnorm", d_hidden=20), "norm.*d_hidden is 20"),
        (lambda: TimestepEncoderConfig(out_norm="simnorm", d_output=12), "out_norm.*d_output is"),
        (lambda: FeedForwardConfig(norm="simnorm", d_ff=12), "norm.*d_ff is 12"),
        (lambda: FeedForwardConfig(out_norm="simnorm", d_model=12), "out_norm.*d_model is 12"),
        (lambda: GRUConfig(norm="simnorm", d_output=12), "norm.*d_output is 12"),
        (lambda: MambaConfig(norm="simnorm", d_model=12), "norm.*d_model is 12"),
        (lambda: TransformerConfig(norm="simnorm", d_ff=12), "norm.*d_ff is 12"),
        (lambda: TransformerConfig(qk_norm="simnorm", n_heads=64), "qk_norm.*width of a head.*4"),
        (lambda: ResidualActorConfig(norm="simnorm", d_ff=12), "norm.*d_ff is 12"),
        (lambda: make_norm("simnorm", 12), "divisible by 8, got 12"),
    ],
)
def test_groups_of_channels_that_do_not_come_out_even_are_refused_by_name(make, field) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=field):
        make()


def test_groups_are_asked_of_the_feed_forward_part_only_where_it_is_normalised() -> None:
    assert TransformerConfig(norm="simnorm", d_ff=12, normformer_norms=False).d_ff == 12
