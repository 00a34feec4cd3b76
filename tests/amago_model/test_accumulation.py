"""A batch in parts makes the update of the whole: statistics move once, before they are used."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from amago_model import (
    Agent,
    Batch,
    ConfigError,
    CustomConfig,
    ObsSpace,
    Spaces,
    TransformerConfig,
    make_agent,
    register,
    registry,
)
from amago_model.encoders.timestep import InputNorm
from amago_model.encoders.trajectory import IdentityTrajectoryEncoder
from amago_model.encoders.transformer import SigmaLinear
from amago_model.heads.actor import Actor
from amago_model.running_statistics import (
    RunningMoments,
    Statistics,
    freeze_statistics,
)
from amago_model.runtime.micro_batches import update_statistics
from tests.amago_model import cases

NARROW = {"n_bins": 9, "min_return": -30.0, "max_return": 40.0}
TRANSFORMER = TransformerConfig(
    d_model=8, n_heads=2, d_ff=8, n_layers=1, dropout_ff=0.0, dropout_emb=0.0
)
CASES = {
    "discrete": ("discrete", {}, {}, {}),
    "sampled critics": ("discrete", {}, {"n_critics_target": 1}, {}),
    "continuous, normalised filter": (
        "continuous",
        {},
        {"subset_replacement": True},
        {"n_actions_in_actor_loss": 2, "filter": {"kind": "exp", "batch_norm": True}},
    ),
    "multitask": ("discrete", {"algorithm": "multitask"}, {"kind": "twohot", **NARROW}, {}),
    "choices": ("multi_discrete", {}, {"kind": "hlgauss", **NARROW}, {"td_lambda": 0.8}),
    "IQL": ("continuous", {}, {}, cases.EXPECTILE | cases.EXP),
    "ReBRAC": (
        "continuous",
        {"actor": {"d_hidden": 8, "continuous": {"kind": "deterministic"}}},
        {"layer_norm": True},
        {"bc_target_penalty": 0.5, "dpg_normalization": "mean_abs_q"},
    ),
    "cloning alone": ("continuous", {}, False, cases.CLONING["losses"]),
}
MASKED = ("continuous, normalised filter", "multitask", "IQL", "ReBRAC", "cloning alone")
LENGTHS = (6, 1, 0, 3, 2, 5, 1)


def _parts(batch: Batch, m: int) -> list[Batch]:
    edges = [len(batch.mask) * i // m for i in range(m + 1)]
    return [batch.windows(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def _learn(agent: Agent, batch: Batch, m: int) -> dict[str, torch.Tensor]:
    """Loss, gradients and statistics after two updates' worth of batches in m parts."""
    result: dict[str, torch.Tensor] = {}
    for turn in range(2):
        counts = {k: float(v) for k, v in agent.loss_counts(batch).items()}
        agent.zero_grad()
        if m == 1:
            loss = agent(batch)[0]
            loss.backward()
        else:
            parts = _parts(batch, m)
            update_statistics(agent, batch)
            loss = torch.zeros(())
            with freeze_statistics(agent):
                for part in parts:
                    one = agent(part, counts=counts)[0]
                    one.backward()
                    loss = loss + one.detach()
        result[f"loss {turn}"] = loss.detach()
        result |= {
            f"grad {turn} {n}": p.grad for n, p in agent.named_parameters() if p.requires_grad
        }
    return result | dict(agent.named_buffers())


