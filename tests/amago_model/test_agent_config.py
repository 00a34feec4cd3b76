"""Settings: complete, checked by name, and the same after a trip through JSON."""

from __future__ import annotations

import json
import math

import pytest

from amago_model import (
    ActionSpace,
    AgentConfig,
    ConfigError,
    FeedForwardConfig,
    LossConfig,
    MLPActorConfig,
    ObsSpace,
    ScalarCriticConfig,
    SpaceError,
    Spaces,
    TimestepEncoderConfig,
    TransformerConfig,
)
from amago_model.config import BetaConfig, GaussianConfig
from amago_model.config.base import Settings, models_in

DEMO = AgentConfig(
    timestep_encoder=TimestepEncoderConfig(d_hidden=64, d_output=64, hide_previous=True),
    trajectory_encoder=FeedForwardConfig(d_model=64),
    actor=MLPActorConfig(d_hidden=128),
    critic=ScalarCriticConfig(n_critics=2, d_hidden=128),
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
    assert losses.replace(gamma=0.9).gammas == (0.1, 0.95, 0.97, 0.99, 0.995, 0.9)
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
        (lambda: AgentConfig(losses=LossConfig(critic_weight=0)), "critic_weight"),
        (lambda: AgentConfig(critic=None), "critic: none, but DPG"),
        (lambda: LossConfig(tau=0.0), "tau"),
        (
            lambda: AgentConfig.from_dict({"losses": {"filter": {"kind": "sharp"}}}),
            "filter.kind.*'exp'",
        ),
        (lambda: LossConfig(n_step=0), "n_step"),
        (lambda: LossConfig(dpg_weight=math.nan), "dpg_weight"),
        (lambda: ScalarCriticConfig(n_critics=1), "n_critics_target"),
        (lambda: ScalarCriticConfig(d_hidden=True), "d_hidden"),
        (lambda: TransformerConfig(d_model=30, n_heads=8), "n_heads"),
        (lambda: TransformerConfig(n_layers=10**9), "n_layers"),
        (lambda: GaussianConfig(std_low=2.0), "std_low: expected less than std_high=1, got 2"),
        (lambda: BetaConfig(low=3.0, high=2.0), "low: expected less than high=2, got 3"),
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
    ("section", "setting", "of"),
    [
        ({"trajectory_encoder": {"kind": "gru", "context": 8}}, "context", "'transformer'"),
        ({"trajectory_encoder": {"kind": "identity", "d_model": 8}}, "d_model", "'feed_forward'"),
        ({"actor": {"kind": "residual", "d_hidden": 8}}, "d_hidden", "'mlp'"),
        (
            {"actor": {"kind": "mlp", "continuous": {"kind": "beta", "std_low": 0.1}}},
            "std_low",
            "'tanh_gaussian', 'gaussian', 'gmm'",
        ),
        ({"critic": {"kind": "scalar", "n_bins": 9}}, "n_bins", "'twohot', 'hlgauss'"),
        ({"critic": {"kind": "twohot", "sigma": 0.5}}, "sigma", "'hlgauss'"),
        ({"losses": {"filter": {"kind": "exp", "threshold": 0.5}}}, "threshold", "'binary'"),
        ({"losses": {"filter": {"kind": "behavior_cloning", "beta": 0.5}}}, "beta", "'exp'"),
        (
            {"timestep_encoder": {"kind": "any", "previous_features": 3}},
            "previous_features",
            "'image'",
        ),
        (
            {"timestep_encoder": {"kind": "any", "images": {"kind": "drq", "block_depths": [4]}}},
            "block_depths",
            "'impala'",
        ),
    ],
)
def test_a_setting_of_another_kind_cannot_be_written(section, setting: str, of: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}: the chosen kind has no such.*{of}"):
        AgentConfig.from_dict(section)


def test_all_problems_are_told_at_once_each_with_its_path() -> None:
    wrong = {"losses": {"gamma": 2, "tua": 0.1}, "critic": {"kind": "scalar", "n_critics": "four"}}
    with pytest.raises(ConfigError) as refused:
        AgentConfig.from_dict(wrong)
    assert str(refused.value).split("; also ") == [
        "AgentConfig.critic.n_critics: expected a valid integer, got 'four'",
        "AgentConfig.losses.gamma: expected less than 1, got 2",
        "AgentConfig.losses: unknown setting 'tua'; the nearest known one is 'tau'",
    ]


def test_a_key_named_as_its_kind_is_told_with_its_path() -> None:
    with pytest.raises(ConfigError, match="trajectory_encoder: unknown setting 'gru'"):
        AgentConfig.from_dict({"trajectory_encoder": {"kind": "gru", "gru": {}}})


def _all_configs(cls: type[Settings]) -> list[type[Settings]]:
    found = [m for f in cls.model_fields.values() for m in models_in(f.annotation)]
    return [cls, *[deeper for c in found for deeper in _all_configs(c)]]


def test_every_setting_has_a_sentence_under_it() -> None:
    for cls in [*_all_configs(AgentConfig), *_all_configs(Spaces)]:
        assert all(f.description for f in cls.model_fields.values()), cls
