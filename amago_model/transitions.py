"""The transitions of a batch, encoded once: what every term of the update reads.

Letters: B windows, T transitions of each, N = B * T, D state width, P width of what only critics
may see, A action width, C critics, G discounts, K action samples, W noise of one sample.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from amago_model.batch import Batch, action_index, encode_action, one_hot
from amago_model.config import AgentConfig, Spaces


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
    imitable: Tensor  # [N] bool: ... and its action is known
    learnable: Tensor  # [N] bool: ... and it ends the task or arrives at a known observation
    shape: tuple[int, int]  # B, T
    target_noise: Tensor  # [K_c, N, G, W] standard normal; nothing if discrete
    own_noise: Tensor  # [K_a, N, G, W], W of actor.noise_width
    subset_noise: Tensor  # [C, N, G], whose order picks the critics of each target
    place: Tensor | None = None  # [N] int64, if packed: where each was among B * T

    def packed(self) -> Transitions:
        """Without padding: N is then the number of transitions that exist.

        Only on a CPU: elsewhere finding them would make the processor wait for the device.
        """
        if self.exists.device.type != "cpu" or torch.compiler.is_compiling():
            return self
        place = self.exists.nonzero().squeeze(1)
        if len(place) == len(self.exists):
            return self
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        noise = {k: fields.pop(k)[:, place] for k in [*fields] if k.endswith("_noise")}
        rows = {k: v[place] for k, v in fields.items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **rows, **noise, place=place)

    def windows(self, x: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]; zeros for what was packed away."""
        if self.place is not None:
            full = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
            x = full.index_copy(0, self.place, x)
        return x.unflatten(0, self.shape)

    def transitions(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]"""
        x = x.flatten(0, 1)
        return x if self.place is None else x[self.place]


def loss_masks(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T] each: the transition exists; its action is known; and its target can be computed."""
    imitable = batch.mask & batch.action_known
    return batch.mask, imitable, imitable & (batch.terminated | batch.next_obs_valid)


def make_transitions(
    batch: Batch,
    config: AgentConfig,
    spaces: Spaces,
    state: Tensor,
    seen: Tensor,
    legal: Tensor | None,
    noise: dict[str, Tensor],
) -> Transitions:
    """Of a batch whose rows have become states [B, L, D]; what critics see [B, L, D + P]; legal
    actions [B, L, A] bool; noise by the names of its fields."""
    exists, imitable, learnable = loss_masks(batch)
    space, whole = spaces.action, noise["own_noise"].dtype  # under autocast states may be halves
    if space.kind == "discrete":
        action = action_index(space, batch.action).clamp(0, space.n - 1).flatten()
        shown = one_hot(action, space.n).to(whole)
        if config.critic.soften_data_actions:
            shown = shown.clamp(config.actor.prob_low, config.actor.prob_high)
            shown = shown / shown.sum(-1, keepdim=True)
    else:
        action = encode_action(space, batch.action).flatten(0, 1).to(whole)
        shown = action = torch.where(imitable.reshape(-1, 1), action, 0.0)
    after = state[:, 1:].detach().flatten(0, 1)
    return Transitions(
        state_t=state[:, :-1].flatten(0, 1),
        state_tp1=after,
        seen_t=seen[:, :-1].flatten(0, 1),
        seen_tp1=after if seen is state else seen[:, 1:].detach().flatten(0, 1),
        shown=shown,
        legal_t=None if legal is None else legal[:, :-1].flatten(0, 1),
        legal_tp1=None if legal is None else legal[:, 1:].flatten(0, 1),
        action=action,
        exists=exists.flatten(),
        imitable=imitable.flatten(),
        learnable=learnable.flatten(),
        shape=(batch.mask.shape[0], batch.mask.shape[1]),
        **noise,
    )
