"""Settings of the heads: state to action distribution, state and action to value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from amago_model.checked import Checked, Unused, of_other_choices, refuse, unused
from amago_model.config.names import MAX_LAYERS, MAX_WIDTH, Activation, Norm, check_norm
from amago_model.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BetaConfig(Checked):
    """Continuous actions from Beta distributions."""

    low: float = 1.0001
    """Smallest alpha and beta; at least 1, so that there is one mode."""
    high: float | None = None
    """Largest alpha and beta, if any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("low", 1 <= self.low < math.inf, "a number of at least 1")
        self.require("high", self.high is None or self.high > self.low, "above low")


@dataclass(frozen=True, kw_only=True)
class GMMConfig(Checked):
    """Continuous actions from a mixture of Gaussians under a tanh."""

    modes: int = 5
    """Gaussians in the mixture."""
    std_low: float = 1e-4
    """Smallest standard deviation before tanh."""
    std_high: float | None = None
    """Largest standard deviation before tanh, if any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(modes=1024)
        self.require("std_low", self.std_low > 0, "a positive number")
        self.require("std_high", self.std_high is None or self.std_high > self.std_low, "above low")


@dataclass(frozen=True, kw_only=True)
class ResidualActorConfig(Checked):
    """An actor of residual blocks with norms (after BRO, Nauman et al. 2024)."""

    d_feature: int = 256
    """Width of the residual stream."""
    d_ff: int = 512
    """Hidden width of a block."""
    n_blocks: int = 2
    """Residual blocks."""
    norm: Norm = "layer"
    """Normalisation inside the blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(d_feature=MAX_WIDTH, d_ff=4 * MAX_WIDTH, n_blocks=MAX_LAYERS)
        check_norm(self, "norm", d_feature=self.d_feature, d_ff=self.d_ff)


@dataclass(frozen=True, kw_only=True)
class ActorConfig(Checked):
    """State vector to action distribution, one for each discount."""

    kind: Literal["mlp", "residual"] = "mlp"
    """Plain layers, or residual blocks."""
    residual: ResidualActorConfig = field(default_factory=ResidualActorConfig)
    """Settings of kind=residual."""
    n_layers: int = 2
    """mlp: hidden layers."""
    d_hidden: int = 256
    """mlp: width of the hidden layers."""
    activation: Activation = "leaky_relu"
    """Activation after each hidden layer."""
    dropout: float = 0.0
    """Dropout probability after each hidden layer."""
    continuous: Literal["tanh_gaussian", "beta", "gmm"] = "tanh_gaussian"
    """Continuous: family of the distribution. gmm has no gradient: it needs dpg_weight 0."""
    beta: BetaConfig = field(default_factory=BetaConfig)
    """Settings of continuous=beta."""
    gmm: GMMConfig = field(default_factory=GMMConfig)
    """Settings of continuous=gmm."""
    prob_low: float = 0.001
    """Discrete and multi-discrete: no action (no choice of a part) is less likely than this, before
    renormalising."""
    prob_high: float = 0.99
    """Discrete and multi-discrete: no action (no choice of a part) is more likely than this, before
    renormalising."""
    prob_low_gradient: bool = True
    """Discrete and multi-discrete: actions less likely than prob_low have a gradient, as if nothing
    had been clipped. Published: none, so that no data makes them likelier."""
    mean_log_prob: bool = False
    """As published, multi-binary: the log-probability of an action is the mean over its switches,
    not their sum."""
    std_low: float = math.exp(-5)
    """Continuous, tanh_gaussian: smallest standard deviation before tanh."""
    std_high: float = math.exp(2)
    """Continuous, tanh_gaussian: largest standard deviation before tanh."""
    log_prob_clip: float = 0.99
    """Continuous: data actions are clipped to plus or minus this before their log-probability."""
    bound_gradient: bool = True
    """Continuous: a deviation or concentration far out, where what bounds it is flat, keeps a
    gradient that leads back. Published: none, so that a few bad updates may freeze a policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(n_layers=MAX_LAYERS, d_hidden=MAX_WIDTH)
        self.require_fractions("dropout")
        self.require("prob_low", 0 <= self.prob_low < self.prob_high, "0 <= prob_low < prob_high")
        self.require("prob_high", self.prob_high <= 1, "at most 1")
        self.require("std_low", 0 < self.std_low < self.std_high, "0 < std_low < std_high")
        self.require("log_prob_clip", 0 < self.log_prob_clip < 1, "a number in (0, 1)")
        kinds = {"mlp": ("n_layers", "d_hidden"), "residual": ("residual",)}
        families = {
            "tanh_gaussian": ("std_low", "std_high"),
            "beta": ("beta",),
            "gmm": ("gmm",),
        }
        found = of_other_choices(self, "kind", kinds)
        found += of_other_choices(self, "continuous", families)
        if self.prob_low == 0:
            found += unused("prob_low=0 clips nothing from below", (self, ["prob_low_gradient"]))
        refuse(found)


@dataclass(frozen=True, kw_only=True)
class BinsConfig(Checked):
    """The support of a critic that classifies returns."""

    n_bins: int = 128
    """Bins."""
    min_return: float = -100_000.0
    """Return of the first bin, after the reward multiplier. The default saves tuning; a narrower
    range tells returns apart better."""
    max_return: float = 100_000.0
    """Return of the last bin, after the reward multiplier."""
    symlog: bool = True
    """Space the bins evenly in sign(y) ln(1 + |y|), not in y."""
    sigma: float = 0.75
    """hlgauss: deviation of a label, in bins."""
    renormalize: bool = False
    """As published, hlgauss: what of a label lies beyond the support is not given to the bin at
    that edge; the rest is scaled up to 1, and far outside nothing is left."""
    init_value: float | None = None
    """Return that fresh critics answer, roughly; none leaves it to chance (the middle). One that is
    far from all returns takes many updates to leave: set it where the range is not around 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("n_bins", 2 <= self.n_bins <= MAX_WIDTH, f"a number from 2 to {MAX_WIDTH}")
        bounds = math.isfinite(self.min_return) and math.isfinite(self.max_return)
        self.require("min_return", bounds and self.min_return < self.max_return, "below max_return")
        self.require("sigma", self.sigma > 0, "a positive number")
        value = self.init_value
        inside = value is None or self.min_return <= value <= self.max_return
        self.require("init_value", inside, "a return between min_return and max_return")


