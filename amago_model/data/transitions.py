"""The transitions of a batch, encoded once: what every term of the update reads.

Letters: B windows, T transitions of each, N = B * T, D state width, P width of what only critics
may see, A action width, C critics, G discounts, K action samples, W noise of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from amago_model.config import AgentConfig, Spaces
from amago_model.data.batch import Batch, action_index, encode_action, one_hot
from amago_model.data.packing import Packing

Shown = dict[str, dict[str, Tensor]]
"""What a head is called with beside the state: {"obs": {key: [N, *shape]}} if it asks for it, else
nothing. See heads/observations.py."""


@dataclass(slots=True)
class Transitions:
    """A batch, flattened to N transitions; '_t' before, '_tp1' after each."""

    state_t: Tensor  # [N, D], with gradient
    state_tp1: Tensor  # [N, D], without
    seen_t: Tensor  # [N, D + P]: the state and what only critics may see
    seen_tp1: Tensor  # [N, D + P]
    legal_t: Tensor | None  # [N, A]
    legal_tp1: Tensor | None  # [N, A]
    action: Tensor  # [N, A] encoded; [N] index if discrete
    shown: Tensor  # [N, A]: the action as critics see it
    exists: Tensor  # [N] bool: the transition is not padding
    known: Tensor  # [N] bool: ... and so does its action
    dpg_mask: Tensor  # [N] bool: it exists, and the actor may learn from it
    bc_mask: Tensor  # [N] bool: ... and its action is known
    critic_mask: Tensor  # [N] bool: known, with a target, and critics may learn from it
    shape: tuple[int, int]  # B, T
    target_noise: Tensor  # [K_c, N, G, W] standard normal; nothing if discrete
    own_noise: Tensor  # [K_a, N, G, W], W of actor.noise_width
    subset_noise: Tensor  # [C, N, G], whose order picks the critics of each target
    place: Tensor | None  # [N] int64, if packed: where each was among B * T
    actor_t: Shown = field(default_factory=dict)  # what actors see beside the state
    actor_tp1: Shown = field(default_factory=dict)
    critic_t: Shown = field(default_factory=dict)  # what critics do
    critic_tp1: Shown = field(default_factory=dict)

    def mask_of(self, loss: str) -> Tensor:
        """[N] bool: what a built-in loss, by its name, is a mean over."""
        masks = {"critic": self.critic_mask, "dpg": self.dpg_mask, "bc": self.bc_mask}
        return masks[loss]

    def windows(self, x: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]; zeros for what was packed away."""
        if self.place is not None:
            full = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
            x = full.index_copy(0, self.place, x)
        out: Tensor = x.unflatten(0, self.shape)
        return out

    def transitions(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]"""
        return at(self.place, x.flatten(0, 1))


def places(exists: Tensor) -> Tensor | None:
    """[N] int64: where, among B * T, there are transitions, [B, T] bool; None to take them all.

    Padding is left out on a CPU alone: elsewhere finding it would make the processor wait for the
    device, and a compiled update could not keep its shapes.
    """
    if exists.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    place = exists.flatten().nonzero().squeeze(1)
    return place if len(place) < exists.numel() else None


def at(place: Tensor | None, x: Tensor) -> Tensor:
    """Rows of x [B * T, ...] -> [N, ...]."""
    return x if place is None else x.index_select(0, place)


class LossMasks(NamedTuple):
    """[B, T] bool each: what the data has, and what each loss is a mean over."""

    known: Tensor
    """The transition exists, and its action was recorded."""
    dpg_mask: Tensor
    """It exists, and the actor may learn from it."""
    bc_mask: Tensor
    """Besides, its action was recorded."""
    critic_mask: Tensor
    """Its action was recorded, it ends the task or arrives at an observation that was, and critics
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
    seen: Tensor,
    legal: Tensor | None,
    noise: dict[str, Tensor],
    packing: Packing | None,
    place: Tensor | None,
) -> Transitions:
    """Of a batch whose rows have become states.

    Args:
        state: [B, L, D], or [1, M, D] by a packing, as the next two.
        seen: [B, L, D + P]: what critics see of them.
        legal: [B, L, A] bool: the actions allowed.
        noise: of the transitions wanted, by the names of its fields.
        packing: of these rows.
        place: the transitions wanted, see `places`; None only without a packing.
    """
    masks = loss_masks(batch)
    exists, known, critic_mask = (
        at(place, mask.flatten()) for mask in (batch.mask, masks.known, masks.critic_mask)
    )
    dpg_mask, bc_mask = exists, known
    if batch.actor_mask is not None:
        dpg_mask, bc_mask = (at(place, m.flatten()) for m in (masks.dpg_mask, masks.bc_mask))
    space, whole = spaces.action, noise["own_noise"].dtype  # under autocast states may be halves
    if space.kind == "discrete":
        action = action_index(space, batch.action).clamp(0, space.n - 1)
        action = at(place, action.flatten())
        shown = one_hot(action, space.n).to(whole)
        if config.critic.soften_data_actions:
            shown = shown.clamp(config.actor.prob_low, config.actor.prob_high)
            shown = shown / shown.sum(-1, keepdim=True)
    else:
        action = at(place, encode_action(space, batch.action).flatten(0, 1)).to(whole)
        shown = action = torch.where(known.unsqueeze(-1), action, 0.0)
    row: Tensor | None
    if place is not None and packing is not None:
        row = packing.before(place)
    else:
        row = row_before(place, batch)
    before, after = ends(row, state, state.detach())
    seen_t, seen_tp1 = (before, after) if seen is state else ends(row, seen, seen.detach())
    legal_t: Tensor | None = None
    legal_tp1: Tensor | None = None
    if legal is not None:
        legal_t, legal_tp1 = ends(row, legal, legal)
    return Transitions(
        state_t=before,
        state_tp1=after,
        seen_t=seen_t,
        seen_tp1=seen_tp1,
        shown=shown,
        legal_t=legal_t,
        legal_tp1=legal_tp1,
        action=action,
        exists=exists,
        known=known,
        dpg_mask=dpg_mask,
        bc_mask=bc_mask,
        critic_mask=critic_mask,
        shape=(batch.mask.shape[0], batch.mask.shape[1]),
        place=place,
        target_noise=noise["target_noise"],
        own_noise=noise["own_noise"],
        subset_noise=noise["subset_noise"],
    )


def row_before(place: Tensor | None, batch: Batch) -> Tensor | None:
    """Where the row before each transition wanted is among B * L; None for all of them."""
    if place is None:
        return None
    return place + torch.div(place, batch.mask.shape[1], rounding_mode="floor")


def ends(row: Tensor | None, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows [B, L, ...] or [1, M, ...] those before and after each transition, [N, ...] each.

    `row` [N] is the one before; None takes all transitions of [B, L, ...].
    """
    if row is None:
        return before[:, :-1].flatten(0, 1), after[:, 1:].flatten(0, 1)
    return at(row, before.flatten(0, 1)), at(row + 1, after.flatten(0, 1))
