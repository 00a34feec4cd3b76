"""Names and limits that several settings share."""

from __future__ import annotations

from typing import Literal

Activation = Literal["leaky_relu", "relu", "gelu", "mish"]
Norm = Literal["none", "layer", "rms"]

MAX_LAYERS, MAX_WIDTH = 256, 65_536
