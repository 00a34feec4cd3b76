"""TD targets: n-step and lambda returns with terminations, missing observations and padding.

    transition   0     1     2           y[t] = r[t] + g r[t+1] + ... + g^m q[t+m-1]
    reward       r0    r1    r2
    next value   q0    q1    q2          q[t] is the value of timestep t+1, after transition t
    terminated   F     F     x           x = True: no value after r2
    usable       T     T     z           False: padding, or `has_target` says so

The sum stops after n rewards, at a termination, or before the first unusable transition, whichever
comes first. It then bootstraps from the next value, except at a termination.
Letters: B windows, T transitions, N of them, C critics, G discounts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amago_model.config import ActionSpace, AgentConfig, LossConfig
from amago_model.critics import Critics
from amago_model.data.batch import Batch, encode_action
from amago_model.data.transitions import (
    Transitions,
    has_target,
    multiplied_reward,
    next_action_known,
)
from amago_model.heads.critic import CriticEnsemble
from amago_model.heads.distributions import Categorical, Deterministic, Distribution
from amago_model.losses.critic_evaluation import StateValue, data_action_outputs, policy_values


@torch.no_grad()
def td_targets(
    batch: Batch,
    tr: Transitions,
    next_policy: Distribution | None,
    critics: Critics,
    gammas: Tensor,
    config: AgentConfig,
) -> Tensor:
    """TD targets [N, G], in units of the multiplied reward.

    They bootstrap from the minimum or mean over a random subset of the target critics, for actions
    of `next_policy` [N, G, ...]; if that is None, from V(s).
    """
    if next_policy is None:
        value = critics.value(tr.critic_state_tp1)
    else:
        value = next_policy_values(tr, next_policy, critics, config)
    value = critics.popart.to_return(value)
    if isinstance(next_policy, Deterministic) and config.losses.bc_target_penalty > 0:
        error = next_action_error(batch, tr, next_policy, critics.online.action)
        value = value - config.losses.bc_target_penalty * error
    return tr.flatten(bootstrapped_returns(batch, tr.unflatten(value), gammas, config.losses))


def next_policy_values(
    tr: Transitions, next_policy: Distribution, critics: Critics, config: AgentConfig
) -> Tensor:
    """Outputs of the target critics in the next states, reduced over a random subset [N, G]."""
    target_critic, state_tp1 = critics.target, tr.critic_state_tp1
    if isinstance(next_policy, Categorical) and target_critic.table:
        q = target_critic.action_values(state_tp1, **tr.critic_inputs_tp1)
        q = (q * next_policy.probs).sum(-1)
    else:
        # The number of values per critic is known immediately on a CPU; a GPU must synchronise.
        sparse = state_tp1.device.type == "cpu" and not torch.compiler.is_compiling()
        sparse = sparse and type(target_critic) is CriticEnsemble
        q = policy_values(
            target_critic,
            target_critic.project_state(state_tp1, **tr.critic_inputs_tp1),
            next_policy,
            tr.target_noise,
            subset=subset_of(tr.ensemble_noise, config) if sparse else None,
        )
    return reduced_targets(q, tr.ensemble_noise, config)


def next_action_error(
    batch: Batch, tr: Transitions, next_policy: Deterministic, space: ActionSpace
) -> Tensor:
    """Squared error [N, G] between the policy's next actions and the data's, mean over dimensions
    and samples; 0 where the data's is unknown."""
    action = encode_action(space, batch.action)
    after = tr.flatten(torch.cat((action[:, 1:], action[:, :1]), dim=1))
    known = tr.flatten(next_action_known(batch))
    error = (next_policy.rsample(tr.target_noise) - after.unsqueeze(1)).square().mean(-1).mean(0)
    return torch.where(known.unsqueeze(1), error, 0.0)


def evaluate_state_value(
    critics: Critics, tr: Transitions, config: AgentConfig, *, soften: bool
) -> StateValue:
    """Evaluate V(s) of value_expectile, and its target: Q of the data's actions.

    V is an expectile of Q over the data's actions in s. Above 1/2 it approaches the value of the
    best of them, without evaluating any other action (IQL; Kostrikov et al. 2022).
    """
    with torch.no_grad():
        q = critics.target.scalar(data_action_outputs(critics.target, tr, soften=soften))
        target = reduced_targets(q, tr.ensemble_noise, config)
    return StateValue(critics.value(tr.critic_state_t), target)


def bootstrapped_returns(
    batch: Batch, next_value: Tensor, gammas: Tensor, config: LossConfig
) -> Tensor:
    """Returns [B, T, G] from next_value [B, T, G] and gammas [G], in units of the multiplied
    reward."""
    usable = has_target(batch, config)
    reward = multiplied_reward(batch, config.reward_multiplier)
    terms = reward, batch.terminated, usable, next_value, gammas
    if config.td_lambda is None:
        returns = n_step_returns(*terms, config.n_step)
    else:
        returns = lambda_returns(*terms, config.td_lambda)
    return clipped_target(returns, *config.scaled_bounds)


