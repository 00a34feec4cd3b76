"""The learner: one forward pass over a batch of windows gives the loss of every head.

An agent is a sum of the free functions of losses/; another algorithm is another sum. It knows
no optimiser, no files and no environments. Letters: B windows, T transitions, L = T + 1 rows,
N = B * T, D state width, A action width, C critics, G discounts, K action samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import ClassVar

import torch
from torch import Tensor

from amago_model.config import AgentConfig, Spaces
from amago_model.data.batch import Batch
from amago_model.data.transitions import Transitions, loss_masks
from amago_model.errors import ConfigError
from amago_model.heads.distributions import Distribution, data_log_prob
from amago_model.judging import Judging
from amago_model.losses.actor import bc_loss, dpg_loss
from amago_model.losses.critic import classification_loss, critic_loss
from amago_model.losses.filters import advantage_weight, normalized_advantage
from amago_model.losses.loss_inputs import LossInputs
from amago_model.losses.metrics import actor_metrics, critic_metrics
from amago_model.losses.values import Values, over_critics
from amago_model.registry import own_part
from amago_model.running_statistics import (
    collecting,
    move_unshown,
    refuse_statistics,
    settle_in_turn,
    still,
)


class Agent(Judging):
    """Off-policy actor-critic on windows of trajectories (AMAGO; Grigsby et al. 2024).

    One update, for all transitions t and discounts g in parallel:

        s      = memory(row_encoder(observation, previous action and reward))      once, online
        a'     ~ target_actor(s[t+1])                          K_c samples, or all probabilities
        q'     = min (mean, if dpg_weight is 0) over M of C target_critics(s[t+1], mean over a')
        y      = multiplied reward + g * (not terminated) * q'                     or n steps of it
        popart takes in y, then y~ = (y - mean) / sigma
        L_critic  = mean over C (w critic(s[t], a[t]) + b - y~)^2                  trains s too
        a_pi   ~ actor(s[t])                                   K_a samples, or all probabilities
        v      = mean over a_pi of the critics                 they and their copy of s[t] constant
        A      = w mean over C (critic(s[t], a[t]) - v)        in deviations of the return
        L_dpg  = - (w min over C of v + b)                     through a_pi into the actor and s
        L_bc   = - f(A) log actor(a[t] | s[t])                 gradient into the actor and s
        loss   = critic_weight L_critic + dpg_weight L_dpg + bc_weight L_bc

    and after the optimiser's step, `update_targets`: target += tau * (online - target).

    Each loss is a mean over the transitions its mask leaves: DPG needs a real row, BC also a known
    action, the critic also a termination or a recorded next observation; and the data may forbid
    either learner any transition (Batch.actor_mask, critic_mask). Truncation bootstraps,
    termination does not. With behavior_cloning and dpg_weight 0 this is behaviour cloning and there
    is no critic at all. Settings that make formulas those that were published are in presets.py;
    with lagged_critics v asks critics from before the last step, with dpg_detach_state the actor
    behind a_pi takes s[t] as a constant, too.
    """

    def forward(
        self, batch: Batch, detailed: bool = True, counts: dict[str, float] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and what there is to say about it.

        Args:
            batch: see data/batch.py. Statistics (inputs, PopArt) take it in if in training mode.
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
        seen = self._look(batch, counts)
        weights = self.weights()
        loss, metrics = torch.zeros(()), {}
        for name, term in self.terms(seen).items():
            if name not in weights or not isinstance(term, Tensor) or term.ndim:
                got = f"shape {list(term.shape)}" if isinstance(term, Tensor) else repr(term)
                raise ConfigError(
                    f"{type(self).__name__}.terms: expected scalar tensors, named "
                    f"{', '.join(weights)}, got {name!r}: {got}; weights() says what each counts"
                )
            loss = loss + weights[name] * term
            metrics[f"loss/{name}"] = term.detach()
        if detailed:
            metrics |= self._metrics(seen)
        return loss, metrics | {"loss/total": loss.detach()}

    def terms(self, seen: LossInputs) -> dict[str, Tensor]:
        """The named terms of the loss, a scalar each; `weights` says how much each counts.

        Here, and in the losses that CustomConfig names, is all that learns. A subclass that
        calls this can leave out terms, replace them, or add its own.
        """
        c, tr, n = self.config.losses, seen.transitions, seen.counts
        terms: dict[str, Tensor] = {}
        if self.critic is not None:
            assert seen.answers is not None and seen.q is not None
            assert seen.target is not None and seen.value is not None
            if self.critic.bins is None:
                prediction = self.normalized(seen.q)
                target = self.value_norm.normalize(seen.target)
                terms["critic"] = critic_loss(prediction, target, tr.critic_mask, n.get("critic"))
            else:
                label = self.critic.bins.label(seen.target)
                terms["critic"] = classification_loss(
                    seen.answers, label, tr.critic_mask, n.get("critic")
                )
            if c.dpg_weight > 0:
                terms["dpg"] = dpg_loss(seen.value, tr.dpg_mask, n.get("dpg"))
        if seen.log_prob is not None:
            terms["bc"] = bc_loss(seen.log_prob, seen.weight, tr.bc_mask, n.get("bc"))
        for name, loss in self._own_losses.items():
            terms[name] = loss(self, seen)
        return terms

    def weights(self) -> dict[str, float]:
        """By the name of a term, how much it counts. Terms that are not there may be here."""
        c, own = self.config.losses, self.config.custom
        built_in = {"critic": c.critic_weight, "dpg": c.dpg_weight, "bc": c.bc_weight}
        return built_in | dict(zip(own.losses, own.loss_weights or repeat(1.0), strict=False))

    def _look(self, batch: Batch, counts: dict[str, float] | None) -> LossInputs:
        """What the terms of this batch are made of; statistics take it in."""
        tr = self._encode(batch)
        policy, dpg_policy = self._policies(tr)
        seen = LossInputs(tr, self._counts(counts), policy)
        if self.critic is not None:
            seen.target = self._target(batch, tr)
            if self.training:
                self.value_norm.update(seen.target, tr.critic_mask)
            seen.answers, v = self._values(tr, dpg_policy)
            seen.value = self.normalized(self._dpg_value(tr, dpg_policy, v))
            seen.q = self.critic.scalar(seen.answers)
            seen.advantage = self._advantage(seen.q.detach(), v.detach())
        if self.config.losses.bc_weight > 0:
            if self.sampled and self.config.critic.soften_data_actions:
                seen.log_prob = data_log_prob(self._choices(policy), tr.shown)
            else:
                seen.log_prob = data_log_prob(policy, tr.action)
            seen.weight = self._filter(seen.advantage, tr.bc_mask)
        return seen

    @torch.no_grad()
    def _metrics(self, seen: LossInputs) -> dict[str, Tensor]:
        tr = seen.transitions
        found: dict[str, Tensor] = {}
        if self.critic is not None:
            assert seen.q is not None and seen.target is not None and seen.advantage is not None
            q, scale = self._returns(seen.q), self.config.losses.reward_multiplier
            found |= critic_metrics(tr, q, seen.target, seen.advantage, self.value_norm, scale)
        if seen.log_prob is not None:
            found |= actor_metrics(tr, seen.policy, seen.log_prob, seen.weight)
        return found

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
                    self.value_norm.update(self._target(part, tr), tr.critic_mask)
                if self._batch_norm:
                    out, v = self._values(tr)
                    advantages.append((self.critic.scalar(out), v, tr.bc_mask))
        with collecting(self.advantage_moments):
            for q_sa, v, mask in advantages:
                self.advantage_moments.update(self._advantage(q_sa, v), mask)

    @property
    def _batch_norm(self) -> bool:
        return self.config.losses.filter_batch_norm

    @staticmethod
    def loss_counts(batch: Batch) -> dict[str, Tensor]:
        """How many transitions each loss of this batch is a mean of; sums of these are `counts`."""
        masks = loss_masks(batch)
        counted = {"dpg": masks.dpg_mask, "bc": masks.bc_mask, "critic": masks.critic_mask}
        return {name: mask.sum() for name, mask in counted.items()}

    def _counts(self, given: dict[str, float] | None) -> dict[str, Tensor]:
        """What losses are means over, where that is not the number of their own transitions."""
        return {k: torch.as_tensor(v, device=self.gammas.device) for k, v in (given or {}).items()}

    def _policies(self, tr: Transitions) -> tuple[Distribution, Distribution]:
        """The actor's policy, and that whose actions DPG asks the critics about: the same, but for
        `LossConfig.dpg_detach_state`."""
        actor = self.policy.actor
        policy = actor(tr.state_t, tr.legal_t, **tr.actor_t)
        if not self.config.losses.dpg_detach_state:
            return policy, policy
        return policy, actor(tr.state_t.detach(), tr.legal_t, **tr.actor_t)

    def _advantage(self, q_sa: Tensor, v: Tensor) -> Tensor:
        """[C, N, G] each -> [N, G]: what the filter sees."""
        assert self.critic is not None
        advantage = (q_sa - v).mean(0)
        if self.config.losses.filter_advantage == "raw":
            return advantage
        return self.value_norm.normalized_difference(advantage, raw=self.critic.bins is None)

    def _filter(self, advantage: Tensor | None, mask: Tensor) -> Tensor | None:
        c = self.config.losses
        if c.behavior_cloning or advantage is None:
            return None
        if self._batch_norm:
            advantage = normalized_advantage(advantage, *self.advantage_moments(advantage, mask))
        if self._own_filter is not None:
            return self._own_filter(advantage)  # type: ignore[no-any-return]
        return advantage_weight(advantage, c.filter)

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
                "get_values: with behavior_cloning and dpg_weight=0 there is no critic to ask; "
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
            weight = self._filter(advantage, tr.bc_mask)
            scale = self.config.losses.reward_multiplier
            q, v = self._returns(q_raw) / scale, self._returns(v_raw) / scale
        finally:
            self.train(was_training)
        weight = torch.ones_like(advantage) if weight is None else weight
        fields = (*over_critics(q), *over_critics(v), advantage, weight)
        q, q_std, v, v_std, advantage, weight = (tr.windows(x) for x in fields)
        mask = tr.windows(tr.known)
        return Values(q, v, advantage, weight, q_std, v_std, mask)


class MultiTaskAgent(Agent):
    """The same update where discrete actions, too, are sampled (AMAGO-2; Grigsby et al. 2024).

    Critics take actions as an input, one-hot where discrete, and values of the policy are means
    over its samples: straight-through Gumbel-softmax carries the gradient of DPG.
    Its companions are critics that classify returns, which care little for their scale (one task's
    rewards may be a thousand times another's), more samples and no DPG: presets.multitask.
    """

    sampled: ClassVar[bool] = True


def make_agent(config: AgentConfig, spaces: Spaces) -> Agent:
    """The agent that `config.algorithm`, or `config.custom.agent`, names.

    Raises:
        UnregisteredError: a part of your own has not been registered.
    """
    if config.custom.agent:
        return own_part(config.custom, "agent", config.custom.agent)(config, spaces)  # type: ignore[no-any-return]
    return (MultiTaskAgent if config.algorithm == "multitask" else Agent)(config, spaces)


def _each(show: Callable[[Batch], object], parts: Sequence[Batch]) -> None:
    for part in parts:
        show(part)
