"""FindBlock: an image and a sentence together say what to touch, and neither does alone."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env

from amago_model.config import Spaces
from collector.builtin import FIND_BLOCK_ID
from collector.builtin.find_block import COLOURS, SENTENCES, SQUARE, WORDS, FindBlock
from collector.envs import make
from collector.interface import interface_of
from stepwell.errors import InvalidData


def wanted(mission: Any) -> str:
    """The colour that a sentence names."""
    (colour,) = {WORDS[number] for number in mission if number} & set(COLOURS)
    return colour


def square_of(image: Any, colour: str) -> int:
    """The square that has a pixel of this colour."""
    _, columns = np.nonzero((image == COLOURS[colour]).all(-1))
    (square,) = set(columns // SQUARE)
    return int(square)


def score(env: gymnasium.Env[Any, Any], episodes: int, policy: Any) -> float:
    """Share of right touches of `policy(observation)`; every episode ends by itself."""
    successes = []
    for seed in range(episodes):
        obs, _ = env.reset(seed=seed)
        over, earned, steps = False, 0.0, 0
        while not over:
            obs, reward, over, cut, info = env.step(policy(obs))
            earned, steps = earned + float(reward), steps + 1
            assert not cut
        assert info["log/success"] == (earned == steps)
        successes.append(earned / steps)
    return float(np.mean(successes))


@pytest.mark.parametrize("colours", [2, 4])
def test_gymnasium_has_nothing_to_object_to(colours: int) -> None:
    """check_env passes, and its advice (a warning, so an error here) is empty."""
    check_env(gymnasium.make(FIND_BLOCK_ID, colours=colours).unwrapped)


@pytest.mark.parametrize("colours", [2, 3, 4])
def test_reading_and_looking_is_always_right(colours: int) -> None:
    env = FindBlock(colours=colours)
    assert score(env, 10, lambda o: square_of(o["image"], wanted(o["mission"]))) == 1.0


def test_either_alone_is_a_guess() -> None:
    env = FindBlock()
    looks_only = score(env, 200, lambda o: square_of(o["image"], "red"))
    reads_only = score(env, 200, lambda o: int(wanted(o["mission"]) == "green"))
    assert looks_only == pytest.approx(0.5, abs=0.08)
    assert reads_only == pytest.approx(0.5, abs=0.08)


def test_all_chance_comes_from_the_seed() -> None:
    one, other = FindBlock(), FindBlock()
    sentences = set()
    for seed in range(60):
        first, again = one.reset(seed=seed)[0], other.reset(seed=seed)[0]
        for key, value in first.items():
            np.testing.assert_array_equal(value, again[key])
        sentences.add(tuple(first["mission"].tolist()))
    assert len(sentences) == 2 * len(SENTENCES)


def test_an_agent_sees_an_image_tokens_and_a_number() -> None:
    """The spaces say so by themselves: nothing has to be set."""
    from amago_model import TimestepEncoderConfig
    from amago_model.encoders.modalities import modalities_of

    spaces = Spaces.of_spec(interface_of(make(FIND_BLOCK_ID), FIND_BLOCK_ID).spec.to_json())
    kinds = modalities_of(TimestepEncoderConfig(), spaces)
    assert kinds == {"image": "image", "left": "vector", "mission": "tokens"}


def test_misuse_is_refused_by_name() -> None:
    env = FindBlock(steps=1)
    env.reset(seed=0)
    with pytest.raises(InvalidAction, match="expected a member of Discrete"):
        env.step(np.int64(2))
    env.step(np.int64(0))
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(np.int64(0))
    for name, value in (("colours", 5), ("steps", 0)):
        with pytest.raises(InvalidData, match=f"^{name}; expected"):
            FindBlock(**{name: value})
