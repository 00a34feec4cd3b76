"""Every quirk of real D4RL files, one test each: where episodes end and what is known of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from server.imports.raw_file import ImportRefused
from stepwell.spaces import Box, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Space
from stepwell.trajectory import Trajectory
from tests.imported import read_file

from .conftest import flags, table, walk

Read = Callable[..., Any]


def lengths(made: list[Any]) -> list[int]:
    return [len(t) for t in made]


def test_mujoco_v2_with_next_observations_and_metadata(read: Read) -> None:
    """(a) The true last observation is stored, for terminals and for timeouts."""
    arrays = table(30, terminals=[9], timeouts=[19, 29])
    arrays["next_observations"] = np.vstack([arrays["observations"][1:], np.zeros((1, 3))])
    arrays["next_observations"][[9, 19, 29]] += 5.0
    arrays["next_observations"] = arrays["next_observations"].astype(np.float32)
    arrays["infos/action_log_probs"] = np.arange(30, dtype=np.float32)
    arrays["infos/qpos"] = walk(30, 9)
    arrays["metadata/algorithm"] = np.bytes_("SAC")
    arrays["metadata/iteration"] = np.int32(7)
    arrays["metadata/policy/fc0/weight"] = np.zeros((4, 3), np.float32)
    found, made = read(arrays, env="Hopper-v5")
    assert lengths(made) == [10, 10, 10]
    assert [t.terminated for t in made] == [True, False, False]
    assert [t.truncated for t in made] == [False, True, True]
    for number, t in enumerate(made):
        rows = slice(10 * number, 10 * number + 10)
        assert t.final_obs_valid
        assert np.array_equal(t.obs["observation"][:-1], arrays["observations"][rows])
        assert np.array_equal(t.obs["observation"][-1], arrays["next_observations"][rows][-1])
        assert np.array_equal(t.actions["action"], arrays["actions"][rows])
        assert np.array_equal(t.rewards, arrays["rewards"][rows])
        assert np.array_equal(
            t.infos["action_log_probs"][:-1], arrays["infos/action_log_probs"][rows]
        )
        assert (t.metadata.env, t.metadata.episode_id) == ("Hopper-v5", f"{'ab' * 6}/{number}")
        assert t.metadata.source == "d4rl:" + "ab" * 32
    assert set(found.spec.infos) == {"action_log_probs", "qpos"}
    assert found.spec.actions["action"] == Box((2,), "float32", -1.0, 1.0)
    assert found.warnings == []


def test_maze2d_v1_with_irregular_timeouts(read: Read) -> None:
    """(b) Terminals all zero, no next_observations: the last observation is unknown."""
    arrays = table(100, timeouts=[7, 50, 51])
    found, made = read(arrays)
    assert lengths(made) == [8, 43, 1, 48]
    assert all(t.truncated and not t.terminated and not t.final_obs_valid for t in made)
    last = made[0].obs["observation"]
    assert np.array_equal(last[-1], last[-2])
    # Never the next row: it may be another episode's first.
    assert not np.array_equal(last[-1], arrays["observations"][8])
    assert found.warnings == ["the last 48 steps have no end: kept as a truncated trajectory"]


def test_antmaze_v2_terminals_in_clusters_are_no_ends(read: Read) -> None:
    """(c) float64 terminals, 1 while the goal is near; only timeouts reset."""
    arrays = table(300, timeouts=[99, 199, 299])
    near = np.zeros(300)
    near[60:99] = near[150:180] = near[290:299] = 1.0
    arrays["terminals"], arrays["rewards"] = near, near.copy()
    arrays["observations"][100:] += 9.0
    arrays["observations"][200:] -= 7.0
    found, made = read(arrays)
    assert lengths(made) == [100, 100, 100]
    assert all(t.truncated and not t.terminated for t in made)
    assert np.array_equal(
        np.concatenate([t.infos["terminals"][:-1] for t in made]), near.astype(bool)
    )
    assert sum(t.total_reward for t in made) == near.sum()
    assert any("no reset" in warning for warning in found.warnings)


def test_diverse_antmaze_single_flags_are_no_ends(read: Read) -> None:
    """One terminal per success, nothing resets after it, and there are no next_observations."""
    arrays = table(3000, terminals=[500, 1300, 2500], timeouts=[999, 1999, 2999])
    _, made = read(arrays)
    assert lengths(made) == [1000, 1000, 1000]


def test_real_terminals_without_next_observations_stay_ends(read: Read) -> None:
    """hopper-v0: smooth data, and the row after a terminal is far away: it did end there."""
    arrays = table(3000, terminals=[500, 1300, 2500], timeouts=[999, 1999, 2999])
    for number, row in enumerate((501, 1000, 1301, 2000, 2501)):
        arrays["observations"][row:] += 8.0 * (-1) ** number
    _, made = read(arrays)
    assert lengths(made) == [501, 499, 301, 699, 501, 499]
    assert [t.terminated for t in made] == [True, False, True, False, True, False]


def test_data_that_is_not_smooth_is_taken_at_its_word(read: Read) -> None:
    arrays = table(2000, terminals=[500, 1500], timeouts=[999, 1999])
    arrays["observations"] = np.random.default_rng(0).normal(size=(2000, 3)).astype(np.float32)
    _, made = read(arrays)
    assert lengths(made) == [501, 499, 501, 499]


def test_next_observations_decide_whether_a_terminal_was_an_end(read: Read) -> None:
    arrays = table(40, terminals=[4, 5, 20], timeouts=[29])
    following = np.vstack([arrays["observations"][1:], np.zeros((1, 3), np.float32)])
    following[[20, 29, 39]] += 3.0
    arrays["next_observations"] = following
    found, made = read(arrays)
    assert lengths(made) == [21, 9, 10]
    assert [t.terminated for t in made] == [True, False, False]
    assert "terminals" in found.spec.infos


def test_next_observations_made_by_shifting_the_rows_are_not_believed(read: Read) -> None:
    """At every end they would be the next episode's first observation."""
    arrays = table(30, terminals=[9, 19], timeouts=[29])
    shifted = np.vstack([arrays["observations"][1:], arrays["observations"][-1:]])
    found, made = read(arrays | {"next_observations": shifted})
    assert lengths(made) == [10, 10, 10]
    assert [t.terminated for t in made] == [True, True, False]
    assert not any(t.final_obs_valid for t in made)
    assert any("the shifted rows" in warning for warning in found.warnings)


