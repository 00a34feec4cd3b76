"""The game itself: the package `crafter`, made to follow its seed to the letter.

The package alone does not: creatures are kept in sets, whose order is that of memory addresses, and
drawing a picture of the night takes numbers from the generator that moves the creatures. Here the
order is that of insertion, and pictures have a separate generator, so a seed determines the world
and the course of events, whatever is rendered.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import crafter
import numpy as np
from crafter import constants, objects, worldgen
from numpy.typing import NDArray

ACTIONS = tuple(constants.actions)
ITEMS = tuple(constants.items)
VIEW = (7, 9)
"""Rows and columns of the map that the player sees, itself in the middle."""
MOST = 9
"""Of any item that can be had."""
TILES = (
    "outside",
    *constants.materials,
    *(f"player-{way}" for way in ("left", "right", "up", "down", "sleep")),
    *("cow", "zombie", "skeleton", "plant", "plant-ripe"),
    *(f"arrow-{way}" for way in ("left", "right", "up", "down")),
)
"""What can be in a place of the map, by its number: the topmost counts."""
_NUMBERS = {name: number for number, name in enumerate(TILES)}
_laid_out: dict[tuple[int, ...], tuple[NDArray[np.uint8], list[tuple[type, Any]]]] = {}
"""Materials and creatures of the last world that was to be kept, by its size and seed."""


class InOrder(dict[Any, None]):
    """A set that is walked through in the order of coming."""

    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]


class World(crafter.Env):  # type: ignore[misc]  # the package has no types
    """`crafter.Env` with one seed a world and without a time limit; x goes right, y down."""

    def __init__(self, area: int) -> None:
        super().__init__(area=(area, area), length=0, seed=0)
        self._of_pictures = np.random.RandomState(0)

    def begin(self, seed: int, world_seed: int | None = None) -> None:
        """A new game. All chance is the seed's; but the world, if it has a seed, is the world's."""
        x, y = self._area
        self._step = 0
        self._world.reset(seed=seed if world_seed is None else world_seed)
        self._world._chunks = defaultdict(InOrder)
        self._of_pictures.seed(seed)
        self._update_time()
        self._player = objects.Player(self._world, (x // 2, y // 2))
        self._last_health = self._player.health
        self._unlocked: set[str] = set()
        self._world.add(self._player)
        if world_seed is None:
            worldgen.generate_world(self._world, self._player)
        else:
            self._lay_out(world_seed)
            self._world.random.seed(seed)  # the one that all creatures share

    def _lay_out(self, world_seed: int) -> None:
        """The world of a seed: made once, which takes most of a second, and then repeated."""
        key = (*self._area, world_seed)
        if key not in _laid_out:
            worldgen.generate_world(self._world, self._player)
            creatures = [(type(o), o.pos.copy()) for o in self._world.objects[1:]]
            _laid_out.clear()
            _laid_out[key] = (self._world._mat_map.copy(), creatures)
            return
        materials, found = _laid_out[key]
        self._world._mat_map[:] = materials
        for kind, place in found:
            hunts = (self._player,) if kind in (objects.Zombie, objects.Skeleton) else ()
            self._world.add(kind(self._world, place, *hunts))

    def act(self, action: int) -> tuple[set[str], bool]:
        """One step: the achievements that it counted, and whether the player is dead."""
        before = dict(self._player.achievements)
        self.step(action)
        after = self._player.achievements
        return {name for name in after if after[name] > before[name]}, self._player.health <= 0

    @property
    def position(self) -> tuple[int, int]:
        """(x, y) of the player."""
        x, y = self._player.pos
        return int(x), int(y)

    @property
    def target(self) -> tuple[int, int]:
        """(x, y) that the player faces: what is collected or placed is there."""
        x, y = np.add(self._player.pos, self._player.facing)
        return int(x), int(y)

    def walkable(self) -> NDArray[np.bool_]:
        """[area, area] by x and y: where one can stand, creatures aside."""
        numbers = [self._world._mat_ids[name] for name in constants.walkable]
        return np.isin(self._world._mat_map, numbers)

    def inventory(self) -> NDArray[np.float32]:
        """[16] of each item, as a share of the most that can be had: health, food, …"""
        return np.array([self._player.inventory[name] / MOST for name in ITEMS], np.float32)

    def numbers(self) -> NDArray[np.float32]:
        """[21]: inventory; x and y as shares of the world; facing in x and y; daylight."""
        place = np.divide(self._player.pos, self._area)
        rest = [*place, *self._player.facing, self._world.daylight]
        return np.concatenate([self.inventory(), np.array(rest, np.float32)])

    def tiles(self) -> NDArray[np.int64]:
        """[7, 9] numbers of what the player sees, by row and column."""
        rows, columns = VIEW
        seen = np.full(VIEW, _NUMBERS["outside"], np.int64)
        left, top = (p - n // 2 for p, n in zip(self.position, (columns, rows), strict=True))
        x = slice(max(left, 0), min(left + columns, self._area[0]))
        y = slice(max(top, 0), min(top + rows, self._area[1]))
        # Materials have the numbers that the game gives them; the map is by x and y.
        there = self._world._mat_map[x, y].astype(np.int64)
        for i, j in np.argwhere(self._world._obj_map[x, y]):
            creature = self._world._objects[self._world._obj_map[x, y][i, j]]
            there[i, j] = _NUMBERS[creature.texture]
        seen[y.start - top : y.stop - top, x.start - left : x.stop - left] = there.T
        return seen

    def picture(self) -> NDArray[np.uint8]:
        """[64, 64, 3] what a human player sees: the map, and below it the inventory."""
        kept, self._world.random = self._world.random, self._of_pictures
        try:
            return np.asarray(self.render(), np.uint8)
        finally:
            self._world.random = kept

    def _obs(self) -> None:
        """Nothing: `step` would draw a picture every time."""
