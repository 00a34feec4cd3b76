"""Settings of the actor (state to action distribution) and critic (state and action to value)."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator
from typing_extensions import Self

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
    """Settings shared by all distributions of continuous actions."""

    limits: ClassVar[tuple[str, str]] = ("std_low", "std_high")
    """The settings that bound a parameter of the distribution."""
    bound_gradient: bool = True
    """Keep a gradient towards the valid range where the bound on a standard deviation or
    concentration saturates. False, as published: no gradient there, so a few bad updates can freeze
    a policy."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        return _require_below(self, *self.limits)


class _BoundedConfig(_ContinuousConfig):
    """Settings of distributions whose density may be infinite at the bounds."""

    log_prob_clip: float = Field(0.99, gt=0, lt=1)
    """Actions of the data are clipped to plus or minus this value before log_prob."""


class TanhGaussianConfig(_BoundedConfig):
    """A tanh-squashed Gaussian."""

    kind: Literal["tanh_gaussian"] = "tanh_gaussian"
    """tanh_gaussian: a tanh-squashed Gaussian."""
    std_low: Positive = math.exp(-5)
    """Smallest standard deviation before tanh."""
    std_high: Positive = math.exp(2)
    """Largest standard deviation before tanh."""


class GaussianConfig(_ContinuousConfig):
    """A Gaussian whose mean is bounded by a tanh; samples are clipped to the bounds."""

    kind: Literal["gaussian"] = "gaussian"
    """gaussian: a Gaussian in action space, its mean bounded by a tanh and its samples clipped to
    the bounds (as in IQL, Kostrikov et al. 2021). It imitates actions at the bounds as exactly as
    others, where tanh_gaussian cannot."""
    std_low: Positive = 0.1
    """Smallest standard deviation, in normalised actions."""
    std_high: Positive = 1.0
    """Largest standard deviation, in normalised actions."""


class BetaConfig(_BoundedConfig):
    """Independent Beta distributions."""

    limits: ClassVar[tuple[str, str]] = ("low", "high")
    kind: Literal["beta"] = "beta"
    """beta: Beta distributions."""
    low: float = Field(1.0001, ge=1)
    """Minimum of alpha and beta; at least 1, so that the distribution has one mode."""
    high: float | None = None
    """Maximum of alpha and beta; none: no maximum."""


class GMMConfig(_BoundedConfig):
    """A tanh-squashed mixture of Gaussians."""

    kind: Literal["gmm"] = "gmm"
    """gmm: a tanh-squashed mixture of Gaussians. Its samples have no gradient for DPG, so it needs
    losses.dpg_weight 0."""
    modes: int = Field(5, ge=1, le=1024)
    """Number of Gaussians in the mixture."""
    std_low: Positive = 1e-4
    """Smallest standard deviation before tanh."""
    std_high: float | None = None
    """Largest standard deviation before tanh; none: no maximum."""


class DeterministicConfig(Settings):
    """A single action per state (DDPG, TD3)."""

    kind: Literal["deterministic"] = "deterministic"
    """deterministic: a single action, for continuous actions only; its log-probability is the
    negative squared error."""
    target_noise: float = Field(0.2, ge=0)
    """Standard deviation of noise on next actions in TD targets (target policy smoothing; TD3),
    where actions are in -1..1."""
    target_noise_clip: Positive = 0.5
    """Largest size of this noise."""


ContinuousConfig = Annotated[
    TanhGaussianConfig | GaussianConfig | BetaConfig | GMMConfig | DeterministicConfig,
    Field(discriminator="kind"),
]
"""Distribution of continuous actions, by `kind`."""


# --------------------------------------------------------------------------------------- the actor


class _ActorConfig(Settings):
    """Settings shared by all actors. An actor outputs one distribution per discount."""

    activation: Activation = "leaky_relu"
    """Activation after each hidden layer."""
    dropout: Dropout = 0.0
    """Dropout probability after each hidden layer."""
    continuous: ContinuousConfig = Field(default_factory=TanhGaussianConfig)
    """Distribution of continuous actions."""
    prob_low: float = Field(0.001, ge=0)
    """Discrete and multi-discrete: minimum probability of an action (or choice of a part), before
    renormalising."""
    prob_high: float = Field(0.99, le=1)
    """Discrete and multi-discrete: maximum probability of an action (or choice of a part), before
    renormalising."""
    prob_low_gradient: bool = True
    """Discrete and multi-discrete: pass the gradient through the lower clip. False, as published:
    actions below prob_low have no gradient, so no data can raise their probability."""

    @model_validator(mode="after")
    def _probabilities(self) -> Self:
        return _require_below(self, "prob_low", "prob_high")


class MLPActorConfig(_ActorConfig):
    """An MLP."""

    kind: Literal["mlp"] = "mlp"
    """mlp: an MLP."""
    n_layers: Layers = 2
    """Number of hidden layers."""
    d_hidden: Width = 256
    """Width of the hidden layers."""


