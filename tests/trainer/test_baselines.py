"""The recipes of other algorithms, as their users run them: memory, micro-batches, policy files."""

from __future__ import annotations

import pytest
import torch

from amago_model import get_values, load_policy, make_agent, save_policy
from benchmarks.recipes import choices, made_up, vectors
from stepwell._settings import override
from trainer.learner import Learner, make_accelerator
from trainer.recipes import recipe

MEMORIES = {
    "gru": {"d_hidden": 8, "d_output": 8},
    "transformer": {"d_model": 8, "n_heads": 2, "d_ff": 8, "n_layers": 1},
}
CASES = [
    (name, action)
    for name in ("awac", "crr", "iql", "td3bc", "rebrac", "dt")
    for action in ("continuous", "discrete")
    if action == "continuous" or name not in ("td3bc", "rebrac")
]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("name", "action"), CASES)
def test_a_baseline_trains_with_memory_and_its_policy_acts(
    name: str, action: str, memory: str
) -> None:
    spaces = vectors(3, 2) if action == "continuous" else choices(3, 4)
    changes = {f"agent.trajectory_encoder.{k}": v for k, v in MEMORIES[memory].items()}
    changes |= {"agent.trajectory_encoder.kind": memory, "agent.losses.auxiliary_gammas": (0.5,)}
    if name == "dt":
        changes["agent.return_conditioning.target_return"] = 2.0
    config = override(recipe(name), changes | {"optimizer.accumulate": 2})
    torch.manual_seed(0)
    agent = make_agent(config.agent, spaces)
    before = [p.detach().clone() for p in agent.trainable_parameters()]
    learner = Learner(
        agent, config.optimizer, make_accelerator(config), seed=0, updates=config.updates
    )
    for update in range(2):
        assert not learner.update(update, made_up(spaces, windows=4, length=6)).skipped
    assert not any(map(torch.equal, before, agent.trainable_parameters()))

    policy, batch = load_policy(save_policy(agent.policy)), made_up(spaces, windows=4, length=6)
    now = {"observation": batch.obs["observation"][:, 0]}, batch.prev_action[:, 0]
    rest = batch.prev_reward[:, 0], torch.zeros(4, dtype=torch.int64)
    chosen = [
        each.act(*now, *rest, each.initial_hidden(4), sample=False)[0]
        for each in (agent.policy, policy)
    ]
    assert torch.equal(*chosen)


def test_the_values_of_iql_are_those_of_its_state_value() -> None:
    spaces = vectors(3, 2)
    agent = make_agent(recipe("iql").agent, spaces).eval()
    batch = made_up(spaces, windows=2, length=5)
    values, tr = get_values(agent, batch), agent.encode(batch)
    assert agent.critics is not None
    v = agent.critics.popart.to_return(agent.critics.value(tr.critic_state_t)).detach()
    torch.testing.assert_close(values.v, tr.unflatten(v))
    assert not values.v_std.any()
