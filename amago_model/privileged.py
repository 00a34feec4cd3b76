"""What only critics may see while learning. Acting never needs it, so no policy file holds it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amago_model.config import Spaces, TimestepEncoderConfig
from amago_model.embedders import GoalEmbedder, TokenEmbedder
from amago_model.images import ImageEncoder, draw_shifts
from amago_model.modalities import kinds_of
from amago_model.timestep_encoders import InputNorm, observation_features, only_valid


class PrivilegedFeatures(nn.Module):
    """What has the role 'critic': seen by critics and never when acting.

    What is plain is flattened and whitened. Images, tokens and goals become features as in the
    timestep encoder, by its settings, but in networks of their own, which learn with the critics.
    """

    def __init__(self, config: TimestepEncoderConfig, spaces: Spaces) -> None:
        super().__init__()
        self.images = config.images
        kinds = kinds_of(config, spaces, role="critic")
        vectors = [key for key, kind in kinds.items() if kind == "vector"]
        self.spaces = {key: spaces.observations[key] for key in vectors}
        plain = sum(space.features for space in self.spaces.values())
        if plain:
            self.norm = InputNorm(
                plain, beta=config.input_norm_beta, init_nu=config.input_norm_init_nu
            )
        self.embedders = nn.ModuleList()
        for key, kind in kinds.items():
            space = spaces.observations[key]
            if kind == "image":
                self.embedders.append(ImageEncoder(config.images, key, space))
            elif kind == "tokens":
                self.embedders.append(TokenEmbedder(config.tokens, key, space))
            elif kind == "goals":
                self.embedders.append(GoalEmbedder(config.goals, key, space))
        self.width = plain + sum(int(part.d_output) for part in self.embedders)  # type: ignore[arg-type]

    def forward(self, obs: dict[str, Tensor], valid: Tensor) -> Tensor:
        """obs[k] [B, L, *shape], valid [B, L] -> [B, L, P]; zeros where no row was recorded."""
        parts = []
        if self.spaces:
            plain = [observation_features(space, obs[key]) for key, space in self.spaces.items()]
            x = torch.where(valid.unsqueeze(-1), torch.cat(plain, dim=-1), 0.0)
            parts.append(self.norm(x, valid))
        for embedder in self.embedders:
            x = only_valid(obs[embedder.key], valid)  # type: ignore[index]
            if isinstance(embedder, ImageEncoder):
                parts.append(embedder(x, self._shift(valid)))
            else:
                parts.append(embedder(x))
        return torch.where(valid.unsqueeze(-1), torch.cat(parts, dim=-1), 0.0)

    def _shift(self, valid: Tensor) -> Tensor | None:
        """[B, L, 2], in training and if wanted."""
        c = self.images
        if not self.training or not c.augment:
            return None
        most, device = c.augment_shift, valid.device
        return draw_shifts(*valid.shape, 1, share=c.augment, most=most, device=device)[:, :, 0]
