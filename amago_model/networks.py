"""The networks of an agent and its target networks: what acts, what judges, and statistics.

Also how a batch becomes the transitions that they are asked about. Letters: B windows, T
transitions, L = T + 1 rows, D state width, P width of what only critics see.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from amago_model.acting import ActingPolicy
from amago_model.config import AgentConfig, PopArtConfig, Spaces
from amago_model.data.batch import Batch
from amago_model.data.noise import Noise
from amago_model.data.packing import Packing
from amago_model.data.transitions import Transitions, at, make_transitions, places
from amago_model.encoders.privileged import PrivilegedFeatures
from amago_model.encoders.trajectory import Hidden
from amago_model.errors import ConfigError
from amago_model.heads.critic import CriticEnsemble
from amago_model.heads.observations import keys_for_critic, shown
from amago_model.heads.popart import PopArt
from amago_model.registry import own_part
from amago_model.running_statistics import BatchMoments

M = TypeVar("M", bound=nn.Module)


class Networks(nn.Module):
    """A policy; and where values are learned, critics, target networks, PopArt."""

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
        own = config.custom
        self._own_filter: Callable[..., Any] | None = (
            own_part(own, "filter", own.filter) if own.filter else None
        )
        self._own_losses = {name: own_part(own, "loss", name) for name in own.losses}
        self._noise = Noise.of(
            config,
            width=0 if self._exact else int(self.policy.actor.noise_width),
            learns_values=config.losses.trains_critic,
        )
        self.critic: CriticEnsemble | None = None
        self.lagged_critic: CriticEnsemble | None = None
        if not config.losses.trains_critic:
            return
        n_gammas = len(config.losses.gammas)
        self.privileged = PrivilegedFeatures(config.timestep_encoder, spaces)
        make_critic = own_part(own, "critic", own.critic) if own.critic else CriticEnsemble
        self.critic = make_critic(
            config.critic,
            spaces.action,
            config.losses.gammas,
            d_state=self.policy.d_state + self.privileged.width,
            sampled=self.sampled,
        )
        self._critic_keys = keys_for_critic(self.critic, spaces)
        self.target_critic = _frozen_copy(self.critic)
        if config.losses.lagged_critics:
            self.lagged_critic = _frozen_copy(self.critic)
        if config.losses.use_target_actor:
            self.target_actor = _frozen_copy(self.policy.actor)
        popart = config.critic.popart or PopArtConfig()
        self.value_norm = PopArt(
            n_gammas,
            beta=popart.beta,
            init_nu=popart.init_nu,
            enabled=config.critic.popart is not None,
        )
        self.advantage_moments = BatchMoments()

    @property
    def _exact(self) -> bool:
        """Whether critics are asked about every action, so that none has to be drawn."""
        return self.spaces.action.kind == "discrete" and not self.sampled

    def trainable_parameters(self) -> list[nn.Parameter]:
        """What the optimiser steps and the gradient norm is clipped over: never a frozen copy."""
        return [p for p in self.parameters() if p.requires_grad]

    @torch.no_grad()
    def update_targets(self, bad: Tensor | None = None) -> None:
        """Move the target networks towards the learned weights. Call it after each optimiser step
        (before it, if `LossConfig.targets_before_step`). `bad` is that of step_adamw."""
        if self.critic is None:
            return
        slow: list[Tensor] = list(self.target_critic.parameters())
        learned: list[Tensor] = list(self.critic.parameters())
        if self.config.losses.use_target_actor:
            slow += self.target_actor.parameters()
            learned += self.policy.actor.parameters()
        if bad is None:
            torch._foreach_lerp_(slow, learned, self.config.losses.tau)
            return
        way = torch._foreach_sub(learned, slow)
        torch._foreach_mul_(way, self.config.losses.tau * (1.0 - bad))
        torch._foreach_add_(slow, way)

    @torch.no_grad()
    def keep_critics(self, bad: Tensor | None = None) -> None:
        """With `LossConfig.lagged_critics`, keep the critics as they are for the next update. Call
        it before each optimiser step. `bad` is that of step_adamw."""
        if self.critic is not None and self.lagged_critic is not None:
            kept: list[Tensor] = list(self.lagged_critic.parameters())
            learned: list[Tensor] = list(self.critic.parameters())
            if bad is not None:
                learned = [torch.where(bad > 0, a, b) for a, b in zip(kept, learned, strict=True)]
            torch._foreach_copy_(kept, learned)

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

    def _privileged(self, batch: Batch, packing: Packing | None = None) -> Tensor:
        """[B, L, P], or [1, M, P] by a packing."""
        out: Tensor = self.privileged(batch.obs, batch.row_mask, packing)
        return out

    def _encode(self, batch: Batch, *, padded: bool = False) -> Transitions:
        """`padded`: with the transitions that do not exist, everywhere."""
        place = None if padded else places(batch.mask)
        state, packing = self._states(batch)
        if packing is not None and place is None:
            state, packing = packing.windows(state), None
        legal = self.policy.legal(batch.obs)
        if legal is not None:  # where nothing was recorded, nothing is forbidden
            legal = legal | ~batch.row_mask.unsqueeze(-1)
            legal = legal if packing is None else packing.rows(legal)
        seen = state
        if self.critic is not None and self.privileged.width:
            seen = torch.cat((state, self._privileged(batch, packing)), dim=-1)
        noise = self.draw_noise(*batch.mask.shape) if batch.noise is None else batch.noise
        drawn = self._noise.split(at(place, noise.flatten(0, 1)).to(self.gammas.dtype))
        config, spaces = self.config, self.spaces
        tr = make_transitions(batch, config, spaces, state, seen, legal, drawn, packing, place)
        tr.actor_t, tr.actor_tp1 = shown(batch, self.policy.actor_keys, place)
        if self.critic is not None:
            tr.critic_t, tr.critic_tp1 = shown(batch, self._critic_keys, place)
        return tr

    def draw_noise(self, n_windows: int, n_transitions: int) -> Tensor:
        """[B, T, width]: all that an update of B windows of T transitions draws (but dropout)."""
        return self._noise.draw(n_windows, n_transitions, self.gammas.device)

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
