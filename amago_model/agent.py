"""The learner: one forward pass over a batch of windows gives the loss of every head.

An agent is a sum of the pure functions of losses.py; another algorithm is another sum. It knows
no optimiser, no files and no environments. Letters: B windows, T transitions, L = T + 1 rows,
N = B * T, D state width, A action width, C critics, G discounts, K action samples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from amago_model import losses
from amago_model.acting import ActingPolicy
from amago_model.batch import Batch
from amago_model.config import AgentConfig, Spaces
from amago_model.critic import CriticEnsemble, policy_value
from amago_model.distributions import Categorical, Distribution, OneHots, data_log_prob
from amago_model.errors import ConfigError
from amago_model.moments import BatchMoments, collecting, still
from amago_model.privileged import PrivilegedFeatures
from amago_model.registry import registered
from amago_model.returns import critic_targets
from amago_model.trajectory_encoders import Hidden
from amago_model.transitions import Transitions, loss_masks, make_transitions
from amago_model.update_metrics import actor_metrics, critic_metrics
from amago_model.value_norm import PopArt
from amago_model.values import Values, over_critics

M = TypeVar("M", bound=nn.Module)


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
        self.advantage_moments = BatchMoments()

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
        tr = self._encode(batch).packed()
        n = _as_tensors(counts, tr.exists.device)
        terms: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        policy: Distribution | None = None
        advantage: Tensor | None = None
        if c.online_weight == 0:  # nothing climbs, so one policy serves both its uses
            policy = self.policy.actor(tr.state_t, tr.legal_t)

        if self.critic is not None:
            target = self._target(batch, tr)
            if self.training:
                self.value_norm.update(target, tr.learnable)
            out, v = self._values(tr, policy)  # [C, N, G, 1 or bins], [C, N, G]
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
                q = self._returns(q_sa.detach())
                metrics |= critic_metrics(
                    tr, q, target, advantage, self.value_norm, c.reward_multiplier
                )

        if c.offline_weight > 0:
            if policy is None:
                policy = self.policy.actor(tr.state_t, tr.legal_t)
            if self.sampled and self.config.critic.soften_data_actions:
                log_prob = data_log_prob(self._choices(policy), tr.shown)
            else:
                log_prob = data_log_prob(policy, tr.action)
            weight = self._filter(advantage, tr.imitable)
            terms["clone"] = losses.cloning_loss(log_prob, weight, tr.imitable, n.get("clone"))
            if detailed:
                metrics |= actor_metrics(tr, policy, log_prob, weight)

        weights = {"critic": c.critic_weight, "climb": c.online_weight, "clone": c.offline_weight}
        loss = sum((weights[name] * term for name, term in terms.items()), torch.zeros(()))
        metrics |= {f"loss/{name}": term.detach() for name, term in terms.items()}
        return loss, metrics | {"loss/total": loss.detach()}

    @torch.no_grad()
    def observe(self, parts: Sequence[Batch]) -> None:
        """Let every statistic take in a batch that comes in parts, as if it came whole.

        What `forward` does by itself for a whole batch. Afterwards, and while the statistics are
        kept `still`, the losses and gradients of the parts sum to those of the whole: given the
        whole's counts and noise, and but for dropout and image augmentation, which each part draws
        anew.

            agent.observe(parts)
            with still(agent):
                for part in parts:
                    agent(part, counts=counts)[0].backward()
        """
        with collecting(self):
            for part in parts:
                self._rows(part)
                if self.critic is not None and self.privileged.width:
                    self.privileged(part.obs, part.row_mask)
        if self.critic is None or not (self.value_norm.enabled or self._batch_norm):
            return
        advantages = []
        with still(self), collecting(self.value_norm):
            for part in parts:
                tr = self._encode(part)
                if self.training:
                    self.value_norm.update(self._target(part, tr), tr.learnable)
                if self._batch_norm:
                    out, v = self._values(tr)
                    advantages.append((self.critic.scalar(out), v, tr.imitable))
        with collecting(self.advantage_moments):
            for q_sa, v, mask in advantages:
                self.advantage_moments.update(self._advantage(q_sa, v), mask)

    @property
    def _batch_norm(self) -> bool:
        return self.config.losses.filter_batch_norm

    @staticmethod
    def loss_counts(batch: Batch) -> dict[str, Tensor]:
        """How many transitions each loss of this batch is a mean of; sums of these are `counts`."""
        exists, imitable, learnable = loss_masks(batch)
        return {"climb": exists.sum(), "clone": imitable.sum(), "critic": learnable.sum()}

    def _rows(self, batch: Batch) -> Tensor:
        return self.policy.rows(
            batch.obs,
            batch.prev_action,
            batch.prev_reward,
            batch.time_idx,
            valid=batch.row_mask,
            previous_known=batch.previous_known,
        )

    def _encode(self, batch: Batch) -> Transitions:
        state = self.policy.states(self._rows(batch), batch.time_idx)  # [B, L, D]
        legal = self.policy.legal(batch.obs)
        if legal is not None:  # where nothing was recorded, nothing is forbidden
            legal = legal | ~batch.row_mask.unsqueeze(-1)
        seen = state
        if self.critic is not None and self.privileged.width:
            seen = torch.cat((state, self.privileged(batch.obs, batch.row_mask)), dim=-1)
        noise = self._noise(batch)
        return make_transitions(batch, self.config, self.spaces, state, seen, legal, noise)

    def draw_noise(self, n_windows: int, n_transitions: int) -> Tensor:
        """[B, T, width]: all that an update of B windows of T transitions draws (but dropout).

        In one draw, time first: padding on the right changes nothing for the transitions before it
        (on a CPU), nor does asking for metrics.
        """
        size = n_windows, sum(self._noise_sizes)
        # A CPU draws sixteen numbers at a time, and the last sixteen of a draw in another way.
        drawn = -(-math.prod(size) // 16) * 16
        noise = torch.randn((n_transitions, drawn), device=self.gammas.device)
        return noise[:, : math.prod(size)].unflatten(1, size).transpose(0, 1)

    @property
    def _noise_sizes(self) -> tuple[int, int, int]:
        """Numbers for a transition: its next actions, the policy's own, the order of critics."""
        c, g = self.config, len(self.config.losses.gammas)
        exact = self.spaces.action.kind == "discrete" and not self.sampled
        width = 0 if exact else int(self.policy.actor.noise_width)
        k_c, k_a = c.losses.n_target_actions, c.losses.n_policy_actions
        everyone = c.critic.n_critics_target == c.critic.n_critics
        everyone = everyone and not c.critic.subset_replacement
        n_critics = 0 if everyone or self.critic is None else c.critic.n_critics
        return k_c * g * width, k_a * g * width, n_critics * g

    def _noise(self, batch: Batch) -> dict[str, Tensor]:
        c, g, sizes = self.config.losses, len(self.config.losses.gammas), self._noise_sizes
        noise = self.draw_noise(*batch.mask.shape) if batch.noise is None else batch.noise
        target, own, subset = noise.flatten(0, 1).to(self.gammas.dtype).split(sizes, dim=1)
        return {
            "target_noise": target.unflatten(1, (c.n_target_actions, g, -1)).transpose(0, 1),
            "own_noise": own.unflatten(1, (c.n_policy_actions, g, -1)).transpose(0, 1),
            "subset_noise": subset.unflatten(1, (-1, g)).transpose(0, 1),
        }

    @torch.no_grad()
    def _target(self, batch: Batch, tr: Transitions) -> Tensor:
        """[N, G]: what the critics should say of each transition, in units of multiplied reward."""
        c = self.config
        actor = self.target_actor if c.losses.use_target_actor else self.policy.actor
        policy = self._choices(actor(tr.state_tp1, tr.legal_tp1))
        critic, noise = self.target_critic, tr.subset_noise
        size, replacement = c.critic.n_critics_target, c.critic.subset_replacement
        chosen = losses.subset_indices(c.critic.n_critics, size, noise, replacement=replacement)
        if isinstance(policy, Categorical) and critic.table:
            q = (critic.action_values(tr.seen_tp1) * policy.probs).sum(-1)
        else:
            part = critic.state_part(tr.seen_tp1)
            # Of how many rows each critic is asked is known to a CPU at once, to a GPU only later.
            sparse = part.device.type == "cpu" and not torch.compiler.is_compiling()
            asked = chosen if sparse and not c.custom.critic else None
            q = policy_value(critic, part, policy, tr.target_noise, chosen=asked)
        value = self._returns(losses.over_subset(q, chosen, minimum=c.losses.online_weight > 0))
        targets = critic_targets(batch, tr.windows(value), self.gammas, c.losses)
        return tr.transitions(targets)

    def _values(self, tr: Transitions, policy: Distribution | None = None) -> tuple[Tensor, Tensor]:
        """Critics on the data's actions, [C, N, G, 1 or bins], and on the policy's own, [C, N, G].

        The first has gradients to critics and states; the second sees both as constants, and has
        gradients to the actor (if anything climbs them). `policy` is the actor's, if at hand.
        """
        c = self.config.losses
        assert self.critic is not None
        climbs = c.online_weight > 0 and torch.is_grad_enabled()
        with torch.set_grad_enabled(climbs):
            if policy is None:
                policy = self.policy.actor(tr.state_t.detach(), tr.legal_t)
            policy = self._choices(policy)
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
            v = policy_value(self.critic, part.detach(), policy, tr.own_noise, frozen=True)
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
        if self._batch_norm:
            advantage = losses.normalized_advantage(
                advantage, *self.advantage_moments(advantage, mask)
            )
        if name := self.config.custom.filter:
            return registered("filter", name)(advantage)  # type: ignore[no-any-return]
        return losses.advantage_weight(advantage, c)

    # ------------------------------------------------------------------------------ looking, acting

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
        fields = (*over_critics(q), *over_critics(v), advantage, weight)
        q, q_std, v, v_std, advantage, weight = (tr.windows(x) for x in fields)
        mask = tr.windows(tr.imitable)
        return Values(q, v, advantage, weight, q_std, v_std, mask)

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


def _frozen_copy(module: M) -> M:
    return copy.deepcopy(module).requires_grad_(False)


def _as_tensors(counts: dict[str, float] | None, device: torch.device) -> dict[str, Tensor]:
    return {k: torch.as_tensor(v, device=device) for k, v in (counts or {}).items()}
