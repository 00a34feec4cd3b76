"""Environments that play another task in each episode: POPGym, BabyAI, Atari, Procgen, Meta-World.

    PopgymGames-v0      27 memory games with up to 30 actions                    stepwell[popgym]
    BabyAITasks-v0      tasks with one instruction of at most nine words         stepwell[minigrid]
    AtariGames-v0       games with all 18 actions, frames of 84 x 84 x 3         stepwell[atari]
    ProcgenGames-v0     games of 64 x 64 x 3, each episode a new level           procgen-mirror
    MetaWorldTasks-v0   reach-v3 or another task, ml10, ml45: each goal is new   metaworld

They are used by the files 03 and 07 to 10 beside this one. To see what they do:

    python examples/many_tasks.py BabyAITasks-v0

All tasks of an environment share one observation and one action space, so that one policy plays
them and one dataset has them. The column `env` of a trajectory is the task's name.
"""

import argparse
from collections.abc import Callable, Mapping

import gymnasium
import numpy as np

from collector.texts import BABYAI_WORDS, TextWords

MULTI_GAME_ATARI = (
    "Pong Boxing Breakout Gopher MsPacman ChopperCommand CrazyClimber BattleZone Qbert Seaquest"
)
PROCGEN_GAMES = (
    "bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper "
    "maze miner ninja plunder starpilot"
)
WITH_MEMORY = ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner")
"""Games of Procgen that have a variant of which little is in view."""
POPGYM_GAMES = (
    "Autoencode RepeatPrevious RepeatFirst CountRecall PositionOnlyCartPole VelocityOnlyCartpole "
    "NoisyPositionOnlyCartPole MultiarmedBandit HigherLower"
)
"""Those with one discrete action and a small observation, each Easy, Medium and Hard."""
HARDER_WORDS = ("Debug", "Seq", "Synth", "Boss", "Order", "Two", "Doors")
"""In the names of BabyAI's tasks with several instructions, or without an end."""


class ManyTasks(gymnasium.Env):
    """Each episode is one of `tasks`, made when it is first played. Consecutive seeds play all of
    them in turn, so that an evaluation is fair."""

    metadata = {"render_modes": [], "partially_observable": True}

    def __init__(self, tasks: Mapping[str, Callable[[], gymnasium.Env]]):
        self._make, self._made = tasks, {}
        self._env = self._task(next(iter(tasks)))
        self.observation_space = self._env.observation_space
        self.action_space = self._env.action_space

    def _task(self, name):
        if name not in self._made:
            self._made[name] = self._make[name]()
        return self._made[name]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        seed = int(self.np_random.integers(2**31)) if seed is None else seed
        name = [*self._make][seed % len(self._make)]
        self._env = self._task(name)
        obs, info = self._env.reset(seed=seed, options=options)
        return obs, {**info, "env_name": name}

    def step(self, action):
        return self._env.step(action)

    def close(self):
        for env in self._made.values():
            env.close()


class PaddedGame(gymnasium.Wrapper):
    """One game in the spaces of all: categories as one-hot numbers, padded with zeros. An action
    that the game does not have is a random one of those that it has; the last number of the
    observation says so (1: the action was the agent's)."""

    NUMBERS, ACTIONS = 26, 30

    def __init__(self, env):
        super().__init__(env)
        shape = (self.NUMBERS + 1,)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
        self.action_space = gymnasium.spaces.Discrete(self.ACTIONS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        obs, info = self.env.reset(seed=seed, options=options)
        return self._padded(obs, True), info

    def step(self, action):
        exists = bool(action < self.env.action_space.n)
        if not exists:
            action = self.np_random.integers(self.env.action_space.n)
        obs, reward, terminated, truncated, info = self.env.step(int(action))
        return self._padded(obs, exists), float(reward), terminated, truncated, info

    def _padded(self, obs, exists):
        flat = gymnasium.spaces.flatten(self.env.observation_space, obs)
        padded = np.zeros(self.NUMBERS + 1, np.float32)
        padded[: len(flat)], padded[-1] = flat, exists
        return padded


def popgym(games=POPGYM_GAMES, levels="Easy Medium Hard"):
    """`games`: as "RepeatFirst HigherLower"; `levels`: of Easy, Medium, Hard."""
    import popgym  # noqa: F401 - registers the games

    def make(name):
        return PaddedGame(gymnasium.make(f"popgym-{name}-v0", disable_env_checker=True))

    names = [f"{game}{level}" for game in games.split() for level in levels.split()]
    return ManyTasks({name: lambda name=name: make(name) for name in names})


def babyai(tasks="", max_words=9):
    """`tasks`: names as GoToLocal-v0, separated by spaces; none means all that fit."""
    import minigrid  # noqa: F401 - registers the tasks

    def make(name):
        env = gymnasium.make(f"BabyAI-{name}", disable_env_checker=True)
        return TextWords(env, sorted(BABYAI_WORDS), max_words)

    known = [i.removeprefix("BabyAI-") for i in gymnasium.registry if i.startswith("BabyAI-")]
    fit = [name for name in known if not any(word in name for word in HARDER_WORDS)]
    return ManyTasks({name: lambda name=name: make(name) for name in tasks.split() or fit})


class SmallFrames(gymnasium.ObservationWrapper):
    """Frames of any size as size x size x 3, each pixel the mean of the area it stands for."""

    def __init__(self, env, size):
        super().__init__(env)
        self._size = size
        self.observation_space = gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8)

    def observation(self, frame):
        import torch

        image = torch.from_numpy(frame).permute(2, 0, 1)[None].float()
        small = torch.nn.functional.interpolate(image, (self._size, self._size), mode="area")
        return small[0].permute(1, 2, 0).round().to(torch.uint8).numpy()


