"""The learner: one forward pass over a batch of windows gives the loss of every head.

An agent is a sum of the pure functions of losses.py; another algorithm is another sum. It knows
no optimiser, no files and no environments. Letters: B windows, T transitions, L = T + 1 rows,
N = B * T, D state width, A action width, C critics, G discounts, K action samples.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from amago_model import losses
from amago_model.acting import ActingPolicy
from amago_model.batch import Batch, action_index, encode_action, one_hot
from amago_model.config import AgentConfig, Spaces
from amago_model.critic import CriticEnsemble
from amago_model.distributions import Categorical, Distribution, OneHots
from amago_model.errors import ConfigError
from amago_model.moments import masked_mean
from amago_model.privileged import PrivilegedFeatures
from amago_model.registry import registered
from amago_model.returns import lambda_returns, n_step_returns
from amago_model.trajectory_encoders import Hidden
from amago_model.value_norm import PopArt

M = TypeVar("M", bound=nn.Module)


@dataclass(slots=True)
class _Transitions:
    """A batch, encoded once and flattened to N transitions; '_t' before, '_tp1' after each."""

    state_t: Tensor  # [N, D], with gradient
    state_tp1: Tensor  # [N, D], without
    seen_t: Tensor  # [N, D + P]: the state and what only critics may see
    seen_tp1: Tensor  # [N, D + P]
    legal_t: Tensor | None  # [N, A]
    legal_tp1: Tensor | None  # [N, A]
    action: Tensor  # [N, A] encoded; [N] index if discrete
    shown: Tensor  # [N, A]: the action as critics see it
    exists: Tensor  # [N] bool: the transition is not padding
    imitable: Tensor  # [N] bool: ... and its action is known
    learnable: Tensor  # [N] bool: ... and it ends the task or arrives at a known observation
    shape: tuple[int, int]  # B, T
    target_noise: Tensor  # [K_c, N, G, W] standard normal; nothing if discrete
    own_noise: Tensor  # [K_a, N, G, W], W of actor.noise_width
    subset_noise: Tensor  # [C, N, G], whose order picks the critics of each target


@dataclass(slots=True)
class Values:
    """Of each transition and discount, [B, T, G], in units of the environment's return."""

    q: Tensor
    """Value of the data's action, mean over critics."""
    v: Tensor
    """Value of the policy's own actions, mean over critics."""
    advantage: Tensor
    """What the filter sees: see LossConfig.filter_advantage for its unit."""
    weight: Tensor
    """What the filter makes of it."""
    q_std: Tensor
    """Deviation of q over critics."""
    v_std: Tensor
    """Deviation of v over critics."""
    mask: Tensor
    """[B, T] bool: False where there is no transition, or its action is not known."""


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

    sampled: ClassVar[bool] = False
    """Whether critics meet the policy's discrete actions as samples, not all with their odds."""

    def __init__(self, config: AgentConfig, spaces: Spaces) -> None:
        super().__init__()
        if (config.algorithm == "multitask") != self.sampled:
            raise ConfigError(
                f"AgentConfig.algorithm: {config.algorithm!r} is not {type(self).__name__}; build "
                "agents with make_agent(config, spaces)"
            )
        self.config, self.spaces = config, spaces
        self.gammas: Tensor
        self.register_buffer("gammas", torch.tensor(config.losses.gammas))
        self.policy = ActingPolicy(config, spaces)
        self.critic: CriticEnsemble | None = None
        if not config.losses.trains_critic:
            return
        n_gammas = len(config.losses.gammas)
        self.privileged = PrivilegedFeatures(spaces)
        name = config.custom.critic
        make_critic = registered("critic", name) if name else CriticEnsemble
        self.critic = make_critic(
            config.critic,
            spaces.action,
            config.losses.gammas,
            d_state=self.policy.d_state + self.privileged.width,
            sampled=self.sampled,
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
        """Move the slow copies towards the learned weights. Call it after each optimiser step
        (before it, if `LossConfig.targets_before_step`)."""
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
            out, v = self._values(tr)  # [C, N, G, 1 or bins], [C, N, G]
            q_sa = self.critic.scalar(out)
            if self.critic.bins is None:
                prediction = self._normalized(q_sa)
                terms["critic"] = losses.critic_loss(
                    prediction, self.value_norm.normalize(target), tr.learnable, n.get("critic")
                )
            else:
                label = self.critic.bins.label(target)
                terms["critic"] = losses.classification_loss(
                    out, label, tr.learnable, n.get("critic")
                )
            value = self._normalized(v)
            advantage = self._advantage(q_sa.detach(), v.detach())
            if c.online_weight > 0:
                terms["climb"] = losses.climbing_loss(value, tr.exists, n.get("climb"))
            if detailed:
                metrics |= self._critic_metrics(tr, target, q_sa, advantage)

        if c.offline_weight > 0:
            policy = self.policy.actor(tr.state_t, tr.legal_t)
            if self.sampled and self.config.critic.soften_data_actions:
                log_prob = _log_prob(self._choices(policy), tr.shown)
            else:
                log_prob = _log_prob(policy, tr.action)
            weight = self._filter(advantage, tr.imitable)
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
            shown = one_hot(action, space.n)
            if self.config.critic.soften_data_actions:
                low, high = self.config.actor.prob_low, self.config.actor.prob_high
                shown = shown.clamp(low, high)
                shown = shown / shown.sum(-1, keepdim=True)
        else:
            action = encode_action(space, batch.action).flatten(0, 1)
            shown = action = torch.where(imitable.reshape(-1, 1), action, 0.0)
        state_t = seen_t = state[:, :-1].flatten(0, 1)
        state_tp1 = seen_tp1 = state[:, 1:].detach().flatten(0, 1)
        if self.critic is not None and self.privileged.width:
            seen = torch.cat((state, self.privileged(batch.obs, batch.row_mask)), dim=-1)
            seen_t = seen[:, :-1].flatten(0, 1)
            seen_tp1 = seen[:, 1:].detach().flatten(0, 1)
        return _Transitions(
            state_t=state_t,
            state_tp1=state_tp1,
            seen_t=seen_t,
            seen_tp1=seen_tp1,
            shown=shown,
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
        exact = self.spaces.action.kind == "discrete" and not self.sampled
        width = 0 if exact else int(self.policy.actor.noise_width)
        k_c, k_a = c.losses.n_target_actions, c.losses.n_policy_actions
        everyone = c.critic.n_critics_target == c.critic.n_critics
        everyone = everyone and not c.critic.subset_replacement
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
        policy = self._choices(actor(tr.state_tp1, tr.legal_tp1))
        critic = self.target_critic
        if isinstance(policy, Categorical) and critic.table:
            q = (critic.action_values(tr.seen_tp1) * policy.probs).sum(-1)
        else:
            q = _policy_value(critic, critic.state_part(tr.seen_tp1), policy, tr.target_noise)
        chosen = losses.ensemble_subset(
            q,
            c.critic.n_critics_target,
            minimum=c.losses.online_weight > 0,
            noise=tr.subset_noise,
            replacement=c.critic.subset_replacement,
        )
        next_value = self._returns(chosen)
        usable = batch.mask & (batch.terminated | batch.next_obs_valid)
        reward = torch.where(batch.mask, batch.reward * c.losses.reward_multiplier, 0.0)
        q_next = next_value.unflatten(0, tr.shape)
        if c.losses.td_lambda is None:
            returns = n_step_returns(
                reward, batch.terminated, usable, q_next, self.gammas, c.losses.n_step
            )
        else:
            returns = lambda_returns(
                reward, batch.terminated, usable, q_next, self.gammas, c.losses.td_lambda
            )
        low, high = (
            None if bound is None else bound * c.losses.reward_multiplier
            for bound in (c.losses.target_low, c.losses.target_high)
        )
        return losses.clipped_target(returns, low, high).flatten(0, 1)

    def _values(self, tr: _Transitions) -> tuple[Tensor, Tensor]:
        """Critics on the data's actions, [C, N, G, 1 or bins], and on the policy's own, [C, N, G].

        The first has gradients to critics and states; the second sees both as constants, and has
        gradients to the actor (if anything climbs them).
        """
        c = self.config.losses
        assert self.critic is not None
        climbs = c.online_weight > 0 and torch.is_grad_enabled()
        with torch.set_grad_enabled(climbs):
            policy = self._choices(self.policy.actor(tr.state_t.detach(), tr.legal_t))
        if isinstance(policy, Categorical) and self.critic.table:
            every = self.critic.action_values(tr.seen_t)  # [C, N, G, A]
            v = (every.detach() * policy.probs).sum(-1)
            if self.config.critic.soften_data_actions:
                return (every * tr.shown.unsqueeze(1)).sum(-1, keepdim=True), v
            index = tr.action.reshape(1, -1, 1, 1).expand(*every.shape[:3], 1)
            return every.gather(-1, index), v
        part = self.critic.state_part(tr.seen_t)
        repeated = tr.shown[None, :, None, :].expand(1, -1, len(c.gammas), -1)
        out = self.critic.outputs(part, repeated).squeeze(1)
        with torch.set_grad_enabled(climbs):
            v = _policy_value(self.critic, part.detach(), policy, tr.own_noise, frozen=True)
        return out, v

    def _choices(self, policy: Distribution) -> Distribution:
        """The policy as the critics meet it."""
        if self.sampled and isinstance(policy, Categorical):
            return OneHots(policy.probs, (self.spaces.action.n,))
        return policy

    def _returns(self, x: Tensor) -> Tensor:
        """What critics say in one number -> units of multiplied reward."""
        assert self.critic is not None
        return self.value_norm.value(x) if self.critic.bins is None else x

    def _normalized(self, x: Tensor) -> Tensor:
        """What critics say in one number -> deviations from the mean return."""
        assert self.critic is not None
        if self.critic.bins is None:
            return self.value_norm.normalized_value(x)
        return self.value_norm.normalize(x)

    def _advantage(self, q_sa: Tensor, v: Tensor) -> Tensor:
        """[C, N, G] each -> [N, G]: what the filter sees."""
        if self.config.losses.filter_advantage == "raw":
            return (q_sa - v).mean(0)
        return (self._normalized(q_sa) - self._normalized(v)).mean(0)

    def _filter(self, advantage: Tensor | None, mask: Tensor) -> Tensor | None:
        c = self.config.losses
        if c.fake_filter or advantage is None:
            return None
        if c.filter_batch_norm:
            advantage = losses.normalized_advantage(advantage, mask)
        if name := self.config.custom.filter:
            return registered("filter", name)(advantage)  # type: ignore[no-any-return]
        if c.filter == "binary":
            return losses.binary_filter(advantage, c.filter_threshold)
        if c.filter == "leaky_relu":
            return losses.leaky_relu_filter(advantage, **dataclasses.asdict(c.leaky_filter))
        return losses.exp_filter(advantage, c.filter_beta, c.filter_max)

    @torch.no_grad()
    def get_values(self, batch: Batch) -> Values:
        """What the agent thinks of the data's actions: for looking at data, not for learning.

        In evaluation mode: no dropout, and no statistic moves. The policy's own samples, where it
        has to draw some, come from torch's global generator.

        Raises:
            ConfigError: pure behaviour cloning has no critic to ask.
            BatchError: a shape does not fit the spaces.
        """
        if self.critic is None:
            raise ConfigError(
                "get_values: with fake_filter and online_weight=0 there is no critic to ask; "
                "train with a critic to compare actions"
            )
        batch.check(self.spaces)
        was_training = self.training
        self.eval()
        try:
            tr = self._encode(batch)
            out, v_raw = self._values(tr)
            q_raw = self.critic.scalar(out)
            advantage = self._advantage(q_raw, v_raw)
            weight = self._filter(advantage, tr.imitable)
            scale = self.config.losses.reward_multiplier
            q, v = self._returns(q_raw) / scale, self._returns(v_raw) / scale
        finally:
            self.train(was_training)
        weight = torch.ones_like(advantage) if weight is None else weight
        fields = (q.mean(0), v.mean(0), advantage, weight, _std(q), _std(v))
        q, v, advantage, weight, q_std, v_std = (x.unflatten(0, tr.shape) for x in fields)
        return Values(
            q=q,
            v=v,
            advantage=advantage,
            weight=weight,
            q_std=q_std,
            v_std=v_std,
            mask=batch.mask & batch.action_known,
        )

    # ------------------------------------------------------------------------------------- metrics

    @torch.no_grad()
    def _critic_metrics(
        self, tr: _Transitions, target: Tensor, q_sa: Tensor, advantage: Tensor
    ) -> dict[str, Tensor]:
        """Of the acting discount, in units of the environment's reward where not said otherwise."""
        scale, mask = self.config.losses.reward_multiplier, tr.learnable
        q = self._returns(q_sa)[..., -1] / scale  # [C, N]
        y = target[:, -1] / scale
        return {
            "value/q_mean": masked_mean(q.mean(0), mask),
            "value/q_std_over_critics": masked_mean(_std(q), mask),
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
        entropy = policy.entropy(tr.own_noise)[:, -1]
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


class MultiTaskAgent(Agent):
    """The same update where discrete actions, too, are sampled (AMAGO-2; Grigsby et al. 2024).

    Critics take actions as an input, one-hot where discrete, and values of the policy are means
    over its samples: straight-through Gumbel-softmax carries a gradient where something climbs.
    Its companions are critics that classify returns, which care little for their scale (one task's
    rewards may be a thousand times another's), more samples and no climbing: presets.multitask.
    """

    sampled: ClassVar[bool] = True


def make_agent(config: AgentConfig, spaces: Spaces) -> Agent:
    """The agent that `config.algorithm`, or `config.custom.agent`, names."""
    if config.custom.agent:
        return registered("agent", config.custom.agent)(config, spaces)  # type: ignore[no-any-return]
    return (MultiTaskAgent if config.algorithm == "multitask" else Agent)(config, spaces)


def _policy_value(
    critic: CriticEnsemble,
    part: Tensor,
    policy: Distribution,
    noise: Tensor,
    *,
    frozen: bool = False,
) -> Tensor:
    """[C, N, G]: the mean over the policy's samples, or over all its actions with their odds."""
    if isinstance(policy, Categorical):
        n = policy.probs.shape[-1]
        each = torch.eye(n, device=part.device)[:, None, None, :]
        each = each.expand(n, *policy.probs.shape)
        return (critic.values(part, each, frozen=frozen) * policy.probs.movedim(-1, 0)).sum(1)
    return critic.values(part, policy.rsample(noise), frozen=frozen).mean(1)


def _std(x: Tensor) -> Tensor:
    """Over critics: [C, ...] -> [...]."""
    return (x - x.mean(0)).square().mean(0).sqrt()


def _frozen_copy(module: M) -> M:
    return copy.deepcopy(module).requires_grad_(False)


def _loss_masks(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T] each: the transition exists; its action is known; and its target can be computed."""
    imitable = batch.mask & batch.action_known
    return batch.mask, imitable, imitable & (batch.terminated | batch.next_obs_valid)


def _log_prob(policy: Distribution, action: Tensor) -> Tensor:
    """Data actions, index [N] or [N, A], under the policy of every discount: [N, G]."""
    if isinstance(policy, Categorical):
        return policy.log_prob(action.unsqueeze(1).expand(policy.probs.shape[:-1]))
    return policy.log_prob(action.unsqueeze(1))


def _masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Largest x [N] that the mask leaves; 0 if there is none."""
    largest = torch.where(mask, x, -torch.inf).amax() if x.numel() else x.sum() - torch.inf
    return torch.where(mask.any(), largest, 0.0)


def _as_tensors(counts: dict[str, float] | None, device: torch.device) -> dict[str, Tensor]:
    return {k: torch.as_tensor(v, device=device) for k, v in (counts or {}).items()}
