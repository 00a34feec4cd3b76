"""Crafter: what is asked can be done, what is seen is there, all chance is the seed's."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import crafter
import gymnasium
import numpy as np
import pytest
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env

from collector.builtin import CRAFTER_ID
from collector.builtin.crafter import goals as asked
from collector.builtin.crafter.env import Crafter
from collector.builtin.crafter.goals import CHANCES, FARTHEST, SPACING, THINGS, WORDS, tokens
from collector.builtin.crafter.world import ACTIONS, TILES
from collector.envs import EnvError
from collector.envs import make as make_by_name
from collector.interface import interface_of
from stepwell.errors import InvalidData

NOOP, LEFT, RIGHT, UP, DOWN, DO, SLEEP = range(7)
PLACE_TABLE, PLACE_PLANT = ACTIONS.index("place_table"), ACTIONS.index("place_plant")
MAKE_PICKAXE = ACTIONS.index("make_wood_pickaxe")


def make(**options: Any) -> Crafter:
    return gymnasium.make(CRAFTER_ID, disable_env_checker=True, **options).unwrapped


def meadow(**options: Any) -> Crafter:
    """A world of nothing but grass and the player, who looks down; nobody else ever comes."""
    env = make(area=24, world_seed=0, **options)
    env.reset(seed=0)
    game = env._world
    for creature in game._world.objects[1:]:
        game._world.remove(creature)
    game._world._mat_map[:] = game._world._mat_ids["grass"]
    game._balance_chunk = lambda chunk, creatures: None
    return env


def asks(env: Crafter, *plan: str) -> None:
    env.plan = [tokens(goal) for goal in plan]
    env._done = env._after = 0


def in_front(env: Crafter, material: str) -> None:
    x, y = env._world.position
    dx, dy = env._world._player.facing
    env._world._world[x + dx, y + dy] = material


def course(env: Crafter, steps: int, seed: int = 0) -> list[Any]:
    """Everything in the world after every step of random play, until it ends."""
    rng, found, over = np.random.default_rng(seed), [], False
    while not over and len(found) < steps:
        *_, terminated, truncated, _ = env.step(rng.integers(len(ACTIONS)))
        over, game = terminated or truncated, env._world._world
        creatures = [(type(o).__name__, *o.pos, o.health) for o in game.objects]
        found.append((hash(game._mat_map.tobytes()), creatures, env._world.numbers().tolist()))
    return found


@pytest.mark.parametrize("view", ["textures", "crop", "render"])
def test_gymnasium_has_nothing_to_object_to(view):
    check_env(make(view=view, area=24, time_limit=50), skip_render_check=True)


# ----------------------------------------------------------------------------------- the world


def test_all_chance_comes_from_the_seed():
    """World, creatures and goals; not from memory addresses, as in the package left alone."""
    one, other = make(area=48), make(area=48)
    keep = [object() for _ in range(1000)]  # other addresses
    courses = []
    for seed in (5, 6):
        a, b = (env.reset(seed=seed)[0] for env in (one, other))
        assert all(np.array_equal(a[key], b[key]) for key in a) and one.plan == other.plan
        courses.append(course(one, 150))
        assert courses[-1] == course(other, 150) and len(courses[-1]) > 60
    assert courses[0] != courses[1] and keep


def test_looking_changes_nothing_not_even_at_night():
    """The noise of a picture of the night comes from another generator than the creatures' moves.

    Asleep from step 150 to 260, the darkest time is seen.
    """
    courses = []
    for view in ("textures", "render"):
        env = make(view=view, area=24, world_seed=1)
        env.reset(seed=2)
        dark = []
        for _ in range(240):
            obs, *_, over, _, _ = env.step(np.int64(NOOP))
            game = env._world._world
            dark.append(game.daylight)
            courses.append((view, [(type(o).__name__, *o.pos) for o in game.objects]))
            if over:
                break
        assert min(dark) < 0.05
    half = len(courses) // 2
    assert [c for _, c in courses[:half]] == [c for _, c in courses[half:]]


def test_one_world_for_all_episodes():
    """With world_seed; made once and then laid out anew, it is the same to the last creature."""
    env = make(area=24, world_seed=3)
    starts, plans, courses = [], [], []
    for seed in (0, 1, 0):
        env.reset(seed=seed)
        game = env._world._world
        starts.append([(type(o).__name__, *o.pos) for o in game.objects] + game._mat_map.tolist())
        plans.append(env.plan)
        courses.append(course(env, 40))
    assert starts[0] == starts[1] == starts[2] and len(starts[0]) > 24
    assert plans[0] == plans[2] != plans[1] and courses[0] == courses[2] != courses[1]
    other = make(area=24, world_seed=4)
    other.reset(seed=0)
    assert other._world._world._mat_map.tolist() != starts[0][-24:]
    env.reset(seed=0)  # not the other one's world
    assert env._world._world._mat_map.tolist() == starts[0][-24:]


def test_the_map_shows_what_is_around():
    """By rows and columns, creatures before the ground, and what lies outside of the world."""
    env = meadow()
    game, (x, y) = env._world._world, env._world.position
    assert [TILES[n] for n in game._mat_ids.values()] == ["outside", *crafter.constants.materials]
    game[x + 4, y - 3], game[x - 4, y + 3] = "water", "diamond"
    game.add(crafter.objects.Cow(game, (x - 1, y + 2)))
    obs, *_ = env.step(np.int64(NOOP))
    cow = next(o for o in game.objects if isinstance(o, crafter.objects.Cow)).pos
    seen = np.array(TILES)[obs["map"].reshape(7, 9)]
    expected = np.full((7, 9), "grass", dtype=seen.dtype)
    expected[0, 8], expected[6, 0], expected[3, 4] = "water", "diamond", "player-down"
    expected[cow[1] - y + 3, cow[0] - x + 4] = "cow"
    assert seen.tolist() == expected.tolist()
    game.move(env._world._player, (0, 23))
    obs, *_ = env.step(np.int64(LEFT))
    seen = np.array(TILES)[obs["map"].reshape(7, 9)]
    assert (seen[4:] == "outside").all() and (seen[:, :4] == "outside").all()
    assert seen[3, 4] == "player-left" and (seen[:3, 4:] == "grass").all()


def test_numbers_and_pictures():
    """Items as shares of nine; place, facing, daylight. The picture has the tiles at the top."""
    env = meadow()
    env._world._player.inventory["wood"] = 3
    obs, *_ = env.step(np.int64(RIGHT))
    items = dict(zip(crafter.constants.items, obs["numbers"], strict=False))
    assert items["health"] == 1.0 and items["wood"] == pytest.approx(1 / 3) and items["coal"] == 0
    assert obs["numbers"][16:] == pytest.approx([13 / 24, 0.5, 1, 0, env._world._world.daylight])
    pictures = {}
    for view in ("crop", "render"):
        pictures[view], _ = make(view=view, area=24, world_seed=0).reset(seed=0)
    assert np.array_equal(pictures["crop"]["image"], pictures["render"]["image"][:48])
    assert pictures["crop"]["inventory"].tolist() == [1.0] * 4 + [0.0] * 12
    assert pictures["render"]["image"][49:].any() and pictures["render"]["image"].std() > 10


# ------------------------------------------------------------------------------------ the goals


def test_every_achievement_but_waking_up_can_be_asked():
    named = {f"{verb} {thing}" for verb, things in THINGS.items() for thing in things}
    there = {name.replace("_", " ") for name in crafter.constants.achievements}
    assert named == there - {"wake up"} and set(asked.TECH_TREE) <= named
    spelt = {tokens(goal) for goal in named} | {tokens("travel 0 60"), tokens("travel 60 0")}
    assert len(spelt) == len(named) + 2
    assert [WORDS[t] for t in tokens("make stone pickaxe")] == ["make", "stone", "pickaxe"]
    assert tokens("place_table")[2] == -1 and len(set(WORDS)) == len(WORDS) == 34


@pytest.mark.parametrize("goal", ["", "wood", "collect table", "travel 5", "travel 3 5", "eat"])
def test_what_cannot_be_asked_is_refused(goal):
    with pytest.raises(InvalidData, match="goal; expected for instance 'collect wood'"):
        tokens(goal)


def test_places_tile_the_world():
    """With the tolerance of 2 everybody is at one place, with less not everybody is."""
    for tolerance, share in ((2, 1.0), (1, 9 / 25), (0, 1 / 25)):
        near = {(x, y): asked.place_near((x, y), tolerance) for x in range(60) for y in range(60)}
        assert np.mean([place is not None for place in near.values()]) == pytest.approx(share)
        for (x, y), place in near.items():
            if place is not None:
                assert max(abs(place[0] - x), abs(place[1] - y)) <= tolerance
                assert place[0] % SPACING == place[1] % SPACING == 0 and max(place) <= FARTHEST
    assert asked.place_near((62, 0), 2) == (60, 0) and asked.place_near((63, 0), 2) is None


def test_goals_are_drawn_by_their_chances_and_none_twice():
    rng = np.random.default_rng(0)
    places = [(5, 5), (10, 60), (15, 0)]
    first: Counter[str] = Counter()
    for _ in range(4000):
        found = asked.draw(3, rng, CHANCES, places)
        assert len(set(found)) == 3
        first[WORDS[found[0][0]]] += 1
    for kind, chance in CHANCES.items():
        assert first[kind] / 4000 == pytest.approx(chance, abs=0.03), kind
    assert {WORDS[g[0]] for _ in range(200) for g in asked.draw(2, rng, CHANCES, [])} == set(THINGS)


def test_nobody_is_sent_to_where_they_are_or_where_nobody_can_be():
    env = make(area=32, world_seed=0, min_goals=5)
    env.reset(seed=0)
    x, y = env._world.position
    free = env._world.walkable()
    sent = set()
    for _ in range(300):
        for goal in env._draw():
            if WORDS[goal[0]] == "travel":
                sent.add(tuple(int(WORDS[t]) for t in goal[1:]))
    assert len(sent) > 15 and asked.place_near((x, y), 2) not in sent
    assert all(free[max(a - 2, 0) : a + 3, max(b - 2, 0) : b + 3].any() for a, b in sent)


def test_only_the_active_goal_pays_and_done_ones_are_marked():
    """Collect, place, make and travel, in their order; what is done too early counts nothing."""
    env = meadow(max_goals=4)
    wood, table = "collect wood", "place table"
    x, y = env._world.position
    asks(env, wood, table, "make wood pickaxe", f"travel {x + 3} {y - 2}")
    assert (x + 3) % SPACING == (y - 2) % SPACING == 0
    game = env._world._player
    in_front(env, "tree")
    obs, reward, *_ = env.step(np.int64(DO))
    here = tokens(f"travel {SPACING * round(x / SPACING)} {SPACING * round(y / SPACING)}")
    assert obs["achieved"].tolist() == [list(here), list(tokens(wood)), [-1] * 3]
    assert reward == 1.0
    assert obs["goals"].tolist()[0] == [-3] * 3 and obs["goals"][1].tolist() == list(tokens(table))
    assert game.inventory["wood"] == 1  # the tree has become grass: nothing more to collect
    game.inventory["wood"] = 9
    game.inventory["sapling"] = 1
    _, reward, *_ = env.step(np.int64(PLACE_PLANT))
    assert reward == 0.0 and game.achievements["place_plant"] == 1
    obs, reward, *_ = env.step(np.int64(LEFT))
    assert reward == 0.0 and obs["achieved"].tolist() == [list(here), [-1] * 3, [-1] * 3]
    rewards = [env.step(np.int64(a))[1] for a in (PLACE_TABLE, MAKE_PICKAXE, MAKE_PICKAXE)]
    assert rewards == [1.0, 1.0, 0.0] and game.inventory["wood_pickaxe"] == 2
    rewards = [env.step(np.int64(RIGHT))[1] for _ in range(2)]
    assert rewards == [0.0, 1.0] and env._world.position[0] == x + 1 and env.active is None


def test_things_can_be_asked_to_be_placed_somewhere():
    """The place is that of the thing: here it lies beyond the tile on which one stands."""
    env = meadow(max_goals=2, time_limit=20)
    x, y = env._world.position
    assert (x, y) == (12, 12) and env._world.target == (12, 13)
    asks(env, "plant 10 10", "plant 10 15")
    env._world._player.inventory["sapling"] = 3
    obs, reward, *_ = env.step(np.int64(PLACE_PLANT))  # at (12, 13)
    spelt = ("travel 10 10", "place plant", "plant 10 15")
    assert obs["achieved"].tolist() == [list(tokens(goal)) for goal in spelt] and reward == 0.0
    env.step(np.int64(UP))
    rewards = [env.step(np.int64(a))[1] for a in (PLACE_PLANT, DOWN, DOWN, DOWN, PLACE_PLANT)]
    assert rewards == [1.0, 0.0, 0.0, 0.0, 0.0]  # (12, 13) is taken
    env.step(np.int64(RIGHT))
    assert env.step(np.int64(PLACE_PLANT))[1] == 0.0  # at (14, 12)
    wanted = make(area=24, world_seed=0, located=1.0, max_goals=5)
    kinds = set()
    for seed in range(40):
        wanted.reset(seed=seed)
        kinds |= {WORDS[goal[0]] for goal in wanted.plan}
    assert "place" not in kinds and kinds >= {"furnace", "plant", "stone", "table", "travel"}


@pytest.mark.parametrize(("deed", "creature"), [("defeat zombie", "Zombie"), ("eat cow", "Cow")])
def test_creatures_can_be_defeated_and_eaten(deed, creature):
    env = meadow(max_goals=1, time_limit=20)
    asks(env, deed)
    game, player = env._world._world, env._world._player
    kind = getattr(crafter.objects, creature)
    there = player.pos + player.facing
    game.add(kind(game, there, player) if creature == "Zombie" else kind(game, there))
    game.objects[-1].move = lambda way: None
    earned = [env.step(np.int64(DO))[1] for _ in range(5)]
    assert sum(earned) == 1.0 and earned.index(1.0) == (4 if creature == "Zombie" else 2)


def test_an_episode_ends_with_the_last_goal_with_death_and_with_time():
    """Terminated two steps after the goal, or by death; truncated by the clock, but not if done."""
    env = meadow(max_goals=1, time_limit=6)
    ends = []
    for scene in ("goal", "death", "time", "goal at the end", "goal and death"):
        env.reset(seed=0)
        asks(env, "collect drink")
        env._world._world._mat_map[:] = env._world._world._mat_ids["grass"]
        steps, over = 0, False
        while not over:
            steps += 1
            if scene in ("goal", "goal and death") or (scene == "goal at the end" and steps == 6):
                in_front(env, "water")
            if "death" in scene and steps == 3:
                env._world._player.health = 0
            _, _, terminated, truncated, info = env.step(np.int64(DO))
            over = terminated or truncated
        ends.append((steps, terminated, truncated, *info.values()))
        assert list(info) == ["log/success", "log/goals", "log/died"]
        with pytest.raises(ResetNeeded, match="call reset"):
            env.step(np.int64(NOOP))
    assert ends == [
        (3, True, False, 1.0, 1.0, 0.0),
        (3, True, False, 0.0, 0.0, 1.0),
        (6, False, True, 0.0, 0.0, 0.0),
        (6, True, False, 1.0, 1.0, 0.0),
        (3, True, False, 1.0, 1.0, 1.0),
    ]
    env.reset()
    with pytest.raises(InvalidAction, match="expected a member of Discrete"):
        env.step(np.int64(17))


def test_goals_can_be_given():
    """Some to draw from, which alone count as achieved; a whole instruction; the tech tree's."""
    few = ("collect sapling", "travel 10 10", "eat cow")
    env = make(area=24, world_seed=0, among=few, min_goals=2, max_goals=2)
    plans = {(env.reset(seed=seed), tuple(env.plan))[1] for seed in range(60)}
    pairs = {(tokens(a), tokens(b)) for a in few for b in few if a != b}
    assert plans == pairs
    achieved = {tuple(g) for seed in range(8) for g in _achieved(env, seed)} - {(-1,) * 3}
    assert achieved and achieved <= set(map(tokens, few))
    env = make(area=24, world_seed=0, instruction=("place table", "place table"), max_goals=3)
    obs, _ = env.reset(seed=0)
    table = list(tokens("place table"))
    assert obs["goals"].tolist() == [[-1] * 3, table, table]
    env = make(area=24, world_seed=0, tech_tree=1.0, min_goals=3, max_goals=3)
    tree = [tokens(goal) for goal in asked.TECH_TREE]
    starts = set()
    for seed in range(60):
        env.reset(seed=seed)
        starts.add(tree.index(env.plan[0]))
        assert env.plan == tree[tree.index(env.plan[0]) :][:3]
    assert starts == set(range(11))


