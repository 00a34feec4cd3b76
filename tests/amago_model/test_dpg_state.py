"""Where DPG's gradient goes: through the actions into the actor and on into the encoders; never
into critics, nor into the state that critics see. test_slow_reference.py checks the numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from amago_model import Agent, AgentConfig, published_v3
from amago_model.heads.actor import Actor
from tests.amago_model.cases import CASES, MEMORIES, make

LENGTHS = [4, 2, 0, 3]
KINDS: dict[str, dict[str, Any]] = {
    "discrete": {},
    "continuous": {"kind": "continuous"},
    "multi-binary": {"kind": "multi_binary"},
    "multi-discrete": {"kind": "multi_discrete"},
    "privileged": {"kind": "continuous", "privileged": True},
    "privileged table": {"privileged": True},
    "multitask": CASES["multitask, DPG"],
    "classified": CASES["continuous, two-hot"],
    # Not leaky ReLUs, whose constant critics have a short way of their own.
    "smooth": {"kind": "continuous", "critic": {"activation": "gelu"}},
    "lagged, smooth": {**CASES["lagged critics, continuous"], "critic": {"activation": "gelu"}},
    "lagged": CASES["lagged critics, continuous"],
    "lagged, classified": CASES["lagged critics, classified"],
}


def with_losses(case: dict[str, Any], **losses: Any) -> dict[str, Any]:
    return {**case, "losses": {**case.get("losses", {}), **losses}}


def of_dpg(agent: Agent, batch: Any) -> dict[str, Tensor]:
    """Gradient of the DPG term alone, of each parameter that it reaches."""
    loss = agent.terms(agent.loss_inputs(batch))["dpg"]
    named = dict(agent.named_parameters())
    learned = {n: p for n, p in named.items() if p.requires_grad}
    found = torch.autograd.grad(loss, [*learned.values()], allow_unused=True)
    return {n: g for n, g in zip(learned, found, strict=True) if g is not None and bool(g.any())}


def parts(gradients: dict[str, Tensor]) -> set[str]:
    """The actor, the encoders, the critic, …"""
    return {n.split(".")[1] if n.startswith("policy.") else n.split(".")[0] for n in gradients}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", KINDS)
def test_dpg_trains_actor_and_encoders_and_no_critic(kind: str, memory: str) -> None:
    torch.manual_seed(0)
    agent, windows = make({**KINDS[kind], "memory": memory})
    encoders = {"timestep_encoder"} | ({"trajectory_encoder"} if memory != "identity" else set())
    assert parts(of_dpg(agent, windows(LENGTHS, 4))) == {"actor"} | encoders


@pytest.mark.parametrize("kind", KINDS)
def test_detached_it_trains_the_actor_alone_and_that_just_as_much(kind: str) -> None:
    torch.manual_seed(0)
    agent, windows = make({**KINDS[kind], "memory": "gru"})
    other, _ = make({**with_losses(KINDS[kind], dpg_detach_state=True), "memory": "gru"})
    other.load_state_dict(agent.state_dict())
    batch = windows(LENGTHS, 4)
    batch.noise = agent.draw_noise(*batch.mask.shape)
    ours, detached = of_dpg(agent, batch), of_dpg(other, batch)
    assert parts(detached) == {"actor"}
    for name, gradient in detached.items():
        torch.testing.assert_close(gradient, ours[name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_ignores_the_state_leaves_dpg_no_way_to_it(kind: str) -> None:
    """What critics make of the state gives it no gradient, nor what is privileged."""
    torch.manual_seed(0)
    agent, windows = make({**KINDS[kind], "memory": "gru"})
    with torch.no_grad():
        agent.policy.actor.mlp[-1].weight.zero_()
    assert parts(of_dpg(agent, windows(LENGTHS, 4))) == {"actor"}


@pytest.mark.parametrize(("detach", "times"), [(False, 1), (True, 2)])
def test_one_pass_of_the_actor_serves_dpg_and_cloning(
    monkeypatch: pytest.MonkeyPatch, detach: bool, times: int
) -> None:
    agent, windows = make({"kind": "continuous", "losses": {"dpg_detach_state": detach}})
    asked = []
    plain = Actor.parameters_of

    def parameters_of(actor: Actor, state: Tensor) -> Tensor:
        asked.append("target" if actor is agent.target_actor else "own")
        return plain(actor, state)

    monkeypatch.setattr(Actor, "parameters_of", parameters_of)
    agent(windows(LENGTHS, 4))[0].backward()
    assert sorted(asked) == ["own"] * times + ["target"]


def test_by_default_and_as_published_dpg_trains_the_encoders() -> None:
    for config in (AgentConfig(), published_v3()):
        assert config.losses.dpg_detach_state is False
