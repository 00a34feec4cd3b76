"""Acting one row at a time is what was learned from whole windows: for every memory, every way to
compute attention, every position, whatever was reset when."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from amago_model import (
    ActingPolicy,
    FeedForwardConfig,
    GRUConfig,
    IdentityConfig,
    MambaConfig,
    TrajectoryEncoderConfig,
    TransformerConfig,
)
from amago_model.encoders.trajectory import make_trajectory_encoder
from amago_model.encoders.transformer import SigmaLinear, Transformer
from tests.amago_model.flash_stand_ins import installer

CONTEXT = 5
BEGINS = ({0}, {0, 3, 17}, {0, 1, 9, 14}, {0, 4, 10, 16})
"""For each environment, the steps at which its episodes begin. Their lengths are 1 to 22: less than
the context, one less, equal, one more, and several times around the ring."""
STEPS = 22


def _transformer(**changes) -> TrajectoryEncoderConfig:  # type: ignore[no-untyped-def]
    small = {"d_model": 16, "n_heads": 2, "d_ff": 24, "n_layers": 2, "context": CONTEXT}
    return TransformerConfig(**(small | changes))


def _mamba(**changes) -> TrajectoryEncoderConfig:  # type: ignore[no-untyped-def]
    small = {"d_model": 16, "d_state": 4, "n_layers": 2}
    return MambaConfig(**(small | changes))


MEMORIES = {
    "identity": IdentityConfig(),
    "feed_forward": FeedForwardConfig(d_model=16),
    "gru": GRUConfig(d_hidden=8, d_output=8),
    "mamba": _mamba(),
    "mamba, convolution of one row": _mamba(d_conv=1, expand=1),
    "mamba, long convolution": _mamba(d_conv=7, norm="rms"),
}

POSITIONS = {
    "sinusoidal": {},
    "learnable": {"position": {"kind": "learnable", "max_time": 12}},
    "rotary": {"position": {"kind": "rotary"}},
    "none": {"position": {"kind": "none"}},
}
PATTERNS = {
    "plain": {"context": 64},
    "window": {},
    "window of one": {"context": 1},
    "sinks": {"n_sinks": 2},
    "more sinks than window": {"n_sinks": 9, "context": 3},
    "biased sinks": {"n_sinks": 2, "sink_bias": 0.7},
    "clip": {"logit_clip": 0.3},
    "clip and sinks": {"n_sinks": 1, "sink_bias": -0.4, "logit_clip": 0.3},
    "qk_norm": {"qk_norm": "layer"},
    "qk_norm and sinks": {"qk_norm": "hypersphere", "n_sinks": 1},
}
LAYERS = {
    "plain layers": {"sigma_reparam": False, "normformer_norms": False, "head_scaling": False},
    "no sigma": {"sigma_reparam": False, "activation": "adaptive"},
    "no NormFormer": {"normformer_norms": False, "norm": "rms"},
    "no head scaling": {"head_scaling": False, "norm": "simnorm"},
}


def _able(backend: str, pattern: dict) -> bool:  # type: ignore[type-arg]
    if backend == "flash":
        return not {"n_sinks", "logit_clip"} & pattern.keys()
    return backend != "sdpa" or "logit_clip" not in pattern


for _backend in ("sdpa", "math", "flex", "flash"):
    for (_position, _p), (_pattern, _w) in itertools.product(POSITIONS.items(), PATTERNS.items()):
        if _able(_backend, _w):
            _name = f"transformer, {_backend}, {_position}, {_pattern}"
            MEMORIES[_name] = _transformer(attention=_backend, **_p, **_w)
MEMORIES |= {f"transformer, {name}": _transformer(**changes) for name, changes in LAYERS.items()}


@torch.no_grad()
def _excited(config: TrajectoryEncoderConfig) -> nn.Module:
    """In float64, with larger weights: at their initial values attention is nearly uniform, and
    much could be wrong unseen."""
    memory = make_trajectory_encoder(config, 6).double()
    for p in memory.parameters():
        p.add_(0.3 * torch.randn_like(p))
    for layer in memory.modules():
        if isinstance(layer, SigmaLinear):
            for _ in range(20):  # its spectral norm finds its way to the new weights
                layer(torch.zeros_like(layer.weight[:1]))
    return memory.eval()


@pytest.fixture
def make(monkeypatch):  # type: ignore[no-untyped-def]
    """A memory by its name."""
    with installer(monkeypatch) as install:

        def do(name: str) -> nn.Module:
            if ", flash" in name:
                install(full_width=True)
            return _excited(MEMORIES[name])

        yield do


def _step_through(memory: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, STEPS, D]: outputs and episode times [N, STEPS], with the rows of BEGINS reset."""
    outputs, times = [], []
    time_idx = torch.zeros(len(BEGINS), dtype=torch.int64)
    hidden = memory.initial_hidden(len(BEGINS), "cpu")  # type: ignore[operator]
    for t in range(STEPS):
        done = torch.tensor([t > 0 and t in begins for begins in BEGINS])
        hidden = memory.reset_hidden(hidden, done)  # type: ignore[operator]
        time_idx = torch.where(done, 0, time_idx)
        y, hidden = memory.step(x[:, t : t + 1], time_idx.unsqueeze(1), hidden)  # type: ignore[operator]
        outputs.append(y)
        times.append(time_idx)
        time_idx = time_idx + 1
    return torch.cat(outputs, dim=1), torch.stack(times, dim=1)


