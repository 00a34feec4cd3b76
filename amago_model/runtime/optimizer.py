"""Gradient clipping and AdamW without the overhead of torch's own functions.

Those sort parameters by device and type, read options and write profiles: on a CPU that takes a
small agent longer than the arithmetic. The results are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that their common norm is at most `limit`, and return what it was.

    As nn.utils.clip_grad_norm_, for parameters of one device. A norm of 0 where there is none.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


@torch.no_grad()
def step_adamw(optimizer: torch.optim.AdamW, bad: Tensor | None = None) -> None:
    """optimizer.step() for an AdamW with fused=True and otherwise default options.

    bad [] float32: 1 leaves everything unchanged, 0 steps; the processor need not wait for its
    value.
    """
    groups = [[p for p in g["params"] if p.grad is not None] for g in optimizer.param_groups]
    if not all(p in optimizer.state for learned in groups for p in learned):
        # torch's own step makes the state of new parameters; `found_inf` is its name for `bad`.
        optimizer.found_inf = bad  # type: ignore[attr-defined]
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
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=bad,
        )
        if bad is not None:
            torch._foreach_sub_(steps, [bad] * len(steps))


def forget_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """As zero_grad(set_to_none=True)."""
    for p in parameters:
        p.grad = None
