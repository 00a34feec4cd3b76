"""Names and limits that several settings share."""

from __future__ import annotations

from typing import Literal

from amago_model.checked import Checked
from amago_model.errors import ConfigError

Activation = Literal["leaky_relu", "relu", "gelu", "mish", "adaptive"]
Norm = Literal["none", "layer", "rms", "unitball", "unitball_detach", "hypersphere", "simnorm"]

MAX_LAYERS, MAX_WIDTH = 256, 65_536
SIMNORM_GROUP = 8
"""Channels of one group of norm 'simnorm'."""


def check_norm(config: Checked, name: str, **widths: int) -> None:
    """Refuse, under the setting's name, a norm that does not fit the widths it is used at."""
    if getattr(config, name) != "simnorm":
        return
    for field, width in widths.items():
        if width % SIMNORM_GROUP:
            raise ConfigError(
                f"{type(config).__name__}.{name}: 'simnorm' works on groups of {SIMNORM_GROUP} "
                f"channels, and {field} is {width}; choose a multiple of {SIMNORM_GROUP} or "
                "another norm"
            )
