"""Settings of the heads: state to action distribution, state and action to value."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from amago_model.config.base import MAX_WIDTH, Settings
from amago_model.config.names import (
    Activation,
    Dropout,
    FeedForwardWidth,
    Layers,
    Norm,
    Positive,
    StepSize,
    Width,
    check_norm,
)

S = TypeVar("S", bound=Settings)


# ------------------------------------------------------------- distributions of continuous actions


class _ContinuousConfig(Settings):
    """What all families of distributions share."""

    log_prob_clip: float = Field(0.99, gt=0, lt=1)
    """Data actions are clipped to plus or minus this before their log-probability."""
    bound_gradient: bool = True
    """A deviation or concentration far out, where what bounds it is flat, keeps a gradient that
    leads back. Published: none, so that a few bad updates may freeze a policy."""


class TanhGaussianConfig(_ContinuousConfig):
    """Continuous actions from a Gaussian under a tanh."""

    kind: Literal["tanh_gaussian"] = "tanh_gaussian"
    """tanh_gaussian: a Gaussian under a tanh."""
    std_low: Positive = math.exp(-5)
    """Smallest standard deviation before tanh."""
    std_high: Positive = math.exp(2)
    """Largest standard deviation before tanh."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        return _require_below(self, "std_low", "std_high")


class BetaConfig(_ContinuousConfig):
    """Continuous actions from Beta distributions."""

    kind: Literal["beta"] = "beta"
    """beta: Beta distributions."""
    low: float = Field(1.0001, ge=1)
    """Smallest alpha and beta; at least 1, so that there is one mode."""
    high: float | None = None
    """Largest alpha and beta, if any."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        return _require_below(self, "low", "high")


class GMMConfig(_ContinuousConfig):
    """Continuous actions from a mixture of Gaussians under a tanh."""

    kind: Literal["gmm"] = "gmm"
    """gmm: a mixture of Gaussians under a tanh, which has no gradient for DPG: it needs
    losses.dpg_weight 0."""
    modes: int = Field(5, ge=1, le=1024)
    """Gaussians in the mixture."""
    std_low: Positive = 1e-4
    """Smallest standard deviation before tanh."""
    std_high: float | None = None
    """Largest standard deviation before tanh, if any."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        return _require_below(self, "std_low", "std_high")


ContinuousConfig = Annotated[
    TanhGaussianConfig | BetaConfig | GMMConfig, Field(discriminator="kind")
]
"""Family of the distribution of continuous actions, by `kind`."""


# --------------------------------------------------------------------------------------- the actor


class _ActorConfig(Settings):
    """What all actors share: state vector to action distribution, one for each discount."""

    activation: Activation = "leaky_relu"
    """Activation after each hidden layer."""
    dropout: Dropout = 0.0
    """Dropout probability after each hidden layer."""
    continuous: ContinuousConfig = Field(default_factory=TanhGaussianConfig)
    """Distribution of continuous actions."""
    prob_low: float = Field(0.001, ge=0)
    """Discrete and multi-discrete: no action (no choice of a part) is less likely than this, before
    renormalising."""
    prob_high: float = Field(0.99, le=1)
    """Discrete and multi-discrete: no action (no choice of a part) is more likely than this, before
    renormalising."""
    prob_low_gradient: bool = True
    """Discrete and multi-discrete: actions less likely than prob_low have a gradient, as if nothing
    had been clipped. Published: none, so that no data makes them likelier."""

    @model_validator(mode="after")
    def _probabilities(self) -> Self:
        return _require_below(self, "prob_low", "prob_high")


class MLPActorConfig(_ActorConfig):
    """An actor of plain layers."""

    kind: Literal["mlp"] = "mlp"
    """mlp: plain layers."""
    n_layers: Layers = 2
    """Hidden layers."""
    d_hidden: Width = 256
    """Width of the hidden layers."""


class ResidualActorConfig(_ActorConfig):
    """An actor of residual blocks with norms (after BRO, Nauman et al. 2024)."""

    kind: Literal["residual"] = "residual"
    """residual: residual blocks with norms."""
    d_feature: Width = 256
    """Width of the residual stream."""
    d_ff: FeedForwardWidth = 512
    """Hidden width of a block."""
    n_blocks: Layers = 2
    """Residual blocks."""
    norm: Norm = "layer"
    """Normalisation inside the blocks."""

    @model_validator(mode="after")
    def _norm_fits(self) -> Self:
        check_norm(self, "norm", d_feature=self.d_feature, d_ff=self.d_ff)
        return self


