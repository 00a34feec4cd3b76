"""PopArt: critics learn normalised returns, and stay unmoved when the normalisation moves.

With raw network output x, the normalised value is w x + b and the value sigma (w x + b) + mean. An
update of (mean, sigma) changes w and b so that the value of every x is what it was (van Hasselt et
al. 2016). w and b are statistics, not weights: one set serves the critics and their copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amago_model.running_statistics import RunningMoments, Statistics


class PopArt(Statistics):
    """Statistics of G returns, one for each discount; the last dimension of every input is G."""

    def __init__(self, n_gammas: int, *, beta: float, init_nu: float, enabled: bool) -> None:
        super().__init__()
        self.enabled = enabled
        self.moments = RunningMoments((n_gammas,), beta=beta, init_nu=init_nu)
        self.register_buffer("w", torch.ones(n_gammas))
        self.register_buffer("b", torch.zeros(n_gammas))

    w: Tensor
    b: Tensor

    @property
    def mean(self) -> Tensor:
        """[G]"""
        return self.moments.mean

    @property
    def sigma(self) -> Tensor:
        """[G], kept within 0.01 .. 10^4."""
        return self.moments.variance.clamp(1e-4, 1e8).sqrt()

    def take(self, x: Tensor, mask: Tensor) -> None:
        """Take in returns x [*mask.shape, G] where the mask is True."""
        if not self.enabled:
            return
        old_mean, old_sigma = self.mean.clone(), self.sigma
        self.moments.take(x, mask)
        sigma = self.sigma
        self.w.mul_(old_sigma / sigma)
        self.b.mul_(old_sigma).add_(old_mean - self.mean).div_(sigma)

    def normalize(self, returns: Tensor) -> Tensor:
        """A return, in deviations from the mean."""
        return (returns - self.mean) / self.sigma if self.enabled else returns

    def normalized_value(self, x: Tensor) -> Tensor:
        """Raw critic output -> normalised value."""
        return torch.addcmul(self.b, self.w, x) if self.enabled else x

    def normalized_difference(self, x: Tensor, *, raw: bool) -> Tensor:
        """A difference of raw critic outputs, or else of returns -> of normalised values."""
        if not self.enabled:
            return x
        return self.w * x if raw else x / self.sigma

    def value(self, x: Tensor) -> Tensor:
        """Raw critic output -> value, in units of the (multiplied) reward."""
        if not self.enabled:
            return x
        return torch.addcmul(self.mean, self.sigma, self.normalized_value(x))
