"""One pass of the actor serves two losses, as two passes would."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from amago_model import Agent
from amago_model.actor import Actor
from amago_model.config import ActorConfig
from amago_model.one_pass import ask_once, can_ask_once

D, N, G = 5, 7, 2


def _losses(climber, cloner):  # type: ignore[no-untyped-def]
    """Two different scalars, of everything that says what a policy is."""
    fields = [f for f in type(climber).__slots__ if isinstance(getattr(climber, f), torch.Tensor)]
    first = sum((getattr(climber, f) * 1.5).sin().sum() for f in fields)
    return first, sum(getattr(cloner, f).square().sum() for f in fields)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("continuous", ActorConfig(d_hidden=6)),
        ("continuous", ActorConfig(d_hidden=6, continuous="beta")),
        ("continuous", ActorConfig(kind="residual")),
        ("discrete", ActorConfig(d_hidden=6, activation="adaptive")),
        ("multi_discrete", ActorConfig(d_hidden=6)),
        ("multi_binary", ActorConfig(d_hidden=6, activation="gelu")),
    ],
)
@pytest.mark.parametrize("used", ["both", "climb", "clone"])
@pytest.mark.parametrize("far", [False, True], ids=["", "out of bounds"])
def test_gradients_are_those_of_two_passes(
    make_spaces, kind: str, config: ActorConfig, used: str, far: bool
) -> None:
    """Also where bounds let only those through that lead back: by each loss for itself."""
    space = make_spaces(kind).action
    torch.manual_seed(0)
    actor = Actor(config, space, d_state=D, n_gammas=G).double()
    if far:
        torch.nn.init.normal_([*actor.parameters()][-1], std=8.0)
    state = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    legal = None
    if kind == "discrete":
        legal = torch.ones(N, space.n, dtype=torch.bool)
        legal[2, 0] = False
    inputs = [state, *actor.parameters()]

    def gradients(climb, clone):  # type: ignore[no-untyped-def]
        loss = {"both": climb + clone, "climb": climb, "clone": clone}[used]
        return torch.autograd.grad(loss, inputs, allow_unused=True)

    two = actor(state.detach(), legal), actor(state, legal)
    expected = gradients(*_losses(*two))
    once = ask_once(actor, state, legal)
    assert type(once[0]) is type(once[1]) is type(two[0])
    for ours, plain in zip(gradients(*_losses(*once)), expected, strict=True):
        plain = torch.zeros_like(ours) if plain is None else plain
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    of_state = gradients(*_losses(*ask_once(actor, state, legal)))[0]
    assert bool((of_state == 0).all()) == (used == "climb")


def test_an_update_that_climbs_and_clones_asks_the_actor_once(
    make_spaces, make_config, make_batch, monkeypatch
) -> None:
    agent = Agent(make_config(), make_spaces("continuous"))
    asked = []
    plain = Actor.parameters_of

    def parameters_of(actor, state):  # type: ignore[no-untyped-def]
        asked.append("target" if actor is agent.target_actor else "own")
        return plain(actor, state)

    monkeypatch.setattr(Actor, "parameters_of", parameters_of)
    agent(make_batch(agent.spaces))[0].backward()
    assert sorted(asked) == ["own", "target"]


def test_each_term_may_be_asked_for_its_gradient_alone(
    make_spaces, make_config, make_batch
) -> None:
    agent = Agent(make_config(), make_spaces("continuous"))
    loss, _ = agent(make_batch(agent.spaces))
    weights = agent.trainable_parameters()
    first = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss, weights, allow_unused=True)
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


class _FixedSpread(Actor):
    def forward(self, state, legal=None):  # type: ignore[no-untyped-def]
        policy = super().forward(state, legal)
        return dataclasses.replace(policy, scale=torch.full_like(policy.loc, 0.3))


@pytest.mark.parametrize("kind", ["frozen", "fixed spread"])
def test_actors_that_it_does_not_serve_are_asked_twice(
    make_spaces, make_config, make_batch, kind: str
) -> None:
    agent = Agent(make_config(), make_spaces("continuous"))
    actor = agent.policy.actor
    if kind == "frozen":
        actor.requires_grad_(False)
    else:
        actor.__class__ = _FixedSpread
    assert not can_ask_once(actor)
    agent(make_batch(agent.spaces))[0].backward()
    learned = any(p.grad is not None and bool(p.grad.any()) for p in actor.parameters())
    assert learned == (kind != "frozen")
