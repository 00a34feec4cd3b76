"""Texts become token ids, with a vocabulary that the dataset keeps and the agent reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces as gs
from rich.console import Console

import stepwell
from amago_model.config import Spaces
from amago_model.policy_file import load_policy
from collector.config import EvaluateConfig
from collector.evaluate import run_evaluation
from collector.interface import BrokenEnv, interface_of
from collector.texts import TextWords, WordSpace, vocabulary_of
from collector.vector_env import VectorEnvAdapter
from stepwell import Client, Vocabulary
from stepwell.errors import InvalidSpace
from stepwell.spaces import EnvSpec, MultiDiscrete
from tests.recording import collect_at_random
from trainer.main import main as train

COLOURS = ["red", "green", "light blue"]


class MissionSpace(gs.Space[str]):
    """MiniGrid's, as far as it is read."""

    def __init__(self, template: Callable[..., str], choices: list[list[str]] | None = None):
        self.mission_func, self.ordered_placeholders = template, choices
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        choices = self.ordered_placeholders or []
        return self.mission_func(*(str(self.np_random.choice(words)) for words in choices))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class BabyAIMissionSpace(MissionSpace):
    """BabyAI's, whose template says nothing."""

    def __init__(self) -> None:
        super().__init__(lambda: "go")


MISSIONS = MissionSpace(
    lambda verb, colour: f"{verb} the {colour} door.", [["Open", "go to"], COLOURS]
)


class Lights(gymnasium.Env[Any, np.int64]):
    """Press the button of the colour in the mission; three steps, of which each tells the last."""

    def __init__(self, missions: gs.Space[str] = MISSIONS) -> None:
        self.observation_space = gs.Tuple(
            [gs.Dict({"mission": missions, "last": gs.Text(5, min_length=0)}), gs.Discrete(4)]
        )
        self.action_space = gs.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.wanted = 0, int(self.np_random.integers(3))
        return self.observation(""), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        right = int(action) == self.wanted
        return self.observation("right" if right else "wrong"), float(right), self.t == 3, False, {}

    def observation(self, last: str) -> Any:
        return {"mission": f"go to the {COLOURS[self.wanted]} door.", "last": last}, self.t


gymnasium.register("stepwell-test/Lights-v0", Lights)


def shell(space: gs.Space[Any]) -> gymnasium.Env[Any, Any]:
    env: gymnasium.Env[Any, Any] = gymnasium.Env()
    env.observation_space, env.action_space = space, gs.Discrete(2)
    return env


def test_a_text_is_its_characters() -> None:
    interface = interface_of(shell(gs.Text(6, charset="cab ")), "Text-v0")
    assert interface.spec.observations == {"observation": MultiDiscrete((6,) * 6)}
    vocabulary = interface.spec.vocabularies["observation"]
    assert vocabulary == Vocabulary((" ", "a", "b", "c"), "")
    for text, ids, back in (
        ("a cab", [3, 2, 5, 3, 4, 0], "a cab"),
        ("", [0] * 6, ""),
        ("abcabcabc", [3, 4, 5, 3, 4, 5], "abcabc"),  # cut
        ("aXb", [3, 1, 4, 0, 0, 0], "a?b"),
    ):
        array = interface.encode_observation(text)["observation"]
        assert array.dtype == np.int64 and array.tolist() == ids
        assert vocabulary.decode(array) == back


def test_a_mission_is_its_words() -> None:
    """From the template and every placeholder; as long as the longest mission."""
    found = vocabulary_of(MISSIONS)
    assert found is not None
    vocabulary, length = found
    assert vocabulary.tokens == tuple(sorted("open go to the red green light blue door .".split()))
    assert length == len("go to the light blue door .".split())
    MISSIONS.seed(0)
    for _ in range(20):
        ids = vocabulary.encode(mission := MISSIONS.sample(), length)
        assert vocabulary.decode(ids) == mission.lower().replace(".", " .")
    assert vocabulary_of(MissionSpace(lambda: "")) == (Vocabulary(()), 1)
    assert vocabulary_of(gs.Discrete(2)) is None


def test_babyais_language_is_known() -> None:
    found = vocabulary_of(BabyAIMissionSpace())
    assert found is not None
    vocabulary, length = found
    one = "put the red ball in front of you next to a grey object on your left"
    text = f"{one} and {one}, then {one} and {one}"
    ids = vocabulary.encode(text, length)
    assert 1 not in ids and vocabulary.decode(ids) == text.replace(",", " ,")


@pytest.mark.parametrize("task", ["GoToObj", "PutNextLocal", "SynthLoc", "BossLevel"])
def test_babyais_own_missions(task: str) -> None:
    pytest.importorskip("minigrid")
    env = gymnasium.make(f"minigrid:BabyAI-{task}-v0", disable_env_checker=True)
    interface = interface_of(env, task)
    for seed in range(3):
        assert 1 not in interface.encode_observation(env.reset(seed=seed)[0])["mission"]


