"""The preset published_v3: each deviation, switched back, is AMAGO's formula, and ours when off.

That both are what they should be in a whole update is test_slow_reference.py's matter (its cases
"softened", "with replacement", "raw advantage", "lagged critics", "no gradient below" and
"renormalised"); here the two stand side by side, by hand. What an update
and an optimiser's step make of it is in tests/trainer/test_learner.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from amago_model import (
    ActionSpace,
    Agent,
    AgentConfig,
    AugmentConfig,
    Batch,
    HLGaussCriticConfig,
    ImageTimestepEncoderConfig,
    LossConfig,
    MLPActorConfig,
    ObsSpace,
    PlainImageConfig,
    Spaces,
    TimestepEncoderConfig,
    get_values,
    make_agent,
    published_v3,
    unused_settings,
)
from amago_model.encoders.privileged import PrivilegedEncoder
from amago_model.encoders.timestep import ImageTimestepEncoder, TimestepEncoder
from amago_model.heads.actor import make_distribution
from amago_model.heads.bins import Bins
from amago_model.losses.td_targets import over_subset, subset_indices
from amago_model.presets import DEVIATIONS
from tests.amago_model.cases import CASES, CLONING, MEMORIES, batch_of, make
from tests.amago_model.reference import slow_update
from tests.amago_model.settings import configured, leaves, value_at

FLOAT64 = torch.float64


def both(kind: str = "discrete", **losses: object) -> tuple[Agent, Agent]:
    """Ours and the published one, alike in everything else, statistics standing still."""
    ours, _ = make({"kind": kind, "losses": losses})
    theirs = Agent(published_v3(ours.config), ours.spaces).double()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    theirs.update_lagged_critics()
    return ours.eval(), theirs.eval()


# ------------------------------------------------------------------------------------- the preset


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"losses": {"filter": {"kind": "exp"}}},
        {"critic": {"kind": "hlgauss"}},
        {"actor": {"kind": "residual", "continuous": {"kind": "beta"}}},
        CLONING,
    ],
)
def test_the_preset_switches_back_what_it_lists_and_nothing_else(sections: dict[str, Any]) -> None:
    """All that the chosen kinds have."""
    plain = configured(**sections)
    published = published_v3(plain)
    assert AgentConfig.from_dict(published.to_dict()) == published
    for name in leaves(plain):
        value = value_at(published, name)
        if name in DEVIATIONS:
            assert value == DEVIATIONS[name].published != value_at(plain, name)
        else:
            assert value == value_at(plain, name)


def test_every_deviation_is_a_setting_of_some_kind() -> None:
    assert set(DEVIATIONS) <= leaves(configured(critic={"kind": "hlgauss"})).keys()


@pytest.mark.parametrize("kind", ["discrete", "continuous", "multi_binary"])
def test_its_update_equals_the_slow_loops_with_its_formulas(kind: str) -> None:
    _, theirs = both(kind, filter={"kind": "exp"})
    batch = batch_of(theirs.spaces, [4, 2, 0, 3], 4)
    noise = theirs.draw_noise(*batch.mask.shape)
    expected, _ = slow_update(theirs, batch, noise.double())
    loss, _ = theirs(dataclasses.replace(batch, noise=noise))
    torch.testing.assert_close(loss, expected.loss, rtol=1e-9, atol=1e-10)


def test_every_case_that_it_can_take_is_accepted() -> None:
    for case in CASES.values():
        agent, _ = make(case)
        config = published_v3(agent.config)
        assert make_agent(config, agent.spaces).config == config


# --------------------------------------------------------------------------- filters and critics


def test_the_filter_sees_raw_outputs_or_deviations_of_the_return() -> None:
    """exp(beta A) with A the difference of the critics' raw outputs; with ours, w times that, which
    is the difference of values in units of sigma."""
    ours, theirs = both("continuous", filter={"kind": "exp", "beta": 0.5})
    batch = batch_of(ours.spaces, [5, 5], 5)
    seen = []
    for agent in (ours, theirs):
        torch.manual_seed(1)
        seen.append(get_values(agent, batch))
    mine, published = seen
    torch.testing.assert_close(mine.advantage, ours.critics.popart.w * published.advantage)
    scale = ours.config.losses.reward_multiplier / ours.critics.popart.sigma
    torch.testing.assert_close(mine.advantage, (mine.q - mine.v) * scale)
    for seen_by in (mine, published):
        weight = (0.5 * seen_by.advantage).exp().clamp(max=20.0)
        torch.testing.assert_close(seen_by.weight, weight)


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_advantages_use_current_or_lagged_critics(kind: str) -> None:
    """Published: the critics evaluate the data's actions, copies one step old evaluate the policy's
    actions. So an agent with the old critics computes the same values of the policy."""
    ours, theirs = both(kind, filter={"kind": "exp"})
    batch = batch_of(ours.spaces, [5, 5], 5)

    def ask(agent: Agent):  # type: ignore[no-untyped-def]
        torch.manual_seed(1)
        return get_values(agent, batch)

    before = ask(theirs)
    torch.testing.assert_close(before.v, ask(ours).v)
    with torch.no_grad():  # a step
        for agent in (ours, theirs):
            for p in agent.critics.online.parameters():
                p += 0.1
    now, mine = ask(theirs), ask(ours)
    torch.testing.assert_close(now.v, before.v)
    assert not torch.allclose(now.q, before.q)
    if kind == "continuous":  # else critics of `theirs` see softened actions
        torch.testing.assert_close(now.q, mine.q)
    assert not torch.allclose(mine.v, before.v)
    theirs.update_lagged_critics()
    torch.testing.assert_close(ask(theirs).v, mine.v)


def test_dpg_follows_the_old_critics() -> None:
    """The gradient of an actor with a step's lag is that of one whose critics are the old ones."""
    ours, theirs = both("continuous", filter={"threshold": 1e9})  # nothing is cloned
    with torch.no_grad():
        for p in theirs.critics.online.parameters():
            p += 0.1
    batch = batch_of(ours.spaces, [5, 5], 5)
    batch = dataclasses.replace(batch, noise=ours.draw_noise(2, 5))
    gradients = []
    for agent in (ours, theirs):
        agent(batch)[0].backward()
        gradients.append([p.grad for p in agent.policy.actor.parameters()])
    for mine, lagged in zip(*gradients, strict=True):
        torch.testing.assert_close(lagged, mine, rtol=1e-4, atol=1e-8)  # but for the 1e-5
        assert mine.any()


