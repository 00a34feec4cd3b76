"""The layers of a critic ensemble, and a forward pass with detached weights for DPG.

DPG uses the lowest critic of each state and discount; the gradient of the others is zero. So the
backward pass computes each critic only for the rows with a nonzero gradient: 1/C of the work with C
critics. Only on a CPU, where the number of these rows is known without a synchronisation.

Letters: C critics, N states, K action samples, G discounts, W width of the inputs beside the state,
H hidden width, M = K * N * G.
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
    # Not baddbmm, which first writes the bias into every row and then reads the rows again.
    return torch.bmm(x, weight).add_(bias)


class StateProjection:
    """States, and their product with the first layer's weight, computed on first use."""

    def __init__(self, state: Tensor, weight: Tensor) -> None:
        """state [N, D], weight [C, D, H]."""
        self.state, self.weight = state, weight
        self._product: Tensor | None = None
        self._grad = torch.is_grad_enabled()

    @property
    def product(self) -> Tensor:
        """[C, N, H]"""
        if self._product is None:
            with torch.set_grad_enabled(self._grad):
                rows = self.state.expand(len(self.weight), -1, -1)
                self._product = torch.bmm(rows, self.weight)
        return self._product

    def detach(self) -> StateProjection:
        """A detached copy."""
        constant = StateProjection(self.state.detach(), self.weight.detach())
        constant._product = None if self._product is None else self._product.detach()
        return constant


def first_layer(inputs: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """The first layer before its activation: [C, N, H] or [C, K, N, G, H].

    With gradients the result is not a view, because the activation writes into it in place.

    Args:
        inputs: [K, N, G, W]
        weight: [C, W, H]; or [C, D + W, H] if it includes the weight of the states.
        state: [C, N, H], the product of states and weight; or [1, N, D], the states.
    """
    k, n, g, width = inputs.shape
    c, d_in, _ = weight.shape
    if d_in != width:
        rows = torch.cat((state, inputs.view(1, n, width)), dim=-1)
        return torch.bmm(rows.expand(c, -1, -1), weight)
    rows = inputs.reshape(1, -1, width).expand(c, -1, -1)
    x = torch.bmm(rows, weight).view(c, k, n, g, weight.shape[-1])
    shared = state[:, None, :, None]
    # Not in place with gradients: x is a view.
    return x + shared if torch.is_grad_enabled() else x.add_(shared)


def forward_frozen(
    inputs: Tensor, state: Tensor, first: Tensor, upper: Layers, slope: float
) -> Tensor:
    """Outputs of critics with leaky ReLUs of one slope, with a gradient only to `inputs`.

    Args:
        inputs, state: see `first_layer`, whose weight is `first`.
        upper: the layers after the first.
        slope: the negative slope of the leaky ReLUs.

    Returns:
        [C, M, d_out]
    """
    flat = [tensor.detach() for layer in upper for tensor in layer]
    return _Frozen.apply(  # type: ignore[no-any-return, no-untyped-call]
        inputs, state.detach(), first.detach(), slope, *flat
    )


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, state: Tensor, first: Tensor, slope: float, *upper: Tensor
    ) -> Tensor:
        x = first_layer(inputs, first, state)
        weights, activations = upper[::2], []
        for weight, bias in zip(weights, upper[1::2], strict=True):
            activations.append(F.leaky_relu_(x, slope).flatten(1, -2))
            x = affine(activations[-1], weight, bias)
        ctx.slope, ctx.shape = slope, inputs.shape
        ctx.save_for_backward(first[:, -inputs.shape[-1] :], *weights, *activations)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, *rest = ctx.saved_tensors
        weights, activations = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        grad_inputs = grad.new_zeros(grad.shape[1], first.shape[1])
        for critic, nonzero in enumerate((grad != 0).any(-1)):
            rows = nonzero.nonzero().squeeze(1)
            g = grad[critic].index_select(0, rows)
            for weight, out in zip(reversed(weights), reversed(activations), strict=True):
                g = torch.mm(g, weight[critic].t())
                _through_activation(g, out[critic].index_select(0, rows), ctx.slope)
            grad_inputs.index_add_(0, rows, torch.mm(g, first[critic].t()))
        return grad_inputs.view(ctx.shape), None, None, None, *[None] * (2 * len(weights))


def _through_activation(grad: Tensor, out: Tensor, slope: float) -> None:
    """Backpropagate `grad` in place through a leaky ReLU with output `out`."""
    torch.ops.aten.leaky_relu_backward.grad_input(grad, out, slope, True, grad_input=grad)
