"""Windows laid end to end are the same windows: every memory, every back-end, whole updates."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn

from amago_model import (
    ActingPolicy,
    Agent,
    AgentConfig,
    AugmentConfig,
    CustomConfig,
    FeedForwardConfig,
    ObsSpace,
    PlainImageConfig,
    Spaces,
    TimestepEncoderConfig,
    TransformerConfig,
    register,
    registry,
)
from amago_model.attention import causal_attention as attention
from amago_model.attention.causal_attention import Attention
from amago_model.attention.flex import attend_flex
from amago_model.attention.pattern import Pattern, band_mask
from amago_model.attention.sdpa import attend_math
from amago_model.data.packing import Packing, make_packing, supports_packing
from amago_model.encoders.timestep import TimestepEncoder
from amago_model.encoders.trajectory import (
    IdentityTrajectoryEncoder,
    make_trajectory_encoder,
)
from amago_model.encoders.transformer import Transformer
from tests.amago_model.cases import MEMORIES, make
from tests.amago_model.flash_stand_ins import installer

CPU = torch.device("cpu")
POSITIONS = {
    "sinusoidal": {},
    "learnable": {"position": {"kind": "learnable", "max_time": 12}},
    "rotary": {"position": {"kind": "rotary"}},
    "none": {"position": {"kind": "none"}},
}
PATTERNS = {
    "longer context": {"context": 64},
    "shorter context": {"context": 3},
    "sinks": {"context": 3, "n_sinks": 2},
    "biased sinks": {"context": 2, "n_sinks": 2, "sink_bias": 0.75},
    "sinks, longer context": {"context": 64, "n_sinks": 1, "sink_bias": -0.5},
    "clip and sinks": {"context": 3, "n_sinks": 1, "sink_bias": -0.5, "logit_clip": 0.25},
}
ABLE = [
    (backend, name)
    for backend, (name, pattern) in itertools.product(("sdpa", "math", "flash"), PATTERNS.items())
    if backend == "math"
    or (backend == "sdpa" and "logit_clip" not in pattern)
    or not {"n_sinks", "logit_clip"} & pattern.keys()
]
TRANSITIONS = ([5, 1, 0, 8, 3], [1, 1], [0, 9], [2])
"""Of each window of a batch; none is as long as the nine there is room for, but one."""


def _mask(transitions: list[int], size: int = 9) -> Tensor:
    return torch.arange(size) < torch.tensor(transitions)[:, None]


def _transformer(**changes) -> TransformerConfig:  # type: ignore[no-untyped-def]
    small = {"d_model": 16, "n_heads": 2, "d_ff": 24, "n_layers": 2, "dropout_ff": 0.0}
    return TransformerConfig(**(small | {"dropout_emb": 0.0} | changes))


@pytest.fixture
def install(monkeypatch):  # type: ignore[no-untyped-def]
    """Make one version of flash-attn importable, on a machine that seems able to run it."""
    with installer(monkeypatch) as do:
        yield do


# ------------------------------------------------------------------------------ the rows that exist


def test_rows_reach_to_the_one_after_the_last_transition() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)
    packing = make_packing(mask)
    assert packing is not None
    assert packing.lengths == (4, 2, 0, 4) and packing.longest == 4
    assert packing.starts.tolist() == [0, 4, 6, 6, 10]
    assert packing.window.tolist() == [0] * 4 + [1] * 2 + [3] * 4
    assert packing.position.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3]
    x = torch.arange(1, 17).reshape(4, 4)
    assert packing.pack(x).tolist() == [[1, 2, 3, 4, 5, 6, 13, 14, 15, 16]]
    back = packing.unpack(packing.pack(x), 5)
    assert back.tolist() == [[1, 2, 3, 4, 0], [5, 6, 0, 0, 0], [0] * 5, [13, 14, 15, 16, 0]]


@pytest.mark.parametrize("transitions", [[9, 9], [0, 0]])
def test_nothing_is_packed_where_nothing_is_or_nothing_lacks(transitions: list[int]) -> None:
    assert make_packing(_mask(transitions)) is None


# ----------------------------------------------------------------------------------------- memories


def _both_ways(memory: nn.Module, transitions: list[int], dtype: torch.dtype) -> list[list[Tensor]]:
    """States of the rows that exist and the gradients they cause, padded and packed."""
    mask = _mask(transitions)
    packing = make_packing(mask)
    assert packing is not None
    rows = packing.unpack(torch.ones(1, len(packing.index)), 10)
    x, weight = torch.randn(len(mask), 10, 6, dtype=dtype), torch.randn(len(mask), 10, 1)
    time_idx = torch.randint(0, 5, (len(mask), 1)) + torch.arange(10)
    results = []
    for packed in (False, True):
        leaf = x.clone().requires_grad_()
        memory.zero_grad()
        if packed:
            out = memory(packing.pack(leaf), packing.pack(time_idx), packing=packing)
            assert out.shape[:2] == (1, sum(packing.lengths))
            out = packing.unpack(out, 10)
        else:
            out = memory(leaf, time_idx) * rows.unsqueeze(-1).to(dtype)
        out_of = [leaf, *memory.parameters()]
        loss = (out.square() * weight.to(dtype)).sum()
        results.append([out.detach(), *torch.autograd.grad(loss, out_of, allow_unused=True)])
    return results


def _excited(memory: nn.Module) -> nn.Module:
    """With larger weights: at their initial values attention is nearly uniform, and much could be
    wrong unseen. Power iterations rest, or the second pass would be of another function."""
    with torch.no_grad():
        for p in memory.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return memory.eval()


def _assert_same(results: list[list[Tensor]], tolerance: float, gradients: float) -> None:
    """Up to so much of the largest of all states, and of all gradients."""
    for part, most in ((slice(0, 1), tolerance), (slice(1, None), gradients)):
        padded, packed = (result[part] for result in results)
        scale = max(float(x.abs().max()) for x in padded if x is not None)
        assert scale > 0
        for a, b in zip(packed, padded, strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=most * scale)


@pytest.mark.sample(40)
@pytest.mark.parametrize("few_rows", [0, 100])
@pytest.mark.parametrize(("backend", "pattern"), ABLE)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_packed_transformer_is_the_padded_one_forward_and_backward(
    monkeypatch,  # type: ignore[no-untyped-def]
    install,  # type: ignore[no-untyped-def]
    backend: str,
    pattern: str,
    position: str,
    few_rows: int,
) -> None:
    """Window by window and padded again; flash-attn by its own function, and without one."""
    if backend == "flash":
        install(full_width=True)
    monkeypatch.setattr(attention, "MIN_WINDOW", few_rows)
    config = _transformer(attention=backend, **PATTERNS[pattern], **POSITIONS[position])
    exact = 1e-6 if position == "rotary" else 1e-9  # turns are computed in float32
    memory = _excited(Transformer(config, 6)).double()
    for transitions in TRANSITIONS:
        _assert_same(_both_ways(memory, transitions, torch.float64), exact, exact)
    assert memory.attention_name == backend
    whole = Transformer(config, 6).eval()
    _assert_same(_both_ways(whole, TRANSITIONS[0], torch.float32), 1e-5, 1e-4)


@pytest.mark.parametrize("name", ["identity", "feed_forward"])
def test_what_keeps_no_memory_works_on_packed_rows(name: str) -> None:
    memory = _excited(make_trajectory_encoder(MEMORIES[name], 6)).double()
    for transitions in TRANSITIONS:
        _assert_same(_both_ways(memory, transitions, torch.float64), 1e-9, 1e-9)


# ------------------------------------------------------------------------- kernels for packed rows


def _by_window(q: Tensor, k: Tensor, v: Tensor, p: Pattern, packing: Packing) -> Tensor:
    lengths = [n for n in packing.lengths if n]
    outs = []
    for part in zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True):
        n = part[0].shape[2]
        mask = band_mask(n, p.context, CPU, p.n_sinks)
        outs.append(
            attend_math(
                *part,
                mask=mask,
                causal=False,
                dropout=0.0,
                bias=p.bias(n, CPU),
                clip=p.logit_clip,
            )
        )
    return torch.cat(outs, dim=2)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_flex_masks_windows_from_each_other(pattern: str) -> None:
    """Forward; on a CPU it has no backward, and is asked window by window but here."""
    at = Attention(_transformer(attention="flex", **PATTERNS[pattern]))
    p = at.pattern
    for transitions in TRANSITIONS[:2]:
        packing = make_packing(_mask(transitions))
        assert packing is not None
        q, k, v = (torch.randn(1, 2, len(packing.index), 8, dtype=torch.float64) for _ in "qkv")
        expected = _by_window(q, k, v, p, packing)
        for out in (attend_flex(q, k, v, p, packing), at.attend_packed(q, k, v, packing, 0.0)):
            torch.testing.assert_close(out, expected, rtol=0.0, atol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention has no backward on a CPU")
# The compiler's own.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_flex_on_packed_rows_equals_math_forward_and_backward_on_a_gpu(pattern: str) -> None:
    packing, results = make_packing(_mask([5, 1, 0, 8, 3]).cuda()), []
    assert packing is not None
    inputs = [torch.randn(1, len(packing.index), 2, 16, device="cuda") for _ in "qkv"]
    for backend in ("math", "flex"):
        at = Attention(_transformer(attention=backend, **PATTERNS[pattern]))
        assert at.has_packed_kernel(torch.device("cuda"), torch.float32, 2, 16) == (
            backend == "flex"
        )
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = at.attend_packed(*(x.transpose(1, 2) for x in leaves), packing, 0.0)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("context", [4, 64])
def test_flash_attn_takes_packed_windows(install, context: int) -> None:  # type: ignore[no-untyped-def]
    install(full_width=True)
    packing = make_packing(_mask([5, 1, 0, 8, 3]))
    assert packing is not None
    at = Attention(_transformer(attention="flash", context=context))
    assert at.has_packed_kernel(CPU, torch.float64, 2, 8)
    results = []
    inputs = [torch.randn(1, 2, len(packing.index), 8, dtype=torch.float64) for _ in "qkv"]
    for packed in (True, False):
        leaves = [x.clone().requires_grad_() for x in inputs]
        if packed:
            out = at.attend_packed(*leaves, packing, 0.0)
        else:
            out = _by_window(*leaves, at.pattern, packing)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-10)


def test_sixteen_bits_go_to_flash_attn_packed_and_back(install) -> None:  # type: ignore[no-untyped-def]
    install()
    packing = make_packing(_mask([5, 1, 8]))
    assert packing is not None
    at = Attention(_transformer(attention="flash", context=4))
    q, k, v = (torch.randn(1, 2, len(packing.index), 8) for _ in "qkv")
    out = at.attend_packed(q, k, v, packing, 0.0)
    assert out.dtype == torch.float32
    expected = _by_window(q, k, v, at.pattern, packing)
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)


def test_packing_is_worth_a_wait_only_for_a_kernel_that_takes_it(
    install,  # type: ignore[no-untyped-def]
    make_spaces,  # type: ignore[no-untyped-def]
) -> None:
    plain = Transformer(_transformer(attention="auto"), 6)
    assert not plain.prefers_packing(CPU)
    install()
    assert not plain.prefers_packing(CPU)  # in 32 bits 'auto' is not flash-attn
    assert plain.bfloat16().prefers_packing(CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert plain.float().prefers_packing(CPU)
    # A device whose values nobody can read: had it been asked for them, it would fail.
    elsewhere = torch.ones(2, 3, dtype=torch.bool, device="meta")
    for memory in ("identity", "transformer"):
        policy = ActingPolicy(AgentConfig(trajectory_encoder=MEMORIES[memory]), make_spaces())
        assert policy.choose_packing(elsewhere) is None


# ------------------------------------------------------------------------------------ whole updates

PIXELS = {
    "frame": ObsSpace(shape=(9, 9, 3), dtype="uint8"),
    "words": ObsSpace(shape=(4,), dtype="int64", n=40),
    "goals": ObsSpace(shape=(2, 3), dtype="float32"),
    "speed": ObsSpace(shape=(3,), dtype="float32"),
}


def _update(agent: Agent, batch) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    torch.manual_seed(7)
    loss, metrics = agent(batch)
    loss.backward()
    grads = {f"grad {n}": p.grad for n, p in agent.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **metrics, **grads, **dict(agent.named_buffers())}


def _packed_and_padded(agent: Agent, batch, monkeypatch) -> tuple[dict, dict]:  # type: ignore[no-untyped-def,type-arg]
    """What an update leaves either way; the same numbers are drawn, dropout apart."""
    assert agent.policy.choose_packing(batch.mask) is not None
    packed = _update(copy.deepcopy(agent), batch)
    monkeypatch.setattr(ActingPolicy, "choose_packing", lambda self, mask: None)
    return packed, _update(copy.deepcopy(agent), batch)


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_update_is_the_same_packed_and_padded(monkeypatch, memory: str) -> None:  # type: ignore[no-untyped-def]
    """With missing observations inside windows; float64: loss, metrics, gradients, statistics."""
    agent, windows = make({"memory": memory, "privileged": True})
    packed, padded = _packed_and_padded(agent, windows([5, 1, 0, 7, 3], 9), monkeypatch)
    assert packed.keys() == padded.keys()
    for key, value in padded.items():
        torch.testing.assert_close(packed[key], value, rtol=1e-8, atol=1e-9)


def test_images_words_and_goals_are_the_same_packed_and_padded(
    monkeypatch,  # type: ignore[no-untyped-def]
    make_spaces,  # type: ignore[no-untyped-def]
    make_config,  # type: ignore[no-untyped-def]
    make_batch,  # type: ignore[no-untyped-def]
) -> None:
    """Shifted frames too: the shifts are those of the whole windows."""
    small = TimestepEncoderConfig(d_hidden=12, d_output=8)
    goals = small.goals.replace(keys=("goals",))
    encoder = small.replace(images=PlainImageConfig(augment=AugmentConfig(share=0.7)), goals=goals)
    spaces = Spaces(observations=PIXELS, action=make_spaces().action)
    batch = make_batch(spaces, lengths=(6, 3, 1, 0), size=8)
    drawn = batch.time_idx.shape
    obs = dict(batch.obs)
    obs["frame"] = torch.randint(0, 256, (*drawn, 9, 9, 3), dtype=torch.uint8)
    obs["words"] = torch.randint(0, 40, (*drawn, 4))
    batch = dataclasses.replace(batch, obs=obs)
    agent = Agent(make_config(encoder=encoder), spaces)
    packed, padded = _packed_and_padded(agent, batch, monkeypatch)
    for key, value in padded.items():
        torch.testing.assert_close(packed[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("few_rows", [0, 100])
@pytest.mark.parametrize(
    "where", ["dropout_ff", "dropout_emb", "dropout_qkv", "dropout_attn", "feed_forward"]
)
def test_dropout_does_not_depend_on_how_much_padding_there_is(
    monkeypatch,  # type: ignore[no-untyped-def]
    where: str,
    few_rows: int,
) -> None:
    monkeypatch.setattr(attention, "MIN_WINDOW", few_rows)
    memory = FeedForwardConfig(d_model=8, dropout=0.3)
    if where != "feed_forward":
        memory = _transformer(**{where: 0.3})
    agent, windows = make({})
    agent = Agent(agent.config.replace(trajectory_encoder=memory), agent.spaces)
    batch = windows([5, 1, 0, 7, 3], 9)
    batch = dataclasses.replace(batch, noise=agent.draw_noise(*batch.mask.shape))
    one, other = (_update(copy.deepcopy(agent), b)["loss"] for b in (batch, batch.padded(14)))
    torch.testing.assert_close(one, other)
    torch.manual_seed(8)
    assert not torch.allclose(copy.deepcopy(agent)(batch)[0].detach(), one)


def test_a_compiler_gets_every_row(monkeypatch, make_spaces, make_config) -> None:  # type: ignore[no-untyped-def]
    policy = ActingPolicy(make_config(), make_spaces())
    assert policy.choose_packing(_mask([3, 1])) is not None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert policy.choose_packing(_mask([3, 1])) is None


# --------------------------------------------------------------------------------------- your own


class Averages(nn.Module):
    """A memory that knows nothing of packed rows: the mean of all rows so far."""

    def __init__(self, config, d_input: int) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.d_output = d_input
        self.seen: list[torch.Size] = []

    def forward(self, x: Tensor, time_idx: Tensor) -> Tensor:
        assert x.shape[:2] == time_idx.shape
        self.seen.append(x.shape[:2])
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(-1)


class Doubled(IdentityTrajectoryEncoder):
    """A subclass of one that takes packed rows, which does not."""

    def forward(self, x: Tensor, time_idx: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * super().forward(x, time_idx)


class Rescaled(nn.Module):
    """A timestep encoder that knows nothing of packed rows."""

    def __init__(self, config, spaces) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.inner = TimestepEncoder(config.timestep_encoder, spaces)
        self.d_output = self.inner.d_output

    def forward(self, obs, previous, valid):  # type: ignore[no-untyped-def]
        assert previous.ndim == 3 and valid.shape == previous.shape[:2]
        return self.inner(obs, previous, valid) * torch.arange(len(valid))[:, None, None]


@pytest.mark.parametrize(
    ("rows", "memory"),
    [("", "averages"), ("rescaled", ""), ("rescaled", "averages"), ("", "doubled")],
)
def test_encoders_that_know_nothing_of_it_get_padded_windows(
    monkeypatch,  # type: ignore[no-untyped-def]
    make_spaces,  # type: ignore[no-untyped-def]
    make_config,  # type: ignore[no-untyped-def]
    make_batch,  # type: ignore[no-untyped-def]
    rows: str,
    memory: str,
) -> None:
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    register("timestep_encoder", "rescaled")(Rescaled)
    register("trajectory_encoder", "averages")(Averages)
    register("trajectory_encoder", "doubled")(lambda _, d_input: Doubled(d_input))
    custom = CustomConfig(timestep_encoder=rows, trajectory_encoder=memory)
    config = make_config().replace(custom=custom)
    agent = Agent(config, make_spaces())
    batch = make_batch(agent.spaces, lengths=(4, 1, 3), size=6)
    if rows and memory:
        assert agent.policy.choose_packing(batch.mask) is None  # there is nobody to gain by it
        return
    assert not supports_packing(
        agent.policy.trajectory_encoder if memory else agent.policy.timestep_encoder
    )
    packed, padded = _packed_and_padded(agent, batch, monkeypatch)
    for key, value in padded.items():
        torch.testing.assert_close(packed[key], value, rtol=1e-4, atol=1e-5)
