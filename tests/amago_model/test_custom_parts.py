"""Encoders, heads, filters and agents of your own: registered, saved by name, and asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from amago_model import (
    Agent,
    AgentConfig,
    ConfigError,
    CustomConfig,
    LossConfig,
    PolicyFileError,
    UnregisteredError,
    load_policy,
    make_agent,
    register,
    registry,
    save_policy,
)
from amago_model.actor import Actor
from amago_model.critic import CriticEnsemble
from amago_model.timestep_encoders import TimestepEncoder
from amago_model.trajectory_encoders import IdentityTrajectoryEncoder


class Scaled(nn.Module):
    """A timestep encoder around the built-in one."""

    def __init__(self, config, spaces) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.inner = TimestepEncoder(config.timestep_encoder, spaces)
        self.scale = nn.Parameter(torch.ones(()))
        self.d_output = self.inner.d_output

    def forward(self, obs, previous, valid):  # type: ignore[no-untyped-def]
        return self.scale * self.inner(obs, previous, valid)


class MyActor(Actor):
    pass


class MyCritic(CriticEnsemble):
    pass


class Lazy(Agent):
    """Climbs nothing, though its config says so: another sum of the same losses."""

    def forward(self, batch, detailed=True, counts=None):  # type: ignore[no-untyped-def]
        loss, metrics = super().forward(batch, detailed, counts)
        return loss - self.config.losses.online_weight * metrics["loss/climb"], metrics


def soft(advantage: torch.Tensor) -> torch.Tensor:
    return advantage.sigmoid()


CUSTOM = CustomConfig(
    timestep_encoder="scaled",
    trajectory_encoder="mine",
    actor="mine",
    critic="mine",
    filter="soft",
    agent="lazy",
)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    register("timestep_encoder", "scaled")(Scaled)

    @register("trajectory_encoder", "mine")
    def memory(config, d_input):  # type: ignore[no-untyped-def]
        del config
        return IdentityTrajectoryEncoder(d_input)

    register("actor", "mine")(MyActor)
    register("critic", "mine")(MyCritic)
    register("filter", "soft")(soft)
    register("agent", "lazy")(Lazy)
    yield


@pytest.mark.usefixtures("mine")
def test_parts_of_one_s_own_take_their_places_and_learn(
    make_spaces, make_config, make_batch
) -> None:
    config = dataclasses.replace(make_config(), custom=CUSTOM)
    agent = make_agent(AgentConfig.from_dict(config.to_dict()), make_spaces("continuous"))
    assert isinstance(agent, Lazy) and isinstance(agent.critic, MyCritic)
    assert isinstance(agent.policy.actor, MyActor)
    batch = make_batch(agent.spaces)
    loss, _ = agent(batch)
    loss.backward()
    assert agent.policy.timestep_encoder.scale.grad is not None
    values = agent.get_values(batch)
    mask, expected = values.mask, values.advantage.sigmoid()
    torch.testing.assert_close(values.weight[mask], expected[mask])


def test_a_policy_file_names_the_code_that_it_needs(
    make_spaces, make_config, mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it, the file loads; without, the error says which part and which flag."""
    del mine
    agent = make_agent(dataclasses.replace(make_config(), custom=CUSTOM), make_spaces())
    data = save_policy(agent)
    assert isinstance(load_policy(data).actor, MyActor)
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    with pytest.raises(PolicyFileError, match=r"timestep_encoder: 'scaled'.*--plugin"):
        load_policy(data)


@pytest.mark.usefixtures("mine")
def test_unknown_names_are_refused_with_the_nearest(make_spaces, make_config) -> None:
    config = dataclasses.replace(make_config(), custom=CustomConfig(agent="lasy"))
    with pytest.raises(UnregisteredError, match="'lasy'.*'lazy'"):
        make_agent(config, make_spaces())
    with pytest.raises(ConfigError, match="kind"):
        register("optimizer", "x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="another name"):
        register("actor", "mine")(MyCritic)


@pytest.mark.parametrize(
    "losses",
    [
        LossConfig(fake_filter=True, online_weight=0.0),
        LossConfig(filter="exp"),
        LossConfig(filter_threshold=0.5),
        LossConfig(offline_weight=0.0),
    ],
)
def test_a_filter_that_would_not_be_used_is_refused(losses: LossConfig) -> None:
    with pytest.raises(ConfigError, match=r"CustomConfig.filter"):
        AgentConfig(losses=losses, custom=CustomConfig(filter="soft"))
