"""What a row shows beside observations, and what of it is whitened by which statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from amago_model import (
    ActionSpace,
    Agent,
    ConfigError,
    GRUConfig,
    InputNormConfig,
    ObsSpace,
    Spaces,
    TimestepEncoderConfig,
    load_policy,
    save_policy,
)
from amago_model.acting import ActingPolicy
from amago_model.data.batch import previous_features
from amago_model.encoders.observation_features import ObservationFeatures
from amago_model.encoders.timestep import TimestepEncoder

SMALL = TimestepEncoderConfig(n_layers=1, d_hidden=8, d_output=6)
SPACES = Spaces(
    observations={
        "observation": ObsSpace(shape=(3,), dtype="float32"),
        "secret": ObsSpace(shape=(2,), dtype="float32", role="critic"),
    },
    action=ActionSpace(kind="continuous", shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0)),
)
GRU = GRUConfig(d_hidden=8, d_output=8, n_layers=1)


def _into_the_mlp(encoder: TimestepEncoder, *inputs: object) -> Tensor:
    seen: list[Tensor] = []
    hook = encoder.mlp.register_forward_hook(lambda *call: seen.append(call[1][0]))
    encoder(*inputs)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("previous", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_only_what_shall_be_whitened_is(previous: bool, reset: bool) -> None:
    """Observations always; the previous action and reward if wanted; the reset never."""
    encoder = TimestepEncoder(
        SMALL.replace(show_reset=reset, input_norm=InputNormConfig(previous=previous)), SPACES
    ).train()
    obs, valid = {"observation": 5.0 + torch.randn(4, 9, 3)}, torch.ones(4, 9, dtype=torch.bool)
    valid[1, 4:] = False
    last = torch.cat((100.0 + torch.randn(4, 9, 1), torch.rand(4, 9, 2)), dim=-1)
    if reset:
        last = torch.cat((last, (torch.arange(9) == 0).float().expand(4, 9)[..., None]), dim=-1)
    x = _into_the_mlp(encoder, obs, last, valid)
    width = 6 if previous else 3
    assert encoder.input_norm.moments.mean.shape == (width,)
    plain = torch.cat((obs["observation"], last), dim=-1)
    torch.testing.assert_close(x[..., width:][valid], plain[..., width:][valid])
    assert x[..., width:][~valid].eq(0).all()
    mean, variance = (plain[valid][:, :width].mean(0), plain[valid][:, :width].var(0, correction=0))
    # The first update goes half of the way from mean 0 and variance 1.
    torch.testing.assert_close(encoder.input_norm.moments.mean, mean / 2, rtol=1e-3, atol=1e-3)
    expected = (1 + variance + mean.square() / 2) / 2
    torch.testing.assert_close(encoder.input_norm.moments.variance, expected, rtol=1e-3, atol=1e-3)


def test_the_reset_is_1_in_an_episodes_first_row_alone() -> None:
    """Whatever came before, and also where the previous step is hidden."""
    time_idx = torch.tensor([[0, 1, 2], [7, 8, 9]])
    action, reward = torch.zeros(2, 3, 2), torch.zeros(2, 3)
    shown = previous_features(SPACES, action, reward, time_idx, show_reset=True)
    assert shown[..., -1].tolist() == [[1, 0, 0], [0, 0, 0]]
    plain = previous_features(SPACES, action, reward, time_idx)
    assert torch.equal(shown[..., :-1], plain)
    for hidden in ({"hide_previous": True}, {"hide_reward": True}):
        encoder = TimestepEncoder(SMALL.replace(show_reset=True, **hidden), SPACES).eval()
        x = encoder.plain({"observation": torch.zeros(2, 3, 3)}, shown + 1.0, None)
        assert torch.equal(x[..., -1], shown[..., -1] + 1.0)
        assert x[..., 3].eq(0).all() and x[..., 4:6].eq(0).all() == ("hide_previous" in hidden)


def test_differences_are_to_the_timestep_before_and_whitened_by_themselves() -> None:
    """However small they are. 0 at a start, beside padding, and where a window begins."""
    torch.manual_seed(0)
    encoder = TimestepEncoder(SMALL.replace(differences=True), SPACES).train()
    assert TimestepEncoder(SMALL, SPACES).difference_norm is None
    speed = 1e-4 * torch.randn(4, 9, 3)
    obs, valid = {"observation": 5.0 + speed.cumsum(1)}, torch.ones(4, 9, dtype=torch.bool)
    valid[1, 4:] = False
    time_idx = torch.arange(9).expand(4, 9) + 3
    time_idx[2] = torch.tensor([7, 8, 9, 0, 1, 2, 3, 4, 5])
    found = encoder.differences(obs, time_idx, valid)
    shown = valid.clone()
    shown[:, 0] = shown[2, 3] = False
    torch.testing.assert_close(found[shown], speed[shown], atol=2e-6, rtol=0.0)
    assert found[~shown].eq(0).all()
    before = obs["observation"][:, 0] - 1.0
    first = encoder.differences(obs, time_idx, valid, before)[:, 0]
    torch.testing.assert_close(first, torch.ones(4, 3))
    for _ in range(50):
        x = _into_the_mlp(encoder, obs, torch.zeros(4, 9, 3), valid, None, found)
    assert x[..., 6:][valid].std() == pytest.approx(1.0, abs=0.1)
    hidden = SMALL.replace(differences=True, hide_keys=("observation",))
    assert TimestepEncoder(hidden, SPACES).differences(obs, time_idx, None).eq(0).all()


def test_numbers_are_compressed_but_neither_categories_nor_bytes() -> None:
    spaces = Spaces(
        observations={
            "number": ObsSpace(shape=(2,), dtype="float32"),
            "kind": ObsSpace(shape=(), dtype="int64", n=3),
            "pixel": ObsSpace(shape=(2,), dtype="uint8"),
        },
        action=SPACES.action,
    )
    obs = {
        "number": torch.tensor([[[math.e - 1.0, 1.0 - math.e**14]]]),
        "kind": torch.tensor([[2]]),
        "pixel": torch.tensor([[[0, 255]]], dtype=torch.uint8),
    }
    features = ObservationFeatures(SMALL.replace(symlog=True), spaces, "policy")
    found = dict(zip(features.vector_keys, features.vectors(obs), strict=True))
    torch.testing.assert_close(found["number"], torch.tensor([[[1.0, -14.0]]]))
    assert found["kind"].tolist() == [[[0.0, 0.0, 1.0]]]
    assert found["pixel"].tolist() == [[[0.0, 1.0]]]


def test_categories_have_no_differences() -> None:
    spaces = Spaces(
        observations={
            "cell": ObsSpace(shape=(), dtype="int64", n=5),
            "speed": ObsSpace(shape=(2,), dtype="float32"),
        },
        action=SPACES.action,
    )
    assert TimestepEncoder(SMALL.replace(differences=True), spaces).d_differences == 2
    only = Spaces(observations={"cell": spaces.observations["cell"]}, action=SPACES.action)
    assert TimestepEncoder(SMALL.replace(differences=True), only).difference_norm is None


@torch.no_grad()
@pytest.mark.parametrize(
    "inputs",
    [
        {"show_reset": True, "input_norm": InputNormConfig(previous=False)},
        {"differences": True},
    ],
    ids=["resets", "differences"],
)
def test_acting_shows_what_windows_show(make_config, inputs) -> None:  # type: ignore[no-untyped-def]
    """Two environments with episodes of other lengths, against one window for each episode."""
    config = make_config(GRU, encoder=SMALL.replace(**inputs))
    policy = ActingPolicy(config, SPACES).eval()
    episodes = [[3, 4], [5, 2]]
    seen: list[Tensor] = []
    hook = policy.actor.mlp.register_forward_hook(lambda *call: seen.append(call[2]))
    obs, action = torch.randn(2, 7, 3), torch.rand(2, 7, 2) * 2 - 1
    reward = torch.randn(2, 7)
    times = torch.tensor([[*range(n), *range(m)] for n, m in episodes])
    hidden = policy.initial_hidden(2)
    for t in range(7):
        if t:
            hidden = policy.reset_hidden(hidden, times[:, t] == 0)
        row = ({"observation": obs[:, t]}, action[:, t], reward[:, t], times[:, t])
        _, hidden = policy.act(*row, hidden)
    hook.remove()
    acted = torch.stack(seen, 1)
    for env, lengths in enumerate(episodes):
        for part in (slice(0, lengths[0]), slice(lengths[0], 7)):
            window = (x[env : env + 1, part] for x in (obs, action, reward, times))
            observed, *rest = window
            rows = policy.encode_timesteps({"observation": observed}, *rest)
            learned = policy.actor.mlp(policy.encode_trajectory(rows, rest[-1]))[0]
            torch.testing.assert_close(acted[env, part], learned, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("differences", [False, True])
def test_padding_changes_nothing_and_a_policy_file_brings_it_back(
    make_config,  # type: ignore[no-untyped-def]
    make_batch,  # type: ignore[no-untyped-def]
    differences: bool,
) -> None:
    """Padding has time 0, but is no beginning."""
    inputs = {"show_reset": True, "input_norm": {"beta": 0.3, "previous": False}}
    inputs |= {"differences": differences}
    config = make_config(GRU, encoder=SMALL.replace(**inputs))
    batch, seen = make_batch(SPACES, first=0), []
    for given in (batch, batch.padded(9)):
        torch.manual_seed(0)
        agent = Agent(config, SPACES).train()
        torch.manual_seed(1)
        loss, _ = agent(given)
        loss.backward()
        grads = [p.grad for p in agent.trainable_parameters()]
        moments = agent.policy.timestep_encoder.input_norm.moments
        seen.append([loss.detach(), *grads, moments.mean, moments.variance])
    torch.testing.assert_close(*seen)
    policy = load_policy(save_policy(agent))
    assert policy.config == config
    assert policy.timestep_encoder.input_norm.moments.beta == 0.3


def test_the_statistics_start_and_move_as_told(make_config) -> None:  # type: ignore[no-untyped-def]
    """Those of what the actor sees, and those of what critics alone do."""
    for beta, nu in ((1e-4, 1.0), (0.3, 9.0)):
        encoder = SMALL.replace(input_norm=InputNormConfig(beta=beta, init_nu=nu))
        agent = Agent(make_config(encoder=encoder), SPACES).train()
        for norm in (
            agent.policy.timestep_encoder.input_norm,
            agent.critics.privileged_encoder.norm,
        ):
            assert norm.moments.variance.eq(nu).all()
            for _ in range(200):
                x = torch.full((1, norm.width), 2.0)
                norm.moments.apply_batch(x, torch.ones(1, dtype=torch.bool))
            mean = float(norm.moments.mean[0])
            assert mean == pytest.approx(2.0 if beta == 0.3 else 2.0 * 200 / 201, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.0}, "beta: expected greater than 0, got 0.0"),
        ({"init_nu": -1.0}, "init_nu: expected greater than or equal to 0, got -1.0"),
    ],
)
def test_statistics_that_could_not_move_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InputNormConfig(**changes)


def test_nothing_left_to_whiten_is_refused() -> None:
    spaces = SPACES.replace(observations={"image": ObsSpace(shape=(8, 8, 3), dtype="uint8")})
    TimestepEncoder(SMALL, spaces)
    with pytest.raises(ConfigError, match="input_norm.previous: .*nothing to whiten"):
        TimestepEncoder(SMALL.replace(input_norm=InputNormConfig(previous=False)), spaces)
