"""The sample order at its edges, and pinned: older runs must resume on the samples they had."""

from __future__ import annotations

import itertools
import zlib

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
        component=np.asarray(component or [0] * n, np.int16),
        weight=np.asarray(weight or [1.0] * n, float),
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


def crc(windows: Windows) -> int:
    return zlib.crc32(table(windows).astype("<i8").tobytes())


def samplers() -> dict[str, WindowSampler]:
    """Every way to draw, by name."""
    found = {}
    for padding, draw in itertools.product(PADDINGS, DRAWS):
        config = DataConfig(batch=12, window=16, padding=padding, draw=draw)
        found[f"{padding} {draw}"] = WindowSampler(manifest_of(), config, 3)
        found[f"{padding} {draw} mixed"] = WindowSampler(manifest_of(**MIXED), config, 3)
    for name, weight in WEIGHTS.items():
        for draw in DRAWS:
            config = DataConfig(batch=12, window=16, padding="right", draw=draw)
            found[f"{draw} weights {name}"] = WindowSampler(manifest_of(weight=weight), config, 4)
    for draw in ("trajectories", "windows"):
        config = DataConfig(batch=12, window=16, padding="none", draw=draw, epochs=True)
        found[f"{draw} epochs"] = WindowSampler(manifest_of(), config, 5)
        found[f"{draw} epochs mixed"] = WindowSampler(manifest_of(**MIXED), config, 5)
    config = DataConfig(batch=20, window=4, ramp_updates=50)
    found["ramp"] = WindowSampler(manifest_of(**MIXED), config, 6, sources=RAMP)
    found["odd window"] = WindowSampler(
        manifest_of(), DataConfig(batch=7, window=5, padding="center"), 7
    )
    return found


SAMPLERS = samplers()


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_order_never_changes_between_versions(name):
    sampler = SAMPLERS[name]
    steps = (0, 1, AT_ONCE - 1, AT_ONCE, 40, 50, 1000)
    assert [crc(sampler.batch(step)) for step in steps] == GOLDEN[name]


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