def test_kitchen_without_timeouts_and_infos_as_an_array(read: Read) -> None:
    """(d) float32 terminals; `infos` is itself an array, not a group."""
    arrays = table(20)
    arrays["terminals"] = flags(20, 6, 13, 19).astype(np.float32)
    arrays["infos"] = np.repeat(np.arange(4), 5)
    _, made = read(arrays)
    assert lengths(made) == [7, 7, 6]
    assert all(t.terminated for t in made)
    assert np.array_equal(np.concatenate([t.infos["infos"][:-1] for t in made]), arrays["infos"])


def test_adroit_infos_of_any_rank(read: Read) -> None:
    """(e) Nested groups, 2-D and 3-D leaves; what has not one row per step is left out by name."""
    arrays = table(12, timeouts=[5, 11])
    arrays["infos/env_state/hand"] = np.random.default_rng(0).normal(size=(12, 4))
    arrays["infos/env_state/rotation"] = np.arange(12 * 9).reshape(12, 3, 3).astype(np.float32)
    arrays["infos/action_log_std"] = np.zeros(2, np.float32)
    found, made = read(arrays)
    assert found.spec.infos["env_state/hand"] == Box((4,), "float64")
    assert found.spec.infos["env_state/rotation"] == Box((3, 3), "float32")
    assert np.array_equal(
        made[1].infos["env_state/rotation"][:-1], arrays["infos/env_state/rotation"][6:]
    )
    assert any("action_log_std" in warning for warning in found.warnings)


