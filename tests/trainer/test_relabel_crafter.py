"""Relabeling and Crafter together: what it says is what the world would say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from amago_model.config import Spaces
from amago_model.encoders.timestep import TimestepEncoder
from amago_model.policy_file import load_policy
from benchmarks.relabel import random_play
from collector.builtin import CRAFTER_ID
from collector.builtin.crafter.goals import TECH_TREE, WORDS
from stepwell import Trajectory
from tests.forks import Fork
from trainer.data.relabel import CrafterGoals, Episode, Relabeler, make_relabelers
from trainer.recipes import recipe

SMALL = {"area": 24, "time_limit": 70, "located": 0.5}
EPISODES = 24


def episode_of(t: Trajectory) -> Episode:
    return Episode(
        obs=t.obs,
        action=t.actions["action"],
        reward=t.rewards,
        terminated=t.terminated,
        truncated=t.truncated,
        id=t.id,
    )


@pytest.fixture(scope="module")
def played() -> dict[str, list[Trajectory]]:
    """Random play of episodes that are given one world, and of such that have a world each."""
    one, each = {**SMALL, "world_seed": 3}, SMALL
    return {
        "one": random_play(EPISODES, 5, one, CRAFTER_ID)[1],
        "each": random_play(EPISODES, 5, each, CRAFTER_ID)[1],
    }


def relabeled(
    found: list[Trajectory], words: tuple[str, ...]
) -> Iterator[tuple[int, Trajectory, Episode]]:
    """Number, trajectory and relabeled episode of each, by the words in turn."""
    ready: list[Relabeler] = [
        relabeler.fit(map(episode_of, found)) for relabeler in make_relabelers(words)
    ]
    for index, t in enumerate(found):
        rng = np.random.default_rng(index)
        yield index, t, ready[index % len(ready)](episode_of(t), rng)


@pytest.mark.parametrize("worlds", ["one", "each"])
def test_a_relabeled_episode_replays_in_the_world(played, worlds):
    """The real environment, given the new goals and the recorded actions, records the same: what is
    seen, what is paid, and where and how it ends. Deaths and time limits are among the ends."""
    env = gymnasium.make(CRAFTER_ID, **SMALL, **({"world_seed": 3} if worlds == "one" else {}))
    env = env.unwrapped
    swapped, ended, paid = 0, 0, 0.0
    words = ("crafter", "crafter:strategy=all", "crafter:strategy=all,rarity=none")
    for index, t, new in relabeled(played[worlds], words):
        swapped, ended, paid = (
            swapped + new.goals_replaced,
            ended + (len(new) < len(t)),
            paid + sum(new.reward),
        )
        env.reset(seed=5 * EPISODES + index)
        env.plan = [tuple(g) for g in new.obs["goals"][0].tolist() if g != [-1, -1, -1]]
        env._done = 0
        for step in range(len(new)):
            obs, reward, terminated, truncated, _ = env.step(new.action[step])
            for key, value in obs.items():
                assert np.array_equal(value, new.obs[key][step + 1]), key
            assert reward == new.reward[step]
            last = step == len(new) - 1
            assert (terminated, truncated) == (last and new.terminated, last and new.truncated)
    assert swapped > EPISODES and ended > 3 and paid > EPISODES


def test_a_hidden_plan_replays_too(played):
    """Data that shows the whole plan becomes what the environment with `hide_plan` records."""
    env = gymnasium.make(CRAFTER_ID, **SMALL, world_seed=3, hide_plan=True).unwrapped
    words = ("crafter:strategy=all,hide_plan=true",)
    plain = relabeled(played["one"], ("crafter:strategy=all",))
    for (index, _, new), (_, _, whole) in zip(relabeled(played["one"], words), plain, strict=True):
        env.reset(seed=5 * EPISODES + index)
        env.plan = [tuple(g) for g in whole.obs["goals"][0].tolist() if g != [-1, -1, -1]]
        for step in range(len(new)):
            obs, *_ = env.step(new.action[step])
            assert np.array_equal(obs["goals"], new.obs["goals"][step + 1])


def test_rare_deeds_are_preferred_to_being_somewhere(played):
    """By default; uniformly, most of what is swapped in is a place."""
    shares = {}
    for name, word in (("none", "crafter:strategy=all,rarity=none"), ("", "crafter:strategy=all")):
        verbs: list[str] = []
        for seed in range(5):
            (relabeler,) = make_relabelers([word])
            ready = relabeler.fit(map(episode_of, played["one"]))
            for t in played["one"]:
                new = ready(episode_of(t), np.random.default_rng(seed))
                before, after = ({tuple(g) for g in e.obs["goals"][0].tolist()} for e in (t, new))
                verbs += [WORDS[goal[0]] for goal in after - before]
        shares[name] = np.mean([verb != "travel" for verb in verbs])
    assert shares[""] > shares["none"] + 0.05, shares


def test_none_needs_no_other_field():
    """Rarity is the default, so `strategy=none` alone must not be called a contradiction."""
    (relabeler,) = make_relabelers(["crafter:strategy=none"])
    assert isinstance(relabeler, CrafterGoals) and relabeler.fit(iter(())) is relabeler


def test_the_recipe_reads_goals_as_words_and_the_map_as_places():
    spec, _ = random_play(1, 0, {"area": 24, "time_limit": 5}, CRAFTER_ID)
    config = recipe("crafter").agent.timestep_encoder
    encoder = TimestepEncoder(config, Spaces.of_spec(spec.to_json()))
    assert encoder.describe() == [
        f"goals: 15 tokens of {config.tokens.vocabulary}",
        "map: 63 x 27 categories",
        "numbers: 21 numbers",
    ]
    assert config.tokens.vocabulary >= len(WORDS) > 30 and len(TECH_TREE) == 13


@pytest.mark.parametrize(
    ("view", "flags"),
    [("textures", []), ("crop", ["--agent.timestep-encoder.vector-keys"])],
)
def test_a_run_learns_and_its_policy_plays(service, view, flags, tmp_path: Path, monkeypatch):
    """The whole way: collect at random, the recipe, evaluate; as the guide says for each view."""
    name = f"relabel-crafter-{view}"
    env: list[Any] = ["--env", f"collector.builtin:{CRAFTER_ID}", "--env-args", "area=24"]
    env += ["world_seed=3", "time_limit=30", f"view={view}", "--envs", "2"]
    commands = [
        [
            *("collector.main", *env, "--dataset", name, "--random", "--episodes", "6"),
            *("--outbox", str(tmp_path / "outbox")),
        ],
        [
            *("trainer.main", "crafter", "--dataset", name, "--run", name, "--updates", "2"),
            *("--data.cache", str(tmp_path / "cache"), "--output", str(tmp_path)),
            *("--device", "cpu", *flags),
        ],
        ["stepwell.cli", "evaluate", *env, "--policy", name, "--episodes", "2", "--no-upload"],
    ]
    monkeypatch.chdir(tmp_path)
    variables = {**os.environ, "STEPWELL_URL": service.url, "OMP_NUM_THREADS": "1"}
    for module, *words in commands:
        done = Fork(module, words, env=variables, output=tmp_path / "output")
        assert done.wait(300) == 0, done.said()
    (policy,) = (tmp_path / name / "policies").glob("*")
    seen = {"textures": {"map", "numbers"}, "crop": {"image", "inventory"}}[view]
    assert set(load_policy(policy.read_bytes()).spaces.observations) == {"goals", *seen}
