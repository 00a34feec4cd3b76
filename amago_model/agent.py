"""The learner: one forward pass over a batch of windows gives the loss of every head.

An agent is a sum of the pure functions of losses.py; another algorithm is another sum. It knows
no optimiser, no files and no environments. Letters: B windows, T transitions, L = T + 1 rows,
N = B * T, D state width, A action width, C critics, G discounts, K action samples.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from amago_model import losses
from amago_model.acting import ActingPolicy
from amago_model.batch import Batch, action_index, encode_action
from amago_model.config import AgentConfig, Spaces
from amago_model.critic import CriticEnsemble
from amago_model.distributions import Categorical, Distribution, TanhGaussian
from amago_model.moments import masked_mean
from amago_model.returns import n_step_returns
from amago_model.trajectory_encoders import Hidden
from amago_model.value_norm import PopArt

M = TypeVar("M", bound=nn.Module)


@dataclass(slots=True)
class _Transitions:
    """A batch, encoded once and flattened to N transitions; '_t' before, '_tp1' after each."""

    state_t: Tensor  # [N, D], with gradient
    state_tp1: Tensor  # [N, D], without
    legal_t: Tensor | None  # [N, A]
    legal_tp1: Tensor | None  # [N, A]
    action: Tensor  # [N] index or [N, A] in -1..1
    exists: Tensor  # [N] bool: the transition is not padding
    imitable: Tensor  # [N] bool: ... and its action is known
    learnable: Tensor  # [N] bool: ... and it ends the task or arrives at a known observation
    shape: tuple[int, int]  # B, T
    target_noise: Tensor  # [K_c, N, G, A] standard normal; nothing if discrete
    own_noise: Tensor  # [K_a, N, G, A]
    subset_noise: Tensor  # [C, N, G], whose order picks the critics of each target


class Agent(nn.Module):
    """Off-policy actor-critic on windows of trajectories (AMAGO; Grigsby et al. 2024).

    One update, for all transitions t and discounts g in parallel:

        s      = memory(row_encoder(observation, previous action and reward))      once, online
        a'     ~ target_actor(s[t+1])                          K_c samples, or all probabilities
        q'     = min (mean, if online_weight is 0) over M of C target_critics(s[t+1], mean over a')
        y      = multiplied reward + g * (not terminated) * q'                     or n steps of it
        popart takes in y, then y~ = (y - mean) / sigma
        L_critic  = mean over C (w critic(s[t], a[t]) + b - y~)^2                  trains s too
        a_pi   ~ actor(s[t] without gradient)                  K_a samples, or all probabilities
        v      = mean over a_pi of the critics, as constants   the same pass serves both uses below
        A      = w mean over C (critic(s[t], a[t]) - v)        in deviations of the return
        L_climb   = - (w min over C of v + b)                  gradient through a_pi into the actor
        L_clone   = - f(A) log actor(a[t] | s[t])              gradient into the actor and s
        loss   = critic_weight L_critic + online_weight L_climb + offline_weight L_clone

    and after the optimiser's step, `update_targets`: target += tau * (online - target).

    Each loss is a mean over the transitions its mask leaves: climbing needs a real row, cloning
    also a known action, the critic also a termination or a recorded next observation. Truncation
    bootstraps, termination does not. With fake_filter and online_weight 0 this is behaviour
    cloning and there is no critic at all.
    """

    def __init__(self, config: AgentConfig, spaces: Spaces) -> None:
        super().__init__()
        self.config, self.spaces = config, spaces
        self.gammas: Tensor
        self.register_buffer("gammas", torch.tensor(config.losses.gammas))
        self.policy = ActingPolicy(config, spaces)
        self.critic: CriticEnsemble | None = None
        if not config.losses.trains_critic:
            return
        n_gammas = len(config.losses.gammas)
        self.critic = CriticEnsemble(
            config.critic, spaces.action, config.losses.gammas, d_state=self.policy.d_state
        )
        self.target_critic = _frozen_copy(self.critic)
        if config.losses.use_target_actor:
            self.target_actor = _frozen_copy(self.policy.actor)
        self.value_norm = PopArt(
            n_gammas,
            beta=config.critic.popart_beta,
            init_nu=config.critic.popart_init_nu,
            enabled=config.critic.popart,
        )

    # ------------------------------------------------------------------------------------ learning

    def trainable_parameters(self) -> list[nn.Parameter]:
        """What the optimiser steps and the gradient norm is clipped over: never a frozen copy."""
        return [p for p in self.parameters() if p.requires_grad]

    @torch.no_grad()
    def update_targets(self) -> None:
        """Move the slow copies towards the learned weights. Call it after each optimiser step."""
        if self.critic is None:
            return
        online: list[Tensor] = list(self.critic.parameters())
        target: list[Tensor] = list(self.target_critic.parameters())
        if self.config.losses.use_target_actor:
            online += self.policy.actor.parameters()
            target += self.target_actor.parameters()
        torch._foreach_lerp_(target, online, self.config.losses.tau)

    def forward(
        self, batch: Batch, detailed: bool = True, counts: dict[str, float] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and what there is to say about it.

        Args:
            batch: see batch.py. Statistics (inputs, PopArt) take it in if in training mode.
            detailed: False leaves out all metrics but the losses, which saves time.
            counts: replaces the number of transitions that each loss is averaged over, by the
                keys of `loss_counts`. To make m micro-batches equal one batch of their union, pass
                the union's counts with each; for W processes whose gradients are averaged, the
                union's divided by W.

        Returns:
            (loss, metrics): a scalar, and detached scalars on the batch's device.

        Raises:
            BatchError: a shape does not fit the spaces.
        """
        batch.check(self.spaces)
        c = self.config.losses
        tr = self._encode(batch)
        n = _as_tensors(counts, tr.exists.device)
        terms: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        advantage: Tensor | None = None

        if self.critic is not None:
            target = self._target(batch, tr)
            if self.training:
                self.value_norm.update(target, tr.learnable)
            q_sa, v = self._values(tr)  # [C, N, G], [C, N, G]
            prediction = self.value_norm.normalized_value(q_sa)
            terms["critic"] = losses.critic_loss(
                prediction, self.value_norm.normalize(target), tr.learnable, n.get("critic")
            )
            value = self.value_norm.normalized_value(v)
            advantage = (prediction.detach() - value.detach()).mean(0)  # [N, G]
            if c.online_weight > 0:
                terms["climb"] = losses.climbing_loss(value, tr.exists, n.get("climb"))
            if detailed:
                metrics |= self._critic_metrics(tr, target, q_sa, advantage)

        if c.offline_weight > 0:
            policy = self.policy.actor(tr.state_t, tr.legal_t)
            log_prob = _log_prob(policy, tr.action)
            weight = self._filter(advantage)
            terms["clone"] = losses.cloning_loss(log_prob, weight, tr.imitable, n.get("clone"))
            if detailed:
                metrics |= self._actor_metrics(tr, policy, log_prob, weight)

        weights = {"critic": c.critic_weight, "climb": c.online_weight, "clone": c.offline_weight}
        loss = sum((weights[name] * term for name, term in terms.items()), torch.zeros(()))
        metrics |= {f"loss/{name}": term.detach() for name, term in terms.items()}
        return loss, metrics | {"loss/total": loss.detach()}

    @staticmethod
    def loss_counts(batch: Batch) -> dict[str, Tensor]:
        """How many transitions each loss of this batch is a mean of; sums of these are `counts`."""
        exists, imitable, learnable = _loss_masks(batch)
        return {"climb": exists.sum(), "clone": imitable.sum(), "critic": learnable.sum()}

    def _encode(self, batch: Batch) -> _Transitions:
        b, t = batch.mask.shape
        rows = self.policy.rows(
            batch.obs,
            batch.prev_action,
            batch.prev_reward,
            batch.time_idx,
            valid=batch.row_mask,
            previous_known=batch.previous_known,
        )
        state = self.policy.states(rows, batch.time_idx)  # [B, L, D]
        legal = self.policy.legal(batch.obs)
        exists, imitable, learnable = _loss_masks(batch)
        space = self.spaces.action
        if space.kind == "discrete":
            action = action_index(space, batch.action).clamp(0, space.n - 1).flatten()
        else:
            action = encode_action(space, batch.action).flatten(0, 1)
            action = torch.where(imitable.reshape(-1, 1), action, 0.0)
        return _Transitions(
            state_t=state[:, :-1].flatten(0, 1),
            state_tp1=state[:, 1:].detach().flatten(0, 1),
            legal_t=None if legal is None else legal[:, :-1].flatten(0, 1),
            legal_tp1=None if legal is None else legal[:, 1:].flatten(0, 1),
            action=action,
            exists=exists.flatten(),
            imitable=imitable.flatten(),
            learnable=learnable.flatten(),
            shape=(b, t),
            **self._noise(b, t, state.device),
        )

    def _noise(self, b: int, t: int, device: torch.device) -> dict[str, Tensor]:
        """All the randomness of an update in one draw, time first: padding on the right changes
        nothing for the transitions before it (on a CPU), nor does asking for metrics."""
        c, g = self.config, len(self.config.losses.gammas)
        width = 0 if self.spaces.action.kind == "discrete" else self.spaces.action.width
        k_c, k_a = c.losses.n_target_actions, c.losses.n_policy_actions
        everyone = c.critic.n_critics_target == c.critic.n_critics
        n_critics = 0 if everyone or self.critic is None else c.critic.n_critics
        sizes = k_c * g * width, k_a * g * width, n_critics * g
        noise = torch.randn(t, b, sum(sizes), device=device).transpose(0, 1).flatten(0, 1)
        target, own, subset = noise.split(sizes, dim=1)
        return {
            "target_noise": target.unflatten(1, (k_c, g, width)).transpose(0, 1),
            "own_noise": own.unflatten(1, (k_a, g, width)).transpose(0, 1),
            "subset_noise": subset.unflatten(1, (n_critics, g)).transpose(0, 1),
        }

    @torch.no_grad()
    def _target(self, batch: Batch, tr: _Transitions) -> Tensor:
        """[N, G]: what the critics should say of each transition, in units of multiplied reward."""
        c = self.config
        actor = self.target_actor if c.losses.use_target_actor else self.policy.actor
        policy = actor(tr.state_tp1, tr.legal_tp1)
        if isinstance(policy, Categorical):
            q = (self.target_critic.action_values(tr.state_tp1) * policy.probs).sum(-1)
        else:
            part = self.target_critic.state_part(tr.state_tp1)
            q = self.target_critic.values(part, policy.rsample(tr.target_noise)).mean(1)
        size, minimum = c.critic.n_critics_target, c.losses.online_weight > 0
        chosen = losses.ensemble_subset(q, size, minimum=minimum, noise=tr.subset_noise)
        next_value = self.value_norm.value(chosen)
        usable = batch.mask & (batch.terminated | batch.next_obs_valid)
        reward = torch.where(batch.mask, batch.reward * c.losses.reward_multiplier, 0.0)
        returns = n_step_returns(
            reward,
            batch.terminated,
            usable,
            next_value.unflatten(0, tr.shape),
            self.gammas,
            c.losses.n_step,
        )
        return returns.flatten(0, 1)

    def _values(self, tr: _Transitions) -> tuple[Tensor, Tensor]:
        """Raw critic outputs, both [C, N, G]: of the data's actions, and of the policy's own.

        The first has gradients to critics and states; the second sees both as constants, and has
        gradients to the actor (if anything climbs them).
        """
        c = self.config.losses
        assert self.critic is not None
        state = tr.state_t.detach()
        with torch.set_grad_enabled(c.online_weight > 0 and torch.is_grad_enabled()):
            policy = self.policy.actor(state, tr.legal_t)
            if not isinstance(policy, Categorical):
                own = policy.rsample(tr.own_noise)
        if isinstance(policy, Categorical):
            every = self.critic.action_values(tr.state_t)  # [C, N, G, A]
            index = tr.action.reshape(1, -1, 1, 1).expand(*every.shape[:3], 1)
            v = (every.detach() * policy.probs).sum(-1)
            return every.gather(-1, index).squeeze(-1), v
        part = self.critic.state_part(tr.state_t)
        repeated = tr.action[None, :, None, :].expand(1, -1, len(c.gammas), -1)
        q_sa = self.critic.values(part, repeated).squeeze(1)
        return q_sa, self.critic.values(part.detach(), own, frozen=True).mean(1)

    def _filter(self, advantage: Tensor | None) -> Tensor | None:
        c = self.config.losses
        if c.fake_filter or advantage is None:
            return None
        if c.filter == "binary":
            return losses.binary_filter(advantage, c.filter_threshold)
        return losses.exp_filter(advantage, c.filter_beta, c.filter_max)

    # ------------------------------------------------------------------------------------- metrics

    @torch.no_grad()
    def _critic_metrics(
        self, tr: _Transitions, target: Tensor, q_sa: Tensor, advantage: Tensor
    ) -> dict[str, Tensor]:
        """Of the acting discount, in units of the environment's reward where not said otherwise."""
        scale, mask = self.config.losses.reward_multiplier, tr.learnable
        q = self.value_norm.value(q_sa)[..., -1] / scale  # [C, N]
        y = target[:, -1] / scale
        centred = q - q.mean(0)
        return {
            "value/q_mean": masked_mean(q.mean(0), mask),
            "value/q_std_over_critics": masked_mean(centred.square().mean(0).sqrt(), mask),
            "value/target_mean": masked_mean(y, mask),
            "value/target_min": -_masked_max(-y, mask),
            "value/target_max": _masked_max(y, mask),
            "value/advantage_mean": masked_mean(advantage[:, -1], tr.imitable),
            "popart/mean": self.value_norm.mean[-1] / scale,
            "popart/sigma": self.value_norm.sigma[-1] / scale,
            "popart/w": self.value_norm.w[-1].clone(),
            "popart/b": self.value_norm.b[-1].clone(),
            "count/critic": mask.sum(),
        }

    @torch.no_grad()
    def _actor_metrics(
        self, tr: _Transitions, policy: Distribution, log_prob: Tensor, weight: Tensor | None
    ) -> dict[str, Tensor]:
        """Of the acting discount."""
        if isinstance(policy, TanhGaussian):
            entropy = policy.entropy(tr.own_noise)[:, -1]
        else:
            entropy = policy.entropy()[:, -1]
        metrics = {
            "policy/log_prob": masked_mean(log_prob[:, -1], tr.imitable),
            "policy/entropy": masked_mean(entropy, tr.exists),
            "count/imitable": tr.imitable.sum(),
        }
        if weight is not None:
            metrics["policy/filter_mean"] = masked_mean(weight[:, -1], tr.imitable)
        return metrics

    # -------------------------------------------------------------------------------------- acting

    def act(
        self,
        obs: dict[str, Tensor],
        prev_action: Tensor,
        prev_reward: Tensor,
        time_idx: Tensor,
        hidden: Hidden,
        sample: bool = True,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Hidden]:
        """See ActingPolicy.act."""
        return self.policy.act(obs, prev_action, prev_reward, time_idx, hidden, sample, generator)

    def initial_hidden(self, n: int, device: torch.device | str = "cpu") -> Hidden:
        """See ActingPolicy.initial_hidden."""
        return self.policy.initial_hidden(n, device)

    def reset_hidden(self, hidden: Hidden, done: Tensor) -> Hidden:
        """See ActingPolicy.reset_hidden."""
        return self.policy.reset_hidden(hidden, done)


def _frozen_copy(module: M) -> M:
    return copy.deepcopy(module).requires_grad_(False)


def _loss_masks(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T] each: the transition exists; its action is known; and its target can be computed."""
    imitable = batch.mask & batch.action_known
    return batch.mask, imitable, imitable & (batch.terminated | batch.next_obs_valid)


def _log_prob(policy: Distribution, action: Tensor) -> Tensor:
    """Data actions, [N] or [N, A], under the policy of every discount: [N, G]."""
    if isinstance(policy, Categorical):
        return policy.log_prob(action.unsqueeze(1).expand(policy.probs.shape[:-1]))
    return policy.log_prob(action.unsqueeze(1))


def _masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Largest x [N] that the mask leaves; 0 if there is none."""
    largest = torch.where(mask, x, -torch.inf).amax() if x.numel() else x.sum() - torch.inf
    return torch.where(mask.any(), largest, 0.0)


def _as_tensors(counts: dict[str, float] | None, device: torch.device) -> dict[str, Tensor]:
    return {k: torch.as_tensor(v, device=device) for k, v in (counts or {}).items()}