def test_columns_of_shape_n_1_and_float64(read: Read) -> None:
    """(f) Rewards, terminals and timeouts as [N, 1]; everything float64."""
    arrays = table(10, timeouts=[4, 9])
    for name in ("rewards", "terminals", "timeouts"):
        arrays[name] = arrays[name].astype(np.float64).reshape(-1, 1)
    for name in ("observations", "actions"):
        arrays[name] = arrays[name].astype(np.float64) + 1e-12
    found, made = read(arrays)
    assert lengths(made) == [5, 5]
    assert made[0].obs["observation"].dtype == made[0].actions["action"].dtype == np.float32
    assert found.warnings == [
        "observations: float64 stored as float32",
        "actions: float64 stored as float32",
    ]


def test_rewards_that_float32_does_not_have_are_said(read: Read) -> None:
    arrays = table(10, timeouts=[9])
    for rewards, rounded in (
        (np.full(10, 0.5), False),
        (np.arange(10), False),
        (np.full(10, 0.1, np.float32), False),
        (np.append(np.zeros(9), 0.1), True),
        (np.full(10, 2**24 + 1), True),
    ):
        found, (made,) = read(arrays | {"rewards": rewards})
        note = f"rewards: {rewards.dtype} stored as float32, which rounds them"
        assert (note in found.warnings) == rounded
        assert made.rewards.tolist() == rewards.astype(np.float32).tolist()


def test_an_unfinished_tail_is_kept(read: Read) -> None:
    """(g) d4rl.sequence_dataset drops it silently; here no step is lost."""
    found, made = read(table(25, terminals=[9], timeouts=[19]))
    assert lengths(made) == [10, 10, 5]
    assert made[-1].truncated
    assert sum(lengths(made)) == 25
    assert "the last 5 steps" in found.warnings[0]


def test_both_flags_on_one_step(read: Read) -> None:
    """(h) It terminated."""
    found, made = read(table(10, terminals=[4, 9], timeouts=[4]))
    assert [(t.terminated, t.truncated) for t in made] == [(True, False), (True, False)]
    assert any("both" in warning for warning in found.warnings)


def test_two_consecutive_ends_make_a_trajectory_of_one_step(read: Read) -> None:
    """(i) Never one of no steps."""
    _, made = read(table(10, terminals=[3, 4, 9]))
    assert lengths(made) == [4, 1, 5]


def test_no_end_at_all_is_one_trajectory_or_pieces_of_max_steps(read: Read) -> None:
    assert lengths(read(table(10))[1]) == [10]
    assert lengths(read(table(10), max_steps=4)[1]) == [4, 4, 2]
    # Where timeouts are marked they count, not the option.
    assert lengths(read(table(10, timeouts=[9]), max_steps=4)[1]) == [10]


def test_timeouts_out_of_step_with_resets_are_told(read: Read) -> None:
    arrays = table(20, timeouts=[9, 19])
    following = np.vstack([arrays["observations"][1:], np.zeros((1, 3), np.float32)])
    following[[5, 9]] += 21.0
    arrays["next_observations"] = following
    found, made = read(arrays)
    assert lengths(made) == [10, 10]
    assert any("after 1 step inside trajectories" in warning for warning in found.warnings)


def test_integer_actions_are_choices(read: Read) -> None:
    arrays = table(10, terminals=[9])
    arrays["actions"] = np.array([0, 3, 1, 2, 0, 0, 1, 3, 2, 1], np.int32)
    found, made = read(arrays)
    assert found.spec.actions["action"] == Discrete(4)
    assert made[0].actions["action"].dtype == np.int64
    arrays["actions"] = arrays["actions"].reshape(-1, 1)
    assert read(arrays)[0].spec.actions["action"] == Discrete(4)
    arrays["actions"] = np.stack([arrays["actions"][:, 0], 1 - arrays["actions"][:, 0] % 2], axis=1)
    assert read(arrays)[0].spec.actions["action"] == MultiDiscrete((4, 2))


