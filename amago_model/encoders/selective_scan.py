"""The recurrence of Mamba, in torch on any device, or by the mamba-ssm package on a GPU.

    h_t = exp(delta_t A) h_{t-1} + B_t (delta_t u_t)        h_0 = 0, A < 0
    y_t = C_t h_t + skip u_t                                Gu & Dao 2023, "Mamba", algorithm 2

In torch the timesteps are computed in chunks: terms independent of the state for a whole chunk at
once, then the states in order. Only the states between chunks are kept for the backward pass, which
recomputes the others. There is no division and no growing exponential, so values cannot overflow.
(On a CPU a scan of logarithmic depth is about fifty times slower: it moves all states through
memory once per level.)

Letters: N sequences, L timesteps, D channels, S state size of each channel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from amago_model.errors import ConfigError
from amago_model.layers import not_compiled

CHUNK = 8
"""Timesteps per chunk, chosen to fit in a core's cache at common widths."""

SCANS = ("torch", "mamba_ssm")


def selective_scan(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, name: str = "torch"
) -> Tensor:
    """u, delta [N, L, D], a [S, D], b and c [N, L, S], skip [D] -> y [N, L, D] in the dtype of u.

    It computes in float32, or in float64 if u is float64. `name` is one of SCANS, from
    `choose_scan`.
    """
    wide = torch.float64 if u.dtype == torch.float64 else torch.float32
    with torch.autocast(u.device.type, enabled=False):
        inputs = [x.to(wide) for x in (u, delta, a, b, c)]
        if name == "mamba_ssm":
            y = _scan_by_package(find_mamba_ssm(), *inputs)
        else:
            y = _scan_in_torch(*inputs)
        return (y + skip.to(wide) * inputs[0]).to(u.dtype)


# ------------------------------------------------------------------------------------ plain torch


def _states(
    start: Tensor, delta: Tensor, du: Tensor, a: Tensor, b: Tensor, decay: Tensor, h: Tensor
) -> None:
    """Fill decay and h [chunk, N, S, D] for the timesteps of delta and du [chunk, N, D]."""
    torch.mul(delta[:, :, None], a, out=decay).exp_()
    torch.mul(b[..., None], du[:, :, None], out=h)
    last = start
    for i in range(h.shape[0]):
        last = h[i].addcmul_(decay[i], last)


