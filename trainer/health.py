"""Health of learning: checks of the logged metrics, each with a sentence for the alarm it raises.

    every logged update ─▶ median of each metric over the last WINDOW logs ─▶ CHECKS ─▶ alarms

A check is a number, computed from the medians and the returns of the data. Its alarm begins when
the number exceeds `begin` and ends when it falls below `end`, so it does not flicker. No alarm
begins in the warm-up. A check whose metrics are missing (no critic, no validation) is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from amago_model.heads.popart import LARGEST_SIGMA
from stepwell._wording import pluralize
from trainer.config import TrainConfig
from trainer.data.returns import DataReturns

WINDOW = 5
"""Number of logged values of a metric whose median the checks see."""
MAX_WARMUP = 1000
"""The warm-up is a tenth of the updates, at most this many, and at least optimizer.warmup."""
MAX_NUMBER = 1e300
SIGMA_RANGE = (0.1, 10.0)
"""Healthy ratio of PopArt's scale to the standard deviation of the data's returns."""

LEAST_OVERFIT = 3.0
"""Ratio of the critic losses of held-back and training data below which the alarm ends."""
RISEN = 1.25
"""A loss has risen if it is this many times its first median: less is chance."""
FLAT_UPDATES = 2000
"""Updates before which values may be the same in all states."""

ABOUT_VALUES = ("value/", "popart/", "loss/critic", "validation/loss/critic", "dormant/critic")
"""Metrics that are not checked if the policy follows no values (behaviour cloning)."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A check that failed."""

    key: str
    message: str
    update: int
    """The update at which it began."""
    value: float
    """The largest number of the check since then; `message` has the metrics of that time."""

    @property
    def summary(self) -> str:
        """The message without its advice: its first sentence."""
        return self.message.split(". ")[0]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Reading:
    """What checks see: medians of metrics, the data's returns, and the settings."""

    metrics: Mapping[str, float]
    config: TrainConfig
    returns: DataReturns | None
    first: Mapping[str, float]
    """The first medians after the warm-up."""

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]

    @property
    def data(self) -> DataReturns:
        """The data's returns; KeyError if they are unknown, which leaves the check out."""
        if self.returns is None:
            raise KeyError("returns")
        return self.returns

    @property
    def losses(self) -> Any:
        return self.config.agent.losses


@dataclass(frozen=True, slots=True)
class Check:
    """One row of CHECKS. `number` raises KeyError if a metric is missing."""

    key: str
    number: Callable[[Reading], float]
    begin: float
    end: float
    message: Callable[[Reading], str]


