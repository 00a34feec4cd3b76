"""Crafter with instructions: an open world, and a sequence of goals to achieve in order.

    view        the 7 x 9 tiles around the player (map [63]) and numbers (inventory and others),
                or an image
    goals       [K, 3] tokens of the goals, in the last rows; -3 for a completed goal, -1 for none
    achieved    [3, 3] tokens of the goals that the last step achieved: reaching a place, doing
                something, placing something at a place; only for hindsight relabeling
    actions     the game's 17: move, do, sleep, place, make

Every episode has a new world and 1 to 5 goals, such as "collect wood", "travel 10 25" and "make
stone pickaxe". Only achieving the active goal is rewarded. After Crafter (Hafner, 2021) with the
instructions of AMAGO (Grigsby et al., ICLR 2024).
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from numpy.typing import NDArray

from collector.builtin.checks import require, require_step
from collector.builtin.crafter import goals as asked
from collector.builtin.crafter.goals import COMPLETED, NOTHING, WIDTH, Goal
from collector.builtin.drawing import RENDERS

View = Literal["textures", "crop", "render"]
Observation = dict[str, NDArray[Any]]
CROPPED = 48
"""Rows of the rendered image that show the map."""
ENLARGED = 6
"""Pixels of a frame of `render()` for each of the game's."""
LATEST = 2**31 - 1


