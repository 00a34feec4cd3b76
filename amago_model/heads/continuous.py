"""Distributions of continuous actions in [-1, 1]. distributions.py has those of discrete actions.

softplus and tanh bound the parameters. They saturate, so their gradient vanishes far outside: after
a few bad updates a policy could stay uniform or deterministic. With `bound_gradient`, the gradient
far outside is that of the nearest point that is not saturated, if a descent step leads back inside,
else zero. For losses that share a forward pass of the actor, the sum of their gradients decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from amago_model.config import (
    BetaConfig,
    DeterministicConfig,
    GaussianConfig,
    GMMConfig,
    TanhGaussianConfig,
)

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_TRIES = 4


@dataclass(slots=True)
class TanhGaussian:
    """tanh of a Gaussian with independent dimensions: actions in (-1, 1)."""

    loc: Tensor
    """[..., A], mean before tanh."""
    scale: Tensor
    """[..., A], standard deviation before tanh."""
    clip: float = 0.99
    """Actions are clipped to plus or minus this before atanh, which is infinite at 1."""

    @classmethod
    def from_parameters(cls, x: Tensor, c: TanhGaussianConfig) -> TanhGaussian:
        """x [..., 2A]: means, then standard deviations, squashed to (std_low, std_high) on a log
        scale."""
        loc, raw = x.chunk(2, dim=-1)
        scale = bounded_exp(raw, c.std_low, c.std_high, gradient=c.bound_gradient)
        return cls(loc, scale, c.log_prob_clip)

    def rsample(self, noise: Tensor) -> Tensor:
        """Differentiable samples from standard normal noise [*K, ..., A]."""
        return torch.addcmul(self.loc, self.scale, noise).tanh()

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
        """Log-density of tanh(u)."""
        z = (u - self.loc) / self.scale
        log_density = -0.5 * z.square() - self.scale.log() - _HALF_LOG_TWO_PI
        return (log_density - _log_tanh_slope(u)).sum(-1)

    def entropy(self, noise: Tensor | None = None) -> Tensor:
        """[...]: a Monte-Carlo estimate (there is no closed form) from noise [K, ..., A]."""
        assert noise is not None
        return -self._log_prob_of(self.loc + self.scale * noise).mean(0)


@dataclass(slots=True)
class Gaussian:
    """A Gaussian with independent dimensions and a mean in (-1, 1); samples are clipped to [-1, 1].

    The log-density is that of the Gaussian without clipping, which is bounded and smooth for
    actions at the bounds (the policy of IQL; Kostrikov et al. 2021).
    """

    mean: Tensor
    """[..., A] in (-1, 1)."""
    std: Tensor
    """[..., A]"""

    @classmethod
    def from_parameters(cls, x: Tensor, c: GaussianConfig) -> Gaussian:
        """x [..., 2A]: means before a tanh, then standard deviations, squashed to
        (std_low, std_high) on a log scale."""
        loc, raw = x.chunk(2, dim=-1)
        std = bounded_exp(raw, c.std_low, c.std_high, gradient=c.bound_gradient)
        return cls(loc.tanh(), std)

    def rsample(self, noise: Tensor) -> Tensor:
        """Differentiable samples from standard normal noise [*K, ..., A]; a clipped sample has no
        gradient."""
        return torch.addcmul(self.mean, self.std, noise).clamp(-1.0, 1.0)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """[..., A] in [-1, 1]."""
        noise = torch.empty_like(self.mean).normal_(generator=generator)
        return self.rsample(noise).detach()

    def greedy(self) -> Tensor:
        """[..., A]: the mean."""
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        """action [..., A] in [-1, 1] -> [...], the joint log-density."""
        z = (action - self.mean) / self.std
        return (-0.5 * z.square() - self.std.log() - _HALF_LOG_TWO_PI).sum(-1)

    def entropy(self, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002 - has a closed form
        """[...]: that of the Gaussian without clipping."""
        return (self.std.log() + _HALF_LOG_TWO_PI + 0.5).sum(-1)


@dataclass(slots=True)
class Beta:
    """Independent Beta distributions stretched to (-1, 1); bounded without a tanh (Chou 2017)."""

    alpha: Tensor
    """[..., A], at least 1, as `beta`: one mode each."""
    beta: Tensor
    """[..., A]"""
    clip: float = 0.99
    """Actions are clipped to plus or minus this; at 1 the log-density may be infinite."""

    NOISE: ClassVar[int] = 4 * _TRIES
    """Standard normal numbers that a sample needs per action dimension."""

    @classmethod
    def from_parameters(cls, x: Tensor, c: BetaConfig) -> Beta:
        """x [..., 2A]: alphas, then betas, as softplus(x) + low, at most high."""
        alpha, beta = bounded_softplus(x, c.low, c.high, gradient=c.bound_gradient).chunk(2, dim=-1)
        return cls(alpha, beta, c.log_prob_clip)

    def rsample(self, noise: Tensor) -> Tensor:
        """Differentiable samples from standard normal noise [*K, ..., 16 A]: X / (X + Y) of two
        Gammas. The gradient is that of the inverse distribution function (Figurnov et al. 2018)."""
        concentration = torch.stack((self.alpha, self.beta), dim=-1)
        x = _gamma(concentration, noise.unflatten(-1, (-1, 2, 2 * _TRIES)))
        return 2.0 * x[..., 0] / x.sum(-1) - 1.0

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """[..., A] in [-1, 1]."""
        return self.rsample(normal_like(self.alpha, self.NOISE, generator)).detach()

    def greedy(self) -> Tensor:
        """[..., A]: the mean."""
        return 2.0 * self.alpha / (self.alpha + self.beta) - 1.0

    def log_prob(self, action: Tensor) -> Tensor:
        """action [..., A] in [-1, 1] -> [...], the joint log-density."""
        u = (action.clamp(-self.clip, self.clip) + 1.0) / 2.0
        kernel = (self.alpha - 1.0) * u.log() + (self.beta - 1.0) * torch.log1p(-u)
        return (kernel - self._log_norm() - math.log(2.0)).sum(-1)

    def entropy(self, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002 - has a closed form
        """[...], in nats."""
        a, b = self.alpha, self.beta
        curved = (a - 1.0) * a.digamma() + (b - 1.0) * b.digamma()
        curved = curved - (a + b - 2.0) * (a + b).digamma()
        return (self._log_norm() - curved + math.log(2.0)).sum(-1)

    def _log_norm(self) -> Tensor:
        return self.alpha.lgamma() + self.beta.lgamma() - (self.alpha + self.beta).lgamma()


@dataclass(slots=True)
class Deterministic:
    """A single action per state. It has no density: log_prob is a negative squared error."""

    loc: Tensor
    """[..., A] in (-1, 1)."""
    noise: float = 0.0
    """Standard deviation of clipped noise on samples."""
    clip: float = 0.0
    """Largest size of this noise."""

    def smoothed(self, c: DeterministicConfig) -> Deterministic:
        """With noise on its samples (target policy smoothing; TD3: Fujimoto et al. 2018)."""
        return Deterministic(self.loc, c.target_noise, c.target_noise_clip)

    def rsample(self, noise: Tensor) -> Tensor:
        """Differentiable actions from standard normal noise [*K, ..., A], in [-1, 1]."""
        return (self.loc + (self.noise * noise).clamp(-self.clip, self.clip)).clamp(-1.0, 1.0)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:  # noqa: ARG002
        """[..., A]: the action."""
        return self.loc.detach()

    def greedy(self) -> Tensor:
        """[..., A]: the action."""
        return self.loc

    def log_prob(self, action: Tensor) -> Tensor:
        """action [..., A] in [-1, 1] -> [...], minus the squared error, mean over dimensions."""
        return -(action - self.loc).square().mean(-1)

    def entropy(self, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """[...]: zeros."""
        return torch.zeros_like(self.loc[..., 0])


@dataclass(slots=True)
class GaussianMixture:
    """tanh of a mixture of M diagonal Gaussians. Its samples have no gradient."""

    logits: Tensor
    """[..., M]"""
    loc: Tensor
    """[..., M, A], means before tanh."""
    scale: Tensor
    """[..., M, A], standard deviations before tanh."""
    clip: float = 0.99
    """Actions are clipped to plus or minus this before atanh."""

    @classmethod
    def from_parameters(cls, x: Tensor, c: GMMConfig) -> GaussianMixture:
        """x [..., M + 2 M A]: logits, then means, then standard deviations, as softplus(x) +
        std_low, at most std_high."""
        size = (x.shape[-1] - c.modes) // 2
        logits, loc, raw = x.split((c.modes, size, size), dim=-1)
        scale = bounded_softplus(raw, c.std_low, c.std_high, gradient=c.bound_gradient)
        loc, scale = (part.unflatten(-1, (c.modes, -1)) for part in (loc, scale))
        return cls(logits, loc, scale, c.log_prob_clip)

    def rsample(self, noise: Tensor) -> Tensor:
        """Samples, without gradient, from standard normal noise [*K, ..., 1 + A]."""
        return self._before_tanh(noise).tanh()

    @torch.no_grad()
    def _before_tanh(self, noise: Tensor) -> Tensor:
        which, noise = torch.special.ndtr(noise[..., :1]), noise[..., 1:]
        below = self.logits.softmax(-1).cumsum(-1) < which
        index = below.sum(-1).clamp(max=self.logits.shape[-1] - 1)[..., None, None]
        index = index.expand(*index.shape[:-1], noise.shape[-1])
        loc, scale = (
            x.expand(*index.shape[:-2], *x.shape[-2:]).gather(-2, index).squeeze(-2)
            for x in (self.loc, self.scale)
        )
        return loc + scale * noise

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """[..., A] in (-1, 1)."""
        *batch, _, width = self.loc.shape
        noise = self.loc.new_empty((*batch, 1 + width)).normal_(generator=generator)
        return self.rsample(noise)

    def greedy(self) -> Tensor:
        """[..., A]: tanh of the mixture's mean."""
        return (self.logits.softmax(-1).unsqueeze(-1) * self.loc).sum(-2).tanh()

    def log_prob(self, action: Tensor) -> Tensor:
        """action [..., A] in [-1, 1] -> [...], the joint log-density."""
        return self._log_prob_of(torch.atanh(action.clamp(-self.clip, self.clip)))

    def _log_prob_of(self, u: Tensor) -> Tensor:
        z = (u.unsqueeze(-2) - self.loc) / self.scale
        each = (-0.5 * z.square() - self.scale.log() - _HALF_LOG_TWO_PI).sum(-1)
        return (self.logits.log_softmax(-1) + each).logsumexp(-1) - _log_tanh_slope(u).sum(-1)

    def entropy(self, noise: Tensor | None = None) -> Tensor:
        """[...]: a Monte-Carlo estimate from noise [K, ..., 1 + A]."""
        assert noise is not None
        return -self._log_prob_of(self._before_tanh(noise)).mean(0)


