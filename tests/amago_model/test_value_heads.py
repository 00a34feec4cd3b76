"""Critics that classify returns, the multi-task sum, privileged critics, and what was published."""

from __future__ import annotations

import pytest
import torch

from amago_model import (
    Agent,
    AgentConfig,
    ConfigError,
    ExpFilterConfig,
    HLGaussCriticConfig,
    ScalarCriticConfig,
    TwoHotCriticConfig,
    get_values,
    make_agent,
    multitask,
)
from amago_model.heads.bins import Bins
from amago_model.heads.critic import CriticEnsemble
from amago_model.layers import symlog
from tests.amago_model.cases import CLONING

KINDS = ("discrete", "continuous", "multi_binary", "multi_discrete")
NARROW = {"n_bins": 21, "min_return": -50.0, "max_return": 50.0}

# -------------------------------------------------------------------------------------------- bins


def test_the_default_support_and_label_are_the_published_ones() -> None:
    """128 bins over symlog of +-100000; a return of 100 lies between bins 88 and 89."""
    bins = Bins(TwoHotCriticConfig())
    assert float(bins.centres[-1]) == pytest.approx(11.51294, abs=1e-5)
    assert bins.width == pytest.approx(0.181306, abs=1e-6)
    label = bins.label(torch.tensor(100.0))
    assert label.nonzero().flatten().tolist() == [88, 89]
    torch.testing.assert_close(label[88:90], torch.tensor([0.0451, 0.9549]), atol=2e-4, rtol=0)


@pytest.mark.parametrize("spacing", [True, False], ids=["symlog", "linear"])
@pytest.mark.parametrize(("low", "high"), [(-50.0, 50.0), (0.0, 50.0), (-50.0, 0.0)])
def test_two_hot_labels_come_back_and_edges_hold_what_lies_outside(
    spacing: bool, low: float, high: float
) -> None:
    """Also where a bound is 0."""
    config = TwoHotCriticConfig(n_bins=21, min_return=low, max_return=high, symlog=spacing)
    bins = Bins(config)
    inside = torch.linspace(low, high, 33)
    label = bins.label(inside)
    torch.testing.assert_close(label.sum(-1), torch.ones(33))
    back = bins.expected(label.clamp(min=1e-30).log())
    torch.testing.assert_close(back, inside, atol=1e-3, rtol=1e-3)
    outside = bins.label(torch.tensor([low - 1e7, high + 1e7]))
    assert outside[0, 0] == 1 and outside[1, -1] == 1


def test_gaussian_labels_sum_to_one_wherever_the_return_lies() -> None:
    """Inside they are the textbook's masses; far outside they are the edge bin, not nothing."""
    bins = Bins(HLGaussCriticConfig(**NARROW))
    label = bins.label(torch.tensor([0.0, 3.0, 49.0, 51.0, 1e6, -1e6]))
    torch.testing.assert_close(label.sum(-1), torch.ones(6))
    assert label[4, -1] == 1 and label[5, 0] == 1 and bool((label >= 0).all())
    z, s = float(symlog(torch.tensor(3.0))), 0.75 * bins.width
    normal = torch.distributions.Normal(z, s)
    centres = bins.centres[5:15]
    mass = normal.cdf(centres + bins.width / 2) - normal.cdf(centres - bins.width / 2)
    torch.testing.assert_close(label[1, 5:15], mass, atol=1e-6, rtol=1e-4)


def test_fresh_critics_answer_the_value_they_are_told_to(make_spaces) -> None:
    bins = NARROW | {"init_value": 20.0, "n_bins": 101}
    config = TwoHotCriticConfig(n_critics=2, d_hidden=16, **bins)
    critic = CriticEnsemble(config, make_spaces("continuous").action, (0.9,), d_state=4)
    with torch.no_grad():
        critic.weights[-1].zero_()
        value = critic.values(critic.project_state(torch.randn(5, 4)), torch.zeros(1, 5, 1, 2))
    torch.testing.assert_close(value, torch.full((2, 1, 5, 1), 20.0), rtol=0.15, atol=0)


@pytest.mark.parametrize("kind", ["multi_binary", "multi_discrete"])
def test_the_ones_of_an_action_have_a_gradient_too(make_spaces, kind: str) -> None:
    """A clamp of actions to less than 1 would leave DPG no gradient where samples are on."""
    critic = CriticEnsemble(
        ScalarCriticConfig(n_critics=2, d_hidden=16), make_spaces(kind).action, (0.9,), d_state=4
    )
    action = torch.ones(1, 5, 1, critic.action.width, requires_grad=True)
    critic.values(critic.project_state(torch.randn(5, 4)), action, frozen=True).sum().backward()
    assert bool((action.grad != 0).all())


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ScalarCriticConfig(**NARROW), "n_bins"),
        (lambda: TwoHotCriticConfig(sigma=0.5), "sigma"),
        (lambda: TwoHotCriticConfig(n_bins=1), "n_bins"),
        (lambda: TwoHotCriticConfig(min_return=3.0, max_return=2.0), "min_return"),
        (lambda: TwoHotCriticConfig(min_return=-1.0, max_return=2.0, init_value=3.0), "init_value"),
        (lambda: ExpFilterConfig(threshold=0.5), "threshold"),
    ],
)
def test_critics_and_filters_that_contradict_are_refused(make, field: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=field):
        make()