class Crafter(gymnasium.Env[Observation, np.int64]):
    """Achieve the goals of the instruction in order, and survive.

    Observation: a Dict of `goals` int16 (max_goals, 3) and `achieved` int16 (3, 3), as in the
    module's docstring; goals.py defines the tokens. `achieved` has the role `relabel`. `view`
    selects the other observations:

    - `textures`: `map`, 63 categories, the visible tiles by rows; `numbers` float32 (21,): the
      counts of 16 items divided by 9, position (x, y), facing direction (x, y), daylight.
    - `crop`: `image` uint8 (48, 64, 3) of the visible tiles; `inventory` float32 (16,).
    - `render`: `image` uint8 (64, 64, 3) of tiles and inventory, as for a human player.

    The reward is 1 for a step that achieves the active goal; in the next step the next goal is
    active. The episode ends with `terminated` at the player's death and `steps_after` steps after
    the last goal. It ends after `time_limit` steps at the latest: with `terminated` if all goals
    were achieved, else with `truncated`. In the last step `info["log/success"]` is 1 if all goals
    were achieved, `info["log/goals"]` is the fraction of goals achieved, and `info["log/died"]` is
    1 if the player died; otherwise these are 0.

    Args:
        view: the observations besides goals and achieved goals.
        min_goals, max_goals: range of the number of goals in an episode.
        among: draw goals uniformly from these, ["collect wood", "travel 10 25"], instead of with
            the probabilities in goals.py; `achieved` then contains no other goals.
        instruction: fixed goals of every episode, in this order.
        located: fraction of the "place" goals that also specify where: "stone 10 25".
        tech_tree: fraction of the episodes whose goals are consecutive entries of TECH_TREE.
        tolerance: maximum distance, in x and in y, at which a place counts as reached: 0, 1 or 2.
        time_limit: maximum number of steps of an episode.
        steps_after: steps that an episode continues after its last goal (also a relabeler field).
        area: width and height of the world.
        world_seed: use the same world in all episodes; goals and creatures' moves still vary.
        hide_plan: show only the active goal, in the last row (as hide_plan of the relabelers).
    """

    metadata: dict[str, Any] = {**RENDERS, "roles": {"achieved": "relabel"}}

    def __init__(
        self,
        view: View = "textures",
        min_goals: int = 1,
        max_goals: int = 5,
        among: Sequence[str] = (),
        instruction: Sequence[str] = (),
        located: float = 0.0,
        tech_tree: float = 0.0,
        tolerance: int = 2,
        time_limit: int = 5000,
        steps_after: int = 2,
        area: int = 64,
        world_seed: int | None = None,
        hide_plan: bool = False,
        render_mode: str | None = None,
    ) -> None:
        try:
            from collector.builtin.crafter import world
        except ModuleNotFoundError as error:
            raise DependencyNotInstalled(f"{error}; pip install 'stepwell[crafter]'") from None
        require(view in get_args(View), "view", ", ".join(get_args(View)), view)
        for name, share in (("located", located), ("tech_tree", tech_tree)):
            require(0 <= share <= 1, name, "a share, 0 … 1", share)
        require(0 <= tolerance <= 2, "tolerance", "0, 1 or 2 tiles", tolerance)
        require(time_limit >= 1, "time_limit", "at least 1 step", time_limit)
        require(steps_after >= 0, "steps_after", "0 or more", steps_after)
        require(16 <= area <= 64, "area", "16 … 64 tiles", area)
        self.view, self.tolerance = view, tolerance
        self.located, self.tech_tree = located, tech_tree
        self.time_limit, self.steps_after = time_limit, steps_after
        self.area, self.world_seed, self.hide_plan = area, world_seed, hide_plan
        self.render_mode = render_mode
        self._choose_goals(min_goals, max_goals, among, instruction)
        self._world = world.World(area)
        views: dict[str, dict[str, spaces.Space[Any]]] = {
            "textures": {
                "map": spaces.MultiDiscrete([len(world.TILES)] * (world.VIEW[0] * world.VIEW[1])),
                "numbers": spaces.Box(-1.0, 1.0, (len(world.ITEMS) + 5,), np.float32),
            },
            "crop": {
                "image": spaces.Box(0, 255, (CROPPED, 64, 3), np.uint8),
                "inventory": spaces.Box(0.0, 1.0, (len(world.ITEMS),), np.float32),
            },
            "render": {"image": spaces.Box(0, 255, (64, 64, 3), np.uint8)},
        }
        words = len(asked.WORDS)
        self.observation_space = spaces.Dict(  # type: ignore[assignment]
            {
                **views[view],
                "goals": spaces.Box(COMPLETED, words - 1, (max_goals, WIDTH), np.int16),
                "achieved": spaces.Box(NOTHING, words - 1, (3, WIDTH), np.int16),
            }
        )
        self.action_space = spaces.Discrete(len(world.ACTIONS))
        self.plan: list[Goal] = []
        """This episode's goals, in order."""
        self._done = self._t = self._after = 0
        self._over = True

    def _choose_goals(
        self, least: int, most: int, among: Sequence[str], instruction: Sequence[str]
    ) -> None:
        require(not (among and instruction), "among", "none beside an instruction", among)
        self.min_goals, self.max_goals = least, most
        self.among = tuple(dict.fromkeys(map(asked.tokens, among)))
        self.instruction = tuple(map(asked.tokens, instruction))
        chosen = self.among or self.instruction
        for name in ("located", "tech_tree"):
            require(not (chosen and getattr(self, name)), name, "0 where goals are given", chosen)
        self._known = frozenset(chosen)
        top = len(self.among) if among else len(asked.TECH_TREE)
        require(
            1 <= least <= most <= top,
            "min_goals, max_goals",
            f"1 <= min_goals <= max_goals <= {top}",
            f"{least}, {most}",
        )
        require(
            len(instruction) <= most, "max_goals", "room for the instruction's goals", str(most)
        )

    @property
    def active(self) -> Goal | None:
        """The active goal; None when all goals are done."""
        return self.plan[self._done] if self._done < len(self.plan) else None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._world.begin(int(self.np_random.integers(LATEST)), self.world_seed)
        self.plan = self._draw()
        self._done = self._t = self._after = 0
        self._over = False
        return self._observe(self._achieved(set())), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        require_step(self, action, over=self._over)
        self._t += 1
        self._after += self.active is None
        events, dead = self._world.act(int(action))
        achieved = self._achieved(events)
        reward = float(self.active in achieved)
        self._done += int(reward)
        success, late = self.active is None, self._t >= self.time_limit
        terminated = dead or (success and (late or self._after >= self.steps_after))
        truncated = late and not terminated
        self._over = terminated or truncated
        info: dict[str, Any] = {}
        if self._over:
            share = self._done / len(self.plan)
            info = {"log/success": float(success), "log/goals": share, "log/died": float(dead)}
        return self._observe(achieved), reward, terminated, truncated, info

    def _draw(self) -> list[Goal]:
        """Draw the episode's goals. Travel goals exclude the player's current place and places
        that the player cannot stand on or near."""
        if self.instruction:
            return list(self.instruction)
        rng = self.np_random
        count = int(rng.integers(self.min_goals, self.max_goals + 1))
        if self.among:
            return [self.among[i] for i in rng.choice(len(self.among), count, replace=False)]
        if rng.random() < self.tech_tree:
            first = int(rng.integers(len(asked.TECH_TREE) - count + 1))
            return [asked.tokens(goal) for goal in asked.TECH_TREE[first : first + count]]
        here = asked.place_near(self._world.position, self.tolerance)
        free = np.argwhere(self._world.walkable())
        near = {asked.place_near(tile, self.tolerance) for tile in free.tolist()}
        places = sorted(place for place in near - {here} if place)
        return asked.draw(count, rng, asked.CHANCES, places, self.located)

    def _achieved(self, events: set[str]) -> list[Goal]:
        """The goals that this step achieved: reaching a place, the event of the step, and placing
        something at a place. At most three, because a step has one event besides waking up, which
        is not a possible goal."""
        found: list[Goal] = []
        if place := asked.place_near(self._world.position, self.tolerance):
            found.append(asked.located("travel", place))
        for event in events - {"wake_up"}:
            found.append(asked.tokens(event))
            verb, _, what = event.partition("_")
            there = asked.place_near(self._world.target, self.tolerance)
            if verb == "place" and there:
                found.append(asked.located(what, there))
        return [goal for goal in found if not self._known or goal in self._known]

    def render(self) -> NDArray[np.uint8] | None:
        """The map and the inventory as a human player sees them, with render_mode "rgb_array"."""
        if self.render_mode != "rgb_array":
            return None
        return self._world.picture().repeat(ENLARGED, 0).repeat(ENLARGED, 1)

    def _observe(self, achieved: list[Goal]) -> Observation:
        sets = np.full((3, WIDTH), NOTHING, np.int16)
        sets[: len(achieved)] = np.reshape(achieved, (-1, WIDTH))
        return {**self._seen(), "goals": self._shown(), "achieved": sets}

    def _seen(self) -> Observation:
        if self.view == "textures":
            return {"map": self._world.tiles().reshape(-1), "numbers": self._world.numbers()}
        image = self._world.picture()
        if self.view == "render":
            return {"image": image}
        return {"image": image[:CROPPED], "inventory": self._world.inventory()}

    def _shown(self) -> NDArray[np.int16]:
        slots = np.full((self.max_goals, WIDTH), NOTHING, np.int16)
        if not self.hide_plan:
            first = self.max_goals - len(self.plan)
            slots[first:] = self.plan
            slots[first : first + self._done] = COMPLETED
        elif self.active is not None:
            slots[-1] = self.active
        return slots
