"""Trajectories ↔ bytes: nothing changes on the way, and no bytes at all can do harm."""

from __future__ import annotations

import io
import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell import (
    Box,
    CodecError,
    Discrete,
    EnvSpec,
    InvalidData,
    InvalidTrajectory,
    MultiBinary,
    MultiDiscrete,
    Trajectory,
    TrajectoryMetadata,
)
from stepwell.codec import (
    END_OF_STREAM,
    HEADER_KEY,
    EncodedStream,
    TrajectoryStream,
    decode,
    encode,
    to_batch,
)
from stepwell.schema import FORMAT_KEY, SPEC_KEY, arrow_schema
from stepwell.spaces import DTYPES, ROLES
from stepwell.testing import make_spec, make_trajectory
from tests.specs import assert_same, make_rich_spec

GOLDEN = Path(__file__).parents[1] / "golden" / "trajectory_v1.arrow"


# --- there and back ---------------------------------------------------------------------------

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}(/[a-z0-9]{1,3})?", fullmatch=True)


@st.composite
def boxes(draw):
    dtype = draw(st.sampled_from(DTYPES))
    if dtype == "bool":
        return Box(draw(shapes), dtype, 0.0, 1.0)
    low = draw(st.integers(0 if dtype.startswith("u") else -100, 0))
    return Box(draw(shapes), dtype, float(low), float(draw(st.integers(1, 100))))


spaces = st.one_of(
    boxes(),
    st.builds(Discrete, st.integers(1, 9), st.integers(-3, 3)),
    st.builds(MultiDiscrete, st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)),
    st.builds(MultiBinary, st.integers(1, 9)),
)
named = st.dictionaries(keys, spaces, min_size=1, max_size=3)


@st.composite
def specs(draw):
    observations = draw(named)
    roles = draw(st.dictionaries(st.sampled_from(sorted(observations)), st.sampled_from(ROLES)))
    return EnvSpec(
        observations,
        draw(st.one_of(st.builds(lambda s: {"action": s}, spaces), named)),
        roles,
        draw(st.one_of(st.just({}), named)),
        draw(st.booleans()),
        draw(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9)),
    )


@settings(max_examples=120, deadline=None)
@given(specs(), st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(0, 99))
def test_any_trajectory_of_any_spec_survives(spec, lengths, seed):
    sent = [make_trajectory(spec, length=n, seed=seed + i) for i, n in enumerate(lengths)]
    got_spec, got = decode(encode(sent, spec))
    assert got_spec == spec
    assert len(got) == len(sent)
    for a, b in zip(got, sent, strict=True):
        assert_same(a, b)


def test_every_field_of_about_and_every_kind_of_end_survives():
    spec = make_rich_spec()
    metadata = TrajectoryMetadata(
        env="Ü-v1",
        episode_id="e/1",
        first_step=7,
        seed=-5,
        policy="demo/7",
        collector="c",
        run="r",
        purpose="eval",
        success=False,
        tags=("a", "b c"),
        source="file.hdf5",
        metrics={"log/x": -0.0, "y": 1e-30},
        started_at=1.5,
    )
    base = make_trajectory(spec)
    ends = [(True, False, True), (False, True, True), (False, False, False)]
    sent = [
        Trajectory(
            obs=base.obs,
            actions=base.actions,
            rewards=base.rewards,
            infos=base.infos,
            action_known=base.action_known,
            metadata=metadata,
            terminated=x,
            truncated=y,
            final_obs_valid=v,
        )
        for x, y, v in ends
    ]
    for a, b in zip(decode(encode(sent, spec))[1], sent, strict=True):
        assert_same(a, b)


def test_infos_may_hold_gaps_and_signed_zeros_survive():
    spec = EnvSpec.of(Box((1,)), Discrete(2), infos={"x": Box((2,))})
    sent = Trajectory.from_arrays(
        obs=[[-0.0], [1.0]],
        actions=[1],
        rewards=[-0.0],
        infos={"x": [[np.nan, np.inf], [1, 2]]},
        spec=spec,
    )
    assert_same(decode(encode([sent], spec))[1][0], sent)


def test_arrays_in_any_memory_order_survive():
    spec = EnvSpec.of(Box((4, 3)), Box((2,), low=-1.0, high=1.0))
    base = make_trajectory(spec, length=6)
    doubled = np.repeat(base.actions["action"], 2, axis=0)
    sent = Trajectory(
        obs={"observation": np.asfortranarray(base.obs["observation"])},
        actions={"action": doubled[::2]},
        rewards=base.rewards[::-1],
        id=base.id,
    )
    got = decode(encode([sent], spec))[1][0]
    assert np.array_equal(got.obs["observation"], base.obs["observation"])
    assert np.array_equal(got.actions["action"], base.actions["action"])
    assert got.digest == sent.digest


