"""Settings of the timestep encoder: observations, previous action and reward to one vector.

The space of an observation decides whether it is an image, tokens or plain numbers; settings can
override this by key, and goals are always named by key. See encoders/modalities.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from amago_model.config.base import MAX_LAYERS, Settings
from amago_model.config.names import (
    Activation,
    Layers,
    Norm,
    Positive,
    StepSize,
    Width,
    check_norm,
)

MAX_VOCABULARY = 1 << 20


class AugmentConfig(Settings):
    """Random shifts of images in training (DrQ-v2's augmentation; Yarats et al. 2022)."""

    share: float = Field(0.75, gt=0, le=1)
    """Fraction of the windows whose frames are shifted."""
    shift: int = Field(4, ge=1, le=1024)
    """Maximum shift in pixels; the border is padded by repeating the edge."""


class _ImageConfig(Settings):
    """Images: a separate convolutional network, linear layer and activation for each key."""

    keys: tuple[str, ...] = ()
    """Observations to treat as images, in addition to those detected: uint8 arrays, height x width
    or with a channel axis shorter than both, at least 5 pixels high and wide."""
    channels: Literal["auto", "first", "last"] = "auto"
    """Position of the channel axis; auto: the axis that is shorter than height and width."""
    d_output: Width = 256
    """Number of features of each image."""
    activation: Activation = "leaky_relu"
    """Activation of the convolutions and of the features."""
    norm: Norm = "none"
    """Normalisation of the features, before the activation."""
    augment: AugmentConfig | None = None
    """Random shifts of the frames in training; none: no augmentation. Acting never shifts."""

    @model_validator(mode="after")
    def _norm_fits(self) -> Self:
        check_norm(self, "norm", d_output=self.d_output)
        return self


class PlainImageConfig(_ImageConfig):
    """A plain convolutional network."""

    kind: Literal["auto", "nature", "drq", "gridworld"] = "auto"
    """nature: strides 4, 2, 1 (Mnih et al. 2015), at least 36 pixels; drq: strides 2, 1, 1, 1
    (Yarats et al. 2021), at least 15 pixels; gridworld: 2 x 2 kernels, at least 4 pixels; auto:
    nature from 64 pixels, drq from 15, else gridworld."""


class ImpalaImageConfig(_ImageConfig):
    """Residual blocks (Espeholt et al. 2018)."""

    kind: Literal["impala"] = "impala"
    """impala: residual blocks (Espeholt et al. 2018), any size."""
    block_depths: tuple[Width, ...] = Field((16, 32, 32), min_length=1, max_length=MAX_LAYERS)
    """Channels of each block; each block halves height and width."""
    group_norm: bool = True
    """Group normalisation after each residual unit, with four groups."""

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.group_norm and any(depth % 4 for depth in self.block_depths):
            raise ValueError(
                "block_depths: group_norm has four groups, so each depth must be a multiple of 4, "
                f"got {self.block_depths}; choose multiples of 4 or set group_norm=False"
            )
        return self


ImageConfig = Annotated[PlainImageConfig | ImpalaImageConfig, Field(discriminator="kind")]
"""Image encoders, by `kind`."""


class TokenConfig(Settings):
    """Token ids: a single category, or a sequence such as an instruction.

    An embedding, for sequences an RNN over the tokens present, a linear layer and a layer norm.
    """

    keys: tuple[str, ...] = ()
    """Observations to treat as tokens, in addition to those detected: texts, and categories whose
    one-hot encoding is wider than 128. Arrays of rank 2 and more are flattened in row-major
    order."""
    vocabulary: int = Field(256, ge=1, le=MAX_VOCABULARY)
    """Number of token ids, for integer arrays whose space does not define it. Larger ids share one
    embedding, "unknown"."""
    lowest: int = Field(0, ge=-(1 << 62), le=1 << 62)
    """The smallest token id of these arrays. Smaller numbers are treated as padding."""
    padding: int | None = None
    """Token id that is treated as padding at any position of a sequence; of texts, always 0."""
    d_embedding: Width = 16
    """Width of a token's embedding."""
    d_hidden: Width = 64
    """Width of the RNN's hidden state."""
    d_output: Width = 32
    """Number of features of each array."""


class GoalConfig(Settings):
    """Lists of goals, [goals, numbers per goal]: two linear layers and a layer norm.

    Goals of integers can be encoded as tokens instead: name them in TokenConfig.keys.
    """

    keys: tuple[str, ...] = ()
    """Observations to treat as lists of goals; none is detected automatically."""
    d_output: Width = 32
    """Number of features of each list."""


class InputNormConfig(Settings):
    """Normalisation of plain numbers by running statistics of the training data."""

    beta: StepSize = 1e-4
    """Step size of the running statistics."""
    init_nu: float = Field(1.0, ge=0)
    """Initial variance, beside an initial mean of 0: they count as one batch. 0: the statistics
    begin with the first batch."""
    min_std: Positive = 0.01
    """A feature with a standard deviation of at most this is centred but not scaled."""
    previous: bool = True
    """Also normalise the previous action and reward; false: they stay unscaled."""


class TimestepEncoderConfig(Settings):
    """Maps one timestep (observations, previous action and reward) to one vector.

    Plain numbers, previous action and reward are normalised together; images, tokens and goals have
    separate encoders; an MLP combines all features into one vector.
    """

    kind: Literal["any"] = "any"
    """any: an MLP over observations of all kinds."""
    n_layers: Layers = 2
    """Number of hidden layers."""
    d_hidden: Width = 512
    """Width of the hidden layers."""
    d_output: Width = 256
    """Width of the timestep vector."""
    auto_scale: bool = False
    """Widen d_hidden and d_output to the width of the MLP's input if that is larger."""
    activation: Activation = "leaky_relu"
    """Activation after each hidden layer."""
    norm: Norm = "none"
    """Normalisation of each hidden layer, before the activation."""
    out_norm: Norm = "layer"
    """Normalisation of the output."""
    input_norm: InputNormConfig | None = Field(default_factory=InputNormConfig)
    """Normalise each plain number by running statistics of the training data; none: do not."""
    symlog: bool = False
    """Compress observed numbers to sign(x) ln(1 + |x|) before all else (DreamerV3), so that rare
    extreme values do not hide the usual ones. Not categories, nor uint8 values."""
    differences: bool = False
    """Add the difference of each observed number to the timestep before, normalised by running
    statistics of its own: a velocity, where only positions are observed. 0 in the first timestep
    of an episode or window."""
    show_reset: bool = False
    """Add a reset flag, not normalised: 1 at the first timestep of an episode, else 0. It
    distinguishes the start of an episode from a zero previous action and reward."""
    hide_previous: bool = False
    """Ablation: replace the previous action and reward by zeros (same parameter count)."""
    hide_reward: bool = False
    """Ablation: replace only the previous reward by zeros."""
    hide_keys: tuple[str, ...] = ()
    """Ablation: replace the features of these observations by zeros (same parameter count)."""
    keys: tuple[str, ...] = ()
    """Observation keys to use; empty: every key with the role 'policy'."""
    vector_keys: tuple[str, ...] = ()
    """Observations to treat as plain numbers (categories as one-hots), whatever their space is."""
    raw_numbers: bool = False
    """Published behaviour: categories and uint8 values are numbers, not one-hots and fractions
    of 255, and categories are embedded only if named in tokens.keys."""
    images: ImageConfig = Field(default_factory=PlainImageConfig)
    """Settings of images."""
    tokens: TokenConfig = Field(default_factory=TokenConfig)
    """Settings of token arrays."""
    goals: GoalConfig = Field(default_factory=GoalConfig)
    """Settings of lists of goals."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_norm(self, "norm", d_hidden=self.d_hidden)
        check_norm(self, "out_norm", d_output=self.d_output)
        kinds = {
            "images.keys": self.images.keys,
            "tokens.keys": self.tokens.keys,
            "goals.keys": self.goals.keys,
            "vector_keys": self.vector_keys,
        }
        kind_of: dict[str, str] = {}
        for name, keys in kinds.items():
            for key in keys:
                if kind_of.setdefault(key, name) != name:
                    raise ValueError(
                        f"{name}: {key!r} is in {kind_of[key]} already; an observation has only "
                        "one kind, so remove it from one of them"
                    )
        return self


class ImageTimestepEncoderConfig(TimestepEncoderConfig):
    """The published encoder for a single image; other observations get the encoder of kind any.

    The symlog of the previous action and reward goes through a small linear layer and is
    concatenated with the image's features. One linear layer replaces the MLP. Nothing is
    normalised.
    """

    kind: Literal["image"] = "image"  # type: ignore[assignment]
    """image: the published encoder for a single image; other observations are encoded as by kind
    any, with a warning."""
    previous_features: Width = 12
    """Number of features of the previous action and reward."""