@pytest.mark.parametrize(
    ("shape", "space"),
    [((), Discrete(2)), ((1,), Discrete(2)), ((3,), MultiBinary(3))],
)
def test_boolean_actions_are_choices(read: Read, shape: tuple[int, ...], space: Space) -> None:
    arrays = table(10, timeouts=[9])
    arrays["actions"] = np.random.default_rng(0).random((10, *shape)) < 0.5
    found, (made,) = read(arrays)
    assert found.spec.actions["action"] == space
    flat = made.actions["action"].reshape(arrays["actions"].shape)
    assert np.array_equal(flat, arrays["actions"])
    found, _ = read(arrays, action="box")
    assert found.spec.actions["action"] == Box(shape or (1,), low=-1, high=1)
    arrays["actions"] = np.zeros((10, 2, 2), np.bool_)
    assert read(arrays)[0].spec.actions["action"] == Box((2, 2), low=-1, high=1)


def test_choices_stored_as_floats_need_the_hint(read: Read) -> None:
    """minigrid: 3.0 may be a choice or a torque; only the uploader knows."""
    arrays = table(6, terminals=[5])
    arrays["actions"] = np.array([0, 1, 2, 0, 1, 2], np.float32)
    assert isinstance(read(arrays)[0].spec.actions["action"], Box)
    found, made = read(arrays, action="discrete:7")
    assert found.spec.actions["action"] == Discrete(7)
    assert made[0].actions["action"].tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ImportRefused, match="actions are outside their space"):
        read(arrays, action="discrete:2")


def test_a_number_too_large_for_its_type_is_said_of_its_episode(read: Read) -> None:
    """1e39 is finite in the file, which does not contain an invalid number."""
    arrays = table(6, terminals=[2, 5])
    arrays["observations"] = arrays["observations"].astype(np.float64)
    arrays["observations"][4, 0] = 1e39
    with pytest.raises(ImportRefused, match="episode 1") as refused:
        read(arrays)
    assert "contains invalid numbers" not in str(refused.value)


def test_bounds_of_actions(read: Read) -> None:
    """±1 where all lie within; else the largest magnitude of each dimension, rounded up."""
    arrays = table(10, terminals=[9])
    arrays["actions"][0] = [1.7, -0.2]
    assert read(arrays)[0].spec.actions["action"] == Box((2,), "float32", (-2.0, -1.0), (2.0, 1.0))
    arrays["actions"][1] = [0.0, 33.0]
    assert read(arrays)[0].spec.actions["action"].high == (2.0, 50.0)
    given = read(arrays, action_low=(-40.0,), action_high=(40.0, 35.0))[0].spec.actions["action"]
    assert given == Box((2,), "float32", -40.0, (40.0, 35.0))
    with pytest.raises(ImportRefused, match="action_low"):
        read(arrays, action_low=(1.0, 2.0, 3.0))
    with pytest.raises(ImportRefused, match="low exceeds high") as refused:
        read(arrays, action_low=(50.0,), action_high=(40.0,))
    assert (refused.value.expected, refused.value.got) == ("low ≤ high", "50.0, 40.0")
    with pytest.raises(ImportRefused, match="actions are outside their space"):
        read(arrays, action_high=(0.5,))


def test_actions_that_fill_little_of_symmetric_bounds_have_bounds_of_their_own(read: Read) -> None:
    """Tiny ones, or ones far from 0. Not a constant one, nor where bounds are given, nor
    in a small file, which says little of those that follow it."""
    n = 1000
    arrays = table(n, terminals=[n - 1])
    tiny, far = np.linspace(-1e-3, 2e-3, n), np.linspace(290.0, 310.0, n)
    arrays["actions"] = np.stack([tiny, far, np.zeros(n), np.linspace(-0.3, 0.3, n)], 1)
    data, made = read(arrays)
    assert data.spec.actions["action"] == Box(
        (4,),
        "float32",
        (float(np.float32(-1e-3)), 290.0, -1.0, -1.0),
        (float(np.float32(2e-3)), 310.0, 1.0, 1.0),
    )
    assert made[0].actions["action"][:, 1].max() == 310.0
    said = [warning for warning in data.warnings if "action_low" in warning]
    assert said == [
        "actions[0] fill 0.0015 of ±1: their own range is their bounds, -0.001 … 0.002; others: "
        "?action_low=&action_high=",
        "actions[1] fill 0.02 of ±500: their own range is their bounds, 290 … 310; others: "
        "?action_low=&action_high=",
    ]
    given = read(arrays, action_high=(400.0,))[0].spec.actions["action"]
    assert given == Box((4,), "float32", (-1.0, -500.0, -1.0, -1.0), 400.0)
    small = {name: array[: n - 1] for name, array in arrays.items()}
    assert read(small)[0].spec.actions["action"].high == (1.0, 500.0, 1.0, 1.0)


