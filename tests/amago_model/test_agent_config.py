"""Settings: complete, checked by name, and the same after a trip through JSON."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from amago_model import (
    ActionSpace,
    ActorConfig,
    AgentConfig,
    BinsConfig,
    ConfigError,
    CriticConfig,
    CustomConfig,
    FeedForwardConfig,
    GRUConfig,
    LeakyFilterConfig,
    LossConfig,
    ObsSpace,
    SpaceError,
    Spaces,
    TimestepEncoderConfig,
    TrajectoryEncoderConfig,
    TransformerConfig,
)
from tests.amago_model.settings import documented

DEMO = AgentConfig(
    timestep_encoder=TimestepEncoderConfig(d_hidden=64, d_output=64, hide_previous=True),
    trajectory_encoder=TrajectoryEncoderConfig(
        kind="feedforward", feedforward=FeedForwardConfig(d_model=64)
    ),
    actor=ActorConfig(d_hidden=128),
    critic=CriticConfig(n_critics=2, d_hidden=128),
    losses=LossConfig(
        gamma=0.98,
        auxiliary_gammas=(),
        reward_multiplier=0.1,
        dpg_weight=0.3,
        bc_weight=1.0,
        tau=0.01,
    ),
)
BOX = ActionSpace(kind="continuous", shape=(2,), low=(-1.0, -2.0), high=(1.0, 2.0))
OBS = {"observation": ObsSpace(shape=(3,), dtype="float32")}


@pytest.mark.parametrize("config", [AgentConfig(), DEMO])
def test_a_config_survives_json(config: AgentConfig) -> None:
    assert AgentConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_spaces_survive_json() -> None:
    spaces = Spaces(observations=OBS | {"id": ObsSpace(shape=(), dtype="int64", n=7)}, action=BOX)
    assert Spaces.from_dict(json.loads(json.dumps(spaces.to_dict()))) == spaces


def test_absent_settings_take_their_defaults() -> None:
    assert AgentConfig.from_dict({"losses": {"gamma": 0.8}}).losses == LossConfig(gamma=0.8)


def test_a_discount_that_acts_is_learned_once() -> None:
    """Whatever the further ones are, and also after another change of gamma."""
    losses = LossConfig(gamma=0.99)
    assert losses.gammas == (0.1, 0.9, 0.95, 0.97, 0.995, 0.99)
    assert dataclasses.replace(losses, gamma=0.9).gammas == (0.1, 0.95, 0.97, 0.99, 0.995, 0.9)
    assert LossConfig(gamma=0.5, auxiliary_gammas=(0.5,)).gammas == (0.5,)


def test_an_unknown_setting_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"losses: unknown setting 'gama'.*'gamma'"):
        AgentConfig.from_dict({"losses": {"gama": 0.9}})


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LossConfig(gamma=1.0), "gamma"),
        (lambda: LossConfig(auxiliary_gammas=(0.9, 1.5)), "auxiliary_gammas"),
        (
            lambda: LossConfig(auxiliary_gammas=(0.9, 0.9)),
            "auxiliary_gammas: expected each discount once",
        ),
        (lambda: LossConfig(dpg_weight=0, bc_weight=0), "bc_weight"),
        (lambda: LossConfig(behavior_cloning=True, bc_weight=0), "behavior_cloning"),
        (lambda: LossConfig(critic_weight=0), "critic_weight"),
        (lambda: LossConfig(tau=0.0), "tau"),
        (lambda: LossConfig(filter="sharp"), "filter"),  # type: ignore[arg-type]
        (lambda: LossConfig(n_step=0), "n_step"),
        (lambda: LossConfig(dpg_weight=math.nan), "dpg_weight"),
        (lambda: CriticConfig(n_critics=1), "n_critics_target"),
        (lambda: CriticConfig(d_hidden=True), "d_hidden"),
        (lambda: TransformerConfig(d_model=30, n_heads=8), "n_heads"),
        (lambda: TransformerConfig(n_layers=10**9), "n_layers"),
        (lambda: TimestepEncoderConfig(hide_previous=True, hide_reward=True), "hide_reward"),
        (
            lambda: TrajectoryEncoderConfig(
                kind="identity", transformer=TransformerConfig(n_layers=1)
            ),
            "transformer",
        ),
    ],
)
def test_contradictions_and_nonsense_are_refused_by_field_name(make, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: ActionSpace(kind="continuous", shape=(1,), low=(-math.inf,), high=(1.0,)),
            "finite bounds",
        ),
        (lambda: ActionSpace(kind="continuous", shape=(2,), low=(0.0,), high=(1.0, 1.0)), "low"),
        (lambda: ActionSpace(kind="continuous", shape=(1,), low=(1.0,), high=(1.0,)), "not below"),
        (lambda: ActionSpace(kind="discrete"), "at least 1"),
        (lambda: Spaces(observations={}, action=BOX), "role 'policy'"),
        (
            lambda: Spaces(
                observations=OBS | {"legal": ObsSpace(shape=(3,), dtype="bool", role="mask")},
                action=ActionSpace(kind="discrete", n=4),
            ),
            r"shape \(4,\)",
        ),
    ],
)
def test_spaces_the_agent_cannot_take_are_refused(make, words: str) -> None:
    with pytest.raises(SpaceError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda: AgentConfig(
                losses=LossConfig(behavior_cloning=True, dpg_weight=0, filter="exp", n_step=3),
                critic=CriticConfig(d_hidden=8, kind="twohot", bins=BinsConfig(n_bins=9)),
                custom=CustomConfig(critic="mine"),
            ),
            "LossConfig.filter LossConfig.n_step CriticConfig.d_hidden CriticConfig.kind "
            "CriticConfig.bins CustomConfig.critic n_step=1 d_hidden=256",
        ),
        (
            lambda: AgentConfig(
                losses=LossConfig(bc_weight=0, filter_batch_norm=True),
                actor=ActorConfig(log_prob_clip=0.9),
            ),
            "LossConfig.filter_batch_norm ActorConfig.log_prob_clip",
        ),
        (
            lambda: LossConfig(
                filter="exp", filter_threshold=0.5, leaky_filter=LeakyFilterConfig(slope=0.5)
            ),
            "LossConfig.filter_threshold LossConfig.leaky_filter filter='leaky_relu'",
        ),
        (
            lambda: LossConfig(td_lambda=0.5, n_step=3, bc_weight=0, behavior_cloning=True),
            "td_lambda=0.5 n_step=3 LossConfig.behavior_cloning",
        ),
        (
            lambda: AgentConfig(
                algorithm="multitask",
                losses=LossConfig(behavior_cloning=True, dpg_weight=0, tau=0.1),
            ),
            "AgentConfig.algorithm LossConfig.tau",
        ),
        (
            lambda: ActorConfig(kind="residual", d_hidden=8, continuous="beta", std_low=0.1),
            "ActorConfig.d_hidden ActorConfig.std_low kind='mlp' continuous='tanh_gaussian'",
        ),
        (
            lambda: CriticConfig(popart=False, popart_beta=0.1, bins=BinsConfig(n_bins=9)),
            "CriticConfig.popart_beta CriticConfig.bins popart=True",
        ),
        (
            lambda: CriticConfig(n_critics_target=1, subset_replacement=True),
            "CriticConfig.subset_replacement n_critics_target",
        ),
        (
            lambda: TrajectoryEncoderConfig(
                kind="identity",
                transformer=TransformerConfig(n_layers=1),
                gru=GRUConfig(n_layers=1),
            ),
            "TrajectoryEncoderConfig.transformer TrajectoryEncoderConfig.gru kind='gru'",
        ),
    ],
)
def test_all_that_would_not_be_used_is_named_at_once(make, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert not [name for name in named.split() if name not in str(refused.value)]


def _all_configs(cls: type) -> list[type]:
    nested = [f.default_factory for f in dataclasses.fields(cls)]
    found = [c for c in nested if isinstance(c, type) and dataclasses.is_dataclass(c)]
    return [cls, *[deeper for c in found for deeper in _all_configs(c)]]


def test_every_setting_has_a_sentence_under_it() -> None:
    for cls in [*_all_configs(AgentConfig), ObsSpace, ActionSpace, Spaces]:
        assert {f.name for f in dataclasses.fields(cls)} == documented(cls)
