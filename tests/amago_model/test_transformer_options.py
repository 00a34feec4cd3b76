"""Positions, sinks, clipped scores, and back-ends: what each computes, and which is chosen.

That each acts as it learns is in test_acting_equals_learning.py.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from amago_model import ConfigError, TransformerConfig
from amago_model.attention.causal_attention import BACKENDS, Attention, choose
from amago_model.attention.pattern import Pattern
from amago_model.encoders.transformer import Transformer, rotate, rotation_of
from tests.amago_model.flash_stand_ins import installer

CPU = torch.device("cpu")


def _config(**changes) -> TransformerConfig:  # type: ignore[no-untyped-def]
    small = {"d_model": 16, "n_heads": 2, "d_ff": 24, "n_layers": 2, "context": 5}
    return TransformerConfig(**(small | changes))


POSITIONS = {
    "sinusoidal": {},
    "learnable": {"position": {"kind": "learnable", "max_time": 12}},
    "rotary": {"position": {"kind": "rotary"}},
    "none": {"position": {"kind": "none"}},
}
PATTERNS = {
    "plain": {},
    "sinks": {"n_sinks": 2},
    "many sinks": {"n_sinks": 9, "context": 3},
    "biased sinks": {"n_sinks": 2, "sink_bias": 0.7},
    "clip": {"logit_clip": 0.05},
    "clip and sinks": {"n_sinks": 1, "sink_bias": -0.4, "logit_clip": 0.3},
    "long context": {"context": 64, "n_sinks": 1, "sink_bias": 1.0},
}
OPTIONS = {
    "qk layer": {"qk_norm": "layer"},
    "qk rms, rotary": {"qk_norm": "rms", "position": {"kind": "rotary"}},
    "plain layers": {"sigma_reparam": False, "normformer_norms": False, "head_scaling": False},
    "no sigma": {"sigma_reparam": False},
    "no NormFormer": {"normformer_norms": False},
    "no head scaling": {"head_scaling": False},
}


def _able(backend: str, pattern: dict) -> bool:  # type: ignore[type-arg]
    return backend != "sdpa" or not pattern.get("logit_clip")


def _slow_attention(q, k, v, p: Pattern):  # type: ignore[no-untyped-def]
    """One row and one key at a time, in the order of the definition."""
    out = torch.zeros_like(q)
    for n, h, i in itertools.product(*map(range, q.shape[:3])):
        weights = {}
        for j in range(i + 1):
            if i - j < p.context or j < p.n_sinks:
                score = float(q[n, h, i] @ k[n, h, j]) / math.sqrt(q.shape[-1])
                score += p.sink_bias if j < p.n_sinks else 0.0
                if p.logit_clip:
                    score = max(-p.logit_clip, min(p.logit_clip, score))
                weights[j] = math.exp(score)
        for j, weight in weights.items():
            out[n, h, i] += weight / sum(weights.values()) * v[n, h, j]
    return out


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_back_end_equals_the_definition_forward_and_each_other_backward(pattern: str) -> None:
    gradients = []
    inputs = [2 * torch.randn(2, 2, 11, 8, dtype=torch.float64) for _ in "qkv"]
    for backend in ("math", "sdpa", "flex"):
        if not _able(backend, PATTERNS[pattern]):
            continue
        attention = Attention(_config(attention=backend, **PATTERNS[pattern]))
        expected = _slow_attention(*inputs, attention.pattern)
        if backend == "flex":  # on a CPU it has no backward
            torch.testing.assert_close(attention.attend(*inputs, 0.0), expected)
            continue
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attention.attend(*leaves, 0.0)
        torch.testing.assert_close(out, expected)
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_rotary_scores_depend_on_time_differences_alone() -> None:
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(t_q: int, t_k: int) -> torch.Tensor:
        turned = (rotate(x, rotation_of(torch.tensor([[t]]), 8)) for x, t in ((q, t_q), (k, t_k)))
        return torch.linalg.vecdot(*turned)

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(score(9, 4), score(9, 5))


def test_learned_positions_beyond_the_table_share_its_last_row() -> None:
    memory = Transformer(_config(position={"kind": "learnable", "max_time": 4}), 6).eval()
    x = torch.randn(1, 1, 6).expand(1, 3, 6)[:, :1]
    at = [memory(x, torch.tensor([[t]])) for t in (2, 3, 900)]
    torch.testing.assert_close(at[1], at[2])
    assert not torch.allclose(at[0], at[1])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"position": {"kind": "learnable"}}, "position.max_time: expected a value"),
        ({"position": {"kind": "rotary", "max_time": 5}}, "max_time.*'learnable'"),
        ({"sink_bias": 1.0}, "sink_bias"),
        ({"logit_clip": -1.0}, "logit_clip"),
        ({"logit_clip": 5.0}, "logit_clip.*'sdpa'"),
        ({"n_sinks": 1, "attention": "flash"}, "n_sinks.*'flash'"),
        ({"dropout_attn": 0.1, "attention": "flex"}, "dropout_attn.*'flex'"),
        ({"d_model": 6, "n_heads": 2, "position": {"kind": "rotary"}}, "n_heads"),
    ],
)
def test_options_that_nothing_could_serve_are_refused_by_name(changes: dict, field: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=field):
        _config(**changes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention has no backward on a CPU")
# The compiler's own.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_flex_equals_math_forward_and_backward_on_a_gpu(pattern: str) -> None:
    inputs, results = [torch.randn(2, 2, 40, 16, device="cuda") for _ in "qkv"], []
    for backend in ("math", "flex"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = Attention(_config(attention=backend, **PATTERNS[pattern])).attend(*leaves, 0.0)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_training_with_flex_on_a_cpu_is_refused_by_name() -> None:
    memory = Transformer(_config(attention="flex"), 6)
    with pytest.raises(ConfigError, match=r"'flex'.*no gradients.*sdpa, math"):
        memory(torch.randn(1, 3, 6), torch.arange(3)[None])


def test_auto_takes_the_best_that_can_and_names_it() -> None:
    for changes, name in (({}, "sdpa"), ({"n_sinks": 2}, "sdpa"), ({"logit_clip": 1.0}, "math")):
        memory = Transformer(_config(attention="auto", **changes), 6)
        memory(torch.randn(1, 3, 6), torch.arange(3)[None])
        assert memory.attention_name == name


@pytest.mark.parametrize("changes", [*POSITIONS.values(), *PATTERNS.values(), *OPTIONS.values()])
def test_every_option_is_saved_in_the_policy_file_and_rebuilt(
    memory_comes_back,
    changes: dict,  # type: ignore[no-untyped-def,type-arg]
) -> None:
    config = _config(attention="auto", **changes)
    memory_comes_back(config)


# ------------------------------------------------------------------------- flash-attn, stood in for


@pytest.fixture
def install(monkeypatch):  # type: ignore[no-untyped-def]
    """Make one version of the package importable, on a machine that seems able to run it."""
    with installer(monkeypatch) as do:
        yield do


@pytest.mark.parametrize("context", [4, 64])
def test_flash_attn_equals_math_forward_and_backward(install, context: int) -> None:  # type: ignore[no-untyped-def]
    install()
    inputs, results = [torch.randn(2, 2, 9, 8) for _ in "qkv"], []
    for backend in ("flash", "math"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = Attention(_config(attention=backend, context=context)).attend(*leaves, 0.0)
        assert out.dtype == torch.float32
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_flash_attn_is_chosen_only_for_half_precision(
    install,  # type: ignore[no-untyped-def]
) -> None:
    q, plain = torch.randn(1, 2, 5, 8), Pattern(context=5)
    install()
    assert choose("auto", q, plain, 0.0) == "sdpa"
    assert choose("auto", q.bfloat16(), plain, 0.1) == "flash"
    assert choose("auto", q.bfloat16(), Pattern(context=5, n_sinks=1), 0.0) == "sdpa"
    assert choose("auto", q[..., :7].bfloat16(), plain, 0.0) == "sdpa"


def test_asking_for_an_absent_back_end_says_why_and_what_else_there_is() -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ConfigError, match=r"'flash' cannot.*not installed.*sdpa, math, flex"):
        choose("flash", q, Pattern(context=5), 0.0)
    assert [n for n in BACKENDS if n != "flash"] == ["sdpa", "math", "flex"]


def test_kernels_that_fail_their_trial_are_not_chosen_and_the_reason_is_told(
    install,  # type: ignore[no-untyped-def]
) -> None:
    def broken(q, k, v, dropout_p=0.0, causal=False, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
        raise RuntimeError(f"no kernel image for {len((q, k, v, dropout_p, causal, window_size))}")

    install(broken)
    q = torch.randn(1, 2, 5, 8).bfloat16()
    assert choose("auto", q, Pattern(context=5), 0.0) == "sdpa"
    with pytest.raises(ConfigError, match=r"'flash' cannot.*trial failed.*no kernel image"):
        choose("flash", q, Pattern(context=5), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_auto_always_finds_one_that_runs(pattern: str, dtype: torch.dtype) -> None:
    attention = Attention(_config(attention="auto", **PATTERNS[pattern]))
    for gradient, dropout in itertools.product((True, False), (0.0, 0.2)):
        q = torch.randn(1, 2, 7, 8, dtype=dtype).requires_grad_(gradient)
        attention.attend(q, q, q, dropout)
        assert attention.name in ("sdpa", "math")


def test_the_plan_is_what_the_first_window_uses_and_refuses_what_it_would(install) -> None:  # type: ignore[no-untyped-def]
    memory = Transformer(_config(attention="auto"), 6)
    assert memory.kernels(CPU, torch.bfloat16) == {"attention": "sdpa"}
    with pytest.raises(ConfigError, match=r"'flex'.*no gradients"):
        Transformer(_config(attention="flex"), 6).kernels(CPU, torch.float32)
    install()
    assert memory.kernels(CPU, torch.bfloat16) == {"attention": "flash"}
    memory.bfloat16()(torch.randn(1, 3, 6).bfloat16(), torch.arange(3)[None])
    assert memory.attention_name == "flash"
