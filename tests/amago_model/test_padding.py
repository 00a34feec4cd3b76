"""Padding, and whatever lies where nothing was recorded, changes nothing for anybody."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amago_model import Agent, Batch, make_agent
from tests.amago_model.cases import CASES, MEMORIES, make


def garbage(batch: Batch) -> Batch:
    """The same batch with the worst imaginable values wherever nothing was recorded."""
    dirty = copy.deepcopy(batch)
    rows = batch.timestep_mask
    for x in dirty.obs.values():
        x[~rows] = torch.nan if x.dtype.is_floating_point else 1
    later = torch.cat((torch.ones_like(rows[:, :1]), batch.mask), dim=1)
    dirty.prev_reward[~later] = torch.inf
    worst = torch.nan if dirty.prev_action.dtype.is_floating_point else -(10**6)
    known = torch.cat((torch.ones_like(rows[:, :1]), batch.mask & batch.action_known), dim=1)
    dirty.prev_action[~known] = worst
    dirty.time_idx[~later] = 10**6
    flags = dirty.terminated, dirty.truncated, dirty.next_obs_valid, dirty.action_known
    for flag in (*flags, dirty.actor_mask, dirty.critic_mask):
        if flag is not None:
            flag[~batch.mask] = True
    return dirty


def longer(batch: Batch, k: int) -> Batch:
    """k more padded transitions at the end of every window."""

    def pad(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, torch.zeros_like(x[:, :1]).expand(-1, k, *x.shape[2:])), dim=1)

    return batch._map(pad)


def everything(agent: Agent, batch: Batch) -> dict[str, torch.Tensor]:
    """Loss, metrics, gradients and statistics of an update."""
    loss, metrics = agent(batch)
    if loss.requires_grad:
        loss.backward()
    grads = {f"grad {n}": p.grad for n, p in agent.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | metrics | grads | dict(agent.named_buffers())


@given(
    name=st.sampled_from(sorted(CASES)),
    memory=st.sampled_from(sorted(MEMORIES)),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    extra=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
def test_padding_changes_no_loss_metric_statistic_or_gradient(
    name: str, memory: str, lengths: list[int], extra: int, seed: int
) -> None:
    """For any agent, shape and mask; float64, so that equal means equal."""
    torch.manual_seed(seed)
    agent, windows = make({**CASES[name], "memory": memory})
    batch = windows(lengths, max(1, max(lengths)))
    batch = dataclasses.replace(batch, noise=agent.draw_noise(*batch.mask.shape))
    clean = everything(copy.deepcopy(agent), batch)
    dirty = everything(agent, garbage(longer(batch, extra)))
    assert clean.keys() == dirty.keys()
    for key, value in clean.items():
        torch.testing.assert_close(
            dirty[key], value, rtol=1e-8, atol=1e-9, msg=lambda text, k=key: f"{k}: {text}"
        )
        assert bool(value.isfinite().all()), key


@pytest.mark.parametrize("hidden", [{}, {"hide_previous": True}, {"hide_reward": True}], ids=str)
def test_padding_enters_no_whitening_whatever_is_hidden(hidden: dict[str, bool]) -> None:
    """Where a padded row is told by its numbers, it is not, once some of them are hidden."""
    torch.manual_seed(0)
    agent, windows = make(CASES["continuous"])
    rows = agent.config.timestep_encoder.replace(**hidden)
    agent = make_agent(agent.config.replace(timestep_encoder=rows), agent.spaces).double()
    batch = windows([4, 1, 0, 3], 4)
    for x in batch.obs.values():
        x[~batch.timestep_mask] = 4.0
    moments = agent.policy.timestep_encoder.input_norm.moments
    step = moments.beta / (1 - (1 - moments.beta) ** 2)
    seen = batch.obs["observation"][batch.timestep_mask].double()
    agent(longer(batch, 3))
    torch.testing.assert_close(moments.mean[:2], step * seen.mean(0))
    if hidden:
        told = slice(2, None) if "hide_previous" in hidden else slice(2, 3)
        assert not moments.mean[told].any()


@pytest.mark.parametrize("n_windows", [1, 3, 5, 8])
@pytest.mark.parametrize("name", ["discrete", "continuous"])
def test_what_is_drawn_for_a_transition_does_not_depend_on_padding(
    name: str, n_windows: int
) -> None:
    """For any number of windows, though a CPU draws sixteen numbers at a time."""
    agent, windows = make(CASES[name])
    torch.manual_seed(3)
    short = agent.draw_noise(n_windows, 4)
    torch.manual_seed(3)
    assert torch.equal(agent.draw_noise(n_windows, 7)[:, :4], short)


@pytest.mark.parametrize("name", ["discrete", "continuous", "multitask, discrete"])
def test_a_batch_of_nothing_gives_zero_losses_and_finite_everything(name: str) -> None:
    agent, windows = make(CASES[name])
    before = {n: b.clone() for n, b in agent.named_buffers()}
    seen = everything(agent, garbage(windows([0, 0], 6)))
    assert float(seen["loss"]) == 0.0
    assert all(bool(x.isfinite().all()) for x in seen.values())
    assert all(torch.equal(b, before[n]) for n, b in agent.named_buffers())
