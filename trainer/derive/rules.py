"""The settings that the recipe `offline` derives from a dataset, each with its reason.

They replace values of the recipe, never one that a file or flag sets. A run keeps the numbers: a
resumed run does not derive them again. docs/reference/training.md explains the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from amago_model.config import InputNormConfig, TimestepEncoderConfig
from amago_model.encoders.modalities import has_numbers
from amago_model.heads.popart import LARGEST_SIGMA
from stepwell._settings import flatten
from stepwell._wording import pluralize
from stepwell.messages import PARTIALLY_OBSERVABLE
from trainer.config import TrainConfig
from trainer.data.returns import NEGLIGIBLE
from trainer.data.validation import FEWEST
from trainer.derive.dataset_profile import DatasetProfile
from trainer.derive.derived import Derived, is_free
from trainer.derive.imitation import (
    FILTER,
    LONG_STEPS,
    cloning,
    compares_outcomes,
    few_data,
    few_show_better_ones,
    filter_settings,
    has_better_ones,
    imitation,
    is_narrow,
    is_small,
    why_late,
)
from trainer.derive.online import needs_history, online_settings
from trainer.derive.rewards import one_digit, outlier_warning, reward_settings
from trainer.errors import SettingError

TRANSITIONS = 256
"""Transitions per update without memory."""
MEMORY_TRANSITIONS = 1024
"""Transitions per update with memory."""
RETURN_SPREAD = 3.0
"""Spread of the undiscounted returns as an input, of similar size as normalised observations."""
FIRST_OUTPUTS = 0.1
"""Factor of the initial weights of the critics' output layer."""
RANDOM = 0.1
"""Outcomes are random if a larger share of those of the same state and action is not the most
frequent one. In the data of deterministic environments it is 0."""
RANDOM_TAU, RANDOM_CLIP = 0.05, 10.0
"""One-step targets reach far states only if target networks follow soon; and a rare reward is a
large error, which the usual clipping of gradients would make a smaller reward."""
FAR_FROM_0 = 100.0
"""Standard deviations from 0 at which an initial mean of 0 would be remembered for too long."""
HEAVY_TAIL = 5.0
"""Standard deviations of observed numbers are below this many ranges of the middle 90%, also of the
joints of a robot that falls (1.5); a value of 1,000 deviations in a hundredth of the steps: 30."""
MEMORY = "agent.trajectory_encoder."
FOLLOWING = (FILTER, "agent.losses.dpg_weight", "agent.losses.critic_weight")
"""Who sets one of these decides how much the policy follows critics."""
PASSES, LONG_PASSES, CLONING_PASSES = 15, 30, 3
"""How often an average step is sampled during training; twice as often where ten actions are
compared; if all actions are imitated, soon enough: later the policy learns their noise by heart."""
WITHOUT_MEMORY = ("feed_forward", "identity")
"""Kinds of trajectory encoders."""