def _episodes() -> list[tuple[int, int, int]]:
    """(environment, first step, step behind the last) of each."""
    edges = [[*sorted(begins), STEPS] for begins in BEGINS]
    return [(n, a, b) for n, e in enumerate(edges) for a, b in itertools.pairwise(e)]


@pytest.mark.sample(46)
@torch.no_grad()
@pytest.mark.parametrize("name", MEMORIES)
def test_stepping_equals_the_full_forward_with_rows_reset_at_different_times(make, name) -> None:  # type: ignore[no-untyped-def]
    memory = make(name)
    x = torch.randn(len(BEGINS), STEPS, 6, dtype=torch.float64)
    stepped, times = _step_through(memory, x)
    # All episodes at once, each padded with numbers that must not matter.
    episodes = _episodes()
    whole = torch.randn(len(episodes), STEPS, 6, dtype=torch.float64)
    time_idx = torch.full((len(episodes), STEPS), 7)
    for i, (n, a, b) in enumerate(episodes):
        whole[i, : b - a], time_idx[i, : b - a] = x[n, a:b], times[n, a:b]
    states = memory(whole, time_idx)
    for i, (n, a, b) in enumerate(episodes):
        torch.testing.assert_close(stepped[n, a:b], states[i, : b - a], rtol=1e-6, atol=1e-6)
    if isinstance(memory, Transformer):
        assert memory.attention_name == memory.config.attention


BRIEF = [n for n in MEMORIES if "transformer" not in n] + [
    f"transformer, sdpa, {position}, {pattern}"
    for position in POSITIONS
    for pattern in ("window", "sinks")
]


@torch.no_grad()
@pytest.mark.parametrize("name", BRIEF)
def test_a_window_that_begins_in_an_episode_is_acting_begun_there(make, name: str) -> None:  # type: ignore[no-untyped-def]
    memory, first = make(name), 6
    x = torch.randn(2, 13, 6, dtype=torch.float64)
    time_idx = torch.arange(first, first + 13).expand(2, 13)
    hidden, outputs = memory.initial_hidden(2, "cpu"), []
    for t in range(13):
        y, hidden = memory.step(x[:, t : t + 1], time_idx[:, t : t + 1], hidden)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), memory(x, time_idx), rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_one_layer_acts_late_in_an_episode_as_it_learned_from_any_window_of_its_context(
    position: str, length: int
) -> None:
    """Windows shorter than the episode: from one context of rows on, the last state is the same."""
    memory = _excited(_transformer(n_layers=1, **POSITIONS[position]))
    x, time_idx = torch.randn(1, STEPS, 6, dtype=torch.float64), torch.arange(STEPS)[None]
    hidden = memory.initial_hidden(1, "cpu")
    for t in range(STEPS):
        acted, hidden = memory.step(x[:, t : t + 1], time_idx[:, t : t + 1], hidden)
        if t >= length:
            window = slice(t - length + 1, t + 1)
            learned = memory(x[:, window], time_idx[:, window])[:, -1:]
            assert torch.allclose(acted, learned, atol=1e-6) == (length >= CONTEXT)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [n for n in BRIEF if "window" not in n] + ["transformer, sdpa, rotary, window"],
)
@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("discrete", {}),
        ("continuous", {}),
        ("continuous", {"show_reset": True, "input_norm": {"previous": False}}),
        ("continuous", {"differences": True, "symlog": True}),
    ],
)
def test_the_policys_distribution_is_the_same_step_by_step_and_over_whole_windows(
    make_spaces,  # type: ignore[no-untyped-def]
    make_config,  # type: ignore[no-untyped-def]
    make_batch,  # type: ignore[no-untyped-def]
    name: str,
    kind: str,
    inputs: dict[str, bool],
) -> None:
    config = make_config(MEMORIES[name])
    config = config.replace(timestep_encoder=config.timestep_encoder.replace(**inputs))
    policy = ActingPolicy(config, make_spaces(kind)).eval()
    batch = make_batch(policy.spaces, lengths=(14, 14, 14), size=14, first=0)
    seen: list[Tensor] = []
    hook = policy.actor.mlp.register_forward_hook(lambda *call: seen.append(call[2]))
    hidden = policy.initial_hidden(3)
    for t in range(14):
        obs = {key: value[:, t] for key, value in batch.obs.items()}
        row = (batch.prev_action[:, t], batch.prev_reward[:, t], batch.time_idx[:, t])
        _, hidden = policy.act(obs, *row, hidden)
    hook.remove()
    rows = policy.encode_timesteps(batch.obs, batch.prev_action, batch.prev_reward, batch.time_idx)
    whole = policy.actor.mlp(policy.encode_trajectory(rows, batch.time_idx))[:, :14]
    torch.testing.assert_close(torch.stack(seen, 1), whole, rtol=1e-4, atol=1e-5)
