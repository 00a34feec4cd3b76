"""Trajectory encoders: a sequence of timestep vectors to a sequence of state vectors.

Every encoder is causal and has four methods:

    forward(x [B, L, D_in], time_idx [B, L]) -> [B, L, d_output]           windows
    initial_hidden(n, device) -> hidden                                    the start of n episodes
    step(x [N, 1, D_in], time_idx [N, 1], hidden) -> ([N, 1, d_output], hidden)
    reset_hidden(hidden, done [N] bool) -> hidden                          reset where done

`step` may modify the hidden state in place: use only the one it returns. Calling `step` for each
timestep of an episode gives the same outputs as `forward` on the whole episode.

If `forward` has an argument `packing`, the encoder can skip padding (data/packing.py): x is then
[1, M, D_in] and time_idx [1, M], the timesteps of all windows concatenated without padding, and the
output is [1, M, d_output]. Without this argument it gets padded windows, with zeros in the padding.
GRU and Mamba do not have it: a recurrence computes all windows at once, and torch's GRU is no
faster on packed sequences (on a CPU, forward and backward, packed and padded: 55 and 57 ms for 32
windows of up to 32 timesteps, 186 and 99 ms for 8 windows of up to 128).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amago_model.config import FeedForwardConfig, GRUConfig, TrajectoryEncoderConfig
from amago_model.data.packing import Packing
from amago_model.encoders.mamba import Mamba
from amago_model.encoders.transformer import Transformer
from amago_model.layers import FlatSequential, Linear, ResidualBlock, make_activation, make_norm

Hidden = Any
"""None, a tensor, a MambaHidden or a TransformerHidden. Only its encoder reads it."""


class _NoMemory(nn.Module):
    """Base class of encoders without memory; their hidden state is None."""

    def initial_hidden(self, n: int, device: torch.device | str) -> None:  # noqa: ARG002
        return None

    def step(self, x: Tensor, time_idx: Tensor, hidden: None) -> tuple[Tensor, None]:
        return self(x, time_idx), hidden

    def reset_hidden(self, hidden: None, done: Tensor) -> None:  # noqa: ARG002
        return hidden


class IdentityTrajectoryEncoder(_NoMemory):
    """The state is the timestep vector: no memory, no parameters."""

    def __init__(self, d_input: int) -> None:
        super().__init__()
        self.d_output = d_input

    def forward(self, x: Tensor, time_idx: Tensor, packing: Packing | None = None) -> Tensor:  # noqa: ARG002
        return x


class FeedForwardTrajectoryEncoder(_NoMemory):
    """Residual feed-forward blocks on each timestep independently."""

    def __init__(self, config: FeedForwardConfig, d_input: int) -> None:
        super().__init__()
        self.d_output = d = config.d_model
        block = {
            "activation": config.activation,
            "norm": config.norm,
            "dropout": config.dropout,
        }
        d_ff = config.d_ff or 4 * d
        self.net = FlatSequential(
            Linear(d_input, d),
            make_activation(config.activation),
            nn.Dropout(config.dropout),
            *[ResidualBlock(d, d_ff, **block) for _ in range(config.n_layers)],  # type: ignore[arg-type]
            Linear(d, d),
            make_norm(config.out_norm, d),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor, time_idx: Tensor, packing: Packing | None = None) -> Tensor:  # noqa: ARG002
        out: Tensor = self.net(x)
        return out


class GRUTrajectoryEncoder(nn.Module):
    """A GRU, a linear layer and a norm. Windows start with a hidden state of zeros."""

    def __init__(self, config: GRUConfig, d_input: int) -> None:
        super().__init__()
        self.config = config
        self.gru = nn.GRU(d_input, config.d_hidden, config.n_layers, batch_first=True)
        self.out = nn.Linear(config.d_hidden, config.d_output)
        self.norm = make_norm(config.norm, config.d_output)

    @property
    def d_output(self) -> int:
        return self.config.d_output

    def forward(self, x: Tensor, time_idx: Tensor) -> Tensor:  # noqa: ARG002
        result: Tensor = self.norm(self.out(self.gru(x)[0]))
        return result

    def initial_hidden(self, n: int, device: torch.device | str) -> Tensor:
        shape, dtype = (self.config.n_layers, n, self.config.d_hidden), self.out.weight.dtype
        return torch.zeros(shape, device=device, dtype=dtype)

    def step(self, x: Tensor, time_idx: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        y, hidden = self.gru(x, hidden)
        return self.norm(self.out(y)), hidden

    def reset_hidden(self, hidden: Tensor, done: Tensor) -> Tensor:
        return torch.where(done.reshape(1, -1, 1), 0.0, hidden)


def make_trajectory_encoder(config: TrajectoryEncoderConfig, d_input: int) -> nn.Module:
    match config.kind:
        case "identity":
            return IdentityTrajectoryEncoder(d_input)
        case "feed_forward":
            return FeedForwardTrajectoryEncoder(config, d_input)
        case "gru":
            return GRUTrajectoryEncoder(config, d_input)
        case "mamba":
            return Mamba(config, d_input)
        case "transformer":
            return Transformer(config, d_input)
