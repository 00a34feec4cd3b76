"""The target networks are no weights: no gradient, no step, no share in the clipped norm."""

from __future__ import annotations

import copy

import pytest
import torch

from amago_model import load_agent, load_policy, save_policy
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


@pytest.mark.parametrize("name", ["continuous", "discrete"])
def test_a_policy_file_holds_the_average_of_all_weights(name: str) -> None:
    """It forgets the first weights soon; a skipped step does not count; what is loaded acts."""
    decay = 0.9
    agent, windows = make({**CASES[name], "ema_decay": decay})
    agent.float()
    assert agent.average is not None
    names = [n for n, p in agent.named_parameters() if p.requires_grad]
    expected = {n: p.clone() for n, p in agent.average.weights(names).items()}
    torch.manual_seed(1)
    for update in range(1, 120):
        with torch.no_grad():
            for p in agent.trainable_parameters():
                p.add_(0.1 * torch.randn_like(p))
        share = max(1 - decay, 9 / (update + 10))
        newest = {n: p.detach() for n, p in agent.named_parameters() if p.requires_grad}
        for n, p in newest.items():
            expected[n] = expected[n] + share * (p - expected[n])
        agent.update_average()
    agent.average.update({n: p * 100 for n, p in newest.items()}, torch.ones(()))
    published = agent.published_weights()
    for n, p in expected.items():
        torch.testing.assert_close(published[n], p, msg=n)
    loaded = load_agent(save_policy(agent))
    acting = load_policy(save_policy(agent))
    for n, p in acting.state_dict().items():
        torch.testing.assert_close(p, published[f"policy.{n}"])
        torch.testing.assert_close(loaded.policy.state_dict()[n], p)
    online = {n: p for n, p in loaded.named_parameters() if n.startswith("critics.online.")}
    assert online
    for n, p in online.items():
        torch.testing.assert_close(p, published[n])


def test_without_a_decay_a_policy_file_holds_the_newest_weights() -> None:
    agent, _ = make(CASES["discrete"])
    agent.float()
    agent.update_average()
    state = agent.state_dict()
    assert agent.average is None and not any(n.startswith("average") for n in state)
    for n, p in load_policy(save_policy(agent)).state_dict().items():
        assert torch.equal(p, state[f"policy.{n}"])
