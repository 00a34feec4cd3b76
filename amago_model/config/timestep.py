"""Settings of the row encoder: observations of any kind, previous action and reward to one vector.

Which observation is an image, a token array, an array of goals or plain numbers is told by its
space, or by the keys named here: see encoders/modalities.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from amago_model.checked import Checked, Unused, either_or, of_other_choices, refuse, unused
from amago_model.config.names import MAX_LAYERS, MAX_WIDTH, Activation, Norm, check_norm
from amago_model.errors import ConfigError

MAX_VOCABULARY = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Checked):
    """Images: each key has a convolutional network, a linear layer and an activation of its own."""

    keys: tuple[str, ...] = ()
    """Observations to take as images, beside those recognised: bytes, height x width or with a
    channel axis that is shorter than both, at least 5 pixels high and wide."""
    kind: Literal["auto", "nature", "drq", "gridworld", "impala"] = "auto"
    """nature: strides 4, 2, 1 (Mnih et al. 2015), for 36 pixels and more; drq: strides 2, 1, 1, 1
    (Yarats et al. 2021), 15 and more; gridworld: 2 x 2 kernels, 4 and more; impala: residual
    blocks (Espeholt et al. 2018), any size; auto: nature from 64 pixels, drq from 15, else
    gridworld."""
    channels: Literal["auto", "first", "last"] = "auto"
    """Where the channel axis is; auto takes the one that is shorter than height and width."""
    d_output: int = 256
    """Features made of each image."""
    activation: Activation = "leaky_relu"
    """Activation of the convolutions and of the features."""
    norm: Norm = "none"
    """Normalisation of the features, before the activation."""
    block_depths: tuple[int, ...] = (16, 32, 32)
    """kind=impala: channels of each block; each halves height and width."""
    group_norm: bool = True
    """kind=impala: normalise after each residual unit, in four groups of channels."""
    augment: float = 0.0
    """Share of the windows whose frames are shifted at random in training (DrQ-v2's augmentation;
    published: 0.75). Never in acting."""
    augment_exact: bool = False
    """As published: the first ceil(B (1 - augment)) of a batch's B windows are left alone, and all
    the others are shifted, instead of each with that probability. What happens to a window then
    depends on the others: not with optimizer.accumulate above 1, nor on several processes."""
    augment_shift: int = 4
    """Largest shift, in pixels; what comes in from outside repeats the edge."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(d_output=MAX_WIDTH, augment_shift=1024)
        check_norm(self, "norm", d_output=self.d_output)
        self.require("augment", 0 <= self.augment <= 1, "a share from 0 to 1")
        if not self.augment:
            why = "augment=0 shifts nothing"
            shifts = (self, ["augment_exact", "augment_shift"])
            refuse(unused(why, shifts, instead="set augment or "))
        self._check_impala()

    def _check_impala(self) -> None:
        impala = self.kind == "impala"
        self.require(
            "block_depths",
            0 < len(self.block_depths) <= MAX_LAYERS
            and all(1 <= depth <= MAX_WIDTH for depth in self.block_depths),
            f"1 to {MAX_LAYERS} numbers of channels from 1 to {MAX_WIDTH}",
        )
        refuse(of_other_choices(self, "kind", {"impala": ("block_depths", "group_norm")}))
        if impala and self.group_norm and any(depth % 4 for depth in self.block_depths):
            raise ConfigError(
                f"ImageConfig.block_depths: group_norm makes four groups of channels, which do not "
                f"fit {self.block_depths}; choose multiples of 4 or set group_norm=False"
            )