def atari(games=MULTI_GAME_ATARI, size=84, frameskip=5, sticky=0.25):
    """`games`: as "Pong Breakout". Rewards are not clipped, and a lost life ends nothing."""
    import ale_py

    gymnasium.register_envs(ale_py)

    def make(game):
        env = gymnasium.make(
            f"ALE/{game}-v5",
            frameskip=frameskip,
            repeat_action_probability=sticky,
            full_action_space=True,
            disable_env_checker=True,
        )
        return SmallFrames(env, size)

    return ManyTasks({game: lambda game=game: make(game) for game in games.split()})


class ProcgenLevel(gymnasium.Env):
    """A game of Procgen at one of its first `levels`, by the seed of the episode.

    Procgen begins the next episode by itself, so that nobody sees the last frame of one: it is the
    frame before. Its limit of 1,000 steps looks like any other end.
    """

    def __init__(self, game, distribution, levels, scale):
        self.observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(15)
        self._settings = {"env_name": game, "distribution_mode": distribution, "num_levels": 1}
        self._levels, self._scale, self._game, self._frame = levels, scale, None, None

    def reset(self, *, seed=None, options=None):
        from procgen import ProcgenGym3Env

        super().reset(seed=seed)
        seed = int(self.np_random.integers(2**31)) if seed is None else seed
        level = int(np.random.default_rng(seed).integers(self._levels))
        attempt = (options or {}).get("attempt", 0)  # what is random within a level differs
        moves = int(np.random.default_rng([seed, attempt]).integers(2**31))
        self.close()  # levels are settings of a game, not of its reset
        self._game = ProcgenGym3Env(num=1, start_level=level, rand_seed=moves, **self._settings)
        self._frame = self._game.observe()[1]["rgb"][0].copy()
        return self._frame, {"level": level}

    def step(self, action):
        self._game.act(np.array([action]))
        rewards, obs, first = self._game.observe()
        if not first[0]:
            self._frame = obs["rgb"][0].copy()
        complete = bool(self._game.get_info()[0]["prev_level_complete"]) and bool(first[0])
        reward = float(rewards[0]) * self._scale
        return self._frame, reward, bool(first[0]), False, {"success": complete}

    def close(self):
        if self._game is not None:
            self._game.close()
            self._game = None


def procgen(games=PROCGEN_GAMES, distribution="easy", levels=10_000):
    """`distribution`: easy, easy-rescaled (rewards of all games of one size), hard, or memory-hard
    (the variant with little in view of the games that have it, else hard)."""
    scales = {"coinrun": 100.0, "climber": 0.1} if distribution == "easy-rescaled" else {}

    def make(game):
        name = distribution.removesuffix("-rescaled")
        if name == "memory-hard":
            name = "memory" if game in WITH_MEMORY else "hard"
        return ProcgenLevel(game, name, levels, scales.get(game, 1.0))

    return ManyTasks({game: lambda game=game: make(game) for game in games.split()})


class RandomGoal(gymnasium.Wrapper):
    """A task of Meta-World with one of its `goals`, by the seed of the episode."""

    def __init__(self, env, goals):
        super().__init__(env)
        self._goals = goals

    def reset(self, *, seed=None, options=None):
        goal = np.random.default_rng(seed).integers(len(self._goals))
        self.env.set_task(self._goals[goal])
        return self.env.reset(seed=seed, options=options)


def metaworld(benchmark="reach-v3", split="train"):
    """`benchmark`: the name of a task, ml10 or ml45; `split`: train or test."""
    import metaworld

    many = {"ml10": metaworld.ML10, "ml45": metaworld.ML45}
    found = many[benchmark]() if benchmark in many else metaworld.ML1(benchmark)
    classes = getattr(found, f"{split}_classes")

    def make(name):
        goals = [goal for goal in getattr(found, f"{split}_tasks") if goal.env_name == name]
        return RandomGoal(classes[name](), goals)

    return ManyTasks({name: lambda name=name: make(name) for name in classes})


ENVIRONMENTS = {
    "PopgymGames-v0": popgym,
    "BabyAITasks-v0": babyai,
    "AtariGames-v0": atari,
    "ProcgenGames-v0": procgen,
    "MetaWorldTasks-v0": metaworld,
}
for _id, _make in ENVIRONMENTS.items():
    gymnasium.register(_id, _make)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("env", choices=ENVIRONMENTS)
    parser.add_argument("--episodes", type=int, default=3, help="(default: %(default)s)")
    args = parser.parse_args()
    env = gymnasium.make(args.env, disable_env_checker=True)
    print(f"observations: {env.observation_space}\nactions: {env.action_space}")
    for seed in range(args.episodes):
        obs, info = env.reset(seed=seed)
        env.action_space.seed(seed)
        total, steps, done = 0.0, 0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, steps, done = total + float(reward), steps + 1, terminated or truncated
        print(f"{info['env_name']}: {steps} random steps, return {total:.2f}")
