"""Environments that break, leave their spaces or never end: what a collector says and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from collector import rollout
from collector.broken_episodes import MOST_CAUSES, BrokenEpisodes
from collector.collect import collect
from collector.config import CollectConfig
from collector.evaluate import evaluate_policy
from collector.interface import BrokenEnv
from collector.main import main
from collector.policy_actor import RandomActor
from collector.record import record
from dashboard.components import run_mark
from stepwell import Client, InvalidTrajectory, cli
from workbench.analysis.doctor import diagnose


class Odd(gymnasium.Env[Any, Any]):
    """Episodes of 4 steps. `answer(t)` is what step t returns, or raises; t counts from 1."""

    def __init__(self, answer: Callable[[int, int], Any], ends: bool = True):
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._answer, self._ends = answer, ends
        self.episode, self.t = -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.t = self.episode + 1, 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.t += 1
        obs, reward = self._answer(self.episode, self.t)
        return obs, reward, self._ends and self.t == 4, False, {}


OBS = np.zeros(2, np.float32)


def fine(_episode: int, _t: int) -> tuple[Any, Any]:
    return OBS, 1.0


def nan_obs(_episode: int, t: int) -> tuple[Any, Any]:
    return (OBS if t < 2 else np.full(2, np.nan, np.float32)), 1.0


def nan_reward(_episode: int, t: int) -> tuple[Any, Any]:
    return OBS, (1.0 if t < 2 else float("nan"))


def wrong_shape(_episode: int, t: int) -> tuple[Any, Any]:
    return (OBS if t < 2 else np.zeros(3, np.float32)), 1.0


def raises(_episode: int, t: int) -> tuple[Any, Any]:
    if t == 2:
        raise RuntimeError("the motor at 0x7f3a is hot: 81.5")
    return OBS, 1.0


@pytest.fixture
def odd() -> Iterator[Callable[..., None]]:
    """Register Odd-v0."""

    def register(answer: Callable[[int, int], Any], **kwargs: Any) -> None:
        episodes = [0]

        def counted(_episode: int, t: int) -> Any:  # over all that are made: a broken one is closed
            episodes[0] += t == 1
            return answer(episodes[0] - 1, t)

        gymnasium.register("Odd-v0", lambda: Odd(counted, **kwargs), disable_env_checker=True)

    yield register
    del gymnasium.registry["Odd-v0"]


@pytest.fixture
def words(service: Any, name: str, tmp_path: Path) -> list[str]:
    found = ["--env", "Odd-v0", "--random", "--envs", "1", "--dataset", name, "--seed", "3"]
    found += ["--run", f"run-{name}", "--url", service.url, "--outbox", str(tmp_path / "outbox")]
    return [*found, "--no-progress"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (nan_obs, "4 x step failed: observation 'observation' holds NaN or infinity"),
        (nan_reward, "4 x step failed: the reward is nan"),
        (wrong_shape, "4 x step failed: observation 'observation' has shape (3,)"),
        (raises, "4 x step failed: the motor at 0x7f3a is hot: 81.5 (RuntimeError at"),
    ],
)
def test_if_every_episode_breaks_the_run_has_failed(
    answer: Any, says: str, odd: Any, words: list[str], client: Client, name: str, capfd: Any
) -> None:
    odd(answer)
    assert main([*words, "--episodes", "4"]) == 1
    printed = " ".join(capfd.readouterr().err.split())
    assert "0 episodes, 4 steps" in printed
    assert "4 episodes were broken off by an error of the environment, 0 ended" in printed
    run = client.run(f"run-{name}")
    assert run.status == "failed" and says in run.error and says in printed
    assert "(first: seed " in run.error and ", step 1)" in run.error
    found = {f.kind: f for f in diagnose(client, name).findings}
    assert found["broken"].trajectories == 4
    assert len(client.sql(found["broken"].sql, dataset=name).rows) == 4


def test_a_part_that_breaks_is_counted_by_cause_and_has_its_exit_status(
    odd: Any, words: list[str], client: Client, name: str, capfd: Any
) -> None:
    def some(episode: int, t: int) -> tuple[Any, Any]:
        if episode % 3 == 2 and t == 3:
            raise ValueError(f"episode {episode} slipped by {episode / 7}")
        return nan_obs(episode, t) if episode == 4 else fine(episode, t)

    odd(some)
    assert main([*words, "--episodes", "9"]) == 3
    run = client.run(f"run-{name}")
    assert run.status == "finished"
    head, first, second = run.error.splitlines()
    assert head == "4 episodes were broken off by an error of the environment, 5 ended:"
    assert first.startswith("3 x step failed: episode 2 slipped by 0.2857") and "step 2)" in first
    assert second.startswith("1 x step failed: observation 'observation' holds NaN")
    assert head in " ".join(capfd.readouterr().err.split())
    assert run_mark(run) == "! finished", "no check mark"
    assert cli.main(["runs", "list", "--url", client.url]) == 0
    assert "finished, with errors" in capfd.readouterr().out
    assert main([*words, "--episodes", "2"]) == 0, "the next ones end"
    assert client.run(f"run-{name}").error == ""


def test_causes_are_few_and_all_are_counted() -> None:
    broken = BrokenEpisodes()
    for number in range(3 * MOST_CAUSES):
        broken.add("x" * (number + 1), seed=None, step=7)
    lines = broken.lines()
    assert len(lines) == MOST_CAUSES + 1 and broken.total == 3 * MOST_CAUSES
    assert sum(int(line.split(" x ")[0]) for line in lines) == broken.total
    assert lines[0].startswith(f"{2 * MOST_CAUSES} x other causes, as xxx")


def far(episode: int, t: int) -> tuple[Any, Any]:
    beyond = episode == 1 and t >= 2
    return (np.array([0.5, 3.25], np.float32) if beyond else OBS), 1.0


SAYS = "observation 'observation'[1] is 3.25, its space says -1 to 1"


def test_values_beyond_their_space_are_stored_and_said_once(
    odd: Any, words: list[str], client: Client, name: str, capfd: Any
) -> None:
    odd(far)
    assert main([*words, "--episodes", "3"]) == 0
    printed = " ".join(capfd.readouterr().err.split())
    assert printed.count(SAYS) == 1 and ", step 2)" in printed
    assert client.dataset(name).fifo.steps == 12
    (found,) = [f for f in diagnose(client, name).findings if f.kind == "observation_outside"]
    assert found.trajectories == 1 and "observation[1] = 3.25" in found.message
    ((_, what),) = client.sql(found.sql, dataset=name).rows
    assert what == "step 2: observation[1] = 3.25, its space says -1 to 1"


def test_an_option_refuses_them(odd: Any, words: list[str], client: Client, name: str) -> None:
    odd(far)
    assert main([*words, "--episodes", "3", "--out-of-bounds", "refuse"]) == 3
    assert SAYS in client.run(f"run-{name}").error
    assert sorted(t.length for t in client.trajectories(name).items) == [1, 4, 4]


def test_rounding_to_float32_leaves_no_space(odd: Any, words: list[str], capfd: Any) -> None:
    odd(lambda _e, _t: (np.array([1.0 + 1e-8, -1.0], np.float64), 1.0))
    assert main([*words, "--episodes", "1"]) == 0
    assert "its space says" not in capfd.readouterr().err


def test_an_episode_without_an_end_is_said_once(
    odd: Any,
    words: list[str],
    client: Client,
    name: str,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout, "ENDLESS_STEPS", 50)
    odd(fine, ends=False)
    assert main([*words, "--steps", "300", "--max-steps", "20"]) == 0
    printed = " ".join(capfd.readouterr().err.split())
    assert printed.count("an episode has run for 50 steps and has not ended (seed ") == 1
    assert "--env-args max_episode_steps=1000" in printed
    (worker,) = [w for w in client.workers() if w.run == f"run-{name}"]
    assert "has run for 50 steps" in worker.last_error


def test_record_warns_once_of_values_beyond_their_space(client: Client, name: str) -> None:
    env = record(Odd(lambda _e, t: far(1, t)), name, client)
    env.reset(seed=1)
    env.step(0)
    with pytest.warns(UserWarning, match=r"observation 'observation'\[1\] is 3.25"):
        env.step(0)
    env.step(0)  # a second warning would be an error
    env.step(0)
    env.close()
    assert client.dataset(name).fifo.trajectories == 1


def test_the_options_of_the_command_are_those_of_the_function(
    odd: Any, service: Any, name: str, tmp_path: Path
) -> None:
    odd(raises)
    config = CollectConfig(
        env="Odd-v0", random=True, envs=1, dataset=name, episodes=2, url=service.url,
        outbox=tmp_path / "outbox", progress=False,
    )  # fmt: skip
    stats = collect(config)
    assert (stats.broken.total, stats.kept, stats.episodes) == (2, 0, 0)


class Old(Odd):
    """Of gym before 0.26, in one of its two methods."""

    def __init__(self, method: str):
        super().__init__(fine)
        self._method = method

    def reset(self, **_: Any) -> Any:
        obs, info = super().reset()
        return obs if self._method == "reset" else (obs, info)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = super().step(action)
        old = self._method == "step"
        return (obs, reward, terminated, info) if old else (obs, reward, terminated, False, info)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_of_the_old_gym_is_named_as_such(method: str, capfd: Any) -> None:
    def actor(interface: Any, n: int) -> RandomActor:
        return RandomActor(interface, n)

    gymnasium.register("OldGym-v0", lambda: Old(method), disable_env_checker=True)
    try:
        with pytest.raises(BrokenEnv, match=f"{method} .*gym before 0.26"):
            evaluate_policy(actor, "OldGym-v0", [1], envs=1)
    finally:
        del gymnasium.registry["OldGym-v0"]


def test_a_malformed_action_is_refused_by_name_before_the_step(
    client: Client, name: str, tmp_path: Path
) -> None:
    class Pair(Odd):
        def __init__(self) -> None:
            super().__init__(fine)
            self.action_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))

    env = record(Pair(), name, client, env_id="Pair-v0", outbox=tmp_path)
    env.reset()
    with pytest.raises(InvalidTrajectory, match=r"actions\[action/1\].*form Tuple"):
        env.step((1,))
    for _ in range(4):
        env.step((1, 2))
    env.close()
    client.flush(name)
    assert [info.length for info in client.trajectories(name).items] == [4]


def test_infos_that_are_none_harm_nothing(client: Client, name: str, tmp_path: Path) -> None:
    class Lists(Odd):
        def step(self, action: Any) -> Any:
            *returned, _ = super().step(action)
            return (*returned, ["no dict"])

    env = record(Lists(fine), name, client, env_id="Lists-v0", outbox=tmp_path)
    env.reset()
    for _ in range(4):
        env.step(0)
    env.close()
    client.flush(name)
    (info,) = client.trajectories(name).items
    assert info.length == 4 and info.tags == []


# numpy's, of torch's tensors.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_an_observation_that_needs_gradients_is_named(
    client: Client, name: str, tmp_path: Path
) -> None:
    def tensor(_episode: int, _t: int) -> tuple[Any, Any]:
        return torch.zeros(2, requires_grad=True), 1.0

    env = record(Odd(tensor), name, client, env_id="Odd-v0", outbox=tmp_path)
    env.reset()
    with pytest.raises(BrokenEnv, match="observation 'observation' is not what its space says"):
        env.step(0)
    env.close()
