"""Built-in environments draw themselves for videos."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

import collector.builtin
from collector.builtin.drawing import COLOURS, draw_map, put

MAPS = {
    "Gridworld": {"size": 3, "limit": 4},
    "TMazePassive": {"corridor_length": 3},
    "TMazeActive": {"corridor_length": 3},
    "DarkKeyDoor": {"size": 4, "start": (0, 0), "key": (2, 1), "door": (3, 3)},
    "MetaFrozenLake": {"size": 3, "attempts": 5},
    "MazeRunner": {"size": 7},
    "PackageDelivery": {"length": 4, "forks": 1},
    "Maze2dMedium": {},
}


def drawn(name: str, seed: int = 0, **more: Any) -> Any:
    env = gymnasium.make(f"stepwell/{name}-v0", render_mode="rgb_array", **(MAPS[name] | more))
    env.reset(seed=seed)
    return env.unwrapped


def rows(env: Any) -> list[str]:
    return list(env.draw())


def test_a_map_is_a_square_of_colour_per_cell() -> None:
    picture = draw_map(["A.", "#G", "KO"])
    assert picture.shape == (72, 48, 3) and picture.dtype == np.uint8
    for at, cell in enumerate("A.#GKO"):
        i, j = divmod(at, 2)
        inside = picture[24 * i + 1 : 24 * i + 24, 24 * j + 1 : 24 * j + 24]
        assert (inside == COLOURS[cell]).all()
    assert (picture[0] < picture[1]).any(), "a line"
    assert draw_map(["." * 100]).shape == (9, 900, 3)
    assert put(["ab", "cd"], (1, 0), "x") == ["ab", "xd"]


@pytest.mark.parametrize("name", MAPS)
def test_an_environment_draws_where_its_agent_is(name: str) -> None:
    if name == "Maze2dMedium":
        pytest.importorskip("gymnasium_robotics")
    env = drawn(name)
    found = set()
    for seed in range(5):
        env.reset(seed=seed)
        env.action_space.seed(seed)
        for _ in range(4):
            assert "".join(rows(env)).count("A") == 1
            assert np.array_equal(env.render(), draw_map(env.draw()))
            found.add("".join(rows(env)))
            if env.step(env.action_space.sample())[2]:
                break
    assert len(found) > 3
    blind = gymnasium.make(f"stepwell/{name}-v0", **MAPS[name]).unwrapped
    blind.reset(seed=0)
    assert blind.render() is None


def test_maps_show_what_a_task_is_about() -> None:
    maze = drawn("TMazePassive", penalty=0.0)
    goal = maze._goal_y
    up = ["####", "?##G", "A...", "###.", "####"]
    assert rows(maze) == (up if goal == 1 else ["####", "###.", "A...", "?##G", "####"])
    for action in (0, 0, 0, 1):
        maze.step(np.int64(action))
    assert rows(maze)[1][3] == "A"
    room = drawn("DarkKeyDoor")
    assert rows(room) == ["A...", "..K.", "....", "...D"]
    for action in (3, 3, 2):  # to the key
        room.step(np.int64(action))
    assert rows(room) == ["S...", "..A.", "....", "...D"]
    lake = drawn("MetaFrozenLake")
    assert rows(lake)[0][0] == "A" and rows(lake)[2][2] == "G"
    assert [row[3:] for row in rows(lake)] == ["##", "##", "##", "##", ".."]
    lake._attempt = 2
    assert rows(lake)[-1] == "gg..."
    road = drawn("PackageDelivery")
    assert rows(road)[0].count("D") == 1 and rows(road)[0][4] == "G" and rows(road)[1] == "KKKK#"
    runner = drawn("MazeRunner")
    text = "".join(rows(runner))
    assert (text.count("G"), text.count("g"), rows(runner)[0]) == (1, 2, "#######")


def test_images_are_enlarged_and_changed_environments_draw_as_they_did() -> None:
    block = gymnasium.make(collector.builtin.FIND_BLOCK_IMAGE_ID, render_mode="rgb_array")
    seen, _ = block.reset(seed=1)
    picture = np.asarray(block.render())
    assert picture.shape == (96, 16 * 19, 3)
    assert np.array_equal(picture[::16, 7 * 16 :: 16], seen[:, 6:])
    assert np.array_equal(picture[::16, : 6 * 16 : 16], seen[:, :6])
    grid = {"env": "stepwell/Gridworld-v0", "size": 3, "limit": 4}
    changed = gymnasium.make(
        collector.builtin.MODIFIED_ID, render_mode="rgb_array", reward_scale=2.0, **grid
    )
    changed.reset(seed=3)
    assert np.array_equal(changed.render(), drawn("Gridworld", seed=3).render())
    assert changed.metadata["render_modes"] == ["rgb_array"]
