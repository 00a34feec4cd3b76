"""Short trajectories that are checked together are judged as each of them alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from server.ingest import validate
from server.ingest.bulk_validate import GROUP, SHORT_ROWS, from_batches
from server.ingest.dataset_registry import RegisteredDataset
from server.ingest.validate import ValidTrajectory, read_body
from server.problems import ProblemError
from stepwell.codec import HEADER_KEY, TrajectoryStream, encode, to_batch
from stepwell.errors import InvalidData
from stepwell.schema import arrow_schema
from stepwell.spaces import EnvSpec
from stepwell.testing import make_spec, make_trajectory
from stepwell.trajectory import Trajectory
from tests.specs import make_rich_spec

SPECS = [
    make_spec(observation=3, action=2),
    make_spec(discrete=4, infos=True, action_known=True),
    make_spec(image=(2, 2)),
    make_rich_spec(),
]


def dataset(spec: EnvSpec) -> RegisteredDataset:
    return RegisteredDataset(1, "d", spec, spec.digest, arrow_schema(spec))


def several(spec: EnvSpec, count: int, seed: int = 0) -> list[Trajectory]:
    return [
        make_trajectory(
            spec,
            length=1 + (seed + i) % 5,
            seed=seed + i,
            terminated=i % 3 == 0,
            truncated=i % 3 == 1,
            final_obs_valid=i % 2 == 0,
            tags=("a",) * (i % 2),
        )
        for i in range(count)
    ]


def judged(body: bytes, spec: EnvSpec) -> list[Any]:
    """What is said of each trajectory, or of the body."""
    try:
        found = list(read_body(body, dataset(spec)))
    except (ProblemError, InvalidData) as error:
        return [type(error), str(error), getattr(error, "got", None)]
    return [
        (one.trajectory.header(), one.digest, bytes(one.message or b""), one.trajectory.nbytes)
        if isinstance(one, ValidTrajectory)
        else (one.id, one.problem.model_dump())
        for one in found
    ]


def alone(body: bytes, spec: EnvSpec, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    with monkeypatch.context() as patch:
        patch.setattr(validate, "from_batches", lambda *_: None)
        return judged(body, spec)


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_together_they_are_what_they_are_alone(
    spec: EnvSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = several(spec, 9)
    body = encode(made, spec)
    together = from_batches(list(TrajectoryStream(body).messages()), spec)
    assert together is not None
    for one, sent in zip(together, made, strict=True):
        assert one.digest == sent.digest and one.header() == sent.header()
        one.check(spec)
        Trajectory(**{name: getattr(one, name) for name in Trajectory.__slots__})
    assert judged(body, spec) == alone(body, spec, monkeypatch)


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_bodies_with_changed_bytes_are_judged_alike(
    spec: EnvSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong is found, and the trajectory that it is wrong with is named."""
    rng = random.Random(3)
    body = encode(several(spec, 6), spec)
    refused = 0
    for _ in range(250):
        changed = bytearray(body)
        for _ in range(rng.randrange(1, 3)):
            changed[rng.randrange(len(changed))] = rng.choice([0, 1, 255, rng.randrange(256)])
        found = judged(bytes(changed), spec)
        assert found == alone(bytes(changed), spec, monkeypatch)
        refused += found != judged(body, spec)
    assert refused > 20


def stream(spec: EnvSpec, parts: list[tuple[pa.RecordBatch, dict[bytes, bytes]]]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, arrow_schema(spec)) as writer:
        for batch, metadata in parts:
            writer.write_batch(batch, custom_metadata=metadata)
    return bytes(sink.getvalue())


def replaced(batch: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    columns = list(batch.columns)
    columns[batch.schema.get_field_index(name)] = values
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def header_of(one: Trajectory, **changes: Any) -> dict[bytes, bytes]:
    import json

    return {HEADER_KEY: json.dumps({**one.header(), **changes}).encode()}


WRONG: list[Any] = [
    lambda b, t: (replaced(b, "reward", pa.array([1.0, 2.0, np.nan, None], pa.float32())), {}),
    lambda b, t: (replaced(b, "reward", pa.array([1.0, None, 2.0, None], pa.float32())), {}),
    lambda b, t: (replaced(b, "reward", pa.array([1.0, 2.0, 3.0, 4.0], pa.float32())), {}),
    lambda b, t: (replaced(b, "terminated", pa.array([True, False, True, False])), {}),
    lambda b, t: (replaced(b, "terminated", pa.array([False, False, False, True])), {}),
    lambda b, t: (replaced(b, "truncated", pa.array([False, True, False, False])), {}),
    lambda b, t: (replaced(b, "is_last", pa.array([False, False, True, True])), {}),
    lambda b, t: (replaced(b, "is_last", pa.array([False, False, True, False])), {}),
    lambda b, t: (b, {"terminated": False}),
    lambda b, t: (b, {"terminated": 1}),
    lambda b, t: (b, {"truncated": True}),
    lambda b, t: (b, {"length": 2}),
    lambda b, t: (b, {"id": t.id.upper()}),
    lambda b, t: (b, {"id": 7}),
    lambda b, t: (b, {"id": "x"}),
    lambda b, t: (b, {"about": {"seed": "no"}}),
    lambda b, t: (b, {"about": 7}),
    lambda b, t: (b, {"more": 7}),
    lambda b, t: (
        replaced(
            b, "obs.observation", pa.array([[0.0] * 3] * 3 + [[np.inf] * 3], b.schema[0].type)
        ),
        {},
    ),
    lambda b, t: (
        replaced(b, "action", pa.array([[0.0] * 2, [9.0, 0.0], [0.0] * 2, None], b.schema[1].type)),
        {},
    ),
    lambda b, t: (
        replaced(b, "action", pa.array([[0.0] * 2, None, [0.0] * 2, None], b.schema[1].type)),
        {},
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_that_breaks_a_rule_leaves_the_others(
    wrong: Any, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS[0]
    schema = arrow_schema(spec)
    made = [make_trajectory(spec, length=3, seed=s) for s in range(5)]
    parts = [(to_batch(t, spec, schema), header_of(t)) for t in made]
    batch, changes = wrong(parts[place][0], made[place])
    parts[place] = batch, header_of(made[place], **changes)
    body = stream(spec, parts)
    found = judged(body, spec)
    assert found == alone(body, spec, monkeypatch)
    if not isinstance(found[0], type):  # else the whole body is refused
        others = [one[1] for i, one in enumerate(found) if i != place]
        assert others == [t.digest for i, t in enumerate(made) if i != place]


def test_long_ones_and_many_are_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[0]
    lengths = [3, 4, SHORT_ROWS, 5, SHORT_ROWS - 1, *[2] * (GROUP + 3)]
    made = [make_trajectory(spec, length=n, seed=i) for i, n in enumerate(lengths)]
    sizes: list[int] = []

    def seen(batches: Any, spec: EnvSpec) -> Any:
        sizes.append(len(batches))
        return from_batches(batches, spec)

    monkeypatch.setattr(validate, "from_batches", seen)
    found = list(read_body(encode(made, spec), dataset(spec)))
    assert [one.digest for one in found if isinstance(one, ValidTrajectory)] == [
        one.digest for one in made
    ]
    assert sizes == [2, GROUP, 5]
