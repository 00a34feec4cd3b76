"""Distributions against closed forms, quadrature and counting."""

from __future__ import annotations

import math

import pytest
import torch

from amago_model import GaussianConfig, MLPActorConfig, TanhGaussianConfig
from amago_model.heads.distributions import Categorical, Gaussian, TanhGaussian


def test_probabilities_are_clipped_then_renormalised() -> None:
    d = Categorical.from_logits(torch.tensor([10.0, 0.0, -20.0]), MLPActorConfig())
    p = torch.tensor([10.0, 0.0, -20.0]).softmax(-1).clamp(0.001, 0.99)
    torch.testing.assert_close(d.probs, p / p.sum())


def test_an_action_clipped_from_below_can_still_be_learned() -> None:
    logits = torch.tensor([20.0, 0.0, 0.0], requires_grad=True)
    Categorical.from_logits(logits, MLPActorConfig()).log_prob(torch.tensor(1)).backward()
    assert logits.grad is not None and logits.grad[1] > 0 and logits.grad[0] < 0


def test_illegal_actions_are_impossible_and_the_rest_sums_to_one() -> None:
    legal = torch.tensor([[True, False, True], [False, False, False]])
    d = Categorical.from_logits(
        torch.zeros(2, 3), MLPActorConfig(prob_low=0.1, prob_high=0.9), legal
    )
    torch.testing.assert_close(d.probs, torch.tensor([[0.5, 0, 0.5], [1 / 3, 1 / 3, 1 / 3]]))
    assert (
        torch.isfinite(d.entropy()).all() and torch.isfinite(d.log_prob(torch.tensor([1, 0]))).all()
    )


def test_categorical_log_prob_entropy_greedy_and_sample() -> None:
    p = torch.tensor([0.2, 0.5, 0.3])
    d = Categorical(p.expand(40_000, 3))
    torch.testing.assert_close(d.log_prob(torch.ones(40_000, dtype=torch.int64))[0], p[1].log())
    torch.testing.assert_close(d.entropy()[0], -(p * p.log()).sum())
    assert int(d.greedy()[0]) == 1
    frequency = torch.bincount(d.sample(torch.Generator().manual_seed(1))) / 40_000
    torch.testing.assert_close(frequency, p, atol=0.01, rtol=0)


def test_the_deviation_is_squashed_between_its_bounds_on_a_log_scale() -> None:
    x = torch.tensor([0.0, -50.0, 0.0, 0.0, 0.0, 50.0]).reshape(3, 2)
    scale = TanhGaussian.from_parameters(x, TanhGaussianConfig(std_low=0.01, std_high=1.0)).scale
    torch.testing.assert_close(scale, torch.tensor([[0.01], [0.1], [1.0]]))


@pytest.mark.parametrize(("loc", "scale"), [(0.3, 0.4), (-1.0, 0.8), (0.0, 1.5)])
def test_the_tanh_gaussian_density_integrates_to_one_and_gives_the_entropy(
    loc: float, scale: float
) -> None:
    d = TanhGaussian(
        torch.tensor([loc], dtype=torch.float64),
        torch.tensor([scale], dtype=torch.float64),
        clip=1 - 1e-9,
    )
    # Midpoints in u = atanh(a): the density of a times da/du.
    u = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    a, da = u.tanh(), (1 - u.tanh() ** 2) * (u[1] - u[0])
    log_p = d.log_prob(a.unsqueeze(-1))
    assert float((log_p.exp() * da).sum()) == pytest.approx(1.0, abs=1e-6)
    entropy = -float((log_p.exp() * log_p * da).sum())
    noise = torch.randn(40_000, 1, dtype=torch.float64)
    assert float(d.entropy(noise)) == pytest.approx(entropy, abs=0.03)


def test_tanh_gaussian_log_prob_is_torch_s_and_is_joint_over_dimensions() -> None:
    loc, scale = torch.randn(5, 3), torch.rand(5, 3) + 0.2
    action = torch.rand(5, 3) * 1.9 - 0.95
    base = torch.distributions.Normal(loc, scale)
    reference = torch.distributions.TransformedDistribution(
        base, torch.distributions.TanhTransform()
    ).log_prob(action)
    torch.testing.assert_close(TanhGaussian(loc, scale).log_prob(action), reference.sum(-1))


def test_an_action_on_the_bound_counts_as_the_clip() -> None:
    d = TanhGaussian(torch.zeros(1), torch.ones(1), clip=0.99)
    torch.testing.assert_close(d.log_prob(torch.ones(1)), d.log_prob(torch.tensor([0.99])))


def test_tanh_gaussian_samples_follow_the_density_and_greedy_is_the_median() -> None:
    d = TanhGaussian(torch.full((40_000, 1), 0.5), torch.full((40_000, 1), 0.7))
    sample = d.sample(torch.Generator().manual_seed(2))
    assert float((sample < math.tanh(0.5)).float().mean()) == pytest.approx(0.5, abs=0.01)
    assert float(d.greedy()[0]) == pytest.approx(math.tanh(0.5))
    below = torch.distributions.Normal(0.5, 0.7).cdf(torch.tensor(math.atanh(0.9)))
    assert float((sample < 0.9).float().mean()) == pytest.approx(float(below), abs=0.01)


def test_rsample_passes_gradients_to_mean_and_deviation() -> None:
    x = torch.zeros(2, requires_grad=True)
    d = TanhGaussian.from_parameters(x, TanhGaussianConfig(std_low=0.1, std_high=1.0))
    d.rsample(torch.tensor([1.0])).sum().backward()
    assert x.grad is not None and bool((x.grad.abs() > 0).all())


def test_a_gaussian_imitates_actions_at_the_bounds_like_any_other() -> None:
    """log_prob is torch's Normal around a tanh, also at 1, with a gradient towards the action."""
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    action = torch.tensor([1.0, -1.0, 0.2], dtype=torch.float64).expand(5, 3)
    d = Gaussian.from_parameters(x, GaussianConfig(std_low=0.01, std_high=2.0))
    loc, raw = x.detach().chunk(2, dim=-1)
    low, high = math.log(0.01), math.log(2.0)
    std = (low + 0.5 * (high - low) * (raw.tanh() + 1)).exp()
    normal = torch.distributions.Normal(loc.tanh(), std)
    torch.testing.assert_close(d.log_prob(action), normal.log_prob(action).sum(-1))
    torch.testing.assert_close(d.entropy(), normal.entropy().sum(-1))
    torch.testing.assert_close(d.greedy(), loc.tanh())
    d.log_prob(action).sum().backward()
    assert x.grad is not None
    assert (x.grad[:, 0] > 0).all() and (x.grad[:, 1] < 0).all()


def test_samples_of_a_gaussian_are_clipped_and_have_a_gradient_inside() -> None:
    mean, std = torch.full((40_000, 1), 0.5), torch.full((40_000, 1), 0.7)
    sample = Gaussian(mean, std).sample(torch.Generator().manual_seed(2))
    assert float((sample < 0.5).float().mean()) == pytest.approx(0.5, abs=0.01)
    assert float((sample == 1.0).float().mean()) == pytest.approx(0.238, abs=0.01)
    one = torch.tensor([0.5], requires_grad=True)
    d = Gaussian(one, torch.tensor([0.7]))
    (inside,) = torch.autograd.grad(d.rsample(torch.tensor([0.1])), one)
    (outside,) = torch.autograd.grad(d.rsample(torch.tensor([3.0])), one)
    assert float(inside) == 1.0 and float(outside) == 0.0
