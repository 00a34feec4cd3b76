"""Types, names and limits shared by several settings."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from amago_model.config.base import MAX_LAYERS, MAX_WIDTH, Settings

Activation = Literal["leaky_relu", "relu", "gelu", "mish", "adaptive"]
Norm = Literal["none", "layer", "rms", "unitball", "unitball_detach", "hypersphere", "simnorm"]

Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
FeedForwardWidth = Annotated[int, Field(ge=1, le=4 * MAX_WIDTH)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
StepSize = Annotated[float, Field(gt=0, lt=1)]

SIMNORM_GROUP = 8
"""Channels per group of norm 'simnorm'."""


def check_norm(config: Settings, name: str, **widths: int) -> None:
    """Raise ValueError if the norm in field `name` does not fit one of these widths."""
    if getattr(config, name) != "simnorm":
        return
    for field, width in widths.items():
        if width % SIMNORM_GROUP:
            raise ValueError(
                f"{name}: 'simnorm' needs a multiple of {SIMNORM_GROUP} channels, but {field} is "
                f"{width}; choose a multiple of {SIMNORM_GROUP} or another norm"
            )


def join_key(key: str, part: str | int) -> str:
    """The name of a part of a nested observation or action, below `key` (empty at the top).

    As specs allow it: other characters, such as spaces, become "_", and a digit at the very begin
    gets one before it.
    """
    name = re.sub(r"[^A-Za-z0-9_/]", "_", str(part))
    if key:
        return f"{key}/{name}"
    return name if name[:1].isalpha() or name[:1] == "_" else f"_{name}"
