"""Every setting of the agent as plain frozen dataclasses; the spaces too can be had from here.

A config is complete when constructed and refuses contradictions by field name. The docstring under
a field is its help text. Everything survives JSON: `to_dict` / `from_dict`. Defaults are those of
the published agent (AMAGO, Grigsby et al., ICLR 2024; AMAGO-2, NeurIPS 2024). No tensor lives here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from amago_model.checked import Checked
from amago_model.errors import ConfigError
from amago_model.spaces import ActionSpace, ObsSpace, Role, Spaces

__all__ = [
    "Activation",
    "ActionSpace",
    "ActorConfig",
    "AgentConfig",
    "BetaConfig",
    "BinsConfig",
    "CriticConfig",
    "CustomConfig",
    "FeedForwardConfig",
    "GMMConfig",
    "GRUConfig",
    "LeakyFilterConfig",
    "LossConfig",
    "Norm",
    "ObsSpace",
    "ResidualActorConfig",
    "Role",
    "Spaces",
    "TimestepEncoderConfig",
    "TrajectoryEncoderConfig",
    "TransformerConfig",
]

Activation = Literal["leaky_relu", "relu", "gelu", "mish"]
Norm = Literal["none", "layer", "rms"]

_LAYERS, _WIDTH = 256, 65_536

# ---------------------------------------------------------------------------------------- encoders


@dataclass(frozen=True, kw_only=True)
class TimestepEncoderConfig(Checked):
    """One row (observation, previous action and reward) to one vector, by an MLP."""

    n_layers: int = 2
    """Hidden layers."""
    d_hidden: int = 512
    """Width of the hidden layers."""
    d_output: int = 256
    """Width of the vector it makes."""
    activation: Activation = "leaky_relu"
    """Activation after each hidden layer."""
    norm: Norm = "none"
    """Normalisation of each hidden layer, before the activation."""
    out_norm: Norm = "layer"
    """Normalisation of the output."""
    normalize_inputs: bool = True
    """Whiten each input feature by running statistics of the training data."""
    hide_previous: bool = False
    """Ablation: replace the previous action and reward by zeros (same parameter count)."""
    hide_reward: bool = False
    """Ablation: replace only the previous reward by zeros."""
    keys: tuple[str, ...] = ()
    """Observation keys to use; empty means every key with the role 'policy'."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(n_layers=_LAYERS, d_hidden=_WIDTH, d_output=_WIDTH)
        if self.hide_previous and self.hide_reward:
            raise ConfigError(
                "TimestepEncoderConfig.hide_reward: hide_previous already hides the reward; "
                "set only one of them"
            )


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(Checked):
    """The attention-free twin of the Transformer: no memory, same geometry."""

    d_model: int = 256
    """Width of the state vector."""
    d_ff: int | None = None
    """Hidden width of a block; none means 4 x d_model."""
    n_layers: int = 1
    """Residual blocks."""
    dropout: float = 0.0
    """Dropout probability."""
    activation: Activation = "leaky_relu"
    """Activation inside the blocks."""
    norm: Norm = "none"
    """Normalisation inside the blocks."""
    out_norm: Norm = "layer"
    """Normalisation of the output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(n_layers=_LAYERS, d_model=_WIDTH)
        if self.d_ff is not None:
            self.require_sizes(d_ff=4 * _WIDTH)
        self.require_fractions("dropout")


@dataclass(frozen=True, kw_only=True)
class GRUConfig(Checked):
    """A recurrent memory (torch's GRU)."""

    d_hidden: int = 256
    """Width of the recurrent state."""
    n_layers: int = 2
    """Stacked GRU layers."""
    d_output: int = 256
    """Width of the state vector."""
    norm: Norm = "layer"
    """Normalisation of the output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(n_layers=_LAYERS, d_hidden=_WIDTH, d_output=_WIDTH)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Checked):
    """A causal Transformer memory (sigma-reparametrised, NormFormer norms, head scaling)."""

    d_model: int = 256
    """Width of the state vector."""
    n_heads: int = 8
    """Attention heads; divides d_model."""
    d_ff: int = 1024
    """Hidden width of the feed-forward part of a layer."""
    n_layers: int = 3
    """Layers."""
    context: int = 256
    """Rows a row attends to in each layer, itself included: in training and in acting alike."""
    dropout_ff: float = 0.05
    """Dropout after the feed-forward part."""
    dropout_emb: float = 0.05
    """Dropout after the input embedding."""
    dropout_attn: float = 0.0
    """Dropout on attention weights."""
    dropout_qkv: float = 0.0
    """Dropout on queries, keys and values."""
    activation: Activation = "leaky_relu"
    """Activation of the feed-forward part."""
    norm: Norm = "layer"
    """Normalisation."""
    sigma_reparam: bool = True
    """Scale each weight matrix to a learned spectral norm (Zhai et al. 2023)."""
    normformer_norms: bool = True
    """Extra norms after attention and inside the feed-forward part (Shleifer et al. 2021)."""
    head_scaling: bool = True
    """A learned scale for each attention head (Shleifer et al. 2021)."""
    position: Literal["sinusoidal", "learnable", "rotary", "none"] = "sinusoidal"
    """How episode time enters: added to the input (sinusoidal, learnable) or by turning queries
    and keys (rotary)."""
    max_time: int = 0
    """position=learnable: rows in the table; episode times beyond share the last one."""
    qk_norm: Norm = "none"
    """Normalisation of each head's queries and keys before their product (Henry et al. 2020)."""
    n_sinks: int = 0
    """First rows of the episode (in training: of the window) that stay visible for ever, beside
    the last `context` ones (Xiao et al. 2023)."""
    sink_bias: float = 0.0
    """Added to the attention scores of the sinks."""
    logit_clip: float = 0.0
    """Limit attention scores to plus or minus this; 0 leaves them."""
    attention: Literal["sdpa", "math", "flex", "flash", "auto"] = "sdpa"
    """Back-end: torch's scaled_dot_product_attention, its plain twin, torch's flex_attention, the
    flash-attn package, or the best of them that can."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(
            n_layers=_LAYERS, d_model=_WIDTH, n_heads=_WIDTH, d_ff=4 * _WIDTH, context=1 << 20
        )
        self._check_attention()
        self.require_fractions("dropout_ff", "dropout_emb", "dropout_attn", "dropout_qkv")
        if self.d_model % self.n_heads or self.d_model % 2:
            raise ConfigError(
                f"TransformerConfig.n_heads: {self.n_heads} heads must divide an even "
                f"d_model={self.d_model}; choose another n_heads or d_model"
            )
        if self.position == "rotary" and self.d_model // self.n_heads % 2:
            raise ConfigError(
                f"TransformerConfig.n_heads: rotary positions need heads of an even width, not "
                f"{self.d_model // self.n_heads}; choose another n_heads or d_model"
            )

    def _check_attention(self) -> None:
        learnable = self.position == "learnable"
        self.require(
            "max_time",
            1 <= self.max_time <= 1 << 24 if learnable else self.max_time == 0,
            "the longest episode's steps" if learnable else "0 unless position='learnable'",
        )
        self.require("n_sinks", 0 <= self.n_sinks <= 1 << 16, "a number from 0 to 65536")
        self.require("sink_bias", math.isfinite(self.sink_bias), "a finite number")
        self.require("sink_bias", self.n_sinks > 0 or not self.sink_bias, "0 unless n_sinks is set")
        self.require("logit_clip", 0 <= self.logit_clip < math.inf, "a finite number, at least 0")
        # What no machine changes; the rest is found out where it runs (attention.obstacle).
        clipped = ("logit_clip", self.logit_clip > 0)
        for backend, (name, used) in (
            ("sdpa", clipped),
            ("flash", clipped),
            ("flash", ("n_sinks", self.n_sinks > 0)),
            ("flex", ("dropout_attn", self.dropout_attn > 0)),
        ):
            if used and self.attention == backend:
                raise ConfigError(
                    f"TransformerConfig.{name}: attention={backend!r} cannot do it; set attention "
                    "to 'math' or 'auto'"
                )


@dataclass(frozen=True, kw_only=True)
class TrajectoryEncoderConfig(Checked):
    """A sequence of row vectors to a sequence of state vectors: the agent's memory."""

    kind: Literal["identity", "feedforward", "gru", "transformer"] = "transformer"
    """Which encoder; only the settings of that one may differ from their defaults."""
    feedforward: FeedForwardConfig = field(default_factory=FeedForwardConfig)
    """Settings of kind=feedforward (no memory)."""
    gru: GRUConfig = field(default_factory=GRUConfig)
    """Settings of kind=gru."""
    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    """Settings of kind=transformer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, cls in (
            ("feedforward", FeedForwardConfig),
            ("gru", GRUConfig),
            ("transformer", TransformerConfig),
        ):
            if name != self.kind and getattr(self, name) != cls():
                raise ConfigError(
                    f"TrajectoryEncoderConfig.{name}: set, but kind={self.kind!r} would not use "
                    f"it; set kind={name!r} or leave {name} at its defaults"
                )


# ------------------------------------------------------------------------------------------- heads


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
        self.require_sizes(d_feature=_WIDTH, d_ff=4 * _WIDTH, n_blocks=_LAYERS)


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
    """Continuous: family of the distribution. gmm has no gradient: it needs online_weight 0."""
    beta: BetaConfig = field(default_factory=BetaConfig)
    """Settings of continuous=beta."""
    gmm: GMMConfig = field(default_factory=GMMConfig)
    """Settings of continuous=gmm."""
    prob_low: float = 0.001
    """Discrete: no action is less likely than this (before renormalising)."""
    prob_high: float = 0.99
    """Discrete: no action is more likely than this (before renormalising)."""
    std_low: float = math.exp(-5)
    """Continuous, tanh_gaussian: smallest standard deviation before tanh."""
    std_high: float = math.exp(2)
    """Continuous, tanh_gaussian: largest standard deviation before tanh."""
    log_prob_clip: float = 0.99
    """Continuous: data actions are clipped to plus or minus this before their log-probability."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(n_layers=_LAYERS, d_hidden=_WIDTH)
        self.require_fractions("dropout")
        self.require("prob_low", 0 <= self.prob_low < self.prob_high, "0 <= prob_low < prob_high")
        self.require("prob_high", self.prob_high <= 1, "at most 1")
        self.require("std_low", 0 < self.std_low < self.std_high, "0 < std_low < std_high")
        self.require("log_prob_clip", 0 < self.log_prob_clip < 1, "a number in (0, 1)")
        unused = ("n_layers", "d_hidden") if self.kind == "residual" else ("residual",)
        for name in unused:
            if getattr(self, name) != getattr(type(self), name, ResidualActorConfig()):
                raise ConfigError(
                    f"ActorConfig.{name}: set, but kind={self.kind!r} would not use it; set "
                    f"another kind or leave {name} at its default"
                )
        for name, default in (("beta", BetaConfig()), ("gmm", GMMConfig())):
            if name != self.continuous and getattr(self, name) != default:
                raise ConfigError(
                    f"ActorConfig.{name}: set, but continuous={self.continuous!r} would not use "
                    f"it; set continuous={name!r} or leave {name} at its defaults"
                )


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
    init_value: float | None = None
    """Return that fresh critics answer, roughly; none leaves it to chance (the middle)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("n_bins", 2 <= self.n_bins <= _WIDTH, f"a number from 2 to {_WIDTH}")
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
        self.require_sizes(n_layers=_LAYERS, d_hidden=_WIDTH, n_critics=1024)
        self.require_fractions("dropout")
        self.require("popart_beta", 0 < self.popart_beta < 1, "a number in (0, 1)")
        self.require("popart_init_nu", self.popart_init_nu > 0, "a positive number")
        if self.kind == "scalar" and self.bins != BinsConfig():
            raise ConfigError(
                "CriticConfig.bins: set, but kind='scalar' has no bins; set kind='twohot' or "
                "'hlgauss', or leave bins at its defaults"
            )
        if not 1 <= self.n_critics_target <= self.n_critics:
            raise ConfigError(
                f"CriticConfig.n_critics_target: {self.n_critics_target} of n_critics="
                f"{self.n_critics} cannot be drawn without replacement; lower it or raise n_critics"
            )


# ------------------------------------------------------------------------------------------ losses


@dataclass(frozen=True, kw_only=True)
class LeakyFilterConfig(Checked):
    """Weight of a data action by a bent line through its advantage."""

    threshold: float = 0.01
    """Advantage at which the line bends."""
    beta: float = 2.0
    """Advantage that raises the weight by 1 above the bend."""
    slope: float = 0.05
    """Slope below the bend, as a part of that above it."""
    at_zero: float = 0.01
    """Weight at an advantage of 0, before the step."""
    smallest: float = 1e-7
    """Smallest weight."""
    largest: float = 10.0
    """Largest weight, before the step."""
    add_step: bool = True
    """Add 1 above the bend, as the binary filter would."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("beta", self.beta > 0, "a positive number")
        self.require("slope", self.slope >= 0, "a number of at least 0")
        self.require("smallest", 0 <= self.smallest < self.largest, "0 <= smallest < largest")


@dataclass(frozen=True, kw_only=True)
class LossConfig(Checked):
    """The terms of the update: critic, filtered behaviour cloning, climbing the critic (DPG)."""

    gamma: float = 0.999
    """Discount of the policy that acts."""
    extra_gammas: tuple[float, ...] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995)
    """Further discounts learned in parallel, to shape the state vector; may be empty."""
    reward_multiplier: float = 10.0
    """Rewards are multiplied by this inside the losses (never in what the agent sees)."""
    n_step: int = 1
    """Rewards summed before the target bootstraps."""
    td_lambda: float | None = None
    """Instead of n_step: mix returns of all lengths, each step on weighing this much of the last.
    Later actions of the data are taken as they are, which biases values towards the data."""
    target_low: float | None = None
    """Targets are clipped to at least this, a return in the environment's units; none does not."""
    target_high: float | None = None
    """Targets are clipped to at most this, a return in the environment's units; none does not."""
    critic_weight: float = 10.0
    """Weight of the critic loss."""
    online_weight: float = 1.0
    """Weight of the term that climbs the critic (DPG); above 0, targets are ensemble minima."""
    offline_weight: float = 0.1
    """Weight of the (filtered) behaviour-cloning term."""
    filter: Literal["binary", "exp", "leaky_relu"] = "binary"
    """Weight of a data action by its advantage: 1 above the threshold, exp(beta x advantage), or a
    bent line (leaky_filter)."""
    filter_batch_norm: bool = False
    """First bring the advantages of a (micro-)batch to mean 0 and deviation 1, per discount."""
    leaky_filter: LeakyFilterConfig = field(default_factory=LeakyFilterConfig)
    """Settings of filter=leaky_relu."""
    filter_threshold: float = 0.0
    """binary: advantage above which an action is imitated."""
    filter_beta: float = 1.0
    """exp: factor on the advantage, which is in units of the target's standard deviation."""
    filter_max: float = 20.0
    """exp: largest weight."""
    fake_filter: bool = False
    """Imitate every action: behaviour cloning. With online_weight 0 there is no critic at all."""
    n_target_actions: int = 1
    """Continuous: policy samples that estimate the value of the next state."""
    n_policy_actions: int = 1
    """Continuous: policy samples in the advantage and in the DPG term."""
    filter_advantage: Literal["normalized", "raw"] = "normalized"
    """What the filter sees: advantages in deviations of the return, or (as published) of the
    critics' outputs as they are, whose scale drifts with PopArt or follows the rewards."""
    targets_before_step: bool = False
    """As published: the slow copies move before the optimiser's step, not after it."""
    use_target_actor: bool = True
    """Next actions come from the slowly moving copy of the actor."""
    tau: float = 0.003
    """How far the copies move towards the learned weights after each update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in (("gamma", (self.gamma,)), ("extra_gammas", self.extra_gammas)):
            self.require(name, all(0 <= g < 1 for g in values), "discounts in [0, 1)")
        self.require_sizes(n_step=1024, n_target_actions=1024, n_policy_actions=1024)
        for name in ("critic_weight", "online_weight", "offline_weight"):
            value = getattr(self, name)
            self.require(name, math.isfinite(value) and value >= 0, "a finite number, at least 0")
        self.require("tau", 0 < self.tau <= 1, "a number in (0, 1]")
        self.require("reward_multiplier", self.reward_multiplier > 0, "a positive number")
        self.require("filter_beta", self.filter_beta > 0, "a positive number")
        self.require("filter_max", self.filter_max > 0, "a positive number")
        self._check_targets_and_filter()
        if self.online_weight == 0 and self.offline_weight == 0:
            raise ConfigError(
                "LossConfig.offline_weight: it and online_weight are both 0, so nothing would "
                "train the actor; raise one of them"
            )
        if self.fake_filter and self.offline_weight == 0:
            raise ConfigError(
                "LossConfig.fake_filter: it changes the behaviour-cloning term, whose "
                "offline_weight is 0; raise offline_weight or unset fake_filter"
            )
        if self.trains_critic and self.critic_weight == 0:
            raise ConfigError(
                "LossConfig.critic_weight: 0 leaves the critic untrained while the actor follows "
                "it; raise it, or set fake_filter with online_weight=0 for behaviour cloning"
            )

    def _check_targets_and_filter(self) -> None:
        if self.td_lambda is not None:
            self.require("td_lambda", 0 <= self.td_lambda <= 1, "a number in [0, 1]")
            if self.n_step != 1:
                raise ConfigError(
                    f"LossConfig.td_lambda: set beside n_step={self.n_step}, but they are two ways "
                    "of doing the same; leave one of them at its default"
                )
        low, high = self.target_low, self.target_high
        self.require("target_low", low is None or math.isfinite(low), "a finite number")
        self.require("target_high", high is None or math.isfinite(high), "a finite number")
        if low is not None and high is not None and low >= high:
            raise ConfigError(f"LossConfig.target_low: {low} is not below target_high={high}")
        if self.filter != "leaky_relu" and self.leaky_filter != LeakyFilterConfig():
            raise ConfigError(
                f"LossConfig.leaky_filter: set, but filter={self.filter!r} would not use it; set "
                "filter='leaky_relu' or leave leaky_filter at its defaults"
            )
        if self.filter != "binary" and self.filter_threshold != 0:
            raise ConfigError(
                f"LossConfig.filter_threshold: set, but filter={self.filter!r} would not use it; "
                "set filter='binary' or leave it 0"
            )
        if self.filter != "exp" and (self.filter_beta != 1 or self.filter_max != 20):
            raise ConfigError(
                f"LossConfig.filter_beta: it or filter_max is set, but filter={self.filter!r} "
                "would not use them; set filter='exp' or leave them at their defaults"
            )
        if self.filter_batch_norm and (self.fake_filter or self.offline_weight == 0):
            raise ConfigError(
                "LossConfig.filter_batch_norm: set, but with fake_filter or offline_weight=0 no "
                "advantage is filtered; unset it"
            )

    @property
    def gammas(self) -> tuple[float, ...]:
        """All discounts; the last one acts."""
        return (*self.extra_gammas, self.gamma)

    @property
    def trains_critic(self) -> bool:
        """False for pure behaviour cloning, which builds no critic."""
        return not (self.fake_filter and self.online_weight == 0)


@dataclass(frozen=True, kw_only=True)
class CustomConfig(Checked):
    """Parts of your own instead of those built in, by the names they are registered under."""

    timestep_encoder: str = ""
    """Registered timestep encoder; empty takes the one built in, here and below."""
    trajectory_encoder: str = ""
    """Registered trajectory encoder."""
    actor: str = ""
    """Registered actor."""
    critic: str = ""
    """Registered critic ensemble."""
    filter: str = ""
    """Registered filter of advantages."""
    agent: str = ""
    """Registered agent."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Checked):
    """The whole agent. Saved in every policy file and rebuilt from it."""

    algorithm: Literal["agent", "multitask"] = "agent"
    """How values of the policy's discrete actions are had: agent takes the mean over all actions,
    multitask samples them (see agent.py; its usual companions are in presets.py)."""

    timestep_encoder: TimestepEncoderConfig = field(default_factory=TimestepEncoderConfig)
    """One row to one vector."""
    trajectory_encoder: TrajectoryEncoderConfig = field(default_factory=TrajectoryEncoderConfig)
    """Row vectors to state vectors: the memory."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """State vector to action distribution."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """State vector and action to value."""
    losses: LossConfig = field(default_factory=LossConfig)
    """What is minimised."""
    custom: CustomConfig = field(default_factory=CustomConfig)
    """Parts of your own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unfiltered = self.losses.fake_filter or self.losses.offline_weight == 0
        if self.custom.filter and (unfiltered or self.losses.filter != "binary"):
            raise ConfigError(
                f"CustomConfig.filter: {self.custom.filter!r} would not be used, or another filter "
                "beside it; leave losses.filter and fake_filter at their defaults and "
                "offline_weight above 0, or unset it"
            )
        if self.custom.critic and not self.losses.trains_critic:
            raise ConfigError(
                f"CustomConfig.critic: {self.custom.critic!r}, but behaviour cloning builds no "
                "critic; unset it"
            )
        if self.actor.continuous == "gmm" and self.losses.online_weight > 0:
            raise ConfigError(
                "ActorConfig.continuous: samples of 'gmm' have no gradient, so nothing can climb "
                f"the critic with online_weight={self.losses.online_weight}; set "
                "losses.online_weight=0 or another distribution"
            )
