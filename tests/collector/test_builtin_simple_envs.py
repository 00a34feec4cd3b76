"""The small environments: gymnasium accepts them, the best policy is known, misuse is refused."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env

from collector.builtin import (
    BANDIT_ID,
    CARTPOLE_POSITION_ID,
    FIND_BLOCK_IMAGE_ID,
    GRIDWORLD_ID,
    MIXED_ID,
    MODIFIED_ID,
)
from collector.builtin.bandit import best_action, best_arm
from collector.builtin.find_block import SQUARE
from collector.builtin.generate_cartpole import expert_push
from collector.builtin.gridworld import DOWN, LEFT, RIGHT, UP
from collector.evaluate import evaluate_policy
from collector.policy_actor import RandomActor
from stepwell.errors import InvalidData

ENVS = [
    (GRIDWORLD_ID, {}),
    (GRIDWORLD_ID, {"size": 3, "limit": 4}),
    (BANDIT_ID, {}),
    (BANDIT_ID, {"continuous": True}),
]
OTHERS = [
    (CARTPOLE_POSITION_ID, {}),
    (FIND_BLOCK_IMAGE_ID, {"colours": 4}),
    (MODIFIED_ID, {"env": GRIDWORLD_ID, "size": 3, "reward_scale": 10.0}),
    (MODIFIED_ID, {"env": BANDIT_ID, "continuous": True, "constant_action": True}),
    (MIXED_ID, {"envs": [GRIDWORLD_ID, [GRIDWORLD_ID, {"size": 3}]]}),
]


@pytest.mark.parametrize(("env_id", "kwargs"), ENVS + OTHERS)
def test_gymnasiums_checker_has_no_objection(env_id: str, kwargs: dict[str, Any]) -> None:
    """check_env passes without a warning (a warning is an error in the tests)."""
    check_env(gymnasium.make(env_id, **kwargs).unwrapped)


@pytest.mark.parametrize(("env_id", "kwargs"), ENVS)
def test_a_step_after_the_end_is_an_error(env_id: str, kwargs: dict[str, Any]) -> None:
    """An action outside the space and a step after the end are errors."""
    env = gymnasium.make(env_id, disable_env_checker=True, **kwargs).unwrapped
    with pytest.raises(ResetNeeded):
        env.step(env.action_space.sample())
    env.reset(seed=0)
    with pytest.raises(InvalidAction):
        env.step(np.full(3, 9.0, np.float32))
    over = False
    while not over:
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        over = terminated or truncated
    with pytest.raises(ResetNeeded):
        env.step(env.action_space.sample())


@pytest.mark.parametrize("size", [2, 7])
def test_gridworld_shortest_path_earns_one(size: int) -> None:
    """Right to the last column, then down: reward 1 after the Manhattan distance to the corner."""
    env = gymnasium.make(GRIDWORLD_ID, size=size)
    starts = set()
    for seed in range(200):
        obs, _ = env.reset(seed=seed)
        cell = np.rint((obs + 1) / 2 * (size - 1)).astype(int)
        starts.add(tuple(cell.tolist()))
        for left in range(int(2 * (size - 1) - cell.sum()) - 1, -1, -1):
            obs, reward, terminated, truncated, info = env.step(RIGHT if obs[1] < 1 else DOWN)
            assert (reward, terminated, truncated) == (float(left == 0), left == 0, False)
        assert info == {"log/success": 1.0}
    assert len(starts) == size**2 - 1 or size == 7
    assert (size - 1, size - 1) not in starts


def test_gridworld_walls_and_the_limit() -> None:
    """A move into the wall stays; the episode is truncated after `limit` steps."""
    env = gymnasium.make(GRIDWORLD_ID, size=3, limit=5)
    env.reset(seed=0)
    ends = [env.step(action) for action in (UP, UP, LEFT, LEFT, UP)]
    assert ends[-1][0].tolist() == [-1.0, -1.0]
    assert [truncated for _, _, _, truncated, _ in ends] == [False] * 4 + [True]
    assert ends[-1][4] == {"log/success": 0.0}
    with pytest.raises(InvalidData, match="^limit; expected at least 4"):
        gymnasium.make(GRIDWORLD_ID, size=3, limit=3)


def _bandit_mean(continuous: bool, policy: Any) -> float:
    env = gymnasium.make(BANDIT_ID, continuous=continuous, disable_env_checker=True)
    rng = np.random.default_rng(0)
    return float(np.mean([env.step(policy(env.reset(seed=s)[0], rng))[1] for s in range(3000)]))


def test_bandit_best_policies_have_the_documented_means() -> None:
    """Best arm 0.8 and best action 1.0; random arms 0.32, random actions about 0.2."""
    assert _bandit_mean(False, lambda x, _: best_arm(x)) == pytest.approx(0.8, abs=0.03)
    assert _bandit_mean(False, lambda x, rng: rng.integers(5)) == pytest.approx(0.32, abs=0.03)
    assert _bandit_mean(True, lambda x, _: best_action(x)) == pytest.approx(1.0, abs=0.03)

    def uniform(_: Any, rng: np.random.Generator) -> Any:
        return rng.uniform(-1, 1, 2).astype(np.float32)

    assert _bandit_mean(True, uniform) == pytest.approx(0.2, abs=0.06)


def test_every_arm_is_the_best_for_some_context() -> None:
    """Each of the five arms is the best in at least 10% of the contexts."""
    contexts = np.random.default_rng(0).uniform(-1, 1, (2000, 4)).astype(np.float32)
    assert np.bincount([best_arm(x) for x in contexts], minlength=5).min() > 200


def _cartpole_steps(policy: Any, seed: int) -> int:
    """Number of steps that `policy(observation, previous observation)` keeps the pole up."""
    env = gymnasium.make(CARTPOLE_POSITION_ID)
    obs, _ = env.reset(seed=seed)
    before, steps, over = obs, 0, False
    while not over:
        action = policy(obs, before)
        before = obs
        obs, reward, terminated, truncated, _ = env.step(action)
        assert reward == 1.0
        steps, over = steps + 1, terminated or truncated
    return steps


def test_cartpole_position_needs_one_remembered_observation() -> None:
    """Velocities from the last two observations: 500 steps. Without them the pole falls early."""

    def remember(obs: Any, before: Any) -> int:
        velocity, angular_velocity = (obs - before) / 0.02
        return expert_push((obs[0], velocity, obs[1], angular_velocity))

    assert [_cartpole_steps(remember, seed) for seed in range(5)] == [500] * 5
    assert max(_cartpole_steps(lambda obs, _: int(obs[1] > 0), seed) for seed in range(5)) < 100


@pytest.mark.parametrize("colours", [2, 4])
def test_find_block_image_contains_the_mission(colours: int) -> None:
    """Touching the square with the colour of the first square earns 1 at every step."""
    env = gymnasium.make(FIND_BLOCK_IMAGE_ID, colours=colours, steps=3)
    missions = set()
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        terminated, total = False, 0.0
        while not terminated:
            mission = obs[0, 0]
            assert (obs[:, :SQUARE] == mission).all()
            missions.add(tuple(mission.tolist()))
            _, columns = np.nonzero((obs[:, SQUARE:] == mission).all(-1))
            (square,) = set(columns // SQUARE)
            obs, reward, terminated, _, info = env.step(np.int64(square))
            total += float(reward)
        assert (total, info["log/success"]) == (3.0, 1.0)
        assert not obs.any()  # no image of a next episode is black
    assert len(missions) == colours


def test_modified_ignores_the_last_action_and_scales_the_reward() -> None:
    """Two last components give the same step; the reward is that of the inner environment x 10."""
    env = gymnasium.make(MODIFIED_ID, env="Pendulum-v1", reward_scale=10.0, constant_action=True)
    inner = gymnasium.make("Pendulum-v1")
    assert env.action_space.shape == (2,)
    for last in (-1.0, 0.5):
        env.reset(seed=3)
        inner.reset(seed=3)
        obs, reward, *_ = env.step(np.array([1.5, last], np.float32))
        inner_obs, inner_reward, *_ = inner.step(np.array([1.5], np.float32))
        np.testing.assert_array_equal(obs, inner_obs)
        assert reward == 10 * float(inner_reward)


def test_modified_observes_in_other_units() -> None:
    """The behaviour sees the inner environment; the space has the same units as observations."""
    env = gymnasium.make(
        MODIFIED_ID, env="Pendulum-v1", hide=[2], observation_scale=1e-3, observation_shift=5.0
    )
    inner = gymnasium.make("Pendulum-v1")
    obs, _ = env.reset(seed=3)
    expected, _ = inner.reset(seed=3)
    np.testing.assert_allclose(obs, 5.0 + 1e-3 * expected[:2], rtol=1e-6)
    assert obs.dtype == np.float32
    assert env.observation_space.contains(obs)
    np.testing.assert_allclose(env.observation_space.high, 5.001)
    np.testing.assert_array_equal(env.unwrapped.full_observation, expected)
    for wrong, said in (
        ({"observation_scale": 0.0}, "^observation_scale; expected above 0"),
        ({"env": "FrozenLake-v1", "observation_shift": 1.0}, "^observation_shift; expected an e"),
    ):
        with pytest.raises(InvalidData, match=said):
            gymnasium.make(MODIFIED_ID, **{"env": "Pendulum-v1", **wrong})


LOUD = [MODIFIED_ID, {"env": "CartPole-v1", "reward_scale": 2.0}]


def test_mixed_plays_each_environment_and_scores_each() -> None:
    """By seed, so that an evaluation repeats; the trajectories say which one."""
    args = {"envs": ["CartPole-v1", LOUD], "weights": [1, 3]}
    runs = [
        evaluate_policy(RandomActor, MIXED_ID, range(60), env_kwargs=args, envs=n) for n in (1, 4)
    ]
    assert runs[0].to_json() == runs[1].to_json()
    played = [t.metadata.env for t in runs[0].trajectories]
    assert set(played) == {"CartPole-v1", MODIFIED_ID}
    assert 0.5 < played.count(MODIFIED_ID) / 60 < 0.95
    for trajectory in runs[0].trajectories:
        assert (trajectory.rewards == (2 if trajectory.metadata.env == MODIFIED_ID else 1)).all()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"envs": "CartPole-v1"}, "envs.*list"),
        ({"envs": []}, "envs.*list"),
        ({"envs": ["CartPole-v1", "Pendulum-v1"]}, "equal spaces.*Pendulum-v1 with"),
        ({"envs": ["CartPole-v1", LOUD], "weights": [1]}, "weights.*2 numbers"),
        ({"envs": ["CartPole-v1", LOUD], "weights": [0, 0]}, "weights"),
    ],
)
def test_what_cannot_be_mixed_is_refused(args: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidData, match=says):
        gymnasium.make(MIXED_ID, **args)
