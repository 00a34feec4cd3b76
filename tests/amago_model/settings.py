"""Every setting of a config, and other values for it: for tests that forget none."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

# Values that cannot be guessed from the type.
TRY: dict[str, list[Any]] = {
    "actor.std_high": [1.0],
    "actor.prob_high": [0.34, 0.5],
    "actor.beta.high": [1.5],
    "actor.gmm.std_high": [0.3, 5.0],
    "actor.residual.norm": ["rms"],
    "critic.bins.init_value": [10.0],
    "critic.bins.min_return": [-50.0],
    "critic.bins.max_return": [50.0],
    "losses.target_low": [0.0],
    "losses.target_high": [0.0],
    "losses.td_lambda": [0.3],
    "losses.auxiliary_gammas": [(0.3, 0.5)],
    "losses.leaky_filter.largest": [0.011, 50.0],
    "losses.leaky_filter.smallest": [0.3],
    "losses.filter_min": [1.0],
    "losses.filter_max": [1.0],
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
    "trajectory_encoder.feedforward.d_ff": [24],
    "trajectory_encoder.transformer.max_time": [2],
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
    "dataset": ["pendulum"],
    "where": ["length > 3"],
    "snapshot": ["s_1"],
    "output": [Path("elsewhere")],
    "plugin": [("json", "statistics")],
    "data.cache": [Path("columns")],
    "data.relabel": [("hindsight",)],
    "data.actor_mask": ["chosen"],
    "data.critic_mask": ["chosen"],
}


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name of every setting -> its annotation."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            found |= leaves(value, f"{prefix}{f.name}.")
        else:
            found[prefix + f.name] = hints[f.name]
    return found


def value_at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def changed(config: Any, name: str, value: Any) -> Any:
    head, _, rest = name.partition(".")
    new = changed(getattr(config, head), rest, value) if rest else value
    return replace(config, **{head: new})


def others(name: str, hint: Any, current: Any) -> list[Any]:
    """Values to try in place of the current one."""
    if name in TRY:
        return [value for value in TRY[name] if value != current]
    if typing.get_origin(hint) is Literal:
        return [value for value in typing.get_args(hint) if value != current]
    if isinstance(hint, types.UnionType):
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if hint is bool:
        return [not current]
    if hint is int:
        return [x for x in (current + 1, 2 * current, 1) if x != current]
    assert hint is float, f"{name}: add values to try to TRY"
    return [x for x in (0.3, 0.7, 1.5, 3.0, 0.003) if x != current]


def documented(cls: type) -> set[str]:
    """The fields of a config class that have a sentence under them."""
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    return {
        before.target.id
        for before, after in zip(node.body, node.body[1:], strict=False)
        if isinstance(before, ast.AnnAssign)
        and isinstance(before.target, ast.Name)
        and isinstance(after, ast.Expr)
    }
