"""The timestep encoder: maps observations of any kind and the previous step to one vector.

    reset flag, return-to-go (both optional) ─────────────────────────────┐
    plain numbers, few categories, previous reward and action ── whiten ──┤
    differences of plain numbers (optional) ── whiten ────────────────────┤
    image ── convolutions, linear ────────────────────────────────────────┤
    tokens ── embedding, recurrent, linear, norm ─────────────────────────┼── MLP ── norm
    goals ── two linear, norm ────────────────────────────────────────────┘

With kind=image, for a single image, as published:

    previous reward and action ── symlog, linear, activation ──┐
    image ── convolutions, linear, activation ─────────────────┴── linear ── norm

Timesteps are encoded independently, but for the differences; the memory is in trajectory.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amago_model.config import (
    ImageTimestepEncoderConfig,
    InputNormConfig,
    Spaces,
    TimestepEncoderConfig,
)
from amago_model.config.names import SIMNORM_GROUP
from amago_model.data.packing import Packing
from amago_model.encoders.modalities import sees_one_image
from amago_model.encoders.observation_features import (
    InputNorm,
    ObservationFeatures,
    configured_norm,
)
from amago_model.errors import ConfigError
from amago_model.layers import Linear, make_activation, make_mlp, make_norm, symlog

SMALLEST = 1e-6
"""Differences with a smaller standard deviation are rounding errors."""


class TimestepEncoder(nn.Module):
    """Whiten plain numbers, encode the rest, concatenate (each kind sorted by key), MLP, norm.

    With only plain observations this is a feed-forward encoder, without additional parameters.
    """

    def __init__(
        self, config: TimestepEncoderConfig, spaces: Spaces, *, return_conditioned: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.observations = ObservationFeatures(config, spaces, "policy")
        self.d_previous = 1 + spaces.action.width
        self.d_unscaled = config.show_reset + return_conditioned
        """Inputs that are never normalised or hidden."""
        self.d_differences = config.differences * self.observations.d_numbers
        self.input_norm: InputNorm | None = None
        self.difference_norm: InputNorm | None = None
        self._make_layers()

    def _make_layers(self) -> None:
        """Create the layers after the networks of single observations."""
        config, observed = self.config, self.observations.d_vectors
        self.input_norm = _input_norm(config.input_norm, observed, self.d_previous)
        if self.d_differences:
            self.difference_norm = InputNorm(self.d_differences, init_nu=0.0, min_std=SMALLEST)
        width = observed + self.d_previous + self.d_unscaled + self.observations.d_encoded
        width += self.d_differences
        self.d_output = _scaled(config, "d_output", "out_norm", width)
        self.mlp: nn.Sequential = make_mlp(
            width,
            _scaled(config, "d_hidden", "norm", width),
            config.n_layers,
            self.d_output,
            activation=config.activation,
            norm=config.norm,
        )
        self.out_norm = make_norm(config.out_norm, self.d_output)

    def describe(self) -> list[str]:
        """The kind and size of each observation, sorted by key."""
        return self.observations.describe()

    def plain(self, obs: dict[str, Tensor], previous: Tensor, valid: Tensor | None) -> Tensor:
        """The plain numbers of each timestep: [B, L, F] float32, zeros where not valid.

        Order: observations, previous reward, previous action, reset flag, return-to-go; those that
        are normalised come first.
        """
        hidden = self.d_previous if self.config.hide_previous else int(self.config.hide_reward)
        if hidden:
            zeros = torch.zeros_like(previous[..., :hidden])
            previous = torch.cat((zeros, previous[..., hidden:]), dim=-1)
        x = torch.cat((*self.observations.vectors(obs), previous), dim=-1)
        return x if valid is None else torch.where(valid.unsqueeze(-1), x, 0.0)

    def differences(
        self,
        obs: dict[str, Tensor],
        time_idx: Tensor,
        valid: Tensor | None,
        before: Tensor | None = None,
    ) -> Tensor:
        """The differences of numbers to the timestep before: obs[k] [B, L, *shape], time_idx and
        valid [B, L] -> [B, L, d_differences].

        `before` [B, d_differences]: the numbers in the timestep before the window, if they are
        known. Differences are 0 where time_idx is 0, or one of both timesteps is not valid.
        """
        numbers = self.observations.numbers(obs)
        first = numbers[:, :1] if before is None else before.unsqueeze(1)
        change = numbers - torch.cat((first, numbers[:, :-1]), dim=1)
        known = time_idx > 0
        if valid is not None:
            known = known & valid & torch.cat((valid[:, :1], valid[:, :-1]), dim=1)
        return torch.where(known.unsqueeze(-1), change, 0.0)

    def forward(
        self,
        obs: dict[str, Tensor],
        previous: Tensor,
        valid: Tensor | None,
        packing: Packing | None = None,
        differences: Tensor | None = None,
    ) -> Tensor:
        """obs[k] [B, L, *shape], previous [B, L, 1+A], valid [B, L] bool -> [B, L, d_output].

        With `show_reset`, previous is [B, L, 2+A] (see `previous_features`); with return
        conditioning it has one more element, the scaled return-to-go. Invalid timesteps are read as
        zeros. valid None means that all timesteps are valid; statistics are then not updated and
        images not shifted. With a packing, the output is [1, M, d_output]: the timesteps that
        exist. `differences` [B, L, d_differences] are needed if the config has them.
        """
        shifts = self.observations.draw_shifts(valid)
        if packing is not None:
            obs = self.observations.pack(obs, packing)
            previous = packing.pack(previous)
            differences = None if differences is None else packing.pack(differences)
            valid = None if valid is None else packing.pack(valid)
            shifts = None if shifts is None else packing.pack(shifts)
        x = self._plain_features(self.plain(obs, previous, valid), valid)
        parts = [x, *self.observations.encoded(obs, valid, shifts)]
        if self.difference_norm is not None:
            assert differences is not None
            parts.append(self.difference_norm(differences, valid))
        out: Tensor = self.out_norm(self.mlp(torch.cat(parts, dim=-1) if len(parts) > 1 else x))
        return out

    def _plain_features(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """The output of `plain`, normalised if configured."""
        if self.input_norm is None:
            return x
        width = self.input_norm.width
        whitened, rest = self.input_norm(x[..., :width], valid), x[..., width:]
        return torch.cat((whitened, rest), dim=-1) if rest.shape[-1] else whitened


class ImageTimestepEncoder(TimestepEncoder):
    """The published encoder of a single image and the previous step: no normalisation, no MLP."""

    def _make_layers(self) -> None:
        c = self.config
        assert isinstance(c, ImageTimestepEncoderConfig)
        self.previous = nn.Sequential(
            Linear(self.d_previous + self.d_unscaled, c.previous_features),
            make_activation(c.images.activation),
        )
        self.d_output = c.d_output
        width = c.previous_features + self.observations.d_encoded
        self.mlp = nn.Sequential(Linear(width, c.d_output))
        self.out_norm = make_norm(c.out_norm, c.d_output)

    def _plain_features(self, x: Tensor, valid: Tensor | None) -> Tensor:
        del valid
        return self.previous(symlog(x))  # type: ignore[no-any-return]


def make_timestep_encoder(
    config: TimestepEncoderConfig, spaces: Spaces, *, return_conditioned: bool = False
) -> TimestepEncoder:
    """The encoder of `config.kind`; kind 'image' applies only to a single image."""
    image = isinstance(config, ImageTimestepEncoderConfig) and sees_one_image(config, spaces)
    make = ImageTimestepEncoder if image else TimestepEncoder
    return make(config, spaces, return_conditioned=return_conditioned)


def _input_norm(config: InputNormConfig | None, observed: int, previous: int) -> InputNorm | None:
    """The normalisation of the first plain numbers of a timestep, if configured."""
    if config is None:
        return None
    width = observed + previous if config.previous else observed
    if not width:
        raise ConfigError(
            "TimestepEncoderConfig.input_norm.previous: False leaves nothing to whiten, because no "
            "observation consists of plain numbers; set input_norm=None "
            "(--agent.timestep-encoder.no-input-norm) instead"
        )
    return configured_norm(width, config)


def _scaled(config: TimestepEncoderConfig, name: str, norm: str, width: int) -> int:
    """A width of the config, or with `auto_scale` the width of the input if it is larger."""
    own = int(getattr(config, name))
    if not config.auto_scale or own >= width:
        return own
    if getattr(config, norm) == "simnorm" and width % SIMNORM_GROUP:
        fits = width + -width % SIMNORM_GROUP
        raise ConfigError(
            f"TimestepEncoderConfig.{norm}: 'simnorm' needs a multiple of {SIMNORM_GROUP} "
            f"channels, but auto_scale widens {name}={own} to {width}, its input width; set "
            f"{name} to {fits}, unset auto_scale or choose another norm"
        )
    return width
