"""Every memory acts one row at a time as it learns whole windows, whatever was reset when."""

from __future__ import annotations

import pytest
import torch

from amago_model import FeedForwardConfig, GRUConfig, TrajectoryEncoderConfig, TransformerConfig
from amago_model.attention import attend_math, attend_sdpa, band_mask
from amago_model.trajectory_encoders import make_trajectory_encoder
from amago_model.transformer import SigmaLinear, sinusoid


def _transformer(context: int = 5, **changes) -> TrajectoryEncoderConfig:  # type: ignore[no-untyped-def]
    small = {"d_model": 16, "n_heads": 2, "d_ff": 24, "n_layers": 2, "context": context}
    return TrajectoryEncoderConfig(
        kind="transformer", transformer=TransformerConfig(**(small | changes))
    )


MEMORIES = {
    "identity": TrajectoryEncoderConfig(kind="identity"),
    "feedforward": TrajectoryEncoderConfig(
        kind="feedforward", feedforward=FeedForwardConfig(d_model=16)
    ),
    "gru": TrajectoryEncoderConfig(kind="gru", gru=GRUConfig(d_hidden=8, d_output=8)),
    "transformer": _transformer(),
    "transformer, math": _transformer(attention="math"),
    "transformer, plain": _transformer(
        sigma_reparam=False, normformer_norms=False, head_scaling=False
    ),
    "transformer, context of one": _transformer(context=1),
    "transformer, long context": _transformer(context=64),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_stepping_equals_the_full_forward_with_rows_reset_at_different_times(name: str) -> None:
    memory = make_trajectory_encoder(MEMORIES[name], 6).eval()
    # Environments and the steps at which their episodes begin; some far outgrow the context of 5.
    begins = ({0}, {0, 3}, {0, 1, 9, 14}, {0, 17}, {0, 7, 8})
    steps, n = 22, len(begins)
    x, outputs = torch.randn(n, steps, 6), []
    time_idx, hidden = torch.zeros(n, dtype=torch.int64), memory.initial_hidden(n, "cpu")
    times = []
    with torch.no_grad():
        for t in range(steps):
            done = torch.tensor([t > 0 and t in b for b in begins])
            hidden = memory.reset_hidden(hidden, done)
            time_idx[done] = 0
            y, hidden = memory.step(x[:, t : t + 1], time_idx.unsqueeze(1), hidden)
            outputs.append(y)
            times.append(time_idx.clone())
            time_idx += 1
        stepped, time_idx = torch.cat(outputs, dim=1), torch.stack(times, dim=1)
        for i, starts in enumerate(begins):
            edges = [*sorted(starts), steps]
            for a, b in zip(edges, edges[1:], strict=False):
                whole = memory(x[i : i + 1, a:b], time_idx[i : i + 1, a:b])
                torch.testing.assert_close(stepped[i : i + 1, a:b], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MEMORIES)
def test_no_row_sees_a_later_one(name: str) -> None:
    memory = make_trajectory_encoder(MEMORIES[name], 6).eval()
    x, time_idx = torch.randn(2, 12, 6), torch.arange(12).expand(2, 12)
    changed = x.clone()
    changed[:, 7:] += 1
    before, after = memory(x, time_idx), memory(changed, time_idx)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_a_layer_looks_back_exactly_one_context() -> None:
    memory = make_trajectory_encoder(_transformer(context=4, n_layers=1), 6).eval()
    x, time_idx = torch.randn(1, 10, 6), torch.arange(10)[None]
    for back, seen in ((3, True), (4, False)):
        changed = x.clone()
        changed[:, 9 - back] += 1
        same = torch.allclose(memory(x, time_idx)[:, 9], memory(changed, time_idx)[:, 9], atol=1e-6)
        assert same != seen


def test_the_two_attention_kernels_agree_forward_and_backward() -> None:
    for mask, causal in ((None, True), (band_mask(9, 4, torch.device("cpu")), False)):
        inputs = [torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
        results = []
        for attend in (attend_sdpa, attend_math):
            out = attend(*inputs, mask=mask, causal=causal, dropout=0.0)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def test_the_spectral_norm_of_a_sigma_layer_is_its_gamma() -> None:
    layer = SigmaLinear(20, 12)
    with torch.no_grad():
        layer.gamma.fill_(1.7)
        layer.weight.add_(torch.randn(12, 20) * 0.1)
    for _ in range(300):
        layer(torch.zeros(1, 20))
    layer.eval()
    matrix = layer(torch.eye(20)) - layer.bias
    assert torch.linalg.matrix_norm(matrix, 2).item() == pytest.approx(1.7, rel=1e-3)


def test_a_sigma_layer_may_run_twice_before_its_backward() -> None:
    layer, x = SigmaLinear(5, 4), torch.randn(3, 5)
    (layer(x).sum() + layer(2 * x).sum()).backward()
    assert layer.gamma.grad is not None


def test_positions_are_those_of_the_episode() -> None:
    table = sinusoid(torch.tensor([0, 3]), 4)
    expected = (
        [torch.tensor(v).sin() for v in (3.0, 0.03)],
        [torch.tensor(v).cos() for v in (3.0, 0.03)],
    )
    torch.testing.assert_close(table[0], torch.tensor([0.0, 1.0, 0.0, 1.0]))
    torch.testing.assert_close(table[1, 0::2], torch.stack(expected[0]))
    torch.testing.assert_close(table[1, 1::2], torch.stack(expected[1]))