def test_decoding_copies_nothing():
    data = encode(
        [make_trajectory(make_spec(observation=100), length=1000)], make_spec(observation=100)
    )
    obs = decode(data)[1][0].obs["observation"]
    assert not obs.flags.owndata and not obs.flags.writeable


def test_an_empty_stream_is_one():
    assert decode(encode([], make_spec())) == (make_spec(), [])


def test_encode_refuses_what_does_not_fit():
    with pytest.raises(InvalidTrajectory, match="shape"):
        encode([make_trajectory(make_spec(observation=4))], make_spec(observation=3))


def test_rows_are_as_drawn():
    """The last row is the observation alone: action and reward NULL, flags false, is_last true."""
    spec = make_spec()
    batch = to_batch(make_trajectory(spec, length=3), spec, arrow_schema(spec))
    rows = batch.to_pydict()
    assert rows["is_last"] == [False, False, False, True]
    assert rows["terminated"] == [False, False, True, False]
    assert rows["truncated"] == [False] * 4
    assert [r is None for r in rows["reward"]] == [False, False, False, True]
    assert [a is None for a in rows["action"]] == [False, False, False, True]
    assert None not in rows["obs.observation"]


# --- golden -----------------------------------------------------------------------------------


def golden_trajectories() -> list[Trajectory]:
    """What the golden file holds, spelt out here and made by no helper that may change."""
    count = np.arange(60)
    first = Trajectory(
        obs={
            "camera": (count % 256).astype(np.uint8).reshape(4, 3, 5),
            "legal": (count[:8] % 3 == 0).reshape(4, 2),
            "room": np.array([0, 1, 2, 1]),
            "state": (count[:12] / 8 - 0.5).astype(np.float32).reshape(4, 3),
        },
        actions={"action": np.array([[-1.0, 0.5], [0.25, 1.0], [0.0, -0.125]], np.float32)},
        rewards=np.array([1.0, -2.5, 0.1], np.float32),
        truncated=True,
        action_known=np.array([True, False, True]),
        infos={"qpos": (count[:8] / 3).reshape(4, 2)},
        metadata=TrajectoryMetadata(
            env="Golden-v1",
            seed=7,
            policy="demo/3",
            tags=("good",),
            metrics={"height": 1.25},
            success=True,
        ),
        id="01890000-0000-7000-8000-000000000001",
    )
    second = Trajectory(
        obs={k: v[:2] for k, v in first.obs.items()},
        actions={"action": first.actions["action"][:1]},
        rewards=first.rewards[:1],
        terminated=True,
        final_obs_valid=False,
        action_known=np.array([True]),
        infos={"qpos": first.infos["qpos"][:2]},
        id="01890000-0000-7000-8000-000000000002",
    )
    return [first, second]


GOLDEN_SPEC = EnvSpec.of(
    {
        "camera": Box((3, 5), "uint8", 0.0, 255.0),
        "legal": Box((2,), "bool", 0.0, 1.0),
        "room": Discrete(3),
        "state": Box((3,)),
    },
    Box((2,), low=-1.0, high=1.0),
    roles={"legal": "mask"},
    infos={"qpos": Box((2,), "float64")},
    action_known=True,
    env="Golden-v1",
)
GOLDEN_DIGESTS = [
    "afedc6b3b0b64a97a0df903d8e6d34598b65601872b14534916cc7cd3371dfdc",
    "e8cb78b85d75dba4149c6bafdbb7ef291ad09bf5687859a6b4ec244e33b9fa8c",
]
GOLDEN_SPEC_DIGEST = "3165c0b301319309079535ed7a36b542601c893c7a5150a77159d13cf7a62e9b"


def test_format_1_stays_readable():
    """A file written once, kept for ever: every later version must read it to the same content."""
    spec, got = decode(GOLDEN.read_bytes())
    assert spec == GOLDEN_SPEC
    for a, b in zip(got, golden_trajectories(), strict=True):
        assert_same(a, b)


def test_digests_never_change():
    """Digests are stored in indexes out there: the same content must have the same for ever."""
    assert [t.digest for t in golden_trajectories()] == GOLDEN_DIGESTS
    assert [t.digest for t in decode(GOLDEN.read_bytes())[1]] == GOLDEN_DIGESTS
    assert GOLDEN_SPEC.digest == GOLDEN_SPEC_DIGEST


# --- bytes of strangers -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def stream() -> bytes:
    spec = make_rich_spec()
    return encode([make_trajectory(spec, length=n) for n in (3, 8)], spec)