def _achieved(env: Crafter, seed: int) -> list[list[int]]:
    """Everything that random play achieves in 60 steps."""
    env.reset(seed=seed)
    rng = np.random.default_rng(seed)
    rows = [env.step(rng.integers(17))[0]["achieved"].tolist() for _ in range(60)]
    return [goal for row in rows for goal in row]


def test_a_hidden_plan_shows_the_active_goal_alone():
    env = meadow(max_goals=3, hide_plan=True)
    asks(env, "collect drink", "place plant")
    in_front(env, "water")
    obs, *_ = env.step(np.int64(DO))
    none = [-1] * 3
    assert obs["goals"].tolist() == [none, none, list(tokens("place plant"))]


def test_what_was_achieved_is_recorded_for_relabeling_and_seen_by_nobody():
    spec = interface_of(make(), CRAFTER_ID).spec
    assert spec.roles == {"achieved": "relabel"}
    assert spec.observations["map"].shape == (63,) and spec.actions["action"].n == 17


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"view": "pixels"}, "view"),
        ({"min_goals": 0}, "min_goals, max_goals"),
        ({"min_goals": 4, "max_goals": 3}, "min_goals, max_goals"),
        ({"max_goals": 14}, "min_goals, max_goals"),
        ({"among": ["eat cow"]}, "min_goals, max_goals"),
        ({"among": ["eat cow"], "max_goals": 1, "instruction": ["eat cow"]}, "among"),
        ({"instruction": ["eat cow"] * 6}, "max_goals"),
        ({"instruction": ["eat cow"], "tech_tree": 0.5}, "tech_tree"),
        ({"tech_tree": 1.5}, "tech_tree"),
        ({"located": -0.5}, "located"),
        ({"among": ["eat cow", "stone 0 0"], "max_goals": 2, "located": 0.5}, "located"),
        ({"tolerance": 3}, "tolerance"),
        ({"time_limit": 0}, "time_limit"),
        ({"steps_after": -1}, "steps_after"),
        ({"area": 8}, "area"),
        ({"among": ["eat sand"]}, "goal"),
    ],
)
def test_impossible_settings_are_refused_by_name(options, name):
    with pytest.raises(InvalidData, match=f"^{name}; expected"):
        make(**options)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    """And registering, and all other environments, need nothing of it."""
    import collector.builtin.crafter as package

    monkeypatch.setitem(sys.modules, "crafter", None)
    monkeypatch.delitem(sys.modules, "collector.builtin.crafter.world")
    monkeypatch.delattr(package, "world")
    with pytest.raises(EnvError, match=r"not installed: .*pip install 'stepwell\[crafter\]'$"):
        make_by_name(CRAFTER_ID)
    make_by_name("stepwell/MazeRunner-v0")


def test_a_video_shows_what_a_human_player_sees() -> None:
    """And drawing it changes nothing."""
    first, second = (
        gymnasium.make(CRAFTER_ID, area=16, time_limit=50, render_mode=mode)
        for mode in ("rgb_array", None)
    )
    seen = [env.reset(seed=2)[0] for env in (first, second)]
    for action in (1, 1, 3, 5, 0):
        assert np.asarray(first.render()).shape == (384, 384, 3) and second.render() is None
        seen = [env.step(action)[0] for env in (first, second)]
    assert all(np.array_equal(seen[0][key], seen[1][key]) for key in seen[0])
