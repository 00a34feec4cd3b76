"""The sample order is arithmetic: pure, the same for any world, exact where that is promised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepwell.testing import make_spec
from trainer.config import DataConfig, SettingError, SourceConfig
from trainer.data.sampler import WindowSampler, permute, philox, philox_key, start_range
from trainer.data.snapshot import DataError, Manifest


def manifest_of(lengths, *, component=None, shares=(1.0,), weight=None) -> Manifest:
    n = len(lengths)
    zeros = np.zeros(n, np.bool_)
    length = np.asarray(lengths, np.int64)
    return Manifest(
        snapshot="sn",
        digest="d" * 64,
        spec=make_spec(),
        shares=shares,
        ids=np.arange(2 * n, dtype=np.int64).view("V16"),
        shards=("sh",),
        component=np.zeros(n, np.int16) if component is None else np.asarray(component, np.int16),
        weight=np.ones(n) if weight is None else np.asarray(weight, float),
        shard=np.zeros(n, np.int32),
        traj_idx=np.arange(n, dtype=np.int32),
        row_start=np.cumsum(length + 1) - length - 1,
        length=length,
        first_step=np.zeros(n, np.int64),
        terminated=zeros,
        truncated=zeros,
        final_obs_valid=~zeros,
    )


def rows(windows) -> list[tuple[int, ...]]:
    columns = (windows.component, windows.trajectory, windows.start, windows.length)
    return list(zip(*(c.tolist() for c in columns), strict=True))


LENGTHS = [5, 100, 33, 64, 1, 250, 40]
MIXTURE = {"component": [0, 1, 1, 0, 1, 0, 1], "shares": (0.3, 0.7)}
CONFIGS = [
    DataConfig(batch=12, window=16, padding=padding, draw=draw)
    for padding in ("none", "both", "left", "right", "center")
    for draw in ("trajectories", "steps", "windows")
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.padding}-{c.draw}")
@pytest.mark.parametrize("mixture", [{}, MIXTURE], ids=["one", "mixture"])
def test_any_world_sees_the_same_batches_in_the_same_order(config, mixture):
    """Ranks' slices, put together, are one process's batch; and k alone decides each sample."""
    manifest = manifest_of(LENGTHS, **mixture)
    one = WindowSampler(manifest, config, seed=3)
    for step in (0, 1, 777):
        whole = rows(one.batch(step))
        for world in (2, 3, 4):
            parts = [
                rows(WindowSampler(manifest, config, 3, world).batch(step, r)) for r in range(world)
            ]
            assert sum(parts, []) == whole
        singly = [rows(one.samples(step * 12 + i, 1))[0] for i in range(12)]
        assert singly == whole


def test_seed_snapshot_and_nothing_else_decide():
    """Another seed or another selection is another order; asking twice is the same one."""
    config = DataConfig(batch=32, window=8)
    manifest = manifest_of(LENGTHS)
    first = rows(WindowSampler(manifest, config, 0).batch(5))
    assert rows(WindowSampler(manifest, config, 0).batch(5)) == first
    assert rows(WindowSampler(manifest, config, 1).batch(5)) != first
    assert rows(WindowSampler(replace(manifest, digest="e" * 64), config, 0).batch(5)) != first


def test_the_order_never_changes_between_versions():
    """Golden: a checkpoint of an older version must resume on the same samples."""
    sampler = WindowSampler(manifest_of(LENGTHS, **MIXTURE), DataConfig(batch=4, window=16), seed=1)
    assert rows(sampler.batch(2)) == GOLDEN


def test_growing_data_tell_how_stale_a_batch_is():
    """By the steps of the same component that were stored later; of data that do not grow nothing
    is told."""
    manifest = manifest_of(LENGTHS, **MIXTURE)
    assert manifest.later_steps.tolist() == [314, 74, 41, 250, 40, 0, 0]
    growing = WindowSampler(manifest, DataConfig(batch=8, window=4, refresh_every=10), 0)
    told = [growing.metrics(step)["data/staleness"] for step in range(4)]
    drawn = [growing.batch(step).trajectory for step in range(4)]
    assert told == [manifest.later_steps[rows].mean() for rows in drawn] and len(set(told)) > 1
    fixed = WindowSampler(manifest, DataConfig(batch=8, window=4), 0)
    assert "data/staleness" not in fixed.metrics(0)


def test_a_world_that_does_not_divide_the_batch_is_refused_by_name():
    with pytest.raises(SettingError, match=r"data\.batch.*32.*3 processes"):
        WindowSampler(manifest_of(LENGTHS), DataConfig(batch=32), 0, world=3)


@pytest.mark.parametrize("shares", [(0.25, 0.75), (0.1, 0.2, 0.7), (0.5, 0.25, 0.25)])
def test_components_are_stratified_exactly(shares):
    """Every batch holds share x B of each component, rounded up or down; over time exactly."""
    n, b, batches = len(shares), 16, 500
    manifest = manifest_of([20] * 12, component=np.arange(12) % n, shares=shares)
    sampler = WindowSampler(manifest, DataConfig(batch=b, window=4), seed=0)
    counts = np.asarray(
        [np.bincount(sampler.batch(s).component, minlength=n) for s in range(batches)]
    )
    wanted = np.asarray(shares) * b
    assert (counts >= np.floor(wanted - 1e-9)).all() and (counts <= np.ceil(wanted + 1e-9)).all()
    assert np.abs(counts.mean(0) - wanted).max() < 2 / batches * b
    of = np.asarray([manifest.component[sampler.batch(s).trajectory] for s in range(50)])
    assert (of == np.asarray([sampler.batch(s).component for s in range(50)])).all()


RAMP = (
    SourceConfig(select="a", share=0.6, share_end=0.1),
    SourceConfig(select="b", share=0.4),
    SourceConfig(select="c", share=0.0, share_end=0.5),
)


def test_shares_move_in_a_straight_line_and_then_stay():
    """At each update exact to one window, from the first share to the last; sums as well."""
    b, ramp = 20, 200
    manifest = manifest_of([20] * 12, component=np.arange(12) % 3, shares=(0.6, 0.4, 0.5))
    sampler = WindowSampler(
        manifest, DataConfig(batch=b, window=4, ramp_updates=ramp), 0, sources=RAMP
    )
    steps = range(2 * ramp)
    counts = np.asarray([np.bincount(sampler.batch(s).component, minlength=3) for s in steps])
    way = np.minimum(np.arange(2 * ramp) / ramp, 1.0)[:, None]
    wanted = b * ((1 - way) * [0.6, 0.4, 0.0] + way * [0.1, 0.4, 0.5])
    assert (counts >= np.floor(wanted - 1e-9)).all() and (counts <= np.ceil(wanted + 1e-9)).all()
    assert np.abs((counts - wanted).mean(axis=0)).max() < 0.05
    assert counts[0].tolist() == [12, 8, 0] and counts[-1].tolist() == [2, 8, 10]
    assert [sampler.shares(s) for s in steps] == (counts / b).tolist()
    of = np.asarray([manifest.component[sampler.batch(s).trajectory] for s in steps])
    assert (of == np.asarray([sampler.batch(s).component for s in steps])).all()


@pytest.mark.parametrize("sources", [RAMP, RAMP[::-1]])
def test_moving_shares_are_as_pure_in_k_as_any_sample(sources):
    """From any step on, in any order, by any number of processes."""
    manifest = manifest_of([*LENGTHS, 7, 8], component=np.arange(9) % 3, shares=(0.6, 0.4, 0.5))
    config = DataConfig(batch=12, window=16, ramp_updates=50)
    whole = {
        s: rows(WindowSampler(manifest, config, 3, sources=sources).batch(s)) for s in (70, 31, 0)
    }
    for step, expected in whole.items():
        for world in (2, 3):
            samplers = [WindowSampler(manifest, config, 3, world, sources) for _ in range(world)]
            parts = [rows(sampler.batch(step, rank)) for rank, sampler in enumerate(samplers)]
            assert sum(parts, []) == expected
        one = WindowSampler(manifest, config, 3, sources=sources)
        assert [rows(one.samples(step * 12 + i, 1))[0] for i in range(12)] == expected


@pytest.mark.parametrize("total", [6, 5, 2])
def test_a_trajectory_no_longer_than_the_window_is_drawn_whole(total):
    sampler = WindowSampler(
        manifest_of([total]), DataConfig(batch=1, window=6, padding="center"), 0
    )
    drawn = sampler.samples(0, 200)
    assert set(drawn.start.tolist()) == {0} and set(drawn.length.tolist()) == {total}


@pytest.mark.parametrize("padding", ["none", "both", "left", "right", "center"])
def test_padded_sampling_ranges_by_brute_force(padding):
    """Each mode draws exactly the starts that its definition allows, equally often."""
    window, total, n = 6, 20, 40_000
    sampler = WindowSampler(
        manifest_of([total]), DataConfig(batch=1, window=window, padding=padding), 0
    )
    drawn = sampler.samples(0, n)
    allowed = {
        "none": range(0, total - window + 1),
        "both": range(-window + 1, total - 1),
        "left": range(-window + 1, total - window + 1),
        "right": range(0, total - 1),
        "center": range(-(window // 2), total - window // 2),
    }[padding]
    expected: dict[tuple[int, int], float] = {}
    for start in allowed:
        if padding == "center":
            start = min(max(start, 0), total - window)
        stop = min(start + window, total)
        begin = max(start, 0)
        key = (begin, stop - begin)
        expected[key] = expected.get(key, 0) + 1 / len(allowed)
    pairs, counts = np.unique(np.stack([drawn.start, drawn.length]), axis=1, return_counts=True)
    got = {(int(s), int(m)): c / n for (s, m), c in zip(pairs.T, counts, strict=True)}
    assert got.keys() == expected.keys()
    for key, share in expected.items():
        assert abs(got[key] - share) < 5 * np.sqrt(share / n)


def test_short_trajectories_come_whole():
    """No longer than the window: start 0, all of it, in every mode."""
    for padding in ("none", "both", "left", "right", "center"):
        low, high = start_range(np.asarray([1, 5, 6]), 6, padding)
        assert (low == 0).all() and (high == 0).all()
        sampler = WindowSampler(
            manifest_of([1, 5, 6]), DataConfig(batch=8, window=6, padding=padding), 0
        )
        drawn = sampler.samples(0, 200)
        assert (drawn.start == 0).all()
        assert (drawn.length == np.asarray([1, 5, 6])[drawn.trajectory]).all()


def test_draws_are_uniform_over_what_was_asked():
    """Trajectories, steps, windows, times weight: frequencies within five sigma."""
    lengths, weight, n, window = [3, 30, 300], [1.0, 1.0, 2.0], 60_000, 10
    for draw, size in (
        ("trajectories", [1, 1, 1]),
        ("steps", lengths),
        ("windows", [1, 21, 291]),
    ):
        for given in (None, weight):
            manifest = manifest_of(lengths, weight=given)
            sampler = WindowSampler(manifest, DataConfig(batch=1, window=window, draw=draw), 0)
            got = np.bincount(sampler.samples(0, n).trajectory, minlength=3) / n
            share = np.asarray(size) * np.asarray(given or [1, 1, 1])
            share = share / share.sum()
            assert (np.abs(got - share) < 5 * np.sqrt(share / n)).all(), (draw, given)


def test_weight_zero_is_never_drawn_and_an_empty_component_is_named():
    manifest = manifest_of([9, 9, 9], weight=[1, 0, 1])
    assert 1 not in WindowSampler(manifest, DataConfig(batch=1), 0).samples(0, 500).trajectory
    with pytest.raises(DataError, match="component 1"):
        WindowSampler(manifest_of([9], shares=(0.5, 0.5)), DataConfig(batch=2), 0)


@pytest.mark.parametrize("draw", ["trajectories", "windows"])
def test_an_epoch_holds_everything_once(draw):
    """Without replacement: each epoch is a permutation, and each epoch another one."""
    config = DataConfig(batch=5, window=16, draw=draw, epochs=True)
    sampler = WindowSampler(manifest_of(LENGTHS), config, seed=0)
    size = len(LENGTHS) if draw == "trajectories" else int(sampler.span.sum())
    epochs = []
    for epoch in range(3):
        drawn = sampler.samples(epoch * size, size)
        keys = [*zip(drawn.trajectory.tolist(), drawn.start.tolist(), strict=True)]
        if draw == "trajectories":
            assert sorted(drawn.trajectory.tolist()) == list(range(len(LENGTHS)))
        else:
            assert len(set(keys)) == size
        epochs.append(keys)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_permutations_permute(n):
    key = philox_key(0, "x")
    got = permute(np.arange(n), n, key, np.zeros(n, np.int64))
    assert sorted(got.tolist()) == list(range(n))


def test_samples_own_their_random_words():
    """Block k of the generator belongs to sample k, wherever a batch begins."""
    key = philox_key(5, "digest")
    whole = philox(key, 0, 64)
    assert (np.concatenate([philox(key, k, 1) for k in range(64)]) == whole).all()
    assert len(np.unique(whole)) == whole.size


GOLDEN = [(0, 0, 0, 5), (1, 1, 41, 16), (1, 6, 11, 16), (1, 4, 0, 1)]