def test_extreme_actions_that_set_the_bounds_are_told(read: Read) -> None:
    arrays = table(3000, terminals=[2999])
    arrays["actions"] = np.random.default_rng(0).uniform(-2.0, 2.0, (3000, 2)).astype(np.float32)
    assert not any("bounds" in warning for warning in read(arrays)[0].warnings)
    arrays["actions"][777, 1] = -1e4
    data, _ = read(arrays)
    assert data.spec.actions["action"] == Box((2,), "float32", (-2.0, -1e4), (2.0, 1e4))
    (said,) = [warning for warning in data.warnings if "bounds" in warning]
    assert said == (
        "actions[1] are within 0.0002 of ±10000 in nearly all rows, so a policy could hardly tell "
        "them apart: extreme ones set the bounds (row 777: -10000). Are these mistakes? Then "
        "repair or remove them"
    )


def test_images_and_scalars_as_observations(read: Read) -> None:
    arrays = table(6, terminals=[5])
    arrays["observations"] = np.random.default_rng(0).integers(0, 255, (6, 4, 5, 3), np.uint8)
    assert read(arrays)[0].spec.observations["observation"] == Box((4, 5, 3), "uint8", 0, 255)
    arrays["observations"] = np.arange(6, dtype=np.float32)
    assert read(arrays)[0].spec.observations["observation"] == Box((1,), "float32")


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_whole_numbers_as_observations_are_states(read: Read, dtype: str) -> None:
    arrays = table(6, terminals=[5])
    arrays["observations"] = np.array([0, 2, 1, 2, 0, 1], dtype)
    found, made = read(arrays)
    assert found.spec.observations["observation"] == Discrete(3)
    assert made[0].obs["observation"].tolist()[:6] == [0, 2, 1, 2, 0, 1]
    assert any("0 … 2: stored as Discrete(3)" in warning for warning in found.warnings)
    arrays["next_observations"] = np.array([2, 1, 2, 0, 1, 5], dtype)
    assert read(arrays)[0].spec.observations["observation"] == Discrete(6)
    given = read(arrays, observation="discrete:9")[0]
    assert given.spec.observations["observation"] == Discrete(9)
    assert not any("stored as Discrete" in warning for warning in given.warnings)
    box = read(arrays, observation="box")[0].spec.observations["observation"]
    assert isinstance(box, Box)
    assert (box.shape, box.dtype) == ((1,), dtype)
    with pytest.raises(ImportRefused, match="/observations are outside"):
        read(arrays, observation="discrete:2")
    for wrong in ("discrete:0", "discrete:", "states"):
        with pytest.raises(ImportRefused, match=r"^\?observation="):
            read(arrays, observation=wrong)


def test_other_whole_numbers_as_observations_stay_numbers(read: Read) -> None:
    arrays = table(6, terminals=[5])
    for values in ([0, -2, 1, 2, 0, 1], [0, 2, 1, 5000, 0, 1]):
        arrays["observations"] = np.array(values, np.int32)
        assert read(arrays)[0].spec.observations["observation"] == Box((1,), "int32")
    arrays["observations"] = np.arange(12, dtype=np.int32).reshape(6, 2)
    assert read(arrays)[0].spec.observations["observation"] == Box((2,), "int32")
    arrays["observations"] = np.array([0, 2, 1, 2, 0, 1], np.float32)
    assert read(arrays)[0].spec.observations["observation"] == Box((1,), "float32")
    made = read(arrays, observation="discrete:4")[1]
    assert made[0].obs["observation"].tolist()[:6] == [0, 2, 1, 2, 0, 1]
    arrays["observations"][2] = 0.5
    with pytest.raises(ImportRefused, match="/observations does not fit its type"):
        read(arrays, observation="discrete:4")


