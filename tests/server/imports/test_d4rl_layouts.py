"""Kitchen, antmaze and adroit as D4RL publishes them: whole files of their names, types, shapes and
chunks, with every quirk of each. What the rules are: test_imports_d4rl.py."""

from __future__ import annotations

import hashlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from stepwell.spaces import Box
from stepwell.trajectory import Trajectory
from tests.imported import read_file

from .conftest import Arrays, Importing, flags, walk


def write(path: Path, arrays: Arrays) -> Path:
    """D4RL's container: gzip 4, chunks that are columns, booleans as enums, no attributes."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            if np.ndim(array) == 0:
                file.create_dataset(name, data=array)
                continue
            chunks = (max(1, len(array) // 2), *(1 for _ in np.shape(array)[1:]))
            file.create_dataset(
                name, data=array, compression="gzip", compression_opts=4, chunks=chunks
            )
    return path


read = read_file


def lengths(made: list[Trajectory]) -> list[int]:
    return [len(t) for t in made]


def uniform(rows: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, width)).astype(np.float32)


# --- kitchen: no timeouts, float terminals, `infos` is an array -----------------------------------

DEMOS = (190, 231, 204, 260)


@pytest.fixture
def kitchen() -> Arrays:
    """kitchen-partial-v0: four demonstrations; the file ends within the last."""
    rows = sum(DEMOS)
    ends = np.cumsum(DEMOS)[:-1] - 1
    return {
        "actions": uniform(rows, 9),
        "infos": np.repeat(np.arange(4), DEMOS).astype(np.int64),
        "observations": walk(rows, 60),
        "rewards": np.repeat(np.arange(4.0), DEMOS).astype(np.float32),
        "terminals": flags(rows, *ends).astype(np.float32),
    }


def test_kitchen_ends_at_float_terminals_only(kitchen: Arrays, tmp_path: Path) -> None:
    found, made = read(write(tmp_path / "k.hdf5", kitchen))
    assert tuple(lengths(made)) == DEMOS
    ends = [(t.terminated, t.truncated) for t in made]
    assert ends == [(True, False)] * 3 + [(False, True)]
    assert found.warnings == ["the last 260 steps have no end: kept as a truncated trajectory"]
    assert (found.spec.observations["observation"], found.spec.actions["action"]) == (
        Box((60,)),
        Box((9,), low=-1, high=1),
    )


def test_kitchen_infos_are_one_array_the_demonstration(kitchen: Arrays, tmp_path: Path) -> None:
    """Code that looks below a group `infos` fails on these files."""
    found, made = read(write(tmp_path / "k.hdf5", kitchen))
    assert found.spec.infos == {"infos": Box((), "int64")}
    assert [set(t.infos["infos"].tolist()) for t in made] == [{0}, {1}, {2}, {3}]
    assert found.dropped == {}


def test_kitchen_final_observations_are_unknown(kitchen: Arrays, tmp_path: Path) -> None:
    """The row after a terminal is the next demonstration's first: it must not be taken."""
    _, made = read(write(tmp_path / "k.hdf5", kitchen))
    assert not any(t.final_obs_valid for t in made)
    for trajectory in made:
        obs = trajectory.obs["observation"]
        assert np.array_equal(obs[-1], obs[-2])
    rows = np.concatenate([t.obs["observation"][:-1] for t in made])
    assert np.array_equal(rows, kitchen["observations"])


def test_kitchen_without_any_end_is_cut_where_the_environment_cuts(
    kitchen: Arrays, tmp_path: Path
) -> None:
    """D4RL's readers fall back to the environment's 280 steps; here that is asked for."""
    kitchen["terminals"][:] = 0.0
    path = write(tmp_path / "k.hdf5", kitchen)
    _, whole = read(path)
    assert lengths(whole) == [sum(DEMOS)]
    _, made = read(path, max_steps=280)
    assert lengths(made) == [280, 280, 280, 45]
    assert all(t.truncated and not t.terminated for t in made)


# --- antmaze: terminals are rewards, not ends -----------------------------------------------------

WITHIN = 200
"""Steps until a time-out; 700 or 1000 in the real ones."""


