"""Settings of the timestep encoder: observations, previous action and reward to one vector.

Which observation is an image, a token array, an array of goals or plain numbers is told by its
space, or by the keys named here: see encoders/modalities.py.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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
    """Share of the windows whose frames are shifted."""
    shift: int = Field(4, ge=1, le=1024)
    """Largest shift, in pixels; what comes in from outside repeats the edge."""


class _ImageConfig(Settings):
    """Images: each key has a convolutional network, a linear layer and an activation of its own."""

    keys: tuple[str, ...] = ()
    """Observations to take as images, beside those recognised: bytes, height x width or with a
    channel axis that is shorter than both, at least 5 pixels high and wide."""
    channels: Literal["auto", "first", "last"] = "auto"
    """Where the channel axis is; auto takes the one that is shorter than height and width."""
    d_output: Width = 256
    """Features made of each image."""
    activation: Activation = "leaky_relu"
    """Activation of the convolutions and of the features."""
    norm: Norm = "none"
    """Normalisation of the features, before the activation."""
    augment: AugmentConfig | None = None
    """Shift frames at random in training, never in acting."""

    @model_validator(mode="after")
    def _norm_fits(self) -> Self:
        check_norm(self, "norm", d_output=self.d_output)
        return self


class PlainImageConfig(_ImageConfig):
    """Plain convolutions."""

    kind: Literal["auto", "nature", "drq", "gridworld"] = "auto"
    """nature: strides 4, 2, 1 (Mnih et al. 2015), for 36 pixels and more; drq: strides 2, 1, 1, 1
    (Yarats et al. 2021), 15 and more; gridworld: 2 x 2 kernels, 4 and more; auto: nature from 64
    pixels, drq from 15, else gridworld."""


class ImpalaImageConfig(_ImageConfig):
    """Residual blocks (Espeholt et al. 2018)."""

    kind: Literal["impala"] = "impala"
    """impala: residual blocks (Espeholt et al. 2018), any size."""
    block_depths: tuple[Width, ...] = Field((16, 32, 32), min_length=1, max_length=MAX_LAYERS)
    """Channels of each block; each halves height and width."""
    group_norm: bool = True
    """Normalise after each residual unit, in four groups of channels."""

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.group_norm and any(depth % 4 for depth in self.block_depths):
            raise ValueError(
                f"block_depths: group_norm makes four groups of channels, which do not fit "
                f"{self.block_depths}; choose multiples of 4 or set group_norm=False"
            )
        return self


ImageConfig = Annotated[PlainImageConfig | ImpalaImageConfig, Field(discriminator="kind")]
"""Networks of images, by `kind`."""


class TokenConfig(Settings):
    """Token numbers: one category, or a sequence of them such as an instruction.

    An embedding for each number, for sequences a plain recurrent network over those present, a
    linear layer and a layer norm.
    """

    keys: tuple[str, ...] = ()
    """Observations to take as tokens, beside those recognised: categories whose one-hots would
    take more than 128 numbers. Arrays of rank 2 and more are read row by row."""
    vocabulary: int = Field(256, ge=1, le=MAX_VOCABULARY)
    """Token numbers of arrays of integers, whose space does not say how many there are. Larger
    numbers share one embedding, "unknown"."""
    lowest: int = Field(0, ge=-(1 << 62), le=1 << 62)
    """The first token number of these arrays. Smaller numbers are read as nothing."""
    padding: int | None = None
    """A number that stands for nothing, wherever in a sequence it is."""
    d_embedding: Width = 16
    """Width of a token's embedding."""
    d_hidden: Width = 64
    """Width of the recurrent network's state."""
    d_output: Width = 32
    """Features made of each array."""


class GoalConfig(Settings):
    """Lists of goals, [goals, numbers of a goal]: two linear layers and a layer norm.

    Goals of whole numbers can be read as tokens instead: name them in TokenConfig.keys.
    """

    keys: tuple[str, ...] = ()
    """Observations to take as lists of goals; none is recognised by itself."""
    d_output: Width = 32
    """Features made of each list."""


class InputNormConfig(Settings):
    """Whitening of plain numbers by running statistics of the training data."""

    beta: StepSize = 1e-4
    """Step size of the statistics."""
    init_nu: Positive = 1.0
    """Variance that the statistics start from."""
    previous: bool = True
    """Whiten the previous action and reward, too; else they are taken as they are."""


class TimestepEncoderConfig(Settings):
    """One timestep (observations, previous action and reward) to one vector.

    Plain numbers, previous action and reward are whitened together; images, tokens and goals become
    features by networks of their own; an MLP makes one vector of them all.
    """

    kind: Literal["any"] = "any"
    """any: observations of all kinds, by an MLP."""
    n_layers: Layers = 2
    """Hidden layers."""
    d_hidden: Width = 512
    """Width of the hidden layers."""
    d_output: Width = 256
    """Width of the vector it makes."""
    auto_scale: bool = False
    """Widen d_hidden and d_output to the width of the MLP's input, where that is larger."""
    activation: Activation = "leaky_relu"
    """Activation after each hidden layer."""
    norm: Norm = "none"
    """Normalisation of each hidden layer, before the activation."""
    out_norm: Norm = "layer"
    """Normalisation of the output."""
    input_norm: InputNormConfig | None = Field(default_factory=InputNormConfig)
    """Whiten each plain number by running statistics of the training data."""
    show_reset: bool = False
    """One more number, not whitened: 1 in an episode's first row, else 0. It tells a beginning from
    a previous action and reward that happen to be zeros."""
    hide_previous: bool = False
    """Ablation: replace the previous action and reward by zeros (same parameter count)."""
    hide_reward: bool = False
    """Ablation: replace only the previous reward by zeros."""
    hide_keys: tuple[str, ...] = ()
    """Ablation: replace what is made of these observations by zeros (same parameter count)."""
    keys: tuple[str, ...] = ()
    """Observation keys to use; empty means every key with the role 'policy'."""
    vector_keys: tuple[str, ...] = ()
    """Observations to take as plain numbers (categories: as one-hots), whatever they look like."""
    raw_numbers: bool = False
    """As published: among plain numbers, categories and bytes are the numbers that they are, not
    one-hots and shares of 255; and no category is embedded unless named in tokens.keys."""
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
                        f"{name}: {key!r} is in {kind_of[key]} already; an observation is of one "
                        "kind"
                    )
        return self


class ImageTimestepEncoderConfig(TimestepEncoderConfig):
    """As published, for one image and nothing else; for other observations the same as kind any.

    Symlog of the previous action and reward, and a small layer of their own, beside the image's
    features; then one layer in place of the MLP, and nothing is whitened.
    """

    kind: Literal["image"] = "image"  # type: ignore[assignment]
    """image: as published, for one image and nothing else; for other observations the same as any,
    with a warning."""
    previous_features: Width = 12
    """Features made of the previous action and reward."""
