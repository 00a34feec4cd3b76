"""The sample order is arithmetic: pure, the same for any world, exact where that is promised, and
pinned: older runs must resume on the samples they had."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import replace

import numpy as np
import pytest

from stepwell.testing import make_spec
from trainer.config import DataConfig, SettingError, SourceConfig
from trainer.data.sampler import (
    AT_ONCE,
    Windows,
    WindowSampler,
    _coprime_stride,
    mix,
    permute,
    philox,
    philox_key,
    start_range,
    uniform,
    uniform_int,
)
from trainer.data.snapshot import DataError, Manifest

LENGTHS = [5, 100, 33, 64, 1, 250, 40, 16, 17, 15]
PADDINGS = ("none", "both", "left", "right", "center")
DRAWS = ("trajectories", "steps", "windows")
MIXED = {"component": [0, 1, 1, 0, 1, 0, 1, 2, 2, 2], "shares": (0.3, 0.5, 0.2)}
WEIGHTS = {
    "alike": [2.0] * 10,
    "whole": [1.0, 2.0, 0.0, 1.0, 4.0, 1.0, 1.0, 0.0, 1.0, 2.0],
    "parts": [0.5, 0.25, 1.5, 0.1, 0.7, 0.3, 0.9, 0.2, 0.6, 0.0],
}
RAMP = (
    SourceConfig(select="a", share=0.6, share_end=0.1),
    SourceConfig(select="b", share=0.4),
    SourceConfig(select="c", share=0.0, share_end=0.5),
)


def manifest_of(lengths=LENGTHS, *, component=None, shares=(1.0,), weight=None) -> Manifest:
    n = len(lengths)
    flags, length = np.zeros(n, np.bool_), np.asarray(lengths, np.int64)
    return Manifest(
        snapshot="sn",
        digest="d" * 64,
        spec=make_spec(),
        shares=shares,
        ids=np.asarray([f"t{i}" for i in range(n)], object),
        shards=("sh",),
        component=np.asarray([0] * n if component is None else component, np.int16),
        weight=np.asarray([1.0] * n if weight is None else weight, float),
        shard=np.zeros(n, np.int32),
        traj_idx=np.arange(n, dtype=np.int32),
        row_start=np.cumsum(length + 1) - length - 1,
        length=length,
        first_step=np.zeros(n, np.int64),
        terminated=flags,
        truncated=flags,
        final_obs_valid=~flags,
    )


def table(windows: Windows) -> np.ndarray:
    return np.stack([windows.component, windows.trajectory, windows.start, windows.length])


def arguments() -> dict[str, tuple[Manifest, DataConfig, int]]:
    """Every way to draw, by name."""
    found, plain, mixed = {}, manifest_of(), manifest_of(**MIXED)
    for padding, draw in itertools.product(PADDINGS, DRAWS):
        config = DataConfig(batch=12, window=16, padding=padding, draw=draw)
        found[f"{padding} {draw}"] = plain, config, 3
        found[f"{padding} {draw} mixed"] = mixed, config, 3
    for name, weight in WEIGHTS.items():
        for draw in DRAWS:
            config = DataConfig(batch=12, window=16, padding="right", draw=draw)
            found[f"{draw} weights {name}"] = manifest_of(weight=weight), config, 4
    for draw in ("trajectories", "windows"):
        config = DataConfig(batch=12, window=16, padding="none", draw=draw, epochs=True)
        found[f"{draw} epochs"] = plain, config, 5
        found[f"{draw} epochs mixed"] = mixed, config, 5
    found["ramp"] = mixed, DataConfig(batch=20, window=4, ramp_updates=50), 6
    found["odd window"] = plain, DataConfig(batch=7, window=5, padding="center"), 7
    return found


ARGUMENTS = arguments()
# Only a ramp reads the sources.
SAMPLERS = {name: WindowSampler(*given, sources=RAMP) for name, given in ARGUMENTS.items()}


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_order_never_changes_between_versions(name):
    sampler = SAMPLERS[name]
    steps = (0, 1, AT_ONCE - 1, AT_ONCE, 40, 50, 1000)
    drawn = b"".join(table(sampler.batch(step)).astype("<i8").tobytes() for step in steps)
    assert zlib.crc32(drawn) == GOLDEN[name]


@pytest.mark.parametrize("name", SAMPLERS)
def test_windows_lie_in_their_trajectories_and_are_of_their_component(name):
    sampler = SAMPLERS[name]
    drawn = sampler.samples(0, 5000)
    total, window = sampler.total_length[drawn.trajectory], sampler.config.window
    assert (drawn.start >= 0).all() and (drawn.length >= 1).all() and (drawn.length <= window).all()
    assert (drawn.start + drawn.length <= total).all()
    for c, members in enumerate(sampler.members):
        assert set(drawn.trajectory[drawn.component == c].tolist()) <= set(members.tolist())
    if sampler.config.padding == "none":
        assert (drawn.length == np.minimum(total, window)).all()
    if sampler.config.padding == "center":
        assert (drawn.length == np.minimum(total, window)).all()


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_world_sees_the_same_batches_in_the_same_order(name):
    """Ranks' slices, put together, are one process's batch; and k alone decides each sample. Across
    the chunks that are drawn at once, forwards and backwards."""
    one, steps = SAMPLERS[name], [0, 31, 32, 33, 31, 0, 1000, 5]
    b = one.config.batch
    whole = {step: table(one.samples(step * b, b)) for step in set(steps)}
    singly = [table(one.samples(31 * b + i, 1)) for i in range(b)]
    assert (np.concatenate(singly, axis=1) == whole[31]).all()
    for world in (n for n in (1, 2, 3, 4) if b % n == 0):
        sampler = WindowSampler(*ARGUMENTS[name], world, RAMP)
        for step in steps:
            parts = [table(sampler.batch(step, rank)) for rank in range(world)]
            assert {part.shape for part in parts} == {(4, b // world)}
            assert (np.concatenate(parts, axis=1) == whole[step]).all()
            first = [sampler.first_sample(step, rank) for rank in range(world)]
            assert first == [step * b + rank * (b // world) for rank in range(world)]


def test_seed_snapshot_and_nothing_else_decide():
    """Another seed or another selection is another order; asking twice is the same one."""
    config, manifest = DataConfig(batch=32, window=8), manifest_of()
    first = table(WindowSampler(manifest, config, 0).batch(5))
    assert (table(WindowSampler(manifest, config, 0).batch(5)) == first).all()
    other = WindowSampler(replace(manifest, digest="e" * 64), config, 0)
    for sampler in (WindowSampler(manifest, config, 1), other):
        assert (table(sampler.batch(5)) != first).any()


def test_the_chunk_drawn_at_once_is_used_again():
    sampler = WindowSampler(manifest_of(), DataConfig(batch=4, window=8), 0)
    calls, samples = [], sampler.samples
    sampler.samples = lambda first, count: calls.append((first, count)) or samples(first, count)
    for step in (*range(AT_ONCE + 1), AT_ONCE, 0, AT_ONCE - 1):
        sampler.batch(step)
    n = AT_ONCE * 4
    assert calls == [(0, n), (n, n), (0, n)]


def test_windows_are_rows():
    windows = Windows(*(np.arange(n, n + 4) for n in (0, 10, 20, 30)))
    assert len(windows) == 4
    assert table(windows[1:3]).tolist() == [[1, 2], [11, 12], [21, 22], [31, 32]]


def test_what_cannot_be_drawn_is_refused():
    WindowSampler(manifest_of(), DataConfig(batch=12), 0, world=4)
    with pytest.raises(SettingError, match=r"data\.batch: 12 .* 5 processes.*multiple of 5"):
        WindowSampler(manifest_of(), DataConfig(batch=12), 0, world=5)
    with pytest.raises(DataError, match="component 1 of the mixture"):
        WindowSampler(manifest_of(weight=[1.0, *[0.0] * 9], **MIXED), DataConfig(batch=12), 0)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("window", [1, 2, 5, 6])
def test_starts_at_the_edges(padding, window):
    """One shorter than the window, as long, one longer, and much longer."""
    length = np.asarray([1, window - 1, window, window + 1, window + 2, 50])
    length = length[length > 0]
    low, high = start_range(length, window, padding)
    for n, first, last in zip(length.tolist(), low.tolist(), high.tolist(), strict=True):
        wanted = {
            "none": (0, n - window),
            "both": (1 - window, n - 2),
            "left": (1 - window, n - window),
            "right": (0, n - 2),
            "center": (-(window // 2), n - 1 - window // 2),
        }[padding]
        assert (first, last) == ((0, 0) if n <= window else wanted), n


def test_recut_draws_the_same_windows_where_lengths_have_not_changed():
    sampler = WindowSampler(
        manifest_of(), DataConfig(batch=12, window=16, padding="both"), 3, world=2
    )
    for step, rank in ((0, 0), (0, 1), (7, 1)):
        windows = sampler.batch(step, rank)
        same = sampler.resample_starts(
            step, rank, windows, sampler.total_length[windows.trajectory]
        )
        assert (table(same) == table(windows)).all()
        shorter = np.maximum(sampler.total_length[windows.trajectory] // 2, 1)
        cut = sampler.resample_starts(step, rank, windows, shorter)
        assert (cut.trajectory == windows.trajectory).all()
        assert (cut.component == windows.component).all()
        assert (cut.start + cut.length <= shorter).all() and (cut.length >= 1).all()
        low, high = start_range(shorter, 16, "both")
        words = philox(sampler.key, step * 12 + rank * 6, 6)
        start = low + uniform_int(words[:, 1], high - low + 1)
        assert (cut.start == np.maximum(start, 0)).all()
        assert (cut.length == np.minimum(start + 16, shorter) - cut.start).all()


def test_checksums_and_shares_tell_batches_apart():
    sampler = SAMPLERS["none steps mixed"]
    whole = sampler.samples(5 * 12, 12)
    samples = np.stack([whole.trajectory, whole.start, whole.length]).tobytes()
    assert sampler.checksum(5) == zlib.crc32(b"", zlib.crc32(samples))
    assert len({sampler.checksum(step) for step in range(50)}) == 50
    relabel = ("hindsight", "rarity")
    other = WindowSampler(manifest_of(**MIXED), sampler.config.replace(relabel=relabel), 3)
    assert other.checksum(5) == zlib.crc32(b"hindsight\nrarity", zlib.crc32(samples))
    counts = [np.sum(whole.component == c) for c in range(3)]
    assert sampler.shares(5) == [float(n / 12) for n in counts] and sum(counts) == 12
    assert all(type(share) is float for share in sampler.shares(5))


@pytest.mark.parametrize("batch", [1, 2, 10, 16, 64])
@pytest.mark.parametrize("shares", [(0.9, 0.1), (1 / 3, 2 / 3), (0.1, 0.2, 0.7), (0.5, 0.25, 0.25)])
def test_components_are_stratified_exactly(shares, batch):
    """Every batch holds share x B of each component, rounded up or down; over time exactly."""
    n, b, batches = len(shares), batch, 500
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


def test_growing_data_tell_how_stale_a_batch_is():
    """By the steps of the same component that were stored later; of data that do not grow nothing
    is told."""
    mixture = {"component": [0, 1, 1, 0, 1, 0, 1], "shares": (0.3, 0.7)}
    manifest = manifest_of([5, 100, 33, 64, 1, 250, 40], **mixture)
    assert manifest.later_steps.tolist() == [314, 74, 41, 250, 40, 0, 0]
    growing = WindowSampler(manifest, DataConfig(batch=8, window=4, refresh_every=10), 0)
    told = [growing.metrics(step)["data/staleness"] for step in range(4)]
    drawn = [growing.batch(step).trajectory for step in range(4)]
    assert told == [manifest.later_steps[rows].mean() for rows in drawn] and len(set(told)) > 1
    fixed = WindowSampler(manifest, DataConfig(batch=8, window=4), 0)
    assert "data/staleness" not in fixed.metrics(0)


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


def test_a_ramp_ends_at_its_last_update():
    sampler = SAMPLERS["ramp"]
    assert sampler._shares(np.asarray([0]))[0].tolist() == [0.6, 0.4, 0.0]
    assert sampler._shares(np.asarray([25]))[0].tolist() == pytest.approx([0.35, 0.4, 0.25])
    for step in (50, 51, 10**6):
        assert sampler._shares(np.asarray([step]))[0].tolist() == pytest.approx([0.1, 0.4, 0.5])
    still = WindowSampler(
        manifest_of(**MIXED), sampler.config.replace(ramp_updates=0), 6, sources=RAMP
    )
    assert still._shares(np.asarray([9])).tolist() == [0.3, 0.5, 0.2]
    unnamed = WindowSampler(manifest_of(**MIXED), sampler.config, 6)
    assert unnamed._shares(np.asarray([9]))[0].tolist() == pytest.approx([0.3, 0.5, 0.2])


# ----------------------------------------------------------------------------------- random words

MOST = np.asarray([0, 1, 2**11 - 1, 2**11, 2**63, 2**64 - 1], np.uint64)


def test_words_as_numbers():
    assert uniform(MOST).tolist() == [0.0, 0.0, 0.0, 2.0**-53, 0.5, 1 - 2.0**-53]
    assert uniform_int(MOST, 10).tolist() == [0, 0, 0, 0, 5, 9]
    assert uniform_int(MOST, 1).tolist() == [0] * 6
    assert uniform_int(MOST, 2**53).tolist() == [0, 0, 0, 1, 2**52, 2**53 - 1]
    assert uniform_int(MOST, np.asarray([1, 2, 3, 4, 5, 6])).tolist() == [0, 0, 0, 0, 2, 5]
    assert uniform_int(MOST, 10).dtype == np.int64 and uniform(MOST).dtype == np.float64


def test_keys_and_words_are_those_of_the_hash_and_of_philox():
    assert philox_key(3, "ab").tolist() == [8068034155053542906, 4445959202585486725]
    assert len({tuple(philox_key(s, d).tolist()) for s in (0, 1) for d in ("a", "b")}) == 4
    key = philox_key(3, "ab")
    for first, count in ((0, 3), (7, 2), (2**40, 1)):
        words = philox(key, first, count)
        assert words.shape == (count, 4) and words.dtype == np.uint64
        for row in range(count):
            alone = np.random.Philox(key=key, counter=first + row).random_raw(4)
            assert (words[row] == alone).all()


def test_the_mixer_is_splitmix64():
    """Known answers of the generator with seed 0: states k times the golden ratio."""
    golden = 0x9E3779B97F4A7C15
    states = np.asarray([(k * golden) % 2**64 for k in range(3)], np.uint64)
    answers = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix(states).tolist() == answers


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 5000])
def test_each_epoch_is_another_permutation(n):
    key = philox_key(0, "x")
    found = [permute(np.arange(n), n, key, np.full(n, epoch)).tolist() for epoch in range(3)]
    assert all(sorted(one) == list(range(n)) for one in found)
    if n > 4:
        assert found[0] != found[1] != found[2] and found[0] != list(range(n))
    some = np.asarray([0, n - 1, n // 2])
    assert permute(some, n, key, np.asarray([1, 1, 1])).tolist() == [found[1][i] for i in some]


def test_a_permutation_stays_in_the_smallest_square_that_holds_it():
    """Fewer than four steps on average, where it walks."""
    key = philox_key(1, "y")
    assert permute(np.arange(17), 17, key, np.zeros(17, np.int64)).tolist() == PERMUTED


def test_strides_deal_a_batch_out():
    assert [_coprime_stride(n) for n in (1, 2, 3, 4, 5, 8, 12, 32, 100, 256)] == STRIDES
    for n in range(1, 300):
        stride = _coprime_stride(n)
        assert stride >= 1 and len({place * stride % n for place in range(n)}) == n


PERMUTED = [6, 3, 9, 10, 7, 16, 15, 12, 4, 8, 11, 5, 13, 0, 1, 14, 2]
STRIDES = [1, 1, 2, 3, 3, 5, 7, 21, 63, 159]
GOLDEN = {
    "none trajectories": 450062910,
    "none trajectories mixed": 1086593549,
    "none steps": 1566206287,
    "none steps mixed": 735727265,
    "none windows": 1087625686,
    "none windows mixed": 1100493636,
    "both trajectories": 396553362,
    "both trajectories mixed": 4220404581,
    "both steps": 315779656,
    "both steps mixed": 1366577192,
    "both windows": 3242783768,
    "both windows mixed": 498308056,
    "left trajectories": 788260979,
    "left trajectories mixed": 3724976295,
    "left steps": 2058638349,
    "left steps mixed": 3706796435,
    "left windows": 3320687886,
    "left windows mixed": 2530148311,
    "right trajectories": 3935048847,
    "right trajectories mixed": 2072029918,
    "right steps": 944648339,
    "right steps mixed": 1540155516,
    "right windows": 2987361232,
    "right windows mixed": 1125774105,
    "center trajectories": 531453842,
    "center trajectories mixed": 279738016,
    "center steps": 603546399,
    "center steps mixed": 3518955000,
    "center windows": 2509067727,
    "center windows mixed": 1419984,
    "trajectories weights alike": 119156115,
    "steps weights alike": 150978062,
    "windows weights alike": 1808129990,
    "trajectories weights whole": 2348871585,
    "steps weights whole": 2027723582,
    "windows weights whole": 1180627475,
    "trajectories weights parts": 1590349690,
    "steps weights parts": 713798465,
    "windows weights parts": 2893521264,
    "trajectories epochs": 3179132483,
    "trajectories epochs mixed": 3388504030,
    "windows epochs": 2537724412,
    "windows epochs mixed": 1926335334,
    "ramp": 2761580682,
    "odd window": 285615121,
}
