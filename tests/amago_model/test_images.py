"""Images: convolutional networks of every kind and size, layouts, and exact random shifts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from amago_model import AugmentConfig, ConfigError, ImpalaImageConfig, ObsSpace, PlainImageConfig
from amago_model.encoders.images import (
    CONVOLUTIONS,
    ImageEncoder,
    ImpalaBlock,
    draw_shifts,
    shifted,
    smallest_side,
)
from amago_model.encoders.modalities import Layout, image_layout

KINDS = ("nature", "drq", "gridworld", "impala")


def encoder(shape: tuple[int, ...], dtype: str = "uint8", **settings) -> ImageEncoder:
    kind = ImpalaImageConfig if settings.get("kind") == "impala" else PlainImageConfig
    return ImageEncoder(kind(**settings), "eye", ObsSpace(shape=shape, dtype=dtype))


def pixels(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_natures_network_has_the_published_number_of_parameters() -> None:
    """84 x 84 x 4: 20, 9, then 7 pixels remain, so the linear layer sees 64 * 7 * 7 numbers."""
    made = encoder((84, 84, 4), kind="nature")
    first, second, third = 4 * 32 * 8 * 8 + 32, 32 * 64 * 4 * 4 + 64, 64 * 64 * 3 * 3 + 64
    assert count(made.convolutions) == first + second + third == 77_984
    assert count(made) == 77_984 + 64 * 7 * 7 * 256 + 256 == 881_056


def test_impalas_network_has_the_published_number_of_parameters() -> None:
    """Each block: one convolution in, four on its own depth, two group norms."""
    made = encoder((9, 12, 3), kind="impala")
    blocks = sum(
        c * d * 9 + d + 4 * (d * d * 9 + d) + 2 * 2 * d for c, d in ((3, 16), (16, 32), (32, 32))
    )
    assert count(made) == blocks + 32 * 2 * 2 * 256 + 256  # 9 x 12 → 5 x 6 → 3 x 3 → 2 x 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extra", [(0, 0), (3, 8)])
def test_every_kind_takes_its_smallest_image_and_oblong_ones(
    kind: str, extra: tuple[int, int]
) -> None:
    """The linear layer fits what the convolutions leave; gradients reach the first of them."""
    side = smallest_side(kind)
    shape = (side + extra[0], side + extra[1], 3)
    made = encoder(shape, kind=kind, channels="last", d_output=8)
    made(pixels(2, 3, *shape)).square().sum().backward()
    first = next(made.convolutions.parameters())
    assert first.grad is not None and first.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_an_image_too_small_for_its_network_is_refused_by_name(kind: str) -> None:
    side = smallest_side(kind)
    with pytest.raises(
        ConfigError, match=rf"kind: '{kind}' needs .* {side} .*'eye' has {side - 1}"
    ):
        encoder((side - 1, 99, 3), kind=kind, channels="last")


@pytest.mark.parametrize(
    ("side", "kind"),
    [(7, "gridworld"), (14, "gridworld"), (15, "drq"), (63, "drq"), (64, "nature")],
)
def test_auto_chooses_by_size(side: int, kind: str) -> None:
    assert encoder((side, side + 10, 3)).kind == kind


@pytest.mark.parametrize(
    ("shape", "channels", "layout"),
    [
        ((84, 84, 4), "auto", Layout(84, 84, 4, "last")),
        ((12, 64, 96), "auto", Layout(64, 96, 12, "first")),
        ((7, 9), "auto", Layout(7, 9, 1, "none")),
        ((7, 7, 20), "last", Layout(7, 7, 20, "last")),
        ((8, 8, 8), "first", Layout(8, 8, 8, "first")),
    ],
)
def test_where_the_channels_are(shape, channels, layout) -> None:
    assert image_layout(shape, channels) == layout


def test_a_layout_that_cannot_be_told_is_asked_for() -> None:
    with pytest.raises(
        ConfigError, match=r"'eye': the channel axis .*\(7, 7, 20\).*ImageConfig.channels"
    ):
        encoder((7, 7, 20))
    with pytest.raises(ConfigError, match=r"not shape \(2, 7, 7, 3\)"):
        encoder((2, 7, 7, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_channels_first_equals_channels_last_on_the_same_image(kind: str) -> None:
    last = encoder((40, 44, 3), kind=kind, d_output=8)
    first = encoder((3, 40, 44), kind=kind, d_output=8)
    first.load_state_dict(last.state_dict())
    x = pixels(2, 2, 40, 44, 3)
    torch.testing.assert_close(first(x.permute(0, 1, 4, 2, 3)), last(x), rtol=1e-4, atol=1e-5)
    flat = encoder((40, 44), kind=kind, d_output=8)
    deep = encoder((40, 44, 1), kind=kind, channels="last", d_output=8)
    deep.load_state_dict(flat.state_dict())
    torch.testing.assert_close(flat(x[..., 0]), deep(x[..., :1]))


def test_frames_do_not_see_each_other() -> None:
    """With group norm, too: a frame alone gives what it gives in a batch."""
    for kind in ("drq", "impala"):
        made = encoder((16, 16, 3), kind=kind, d_output=8)
        x = pixels(3, 4, 16, 16, 3)
        torch.testing.assert_close(made(x[1:2, 2:3])[0, 0], made(x)[1, 2], rtol=1e-4, atol=1e-5)


def test_bytes_are_scaled_and_floats_are_not() -> None:
    seen: list[Tensor] = []
    for dtype, x in (("uint8", pixels(1, 1, 7, 7, 3)), ("float32", torch.rand(1, 1, 7, 7, 3))):
        made = encoder((7, 7, 3), dtype, d_output=4)
        made.convolutions.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        made(x)
        expected = x.double() / 128 - 1 if dtype == "uint8" else x.double()
        torch.testing.assert_close(seen[-1][0].double().permute(1, 2, 0), expected[0, 0])


def test_natures_filters_begin_orthogonal_in_their_middle() -> None:
    weight = encoder((36, 36, 3), kind="nature").convolutions[4].weight.detach()  # [64, 64, 3, 3]
    centre, around = weight[:, :, 1, 1], weight.clone()
    torch.testing.assert_close(
        centre @ centre.T, torch.eye(64) * 2 / (1 + 0.01**2), rtol=1e-4, atol=1e-4
    )
    around[:, :, 1, 1] = 0.0
    assert not around.any()


@pytest.mark.parametrize("group_norm", [True, False])
def test_an_impala_block_is_what_its_formula_says(group_norm: bool) -> None:
    """Against plain functions that write nothing in place."""
    block = ImpalaBlock(3, 8, activation="leaky_relu", group_norm=group_norm)
    x = torch.randn(2, 3, 9, 7)
    down = block.downscale[0]
    y = F.max_pool2d(F.conv2d(x, down.weight, down.bias, padding=1), 3, 2, 1)
    for unit, norm in zip(block.units, block.norms, strict=True):
        z = F.leaky_relu(y)
        z = F.leaky_relu(F.conv2d(z, unit[1].weight, unit[1].bias, padding=1))
        y = y + F.conv2d(z, unit[3].weight, unit[3].bias, padding=1)
        if group_norm:
            y = F.group_norm(y, 4, norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(block(x), y)
    assert count(block.norms) == (2 * 2 * 8 if group_norm else 0)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: ImpalaImageConfig(block_depths=(6,)), "multiples of 4"),
        (lambda: ImpalaImageConfig(block_depths=()), "block_depths: .*at least 1"),
        (lambda: PlainImageConfig(block_depths=(8,)), "unknown setting 'block_depths'"),
        (lambda: AugmentConfig(share=1.5), "share: expected less than or equal to 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make()


def test_a_shift_is_a_crop_of_the_padded_image() -> None:
    """Every shift of an oblong image, to the byte."""
    x, most = pixels(81, 6, 9, 3), 4
    moves = [(i, j) for i in range(-most, most + 1) for j in range(-most, most + 1)]
    got = shifted(x, torch.tensor(moves))
    padded = F.pad(x.permute(0, 3, 1, 2).float(), [most] * 4, mode="replicate")
    for n, (i, j) in enumerate(moves):
        crop = padded[n, :, most + i : most + i + 6, most + j : most + j + 9]
        assert torch.equal(got[n].permute(2, 0, 1).float(), crop)
    assert got.dtype == torch.uint8


def test_shifts_are_drawn_per_frame_for_a_share_of_the_windows() -> None:
    config = AugmentConfig(share=0.75, shift=3)
    shifts = draw_shifts(400, 20, 2, config=config, device=torch.device("cpu"))
    assert shifts.shape == (400, 20, 2, 2)
    moved = shifts.flatten(1).any(1)
    assert 0.68 < moved.float().mean() < 0.82
    seen, times = shifts[moved].unique(return_counts=True)
    assert seen.tolist() == [-3, -2, -1, 0, 1, 2, 3]
    assert times.max() < 1.1 * times.min()
    assert not torch.equal(shifts[moved][:, 0], shifts[moved][:, 1])


def test_longer_windows_change_neither_earlier_shifts_nor_later_draws() -> None:
    drawn = []
    for length in (5, 9):
        torch.manual_seed(3)
        config = AugmentConfig(share=1.0)
        shifts = draw_shifts(4, length, 2, config=config, device=torch.device("cpu"))
        drawn.append((shifts[:, :5], torch.randn(8)))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


def test_a_compiled_update_draws_the_same_shifts() -> None:
    """The generator cannot be traced, so a compiler leaves the function out."""
    config = AugmentConfig(share=1.0)

    def update() -> torch.Tensor:
        return 2 * draw_shifts(4, 5, 2, config=config, device=torch.device("cpu"))

    drawn = []
    for run in (update, torch.compile(update, backend="aot_eager")):
        torch.manual_seed(3)
        drawn.append(run())
    assert torch.equal(*drawn) and drawn[0].any()


def test_a_shift_beyond_the_image_is_refused() -> None:
    with pytest.raises(ConfigError, match="augment.shift: expected .* 'eye', 7 x 9, got 7"):
        encoder((7, 9, 3), augment=AugmentConfig(share=0.5, shift=7))


def test_without_gradients_frames_are_convolved_in_blocks() -> None:
    """The statistics of a whole batch need no more memory than its micro-batches."""
    made, x = encoder((16, 16, 3)), pixels(10, 13, 16, 16, 3)
    seen: list[int] = []
    made.convolutions.register_forward_hook(lambda _, args, __: seen.append(len(args[0])))
    whole = made(x)
    with torch.no_grad():
        blocks = made(x)
    assert seen == [130, 64, 64, 2]
    torch.testing.assert_close(blocks, whole)