class Health:
    """The checks of one run. `standing` are the alarms that have begun and not ended, `first` the
    first medians after the warm-up."""

    def __init__(
        self,
        config: TrainConfig,
        standing: Sequence[Mapping[str, Any]] = (),
        first: Mapping[str, float] | None = None,
    ):
        """`standing` (as JSON) and `first` are those of a checkpoint."""
        self._config = config
        self._warmup = max(config.optimizer.warmup, min(config.updates // 10, MAX_WARMUP))
        losses = config.agent.losses
        cloned = losses.filter.kind == "behavior_cloning" and losses.dpg_weight == 0
        self._follows_values = not cloned or bool(config.agent.custom.losses)
        self._seen: dict[str, deque[float]] = {}
        self.first: dict[str, float] = dict(first or {})
        self.standing: dict[str, Alarm] = {a["key"]: Alarm(**a) for a in standing}

    @property
    def unchecked(self) -> str:
        """Why no check has been made; empty after the first one."""
        if self.first:
            return ""
        warmup = pluralize(self._warmup, "update")
        return (
            f"fewer than {WINDOW} logs after the warm-up of {warmup} "
            f"(schedule.log_every={self._config.schedule.log_every})"
        )

    def check(
        self, update: int, values: Mapping[str, float], returns: DataReturns | None
    ) -> tuple[list[Alarm], list[Alarm]]:
        """Run all checks on the values logged at an update. Returns (begun, ended) alarms."""
        for name, value in values.items():
            if not self._follows_values and name.startswith(ABOUT_VALUES):
                continue
            self._seen.setdefault(name, deque(maxlen=WINDOW)).append(value)
        if update <= self._warmup:
            for seen in self._seen.values():
                seen.clear()
            return [], []
        full = {name: median(seen) for name, seen in self._seen.items() if len(seen) == WINDOW}
        if not full:
            return [], []
        self.first = full | self.first  # some metrics are logged less often
        reading = Reading(full, self._config, returns, self.first)
        begun: list[Alarm] = []
        ended: list[Alarm] = []
        for check in CHECKS:
            try:
                number = check.number(reading)
            except KeyError:
                continue
            before = self.standing.get(check.key)
            if before is not None and number < check.end:
                ended.append(self.standing.pop(check.key))
            elif before is not None and number > before.value:  # worse: newer numbers
                message = check.message(reading)
                self.standing[check.key] = replace(before, message=message, value=_finite(number))
            elif before is None and number > check.begin:
                alarm = Alarm(check.key, check.message(reading), update, _finite(number))
                self.standing[check.key] = alarm
                begun.append(alarm)
        return begun, ended


def _finite(number: float) -> float:
    """Infinite values of diverged critics as numbers that JSON has."""
    return max(-MAX_NUMBER, min(MAX_NUMBER, float(number)))


# --------------------------------------------------------------------------------------- the checks


def _above(x: Reading) -> float:
    return (x["value/q_max"] - x.data.high) / x.data.spread


def _below(x: Reading) -> float:
    return (x.data.low - x["value/q_min"]) / x.data.spread


def _wrong_bound(x: Reading) -> str:
    """What to do about a bound beyond all returns of the data; empty if there is none."""
    low, high = x.losses.target_low, x.losses.target_high
    if low is not None and low >= x.data.high:
        return f"agent.losses.target_low={low:g} is above all of them: lower it"
    if high is not None and high <= x.data.low:
        return f"agent.losses.target_high={high:g} is below all of them: raise it"
    return ""


def _remedy(x: Reading, bound: str, value: float) -> str:
    """What to do about values outside the data's returns."""
    gamma = f"a lower agent.losses.gamma (now {x.losses.gamma:g})"
    if wrong := _wrong_bound(x):
        return wrong
    if getattr(x.losses, bound) is not None:
        return f"Try {gamma}, or check the reward multiplier"
    return f"Try agent.losses.{bound}={value:.4g} or {gamma}"


def _q_above(x: Reading) -> str:
    return (
        f"Q has reached {x['value/q_max']:.4g}; no discounted return in the data exceeds "
        f"{x.data.high:.4g}: expect a bad policy. {_remedy(x, 'target_high', x.data.high)}"
    )


def _q_below(x: Reading) -> str:
    return (
        f"Q has fallen to {x['value/q_min']:.4g}; no discounted return in the data is below "
        f"{x.data.low:.4g}: expect a bad policy. {_remedy(x, 'target_low', x.data.low)}"
    )


def _at_bound(x: Reading) -> float:
    # Of sparse rewards most returns are extreme, and early targets even more.
    return x["value/target_at_bound"] - max(0.97, 0.5 * (1.0 + x.data.at_extremes))


def _given_bounds(x: Reading) -> list[str]:
    """The bounds of the targets that are set."""
    given = {"target_low": x.losses.target_low, "target_high": x.losses.target_high}
    return [f"{name}={v:g}" for name, v in given.items() if v is not None]


def _at_bound_message(x: Reading) -> str:
    bounds = " or ".join(_given_bounds(x))
    remedy = _wrong_bound(x) or "Try wider bounds or a lower agent.losses.gamma"
    return (
        f"{x['value/target_at_bound']:.0%} of the TD targets are at {bounds}; only "
        f"{x.data.at_extremes:.0%} of the data's returns are extreme: the critics cannot tell "
        f"actions apart. {remedy}"
    )


def _left_out(x: Reading) -> float:
    """The share of the range of usual returns that is outside the bounds of the targets."""
    low, high = x.data.usual
    if high <= low or "value/td_error" not in x.metrics:  # most returns are equal; no critic
        raise KeyError("usual")
    target_low, target_high = x.losses.target_low, x.losses.target_high
    lowest = low if target_low is None else max(low, target_low)
    highest = high if target_high is None else min(high, target_high)
    return 1.0 - max(highest - lowest, 0.0) / (high - low)


def _left_out_message(x: Reading) -> str:
    low, high = x.data.usual
    return (
        f"the bounds of the TD targets (agent.losses: {', '.join(_given_bounds(x))}) leave out "
        f"{_left_out(x):.0%} of the range of the data's returns, {low:.4g} … {high:.4g} without "
        "their extremes: the critics cannot tell good from bad there. Try wider bounds, or none"
    )


def _td_error(x: Reading) -> float:
    if x.data.std == 0:
        raise KeyError("std")
    return x["value/td_error"] / x.data.std


def _td_error_message(x: Reading) -> str:
    return (
        f"the critics miss their targets by {x['value/td_error']:.4g} on average, and the returns "
        f"of the data vary by {x.data.std:.4g}: the values mean nothing. Try a lower "
        f"agent.losses.tau (now {x.losses.tau:g}) or optimizer.learning_rate "
        f"(now {x.config.optimizer.learning_rate:g})"
    )


def _flat(x: Reading) -> float:
    """The spread of the data's returns over that of Q in a batch."""
    # Values begin at one number for all states, and need a while to differ.
    begun = max(FLAT_UPDATES, 0.5 * x["progress/total"])
    if x.data.std == 0 or x["progress/updates"] < begun:
        raise KeyError("std")
    return x.data.std / max(x["value/q_max"] - x["value/q_min"], 1e-9 * x.data.std)


def _flat_message(x: Reading) -> str:
    return (
        f"Q is between {x['value/q_min']:.4g} and {x['value/q_max']:.4g} in all states, and the "
        f"returns of the data vary by {x.data.std:.4g}: the critics cannot tell states apart, so "
        "what follows them follows noise. Try the recipe bc, more updates or, if one observation "
        "does not show the state, memory=transformer"
    )


def _scale(x: Reading) -> float:
    """PopArt's scale over the standard deviation of the data's returns."""
    if x.data.std == 0 or x.config.agent.critic is None or x.config.agent.critic.popart is None:
        raise KeyError("popart")
    if _wrong_bound(x):  # values are on the bound's scale
        raise KeyError("bound")
    return x["popart/sigma"] / x.data.std


def _too_large(x: Reading) -> float:
    # A smaller scale is on its way: values grow over thousands of updates if tau is small.
    clipped = x["popart/sigma"] * x.losses.reward_multiplier >= 0.9 * LARGEST_SIGMA
    return 1.0 / _scale(x) if clipped else 0.0


def _scale_message(x: Reading, wrong: str) -> str:
    suggested = float(f"{10.0 / x.data.std:.1g}")  # one digit, and 40 instead of 4e+01
    return (
        f"rewards are too {wrong} for the critics: the returns of the data vary by "
        f"{x.data.std:.4g}, and values are learned on a scale of {x['popart/sigma']:.4g}. Try "
        f"agent.losses.reward_multiplier={suggested:g} (now {x.losses.reward_multiplier:g})"
    )


def _overfit(x: Reading) -> float:
    trained, held_back = x["loss/critic"], x["validation/loss/critic"]
    ratio = held_back / max(trained, 0.03)
    # data.best_share trains on other trajectories than are held back: the losses differ anyway.
    risen = held_back > RISEN * x.first["validation/loss/critic"]
    if x.config.data.best_share and ratio > LEAST_OVERFIT and not risen:
        raise KeyError("validation/loss/critic")
    return ratio


def _overfit_message(x: Reading) -> str:
    return (
        f"the critic loss of held-back trajectories is {x['validation/loss/critic']:.3g}, that of "
        f"the training data {x['loss/critic']:.3g}: the critics learn the data by heart. Try fewer "
        "updates, a smaller agent.critic.d_hidden, or more data"
    )


def _rejected(x: Reading) -> float:
    return 1.0 - x["policy/filter_acceptance"]


def _rejected_message(x: Reading) -> str:
    remedy = "agent.losses.filter.kind=exp, a lower threshold"
    if x.losses.filter.kind == "exp":
        remedy = f"a lower agent.losses.filter.beta (now {x.losses.filter.beta:g})"
    return (
        f"the filter accepts {x['policy/filter_acceptance']:.1%} of the data's actions: behaviour "
        f"cloning learns from almost none. Try {remedy}, or look at the advantages "
        "(value/advantage_mean)"
    )


def _saturated(x: Reading) -> float:
    return x["policy/saturation"] - x["policy/saturation_of_data"]


def _saturated_message(x: Reading) -> str:
    return (
        f"{x['policy/saturation']:.0%} of the policy's actions are at their bounds, "
        f"{x['policy/saturation_of_data']:.0%} of the data's are: the policy has left the data. "
        f"Try a higher agent.losses.bc_weight (now {x.losses.bc_weight:g}) or a lower "
        f"agent.losses.dpg_weight (now {x.losses.dpg_weight:g})"
    )


def _dormant(part: str) -> Check:
    return Check(
        f"dormant_{part}",
        lambda x: x[f"dormant/{part}"],
        0.6,
        0.4,
        lambda x: (
            f"{x[f'dormant/{part}']:.0%} of the {part}'s hidden units are always near 0: it has "
            "lost capacity. Try a lower optimizer.learning_rate "
            f"(now {x.config.optimizer.learning_rate:g})"
        ),
    )


def _gradient(x: Reading) -> float:
    return x["optimizer/gradient_norm"] / max(x.first["optimizer/gradient_norm"], 1e-6)


def _gradient_message(x: Reading) -> str:
    return (
        f"the gradient norm is {x['optimizer/gradient_norm']:.4g}, {_gradient(x):.0f} times that "
        "after the warm-up: learning diverges. Try a lower optimizer.learning_rate or "
        "agent.losses.tau"
    )


def _tau(x: Reading) -> float:
    return float(x.losses.tau) if "value/td_error" in x.metrics else 0.0


def _tau_message(x: Reading) -> str:
    return (
        f"the target networks follow the critics almost at once (agent.losses.tau={x.losses.tau:g})"
        ": targets that chase themselves often diverge. Try agent.losses.tau=0.01"
    )


def _skipped_message(x: Reading) -> str:
    return (
        f"{pluralize(int(x['progress/skipped']), 'update was', 'updates were')} skipped, because "
        "the gradient was not finite; "
        f"{x.config.optimizer.max_bad_updates} of them end the run. Try a lower "
        "optimizer.learning_rate or agent.losses.reward_multiplier"
    )


LOW_SIGMA, HIGH_SIGMA = SIGMA_RANGE
CHECKS = (
    Check("q_above_data", _above, 0.5, 0.25, _q_above),
    Check("q_below_data", _below, 0.5, 0.25, _q_below),
    Check("targets_at_bound", _at_bound, 0.0, -0.05, _at_bound_message),
    Check("bounds_too_narrow", _left_out, 0.5, 0.5, _left_out_message),
    Check("td_error", _td_error, 1.5, 1.0, _td_error_message),
    Check("values_flat", _flat, 4.0, 2.5, _flat_message),
    Check("targets_follow", _tau, 0.2, 0.2, _tau_message),
    Check(
        "rewards_too_small",
        _scale,
        HIGH_SIGMA,
        HIGH_SIGMA / 2,
        lambda x: _scale_message(x, "small"),
    ),
    Check(
        "rewards_too_large", _too_large, 1 / LOW_SIGMA, 5.0, lambda x: _scale_message(x, "large")
    ),
    Check("critic_overfits", _overfit, 5.0, LEAST_OVERFIT, _overfit_message),
    Check("filter_rejects", _rejected, 0.99, 0.98, _rejected_message),
    Check("actions_saturated", _saturated, 0.85, 0.7, _saturated_message),
    _dormant("actor"),
    _dormant("critic"),
    Check("gradient_norm", _gradient, 100.0, 30.0, _gradient_message),
    Check("skipped_updates", lambda x: x["progress/skipped"], 0.5, 0.5, _skipped_message),
)
"""All checks: key, number, where the alarm begins and ends, and its sentence."""
