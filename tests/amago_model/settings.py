"""Every setting of a config, and other values for it: for tests that forget none."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

from amago_model import AgentConfig, Settings
from stepwell._settings import Option, flatten, options, override

# Values that cannot be guessed from the type.
TRY: dict[str, list[Any]] = {
    "actor.continuous.std_high": [1.0],
    "actor.prob_high": [0.34, 0.5],
    "actor.norm": ["rms"],
    "actor.continuous.high": [1.5, 9.0],
    "trajectory_encoder.d_ff": [24],
    "critic.init_value": [10.0],
    "critic.min_return": [-50.0],
    "critic.max_return": [50.0],
    "losses.target_low": [0.0],
    "losses.target_high": [0.0],
    "losses.td_lambda": [0.3],
    "losses.auxiliary_gammas": [(0.3, 0.5)],
    "losses.filter.largest": [0.011, 50.0],
    "losses.filter.smallest": [0.3],
    "timestep_encoder.keys": [("goals", "image", "letters", "observation")],
    "timestep_encoder.hide_keys": [("observation",)],
    "timestep_encoder.vector_keys": [("words",), ("image",)],
    "timestep_encoder.images.keys": [("map",)],
    "timestep_encoder.images.block_depths": [(8,)],
    "timestep_encoder.tokens.keys": [("letters", "words"), ()],
    "timestep_encoder.tokens.padding": [3],
    "timestep_encoder.tokens.vocabulary": [5],
    "timestep_encoder.tokens.lowest": [2],
    "timestep_encoder.goals.keys": [("goals", "map")],
    "trajectory_encoder.position.max_time": [2],
    "custom.timestep_encoder": ["mine"],
    "custom.trajectory_encoder": ["mine"],
    "custom.actor": ["mine"],
    "custom.critic": ["mine"],
    "custom.filter": ["mine"],
    "custom.losses": [("mine",)],
    "custom.loss_weights": [(0.5,)],
    "custom.agent": ["mine"],
    "custom.settings": [("actor.width=3", "timestep_encoder.word=a b")],
    "run": ["mine"],
    "tags": [("tried", "by hand")],
    "dataset": ["pendulum"],
    "where": ["length > 3"],
    "snapshot": ["s_1"],
    "device": ["cpu", "cuda:1"],
    "output": [Path("elsewhere")],
    "plugin": [("json", "statistics")],
    "data.cache": [Path("columns")],
    "data.relabel": [("hindsight",)],
    "data.actor_mask": ["chosen"],
    "data.critic_mask": ["chosen"],
}


def configured(base: Any = None, **sections: Any) -> Any:
    """A config (default: the agent's) with changes from models or nested dicts, which may leave out
    the kind of a section."""
    return override(AgentConfig() if base is None else base, _plain(sections))


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(inside) for key, inside in value.items()}
    return value


def leaves(config: Any) -> dict[str, Option]:
    """Dotted name of every setting that this config has -> what it is."""
    known = options(type(config))
    return {name: known[name] for name in flatten(config.to_dict()) if name in known}


def value_at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def changed(config: Any, name: str, value: Any) -> Any:
    return configured(config, **{name: value})


def others(option: Option, current: Any) -> list[Any]:
    """Values to try in place of the current one."""
    name, hint = option.name.removeprefix("agent."), option.hint
    if name in TRY:
        return [value for value in TRY[name] if value != current]
    if option.choices:
        return [value for value in option.choices if value != current]
    kinds = set(typing.get_args(hint)) or {hint}
    if hint is bool:
        return [not current]
    if int in kinds:
        return [x for x in ((current or 1) + 1, 2 * (current or 1), 1) if x != current]
    assert float in kinds, f"{name}: add values to try to TRY"
    return [x for x in (0.3, 0.7, 1.5, 3.0, 0.003) if x != current]
