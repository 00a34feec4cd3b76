"""The pieces of the update by hand and from scalars, in float64: what reference.py is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from amago_model import Agent
from amago_model.heads.distributions import Beta, GaussianMixture

NOTHING = torch.zeros((), dtype=torch.float64)


def plain(x: Tensor | float) -> float:
    """As a number, without gradient."""
    return float(x.detach()) if isinstance(x, Tensor) else float(x)


# ------------------------------------------------------------------------------------ statistics


def moved_moments(
    mean: float, variance: float, updates: float, rows: list[float], beta: float
) -> tuple[float, float, float]:
    """Debiased running mean, variance and count of updates after one batch of scalars."""
    if not rows:
        return mean, variance, updates
    updates += 1
    step = beta / (1 - (1 - beta) ** updates)
    second = variance + mean**2
    batch_mean = sum(rows) / len(rows)
    batch_second = sum(x * x for x in rows) / len(rows)
    mean = mean + step * (batch_mean - mean)
    second = second + step * (batch_second - second)
    return mean, second - mean**2, updates


@dataclass
class SlowPopArt:
    """Statistics of one discount."""

    mean: float
    variance: float
    updates: float
    w: float
    b: float
    beta: float
    preserves: bool
    enabled: bool

    @property
    def sigma(self) -> float:
        return math.sqrt(min(max(self.variance, 1e-4), 1e8))

    def update(self, returns: list[float]) -> None:
        if not self.enabled:
            return
        mean, sigma = self.mean, self.sigma
        self.mean, self.variance, self.updates = moved_moments(
            self.mean, self.variance, self.updates, returns, self.beta
        )
        if self.preserves:
            self.w *= sigma / self.sigma
            self.b = (sigma * self.b + mean - self.mean) / self.sigma

    def normalize(self, y):  # type: ignore[no-untyped-def]
        return (y - self.mean) / self.sigma if self.enabled else y

    def to_normalized(self, x: Tensor) -> Tensor:
        return self.w * x + self.b if self.enabled else x

    def to_return(self, x: Tensor) -> Tensor:
        return self.sigma * (self.w * x + self.b) + self.mean if self.enabled else x


# --------------------------------------------------------------------------------------- returns


def slow_n_step(rewards, ended, usable, q, gamma, n, t):  # type: ignore[no-untyped-def]
    """Return of transition t from up to n rewards; q[k] is the value where transition k arrives."""
    total, discount = 0.0, 1.0
    for k in range(t, len(rewards)):
        total = total + discount * rewards[k]
        discount = discount * gamma
        if ended[k]:
            return total
        last_of_n = k - t + 1 == n
        if last_of_n or k + 1 == len(rewards) or not usable[k + 1]:
            return total + discount * q[k]
    raise AssertionError("t lies behind the window")


def slow_lambda(rewards, ended, usable, q, gamma, lam, t):  # type: ignore[no-untyped-def]
    """The same with every later return, each step weighing lambda of the one before."""
    if ended[t]:
        return rewards[t]
    if t + 1 == len(rewards) or not usable[t + 1]:
        return rewards[t] + gamma * q[t]
    later = slow_lambda(rewards, ended, usable, q, gamma, lam, t + 1)
    return rewards[t] + gamma * ((1 - lam) * q[t] + lam * later)


# ---------------------------------------------------------------------------------- distributions


def normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def slow_probabilities(
    logits: Tensor, low: float, high: float, legal: list[bool] | None, low_gradient: bool
) -> list[Tensor]:
    """Softmax over the legal, clipped, renormalised. The upper clip and the sum are constants; so
    is the lower clip, but for `low_gradient`."""
    ok = [True] * len(logits) if legal is None or not any(legal) else legal
    top = max(plain(x) for x, fine in zip(logits, ok, strict=True) if fine)
    each = [(x - top).exp() if fine else NOTHING for x, fine in zip(logits, ok, strict=True)]
    total = sum(each)
    clipped = []
    for x, fine in zip(each, ok, strict=True):
        p = x / total
        if fine and plain(p) > high:
            p = NOTHING + high
        elif fine and plain(p) < low:
            p = p + (low - p).detach() if low_gradient else NOTHING + low
        clipped.append(p)
    scale = plain(sum(clipped))
    return [p / scale for p in clipped]


class SlowPolicy:
    """The distribution of one row and discount, from the actor's numbers x [P] for it."""

    def __init__(self, agent: Agent, x: Tensor, legal: list[bool] | None) -> None:
        self.c, self.space, self.x = agent.config.actor, agent.spaces.action, x
        self.smoothed = False
        self.probs: list[Tensor] = []
        if self.space.kind in ("discrete", "multi_discrete"):
            at = 0
            for n in self.parts:
                of_part = None if legal is None else legal[at : at + n]
                self.probs += slow_probabilities(
                    x[at : at + n],
                    self.c.prob_low,
                    self.c.prob_high,
                    of_part,
                    self.c.prob_low_gradient,
                )
                at += n

    @property
    def parts(self) -> tuple[int, ...]:
        return (self.space.n,) if self.space.kind == "discrete" else self.space.nvec

    def _gaussian(self) -> tuple[Tensor, Tensor]:
        loc, raw = self.x.chunk(2)
        low, high = math.log(self.c.continuous.std_low), math.log(self.c.continuous.std_high)
        return loc, (low + 0.5 * (high - low) * (raw.tanh() + 1)).exp()

    def _beta(self) -> Beta:
        b = self.c.continuous
        return Beta.from_parameters(self.x, b)

    def _mixture(self) -> GaussianMixture:
        g = self.c.continuous
        return GaussianMixture.from_parameters(self.x, g)

    def _smoothed(self, noise: Tensor) -> Tensor:
        """The single action with clipped noise, a number at a time."""
        c, moved = self.c.continuous, []
        for x, e in zip(self.x, noise, strict=True):
            shift = min(max(c.target_noise * plain(e), -c.target_noise_clip), c.target_noise_clip)
            moved.append(min(max(math.tanh(plain(x)) + shift, -1.0), 1.0))
        return torch.tensor(moved, dtype=torch.float64)

    def sample(self, noise: Tensor) -> Tensor:
        """An encoded action [A] from noise [W]."""
        if self.space.kind == "continuous":
            if self.c.continuous.kind == "beta":
                return self._beta().rsample(noise)
            if self.c.continuous.kind == "gmm":
                return self._mixture().rsample(noise)
            if self.c.continuous.kind == "deterministic":
                return self._smoothed(noise) if self.smoothed else self.x.tanh()
            loc, std = self._gaussian()
            if self.c.continuous.kind == "gaussian":
                return (loc.tanh() + std * noise).clamp(-1.0, 1.0)
            return (loc + std * noise).tanh()
        if self.space.kind == "multi_binary":
            on = [x.sigmoid() for x in self.x]
            hard = [plain(normal_cdf(plain(e)) < plain(p)) for e, p in zip(noise, on, strict=True)]
            return torch.stack([h + p - p.detach() for h, p in zip(hard, on, strict=True)])
        taken, at = [], 0
        for n in self.parts:  # Gumbel-max, and the gradient of a softmax at temperature 1/2
            score = []
            for p, e in zip(self.probs[at : at + n], noise[at : at + n], strict=True):
                uniform = min(max(normal_cdf(plain(e)), 2.0**-52), 1 - 2.0**-52)
                log_p = p.clamp(min=torch.finfo(torch.float64).tiny).log()
                score.append((log_p - math.log(-math.log(uniform))) / 0.5)
            best = max(range(n), key=lambda i: plain(score[i]))  # noqa: B023 - used at once
            soft = torch.stack(score).softmax(0)
            hard = torch.eye(n, dtype=torch.float64)[best]
            taken.append(hard + soft - soft.detach())
            at += n
        return torch.cat(taken)

    def log_prob(self, action: Tensor) -> Tensor:
        """Of an encoded action [A]; for choices, each number of it weighs one log-probability."""
        if self.space.kind == "continuous" and self.c.continuous.kind == "deterministic":
            return -sum(
                ((a - x.tanh()) ** 2 for a, x in zip(action, self.x, strict=True)), NOTHING
            ) / len(self.x)
        if self.space.kind == "continuous" and self.c.continuous.kind == "gaussian":
            loc, std = self._gaussian()
            return torch.distributions.Normal(loc.tanh(), std).log_prob(action).sum()
        if self.space.kind == "continuous":
            clip = self.c.continuous.log_prob_clip
            a = action.clamp(-clip, clip)
            if self.c.continuous.kind == "beta":
                d = self._beta()
                base = torch.distributions.Beta(d.alpha, d.beta)
                return (base.log_prob((a + 1) / 2) - math.log(2)).sum()
            slope = (1 - a * a).log().sum()
            if self.c.continuous.kind == "gmm":
                d = self._mixture()
                normal = torch.distributions.Normal(d.loc, d.scale)
                each = normal.log_prob(torch.atanh(a)).sum(-1)
                return torch.logsumexp(d.logits.log_softmax(-1) + each, -1) - slope
            loc, std = self._gaussian()
            return torch.distributions.Normal(loc, std).log_prob(torch.atanh(a)).sum() - slope
        if self.space.kind == "multi_binary":
            p = self.x.sigmoid()
            odds = [p[i] if plain(a) == 1 else 1 - p[i] for i, a in enumerate(action)]
            return sum((x.log() for x in odds), NOTHING)
        tiny = torch.finfo(torch.float64).tiny
        return sum(
            (a * p.clamp(min=tiny).log() for a, p in zip(action, self.probs, strict=True)), NOTHING
        )


