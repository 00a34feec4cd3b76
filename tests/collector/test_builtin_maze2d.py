"""Maze2d and its generators: a fixed goal, and data with D4RL's quirks."""

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from numpy.typing import NDArray

from collector.builtin import MAZE2D_LARGE_ID, MAZE2D_MEDIUM_ID
from collector.builtin.__main__ import main
from collector.builtin.generate import MissingPackage, first_episode_seed, generate
from collector.builtin.generate_maze2d import Maze2dLarge, Maze2dMedium, Maze2dSparse
from collector.builtin.maze2d import next_cells, steer
from stepwell.errors import InvalidData

Columns = dict[str, NDArray[Any]]


def read(path: Path) -> Columns:
    with h5py.File(path) as h5:
        names = ("observations", "actions", "rewards", "terminals", "timeouts", "infos/goal")
        assert set(h5) == {"infos", "metadata", *names} - {"infos/goal"}  # no next_observations
        return {name: h5[name][()] for name in names}


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("maze") / "medium.hdf5"
    generate(Maze2dMedium, path, steps=4000, seed=2)
    return path


@pytest.mark.parametrize("env_id", [MAZE2D_MEDIUM_ID, MAZE2D_LARGE_ID])
def test_gymnasiums_checker_has_no_objection(env_id: str) -> None:
    """check_env passes without a warning (a warning is an error in the tests)."""
    check_env(gymnasium.make(env_id).unwrapped)


@pytest.mark.parametrize(("env_id", "limit"), [(MAZE2D_MEDIUM_ID, 600), (MAZE2D_LARGE_ID, 800)])
def test_the_shortest_path_reaches_the_goal_and_stays(env_id: str, limit: int) -> None:
    """The PD controller earns more than half of the steps; doing nothing elsewhere earns 0."""
    env = gymnasium.make(env_id)
    maze: Any = env.unwrapped
    following = next_cells(maze.free_cells, maze.goal_cell)
    assert set(following) == set(maze.free_cells)  # every cell leads to the goal
    for seed in range(3):
        obs, _ = env.reset(seed=seed)
        rewards: list[float] = []
        truncated = False
        while not truncated:
            force = steer(maze, obs, maze.centres[maze.goal_cell], following)
            obs, reward, terminated, truncated, _ = env.step(force.astype(np.float32))
            rewards.append(float(reward))
            assert not terminated
        assert len(rewards) == limit
        assert sum(rewards) > limit / 2
        assert set(rewards[-100:]) == {1.0}
    env.reset(seed=0)
    assert sum(float(env.step(np.zeros(2, np.float32))[1]) for _ in range(50)) == 0


def test_the_data_is_one_trajectory_with_d4rls_quirks(medium: Path) -> None:
    """No terminals; a timeout exactly where the goal changes; rewards of obs[t] for a fixed goal;
    nothing jumps; the replay of all actions from one reset gives all observations."""
    columns = read(medium)
    obs, timeouts = columns["observations"], columns["timeouts"]
    assert len(obs) == 4000
    assert not columns["terminals"].any()
    changed = (np.diff(columns["infos/goal"], axis=0) != 0).any(1)
    np.testing.assert_array_equal(np.flatnonzero(timeouts[:-1]), np.flatnonzero(changed))
    assert 15 < timeouts.sum() < 60
    assert np.abs(np.diff(obs[:, :2], axis=0)).max() < 0.1
    with h5py.File(medium) as h5:
        env_id = h5["metadata/environment"][()].decode()
        assert h5["metadata/first_episode_seed"][()] == first_episode_seed(2)
    maze: Any = gymnasium.make(env_id).unwrapped
    near = np.linalg.norm(obs[:, :2] - maze.centres[maze.goal_cell], axis=1) <= 0.5
    np.testing.assert_array_equal(columns["rewards"] == 1, near)
    now, _ = maze.reset(seed=first_episode_seed(2))
    for t in range(1000):
        np.testing.assert_array_equal(now, obs[t])
        now = maze.step(columns["actions"][t])[0]


def test_a_timeout_is_a_reached_goal(medium: Path) -> None:
    """The observation after a timeout is near the old goal."""
    columns = read(medium)
    (ends,) = np.nonzero(columns["timeouts"][:-1])
    gap = columns["observations"][ends + 1, :2] - columns["infos/goal"][ends]
    assert np.linalg.norm(gap, axis=1).max() <= 0.5 + 1e-5


def test_the_same_arguments_give_the_same_bytes(medium: Path, tmp_path: Path) -> None:
    """Bit-identical when made again; a shorter file is a prefix; `episodes` counts goals."""
    again, shorter, three = (tmp_path / name for name in ("again", "shorter", "three"))
    generate(Maze2dMedium, again, steps=4000, seed=2)
    assert again.read_bytes() == medium.read_bytes()
    generate(Maze2dMedium, shorter, steps=700, seed=2)
    np.testing.assert_array_equal(read(shorter)["actions"], read(medium)["actions"][:700])
    generate(Maze2dMedium, three, episodes=3, seed=2)
    ends = np.flatnonzero(read(medium)["timeouts"])
    assert len(read(three)["rewards"]) == ends[2] + 1


def test_large_maze_walks_everywhere(tmp_path: Path) -> None:
    """12,000 steps of the large maze come into most of its cells."""
    path = tmp_path / "large.hdf5"
    generate(Maze2dLarge, path, steps=12_000)
    maze: Any = gymnasium.make(MAZE2D_LARGE_ID).unwrapped
    seen = {maze.cell(obs) for obs in read(path)["observations"][::5]}
    assert len(seen) > 0.9 * len(maze.free_cells)


def test_sparse_keeps_few_of_the_successes(tmp_path: Path) -> None:
    """Visits of the rewarded cell thin out with `successes`; at 0 there is none."""
    counts = []
    for share in (1.0, 0.2, 0.0):
        path = tmp_path / "sparse.hdf5"
        policy_args = {"successes": share}
        generate(Maze2dSparse, path, steps=8000, policy_args=policy_args)
        counts.append(int(read(path)["rewards"].sum()))
    assert counts[0] > 2 * counts[1] > 0
    assert counts[2] == 0
    with pytest.raises(InvalidData, match="^successes; expected 0 … 1"):
        generate(Maze2dSparse, path, steps=10, policy_args={"successes": 2.0})


def test_without_gymnasium_robotics_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence with the command, and no half file."""
    monkeypatch.setitem(sys.modules, "gymnasium_robotics", None)
    with pytest.raises(MissingPackage, match='pip install "gymnasium-robotics"'):
        generate(Maze2dMedium, tmp_path / "out.hdf5", steps=10)
    assert list(tmp_path.iterdir()) == []


def test_command_line_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--successes`, `--reward-scale` and `--constant-action` reach the generator."""
    path = tmp_path / "out.hdf5"
    arguments = ["--steps", "3000", "--successes", "1", "--reward-scale", "10", "--constant-action"]
    assert main(["maze2d-sparse", str(path), *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3000
    columns = read(path)
    assert set(columns["rewards"].tolist()) == {0.0, 10.0}
    assert columns["actions"].shape == (3000, 3)
    assert not columns["actions"][:, 2].any()