def test_observations_are_discrete_if_the_file_says_of_how_many(read: Read) -> None:
    arrays = table(6, terminals=[5])
    arrays["observations"] = np.array([0, 2, 1, 2, 0, 1], np.int32)
    arrays["next_observations"] = np.array([2, 1, 2, 0, 1, 3], np.int32)
    arrays["metadata/discrete_observations"] = 5
    assert read(arrays)[0].spec.observations["observation"] == Discrete(5)
    chosen = read(arrays, observation="discrete:6")[0]
    assert chosen.spec.observations["observation"] == Discrete(6)
    arrays["metadata/discrete_observations"] = 4
    found, made = read(arrays)
    assert found.spec.observations["observation"] == Discrete(4)
    assert made[0].obs["observation"].tolist() == [0, 2, 1, 2, 0, 1, 3]
    for states in (2, 3):  # the next observation is 3
        with pytest.raises(ImportRefused, match="/observations are outside"):
            read(arrays | {"metadata/discrete_observations": states})
    for wrong in (0, 10**9, 4.0, np.bytes_("4")):
        with pytest.raises(ImportRefused, match="metadata/discrete_observations"):
            read(arrays | {"metadata/discrete_observations": wrong})


def test_big_endian_files_read_the_same(read: Read) -> None:
    arrays = table(10, timeouts=[4, 9])
    other = {k: v.astype(v.dtype.newbyteorder(">")) for k, v in arrays.items()}
    assert [t.digest for t in read(arrays)[1]] == [t.digest for t in read(other)[1]]


def test_nan_is_refused_where_an_agent_reads_and_kept_where_people_do(read: Read) -> None:
    arrays = table(10, terminals=[9])
    arrays["infos/x"] = np.full(10, np.nan, np.float32)
    assert np.isnan(read(arrays)[1][0].infos["x"]).all()
    for name in ("observations", "actions", "rewards"):
        bad = {k: v.copy() for k, v in arrays.items()}
        bad[name][3] = np.nan
        with pytest.raises(ImportRefused, match=name):
            read(bad)


def test_ids_are_the_same_for_the_same_file_and_dataset(read: Read) -> None:
    first, again = read(table(20, timeouts=[9, 19]))[1], read(table(20, timeouts=[9, 19]))[1]
    assert [t.id for t in first] == [t.id for t in again]
    assert len({t.id for t in first}) == 2
    assert [t.digest for t in first] == [t.digest for t in again]


def test_an_existing_spec_decides(read: Read) -> None:
    """Casts that lose nothing but precision are made; anything else is refused by name."""
    arrays = table(10, terminals=[9])
    arrays["infos/extra"] = np.zeros(10, np.float32)
    spec = EnvSpec.of(Box((3,)), Box((2,), low=-3.0, high=3.0))
    found, _ = read(arrays, spec=spec)
    assert found.spec == spec
    assert any("extra" in warning for warning in found.warnings)
    for other, says in (
        (EnvSpec.of(Box((4,)), Box((2,))), "observations has another shape"),
        (EnvSpec.of(Box((3,)), Box((1,))), "actions has another shape"),
        (EnvSpec.of({"a": Box((3,)), "b": Box((3,))}, Box((2,))), "other observations"),
        (EnvSpec.of(Box((3,)), Discrete(3)), "actions has another shape"),
        (EnvSpec.of(Box((3,)), Box((2,), high=0.1)), "actions are outside their space"),
        (EnvSpec.of(Box((3,)), Box((2,)), infos={"q": Box((2,))}), "infos/q is missing"),
        (EnvSpec.of(Box((3,), "uint8"), Box((2,))), "observations does not fit"),
    ):
        with pytest.raises(ImportRefused, match=says) as caught:
            read(arrays, spec=other)
        assert caught.value.code == "schema_mismatch"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("observations", np.zeros((0, 3), np.float32), "an invalid length"),
        ("rewards", np.zeros(9, np.float32), "rewards has the wrong length"),
        ("rewards", np.zeros((10, 2), np.float32), "rewards has the wrong length"),
        ("terminals", np.zeros(11, np.bool_), "terminals has the wrong length"),
        ("timeouts", np.zeros(3, np.bool_), "timeouts has the wrong length"),
        ("terminals", np.full(10, 0.5), "terminals does not contain flags"),
        ("timeouts", np.full(10, 2), "timeouts does not contain flags"),
        ("actions", np.zeros((7, 2), np.float32), "actions has the wrong length"),
        (
            "next_observations",
            np.zeros((10, 4), np.float32),
            "next_observations has the wrong shape",
        ),
        ("actions", np.array([-1] * 10), "integer actions"),
        ("observations", np.float32(1.0), "scalar"),
    ],
)
def test_wrong_arrays_are_refused_by_name(
    read: Read, tmp_path: Path, name: str, value: Any, says: str
) -> None:
    arrays = table(10, timeouts=[4, 9])
    arrays[name] = value
    with pytest.raises(ImportRefused) as caught:
        read(arrays)
    assert says in f"{caught.value.detail} {caught.value.got}"


