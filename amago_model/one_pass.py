"""One pass of the actor for two losses, of which one may not train the state.

Climbing takes the state as a constant, cloning trains it. Asking the actor twice gives each loss a
graph of its own. One graph serves both: its weights get the sum of what the losses say, and the
state only what cloning says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from amago_model.actor import Actor
from amago_model.distributions import Distribution


def can_ask_once(actor: nn.Module) -> bool:
    """Whether `ask_once` serves this actor here: not under torch.compile, nor where nothing learns,
    nor an actor of somebody's own, whose policies may hold what no weight has a part in."""
    learns = any(p.requires_grad for p in actor.parameters())
    return type(actor) is Actor and learns and not torch.compiler.is_compiling()


def ask_once(
    actor: Actor, state: Tensor, legal: Tensor | None
) -> tuple[Distribution, Distribution]:
    """actor(state [N, D], legal [N, A]), twice the same: its gradient reaches the actor's weights
    from both, and the state from the second alone.

    Where dropout is drawn, it is drawn once. See `can_ask_once`; no gradients of gradients.
    """
    weights = [p for p in actor.parameters() if p.requires_grad]
    first, second = _OnePass.apply(actor.parameters_of, state, *weights)
    # Made twice, which is cheap: bounds ask what a loss wants, and must hear each by itself.
    return actor.distribution(first, legal), actor.distribution(second, legal)


class _OnePass(torch.autograd.Function):
    """run(state), twice the same."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], state: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = state.detach().requires_grad_()
            ctx.state = leaf.view_as(leaf)  # hooks of torch's own counters take no leaf
            ctx.made, ctx.weights = run(ctx.state), weights
        return ctx.made.detach(), ctx.made.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first, second = grads
        options: dict[str, Any] = {"allow_unused": True, "retain_graph": True}
        of_weights = torch.autograd.grad(ctx.made, ctx.weights, first + second, **options)
        of_state = None
        if ctx.needs_input_grad[1]:
            (of_state,) = torch.autograd.grad(ctx.made, ctx.state, second, **options)
        return None, of_state, *of_weights
