"""One place reads flags: ends of episodes, and the success of one, in whatever form they come."""

import json
from typing import Any

import numpy as np
import pytest

from stepwell import Client, EnvSpec, InvalidTrajectory, Trajectory
from stepwell.flags import as_bool, as_bools
from stepwell.metadata import TrajectoryMetadata
from stepwell.spaces import Box, Discrete
from tests.flag_values import FALSE, NEITHER, NOTHING, TRUE

KNOWN = [(value, True) for value in TRUE.values()] + [(value, False) for value in FALSE.values()]
NAMES = [f"true {name}" for name in TRUE] + [f"false {name}" for name in FALSE]
ENDS, END_NAMES = KNOWN + [(value, False) for value in NOTHING.values()], [*NAMES, *NOTHING]
SPEC = EnvSpec.of(Box((1,)), Discrete(3))
ARRAYS: dict[str, Any] = {"obs": [[0.0], [1.0], [2.0]], "actions": [0, 1], "rewards": [0, 1]}


@pytest.mark.parametrize(("value", "flag"), ENDS, ids=END_NAMES)
def test_what_numpy_and_gymnasium_let_pass_is_a_flag(value: Any, flag: bool) -> None:
    assert as_bool("terminated", value, end=True) is flag


@pytest.mark.parametrize("value", NEITHER.values(), ids=NEITHER)
def test_what_could_mean_either_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidTrajectory, match=r"terminated; expected a bool, 0 or 1, None") as e:
        as_bool("terminated", value, end=True)
    assert type(value).__name__ in str(e.value) or value.dtype.name in str(e.value)


@pytest.mark.parametrize("value", NOTHING.values(), ids=NOTHING)
def test_none_is_a_flag_of_ends_only(value: Any) -> None:
    with pytest.raises(InvalidTrajectory, match="success; expected a bool"):
        as_bool("success", value)


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        (np.array([0.0, 1.0]), [False, True]),
        (np.array([0, 1], np.uint8), [False, True]),
        ([None, True], [False, True]),
        ([0, 1.0], [False, True]),
        (np.array([np.bool_(False), 1, None], object), [False, True, False]),
        (np.array([[0], [1]]), [[False], [True]]),
    ],
)
def test_each_of_many(values: Any, flags: list[Any]) -> None:
    found = as_bools("terminated", values, end=True)
    assert found.dtype == np.bool_ and found.tolist() == flags


@pytest.mark.parametrize("values", [[0, 2], [0.0, 0.5], ["no", "yes"], [0.0, float("nan")]])
def test_one_wrong_flag_of_many_is_refused(values: Any) -> None:
    with pytest.raises(InvalidTrajectory, match="truncated; expected bools, 0 or 1"):
        as_bools("truncated", values, end=True)


@pytest.mark.parametrize("name", ["terminated", "truncated"])
@pytest.mark.parametrize(("value", "flag"), ENDS, ids=END_NAMES)
def test_a_trajectory_has_bools(name: str, value: Any, flag: bool) -> None:
    """Also one of a single step, and one that is constructed without from_arrays."""
    for arrays in (ARRAYS, {"obs": [[0.0], [1.0]], "actions": [2], "rewards": [1]}):
        made = Trajectory.from_arrays(**arrays, **{name: value}, spec=SPEC)
        same = Trajectory(
            obs=made.obs, actions=made.actions, rewards=made.rewards, id=made.id, **{name: value}
        )
        for one in (made, same):
            assert getattr(one, name) is flag
            assert json.loads(json.dumps(one.header()))[name] is flag
        assert made.digest == same.digest


@pytest.mark.parametrize("name", ["terminated", "truncated"])
@pytest.mark.parametrize("value", NEITHER.values(), ids=NEITHER)
def test_a_trajectory_with_another_flag_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidTrajectory, match=name):
        Trajectory.from_arrays(**{**ARRAYS, name: value}, spec=SPEC)
    made = Trajectory.from_arrays(**ARRAYS, spec=SPEC)
    with pytest.raises(InvalidTrajectory, match=name):
        Trajectory(obs=made.obs, actions=made.actions, rewards=made.rewards, **{name: value})


@pytest.mark.parametrize(
    ("values", "flag"),
    [([0, 1], True), ([0.0, 0.0], False), ([None, True], True), ([[0], [1]], True)],
)
def test_a_flag_of_each_step(values: Any, flag: bool) -> None:
    assert Trajectory.from_arrays(**ARRAYS, spec=SPEC, terminated=values).terminated is flag


@pytest.mark.parametrize("values", [[0, 2], [0.0, 0.5], [0, float("nan")], ["no", "yes"]])
def test_a_step_with_another_flag(values: Any) -> None:
    with pytest.raises(InvalidTrajectory, match="truncated"):
        Trajectory.from_arrays(**ARRAYS, spec=SPEC, truncated=values)


@pytest.mark.parametrize(("value", "flag"), KNOWN, ids=NAMES)
def test_other_flags_are_bools_too(value: Any, flag: bool) -> None:
    made = Trajectory.from_arrays(**ARRAYS, spec=SPEC, success=value, final_obs_valid=value)
    assert made.metadata.success is flag and made.final_obs_valid is flag
    assert made.metadata.to_json() == {"success": flag}


