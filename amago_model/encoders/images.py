"""Image encoders: convolutional networks for images of any size, and random shifts.

Frames are encoded independently. Letters: N frames, C channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from amago_model.config import Activation, AugmentConfig, ImageConfig, ObsSpace
from amago_model.encoders.modalities import Layout, image_layout
from amago_model.errors import ConfigError
from amago_model.layers import make_activation, make_norm, not_compiled

# By kind: (channels, kernel, stride) of each convolution; no padding.
CONVOLUTIONS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    "drq": ((32, 3, 2), (32, 3, 1), (32, 3, 1), (32, 3, 1)),
    "gridworld": ((16, 2, 1), (32, 2, 1), (48, 2, 1)),
}
NATURE_FROM, DRQ_FROM = 64, 15
"""Minimum side in pixels for which kind='auto' selects these."""
BLOCK = 64
"""Frames convolved at once where there are no gradients: activations of a whole batch would need
more memory than the micro-batches that it learns in."""


class ImageEncoder(nn.Module):
    """[B, L, *shape] pixels to [B, L, d_output]: convolutions, linear layer, norm, activation.

    uint8 values become x / 128 - 1; other numbers are not scaled.
    """

    def __init__(self, config: ImageConfig, key: str, space: ObsSpace) -> None:
        super().__init__()
        self.key, self.d_output = key, config.d_output
        try:
            self.layout = image_layout(space.shape, config.channels)
        except ConfigError as error:
            raise ConfigError(f"ImageConfig: observation {key!r}: {error}") from None
        side = min(self.layout.height, self.layout.width)
        self.kind = _kind_for(side) if config.kind == "auto" else config.kind
        if (smallest := smallest_side(self.kind)) > side:
            raise ConfigError(
                f"ImageConfig.kind: {self.kind!r} needs images of at least {smallest} pixels, "
                f"{key!r} has {self.layout.height} x {self.layout.width}; set kind to 'auto' or "
                "'impala', or name the key in TimestepEncoderConfig.vector_keys"
            )
        if config.augment is not None and config.augment.shift >= side:
            raise ConfigError(
                f"images.augment.shift: expected less than the shorter side of {key!r}, "
                f"{self.layout.height} x {self.layout.width}, got {config.augment.shift}; lower it"
            )
        self.convolutions, d_flat = _network(self.kind, config, self.layout)
        self.linear = nn.Linear(d_flat, config.d_output)
        self.norm = make_norm(config.norm, config.d_output)
        self.activation = make_activation(config.activation)

    def describe(self) -> str:
        shape = f"{self.layout.height} x {self.layout.width} x {self.layout.channels}"
        axis = "" if self.layout.axis == "none" else f", channels {self.layout.axis}"
        return f"image {shape}{axis}, {self.kind}"

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """x [B, L, *shape], shift [B, L, 2] int64 or None (see `shifted`) -> [B, L, d_output]."""
        frames = x.flatten(0, 1)  # [N, height, width, C], with the axes in the stored order
        if self.layout.axis == "none":
            frames = frames.unsqueeze(-1)
        elif self.layout.axis == "first":
            frames = frames.permute(0, 2, 3, 1)
        if shift is not None:
            frames = shifted(frames, shift.flatten(0, 1))
        at_once = len(frames) if torch.is_grad_enabled() else BLOCK
        blocks = [self._convolved(block) for block in frames.split(at_once)]
        features = self.linear(torch.cat(blocks) if len(blocks) > 1 else blocks[0])
        out: Tensor = self.activation(self.norm(features)).unflatten(0, x.shape[:2])
        return out

    def _convolved(self, frames: Tensor) -> Tensor:
        """[N, height, width, C] -> [N, features]."""
        pixels = frames.permute(0, 3, 1, 2).to(self.linear.weight.dtype)
        if frames.dtype == torch.uint8:
            pixels = pixels / 128.0 - 1.0
        found: Tensor = self.convolutions(pixels).flatten(1)
        return found


def shifted(frames: Tensor, shift: Tensor) -> Tensor:
    """Frames [N, height, width, C] shifted by whole pixels; the edge is repeated.

    shift [N, 2] int64: output pixel (i, j) is input pixel (i + shift[0], j + shift[1]).
    """
    n, height, width, _ = frames.shape
    device = frames.device
    rows = (torch.arange(height, device=device) + shift[:, :1]).clamp(0, height - 1)
    columns = (torch.arange(width, device=device) + shift[:, 1:]).clamp(0, width - 1)
    which = torch.arange(n, device=device)[:, None, None]
    return frames[which, rows[:, :, None], columns[:, None, :]]


@not_compiled  # its generator cannot be traced
def draw_shifts(
    b: int, length: int, images: int, *, config: AugmentConfig, device: torch.device
) -> Tensor:
    """Random shifts [B, L, images, 2] int64 for `shifted`, in -shift … shift.

    Each frame has a separate shift (Yarats et al. 2021); about `config.share` of the windows are
    shifted. It takes one number from torch's global generator for any number of frames, and draws
    with time as the first dimension. So, on any device, padding on the right changes neither the
    shifts of earlier frames nor later random numbers.
    """
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
    chosen = torch.rand(b, generator=generator) < config.share
    shifts = torch.randint(
        -config.shift, config.shift + 1, (length, b, images, 2), generator=generator
    )
    shifts = torch.where(chosen[:, None, None], shifts, 0)
    return shifts.transpose(0, 1).to(device, non_blocking=True)


class ImpalaBlock(nn.Module):
    """Convolution, max pooling to half the size, two residual units (Espeholt et al. 2018)."""

    def __init__(
        self, channels: int, depth: int, *, activation: Activation, group_norm: bool
    ) -> None:
        super().__init__()
        self.downscale = nn.Sequential(
            nn.Conv2d(channels, depth, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)
        )
        self.units = nn.ModuleList(
            nn.Sequential(
                make_activation(activation),
                nn.Conv2d(depth, depth, 3, padding=1),
                make_activation(activation),
                nn.Conv2d(depth, depth, 3, padding=1),
            )
            for _ in range(2)
        )
        self.norms = nn.ModuleList(
            nn.GroupNorm(4, depth) if group_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, height, width] -> [N, depth, height / 2, width / 2], rounded up."""
        x = self.downscale(x)
        for unit, norm in zip(self.units, self.norms, strict=True):
            # A copy, because a unit starts with an in-place activation.
            x = norm(x + unit(x.clone()))
        return x