@pytest.mark.parametrize("name", ["none steps mixed", "windows epochs", "ramp"])
def test_a_batch_is_its_slice_of_the_samples_wherever_it_begins(name):
    """Across the chunks that are drawn at once, forwards and backwards, by each rank."""
    sampler = SAMPLERS[name]
    b = sampler.config.batch
    steps = [0, 31, 32, 33, 63, 64, 65, 31, 0, 1000, 5, 64]
    for step in steps:
        assert (table(sampler.batch(step)) == table(sampler.samples(step * b, b))).all()
    half = WindowSampler(
        manifest_of(**MIXED), sampler.config, 6, world=2, sources=RAMP if name == "ramp" else ()
    )
    for step in steps:
        whole = table(half.samples(step * b, b))
        parts = [table(half.batch(step, rank)) for rank in (0, 1)]
        assert [part.shape for part in parts] == [(4, b // 2)] * 2
        assert (np.concatenate(parts, axis=1) == whole).all()
        assert [half.first_sample(step, rank) for rank in (0, 1)] == [step * b, step * b + b // 2]


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


def test_every_start_of_a_long_trajectory_is_drawn():
    for padding in PADDINGS:
        sampler = WindowSampler(
            manifest_of([30]), DataConfig(batch=1, window=4, padding=padding), 0
        )
        low, high = int(sampler.low[0]), int(sampler.low[0] + sampler.span[0] - 1)
        raw = low + uniform_int(philox(sampler.key, 0, 4000)[:, 1], int(sampler.span[0]))
        assert (raw.min(), raw.max()) == (low, high)


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


@pytest.mark.parametrize("share", [0.25, 1 / 3, 0.5, 0.9])
@pytest.mark.parametrize("batch", [1, 2, 10, 64])
def test_every_batch_has_its_shares_rounded_up_or_down(share, batch):
    manifest = manifest_of([20] * 4, component=[0, 1, 0, 1], shares=(share, 1 - share))
    sampler = WindowSampler(manifest, DataConfig(batch=batch, window=4), 0)
    counts = [int(np.sum(sampler.batch(step).component == 0)) for step in range(200)]
    assert min(counts) >= int(share * batch) and max(counts) <= int(share * batch) + 1
    assert abs(np.mean(counts) - share * batch) < 0.02 * batch + 0.02


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
    "none trajectories": [
        1303535668,
        1590655944,
        630376568,
        3152542185,
        3456935169,
        3866523351,
        1780373109,
    ],
    "none trajectories mixed": [
        2993134282,
        3432172126,
        2541017167,
        1932900144,
        576023731,
        3974022715,
        131077425,
    ],
    "none steps": [
        2445737493,
        2859338271,
        1734096322,
        3175516687,
        1180850207,
        636104302,
        2029185131,
    ],
    "none steps mixed": [
        3539991795,
        2001338870,
        3296618768,
        4012495649,
        1350973277,
        73996592,
        4281611041,
    ],
    "none windows": [
        2445737493,
        2859338271,
        1296732526,
        1787350504,
        1016476659,
        1197454545,
        627049695,
    ],
    "none windows mixed": [
        3539991795,
        2119608842,
        3296618768,
        786062109,
        4137324595,
        3533616926,
        1496863099,
    ],
    "both trajectories": [
        3724969141,
        2615509079,
        1115187468,
        559898467,
        682294839,
        3712742350,
        1003736906,
    ],
    "both trajectories mixed": [
        1484641159,
        1521775500,
        3887051031,
        1803172444,
        3942811654,
        3752363572,
        3954812185,
    ],
    "both steps": [
        1442058351,
        4098031468,
        2297055492,
        1989823156,
        1750821725,
        3260401614,
        45067662,
    ],
    "both steps mixed": [
        1504871364,
        3086137640,
        823669696,
        2729158555,
        377632244,
        2320599322,
        2219518136,
    ],
    "both windows": [
        2646723054,
        282066107,
        1247451617,
        3224135528,
        2933797910,
        1020640371,
        2887926630,
    ],
    "both windows mixed": [
        473153314,
        4274918689,
        403524530,
        2729158555,
        377632244,
        678877183,
        268448807,
    ],
    "left trajectories": [
        2116947259,
        3370595086,
        811606958,
        1123468104,
        3725773439,
        2885170711,
        3588819829,
    ],
    "left trajectories mixed": [
        1408029976,
        320891949,
        3010342334,
        619587840,
        2857437352,
        3950114270,
        3280098544,
    ],
    "left steps": [
        3670609228,
        3174705048,
        1308271110,
        4219829095,
        2447644037,
        3476659809,
        616858295,
    ],
    "left steps mixed": [
        3122824908,
        1329537316,
        3590359327,
        2756842068,
        3514138222,
        4054780770,
        4036758016,
    ],
    "left windows": [
        3670609228,
        1505174607,
        2676689304,
        3163174125,
        2447644037,
        4124653568,
        3161646713,
    ],
    "left windows mixed": [
        3122824908,
        2161903404,
        1780095191,
        2756842068,
        3514138222,
        2076611538,
        3807251033,
    ],
    "right trajectories": [
        640157159,
        186626896,
        2383180931,
        2911865058,
        2179734539,
        2900359637,
        2072226789,
    ],
    "right trajectories mixed": [
        193395711,
        2051620310,
        1460585898,
        1309476595,
        1107134853,
        1792933296,
        2763934442,
    ],
    "right steps": [
        3874444871,
        3641764972,
        2800517135,
        1948676224,
        1152819142,
        3945025268,
        1801303975,
    ],
    "right steps mixed": [
        2278394682,
        3588673975,
        2412862003,
        3017980780,
        3233208154,
        2456708909,
        1022944696,
    ],
    "right windows": [
        3874444871,
        3321281419,
        2547199231,
        3455081493,
        1152819142,
        781673413,
        2264124282,
    ],
    "right windows mixed": [
        2278394682,
        1899907155,
        2135672975,
        3017980780,
        3296157181,
        1530017762,
        3429005060,
    ],
    "center trajectories": [
        3888139828,
        3329207726,
        3747250488,
        3210817172,
        1859970687,
        4074462968,
        3764396679,
    ],
    "center trajectories mixed": [
        3301350367,
        1479945163,
        3814850092,
        2028774352,
        2202173661,
        2454029906,
        994615360,
    ],
    "center steps": [
        1436462133,
        2339206836,
        2750984172,
        334034828,
        126783933,
        2463423571,
        58647849,
    ],
    "center steps mixed": [
        4053289937,
        1644341621,
        3138303150,
        1495840052,
        981554786,
        3621110120,
        1883954623,
    ],
    "center windows": [
        1436462133,
        1916339426,
        2517342534,
        1384335515,
        126783933,
        70685420,
        1851004630,
    ],
    "center windows mixed": [
        4053289937,
        2770055193,
        2316304506,
        1495840052,
        981554786,
        3617938595,
        1096051051,
    ],
    "trajectories weights alike": [
        1321438074,
        870775960,
        801257994,
        2956885204,
        3550840573,
        1482908217,
        3763683212,
    ],
    "steps weights alike": [
        1898903838,
        947204587,
        177542222,
        208322818,
        3341173770,
        3931887656,
        1483780772,
    ],
    "windows weights alike": [
        2728310139,
        1775958498,
        3942863935,
        208322818,
        2638438551,
        2402051639,
        2005903972,
    ],
    "trajectories weights whole": [
        1519495759,
        1328880702,
        3113791094,
        3295180199,
        3601697585,
        2172115980,
        693581331,
    ],
    "steps weights whole": [
        1257061472,
        1493928373,
        1336221230,
        905733126,
        558738130,
        3846809759,
        415722048,
    ],
    "windows weights whole": [
        605719430,
        745522059,
        1877247380,
        1129090088,
        3984945566,
        3129123338,
        2028172470,
    ],
    "trajectories weights parts": [
        3232406046,
        3069201522,
        2600239869,
        1966283976,
        444206222,
        4213959695,
        3018453085,
    ],
    "steps weights parts": [
        1339539347,
        1878732662,
        4006854388,
        247195770,
        960306085,
        4248977925,
        1954337084,
    ],
    "windows weights parts": [
        624153153,
        3732079447,
        3942863935,
        247195770,
        960306085,
        1770339778,
        247556506,
    ],
    "trajectories epochs": [
        1861923464,
        3821429643,
        1136060334,
        167630594,
        432731120,
        3674292994,
        4211166185,
    ],
    "trajectories epochs mixed": [
        3038161242,
        3889632257,
        1767168353,
        1470535888,
        318357707,
        2084061886,
        999074068,
    ],
    "windows epochs": [
        34236136,
        2034614203,
        254356711,
        1191833613,
        176893869,
        2136885413,
        1221744325,
    ],
    "windows epochs mixed": [
        2982034522,
        305367991,
        836448755,
        1429415180,
        1866233666,
        47229295,
        61264160,
    ],
    "ramp": [1048247268, 1300270208, 3473463933, 1084570826, 3378663979, 3300677568, 50610617],
    "odd window": [
        1717713175,
        3465247821,
        1353169187,
        1042623588,
        969535875,
        4200085605,
        960737512,
    ],
}
