"""MazeRunner: every goal can be reached, observations are as drawn, all chance is the seed's."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env

from collector.builtin import MAZERUNNER_ID
from collector.builtin.mazerunner import EAST, NORTH, SOUTH, STAY, WEST, MazeRunner, random_maze
from collector.interface import interface_of
from stepwell.errors import InvalidData


def path_to(env: MazeRunner, goal: tuple[int, int]) -> list[tuple[int, int]]:
    """The (row, column) moves of a shortest path, by breadth-first search."""
    came: dict[tuple[int, int], Any] = {env.position: None}
    queue = deque([env.position])
    while queue and goal not in came:
        i, j = queue.popleft()
        for di, dj in ((0, -1), (-1, 0), (0, 1), (1, 0)):
            cell = (i + di, j + dj)
            if not env.walls[cell] and cell not in came:
                came[cell] = (i, j)
                queue.append(cell)
    moves, cell = [], goal
    while came[cell] is not None:
        i, j = came[cell]
        moves.append((cell[0] - i, cell[1] - j))
        cell = (i, j)
    return moves[::-1]


def solve(env: MazeRunner) -> tuple[float, int, dict[str, Any]]:
    """Walk to all goals in order; return, steps and the last info."""
    earned, steps, info, over = 0.0, 0, {}, False
    for goal in list(env.goals):
        for move in path_to(env, goal):
            assert not over
            _, reward, over, truncated, info = env.step(np.int64(env.moves.index(move)))
            earned, steps = earned + reward, steps + 1
            assert not truncated
    assert over
    return earned, steps, info


def make(**options: Any) -> MazeRunner:
    return gymnasium.make(MAZERUNNER_ID, **options).unwrapped


@pytest.mark.parametrize("options", [{}, {"size": 7, "max_goals": 4, "min_goals": 1}])
def test_gymnasium_has_nothing_to_object_to(options):
    check_env(make(**options))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_shortest_path_reaches_every_goal(shuffle):
    """One for each goal, and the end with the last: mazes are connected, for any size."""
    for seed in range(40):
        env = make(size=(7, 9, 15, 21)[seed % 4], shuffle_actions=shuffle, time_limit=1000)
        env.reset(seed=seed)
        assert len({*env.goals, env.position}) == 4
        assert not any(env.walls[goal] for goal in env.goals)
        earned, steps, info = solve(env)
        assert earned == 3.0 and steps >= 3
        assert info == {"log/success": 1.0, "log/goals": 1.0}


def test_the_start_lies_in_a_corridor_of_a_closed_maze():
    for seed in range(30):
        env = make(size=11)
        env.reset(seed=seed)
        assert env.position == (9, 5)
        assert env.walls[[0, -1]].all() and env.walls[:, [0, -1]].all()
        assert env.walls[7:10, [4, 6]].all() and not env.walls[6:10, 5].any()
        assert not env.walls[6, 1:10].any()


def test_observations_are_as_drawn():
    """Place, free cells to each side and clock, all in parts; the goals; where one stands."""
    env = make(size=9, min_goals=2, max_goals=3, time_limit=50, maze_seed=4)
    obs, _ = env.reset(seed=1)
    while len(env.goals) != 2:
        obs, _ = env.reset()
    i, j = env.position
    assert obs["goals"].tolist() == [[-1, -1], *map(list, env.goals)]
    assert obs["achieved"].tolist() == [7, 4]
    sight = []
    for di, dj in ((0, -1), (-1, 0), (0, 1), (1, 0)):
        free = 1
        while not env.walls[i + free * di, j + free * dj]:
            free += 1
        sight.append((free - 1) / 9)
    assert obs["observation"] == pytest.approx([7 / 9, 4 / 9, *sight, 0.0])
    assert sight[0] == sight[2] == sight[3] == 0.0 and sight[1] >= 3 / 9
    obs, reward, *_ = env.step(np.int64(EAST))  # a wall
    assert env.position == (7, 4) and reward == 0.0
    assert obs["observation"][-1] == pytest.approx(1 / 50)
    obs, *_ = env.step(np.int64(NORTH))
    assert obs["achieved"].tolist() == [6, 4]
    env.goals = [(5, 4), (5, 4)]
    env._reached = 0
    obs, reward, *_ = env.step(np.int64(NORTH))
    assert reward == 1.0 and obs["goals"].tolist() == [[-1, -1], [-1, -1], [5, 4]]
    obs, reward, over, *_ = env.step(np.int64(STAY))  # one goal a step, and staying arrives too
    assert reward == 1.0 and over and (obs["goals"] == -1).all()


def test_the_clock_ends_an_episode_as_a_task_ends():
    """It is observed, so nothing lies beyond: terminated, not truncated. Then only reset."""
    env = make(size=7, time_limit=3)
    env.reset(seed=0)
    for t in (1, 2, 3):
        obs, _, terminated, truncated, info = env.step(np.int64(SOUTH))
        assert (terminated, truncated) == (t == 3, False)
    assert obs["observation"][-1] == 1.0 and info == {"log/success": 0.0, "log/goals": 0.0}
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(np.int64(0))
    env.reset(seed=1)
    env.time_limit = 100
    solve(env)
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(np.int64(0))
    env.reset()
    with pytest.raises(InvalidAction, match="expected a member of Discrete"):
        env.step(np.int64(5))


def test_all_chance_comes_from_the_seed():
    """Maze, goals and permutation; with maze_seed the maze stays and the rest varies."""

    def what(seed: int, **options: Any):
        env = make(size=9, shuffle_actions=True, **options)
        env.reset(seed=seed)
        return env.walls.tobytes(), tuple(env.goals), env.moves

    assert [what(seed) for seed in range(10)] == [what(seed) for seed in range(10)]
    for kind in zip(*[what(seed) for seed in range(10)], strict=True):
        assert len(set(kind)) > 5
    mazes, goals, moves = zip(*[what(seed, maze_seed=3) for seed in range(10)], strict=True)
    assert len(set(mazes)) == 1 and len(set(goals)) > 5 and len(set(moves)) > 5
    assert random_maze(9, np.random.default_rng(3)).tobytes() == mazes[0]


def test_a_hidden_plan_shows_the_active_goal_alone():
    env = make(size=9, hide_plan=True, time_limit=500)
    obs, _ = env.reset(seed=2)
    first, second = env.goals[:2]
    assert obs["goals"].tolist() == [[-1, -1], [-1, -1], list(first)]
    for move in path_to(env, first):
        obs, *_ = env.step(np.int64(env.moves.index(move)))
    assert obs["goals"].tolist() == [[-1, -1], [-1, -1], list(second)]


def test_where_one_stands_is_recorded_for_relabeling_and_seen_by_nobody():
    """The environment says so itself; a role given by hand goes before."""
    env = make()
    assert interface_of(env, MAZERUNNER_ID).spec.roles == {"achieved": "relabel"}
    mine = interface_of(env, MAZERUNNER_ID, roles={"achieved": "log"}).spec
    assert mine.roles == {"achieved": "log"}
    several = gymnasium.make_vec(MAZERUNNER_ID, 2)
    assert interface_of(several, MAZERUNNER_ID).spec.role("achieved") == "relabel"
    several.close()


def test_actions_are_west_north_east_south_stay():
    env = make(size=9)
    env.reset(seed=0)
    places = []
    for action in (NORTH, NORTH, NORTH, WEST, EAST, EAST, SOUTH, STAY):
        env.step(np.int64(action))
        places.append(env.position)
    assert places[:6] == [(6, 4), (5, 4), (4, 4), (4, 3), (4, 4), (4, 5)]
    assert places[6] == places[7] == (4, 5)  # a wall beside the corridor, and staying


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"size": 8}, "size"),
        ({"size": 5}, "size"),
        ({"min_goals": 4}, "min_goals, max_goals"),
        ({"min_goals": 0}, "min_goals, max_goals"),
        ({"max_goals": 50}, "max_goals"),
        ({"time_limit": 0}, "time_limit"),
    ],
)
def test_impossible_sizes_are_refused_by_name(options, name):
    with pytest.raises(InvalidData, match=f"^{name}; expected"):
        make(**options)
