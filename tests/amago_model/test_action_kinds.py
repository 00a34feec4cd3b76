"""Beta, mixtures, switches and several choices at once: the numbers, and the way through."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from amago_model import (
    ActionSpace,
    Agent,
    AgentConfig,
    ConfigError,
    MLPActorConfig,
    ObsSpace,
    SpaceError,
    Spaces,
    decode_action,
    encode_action,
    load_policy,
    make_agent,
    save_policy,
    unused_settings,
)
from amago_model.config import ActorConfig, BetaConfig, GMMConfig, LossConfig
from amago_model.heads.actor import make_distribution, n_parameters, noise_width
from amago_model.heads.distributions import Beta, GaussianMixture, MultiBinary, OneHots
from tests.amago_model.cases import CLONING

BOX = ActionSpace(kind="continuous", shape=(2,), low=(-2.0, 0.0), high=(2.0, 1.0))
FLOAT64 = torch.float64


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=FLOAT64)


# -------------------------------------------------------------------------------------------- beta


def _beta() -> tuple[Beta, torch.distributions.Beta]:
    a, b = torch.tensor([[1.5, 4.0]], dtype=FLOAT64), torch.tensor([[2.5, 1.1]], dtype=FLOAT64)
    return Beta(a, b), torch.distributions.Beta(a, b)


def test_beta_log_prob_entropy_and_greedy_are_the_textbook_s() -> None:
    d, reference = _beta()
    action = torch.tensor([[-0.3, 0.95]], dtype=FLOAT64)
    log_prob = (reference.log_prob((action + 1) / 2) - torch.log(torch.tensor(2.0))).sum(-1)
    torch.testing.assert_close(d.log_prob(action), log_prob)
    stretched = reference.entropy() + torch.log(torch.tensor(2.0, dtype=FLOAT64))
    torch.testing.assert_close(d.entropy(), stretched.sum(-1))
    torch.testing.assert_close(d.greedy(), 2 * reference.mean - 1)
    edge = torch.ones(1, 2, dtype=FLOAT64)
    torch.testing.assert_close(d.log_prob(edge), d.log_prob(0.99 * edge))


def test_beta_samples_have_its_moments_and_its_gradient() -> None:
    """The pathwise gradient of a mean equals the derivative of the mean in closed form."""
    a = torch.tensor([1.5, 4.0], dtype=FLOAT64, requires_grad=True)
    b = torch.tensor([2.5, 1.1], dtype=FLOAT64)
    sample = Beta(a, b).rsample(_noise(60_000, 2 * Beta.NOISE))
    reference = torch.distributions.Beta(a.detach(), b)
    u = (sample + 1) / 2
    torch.testing.assert_close(u.mean(0), reference.mean, atol=4e-3, rtol=0)
    torch.testing.assert_close(u.var(0), reference.variance, atol=2e-3, rtol=0)
    sample.mean(0).sum().backward()
    torch.testing.assert_close(a.grad, 2 * b / (a.detach() + b) ** 2, atol=4e-3, rtol=0.01)


# --------------------------------------------------------------------------------------------- gmm


def _mixture() -> GaussianMixture:
    return GaussianMixture(
        torch.tensor([0.3, -0.5], dtype=FLOAT64),
        torch.tensor([[-0.8], [0.6]], dtype=FLOAT64),
        torch.tensor([[0.3], [0.5]], dtype=FLOAT64),
        clip=1 - 1e-9,
    )


def test_the_mixture_s_density_integrates_to_one_and_gives_the_entropy() -> None:
    d = _mixture()
    u = torch.linspace(-5, 5, 20_001, dtype=FLOAT64)
    a, da = u.tanh(), (1 - u.tanh() ** 2) * (u[1] - u[0])
    log_p = d.log_prob(a.unsqueeze(-1))
    assert float((log_p.exp() * da).sum()) == pytest.approx(1.0, abs=1e-6)
    entropy = -float((log_p.exp() * log_p * da).sum())
    assert float(d.entropy(_noise(40_000, 2))) == pytest.approx(entropy, abs=0.03)


def test_mixture_samples_follow_the_density_and_greedy_is_tanh_of_the_mean() -> None:
    d = _mixture()
    sample = d.rsample(_noise(40_000, 2))
    weights = d.logits.softmax(-1)
    normal = torch.distributions.Normal(d.loc[:, 0], d.scale[:, 0])
    for edge in (-0.7, 0.0, 0.5):
        below = float((weights * normal.cdf(torch.atanh(torch.tensor(edge)))).sum())
        assert float((sample < edge).double().mean()) == pytest.approx(below, abs=0.01)
    torch.testing.assert_close(d.greedy(), (weights @ d.loc).tanh())


def test_a_mixture_of_one_is_independent_over_dimensions_and_bounded_below() -> None:
    x = torch.tensor([0.0, 0.4, -0.2, -30.0, 0.0], dtype=FLOAT64)
    d = GaussianMixture.from_parameters(x, GMMConfig(modes=1, std_low=0.1, std_high=0.5))
    torch.testing.assert_close(d.scale, torch.tensor([[0.1, 0.5]], dtype=FLOAT64))
    base = torch.distributions.Normal(d.loc[0], d.scale[0])
    reference = torch.distributions.TransformedDistribution(
        base, torch.distributions.TanhTransform()
    )
    action = torch.tensor([0.3, -0.6], dtype=FLOAT64)
    torch.testing.assert_close(d.log_prob(action), reference.log_prob(action).sum())


def test_a_mixture_refuses_dpg() -> None:
    with pytest.raises(ConfigError, match="continuous.*gradient"):
        AgentConfig(actor=MLPActorConfig(continuous=GMMConfig()))
    AgentConfig(actor=MLPActorConfig(continuous=GMMConfig()), losses=LossConfig(dpg_weight=0.0))


# ------------------------------------------------------------------------ switches and many choices


def test_switches_have_the_log_prob_and_entropy_of_all_their_positions() -> None:
    d = MultiBinary(torch.tensor([0.7, -1.2, 0.1], dtype=FLOAT64))
    every = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3)), dtype=FLOAT64)
    log_p = d.log_prob(every)
    p = d.logits.sigmoid()
    torch.testing.assert_close(log_p[5], (p[0] * (1 - p[1]) * p[2]).log())
    torch.testing.assert_close(log_p.exp().sum(), torch.tensor(1.0, dtype=FLOAT64))
    torch.testing.assert_close(d.entropy(), -(log_p.exp() * log_p).sum())
    assert d.greedy().tolist() == [1, 0, 1]


def test_parts_have_the_log_prob_and_entropy_of_all_their_combinations() -> None:
    d = OneHots.from_logits(_noise(5), (2, 3), MLPActorConfig())
    eye2, eye3 = torch.eye(2, dtype=FLOAT64), torch.eye(3, dtype=FLOAT64)
    every = torch.stack([torch.cat((a, b)) for a, b in itertools.product(eye2, eye3)])
    log_p = d.log_prob(every)
    torch.testing.assert_close(log_p[4], (d.probs[1] * d.probs[2 + 1]).log())
    torch.testing.assert_close(log_p.exp().sum(), torch.tensor(1.0, dtype=FLOAT64))
    torch.testing.assert_close(d.entropy(), -(log_p.exp() * log_p).sum())
    torch.testing.assert_close(d.log_prob(d.greedy()), log_p.max())


@pytest.mark.parametrize(
    "d",
    [
        MultiBinary(torch.tensor([0.7, -1.2, 0.1], dtype=FLOAT64)),
        OneHots(torch.tensor([0.2, 0.8, 0.5, 0.1, 0.4], dtype=FLOAT64), (2, 3)),
    ],
    ids=["multi_binary", "multi_discrete"],
)
def test_their_samples_are_exact_and_as_frequent_as_they_should_be(d) -> None:  # type: ignore[no-untyped-def]
    p = d.logits.sigmoid() if isinstance(d, MultiBinary) else d.probs
    sample = d.rsample(_noise(40_000, p.shape[-1]))
    assert set(sample.unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(sample.mean(0), p, atol=0.01, rtol=0)
    again = d.sample(torch.Generator().manual_seed(1))
    torch.testing.assert_close(again, d.sample(torch.Generator().manual_seed(1)))


def test_straight_through_gradients_are_those_of_the_probabilities() -> None:
    logits = torch.tensor([0.7, -1.2], dtype=FLOAT64, requires_grad=True)
    weight = torch.tensor([2.0, -3.0], dtype=FLOAT64)
    (MultiBinary(logits).rsample(_noise(2)) * weight).sum().backward()
    p = logits.detach().sigmoid()
    torch.testing.assert_close(logits.grad, weight * p * (1 - p))
    # One-hots: the softmax of (log p + Gumbel noise) / temperature, by hand.
    probs = torch.tensor([0.2, 0.3, 0.5], dtype=FLOAT64, requires_grad=True)
    noise, weight = _noise(3), torch.tensor([1.0, 2.0, -1.0], dtype=FLOAT64)
    (OneHots(probs, (3,)).rsample(noise) * weight).sum().backward()
    other = probs.detach().clone().requires_grad_()
    gumbel = -(-torch.special.ndtr(noise).log()).log()
    (((other.log() + gumbel) / 0.5).softmax(-1) * weight).sum().backward()
    torch.testing.assert_close(probs.grad, other.grad)


def test_an_illegal_choice_is_never_drawn_and_leaves_finite_gradients() -> None:
    logits = torch.zeros(5, dtype=FLOAT64, requires_grad=True)
    legal = torch.tensor([True, True, False, True, True])
    d = OneHots.from_logits(logits, (2, 3), MLPActorConfig(), legal)
    sample = d.rsample(_noise(2000, 5))
    assert float(sample.detach()[:, 2].sum()) == 0
    (sample.sum() + d.log_prob(sample.detach()).sum()).backward()
    assert bool(logits.grad.isfinite().all())


# ------------------------------------------------------------------------------------ end to end


def test_actions_of_both_kinds_come_back_from_their_encoding() -> None:
    switches = ActionSpace(kind="multi_binary", n=3)
    action = torch.tensor([[0, 1, 1], [1, 0, 0]])
    torch.testing.assert_close(encode_action(switches, action), action.float())
    torch.testing.assert_close(decode_action(switches, encode_action(switches, action)), action)
    choices = ActionSpace(kind="multi_discrete", nvec=(2, 3))
    action = torch.tensor([[1, 2], [0, 0], [-1, 1]])
    x = encode_action(choices, action)
    assert x.tolist() == [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0], [0, 0, 0, 1, 0]]
    torch.testing.assert_close(decode_action(choices, x[:2]), action[:2])


ALL = [
    ("multi_binary", {}, 0.5),
    ("multi_discrete", {}, 0.5),
    ("continuous", {"continuous": {"kind": "beta"}}, 0.5),
    ("continuous", {"continuous": {"kind": "gaussian"}}, 0.5),
    ("continuous", {"continuous": {"kind": "gmm", "modes": 3}}, 0.0),
]


@pytest.mark.parametrize(("kind", "actor", "online"), ALL)
def test_every_kind_learns_and_is_blind_to_padding(
    make_spaces, make_config, make_batch, kind: str, actor: dict, online: float
) -> None:
    config = make_config(losses={"dpg_weight": online}, actor=actor)
    agent = Agent(config, make_spaces(kind)).eval()
    batch = make_batch(agent.spaces)
    results = []
    for t in (6, 9):  # windows of 6 transitions, then with 3 columns of padding
        padded = dataclasses.replace(batch)
        if t > 6:
            torch.manual_seed(2)
            longer = make_batch(agent.spaces, size=t)
            for f in dataclasses.fields(batch):
                if f.name != "obs" and getattr(batch, f.name) is not None:
                    fresh, old = getattr(longer, f.name), getattr(batch, f.name)
                    fresh[:, : old.shape[1]] = old
                    setattr(padded, f.name, fresh)
            rows = longer.obs["observation"]
            rows[:, :7] = batch.obs["observation"]
            padded.obs = {"observation": rows}
        agent.zero_grad()
        torch.manual_seed(7)
        loss, metrics = agent(padded)
        loss.backward()
        grads = [p.grad for p in agent.trainable_parameters() if p.grad is not None]
        assert all(bool(g.isfinite().all()) for g in grads)
        moved = agent.policy.actor.mlp[0].weight.grad.abs().sum()
        assert float(moved) > 0
        results.append((metrics, [g.clone() for g in grads]))
    for name in results[0][0]:
        torch.testing.assert_close(results[0][0][name], results[1][0][name], msg=name)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "actor", "online"), ALL)
def test_every_kind_acts_in_the_environment_s_terms_from_its_file(
    make_spaces, make_config, kind: str, actor: dict, online: float
) -> None:
    spaces = make_spaces(kind)
    agent = Agent(make_config(losses={"dpg_weight": online}, actor=actor), spaces)
    policy = load_policy(save_policy(agent))
    assert policy.config == agent.config and policy.spaces == spaces
    n, shape = 16, spaces.action.array_shape
    dtype = torch.float32 if kind == "continuous" else torch.int64
    prev, hidden = torch.zeros(n, *shape, dtype=dtype), policy.initial_hidden(n)
    for t, sample in enumerate((True, False)):
        time = torch.full((n,), t)
        obs = {"observation": torch.randn(n, 3)}
        prev, hidden = policy.act(obs, prev, torch.zeros(n), time, hidden, sample)
        assert prev.shape == (n, *shape) and prev.dtype == dtype
        again = decode_action(spaces.action, encode_action(spaces.action, prev))
        torch.testing.assert_close(again, prev)


@pytest.mark.parametrize(("kind", "actor", "online"), ALL)
def test_bc_recovers_a_constant_action(
    make_spaces, make_config, make_batch, kind: str, actor: dict, online: float
) -> None:
    """Behaviour cloning of a constant action makes it the greedy one."""
    del online
    spaces = make_spaces(kind)
    losses = {"bc_weight": 1.0} | CLONING["losses"]
    agent = Agent(make_config(losses=losses, actor=actor, critic=False), spaces)
    batch = make_batch(spaces)
    wanted = {
        "multi_binary": torch.tensor([1, 0, 1]),
        "multi_discrete": torch.tensor([1, 2]),
        "continuous": torch.tensor([1.0, 0.25]),
    }[kind]
    batch.prev_action[:] = wanted
    optimizer = torch.optim.Adam(agent.trainable_parameters(), lr=0.05)
    for _ in range(50):
        optimizer.zero_grad()
        agent(batch, detailed=False)[0].backward()
        optimizer.step()
    obs = {"observation": batch.obs["observation"][0]}
    n = len(obs["observation"])
    action, _ = agent.policy.act(
        obs, batch.prev_action[0], torch.zeros(n), torch.ones(n).long(), None, sample=False
    )
    torch.testing.assert_close(action, wanted.expand_as(action), atol=0.15, rtol=0)


@pytest.mark.parametrize("algorithm", ["agent", "multitask"])
def test_a_thousand_actions_keep_their_numbers(make_config, make_batch, algorithm: str) -> None:
    """What is cloned, seen as previous action, chosen and decoded is 777, not that modulo 256."""
    space = ActionSpace(kind="discrete", n=1000, start=3)
    obs_spaces = {"observation": ObsSpace(shape=(3,), dtype="float32")}
    spaces = Spaces(observations=obs_spaces, action=space)
    losses = {"dpg_weight": 0.0, "bc_weight": 1.0, "filter": {"threshold": -100.0}}
    config = make_config(losses=losses).replace(algorithm=algorithm)
    agent = make_agent(config, spaces)
    batch = make_batch(spaces)
    batch.prev_action[:] = 777
    assert encode_action(space, batch.prev_action)[0, 1].argmax() == 777 - 3
    optimizer = torch.optim.Adam(agent.trainable_parameters(), lr=0.02)
    for _ in range(30):
        optimizer.zero_grad()
        agent(batch, detailed=False)[0].backward()
        optimizer.step()
    policy = load_policy(save_policy(agent))
    obs = {"observation": batch.obs["observation"][0]}
    n = len(obs["observation"])
    action, _ = policy.act(
        obs, batch.prev_action[0], torch.zeros(n), torch.ones(n).long(), None, sample=False
    )
    assert action.tolist() == [777] * n


@pytest.mark.parametrize(
    ("config", "space", "parameters", "noise"),
    [
        (MLPActorConfig(), BOX, 4, 2),
        (MLPActorConfig(continuous=BetaConfig()), BOX, 4, 2 * Beta.NOISE),
        (MLPActorConfig(continuous=GMMConfig()), BOX, 5 + 2 * 5 * 2, 3),
        (MLPActorConfig(), ActionSpace(kind="multi_binary", n=3), 3, 3),
        (MLPActorConfig(), ActionSpace(kind="multi_discrete", nvec=(2, 3)), 5, 5),
    ],
)
def test_the_actor_s_output_and_noise_are_as_wide_as_published(
    config: ActorConfig, space: ActionSpace, parameters: int, noise: int
) -> None:
    assert (n_parameters(config, space), noise_width(config, space)) == (parameters, noise)
    d = make_distribution(config, space, torch.randn(7, parameters), None)
    assert d.rsample(torch.randn(2, 7, noise)).shape == (2, 7, space.width)


def test_what_actions_have_no_use_for_is_told_and_changes_nothing(make_spaces, make_config) -> None:
    with pytest.raises(ConfigError, match="BetaConfig: unknown setting 'modes'"):
        BetaConfig(modes=2)
    config, plain = make_config(actor={"continuous": {"kind": "beta"}}), make_config()
    assert not unused_settings(config, make_spaces("continuous"))
    spaces = make_spaces("discrete")
    assert "actor.continuous.kind='beta'" in unused_settings(config, spaces)
    assert Agent(config, spaces).state_dict().keys() == Agent(plain, spaces).state_dict().keys()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ActionSpace(kind="multi_binary"),
        lambda: ActionSpace(kind="multi_discrete"),
        lambda: ActionSpace(kind="multi_discrete", nvec=(2, 0)),
        lambda: ActionSpace(kind="multi_discrete", nvec=(2,), n=3),
        lambda: ActionSpace(kind="multi_discrete", nvec=(2, 3), starts=(1,)),
        lambda: ActionSpace(kind="discrete", n=3, starts=(1,)),
        lambda: ActionSpace(kind="multi_binary", n=3, start=1),
        lambda: ActionSpace(kind="discrete", n=3, nvec=(3,)),
        lambda: ActionSpace(kind="multi_binary", n=3, shape=(3,)),
    ],
)
def test_half_made_action_spaces_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SpaceError):
        make()


def test_a_mask_of_legal_choices_reaches_a_multi_discrete_policy(make_config) -> None:
    spaces = Spaces(
        observations={
            "observation": ObsSpace(shape=(3,), dtype="float32"),
            "legal": ObsSpace(shape=(5,), dtype="int8", role="mask"),
        },
        action=ActionSpace(kind="multi_discrete", nvec=(2, 3)),
    )
    policy = Agent(make_config(), spaces).policy
    n = 64
    legal = torch.tensor([1, 1, 0, 1, 0]).expand(n, 5)
    action, _ = policy.act(
        {"observation": torch.randn(n, 3), "legal": legal},
        torch.zeros(n, 2, dtype=torch.int64),
        torch.zeros(n),
        torch.zeros(n, dtype=torch.int64),
        policy.initial_hidden(n),
    )
    assert set(action[:, 1].tolist()) == {1} and set(action[:, 0].tolist()) == {0, 1}
