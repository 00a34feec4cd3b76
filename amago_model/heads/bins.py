"""Returns as probabilities over fixed bins: labels to learn from, and the way back to a number.

    two-hot    the two centres beside a return share it, in proportion to closeness
    HL-Gauss   a Gaussian around it, integrated over each bin (Imani & White 2018; Farebrother 2024)

A return beyond the support belongs to the bin at that edge, wholly: every label sums to 1 (unless
HLGaussCriticConfig.renormalize, as published: far outside nothing is left). Centres
are evenly spaced, by default in symlog(y) = sign(y) ln(1 + |y|) (Hafner et al. 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amago_model.config import BinnedCriticConfig, HLGaussCriticConfig
from amago_model.layers import symexp, symlog


class Bins(nn.Module):
    """n centres, as a buffer."""

    def __init__(self, config: BinnedCriticConfig) -> None:
        super().__init__()
        self.config = config
        self.labels = config if isinstance(config, HLGaussCriticConfig) else None
        ends = torch.tensor([config.min_return, config.max_return], dtype=torch.float64)
        low, high = (symlog(ends) if config.symlog else ends).tolist()
        self.width = (high - low) / (config.n_bins - 1)
        # Not saved: they follow from the config.
        self.register_buffer("centres", torch.linspace(low, high, config.n_bins), persistent=False)

    centres: Tensor

    def label(self, returns: Tensor) -> Tensor:
        """[...] -> [..., n], summing to 1 (with `renormalize` to less, far outside the support)."""
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
        # Outermost edges at infinity: the mass outside goes to the bins at the ends.
        return torch.cat((below, torch.ones_like(z)), -1) - torch.cat(
            (torch.zeros_like(z), below), -1
        )

    def _renormalized(self, z: Tensor, deviation: float) -> Tensor:
        """[..., 1] -> [..., n]: the mass inside of each bin, all alike, over that inside of all."""
        half = self.width / 2.0
        upper, lower = self.centres + half - z, self.centres - half - z
        mass = torch.special.ndtr(upper / deviation) - torch.special.ndtr(lower / deviation)
        out: Tensor = mass / mass.sum(-1, keepdim=True).clamp(min=1e-8)
        return out

    def expected(self, logits: Tensor) -> Tensor:
        """[..., n] -> [...]: the return of the mean centre."""
        z = (logits.softmax(-1) * self.centres).sum(-1)
        return symexp(z) if self.config.symlog else z

    def initial_bias(self) -> Tensor | None:
        """[n]: logits of a Gaussian around init_value, four bins wide; None for none."""
        if self.config.init_value is None:
            return None
        value = torch.tensor(float(self.config.init_value))
        z = symlog(value) if self.config.symlog else value
        out: Tensor = -0.5 * ((self.centres - z) / (4.0 * self.width)).square()
        return out