@dataclass(frozen=True, kw_only=True)
class CriticConfig(Checked):
    """An ensemble of action values, one for each discount."""

    kind: Literal["scalar", "twohot", "hlgauss"] = "scalar"
    """Regress normalised returns, or classify them over bins by two-hot or HL-Gauss labels."""
    bins: BinsConfig = field(default_factory=BinsConfig)
    """Settings of kind=twohot and hlgauss."""
    n_critics: int = 4
    """Critics in the ensemble."""
    n_critics_target: int = 2
    """Critics drawn for each target value."""
    subset_replacement: bool = False
    """As published: draw them with replacement, so that some targets rest on fewer critics."""
    soften_data_actions: bool = False
    """As published, discrete: show critics the data's one-hots clipped to prob_low..prob_high."""
    n_layers: int = 2
    """Hidden layers."""
    d_hidden: int = 256
    """Width of the hidden layers."""
    activation: Activation = "leaky_relu"
    """Activation after each hidden layer."""
    dropout: float = 0.0
    """Dropout probability after each hidden layer."""
    popart: bool = True
    """Normalise the targets of each discount by running statistics (PopArt)."""
    popart_beta: float = 5e-4
    """Step size of the PopArt statistics."""
    popart_init_nu: float = 100.0
    """Second moment that the PopArt statistics start from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(n_layers=MAX_LAYERS, d_hidden=MAX_WIDTH, n_critics=1024)
        self.require_fractions("dropout")
        self.require("popart_beta", 0 < self.popart_beta < 1, "a number in (0, 1)")
        self.require("popart_init_nu", self.popart_init_nu > 0, "a positive number")
        found: list[Unused] = []
        if not self.popart:
            names = ("popart_beta", "popart_init_nu")
            found += unused(
                "popart=False keeps no statistics", (self, names), instead="set popart=True or "
            )
        if self.kind == "scalar":
            instead = "set kind='twohot' or 'hlgauss', or "
            found += unused("kind='scalar' has no bins", (self, ["bins"]), instead=instead)
        if self.kind == "twohot":
            why, instead = "labels of kind='twohot' have no width", "set kind='hlgauss' or "
            found += unused(why, (self.bins, ["sigma", "renormalize"]), instead=instead)
        if self.n_critics_target == 1:
            why = "n_critics_target=1 draws one critic, which comes back no second time"
            instead = "raise n_critics_target or "
            found += unused(why, (self, ["subset_replacement"]), instead=instead)
        refuse(found)
        if not 1 <= self.n_critics_target <= self.n_critics:
            raise ConfigError(
                f"CriticConfig.n_critics_target: {self.n_critics_target} of n_critics="
                f"{self.n_critics} cannot be drawn without replacement; lower it or raise n_critics"
            )
