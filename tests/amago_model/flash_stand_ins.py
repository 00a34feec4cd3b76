"""The functions of flash-attn 2.7, computed in plain torch, and a way to install them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from amago_model.attention import causal_attention as attention
from amago_model.attention import flash


def _windowed(q, k, v, dropout_p, causal, window_size):  # type: ignore[no-untyped-def]
    """What flash-attn computes, from [N, L, H, E]: bounds are inclusive, -1 is none."""
    assert causal
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None]
    left = window_size[0] if window_size[0] is not None else -1
    seen = (j <= i) & ((i - j <= left) if left >= 0 else torch.tensor(True))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, dropout_p).transpose(1, 2)


def flash_2(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    assert (softmax_scale, softcap, alibi_slopes) == (None, 0.0, None)
    assert not (deterministic or return_attn_probs)
    return _windowed(q, k, v, dropout_p, causal, window_size)


# ------------------------------------------------------- windows laid end to end: q, k, v [M, H, E]


def _end_to_end(  # type: ignore[no-untyped-def]
    q, k, v, starts, starts_k, dropout_p, causal, window_size
):
    assert starts is starts_k and starts.dtype == torch.int32 and q.ndim == 3
    edges = starts.tolist()
    assert edges[0] == 0 and edges[-1] == len(q)
    outs = [
        _windowed(*(x[a:b][None] for x in (q, k, v)), dropout_p, causal, window_size)[0]
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    return torch.cat(outs)


def _longest(starts) -> int:  # type: ignore[no-untyped-def]
    return int(starts.diff().max())


def packed_2(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    assert (softmax_scale, softcap, alibi_slopes, block_table) == (None, 0.0, None, None)
    assert not (deterministic or return_attn_probs)
    assert max_seqlen_q == max_seqlen_k == _longest(cu_seqlens_q)
    return _end_to_end(q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, causal, window_size)


def _half_only(function):  # type: ignore[no-untyped-def]
    @functools.wraps(function)
    def strict(q, k, v, **options):  # type: ignore[no-untyped-def]
        assert {x.dtype for x in (q, k, v)} <= {torch.float16, torch.bfloat16}
        return function(q, k, v, **options)

    return strict


@contextlib.contextmanager
def installer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that makes the package importable, on a machine that seems able to run it."""

    def forget() -> None:
        flash.flash_attn.cache_clear()
        attention._trial.cache_clear()

    def do(function: Callable[..., Any] = flash_2, *, full_width: bool = False) -> None:
        """`full_width`: its kernel takes any type, so that its result can be compared exactly."""
        functions = {"flash_attn_func": function, "flash_attn_varlen_func": packed_2}
        if not full_width:
            functions = {name: _half_only(one) for name, one in functions.items()}

        def find(name: str) -> SimpleNamespace:
            assert name == "flash_attn"
            return SimpleNamespace(**functions)

        monkeypatch.setattr(flash.importlib, "import_module", find)
        monkeypatch.setattr(flash, "_supports", lambda device: True)  # noqa: ARG005
        if full_width:
            monkeypatch.setattr(flash, "_kernel_dtype", lambda dtype: dtype)
        forget()

    yield do
    monkeypatch.undo()
    forget()
