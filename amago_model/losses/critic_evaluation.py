"""Evaluation of the critics on the actions of the data and of the policy.

Letters: N transitions, A action width, C critics, G discounts, K action samples, M critics of a
subset.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from amago_model.critics import Critics
from amago_model.data.transitions import Transitions
from amago_model.heads.critic import CriticEnsemble
from amago_model.heads.critic_layers import StateProjection
from amago_model.heads.distributions import Categorical, Distribution


class StateValue(NamedTuple):
    """V(s) of value_expectile, and its target: outputs like those of scalar critics."""

    v: Tensor
    """[N, G]: V(s). Gradient to its network and the states."""
    target: Tensor
    """[N, G]: value of the data's action, reduced over a random subset of the target critics."""


class CriticEvaluation(NamedTuple):
    """Outputs of the critics in the state before each transition. See popart.py for their units."""

    output: Tensor
    """[C, N, G, 1 or bins]: raw outputs for the actions of the data. Gradient to critics and
    states."""
    q: Tensor
    """[C, N, G]: `output` as scalar values."""
    v: Tensor
    """[C, N, G]: mean value of the policy's actions; with value_expectile V(s), [1, N, G]."""
    dpg_q: Tensor
    """[C, N, G]: mean value of the policy's actions, maximised by DPG. Critics and states are
    detached: the gradient flows only through the actions, to the policy. With value_expectile and
    without DPG nothing maximises it, and it is `v`."""

    state_value: StateValue | None = None
    """V(s) and its target; None without value_expectile."""

    @property
    def action_value(self) -> Tensor:
        """[N, G]: value of the data's action, the mean over critics, without gradient; with
        value_expectile, V's target."""
        if self.state_value is not None:
            return self.state_value.target
        return self.q.detach().mean(0)

    @property
    def policy_value(self) -> Tensor:
        """[N, G]: value of the policy's actions, or V(s), the mean over critics; no gradient."""
        return self.v.detach().mean(0)

    @property
    def advantage(self) -> Tensor:
        """[N, G]: the difference of both, `action_value` minus `policy_value`."""
        if self.state_value is not None:
            return self.state_value.target - self.state_value.v.detach()
        return (self.q - self.v).detach().mean(0)


def evaluate_critics(
    critics: Critics,
    tr: Transitions,
    policy: Distribution,
    *,
    soften: bool,
    dpg: bool,
) -> CriticEvaluation:
    """Evaluate the critics on all transitions.

    Args:
        critics: if there is a lagged copy, it evaluates the policy's actions; for critics over
            bins only in `dpg_q`.
        policy: the policy in the state before each transition, [N, G, ...].
        soften: the actions of the data are `tr.encoded_action` instead of one-hots (see
            soften_data_actions of the critic).
        dpg: keep the gradient of the policy's actions.
    """
    critic, lagged_critic = critics.online, critics.lagged
    with_dpg = dpg and torch.is_grad_enabled()
    if isinstance(policy, Categorical) and critic.table:
        every = critic.action_values(tr.critic_state_t, **tr.critic_inputs_t)  # [C, N, G, A]
        constant = every.detach()
        if lagged_critic is not None:
            constant = lagged_critic.action_values(tr.critic_state_t.detach(), **tr.critic_inputs_t)
        v = (constant * policy.probs).sum(-1)
        output = _of_data_action(every, tr, soften=soften)
        return CriticEvaluation(output, critic.scalar(output), v, v)
    state = critic.project_state(tr.critic_state_t, **tr.critic_inputs_t)
    output = _data_action_outputs(critic, state, tr)
    q = critic.scalar(output)
    with torch.set_grad_enabled(with_dpg):
        if lagged_critic is None:
            v = policy_values(critic, state.detach(), policy, tr.policy_noise, frozen=True)
            return CriticEvaluation(output, q, v, v)
        past = lagged_critic.project_state(tr.critic_state_t.detach(), **tr.critic_inputs_t)
        dpg_q = policy_values(lagged_critic, past, policy, tr.policy_noise, frozen=True)
        if critic.bins is None:
            return CriticEvaluation(output, q, dpg_q, dpg_q)
        v = policy_values(critic, state.detach(), policy, tr.policy_noise, frozen=True)
        return CriticEvaluation(output, q, v, dpg_q)


def data_action_outputs(critic: CriticEnsemble, tr: Transitions, *, soften: bool) -> Tensor:
    """Raw outputs for the data's actions, [C, N, G, 1 or bins]; `soften` as in
    `evaluate_critics`."""
    if critic.table:
        every = critic.action_values(tr.critic_state_t, **tr.critic_inputs_t)
        return _of_data_action(every, tr, soften=soften)
    state = critic.project_state(tr.critic_state_t, **tr.critic_inputs_t)
    return _data_action_outputs(critic, state, tr)


def _of_data_action(every: Tensor, tr: Transitions, *, soften: bool) -> Tensor:
    """Select from the values of all actions, [C, N, G, A] -> [C, N, G, 1]."""
    if soften:
        return (every * tr.encoded_action.unsqueeze(1)).sum(-1, keepdim=True)
    index = tr.action.reshape(1, -1, 1, 1).expand(*every.shape[:3], 1)
    return every.gather(-1, index)


def _data_action_outputs(critic: CriticEnsemble, state: StateProjection, tr: Transitions) -> Tensor:
    action = tr.encoded_action[None, :, None, :].expand(1, -1, tr.policy_noise.shape[2], -1)
    return critic.outputs(state, action).squeeze(1)


def policy_values(
    critic: CriticEnsemble,
    state: StateProjection,
    policy: Distribution,
    noise: Tensor,
    *,
    frozen: bool = False,
    subset: Tensor | None = None,
) -> Tensor:
    """Values of a policy [C, N, G]: the expectation over discrete actions, or a mean over samples.

    Args:
        critic: an ensemble of C critics.
        state: the states' product with the first layer, from `critic.project_state`.
        policy: a policy of batch shape [N, G].
        noise: [K, N, G, W] standard normal, for K samples; unused for `Categorical`.
        frozen: detach the critics' weights.
        subset: [M, N, G] indices of critics. Only their values are computed, without gradients;
            the values of the others are zeros.
    """
    probs: Tensor | None = None
    if isinstance(policy, Categorical):
        n = policy.probs.shape[-1]
        action = torch.eye(n, device=policy.probs.device)[:, None, None, :]
        action = action.expand(n, *policy.probs.shape)
        probs = policy.probs.movedim(-1, 0)
    else:
        action = policy.rsample(noise)
    if subset is None:
        values = critic.values(state, action, frozen=frozen)
    else:
        values = critic.subset_values(state, action, subset)
    if probs is not None:
        return (values * probs).sum(1)
    return values.mean(1) if len(action) > 1 else values.squeeze(1)
