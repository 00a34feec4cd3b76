"""A part of one's own says which settings it reads that nothing built in would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from amago_model import (
    ActorConfig,
    AgentConfig,
    BinsConfig,
    ConfigError,
    CriticConfig,
    CustomConfig,
    LossConfig,
    UnusedError,
    checked,
    fitting,
    load_policy,
    make_agent,
    register,
    registry,
    save_policy,
)

CLONING = {"behavior_cloning": True, "dpg_weight": 0.0}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    monkeypatch.setattr(checked, "_declared", {})

    @register("loss", "warm", reads=("losses.filter_beta", "losses.tau", "actor.prob_low"))
    def warm(agent, seen):  # type: ignore[no-untyped-def]
        return agent.config.losses.filter_beta * seen.mean(-seen.log_prob, over="bc")

    register("loss", "cold")(lambda agent, seen: seen.mean(-seen.log_prob, over="bc"))  # noqa: ARG005
    register("filter", "bent", reads=("losses.filter_beta", "losses.leaky_filter"))(torch.sigmoid)
    register("filter", "wide", reads=("critic.bins.sigma",))(torch.sigmoid)
    yield


def own(**custom) -> CustomConfig:  # type: ignore[no-untyped-def]
    return CustomConfig(**custom)


def test_what_a_chosen_part_reads_may_be_set(make_spaces, make_config, make_batch) -> None:
    """And does something: the loss is what its factor says. The policy file brings it back."""
    losses = LossConfig(filter_beta=3.0, gamma=0.9, auxiliary_gammas=())
    config = AgentConfig(losses=losses, custom=own(losses=("warm",)))
    agent = make_agent(AgentConfig.from_dict(config.to_dict()), make_spaces())
    batch = make_batch(agent.spaces)
    seen = agent._look(batch, None)
    expected = 3.0 * seen.mean(-seen.log_prob, over="bc")
    torch.testing.assert_close(agent.terms(seen)["warm"], expected)
    assert load_policy(save_policy(agent)).config == config


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda c: AgentConfig(losses=LossConfig(filter_beta=3.0), custom=c), "filter_beta"),
        (lambda c: AgentConfig(losses=LossConfig(tau=0.5, **CLONING), custom=c), "tau"),
        (
            lambda c: AgentConfig(
                critic=CriticConfig(kind="twohot", bins=BinsConfig(sigma=0.3)), custom=c
            ),
            "sigma",
        ),
    ],
)
def test_what_only_others_read_is_refused(make, name: str) -> None:
    """A part that is registered lets nothing through, unless it is chosen."""
    with pytest.raises(UnusedError, match=f"{name}: set, but"):
        make(own())
    with pytest.raises(UnusedError, match=f"{name}: set, but"):
        make(own(losses=("cold",)))
    chosen = own(filter="wide") if name == "sigma" else own(losses=("warm",))
    assert make(chosen).custom == chosen


def test_a_filter_may_read_the_settings_of_the_one_it_replaces() -> None:
    losses = LossConfig(filter_beta=3.0)
    assert AgentConfig(losses=losses, custom=own(filter="bent")).losses.filter_beta == 3.0
    with pytest.raises(UnusedError, match="filter_max"):
        AgentConfig(losses=LossConfig(filter="exp", filter_max=5.0), custom=own(filter="bent"))


def test_what_the_actions_have_no_use_for_may_be_read_too(make_spaces) -> None:
    spaces, actor = make_spaces("continuous"), ActorConfig(prob_low=0.2)
    with pytest.raises(UnusedError, match="prob_low"):
        make_agent(AgentConfig(actor=actor), spaces)
    assert fitting(AgentConfig(actor=actor), spaces).actor == ActorConfig()
    config = AgentConfig(actor=actor, custom=own(losses=("warm",)))
    assert fitting(config, spaces) == config
    make_agent(config, spaces)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("losses.filter_betta", "no 'filter_betta' there; the nearest is 'filter_beta'"),
        ("lossses.tau", "no 'lossses' there; the nearest is 'losses'"),
        ("losses.tau.more", "no 'more' there; 'losses.tau' is no section"),
        ("critic.bins.sigmas", "no 'sigmas' there; the nearest is 'sigma'"),
        ("d_hiden", "no 'd_hiden' there; the nearest is 'd_hidden'"),
    ],
)
def test_a_setting_that_there_is_not_is_refused_by_name(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        register("actor", "mistaken", reads=(path,))


def test_a_word_alone_is_no_list_of_settings() -> None:
    with pytest.raises(ConfigError, match="'losses.filter_beta',"):
        register("loss", "mistaken", reads="losses.filter_beta")
    with pytest.raises(ConfigError, match="no 'loss' there; the nearest is 'losses'"):
        register("loss", "mistaken", reads=("filter_beta",))


def test_what_is_read_inside_a_section_makes_the_section_read() -> None:
    critic = CriticConfig(bins=BinsConfig(sigma=0.5))
    assert AgentConfig(critic=critic, custom=own(filter="wide")).critic == critic
    with pytest.raises(UnusedError, match="bins"):
        AgentConfig(critic=critic, custom=own(filter="bent"))
