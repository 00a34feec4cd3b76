"""Pictures of built-in environments, for videos: one coloured square per cell of a map of text.

draw_map(["A..", ".#G"])  →  uint8 [2 x side, 3 x side, 3]     A the agent, # a wall, G a goal …
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RENDERS: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 8}
"""For the `metadata` of an environment that draws a map."""
COLOURS = {
    ".": (238, 238, 232),  # free
    "#": (72, 76, 84),  # wall
    "A": (38, 104, 216),  # agent
    "G": (52, 162, 88),  # goal
    "g": (176, 222, 188),  # goal that is not active yet, or was reached
    "O": (150, 186, 214),  # hole
    "K": (224, 164, 32),  # key
    "D": (146, 84, 44),  # door
    "?": (206, 92, 176),  # cue
    "S": (214, 214, 206),  # start
}
SIDE, WIDTH = 24, 960
"""Pixels per cell, and the width above which cells are smaller."""


class DrawsMap(ABC):
    """An environment whose `render()` draws the rows of text of its method `draw`."""

    render_mode: str | None

    @abstractmethod
    def draw(self) -> Sequence[str]:
        """The map as it is now: rows of characters of COLOURS."""

    def render(self) -> NDArray[np.uint8] | None:
        """uint8 [height, width, 3] with render_mode "rgb_array", else None."""
        return draw_map(self.draw()) if self.render_mode == "rgb_array" else None


def draw_map(rows: Sequence[str]) -> NDArray[np.uint8]:
    """uint8 [R x side, C x side, 3]: a square of the cell's colour, with a line at its edges."""
    cells = np.array([[COLOURS[cell] for cell in row] for row in rows], np.uint8)
    side = max(4, min(SIDE, WIDTH // cells.shape[1]))
    picture = cells.repeat(side, 0).repeat(side, 1)
    for edge in (picture[::side], picture[:, ::side]):
        edge[...] = edge // 8 * 7
    return picture


def put(rows: Sequence[str], cell: tuple[int, int], what: str) -> list[str]:
    """The rows with the character of one (row, column) replaced."""
    i, j = cell
    return [row[:j] + what + row[j + 1 :] if at == i else row for at, row in enumerate(rows)]
