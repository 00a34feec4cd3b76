"""What only critics may see while learning. Acting never needs it, so no policy file holds it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amago_model.config import InputNormConfig, Spaces, TimestepEncoderConfig
from amago_model.data.batch import only_valid
from amago_model.data.packing import Packing
from amago_model.encoders.embedders import GoalEmbedder, TokenEmbedder
from amago_model.encoders.images import ImageEncoder, draw_shifts
from amago_model.encoders.modalities import kinds_of
from amago_model.encoders.timestep import (
    InputNorm,
    observation_features,
    vector_width,
)


class PrivilegedFeatures(nn.Module):
    """What has the role 'critic': seen by critics and never when acting.

    What is plain is flattened and whitened. Images, tokens and goals become features as in the
    timestep encoder, by its settings, but in networks of their own, which learn with the critics.
    """

    def __init__(self, config: TimestepEncoderConfig, spaces: Spaces) -> None:
        super().__init__()
        self.images, self.raw = config.images, config.raw_numbers
        kinds = kinds_of(config, spaces, role="critic")
        self.keys = list(kinds)
        vectors = [key for key, kind in kinds.items() if kind == "vector"]
        self.spaces = {key: spaces.observations[key] for key in vectors}
        plain = sum(vector_width(space, raw=self.raw) for space in self.spaces.values())
        if plain:
            statistics = config.input_norm or InputNormConfig()
            self.norm = InputNorm(plain, beta=statistics.beta, init_nu=statistics.init_nu)
        self.embedders = nn.ModuleList()
        for key, kind in kinds.items():
            space = spaces.observations[key]
            if kind == "image":
                self.embedders.append(ImageEncoder(config.images, key, space))
            elif kind == "tokens":
                self.embedders.append(TokenEmbedder(config.tokens, key, space))
            elif kind == "goals":
                self.embedders.append(GoalEmbedder(config.goals, key, space))
        self.n_images = sum(isinstance(part, ImageEncoder) for part in self.embedders)
        self.width = plain + sum(int(part.d_output) for part in self.embedders)  # type: ignore[arg-type, misc]

    def forward(
        self, obs: dict[str, Tensor], valid: Tensor, packing: Packing | None = None
    ) -> Tensor:
        """obs[k] [B, L, *shape], valid [B, L] -> [B, L, P]; zeros where no row was recorded.

        With a packing only the rows that exist are computed: [1, M, P].
        """
        shifts = self._shifts(valid)
        if packing is not None:
            obs = {key: packing.rows(obs[key]) for key in self.keys}
            valid = packing.rows(valid)
            shifts = None if shifts is None else packing.rows(shifts)
        parts = []
        if self.spaces:
            plain = [
                observation_features(space, obs[key], raw=self.raw)
                for key, space in self.spaces.items()
            ]
            x = torch.where(valid.unsqueeze(-1), torch.cat(plain, dim=-1), 0.0)
            parts.append(self.norm(x, valid))
        images = iter(range(self.n_images))
        for embedder in self.embedders:
            x = only_valid(obs[embedder.key], valid)  # type: ignore[index]
            if isinstance(embedder, ImageEncoder):
                index = next(images)
                parts.append(embedder(x, None if shifts is None else shifts[:, :, index]))
            else:
                parts.append(embedder(x))
        return torch.where(valid.unsqueeze(-1), torch.cat(parts, dim=-1), 0.0)

    def _shifts(self, valid: Tensor) -> Tensor | None:
        """[B, L, images, 2], in training and if wanted."""
        augment = self.images.augment
        if augment is None or not self.training or not self.n_images:
            return None
        out: Tensor = draw_shifts(*valid.shape, self.n_images, config=augment, device=valid.device)
        return out
