"""The preset published_v3: each deviation, switched back, is AMAGO's formula, and ours when off.

That both are what they should be in a whole update is test_slow_reference.py's matter (its cases
"softened", "with replacement" and "raw advantage"); here the two stand side by side, by hand.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from amago_model import Agent, AgentConfig, LossConfig, fitting, published_v3
from amago_model.losses import ensemble_subset
from amago_model.presets import DEVIATIONS
from tests.amago_model.cases import CASES, batch_of, make
from tests.amago_model.reference import slow_update


def both(kind: str = "discrete", **losses: object) -> tuple[Agent, Agent]:
    """Ours and the published one, alike in everything else, statistics standing still."""
    ours, _ = make({"kind": kind, "losses": losses})
    theirs = Agent(fitting(published_v3(ours.config), ours.spaces), ours.spaces).double()
    theirs.load_state_dict(ours.state_dict())
    return ours.eval(), theirs.eval()


def test_the_preset_switches_back_exactly_what_it_lists() -> None:
    plain = AgentConfig(losses=LossConfig(filter="exp"))
    changed = {
        f"{part}.{f.name}"
        for part in ("critic", "losses")
        for f in dataclasses.fields(getattr(plain, part))
        if getattr(getattr(plain, part), f.name)
        != getattr(getattr(published_v3(plain), part), f.name)
    }
    assert changed == set(DEVIATIONS)
    assert AgentConfig.from_dict(published_v3().to_dict()) == published_v3()


def test_what_has_no_use_for_a_deviation_is_left_alone() -> None:
    cloning = AgentConfig(losses=LossConfig(fake_filter=True, online_weight=0.0))
    assert published_v3(cloning) == cloning
    unfiltered = published_v3(AgentConfig(losses=LossConfig(fake_filter=True)))
    assert unfiltered.losses.filter_advantage == "normalized"
    assert unfiltered.critic.subset_replacement and unfiltered.losses.targets_before_step


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_its_update_equals_the_slow_loops_with_its_formulas(kind: str) -> None:
    _, theirs = both(kind, filter="exp")
    batch = batch_of(theirs.spaces, [4, 2, 0, 3], 4)
    noise = theirs.draw_noise(*batch.mask.shape)
    expected, _ = slow_update(theirs, batch, noise.double())
    loss, _ = theirs(dataclasses.replace(batch, noise=noise))
    torch.testing.assert_close(loss, expected.loss, rtol=1e-9, atol=1e-10)


def test_the_filter_sees_raw_outputs_or_deviations_of_the_return() -> None:
    """exp(beta A) with A the difference of the critics' raw outputs; with ours, w times that, which
    is the difference of values in units of sigma."""
    ours, theirs = both("continuous", filter="exp", filter_beta=0.5, filter_max=1e30)
    batch = batch_of(ours.spaces, [5, 5], 5)
    seen = []
    for agent in (ours, theirs):
        torch.manual_seed(1)
        seen.append(agent.get_values(batch))
    mine, published = seen
    torch.testing.assert_close(mine.advantage, ours.value_norm.w * published.advantage)
    scale = ours.config.losses.reward_multiplier / ours.value_norm.sigma
    torch.testing.assert_close(mine.advantage, (mine.q - mine.v) * scale)
    torch.testing.assert_close(mine.weight, (0.5 * mine.advantage).exp())
    torch.testing.assert_close(published.weight, (0.5 * published.advantage).exp())


def test_critics_see_the_action_taken_or_a_softened_one() -> None:
    """Published: .99 of the action taken and .001 of each other one, renormalised."""
    ours, theirs = both()
    batch = batch_of(ours.spaces, [4], 4)
    n = next(k for k in range(4) if batch.action_known[0, k])
    taken = int(batch.action[0, n]) - ours.spaces.action.start
    mine, published = ours._encode(batch).shown[n], theirs._encode(batch).shown[n]
    assert mine.tolist() == [float(a == taken) for a in range(3)]
    soft = torch.tensor([0.99 if a == taken else 0.001 for a in range(3)]).double()
    torch.testing.assert_close(published, soft / soft.sum(), rtol=1e-6, atol=0)


def test_critics_of_a_target_are_drawn_with_replacement_or_without() -> None:
    """Minimum of 2 out of 4: 7, 5, 3, 1 of 16 draws, or 3, 2, 1 of 6."""
    n = 40_000
    q = torch.arange(4.0)[:, None].expand(4, n)
    shares = {True: [7 / 16, 5 / 16, 3 / 16, 1 / 16], False: [3 / 6, 2 / 6, 1 / 6, 0.0]}
    for replacement, share in shares.items():
        noise = torch.randn(4, n)
        got = ensemble_subset(q, 2, minimum=True, noise=noise, replacement=replacement)
        frequency = torch.bincount(got.long(), minlength=4) / n
        torch.testing.assert_close(frequency, torch.tensor(share), atol=0.01, rtol=0)
    ours, theirs = both()
    assert not ours.config.critic.subset_replacement and theirs.config.critic.subset_replacement


@pytest.mark.parametrize(
    ("published", "bounds"), [(True, (1e-7, 1e30)), (False, (0.0, 20.0))], ids=["published", "ours"]
)
def test_exponential_weights_are_bounded_or_not(
    published: bool, bounds: tuple[float, float]
) -> None:
    """Published: bounded below, where the advantage is less than -16 / beta, and not above."""
    agent = both(filter="exp", filter_beta=50.0)[int(published)]
    advantage = torch.tensor([[1.0], [-1.0]]).double()
    weight = agent._filter(advantage, torch.tensor([True, True]))
    torch.testing.assert_close(weight, (50.0 * advantage).exp().clamp(*bounds), rtol=1e-9, atol=0)


def test_every_case_that_it_can_take_is_accepted() -> None:
    for case in CASES.values():
        config = make(case)[0].config
        assert (published_v3(config) == config) == (not config.losses.trains_critic or _is(config))


def _is(config: AgentConfig) -> bool:
    """Whether a config is the published one already."""
    return config.critic.subset_replacement and config.losses.targets_before_step
