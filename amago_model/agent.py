"""The trainable agent: a forward pass over a batch of windows returns the loss and its metrics.

The networks are modules (encoders/, heads/); the loss terms are functions (losses/). The optimiser,
files and environments are outside this package. Letters: B windows, T transitions, L = T + 1
timesteps, N transitions that exist, D state width, A action width, C critics, G discounts, K action
samples.
"""

from __future__ import annotations

from itertools import repeat

import torch
from torch import Tensor, nn

from amago_model.acting import ActingPolicy
from amago_model.config import AgentConfig, Spaces
from amago_model.critics import Critics
from amago_model.data.batch import Batch
from amago_model.data.noise import UpdateNoise
from amago_model.data.transitions import (
    ObservationKeys,
    Transitions,
    flat_indices,
    loss_masks,
    make_transitions,
    select,
)
from amago_model.errors import ConfigError
from amago_model.heads.actor import Actor
from amago_model.heads.distributions import (
    Deterministic,
    Distribution,
    data_log_prob,
    with_sampled_actions,
)
from amago_model.heads.target_networks import (
    WeightAverage,
    copy_weights,
    frozen_copy,
    polyak_update,
)
from amago_model.losses.actor_losses import bc_loss, dpg_loss
from amago_model.losses.critic_evaluation import (
    CriticEvaluation,
    data_action_outputs,
    evaluate_critics,
)
from amago_model.losses.critic_losses import critic_term, value_term
from amago_model.losses.filters import AdvantageFilter
from amago_model.losses.loss_inputs import LossInputs
from amago_model.losses.metrics import update_metrics
from amago_model.losses.td_targets import evaluate_state_value, td_targets
from amago_model.registry import custom_module
from amago_model.running_statistics import BatchMoments


