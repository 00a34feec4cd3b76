"""The transitions of a batch: the inputs and masks of every loss, flattened to N.

Letters: B windows, T transitions of each, N of those that exist (on a CPU; else B * T), D state
width, P width of privileged features, A action width, C critics, G discounts, K action samples, W
noise of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from amago_model.config import AgentConfig, Spaces
from amago_model.data.batch import Batch, action_index, encode_action, one_hot, only_valid
from amago_model.data.packing import Packing

HeadInputs = dict[str, dict[str, Tensor]]
"""Keyword arguments of a head beside the state: {"obs": {key: [N, *shape]}} if it has that
argument, else nothing. See heads/observations.py."""


@dataclass(frozen=True)
class ObservationKeys:
    """The observations that heads read beside the state."""

    legal: str | None
    """The mask of legal actions."""
    actor: tuple[str, ...]
    """Inputs of a custom actor."""
    critic: tuple[str, ...]
    """Inputs of a custom critic."""


@dataclass(slots=True)
class Transitions:
    """A batch, flattened to N transitions; '_t' before, '_tp1' after each."""

    state_t: Tensor  # [N, D], with gradient
    state_tp1: Tensor  # [N, D], without
    critic_state_t: Tensor  # [N, D + P]: the state and the privileged features
    critic_state_tp1: Tensor  # [N, D + P]
    legal_t: Tensor | None  # [N, A]
    legal_tp1: Tensor | None  # [N, A]
    action: Tensor  # [N, A] encoded; [N] index if discrete
    encoded_action: Tensor  # [N, A]: the critics' input
    exists: Tensor  # [N] bool: the transition is not padding
    action_known: Tensor  # [N] bool: it exists, and its action was recorded
    dpg_mask: Tensor  # [N] bool: it exists, and the actor may learn from it
    bc_mask: Tensor  # [N] bool: ... and its action is known
    critic_mask: Tensor  # [N] bool: action known, with a target, and critics may learn from it
    shape: tuple[int, int]  # B, T
    target_noise: Tensor  # [K_c, N, G, W] standard normal; nothing if discrete
    policy_noise: Tensor  # [K_a, N, G, W], W of actor.noise_width
    ensemble_noise: Tensor  # [C, N, G], whose order picks the critics of each target
    index: Tensor | None  # [N] int64: where each is among B * T; None if N is B * T
    actor_inputs_t: HeadInputs  # keyword arguments of the actor beside the state
    actor_inputs_tp1: HeadInputs
    critic_inputs_t: HeadInputs  # ... and of the critics
    critic_inputs_tp1: HeadInputs

    def loss_mask(self, loss: str) -> Tensor:
        """[N] bool: the transitions that a built-in loss, by its name, is a mean over."""
        masks = {"critic": self.critic_mask, "dpg": self.dpg_mask, "bc": self.bc_mask}
        return masks[loss]

    def unflatten(self, x: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]; zeros where no transition exists."""
        if self.index is not None:
            full = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
            x = full.index_copy(0, self.index, x)
        out: Tensor = x.unflatten(0, self.shape)
        return out

    def flatten(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]"""
        return select(self.index, x.flatten(0, 1))


def flat_indices(exists: Tensor) -> Tensor | None:
    """[N] int64: where, among B * T, transitions exist, [B, T] bool; None to take them all.

    Padding is left out on a CPU alone: elsewhere finding it would make the processor wait for the
    device, and a compiled update could not keep its shapes.
    """
    if exists.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    index = exists.flatten().nonzero().squeeze(1)
    return index if len(index) < exists.numel() else None


def select(index: Tensor | None, x: Tensor) -> Tensor:
    """x [B * T, ...] -> [N, ...]; None selects all."""
    return x if index is None else x.index_select(0, index)


class LossMasks(NamedTuple):
    """[B, T] bool each: which transitions each loss is a mean over."""

    action_known: Tensor
    """The transition exists, and its action was recorded."""
    dpg_mask: Tensor
    """It exists, and the actor may learn from it."""
    bc_mask: Tensor
    """Besides, its action was recorded."""
    critic_mask: Tensor
    """Its action was recorded, it ends the task or its next observation was recorded, and critics
    may learn from it."""


def loss_masks(batch: Batch) -> LossMasks:
    known = batch.mask & batch.action_known
    critic_mask = known & (batch.terminated | batch.next_obs_valid)
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
    """The transitions of a batch whose timesteps have become states.

    Args:
        state: [B, L, D], or packed [1, M, D], as the next one.
        critic_state: [B, L, D + P]: with the privileged features.
        noise: of the transitions wanted, by the names of its fields.
        keys: the observations that heads read beside the state.
        packing: of these states.
        index: the transitions wanted, from `flat_indices`; None only without a packing.
    """
    masks = LossMasks(*(select(index, mask.flatten()) for mask in loss_masks(batch)))
    space, dtype = spaces.action, noise["policy_noise"].dtype  # under autocast states may be halves
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
    if keys.legal is not None:  # nothing is forbidden where no observation was recorded
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
    """Observations before and after each transition, zeros where none was recorded."""
    if not keys:
        return {}, {}
    valid = before_and_after(timestep, batch.timestep_mask, batch.timestep_mask)
    both = {key: before_and_after(timestep, batch.obs[key], batch.obs[key]) for key in keys}
    before, after = ({key: only_valid(x[i], valid[i]) for key, x in both.items()} for i in (0, 1))
    return {"obs": before}, {"obs": after}


def timestep_before(index: Tensor | None, batch: Batch) -> Tensor | None:
    """Where, among B * L, the timestep before each transition wanted is; None for all of them."""
    if index is None:
        return None
    return index + torch.div(index, batch.mask.shape[1], rounding_mode="floor")


def before_and_after(
    timestep: Tensor | None, before: Tensor, after: Tensor
) -> tuple[Tensor, Tensor]:
    """From timesteps [B, L, ...] or [1, M, ...] those before and after each transition, [N, ...].

    `timestep` [N] is the one before; None takes all transitions of [B, L, ...].
    """
    if timestep is None:
        return before[:, :-1].flatten(0, 1), after[:, 1:].flatten(0, 1)
    return select(timestep, before.flatten(0, 1)), select(timestep + 1, after.flatten(0, 1))
