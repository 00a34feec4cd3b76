"""Every rule of trajectory.py: a valid one is built, anything else says expected and got."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from stepwell import (
    Box,
    Discrete,
    EnvSpec,
    InvalidTrajectory,
    Trajectory,
    TrajectoryMetadata,
    new_id,
)
from stepwell.testing import make_spec, make_trajectory
from tests.specs import make_rich_spec

T = 4
GOOD = {
    "obs": {"observation": np.zeros((T + 1, 3), np.float32)},
    "actions": {"action": np.zeros((T, 1), np.float32)},
    "rewards": np.ones(T, np.float32),
}


def with_value(array, index, value):
    array = array.copy()
    array[index] = value
    return array


BAD = {
    "id is no UUID": {"id": "seven"},
    "id is no text": {"id": 7},
    "id in another spelling": {"id": new_id().upper()},
    "no observations": {"obs": {}},
    "observations without names": {"obs": GOOD["obs"]["observation"]},
    "a list of observations": {"obs": [[0.0] * 3] * (T + 1)},
    "actions without names": {"actions": GOOD["actions"]["action"]},
    "infos are None": {"infos": None},
    "no actions": {"actions": {}},
    "rewards are a list": {"rewards": [1.0] * T},
    "rewards are float64": {"rewards": np.ones(T)},
    "rewards have two axes": {"rewards": np.ones((T, 1), np.float32)},
    "no rewards": {"rewards": np.ones(0, np.float32)},
    "NaN reward": {"rewards": with_value(GOOD["rewards"], 1, math.nan)},
    "infinite reward": {"rewards": with_value(GOOD["rewards"], 1, math.inf)},
    "T observations": {"obs": {"observation": np.zeros((T, 3), np.float32)}},
    "T+2 observations": {"obs": {"observation": np.zeros((T + 2, 3), np.float32)}},
    "T+1 actions": {"actions": {"action": np.zeros((T + 1, 1), np.float32)}},
    "T infos": {"infos": {"x": np.zeros(T)}},
    "NaN observation": {"obs": {"observation": np.full((T + 1, 3), np.nan, np.float32)}},
    "NaN in the last observation": {
        "obs": {"observation": with_value(GOOD["obs"]["observation"], (T, 0), np.nan)}
    },
    "infinite action": {"actions": {"action": np.full((T, 1), np.inf, np.float32)}},
    "observation is a list": {"obs": {"observation": [0.0] * (T + 1)}},
    "observation is a scalar": {"obs": {"observation": np.float32(1.0)}},
    "observations are text": {"obs": {"observation": np.array(["a"] * (T + 1))}},
    "observations are objects": {"obs": {"observation": np.array([None] * (T + 1))}},
    "observations are complex": {"obs": {"observation": np.zeros(T + 1, np.complex64)}},
    "both ends": {"terminated": True, "truncated": True},
    "action_known has T+1": {"action_known": np.ones(T + 1, np.bool_)},
    "action_known holds integers": {"action_known": np.ones(T, np.int8)},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_every_broken_rule_says_what_was_expected_and_what_came(change):
    Trajectory(**GOOD)
    with pytest.raises(InvalidTrajectory) as caught:
        Trajectory(**{**GOOD, **change})
    assert caught.value.expected and caught.value.got
    assert isinstance(caught.value, ValueError)


BAD_ABOUT = {
    "env too long": {"env": "x" * 1025},
    "env not text": {"env": 3},
    "NUL in text": {"policy": "a\0b"},
    "lone surrogate": {"source": "\ud800"},
    "purpose": {"purpose": "play"},
    "negative first_step": {"first_step": -1},
    "boolean first_step": {"first_step": True},
    "fractional seed": {"seed": 1.5},
    "huge seed": {"seed": 2**63},
    "success as another number": {"success": 2},
    "tags as one text": {"tags": "abc"},
    "empty tag": {"tags": ("",)},
    "long tag": {"tags": ("x" * 129,)},
    "many tags": {"tags": tuple(str(i) for i in range(65))},
    "NaN metric": {"metrics": {"m": math.nan}},
    "metric as text": {"metrics": {"m": "3"}},
    "nameless metric": {"metrics": {3: 1.0}},
    "metrics as list": {"metrics": [1.0]},
    "many metrics": {"metrics": {str(i): 1.0 for i in range(257)}},
    "infinite start": {"started_at": math.inf},
}


@pytest.mark.parametrize("values", BAD_ABOUT.values(), ids=BAD_ABOUT)
def test_about_refuses_what_no_index_could_keep(values):
    with pytest.raises(InvalidTrajectory) as caught:
        TrajectoryMetadata(**values)
    assert caught.value.expected and caught.value.got
    with pytest.raises(InvalidTrajectory):
        TrajectoryMetadata.from_json(values)


def test_about_json_refuses_other_fields_and_other_shapes():
    for data in ([], {"enviroment": "x"}, {"tags": 3}, {"metrics": 3}):
        with pytest.raises(InvalidTrajectory):
            TrajectoryMetadata.from_json(data)


def test_about_survives_json_and_numpy_spells_the_same():
    metadata = TrajectoryMetadata(
        env="Hopper-v5",
        seed=np.int64(3),
        first_step=np.int32(2),
        success=np.bool_(False),
        tags=["a", "b"],
        metrics={"height": np.float32(0.5), "count": 3},
        started_at=1,
        purpose="eval",
    )
    assert TrajectoryMetadata.from_json(metadata.to_json()) == metadata
    assert TrajectoryMetadata.from_json(metadata.to_json()).to_json() == metadata.to_json()
    assert metadata.to_json()["metrics"] == {"height": 0.5, "count": 3.0}
    assert TrajectoryMetadata(metrics={"m": 2**53 + 1}).metrics == {"m": 2.0**53}  # as documented
    assert type(metadata.seed) is int and type(metadata.metrics["count"]) is float
    assert TrajectoryMetadata().to_json() == {}


# --- Trajectory.from_arrays ---------------------------------------------------------------------


def test_of_takes_lists_and_casts_to_the_spec():
    spec = EnvSpec.of(Box((2,)), Discrete(3))
    made = Trajectory.from_arrays(
        obs=[[0, 0], [1, 1], [2, 2]],
        actions=[[0.0], [2.0]],
        rewards=[[1], [2]],
        terminated=[0, 1],
        spec=spec,
        env="mine",
    )
    made.check(spec)
    assert made.actions["action"].tolist() == [0, 2] and made.rewards.dtype == np.float32
    assert made.terminated and not made.truncated and made.metadata.env == "mine"
    assert made.total_reward == 3.0 and len(made) == 2


def test_of_repeats_a_missing_last_observation_and_says_so():
    made = Trajectory.from_arrays(
        obs=[1.0, 2.0], actions=[0, 0], rewards=[0, 0], infos={"x": [5, 6]}
    )
    assert not made.final_obs_valid
    assert made.obs["observation"].tolist() == [1.0, 2.0, 2.0]
    assert made.infos["x"].tolist() == [5, 6, 6]


BAD_OF = {
    "ragged observations": {"obs": [[1.0], [1.0, 2.0], [3.0]]},
    "text observations": {"obs": ["a", "b", "c"]},
    "a single number": {"obs": 3.0},
    "text rewards": {"rewards": ["x", "y"]},
    "ragged rewards": {"rewards": [[1], [2, 3]]},
    "overflowing reward": {"rewards": [1e300, 0.0]},
    "end before the end": {"terminated": [True, False]},
    "too many flags": {"terminated": [False, False, True]},
    "text flags": {"truncated": ["no", "yes"]},
    "infos without names": {"infos": [1, 2, 3]},
    "unknown keyword": {"colour": "red"},
    "half a discrete action": {"actions": [0.5, 1.0]},
    "NaN as discrete action": {"actions": [math.nan, 1.0]},
    "an action outside": {"actions": [0, 3], "check": True},
}


@pytest.mark.parametrize("change", BAD_OF.values(), ids=BAD_OF)
def test_of_raises_only_its_own_error(change):
    spec = EnvSpec.of(Box((1,)), Discrete(3))
    given = {"obs": [[0.0], [1.0], [2.0]], "actions": [0, 1], "rewards": [0, 0], **change}
    check = given.pop("check", False)
    with pytest.raises(InvalidTrajectory):
        made = Trajectory.from_arrays(spec=spec, **given)
        assert check
        made.check(spec)


@pytest.mark.parametrize(("dtype", "value"), [("uint8", 256), ("uint8", -1), ("int8", 200)])
def test_of_never_wraps_an_integer_around(dtype, value):
    spec = EnvSpec.of(Box((1,), dtype, -1e9, 1e9), Discrete(2))
    with pytest.raises(InvalidTrajectory, match=str(value)):
        Trajectory.from_arrays(obs=[[0], [value]], actions=[0], rewards=[0], spec=spec)


MASKED = np.ma.array([0.0, 1.0], mask=[False, True])
MASKED_OF = {
    "observations": {"obs": np.ma.array([0.0, 1.0, 2.0], mask=[0, 0, 1])},
    "a list of them": {"obs": {"x": [MASKED, MASKED, MASKED]}},
    "actions": {"actions": MASKED},
    "rewards": {"rewards": MASKED},
    "infos": {"infos": {"x": np.ma.array([0.0, 1.0, 2.0], mask=[0, 0, 1])}},
    "ends": {"terminated": MASKED},
    "known actions": {"action_known": MASKED},
}


@pytest.mark.parametrize("change", MASKED_OF.values(), ids=MASKED_OF)
def test_masked_elements_are_refused(change):
    """Numpy would store what is beneath the mask."""
    given = {"obs": [0.0, 1.0, 2.0], "actions": [0, 1], "rewards": [0, 0], **change}
    with pytest.raises(InvalidTrajectory, match=r"no masked elements \(array.filled"):
        Trajectory.from_arrays(**given)


def test_masked_elements_are_refused_in_a_trajectory_of_arrays():
    for what in ("obs", "actions"):
        masked = {key: np.ma.masked_equal(array, 0) for key, array in GOOD[what].items()}
        with pytest.raises(InvalidTrajectory, match=rf"{what}\[.*no masked elements"):
            Trajectory(**{**GOOD, what: masked})
    for change in ({"rewards": np.ma.masked_equal(GOOD["rewards"], 1)}, {"action_known": MASKED}):
        with pytest.raises(InvalidTrajectory, match="no masked elements"):
            Trajectory(**{**GOOD, **change})


def test_a_masked_array_without_masked_elements_is_an_array():
    made = Trajectory.from_arrays(obs=np.ma.array([0.0, 1.0]), actions=[0], rewards=[0])
    assert made.obs["observation"].tolist() == [0, 1]


@pytest.mark.parametrize("what", ["obs", "actions", "rewards"])
def test_a_tensor_that_needs_gradients_is_refused_with_the_cure(what):
    torch = pytest.importorskip("torch")
    given = {"obs": torch.zeros(3), "actions": torch.zeros(2), "rewards": torch.zeros(2)}
    given[what].requires_grad_()
    with pytest.raises(InvalidTrajectory, match=r"without gradients \(tensor\.detach\(\)\)"):
        Trajectory.from_arrays(**given)


# --- against a spec ---------------------------------------------------------------------------


def replace(trajectory, **changes):
    return dataclasses.replace(trajectory, **changes)


def test_check_names_the_key_and_both_sides():
    spec = make_spec()
    good = make_trajectory(spec)
    good.check(spec)
    obs, actions = good.obs["observation"], good.actions["action"]
    cases = {
        "other names": replace(good, obs={"state": obs}),
        r"obs\[observation\] shape": replace(good, obs={"observation": obs[:, :2]}),
        r"obs\[observation\] dtype": replace(good, obs={"observation": obs.astype(np.float64)}),
        r"actions\[action\]; expected values inside": replace(
            good, actions={"action": actions + 5}
        ),
        "infos have other names": replace(good, infos={"x": np.zeros(len(obs))}),
        "action_known": replace(good, action_known=np.ones(len(good), np.bool_)),
    }
    for says, bad in cases.items():
        with pytest.raises(InvalidTrajectory, match=says) as caught:
            bad.check(spec)
        assert caught.value.expected and caught.value.got


def test_observations_may_leave_a_float_box_but_not_an_integer_one():
    """Many environments lie about their float bounds; an integer outside is a wrong index."""
    spec = EnvSpec.of({"f": Box((1,), low=0.0, high=1.0), "i": Discrete(3)}, Discrete(2))
    made = Trajectory.from_arrays(
        obs={"f": [[5.0], [6.0]], "i": [0, 2]}, actions=[0], rewards=[0], spec=spec
    )
    made.check(spec)
    with pytest.raises(InvalidTrajectory, match=r"obs\[i\]"):
        replace(made, obs={**made.obs, "i": np.array([0, 3])}).check(spec)


# --- digest and pieces ------------------------------------------------------------------------


def test_the_digest_covers_everything_and_nothing_else():
    """Equal content, equal digest; one changed bit anywhere, another digest."""
    spec = make_rich_spec()
    one = make_trajectory(spec, id=new_id(), seed=3)
    assert make_trajectory(spec, id=one.id, seed=3).digest == one.digest
    strided = {k: np.asfortranarray(v) for k, v in one.obs.items()}
    assert replace(one, obs=strided).digest == one.digest
    key = next(iter(one.obs))
    changed = [
        replace(one, id=new_id()),
        replace(one, metadata=TrajectoryMetadata(env="else")),
        replace(one, terminated=False),
        replace(one, rewards=with_value(one.rewards, 0, 9.0)),
        replace(one, obs={**one.obs, key: with_value(one.obs[key], -1, 7)}),
        replace(one, infos={k: v for k, v in one.infos.items() if k != "lidar"}),
        replace(one, action_known=~one.action_known),
    ]
    assert len({one.digest, *(t.digest for t in changed)}) == len(changed) + 1