def derive_settings(
    profile: DatasetProfile,
    config: TrainConfig,
    origins: Mapping[str, str] | None = None,
    own: Collection[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> list[Derived]:
    """The settings for a dataset.

    `config.derive` selects all, or only its shape: sampling, memory, networks, the critics' first
    values and length, which every algorithm needs. `origins` tells where the config's values come
    from, `own` are the settings of the recipe itself: what it, a file or a flag sets is the basis
    of the settings that depend on it. `say` is called with a warning if a few extreme returns set
    the scale of rewards. Raises `SettingError` if `memory` contradicts the kind of memory that a
    file or flag sets.
    """
    decided, flat = origins or {}, flatten(config.to_dict())

    def basis(derived: Derived) -> Any:
        """The value that others depend on: the config's, if something decides it."""
        free = derived.key not in own and is_free(derived.key, decided)
        return derived.value if free else flat[derived.key]

    memory = config.memory
    remembers = memory in ("transformer", "gru") or (
        memory == "auto" and (profile.partially_observable or needs_history(profile))
    )
    if not is_free(f"{MEMORY}kind", decided):
        kind = flat[f"{MEMORY}kind"]
        if memory not in ("auto", kind, *(["none"] if kind in WITHOUT_MEMORY else [])):
            raise SettingError(
                f"memory={memory} and agent.trajectory_encoder.kind={kind} contradict each other: "
                "leave one of them out"
            )
        remembers = kind not in WITHOUT_MEMORY
    if config.derive == "online":
        return online_settings(profile, memory, remembers, basis)
    conditioned = config.agent.return_conditioning is not None
    discount, random = _gamma(profile), _is_random(profile, remembers)
    n_step = _n_step(profile, random)
    recalls = remembers and profile.sparse and has_better_ones(profile)
    narrow, few = is_narrow(profile), is_small(profile)
    compare_few = few and not narrow and few_show_better_ones(profile, remembers)
    follows_rule = config.derive == "all"
    follows_rule &= all(is_free(key, decided) for key in decided if key.startswith(FOLLOWING))
    clone = follows_rule and (narrow or (few and not compare_few) or recalls)
    window = _window(profile, remembers, basis(n_step))
    batch = _batch(basis(window), remembers, basis(n_step))
    passes = LONG_PASSES if basis(n_step) >= LONG_STEPS and not remembers else PASSES
    passes = CLONING_PASSES if clone and not recalls else passes
    transitions = basis(window) * basis(batch)
    updates = _updates(profile, transitions, passes)
    shape = [
        *(window, batch),
        *_sampling(profile),
        *_memory(profile, memory, remembers, basis(window)),
        *_network(profile, remembers),
        *(_input_norm(profile) if config.agent.timestep_encoder.input_norm else ()),
        *(updates, *_schedule(basis(updates))),
        *(_conditioning(profile) if conditioned and not config.data.relabel else ()),
    ]
    losses = config.agent.losses
    if config.derive == "shape":
        return [*shape, *_first_values(profile, losses.gamma, losses.reward_multiplier)]
    rewards = reward_settings(profile, gamma := basis(discount))
    first = _first_values(profile, gamma, basis(rewards[0]))
    found = [discount, *rewards, *first, n_step]
    if random and basis(n_step) == 1:
        found += _one_step(profile)
    if clone:
        return [*found, *cloning(profile), *shape]
    if config.agent.critic is not None and basis(rewards[0]) == rewards[0].value:
        if warning := outlier_warning(profile, gamma, rewards[0], config.where):
            say(warning)
    if compare_few and follows_rule:
        return [*found, *few_data(profile), *shape]
    found += [*imitation(profile), *shape]
    if all(is_free(key, decided) for key in decided if key.startswith(FILTER)):
        found += filter_settings(profile, basis(window))
    return found


def _gamma(p: DatasetProfile) -> Derived:
    long = p.long_length  # not the median: a good policy may survive for longer than most
    key = "agent.losses.gamma"
    if long <= 1:
        return Derived(key, 0.0, "episodes of one step: there is no future reward")
    if p.sparse:
        horizon = min(max(long, 20.0), 200.0)
        why = (
            f"rewards are sparse ({p.informative:.2%} of the steps), so the horizon is an episode, "
            "at least 20 and at most 200 steps"
        )
    else:
        horizon = min(max(long / 2, 10.0), 100.0)
        why = "half an episode, at least 10 and at most 100 steps, is the horizon"
    gamma = round(1.0 - 1.0 / horizon, 3)
    return Derived(key, gamma, f"{why}; long episodes have {pluralize(round(long), 'step')}")


def _first_values(p: DatasetProfile, gamma: float, multiplier: float) -> list[Derived]:
    """Before the first update, all values are near the mean of the returns in the data.

    A wrong beginning is forgotten at the rate (1 - gamma) tau, more slowly than runs are long.
    """
    returns = p.discounted(gamma)
    mean = multiplier * returns.mean
    variance = min(multiplier**2 * returns.variance, LARGEST_SIGMA**2)
    if variance <= NEGLIGIBLE * mean**2:
        variance = 1.0
    reason = (
        f"discounted returns are {returns.mean:.4g} on average, with a standard deviation of "
        f"{returns.variance**0.5:.4g}: values begin there"
    )
    return [
        Derived("agent.critic.popart.init_mean", float(f"{mean:.3g}"), reason),
        Derived("agent.critic.popart.init_nu", float(f"{variance:.3g}"), reason),
        Derived("agent.critic.init_scale", FIRST_OUTPUTS, "first values differ little"),
    ]


def _is_random(p: DatasetProfile, remembers: bool) -> bool:
    """Whether rewards are rare and partly luck. With memory, what seems random may be hidden."""
    rare = p.sparse and p.long_length > 1
    return rare and p.random_outcomes > RANDOM and not remembers


def _one_step(p: DatasetProfile) -> list[Derived]:
    """How values spread without returns of several steps."""
    return [
        Derived(
            "agent.losses.tau",
            RANDOM_TAU,
            "one-step targets reach distant states only if target networks follow soon",
        ),
        Derived(
            "optimizer.grad_clip",
            RANDOM_CLIP,
            f"rewards are rare ({p.informative:.2%} of the steps): their errors count in full",
        ),
    ]


def _n_step(p: DatasetProfile, random: bool) -> Derived:
    key = "agent.losses.n_step"
    if random:
        reason = (
            f"outcomes are random ({p.random_outcomes:.0%} of those of the same observation and "
            "action are unusual ones): in a sum of several rewards, luck looks like a good action"
        )
        return Derived(key, 1, reason)
    longest = {"discrete": 5, "continuous": LONG_STEPS}.get(p.spaces.action.kind, 1)
    if (p.sparse and longest > 1) or compares_outcomes(p):
        n_step = max(1, min(longest, int(p.length[0])))
        return Derived(key, n_step, f"{why_late(p)}: what an action leads to is known sooner")
    reason = "multi-step returns would be biased to the data's actions"
    return Derived(key, 1, reason)


def _window(p: DatasetProfile, remembers: bool, n_step: int) -> Derived:
    long = int(p.long_length)
    if remembers:
        why = "with memory, windows as long as most episodes, at most 128 steps"
        return Derived("data.window", max(1, min(long, 128)), why)
    why = "few transitions per window: without memory, diverse batches learn faster"
    if n_step > 1:
        why += f"; long enough for returns of {n_step} steps"
    wanted = n_step + max(3, n_step // 2 + 1)
    return Derived("data.window", max(1, min(wanted, long)), why)


def _batch(window: int, remembers: bool, n_step: int) -> Derived:
    budget, why = TRANSITIONS, ""
    if n_step >= LONG_STEPS:
        budget = 2 * TRANSITIONS
        why = f"; returns of {n_step} steps leave few in a window, so there are twice as many"
    if remembers:
        budget, why = MEMORY_TRANSITIONS, ""
    batch = max(8, budget // window // 8 * 8)
    return Derived("data.batch", batch, f"{batch * window:,} transitions per update{why}")


def _memory(p: DatasetProfile, memory: str, remembers: bool, window: int) -> list[Derived]:
    context = Derived(f"{MEMORY}context", window + 1, "attention to a whole window")
    return [_memory_kind(p, memory, remembers), *([context] if remembers else [])]


def _memory_kind(p: DatasetProfile, memory: str, remembers: bool) -> Derived:
    key = f"{MEMORY}kind"
    kind, why = "gru", "rewards are dense: a GRU learns from imitation and critics at once"
    if p.sparse:
        kind, why = "transformer", "rewards are sparse: one step of many may have to be remembered"
    if remembers and memory == "auto":
        tagged = (
            f"the dataset has the tag {PARTIALLY_OBSERVABLE}: its environment or file declared "
            "that one observation does not show the state, or a user added the tag"
        )
        return Derived(key, kind, f"{tagged}; {why}")
    if remembers:
        return Derived(key, memory, f"memory = {memory}")
    if memory == "none":
        return Derived(key, "feed_forward", "memory = none")
    reason = (
        "the dataset is not tagged as partially observable; if one observation does not show the "
        f"state, add --memory {kind}, or the tag {PARTIALLY_OBSERVABLE} to the dataset"
    )
    return Derived(key, "feed_forward", reason)


def _network(p: DatasetProfile, remembers: bool) -> list[Derived]:
    width = 64 if p.observation_width <= 30 else 128 if p.observation_width <= 100 else 256
    reason = f"{p.observation_width} observation features"
    hidden = max(128, width)
    keys = {
        "agent.timestep_encoder.d_hidden": width,
        "agent.timestep_encoder.d_output": width,
        f"{MEMORY}d_model": width,
        "agent.actor.d_hidden": hidden,
        "agent.critic.d_hidden": hidden,
    }
    if remembers:
        keys |= {f"{MEMORY}d_hidden": width, f"{MEMORY}d_ff": 4 * width}  # of GRU, of Transformer
    found = [Derived(key, value, reason) for key, value in keys.items()]
    hide = "without memory the state is in the observation"
    if remembers:
        hide = "with memory, previous actions and rewards tell the state"
        small = "small enough for a CPU"
        found += [Derived(f"{MEMORY}n_heads", 4, small), Derived(f"{MEMORY}n_layers", 2, small)]
        if not p.sparse and has_numbers(TimestepEncoderConfig(), p.spaces):
            seen = "shows velocities, which a memory hardly sees in positions that change little"
            found.append(Derived("agent.timestep_encoder.differences", True, seen))
    return [*found, Derived("agent.timestep_encoder.hide_previous", not remembers, hide)]


def _input_norm(p: DatasetProfile) -> list[Derived]:
    """How observations in small units, far from 0, or beside extreme values, become visible."""
    key, found = "agent.timestep_encoder.input_norm.", []
    small, far = p.smallest_std <= InputNormConfig().min_std, p.farthest > FAR_FROM_0
    if small:
        reason = f"an observed number varies by {p.smallest_std:.2g} only: it is scaled, too"
        found.append(Derived(f"{key}min_std", one_digit(0.1 * p.smallest_std), reason))
    if small or far:
        what = "small" if small else f"{p.farthest:,.0f} standard deviations from 0"
        reason = f"an observed number is {what}: its statistics begin with the first batch"
        found.append(Derived(f"{key}init_nu", 0.0, reason))
    if p.heaviest_tail > HEAVY_TAIL and not far:
        reason = (
            f"the standard deviation of an observed number is {p.heaviest_tail:,.0f} times the "
            "range of the middle 90% of its values: the extreme ones would hide the others"
        )
        found.append(Derived("agent.timestep_encoder.symlog", True, reason))
    return found


def _sampling(p: DatasetProfile) -> list[Derived]:
    found = [
        Derived("data.draw", "steps", "every step counts equally, however long its episode"),
        Derived("data.padding", "right", "so that the last steps of an episode start windows"),
    ]
    if p.trajectories >= FEWEST:
        reason = f"{p.trajectories} trajectories: some are held back to watch the losses"
        found.append(Derived("data.validation", 0.05, reason))
    if p.spaces.action.kind == "continuous":
        reason = "imitates actions at their bounds as exactly as others"
        found.append(Derived("agent.actor.continuous.kind", "gaussian", reason))
    return found


def _conditioning(p: DatasetProfile) -> list[Derived]:
    low, _, high = p.returns
    target, why = high, "the 95th percentile of the returns; the highest ones may be luck"
    if p.sparse:  # fewer than one in twenty trajectories may have a reward at all
        target = p.best_return
        why = f"the highest return, as rewards are sparse ({p.informative:.2%} of the steps)"
    spread = max(high - low, 0.5 * (p.best_return - low))
    reason = f"returns differ by about {spread:.4g}: scaled to about {RETURN_SPREAD:g}"
    if spread <= NEGLIGIBLE * max(abs(low), abs(p.best_return)):
        spread, reason = abs(target) or 1.0, f"all returns are {target:.4g}"
    key = "agent.return_conditioning"
    return [
        Derived(f"{key}.target_return", float(f"{target:.6g}"), why),
        Derived(f"{key}.scale", one_digit(RETURN_SPREAD / spread), reason),
    ]


def _updates(p: DatasetProfile, transitions: int, passes: int) -> Derived:
    wanted = passes * p.steps / transitions
    updates = int(min(max(math.ceil(wanted / 1000) * 1000, 3000), 20_000))
    times = updates * transitions / p.steps
    size = pluralize(p.steps, "step")
    reason = f"{size}, each sampled about {times:.3g} times; at least 3,000 updates, at most 20,000"
    return Derived("updates", updates, reason)


def _schedule(updates: int) -> list[Derived]:
    every = max(1, updates // 5)
    return [
        Derived("schedule.publish_every", every, "five policies per run"),
        Derived("schedule.checkpoint_every", every, "with each policy"),
    ]