def test_critics_see_the_action_taken_or_a_softened_one() -> None:
    """Published: .99 of the action taken and .001 of each other one, renormalised."""
    ours, theirs = both()
    batch = batch_of(ours.spaces, [4], 4)
    n = next(k for k in range(4) if batch.action_known[0, k])
    taken = int(batch.action[0, n]) - ours.spaces.action.start
    mine, published = ours.encode(batch).encoded_action[n], theirs.encode(batch).encoded_action[n]
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
        indices = subset_indices(4, 2, noise, replacement=replacement)
        got = over_subset(q, indices, minimum=True)
        frequency = torch.bincount(got.long(), minlength=4) / n
        torch.testing.assert_close(frequency, torch.tensor(share), atol=0.01, rtol=0)
    ours, theirs = both()
    assert not ours.config.critic.subset_replacement and theirs.config.critic.subset_replacement


@pytest.mark.parametrize("sigma", [0.5, 0.75, 2.0])
def test_labels_keep_what_lies_outside_at_the_edge_or_lose_it(sigma: float) -> None:
    """Both are the Gaussian's mass in each bin, but for what lies beyond the outermost bins: ours
    is in these; published, the rest is divided by its sum, unless that is below 1e-8."""
    config = HLGaussCriticConfig(
        n_bins=9, min_return=-4.0, max_return=4.0, symlog=False, sigma=sigma
    )
    ours = Bins(config).double()
    theirs = Bins(config.replace(renormalize=True)).double()
    for y in (-20.0, -4.6, -4.0, 0.3, 3.9, 5.0, 40.0):
        below = [0.5 * (1 + math.erf((e / 2 - y) / sigma / 2**0.5)) for e in range(-9, 10, 2)]
        mass = [b - a for a, b in zip(below, below[1:], strict=False)]
        published = [m / max(sum(mass), 1e-8) for m in mass]
        kept = [mass[0] + below[0], *mass[1:-1], mass[-1] + 1 - below[-1]]
        at = torch.tensor(y, dtype=FLOAT64)
        for bins, expected in ((theirs, published), (ours, kept)):
            wanted = torch.tensor(expected, dtype=FLOAT64)
            torch.testing.assert_close(bins.label(at), wanted, rtol=1e-6, atol=1e-9)
    assert float(theirs.label(torch.tensor(40.0).double()).sum()) < 1e-9


# --------------------------------------------------------------------------------------- actions


@pytest.mark.parametrize("published", [True, False])
def test_unlikely_actions_have_a_gradient_or_none(published: bool) -> None:
    """Published: softmax, torch's own clamp, and a sum that is a constant."""
    config = MLPActorConfig(prob_low=0.1, prob_high=0.6, prob_low_gradient=not published)
    logits = torch.tensor([[0.0, 3.0, 1.0, -4.0]], dtype=FLOAT64, requires_grad=True)
    unlikely = torch.tensor([3])
    space = ActionSpace(kind="discrete", n=4)
    got = make_distribution(config, space, logits, None)
    p = logits.softmax(-1).clamp(0.1, 0.6)
    p = p / p.detach().sum(-1, keepdim=True)
    torch.testing.assert_close(got.probs, p)
    (gradient,) = torch.autograd.grad(got.log_prob(unlikely).sum(), logits, retain_graph=True)
    (clamped,) = torch.autograd.grad(p[0, 3].log(), logits)
    assert not clamped.any()
    assert torch.equal(gradient, clamped) == published
    assert published or gradient[0, 3] > 0 > gradient[0, 1]


