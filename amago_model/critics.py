"""The value networks of training: critics, target critics, privileged encoder and PopArt.

Acting does not use them. Letters: B windows, L timesteps, D state width, P width of privileged
features, G discounts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amago_model.config import ActionSpace, AgentConfig, Spaces
from amago_model.data.batch import Batch
from amago_model.data.packing import Packing
from amago_model.encoders.privileged import PrivilegedEncoder
from amago_model.heads.critic import CriticEnsemble
from amago_model.heads.observations import critic_observation_keys
from amago_model.heads.popart import PopArt
from amago_model.heads.target_networks import frozen_copy
from amago_model.registry import custom_module


class Critics(nn.Module):
    """The online critic ensemble, its target and lagged copies, state value, privileged encoder
    and PopArt."""

    def __init__(self, config: AgentConfig, spaces: Spaces, d_state: int) -> None:
        super().__init__()
        losses, custom = config.losses, config.custom
        assert config.critic is not None
        self.privileged_encoder = PrivilegedEncoder(config.timestep_encoder, spaces)
        make = custom_module(custom, "critic", custom.critic) if custom.critic else CriticEnsemble
        self.online: CriticEnsemble = make(
            config.critic,
            spaces.action,
            losses.gammas,
            d_state=d_state + self.privileged_encoder.width,
            sampled=config.algorithm == "multitask",
        )
        self.observation_keys = critic_observation_keys(self.online, spaces)
        self.target = frozen_copy(self.online)
        self.lagged = frozen_copy(self.online) if losses.lagged_critics else None
        self.state_value: CriticEnsemble | None = None
        if losses.value_expectile is not None:
            # A critic of the state alone: one action, without a choice.
            self.state_value = CriticEnsemble(
                config.critic.replace(n_critics=1, n_critics_target=1),
                ActionSpace(kind="discrete", n=1),
                losses.gammas,
                d_state=d_state + self.privileged_encoder.width,
            )
        self.popart = PopArt(
            len(losses.gammas), config.critic.popart, bins=self.online.bins is not None
        )

    def value(self, state: Tensor) -> Tensor:
        """V(s) of value_expectile, an output like those of scalar critics: [N, D + P] -> [N, G]."""
        assert self.state_value is not None
        return self.state_value.action_values(state)[0, ..., 0]

    def encode(self, state: Tensor, batch: Batch, packing: Packing | None) -> Tensor:
        """Append privileged features: state [B, L, D], or packed [1, M, D] -> [..., D + P]."""
        if not self.privileged_encoder.width:
            return state
        privileged = self.privileged_encoder(batch.obs, batch.timestep_mask, packing)
        return torch.cat((state, privileged), dim=-1)
