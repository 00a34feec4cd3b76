"""Spaces and env specs: what is refused and how, JSON both ways, equality and digests."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from stepwell import (
    Box,
    Discrete,
    EnvSpec,
    InvalidSpace,
    MultiBinary,
    MultiDiscrete,
    Vocabulary,
)
from stepwell.schema import arrow_schema, spec_of
from stepwell.spaces import space_from_json, space_to_json, why_outside
from stepwell.testing import make_spec
from tests.specs import make_rich_spec

SPACES = [
    Box((3,)),
    Box((), "float64", -1.5, math.inf),
    Box((2, 2), "int16", low=(-1.0, -2.0, -3.0, -4.0), high=5.0),
    Box((4, 4, 3), "uint8", 0.0, 255.0),
    Discrete(3),
    Discrete(4, start=-2),
    MultiDiscrete((2, 7)),
    MultiBinary(5),
]


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_a_space_survives_json_text(space):
    assert space_from_json(json.loads(json.dumps(space_to_json(space)))) == space


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Box((3,), "complex64"), "dtype"),
        (lambda: Box((0,)), "shape"),
        (lambda: Box((-1,)), "shape"),
        (lambda: Box((1.5,)), "shape"),
        (lambda: Box((1,) * 9), "shape"),
        (lambda: Box((1 << 13, 1 << 13)), "too large"),
        (lambda: Box((2,), low=(0.0, 1.0, 2.0)), "wrong length"),
        (lambda: Box((2,), low=1.0, high=0.0), "low exceeds high"),
        (lambda: Box((2,), low=(0.0, 3.0), high=(1.0, 2.0)), "low exceeds high"),
        (lambda: Box((2,), low=math.nan), "NaN"),
        (lambda: Box((2,), low="low"), "bad low"),
        (lambda: Discrete(0), "positive"),
        (lambda: Discrete(2.5), "bad n"),
        (lambda: Discrete(2, start=2**63 - 1), "too wide"),
        (lambda: MultiDiscrete(()), "positive"),
        (lambda: MultiDiscrete((2, 0)), "positive"),
        (lambda: MultiDiscrete((2, 3), (1,)), "start has the wrong length"),
        (lambda: MultiDiscrete((2, 3), (1, 0.5)), "bad start"),
        (lambda: MultiDiscrete((2, 3), (0, 2**63 - 2)), "too wide"),
        (lambda: MultiDiscrete((2, 3), -(2**63) - 1), "too wide"),
        (lambda: MultiBinary(0), "positive"),
        (lambda: space_from_json([]), "object"),
        (lambda: space_from_json({"type": "Graph"}), "unknown space"),
        (lambda: space_from_json({"type": ["Box"]}), "unknown space"),
        (lambda: space_from_json({"type": "Discrete", "m": 3}), "unknown fields"),
        (lambda: space_from_json({"type": "Discrete"}), "incomplete"),
        (lambda: space_from_json({"type": "Box", "shape": "abc"}), "bad shape"),
        (lambda: space_from_json({"type": "Box", "shape": [2], "low": "x"}), "wrong type"),
        (lambda: space_from_json({"type": "Box", "shape": [2], "low": "nan"}), "NaN"),
        (lambda: EnvSpec.of({}, Box((1,))), "observations are empty"),
        (lambda: EnvSpec.of(Box((1,)), {}), "actions are empty"),
        (lambda: EnvSpec.of({"a b": Box((1,))}, Box((1,))), "bad name"),
        (lambda: EnvSpec.of({"../x": Box((1,))}, Box((1,))), "bad name"),
        (lambda: EnvSpec.of({3: Box((1,))}, Box((1,))), "bad name"),
        (
            lambda: EnvSpec.of({"0": Box((1,))}, Box((1,))),
            "bad name in observations; expected a letter or _ first, .* got '0'",
        ),
        (lambda: EnvSpec.of({f"k{i}": Box((1,)) for i in range(1025)}, Box((1,))), "too many"),
        (lambda: EnvSpec.of(Box((1,)), Box((1,)), roles={"x": "mask"}), "unknown observation"),
        (lambda: EnvSpec.of(Box((1,)), Box((1,)), roles={"observation": "y"}), "unknown role"),
        (lambda: EnvSpec.from_json(None), "object"),
        (lambda: EnvSpec.from_json({"observation": {}}), "unknown fields"),
        (lambda: EnvSpec.from_json({"observations": []}), "named spaces"),
        (lambda: EnvSpec.from_json({"observations": {}, "actions": {}}), "empty"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, says):
    with pytest.raises(InvalidSpace, match=says):
        make()


def test_equal_spaces_are_equal_however_they_are_spelt():
    """Numpy's numbers, tuples of one number and -0.0 make no second layout."""
    plain = Box((2,), low=-1.0, high=0.0)
    assert Box((np.int64(2),), low=np.float32(-1), high=-0.0) == plain
    assert Box((2,), low=(-1, -1), high=np.zeros(2)) == plain
    spelt = [
        EnvSpec.of(Box((2,), low=-1, high=1), Discrete(np.int64(3))),
        EnvSpec.of(Box((2,), low=(-1.0, -1.0), high=np.ones(2)), Discrete(3), env="another"),
    ]
    assert spelt[0].digest == spelt[1].digest