ActorConfig = Annotated[MLPActorConfig | ResidualActorConfig, Field(discriminator="kind")]
"""State vector to action distribution, by `kind`."""


# -------------------------------------------------------------------------------------- the critic


class PopArtConfig(Settings):
    """Normalise the targets of each discount by running statistics (van Hasselt et al. 2016)."""

    beta: StepSize = 5e-4
    """Step size of the statistics."""
    init_nu: Positive = 100.0
    """Second moment that the statistics start from."""


class _CriticConfig(Settings):
    """What all critics share: an ensemble of action values, one for each discount."""

    n_critics: int = Field(4, ge=1, le=1024)
    """Critics in the ensemble."""
    n_critics_target: int = Field(2, ge=1)
    """Critics drawn for each target value."""
    subset_replacement: bool = False
    """As published: draw them with replacement, so that some targets rest on fewer critics."""
    soften_data_actions: bool = False
    """As published, discrete: show critics the data's one-hots clipped to prob_low..prob_high."""
    n_layers: Layers = 2
    """Hidden layers."""
    d_hidden: Width = 256
    """Width of the hidden layers."""
    activation: Activation = "leaky_relu"
    """Activation after each hidden layer."""
    dropout: Dropout = 0.0
    """Dropout probability after each hidden layer."""
    popart: PopArtConfig | None = Field(default_factory=PopArtConfig)
    """Normalise the targets of each discount by running statistics (PopArt)."""

    @model_validator(mode="after")
    def _subset(self) -> Self:
        if self.n_critics_target > self.n_critics:
            raise ValueError(
                f"n_critics_target: {self.n_critics_target} of n_critics={self.n_critics} cannot "
                "be drawn without replacement; lower it or raise n_critics"
            )
        return self


class ScalarCriticConfig(_CriticConfig):
    """Critics that regress returns."""

    kind: Literal["scalar"] = "scalar"
    """scalar: regress normalised returns."""


class BinnedCriticConfig(_CriticConfig):
    """What critics share that classify returns over bins."""

    n_bins: int = Field(128, ge=2, le=MAX_WIDTH)
    """Bins."""
    min_return: float = -100_000.0
    """Return of the first bin, after the reward multiplier. The default saves tuning; a narrower
    range tells returns apart better."""
    max_return: float = 100_000.0
    """Return of the last bin, after the reward multiplier."""
    symlog: bool = True
    """Space the bins evenly in sign(y) ln(1 + |y|), not in y."""
    init_value: float | None = None
    """Return that fresh critics answer, roughly; none leaves it to chance (the middle). One that is
    far from all returns takes many updates to leave: set it where the range is not around 0."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        _require_below(self, "min_return", "max_return")
        if self.init_value is not None and not (
            self.min_return <= self.init_value <= self.max_return
        ):
            raise ValueError(
                f"init_value: expected a return between min_return={self.min_return:g} and "
                f"max_return={self.max_return:g}, got {self.init_value}"
            )
        return self


class TwoHotCriticConfig(BinnedCriticConfig):
    """Critics that classify returns by two-hot labels."""

    kind: Literal["twohot"] = "twohot"
    """twohot: classify returns over bins by two-hot labels."""


class HLGaussCriticConfig(BinnedCriticConfig):
    """Critics that classify returns by HL-Gauss labels (Farebrother et al. 2024)."""

    kind: Literal["hlgauss"] = "hlgauss"
    """hlgauss: classify returns over bins by HL-Gauss labels."""
    sigma: Positive = 0.75
    """Deviation of a label, in bins."""
    renormalize: bool = False
    """As published: what of a label lies beyond the support is not given to the bin at that edge;
    the rest is scaled up to 1, and far outside nothing is left."""


CriticConfig = Annotated[
    ScalarCriticConfig | TwoHotCriticConfig | HLGaussCriticConfig, Field(discriminator="kind")
]
"""State vector and action to value, by `kind`."""


def _require_below(config: S, low: str, high: str) -> S:
    first, second = getattr(config, low), getattr(config, high)
    if second is not None and not first < second:
        raise ValueError(f"{low}: expected less than {high}={second:g}, got {first:g}")
    return config
