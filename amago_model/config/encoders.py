"""Settings of the trajectory encoder, the agent's memory: timestep vectors to state vectors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from amago_model.config.base import Settings
from amago_model.config.names import (
    Activation,
    Dropout,
    FeedForwardWidth,
    Layers,
    Norm,
    Width,
    check_norm,
)


class IdentityConfig(Settings):
    """No memory: the timestep vector is the state vector."""

    kind: Literal["identity"] = "identity"
    """identity: no memory, the timestep vector is the state."""


class FeedForwardConfig(Settings):
    """Residual feed-forward blocks on each timestep: the Transformer without attention."""

    kind: Literal["feed_forward"] = "feed_forward"
    """feed_forward: residual blocks, no memory."""
    d_model: Width = 256
    """Width of the state vector."""
    d_ff: FeedForwardWidth | None = None
    """Hidden width of a block; none: 4 x d_model."""
    n_layers: Layers = 1
    """Number of blocks."""
    dropout: Dropout = 0.0
    """Dropout probability."""
    activation: Activation = "leaky_relu"
    """Activation inside the blocks."""
    norm: Norm = "none"
    """Normalisation inside the blocks."""
    out_norm: Norm = "layer"
    """Normalisation of the output."""

    @model_validator(mode="after")
    def _norms_fit(self) -> Self:
        check_norm(self, "norm", d_model=self.d_model, d_ff=self.d_ff or 4 * self.d_model)
        check_norm(self, "out_norm", d_model=self.d_model)
        return self


class GRUConfig(Settings):
    """A recurrent memory (torch.nn.GRU)."""

    kind: Literal["gru"] = "gru"
    """gru: recurrent."""
    d_hidden: Width = 256
    """Width of the recurrent state."""
    n_layers: Layers = 2
    """Number of layers."""
    d_output: Width = 256
    """Width of the state vector."""
    norm: Norm = "layer"
    """Normalisation of the output."""

    @model_validator(mode="after")
    def _norm_fits(self) -> Self:
        check_norm(self, "norm", d_output=self.d_output)
        return self


class MambaConfig(Settings):
    """A selective state-space memory: constant time per step (Gu & Dao 2023)."""

    kind: Literal["mamba"] = "mamba"
    """mamba: selective state space."""
    d_model: Width = 256
    """Width of the state vector."""
    d_state: int = Field(16, ge=1, le=256)
    """Size of the recurrent state of each channel."""
    d_conv: int = Field(4, ge=1, le=64)
    """Kernel size, in timesteps, of the causal convolution before the recurrence."""
    expand: int = Field(2, ge=1, le=64)
    """Channels inside a layer, as a multiple of d_model."""
    n_layers: Layers = 3
    """Number of layers."""
    norm: Norm = "layer"
    """Normalisation before each layer and of the output."""
    scan: Literal["auto", "torch", "mamba_ssm"] = "auto"
    """Implementation of the recurrence over windows: torch, the mamba-ssm package, or auto: the
    package where it can run, else torch."""

    @model_validator(mode="after")
    def _norm_fits(self) -> Self:
        check_norm(self, "norm", d_model=self.d_model)
        return self


class PositionConfig(Settings):
    """Fixed position encodings."""

    kind: Literal["sinusoidal", "rotary", "none"] = "sinusoidal"
    """Encoding of the episode time: sinusoidal: added to the input; rotary: rotates queries and
    keys; none: no encoding."""


class LearnablePositionConfig(Settings):
    """Learned position embeddings."""

    kind: Literal["learnable"] = "learnable"
    """learnable: a learned embedding of the episode time, added to the input."""
    max_time: int = Field(ge=1, le=1 << 24)
    """Number of embeddings: at least the steps of the longest episode; later steps share the last
    embedding."""


class TransformerConfig(Settings):
    """A causal Transformer memory (sigma reparametrisation, NormFormer norms, head scaling)."""

    kind: Literal["transformer"] = "transformer"
    """transformer: causal attention over the last `context` timesteps."""
    d_model: Width = 256
    """Width of the state vector."""
    n_heads: Width = 8
    """Attention heads; divides d_model."""
    d_ff: FeedForwardWidth = 1024
    """Hidden width of the feed-forward block of a layer."""
    n_layers: Layers = 3
    """Number of layers."""
    context: int = Field(256, ge=1, le=1 << 20)
    """Number of timesteps that a timestep attends to in each layer, including itself; the same in
    training and acting."""
    dropout_ff: Dropout = 0.05
    """Dropout after the feed-forward block."""
    dropout_emb: Dropout = 0.05
    """Dropout after the input embedding."""
    dropout_attn: Dropout = 0.0
    """Dropout on attention weights."""
    dropout_qkv: Dropout = 0.0
    """Dropout on queries, keys and values."""
    activation: Activation = "leaky_relu"
    """Activation of the feed-forward block."""
    norm: Norm = "layer"
    """Normalisation."""
    sigma_reparam: bool = True
    """Scale each weight matrix to a learned spectral norm (Zhai et al. 2023)."""
    normformer_norms: bool = True
    """Extra norms after attention and inside the feed-forward block (Shleifer et al. 2021)."""
    head_scaling: bool = True
    """A learned scale for each attention head (Shleifer et al. 2021)."""
    position: Annotated[PositionConfig | LearnablePositionConfig, Field(discriminator="kind")] = (
        Field(default_factory=PositionConfig)
    )
    """Position encoding of the episode time."""
    qk_norm: Norm = "none"
    """Normalisation of each head's queries and keys before their product (Henry et al. 2020)."""
    n_sinks: int = Field(0, ge=0, le=1 << 16)
    """Attention sinks: the first timesteps of the episode (in training: of the window) stay visible
    in addition to the last `context` timesteps (Xiao et al. 2023)."""
    sink_bias: float = 0.0
    """Added to the attention scores of the sinks."""
    logit_clip: float = Field(0.0, ge=0)
    """Clip attention scores to plus or minus this value; 0: no clipping."""
    attention: Literal["sdpa", "math", "flex", "flash", "auto"] = "sdpa"
    """Back-end: sdpa: torch's scaled_dot_product_attention; math: a plain implementation; flex:
    torch's flex_attention; flash: the flash-attn package; auto: the fastest one that supports these
    settings on this machine."""

    @model_validator(mode="after")
    def _geometry(self) -> Self:
        if self.d_model % self.n_heads or self.d_model % 2:
            raise ValueError(
                f"n_heads: expected an even d_model that n_heads divides, got "
                f"n_heads={self.n_heads} and d_model={self.d_model}; change one of them"
            )
        if self.position.kind == "rotary" and self.d_model // self.n_heads % 2:
            raise ValueError(
                "n_heads: rotary positions need an even head width (d_model / n_heads), got "
                f"{self.d_model // self.n_heads}; choose another n_heads or d_model"
            )
        inner = {"d_ff": self.d_ff} if self.normformer_norms else {}
        check_norm(self, "norm", d_model=self.d_model, **inner)
        head = {"the width of a head, d_model / n_heads": self.d_model // self.n_heads}
        check_norm(self, "qk_norm", **head)
        return self

    @model_validator(mode="after")
    def _backend(self) -> Self:
        if self.sink_bias and not self.n_sinks:
            raise ValueError("sink_bias: has no effect without sinks; set n_sinks, or sink_bias=0")
        # These limits hold on every machine; attention.obstacle checks the others at run time.
        clipped = ("logit_clip", self.logit_clip > 0)
        for backend, (name, used) in (
            ("sdpa", clipped),
            ("flash", clipped),
            ("flash", ("n_sinks", self.n_sinks > 0)),
            ("flex", ("dropout_attn", self.dropout_attn > 0)),
        ):
            if used and self.attention == backend:
                raise ValueError(
                    f"{name}: attention={backend!r} does not support it; set attention to 'math' "
                    "or 'auto'"
                )
        return self


TrajectoryEncoderConfig = Annotated[
    IdentityConfig | FeedForwardConfig | GRUConfig | MambaConfig | TransformerConfig,
    Field(discriminator="kind"),
]
"""Maps a sequence of timestep vectors to a sequence of state vectors, by `kind`."""