@dataclass(frozen=True, kw_only=True)
class TokenConfig(Checked):
    """Token numbers: one category, or a sequence of them such as an instruction.

    An embedding for each number, for sequences a plain recurrent network over those present, a
    linear layer and a layer norm.
    """

    keys: tuple[str, ...] = ()
    """Observations to take as tokens, beside those recognised: categories whose one-hots would
    take more than 128 numbers. Arrays of rank 2 and more are read row by row."""
    vocabulary: int = 256
    """Token numbers of arrays of integers, whose space does not say how many there are. Larger
    numbers share one embedding, "unknown"."""
    lowest: int = 0
    """The first token number of these arrays. Smaller numbers are read as nothing."""
    nearest: bool = False
    """As published: a number outside of the vocabulary is read as the nearest one in it."""
    padding: int | None = None
    """A number that stands for nothing, wherever in a sequence it is."""
    d_embedding: int = 16
    """Width of a token's embedding."""
    d_hidden: int = 64
    """Width of the recurrent network's state."""
    d_output: int = 32
    """Features made of each array."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(
            vocabulary=MAX_VOCABULARY,
            d_embedding=MAX_WIDTH,
            d_hidden=MAX_WIDTH,
            d_output=MAX_WIDTH,
        )
        self.require("lowest", abs(self.lowest) <= 1 << 62, "a 63-bit integer")


@dataclass(frozen=True, kw_only=True)
class GoalConfig(Checked):
    """Lists of goals, [goals, numbers of a goal]: two linear layers and a layer norm.

    Goals of whole numbers can be read as tokens instead: name them in TokenConfig.keys.
    """

    keys: tuple[str, ...] = ()
    """Observations to take as lists of goals; none is recognised by itself."""
    d_output: int = 32
    """Features made of each list."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(d_output=MAX_WIDTH)


@dataclass(frozen=True, kw_only=True)
class TimestepEncoderConfig(Checked):
    """One row (observations, previous action and reward) to one vector.

    Plain numbers, previous action and reward are whitened together; images, tokens and goals become
    features by networks of their own; an MLP makes one vector of them all.
    """

    kind: Literal["any", "image"] = "any"
    """any: what is said above. image, as published, for one image and nothing else: symlog of the
    previous action and reward, and a small layer of their own, beside the image's features; then
    one layer in place of the MLP, and nothing is whitened. Whether it suits the observations, and
    which settings it has no use for, is told where an agent is made."""
    previous_features: int = 12
    """kind=image: features made of the previous action and reward."""
    n_layers: int = 2
    """Hidden layers."""
    d_hidden: int = 512
    """Width of the hidden layers."""
    d_output: int = 256
    """Width of the vector it makes."""
    auto_scale: bool = False
    """Widen d_hidden and d_output to the width of the MLP's input, where that is larger."""
    activation: Activation = "leaky_relu"
    """Activation after each hidden layer."""
    norm: Norm = "none"
    """Normalisation of each hidden layer, before the activation."""
    out_norm: Norm = "layer"
    """Normalisation of the output."""
    normalize_inputs: bool = True
    """Whiten each plain number by running statistics of the training data."""
    normalize_previous: bool = True
    """Whiten the previous action and reward, too; else they are taken as they are."""
    input_norm_beta: float = 1e-4
    """Step size of the statistics that whiten."""
    input_norm_init_nu: float = 1.0
    """Variance that these statistics start from."""
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
    images: ImageConfig = field(default_factory=ImageConfig)
    """Settings of images."""
    tokens: TokenConfig = field(default_factory=TokenConfig)
    """Settings of token arrays."""
    goals: GoalConfig = field(default_factory=GoalConfig)
    """Settings of lists of goals."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_sizes(n_layers=MAX_LAYERS, d_hidden=MAX_WIDTH, d_output=MAX_WIDTH)
        self.require_sizes(previous_features=MAX_WIDTH)
        refuse(of_other_choices(self, "kind", {"image": ("previous_features",)}))
        check_norm(self, "norm", d_hidden=self.d_hidden)
        check_norm(self, "out_norm", d_output=self.d_output)
        self._check_whitening()
        why = "the one hides the other's reward, too"
        refuse(either_or(self, "hide_previous", "hide_reward", why))
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
                    raise ConfigError(
                        f"TimestepEncoderConfig.{name}: {key!r} is in {kind_of[key]} already; an "
                        "observation is of one kind"
                    )

    def _check_whitening(self) -> None:
        beta, nu = self.input_norm_beta, self.input_norm_init_nu
        self.require("input_norm_beta", 0 < beta < 1, "a number in (0, 1)")
        self.require("input_norm_init_nu", nu > 0, "a positive number")
        found: list[Unused] = []
        if not self.normalize_inputs:
            names = ("normalize_previous", "input_norm_beta", "input_norm_init_nu")
            found += unused(
                "normalize_inputs=False whitens nothing",
                (self, names),
                instead="set normalize_inputs=True or ",
            )
        elif self.hide_previous:
            why = "hide_previous leaves nothing but zeros of the previous action and reward"
            found += unused(why, (self, ["normalize_previous"]))
        refuse(found)