def n_step_returns(
    reward: Tensor,
    terminated: Tensor,
    usable: Tensor,
    next_value: Tensor,
    gammas: Tensor,
    n: int,
) -> Tensor:
    """n-step returns: reward, terminated, usable [B, T], next_value [B, T, G], gammas [G] ->
    [B, T, G].

    Entries of unusable transitions are undefined: the losses mask them.
    """
    discount = gammas * (~terminated).unsqueeze(-1)
    one_step = reward.unsqueeze(-1) + discount * next_value
    return n_step_sums(one_step, reward, discount, usable[:, 1:], n)


def n_step_sums(
    one_step: Tensor, reward: Tensor, discount: Tensor, continues: Tensor, n: int
) -> Tensor:
    """Sums over up to n transitions, from those over one:

        y_1 = one_step,   y_n[t] = r[t] + discount[t] y_(n-1)[t+1]   if continues[t], else y_1[t]

    Shapes: one_step [B, T, G], reward [B, T], discount [B, T, G] or [G], continues [B, T - 1]:
    whether the sum may go on with transition t + 1. Returns [B, T, G].
    """
    r, more, sums = reward[:, :-1].unsqueeze(-1), continues.unsqueeze(-1), one_step
    discount = discount[:, :-1] if discount.ndim > 1 else discount
    for _ in range(min(n, reward.shape[1]) - 1):
        longer = torch.where(more, r + discount * sums[:, 1:], one_step[:, :-1])
        sums = torch.cat((longer, one_step[:, -1:]), dim=1)
    return sums


def lambda_returns(
    reward: Tensor,
    terminated: Tensor,
    usable: Tensor,
    next_value: Tensor,
    gammas: Tensor,
    td_lambda: float,
) -> Tensor:
    """Lambda returns, a weighted mean of all n-step returns; shapes as in `n_step_returns`.

        y[t] = r[t] + g ((1 - lambda) q[t] + lambda y[t+1])       (Sutton 1988)

    with only q[t] if transition t + 1 is not usable, and neither after a termination.
    """
    r_t = reward.unsqueeze(-1)
    discount_t = gammas * (~terminated).unsqueeze(-1)
    y = r_t[:, -1:] + discount_t[:, -1:] * next_value[:, -1:]
    returns = [y]
    for t in range(reward.shape[1] - 2, -1, -1):
        q = next_value[:, t : t + 1]
        later = torch.where(usable[:, t + 1, None, None], torch.lerp(q, y, td_lambda), q)
        y = r_t[:, t : t + 1] + discount_t[:, t : t + 1] * later
        returns.append(y)
    return torch.cat(returns[::-1], dim=1)


def clipped_target(target: Tensor, low: float | None, high: float | None) -> Tensor:
    """Targets clipped to [low, high], in units of the multiplied reward; None is no bound."""
    return target if low is None and high is None else target.clamp(min=low, max=high)


def reduced_targets(q: Tensor, noise: Tensor, config: AgentConfig) -> Tensor:
    """Minimum or mean [N, G] of target critics q [C, N, G] over the subset that `noise` [C, N, G]
    draws."""
    return over_subset(q, subset_of(noise, config), minimum=config.losses.target_minimum)


def subset_of(noise: Tensor, config: AgentConfig) -> Tensor | None:
    """Indices [size, N, G] of the subset of critics that `noise` [C, N, G] draws; None: all."""
    c = config.critic
    assert c is not None
    return subset_indices(c.n_critics, c.n_critics_target, noise, replacement=c.subset_replacement)


def subset_indices(
    n_critics: int, size: int, noise: Tensor, *, replacement: bool = False
) -> Tensor | None:
    """Indices [size, ...] of a random subset of critics, from noise [C, ...]; None for all critics.

    Without replacement (Chen et al. 2021, REDQ): the critics with the largest `noise`, which is
    independent and standard normal. With replacement: the noise is divided into C equally likely
    ranges.
    """
    if replacement:
        uniform = torch.special.ndtr(noise[:size])
        out: Tensor = (uniform * n_critics).long().clamp(max=n_critics - 1)
        return out
    return noise.topk(size, dim=0).indices if size < n_critics else None


def over_subset(q: Tensor, indices: Tensor | None, *, minimum: bool) -> Tensor:
    """Minimum (or mean) [...] of q [C, ...] over the critics `indices` [size, ...]."""
    if indices is not None:
        q = q.gather(0, indices)
    return q.amin(0) if minimum else q.mean(0)