def test_every_truncation_is_noticed(stream):
    for size in range(len(stream)):
        with pytest.raises(CodecError):
            decode(stream[:size])


def test_a_flipped_bit_never_does_more_than_raise_its_own_error(stream):
    """Bits of values may change unseen here (digests are for that); nothing else may happen."""
    rng = np.random.default_rng(0)
    refused = 0
    for position in rng.choice(len(stream) * 8, 3000, replace=False):
        damaged = bytearray(stream)
        damaged[position // 8] ^= 1 << (position % 8)
        try:
            decode(bytes(damaged))
        except InvalidData:
            refused += 1
    assert refused > 300


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_is_refused_by_name(data):
    for body in (data, data + END_OF_STREAM, b"\xff\xff\xff\xff" + data + END_OF_STREAM):
        with pytest.raises(CodecError):
            decode(body)


def ipc(schema, batches, options=None):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        for batch, metadata in batches:
            writer.write_batch(batch, custom_metadata=metadata)
    return bytes(sink.getvalue())


def header(**changes):
    return {HEADER_KEY: json.dumps({**make_trajectory(length=5).header(), **changes}).encode()}


def rows_of(length=5):
    return to_batch(make_trajectory(length=length), make_spec(), arrow_schema(make_spec()))


def changed(column, value):
    batch = rows_of()
    at = batch.schema.get_field_index(column)
    return batch.set_column(at, batch.schema.field(at), pa.array(value, batch.schema[at].type))


SCHEMA = arrow_schema(make_spec())
FOREIGN = {
    "a pickle": lambda: pickle.dumps({"obs": [1, 2, 3]}) + END_OF_STREAM,
    "an npz": lambda: b"PK\x03\x04" + b"\0" * 100 + END_OF_STREAM,
    "HTML": lambda: b"<html><body>404</body></html>" + END_OF_STREAM,
    "a foreign schema": lambda: ipc(pa.schema([("a", pa.int64())]), []),
    "another format": lambda: ipc(SCHEMA.with_metadata({**SCHEMA.metadata, FORMAT_KEY: b"2"}), []),
    "no number as format": lambda: ipc(
        SCHEMA.with_metadata({**SCHEMA.metadata, FORMAT_KEY: b"one"}), []
    ),
    "a spec that is no JSON": lambda: ipc(
        SCHEMA.with_metadata({**SCHEMA.metadata, SPEC_KEY: b"{"}), []
    ),
    "a spec nested to death": lambda: ipc(
        SCHEMA.with_metadata({**SCHEMA.metadata, SPEC_KEY: b"[" * 100_000}), []
    ),
    "a spec that cannot be": lambda: ipc(
        SCHEMA.with_metadata({**SCHEMA.metadata, SPEC_KEY: b'{"observations": {}}'}), []
    ),
    "a spec for other columns": lambda: ipc(
        arrow_schema(make_spec(action=2)).with_metadata(SCHEMA.metadata), []
    ),
    "no header": lambda: ipc(SCHEMA, [(rows_of(), None)]),
    "a header that is no JSON": lambda: ipc(SCHEMA, [(rows_of(), {HEADER_KEY: b"\xff{"})]),
    "a header that is a list": lambda: ipc(SCHEMA, [(rows_of(), {HEADER_KEY: b"[]"})]),
    "a giant header": lambda: ipc(SCHEMA, [(rows_of(), {HEADER_KEY: b" " * 300_000})]),
    "an unknown header field": lambda: ipc(SCHEMA, [(rows_of(), header(pickle="x"))]),
    "another length": lambda: ipc(SCHEMA, [(rows_of(), header(length=4))]),
    "no rows": lambda: ipc(SCHEMA, [(rows_of().slice(0, 0), header(length=0))]),
    "one row": lambda: ipc(SCHEMA, [(rows_of().slice(5, 1), header(length=0))]),
    "flags against the header": lambda: ipc(SCHEMA, [(rows_of(), header(terminated=False))]),
    "a flag that is a number": lambda: ipc(SCHEMA, [(rows_of(), header(terminated=1))]),
    "terminated in the middle": lambda: ipc(
        SCHEMA, [(changed("terminated", [False, True, False, False, True, False]), header())]
    ),
    "is_last in the middle": lambda: ipc(
        SCHEMA, [(changed("is_last", [True, False, False, False, False, True]), header())]
    ),
    "is_last nowhere": lambda: ipc(SCHEMA, [(changed("is_last", [False] * 6), header())]),
    "a NULL flag": lambda: ipc(SCHEMA, [(changed("is_last", [None] * 5 + [True]), header())]),
    "a NULL reward": lambda: ipc(SCHEMA, [(changed("reward", [1, None, 1, 1, 1, None]), header())]),
    "a NaN reward": lambda: ipc(
        SCHEMA, [(changed("reward", [1, float("nan"), 1, 1, 1, None]), header())]
    ),
    "a NULL observation": lambda: ipc(
        SCHEMA, [(changed("obs.observation", [[1, 2, 3]] * 5 + [None]), header())]
    ),
    "a NULL action": lambda: ipc(
        SCHEMA, [(changed("action", [[1.0], None, [1.0], [1.0], [1.0], None]), header())]
    ),
    "a bad id": lambda: ipc(SCHEMA, [(rows_of(), header(id="../../etc/passwd"))]),
    "an id that is a number": lambda: ipc(SCHEMA, [(rows_of(), header(id=3))]),
    "unknown metadata": lambda: ipc(SCHEMA, [(rows_of(), header(about={"x": 1}))]),
    "metadata as list": lambda: ipc(SCHEMA, [(rows_of(), header(about=[1]))]),
    "compressed": lambda: ipc(
        SCHEMA, [(rows_of(), header())], pa.ipc.IpcWriteOptions(compression="zstd")
    ),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_foreign_streams_are_refused_by_name(make):
    with pytest.raises((CodecError, InvalidTrajectory)):
        decode(make())


def test_the_cases_above_fail_for_their_own_reason():
    assert decode(ipc(SCHEMA, [(rows_of(), header())]))[1][0].metadata.env == "Test-v0"


def test_a_compressed_bomb_is_not_unpacked():
    """21 MB of zeros in a few kilobytes: refused by looking at the message, not by running it."""
    spec = make_spec(observation=16)
    big = make_trajectory(spec, length=300_000)
    zeros = Trajectory(
        obs={"observation": np.zeros_like(big.obs["observation"])},
        actions={"action": np.zeros_like(big.actions["action"])},
        rewards=np.zeros_like(big.rewards),
    )
    batch = to_batch(zeros, spec, arrow_schema(spec))
    metadata = {HEADER_KEY: json.dumps(zeros.header()).encode()}
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    body = ipc(arrow_schema(spec), [(batch, metadata)], options)
    assert len(body) < 100_000
    before = pa.total_allocated_bytes()
    with pytest.raises(CodecError, match="compressed"):
        decode(body)
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_columns_that_share_their_bytes_are_refused():
    """A small body whose eight columns all point at one buffer would pose as a large one."""
    spec = EnvSpec.of(Box((1,)), Discrete(2), infos={f"i{n}": Box((100,)) for n in range(8)})
    body = encode([make_trajectory(spec, length=50)], spec)
    message = next(m for m in pa.ipc.MessageReader.open_stream(body) if m.type == "record batch")
    total, size = message.body.size, 51 * 100 * 4
    padded = -(-size // 8) * 8
    first = total - 8 * padded
    for n in range(1, 8):
        entry = struct.pack("<qq", first + n * padded, size)
        assert body.count(entry) == 1
        body = body.replace(entry, struct.pack("<qq", first, size))
    assert body.count(struct.pack("<q", total)) == 1
    body = body.replace(struct.pack("<q", total), struct.pack("<q", first + padded))
    small = body[: -len(END_OF_STREAM) - 7 * padded] + END_OF_STREAM
    assert pa.ipc.open_stream(small).read_all().num_rows == 51, "Arrow itself sees nothing wrong"
    with pytest.raises(CodecError, match="share their bytes"):
        decode(small)


@pytest.mark.parametrize("spec", [make_spec(), make_rich_spec()])
def test_streams_of_one_schema_are_joined_without_decoding(spec):
    """As an outbox does: byte for byte what encoding all of them gives."""
    made = [make_trajectory(spec, length=length, seed=length) for length in (1, 5, 8)]
    streams = [TrajectoryStream(encode([one], spec)) for one in made]
    assert len({stream.head for stream in streams}) == 1
    joined = b"".join([streams[0].head, *(stream.body for stream in streams), END_OF_STREAM])
    assert joined == encode(made, spec)


def test_a_stream_is_written_as_it_is_encoded_and_says_how_long_it_is() -> None:
    """Its file stays open: an import's child writes many."""
    spec = make_spec(observation=3, action=2)
    sent = [make_trajectory(spec, length=n, seed=n) for n in (1, 30)]
    stream, sink = EncodedStream(sent, spec), io.BytesIO()
    stream.write_to(sink)
    stream.write_to(sink)
    assert sink.getvalue() == 2 * encode(sent, spec)
    assert len(stream) == len(encode(sent, spec))
