"""The networks of an agent and their slow copies: what acts, what judges, and their statistics."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from amago_model.acting import ActingPolicy
from amago_model.config import AgentConfig, Spaces
from amago_model.critic import CriticEnsemble
from amago_model.errors import ConfigError
from amago_model.moments import BatchMoments
from amago_model.noise import Noise
from amago_model.privileged import PrivilegedFeatures
from amago_model.registry import registered
from amago_model.trajectory_encoders import Hidden
from amago_model.value_norm import PopArt

M = TypeVar("M", bound=nn.Module)


class Networks(nn.Module):
    """A policy; and where values are learned, critics, slow copies, PopArt."""

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
        self._noise = Noise.of(
            config,
            width=0 if self._exact else int(self.policy.actor.noise_width),
            learns_values=config.losses.trains_critic,
        )
        self.critic: CriticEnsemble | None = None
        if not config.losses.trains_critic:
            return
        n_gammas = len(config.losses.gammas)
        self.privileged = PrivilegedFeatures(config.timestep_encoder, spaces)
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

    @property
    def _exact(self) -> bool:
        """Whether critics are asked about every action, so that none has to be drawn."""
        return self.spaces.action.kind == "discrete" and not self.sampled

    def trainable_parameters(self) -> list[nn.Parameter]:
        """What the optimiser steps and the gradient norm is clipped over: never a frozen copy."""
        return [p for p in self.parameters() if p.requires_grad]

    @torch.no_grad()
    def update_targets(self) -> None:
        """Move the slow copies towards the learned weights. Call it after each optimiser step
        (before it, if `LossConfig.targets_before_step`)."""
        if self.critic is None:
            return
        torch._foreach_lerp_(*self._copies, self.config.losses.tau)

    @cached_property
    def _copies(self) -> tuple[list[Tensor], list[Tensor]]:
        """The weights of the slow copies, and those that they follow."""
        assert self.critic is not None
        slow: list[Tensor] = list(self.target_critic.parameters())
        learned: list[Tensor] = list(self.critic.parameters())
        if self.config.losses.use_target_actor:
            slow += self.target_actor.parameters()
            learned += self.policy.actor.parameters()
        return slow, learned

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