# ------------------------------------------------------------------------------------------ bins


def symlog(y: float) -> float:
    return math.copysign(math.log1p(abs(y)), y)


def slow_centres(agent: Agent) -> tuple[list[float], float]:
    """Centres of the bins, rounded to float32 as the agent keeps them, and the distance of two."""
    c = agent.config.critic
    low, high = c.min_return, c.max_return
    if c.symlog:
        low, high = symlog(low), symlog(high)
    width = (high - low) / (c.n_bins - 1)
    exact = [low + i * width for i in range(c.n_bins)]
    kept = agent.critics.online.bins.centres.tolist()
    assert all(abs(a - b) < 1e-5 * (high - low) for a, b in zip(exact, kept, strict=True))
    return kept, width


def slow_label(agent: Agent, y: float) -> list[float]:
    """Probabilities of the bins for the return y."""
    c, centres, width = agent.config.critic, *slow_centres(agent)
    y = symlog(y) if c.symlog else y
    if agent.config.critic.kind == "twohot":
        place = min(max((y - centres[0]) / width, 0.0), c.n_bins - 1.0)
        label = [0.0] * c.n_bins
        below = min(int(place), c.n_bins - 2)
        label[below], label[below + 1] = 1 - (place - below), place - below
        return label
    if c.renormalize:
        inside = [
            normal_cdf((at + width / 2 - y) / (c.sigma * width))
            - normal_cdf((at - width / 2 - y) / (c.sigma * width))
            for at in centres
        ]
        return [mass / max(sum(inside), 1e-8) for mass in inside]
    edges = [(a + b) / 2 for a, b in zip(centres, centres[1:], strict=False)]
    below = [0.0, *(normal_cdf((edge - y) / (c.sigma * width)) for edge in edges), 1.0]
    return [b - a for a, b in zip(below, below[1:], strict=False)]


# ---------------------------------------------------------------------------------------- filters


def slow_filter(agent: Agent, advantage: float) -> float:
    f = agent.config.losses.filter
    if f.kind == "binary":
        return plain(advantage > f.threshold)
    if f.kind == "exp":
        return min(math.exp(f.beta * advantage), f.largest)
    rise = (advantage - f.threshold) / f.beta
    line = f.at_zero + f.slope * f.threshold / f.beta + (rise if rise > 0 else f.slope * rise)
    step = plain(f.add_step and advantage > f.threshold)
    return min(max(line, f.smallest), f.largest) + step