@pytest.mark.parametrize("name", ["observations", "actions", "rewards", "terminals"])
def test_the_four_required_arrays(read: Read, name: str) -> None:
    arrays = table(10, timeouts=[9])
    del arrays[name]
    with pytest.raises(ImportRefused, match=f"{name} is missing"):
        read(arrays)


@pytest.mark.parametrize("parent", ["data", "/"])
@pytest.mark.parametrize("several", [True, False])
def test_a_group_for_each_episode_is_refused_with_the_lines_that_send_them(
    tmp_path: Path, parent: str, several: bool
) -> None:
    """robomimic's layout, of more groups than the members that are read; and ManiSkill's."""
    path = tmp_path / "demos.hdf5"
    groups = 600 if several and parent == "data" else 3
    with h5py.File(path, "w") as file:
        for number in range(groups):
            group = file.require_group(parent).create_group(f"demo_{number}")
            group["obs/arm" if several else "obs"] = np.full((3, 2), number, np.float32)
            group["actions"] = np.zeros((3, 1), np.float32)
            group["dones"] = np.array([0, 0, number % 2])
            if several:
                group["rewards"] = np.arange(3.0)
    with pytest.raises(ImportRefused, match="a group of its own") as caught:
        read_file(path)
    assert "demo_0: actions, dones, obs" in caught.value.got
    loop = caught.value.expected.partition("and for g in ")[2]
    code = "for g in " + loop.replace("FILE", repr(str(path)))
    made: list[Trajectory] = []

    class Client:
        @staticmethod
        def add(name: str, **given: Any) -> None:
            made.append(Trajectory.from_arrays(**given))

    exec(code, {"h5py": h5py, "client": Client, "NAME": "d"})  # noqa: S102
    assert (len(made), len(made[0]), made[1].terminated) == (groups, 3, True)
    assert made[0].total_reward == (3 if several else 0)
    assert list(made[0].obs) == (["arm"] if several else ["observation"])


@pytest.mark.parametrize(
    "attributes",
    [{"scale_factor": 0.1}, {"add_offset": 5.0}, {"_FillValue": np.int16(-999)}],
)
def test_arrays_that_netcdf_packed_are_refused_with_the_cure(
    tmp_path: Path, attributes: dict[str, Any]
) -> None:
    path = tmp_path / "packed.hdf5"
    with h5py.File(path, "w") as file:
        for name, array in table(6, terminals=[5]).items():
            file[name] = array
        del file["observations"]
        file["observations"] = np.arange(12, dtype=np.int16).reshape(6, 2)
        file["observations"][1, 0] = -999
        file["observations"].attrs.update(attributes)
    with pytest.raises(ImportRefused, match="is packed") as caught:
        read_file(path)
    assert "xarray.open_dataset(FILE)" in caught.value.expected
    neutral = {"scale_factor": 1.0, "add_offset": 0.0, "_FillValue": np.int16(-5)}
    with h5py.File(path, "a") as file:
        file["observations"].attrs.update(neutral)
    read_file(path)
