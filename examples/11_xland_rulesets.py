"""Write rulesets for XLand-MiniGrid: goals, objects in the room, rules that change them.

    python examples/11_xland_rulesets.py rulesets.bz2

Each ruleset has three objects. In half of them the goal is to pick up one that lies there; in the
others none is it: two of the three, put next to each other, turn into it. Which two, the agent
must find out: it is shown the goal, but no rule.
"""

import argparse

import numpy as np


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="is written, as a pickle; load only files that you trust")
    parser.add_argument("--rulesets", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    args = parser.parse_args()

    from xminigrid.benchmarks import save_bz2_pickle
    from xminigrid.core.constants import PICKABLE, TILES_REGISTRY, Colors
    from xminigrid.core.goals import AgentHoldGoal
    from xminigrid.core.rules import EmptyRule, TileNearRule

    rng = np.random.default_rng(args.seed)
    colors = (Colors.RED, Colors.GREEN, Colors.BLUE, Colors.PURPLE, Colors.YELLOW)
    objects = [TILES_REGISTRY[tile, color] for tile in np.asarray(PICKABLE) for color in colors]
    goals, rules, tiles = [], [], []
    for _ in range(args.rulesets):
        *there, made = (objects[i] for i in rng.choice(len(objects), 4, replace=False))
        must_be_made = rng.random() < 0.5
        rule = TileNearRule(there[0], there[1], made) if must_be_made else EmptyRule()
        goal = AgentHoldGoal(made if must_be_made else there[0])
        goals.append(np.asarray(goal.encode()))
        rules.append(np.asarray(rule.encode())[None])
        tiles.append(np.stack(rng.permutation([np.asarray(tile) for tile in there])))
    save_bz2_pickle(
        {
            "goals": np.stack(goals),
            "rules": np.stack(rules),
            "init_tiles": np.stack(tiles),
            "num_rules": np.array([int(rule.any()) for rule in rules], np.int32),
        },
        args.file,
    )
    print(f"{args.rulesets} rulesets in {args.file}")


if __name__ == "__main__":
    main()
