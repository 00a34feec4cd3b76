"""Units that are almost always zero are counted, per layer and network."""

from __future__ import annotations

import pytest
import torch

from amago_model import Agent
from amago_model.dormant_units import dormant_units


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
def test_silenced_units_are_counted(make_spaces, make_config, make_batch, kind) -> None:
    """The first 8 of 16 units of each layer get no input: half of them are dormant."""
    agent = Agent(make_config(), make_spaces(kind)).eval()
    batch = make_batch(agent.spaces)
    before = dormant_units(agent, batch)
    assert before.keys() == {"dormant/actor", "dormant/critic"}
    assert all(float(share) < 0.3 for share in before.values())
    online, actor = agent.critics.online, agent.policy.actor
    hidden = [layer for layer in actor.mlp if isinstance(layer, torch.nn.Linear)][:-1]
    with torch.no_grad():
        for layer in hidden:
            layer.weight[: len(layer.weight) // 2] = 0
            layer.bias[: len(layer.bias) // 2] = 0
        for weight, bias in zip(online.weights[:-1], online.biases[:-1], strict=True):
            weight[..., : weight.shape[-1] // 2] = 0
            bias[..., : bias.shape[-1] // 2] = 0
    after = dormant_units(agent, batch)
    for name, share in after.items():
        assert 0.5 <= float(share) <= 0.5 + float(before[name]), name


def test_blocks_of_a_cpu_change_nothing(make_spaces, make_config, make_batch, monkeypatch) -> None:
    agent = Agent(make_config(), make_spaces()).eval()
    batch = make_batch(agent.spaces)
    whole = dormant_units(agent, batch)
    monkeypatch.setattr("amago_model.heads.critic.BLOCK", 1)
    assert dormant_units(agent, batch) == whole
