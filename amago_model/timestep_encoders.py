"""One row to one vector: observation arrays and the previous step's features through an MLP.

Rows are independent of each other: whatever needs the past belongs in trajectory_encoders.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amago_model.batch import one_hot
from amago_model.config import ObsSpace, Spaces, TimestepEncoderConfig
from amago_model.errors import ConfigError
from amago_model.layers import make_mlp, make_norm
from amago_model.moments import RunningMoments


class InputNorm(nn.Module):
    """Whiten each feature by its running mean and deviation, learned from valid rows only.

    A feature that has hardly varied (deviation up to 0.01) is centred and not scaled.
    """

    def __init__(self, width: int, *, beta: float = 1e-4, init_nu: float = 1.0) -> None:
        super().__init__()
        self.moments = RunningMoments((width,), beta=beta, init_nu=init_nu)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """x [B, L, F], valid [B, L] -> [B, L, F]. Statistics move in training, before their use."""
        if self.training and valid is not None:
            self.moments.update(x, valid)
        std = torch.sqrt(self.moments.variance.clamp(min=0.0) + 1e-5)
        scale = torch.where(std > 0.01, std, 1.0)
        return ((x - self.moments.mean) / scale).clamp(-1e4, 1e4)


def observation_features(space: ObsSpace, x: Tensor) -> Tensor:
    """[B, L, *shape] in storage dtype -> [B, L, features] float32.

    Categories become one-hot; bytes (pixels, usually) are divided by 255; anything else is taken
    as it is. Images get no better treatment here: convolutional encoders come later.
    """
    rows = x.reshape(*x.shape[:2], -1)
    if space.n is not None:
        return one_hot(rows, space.n).flatten(2)
    if space.dtype == "uint8":
        return rows.to(torch.float32) / 255.0
    return rows.to(torch.float32)


class FeedForwardTimestepEncoder(nn.Module):
    """Concatenate [arrays sorted by key | previous reward | previous action], normalise, MLP."""

    def __init__(self, config: TimestepEncoderConfig, spaces: Spaces) -> None:
        super().__init__()
        self.config = config
        self.keys = list(config.keys) or spaces.keys("policy")
        for key in self.keys:
            if key not in spaces.keys("policy"):
                raise ConfigError(
                    f"TimestepEncoderConfig.keys: {key!r} is not an observation with the role "
                    f"'policy'; those are {spaces.keys('policy')}"
                )
        self.keys.sort()
        self.spaces = {key: spaces.observations[key] for key in self.keys}
        width = sum(space.features for space in self.spaces.values()) + 1 + spaces.action.width
        self.input_norm = InputNorm(width) if config.normalize_inputs else None
        self.mlp = make_mlp(
            width,
            config.d_hidden,
            config.n_layers,
            config.d_output,
            activation=config.activation,
            norm=config.norm,
        )
        self.out_norm = make_norm(config.out_norm, config.d_output)

    @property
    def d_output(self) -> int:
        return self.config.d_output

    def forward(self, obs: dict[str, Tensor], previous: Tensor, valid: Tensor | None) -> Tensor:
        """obs[k] [B, L, *shape], previous [B, L, 1+A], valid [B, L] bool -> [B, L, d_output].

        Rows that are not valid are read as zeros; None means all are valid and that running
        statistics must not move.
        """
        if self.config.hide_previous:
            previous = torch.zeros_like(previous)
        elif self.config.hide_reward:
            previous = torch.cat((torch.zeros_like(previous[..., :1]), previous[..., 1:]), dim=-1)
        parts = [observation_features(self.spaces[key], obs[key]) for key in self.keys]
        x = torch.cat((*parts, previous), dim=-1)
        if valid is not None:
            x = torch.where(valid.unsqueeze(-1), x, 0.0)
        if self.input_norm is not None:
            x = self.input_norm(x, valid)
        return self.out_norm(self.mlp(x))