class Agent(nn.Module):
    """Off-policy actor-critic on windows of trajectories (AMAGO; Grigsby et al. 2024).

    One update, for all transitions t and discounts g in parallel:

        s      = memory(timestep_encoder(observation, previous action and reward))
        a'     ~ target_actor(s[t+1])                          K_c samples, or all probabilities
        q'     = min (mean, if dpg_weight is 0) over M of C target_critics(s[t+1], mean over a')
        y      = multiplied reward + g * (not terminated) * q'      or an n-step or lambda return
        popart is updated with y, then y~ = (y - mean) / sigma
        L_critic  = mean over C (w critic(s[t], a[t]) + b - y~)^2   gradient to critics and s
        a_pi   ~ actor(s[t])                                   K_a samples, or all probabilities
        v      = mean over a_pi of critics(s[t], a_pi)         critics and s[t] detached
        A      = w mean over C (critic(s[t], a[t]) - v)        in standard deviations of the return
        L_dpg  = - (w min over C of v + b)                     gradient to the actor and s by a_pi
        L_bc   = - f(A) log actor(a[t] | s[t])                 gradient to the actor and s
        loss   = critic_weight L_critic + dpg_weight L_dpg + bc_weight L_bc

    With value_expectile (IQL), a state value V(s) replaces the policy's value:

        q'     = V(s[t+1]),   A = w (min over M of C target_critics(s[t], a[t]) - V(s[t]))
        L_value = |expectile - 1[A < 0]| A^2                   gradient to V and s
        loss  += critic_weight L_value

    The encoders have no target network. After the optimiser step, `update_targets` does
    target += tau * (online - target).

    Each loss is a mean over the transitions in its mask. DPG needs an observation; BC also needs a
    known action; the critic also needs a termination or a recorded next observation. The data can
    exclude transitions (Batch.actor_mask, critic_mask). Truncation bootstraps, termination does
    not. Filter kind behavior_cloning with dpg_weight 0 and no critic is behaviour cloning. The
    settings in presets.py restore the published formulas: with lagged_critics, v uses the critics
    from before the last step. With dpg_detach_state, a_pi has no gradient to s.

    With algorithm=multitask (AMAGO-2; Grigsby et al. 2024), discrete actions are sampled, too:
    critics take one-hot actions as input, values of the policy are means over its samples, and
    DPG uses straight-through Gumbel-softmax. See presets.multitask.
    """

    gammas: Tensor
    target_actor: Actor

    def __init__(self, config: AgentConfig, spaces: Spaces) -> None:
        super().__init__()
        self.config, self.spaces = config, spaces
        losses, custom = config.losses, config.custom
        self.sampled = config.algorithm == "multitask"
        self._soften = config.critic is not None and config.critic.soften_data_actions
        self.register_buffer("gammas", torch.tensor(losses.gammas))
        self.policy = ActingPolicy(config, spaces)
        self.critics: Critics | None = None
        if config.critic is not None:
            self.critics = Critics(config, spaces, self.policy.d_state)
            if losses.use_target_actor:
                self.target_actor = frozen_copy(self.policy.actor)
        self.filter = AdvantageFilter(config)
        self.value_size = BatchMoments()
        """Mean absolute value of the policy's actions in the batch, for mean_abs_q."""
        self._custom_losses = {name: custom_module(custom, "loss", name) for name in custom.losses}
        every_action = spaces.action.kind == "discrete" and not self.sampled
        noise_width = 0 if every_action else int(self.policy.actor.noise_width)
        self._noise = UpdateNoise.of(config, width=noise_width)
        critic_keys = () if self.critics is None else self.critics.observation_keys
        self._keys = ObservationKeys(self.policy.legal_key, self.policy.actor_keys, critic_keys)
        self.average: WeightAverage | None = None
        if config.ema_decay > 0:
            self.average = WeightAverage(config.ema_decay, self._trainable())

    # ------------------------------------------------------------------------- from batch to loss

    def forward(
        self, batch: Batch, detailed: bool = True, counts: dict[str, float] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and the metrics of a batch.

        Args:
            batch: see data/batch.py. In training mode it updates the statistics (inputs, PopArt).
            detailed: if False, compute only the losses as metrics, which is faster.
            counts: number of transitions that each loss is averaged over, by the keys of
                `loss_counts`; None counts those of the batch. For m micro-batches, pass the counts
                of their union with each. For W processes whose gradients are averaged, pass the
                counts of the union divided by W.

        Returns:
            (loss, metrics): a scalar, and a dict of detached scalars on the batch's device.

        Raises:
            BatchError: a shape does not match the spaces.
            ConfigError: `terms` returned an unknown name or a non-scalar.
        """
        batch.check(self.spaces)
        inputs = self.loss_inputs(batch, counts)
        weights = self.weights()
        loss, metrics = torch.zeros(()), {}
        for name, term in self.terms(inputs).items():
            if name not in weights or not isinstance(term, Tensor) or term.ndim:
                got = f"shape {list(term.shape)}" if isinstance(term, Tensor) else repr(term)
                raise ConfigError(
                    f"{type(self).__name__}.terms: expected scalar tensors, named "
                    f"{', '.join(weights)}, got {name!r}: {got}; weights() returns their weights"
                )
            loss = loss + weights[name] * term
            metrics[f"loss/{name}"] = term.detach()
        if detailed:
            popart = None if self.critics is None else self.critics.popart
            metrics |= update_metrics(inputs, popart, self.config.losses)
        return loss, metrics | {"loss/total": loss.detach()}

    def loss_inputs(self, batch: Batch, counts: dict[str, float] | None = None) -> LossInputs:
        """Compute the inputs of all loss terms. In training mode, update the statistics."""
        c, tr, actor = self.config.losses, self.encode(batch), self.policy.actor
        device = self.gammas.device
        policy = dpg_policy = actor(tr.state_t, tr.legal_t, **tr.actor_inputs_t)
        if c.dpg_detach_state:
            dpg_policy = actor(tr.state_t.detach(), tr.legal_t, **tr.actor_inputs_t)
        given = {k: torch.as_tensor(v, device=device) for k, v in (counts or {}).items()}
        inputs = LossInputs(tr, given, policy)
        if self.critics is not None:
            popart = self.critics.popart
            inputs.td_target = self.td_target(batch, tr)
            if self.training:
                popart.update(inputs.td_target, tr.critic_mask)
            evaluation = self.evaluate(tr, dpg_policy)
            inputs.critic_output, inputs.q_values = evaluation.output, evaluation.q
            inputs.state_value = evaluation.state_value
            inputs.policy_values = self.policy_values(evaluation, tr)
            inputs.advantage = self.filter.advantage(evaluation, popart, batch, tr)
        if c.bc_weight > 0:
            soften = self.sampled and self._soften
            imitated = with_sampled_actions(policy, soften)
            action = tr.encoded_action if soften else tr.action
            inputs.log_prob = data_log_prob(imitated, action)
            inputs.filter_weight = self.filter(inputs.advantage, tr.bc_mask)
        return inputs

    def terms(self, inputs: LossInputs) -> dict[str, Tensor]:
        """Compute the unweighted loss terms: {name: scalar}; `weights` returns their weights.

        These are all losses of the update. A subclass can override this method to remove, replace
        or add terms; CustomConfig.losses adds terms without a subclass.
        """
        c, tr, n = self.config.losses, inputs.transitions, inputs.counts
        terms: dict[str, Tensor] = {}
        if self.critics is not None:
            terms["critic"] = critic_term(inputs, self.critics)
            if c.value_expectile is not None:
                terms["value"] = value_term(inputs, self.critics, c.value_expectile)
            if c.dpg_weight > 0:
                assert inputs.policy_values is not None
                terms["dpg"] = dpg_loss(inputs.policy_values, tr.dpg_mask, n.get("dpg"))
        if inputs.log_prob is not None:
            terms["bc"] = bc_loss(inputs.log_prob, inputs.filter_weight, tr.bc_mask, n.get("bc"))
        for name, loss in self._custom_losses.items():
            terms[name] = loss(self, inputs)
        return terms

    def weights(self) -> dict[str, float]:
        """The weight of each loss term, by name, including terms that are not computed."""
        c, custom = self.config.losses, self.config.custom
        critic = {"critic": c.critic_weight, "value": c.critic_weight}
        built_in = critic | {"dpg": c.dpg_weight, "bc": c.bc_weight}
        return built_in | dict(zip(custom.losses, custom.loss_weights or repeat(1.0), strict=False))

    # ----------------------------------------------------------------------------------- the parts

    def encode(self, batch: Batch, *, padded: bool = False) -> Transitions:
        """Encode a batch as transitions; with `padded`, always include padding transitions."""
        index = None if padded else flat_indices(batch.mask)
        state, packing = self.policy.encode_windows(batch)
        if packing is not None and index is None:
            state, packing = packing.unpack(state), None
        critic_state = state
        if self.critics is not None:
            critic_state = self.critics.encode(state, batch, packing)
        noise = self.draw_noise(*batch.mask.shape) if batch.noise is None else batch.noise
        noise = select(index, noise.flatten(0, 1)).to(self.gammas.dtype)
        named, keys = self._noise.split(noise), self._keys
        config, spaces = self.config, self.spaces
        return make_transitions(
            batch, config, spaces, state, critic_state, named, keys, packing, index
        )

    @torch.no_grad()
    def td_target(self, batch: Batch, tr: Transitions) -> Tensor:
        """TD targets [N, G], in units of the multiplied reward."""
        c, policy = self.config, None
        if c.losses.value_expectile is None:
            actor = self.target_actor if c.losses.use_target_actor else self.policy.actor
            policy = actor(tr.state_tp1, tr.legal_tp1, **tr.actor_inputs_tp1)
            policy = with_sampled_actions(policy, self.sampled)
            family = c.actor.continuous
            if isinstance(policy, Deterministic) and family.kind == "deterministic":
                policy = policy.smoothed(family)
        assert self.critics is not None
        return td_targets(batch, tr, policy, self.critics, self.gammas, c)

    def evaluate(self, tr: Transitions, policy: Distribution | None = None) -> CriticEvaluation:
        """Evaluate the critics on the actions of the data and of the policy.

        `policy` is the actor's distribution for `tr`; None computes it.
        """
        assert self.critics is not None
        c, soften = self.config.losses, self._soften
        value = None
        if c.value_expectile is not None:
            value = evaluate_state_value(self.critics, tr, self.config, soften=soften)
            if c.dpg_weight == 0:  # nothing follows the values of the policy's actions
                critic = self.critics.online
                output = data_action_outputs(critic, tr, soften=soften)
                v = value.v.detach().unsqueeze(0)
                return CriticEvaluation(output, critic.scalar(output), v, v, value)
        if policy is None:
            policy = self.policy.actor(tr.state_t, tr.legal_t, **tr.actor_inputs_t)
        policy = with_sampled_actions(policy, self.sampled)
        found = evaluate_critics(self.critics, tr, policy, soften=soften, dpg=c.dpg_weight > 0)
        if value is None:
            return found
        return found._replace(v=value.v.detach().unsqueeze(0), state_value=value)

    def policy_values(self, evaluation: CriticEvaluation, tr: Transitions) -> Tensor:
        """The values that DPG maximises, [C, N, G], in the unit of `dpg_normalization`."""
        assert self.critics is not None
        popart = self.critics.popart
        if self.config.losses.dpg_normalization == "popart":
            return popart.to_normalized(evaluation.dpg_q)
        values = popart.to_return(evaluation.dpg_q)
        size, _ = self.value_size(values.detach().amin(0).abs(), tr.dpg_mask)
        normalized: Tensor = values / size.clamp(min=1e-6)
        return normalized

    # -------------------------------------------------------------------------- around the update

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters of the optimiser and of the clipped gradient norm."""
        return list(self._trainable().values())

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def published_weights(self) -> dict[str, Tensor]:
        """The state dict of this agent, with averaged weights if `ema_decay` is above 0: what a
        policy file holds."""
        state = {k: v for k, v in self.state_dict().items() if not k.startswith("average.")}
        return state if self.average is None else state | self.average.weights(self._trainable())

    def update_average(self, skip: Tensor | None = None) -> None:
        """With `ema_decay`, average the weights. Call it after each optimiser step. `skip`: see
        runtime.optimizer.step_adamw."""
        if self.average is not None:
            self.average.update(self._trainable(), skip)

    def loss_counts(self, batch: Batch) -> dict[str, Tensor]:
        """The number of transitions that each loss of this batch is averaged over, by loss.

        Sum these over micro-batches for the argument `counts` of `forward`.
        """
        masks = loss_masks(batch, self.config.losses)
        counted = {"dpg": masks.dpg_mask, "bc": masks.bc_mask, "critic": masks.critic_mask}
        return {name: mask.sum() for name, mask in counted.items()}

    def draw_noise(self, n_windows: int, n_transitions: int) -> Tensor:
        """All random numbers of an update except dropout: [B, T, width] (see data/noise.py)."""
        return self._noise.draw(n_windows, n_transitions, self.gammas.device)

    def update_targets(self, skip: Tensor | None = None) -> None:
        """Polyak update of the target networks. Call it after each optimiser step (before it with
        `LossConfig.targets_before_step`). `skip`: see runtime.optimizer.step_adamw."""
        if self.critics is not None:
            pairs: list[tuple[nn.Module, nn.Module]] = [(self.critics.target, self.critics.online)]
            if self.config.losses.use_target_actor:
                pairs.append((self.target_actor, self.policy.actor))
            polyak_update(pairs, self.config.losses.tau, skip)

    def update_lagged_critics(self, skip: Tensor | None = None) -> None:
        """With `LossConfig.lagged_critics`, copy the critics for the next update. Call it before
        each optimiser step. `skip`: see runtime.optimizer.step_adamw."""
        if self.critics is not None and self.critics.lagged is not None:
            copy_weights(self.critics.lagged, self.critics.online, skip)


def make_agent(config: AgentConfig, spaces: Spaces) -> Agent:
    """Create the agent of a config: `Agent`, or the custom agent named by `config.custom.agent`.

    Raises:
        UnregisteredError: a custom module is not registered.
    """
    if config.custom.agent:
        return custom_module(config.custom, "agent", config.custom.agent)(config, spaces)  # type: ignore[no-any-return]
    return Agent(config, spaces)
