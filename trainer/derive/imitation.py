"""What the policy follows, by the dataset: the data's actions, the better ones more, or values.

docs/reference/training.md explains the rule, docs/reference/results.md what it follows from.
"""

from __future__ import annotations

from typing import Any

from stepwell._wording import pluralize
from trainer.derive.dataset_profile import BLOCK, COMPARED, DatasetProfile
from trainer.derive.derived import Derived

CONSISTENT = 0.25
"""Trajectories are good or bad as a whole if a larger share of the variance of rewards lies between
them. In replays of one learning agent it is 0.3 to 0.8, in data of mixed actions below 0.2."""
SAME_QUALITY = 1 / 3
"""What follows an action in the data is of its quality if a larger share lies between them."""
NARROW = 0.25
"""Trajectories are equally good if their returns differ by a smaller share of the mean, and the
same steps of different trajectories, too. Data of one policy: below 0.2; of mixed ones: 0.5 up."""
FEW_TRAJECTORIES, FEW_STEPS = 20, 10_000
"""Data with fewer of both are few."""
FEWEST_STEPS = 800
"""Few data with fewer steps are too few for critics."""
DISCRETE_BETA = 3.0
"""Strength of the exponential filter for discrete actions, whose advantages count in standard
deviations of the return."""
GOALS_END = -0.9
"""Goals end trajectories if the correlation of their lengths and returns is lower."""
ENOUGH_TO_RANK, FEW_BEST_SHARE = 10, 0.95
"""Fewest trajectories that show which are best as a whole, where data are few; and how much of a
batch is then from the best tenth."""
LONG_STEPS = 10
"""Steps that late rewards travel at once, and continuous actions whose outcomes are compared."""
FILTER = "agent.losses.filter."


def is_narrow(profile: DatasetProfile) -> bool:
    """Whether all trajectories are about equally good, in total and in each part, like those of
    one policy.

    The best return counts, not its 95th percentile: rare successes are what sparse rewards teach.
    """
    _, mean, _ = profile.returns
    spread = profile.best_return - profile.low_return
    alike = spread <= NARROW * abs(mean) and profile.difference <= NARROW
    return alike and profile.trajectories >= COMPARED


def is_small(profile: DatasetProfile) -> bool:
    """Whether there are few trajectories and few steps."""
    return profile.trajectories < FEW_TRAJECTORIES and profile.steps < FEW_STEPS


def has_better_ones(p: DatasetProfile) -> bool:
    """Whether a best tenth exists, and is better than others."""
    low, _, high = p.returns
    return p.trajectories >= 50 and high - low > 1e-6 * max(abs(low), abs(high))


def has_goals(p: DatasetProfile) -> bool:
    """Whether goals end trajectories, so that short ones are best."""
    return p.terminated > 0 and p.length_correlation < GOALS_END


def few_show_better_ones(p: DatasetProfile, remembers: bool) -> bool:
    """Whether few data tell better actions from worse ones: in each step of an episode that a time
    limit ends, or, of discrete actions, by how soon goals are reached. Where mistakes end a
    trajectory, few data have few such ends."""
    enough = p.trajectories >= COMPARED and p.steps >= FEWEST_STEPS
    if remembers or not enough:
        return False
    kind = p.spaces.action.kind
    return (kind == "continuous" and p.terminated < 0.5) or (kind == "discrete" and has_goals(p))


def compares_outcomes(p: DatasetProfile) -> bool:
    """Whether advantages compare the outcomes of several actions, not of one: where an action's
    effect comes late, and the actions after it are of the same quality."""
    whole = p.consistency > SAME_QUALITY and has_better_ones(p)
    late = p.sparse or (p.terminated > 0.5 and whole)
    return late and p.spaces.action.kind == "continuous"


def why_late(p: DatasetProfile) -> str:
    """Why the effects of actions come late."""
    if p.sparse:
        return f"sparse rewards ({p.informative:.2%} of the steps)"
    return (
        f"mistakes show late ({p.terminated:.0%} of the trajectories terminate, and "
        f"{p.consistency:.0%} of the variance of rewards lies between them)"
    )


def imitation(p: DatasetProfile) -> list[Derived]:
    """What the actor follows: values (DPG), or the data, and the best of it more than the rest."""
    weight = "agent.losses.dpg_weight"
    found = [Derived(weight, 0.05, "imitates the data's good actions; values refine them a little")]
    if p.sparse and compares_outcomes(p):
        return found  # the filter compares outcomes; whole trajectories have hardly any
    if not has_better_ones(p):
        return found
    low, mean, high = p.returns
    share, whole = p.consistency, p.consistency > CONSISTENT
    reason = (
        f"returns of trajectories differ (5th to 95th percentile {low:.4g} to {high:.4g}, mean "
        f"{mean:.4g}), and {share:.0%} of the variance of rewards lies between trajectories: they "
        "are "
        + ("good or bad as a whole, so most" if whole else "mixed in themselves, so half")
        + f" of each batch is from the {p.best_tenth:,} best"
    )
    return [*found, Derived("data.best_share", 0.8 if whole else 0.5, reason)]


