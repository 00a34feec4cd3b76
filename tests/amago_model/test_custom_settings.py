"""Settings of parts of one's own: told, converted, saved with the policy, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from amago_model import (
    ActionSpace,
    Agent,
    AgentConfig,
    ConfigError,
    CustomConfig,
    PolicyFileError,
    Spaces,
    get_values,
    load_policy,
    make_agent,
    register,
    registry,
    save_policy,
)
from amago_model.config import ActorConfig
from amago_model.encoders.timestep import TimestepEncoder
from amago_model.encoders.trajectory import IdentityTrajectoryEncoder
from amago_model.heads.actor import Actor
from amago_model.heads.critic import CriticEnsemble


def soft(advantage: Tensor, *, temperature: float = 1.0) -> Tensor:
    return (advantage / temperature).sigmoid()


def small(agent: Agent, seen, *, scale: float = 1.0) -> Tensor:  # type: ignore[no-untyped-def]
    del agent
    return scale * seen.mean(seen.transitions.state_t.square(), "dpg")


class Rows(TimestepEncoder):
    def __init__(self, config: AgentConfig, spaces: Spaces, *, twice: bool = False) -> None:
        super().__init__(config.timestep_encoder, spaces)
        self.twice = twice


class Tall(Actor):
    """An actor that counts, and has a word and a width of its own."""

    def __init__(
        self,
        config: ActorConfig,
        action: ActionSpace,
        *,
        d_state: int,
        n_gammas: int,
        width: int = 4,
        word: str = "none",
        table: tuple[int, ...] = (),
    ) -> None:
        super().__init__(config, action, d_state=d_state, n_gammas=n_gammas)
        del table
        self.word, self.extra = word, torch.nn.Linear(width, width)


class Curious(Agent):
    def __init__(self, config: AgentConfig, spaces: Spaces, *, curiosity: float = 0.0) -> None:
        super().__init__(config, spaces)
        self.curiosity = curiosity


SETTINGS = (
    "filter.temperature=2",
    "losses.small.scale=0.5",
    "timestep_encoder.twice=True",
    "actor.width=7",
    "actor.word=a=b.c",
    "agent.curiosity=1e-3",
)
CUSTOM = CustomConfig(
    timestep_encoder="mine",
    actor="mine",
    filter="mine",
    losses=("small", "large"),
    agent="mine",
    settings=SETTINGS,
)


@pytest.fixture(autouse=True)
def _mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    register("filter", "mine")(soft)
    register("timestep_encoder", "mine")(Rows)
    register("actor", "mine")(Tall)
    register("agent", "mine")(Curious)
    register("critic", "mine")(CriticEnsemble)
    register("loss", "small")(small)
    register("loss", "large")(small)

    @register("trajectory_encoder", "mine")
    def memory(config: AgentConfig, d_input: int, more: int = 0) -> IdentityTrajectoryEncoder:
        del config, more
        return IdentityTrajectoryEncoder(d_input)

    yield


def test_settings_reach_the_parts_they_name(make_spaces, make_config, make_batch) -> None:  # type: ignore[no-untyped-def]
    """Each in the type of its default; of two losses by the same function, one alone."""
    config = AgentConfig.from_dict(make_config().replace(custom=CUSTOM).to_dict())
    torch.manual_seed(0)
    agent = make_agent(config, make_spaces("continuous"))
    assert isinstance(agent, Curious) and agent.curiosity == 1e-3
    assert agent.policy.timestep_encoder.twice is True
    assert agent.policy.actor.extra.weight.shape == (7, 7)
    assert agent.policy.actor.word == "a=b.c"
    batch = make_batch(agent.spaces)
    loss, metrics = agent(batch)
    loss.backward()
    torch.testing.assert_close(metrics["loss/small"], 0.5 * metrics["loss/large"])
    values = get_values(agent, batch)
    expected = (values.advantage / 2.0).sigmoid()
    torch.testing.assert_close(values.weight[values.mask], expected[values.mask])


def test_a_policy_file_brings_them_back(make_spaces, make_config) -> None:  # type: ignore[no-untyped-def]
    """And is refused where the code has changed so that they mean nothing any more."""
    agent = make_agent(make_config().replace(custom=CUSTOM), make_spaces())
    data = save_policy(agent)
    policy = load_policy(data)
    assert policy.config.custom.settings == SETTINGS
    assert policy.actor.extra.weight.shape == (7, 7) and policy.actor.word == "a=b.c"
    registry._registered["actor"]["mine"] = Actor
    with pytest.raises(PolicyFileError, match="actor 'mine' has no setting 'width'; it has none"):
        load_policy(data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("filter.temprature=2", "filter 'mine' has no setting 'temprature'.* 'temperature'"),
        ("filter.advantage=2", "has no setting 'advantage'"),
        ("filter.temperature=warm", "temperature: expected float, like its default 1.0"),
        ("actor.width=7.5", "width: expected int, like its default 4, got '7.5'"),
        ("timestep_encoder.twice=1", "twice: expected bool, like its default False, got '1'"),
        ("actor.d_state=7", "actor 'mine' has no setting 'd_state'"),
        ("actor.table=7", "actor 'mine' has no setting 'table'"),
        ("critic.sampled=true", "critic 'mine' has no setting 'sampled'; it has none"),
        ("trajectory_encoder.more=1", "'mine' has no setting 'more'; it has none"),
        ("losses.large.size=1", "loss 'large' has no setting 'size'.*'scale'"),
        ("agent.x=1", "agent 'mine' has no setting 'x'.*'curiosity'"),
    ],
)
def test_what_a_part_does_not_take_is_refused(
    make_spaces,  # type: ignore[no-untyped-def]
    make_config,  # type: ignore[no-untyped-def]
    settings: str,
    message: str,
) -> None:
    """When the agent is made: only then must the code be there."""
    custom = CUSTOM.replace(critic="mine", trajectory_encoder="mine", settings=(settings,))
    config = make_config().replace(custom=custom)
    with pytest.raises(ConfigError, match=rf"CustomConfig\.settings: .*{message}"):
        make_agent(config, make_spaces())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("temperature=2",), "MODULE.NAME=VALUE each"),
        (("filter.temperature",), "MODULE.NAME=VALUE each"),
        (("filter.=2",), "MODULE.NAME=VALUE each"),
        (("filter.a=1", "filter.a=2"), "each setting once"),
        (("actor.width=1",), "given for actor, but the custom modules are: filter, losses.x;"),
        (("losses.scale=1",), "for losses, but"),
        (("losses.y.scale=1",), r"for losses\.y, but"),
    ],
)
def test_what_is_of_no_part_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"CustomConfig\.settings: .*{message}"):
        CustomConfig(filter="mine", losses=("x",), settings=settings)
    with pytest.raises(ConfigError, match="are: none"):
        CustomConfig(settings=("filter.temperature=2",))
