"""PopArt: normalised returns, by default with outputs preserved when the statistics change.

For a raw network output x, the normalised value is w x + b and the value is sigma (w x + b) + mean.
An update of (mean, sigma) also updates w and b so that the value of each x does not change (van
Hasselt et al. 2016). w and b are statistics, not weights; critics and target critics share them.
So sigma w never changes, nor the scale of the outputs that a network must learn. Without
`preserve_outputs` w stays 1 and b 0, and the values of x move with mean and sigma. Critics over
bins output returns; they use only mean and sigma.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amago_model.config import PopArtConfig
from amago_model.running_statistics import RunningMoments, Statistics

LARGEST_SIGMA = 1e4
"""The largest standard deviation, in units of the multiplied reward."""


class PopArt(Statistics):
    """Statistics of G returns, one for each discount; the last dimension of every input is G."""

    def __init__(self, n_gammas: int, config: PopArtConfig | None, *, bins: bool = False) -> None:
        """config None: no normalisation. `bins`: the critics classify over bins."""
        super().__init__()
        self.enabled, self.bins = config is not None, bins
        c = config or PopArtConfig()
        self.preserves = c.preserve_outputs
        self.moments = RunningMoments((n_gammas,), beta=c.beta, init_nu=c.init_nu)
        self.moments.mean.fill_(c.init_mean)
        self.register_buffer("w", torch.ones(n_gammas))
        self.register_buffer("b", torch.zeros(n_gammas))

    w: Tensor
    b: Tensor

    @property
    def mean(self) -> Tensor:
        """[G]: mean of the returns."""
        return self.moments.mean

    @property
    def sigma(self) -> Tensor:
        """[G]: standard deviation of the returns, clipped to 0.01 .. 10^4."""
        return self.moments.variance.clamp(1e-4, LARGEST_SIGMA**2).sqrt()

    def apply_batch(self, x: Tensor, mask: Tensor) -> None:
        """Update with returns x [*mask.shape, G] where the mask is True."""
        if not self.enabled:
            return
        old_mean, old_sigma = self.mean.clone(), self.sigma
        self.moments.apply_batch(x, mask)
        if not self.preserves:
            return
        sigma = self.sigma
        self.w.mul_(old_sigma / sigma)
        self.b.mul_(old_sigma).add_(old_mean - self.mean).div_(sigma)

    def normalize(self, returns: Tensor) -> Tensor:
        """Returns -> normalised returns, (return - mean) / sigma."""
        return (returns - self.mean) / self.sigma if self.enabled else returns

    def to_normalized(self, x: Tensor) -> Tensor:
        """Scalar critic outputs -> normalised values."""
        if not self.enabled or self.bins:
            return self.normalize(x)
        return torch.addcmul(self.b, self.w, x)

    def to_return(self, x: Tensor) -> Tensor:
        """Scalar critic outputs -> returns, in units of the multiplied reward."""
        if not self.enabled or self.bins:
            return x
        return torch.addcmul(self.mean, self.sigma, self.to_normalized(x))

    def normalized_difference(self, x: Tensor) -> Tensor:
        """A difference of scalar critic outputs -> the difference of their normalised values."""
        if not self.enabled:
            return x
        return x / self.sigma if self.bins else self.w * x

    def output_difference(self, x: Tensor) -> Tensor:
        """The inverse of `normalized_difference`."""
        if not self.enabled:
            return x
        return x * self.sigma if self.bins else x / self.w
