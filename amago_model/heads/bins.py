"""Returns as probabilities over fixed bins: labels for critics, and expected returns.

    two-hot    linear interpolation between the two centres next to a return
    HL-Gauss   a Gaussian around it, integrated over each bin (Imani & White 2018; Farebrother 2024)

A return outside the support belongs to the outer bin, so every label sums to 1 (unless
HLGaussCriticConfig.renormalize, as published: far outside it is 0). Centres are evenly spaced, by
default in symlog(y) = sign(y) ln(1 + |y|) (Hafner et al. 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amago_model.config import BinnedCriticConfig, HLGaussCriticConfig
from amago_model.layers import symexp, symlog


class Bins(nn.Module):
    """n bins; the buffer `centres` contains their centres (symlog, if configured)."""

    def __init__(self, config: BinnedCriticConfig) -> None:
        super().__init__()
        self.config = config
        self.labels = config if isinstance(config, HLGaussCriticConfig) else None
        ends = torch.tensor(
            [config.min_return, config.max_return], dtype=torch.float64, device="cpu"
        )
        low, high = (symlog(ends) if config.symlog else ends).tolist()
        self.width = (high - low) / (config.n_bins - 1)
        # Not saved: the config determines them.
        self.register_buffer("centres", torch.linspace(low, high, config.n_bins), persistent=False)

    centres: Tensor

    def label(self, returns: Tensor) -> Tensor:
        """Returns [...] -> labels [..., n], which sum to 1 (with `renormalize` to less, far outside
        the support)."""
        z = (symlog(returns) if self.config.symlog else returns).unsqueeze(-1)
        if self.labels is None:
            position = (z - self.centres[0]).clamp(min=0.0) / self.width
            position = position.clamp(max=self.config.n_bins - 1)
            index = torch.arange(self.config.n_bins, device=z.device)
            out: Tensor = (1.0 - (position - index).abs()).clamp(min=0.0)
            return out
        if self.labels.renormalize:
            return self._renormalized(z, self.labels.sigma * self.width)
        inner = (self.centres[:-1] + self.centres[1:]) / 2.0
        below = torch.special.ndtr((inner - z) / (self.labels.sigma * self.width))
        # The outermost edges are at infinity, so the outer bins get the mass outside the support.
        return torch.cat((below, torch.ones_like(z)), -1) - torch.cat(
            (torch.zeros_like(z), below), -1
        )

    def _renormalized(self, z: Tensor, deviation: float) -> Tensor:
        """[..., 1] -> [..., n]: the mass in each bin, divided by the mass in all bins."""
        half = self.width / 2.0
        upper, lower = self.centres + half - z, self.centres - half - z
        mass = torch.special.ndtr(upper / deviation) - torch.special.ndtr(lower / deviation)
        out: Tensor = mass / mass.sum(-1, keepdim=True).clamp(min=1e-8)
        return out

    def expected(self, logits: Tensor) -> Tensor:
        """Logits [..., n] -> returns [...]: the mean centre, converted from symlog."""
        z = (logits.softmax(-1) * self.centres).sum(-1)
        return symexp(z) if self.config.symlog else z

    def initial_bias(self) -> Tensor | None:
        """[n]: logits of a Gaussian around init_value with a standard deviation of four bins; None
        without init_value."""
        if self.config.init_value is None:
            return None
        value = torch.tensor(float(self.config.init_value))
        z = symlog(value) if self.config.symlog else value
        out: Tensor = -0.5 * ((self.centres - z) / (4.0 * self.width)).square()
        return out