def normal_like(like: Tensor, times: int, generator: torch.Generator | None) -> Tensor:
    """Standard normal noise [..., times A] for parameters [..., A], of their dtype and device."""
    shape = (*like.shape[:-1], like.shape[-1] * times)
    return like.new_empty(shape).normal_(generator=generator)


def _log_tanh_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), in a form that does not underflow."""
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))


def _gamma(concentration: Tensor, noise: Tensor) -> Tensor:
    """Gamma samples of concentration [...] >= 1 from standard normal noise [*K, ..., 2 tries].

    Rejection sampling (Marsaglia & Tsang 2000) with 4 tries, each accepted with a probability of at
    least 0.95. If all are rejected (1 in 160 000), the sample is a value near the mode.
    """
    with torch.no_grad():
        x, accept = noise.chunk(2, dim=-1)
        d = (concentration - 1.0 / 3.0).unsqueeze(-1)
        v = (1.0 + x / (9.0 * d).sqrt()) ** 3
        bound = 0.5 * x.square() + d - d * v + d * v.clamp(min=1e-30).log()
        accepted = (v > 0) & (torch.special.log_ndtr(accept) < bound)
        first = accepted.to(x.dtype).argmax(-1, keepdim=True)
        v = torch.where(accepted, v, 1.0).gather(-1, first).squeeze(-1)
        sample = d.squeeze(-1) * v
    if not (torch.is_grad_enabled() and concentration.requires_grad):
        return sample
    slope = torch._standard_gamma_grad(concentration.detach().expand_as(sample), sample)
    return sample + slope * (concentration - concentration.detach())


# ------------------------------------------------------------------------------ bounded parameters

SOFTPLUS_EDGE = -4.0
"""Below this, softplus and its slope (at most 1) are less than 0.02."""
TANH_EDGE = 3.0
"""Beyond this, the slope of tanh is less than a hundredth of its maximum."""


def bounded_softplus(x: Tensor, low: float, high: float | None, *, gradient: bool) -> Tensor:
    """softplus(x) + low, at most high, elementwise; `gradient`: also where it saturates."""

    def rising(x: Tensor) -> Tensor:
        return F.softplus(x) + low

    if not gradient:
        return rising(x).clamp(min=low, max=high)
    top = math.inf if high is None else _inverse_softplus(high - low)
    return _clamped(rising, x, min(SOFTPLUS_EDGE, top), top, reach=top)


def bounded_exp(x: Tensor, low: float, high: float, *, gradient: bool) -> Tensor:
    """Elementwise tanh(x) scaled to (low, high) on a log scale; `gradient`: also where it
    saturates."""
    middle, half = 0.5 * math.log(low * high), 0.5 * math.log(high / low)

    def rising(x: Tensor) -> Tensor:
        return (middle + half * x.tanh()).exp()

    return _clamped(rising, x, -TANH_EDGE, TANH_EDGE) if gradient else rising(x)


class _InwardClamp(torch.autograd.Function):
    """Clamp that passes the gradient outside the bounds, unless descent would lead further out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bounds = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,), (low, high), (gradient,) = ctx.saved_tensors, ctx.bounds, gradients
        outward = ((x < low) & (gradient > 0.0)) | ((x > high) & (gradient < 0.0))
        return gradient.masked_fill(outward, 0.0), None, None


def _clamped(
    rising: Callable[[Tensor], Tensor],
    x: Tensor,
    low: float,
    high: float,
    *,
    reach: float = math.inf,
) -> Tensor:
    """rising(x), constant above `reach`, with the gradient of the nearest point in [low, high]."""
    if _within(x, low, high):
        return rising(x)
    with torch.no_grad():
        value = rising(x.clamp(max=reach))
    if not torch.is_grad_enabled():
        return value
    inside = rising(_InwardClamp.apply(x, low, high))  # type: ignore[no-untyped-call]
    return value + (inside - inside.detach())


def _within(x: Tensor, low: float, high: float) -> bool:
    """Whether all of x is in [low, high], which is the common case. False where checking would need
    a synchronisation (GPU) or break the graph (torch.compile)."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not x.numel():
        return False
    least, most = x.detach().aminmax()
    return bool(least >= low and most <= high)


def _inverse_softplus(y: float) -> float:
    return y + math.log(-math.expm1(-y))
