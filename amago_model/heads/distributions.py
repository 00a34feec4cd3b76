"""Action distributions: sample, greedy, log_prob and entropy; rsample for differentiable samples.

They do not use torch.distributions, whose argument checks take longer than a small network. Actions
are in the networks' units (indices 0..n-1, ones and zeros, or -1..1); batch.decode_action converts
them to the environment's units. All samples in an update are functions of standard normal noise,
passed as an argument, so padding or a second pass over a batch does not change them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from amago_model.config import ActorConfig
from amago_model.heads.continuous import (
    Beta,
    Deterministic,
    Gaussian,
    GaussianMixture,
    TanhGaussian,
    normal_like,
)

__all__ = [
    "Beta",
    "Categorical",
    "Deterministic",
    "Distribution",
    "Gaussian",
    "GaussianMixture",
    "MultiBinary",
    "OneHots",
    "TanhGaussian",
    "data_log_prob",
    "with_sampled_actions",
]


@dataclass(slots=True)
class Categorical:
    """One of n actions."""

    probs: Tensor
    """[..., n]: probabilities; they sum to 1."""

    @classmethod
    def from_logits(
        cls, logits: Tensor, c: ActorConfig, legal: Tensor | None = None
    ) -> Categorical:
        """Softmax, clipped to prob_low..prob_high and renormalised; illegal actions get exactly 0.

        logits [..., n]; legal, broadcastable bool (if no action is legal, as in padding, all are
        treated as legal). With `prob_low_gradient` the gradient passes through the lower clip;
        otherwise an action of the data with probability 0 could not be learned. The upper clip and
        the renormalising sum stop gradients.
        """
        if legal is not None:
            legal = legal | ~legal.any(-1, keepdim=True)
            logits = logits.masked_fill(~legal, -math.inf)
        probs = logits.softmax(-1).clamp(max=c.prob_high)
        if c.prob_low_gradient:
            probs = probs + (c.prob_low - probs).clamp(min=0.0).detach()
        else:
            probs = probs.clamp(min=c.prob_low)
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
        """index [...] int64 -> [...]. Probability 0 gives the log of the smallest normal float."""
        chosen = self.probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()

    def entropy(self, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002 - has a closed form
        """[...], in nats."""
        out: Tensor = torch.special.entr(self.probs).sum(-1)
        return out


@dataclass(slots=True)
class MultiBinary:
    """n independent Bernoulli variables. Actions are ones and zeros, as floats."""

    logits: Tensor
    """[..., n]: logits of a one."""

    def rsample(self, noise: Tensor) -> Tensor:
        """Exact ones and zeros from standard normal noise [*K, ..., n], with the gradient of the
        probabilities (straight-through estimator: Bengio et al. 2013)."""
        p = self.logits.sigmoid()
        hard = (torch.special.ndtr(noise) < p).to(p.dtype)
        return _straight_through(hard, p)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """[..., n]"""
        return self.rsample(normal_like(self.logits, 1, generator)).detach()

    def greedy(self) -> Tensor:
        """[..., n]: the more likely value of each variable."""
        return (self.logits > 0).to(self.logits.dtype)

    def log_prob(self, action: Tensor) -> Tensor:
        """action [..., n] -> [...], the joint log-probability."""
        on, off = F.logsigmoid(self.logits), F.logsigmoid(-self.logits)
        return (action * on + (1.0 - action) * off).sum(-1)

    def entropy(self, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002 - has a closed form
        """[...], in nats."""
        p = self.logits.sigmoid()
        on, off = F.logsigmoid(self.logits), F.logsigmoid(-self.logits)
        return -(p * on + (1.0 - p) * off).sum(-1)


@dataclass(slots=True)
class OneHots:
    """Independent categorical variables, nvec[i] choices for part i; actions are concatenated
    one-hots.

    With a single part it is a Categorical with differentiable samples.
    """

    probs: Tensor
    """[..., A]: the probabilities of all parts, concatenated; each part sums to 1."""
    nvec: tuple[int, ...]
    """Number of choices of each part; A is their sum."""
    temperature: float = 0.5
    """Temperature of the softmax that gives samples their gradient. A lower temperature has less
    bias and more variance."""

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        nvec: tuple[int, ...],
        c: ActorConfig,
        legal: Tensor | None = None,
    ) -> OneHots:
        """Like Categorical.from_logits, per part. logits [..., A]; legal, broadcastable bool."""
        masks = [None] * len(nvec) if legal is None else legal.split(nvec, dim=-1)
        parts = [
            Categorical.from_logits(part, c, mask).probs
            for part, mask in zip(logits.split(nvec, dim=-1), masks, strict=True)
        ]
        return cls(torch.cat(parts, dim=-1), nvec)

    def rsample(self, noise: Tensor) -> Tensor:
        """Exact one-hots from standard normal noise [*K, ..., A] by the Gumbel-max trick, with the
        gradient of a softmax at `temperature` (straight-through: Jang et al. 2017)."""
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
        return self.rsample(normal_like(self.probs, 1, generator)).detach()

    def greedy(self) -> Tensor:
        """[..., A]: the most likely choice of each part."""
        return torch.cat(
            [
                torch.zeros_like(part).scatter_(-1, part.argmax(-1, keepdim=True), 1.0)
                for part in self.probs.split(self.nvec, dim=-1)
            ],
            dim=-1,
        )

    def log_prob(self, action: Tensor) -> Tensor:
        """action [..., A], one-hots (or softened one-hots) -> [...], the joint log-probability."""
        return (action * _log(self.probs)).sum(-1)

    def entropy(self, noise: Tensor | None = None) -> Tensor:  # noqa: ARG002 - has a closed form
        """[...], in nats."""
        out: Tensor = torch.special.entr(self.probs).sum(-1)
        return out


Distribution = (
    Categorical
    | TanhGaussian
    | Gaussian
    | Beta
    | GaussianMixture
    | Deterministic
    | MultiBinary
    | OneHots
)


def with_sampled_actions(policy: Distribution, sampled: bool) -> Distribution:
    """If `sampled`, replace a Categorical by one with differentiable samples; else unchanged."""
    if sampled and isinstance(policy, Categorical):
        return OneHots(policy.probs, (policy.probs.shape[-1],))
    return policy


def data_log_prob(policy: Distribution, action: Tensor) -> Tensor:
    """Log-probabilities [N, G] of data actions, index [N] or encoded [N, A], for each discount."""
    if isinstance(policy, Categorical):
        return policy.log_prob(action.unsqueeze(1).expand(policy.probs.shape[:-1]))
    return policy.log_prob(action.unsqueeze(1))


def _log(probs: Tensor) -> Tensor:
    return probs.clamp(min=torch.finfo(probs.dtype).tiny).log()


def _straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    # Not hard + soft - soft.detach(), which rounds to values other than 0 and 1.
    return hard + (soft - soft.detach())
