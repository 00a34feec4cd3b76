"""The possible goals of an instruction in Crafter, as words and as tokens.

    "collect wood"          [0, 12, -1]     do something; -1 pads a goal of two words
    "make stone pickaxe"    [3, 11, 17]
    "travel 10 25"          [5, 23, 26]     be within `tolerance` of (10, 25), in x and in y
    "stone 10 25"           [17, 23, 26]    place a stone within `tolerance` of (10, 25)

A goal is 3 integers, each the index of a word in `WORDS`; -1 is padding. Coordinates are multiples
of five, and each coordinate is a word.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from stepwell.errors import InvalidData

THINGS = {
    "collect": ("coal", "diamond", "drink", "iron", "sapling", "stone", "wood"),
    "defeat": ("skeleton", "zombie"),
    "eat": ("cow", "plant"),
    "make": tuple(
        f"{of} {tool}" for tool in ("pickaxe", "sword") for of in ("wood", "stone", "iron")
    ),
    "place": ("furnace", "plant", "stone", "table"),
}
"""Verb → its objects: the game's achievements, except waking up."""
CHANCES = {"collect": 0.3, "defeat": 0.1, "eat": 0.1, "make": 0.15, "place": 0.15, "travel": 0.2}
"""Probability of each kind of goal."""
TECH_TREE = (
    "collect wood",
    "place table",
    "make wood pickaxe",
    "make wood sword",
    "collect stone",
    "make stone pickaxe",
    "make stone sword",
    "collect coal",
    "place furnace",
    "collect iron",
    "make iron pickaxe",
    "make iron sword",
    "collect diamond",
)
"""An order in which these goals can be achieved: each entry's prerequisites come before it."""
SPACING, FARTHEST = 5, 60
WIDTH, NOTHING, COMPLETED = 3, -1, -3

_things = {word for things in THINGS.values() for thing in things for word in thing.split()}
WORDS = (*CHANCES, *sorted(_things), *map(str, range(0, FARTHEST + 1, SPACING)))
"""Word by its token. Fits in the default vocabulary of the trainer's token embedder."""

Goal = tuple[int, int, int]
Place = tuple[int, int]


def tokens(text: str) -> Goal:
    """Convert a goal in words to tokens. Raises `InvalidData` for an impossible goal."""
    words = text.replace("_", " ").split()
    verb, rest = (words[0], words[1:]) if words else ("", [])
    places = [word for word in rest if word.isdigit() and word in WORDS]
    located = verb in ("travel", *THINGS["place"]) and len(places) == len(rest) == 2
    if " ".join(rest) not in THINGS.get(verb, ()) and not located:
        raise InvalidData(
            "goal",
            expected="for instance 'collect wood', 'make iron sword' or, in steps of "
            f"{SPACING} up to {FARTHEST}, 'travel 10 25' or 'stone 10 25'",
            got=repr(text),
        )
    a, b, c, *_ = [*(WORDS.index(word) for word in words), NOTHING]
    return a, b, c


def located(what: str, place: Place) -> Goal:
    """The goal to travel to `place` (`what` is "travel") or to place the item `what` there.

    `place` is (x, y), both multiples of `SPACING`.
    """
    first = WORDS.index("0")
    return WORDS.index(what), first + place[0] // SPACING, first + place[1] // SPACING


def place_near(position: Sequence[int], tolerance: int) -> Place | None:
    """The place within `tolerance` of `position` (x, y), if any.

    There is at most one, because the tolerance is less than half of `SPACING`.
    """
    x, y = (SPACING * ((p + SPACING // 2) // SPACING) for p in position)
    far = max(abs(x - position[0]), abs(y - position[1]))
    return (x, y) if far <= tolerance and max(x, y) <= FARTHEST else None


def draw(
    count: int,
    rng: np.random.Generator,
    chances: Mapping[str, float],
    places: Sequence[Place],
    share_located: float = 0.0,
) -> list[Goal]:
    """Draw `count` different goals: first a kind with its probability, then a goal of that kind.

    `share_located` is the fraction of the "place" goals that also specify where.
    """
    kinds = [kind for kind in chances if kind != "travel" or places]
    weights = np.array([chances[kind] for kind in kinds])
    found: list[Goal] = []
    while len(found) < count:
        kind = kinds[int(rng.choice(len(kinds), p=weights / weights.sum()))]
        what = "travel"
        if kind != "travel":
            what = THINGS[kind][int(rng.integers(len(THINGS[kind])))]
        if kind == "travel" or (kind == "place" and places and rng.random() < share_located):
            goal = located(what, places[int(rng.integers(len(places)))])
        else:
            goal = tokens(f"{kind} {what}")
        if goal not in found:
            found.append(goal)
    return found
