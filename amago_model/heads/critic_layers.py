"""The arithmetic of a critic ensemble's layers, and critics as constants for DPG.

DPG follows the lowest critic of each state and discount, so all the others get a gradient of
zero there. Going back, each critic is asked about those rows alone in which it got another: with C
critics a C-th of the work. For a CPU, which knows at once how many these are.

Letters: C critics, N states, K action samples, G discounts, W width of what critics are told beside
the state, H hidden width, M = K * N * G.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Layers = list[tuple[Tensor, Tensor]]
"""Weights [C, d_in, d_out] and biases [C, 1, d_out]."""


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [C, M, d_in] @ weight [C, d_in, d_out] + bias [C, 1, d_out]."""
    # Not baddbmm, which first writes the bias into every row and then reads it again.
    return torch.bmm(x, weight).add_(bias)


class StatePart:
    """States that critics are asked about, and what the first layer makes of them without the rest
    of its input: computed when it is first needed, and once."""

    def __init__(self, state: Tensor, weight: Tensor) -> None:
        """state [N, D], weight [C, D, H]."""
        self.state, self.weight = state, weight
        self._part: Tensor | None = None
        self._grad = torch.is_grad_enabled()

    @property
    def part(self) -> Tensor:
        """[C, N, H]"""
        if self._part is None:
            with torch.set_grad_enabled(self._grad):
                rows = self.state.expand(len(self.weight), -1, -1)
                self._part = torch.bmm(rows, self.weight)
        return self._part

    def detach(self) -> StatePart:
        """The same as constants."""
        constant = StatePart(self.state.detach(), self.weight.detach())
        constant._part = None if self._part is None else self._part.detach()
        return constant


def first_layer(told: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """Before its activation, [C, N, H] or [C, K, N, G, H]: no view where a gradient passes, since
    the activation will write into it.

    Args:
        told: [K, N, G, W]
        weight: [C, W, H], or [C, D + W, H] to make it of states, too.
        state: [C, N, H], what the layer made of the states; or they themselves, [1, N, D].
    """
    k, n, g, width = told.shape
    c, d_in, _ = weight.shape
    if d_in != width:
        rows = torch.cat((state, told.view(1, n, width)), dim=-1)
        return torch.bmm(rows.expand(c, -1, -1), weight)
    rows = told.reshape(1, -1, width).expand(c, -1, -1)
    x = torch.bmm(rows, weight).view(c, k, n, g, weight.shape[-1])
    shared = state[:, None, :, None]
    # Not in place where a gradient passes: x is a view.
    return x + shared if torch.is_grad_enabled() else x.add_(shared)


def constant_answers(
    told: Tensor, state: Tensor, first: Tensor, upper: Layers, slope: float
) -> Tensor:
    """What critics with leaky ReLUs of one slope answer, with a gradient to `told` alone.

    Args:
        told, state: see `first_layer`, whose weight is `first`.
        upper: the layers above it.

    Returns:
        [C, M, d_out]
    """
    flat = [tensor.detach() for layer in upper for tensor in layer]
    return _Constant.apply(  # type: ignore[no-any-return, no-untyped-call]
        told, state.detach(), first.detach(), slope, *flat
    )


class _Constant(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, told: Tensor, state: Tensor, first: Tensor, slope: float, *upper: Tensor
    ) -> Tensor:
        x = first_layer(told, first, state)
        weights, kept = upper[::2], []
        for weight, bias in zip(weights, upper[1::2], strict=True):
            kept.append(F.leaky_relu_(x, slope).flatten(1, -2))
            x = affine(kept[-1], weight, bias)
        ctx.slope, ctx.shape = slope, told.shape
        ctx.save_for_backward(first[:, -told.shape[-1] :], *weights, *kept)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, *rest = ctx.saved_tensors
        weights, kept = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        of_told = grad.new_zeros(grad.shape[1], first.shape[1])
        for critic, asked in enumerate((grad != 0).any(-1)):
            rows = asked.nonzero().squeeze(1)
            g = grad[critic].index_select(0, rows)
            for weight, out in zip(reversed(weights), reversed(kept), strict=True):
                g = torch.mm(g, weight[critic].t())
                _through_activation(g, out[critic].index_select(0, rows), ctx.slope)
            of_told.index_add_(0, rows, torch.mm(g, first[critic].t()))
        return of_told.view(ctx.shape), None, None, None, *[None] * (2 * len(weights))


def _through_activation(grad: Tensor, out: Tensor, slope: float) -> None:
    """In place: what of the gradient passes a leaky ReLU that gave `out`."""
    torch.ops.aten.leaky_relu_backward.grad_input(grad, out, slope, True, grad_input=grad)
