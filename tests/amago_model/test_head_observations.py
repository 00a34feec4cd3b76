"""Heads of one's own that ask for observations see their row's, learning and acting alike."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amago_model import (
    Agent,
    Batch,
    ConfigError,
    CustomConfig,
    get_values,
    load_policy,
    make_agent,
    register,
    registry,
    save_policy,
)
from amago_model.heads.actor import Actor, make_distribution
from amago_model.heads.critic import CriticEnsemble
from amago_model.heads.distributions import Distribution
from amago_model.running_statistics import freeze_statistics
from tests.amago_model.cases import agent_of, batch_of, spaces_of
from tests.amago_model.test_padding import everything, garbage, longer

LENGTHS = [3, 1, 0, 4]
CRITIC_KEYS = ["legal", "observation", "truth"]
heard: list[tuple[str, Tensor, dict[str, Tensor]]] = []


class Looking(Actor):
    """A linear path from the observation to the parameters of the policy."""

    def __init__(self, config: Any, action: Any, *, d_state: int, n_gammas: int) -> None:
        super().__init__(config, action, d_state=d_state, n_gammas=n_gammas)
        width = self.mlp[-1].out_features
        self.path = nn.Linear(2, width)

    def _parameters_of(self, state: Tensor, obs: dict[str, Tensor]) -> Tensor:
        x = self.mlp(state) + self.path(obs["observation"].to(state.dtype))
        return x.unflatten(-1, (self.n_gammas, -1))

    def forward(self, state: Tensor, legal: Tensor | None = None, *, obs: Any) -> Distribution:
        heard.append(("actor", state, obs))
        every = None if legal is None else legal.unsqueeze(-2)
        return make_distribution(self.config, self.action, self._parameters_of(state, obs), every)

    def acting(self, state: Tensor, legal: Tensor | None = None, *, obs: Any) -> Distribution:
        heard.append(("acting", state, obs))
        x = self._parameters_of(state, obs)[..., -1, :]
        return make_distribution(self.config, self.action, x, legal)


class Informed(CriticEnsemble):
    """The observation, and what only critics see, stand in every state once more."""

    def __init__(self, *args: Any, d_state: int, **options: Any) -> None:
        super().__init__(*args, d_state=d_state + 3, **options)

    def _with(self, state: Tensor, obs: dict[str, Tensor]) -> Tensor:
        heard.append(("critic", state, obs))
        return torch.cat((state, *(obs[key].to(state.dtype) for key in CRITIC_KEYS[1:])), dim=-1)

    def project_state(self, state: Tensor, *, obs: Any) -> Any:
        return super().project_state(self._with(state, obs))

    def action_values(self, state: Tensor, *, obs: Any) -> Tensor:
        return super().action_values(self._with(state, obs))


class Forgetful(Looking):
    """It looks when it learns, and not when it acts."""

    def acting(self, state: Tensor, legal: Tensor | None = None) -> Distribution:  # type: ignore[override]
        return Actor.acting(self, state, legal)


class Halved(Informed):
    def action_values(self, state: Tensor) -> Tensor:  # type: ignore[override]
        return CriticEnsemble.action_values(self, state)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    register("actor", "looking")(Looking)
    register("actor", "forgetful")(Forgetful)
    register("critic", "informed")(Informed)
    register("critic", "halved")(Halved)
    heard.clear()
    yield


def looking(kind: str, memory: str = "identity", **custom: str) -> Agent:
    torch.manual_seed(0)
    spaces = spaces_of(kind, legal=True, privileged=True)
    config = agent_of(spaces, memory=memory).config
    own = CustomConfig(**({"actor": "looking", "critic": "informed"} | custom))
    return make_agent(config.replace(custom=own), spaces).double()


def windows(agent: Agent) -> Batch:
    torch.manual_seed(1)
    batch = batch_of(agent.spaces, LENGTHS, 4)
    return dataclasses.replace(batch, noise=agent.draw_noise(*batch.mask.shape))


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("memory", ["gru", "transformer"])
def test_heads_see_the_rows_before_and_after_each_transition(kind: str, memory: str) -> None:
    """Compared with a loop over the batch; a row that was not recorded is zeros."""
    agent = looking(kind, memory).eval()
    batch = windows(agent)
    tr = agent.encode(batch)
    states = {
        "actor": (tr.state_t, tr.state_tp1),
        "critic": (tr.critic_state_t, tr.critic_state_tp1),
    }
    agent(batch)
    rows = batch.timestep_mask
    places = [(b, t) for b in range(4) for t in range(LENGTHS[b])]
    keys = {"actor": sorted({"observation", *agent.spaces.keys("mask")})}
    keys["critic"] = sorted({*keys["actor"], "truth"})
    wanted = {
        step: {
            key: torch.stack([x[b, t + step] * rows[b, t + step] for b, t in places])
            for key, x in batch.obs.items()
        }
        for step in (0, 1)
    }
    steps: dict[str, set[int]] = {"actor": set(), "critic": set()}
    for head, state, obs in heard:
        assert sorted(obs) == keys[head]
        (step,) = (s for s in (0, 1) if torch.equal(obs["observation"], wanted[s]["observation"]))
        assert torch.equal(state, states[head][step])
        assert all(torch.equal(x, wanted[step][key]) for key, x in obs.items())
        steps[head].add(step)
    assert steps == {"actor": {0, 1}, "critic": {0, 1}}


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
@pytest.mark.parametrize("memory", ["feed_forward", "transformer"])
def test_padding_and_what_was_not_recorded_change_nothing(
    kind: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = looking(kind, memory)
    batch = windows(agent)
    packed, padded = copy.deepcopy(agent), copy.deepcopy(agent)
    clean = everything(agent, batch)
    assert bool(agent.policy.actor.path.weight.grad.any())
    others = [everything(packed, garbage(longer(batch, 2)))]
    monkeypatch.setattr("amago_model.agent.flat_indices", lambda exists: None)  # noqa: ARG005
    others.append(everything(padded, garbage(batch)))
    for other in others:
        for key, value in clean.items():
            torch.testing.assert_close(other[key], value, rtol=1e-8, atol=1e-9, msg=key)


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_acting_sees_what_learning_saw(kind: str) -> None:
    """Row by row, from a policy file: the greedy actions of the whole windows."""
    agent = looking(kind, "gru").float().eval()
    policy = load_policy(save_policy(agent))
    torch.manual_seed(2)
    batch = batch_of(agent.spaces, [4, 4], 4)
    batch = dataclasses.replace(batch, time_idx=torch.arange(5).expand(2, 5).clone())
    state = policy.encode_trajectory(
        policy.encode_timesteps(batch.obs, batch.prev_action, batch.prev_reward, batch.time_idx),
        batch.time_idx,
    )
    obs = {key: batch.obs[key] for key in policy.actor_keys}
    legal = policy.legal_actions(batch.obs)
    with torch.no_grad():
        whole = (
            policy.actor(state, legal, obs=obs).greedy()[..., -1]
            if kind == "discrete"
            else (policy.actor(state, legal, obs=obs).greedy()[..., -1, :])
        )
    hidden = policy.initial_hidden(2)
    for t in range(5):
        arguments = (batch.prev_action[:, t], batch.prev_reward[:, t].float(), batch.time_idx[:, t])
        row = {key: x[:, t] for key, x in batch.obs.items() if key != "truth"}
        heard.clear()
        action, hidden = policy.act(row, *arguments, hidden, sample=False)
        ((_, _, seen),) = heard
        assert sorted(seen) == sorted(policy.actor_keys) and "truth" not in seen
        if kind == "discrete":
            assert torch.equal(action, whole[:, t] + agent.spaces.action.start)
        else:
            low, high = (
                torch.tensor(x) for x in (agent.spaces.action.low, agent.spaces.action.high)
            )
            expected = low + (high - low) * (whole[:, t] + 1) / 2
            torch.testing.assert_close(action, expected, rtol=1e-4, atol=1e-5)


def test_values_of_data_are_asked_with_observations_too() -> None:
    agent = looking("continuous")
    batch = windows(agent)
    moved = dataclasses.replace(batch, obs=batch.obs | {"truth": batch.obs["truth"] + 5.0})
    with freeze_statistics(agent):
        torch.manual_seed(3)
        one = get_values(agent, batch)
        torch.manual_seed(3)
        other = get_values(agent, moved)
    assert not torch.allclose(one.q[one.mask], other.q[one.mask])


@pytest.mark.parametrize(
    ("custom", "says"),
    [
        (
            {"actor": "forgetful"},
            "Forgetful.acting: forward has an argument `obs`, but acting has none",
        ),
        ({"critic": "halved"}, "Halved.action_values: project_state has an argument `obs`"),
    ],
)
def test_a_head_that_would_look_only_sometimes_is_refused(custom: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        looking("discrete", **custom)
