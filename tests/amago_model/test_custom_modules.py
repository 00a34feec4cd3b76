"""Encoders, heads, filters, losses and agents: registered, saved by name, asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from amago_model import (
    Agent,
    AgentConfig,
    Batch,
    ConfigError,
    CustomConfig,
    PolicyFileError,
    UnregisteredError,
    get_values,
    load_policy,
    make_agent,
    register,
    registry,
    save_policy,
)
from amago_model.encoders.timestep import TimestepEncoder
from amago_model.encoders.trajectory import IdentityTrajectoryEncoder
from amago_model.heads.actor import Actor
from amago_model.heads.critic import CriticEnsemble
from amago_model.losses.loss_inputs import LossInputs
from amago_model.running_statistics import freeze_statistics
from tests.amago_model.cases import CASES, make


class Scaled(nn.Module):
    """A timestep encoder around the built-in one."""

    def __init__(self, config, spaces) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.inner = TimestepEncoder(config.timestep_encoder, spaces)
        self.scale = nn.Parameter(torch.ones(()))
        self.d_output = self.inner.d_output

    def forward(self, obs, previous, valid):  # type: ignore[no-untyped-def]
        return self.scale * self.inner(obs, previous, valid)


class MyActor(Actor):
    pass


class MyCritic(CriticEnsemble):
    pass


class Lazy(Agent):
    """Without DPG, though its config says so: another sum of the same losses."""

    def terms(self, seen: LossInputs) -> dict[str, torch.Tensor]:
        terms = super().terms(seen)
        del terms["dpg"]
        return terms


class Absolute(Agent):
    """A critic's error counts by its size, not its square; twice as much as it says."""

    def terms(self, seen: LossInputs) -> dict[str, torch.Tensor]:
        popart = self.critics.popart
        error = popart.to_normalized(seen.q_values) - popart.normalize(seen.td_target)
        return super().terms(seen) | {"critic": seen.mean(error.abs().mean(0), "critic")}

    def weights(self) -> dict[str, float]:
        return super().weights() | {"critic": 2.0}


def predictable(agent: Agent, seen: LossInputs) -> torch.Tensor:
    """Surprise of the data's actions, all alike: a further, unfiltered imitation."""
    del agent
    assert seen.log_prob is not None
    return -seen.mean(seen.log_prob, "bc")


def small(agent: Agent, seen: LossInputs) -> torch.Tensor:
    """Small answers of the critics, and small states."""
    del agent
    assert seen.critic_output is not None
    answers = seen.mean(seen.critic_output.square().mean((0, 3)), "critic")
    return answers + seen.mean(seen.transitions.state_t.square(), "dpg")


def soft(advantage: torch.Tensor) -> torch.Tensor:
    return advantage.sigmoid()


CUSTOM = CustomConfig(
    timestep_encoder="scaled",
    trajectory_encoder="mine",
    actor="mine",
    critic="mine",
    filter="soft",
    losses=("predictable", "small"),
    loss_weights=(0.3, 0.01),
    agent="lazy",
)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    register("timestep_encoder", "scaled")(Scaled)

    @register("trajectory_encoder", "mine")
    def memory(config, d_input):  # type: ignore[no-untyped-def]
        del config
        return IdentityTrajectoryEncoder(d_input)

    register("actor", "mine")(MyActor)
    register("critic", "mine")(MyCritic)
    register("filter", "soft")(soft)
    register("loss", "predictable")(predictable)
    register("loss", "small")(small)
    register("agent", "lazy")(Lazy)
    register("agent", "absolute")(Absolute)
    yield


@pytest.mark.usefixtures("mine")
def test_parts_of_one_s_own_take_their_places_and_learn(
    make_spaces, make_config, make_batch
) -> None:
    config = make_config().replace(custom=CUSTOM)
    agent = make_agent(AgentConfig.from_dict(config.to_dict()), make_spaces("continuous"))
    assert isinstance(agent, Lazy) and isinstance(agent.critics.online, MyCritic)
    assert isinstance(agent.policy.actor, MyActor)
    batch = make_batch(agent.spaces)
    loss, _ = agent(batch)
    loss.backward()
    assert agent.policy.timestep_encoder.scale.grad is not None
    values = get_values(agent, batch)
    mask, expected = values.mask, values.advantage.sigmoid()
    torch.testing.assert_close(values.weight[mask], expected[mask])


