"""A plain implementation of Stepwell's update, the baseline of `benchmarks.update`.

It runs eagerly in float32 and differs from Stepwell's update in these parts:

- The critics' first layer is not split: one batched matmul over full rows [state | discount |
  action].
- DPG maximises the values of a full copy of the critics, which is updated after every step.
- All target critics are evaluated for every TD target.
- AdamW has torch's default implementation.
- Target networks are updated parameter by parameter.

Encoders, actor and loss functions are Stepwell's own code. The mathematics are the same.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amago_model import Agent, Batch
from amago_model.heads.critic import CriticEnsemble
from amago_model.heads.distributions import Categorical, Distribution, data_log_prob
from amago_model.heads.popart import PopArt
from amago_model.losses.actor_losses import bc_loss, dpg_loss
from amago_model.losses.critic_losses import critic_loss
from amago_model.losses.filters import advantage_weight
from amago_model.losses.td_targets import bootstrapped_returns, over_subset, subset_indices


class PlainCritics(nn.Module):
    """The weights of a `CriticEnsemble` with scalar values, without its optimisations."""

    def __init__(self, like: CriticEnsemble) -> None:
        super().__init__()
        self.table, self.n_gammas, self.n_actions = like.table, like.n_gammas, like.action.n
        self.continuous = like.action.kind == "continuous"
        self.weights = nn.ParameterList(w.detach().clone() for w in like.weights)
        self.biases = nn.ParameterList(b.detach().clone() for b in like.biases)
        self.register_buffer("gamma_features", like.gamma_features.clone())

    def _layers(self, x: Tensor) -> Tensor:
        """[M, d_in] -> [C, M, d_out]."""
        x = x.expand(self.weights[0].shape[0], -1, -1)
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if i < last:
                x = F.leaky_relu(x, 0.01)
        return x

    def every_action(self, state: Tensor) -> Tensor:
        """[N, D] -> [C, N, G, A]."""
        return self._layers(state).unflatten(-1, (self.n_gammas, self.n_actions))

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        """[N, D], [K, N, G, A] -> [C, K, N, G]."""
        k, n, g, _ = action.shape
        if self.continuous:
            action = action.clamp(-0.999, 0.999)
        rows = (
            state[None, :, None].expand(k, n, g, -1),
            self.gamma_features.expand(k, n, g, 1),
            action,
        )
        return self._layers(torch.cat(rows, dim=-1).flatten(0, 2)).reshape(-1, k, n, g)


class Baseline:
    """A copy of an agent, with its weights and statistics, that makes plain updates."""

    def __init__(self, agent: Agent, *, learning_rate: float, grad_clip: float) -> None:
        assert agent.critics is not None and agent.critics.online.bins is None and not agent.sampled
        self.agent = copy.deepcopy(agent)  # encoders, actors, statistics
        self.config, self.grad_clip = agent.config, grad_clip
        device = agent.gammas.device
        self.critics = PlainCritics(agent.critics.online).to(device)
        self.frozen_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.targets = PlainCritics(agent.critics.target).to(device).requires_grad_(False)
        self.norm: PopArt = self.agent.critics.popart
        self.parameters = [*self.agent.policy.parameters(), *self.critics.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate)

    def named_gradients(self) -> dict[str, Tensor]:
        """Gradients by the parameter names of Stepwell's agent."""
        parts = {"policy": self.agent.policy, "critics.online": self.critics}
        return {
            f"{part}.{name}": p.grad
            for part, module in parts.items()
            for name, p in module.named_parameters()
            if p.grad is not None
        }

    def update(self, batch: Batch) -> Tensor:
        loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._update_copies()
        return loss.detach()

    @torch.no_grad()
    def _update_copies(self) -> None:
        pairs = [(self.targets, self.critics)]
        if self.config.losses.use_target_actor:
            pairs.append((self.agent.target_actor, self.agent.policy.actor))
        for slow, fast in pairs:
            for p, q in zip(slow.parameters(), fast.parameters(), strict=True):
                p.lerp_(q, self.config.losses.tau)
        for p, q in zip(self.frozen_critics.parameters(), self.critics.parameters(), strict=True):
            p.copy_(q)

    def loss(self, batch: Batch) -> Tensor:
        c = self.config
        tr = self.agent.encode(batch, padded=True)
        with torch.no_grad():
            actor = self.agent.target_actor if c.losses.use_target_actor else self._actor
            q = self._value(self.targets, tr.state_tp1, actor(tr.state_tp1), tr.target_noise)
            subset = subset_indices(
                c.critic.n_critics,
                c.critic.n_critics_target,
                tr.ensemble_noise,
                replacement=c.critic.subset_replacement,
            )
            q = over_subset(q, subset, minimum=c.losses.dpg_weight > 0)
            q_next = self.norm.to_return(q).unflatten(0, tr.shape)
            target = bootstrapped_returns(batch, q_next, self.agent.gammas, c.losses).flatten(0, 1)
        self.norm.update(target, tr.critic_mask)
        q_sa = self._of_data(tr.state_t, tr.action)
        prediction = self.norm.to_normalized(q_sa)
        goal = self.norm.normalize(target)
        loss = c.losses.critic_weight * critic_loss(prediction, goal, tr.critic_mask, None)
        policy = own = self._actor(tr.state_t)
        with torch.set_grad_enabled(c.losses.dpg_weight > 0):
            state = tr.state_t.detach()
            if c.losses.dpg_detach_state:
                own = self._actor(state)
            v = self._value(self.frozen_critics, state, own, tr.policy_noise)
            value = self.norm.to_normalized(v)
        if c.losses.dpg_weight > 0:
            dpg = dpg_loss(value, tr.exists, None)
            loss = loss + c.losses.dpg_weight * dpg
        if c.losses.bc_weight > 0:
            advantage = (prediction.detach() - value.detach()).mean(0)
            weight = advantage_weight(advantage, c.losses.filter)
            log_prob = data_log_prob(policy, tr.action)
            bc = bc_loss(log_prob, weight, tr.bc_mask, None)
            loss = loss + c.losses.bc_weight * bc
        return loss

    @property
    def _actor(self) -> nn.Module:
        return self.agent.policy.actor

    def _value(
        self, critics: PlainCritics, state: Tensor, policy: Distribution, noise: Tensor
    ) -> Tensor:
        if isinstance(policy, Categorical):
            return (critics.every_action(state) * policy.probs).sum(-1)
        return critics(state, policy.rsample(noise)).mean(1)

    def _of_data(self, state: Tensor, action: Tensor) -> Tensor:
        if self.critics.table:
            every = self.critics.every_action(state)
            index = action.reshape(1, -1, 1, 1).expand(*every.shape[:3], 1)
            return every.gather(-1, index).squeeze(-1)
        action = action[None, :, None].expand(1, -1, self.critics.gamma_features.shape[0], -1)
        return self.critics(state, action).squeeze(1)