class ResidualActorConfig(_ActorConfig):
    """Residual blocks with norms (after BRO, Nauman et al. 2024)."""

    kind: Literal["residual"] = "residual"
    """residual: residual blocks with norms."""
    d_feature: Width = 256
    """Width of the residual stream."""
    d_ff: FeedForwardWidth = 512
    """Hidden width of a block."""
    n_blocks: Layers = 2
    """Number of residual blocks."""
    norm: Norm = "layer"
    """Normalisation inside the blocks."""

    @model_validator(mode="after")
    def _norm_fits(self) -> Self:
        check_norm(self, "norm", d_feature=self.d_feature, d_ff=self.d_ff)
        return self


ActorConfig = Annotated[MLPActorConfig | ResidualActorConfig, Field(discriminator="kind")]
"""Maps state vectors to action distributions, by `kind`."""


# -------------------------------------------------------------------------------------- the critic


class PopArtConfig(Settings):
    """Normalise the targets of each discount by running statistics (van Hasselt et al. 2016)."""

    beta: StepSize = 5e-4
    """Step size of the statistics."""
    init_mean: float = 0.0
    """Initial mean of the returns, in units of the multiplied reward."""
    init_nu: Positive = 100.0
    """Initial variance of the returns, in units of the multiplied reward."""
    preserve_outputs: bool = True
    """A change of the statistics moves no value (as published), by a scale and an offset outside of
    the networks: their outputs stay in units of sqrt(init_nu), so returns a hundred times as large
    are learned late. False: outputs are normalised returns, and all values move with the
    statistics. Critics over bins output returns in any case."""


class _CriticConfig(Settings):
    """Settings shared by all critics: an ensemble, each with one action value per discount."""

    n_critics: int = Field(4, ge=1, le=1024)
    """Number of critics in the ensemble."""
    n_critics_target: int = Field(2, ge=1)
    """Size of the random subset of target critics for each target."""
    subset_replacement: bool = False
    """Published behaviour: draw the subset with replacement, so some targets use fewer critics."""
    soften_data_actions: bool = False
    """Published behaviour for discrete actions: the critics' input is the one-hot action clipped
    to prob_low..prob_high."""
    n_layers: Layers = 2
    """Number of hidden layers."""
    d_hidden: Width = 256
    """Width of the hidden layers."""
    init_scale: Positive = 1.0
    """Factor of the output layer's initial weights. If it is small, all values begin near
    popart.init_mean; a wrong beginning is only forgotten after about 1 / ((1 - gamma) tau)
    updates."""
    activation: Activation = "leaky_relu"
    """Activation after each hidden layer."""
    layer_norm: bool = False
    """Layer norm after each activation, which bounds values far from the data (ReBRAC; Tarasov et
    al. 2023). It has no weights: the next layer scales its output."""
    dropout: Dropout = 0.0
    """Dropout probability after each hidden layer."""
    popart: PopArtConfig | None = Field(default_factory=PopArtConfig)
    """Normalise the targets of each discount by running statistics (PopArt); none: do not."""

    @model_validator(mode="after")
    def _subset(self) -> Self:
        if self.n_critics_target > self.n_critics:
            raise ValueError(
                f"n_critics_target: expected at most n_critics={self.n_critics}, got "
                f"{self.n_critics_target}; lower it or raise n_critics"
            )
        return self


class ScalarCriticConfig(_CriticConfig):
    """Critics trained by regression."""

    kind: Literal["scalar"] = "scalar"
    """scalar: regression of normalised returns."""


class BinnedCriticConfig(_CriticConfig):
    """Settings shared by critics that classify returns over bins."""

    n_bins: int = Field(128, ge=2, le=MAX_WIDTH)
    """Number of bins."""
    min_return: float = -100_000.0
    """Return at the first bin, after the reward multiplier. The default needs no tuning; a narrower
    range has a finer resolution."""
    max_return: float = 100_000.0
    """Return at the last bin, after the reward multiplier."""
    symlog: bool = True
    """Space the bins evenly in sign(y) ln(1 + |y|) instead of y."""
    init_value: float | None = None
    """Approximate output of untrained critics, a return; none: the middle of the range. A value far
    from all returns takes many updates to leave: set it if the range is not centred on 0."""

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
    """Critics trained by classification with two-hot labels."""

    kind: Literal["twohot"] = "twohot"
    """twohot: classification of returns over bins with two-hot labels."""


class HLGaussCriticConfig(BinnedCriticConfig):
    """Critics trained by classification with HL-Gauss labels (Farebrother et al. 2024)."""

    kind: Literal["hlgauss"] = "hlgauss"
    """hlgauss: classification of returns over bins with HL-Gauss labels."""
    sigma: Positive = 0.75
    """Standard deviation of a label, in bins."""
    renormalize: bool = False
    """Published behaviour: drop a label's mass outside the support, rescale the rest to 1 (nothing
    remains far outside). False: the outer bins get that mass."""


CriticConfig = Annotated[
    ScalarCriticConfig | TwoHotCriticConfig | HLGaussCriticConfig, Field(discriminator="kind")
]
"""Maps states and actions to values, by `kind`."""


def _require_below(config: S, low: str, high: str) -> S:
    first, second = getattr(config, low), getattr(config, high)
    if second is not None and not first < second:
        raise ValueError(f"{low}: expected less than {high}={second:g}, got {first:g}")
    return config