# ------------------------------------------------------------------------------------- whole update


def _multitask(make_config, **losses: object) -> AgentConfig:  # type: ignore[no-untyped-def]
    config = multitask(make_config(critic={"kind": "twohot", **NARROW}))
    return config.replace(losses=config.losses.replace(**losses))


@pytest.mark.parametrize("online", [0.0, 0.5])
@pytest.mark.parametrize(
    ("kind", "algorithm"), [*((kind, "agent") for kind in KINDS), ("discrete", "multitask")]
)
def test_every_sum_of_losses_trains_what_it_should(
    make_spaces, make_config, make_batch, kind: str, algorithm: str, online: float
) -> None:
    """Classified returns: finite losses, gradients to everything learned, none to the copies."""
    config = _multitask(make_config, dpg_weight=online)
    config, spaces = config.replace(algorithm=algorithm), make_spaces(kind)
    agent = make_agent(config, spaces)
    assert agent.sampled == (algorithm == "multitask")
    loss, metrics = agent(make_batch(agent.spaces))
    loss.backward()
    assert all(bool(v.isfinite()) for v in metrics.values())
    assert set(metrics) >= {"loss/critic", "loss/bc"}
    assert ("loss/dpg" in metrics) == (online > 0)
    for name, p in agent.named_parameters():
        frozen = name.startswith(("target_", "critics.target."))
        assert (p.grad is None) == frozen, name


def test_straight_through_actions_find_a_known_value_by_dpg(
    make_spaces, make_config, make_batch
) -> None:
    """A critic that likes one discrete action: DPG alone makes it the policy's."""
    config = _multitask(make_config, dpg_weight=1.0, bc_weight=0.0, auxiliary_gammas=())
    agent = make_agent(config, make_spaces("discrete"))
    with torch.no_grad():  # value = what the action's third switch says, whatever the state
        for p in agent.critics.online.parameters():
            p.zero_()
        agent.critics.online.weights[0][:, agent.critics.online.d_state + 1 + 2] = 1.0
        agent.critics.online.weights[1][:] = torch.eye(16)
        agent.critics.online.weights[2][:, :, -1] = 1.0
    for p in agent.critics.online.parameters():
        p.requires_grad_(False)
    batch = make_batch(agent.spaces)
    optimizer = torch.optim.Adam(agent.policy.actor.parameters(), lr=0.02)
    for _ in range(80):
        optimizer.zero_grad()
        agent(batch, detailed=False)[0].backward()
        optimizer.step()
    state = agent.encode(batch).state_t
    assert float(agent.policy.actor(state).probs[:, -1, 2].detach().mean()) > 0.8


# -------------------------------------------------------------------------------------- privileged


# ---------------------------------------------------------------------------------- looking at data


@pytest.mark.parametrize("kind", KINDS)
def test_get_values_are_those_of_the_update_and_change_nothing(
    make_spaces, make_config, make_batch, kind: str
) -> None:
    agent = Agent(make_config(), make_spaces(kind))
    batch = make_batch(agent.spaces)
    agent(batch)
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    torch.manual_seed(4)
    values = get_values(agent, batch)
    assert agent.training
    torch.testing.assert_close(agent.state_dict(), before, rtol=0, atol=0)
    b, t = batch.mask.shape
    assert all(getattr(values, f).shape == (b, t, 2) for f in ("q", "v", "advantage", "weight"))
    torch.testing.assert_close(values.weight, (values.advantage > 0).float())
    sigma = agent.critics.popart.sigma / agent.config.losses.reward_multiplier
    torch.testing.assert_close(values.q - values.v, values.advantage * sigma, rtol=1e-3, atol=1e-5)
    torch.manual_seed(4)
    _, metrics = agent.eval()(batch)
    known = values.mask & (batch.terminated | batch.next_obs_valid)
    torch.testing.assert_close(metrics["value/q_mean"], values.q[known][:, -1].mean())


def test_behaviour_cloning_has_no_values_to_get(make_spaces, make_config, make_batch) -> None:
    agent = Agent(make_config(**CLONING), make_spaces())
    with pytest.raises(ConfigError, match="no critic"):
        get_values(agent, make_batch(agent.spaces))
