"""The target networks are no weights: no gradient, no step, no share in the clipped norm."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.amago_model.cases import CASES, make


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_target_networks_have_no_gradient_and_take_no_step(name: str) -> None:
    """For every kind of agent: everything else that is learned has one, and moves."""
    agent, windows = make({**CASES[name], "memory": "gru"})
    copies = {
        n: p
        for n, p in agent.named_parameters()
        if n.startswith(("target_", "critics.target.", "critics.lagged."))
    }
    assert bool(copies) == (agent.critics is not None)
    learned = agent.trainable_parameters()
    assert not {id(p) for p in copies.values()} & {id(p) for p in learned}
    assert len(learned) + len(copies) == len(list(agent.parameters()))
    before = copy.deepcopy(agent.state_dict())
    optimizer = torch.optim.AdamW(learned, lr=0.1, weight_decay=0.1)
    loss, _ = agent(windows([4, 2, 3], 4))
    loss.backward()
    assert all(p.grad is None for p in copies.values())
    assert all(p.grad is not None for p in learned)
    norm = torch.nn.utils.clip_grad_norm_(learned, 1e-3)
    by_hand = torch.stack([g.square().sum() for g in _gradients_again(name)]).sum().sqrt()
    torch.testing.assert_close(norm, by_hand)
    optimizer.step()
    for n, p in agent.named_parameters():
        assert torch.equal(p, before[n]) == (n in copies), n


def _gradients_again(name: str) -> list[torch.Tensor]:
    """Of every parameter that has any, copies included, in a fresh agent with the same draws."""
    torch.manual_seed(0)
    agent, windows = make({**CASES[name], "memory": "gru"})
    loss, _ = agent(windows([4, 2, 3], 4))
    loss.backward()
    return [p.grad for p in agent.parameters() if p.grad is not None]
