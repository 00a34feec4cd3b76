"""Action distributions: sample, greedy, log_prob, entropy; rsample where gradients can pass.

Bare tensors instead of torch.distributions, whose argument checks cost more than small networks do.
Actions are in the networks' terms (indices 0..n-1, or -1..1); batch.decode_action makes them the
environment's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(slots=True)
class Categorical:
    """One of n actions."""

    probs: Tensor
    """[..., n], summing to 1."""

    @classmethod
    def from_logits(
        cls, logits: Tensor, *, low: float, high: float, legal: Tensor | None = None
    ) -> Categorical:
        """Softmax, clipped to [low, high] and renormalised; illegal actions get exactly 0.

        logits [..., n]; legal, broadcastable bool (a row without any legal action counts as all
        legal: it is padding). Gradients pass through the lower clip, or an action that data shows
        but the policy thinks impossible could never be learned; the upper clip stops them, and so
        does the renormalising sum.
        """
        if legal is not None:
            legal = legal | ~legal.any(-1, keepdim=True)
            logits = logits.masked_fill(~legal, -math.inf)
        probs = logits.softmax(-1).clamp(max=high)
        probs = probs + (low - probs).clamp(min=0.0).detach()
        if legal is not None:
            probs = torch.where(legal, probs, 0.0)
        return cls(probs / probs.detach().sum(-1, keepdim=True))

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """[...] int64."""
        flat = self.probs.reshape(-1, self.probs.shape[-1])
        index = torch.multinomial(flat, 1, generator=generator)
        return index.reshape(self.probs.shape[:-1])

    def greedy(self) -> Tensor:
        """[...] int64: the most likely action."""
        return self.probs.argmax(-1)

    def log_prob(self, index: Tensor) -> Tensor:
        """index [...] int64 -> [...]. An impossible action gets the log of the smallest float."""
        chosen = self.probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()

    def entropy(self) -> Tensor:
        """[...], in nats."""
        return torch.special.entr(self.probs).sum(-1)


@dataclass(slots=True)
class TanhGaussian:
    """tanh of a Gaussian with independent dimensions: actions in (-1, 1)."""

    loc: Tensor
    """[..., A], mean before tanh."""
    scale: Tensor
    """[..., A], standard deviation before tanh."""
    clip: float = 0.99
    """Actions are clipped to plus or minus this before tanh is undone: at 1 it is infinite."""

    @classmethod
    def from_parameters(
        cls, x: Tensor, *, std_low: float, std_high: float, clip: float
    ) -> TanhGaussian:
        """[..., 2A]: means, then deviations squashed into (std_low, std_high) on a log scale."""
        loc, raw = x.chunk(2, dim=-1)
        low, high = math.log(std_low), math.log(std_high)
        return cls(loc, torch.exp(low + 0.5 * (high - low) * (raw.tanh() + 1.0)), clip)

    def rsample(self, noise: Tensor) -> Tensor:
        """Differentiable samples from standard normal noise [*K, ..., A]."""
        return torch.tanh(self.loc + self.scale * noise)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """[..., A] in (-1, 1)."""
        noise = torch.empty_like(self.loc).normal_(generator=generator)
        return self.rsample(noise).detach()

    def greedy(self) -> Tensor:
        """[..., A]: the median (tanh of the Gaussian's mean)."""
        return self.loc.tanh()

    def log_prob(self, action: Tensor) -> Tensor:
        """action [..., A] in [-1, 1] -> [...], the joint log-density."""
        return self._log_prob_of(torch.atanh(action.clamp(-self.clip, self.clip)))

    def _log_prob_of(self, u: Tensor) -> Tensor:
        """Log-density of tanh(u). log(1 - tanh(u)^2) in a form that does not underflow."""
        z = (u - self.loc) / self.scale
        log_slope = 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
        return (-0.5 * z.square() - self.scale.log() - _HALF_LOG_TWO_PI - log_slope).sum(-1)

    def entropy(self, noise: Tensor) -> Tensor:
        """[...]: a Monte-Carlo estimate (there is no closed form) from noise [K, ..., A]."""
        return -self._log_prob_of(self.loc + self.scale * noise).mean(0)


Distribution = Categorical | TanhGaussian
