"""Settings that an environment's spaces, or parts of one's own, have no use for: refused where an
agent is made.

What contradicts whatever the environment is refused by the configs themselves; see config/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

from amago_model.checked import Checked, Unused, refuse, setting_default, unused
from amago_model.config import AgentConfig, Spaces
from amago_model.encoders.modalities import not_one_image, unused_kinds
from amago_model.registry import Kind, registered, settings_read

C = TypeVar("C", bound=Checked)

OF_SOFTENING = ("prob_low", "prob_high")
"""What softens the data's actions for critics, beside bounding the policy."""
OF_CATEGORIES = (*OF_SOFTENING, "prob_low_gradient")
OF_SWITCHES = ("mean_log_prob",)
OF_NUMBERS = (
    *("continuous", "beta", "gmm", "std_low", "std_high", "log_prob_clip", "bound_gradient"),
)
SAMPLES = ("n_actions_in_critic_loss", "n_actions_in_actor_loss")
OF_ENSEMBLES = (
    *("n_critics", "n_critics_target", "subset_replacement", "soften_data_actions"),
    *("popart", "popart_beta", "popart_init_nu"),
)
"""What agents read of the critic's settings, whatever the critic is."""
OF_PRIVILEGED = (
    *("keys", "vector_keys", "images", "tokens", "goals", "raw_numbers"),
    *("input_norm_beta", "input_norm_init_nu"),
)
"""What networks of what only critics see read of the row encoder's settings."""
OF_WHITENING = ("input_norm_beta", "input_norm_init_nu")
OF_ANY_ROWS = (
    *("n_layers", "d_hidden", "auto_scale", "activation", "norm"),
    *("normalize_inputs", "normalize_previous"),
)
"""What the row encoder of kind=image has no use for."""


def refuse_unused(config: AgentConfig, spaces: Spaces) -> None:
    """Raises `UnusedError` naming all settings that these spaces have no use for."""
    refuse(unused_for(config, spaces))


def fitting(config: AgentConfig, spaces: Spaces) -> AgentConfig:
    """A config in which what these spaces have no use for is back at its default.

    For configs made for any environment, such as presets:

        agent = make_agent(fitting(presets.published_v3(), spaces), spaces)
    """
    names = {name for found in unused_for(config, spaces) for name in found.settings}
    return _without(config, names)


def unused_for(config: AgentConfig, spaces: Spaces) -> list[Unused]:
    """What to say of settings that these spaces, or parts of one's own, have no use for."""
    with config.own_parts_read():
        return (
            _unread_of_heads(config, spaces)
            + _unread_of_rows(config, spaces)
            + _unread_by_own_parts(config, spaces)
        )


def _unread_of_heads(config: AgentConfig, spaces: Spaces) -> list[Unused]:
    """What to say of settings that are for other actions."""
    kind = spaces.action.kind
    of_actor: list[str] = []
    if not config.custom.actor:
        of_actor += OF_CATEGORIES if kind not in ("discrete", "multi_discrete") else ()
        of_actor += OF_NUMBERS if kind != "continuous" else ()
        of_actor += OF_SWITCHES if kind != "multi_binary" else ()
    parts: list[tuple[Checked, list[str]]] = [(config.actor, of_actor)]
    if kind != "discrete":
        parts += (config, ["algorithm"]), (config.critic, ["soften_data_actions"])
    found = unused(f"agents of {kind} actions would not use it", *parts)
    samples = (config.losses, SAMPLES)
    if kind != "continuous" and not config.losses.trains_critic:
        found += unused(f"without critics nothing samples {kind} actions", samples)
    elif kind == "discrete" and config.algorithm == "agent":
        why = "critics answer for every discrete action, so none is sampled"
        found += unused(why, samples, instead="set algorithm='multitask' or ")
    return found


def _unread_of_rows(config: AgentConfig, spaces: Spaces) -> list[Unused]:
    """What to say of settings of the row encoder that these observations have no use for."""
    rows, own = config.timestep_encoder, config.custom.timestep_encoder
    if own:
        if not _inherits("timestep_encoder", own):
            return []  # told by _unread_by_own_parts
        why = f"custom.timestep_encoder={own!r} takes the place of it"
        return unused(why, (rows, ["kind", "previous_features"])) + unused_kinds(rows, spaces)
    found = unused_kinds(rows, spaces)
    if rows.kind == "image":
        found += (elsewhere := not_one_image(rows, spaces))
        privileged = spaces.keys("critic") and config.losses.trains_critic
        names = OF_ANY_ROWS if privileged else (*OF_ANY_ROWS, *OF_WHITENING)
        if not elsewhere:
            instead = "set kind='any' or "
            found += unused("kind='image' would not use it", (rows, names), instead=instead)
    return found


def _unread_by_own_parts(config: AgentConfig, spaces: Spaces) -> list[Unused]:
    """What to say of settings of the built-in parts whose places others have taken."""
    # What others read of them.
    softened = spaces.action.kind == "discrete" and config.critic.soften_data_actions
    privileged = spaces.keys("critic") and config.losses.trains_critic
    built_in: dict[Kind, tuple[Checked, tuple[str, ...]]] = {
        "timestep_encoder": (config.timestep_encoder, OF_PRIVILEGED if privileged else ()),
        "trajectory_encoder": (config.trajectory_encoder, ()),
        "actor": (config.actor, OF_SOFTENING if softened else ()),
        "critic": (config.critic, OF_ENSEMBLES),
    }
    found: list[Unused] = []
    for kind, (section, others) in built_in.items():
        name = getattr(config.custom, kind)
        if not name:
            continue
        reads = settings_read(kind, name)
        if _inherits(kind, name) or reads == "all":
            continue
        why = f"custom.{kind}={name!r} does not read it"
        unread = [x for x in section.setting_names() if x not in (*reads, *others)]
        instead = "name it in `reads` where that is registered, or "
        found += unused(why, (section, unread), instead=instead)
    return found


def _inherits(kind: Kind, name: str) -> bool:
    """Whether what was registered is a subclass of the built-in part, whose settings it reads."""
    # Here, because they load torch, and settings are read without it.
    from amago_model.encoders.timestep import TimestepEncoder
    from amago_model.heads.actor import Actor
    from amago_model.heads.critic import CriticEnsemble

    bases: dict[Kind, type] = {
        "timestep_encoder": TimestepEncoder,
        "actor": Actor,
        "critic": CriticEnsemble,
    }
    made = registered(kind, name)
    return isinstance(made, type) and kind in bases and issubclass(made, bases[kind])


def _without(config: C, names: Collection[str]) -> C:
    """A config with these settings, named as "LossConfig.n_step", back at their defaults."""
    new: dict[str, Any] = {}
    for name in config.setting_names():
        value = getattr(config, name)
        if f"{type(config).__name__}.{name}" in names:
            new[name] = setting_default(type(config), name)
        elif isinstance(value, Checked):
            new[name] = _without(value, names)
    return dataclasses.replace(config, **new)  # type: ignore[type-var]
