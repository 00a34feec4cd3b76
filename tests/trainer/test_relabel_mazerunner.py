"""Relabeling and MazeRunner together: what it says is what the maze would say, and it helps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from amago_model.config import Spaces
from amago_model.encoders.timestep import TimestepEncoder
from amago_model.policy_file import load_policy
from benchmarks.relabel import outcome, random_play
from collector.builtin import MAZERUNNER_ID
from tests.forks import Fork
from trainer.data.relabel import Episode, make_relabelers
from trainer.recipes import recipe


def test_a_relabeled_episode_replays_in_the_maze():
    """The real environment, given the new goals and the recorded actions, records the same."""
    maze = {"size": 9, "min_goals": 1, "max_goals": 3, "time_limit": 40}
    _, found = random_play(40, 7, maze)
    env = gymnasium.make(MAZERUNNER_ID, **maze).unwrapped
    swapped = ended = 0
    for index, t in enumerate(found):
        (relabeler,) = make_relabelers([f"mazerunner:strategy={('some', 'all')[index % 2]}"])
        recorded = Episode(
            obs=t.obs,
            action=t.actions["action"],
            reward=t.rewards,
            terminated=t.terminated,
            truncated=t.truncated,
        )
        new = relabeler(recorded, np.random.default_rng(index))
        swapped, ended = swapped + new.goals_replaced, ended + (len(new) < len(t))
        obs, _ = env.reset(seed=7 * len(found) + index)
        env.goals = [tuple(g) for g in new.obs["goals"][0].tolist() if g != [-1, -1]]
        for step in range(len(new)):
            obs, reward, terminated, truncated, _ = env.step(new.action[step])
            for key, value in obs.items():
                assert np.array_equal(value, new.obs[key][step + 1]), key
            assert reward == new.reward[step]
            assert (terminated, truncated) == (step == len(new) - 1, False)
        assert (new.terminated, new.truncated) == (True, False)
    assert swapped > 20 and ended > 10


def test_the_recipe_reads_goals_as_places_and_needs_no_advice():
    """Whoever left it to the shape of the array is told that whole numbers may be tokens."""
    spec, _ = random_play(1, 0, {"size": 7, "time_limit": 5})
    rows = recipe("mazerunner").agent.timestep_encoder
    assert TimestepEncoder(rows, Spaces.of_spec(spec.to_json())).describe()[0] == "goals: 6 numbers"
    left = TimestepEncoder(rows.replace(vector_keys=()), Spaces.of_spec(spec.to_json())).describe()
    assert "name it in tokens.keys" in left[0]


@pytest.mark.timeout(900)  # twenty seconds of computing, which a busy machine may stretch
def test_relabeling_some_goals_beats_relabeling_none():
    """From the same random play, of which one episode in twelve succeeds; same budget and seed.

    benchmarks/results/relabel.json has three seeds and more updates.
    """
    torch.set_num_threads(1)
    none, some = (outcome(strategy, 0, 400) for strategy in ("none", "some"))
    assert none["data_success"] == some["data_success"] < 0.15
    assert some["success"] > none["success"] + 0.1
    assert some["goals"] > none["goals"] + 0.05


@pytest.fixture(scope="module")
def mazes(service) -> str:
    spec, found = random_play(12, 0, {"size": 7, "time_limit": 20})
    with service.client() as client:
        client.create_dataset("relabel-mazes", spec)
        client.post("relabel-mazes", found, spec=spec, wait_sealed=True)
    return "relabel-mazes"


def test_a_run_relabels_says_so_and_publishes_a_policy_that_needs_no_achieved_goal(
    service, mazes, tmp_path: Path
):
    """The whole way: recipe, flag, metrics, policy."""
    words = ["mazerunner", "--dataset", mazes, "--run", "relabel-run", "--updates", "3"]
    words += ["--data.cache", str(tmp_path / "cache"), "--schedule.log-every", "1"]
    words += ["--output", str(tmp_path), "--data.relabel", "mazerunner:strategy=all"]
    env = {**os.environ, "STEPWELL_URL": service.url, "OMP_NUM_THREADS": "1"}
    done = Fork("trainer.main", [*words, "--device", "cpu"], env=env, output=tmp_path / "output")
    assert done.wait(300) == 0, done.said()
    lines = (tmp_path / "relabel-run" / "metrics.jsonl").read_text().splitlines()
    seen = {p["key"]: p["value"] for p in map(json.loads, lines) if p["step"] == 3}
    assert seen["relabel/changed"] > 0.5 and seen["relabel/goals_replaced"] > 0.5
    assert 0 < seen["relabel/steps_kept"] <= 1 and seen["relabel/cpu_ms"] > 0
    (policy,) = (tmp_path / "relabel-run" / "policies").glob("*")
    assert set(load_policy(policy.read_bytes()).spaces.observations) == {"observation", "goals"}
