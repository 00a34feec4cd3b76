"""Under bfloat16 autocast every agent learns, in parts too, looks at data and acts."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from amago_model import Agent, get_values
from amago_model.encoders.transformer import SigmaLinear
from amago_model.running_statistics import freeze_statistics
from amago_model.runtime.micro_batches import update_statistics
from tests.amago_model.cases import CASES, MEMORIES, make


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def both(name: str, memory: str) -> tuple[Agent, Agent, list]:
    """Twins in float32, and a batch in two parts that carry its noise."""
    agent, windows = make({**CASES[name], "memory": memory})
    batch = windows([4, 2, 0, 3], 4)
    batch.prev_reward = batch.prev_reward.float()
    batch = dataclasses.replace(batch, noise=agent.float().draw_noise(*batch.mask.shape))
    return agent, copy.deepcopy(agent), [batch.windows(0, 2), batch.windows(2, 4)]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["continuous", "beta", "mixture"])
def test_every_memory_acts(name: str, memory: str) -> None:
    agent, _, (part, _) = both(name, memory)
    obs, hidden = {k: x[:, 0] for k, x in part.obs.items()}, agent.policy.initial_hidden(2)
    with half():
        for t in range(3):
            rows = (part.prev_action[:, t], part.prev_reward[:, t], part.time_idx[:, t])
            action, hidden = agent.policy.act(obs, *rows, hidden)
            assert bool(action.isfinite().all())


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_every_agent_learns_from_parts_and_looks_at_data(name: str) -> None:
    agent, _, (batch, *_) = both(name, "transformer")
    parts = [batch.windows(0, 1), batch.windows(1, len(batch.mask))]
    counts = {k: float(v) for k, v in agent.loss_counts(batch).items()}
    with half():
        update_statistics(agent, batch)
        if agent.critics is not None:
            get_values(agent, batch)
    with freeze_statistics(agent):
        for part in parts:
            with half():
                loss, _ = agent(part, counts=counts)
            loss.backward()
    grads = [p.grad for p in agent.parameters() if p.grad is not None]
    assert grads and all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("name", ["continuous, two-hot", "continuous, raw two-hot", "beta"])
def test_targets_of_critics_that_were_drawn_are_near(name: str) -> None:
    agent, twin, (part, _) = both(name, "identity")
    target = agent.td_target(part, agent.encode(part))
    with half():
        rounded = twin.td_target(part, twin.encode(part))
    assert rounded.dtype == target.dtype and not torch.equal(rounded, target)
    torch.testing.assert_close(rounded, target, rtol=0.1, atol=0.5)


def test_the_spectral_norm_is_not_rounded() -> None:
    """u, v and sigma are those of float32; only the layer's product is in halves."""
    layer = SigmaLinear(6, 5)
    twin = copy.deepcopy(layer)
    x = torch.randn(3, 6)
    full = layer(x)
    with half():
        rounded = twin(x)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(layer.u, twin.u) and torch.equal(layer.v, twin.v)
    torch.testing.assert_close(rounded.float(), full, rtol=0.02, atol=0.02)
    matrix = twin._matrix(twin.u, twin.v)
    with half():
        assert torch.equal(twin._matrix(twin.u, twin.v), matrix)
