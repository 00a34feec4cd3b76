"""What a memory may see, and the parts of the Transformer.

That each acts as it learns is in test_acting_equals_learning.py.
"""

from __future__ import annotations

import pytest
import torch

from amago_model import (
    FeedForwardConfig,
    GRUConfig,
    IdentityConfig,
    MambaConfig,
    TrajectoryEncoderConfig,
    TransformerConfig,
)
from amago_model.encoders.trajectory import make_trajectory_encoder
from amago_model.encoders.transformer import SigmaLinear, sinusoid


def _transformer(context: int = 5, **changes) -> TrajectoryEncoderConfig:  # type: ignore[no-untyped-def]
    small = {"d_model": 16, "n_heads": 2, "d_ff": 24, "n_layers": 2, "context": context}
    return TransformerConfig(**(small | changes))


MEMORIES = {
    "identity": IdentityConfig(),
    "feed_forward": FeedForwardConfig(d_model=16),
    "gru": GRUConfig(d_hidden=8, d_output=8),
    "mamba": MambaConfig(d_model=8, d_state=4),
    "transformer": _transformer(),
    "transformer, math": _transformer(attention="math"),
    "transformer, sinks": _transformer(n_sinks=2),
    "transformer, long context": _transformer(context=64),
}


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


@torch.no_grad()
def test_a_sigma_layer_that_acts_sees_every_change_of_its_weights() -> None:
    layer, x = SigmaLinear(5, 4).eval(), torch.randn(3, 5)

    def fresh() -> torch.Tensor:
        with torch.enable_grad():  # as in learning, nothing is kept
            return layer(x).detach()

    torch.testing.assert_close(layer(x), fresh())
    other = {name: value + 0.1 for name, value in layer.state_dict().items()}
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)

    def step() -> None:
        layer.train()
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        layer.eval()

    changes = (
        lambda: layer.load_state_dict(other),
        lambda: layer.weight.mul_(torch.rand(4, 5)),
        lambda: layer.gamma.add_(1),
        step,
        layer.double,
    )
    for change in changes:
        before = layer(x)
        change()
        x = x.to(layer.weight.dtype)
        torch.testing.assert_close(layer(x), fresh(), rtol=0, atol=0)
        assert before.dtype != x.dtype or not torch.allclose(layer(x), before)


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
