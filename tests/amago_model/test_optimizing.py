"""Clipping and stepping give the numbers that torch's own functions give."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from amago_model.runtime.optimizer import clip_gradients, forget_gradients, step_adamw


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def _learn(network: nn.Module, seed: int, without: int | None = None) -> list[nn.Parameter]:
    parameters = list(network.parameters())
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))
    network(x).square().sum().backward()
    if without is not None:
        parameters[without].grad = None
    return parameters


@pytest.mark.parametrize("limit", [0.1, 1e9, float("inf")])
def test_a_gradient_is_clipped_as_torch_does(limit: float) -> None:
    ours = _network()
    other = copy.deepcopy(ours)
    norm = clip_gradients(_learn(ours, 0), limit)
    expected = nn.utils.clip_grad_norm_(_learn(other, 0), limit)
    torch.testing.assert_close(norm, expected)
    assert float(norm) > 0.1
    for p, q in zip(ours.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_the_norm_of_no_gradient_is_nothing() -> None:
    assert float(clip_gradients(list(_network().parameters()), 1.0)) == 0.0


def test_steps_are_those_of_the_optimizer_and_so_is_its_state() -> None:
    ours = _network()
    other = copy.deepcopy(ours)
    optimizers = []
    for network in (ours, other):
        first, *rest = network.parameters()
        groups = [{"params": [first]}, {"params": rest, "weight_decay": 0.3}]
        optimizers.append(torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True))
    # The third update is the first in which every parameter has a gradient.
    for update, without in enumerate((2, 2, None, 0, None)):
        for group in (g for optimizer in optimizers for g in optimizer.param_groups):
            group["lr"] = 0.01 / (1 + update)
        learned = _learn(ours, update, without)
        step_adamw(optimizers[0])
        forget_gradients(learned)
        _learn(other, update, without)
        optimizers[1].step()
        optimizers[1].zero_grad(set_to_none=True)
        for p, q in zip(ours.parameters(), other.parameters(), strict=True):
            assert p.grad is None
            torch.testing.assert_close(p, q)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert states[0].keys() == states[1].keys() == {0, 1, 2, 3}
    for index, state in states[0].items():
        for name, value in state.items():
            torch.testing.assert_close(value, states[1][index][name])
    assert {float(state["step"]) for state in states[0].values()} == {3.0, 4.0, 5.0}


def test_a_state_that_was_loaded_goes_on() -> None:
    ours = _network()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01, fused=True)
    _learn(ours, 0)
    step_adamw(optimizer)
    resumed = copy.deepcopy(ours)
    second = torch.optim.AdamW(resumed.parameters(), lr=0.01, fused=True)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for network, its in ((ours, optimizer), (resumed, second)):
        forget_gradients(list(network.parameters()))
        _learn(network, 1)
        step_adamw(its)
    for p, q in zip(ours.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
