"""The settings that the recipe `online` derives from the first, random episodes of a run.

The values of the recipe itself are for environments whose observations do not show the state: a
Transformer over long windows. Where they do, a small network without memory acts and learns several
times as fast. docs/reference/online.md explains the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stepwell.messages import PARTIALLY_OBSERVABLE
from trainer.derive.dataset_profile import DatasetProfile
from trainer.derive.derived import Derived
from trainer.derive.history import MUCH_BETTER

TRANSITIONS = 512
"""Transitions per update."""
EVENTFUL = 0.02
"""Values are known soon if at least this share of the steps has an unusual reward or ends an
episode."""
SOON, LATE = 3, 15
"""Steps of the returns where values are known soon, and where rewards are rare."""
CHOICES_RATE, RARE_RATE = 6e-4, 3e-4
"""Learning rates where actions are choices, and of these where rewards are rare."""
UPDATES = 20_000
RATIO, LEAST = 0.25, 0.02
"""Updates per step: at most, where steps are expensive; and at least, below which collectors wait.
With 0.25 on cheap environments policies stayed bad for long and swung from one version to the next;
20 to 50 steps per update mended both."""
MEMORY = "agent.trajectory_encoder."


def online_settings(
    profile: DatasetProfile, memory: str, remembers: bool, basis: Callable[[Derived], Any]
) -> list[Derived]:
    """The settings for the first data of a run: the recipe's own where a memory is needed. `memory`
    is the setting of that name."""
    if remembers:
        return [_memory(profile, memory)]
    n_step = _n_step(profile)
    window = _window(basis(n_step))
    reason = (
        f"{TRANSITIONS} transitions per update: without memory, a small network learns fast from "
        "many short windows"
    )
    batch = Derived("data.batch", max(1, TRANSITIONS // basis(window)), reason)
    return [*_network(profile), *_choices(profile, n_step), n_step, window, batch, *_pace(basis)]


def needs_history(p: DatasetProfile) -> bool:
    """Whether one observation was measured not to show the state."""
    return p.history_gain is not None and p.history_gain >= MUCH_BETTER


def _memory(p: DatasetProfile, memory: str) -> Derived:
    if memory != "auto":
        return Derived(f"{MEMORY}kind", memory, f"memory = {memory}")
    why = "the kind of memory was set"
    if p.partially_observable:
        why = f"the dataset has the tag {PARTIALLY_OBSERVABLE}"
    elif needs_history(p):
        why = (
            f"earlier observations explain {p.history_gain:.0%} more of what follows a step: one "
            "alone does not show the state"
        )
    return Derived(f"{MEMORY}kind", "transformer", why)


def _network(p: DatasetProfile) -> list[Derived]:
    width = 64 if p.observation_width <= 100 else 128
    features = f"{p.observation_width} observation features"
    why = "what was before an observation hardly tells more of what follows it"
    if p.history_gain is None:
        why = f"the dataset has no tag {PARTIALLY_OBSERVABLE}, and a memory was not asked for"
    why += "; if one observation does not show the state, add --train.memory transformer"
    return [
        Derived(f"{MEMORY}kind", "identity", why),
        Derived("agent.timestep_encoder.hide_previous", True, why),
        Derived("agent.timestep_encoder.d_hidden", 2 * width, features),
        Derived("agent.timestep_encoder.d_output", width, features),
    ]


def _choices(p: DatasetProfile, n_step: Derived) -> list[Derived]:
    if p.spaces.action.kind == "continuous":
        return []
    steps = "where actions are choices, larger steps flip the best of them back and forth"
    rate = CHOICES_RATE
    if n_step.value == LATE:
        rate, steps = RARE_RATE, f"{steps}, most of all where rewards are rare"
    why = "where actions are choices, one discount learns sooner than several"
    return [
        Derived("optimizer.learning_rate", rate, steps),
        Derived("agent.losses.auxiliary_gammas", (), why),
    ]


def _n_step(p: DatasetProfile) -> Derived:
    key = "agent.losses.n_step"
    ends = p.terminated * p.trajectories / p.steps
    share = max(p.informative, ends)
    if share < EVENTFUL:
        reason = (
            f"only {share:.2%} of the random steps have another reward than most, or end an "
            f"episode: returns of {LATE} steps carry what happens to the steps before it"
        )
        return Derived(key, LATE, reason)
    return Derived(key, SOON, f"{share:.0%} of the random steps tell something")


def _window(n_step: int) -> Derived:
    long = n_step >= LATE
    why = f"long enough for returns of {n_step} steps"
    return Derived("data.window", 2 * n_step + 2 if long else n_step + 5, why)


def _pace(basis: Callable[[Derived], Any]) -> list[Derived]:
    why = "updates without memory take less than half of the time"
    ratio = Derived("data.ratio.updates_per_step", RATIO, why)
    free = (
        "steps of most environments cost less than updates, and more of them make steady policies"
    )
    least = Derived("data.ratio.min_updates_per_step", LEAST, free)
    return [
        Derived("updates", UPDATES, why),
        ratio,
        # Who sets a ratio gets that one.
        *([least] if basis(replace(ratio, value=None)) is None else []),
        Derived("data.draw", "steps", "every step counts equally, however long its episode"),
        Derived("schedule.publish_every", 100, why),
        Derived("schedule.checkpoint_every", 2_000, why),
        Derived("data.refresh_every", 50, why),
    ]
