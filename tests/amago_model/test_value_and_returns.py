"""Statistics, PopArt, n-step returns and critics, against hand numbers and slow loops."""

from __future__ import annotations

import pytest
import torch

from amago_model import ActionSpace, PopArtConfig, ScalarCriticConfig
from amago_model.encoders.timestep import InputNorm
from amago_model.heads.critic import CriticEnsemble, gamma_feature
from amago_model.heads.popart import PopArt
from amago_model.losses.td_targets import n_step_returns
from amago_model.running_statistics import RunningMoments, masked_mean, masked_moments

# ------------------------------------------------------------------------------------------ moments


def test_a_masked_mean_ignores_what_is_masked_even_nan_and_is_zero_when_empty() -> None:
    x = torch.tensor([[1.0, 3.0], [torch.nan, torch.inf]])
    assert float(masked_mean(x, torch.tensor([True, False]))) == 2.0
    assert float(masked_mean(x, torch.tensor([False, False]))) == 0.0


def test_masked_moments_equal_the_plain_ones_of_what_is_left() -> None:
    x, mask = torch.randn(4, 5, 3), torch.rand(4, 5) > 0.4
    count, mean, variance = masked_moments(x, mask)
    assert int(count) == int(mask.sum())
    torch.testing.assert_close(mean, x[mask].mean(0))
    torch.testing.assert_close(variance, x[mask].var(0, correction=0))


@pytest.mark.parametrize(
    ("beta", "first", "second"), [(5e-4, 0.500125, 0.3335), (1e-4, 0.500025, None)]
)
def test_the_first_debiased_steps(beta: float, first: float, second: float | None) -> None:
    moments = RunningMoments((1,), beta=beta, init_nu=1.0)
    one = torch.ones(1, dtype=torch.bool)
    moments.update(torch.ones(1, 1), one)
    assert float(moments.mean) == pytest.approx(first, abs=1e-6)
    before = float(moments.mean)
    moments.update(torch.full((1, 1), 2.0), one)
    if second is not None:
        assert float(moments.mean) == pytest.approx(before + second * (2 - before), abs=1e-6)


def test_the_variance_is_that_of_averaged_first_and_second_moments() -> None:
    moments = RunningMoments((2,), beta=0.05, init_nu=3.0)
    mu, nu = torch.zeros(2), torch.full((2,), 3.0)
    for k in range(2, 9):
        x = torch.randn(50, 2) * torch.tensor([1.0, 4.0]) + 2
        moments.update(x, torch.ones(50, dtype=torch.bool))
        step = 0.05 / (1 - 0.95**k)
        mu, nu = mu + step * (x.mean(0) - mu), nu + step * (x.square().mean(0) - nu)
        torch.testing.assert_close(moments.variance, nu - mu**2)
        torch.testing.assert_close(moments.mean, mu)


def test_a_large_mean_does_not_swallow_the_spread() -> None:
    moments = RunningMoments((1,), beta=0.05, init_nu=1.0)
    moments.mean.fill_(50_000.0)
    for _ in range(100):
        moments.update(50_000 + torch.randn(512, 1), torch.ones(512, dtype=torch.bool))
    # In float32, E[x^2] - E[x]^2 is off by hundreds here.
    assert float(moments.variance) == pytest.approx(1.0, abs=0.1)


def test_without_an_initial_variance_the_first_batch_is_all_that_counts() -> None:
    """Also where nothing is known of the first batches, on each way to count."""
    for empty in (0, torch.tensor(0)):
        moments = RunningMoments((1,), beta=1e-4, init_nu=0.0)
        assert moments._step(empty) == 0.0
        moments.update(torch.ones(4, 1), torch.zeros(4, dtype=torch.bool))
        assert (float(moments.mean), float(moments.variance)) == (0.0, 0.0)
        x = torch.tensor([[1e3], [1e3 + 2e-2]])
        moments.update(x, torch.ones(2, dtype=torch.bool))
        assert float(moments.mean) == pytest.approx(1e3 + 1e-2, abs=1e-3)
        assert float(moments.variance) == pytest.approx(1e-4, rel=0.1)
    assert float(moments._step(torch.tensor(3))) == pytest.approx(0.5, rel=1e-3)