@pytest.fixture
def antmaze() -> Arrays:
    """antmaze-medium-play-v2: five walks, three of which are near the goal for a while."""
    rows = 5 * WITHIN
    near = np.zeros(rows)
    near[150:200] = near[330:360] = near[395:400] = near[970:1000] = 1.0
    observations = walk(rows, 29)
    for number in range(1, 5):
        observations[number * WITHIN :] += 6.0 * (-1) ** number
    return {
        "actions": uniform(rows, 8),
        "infos/goal": np.tile([20.5, 20.25], (rows, 1)).astype(np.float32),
        "infos/qpos": observations[:, :15],
        "infos/qvel": observations[:, 15:],
        "observations": observations,
        "rewards": near.copy(),
        "terminals": near.copy(),
        "timeouts": flags(rows, *range(WITHIN - 1, rows, WITHIN)),
    }


def test_antmaze_ends_at_timeouts_only(antmaze: Arrays, tmp_path: Path) -> None:
    """Splitting at terminals would make 110 episodes of one step."""
    found, made = read(write(tmp_path / "a.hdf5", antmaze))
    assert lengths(made) == [WITHIN] * 5
    assert any("no reset" in warning for warning in found.warnings)


def test_antmaze_terminals_are_kept_as_infos(antmaze: Arrays, tmp_path: Path) -> None:
    found, made = read(write(tmp_path / "a.hdf5", antmaze))
    kept = np.concatenate([t.infos["terminals"][:-1] for t in made])
    assert np.array_equal(kept, antmaze["terminals"] != 0)
    assert set(found.spec.infos) == {"goal", "qpos", "qvel", "terminals"}


def test_antmaze_float_flags_and_a_step_with_both(antmaze: Arrays, tmp_path: Path) -> None:
    """float64 terminals beside boolean timeouts; where both are set, the episode is terminated."""
    found, made = read(write(tmp_path / "a.hdf5", antmaze))
    assert [t.terminated for t in made] == [True, True, False, False, True]
    assert [t.truncated for t in made] == [False, False, True, True, False]
    assert any("3 steps are both terminal and timeout" in w for w in found.warnings)


def test_antmaze_rewards_stay_as_they_are(antmaze: Arrays, tmp_path: Path) -> None:
    """1 near the goal and 0 elsewhere; subtracting 1, as papers do, is the learner's choice."""
    _, made = read(write(tmp_path / "a.hdf5", antmaze))
    assert [t.total_reward for t in made] == [50, 35, 0, 0, 30]
    assert made[0].rewards.dtype == np.float32


def test_antmaze_umaze_diverse_has_single_flags(antmaze: Arrays, tmp_path: Path) -> None:
    """One flag per success, with nothing before or after that says so."""
    antmaze["terminals"] = flags(5 * WITHIN, 150, 460, 870).astype(np.float64)
    antmaze["rewards"] = antmaze["terminals"]
    _, made = read(write(tmp_path / "a.hdf5", antmaze))
    assert lengths(made) == [WITHIN] * 5
    assert all(t.truncated for t in made)
    assert [t.total_reward for t in made] == [1, 0, 1, 0, 1]


def test_antmaze_v0_timeouts_beside_resets_are_told(antmaze: Arrays, tmp_path: Path) -> None:
    """Published once with timeouts that are not where the ant was reset. With next_observations it
    shows, and a warning counts them; without, the file is taken at its word."""
    antmaze["terminals"][:] = 0.0
    antmaze["timeouts"] = flags(5 * WITHIN, *range(WITHIN + 4, 5 * WITHIN, WITHIN), 5 * WITHIN - 1)
    following = np.vstack([antmaze["observations"][1:], antmaze["observations"][-1:] + 0.5])
    following[range(WITHIN - 1, 5 * WITHIN, WITHIN)] += 0.5
    found, made = read(write(tmp_path / "a.hdf5", antmaze | {"next_observations": following}))
    assert any("after 4 steps inside trajectories" in w for w in found.warnings)
    assert len(made) == 5
    found, _ = read(write(tmp_path / "b.hdf5", antmaze))
    assert not any("inside trajectories" in w for w in found.warnings)


# --- adroit: states of the simulator, statistics of the policy ------------------------------------

PLAYS = 100
"""Steps of an episode of pen; 200 of the other hands."""


