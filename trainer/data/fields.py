"""The columns of a dataset that an agent learns from.

A row of the shards that has no action and no reward (a trajectory's last one) holds NULL there; in
the cache it holds `fill`, which the agent's encoding shows as "no previous step".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from amago_model.config.spaces import USED_ROLES
from stepwell import Box, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from stepwell.schema import ACTION_KNOWN, REWARD, column_names
from trainer.config import DataConfig
from trainer.data.alignment import ARRIVAL, DEPARTURE, OBSERVATION
from trainer.data.snapshot import DataError


@dataclass(frozen=True, slots=True)
class Field:
    """One column of the cache: [rows, *shape] of `dtype`."""

    name: str
    """obs.<key>, "action", "reward", "action_known", "return_to_go" or a loss mask."""
    column: str
    """Its name in the shards."""
    dtype: str
    shape: tuple[int, ...]
    offset: int = DEPARTURE
    """The stored row read for a window's row 0, relative to its first stored row: alignment.py."""
    fill: tuple[float, ...] = (0.0,)
    """The replacement for NULL: one number, or one for each element."""
    relabel_only: bool = False
    """Only relabelers read it."""

    @property
    def of_step(self) -> bool:
        """Whether it belongs to steps (T values per trajectory) or to observations (T+1)."""
        return not self.name.startswith("obs.") and self.name != RETURN_TO_GO.name

    @property
    def size(self) -> int:
        """Elements in a row."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def fill_array(self) -> NDArray[np.generic]:
        """`fill` in the shape and dtype of a row."""
        values = np.broadcast_to(np.asarray(self.fill), self.size).reshape(self.shape)
        return values.astype(self.dtype)


RETURN_TO_GO = Field("return_to_go", "", "float32", (), OBSERVATION)
"""Computed from the rewards of whole trajectories; not in the shards or the cache."""


def fields_of(spec: EnvSpec, data: DataConfig | None = None) -> tuple[Field, ...]:
    """The columns of a dataset to cache: observations of a used role, action, reward; the columns
    that only the relabelers in `data` read; and the infos that `data` names as loss masks.

    Raises `DataError` if an agent cannot learn from the dataset.
    """
    columns, relabels = column_names(spec), bool(data and data.relabel)
    fields = [
        Field(
            f"obs.{key}",
            name,
            space.dtype,
            space.shape,
            OBSERVATION,
            relabel_only=spec.role(key) == "relabel",
        )
        for name, key, space in columns["obs"]
        if spec.role(key) in USED_ROLES or (relabels and spec.role(key) == "relabel")
    ]
    name, key, action = columns["action"][0]
    if len(columns["action"]) > 1:
        raise DataError(
            f"the agent takes one action, the dataset has {sorted(spec.actions)}; "
            "flatten them into one array when collecting"
        )
    if isinstance(action, Discrete):
        fields.append(Field("action", name, "int64", (), fill=(action.start - 1.0,)))
    elif isinstance(action, Box) and np.dtype(action.dtype).kind == "f":
        low, high = (bound.reshape(-1) for bound in action.bounds())
        with np.errstate(invalid="ignore"):
            middle = np.where(np.isfinite(low) & np.isfinite(high), (low + high) / 2, 0.0)
        fields.append(Field("action", name, "float32", action.shape, fill=tuple(middle.tolist())))
    elif isinstance(action, MultiDiscrete):
        below = tuple(start - 1.0 for start in action.start) if any(action.start) else (-1.0,)
        fields.append(Field("action", name, "int64", action.shape, fill=below))
    elif isinstance(action, MultiBinary):
        fields.append(Field("action", name, "int64", action.shape, fill=(-1.0,)))
    else:
        raise DataError(
            f"the agent cannot take the action {key!r} of kind {type(action).__name__} yet; "
            "it takes Discrete, MultiDiscrete, MultiBinary and Box of floats"
        )
    fields.append(Field("reward", REWARD, "float32", ()))
    if spec.action_known:
        fields.append(Field("action_known", ACTION_KNOWN, "bool", ()))
    if data is not None:
        masks = {"actor_mask": data.actor_mask, "critic_mask": data.critic_mask}
        offset = ARRIVAL if data.mask_row == "arrival" else DEPARTURE
        fields += [_loss_mask(spec, name, key, offset) for name, key in masks.items() if key]
    return tuple(fields)


def _loss_mask(spec: EnvSpec, name: str, key: str, offset: int) -> Field:
    for column, known, space in column_names(spec)["info"]:
        if known == key and space.shape == ():
            return Field(name, column, space.dtype, (), offset)
    single = sorted(known for known, space in spec.infos.items() if space.shape == ())
    raise DataError(
        f"data.{name}: expected an info of the dataset with one number a row, got {key!r}; it has "
        f"{', '.join(map(repr, single)) or 'none'}"
    )