def test_words_can_be_given() -> None:
    """In the place of every text of the environment; the rest of its space stays."""
    env = TextWords(Lights(), words=["go to the red door", "green", "right"], max_words=4)
    interface = interface_of(env, "Lights-v0")
    words = ("door", "go", "green", "red", "right", "the", "to")
    assert interface.spec.vocabularies == dict.fromkeys(
        ("observation/0/last", "observation/0/mission"), Vocabulary(words)
    )
    seen = interface.encode_observation(({"mission": "Go to the sun now", "last": "right"}, 0))
    assert seen["observation/0/mission"].tolist() == [3, 8, 7, 1]
    assert seen["observation/0/last"].tolist() == [6, 0, 0, 0]
    space = WordSpace(["go", "red"], 3)
    space.seed(0)
    assert all(space.contains(space.sample()) for _ in range(5))
    with pytest.raises(ValueError, match="max_words"):
        WordSpace(["go"], 0)


@pytest.mark.parametrize("raw", [None, b"go", 7, ["go"]])
def test_a_text_that_is_none_is_a_broken_environment(raw: object) -> None:
    interface = interface_of(shell(gs.Dict({"said": gs.Text(6)})), "Text-v0")
    with pytest.raises(BrokenEnv, match="'said'.*expected a text"):
        interface.encode_observation({"said": raw})


def test_the_spec_keeps_the_vocabulary() -> None:
    """And its digest: ids of other words are other data."""
    spec = interface_of(Lights(), "Lights-v0").spec
    again = EnvSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec and again.digest == spec.digest and hash(again) == hash(spec)
    other = interface_of(shell(gs.Text(3, charset="abc")), "A-v0")
    with pytest.raises(InvalidSpace, match="other vocabularies"):
        other.for_dataset(interface_of(shell(gs.Text(3, charset="abd")), "B-v0").spec, "d")
    assert "vocabularies" not in interface_of(shell(gs.Discrete(2)), "C-v0").spec.to_json()


@pytest.mark.parametrize(
    "vocabularies",
    [
        {"observation": {"tokens": ["a"], "separator": ""}},  # another number of ids
        {"other": {"tokens": ["a", "b"], "separator": ""}},
        {"observation": {"tokens": ["a", "a"], "separator": ""}},
        {"observation": {"tokens": ["a", ""], "separator": ""}},
        {"observation": {"tokens": ["a", 1], "separator": ""}},
        {"observation": {"tokens": ["a", "b"], "separator": "-"}},
        {"observation": {"tokens": "ab", "separator": ""}},
        {"observation": {"tokens": ["a", "b"], "separator": "", "more": 1}},
        [],
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(vocabularies: object) -> None:
    spec = interface_of(shell(gs.Text(3, charset="ab")), "Text-v0").spec.to_json()
    with pytest.raises(InvalidSpace):
        EnvSpec.from_json({**spec, "vocabularies": vocabularies})


def test_a_policy_of_other_words_is_refused() -> None:
    a, b = (interface_of(shell(gs.Text(3, charset=c)), "Text-v0") for c in ("abc", "abd"))
    spaces = Spaces.of_spec(a.spec.to_json())
    a.check_policy(spaces, "p/1")
    with pytest.raises(InvalidSpace, match="p/1 cannot play"):
        b.check_policy(spaces, "p/1")


def test_vector_environments_give_the_same_texts() -> None:
    single = interface_of(Lights(), "Lights-v0")
    vector = gymnasium.vector.SyncVectorEnv([Lights, Lights])
    interface = interface_of(vector, "Lights-v0")
    assert interface.spec == single.spec
    adapter = VectorEnvAdapter(vector, interface)
    for i, start in adapter.reset({0: 1, 1: 2}).items():
        alone = single.encode_observation(Lights().reset(seed=i + 1)[0])
        assert all(np.array_equal(start.obs[key], alone[key]) for key in alone)
    for _, event in adapter.step({"action": np.zeros(2, np.int64)}, [True, True]):
        assert event.obs is not None and event.obs["observation/0/last"].any()


def test_texts_are_collected_trained_on_and_acted_by(
    service: Any,
    client: Client,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STEPWELL_URL", service.url)
    threads = torch.get_num_threads()
    env_id = "stepwell-test/Lights-v0"
    collect_at_random(service, name, env_id, tmp_path / "outbox")
    client.flush(name)
    spec = client.spec(name)
    key = "observation/0/mission"
    found = client.sql(f"SELECT DISTINCT obs['{key}'] AS ids FROM \"{name}\".steps")
    assert {spec.vocabularies[key].decode(ids) for (ids,) in found} == {
        f"go to the {colour} door ." for colour in COLOURS
    }
    run = f"train-{name}"
    words = ["offline", "--dataset", name, "--run", run, "--output", str(tmp_path / "runs")]
    small = ["--updates", "3", "--data.batch", "4", "--device", "cpu"]
    assert train([*words, "--data.cache", str(tmp_path / "cache"), *small]) == 0
    assert f"{key}: 7 tokens of 12" in capfd.readouterr().out
    policy = load_policy(client.download_policy(run).data)
    assert policy.spaces.observations[key].vocabulary == spec.vocabularies[key].tokens
    result, _ = run_evaluation(
        EvaluateConfig(env=env_id, policy=run, episodes=4, url=service.url, dataset=f"eval-{name}"),
        Console(quiet=True),
    )
    assert len(result.returns) == 4
    env, player = Lights(), stepwell.load_policy(run, client=client)
    player.reset()
    seen = interface_of(env, env_id).encode_observation(env.reset(seed=0)[0])
    assert env.action_space.contains(player.act(seen))
    torch.set_num_threads(threads)