def test_a_lower_limit_makes_small_features_visible() -> None:
    x = 1e-5 * torch.randn(1, 4096, 1)
    norm = InputNorm(1, init_nu=0.0, min_std=1e-6)
    assert float(norm(x, torch.ones(1, 4096, dtype=torch.bool)).std()) == pytest.approx(1, abs=0.01)
    unseen = InputNorm(1)(x, torch.ones(1, 4096, dtype=torch.bool))
    assert float(unseen.std()) < 1e-4


def test_an_empty_mask_leaves_statistics_untouched() -> None:
    norm = InputNorm(3)
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    out = norm(torch.full((2, 4, 3), torch.nan).nan_to_num(), torch.zeros(2, 4, dtype=torch.bool))
    assert torch.isfinite(out).all()
    assert all(torch.equal(before[k], v) for k, v in norm.state_dict().items())


def test_a_feature_that_never_varies_is_centred_and_not_blown_up() -> None:
    norm = InputNorm(1, beta=0.1)
    for _ in range(300):
        norm(torch.full((1, 64, 1), 7.0), torch.ones(1, 64, dtype=torch.bool))
    norm.eval()
    assert float(norm(torch.full((1, 1, 1), 7.5), None)) == pytest.approx(0.5, abs=1e-3)


def test_inputs_are_whitened_by_their_running_mean_and_deviation() -> None:
    norm = InputNorm(2).eval()
    norm.moments.mean.copy_(torch.tensor([2.0, -1.0]))
    norm.moments.variance.copy_(torch.tensor([9.0, 1e-6]))
    out = norm(torch.tensor([[[5.0, 1.0], [1e9, -1.0]]]), torch.ones(1, 2, dtype=torch.bool))
    # A deviation of .0033 (with the 1e-5 under the root) is not divided by; 1e4 is the limit.
    torch.testing.assert_close(out, torch.tensor([[[3 / (9 + 1e-5) ** 0.5, 2.0], [1e4, 0.0]]]))


# ------------------------------------------------------------------------------------------- PopArt


def _popart(g: int = 2) -> PopArt:
    return PopArt(g, PopArtConfig())


def test_an_update_of_popart_moves_no_value() -> None:
    popart, x = _popart(), torch.randn(3, 5, 2)
    for scale in (1.0, 30.0, 400.0, 2.0):
        before = popart.to_return(x)
        popart.update(scale * torch.randn(20, 2) + scale, torch.ones(20, dtype=torch.bool))
        torch.testing.assert_close(popart.to_return(x), before, rtol=1e-4, atol=1e-3)


# ------------------------------------------------------------------------------------------ returns


@pytest.mark.parametrize(
    ("n", "ends", "length", "expected"),
    [
        (1, None, 3, 1 + 0.9 * 10),
        (2, None, 3, 19.0),
        (3, None, 3, 27.1),
        (3, 1, 3, 2.8),
        (3, None, 2, 1 + 0.9 * 2 + 0.81 * 20),  # bootstraps at the last valid step
        (9, None, 3, 27.1),
    ],
)
def test_n_step_returns_by_hand(n: int, ends: int | None, length: int, expected: float) -> None:
    reward, q = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[[10.0], [20.0], [30.0]]])
    t = torch.arange(3)[None]
    terminated = t == (-1 if ends is None else ends)
    y = n_step_returns(reward, terminated, t < length, q, torch.tensor([0.9]), n)
    assert float(y[0, 0, 0]) == pytest.approx(expected)


# ------------------------------------------------------------------------------------------ critics


def test_discount_features_are_the_published_ones() -> None:
    gammas = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995, 0.999)
    expected = (0.7472, 2.3979, 3.0445, 3.5361, 4.6151, 5.3033, 6.9088)
    assert [gamma_feature(g) for g in gammas] == pytest.approx(expected, abs=5e-5)


BOX = ActionSpace(kind="continuous", shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))


def test_a_frozen_pass_gives_the_same_values_and_gradients_to_the_action_alone() -> None:
    critic = CriticEnsemble(ScalarCriticConfig(n_critics=2, d_hidden=8), BOX, (0.9,), d_state=5)
    part = critic.project_state(torch.randn(7, 5)).detach()
    action = torch.zeros(1, 7, 1, 2, requires_grad=True)
    frozen = critic.values(part, action, frozen=True)
    torch.testing.assert_close(frozen, critic.values(part, action))
    frozen.sum().backward()
    assert action.grad is not None and bool((action.grad != 0).all())
    assert all(p.grad is None for p in critic.parameters())
