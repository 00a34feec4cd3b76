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
    "CriticConfig",
    "FeedForwardConfig",
    "GRUConfig",
    "LossConfig",
    "Norm",
    "ObsSpace",
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
    attention: Literal["sdpa", "math"] = "sdpa"
    """Kernel: torch's scaled_dot_product_attention, or its plain twin for checking."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(
            n_layers=_LAYERS, d_model=_WIDTH, n_heads=_WIDTH, d_ff=4 * _WIDTH, context=1 << 20
        )
        self.require_fractions("dropout_ff", "dropout_emb", "dropout_attn", "dropout_qkv")
        if self.d_model % self.n_heads or self.d_model % 2:
            raise ConfigError(
                f"TransformerConfig.n_heads: {self.n_heads} heads must divide an even "
                f"d_model={self.d_model}; choose another n_heads or d_model"
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
class ActorConfig(Checked):
    """State vector to action distribution, one for each discount."""

    n_layers: int = 2
    """Hidden layers."""
    d_hidden: int = 256
    """Width of the hidden layers."""
    activation: Activation = "leaky_relu"
    """Activation after each hidden layer."""
    dropout: float = 0.0
    """Dropout probability after each hidden layer."""
    prob_low: float = 0.001
    """Discrete: no action is less likely than this (before renormalising)."""
    prob_high: float = 0.99
    """Discrete: no action is more likely than this (before renormalising)."""
    std_low: float = math.exp(-5)
    """Continuous: smallest standard deviation before tanh."""
    std_high: float = math.exp(2)
    """Continuous: largest standard deviation before tanh."""
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


@dataclass(frozen=True, kw_only=True)
class CriticConfig(Checked):
    """An ensemble of action values, one for each discount."""

    n_critics: int = 4
    """Critics in the ensemble."""
    n_critics_target: int = 2
    """Critics drawn (without replacement) for each target value."""
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
        if not 1 <= self.n_critics_target <= self.n_critics:
            raise ConfigError(
                f"CriticConfig.n_critics_target: {self.n_critics_target} of n_critics="
                f"{self.n_critics} cannot be drawn without replacement; lower it or raise n_critics"
            )


# ------------------------------------------------------------------------------------------ losses


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
    critic_weight: float = 10.0
    """Weight of the critic loss."""
    online_weight: float = 1.0
    """Weight of the term that climbs the critic (DPG); above 0, targets are ensemble minima."""
    offline_weight: float = 0.1
    """Weight of the (filtered) behaviour-cloning term."""
    filter: Literal["binary", "exp"] = "binary"
    """Weight of a data action by its advantage: 1 above the threshold, or exp(beta x advantage)."""
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

    @property
    def gammas(self) -> tuple[float, ...]:
        """All discounts; the last one acts."""
        return (*self.extra_gammas, self.gamma)

    @property
    def trains_critic(self) -> bool:
        """False for pure behaviour cloning, which builds no critic."""
        return not (self.fake_filter and self.online_weight == 0)


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Checked):
    """The whole agent. Saved in every policy file and rebuilt from it."""

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
