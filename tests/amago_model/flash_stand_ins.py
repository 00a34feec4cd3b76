"""What the versions of flash-attn publish, computed in plain torch, and a way to install them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

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


def flash_2_0(  # type: ignore[no-untyped-def]
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False
):
    assert (softmax_scale, return_attn_probs) == (None, False)
    return _windowed(q, k, v, dropout_p, causal, (-1, -1))


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


def flash_3(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
):
    assert (softmax_scale, qv, q_descale, k_descale, v_descale, pack_gqa) == (None,) * 6
    assert (attention_chunk, softcap, num_splits, deterministic, sm_margin) == (0, 0, 1, False, 0)
    return _windowed(q, k, v, 0.0, causal, window_size)


def flash_4(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
):
    assert (softmax_scale, learnable_sink, softcap, num_splits) == (None, None, 0.0, 1)
    assert (pack_gqa, deterministic) == (None, False)
    out = _windowed(q, k, v, 0.0, causal, window_size)
    return out, None


def flash_4_first(  # type: ignore[no-untyped-def]
    q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None,
    softcap=0.0,
):  # fmt: skip
    assert (softmax_scale, learnable_sink, softcap) == (None, None, 0.0)
    return _windowed(q, k, v, 0.0, causal, window_size), None


VERSIONS = {
    "2.0": ("flash_attn", flash_2_0),
    "2.3": ("flash_attn", flash_2),
    "3": ("flash_attn_interface", flash_3),
    "4, first": ("flash_attn.cute", flash_4_first),
    "4": ("flash_attn.cute", flash_4),
}


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


def packed_2_0(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, return_attn_probs=False,
):  # fmt: skip
    assert (softmax_scale, return_attn_probs) == (None, False)
    assert max_seqlen_q == max_seqlen_k == _longest(cu_seqlens_q)
    return _end_to_end(q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, causal, (-1, -1))


def packed_2(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    assert (softmax_scale, softcap, alibi_slopes, block_table) == (None, 0.0, None, None)
    assert not (deterministic or return_attn_probs)
    assert max_seqlen_q == max_seqlen_k == _longest(cu_seqlens_q)
    return _end_to_end(q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, causal, window_size)


def packed_3(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    nothing = (seqused_q, seqused_k, softmax_scale, qv, q_descale, k_descale, v_descale, pack_gqa)
    assert nothing == (None,) * 8 and (num_splits, softcap, sm_margin) == (1, 0.0, 0)
    assert not (attention_chunk or deterministic or return_attn_probs)
    assert max_seqlen_q == max_seqlen_k == _longest(cu_seqlens_q)
    return _end_to_end(q, k, v, cu_seqlens_q, cu_seqlens_k, 0.0, causal, window_size)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):  # type: ignore[no-untyped-def]
        return out.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        raise NotImplementedError("no gradient of sequences of variable length")


def packed_4_first(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
):  # fmt: skip
    assert (seqused_q, seqused_k, softmax_scale, learnable_sink, softcap) == (None,) * 4 + (0.0,)
    out = _end_to_end(q, k, v, cu_seqlens_q, cu_seqlens_k, 0.0, causal, window_size)
    return _NoGradient.apply(out), None


def packed_4(  # type: ignore[no-untyped-def]
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, mask_mod=None,
    aux_tensors=None, return_lse=False,
):  # fmt: skip
    nothing = (qv, min_seqlen_k, seqused_q, seqused_k, gather_kv_indices, page_table, score_mod)
    nothing += (softmax_scale, learnable_sink, pack_gqa, mask_mod, aux_tensors)
    assert nothing == (None,) * 12 and (softcap, num_splits) == (0.0, 1)
    assert not (deterministic or return_lse)
    assert max_seqlen_q == max_seqlen_k == _longest(cu_seqlens_q)
    return _end_to_end(q, k, v, cu_seqlens_q, cu_seqlens_k, 0.0, causal, window_size), None


PACKED = {
    "2.0": packed_2_0,
    "2.3": packed_2,
    "3": packed_3,
    "4, first": packed_4_first,
    "4": packed_4,
}


def _half_only(function):  # type: ignore[no-untyped-def]
    @functools.wraps(function)
    def strict(q, k, v, **options):  # type: ignore[no-untyped-def]
        assert {x.dtype for x in (q, k, v)} <= {torch.float16, torch.bfloat16}
        return function(q, k, v, **options)

    return strict


@contextlib.contextmanager
def installer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that makes one version importable, on a machine that seems able to run it."""

    def forget() -> None:
        flash._find_module.cache_clear()
        attention._trial.cache_clear()

    def do(version: str, *, full_width: bool = False, packed: bool = True) -> None:
        """`full_width`: its kernel takes any type, so that its result can be compared exactly.
        `packed`: it has the function for windows laid end to end, too."""
        module, function = VERSIONS[version]
        functions = {"flash_attn_func": function}
        if packed:
            functions["flash_attn_varlen_func"] = PACKED[version]
        if not full_width:
            functions = {name: _half_only(one) for name, one in functions.items()}

        def find(name: str) -> SimpleNamespace:
            if name != module:
                raise ImportError(name)
            return SimpleNamespace(**functions)

        monkeypatch.setattr(flash.importlib, "import_module", find)
        monkeypatch.setattr(flash, "_able", lambda device: True)  # noqa: ARG005
        if full_width:
            monkeypatch.setattr(flash, "_kernel_dtype", lambda dtype: dtype)
        forget()

    yield do
    monkeypatch.undo()
    forget()
