"""Action distributions: sample, greedy, log_prob, entropy; rsample where gradients can pass.

Bare tensors instead of torch.distributions, whose argument checks cost more than small networks do.
Actions are in the networks' terms (indices 0..n-1, ones and zeros, or -1..1); batch.decode_action
makes them the environment's. All that is drawn in an update is a function of standard normal noise,
handed in: so padding, or a second look at the same batch, changes no draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_TRIES = 4


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

    def entropy(self, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002 - has a closed form
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
        return cls(loc, (0.5 * (low + high) + 0.5 * (high - low) * raw.tanh()).exp(), clip)

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
class Beta:
    """Independent Beta distributions stretched to (-1, 1); bounded without a tanh (Chou 2017)."""

    alpha: Tensor
    """[..., A], at least 1, as `beta`: one mode each."""
    beta: Tensor
    """[..., A]"""
    clip: float = 0.99
    """Actions are clipped to plus or minus this: at 1 the log-density may be infinite."""

    NOISE: ClassVar[int] = 4 * _TRIES
    """Normal numbers that a sample needs for each dimension of an action."""

    @classmethod
    def from_parameters(cls, x: Tensor, *, low: float, high: float | None, clip: float) -> Beta:
        """[..., 2A]: alphas, then betas, made softplus(x) + low and at most high."""
        alpha, beta = _bounded_softplus(x, low, high).chunk(2, dim=-1)
        return cls(alpha, beta, clip)

    def rsample(self, noise: Tensor) -> Tensor:
        """Differentiable samples from standard normal noise [*K, ..., 16 A]: X / (X + Y) of two
        Gammas. The gradient is that of the inverse distribution function (Figurnov et al. 2018)."""
        concentration = torch.stack((self.alpha, self.beta), dim=-1)
        x = _gamma(concentration, noise.unflatten(-1, (-1, 2, 2 * _TRIES)))
        return 2.0 * x[..., 0] / x.sum(-1) - 1.0

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """[..., A] in [-1, 1]."""
        return self.rsample(_normal(self.alpha, self.NOISE, generator)).detach()

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
class GaussianMixture:
    """tanh of a mixture of M diagonal Gaussians. Its samples have no gradient."""

    logits: Tensor
    """[..., M]"""
    loc: Tensor
    """[..., M, A], means before tanh."""
    scale: Tensor
    """[..., M, A], standard deviations before tanh."""
    clip: float = 0.99
    """Actions are clipped to plus or minus this before tanh is undone."""

    @classmethod
    def from_parameters(
        cls, x: Tensor, *, modes: int, std_low: float, std_high: float | None, clip: float
    ) -> GaussianMixture:
        """[..., M + 2 M A]: logits, then means, then what becomes softplus(x) + std_low."""
        size = (x.shape[-1] - modes) // 2
        logits, loc, raw = x.split((modes, size, size), dim=-1)
        scale = _bounded_softplus(raw, std_low, std_high)
        return cls(logits, loc.unflatten(-1, (modes, -1)), scale.unflatten(-1, (modes, -1)), clip)

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


@dataclass(slots=True)
class MultiBinary:
    """n independent switches. Actions are ones and zeros, in floats."""

    logits: Tensor
    """[..., n], of being on."""

    def rsample(self, noise: Tensor) -> Tensor:
        """Exact ones and zeros from standard normal noise [*K, ..., n]; their gradient is that of
        the probabilities (straight through: Bengio et al. 2013)."""
        p = self.logits.sigmoid()
        hard = (torch.special.ndtr(noise) < p).to(p.dtype)
        return _straight_through(hard, p)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """[..., n]"""
        return self.rsample(_normal(self.logits, 1, generator)).detach()

    def greedy(self) -> Tensor:
        """[..., n]: each switch in its likelier position."""
        return (self.logits > 0).to(self.logits.dtype)

    def log_prob(self, action: Tensor) -> Tensor:
        """action [..., n] -> [...], joint over the switches."""
        on, off = F.logsigmoid(self.logits), F.logsigmoid(-self.logits)
        return (action * on + (1.0 - action) * off).sum(-1)

    def entropy(self, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002 - has a closed form
        """[...], in nats."""
        p = self.logits.sigmoid()
        on, off = F.logsigmoid(self.logits), F.logsigmoid(-self.logits)
        return -(p * on + (1.0 - p) * off).sum(-1)


@dataclass(slots=True)
class OneHots:
    """One of nvec[i] choices for every part i, independently; actions are one-hots side by side.

    With a single part it is a Categorical whose samples can be climbed.
    """

    probs: Tensor
    """[..., A], the parts side by side, each summing to 1."""
    nvec: tuple[int, ...]
    """Choices of each part; A is their sum."""
    temperature: float = 0.5
    """Of the softmax whose gradient the samples carry: sharper is truer and noisier."""

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        nvec: tuple[int, ...],
        *,
        low: float,
        high: float,
        legal: Tensor | None = None,
    ) -> OneHots:
        """Each part as in Categorical.from_logits. logits [..., A]; legal, broadcastable bool."""
        masks = [None] * len(nvec) if legal is None else legal.split(nvec, dim=-1)
        parts = [
            Categorical.from_logits(part, low=low, high=high, legal=mask).probs
            for part, mask in zip(logits.split(nvec, dim=-1), masks, strict=True)
        ]
        return cls(torch.cat(parts, dim=-1), nvec)

    def rsample(self, noise: Tensor) -> Tensor:
        """Exact one-hots from standard normal noise [*K, ..., A] by the Gumbel-max trick; their
        gradient is that of a softmax at `temperature` (straight through: Jang et al. 2017)."""
        log_p = _log(self.probs)
        eps = torch.finfo(log_p.dtype).eps
        perturbed = log_p - (-torch.special.ndtr(noise).clamp(eps, 1.0 - eps).log()).log()
        parts = []
        for part in perturbed.split(self.nvec, dim=-1):
            soft = (part / self.temperature).softmax(-1)
            hard = torch.zeros_like(soft).scatter_(-1, part.argmax(-1, keepdim=True), 1.0)
            parts.append(_straight_through(hard, soft))
        return torch.cat(parts, dim=-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """[..., A]"""
        return self.rsample(_normal(self.probs, 1, generator)).detach()

    def greedy(self) -> Tensor:
        """[..., A]: the likeliest choice of every part."""
        return torch.cat(
            [
                torch.zeros_like(part).scatter_(-1, part.argmax(-1, keepdim=True), 1.0)
                for part in self.probs.split(self.nvec, dim=-1)
            ],
            dim=-1,
        )

    def log_prob(self, action: Tensor) -> Tensor:
        """action [..., A], one-hots or softened ones -> [...], joint over the parts."""
        return (action * _log(self.probs)).sum(-1)

    def entropy(self, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002 - has a closed form
        """[...], in nats."""
        return torch.special.entr(self.probs).sum(-1)


Distribution = Categorical | TanhGaussian | Beta | GaussianMixture | MultiBinary | OneHots


def data_log_prob(policy: Distribution, action: Tensor) -> Tensor:
    """Data actions, index [N] or [N, A], under the policy of every discount: [N, G]."""
    if isinstance(policy, Categorical):
        return policy.log_prob(action.unsqueeze(1).expand(policy.probs.shape[:-1]))
    return policy.log_prob(action.unsqueeze(1))


def _log(probs: Tensor) -> Tensor:
    return probs.clamp(min=torch.finfo(probs.dtype).tiny).log()


def _straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    # Not hard + soft - soft.detach(), which rounds to something beside 0 and 1.
    return hard + (soft - soft.detach())


def _normal(like: Tensor, times: int, generator: torch.Generator | None) -> Tensor:
    shape = (*like.shape[:-1], like.shape[-1] * times)
    return like.new_empty(shape).normal_(generator=generator)


def _bounded_softplus(x: Tensor, low: float, high: float | None) -> Tensor:
    return (F.softplus(x) + low).clamp(min=low, max=high)


def _log_tanh_slope(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), in a form that does not underflow."""
    return 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))


def _gamma(concentration: Tensor, noise: Tensor) -> Tensor:
    """Gamma samples of concentration [...] >= 1 from standard normal noise [*K, ..., 2 tries].

    Rejection after Marsaglia and Tsang (2000): a try is accepted at least 19 times in 20. The one
    in 160 000 without an accepted one becomes a value near the mode.
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
