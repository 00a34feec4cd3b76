"""The encoder of privileged observations: inputs of the critics that acting does not need."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amago_model.config import InputNormConfig, Spaces, TimestepEncoderConfig
from amago_model.data.packing import Packing
from amago_model.encoders.observation_features import ObservationFeatures, configured_norm


class PrivilegedEncoder(nn.Module):
    """Features of observations with the role 'critic', by the settings of the timestep encoder.

    Plain numbers are normalised. The critic loss trains the networks of images, tokens and goals.
    """

    def __init__(self, config: TimestepEncoderConfig, spaces: Spaces) -> None:
        super().__init__()
        self.observations = ObservationFeatures(config, spaces, "critic")
        if plain := self.observations.d_vectors:
            self.norm = configured_norm(plain, config.input_norm or InputNormConfig())
        self.width = plain + self.observations.d_encoded
        """P: number of features per timestep."""

    def forward(
        self, obs: dict[str, Tensor], valid: Tensor, packing: Packing | None = None
    ) -> Tensor:
        """obs[k] [B, L, *shape], valid [B, L] -> [B, L, P]; zeros where valid is False.

        With a packing, the output is [1, M, P]: the timesteps that exist.
        """
        shifts = self.observations.draw_shifts(valid)
        if packing is not None:
            obs, valid = self.observations.pack(obs, packing), packing.pack(valid)
            shifts = None if shifts is None else packing.pack(shifts)
        parts = self.observations.encoded(obs, valid, shifts)
        if vectors := self.observations.vectors(obs):
            x = torch.where(valid.unsqueeze(-1), torch.cat(vectors, dim=-1), 0.0)
            parts.insert(0, self.norm(x, valid))
        return torch.where(valid.unsqueeze(-1), torch.cat(parts, dim=-1), 0.0)