def test_order_of_keys_does_not_matter_and_env_is_no_layout():
    a = EnvSpec.of({"b": Box((1,)), "a": Discrete(2)}, Box((1,)), env="A")
    b = EnvSpec.of({"a": Discrete(2), "b": Box((1,))}, Box((1,)), env="A")
    assert a == b and hash(a) == hash(b) and list(a.observations) == ["a", "b"]
    assert a.digest == EnvSpec.of({"a": Discrete(2), "b": Box((1,))}, Box((1,)), env="B").digest
    assert a.digest != make_spec().digest


@pytest.mark.parametrize("spec", [make_spec(), make_rich_spec(), make_spec(discrete=4, infos=True)])
def test_a_spec_survives_json_and_arrow(spec):
    assert EnvSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec_of(arrow_schema(spec)) == spec


def test_columns_bear_the_names_that_sql_shows():
    assert arrow_schema(make_spec(image=(2, 2), infos=True)).names == [
        "obs.image",
        "obs.observation",
        "action",
        "reward",
        "terminated",
        "truncated",
        "is_last",
        "info.position",
        "info.room",
    ]
    assert "action.grip" in arrow_schema(make_rich_spec()).names


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (Box((2,), low=-1.0, high=1.0), [[1.0, -1.0]], [[0.0, 1.01]]),
        (Box((2,), low=(-1.0, -9.0), high=1.0), [[-1.0, -9.0]], [[-9.0, -1.0]]),
        (Box((2,), low=-1.0, high=1.0), [[1.0000001, 0.0]], [[math.nan, 0.0]]),
        (Box((1,)), [[1e30]], [[math.inf]]),
        (Box((1,), high=0.0), [[-1e30]], [[0.1]]),
        (Discrete(3, start=1), [1, 3], [1, 0]),
        (Discrete(3), [0, 2], [3]),
        (MultiDiscrete((2, 3)), [[1, 2]], [[2, 1]]),
        (MultiDiscrete((2, 3)), [[0, 0]], [[0, -1]]),
        (MultiDiscrete((2, 3), (-1, 5)), [[-1, 5], [0, 7]], [[1, 5]]),
        (MultiDiscrete((2, 3), (-1, 5)), [[0, 6]], [[-2, 5]]),
        (MultiDiscrete((2, 3), (-1, 5)), [[0, 6]], [[0, 2]]),
        (MultiBinary(2), [[0, 1]], [[0, 2]]),
    ],
    ids=repr,
)
def test_outside_says_why_or_nothing(space, good, bad):
    dtype = np.dtype(space.dtype)
    assert why_outside(space, np.asarray(good, dtype)) is None
    assert why_outside(space, np.asarray(bad, dtype))


def test_choices_begin_at_their_own_numbers():
    space = MultiDiscrete((2, 3), np.array([-1, 5]))
    assert (space.start, space.last) == ((-1, 5), (0, 7))
    said = space_to_json(space)
    assert said == {"type": "MultiDiscrete", "nvec": [2, 3], "start": [-1, 5]}
    assert space_from_json(said) == space != MultiDiscrete((2, 3))
    assert MultiDiscrete((2, 3), 4) == MultiDiscrete((2, 3), (4, 4))


def test_choices_from_0_are_written_as_before_there_was_a_start():
    """So are the digests of datasets of older versions."""
    for space in (MultiDiscrete((2, 3)), MultiDiscrete((2, 3), 0), MultiDiscrete((2, 3), (0, 0))):
        assert space == MultiDiscrete((2, 3)) and space.start == (0, 0)
        assert space_to_json(space) == {"type": "MultiDiscrete", "nvec": [2, 3]}
        assert (
            EnvSpec.of(Box((2,)), space).digest
            == "5adcf09ece65d9925fb41fedb360a6bb438b0bd976a1fb04faa9b8a031f32243"
        )
    assert space_from_json({"type": "MultiDiscrete", "nvec": [2, 3]}).start == (0, 0)


def test_a_text_begins_at_0():
    words = {"observation": Vocabulary(("go", "up"))}
    EnvSpec.of(MultiDiscrete((4, 4)), Discrete(2), vocabularies=words)
    with pytest.raises(InvalidSpace, match="no such text"):
        EnvSpec.of(MultiDiscrete((4, 4), 1), Discrete(2), vocabularies=words)
