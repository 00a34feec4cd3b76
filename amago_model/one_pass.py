"""One pass of the actor for two losses, of which one may not train the state.

Climbing takes the state as a constant, cloning trains it. Asking the actor twice gives each loss a
graph of its own. One graph serves both: its weights get the sum of what the losses say, and the
state only what cloning says.
"""

from __future__ import annotations

import dataclasses
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
    actor: nn.Module, state: Tensor, legal: Tensor | None
) -> tuple[Distribution, Distribution]:
    """actor(state [N, D], legal [N, A]), twice the same: its gradient reaches the actor's weights
    from both, and the state from the second alone.

    Where dropout is drawn, it is drawn once. See `can_ask_once`; no gradients of gradients.
    """
    weights = [p for p in actor.parameters() if p.requires_grad]
    made: list[Distribution] = []

    def run(x: Tensor) -> list[Tensor]:
        made.append(actor(x, legal))
        return _tensors(made[0])

    parts = _OnePass.apply(run, state, *weights)
    half = len(parts) // 2
    return _replaced(made[0], parts[:half]), _replaced(made[0], parts[half:])


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], list[Tensor]], state: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaf = state.detach().requires_grad_()
            ctx.state = leaf.view_as(leaf)  # hooks of torch's own counters take no leaf
            ctx.parts, ctx.weights = run(ctx.state), weights
        return tuple(x.detach() for x in (*ctx.parts, *ctx.parts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        half = len(ctx.parts)
        first, second = grads[:half], grads[half:]
        both = [a + b for a, b in zip(first, second, strict=True)]
        options: dict[str, Any] = {"allow_unused": True, "retain_graph": True}
        of_weights = torch.autograd.grad(ctx.parts, ctx.weights, both, **options)
        of_state = None
        if ctx.needs_input_grad[1]:
            (of_state,) = torch.autograd.grad(ctx.parts, ctx.state, second, **options)
        return None, of_state, *of_weights


def _names(policy: Distribution) -> list[str]:
    names = [field.name for field in dataclasses.fields(policy)]
    return [name for name in names if isinstance(getattr(policy, name), Tensor)]


def _tensors(policy: Distribution) -> list[Tensor]:
    return [getattr(policy, name) for name in _names(policy)]


def _replaced(policy: Distribution, tensors: tuple[Tensor, ...]) -> Distribution:
    return dataclasses.replace(policy, **dict(zip(_names(policy), tensors, strict=True)))
