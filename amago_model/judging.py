"""What critics say of a batch: of its actions, of the policy's own, and of where it leads.

Letters: N transitions, A action width, C critics, G discounts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amago_model.data.batch import Batch
from amago_model.data.transitions import Transitions
from amago_model.heads.critic import policy_value
from amago_model.heads.distributions import Categorical, Distribution, OneHots
from amago_model.losses.td_targets import critic_targets, over_subset, subset_indices
from amago_model.networks import Networks


class Judging(Networks):
    """Networks, and how their critics are asked."""

    @torch.no_grad()
    def _target(self, batch: Batch, tr: Transitions) -> Tensor:
        """[N, G]: what the critics should say of each transition, in units of multiplied reward."""
        c = self.config
        actor = self.target_actor if c.losses.use_target_actor else self.policy.actor
        policy = self._choices(actor(tr.state_tp1, tr.legal_tp1, **tr.actor_tp1))
        critic, noise = self.target_critic, tr.subset_noise
        size, replacement = c.critic.n_critics_target, c.critic.subset_replacement
        chosen = subset_indices(c.critic.n_critics, size, noise, replacement=replacement)
        if isinstance(policy, Categorical) and critic.table:
            q = (critic.action_values(tr.seen_tp1, **tr.critic_tp1) * policy.probs).sum(-1)
        else:
            part = critic.state_part(tr.seen_tp1, **tr.critic_tp1)
            # Of how many rows each critic is asked is known to a CPU at once, to a GPU only later.
            sparse = tr.seen_tp1.device.type == "cpu" and not torch.compiler.is_compiling()
            asked = chosen if sparse and not c.custom.critic else None
            q = policy_value(critic, part, policy, tr.target_noise, chosen=asked)
        value = self._returns(over_subset(q, chosen, minimum=c.losses.dpg_weight > 0))
        targets = critic_targets(batch, tr.windows(value), self.gammas, c.losses)
        return tr.transitions(targets)

    def _values(self, tr: Transitions, policy: Distribution | None = None) -> tuple[Tensor, Tensor]:
        """Critics on the data's actions, [C, N, G, 1 or bins], and on the policy's own, [C, N, G].

        The first has gradients to critics and states. To the second both are constants: its
        gradient goes through the actions alone, to all that `policy` was made of (if dpg_weight
        is above 0). `policy` is the actor's, if at hand.
        """
        c = self.config.losses
        assert self.critic is not None
        judge = self.lagged_critic if self.critic.bins is None else None
        with_dpg = c.dpg_weight > 0 and torch.is_grad_enabled()
        with torch.set_grad_enabled(with_dpg):
            if policy is None:
                policy = self.policy.actor(tr.state_t.detach(), tr.legal_t, **tr.actor_t)
            policy = self._choices(policy)
        if isinstance(policy, Categorical) and self.critic.table:
            every = self.critic.action_values(tr.seen_t, **tr.critic_t)  # [C, N, G, A]
            judged = every.detach()
            if judge is not None:
                judged = judge.action_values(tr.seen_t.detach(), **tr.critic_t)
            v = (judged * policy.probs).sum(-1)
            if self.config.critic.soften_data_actions:
                return (every * tr.shown.unsqueeze(1)).sum(-1, keepdim=True), v
            index = tr.action.reshape(1, -1, 1, 1).expand(*every.shape[:3], 1)
            return every.gather(-1, index), v
        part = self.critic.state_part(tr.seen_t, **tr.critic_t)
        repeated = tr.shown[None, :, None, :].expand(1, -1, len(c.gammas), -1)
        out = self.critic.outputs(part, repeated).squeeze(1)
        with torch.set_grad_enabled(with_dpg):
            if judge is not None:
                return out, self._lagged_values(tr, policy)
            v = policy_value(self.critic, part.detach(), policy, tr.own_noise, frozen=True)
        return out, v

    def _lagged_values(self, tr: Transitions, policy: Distribution) -> Tensor:
        """[C, N, G] of the policy's own actions, by the critics from before the last step."""
        assert self.lagged_critic is not None
        part = self.lagged_critic.state_part(tr.seen_t.detach(), **tr.critic_t)
        return policy_value(self.lagged_critic, part, policy, tr.own_noise, frozen=True)

    def _dpg_value(self, tr: Transitions, policy: Distribution, v: Tensor) -> Tensor:
        """[C, N, G]: what DPG raises, if `v` is what advantages take from."""
        assert self.critic is not None
        if self.lagged_critic is None or self.critic.bins is None:
            return v
        return self._lagged_values(tr, self._choices(policy))

    def _choices(self, policy: Distribution) -> Distribution:
        """The policy as the critics meet it."""
        if self.sampled and isinstance(policy, Categorical):
            return OneHots(policy.probs, (self.spaces.action.n,))
        return policy

    def _returns(self, x: Tensor) -> Tensor:
        """What critics say in one number -> units of multiplied reward."""
        assert self.critic is not None
        return self.value_norm.value(x) if self.critic.bins is None else x

    def normalized(self, x: Tensor) -> Tensor:
        """What critics say in one number, such as LossInputs.q -> deviations from the mean return,
        as `value_norm.normalize` makes them of a return."""
        assert self.critic is not None
        if self.critic.bins is None:
            return self.value_norm.normalized_value(x)
        return self.value_norm.normalize(x)
