"""Features of observations: plain numbers unchanged; images, tokens and goals by networks.

The timestep encoder and the privileged encoder use this module, with separate networks.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from amago_model.config import InputNormConfig, ObsSpace, Spaces, TimestepEncoderConfig
from amago_model.data.batch import category_index, one_hot, only_valid
from amago_model.data.packing import Packing
from amago_model.encoders.images import ImageEncoder, draw_shifts
from amago_model.encoders.modalities import hint, modalities_of
from amago_model.encoders.tokens_and_goals import GoalEncoder, TokenEncoder
from amago_model.layers import symlog
from amago_model.running_statistics import RunningMoments


class InputNorm(nn.Module):
    """Normalise each feature by its running mean and standard deviation over valid timesteps.

    A feature with a standard deviation of at most `min_std` is centred but not scaled.
    """

    def __init__(
        self, width: int, *, beta: float = 1e-4, init_nu: float = 1.0, min_std: float = 0.01
    ) -> None:
        super().__init__()
        self.width, self.min_std = width, min_std
        self.moments = RunningMoments((width,), beta=beta, init_nu=init_nu)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """x [B, L, F], valid [B, L] -> [B, L, F]. In training, updates the statistics first."""
        if self.training and valid is not None:
            self.moments.update(x, valid)
        std = torch.sqrt(self.moments.variance.clamp(min=0.0) + 0.1 * self.min_std**2)
        scale = torch.where(std > self.min_std, std, 1.0)
        return ((x - self.moments.mean) / scale).clamp(-1e4, 1e4)


def configured_norm(width: int, config: InputNormConfig) -> InputNorm:
    """The normalisation of `width` features that a config describes."""
    return InputNorm(width, beta=config.beta, init_nu=config.init_nu, min_std=config.min_std)


def vector_width(space: ObsSpace, *, raw: bool) -> int:
    """The number of features of `vector_features`."""
    return math.prod(space.shape) if raw else space.features


def vector_features(space: ObsSpace, x: Tensor, *, raw: bool = False) -> Tensor:
    """[B, L, *shape] in storage dtype -> [B, L, features] float32.

    Categories become one-hots and uint8 values are divided by 255, unless `raw`. Other numbers are
    unchanged.
    """
    flat = x.reshape(*x.shape[:2], -1)
    if space.n is not None and not raw:
        return one_hot(category_index(space, flat), space.n).flatten(2)
    flat = flat.to(torch.float32)
    return flat / 255.0 if space.dtype == "uint8" and not raw else flat


class ObservationFeatures(nn.Module):
    """Features of the observations of a role, with a network per image, token array and goal
    list."""

    def __init__(
        self, config: TimestepEncoderConfig, spaces: Spaces, role: Literal["policy", "critic"]
    ) -> None:
        super().__init__()
        self.config = config
        kinds = modalities_of(config, spaces, role)
        self.spaces = {key: spaces.observations[key] for key in kinds}
        self.vector_keys = [key for key, kind in kinds.items() if kind == "vector"]
        images, tokens, goals = (
            [(key, self.spaces[key]) for key in kinds if kinds[key] == wanted]
            for wanted in ("image", "tokens", "goals")
        )
        self.n_images = len(images)
        self.encoders = nn.ModuleList(
            [
                *(ImageEncoder(config.images, *item) for item in images),
                *(TokenEncoder(config.tokens, *item) for item in tokens),
                *(GoalEncoder(config.goals, *item) for item in goals),
            ]
        )
        raw = config.raw_numbers
        self.number_keys = [key for key in self.vector_keys if self.spaces[key].n is None]
        self.d_numbers = sum(vector_width(self.spaces[key], raw=raw) for key in self.number_keys)
        self.d_vectors = sum(vector_width(self.spaces[key], raw=raw) for key in self.vector_keys)
        self.d_encoded = sum(int(part.d_output) for part in self.encoders)  # type: ignore[arg-type, misc]

    def describe(self) -> list[str]:
        """The kind and size of each observation, sorted by key."""
        found = {str(part.key): part.describe() for part in self.encoders}  # type: ignore[operator]
        for key in self.vector_keys:
            space = self.spaces[key]
            if space.n is not None and not self.config.raw_numbers:
                form = f"{space.features // space.n} x {space.n} categories"
            else:
                width = vector_width(space, raw=self.config.raw_numbers)
                form = f"{width} number" + "s" * (width > 1)
            # No hint for keys that the config names as vectors.
            advice = "" if key in self.config.vector_keys else hint(space, "vector")
            found[key] = ", ".join(filter(None, (form, advice)))
        return [f"{key}: {found[key]}" for key in sorted(found)]

    def draw_shifts(self, valid: Tensor | None) -> Tensor | None:
        """Random shifts [B, L, images, 2], given valid [B, L]; None in acting or if not
        configured."""
        augment = self.config.images.augment
        if augment is None or not (self.training and self.n_images) or valid is None:
            return None
        b, length = valid.shape
        return draw_shifts(b, length, self.n_images, config=augment, device=valid.device)

    def pack(self, obs: dict[str, Tensor], packing: Packing) -> dict[str, Tensor]:
        """The observations used, by key: [B, L, *shape] -> [1, M, *shape]."""
        return {key: packing.pack(obs[key]) for key in self.spaces}

    def vectors(self, obs: dict[str, Tensor]) -> list[Tensor]:
        """The plain numbers of each vector key, [B, L, features] each; zeros for hidden keys."""
        return [self._vector(key, obs) for key in self.vector_keys]

    def numbers(self, obs: dict[str, Tensor]) -> Tensor:
        """[B, L, d_numbers]: those of `vectors` that are no categories."""
        return torch.cat([self._vector(key, obs) for key in self.number_keys], dim=-1)

    def _vector(self, key: str, obs: dict[str, Tensor]) -> Tensor:
        space = self.spaces[key]
        part = vector_features(space, obs[key], raw=self.config.raw_numbers)
        if self.config.symlog and space.n is None and space.dtype != "uint8":
            part = symlog(part)
        return torch.zeros_like(part) if key in self.config.hide_keys else part

    def encoded(
        self, obs: dict[str, Tensor], valid: Tensor | None, shifts: Tensor | None
    ) -> list[Tensor]:
        """Features of images, tokens and goals, [B, L, d] each; invalid inputs are read as
        zeros."""
        found = []
        for index, encoder in enumerate(self.encoders):
            key = str(encoder.key)
            x = only_valid(obs[key], valid)
            if isinstance(encoder, ImageEncoder):  # images come first
                part = encoder(x, None if shifts is None else shifts[:, :, index])
            else:
                part = encoder(x)
            # Times zero, so that its parameters have a gradient (of zero), as distributed training
            # requires.
            found.append(part * 0.0 if key in self.config.hide_keys else part)
        return found
