"""The returns that a dataset shows, against slow loops."""

from __future__ import annotations

import numpy as np
import pytest

from stepwell import Box, Discrete, EnvSpec, Trajectory
from tests.trainer.small_runs import view_of
from trainer.config import DataConfig
from trainer.data.returns import data_returns, margin_of_returns, returns_to_go

SPEC = EnvSpec.of(Box((1,)), Discrete(2))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99])
def test_returns_to_go_equal_the_slow_sum(gamma):
    rng = np.random.default_rng(0)
    length = np.array([1, 5, 2, 33, 1])
    reward, ends = rng.normal(size=length.sum()), np.array([True, False, True, False, False])
    want, first = [], 0
    for n, end in zip(length, ends, strict=True):
        back, value = [], 0.0 if end else reward[first : first + n].mean() / (1 - gamma)
        for r in reward[first : first + n][::-1]:
            value = r + gamma * value
            back.append(value)
        want += back[::-1]
        first += n
    np.testing.assert_allclose(returns_to_go(reward, length, gamma, ends), want, rtol=1e-9)


def returns_of(fake, folder, plays, gamma, **options):
    """The returns of trajectories given as (rewards, terminated)."""
    service = fake(SPEC)
    service.add_shard(
        [
            Trajectory.from_arrays(
                obs=np.zeros((len(rewards) + 1, 1), np.float32),
                actions=np.zeros(len(rewards), np.int64),
                rewards=np.asarray(rewards, np.float32),
                terminated=terminated,
                truncated=not terminated,
                spec=SPEC,
            )
            for rewards, terminated in plays
        ]
    )
    view = view_of(service, folder, DataConfig(batch=1))
    rewards = next(column for column in view.columns if column.field.name == "reward")
    return data_returns(view.manifest, rewards, gamma, **options)


def test_a_termination_ends_a_return_and_a_truncation_goes_on(fake, tmp_path):
    """Rewards of -1 for ever are worth -10 at gamma .9, however long they were recorded."""
    ended = returns_of(fake, tmp_path / "a", [([-1, -1], True), ([0, 1], True)], 0.9)
    assert (ended.low, ended.high) == pytest.approx((-1.9, 1.0))
    assert ended.spread == pytest.approx(2.9) and ended.std > 0
    cut = returns_of(fake, tmp_path / "b", [([-1, -1, -1], False), ([0, 1], True)], 0.9)
    assert (cut.low, cut.high) == pytest.approx((-10.0, 1.0))


def test_extremes_are_counted_and_much_data_is_thinned(fake, tmp_path):
    bandit = [([0], True), ([1], True)] * 5
    assert returns_of(fake, tmp_path / "a", bandit, 0.9).at_extremes == 1.0
    even = returns_of(fake, tmp_path / "b", bandit, 0.9, max_steps=5)
    assert (even.low, even.high) == (0.0, 0.0)  # every second trajectory
    steady = returns_of(fake, tmp_path / "c", [([5.0], True)] * 3, 0.9)
    assert steady.spread == pytest.approx(2.5)  # returns that hardly differ have a scale, too


def test_usual_returns_are_those_without_the_extreme_twentieths(fake, tmp_path):
    """One good and one bad trajectory of a hundred are unusual; of ten they are not."""
    rare = [([-1000.0], True), *[([float(i % 2)], True) for i in range(98)], ([1000.0], True)]
    assert returns_of(fake, tmp_path / "a", rare, 0.9).usual == (0.0, 1.0)
    usual = returns_of(fake, tmp_path / "b", rare[:5] + rare[-5:], 0.9).usual
    assert usual[0] < -100 and usual[1] > 100


@pytest.mark.parametrize(("certain", "margin"), [(True, 0.5), (False, 2.5)])
def test_truncations_leave_a_wider_margin_around_the_returns(certain, margin):
    assert margin_of_returns(-1.0, 4.0, certain=certain) == pytest.approx(margin)
