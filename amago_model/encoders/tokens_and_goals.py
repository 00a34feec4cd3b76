"""Encoders of tokens and lists of goals. Timesteps are encoded independently."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from amago_model.config import GoalConfig, ObsSpace, TokenConfig
from amago_model.data.batch import category_index
from amago_model.errors import ConfigError


class TokenEncoder(nn.Module):
    """Token ids [B, L, *shape] to [B, L, d_output].

    An RNN reads the tokens in order and skips padding at any position; its last state (zeros if
    there are no tokens) goes through a linear layer and a layer norm. Ids above the vocabulary are
    the token "unknown"; ids below it are padding.
    """

    def __init__(self, config: TokenConfig, key: str, space: ObsSpace) -> None:
        super().__init__()
        if space.dtype.startswith("float"):
            raise ConfigError(
                f"TokenConfig.keys: {key!r} has dtype {space.dtype}, but tokens are integers; "
                "record integers, or name it in TimestepEncoderConfig.vector_keys"
            )
        self.key, self.d_output, self.space = key, config.d_output, space
        self.length = math.prod(space.shape)
        self.lowest = 0 if space.n is not None else config.lowest
        self.vocabulary = space.n or config.vocabulary
        self.padding = 0 if space.vocabulary else config.padding
        first = min(space.starts, default=self.lowest)
        last = max(space.starts, default=self.lowest) + self.vocabulary - 1
        if self.padding is not None and not first <= self.padding <= last:
            raise ConfigError(
                f"TokenConfig.padding: {self.padding} is no token of {key!r}, which has "
                f"{first} to {last}; choose one of them, or "
                "unset it: smaller numbers are always padding"
            )
        self.embedding = nn.Embedding(self.vocabulary + 1, config.d_embedding)
        self.recurrent: nn.RNN | None = None
        d_state = config.d_embedding
        if self.length > 1:
            self.recurrent = nn.RNN(config.d_embedding, config.d_hidden, batch_first=True)
            d_state = config.d_hidden
        self.out = nn.Sequential(nn.Linear(d_state, config.d_output), nn.LayerNorm(config.d_output))

    def describe(self) -> str:
        many = "1 token" if self.length == 1 else f"{self.length} tokens"
        return f"{many} of {self.vocabulary}"

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, *shape] integers -> [B, L, d_output]."""
        given = x.reshape(-1, self.length).to(torch.int64)  # [N, S]
        token = category_index(self.space, given)
        absent = token < self.lowest
        if self.padding is not None:
            absent = absent | (given == self.padding)
        index = (token - self.lowest).clamp(0, self.vocabulary)
        if self.recurrent is None:
            state = self.embedding(index[:, 0])
        else:
            order = absent.to(torch.int8).argsort(dim=1, stable=True)
            states = self.recurrent(self.embedding(index.gather(1, order)))[0]  # [N, S, H]
            last = (self.length - 1 - absent.sum(1)).clamp(min=0)
            state = states[torch.arange(len(states), device=states.device), last]
        state = torch.where(absent.all(1, keepdim=True), 0.0, state)
        result: Tensor = self.out(state).unflatten(0, x.shape[:2])
        return result


class GoalEncoder(nn.Module):
    """Lists of goals [B, L, goals, d] to [B, L, d_output], by two linear layers and a layer norm.

    Numbers are not scaled; the environment defines how "no goal" and "done" are encoded.
    """

    def __init__(self, config: GoalConfig, key: str, space: ObsSpace) -> None:
        super().__init__()
        if len(space.shape) != 2:
            raise ConfigError(
                f"GoalConfig.keys: {key!r} has shape {space.shape}, expected [goals, numbers per "
                "goal]; reshape it when recording, or remove it from the keys"
            )
        self.key, self.d_output = key, config.d_output
        self.shape = space.shape
        width = 2 * space.shape[1]
        self.net = nn.Sequential(
            nn.Linear(math.prod(space.shape), width),
            nn.LeakyReLU(0.01, inplace=True),
            nn.Linear(width, config.d_output),
            nn.LayerNorm(config.d_output),
        )

    def describe(self) -> str:
        return f"{self.shape[0]} goals of {self.shape[1]}"

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, goals, d] -> [B, L, d_output]."""
        norm = self.net[-1]
        assert isinstance(norm, nn.LayerNorm)
        out: Tensor = self.net(x.flatten(2).to(norm.weight.dtype))
        return out