# ------------------------------------------------------------------------------------------ rows


def test_categories_and_bytes_are_numbers_or_one_hots_and_shares() -> None:
    spaces = Spaces(
        observations={
            "a": ObsSpace(shape=(2,), dtype="int64", n=4),
            "b": ObsSpace(shape=(2,), dtype="uint8"),
            "c": ObsSpace(shape=(), dtype="int64", n=500),
        },
        action=ActionSpace(kind="discrete", n=3),
    )
    obs = {
        "a": torch.tensor([[[3, 1]]]),
        "b": torch.tensor([[[255, 51]]], dtype=torch.uint8),
        "c": torch.tensor([[400]]),
    }
    ours = TimestepEncoder(TimestepEncoderConfig(), spaces)
    theirs = TimestepEncoder(TimestepEncoderConfig(raw_numbers=True), spaces)
    previous, valid = torch.zeros(1, 1, 4), torch.ones(1, 1, dtype=torch.bool)
    x = theirs.plain(obs, previous, valid)
    assert x[0, 0, :5].tolist() == [3.0, 1.0, 255.0, 51.0, 400.0]
    assert not len(theirs.observations.encoders) and theirs.input_norm.width == 5 + 4
    assert theirs.describe() == ["a: 2 numbers", "b: 2 numbers", "c: 1 number"]
    x = ours.plain(obs, previous, valid)
    assert x[0, 0, :10].tolist() == [0, 0, 0, 1, 0, 1, 0, 0, 1.0, pytest.approx(0.2)]
    assert [part.key for part in ours.observations.encoders] == ["c"]


@pytest.mark.parametrize("raw", [True, False])
def test_so_are_those_that_only_critics_see(raw: bool) -> None:
    spaces = Spaces(
        observations={
            "a": ObsSpace(shape=(), dtype="int64", n=4, role="critic"),
            "b": ObsSpace(shape=(1,), dtype="float32"),
        },
        action=ActionSpace(kind="discrete", n=3),
    )
    config = TimestepEncoderConfig(raw_numbers=raw)
    seen = PrivilegedEncoder(config, spaces).eval()
    assert seen.width == (1 if raw else 4)
    x = seen({"a": torch.tensor([[2]])}, torch.ones(1, 1, dtype=torch.bool))[0, 0]
    expected = [2.0] if raw else [0.0, 0.0, 1.0, 0.0]
    torch.testing.assert_close(x, torch.tensor(expected), rtol=1e-4, atol=0)


EYE = {"eye": ObsSpace(shape=(84, 84, 4), dtype="uint8")}
DISCRETE = ActionSpace(kind="discrete", n=6)


def image_agent(**rows: Any) -> AgentConfig:
    return published_v3(AgentConfig(timestep_encoder=TimestepEncoderConfig(**rows)))


def test_one_image_has_the_published_encoder_and_no_parameter_more() -> None:
    """Convolutions, a layer to 256, one of 12 for the previous step, one to 256, and a norm."""
    config = image_agent().timestep_encoder
    assert config.kind == "image"
    made = ImageTimestepEncoder(config, Spaces(observations=EYE, action=DISCRETE))
    image = 77_984 + 3136 * 256 + 256  # test_images.py
    expected = image + (1 + 6) * 12 + 12 + (256 + 12) * 256 + 256 + 2 * 256
    assert sum(p.numel() for p in made.parameters()) == expected
    assert not list(made.buffers()), "nothing is whitened"


def test_its_rows_are_the_published_formula() -> None:
    """By plain functions: x / 128 - 1, symlog of the previous step, one activation over both."""
    spaces = Spaces(observations=EYE, action=DISCRETE)
    rows = ImageTimestepEncoder(ImageTimestepEncoderConfig(), spaces)
    pixels = torch.randint(0, 256, (2, 3, 84, 84, 4), dtype=torch.uint8)
    previous = torch.randn(2, 3, 7) * 5
    x = (pixels.float() / 128 - 1).flatten(0, 1).permute(0, 3, 1, 2)
    convolutions = [
        m for m in rows.observations.encoders[0].convolutions if isinstance(m, torch.nn.Conv2d)
    ]
    for convolution, stride in zip(convolutions, (4, 2, 1), strict=True):
        x = F.leaky_relu(F.conv2d(x, convolution.weight, convolution.bias, stride))
    seen = linear(rows.observations.encoders[0].linear, x.flatten(1))
    before = previous.flatten(0, 1)
    done = linear(rows.previous[0], before.sign() * (1 + before.abs()).log())
    joined = F.leaky_relu(torch.cat((done, seen), dim=-1))
    out = F.layer_norm(linear(rows.mlp[0], joined), (256,), *rows.out_norm.parameters())
    valid = torch.ones(2, 3, dtype=torch.bool)
    got = rows({"eye": pixels}, previous, valid)
    torch.testing.assert_close(got.flatten(0, 1), out, rtol=1e-4, atol=1e-5)


