"""The transitions of a batch: inputs and masks of the losses, flattened to N.

Letters: B windows, T transitions per window, N transitions (on a CPU those that are not padding,
else B * T), D state width, P width of privileged features, A action width, C critics, G discounts,
K action samples, W noise width of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from amago_model.config import AgentConfig, LossConfig, Spaces
from amago_model.data.batch import Batch, action_index, encode_action, one_hot, only_valid
from amago_model.data.packing import Packing

HeadInputs = dict[str, dict[str, Tensor]]
"""Keyword arguments of a head: {"obs": {key: [N, *shape]}} if it has the argument `obs`, else
empty. See heads/observations.py."""


@dataclass(frozen=True)
class ObservationKeys:
    """The observations that heads use in addition to the state."""

    legal: str | None
    """Key of the mask of legal actions; None without a mask."""
    actor: tuple[str, ...]
    """Keys of the inputs of a custom actor."""
    critic: tuple[str, ...]
    """Keys of the inputs of a custom critic."""


@dataclass(slots=True)
class Transitions:
    """A batch flattened to N transitions; suffix '_t': before, '_tp1': after the transition."""

    state_t: Tensor  # [N, D], with gradient
    state_tp1: Tensor  # [N, D], detached
    critic_state_t: Tensor  # [N, D + P]: the state and the privileged features
    critic_state_tp1: Tensor  # [N, D + P], detached
    legal_t: Tensor | None  # [N, A] bool
    legal_tp1: Tensor | None  # [N, A] bool
    action: Tensor  # [N, A] encoded; [N] index if discrete
    encoded_action: Tensor  # [N, A]: the critics' input
    exists: Tensor  # [N] bool: not padding
    action_known: Tensor  # [N] bool: not padding, and the action was recorded
    dpg_mask: Tensor  # [N] bool: see LossMasks, as for the next two
    bc_mask: Tensor  # [N] bool
    critic_mask: Tensor  # [N] bool
    shape: tuple[int, int]  # B, T
    target_noise: Tensor  # [K_c, N, G, W] standard normal; W is 0 if actions are not sampled
    policy_noise: Tensor  # [K_a, N, G, W]; W is actor.noise_width
    ensemble_noise: Tensor  # [C, N, G]: selects the critics of each TD target
    index: Tensor | None  # [N] int64: indices in B * T; None if N is B * T
    actor_inputs_t: HeadInputs  # keyword arguments of the actor
    actor_inputs_tp1: HeadInputs
    critic_inputs_t: HeadInputs  # keyword arguments of the critics
    critic_inputs_tp1: HeadInputs

    def loss_mask(self, loss: str) -> Tensor:
        """[N] bool: the mask of a built-in loss: 'critic', 'dpg' or 'bc'."""
        masks = {"critic": self.critic_mask, "dpg": self.dpg_mask, "bc": self.bc_mask}
        return masks[loss]

    def unflatten(self, x: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]; zeros at padding."""
        if self.index is not None:
            full = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
            x = full.index_copy(0, self.index, x)
        out: Tensor = x.unflatten(0, self.shape)
        return out

    def flatten(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]"""
        return select(self.index, x.flatten(0, 1))


def flat_indices(exists: Tensor) -> Tensor | None:
    """[N] int64: indices in B * T of the transitions that exist, [B, T] bool; None selects all.

    Padding is only removed on a CPU: on a GPU this needs a synchronisation, and torch.compile needs
    constant shapes.
    """
    if exists.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    index = exists.flatten().nonzero().squeeze(1)
    return index if len(index) < exists.numel() else None


def select(index: Tensor | None, x: Tensor) -> Tensor:
    """x [B * T, ...] -> [N, ...]; None selects all."""
    return x if index is None else x.index_select(0, index)


class LossMasks(NamedTuple):
    """The transitions of each loss, [B, T] bool each."""

    action_known: Tensor
    """The transition exists (is not padding), and its action was recorded."""
    dpg_mask: Tensor
    """The transition exists, and `Batch.actor_mask` includes it."""
    bc_mask: Tensor
    """`dpg_mask` holds, and the action was recorded."""
    critic_mask: Tensor
    """The action was recorded, the transition has a target, and `Batch.critic_mask` includes it."""


def has_target(batch: Batch, losses: LossConfig) -> Tensor:
    """[B, T] bool: the transition terminates, or its next state can be evaluated: the observation
    was recorded and, for `losses.bc_target_penalty`, the action in it too."""
    if losses.bc_target_penalty > 0:
        return has_next_value(batch) & (batch.terminated | next_action_known(batch))
    return has_next_value(batch)


def has_next_value(batch: Batch) -> Tensor:
    """[B, T] bool: the transition exists, and terminates or has a recorded next observation."""
    return batch.mask & (batch.terminated | batch.next_obs_valid)


def multiplied_reward(batch: Batch, multiplier: float) -> Tensor:
    """[B, T]: the rewards in the unit of values and targets; 0 at padding."""
    return torch.where(batch.mask, batch.reward * multiplier, 0.0)


def next_action_known(batch: Batch) -> Tensor:
    """[B, T] bool: the next action was recorded; False for the last transition of a window."""
    known = batch.mask & batch.action_known
    return torch.cat((known[:, 1:], torch.zeros_like(known[:, :1])), dim=1)


def loss_masks(batch: Batch, losses: LossConfig) -> LossMasks:
    known = batch.mask & batch.action_known
    critic_mask = known & has_target(batch, losses)
    if batch.critic_mask is not None:
        critic_mask = critic_mask & batch.critic_mask
    if batch.actor_mask is None:
        return LossMasks(known, batch.mask, known, critic_mask)
    return LossMasks(known, batch.mask & batch.actor_mask, known & batch.actor_mask, critic_mask)


def make_transitions(
    batch: Batch,
    config: AgentConfig,
    spaces: Spaces,
    state: Tensor,
    critic_state: Tensor,
    noise: dict[str, Tensor],
    keys: ObservationKeys,
    packing: Packing | None,
    index: Tensor | None,
) -> Transitions:
    """The transitions of a batch and its encoded states.

    Args:
        batch: see data/batch.py.
        config: the agent's settings.
        spaces: the spaces of the environment.
        state: [B, L, D], or packed [1, M, D].
        critic_state: [B, L, D + P], or packed [1, M, D + P]: with the privileged features.
        noise: the noise of the selected transitions, by field name.
        keys: the observations that heads use in addition to the state.
        packing: the packing of the states, if they are packed.
        index: the selected transitions, from `flat_indices`; None only without a packing.
    """
    masks = LossMasks(*(select(index, mask.flatten()) for mask in loss_masks(batch, config.losses)))
    space, dtype = spaces.action, noise["policy_noise"].dtype  # autocast may make states 16-bit
    if space.kind == "discrete":
        action = action_index(space, batch.action).clamp(0, space.n - 1)
        action = select(index, action.flatten())
        encoded_action = one_hot(action, space.n).to(dtype)
        if config.critic is not None and config.critic.soften_data_actions:
            low, high = config.actor.prob_low, config.actor.prob_high
            encoded_action = encoded_action.clamp(low, high)
            encoded_action = encoded_action / encoded_action.sum(-1, keepdim=True)
    else:
        action = select(index, encode_action(space, batch.action).flatten(0, 1)).to(dtype)
        action = torch.where(masks.action_known.unsqueeze(-1), action, 0.0)
        encoded_action = action
    before = timestep = timestep_before(index, batch)
    if index is not None and packing is not None:
        before = packing.timestep_before(index)
    state_t, state_tp1 = before_and_after(before, state, state.detach())
    critic_state_t, critic_state_tp1 = state_t, state_tp1
    if critic_state is not state:
        critic_state_t, critic_state_tp1 = before_and_after(
            before, critic_state, critic_state.detach()
        )
    legal_t: Tensor | None = None
    legal_tp1: Tensor | None = None
    if keys.legal is not None:  # without a recorded observation all actions are legal
        legal = (batch.obs[keys.legal] > 0) | ~batch.timestep_mask.unsqueeze(-1)
        legal_t, legal_tp1 = before_and_after(timestep, legal, legal)
    actor_inputs_t, actor_inputs_tp1 = _head_inputs(batch, keys.actor, timestep)
    critic_inputs_t, critic_inputs_tp1 = _head_inputs(batch, keys.critic, timestep)
    return Transitions(
        state_t=state_t,
        state_tp1=state_tp1,
        critic_state_t=critic_state_t,
        critic_state_tp1=critic_state_tp1,
        legal_t=legal_t,
        legal_tp1=legal_tp1,
        action=action,
        encoded_action=encoded_action,
        exists=select(index, batch.mask.flatten()),
        **masks._asdict(),
        **noise,
        shape=(batch.mask.shape[0], batch.mask.shape[1]),
        index=index,
        actor_inputs_t=actor_inputs_t,
        actor_inputs_tp1=actor_inputs_tp1,
        critic_inputs_t=critic_inputs_t,
        critic_inputs_tp1=critic_inputs_tp1,
    )


def _head_inputs(
    batch: Batch, keys: tuple[str, ...], timestep: Tensor | None
) -> tuple[HeadInputs, HeadInputs]:
    """Observations before and after each transition; zeros if none was recorded."""
    if not keys:
        return {}, {}
    valid = before_and_after(timestep, batch.timestep_mask, batch.timestep_mask)
    both = {key: before_and_after(timestep, batch.obs[key], batch.obs[key]) for key in keys}
    before, after = ({key: only_valid(x[i], valid[i]) for key, x in both.items()} for i in (0, 1))
    return {"obs": before}, {"obs": after}


def timestep_before(index: Tensor | None, batch: Batch) -> Tensor | None:
    """Index in B * L of the timestep before each selected transition; None selects all."""
    if index is None:
        return None
    return index + torch.div(index, batch.mask.shape[1], rounding_mode="floor")


def before_and_after(
    timestep: Tensor | None, before: Tensor, after: Tensor
) -> tuple[Tensor, Tensor]:
    """Select from timesteps [B, L, ...] or [1, M, ...] those before and after each transition:
    [N, ...].

    `timestep` [N] int64 is the index of the one before; None selects all transitions of
    [B, L, ...].
    """
    if timestep is None:
        return before[:, :-1].flatten(0, 1), after[:, 1:].flatten(0, 1)
    return select(timestep, before.flatten(0, 1)), select(timestep + 1, after.flatten(0, 1))