def smallest_side(kind: str) -> int:
    """Minimum height and width in pixels for an output of at least one pixel."""
    side = 1
    for _, kernel, stride in reversed(CONVOLUTIONS.get(kind, ())):
        side = (side - 1) * stride + kernel
    return side


def _kind_for(side: int) -> str:
    if side >= NATURE_FROM:
        return "nature"
    return "drq" if side >= DRQ_FROM else "gridworld"


def _network(kind: str, config: ImageConfig, layout: Layout) -> tuple[nn.Sequential, int]:
    """(convolutions, number of output features)."""
    channels, sides = layout.channels, [layout.height, layout.width]
    blocks: list[nn.Module] = []
    if kind == "impala":
        assert config.kind == "impala"
        for depth in config.block_depths:
            blocks.append(
                ImpalaBlock(
                    channels, depth, activation=config.activation, group_norm=config.group_norm
                )
            )
            channels, sides = depth, [(side + 1) // 2 for side in sides]
        blocks.append(make_activation(config.activation))
    else:
        for depth, kernel, stride in CONVOLUTIONS[kind]:
            convolution = nn.Conv2d(channels, depth, kernel, stride)
            if kind == "nature":
                _delta_orthogonal(convolution)
            blocks += [convolution, make_activation(config.activation)]
            channels, sides = depth, [(side - kernel) // stride + 1 for side in sides]
    return nn.Sequential(*blocks), channels * math.prod(sides)


def _delta_orthogonal(convolution: nn.Conv2d) -> None:
    """Delta-orthogonal initialisation (Xiao et al. 2018), scaled for leaky ReLU: the kernel is
    zero except for an orthogonal centre, and the bias is zero."""
    with torch.no_grad():
        convolution.weight.zero_()
        middle = convolution.kernel_size[0] // 2
        centre = torch.empty(convolution.weight.shape[:2], device=convolution.weight.device)
        nn.init.orthogonal_(centre, nn.init.calculate_gain("leaky_relu"))
        convolution.weight[:, :, middle, middle] = centre
        if convolution.bias is not None:
            convolution.bias.zero_()
