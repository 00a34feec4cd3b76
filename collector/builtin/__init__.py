"""Stepwell's environments and the generators of offline data that use them.

Importing this package registers the environments with gymnasium, so both of these work:
`import collector.builtin; gymnasium.make("stepwell/Recall-v0")` and, without the import,
`gymnasium.make("collector.builtin:stepwell/Recall-v0")`.
The generators are separate modules (`python -m collector.builtin --help`).
"""

import gymnasium

TMAZE_PASSIVE_ID = "stepwell/TMazePassive-v0"
RECALL_ID = "stepwell/Recall-v0"
MAZERUNNER_ID = "stepwell/MazeRunner-v0"
FIND_BLOCK_ID = "stepwell/FindBlock-v0"
CRAFTER_ID = "stepwell/Crafter-v0"
GRIDWORLD_ID = "stepwell/Gridworld-v0"
BANDIT_ID = "stepwell/Bandit-v0"
CARTPOLE_POSITION_ID = "stepwell/CartPolePosition-v0"
CARTPOLE_VELOCITY_ID = "stepwell/CartPoleVelocity-v0"
TMAZE_ACTIVE_ID = "stepwell/TMazeActive-v0"
META_FROZEN_LAKE_ID = "stepwell/MetaFrozenLake-v0"
DARK_KEY_DOOR_ID = "stepwell/DarkKeyDoor-v0"
PACKAGE_DELIVERY_ID = "stepwell/PackageDelivery-v0"
CHEETAH_VELOCITY_ID = "stepwell/HalfCheetahVelocity-v0"
FIND_BLOCK_IMAGE_ID = "stepwell/FindBlockImage-v0"
MAZE2D_MEDIUM_ID = "stepwell/Maze2dMedium-v0"
MAZE2D_LARGE_ID = "stepwell/Maze2dLarge-v0"
MODIFIED_ID = "stepwell/Modified-v0"
ATTEMPTS_ID = "stepwell/Attempts-v0"
MIXED_ID = "stepwell/Mixed-v0"
GYMNAX_ID = "stepwell/Gymnax-v0"
XLAND_MINIGRID_ID = "stepwell/XLandMiniGrid-v0"

# Entry points are strings, so that registering does not import unused environments.
_ENTRY_POINTS = {
    TMAZE_PASSIVE_ID: "collector.builtin.tmaze:TMazePassive",
    TMAZE_ACTIVE_ID: "collector.builtin.tmaze:TMazeActive",
    META_FROZEN_LAKE_ID: "collector.builtin.meta_frozen_lake:MetaFrozenLake",
    DARK_KEY_DOOR_ID: "collector.builtin.key_door:DarkKeyDoor",
    PACKAGE_DELIVERY_ID: "collector.builtin.package_delivery:PackageDelivery",
    CHEETAH_VELOCITY_ID: "collector.builtin.cheetah_velocity:HalfCheetahVelocity",
    RECALL_ID: "collector.builtin.recall:Recall",
    MAZERUNNER_ID: "collector.builtin.mazerunner:MazeRunner",
    FIND_BLOCK_ID: "collector.builtin.find_block:FindBlock",
    CRAFTER_ID: "collector.builtin.crafter.env:Crafter",
    GRIDWORLD_ID: "collector.builtin.gridworld:Gridworld",
    BANDIT_ID: "collector.builtin.bandit:Bandit",
    FIND_BLOCK_IMAGE_ID: "collector.builtin.find_block:FindBlockImage",
    MODIFIED_ID: "collector.builtin.modified:Modified",
    ATTEMPTS_ID: "collector.builtin.attempts:make_attempts",
    MIXED_ID: "collector.builtin.mixed:Mixed",
    XLAND_MINIGRID_ID: "collector.builtin.jax_envs:XLandMiniGrid",
}

# No time limit is registered: each of these environments ends its own episodes.
for _env_id, _entry_point in _ENTRY_POINTS.items():
    gymnasium.register(id=_env_id, entry_point=_entry_point)
gymnasium.register(
    id=GYMNAX_ID,
    entry_point="collector.builtin.jax_envs:Gymnax",
    vector_entry_point="collector.builtin.jax_envs:GymnaxVector",
)
for _env_id, _name in (
    (CARTPOLE_POSITION_ID, "CartPolePosition"),
    (CARTPOLE_VELOCITY_ID, "CartPoleVelocity"),
):
    gymnasium.register(
        id=_env_id, entry_point=f"collector.builtin.cartpole:{_name}", max_episode_steps=500
    )
for _env_id, _maze, _limit in ((MAZE2D_MEDIUM_ID, "Medium", 600), (MAZE2D_LARGE_ID, "Large", 800)):
    gymnasium.register(
        id=_env_id,
        entry_point="collector.builtin.maze2d:Maze2d",
        max_episode_steps=_limit,
        kwargs={"maze": _maze},
    )