@pytest.fixture
def adroit() -> Arrays:
    """pen-cloned-v1: four time-outs and an unfinished episode."""
    rows = 4 * PLAYS + 30
    rng = np.random.default_rng(3)
    return {
        "actions": np.clip(uniform(rows, 24) * 1.2, -1.0, 1.0),
        "infos/action_log_std": np.full((rows, 24), -0.5, np.float32),
        "infos/action_mean": uniform(rows, 24, seed=1),
        "infos/desired_orien": rng.normal(size=(rows, 4)),
        "infos/env_state/rotation": rng.normal(size=(rows, 3, 3)).astype(np.float32),
        "infos/env_state/touching": rng.integers(0, 2, rows).astype(np.bool_),
        "infos/qpos": rng.normal(size=(rows, 30)),
        "infos/qvel": rng.normal(size=(rows, 30)),
        "metadata/algorithm": np.bytes_("DAPG"),
        "metadata/iteration": np.int32(150),
        "metadata/policy/fc0/bias": np.zeros(32, np.float32),
        "metadata/policy/fc0/weight": np.zeros((32, 45), np.float32),
        "metadata/policy/nonlinearity": np.bytes_("tanh"),
        "observations": walk(rows, 45),
        "rewards": rng.normal(size=(rows, 1)).astype(np.float32),
        "terminals": np.zeros(rows, np.bool_),
        "timeouts": flags(rows, *range(PLAYS - 1, rows, PLAYS)),
    }


def test_adroit_ends_at_timeouts_and_keeps_the_tail(adroit: Arrays, tmp_path: Path) -> None:
    """D4RL's sequence_dataset drops the unfinished episode without a word."""
    found, made = read(write(tmp_path / "p.hdf5", adroit))
    assert lengths(made) == [PLAYS] * 4 + [30]
    assert all(t.truncated and not t.terminated for t in made)
    assert "the last 30 steps have no end: kept as a truncated trajectory" in found.warnings


def test_adroit_rewards_of_shape_n_1(adroit: Arrays, tmp_path: Path) -> None:
    _, made = read(write(tmp_path / "p.hdf5", adroit))
    assert np.array_equal(np.concatenate([t.rewards for t in made]), adroit["rewards"][:, 0])


def test_adroit_actions_on_the_bounds_stay_there(adroit: Arrays, tmp_path: Path) -> None:
    """tanh has no inverse at 1: to clip them is the learner's business."""
    found, made = read(write(tmp_path / "p.hdf5", adroit))
    assert found.spec.actions["action"] == Box((24,), low=-1, high=1)
    taken = np.concatenate([t.actions["action"] for t in made])
    assert np.array_equal(taken, adroit["actions"])
    assert (np.abs(taken) == 1.0).any()


def test_adroit_infos_keep_names_ranks_and_types(adroit: Arrays, tmp_path: Path) -> None:
    found, made = read(write(tmp_path / "p.hdf5", adroit))
    assert found.spec.infos["env_state/rotation"] == Box((3, 3), "float32")
    assert found.spec.infos["qpos"] == Box((30,), "float64")
    assert found.spec.infos["env_state/touching"].dtype == "bool"
    for name in found.spec.infos:
        kept = np.concatenate([t.infos[name][:-1] for t in made])
        assert np.array_equal(kept, adroit[f"infos/{name}"]), name
    assert len(found.spec.infos) == 7


def test_adroit_goes_through_the_service_with_its_metadata(
    adroit: Arrays, tmp_path: Path, importing: Importing
) -> None:
    """Scalars of `metadata` are texts and numbers, arrays only their shape."""
    path = write(tmp_path / "pen-cloned-v1.hdf5", adroit)
    job = importing.run(path, "pen", env="AdroitHandPen-v1")
    assert job.state == "succeeded", job
    assert job.result is not None
    assert job.result["metadata"] == {
        "algorithm": "DAPG",
        "iteration": 150,
        "policy/fc0/bias": "float32 [32]",
        "policy/fc0/weight": "float32 [32, 45]",
        "policy/nonlinearity": "tanh",
    }
    source = "d4rl:" + hashlib.sha256(path.read_bytes()).hexdigest()
    rows = importing.rows(
        "select length, truncated, final_obs_valid, env, source from trajectories"
        " where dataset = 'pen' order by seq"
    )
    wanted = [[n, True, False, "AdroitHandPen-v1", source] for n in [PLAYS] * 4 + [30]]
    assert rows == wanted


def test_legacy_chunks_are_not_read_twice(adroit: Arrays, tmp_path: Path) -> None:
    """Old sets have the same steps once more, in groups below `virtual`."""
    chunk = {f"virtual/0/{k}": adroit[k] for k in ("observations", "actions", "rewards")}
    found, made = read(write(tmp_path / "p.hdf5", adroit | chunk))
    assert sum(lengths(made)) == len(adroit["rewards"])
    assert any(w.startswith("not read: virtual/0/actions") for w in found.warnings)
