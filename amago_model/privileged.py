"""What only critics may see while learning. Acting never needs it, so no policy file holds it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amago_model.config import Spaces
from amago_model.timestep_encoders import InputNorm, observation_features


class PrivilegedFeatures(nn.Module):
    """What has the role 'critic', flattened and whitened: seen by critics and never when acting."""

    def __init__(self, spaces: Spaces) -> None:
        super().__init__()
        self.spaces = {key: spaces.observations[key] for key in spaces.keys("critic")}
        self.width = sum(space.features for space in self.spaces.values())
        if self.width:
            self.norm = InputNorm(self.width)

    def forward(self, obs: dict[str, Tensor], valid: Tensor) -> Tensor:
        """obs[k] [B, L, *shape], valid [B, L] -> [B, L, P]; zeros where no row was recorded."""
        parts = [observation_features(space, obs[key]) for key, space in self.spaces.items()]
        x = torch.where(valid.unsqueeze(-1), torch.cat(parts, dim=-1), 0.0)
        return torch.where(valid.unsqueeze(-1), self.norm(x, valid), 0.0)