class _Scan(torch.autograd.Function):
    """u, delta [L, N, D], a [S, D], b and c [L, N, S] -> [L, N, D], without the skip."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        length, n, _ = u.shape
        du, y = delta * u, torch.empty_like(u)
        decay, h = u.new_empty(2, min(CHUNK, length), n, *a.shape).unbind()
        starts = [u.new_zeros(n, *a.shape)]
        for t in range(0, length, CHUNK):
            chunk = slice(t, min(t + CHUNK, length))
            k = chunk.stop - t
            _states(starts[-1], delta[chunk], du[chunk], a, b[chunk], decay[:k], h[:k])
            y[chunk] = (c[chunk, :, None] @ h[:k]).squeeze(2)
            if chunk.stop < length:
                starts.append(h[k - 1].clone())
        ctx.save_for_backward(u, delta, a, b, c, *starts)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, ...]:
        u, delta, a, b, c, *starts = ctx.saved_tensors
        with torch.autocast(u.device.type, enabled=False):
            return _backward(u, delta, a, b, c, starts, grad_y)


def _backward(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: list[Tensor], grad_y: Tensor
) -> tuple[Tensor, ...]:
    length, n, _ = u.shape
    du, grad_a = delta * u, torch.zeros_like(a)
    grad_du, grad_delta, grad_b, grad_c = (torch.empty_like(x) for x in (u, u, b, c))
    decay, h, g = u.new_empty(3, min(CHUNK, length), n, *a.shape).unbind()
    later: Tensor | None = None  # gradient of this chunk's last state from later ones
    for t in reversed(range(0, length, CHUNK)):
        chunk, start = slice(t, min(t + CHUNK, length)), starts[t // CHUNK]
        k = chunk.stop - t
        _states(start, delta[chunk], du[chunk], a, b[chunk], decay[:k], h[:k])
        grad_c[chunk] = (h[:k] @ grad_y[chunk, ..., None]).squeeze(-1)
        # g: the gradient of each state, from its own output and from the state after it.
        torch.mul(c[chunk, ..., None], grad_y[chunk, :, None], out=g[:k])
        if later is not None:
            g[k - 1].add_(later)
        for i in reversed(range(1, k)):
            g[i - 1].addcmul_(g[i], decay[i])
        grad_b[chunk] = (g[:k] @ du[chunk, ..., None]).squeeze(-1)
        grad_du[chunk] = (b[chunk, :, None] @ g[:k]).squeeze(2)
        g[:k].mul_(decay[:k])
        later = g[0].clone()
        g[1:k].mul_(h[: k - 1])
        g[0].mul_(start)
        # g: now the gradient of the exponent delta_t A. The decays have served.
        grad_a += torch.mul(g[:k], delta[chunk, :, None], out=decay[:k]).sum((0, 1))
        grad_delta[chunk] = g[:k].mul_(a).sum(2)
    return grad_du * delta, grad_delta + grad_du * u, grad_a, grad_b, grad_c


@not_compiled  # it would unroll the loop over time
def _scan_in_torch(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    u, delta, b, c = (x.transpose(0, 1).contiguous() for x in (u, delta, b, c))
    return _Scan.apply(u, delta, a, b, c).transpose(0, 1)  # type: ignore[no-untyped-call,no-any-return]


# ------------------------------------------------------------------------------------- the package


@lru_cache(maxsize=1)
def find_mamba_ssm() -> Callable[..., Any] | None:
    """`selective_scan_fn` of the package mamba-ssm; None if it cannot be imported."""
    try:
        module = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    except Exception:  # noqa: BLE001 a broken CUDA build may raise any exception
        return None
    return getattr(module, "selective_scan_fn", None)


def _scan_by_package(
    function: Callable[..., Any] | None, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> Tensor:
    """The package takes u, delta [N, D, L], A [D, S], B and C [N, S, L], all contiguous.

    This is tested against a stand-in with the published signature, not with the package.
    """
    assert function is not None  # `scan_obstacle` has checked it
    u, delta, b, c = (x.transpose(1, 2).contiguous() for x in (u, delta, b, c))
    return function(u, delta, a.T.contiguous(), b, c).transpose(1, 2)  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------- the choice


def scan_obstacle(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this scan does not support this device or dtype; None if it does."""
    if name == "torch":
        return None
    if find_mamba_ssm() is None:
        return "the package mamba-ssm is not installed (pip install mamba-ssm, on a GPU machine)"
    if not _has_kernels(device):
        return f"mamba-ssm needs a CUDA GPU, not '{device}'"
    if dtype == torch.float64:
        return "mamba-ssm computes in float32 at most"
    return _trial(device)


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


@lru_cache(maxsize=16)
def _trial(device: torch.device) -> str | None:
    """The error of a small trial, forward and backward; None if it succeeds."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            u, b = torch.ones(1, 2, 8, device=device), torch.ones(1, 2, 4, device=device)
            u.requires_grad_()
            a = -torch.ones(4, 8, device=device)
            _scan_by_package(find_mamba_ssm(), u, u.abs(), a, b, b).sum().backward()
    except Exception as error:  # noqa: BLE001 kernels may raise any exception
        return f"a trial of mamba-ssm failed: {type(error).__name__}: {error}"
    return None


def choose_scan(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """The scan to use: `wanted`, or for 'auto' the fastest one that can run.

    Raises:
        ConfigError: `wanted` cannot run; the message contains the reason.
    """
    if wanted == "auto":
        return "torch" if scan_obstacle("mamba_ssm", device, dtype) else "mamba_ssm"
    if why := scan_obstacle(wanted, device, dtype):
        raise ConfigError(
            f"MambaConfig.scan: {wanted!r} cannot be used: {why}. Set scan='torch' or scan='auto'"
        )
    return wanted
