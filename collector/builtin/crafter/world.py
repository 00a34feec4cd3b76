"""The game of the package `crafter`, modified to be deterministic for a given seed.

The original is not deterministic: it stores creatures in sets, which are ordered by memory address,
and rendering at night uses the random generator that moves the creatures. Here creatures are in
insertion order, and rendering has a separate generator. The seed and the actions therefore
determine the world and all events, with or without rendering.
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
"""Rows and columns of the visible part of the map, with the player in the centre."""
MOST = 9
"""Maximum count of any item."""
TILES = (
    "outside",
    *constants.materials,
    *(f"player-{way}" for way in ("left", "right", "up", "down", "sleep")),
    *("cow", "zombie", "skeleton", "plant", "plant-ripe"),
    *(f"arrow-{way}" for way in ("left", "right", "up", "down")),
)
"""Content of a map cell by its number; a creature or object hides the material below it."""
_NUMBERS = {name: number for number, name in enumerate(TILES)}
_laid_out: dict[tuple[int, ...], tuple[NDArray[np.uint8], list[tuple[type, Any]]]] = {}
"""Materials and creatures of the last world with a fixed world seed, by its size and seed."""


class InOrder(dict[Any, None]):
    """A set that is iterated in insertion order."""

    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]


class World(crafter.Env):  # type: ignore[misc]  # the package has no types
    """`crafter.Env` with a seed for each game and no time limit; x points right, y down."""

    def __init__(self, area: int) -> None:
        super().__init__(area=(area, area), length=0, seed=0)
        self._of_pictures = np.random.RandomState(0)

    def begin(self, seed: int, world_seed: int | None = None) -> None:
        """Start a new game. `seed` determines all randomness, except that `world_seed`, if given,
        determines the world."""
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
            self._world.random.seed(seed)  # shared by all creatures

    def _lay_out(self, world_seed: int) -> None:
        """Build the world of a seed. Generating it takes almost a second, so it is cached."""
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
        """Make one step. Returns its achievements and whether the player is dead."""
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
        """(x, y) of the cell that the player faces, where items are collected or placed."""
        x, y = np.add(self._player.pos, self._player.facing)
        return int(x), int(y)

    def walkable(self) -> NDArray[np.bool_]:
        """[area, area], indexed by x and y: whether the player can stand there, if no creature
        is there."""
        numbers = [self._world._mat_ids[name] for name in constants.walkable]
        return np.isin(self._world._mat_map, numbers)

    def inventory(self) -> NDArray[np.float32]:
        """[16] count of each item (health, food, …) divided by its maximum."""
        return np.array([self._player.inventory[name] / MOST for name in ITEMS], np.float32)

    def numbers(self) -> NDArray[np.float32]:
        """[21]: inventory; x and y divided by the world's size; facing in x and y; daylight."""
        place = np.divide(self._player.pos, self._area)
        rest = [*place, *self._player.facing, self._world.daylight]
        return np.concatenate([self.inventory(), np.array(rest, np.float32)])

    def tiles(self) -> NDArray[np.int64]:
        """[7, 9] content numbers of the visible cells, by row and column."""
        rows, columns = VIEW
        seen = np.full(VIEW, _NUMBERS["outside"], np.int64)
        left, top = (p - n // 2 for p, n in zip(self.position, (columns, rows), strict=True))
        x = slice(max(left, 0), min(left + columns, self._area[0]))
        y = slice(max(top, 0), min(top + rows, self._area[1]))
        # Material numbers are the game's own. The game's map is indexed by x and y.
        there = self._world._mat_map[x, y].astype(np.int64)
        for i, j in np.argwhere(self._world._obj_map[x, y]):
            creature = self._world._objects[self._world._obj_map[x, y][i, j]]
            there[i, j] = _NUMBERS[creature.texture]
        seen[y.start - top : y.stop - top, x.start - left : x.stop - left] = there.T
        return seen

    def picture(self) -> NDArray[np.uint8]:
        """[64, 64, 3] image for a human player: the map, and below it the inventory."""
        kept, self._world.random = self._world.random, self._of_pictures
        try:
            return np.asarray(self.render(), np.uint8)
        finally:
            self._world.random = kept

    def _obs(self) -> None:
        """Override, so that `step` does not render an image."""
