"""What the recipe `online` derives from the first, random episodes of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest

import collector.builtin  # noqa: F401 - registers environments
from stepwell import Box, Discrete, EnvSpec
from tests.trainer.test_derived_settings import make_profile
from trainer.derive.dataset_profile import DatasetProfile
from trainer.derive.derived import Derived
from trainer.derive.history import MUCH_BETTER, Episode, gain_of_history
from trainer.derive.rules import derive_settings
from trainer.recipes import recipe


def made() -> DatasetProfile:
    return make_profile([np.ones(20)] * 50)


def settings(profile: Any, **decided: Any) -> dict[str, Derived]:
    config = recipe("online")
    found = derive_settings(profile, config, dict.fromkeys(decided, "flag"))
    return {one.key: one for one in found}


def played(env_id: str, steps: int = 2000) -> list[Episode]:
    """Random episodes, actions as one-hots."""
    env = gymnasium.make(env_id)
    env.action_space.seed(0)
    choices, found = np.eye(env.action_space.n), list[Episode]()  # type: ignore[attr-defined]
    while sum(len(e.rewards) for e in found) < steps:
        obs, rewards, actions, ended = [env.reset(seed=len(found))[0]], [], [], False
        while not ended:
            actions.append(choices[env.action_space.sample()])
            after, reward, terminated, truncated, _ = env.step(int(actions[-1].argmax()))
            ended = terminated or truncated
            obs.append(after)
            rewards.append(float(reward))
        found.append(Episode(np.array(obs, float), np.array(actions), np.array(rewards)))
    return found


def repeated(lag: int, episodes: int = 40, steps: int = 50) -> list[Episode]:
    """A reward for the choice that was shown `lag` steps ago."""
    rng, eye = np.random.default_rng(0), np.eye(4)
    found = []
    for _ in range(episodes):
        shown, chosen = rng.integers(0, 4, steps + 1), rng.integers(0, 4, steps)
        right = np.roll(shown, lag)[:steps] == chosen
        right[:lag] = False
        found.append(Episode(eye[shown], eye[chosen], right.astype(float)))
    return found


@pytest.mark.parametrize(
    ("episodes", "needed"),
    [
        (lambda: played("CartPole-v1"), False),
        (lambda: played("stepwell/CartPolePosition-v0"), True),
        (lambda: repeated(0), False),
        (lambda: repeated(3), True),
    ],
    ids=["CartPole", "CartPole without velocities", "shown now", "shown three steps ago"],
)
def test_whether_one_observation_shows_the_state_is_measured(episodes: Any, needed: bool) -> None:
    assert (gain_of_history(episodes()) >= MUCH_BETTER) is needed


def test_too_few_episodes_tell_nothing() -> None:
    assert gain_of_history(repeated(3, episodes=1)) == 0.0
    assert gain_of_history(repeated(3, episodes=8)) == 0.0


def test_a_network_without_memory_where_one_observation_shows_the_state() -> None:
    found = settings(replace(made(), history_gain=0.0))
    assert found["agent.trajectory_encoder.kind"].value == "identity"
    assert found["data.batch"].value * found["data.window"].value == pytest.approx(512, rel=0.1)


def test_collectors_of_cheap_steps_go_on_unless_the_user_sets_a_ratio() -> None:
    lowest, ratio = "data.ratio.min_updates_per_step", "data.ratio.updates_per_step"
    seen = replace(made(), history_gain=0.0)
    free = settings(seen)
    assert 0 < free[lowest].value < free[ratio].value
    assert lowest not in settings(seen, **{ratio: 0.25}), "whose value stays"


def test_the_recipe_as_it_is_where_it_does_not() -> None:
    for profile in (
        replace(made(), history_gain=0.5),
        replace(made(), partially_observable=True),
    ):
        found = settings(profile)
        assert [*found] == ["agent.trajectory_encoder.kind"]
        assert found["agent.trajectory_encoder.kind"].value == "transformer"


def test_the_memory_that_is_asked_for_wins() -> None:
    """Whatever was measured."""
    seen = replace(made(), history_gain=0.0)
    for memory, kind in (("gru", "gru"), ("transformer", "transformer"), ("none", "identity")):
        config = recipe("online").replace(memory=memory)
        for profile in (seen, replace(seen, history_gain=0.5)):
            found = {one.key: one.value for one in derive_settings(profile, config)}
            assert found["agent.trajectory_encoder.kind"] == kind


def test_choices_learn_with_one_discount_and_smaller_steps_where_rewards_are_rare() -> None:
    """Continuous actions as the recipe says."""
    rate, discounts = "optimizer.learning_rate", "agent.losses.auxiliary_gammas"
    choices = make_profile([np.ones(20)] * 50, spec=EnvSpec.of(Box((3,)), Discrete(2)))
    often, rare = (replace(choices, informative=x, terminated=0.0) for x in (0.5, 0.001))
    usual = recipe("online").optimizer.learning_rate
    assert settings(rare)[rate].value < settings(often)[rate].value < usual
    assert settings(often)[discounts].value == ()
    assert not {rate, discounts} & settings(made()).keys()


def test_rare_rewards_and_ends_need_returns_of_many_steps() -> None:
    """As in Acrobot and MountainCar: -1 in each step, and hardly an end."""
    often = replace(made(), informative=0.5)
    rare = replace(made(), informative=0.001, terminated=0.0)
    ends = replace(rare, terminated=1.0, trajectories=100, steps=2000)
    n_steps = [settings(p)["agent.losses.n_step"].value for p in (often, rare, ends)]
    assert n_steps == [3, 15, 3]
    for profile in (often, rare):
        found = settings(profile)
        assert found["data.window"].value > found["agent.losses.n_step"].value
