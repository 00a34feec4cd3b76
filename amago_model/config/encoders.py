"""Settings of the memory over rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from amago_model.checked import Checked, of_other_choices, refuse
from amago_model.config.names import MAX_LAYERS, MAX_WIDTH, Activation, Norm, check_norm
from amago_model.errors import ConfigError


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
        self.require_sizes(n_layers=MAX_LAYERS, d_model=MAX_WIDTH)
        if self.d_ff is not None:
            self.require_sizes(d_ff=4 * MAX_WIDTH)
        self.require_fractions("dropout")
        check_norm(self, "norm", d_model=self.d_model, d_ff=self.d_ff or 4 * self.d_model)
        check_norm(self, "out_norm", d_model=self.d_model)


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
        self.require_sizes(n_layers=MAX_LAYERS, d_hidden=MAX_WIDTH, d_output=MAX_WIDTH)
        check_norm(self, "norm", d_output=self.d_output)


@dataclass(frozen=True, kw_only=True)
class MambaConfig(Checked):
    """A selective state-space memory: constant time per step (Gu & Dao 2023)."""

    d_model: int = 256
    """Width of the state vector."""
    d_state: int = 16
    """Numbers of recurrent state for each channel."""
    d_conv: int = 4
    """Rows that the convolution before the recurrence sees, the row itself included."""
    expand: int = 2
    """Channels inside a layer, as a multiple of d_model."""
    n_layers: int = 3
    """Layers."""
    norm: Norm = "layer"
    """Normalisation before each layer and of the output."""
    scan: Literal["auto", "torch", "mamba_ssm"] = "auto"
    """Who computes the recurrence of whole windows: torch, the mamba-ssm package, or the package
    where it is able and torch elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(
            n_layers=MAX_LAYERS, d_model=MAX_WIDTH, d_state=256, d_conv=64, expand=64
        )
        check_norm(self, "norm", d_model=self.d_model)


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
            n_layers=MAX_LAYERS,
            d_model=MAX_WIDTH,
            n_heads=MAX_WIDTH,
            d_ff=4 * MAX_WIDTH,
            context=1 << 20,
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
        inner = {"d_ff": self.d_ff} if self.normformer_norms else {}
        check_norm(self, "norm", d_model=self.d_model, **inner)
        head = {"the width of a head, d_model / n_heads": self.d_model // self.n_heads}
        check_norm(self, "qk_norm", **head)

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

    kind: Literal["identity", "feedforward", "gru", "mamba", "transformer"] = "transformer"
    """Which encoder; only the settings of that one may differ from their defaults."""
    feedforward: FeedForwardConfig = field(default_factory=FeedForwardConfig)
    """Settings of kind=feedforward (no memory)."""
    gru: GRUConfig = field(default_factory=GRUConfig)
    """Settings of kind=gru."""
    mamba: MambaConfig = field(default_factory=MambaConfig)
    """Settings of kind=mamba."""
    transformer: TransformerConfig = field(default_factory=TransformerConfig)
    """Settings of kind=transformer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = ("feedforward", "gru", "mamba", "transformer")
        refuse(of_other_choices(self, "kind", {kind: (kind,) for kind in kinds}))