def test_a_policy_file_names_the_code_that_it_needs(
    make_spaces, make_config, mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it, the file loads; without, the error says which part and which flag."""
    del mine
    agent = make_agent(make_config().replace(custom=CUSTOM), make_spaces())
    data = save_policy(agent)
    assert isinstance(load_policy(data).actor, MyActor)
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    with pytest.raises(PolicyFileError, match=r"timestep_encoder: 'scaled'.*--plugin"):
        load_policy(data)


def test_what_only_learning_needs_a_policy_file_names_but_does_not_ask_for(
    make_spaces, make_config, mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    del mine
    custom = CustomConfig(losses=("small",), loss_weights=(0.5,), filter="soft", agent="lazy")
    config = make_config().replace(custom=custom)
    data = save_policy(make_agent(config, make_spaces()))
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    assert load_policy(data).config.custom == custom


@pytest.mark.usefixtures("mine")
def test_unknown_names_are_refused_with_the_nearest(make_spaces, make_config) -> None:
    config = make_config().replace(custom=CustomConfig(agent="lasy"))
    with pytest.raises(UnregisteredError, match="'lasy'.*'lazy'"):
        make_agent(config, make_spaces())
    with pytest.raises(ConfigError, match="kind"):
        register("optimizer", "x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="another name"):
        register("actor", "mine")(MyCritic)


# ------------------------------------------------------------------------------ losses of one's own


def _with(agent: Agent, /, **custom) -> Agent:  # type: ignore[no-untyped-def]
    """An agent with the same weights, and parts of its own."""
    config = agent.config.replace(custom=CustomConfig(**custom))
    made = make_agent(config, agent.spaces).double()
    made.load_state_dict(agent.state_dict())
    return made


def _gradients(agent: Agent, batch: Batch, name: str = "total") -> dict[str, torch.Tensor]:
    """Of the whole loss, or of one of its terms, by parameter; those that it does not reach too."""
    agent = copy.deepcopy(agent)
    if name == "total":
        loss = agent(batch)[0]
    else:
        loss = agent.terms(agent.loss_inputs(batch))[name]
    named = {n: p for n, p in agent.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, [*named.values()], materialize_grads=True)
    return dict(zip(named, found, strict=True))


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("name", ["discrete", "continuous"])
def test_an_agent_that_leaves_a_term_out_learns_as_if_it_did_not_exist(name: str) -> None:
    """One critic in each target, for whose minimum and mean are the same."""
    torch.manual_seed(0)
    agent, windows = make({"critic": {"n_critics_target": 1}, "kind": name})
    batch = windows([3, 1, 0, 4], 4)
    batch.noise = agent.draw_noise(*batch.mask.shape)
    losses = agent.config.losses.replace(dpg_weight=0.0)
    never = make_agent(agent.config.replace(losses=losses), agent.spaces).double()
    never.load_state_dict(agent.state_dict())
    lazy = _with(agent, agent="lazy")
    torch.testing.assert_close(_gradients(lazy, batch), _gradients(never, batch))
    with_dpg, without = _gradients(agent, batch), _gradients(lazy, batch)
    moved = {n for n, g in with_dpg.items() if not torch.allclose(g, without[n])}
    # DPG trains the actor and, through it, the encoders.
    assert moved == {n for n in with_dpg if n.startswith("policy.")}
    assert "loss/dpg" not in lazy(batch)[1]


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("name", ["discrete", "continuous, samples", "discrete, two-hot"])
def test_a_loss_of_one_s_own_adds_its_own_gradient_and_no_more(name: str) -> None:
    torch.manual_seed(0)
    agent, windows = make(CASES[name])
    batch = windows([3, 1, 0, 4], 4)
    batch.noise = agent.draw_noise(*batch.mask.shape)
    own = _with(agent, losses=("predictable", "small"), loss_weights=(0.3, 2.0))
    plain, both = _gradients(agent, batch), _gradients(own, batch)
    first, second = (_gradients(own, batch, term) for term in ("predictable", "small"))
    for n, gradient in both.items():
        torch.testing.assert_close(gradient, plain[n] + 0.3 * first[n] + 2.0 * second[n])
    assert any(g.any() for n, g in first.items() if n.startswith("policy.actor."))
    assert any(g.any() for n, g in second.items() if n.startswith("critics.online."))
    loss, metrics = own(batch)
    shares = agent.weights() | {"predictable": 0.3, "small": 2.0}
    whole = sum(w * metrics[f"loss/{n}"] for n, w in shares.items() if f"loss/{n}" in metrics)
    torch.testing.assert_close(loss, whole)
    each = _with(agent, losses=("small",)).weights()
    assert each["small"] == 1.0


@pytest.mark.usefixtures("mine")
def test_a_term_replaced_and_weighed_anew_is_that_of_a_slow_loop() -> None:
    torch.manual_seed(0)
    agent, windows = make({"critic": {"popart": None}})
    batch = windows([3, 1, 0, 4], 4)
    batch.noise = agent.draw_noise(*batch.mask.shape)
    own = _with(agent, agent="absolute")
    loss, metrics = own(batch)
    with torch.no_grad():
        seen = agent.loss_inputs(batch)
    errors = [
        abs(float(seen.q_values[c, i, g]) - float(seen.td_target[i, g]))
        for c in range(3)
        for i in range(len(seen.td_target))
        for g in range(2)
        if seen.transitions.critic_mask[i]
    ]
    assert float(metrics["loss/critic"]) == pytest.approx(sum(errors) / len(errors))
    c = agent.config.losses
    rest = c.dpg_weight * metrics["loss/dpg"] + c.bc_weight * metrics["loss/bc"]
    torch.testing.assert_close(loss, 2.0 * metrics["loss/critic"] + rest)


@pytest.mark.usefixtures("mine")
def test_losses_of_one_s_own_in_parts_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    agent, windows = make(CASES["continuous"])
    own = _with(agent, losses=("predictable", "small"), loss_weights=(0.3, 2.0)).eval()
    batch = windows([3, 1, 0, 4, 2, 4], 4)
    batch.noise = own.draw_noise(*batch.mask.shape)
    whole, counts = own(batch)[1], {k: float(v) for k, v in own.loss_counts(batch).items()}
    with freeze_statistics(own):
        parts = [own(batch.windows(*edges), counts=counts)[1] for edges in ((0, 1), (1, 6))]
    for name in ("loss/predictable", "loss/small", "loss/total"):
        torch.testing.assert_close(sum(part[name] for part in parts), whole[name])


@pytest.mark.usefixtures("mine")
def test_losses_that_cannot_be_counted_are_refused(make_spaces, make_config, make_batch) -> None:
    with pytest.raises(ConfigError, match=r"losses: .*Agent\.terms, got \('bc',\)"):
        CustomConfig(losses=("bc",))
    with pytest.raises(ConfigError, match="each name once"):
        CustomConfig(losses=("small", "small"))
    with pytest.raises(ConfigError, match=r"loss_weights.*\('small',\)"):
        CustomConfig(losses=("small",), loss_weights=(1.0, 2.0))
    config = make_config().replace(custom=CustomConfig(losses=("smaller",)))
    with pytest.raises(UnregisteredError, match=r"CustomConfig\.losses: 'smaller'.*'small'"):
        make_agent(config, make_spaces())
    register("loss", "wide")(lambda agent, seen: seen.advantage)  # noqa: ARG005
    agent = make_agent(config.replace(custom=CustomConfig(losses=("wide",))), make_spaces())
    with pytest.raises(ConfigError, match=r"terms: expected scalar.*'wide': shape \["):
        agent(make_batch(agent.spaces))

    class Nameless(Agent):
        def terms(self, seen: LossInputs) -> dict[str, torch.Tensor]:
            return {"surprise": seen.advantage.mean()}

    agent = Nameless(make_config(), make_spaces())
    with pytest.raises(ConfigError, match=r"Nameless\.terms.*'surprise'.*weights\(\)"):
        agent(make_batch(agent.spaces))
