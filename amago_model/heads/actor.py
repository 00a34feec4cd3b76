"""The actor head: maps a state vector to one action distribution per discount."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amago_model.config import ActionSpace, ActorConfig, ResidualActorConfig
from amago_model.errors import ConfigError
from amago_model.heads.distributions import (
    Beta,
    Categorical,
    Deterministic,
    Distribution,
    Gaussian,
    GaussianMixture,
    MultiBinary,
    OneHots,
    TanhGaussian,
)
from amago_model.layers import Linear, ResidualBlock, make_mlp


class Actor(nn.Module):
    """An MLP (plain or residual) that outputs the parameters of the distributions of all G
    discounts."""

    def __init__(
        self, config: ActorConfig, action: ActionSpace, *, d_state: int, n_gammas: int
    ) -> None:
        super().__init__()
        if config.continuous.kind == "deterministic" and action.kind != "continuous":
            raise ConfigError(
                "actor.continuous.kind: 'deterministic' needs continuous actions, but these are "
                f"{action.kind}; use recipe iql, awac or crr (or bc), or choose another kind"
            )
        self.config, self.action = config, action
        self.n_gammas = n_gammas
        self.noise_width = noise_width(config, action)
        parameters = n_parameters(config, action)
        if config.kind == "residual":
            self.mlp = _residual_mlp(config, d_state, n_gammas * parameters)
            return
        self.mlp = make_mlp(
            d_state,
            config.d_hidden,
            config.n_layers,
            n_gammas * parameters,
            activation=config.activation,
            dropout=config.dropout,
        )

    def forward(self, state: Tensor, legal: Tensor | None = None) -> Distribution:
        """state [..., D], legal [..., n] bool -> a distribution of batch shape [..., G]."""
        every = None if legal is None else legal.unsqueeze(-2)
        return make_distribution(self.config, self.action, self.parameters_of(state), every)

    def acting(self, state: Tensor, legal: Tensor | None = None) -> Distribution:
        """Like forward, but only for the last discount, that of the acting policy: batch shape
        [...]."""
        x = self.parameters_of(state)[..., -1, :]
        return make_distribution(self.config, self.action, x, legal)

    def parameters_of(self, state: Tensor) -> Tensor:
        """state [..., D] -> parameters of the distributions, [..., G, n_parameters]."""
        return self.mlp(state).unflatten(-1, (self.n_gammas, -1))  # type: ignore[no-any-return]


def _residual_mlp(c: ResidualActorConfig, d_state: int, d_output: int) -> nn.Sequential:
    shared = {"activation": c.activation, "dropout": c.dropout}
    return nn.Sequential(
        make_mlp(d_state, c.d_feature, 1, c.d_feature, **shared),  # type: ignore[arg-type]
        *(
            ResidualBlock(c.d_feature, c.d_ff, norm=c.norm, last=False, **shared)  # type: ignore[arg-type]
            for _ in range(c.n_blocks)
        ),
        Linear(c.d_feature, d_output),
    )


def n_parameters(config: ActorConfig, action: ActionSpace) -> int:
    """Number of parameters of one distribution."""
    if action.kind != "continuous":
        return action.width
    if config.continuous.kind == "gmm":
        return config.continuous.modes * (1 + 2 * action.width)
    if config.continuous.kind == "deterministic":
        return action.width
    return 2 * action.width


def noise_width(config: ActorConfig, action: ActionSpace) -> int:
    """Number of standard normal numbers that one sample needs."""
    if action.kind == "continuous" and config.continuous.kind == "gmm":
        return 1 + action.width
    if action.kind == "continuous" and config.continuous.kind == "beta":
        return Beta.NOISE * action.width
    return action.width


def make_distribution(
    config: ActorConfig, action: ActionSpace, x: Tensor, legal: Tensor | None
) -> Distribution:
    """x [..., n_parameters], legal broadcastable to [..., A] -> a distribution of shape [...]."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # autocast may make it 16-bit
    match action.kind:
        case "discrete":
            return Categorical.from_logits(x, config, legal)
        case "multi_discrete":
            return OneHots.from_logits(x, action.nvec, config, legal)
        case "multi_binary":
            return MultiBinary(x)
    family = config.continuous
    match family.kind:
        case "beta":
            return Beta.from_parameters(x, family)
        case "gmm":
            return GaussianMixture.from_parameters(x, family)
        case "deterministic":
            return Deterministic(x.tanh())
        case "gaussian":
            return Gaussian.from_parameters(x, family)
        case "tanh_gaussian":
            return TanhGaussian.from_parameters(x, family)
