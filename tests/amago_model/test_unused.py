"""What an environment's actions, or a part of one's own, have no use for is refused by name."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from amago_model import (
    ActorConfig,
    AgentConfig,
    BetaConfig,
    CriticConfig,
    CustomConfig,
    FeedForwardConfig,
    GRUConfig,
    LossConfig,
    TimestepEncoderConfig,
    TrajectoryEncoderConfig,
    UnusedError,
    fitting,
    load_policy,
    make_agent,
    multitask,
    published_v3,
    register,
    registry,
    save_policy,
)
from amago_model.checked import unfinished
from amago_model.encoders.trajectory import IdentityTrajectoryEncoder
from amago_model.heads.actor import Actor

KINDS = ("discrete", "continuous", "multi_binary", "multi_discrete")
SAMPLES = LossConfig(n_actions_in_actor_loss=3, n_actions_in_critic_loss=3)
CLONING = LossConfig(behavior_cloning=True, dpg_weight=0.0)
GAUSSIAN = ActorConfig(std_low=0.1, log_prob_clip=0.9)
SOFTENED = CriticConfig(soften_data_actions=True)
CASES = [
    (
        "discrete",
        AgentConfig(losses=SAMPLES),
        {"n_actions_in_actor_loss", "n_actions_in_critic_loss"},
    ),
    ("discrete", AgentConfig(actor=GAUSSIAN), {"std_low", "log_prob_clip"}),
    (
        "discrete",
        AgentConfig(actor=ActorConfig(continuous="beta", beta=BetaConfig(low=2.0))),
        {"continuous", "beta"},
    ),
    (
        "discrete",
        AgentConfig(losses=replace(CLONING, n_actions_in_actor_loss=3)),
        {"n_actions_in_actor_loss"},
    ),
    (
        "continuous",
        AgentConfig(actor=ActorConfig(prob_low=0.1), critic=SOFTENED, algorithm="multitask"),
        {"prob_low", "soften_data_actions", "algorithm"},
    ),
    (
        "multi_binary",
        AgentConfig(actor=replace(GAUSSIAN, prob_high=0.5), critic=SOFTENED),
        {"prob_high", "std_low", "log_prob_clip", "soften_data_actions"},
    ),
    (
        "multi_binary",
        AgentConfig(losses=replace(CLONING, n_actions_in_actor_loss=3)),
        {"n_actions_in_actor_loss"},
    ),
    (
        "multi_discrete",
        AgentConfig(algorithm="multitask", actor=GAUSSIAN, critic=SOFTENED),
        {"std_low", "log_prob_clip", "soften_data_actions", "algorithm"},
    ),
]


@pytest.mark.parametrize(("kind", "config", "names"), CASES)
def test_what_the_actions_have_no_use_for_is_named_at_once(
    make_spaces, kind: str, config: AgentConfig, names: set[str]
) -> None:
    spaces = make_spaces(kind)
    with pytest.raises(UnusedError) as refused:
        make_agent(config, spaces)
    assert {name.partition(".")[2] for name in refused.value.settings} == names
    assert not [name for name in refused.value.settings if name not in str(refused.value)]
    # Back at their defaults, by name or all at once, nothing is left to complain of.
    assert make_agent(fitting(config, spaces), spaces).config == fitting(config, spaces)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", [published_v3, multitask])
def test_a_preset_fits_every_kind_of_actions(make_spaces, make_config, preset, kind: str) -> None:
    """... and keeps what they do use."""
    spaces, config = make_spaces(kind), preset(make_config())
    used = fitting(config, spaces)
    # Without an image there is no use for an encoder of one.
    assert (used == config) == (kind == "discrete" and preset is multitask)
    assert used.losses == config.losses
    assert load_policy(save_policy(make_agent(used, spaces))).config == used


def test_a_policy_file_with_what_acting_has_no_use_for_loads(make_spaces, make_config) -> None:
    """Who made it may have had a use for it, or have known no better."""
    spaces = make_spaces("continuous")
    with unfinished():
        config = replace(
            make_config(), algorithm="multitask", losses=LossConfig(gamma=0.9, n_step=3)
        )
        policy = make_agent(config, spaces).policy
    assert load_policy(save_policy(policy)).config.algorithm == "multitask"


# ------------------------------------------------------------------------------ parts of one's own


class Heedless(IdentityTrajectoryEncoder):
    def __init__(self, config, d_input) -> None:  # type: ignore[no-untyped-def]
        del config
        super().__init__(d_input)


@pytest.fixture
def own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    register("trajectory_encoder", "heedless")(Heedless)
    register("trajectory_encoder", "reader", reads=("kind", "gru"))(Heedless)
    register("actor", "child")(type("Child", (Actor,), {}))
    register("actor", "stranger")(lambda *args, **kwargs: Actor(*args, **kwargs))


GRU = TrajectoryEncoderConfig(kind="gru", gru=GRUConfig(d_hidden=7))
FEEDFORWARD = TrajectoryEncoderConfig(kind="feedforward", feedforward=FeedForwardConfig(d_model=8))


@pytest.mark.usefixtures("own_parts")
@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ({"trajectory_encoder": ("heedless", GRU)}, {"kind", "gru"}),
        ({"trajectory_encoder": ("reader", GRU)}, set()),
        ({"trajectory_encoder": ("reader", FEEDFORWARD)}, {"feedforward"}),
        ({"actor": ("child", ActorConfig(d_hidden=8))}, set()),
        ({"actor": ("stranger", ActorConfig(d_hidden=8, prob_low=0.1))}, {"d_hidden", "prob_low"}),
    ],
)
def test_what_a_part_of_one_s_own_does_not_read_is_named(
    make_spaces, parts: dict[str, tuple[str, object]], names: set[str]
) -> None:
    custom = CustomConfig(**{part: name for part, (name, _) in parts.items()})
    sections = {part: section for part, (_, section) in parts.items()}
    config = dataclasses.replace(
        AgentConfig(timestep_encoder=TimestepEncoderConfig(d_hidden=8, d_output=8)),
        custom=custom,
        **sections,
    )
    if not names:
        make_agent(config, make_spaces())
        return
    with pytest.raises(UnusedError, match="does not read it.*`reads`") as refused:
        make_agent(config, make_spaces())
    assert {name.partition(".")[2] for name in refused.value.settings} == names


@pytest.mark.usefixtures("own_parts")
def test_what_others_read_of_a_replaced_part_may_be_set(make_spaces) -> None:
    """The odds of softened data are an actor's settings, but the critics' input."""
    custom = CustomConfig(actor="stranger")
    config = AgentConfig(custom=custom, actor=ActorConfig(prob_low=0.1), critic=SOFTENED)
    assert make_agent(config, make_spaces("discrete")).config == config
