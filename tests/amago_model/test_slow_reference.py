"""Every loss, statistic and gradient of the update against the slow loops of reference.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amago_model import Agent, Batch
from tests.amago_model.cases import CASES, MEMORIES, make
from tests.amago_model.reference import SlowUpdate, slow_update


def shown_numbers(agent: Agent, slow: SlowUpdate) -> dict[str, float]:
    """What an update must show of the acting discount, in the environment's units."""
    acting, scale = len(agent.gammas) - 1, agent.config.losses.reward_multiplier

    def of_acting(found: dict) -> dict:  # type: ignore[type-arg]
        return {place: x for place, x in found.items() if place[2] == acting}

    def mean(xs: list[float]) -> float:
        return sum(xs) / max(len(xs), 1)

    numbers: dict[str, float] = {}
    if agent.config.losses.bc_weight > 0:
        log_probs = of_acting(slow.log_probs)
        numbers["policy/log_prob"] = mean(list(log_probs.values()))
        numbers["count/bc"] = len(log_probs)
        if slow.weights:
            weights = list(of_acting(slow.weights).values())
            numbers["policy/filter_mean"] = mean(weights)
            numbers["policy/filter_acceptance"] = mean([float(w > 0.1) for w in weights])
    if agent.critics is None:
        return numbers
    targets = {place: y / scale for place, y in of_acting(slow.targets).items()}
    values = {place: [q / scale for q in slow.values[place]] for place in targets}
    spread = [mean([(x - mean(q)) ** 2 for x in q]) ** 0.5 for q in values.values()]
    return numbers | {
        "value/target_mean": mean(list(targets.values())),
        "value/target_min": min(targets.values(), default=0.0),
        "value/target_max": max(targets.values(), default=0.0),
        "value/advantage_mean": mean(list(of_acting(slow.advantages).values())),
        "value/q_mean": mean([mean(q) for q in values.values()]),
        "value/q_min": min([mean(q) for q in values.values()], default=0.0),
        "value/q_max": max([mean(q) for q in values.values()], default=0.0),
        "value/td_error": mean([abs(mean(values[p]) - targets[p]) for p in targets]),
        "value/q_std_over_critics": mean(spread),
        "count/critic": len(targets),
    }


def assert_equal_to_the_slow_loops(agent: Agent, batch: Batch) -> None:
    """Loss, terms, statistics, what is logged, and the gradient of every parameter."""
    noise = agent.draw_noise(*batch.mask.shape)
    expected, twin = slow_update(agent, batch, noise.double())
    loss, metrics = agent(dataclasses.replace(batch, noise=noise))
    close = {"rtol": 1e-9, "atol": 1e-10}
    shown = {k.removeprefix("loss/"): v for k, v in metrics.items() if k.startswith("loss/")}
    assert shown.keys() == expected.terms.keys() | {"total"}
    for name, term in expected.terms.items():
        torch.testing.assert_close(shown[name], term.detach(), msg=f"{name}: {term}", **close)
    torch.testing.assert_close(loss, expected.loss, **close)
    for name, number in shown_numbers(agent, expected).items():
        assert float(metrics[name]) == pytest.approx(number, rel=1e-9, abs=1e-9), name
    if loss.requires_grad:
        loss.backward()
    if expected.loss.requires_grad:
        expected.loss.backward()
    for (name, p), slow in zip(agent.named_parameters(), twin.parameters(), strict=True):
        got = torch.zeros_like(p) if p.grad is None else p.grad
        want = torch.zeros_like(p) if slow.grad is None else slow.grad
        torch.testing.assert_close(got, want, msg=lambda m, n=name: f"{n}: {m}", **close)
    if agent.critics is not None:
        for g, slow in enumerate(expected.popart):
            norm = agent.critics.popart
            got = torch.stack((norm.mean[g], norm.sigma[g], norm.w[g], norm.b[g]))
            want = torch.tensor([slow.mean, slow.sigma, slow.w, slow.b], dtype=torch.float64)
            torch.testing.assert_close(got, want, **close)
    if agent.training:
        moments = agent.policy.timestep_encoder.input_norm.moments
        torch.testing.assert_close(moments.mean, expected.inputs["inputs.mean"], **close)
        torch.testing.assert_close(moments.variance, expected.inputs["inputs.variance"], **close)


@pytest.mark.parametrize("name", CASES)
def test_an_update_equals_the_slow_loops(name: str) -> None:
    agent, windows = make(CASES[name])
    assert_equal_to_the_slow_loops(agent, windows([3, 1, 0, 4], 4))


def test_without_moving_statistics_too() -> None:
    agent, windows = make(CASES["continuous, samples"])
    assert_equal_to_the_slow_loops(agent.eval(), windows([3, 1, 0, 4], 4))


@given(
    name=st.sampled_from(sorted(CASES)),
    memory=st.sampled_from(sorted(MEMORIES)),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    padding=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
@settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_so_it_does_for_any_shape_mask_and_memory(
    name: str, memory: str, lengths: list[int], padding: int, seed: int
) -> None:
    torch.manual_seed(seed)
    agent, windows = make({**CASES[name], "memory": memory})
    assert_equal_to_the_slow_loops(agent, windows(lengths, max(1, max(lengths) + padding)))
