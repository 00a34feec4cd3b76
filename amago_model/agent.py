"""The learner: one forward pass over a batch of windows gives the loss of every head.

An agent is a sum of the pure functions of losses.py; another algorithm is another sum. It knows
no optimiser, no files and no environments. Letters: B windows, T transitions, L = T + 1 rows,
N = B * T, D state width, A action width, C critics, G discounts, K action samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from amago_model import losses
from amago_model.actor import Actor
from amago_model.batch import Batch
from amago_model.config import AgentConfig, Spaces
from amago_model.critic import policy_value
from amago_model.distributions import Categorical, Distribution, OneHots, data_log_prob
from amago_model.errors import ConfigError
from amago_model.moments import (
    collecting,
    move_unshown,
    refuse_statistics,
    settle_in_turn,
    still,
)
from amago_model.networks import Networks
from amago_model.one_pass import ask_once
from amago_model.packing import Packing
from amago_model.registry import registered
from amago_model.returns import critic_targets
from amago_model.transitions import Transitions, at, loss_masks, make_transitions, places
from amago_model.update_metrics import actor_metrics, critic_metrics
from amago_model.values import Values, over_critics


class Agent(Networks):
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
        climber, policy = self._policies(tr)

        if self.critic is not None:
            target = self._target(batch, tr)
            if self.training:
                self.value_norm.update(target, tr.learnable)
            out, v = self._values(tr, climber)  # [C, N, G, 1 or bins], [C, N, G]
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

        Raises:
            ConfigError: a head of your own has statistics, which would not move.
        """
        refuse_statistics("CustomConfig.actor", self.policy.actor)
        if self.critic is not None:
            refuse_statistics("CustomConfig.critic", self.critic)
        move_unshown(self)
        with still(self):
            settle_in_turn(self.policy.timestep_encoder, lambda: _each(self._rows, parts))
            settle_in_turn(self.policy.trajectory_encoder, lambda: _each(self._states, parts))
            if self.critic is not None and self.privileged.width:
                settle_in_turn(self.privileged, lambda: _each(self._privileged, parts))
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

    def _rows(self, batch: Batch, packing: Packing | None = None) -> Tensor:
        return self.policy.rows(
            batch.obs,
            batch.prev_action,
            batch.prev_reward,
            batch.time_idx,
            valid=batch.row_mask,
            previous_known=batch.previous_known,
            packing=packing,
        )

    def _states(self, batch: Batch) -> tuple[Tensor, Packing | None]:
        """[B, L, D], or [1, M, D] of the rows that exist, by a packing."""
        packing = self.policy.packing(batch.mask)
        return self.policy.states(self._rows(batch, packing), batch.time_idx, packing), packing

    def _privileged(self, batch: Batch) -> Tensor:
        return self.privileged(batch.obs, batch.row_mask)  # [B, L, P]

    def _encode(self, batch: Batch, *, padded: bool = False) -> Transitions:
        """`padded`: with the transitions that do not exist, everywhere."""
        place = None if padded else places(batch.mask)
        state, packing = self._states(batch)
        if packing is not None and place is None:
            state, packing = packing.windows(state), None

        def rows(x: Tensor) -> Tensor:
            return x if packing is None else packing.rows(x)

        legal = self.policy.legal(batch.obs)
        if legal is not None:  # where nothing was recorded, nothing is forbidden
            legal = rows(legal | ~batch.row_mask.unsqueeze(-1))
        seen = state
        if self.critic is not None and self.privileged.width:
            seen = torch.cat((state, rows(self._privileged(batch))), dim=-1)
        noise = self.draw_noise(*batch.mask.shape) if batch.noise is None else batch.noise
        drawn = self._noise.split(at(place, noise.flatten(0, 1)).to(self.gammas.dtype))
        config, spaces = self.config, self.spaces
        return make_transitions(batch, config, spaces, state, seen, legal, drawn, packing, place)

    def draw_noise(self, n_windows: int, n_transitions: int) -> Tensor:
        """[B, T, width]: all that an update of B windows of T transitions draws (but dropout)."""
        return self._noise.draw(n_windows, n_transitions, self.gammas.device)

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
            sparse = tr.seen_tp1.device.type == "cpu" and not torch.compiler.is_compiling()
            asked = chosen if sparse and not c.custom.critic else None
            q = policy_value(critic, part, policy, tr.target_noise, chosen=asked)
        value = self._returns(losses.over_subset(q, chosen, minimum=c.losses.online_weight > 0))
        targets = critic_targets(batch, tr.windows(value), self.gammas, c.losses)
        return tr.transitions(targets)

    def _policies(self, tr: Transitions) -> tuple[Distribution, Distribution]:
        """The actor's policy twice: climbing takes the state as a constant, cloning trains it."""
        c, actor = self.config.losses, self.policy.actor
        if c.online_weight == 0:
            policy = actor(tr.state_t, tr.legal_t)
            return policy, policy
        if c.offline_weight == 0:
            policy = actor(tr.state_t.detach(), tr.legal_t)
            return policy, policy
        if isinstance(actor, Actor) and not torch.compiler.is_compiling():
            return ask_once(actor, tr.state_t, tr.legal_t)
        return actor(tr.state_t.detach(), tr.legal_t), actor(tr.state_t, tr.legal_t)

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
        assert self.critic is not None
        advantage = (q_sa - v).mean(0)
        if self.config.losses.filter_advantage == "raw":
            return advantage
        return self.value_norm.normalized_difference(advantage, raw=self.critic.bins is None)

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


def _each(show: Callable[[Batch], object], parts: Sequence[Batch]) -> None:
    for part in parts:
        show(part)


def _as_tensors(counts: dict[str, float] | None, device: torch.device) -> dict[str, Tensor]:
    return {k: torch.as_tensor(v, device=device) for k, v in (counts or {}).items()}