def test_its_rows_one_by_one_and_packed_are_those_of_the_window() -> None:
    """As acting sees them, and as a batch with padding does; shifts happen in training alone."""
    rows = {
        "images": PlainImageConfig(d_output=8, augment=AugmentConfig(share=0.75)),
        "d_output": 8,
    }
    small = {"eye": ObsSpace(shape=(36, 36, 3), dtype="uint8")}
    config = image_agent(**rows).replace(
        trajectory_encoder=MEMORIES["gru"], losses=LossConfig(gamma=0.9)
    )
    assert config.timestep_encoder.kind == "image"
    agent = make_agent(config, Spaces(observations=small, action=DISCRETE))
    b, t = 3, 4
    mask = torch.arange(t) < torch.tensor([4, 1, 2])[:, None]
    batch = Batch(
        obs={"eye": torch.randint(0, 256, (b, t + 1, 36, 36, 3), dtype=torch.uint8)},
        prev_action=torch.randint(0, 6, (b, t + 1)),
        prev_reward=torch.randn(b, t + 1),
        time_idx=torch.arange(t + 1).expand(b, -1),
        terminated=torch.zeros_like(mask),
        truncated=torch.zeros_like(mask),
        next_obs_valid=mask,
        mask=mask,
        action_known=mask,
    )
    agent(batch)[0].backward()
    for name, p in agent.policy.timestep_encoder.named_parameters():
        assert p.grad is not None and p.grad.any(), name
    policy = agent.eval().policy
    packing = policy.choose_packing(mask)
    assert packing is not None
    inputs = (batch.prev_action, batch.prev_reward, batch.time_idx)
    with torch.no_grad():
        whole = policy.encode_timesteps(batch.obs, *inputs, valid=batch.timestep_mask)
        packed = policy.encode_timesteps(
            batch.obs, *inputs, valid=batch.timestep_mask, packing=packing
        )
        exists = batch.timestep_mask
        unpacked = packing.unpack(packed)[exists]
        torch.testing.assert_close(unpacked, whole[exists], rtol=1e-4, atol=1e-5)
        for now in (slice(0, 1), slice(2, 3)):
            row = policy.encode_timesteps(
                {"eye": batch.obs["eye"][:, now]}, *(x[:, now] for x in inputs)
            )
            torch.testing.assert_close(row[:1], whole[:1, now], rtol=1e-4, atol=1e-5)


def linear(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight.T + layer.bias


def test_it_can_hide_the_reward_or_all_of_the_previous_step() -> None:
    spaces = Spaces(observations=EYE, action=DISCRETE)
    pixels = torch.zeros(1, 1, 84, 84, 4, dtype=torch.uint8)
    valid = torch.ones(1, 1, dtype=torch.bool)
    for hidden, tells in (({"hide_previous": True}, []), ({"hide_reward": True}, [3])):
        rows = ImageTimestepEncoder(ImageTimestepEncoderConfig(**hidden), spaces)
        plain = rows({"eye": pixels}, torch.zeros(1, 1, 7), valid)
        for place in (0, 3):
            previous = torch.zeros(1, 1, 7)
            previous[..., place] = 1.0
            assert torch.equal(rows({"eye": pixels}, previous, valid), plain) == (
                place not in tells
            )


@pytest.mark.parametrize(
    ("obs", "keys", "image"),
    [
        (EYE, (), True),
        (EYE | {"speed": ObsSpace(shape=(1,), dtype="float32")}, (), False),
        (EYE | {"speed": ObsSpace(shape=(1,), dtype="float32")}, ("eye",), True),
        ({"speed": ObsSpace(shape=(1,), dtype="float32")}, (), False),
    ],
)
def test_anything_but_one_image_has_the_encoder_of_any_observations(
    obs: dict[str, ObsSpace], keys: tuple[str, ...], image: bool
) -> None:
    """The keys may choose the image; where they do not, the trainer warns."""
    spaces, config = Spaces(observations=obs, action=DISCRETE), image_agent(keys=keys)
    made = make_agent(config, spaces).policy.timestep_encoder
    assert isinstance(made, ImageTimestepEncoder) == image
    assert ("timestep_encoder.kind='image'" in unused_settings(config, spaces)) != image