@pytest.mark.parametrize("value", NEITHER.values(), ids=NEITHER)
def test_other_flags_that_are_none_are_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidTrajectory, match=r"metadata\.success"):
        TrajectoryMetadata(success=value)
    with pytest.raises(InvalidTrajectory, match="final_obs_valid"):
        Trajectory.from_arrays(**ARRAYS, spec=SPEC, final_obs_valid=value)


@pytest.mark.parametrize("known", [[1, 0], [1.0, 0.0], [np.bool_(True), np.bool_(False)]])
def test_known_actions(known: Any) -> None:
    spec = EnvSpec.of(Box((1,)), Discrete(3), action_known=True)
    made = Trajectory.from_arrays(**ARRAYS, spec=spec, action_known=known)
    assert made.action_known is not None and made.action_known.tolist() == [True, False]
    with pytest.raises(InvalidTrajectory, match="action_known"):
        Trajectory.from_arrays(**ARRAYS, spec=spec, action_known=[1, 2])


def one(value: Any) -> list[Any]:
    """The same value in numpy's and torch's forms."""
    scalar = np.asarray(value)
    return [scalar[()], scalar, scalar.reshape(1)]


@pytest.mark.parametrize(
    ("field", "given", "stored"),
    [
        *[("seed", value, 7) for value in [*one(7), np.uint8(7), np.float64(7.0), 7.0]],
        *[("first_step", value, 7) for value in one(np.int32(7))],
        *[("env", value, "Maze-v1") for value in one("Maze-v1")],
        *[("purpose", value, "eval") for value in one("eval")],
        *[("started_at", value, 1.5) for value in one(np.float32(1.5))],
        *[("metrics", {"m": value}, {"m": 0.5}) for value in one(np.float32(0.5))],
        *[("metrics", {np.str_("m"): value}, {"m": 1.0}) for value in one(np.bool_(True))],
        ("tags", [np.str_("a"), "b"], ("a", "b")),
        ("tags", np.array(["a", "b"]), ("a", "b")),
    ],
)
def test_numpy_values_in_metadata_become_pythons(field: str, given: Any, stored: Any) -> None:
    value = getattr(TrajectoryMetadata(**{field: given}), field)
    assert value == stored and type(value) is type(stored)
    if isinstance(stored, dict):
        assert [type(v) for v in value.values()] == [float] and [type(k) for k in value] == [str]
    if isinstance(stored, tuple):
        assert {type(tag) for tag in value} == {str}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", np.float64(1.5)),
        ("seed", np.array([1, 2])),
        ("seed", np.bool_(True)),
        ("env", np.array(["a", "b"])),
        ("env", ["a"]),
        ("started_at", np.float32("nan")),
        ("metrics", {"m": np.array([1.0, 2.0])}),
        ("tags", [["a"]]),
    ],
)
def test_what_is_not_one_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidTrajectory, match=rf"metadata\.{field}"):
        TrajectoryMetadata(**{field: value})


def test_added_and_posted_flags_reach_sql(client: Client, name: str) -> None:
    client.create_dataset(name, SPEC)
    flags = {**TRUE, **NOTHING}
    for value, said in ((np.float32(1.0), np.float32(1.0)), (None, 1)):
        client.add(name, **ARRAYS, terminated=value, truncated=None, success=said)
    made = Trajectory.from_arrays(**ARRAYS, spec=SPEC)
    posted = [
        Trajectory(
            obs=made.obs,
            actions=made.actions,
            rewards=made.rewards,
            truncated=value,
            final_obs_valid=np.bool_(True),  # type: ignore[arg-type]
            metadata=TrajectoryMetadata(success=0),  # type: ignore[arg-type]
        )
        for value in flags.values()
    ]
    assert {item.status for item in client.post(name, posted).items} == {"stored"}
    rows = client.sql(
        "select terminated, truncated, success, count(*) from trajectories where dataset = ? "
        "group by all order by all",
        [name],
    ).rows
    n, none = len(TRUE), len(NOTHING)
    assert [list(row) for row in rows] == [
        [False, False, False, none],
        [False, False, True, 1],
        [False, True, False, n],
        [True, False, True, 1],
    ]


# --- float64 in place of float32 -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rewards": [0.1, 0.0]}, "rewards: float64 stored as float32, which rounds them"),
        ({"obs": [[0.0], [0.1], [0.2]]}, "observations: float64 stored as float32"),
        ({"rewards": [2**24 + 1, 0]}, "rewards: int64 stored as float32, which rounds them"),
    ],
)
def test_values_that_lose_digits_warn(change: dict[str, Any], says: str) -> None:
    with pytest.warns(UserWarning, match=says) as caught:
        Trajectory.from_arrays(**{**ARRAYS, **change}, spec=SPEC)
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("value", [2**24 + 1, 1e300])
def test_an_info_that_loses_digits_warns(value: float) -> None:
    spec = EnvSpec.of(SPEC.observations, SPEC.actions, infos={"x": Box(())})
    with pytest.warns(UserWarning, match="infos: .*64 stored as float32, which rounds them"):
        Trajectory.from_arrays(**ARRAYS, infos={"x": [0, 0, value]}, spec=spec)


@pytest.mark.parametrize(
    "change",
    [{"rewards": [0.5, -3.0]}, {"obs": np.float32([[0.1], [0.2], [0.3]])}, {"rewards": [0, 1]}],
)
def test_values_that_keep_all_digits_do_not_warn(change: dict[str, Any]) -> None:
    """Warnings are errors in tests."""
    Trajectory.from_arrays(**{**ARRAYS, **change}, spec=SPEC)
