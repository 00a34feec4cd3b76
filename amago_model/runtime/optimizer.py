"""Gradient clipping and AdamW with less overhead than torch's functions, and equal results.

torch's functions group parameters by device and dtype, read options and write profiles: for a small
agent on a CPU this takes longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that their total norm is at most `limit`; return the norm before.

    Like nn.utils.clip_grad_norm_, for parameters on one device. Without gradients the norm is 0.
    """
    norm = gradient_norm(parameters)
    if gradients := [p.grad for p in parameters if p.grad is not None]:
        torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


@torch.no_grad()
def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The norm of the gradient over all parameters, on one device; 0 without gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


@torch.no_grad()
def step_adamw(
    optimizer: torch.optim.AdamW, skip: Tensor | None = None, rate: Tensor | None = None
) -> None:
    """optimizer.step() for an AdamW with fused=True and otherwise default options.

    `skip` [] float32: 1 (e.g. for NaN gradients) skips the step, 0 makes it; the decision needs no
    device synchronisation. `rate` [] float32: the learning rate of all groups, on the device of the
    parameters, for CUDA graphs; None: each group's `lr`.
    """
    groups = [[p for p in g["params"] if p.grad is not None] for g in optimizer.param_groups]
    if not all(p in optimizer.state for learned in groups for p in learned):
        # torch's step creates the state of new parameters; `found_inf` is torch's name of `skip`.
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.found_inf = None  # type: ignore[attr-defined]
        return
    for group, learned in zip(optimizer.param_groups, groups, strict=True):
        if not learned:
            continue
        states = [optimizer.state[p] for p in learned]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1.0)
        torch._fused_adamw_(
            learned,
            [p.grad for p in learned],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group["lr"] if rate is None else rate,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=skip,
        )
        if skip is not None:
            torch._foreach_sub_(steps, [skip] * len(steps))


def forget_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Like optimizer.zero_grad(set_to_none=True)."""
    for p in parameters:
        p.grad = None
