"""The Mamba memory: constant time and memory per step for episodes of any length.

    h = W x
    h = h + mixer(norm(h))                                  n_layers times
    out = norm(h)

    mixer:  u, gate = W_in x                                both of width expand * d_model
            u = silu(causal convolution of each channel over the last d_conv inputs)
            step, B, C = W u; delta = softplus(W step + b)  the recurrence depends on its input
            y = selective scan of u                         selective_scan.py
            W_out (y * silu(gate))

Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces". Training windows
start from an empty state, as do episodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amago_model.config import MambaConfig
from amago_model.encoders.selective_scan import choose_scan, selective_scan
from amago_model.layers import make_norm


@dataclass(slots=True)
class MambaHidden:
    """The hidden state of N environments. `step` modifies it in place."""

    recent: Tensor
    """[n_layers, N, D, d_conv - 1]: the last inputs of the convolution."""
    states: Tensor
    """[n_layers, N, S, D]: the recurrent states."""


class MambaBlock(nn.Module):
    """x + mixer(norm(x)). D = expand * d_model channels, S = d_state."""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        width, rank = config.expand * config.d_model, math.ceil(config.d_model / 16)
        self.norm = make_norm(config.norm, config.d_model)
        self.expand = nn.Linear(config.d_model, 2 * width, bias=False)
        self.convolution = nn.Conv1d(width, width, config.d_conv, groups=width)
        self.select = nn.Linear(width, rank + 2 * config.d_state, bias=False)
        self.step_size = nn.Linear(rank, width)
        # Decays 1, 2, …, S in each channel (S4D-real), and first steps from 0.001 to 0.1.
        rates = torch.arange(1, config.d_state + 1, dtype=torch.float32)
        self.log_rates = nn.Parameter(rates.log()[:, None].repeat(1, width))
        self.skip = nn.Parameter(torch.ones(width))
        self.contract = nn.Linear(width, config.d_model, bias=False)
        nn.init.uniform_(self.step_size.weight, -(rank**-0.5), rank**-0.5)
        with torch.no_grad():
            first = torch.empty(width).uniform_(math.log(1e-3), math.log(0.1)).exp()
            self.step_size.bias.copy_(first + torch.log(-torch.expm1(-first)))  # softplus inverted

    def _selected(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u [..., D] -> delta [..., D], B and C [..., S]."""
        s = self.config.d_state
        rank = self.step_size.in_features
        step, b, c = self.select(u).split((rank, s, s), dim=-1)
        return F.softplus(self.step_size(step)), b, c

    def forward(self, x: Tensor, scan: str) -> Tensor:
        """x [B, L, d_model]; `scan` is the name of a scan."""
        u, gate = self.expand(self.norm(x)).chunk(2, dim=-1)
        before = (self.config.d_conv - 1, 0)
        u = F.silu(self.convolution(F.pad(u.transpose(1, 2), before)).transpose(1, 2))
        delta, b, c = self._selected(u)
        y = selective_scan(u, delta, -self.log_rates.exp(), b, c, self.skip, scan)
        out: Tensor = x + self.contract(y * F.silu(gate))
        return out

    def step(self, x: Tensor, recent: Tensor, state: Tensor) -> Tensor:
        """x [N, 1, d_model]; modifies recent [N, D, d_conv - 1] and state [N, S, D] in place."""
        u, gate = self.expand(self.norm(x)).chunk(2, dim=-1)
        window = torch.cat((recent, u.transpose(1, 2).to(recent.dtype)), dim=-1)
        recent.copy_(window[..., 1:])
        u = F.silu(self.convolution(window)).transpose(1, 2)
        u, delta, b, c = (z.to(state.dtype) for z in (u, *self._selected(u)))
        state.mul_((delta * -self.log_rates.exp()).exp()).addcmul_(b.transpose(1, 2), delta * u)
        y = c @ state + self.skip * u
        out: Tensor = x + self.contract(y * F.silu(gate))
        return out


class Mamba(nn.Module):
    """[B, L, D_in] to [B, L, d_model]; `step` computes the same for one timestep."""

    def __init__(self, config: MambaConfig, d_input: int) -> None:
        super().__init__()
        self.config = config
        self.scan_name: str = config.scan
        """For logs: the scan of the last window, or the setting before the first window."""
        self.embed = nn.Linear(d_input, config.d_model)
        self.layers = nn.ModuleList(MambaBlock(config) for _ in range(config.n_layers))
        self.norm = make_norm(config.norm, config.d_model)

    @property
    def d_output(self) -> int:
        return self.config.d_model

    def kernels(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:  # noqa: ARG002
        """The scan of windows on this device. Its dtype is at least float32."""
        return {"scan": choose_scan(self.config.scan, device, self.embed.weight.dtype)}

    def forward(self, x: Tensor, time_idx: Tensor) -> Tensor:  # noqa: ARG002
        self.scan_name = choose_scan(self.config.scan, x.device, x.dtype)
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, self.scan_name)
        out: Tensor = self.norm(h)
        return out

    def initial_hidden(self, n: int, device: torch.device | str) -> MambaHidden:
        c, like = self.config, self.embed.weight
        width = c.expand * c.d_model
        recent = torch.zeros(c.n_layers, n, width, c.d_conv - 1, device=device, dtype=like.dtype)
        states = torch.zeros(c.n_layers, n, c.d_state, width, device=device, dtype=like.dtype)
        return MambaHidden(recent=recent, states=states)

    def step(
        self,
        x: Tensor,
        time_idx: Tensor,  # noqa: ARG002
        hidden: MambaHidden,
    ) -> tuple[Tensor, MambaHidden]:
        """x [N, 1, D_in] -> [N, 1, d_model]. Modifies `hidden` in place."""
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = layer.step(h, hidden.recent[i], hidden.states[i])  # type: ignore[operator]
        return self.norm(h), hidden

    def reset_hidden(self, hidden: MambaHidden, done: Tensor) -> MambaHidden:
        for memory in (hidden.recent, hidden.states):
            memory.masked_fill_(done[:, None, None], 0.0)
        return hidden