def cloning(p: DatasetProfile) -> list[Derived]:
    """What the actor follows where critics would learn little but their own errors."""
    if is_narrow(p):
        reason = (
            f"trajectories are about equally good (returns {p.low_return:.4g} to "
            f"{p.best_return:.4g}, the same {BLOCK} steps differ by {p.difference:.0%}): critics "
            "would prefer actions by their errors"
        )
    elif is_small(p):
        reason = f"too little data for critics ({_size(p)})"
    else:
        reason = (
            f"rewards are sparse ({p.informative:.2%} of the steps) and follow from the past: what "
            "to remember is found sooner by imitating good trajectories than by critics, which "
            "would have to find it, too"
        )
    found = [
        Derived(f"{FILTER}kind", "behavior_cloning", f"{reason}; so all actions are imitated"),
        Derived("agent.losses.dpg_weight", 0.0, "all actions are imitated"),
        Derived("agent.losses.critic_weight", 0.01, "critics learn, but do not shape the encoder"),
    ]
    if has_better_ones(p):
        best = pluralize(p.best_tenth, "best trajectory", "best trajectories")
        reason = f"most of each batch is from the {best}"
        found.append(Derived("data.best_share", 0.8, reason))
    return found


def few_data(p: DatasetProfile) -> list[Derived]:
    """What the actor follows if there are few data, good and bad ones: only the data's actions, the
    better ones more; of continuous ones by values of no others (as in IQL)."""
    better = "better actions are imitated more, and none is taken from critics, which would err"
    chosen: dict[str, Any] = {f"{FILTER}kind": "exp", "agent.losses.dpg_weight": 0.0}
    if p.spaces.action.kind == "discrete":
        reason = f"few data ({_size(p)}), but goals end trajectories, so short ones are good"
        chosen[f"{FILTER}beta"] = DISCRETE_BETA
        return [Derived(key, value, f"{reason}: {better}") for key, value in chosen.items()]
    reason = f"few data ({_size(p)}), so values are those of the data's better actions"
    chosen[f"{FILTER}beta"] = 1.0
    chosen[f"{FILTER}batch_norm"] = True
    chosen["agent.losses.value_expectile"] = 0.7
    found = [Derived(key, value, f"{reason}: {better}") for key, value in chosen.items()]
    if p.trajectories >= ENOUGH_TO_RANK and p.consistency > CONSISTENT:
        reason = (
            f"{p.consistency:.0%} of the variance of rewards lies between trajectories: they are "
            "good or bad as a whole, so nearly all of each batch is from the "
            + pluralize(p.best_tenth, "best one", "best ones")
        )
        found.append(Derived("data.best_share", FEW_BEST_SHARE, reason))
    return found


def _size(p: DatasetProfile) -> str:
    trajectories = pluralize(p.trajectories, "trajectory", "trajectories")
    return f"{trajectories}, {pluralize(p.steps, 'step')}"


def filter_settings(p: DatasetProfile, window: int) -> list[Derived]:
    """The advantage filter, if it is not the recipe's."""
    if p.spaces.action.kind == "discrete":
        reason = (
            "discrete actions: an exponential filter lowers the probability of bad actions without "
            "forbidding one, so an error of the critics seldom changes the most probable action"
        )
        # In standard deviations of the return, not of the batch's advantages: while critics know
        # nothing, those would turn their noise into weights, and not even a clone would be learned.
        chosen: dict[str, Any] = {f"{FILTER}kind": "exp", f"{FILTER}beta": DISCRETE_BETA}
    elif compares_outcomes(p):
        n_step = max(1, min(LONG_STEPS, int(p.length[0]), window))
        reason = (
            f"{why_late(p)}: one action changes the value less than the critics' errors, so the "
            f"outcomes of {pluralize(n_step, 'action')} of the data are compared, and values are "
            "those of its better actions"
        )
        chosen = {
            f"{FILTER}kind": "exp",
            f"{FILTER}beta": 3.0,
            f"{FILTER}batch_norm": True,
            f"{FILTER}n_step": n_step,
            "agent.losses.value_expectile": 0.9,
        }
    else:
        return []
    return [Derived(key, value, reason) for key, value in chosen.items()]
