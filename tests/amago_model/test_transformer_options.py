"""Positions, sinks, clipped scores, normalised queries, and back-ends: each acts as it learns."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from amago_model import Agent, ConfigError, TrajectoryEncoderConfig, TransformerConfig, load_policy
from amago_model import flash_attention as flash
from amago_model.attention import BACKENDS, Attention, Pattern, choose
from amago_model.policy_file import save_policy
from amago_model.transformer import Transformer, rotate, rotation

CPU = torch.device("cpu")


def _config(**changes) -> TransformerConfig:  # type: ignore[no-untyped-def]
    small = {"d_model": 16, "n_heads": 2, "d_ff": 24, "n_layers": 2, "context": 5}
    return TransformerConfig(**(small | changes))


POSITIONS = {
    "sinusoidal": {},
    "learnable": {"position": "learnable", "max_time": 12},
    "rotary": {"position": "rotary"},
    "none": {"position": "none"},
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
    "qk rms, rotary": {"qk_norm": "rms", "position": "rotary"},
    "plain layers": {"sigma_reparam": False, "normformer_norms": False, "head_scaling": False},
    "no sigma": {"sigma_reparam": False},
    "no NormFormer": {"normformer_norms": False},
    "no head scaling": {"head_scaling": False},
}


def _able(backend: str, pattern: dict) -> bool:  # type: ignore[type-arg]
    return backend != "sdpa" or not pattern.get("logit_clip")


CASES = [
    (f"{backend}, {position}, {pattern}", {"attention": backend, **p, **w})
    for backend in ("sdpa", "math", "flex")
    for (position, p), (pattern, w) in itertools.product(POSITIONS.items(), PATTERNS.items())
    if _able(backend, w) and (pattern == "clip and sinks" or position in ("sinusoidal", "rotary"))
] + [(name, changes) for name, changes in OPTIONS.items()]


def _excite(memory: torch.nn.Module) -> None:
    """Larger, uneven weights: at their initial values attention is nearly uniform."""
    with torch.no_grad():
        for p in memory.parameters():
            p.add_(0.3 * torch.randn_like(p))


def _stepped_equals_full(memory: Transformer, begins, steps: int = 22) -> None:  # type: ignore[no-untyped-def]
    """Act with rows reset at the given steps; each episode must be what forward makes of it."""
    n = len(begins)
    x, outputs, times = torch.randn(n, steps, 6), [], []
    time_idx, hidden = torch.zeros(n, dtype=torch.int64), memory.initial_hidden(n, "cpu")
    for t in range(steps):
        done = torch.tensor([t > 0 and t in b for b in begins])
        hidden = memory.reset_hidden(hidden, done)
        time_idx[done] = 0
        y, hidden = memory.step(x[:, t : t + 1], time_idx.unsqueeze(1), hidden)
        outputs.append(y)
        times.append(time_idx.clone())
        time_idx += 1
    stepped, times_ = torch.cat(outputs, dim=1), torch.stack(times, dim=1)
    for i, starts in enumerate(begins):
        for a, b in itertools.pairwise([*sorted(starts), steps]):
            whole = memory(x[i : i + 1, a:b], times_[i : i + 1, a:b])
            torch.testing.assert_close(stepped[i : i + 1, a:b], whole, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("changes", [c for _, c in CASES], ids=[n for n, _ in CASES])
def test_every_option_acts_as_it_learns_with_rows_reset_at_different_times(changes: dict) -> None:  # type: ignore[type-arg]
    memory = Transformer(_config(**changes), 6).eval()
    _excite(memory)
    with torch.no_grad():
        _stepped_equals_full(memory, ({0}, {0, 3, 17}, {0, 1, 9, 14}))
    assert memory.attention_name == changes.get("attention", "sdpa")


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
            torch.testing.assert_close(attention.windows(*inputs, 0.0), expected)
            continue
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attention.windows(*leaves, 0.0)
        torch.testing.assert_close(out, expected)
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_rotary_scores_depend_on_time_differences_alone() -> None:
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(t_q: int, t_k: int) -> torch.Tensor:
        turned = (rotate(x, rotation(torch.tensor([[t]]), 8)) for x, t in ((q, t_q), (k, t_k)))
        return torch.linalg.vecdot(*turned)

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(score(9, 4), score(9, 5))


def test_learned_positions_beyond_the_table_share_its_last_row() -> None:
    memory = Transformer(_config(position="learnable", max_time=4), 6).eval()
    x = torch.randn(1, 1, 6).expand(1, 3, 6)[:, :1]
    at = [memory(x, torch.tensor([[t]])) for t in (2, 3, 900)]
    torch.testing.assert_close(at[1], at[2])
    assert not torch.allclose(at[0], at[1])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"position": "learnable"}, "max_time"),
        ({"max_time": 5}, "max_time"),
        ({"sink_bias": 1.0}, "sink_bias"),
        ({"logit_clip": -1.0}, "logit_clip"),
        ({"logit_clip": 5.0}, "logit_clip.*'sdpa'"),
        ({"n_sinks": 1, "attention": "flash"}, "n_sinks.*'flash'"),
        ({"dropout_attn": 0.1, "attention": "flex"}, "dropout_attn.*'flex'"),
        ({"position": "rotary", "d_model": 6, "n_heads": 2}, "n_heads"),
    ],
)
def test_options_that_nothing_could_serve_are_refused_by_name(changes: dict, field: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=field):
        _config(**changes)


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
    make_spaces,
    make_config,
    make_batch,
    changes: dict,  # type: ignore[no-untyped-def,type-arg]
) -> None:
    spaces = make_spaces("discrete")
    config = _config(attention="auto", **changes)
    memory = TrajectoryEncoderConfig(kind="transformer", transformer=config)
    agent = Agent(make_config(memory), spaces)
    loss, _ = agent(make_batch(spaces))
    loss.backward()
    unused = [n for n, p in agent.policy.named_parameters() if p.requires_grad and p.grad is None]
    assert not unused
    policy = load_policy(save_policy(agent))
    assert policy.config == agent.config
    x, time_idx = torch.randn(1, 9, 12), torch.arange(9)[None]
    agent.eval()
    torch.testing.assert_close(policy.states(x, time_idx), agent.policy.states(x, time_idx))


# ------------------------------------------------------------------------- flash-attn, stood in for


def _windowed(q, k, v, dropout_p, causal, window_size):  # type: ignore[no-untyped-def]
    """What flash-attn computes, from [N, L, H, E]: bounds are inclusive, -1 is none."""
    assert causal
    assert q.dtype in (torch.float16, torch.bfloat16)
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


VERSIONS = {"flash_attn": flash_2, "flash_attn_interface": flash_3, "flash_attn.cute": flash_4}


@pytest.fixture
def install(monkeypatch):  # type: ignore[no-untyped-def]
    """Make one version of the package importable, on a machine that seems able to run it."""

    def do(module: str) -> None:
        def find(name: str) -> SimpleNamespace:
            if name != module:
                raise ImportError(name)
            return SimpleNamespace(flash_attn_func=VERSIONS[module])

        monkeypatch.setattr(flash.importlib, "import_module", find)
        monkeypatch.setattr(flash, "_able", lambda device: True)  # noqa: ARG005
        flash.find_flash.cache_clear()

    yield do
    flash.find_flash.cache_clear()


@pytest.mark.parametrize("module", VERSIONS)
@pytest.mark.parametrize("context", [4, 64])
def test_flash_attn_equals_math_forward_and_backward(install, module: str, context: int) -> None:  # type: ignore[no-untyped-def]
    install(module)
    inputs, results = [torch.randn(2, 2, 9, 8) for _ in "qkv"], []
    for backend in ("flash", "math"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = Attention(_config(attention=backend, context=context)).windows(*leaves, 0.0)
        assert out.dtype == torch.float32
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("module", VERSIONS)
def test_a_policy_trained_with_flash_attn_acts_as_it_learned(install, module: str) -> None:  # type: ignore[no-untyped-def]
    install(module)
    memory = Transformer(_config(attention="flash", position="rotary"), 6).eval()
    x, time_idx = torch.randn(2, 12, 6), torch.arange(12).expand(2, 12)
    with torch.no_grad():
        learned, hidden, acted = memory(x, time_idx), memory.initial_hidden(2, "cpu"), []
        for t in range(12):
            y, hidden = memory.step(x[:, t : t + 1], time_idx[:, t : t + 1], hidden)
            acted.append(y)
    assert memory.attention_name == "flash"
    torch.testing.assert_close(torch.cat(acted, 1), learned, rtol=0.1, atol=0.1)


def test_flash_attn_is_chosen_only_for_half_precision_and_dropout_only_where_it_has_it(
    install,  # type: ignore[no-untyped-def]
) -> None:
    q, plain = torch.randn(1, 2, 5, 8), Pattern(context=5)
    install("flash_attn")
    assert choose("auto", q, plain, 0.0) == "sdpa"
    assert choose("auto", q.bfloat16(), plain, 0.1) == "flash"
    assert choose("auto", q.bfloat16(), Pattern(context=5, n_sinks=1), 0.0) == "sdpa"
    assert choose("auto", q[..., :7].bfloat16(), plain, 0.0) == "sdpa"
    flash.find_flash.cache_clear()
    install("flash_attn_interface")
    assert choose("auto", q.bfloat16(), plain, 0.1) == "sdpa"
    with pytest.raises(ConfigError, match="no dropout"):
        choose("flash", q, plain, 0.1)


def test_asking_for_an_absent_back_end_says_why_and_what_else_there_is() -> None:
    flash.find_flash.cache_clear()
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ConfigError, match=r"'flash' cannot.*not installed.*sdpa, math, flex"):
        choose("flash", q, Pattern(context=5), 0.0)
    assert [n for n in BACKENDS if n != "flash"] == ["sdpa", "math", "flex"]
