"""One row to one vector: observations of any kind and the previous step, through an MLP.

    first row of an episode? ─────────────────────────────────────────────┐
    plain numbers, few categories, previous reward and action ── whiten ──┤
    image ── convolutions, linear ────────────────────────────────────────┤
    tokens ── embedding, recurrent, linear, norm ─────────────────────────┼── MLP ── norm ── row
    goals ── two linear, norm ────────────────────────────────────────────┘

With kind=image, for one image and nothing else, as published:

    previous reward and action ── symlog, linear, activation ──┐
    image ── convolutions, linear, activation ─────────────────┴── linear ── norm ── row

Rows are independent of each other: whatever needs the past belongs in trajectory_encoders.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from amago_model.config import InputNormConfig, ObsSpace, Spaces, TimestepEncoderConfig
from amago_model.config.names import SIMNORM_GROUP
from amago_model.data.batch import one_hot, only_valid
from amago_model.data.packing import Packing
from amago_model.encoders.embedders import GoalEmbedder, TokenEmbedder
from amago_model.encoders.images import ImageEncoder, draw_shifts
from amago_model.encoders.modalities import hint, kinds_of, sees_one_image
from amago_model.errors import ConfigError
from amago_model.layers import Linear, make_activation, make_mlp, make_norm, symlog
from amago_model.running_statistics import RunningMoments


class InputNorm(nn.Module):
    """Whiten each feature by its running mean and deviation, learned from valid rows only.

    A feature that has hardly varied (deviation up to 0.01) is centred and not scaled.
    """

    def __init__(self, width: int, *, beta: float = 1e-4, init_nu: float = 1.0) -> None:
        super().__init__()
        self.width = width
        self.moments = RunningMoments((width,), beta=beta, init_nu=init_nu)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """x [B, L, F], valid [B, L] -> [B, L, F]. Statistics move in training, before their use."""
        if self.training and valid is not None:
            self.moments.update(x, valid)
        std = torch.sqrt(self.moments.variance.clamp(min=0.0) + 1e-5)
        scale = torch.where(std > 0.01, std, 1.0)
        return ((x - self.moments.mean) / scale).clamp(-1e4, 1e4)


def vector_width(space: ObsSpace, *, raw: bool) -> int:
    """How many numbers `observation_features` makes."""
    return math.prod(space.shape) if raw else space.features


def observation_features(space: ObsSpace, x: Tensor, *, raw: bool = False) -> Tensor:
    """[B, L, *shape] in storage dtype -> [B, L, features] float32.

    Categories become one-hot; bytes are divided by 255; anything else, or with `raw` everything, is
    taken as it is.
    """
    rows = x.reshape(*x.shape[:2], -1)
    if raw:
        return rows.to(torch.float32)
    if space.n is not None:
        return one_hot(rows, space.n).flatten(2)
    if space.dtype == "uint8":
        return rows.to(torch.float32) / 255.0
    return rows.to(torch.float32)


class TimestepEncoder(nn.Module):
    """Whiten what is plain, embed the rest, concatenate (each kind sorted by key), MLP, norm.

    Where all observations are plain this is the feed-forward encoder, with no parameter more.
    """

    def __init__(self, config: TimestepEncoderConfig, spaces: Spaces) -> None:
        super().__init__()
        self.config = config
        kinds = kinds_of(config, spaces)
        self.spaces = {key: spaces.observations[key] for key in kinds}
        self.vector_keys = [key for key, kind in kinds.items() if kind == "vector"]
        self.images = nn.ModuleList(
            ImageEncoder(config.images, key, self.spaces[key])
            for key, kind in kinds.items()
            if kind == "image"
        )
        self.tokens = nn.ModuleList(
            TokenEmbedder(config.tokens, key, self.spaces[key])
            for key, kind in kinds.items()
            if kind == "tokens"
        )
        self.goals = nn.ModuleList(
            GoalEmbedder(config.goals, key, self.spaces[key])
            for key, kind in kinds.items()
            if kind == "goals"
        )
        self.d_previous = 1 + spaces.action.width
        self.input_norm: InputNorm | None = None
        widths = [int(part.d_output) for part in self._embedders()]  # type: ignore[arg-type]
        self._make_layers(sum(widths))

    def _make_layers(self, embedded: int) -> None:
        """Of what comes after the embedders, which make so many features."""
        config, raw = self.config, self.config.raw_numbers
        observed = sum(vector_width(self.spaces[key], raw=raw) for key in self.vector_keys)
        self.input_norm = _input_norm(config.input_norm, observed, self.d_previous)
        width = observed + self.d_previous + config.show_reset + embedded
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

    def _embedders(self) -> list[nn.Module]:
        return [*self.images, *self.tokens, *self.goals]

    def describe(self) -> list[str]:
        """What each observation is taken for, sorted by key."""
        found = {str(part.key): part.describe() for part in self._embedders()}  # type: ignore[operator]
        for key in self.vector_keys:
            space = self.spaces[key]
            if space.n is not None and not self.config.raw_numbers:
                form = f"{space.features // space.n} x {space.n} categories"
            else:
                width = vector_width(space, raw=self.config.raw_numbers)
                form = f"{width} number" + "s" * (width > 1)
            # Who named it a vector needs no hint that it looks like something else.
            advice = "" if key in self.config.vector_keys else hint(space, "vector")
            found[key] = ", ".join(filter(None, (form, advice)))
        return [f"{key}: {found[key]}" for key in sorted(found)]

    def plain(self, obs: dict[str, Tensor], previous: Tensor, valid: Tensor | None) -> Tensor:
        """All plain numbers, as they come: [B, L, F] float32, zeros in rows that are not valid.

        Observations, previous reward and action, and the reset last: what is whitened stands first.
        """
        hidden = self.d_previous if self.config.hide_previous else int(self.config.hide_reward)
        if hidden:
            shown = previous[..., hidden:]
            previous = torch.cat((torch.zeros_like(previous[..., :hidden]), shown), dim=-1)
        parts = []
        for key in self.vector_keys:
            raw = self.config.raw_numbers
            part = observation_features(self.spaces[key], obs[key], raw=raw)
            parts.append(torch.zeros_like(part) if key in self.config.hide_keys else part)
        x = torch.cat((*parts, previous), dim=-1)
        return x if valid is None else torch.where(valid.unsqueeze(-1), x, 0.0)

    def forward(
        self,
        obs: dict[str, Tensor],
        previous: Tensor,
        valid: Tensor | None,
        packing: Packing | None = None,
    ) -> Tensor:
        """obs[k] [B, L, *shape], previous [B, L, 1+A], valid [B, L] bool -> [B, L, d_output].

        With `show_reset`, previous has one number more (see `previous_features`).
        Rows that are not valid are read as zeros; None means all are valid, that running statistics
        must not move and that images stay where they are. With a packing only the rows that exist
        are computed: [1, M, d_output].
        """
        shifts = self._shifts(valid)
        if packing is not None:
            obs = {key: packing.rows(obs[key]) for key in self.spaces}
            previous = packing.rows(previous)
            valid = None if valid is None else packing.rows(valid)
            shifts = None if shifts is None else packing.rows(shifts)
        x = self._plain_features(self.plain(obs, previous, valid), valid)
        parts = [x]
        for index, image in enumerate(self.images):
            pixels = only_valid(obs[image.key], valid)  # type: ignore[index]
            part = image(pixels, None if shifts is None else shifts[:, :, index])
            parts.append(self._shown(image, part))
        for embedder in (*self.tokens, *self.goals):
            part = embedder(only_valid(obs[embedder.key], valid))
            parts.append(self._shown(embedder, part))
        out: Tensor = self.out_norm(self.mlp(torch.cat(parts, dim=-1) if len(parts) > 1 else x))
        return out

    def _plain_features(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """What becomes of `plain`: whitened, as far as it is to be."""
        if self.input_norm is None:
            return x
        width = self.input_norm.width
        whitened, left = self.input_norm(x[..., :width], valid), x[..., width:]
        return torch.cat((whitened, left), dim=-1) if left.shape[-1] else whitened

    def _shown(self, embedder: nn.Module, part: Tensor) -> Tensor:
        # Times zero: its parameters still get a gradient, of zero, as processes that share out the
        # gradients expect.
        return part * 0.0 if embedder.key in self.config.hide_keys else part

    def _shifts(self, valid: Tensor | None) -> Tensor | None:
        """[B, L, images, 2], in training and if wanted."""
        augment = self.config.images.augment
        if augment is None or not self.training or valid is None:
            return None
        out: Tensor = draw_shifts(
            *valid.shape, len(self.images), config=augment, device=valid.device
        )
        return out


class ImageTimestepEncoder(TimestepEncoder):
    """One image and the previous step, as published: nothing is whitened, and there is no MLP."""

    def _make_layers(self, embedded: int) -> None:
        c = self.config
        self.previous = nn.Sequential(
            Linear(self.d_previous + c.show_reset, c.previous_features),
            make_activation(c.images.activation),
        )
        self.d_output = c.d_output
        self.mlp = nn.Sequential(Linear(c.previous_features + embedded, c.d_output))
        self.out_norm = make_norm(c.out_norm, c.d_output)

    def _plain_features(self, x: Tensor, valid: Tensor | None) -> Tensor:
        del valid
        return self.previous(symlog(x))  # type: ignore[no-any-return]


def make_timestep_encoder(config: TimestepEncoderConfig, spaces: Spaces) -> TimestepEncoder:
    """The encoder that `config.kind` names; kind 'image' is for one image and nothing else."""
    image = config.kind == "image" and sees_one_image(config, spaces)
    return (ImageTimestepEncoder if image else TimestepEncoder)(config, spaces)


def _input_norm(config: InputNormConfig | None, observed: int, previous: int) -> InputNorm | None:
    """What whitens the first plain numbers of a timestep, if anything does."""
    if config is None:
        return None
    width = observed + previous if config.previous else observed
    if not width:
        raise ConfigError(
            "TimestepEncoderConfig.input_norm.previous: without the previous action and reward "
            "there is nothing to whiten, for no observation is plain numbers; set input_norm=None "
            "(--agent.timestep-encoder.no-input-norm) instead"
        )
    return InputNorm(width, beta=config.beta, init_nu=config.init_nu)


def _scaled(config: TimestepEncoderConfig, name: str, norm: str, width: int) -> int:
    """A width of the config, or with `auto_scale` that of the input where this is larger."""
    own = int(getattr(config, name))
    if not config.auto_scale or own >= width:
        return own
    if getattr(config, norm) == "simnorm" and width % SIMNORM_GROUP:
        fits = width + -width % SIMNORM_GROUP
        raise ConfigError(
            f"TimestepEncoderConfig.{norm}: 'simnorm' works on groups of {SIMNORM_GROUP} channels, "
            f"and auto_scale widens {name}={own} to the {width} numbers of a row; set {name} to "
            f"{fits}, unset auto_scale or choose another norm"
        )
    return width
