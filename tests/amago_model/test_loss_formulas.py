"""Every function of losses/ and heads/popart.py by hand, in float64, at its edges.

What an update makes of them is in test_slow_reference.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from amago_model import (
    Batch,
    BinaryFilterConfig,
    ExpFilterConfig,
    LeakyReLUFilterConfig,
    LossConfig,
    PopArtConfig,
)
from amago_model.heads.popart import PopArt
from amago_model.losses.actor_losses import bc_loss, dpg_loss
from amago_model.losses.critic_losses import classification_loss, critic_loss, expectile_loss
from amago_model.losses.filters import (
    advantage_weight,
    binary_filter,
    exp_filter,
    leaky_relu_filter,
    normalized_advantage,
)
from amago_model.losses.td_targets import (
    bootstrapped_returns,
    clipped_target,
    lambda_returns,
    n_step_returns,
    over_subset,
    subset_indices,
)
from tests.amago_model.reference_parts import slow_lambda, slow_n_step

NAN, INF = math.nan, math.inf


def t(*numbers: Any, grad: bool = False) -> Tensor:
    """t(1, 2) is [1, 2]; t([1, 2]) is [[1, 2]]."""
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=grad)


def exactly(got: Tensor, *expected: Any) -> None:
    """Values and shape, up to rounding."""
    torch.testing.assert_close(got.detach(), t(*expected), rtol=1e-12, atol=1e-12)


def number(got: Tensor) -> float:
    assert got.shape == ()
    return float(got.detach())


# ------------------------------------------------------------------ which critics, and what of them


def test_critics_are_the_largest_of_their_noise_each_once() -> None:
    noise = t([0.1, 3.0], [0.3, -1.0], [0.2, 2.0])
    indices = subset_indices(3, 2, noise)
    assert indices is not None and indices.tolist() == [[1, 0], [2, 2]]
    one = subset_indices(3, 1, noise)
    assert one is not None and one.tolist() == [[1, 0]]


def test_all_critics_need_no_drawing() -> None:
    assert subset_indices(3, 3, torch.full((3, 2), NAN)) is None
    assert subset_indices(1, 1, torch.full((1, 2), NAN)) is None


def test_with_replacement_noise_is_cut_into_as_many_ranges_as_there_are_critics() -> None:
    third = float(torch.special.ndtri(t(1 / 3))[0])
    noise = t([-40.0, third - 1e-6, third + 1e-6], [-third - 1e-6, -third + 1e-6, 40.0], [NAN] * 3)
    indices = subset_indices(3, 2, noise, replacement=True)
    assert indices is not None and indices.tolist() == [[0, 0, 1], [1, 2, 2]]
    # As many as there are, but drawn all the same: two entries rest on one critic twice.
    both = subset_indices(2, 2, t([-1.0, 1.0], [-1.0, -1.0]), replacement=True)
    assert both is not None and both.tolist() == [[0, 1], [0, 0]]


def test_a_subset_has_its_minimum_or_mean() -> None:
    q = t([1.0, 20.0], [5.0, 10.0], [3.0, 60.0])
    indices = torch.tensor([[1, 0], [2, 2]])
    exactly(over_subset(q, indices, minimum=True), 3.0, 20.0)
    exactly(over_subset(q, indices, minimum=False), 4.0, 40.0)
    exactly(over_subset(q, None, minimum=True), 1.0, 10.0)
    exactly(over_subset(q, None, minimum=False), 3.0, 30.0)


# ---------------------------------------------------------------------------------- critics' losses

MASK = torch.tensor([True, False, True])


def test_the_critic_loss_is_the_mean_squared_error_of_what_the_mask_leaves() -> None:
    prediction = torch.tensor(
        [[[1.0, 2.0], [NAN, INF], [0.0, 0.0]], [[3.0, 2.0], [9.0, 9.0], [0.0, -4.0]]],
        dtype=torch.float64,
    )  # [C 2, N 3, G 2]
    target = t([0.0, 2.0], [NAN, 0.0], [1.0, 0.0])
    errors = (1 + 0 + 1 + 0) + (9 + 0 + 1 + 16)
    assert number(critic_loss(prediction, target, MASK, None)) == pytest.approx(errors / 8)
    # Of a batch that is a part of one with 5 rows.
    assert number(critic_loss(prediction, target, MASK, t(5.0)[0])) == pytest.approx(errors / 20)
    assert number(critic_loss(prediction, target, torch.zeros(3).bool(), None)) == 0.0


def test_the_critic_loss_trains_the_prediction_and_not_the_target() -> None:
    prediction, target = torch.ones(1, 3, 1).double().requires_grad_(), t([0.0], [0.0], [3.0])
    target.requires_grad_()
    critic_loss(prediction, target, MASK, None).backward()
    assert target.grad is None
    exactly(prediction.grad, [[1.0], [0.0], [-2.0]])


def test_the_classification_loss_is_the_cross_entropy_of_what_the_mask_leaves() -> None:
    third, label = math.log(3.0), t([[0.25, 0.75]], [[NAN, 0.0]], [[1.0, 0.0]])  # [N 3, G 1, 2]
    logits = torch.tensor(
        [
            [[[0.0, third]], [[INF, NAN]], [[0.0, 0.0]]],
            [[[0.0, 0.0]], [[0.0, 0.0]], [[third, 0.0]]],
        ],
        dtype=torch.float64,
        requires_grad=True,
    )
    a = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) + math.log(2.0)
    b = math.log(2.0) - math.log(0.75)
    label.requires_grad_()
    loss = classification_loss(logits, label, MASK, None)
    assert number(loss) == pytest.approx((a + b) / 4)
    loss.backward()
    assert label.grad is None and logits.grad is not None
    exactly(logits.grad[1, 0], [(0.5 - 0.25) / 4, (0.5 - 0.75) / 4])
    with torch.no_grad():
        of_many = classification_loss(logits, label, MASK, t(8.0)[0])
    assert number(of_many) == pytest.approx((a + b) / 16)


def test_an_expectile_weighs_values_that_are_too_low_more_than_those_that_are_too_high() -> None:
    value = t([1.0, 4.0], [7.0, 0.0], [2.0, -1.0], grad=True)
    target = t([3.0, 3.0], [0.0, NAN], [2.0, 1.0], grad=True)
    loss = expectile_loss(value, target, 0.9, MASK, None)
    assert number(loss) == pytest.approx((0.9 * 4 + 0.1 * 1 + 0.0 + 0.9 * 4) / 4)
    loss.backward()
    assert target.grad is None
    exactly(value.grad[[0, 2]], [-0.9, 0.05], [0.0, -0.9])
    assert number(expectile_loss(value, target, 0.5, MASK, t(9.0)[0])) == pytest.approx(4.5 / 18)


# ------------------------------------------------------------------------------------------ filters


def test_the_binary_filter_leaves_out_what_is_no_better_than_the_threshold() -> None:
    advantage = t(-1.0, 0.0, 1e-9, 0.5, 0.5 + 1e-9)
    got = binary_filter(advantage, 0.0)
    assert got.dtype == torch.float64 and got.tolist() == [0, 0, 1, 1, 1]
    assert binary_filter(advantage, 0.5).tolist() == [0, 0, 0, 0, 1]
    assert binary_filter(advantage.float(), 0.0).dtype == torch.float32


def test_the_exponential_filter_is_bounded_above() -> None:
    advantage = t(-50.0, -0.5, 0.0, 0.5, 50.0)
    exactly(
        exp_filter(advantage, 2.0, 20.0),
        math.exp(-100),
        math.exp(-1),
        1.0,
        math.exp(1),
        20.0,
    )
    exactly(exp_filter(t(0.0, 0.1, 5.0), 10.0, 2.0), 1.0, 2.0, 2.0)


LEAKY = {"threshold": 0.5, "beta": 2.0, "slope": 0.1, "at_zero": 0.2}


def test_the_leaky_filter_bends_at_the_threshold_and_has_its_value_at_zero() -> None:
    advantage, bounds = (
        t(-2.0, 0.0, 0.5, 0.5 + 1e-9, 2.5, 100.0),
        {"smallest": 0.15, "largest": 3.0},
    )
    plain = leaky_relu_filter(advantage, LeakyReLUFilterConfig(**LEAKY, **bounds, add_step=False))
    # 0.2 + 0.1 a / 2 up to 0.5, then 0.225 + (a - 0.5) / 2.
    exactly(plain, 0.15, 0.2, 0.225, 0.225 + 5e-10, 1.225, 3.0)
    stepped = leaky_relu_filter(advantage, LeakyReLUFilterConfig(**LEAKY, **bounds))
    exactly(stepped, 0.15, 0.2, 0.225, 1.225 + 5e-10, 2.225, 4.0)


def test_a_config_chooses_its_filter_with_all_of_its_settings() -> None:
    advantage = t(-3.0, 0.3, 0.7, 9.0)
    binary = BinaryFilterConfig(threshold=0.5)
    exactly(advantage_weight(advantage, binary), 0.0, 0.0, 1.0, 1.0)
    exponential = ExpFilterConfig(beta=0.5)
    expected = (math.exp(-1.5), math.exp(0.15), math.exp(0.35), 20.0)
    exactly(advantage_weight(advantage, exponential), *expected)
    leaky = LeakyReLUFilterConfig(**LEAKY, smallest=0.1, largest=3.0, add_step=False)
    exactly(advantage_weight(advantage, leaky), 0.1, 0.215, 0.325, 3.0)


def test_normalised_advantages_have_mean_0_and_deviation_1_of_each_discount() -> None:
    advantage, mean, variance = t([1.0, 10.0], [5.0, 30.0]), t(3.0, 10.0), t(4.0, 0.0)
    # A deviation of 0 is taken for 1e-5.
    small = 2 / math.sqrt(4 + 1e-10)
    got = normalized_advantage(advantage, mean, variance)
    exactly(got, [-small, 0.0], [small, 2e6])


# ------------------------------------------------------------------------------- targets, the actor


def test_targets_are_clipped_where_there_is_a_bound() -> None:
    y = t(-3.0, 0.5, 3.0)
    assert clipped_target(y, None, None) is y
    exactly(clipped_target(y, -1.0, None), -1.0, 0.5, 3.0)
    exactly(clipped_target(y, None, 1.0), -3.0, 0.5, 1.0)
    exactly(clipped_target(y, -1.0, 1.0), -1.0, 0.5, 1.0)
    exactly(clipped_target(y, 0.0, None), 0.0, 0.5, 3.0)


def test_cloning_raises_the_probability_of_what_the_filter_leaves() -> None:
    log_prob = t([-1.0, -2.0], [NAN, -INF], [-3.0, 0.5], grad=True)
    weight = t([2.0, 0.0], [9.0, 1.0], [1.0, 4.0], grad=True)
    loss = bc_loss(log_prob, weight, MASK, None)
    assert number(loss) == pytest.approx(-(-2.0 + 0.0 - 3.0 + 2.0) / 4)
    loss.backward()
    assert weight.grad is None
    exactly(log_prob.grad, [-0.5, 0.0], [0.0, 0.0], [-0.25, -1.0])
    assert number(bc_loss(log_prob, None, MASK, None)) == pytest.approx(5.5 / 4)
    assert number(bc_loss(log_prob, None, MASK, t(11.0)[0])) == pytest.approx(5.5 / 22)


def test_dpg_raises_the_lowest_critic_s_value() -> None:
    value = torch.tensor([[[1.0], [NAN], [4.0]], [[2.0], [0.0], [-8.0]]], dtype=torch.float64)
    value.requires_grad_()
    loss = dpg_loss(value, MASK, None)
    assert number(loss) == pytest.approx(3.5)
    loss.backward()
    assert value.grad is not None
    exactly(value.grad[:, [0, 2]], [[-0.5], [0.0]], [[0.0], [-0.5]])
    assert number(dpg_loss(value, MASK, t(7.0)[0])) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------ returns

R, Q, HALF = t([1.0, 2.0, 4.0, 8.0]), t([[10.0], [20.0], [30.0], [40.0]]), t(0.5)
NEVER, ALWAYS = torch.zeros(1, 4).bool(), torch.ones(1, 4).bool()


@pytest.mark.parametrize("t_max", [1, 9])
@pytest.mark.parametrize(
    ("fast", "slow", "how"),
    [(n_step_returns, slow_n_step, n) for n in (1, 2, 4, 20)]
    + [(lambda_returns, slow_lambda, lam) for lam in (0.0, 0.25, 1.0)],
)
def test_returns_equal_a_slow_loop(
    fast: Callable[..., Tensor], slow: Callable[..., float], how: float, t_max: int
) -> None:
    """With random endings and gaps, which may hold anything, and two discounts."""
    torch.manual_seed(0)
    reward, q = torch.randn(16, t_max).double(), torch.randn(16, t_max, 2).double()
    end, usable = torch.rand(16, t_max) < 0.15, torch.rand(16, t_max) < 0.8
    wild = torch.where(usable, reward, NAN)
    y = fast(wild, end & usable, usable, q, t(0.5, 0.97), how)
    for i, k in usable.nonzero().tolist():
        case = wild[i].tolist(), (end & usable)[i].tolist(), usable[i].tolist()
        for g, gamma in enumerate((0.5, 0.97)):
            expected = slow(*case, q[i, :, g].tolist(), gamma, how, k)
            assert float(y[i, k, g]) == pytest.approx(expected, abs=1e-12)


def at(*places: int) -> Tensor:
    mask = NEVER.clone()
    mask[0, list(places)] = True
    return mask


def window(**changes: Any) -> Batch:
    """R in a window of 4 transitions, all there and known."""
    rows = torch.zeros(1, 5)
    plain = Batch(
        obs={},
        prev_action=rows,
        prev_reward=torch.cat((torch.zeros(1, 1).double(), R), 1),
        time_idx=torch.arange(5)[None],
        terminated=NEVER,
        truncated=NEVER,
        next_obs_valid=ALWAYS,
        mask=ALWAYS,
        action_known=ALWAYS,
    )
    return dataclasses.replace(plain, **changes)


def targets(batch: Batch, **losses: Any) -> Tensor:
    config = LossConfig(**{"reward_multiplier": 10.0, "n_step": 4} | losses)
    return bootstrapped_returns(batch, 10.0 * Q, HALF, config)[0, :, 0]


def test_targets_are_in_units_of_the_multiplied_reward() -> None:
    exactly(targets(window()), 65.0, 110.0, 180.0, 280.0)
    exactly(targets(window(), n_step=1), 60.0, 120.0, 190.0, 280.0)
    exactly(targets(window(), n_step=1, td_lambda=1.0), 65.0, 110.0, 180.0, 280.0)
    exactly(targets(window(), n_step=1, td_lambda=0.0), 60.0, 120.0, 190.0, 280.0)


def test_target_bounds_are_in_units_of_the_reward() -> None:
    exactly(targets(window(), target_low=12.0), 120.0, 120.0, 180.0, 280.0)
    exactly(targets(window(), target_high=12.0), 65.0, 110.0, 120.0, 120.0)
    exactly(targets(window(), target_low=7.0, target_high=12.0), 70.0, 110.0, 120.0, 120.0)


@pytest.mark.parametrize("how", [{}, {"n_step": 1, "td_lambda": 1.0}])
def test_targets_use_what_exists_and_either_ends_or_arrives(how: dict[str, Any]) -> None:
    # Where transition 2 arrives was not recorded: 1 bootstraps before it.
    unseen = targets(window(next_obs_valid=~at(2)), **how)
    exactly(unseen[[0, 1, 3]], 10 + 60.0, 120.0, 280.0)
    # But where it ends the task, nothing has to be seen.
    ended = targets(window(next_obs_valid=~at(2), terminated=at(2)), **how)
    exactly(ended, 10 + 20.0, 20 + 20.0, 40.0, 280.0)
    # Padding is no transition, whatever it says, and no reward.
    padded = targets(window(mask=~at(2, 3), terminated=at(2, 3)), **how)
    exactly(padded[:2], 10 + 60.0, 120.0)
    wild = torch.where(torch.tensor([[False, False, False, True, True]]), NAN, window().prev_reward)
    got = targets(window(mask=~at(2, 3), prev_reward=wild), **how)
    assert bool(got.isfinite().all())
    exactly(got[:2], 10 + 60.0, 120.0)


# ------------------------------------------------------------------------------------------- PopArt


def popart(mean: float, variance: float, *, enabled: bool = True) -> PopArt:
    norm = PopArt(1, PopArtConfig(beta=0.5, init_nu=1.0) if enabled else None).double()
    norm.moments.mean.fill_(mean)
    norm.moments.variance.fill_(variance)
    return norm


def test_a_fresh_normaliser_has_its_settings_and_changes_no_output() -> None:
    exactly(PopArt(1, PopArtConfig(init_mean=-3.0)).double().to_return(t([0.1])), [-2.0])
    norm = PopArt(3, PopArtConfig(beta=0.25, init_nu=49.0)).double()
    exactly(norm.mean, 0.0, 0.0, 0.0)
    exactly(norm.sigma, 7.0, 7.0, 7.0)
    exactly(norm.w, 1.0, 1.0, 1.0)
    exactly(norm.b, 0.0, 0.0, 0.0)
    assert set(norm.state_dict()) == {
        "moments.mean",
        "moments.variance",
        "moments.updates",
        "w",
        "b",
    }
    x = t([1.0, -2.0, 3.0])
    exactly(norm.to_normalized(x), *x.tolist())
    norm.update(t([1.0, 1.0, 1.0]), torch.ones(1).bool())
    exactly(norm.mean, *[0.25 / (1 - 0.75**2)] * 3)


@pytest.mark.parametrize(
    ("variance", "sigma"),
    [
        (0.0, 0.01),
        (1e-9, 0.01),
        (0.999e-4, 0.01),
        (1.21e-4, 0.011),
        (1.0, 1.0),
        (0.81e8, 0.9e4),
        (1.1e8, 1e4),
        (1e30, 1e4),
    ],
)
def test_sigma_stays_within_its_floor_and_its_ceiling(variance: float, sigma: float) -> None:
    norm = popart(5.0, variance)
    exactly(norm.sigma, sigma)
    exactly(norm.normalize(t(5.0 + 3 * sigma)), 3.0)
    exactly(norm.to_return(t(3.0)), 5.0 + 3 * sigma)
    norm.bins = True
    exactly(norm.normalized_difference(t(2 * sigma)), 2.0)


def test_returns_that_never_vary_meet_the_floor_and_no_value_moves() -> None:
    """Their variance goes to 0. Without a floor, w would grow without end."""
    norm, x = PopArt(1, PopArtConfig(beta=0.3, init_nu=1.0)).double(), t([-1.0], [0.0], [2.0])
    before = norm.to_return(x)
    for _ in range(200):
        norm.update(torch.full((4, 1), 7.0).double(), torch.ones(4).bool())
    assert float(norm.moments.variance) < 1e-20
    exactly(norm.sigma, 0.01)
    exactly(norm.mean, 7.0)
    exactly(norm.w, 100.0)  # sigma began at 1
    exactly(norm.b, -700.0)
    torch.testing.assert_close(norm.to_return(x), before, rtol=0, atol=1e-9)
    exactly(norm.normalize(t([7.0], [7.01])), [0.0], [1.0])


def test_an_update_by_hand() -> None:
    """From mean 1 and deviation 2, a batch of 7 and 11 with a step of 2/3."""
    norm = popart(1.0, 4.0)
    norm.w.fill_(3.0)
    norm.b.fill_(0.5)
    before = norm.to_return(t(0.0, 1.0))
    norm.update(t([7.0], [NAN], [11.0]), MASK)
    step = 0.5 / (1 - 0.5**2)
    mean = 1 + step * 8
    second = (4 + 1) + step * ((49 + 121) / 2 - 5)
    sigma = math.sqrt(second - mean**2)
    exactly(norm.mean, mean)
    exactly(norm.sigma, sigma)
    exactly(norm.w, 3.0 * 2.0 / sigma)
    exactly(norm.b, (2.0 * 0.5 + 1.0 - mean) / sigma)
    torch.testing.assert_close(norm.to_return(t(0.0, 1.0)), before)


def test_switched_off_it_changes_nothing_and_takes_nothing_in() -> None:
    norm, x = popart(10.0, 4.0, enabled=False), t(2.0)
    norm.w.fill_(3.0)
    norm.update(t([7.0]), torch.ones(1).bool())
    exactly(norm.mean, 10.0)
    exactly(norm.w, 3.0)
    for made in (norm.normalize, norm.to_normalized, norm.to_return):
        assert made(x) is x
    assert norm.normalized_difference(x) is x
