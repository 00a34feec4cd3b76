"""Critics alone see images, tokens and goals through networks of their own, not flattened."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from amago_model import (
    ActionSpace,
    Agent,
    AgentConfig,
    AugmentConfig,
    Batch,
    ConfigError,
    GoalConfig,
    ObsSpace,
    PlainImageConfig,
    Spaces,
    TimestepEncoderConfig,
    TokenConfig,
    get_values,
    load_policy,
    save_policy,
)
from amago_model.data.packing import make_packing
from amago_model.encoders.images import ImageEncoder
from amago_model.encoders.tokens_and_goals import GoalEncoder, TokenEncoder
from amago_model.running_statistics import freeze_statistics
from amago_model.runtime.micro_batches import update_statistics

SEEN = {"observation": ObsSpace(shape=(3,), dtype="float32")}
HIDDEN = {
    "camera": ObsSpace(shape=(6, 6, 3), dtype="uint8", role="critic"),
    "goals": ObsSpace(shape=(2, 2), dtype="float32", role="critic"),
    "map": ObsSpace(shape=(7, 7), dtype="float32", role="critic"),
    "truth": ObsSpace(shape=(2,), dtype="float32", role="critic"),
    "word": ObsSpace(shape=(), dtype="int64", n=500, role="critic"),
}
SPACES = Spaces(
    observations=SEEN | HIDDEN,
    action=ActionSpace(kind="continuous", shape=(2,), low=(-2.0, 0.0), high=(2.0, 1.0)),
)
ENCODER = TimestepEncoderConfig(
    n_layers=1,
    d_hidden=8,
    d_output=8,
    images=PlainImageConfig(keys=("map",), d_output=4),
    tokens=TokenConfig(d_output=3),
    goals=GoalConfig(keys=("goals",), d_output=5),
)


@pytest.fixture
def agent(make_config) -> Agent:
    torch.manual_seed(0)
    return Agent(make_config(encoder=ENCODER), SPACES)


def with_hidden(batch: Batch, garbage: float = 0.0) -> Batch:
    """The same batch with other privileged observations, garbage where none was recorded."""
    generator = torch.Generator().manual_seed(1)
    obs = dict(batch.obs)
    for key, space in HIDDEN.items():
        shape = (*batch.timestep_mask.shape, *space.shape)
        valid = batch.timestep_mask.reshape(*batch.timestep_mask.shape, *[1] * len(space.shape))
        if space.dtype == "float32":
            x = torch.randn(shape, generator=generator)
            obs[key] = torch.where(valid, x, garbage)
        else:
            x = torch.randint(0, space.n or 256, shape, generator=generator)
            obs[key] = torch.where(valid, x, 99).to(getattr(torch, space.dtype))
    return dataclasses.replace(batch, obs=obs)


def test_each_kind_has_its_network_and_plain_numbers_are_whitened(agent) -> None:
    kinds = {
        part.key: type(part) for part in agent.critics.privileged_encoder.observations.encoders
    }
    images = dict.fromkeys(("camera", "map"), ImageEncoder)
    assert kinds == images | {"goals": GoalEncoder, "word": TokenEncoder}
    assert agent.critics.privileged_encoder.width == 2 + 4 + 4 + 3 + 5
    assert agent.critics.privileged_encoder.norm.moments.mean.shape == (2,)
    assert not agent.policy.timestep_encoder.observations.n_images


@pytest.mark.parametrize("key", HIDDEN)
def test_critics_see_it_learn_from_it_and_acting_needs_none_of_it(
    agent, make_batch, key: str
) -> None:
    batch = make_batch(SPACES)
    other = dataclasses.replace(batch, obs=batch.obs | {key: with_hidden(batch).obs[key]})
    loss, _ = agent(batch)
    loss.backward()
    for part in agent.critics.privileged_encoder.observations.encoders:
        assert all(bool((p.grad != 0).any()) for p in part.parameters() if p.ndim > 1), part.key
    agent.eval()
    before, after = get_values(agent, batch), get_values(agent, other)
    assert not torch.allclose(before.q[batch.mask], after.q[batch.mask])
    torch.testing.assert_close(agent.encode(batch).state_t, agent.encode(other).state_t)
    policy, n = load_policy(save_policy(agent)), 3
    nothing = torch.zeros(n, 2), torch.zeros(n), torch.zeros(n, dtype=torch.int64)
    policy.act({"observation": torch.randn(n, 3)}, *nothing, policy.initial_hidden(n))
    assert len([*policy.parameters()]) == len([*agent.policy.parameters()])


def test_rows_that_were_not_recorded_are_not_read(agent, make_batch) -> None:
    results = []
    for garbage in (0.0, torch.nan):
        torch.manual_seed(2)
        twin = copy.deepcopy(agent)
        loss, _ = twin(with_hidden(make_batch(SPACES, lengths=(3, 2, 0)), garbage))
        loss.backward()
        results.append([loss, *(p.grad for p in twin.critics.privileged_encoder.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_rows_of_padding_are_not_computed(agent, make_batch) -> None:
    batch = with_hidden(make_batch(SPACES, lengths=(3, 2, 0)))
    packing = make_packing(batch.mask)
    assert packing is not None
    whole = agent.eval().critics.privileged_encoder(batch.obs, batch.timestep_mask)
    rows: list[int] = []
    for embedder in agent.critics.privileged_encoder.observations.encoders:
        embedder.register_forward_pre_hook(lambda _, x: rows.append(x[0].shape[:2].numel()))
    packed = agent.critics.privileged_encoder(batch.obs, batch.timestep_mask, packing)
    torch.testing.assert_close(packed, packing.pack(whole))
    rows.clear()
    agent(batch)
    assert rows == [7, 7, 7, 7]


def test_parts_make_the_update_of_the_whole(agent, make_batch) -> None:
    batch = with_hidden(make_batch(SPACES, lengths=(5, 1, 0, 3)))
    batch = dataclasses.replace(batch, noise=agent.draw_noise(*batch.mask.shape))
    counts = {k: float(v) for k, v in agent.loss_counts(batch).items()}
    twin = copy.deepcopy(agent)
    agent(batch)[0].backward()
    parts = [batch.windows(0, 1), batch.windows(1, 4)]
    update_statistics(twin, batch)
    with freeze_statistics(twin):
        for part in parts:
            twin(part, counts=counts)[0].backward()
    for (name, one), other in zip(agent.named_parameters(), twin.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_images_are_shifted_in_training_alone(agent, make_batch) -> None:
    """By the same setting as those of the policy."""
    images = ENCODER.images.replace(augment=AugmentConfig(share=1.0, shift=2))
    encoder = ENCODER.replace(images=images)
    config = AgentConfig(**{**vars(agent.config), "timestep_encoder": encoder})
    shifted, batch = Agent(config, SPACES), with_hidden(make_batch(SPACES))
    shifted.load_state_dict(agent.state_dict())
    features = []
    for mode in (True, True, False, False):
        shifted.train(mode)
        with freeze_statistics(shifted):
            features.append(shifted.critics.privileged_encoder(batch.obs, batch.timestep_mask))
    assert not torch.equal(features[0], features[1]) and torch.equal(features[2], features[3])


def test_settings_name_privileged_observations_or_are_refused() -> None:
    config = AgentConfig(timestep_encoder=ENCODER.replace(vector_keys=("camera",)))
    kinds = [
        part.key for part in Agent(config, SPACES).critics.privileged_encoder.observations.encoders
    ]
    assert sorted(kinds) == ["goals", "map", "word"]
    for wrong, says in (
        ({"hide_keys": ("truth",)}, "hide_keys: 'truth'"),
        ({"keys": ("truth",)}, "keys: 'truth'"),
        ({"vector_keys": ("nothing",)}, "vector_keys: 'nothing'"),
    ):
        encoder = ENCODER.replace(**wrong)
        with pytest.raises(ConfigError, match=says):
            Agent(AgentConfig(timestep_encoder=encoder), SPACES)