@pytest.mark.parametrize("m", [2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_parts_equal_the_whole_with_every_statistic_moving(
    make_spaces, make_config, make_batch, name: str, m: int
) -> None:
    """Float64: loss, gradient of every parameter and every buffer to 1e-8."""
    kind, more, critic, losses = CASES[name]
    spaces = make_spaces(kind)
    truth = ObsSpace(shape=(2,), dtype="float32", role="critic")
    spaces = Spaces(observations={**spaces.observations, "truth": truth}, action=spaces.action)
    config = make_config(
        TRANSFORMER,
        actor=more.get("actor"),
        critic=critic is not False and {"popart": {"beta": 0.1}} | critic,
        losses=losses,
    ).replace(algorithm=more.get("algorithm", "agent"))
    agent = make_agent(config, spaces).double()
    batch = make_batch(spaces, lengths=LENGTHS)
    batch.prev_reward = batch.prev_reward.double()
    if name in MASKED:
        batch.actor_mask, batch.critic_mask = torch.rand(2, *batch.mask.shape) < 0.6
    batch = dataclasses.replace(batch, noise=agent.draw_noise(*batch.mask.shape))
    whole = _learn(copy.deepcopy(agent), batch, 1)
    parts = _learn(copy.deepcopy(agent), batch, m)
    assert whole.keys() == parts.keys()
    for key, value in whole.items():
        torch.testing.assert_close(
            parts[key], value, rtol=1e-8, atol=1e-10, msg=lambda text, k=key: f"{k}: {text}"
        )
    moved = {n for n, b in agent.named_buffers() if not torch.equal(b, whole[n])}
    assert any(n.endswith("timestep_encoder.input_norm.moments.mean") for n in moved)
    assert any(n.endswith(".u") for n in moved)  # power iterations too are statistics
    if agent.critics is not None:
        assert {"critics.popart.w", "critics.privileged_encoder.norm.moments.mean"} <= moved


def test_a_batch_carries_the_noise_that_the_agent_would_draw(
    make_spaces, make_config, make_batch
) -> None:
    agent = Agent(make_config(), make_spaces("continuous"))
    twin = copy.deepcopy(agent)
    batch = make_batch(agent.spaces)
    torch.manual_seed(5)
    loss, _ = agent(batch)
    torch.manual_seed(5)
    noise = twin.draw_noise(*batch.mask.shape)
    assert torch.equal(twin(dataclasses.replace(batch, noise=noise))[0], loss)


def test_frozen_statistics_do_not_change() -> None:
    moments = RunningMoments((2,), beta=0.1, init_nu=1.0)
    x, mask = torch.randn(5, 3, 2), torch.rand(5, 3) > 0.3
    with freeze_statistics(moments):
        moments.update(x, mask)
    assert float(moments.updates) == 1.0
    moments.update(x, mask)
    assert float(moments.updates) == 2.0


def test_a_statistic_must_say_how_it_moves() -> None:
    class Silent(Statistics):
        pass

    with pytest.raises(TypeError, match="apply_batch"):
        Silent()  # type: ignore[abstract]
    assert not isinstance(SigmaLinear(2, 2), Statistics)  # shown nothing, so it has nothing to take


class TwiceWhitened(IdentityTrajectoryEncoder):
    """A memory whose second statistic depends on its first one, registered the other way round."""

    def __init__(self, d_input: int) -> None:
        super().__init__(d_input)
        self.second = InputNorm(d_input, beta=0.3)
        self.first = InputNorm(d_input, beta=0.2)

    def forward(self, x: torch.Tensor, time_idx: torch.Tensor) -> torch.Tensor:
        everything = torch.ones_like(time_idx, dtype=torch.bool)
        return self.second(self.first(x, everything).tanh(), everything)


class WhitenedActor(Actor):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.whiten = InputNorm(3)


@pytest.fixture
def custom_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
    register("trajectory_encoder", "whitened")(lambda _, d_input: TwiceWhitened(d_input))
    register("actor", "whitened")(WhitenedActor)


@pytest.mark.usefixtures("custom_modules")
@pytest.mark.parametrize("m", [2, 5])
def test_statistics_of_a_custom_memory_move_as_with_the_whole(
    make_spaces, make_config, make_batch, m: int
) -> None:
    config = make_config(critic={"popart": {"beta": 0.1}})
    config = config.replace(custom=CustomConfig(trajectory_encoder="whitened"))
    agent = make_agent(config, make_spaces("continuous")).double()
    batch = make_batch(agent.spaces, lengths=LENGTHS)
    batch.prev_reward = batch.prev_reward.double()
    batch = dataclasses.replace(batch, noise=agent.draw_noise(*batch.mask.shape))
    whole = _learn(copy.deepcopy(agent), batch, 1)
    parts = _learn(copy.deepcopy(agent), batch, m)
    torch.testing.assert_close(parts, whole, rtol=1e-8, atol=1e-10)
    moments = "policy.trajectory_encoder.second.moments.mean"
    assert not torch.equal(parts[moments], agent.get_buffer(moments))


@pytest.mark.usefixtures("custom_modules")
def test_statistics_of_a_custom_head_are_refused_in_parts(
    make_spaces, make_config, make_batch
) -> None:
    config = make_config().replace(custom=CustomConfig(actor="whitened"))
    agent = make_agent(config, make_spaces("continuous"))
    with pytest.raises(ConfigError, match=r"CustomConfig\.actor.*'whiten\.moments'.*accumulate=1"):
        update_statistics(agent, make_batch(agent.spaces))
