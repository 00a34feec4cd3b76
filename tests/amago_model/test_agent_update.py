"""The whole update: blind to padding, and gradients only where they belong."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from amago_model import (
    ActionSpace,
    Agent,
    AgentConfig,
    FeedForwardConfig,
    GRUConfig,
    IdentityConfig,
    ObsSpace,
    Spaces,
    TransformerConfig,
    make_agent,
    multitask,
)
from tests.amago_model.cases import CLONING
from tests.amago_model.settings import configured

KINDS = ("discrete", "continuous")
MEMORIES = {
    "identity": IdentityConfig(),
    "feed_forward": FeedForwardConfig(d_model=12),
    "gru": GRUConfig(d_hidden=12, d_output=12),
    "transformer": TransformerConfig(
        d_model=12, n_heads=2, d_ff=16, n_layers=2, dropout_ff=0.0, dropout_emb=0.0
    ),
}


def _assert_close(a: dict, b: dict, **kw) -> None:  # type: ignore[no-untyped-def]
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], msg=lambda m, k=key: f"{k}: {m}", **kw)


# ------------------------------------------------------------------------------------ masks by name


def test_a_cut_without_its_last_observation_teaches_the_actor_and_not_the_critic(
    make_spaces, make_config, make_batch
) -> None:
    agent = Agent(make_config(), make_spaces())
    batch = make_batch(agent.spaces, lengths=(4,), size=4)
    batch.next_obs_valid[0, 3] = False
    counts = agent.loss_counts(batch)
    assert {k: int(v) for k, v in counts.items()} == {"dpg": 4, "bc": 4, "critic": 3}
    batch.terminated[0, 3] = True
    assert int(agent.loss_counts(batch)["critic"]) == 4


def test_legal_actions_reach_the_targets_and_the_policy() -> None:
    action = ActionSpace(kind="discrete", n=3)
    obs = {
        "observation": ObsSpace(shape=(2,), dtype="float32"),
        "legal": ObsSpace(shape=(3,), dtype="int8", role="mask"),
    }
    spaces = Spaces(observations=obs, action=action)
    policy = Agent(AgentConfig(), spaces).policy
    legal = torch.tensor([[0, 0, 1], [1, 0, 0]], dtype=torch.int8)
    action_taken, _ = policy.act(
        {"observation": torch.randn(2, 2), "legal": legal},
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int64),
        policy.initial_hidden(2),
        sample=True,
    )
    assert action_taken.tolist() == [2, 0]


# ------------------------------------------------------------------------- gradients and the copies


def test_behaviour_cloning_builds_no_critic(make_spaces, make_config, make_batch) -> None:
    losses = CLONING["losses"] | {"bc_weight": 1.0}
    agent = Agent(make_config(losses=losses, critic=False), make_spaces())
    loss, metrics = agent(make_batch(agent.spaces))
    loss.backward()
    assert agent.critics is None and not any("target" in n for n, _ in agent.named_parameters())
    assert set(k for k in metrics if k.startswith("loss/")) == {"loss/bc", "loss/total"}
    assert all(p.grad is not None for p in agent.trainable_parameters())
    agent.update_targets()


def test_targets_move_a_fraction_towards_the_learned_weights(make_spaces, make_config) -> None:
    agent = Agent(make_config(losses={"tau": 0.25}), make_spaces())
    with torch.no_grad():
        for p in agent.trainable_parameters():
            p.add_(1.0)
    before = [p.clone() for p in agent.critics.target.parameters()]
    agent.update_targets()
    for old, new in zip(before, agent.critics.target.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.25)
    for online, target in zip(
        agent.policy.actor.parameters(), agent.target_actor.parameters(), strict=True
    ):
        torch.testing.assert_close(online - target, torch.full_like(online, 0.75))


def test_metrics_are_detached_scalars_and_brief_ones_are_the_losses(
    make_spaces, make_config, make_batch
) -> None:
    agent = Agent(make_config(), make_spaces()).eval()
    batch = make_batch(agent.spaces)
    full, brief = agent(batch)[1], agent(batch, detailed=False)[1]
    assert all(v.ndim == 0 and not v.requires_grad for v in full.values())
    assert set(brief) == {k for k in full if k.startswith("loss/")}


def test_evaluation_mode_moves_no_statistic(make_spaces, make_config, make_batch) -> None:
    agent = Agent(make_config(), make_spaces()).eval()
    before = {n: b.clone() for n, b in agent.named_buffers()}
    agent(make_batch(agent.spaces))
    _assert_close(dict(agent.named_buffers()), before)


# ---------------------------------------------------------------------------------- small functions


@pytest.mark.parametrize(
    ("encoder", "count"),
    [("feed_forward", 657_664), ("gru", 855_808), ("transformer", 2_440_996)],
)
def test_parameter_counts_are_the_published_ones(encoder: str, count: int) -> None:
    obs = {"observation": ObsSpace(shape=(4,), dtype="float32")}
    config = configured(trajectory_encoder={"kind": encoder})
    discrete = ActionSpace(kind="discrete", n=5)
    box = ActionSpace(kind="continuous", shape=(6,), low=(-1.0,) * 6, high=(1.0,) * 6)
    for action, expected in (
        (discrete, (400_128, 562_316, 140_579)),
        (box, (400_640, 534_532, 153_172)),
    ):
        agent = Agent(config, Spaces(observations=obs, action=action))
        parts = agent.policy.timestep_encoder, agent.critics.online, agent.policy.actor
        assert tuple(sum(p.numel() for p in m.parameters()) for m in parts) == expected
        assert sum(p.numel() for p in agent.policy.trajectory_encoder.parameters()) == count


@pytest.mark.parametrize(("kind", "count"), [("discrete", 664_064), ("continuous", 665_088)])
def test_classifying_critics_have_the_published_number_of_parameters(kind: str, count: int) -> None:
    """Those of the multi-task agent, for 5 discrete actions; for 6 numbers it is no other agent."""
    obs = {"observation": ObsSpace(shape=(4,), dtype="float32")}
    action = {
        "discrete": ActionSpace(kind="discrete", n=5),
        "continuous": ActionSpace(kind="continuous", shape=(6,), low=(-1.0,) * 6, high=(1.0,) * 6),
    }[kind]
    config = AgentConfig(trajectory_encoder=FeedForwardConfig())
    config = multitask(config)
    if kind == "continuous":
        config = config.replace(algorithm="agent")
    agent = make_agent(config, Spaces(observations=obs, action=action))
    assert agent.critics is not None
    assert sum(p.numel() for p in agent.critics.online.parameters()) == count


def test_permuted_observation_keys_give_the_same_update(make_config, make_batch) -> None:
    obs = {
        "b": ObsSpace(shape=(2, 2), dtype="uint8"),
        "a": ObsSpace(shape=(3,), dtype="float32"),
        "c": ObsSpace(shape=(), dtype="int64", n=5),
        "seen by nobody": ObsSpace(shape=(9,), dtype="float32", role="critic"),
    }
    action = ActionSpace(kind="discrete", n=3)
    spaces = Spaces(observations=obs, action=action)
    batch = make_batch(spaces)
    batch.obs["c"] = torch.randint(0, 5, batch.time_idx.shape)
    batch.obs["b"] = torch.randint(0, 256, batch.obs["b"].shape, dtype=torch.uint8)
    agent = Agent(make_config(), spaces).eval()
    other = Agent(
        make_config(), Spaces(observations=dict(reversed(obs.items())), action=action)
    ).eval()
    other.load_state_dict(agent.state_dict())
    shuffled = dataclasses.replace(batch, obs=dict(reversed(batch.obs.items())))
    torch.manual_seed(1)
    loss, _ = agent(batch)
    torch.manual_seed(1)
    torch.testing.assert_close(other(shuffled)[0], loss)
