"""A score follows from policy and seeds alone, and its uncertainty is computed as it should be."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from amago_model.acting import ActingPolicy
from amago_model.config import AgentConfig, Spaces
from collector.builtin import RECALL_ID
from collector.envs import make
from collector.episode_recorder import EpisodeSummary
from collector.evaluate import evaluate_policy
from collector.evaluation_result import EvaluationResult, summarise
from collector.interface import BrokenEnv, Interface, interface_of
from collector.main import evaluate as main
from collector.policy_actor import ActorError, ActorInputs, RandomActor
from collector.scripted_policy import ScriptedActor as PythonActor
from stepwell.errors import InvalidSpace
from tests.collector.fake_env import FakeEnv
from tests.collector.scripted_actor import ScriptedActor

SEEDS = range(50, 57)


def policy_for(env_id: str, kind: str = "feed_forward", **kwargs: Any) -> ActingPolicy:
    torch.manual_seed(1)
    spaces = Spaces.of_spec(interface_of(make(env_id, kwargs), env_id).spec.to_json())
    small = {
        "timestep_encoder": {"kind": "any", "d_hidden": 32, "d_output": 32},
        "trajectory_encoder": {"kind": kind, "d_model": 32, "d_ff": 64},
    }
    return ActingPolicy(AgentConfig.from_dict(small), spaces).eval()


@pytest.mark.parametrize("kind", ["feed_forward", "transformer"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_score_does_not_depend_on_how_many_play_side_by_side(env_id: str, kind: str) -> None:
    """Bit-equal returns and trajectories for 1, 2 and 7 environments; other seeds, other scores."""
    policy = policy_for(env_id, kind)
    kwargs = {"max_episode_steps": 30}
    one, two, seven = (
        evaluate_policy(policy, env_id, SEEDS, env_kwargs=kwargs, envs=n) for n in (1, 2, 7)
    )
    assert one.returns == two.returns == seven.returns
    for a, b, c in zip(one.trajectories, two.trajectories, seven.trajectories, strict=True):
        assert a.obs["observation"].tobytes() == b.obs["observation"].tobytes()
        assert a.obs["observation"].tobytes() == c.obs["observation"].tobytes()
    others = evaluate_policy(policy, env_id, range(90, 97), env_kwargs=kwargs, envs=7)
    assert others.trajectories[0].obs["observation"][0].tolist() != (
        one.trajectories[0].obs["observation"][0].tolist()
    )


def test_results_come_in_the_order_of_the_seeds() -> None:
    """Whatever order the episodes end in: row i of everything is seed i."""
    policy = policy_for("CartPole-v1")
    result = evaluate_policy(policy, "CartPole-v1", SEEDS, envs=3, policy_id="p/1")
    assert result.seeds == list(SEEDS)
    assert [t.metadata.seed for t in result.trajectories] == list(SEEDS)
    assert [t.total_reward for t in result.trajectories] == result.returns
    assert [len(t) for t in result.trajectories] == result.lengths
    assert {t.metadata.purpose for t in result.trajectories} == {"eval"}
    assert {t.metadata.policy for t in result.trajectories} == {"p/1"}
    env = gymnasium.make("CartPole-v1")
    for seed, trajectory in zip(SEEDS, result.trajectories, strict=True):
        np.testing.assert_array_equal(trajectory.obs["observation"][0], env.reset(seed=seed)[0])


def test_a_scripted_optimum_scores_the_optimum() -> None:
    """Recall: remembering the cue earns 1 in every episode and says success."""

    def remembering(interface: Interface, slots: int) -> ScriptedActor:
        cue = {"now": 0}

        def act(obs: Any, t: int) -> np.int64:
            if t == 0:
                cue["now"] = int(np.argmax(obs["observation"][:4]))
            return np.int64(cue["now"])

        return ScriptedActor(interface, "optimum", act)

    best = evaluate_policy(remembering, RECALL_ID, range(12), env_kwargs={"delay": 3}, envs=1)
    assert best.returns == [1.0] * 12 and best.successes == [True] * 12
    assert (best.mean, best.iqm, best.ci_low, best.ci_high) == (1.0, 1.0, 1.0, 1.0)
    assert best.bottom_quintile == 1.0
    chance = evaluate_policy(
        lambda interface, slots: RandomActor(interface, slots), RECALL_ID, range(200), envs=4
    )
    assert 0.1 < chance.mean < 0.4 and chance.ci_low < 0.25 < chance.ci_high


def episodes(returns: list[float]) -> list[EpisodeSummary]:
    return [
        EpisodeSummary(
            index=i,
            env_index=0,
            seed=i,
            policy_id="p",
            total_reward=r,
            length=1,
            success=None,
        )
        for i, r in enumerate(returns)
    ]


@pytest.mark.parametrize("n", [1, 4, 30, 31])
def test_the_summary_equals_its_slow_definitions(n: int) -> None:
    """IQM as the integral of the middle half of the quantile function; interval by plain loops."""
    returns = (np.random.default_rng(n).normal(size=n) * 100).tolist()
    result = summarise("Hopper-v5", "p", episodes(returns))
    ordered, total = sorted(returns), 0.0
    fine = 4000
    for i in range(fine):  # midpoints: exact, as the quantile function is a staircase
        q = 0.25 + 0.5 * (i + 0.5) / fine
        total += ordered[min(int(q * n), n - 1)] / fine
    assert result.iqm == pytest.approx(total, abs=0.3)
    assert result.mean == pytest.approx(sum(returns) / n)
    place = 0.2 * (n - 1)  # linear between the two returns around it
    low, high = ordered[int(place)], ordered[min(int(place) + 1, n - 1)]
    assert result.bottom_quintile == pytest.approx(low + (place - int(place)) * (high - low))
    rng = np.random.default_rng(123)
    means = sorted(float(np.mean(rng.choice(returns, n))) for _ in range(4000))
    width = max(means[-1] - means[0], 1e-9)
    assert result.ci_low == pytest.approx(means[100], abs=0.05 * width)
    assert result.ci_high == pytest.approx(means[3900], abs=0.05 * width)
    again = summarise("Hopper-v5", "p", episodes(returns))
    assert (again.ci_low, again.ci_high) == (result.ci_low, result.ci_high)
    expected = 100 * (result.mean + 20.272305) / (3234.3 + 20.272305)
    assert result.normalised == pytest.approx(expected)
    assert summarise("Pendulum-v1", "p", episodes(returns)).normalised is None


@pytest.fixture
def broken_at() -> Iterator[Callable[..., str]]:
    """Registers an environment that fails in this episode of its own, at this step."""

    def register(*place: int) -> str:
        gymnasium.register(
            "BrokenFake-v0", lambda: FakeEnv((4,), broken_at=place), disable_env_checker=True
        )
        return "BrokenFake-v0"

    yield register
    del gymnasium.registry["BrokenFake-v0"]


def random_actor(interface: Interface, n: int) -> RandomActor:
    return RandomActor(interface, n)


def test_an_episode_whose_environment_fails_is_played_again(broken_at: Callable[..., str]) -> None:
    """The second episode of every environment fails: each seed is scored all the same."""
    with pytest.warns(
        UserWarning, match="failed in 3 episodes, played again .*: 3 x .*asked to fail"
    ):
        result = evaluate_policy(random_actor, broken_at(1, 2), [5, 3, 9, 3, 7], envs=2)
    assert list(result.seeds) == [5, 3, 9, 3, 7] and list(result.lengths) == [4] * 5
    assert [t.metadata.seed for t in result.trajectories] == [5, 3, 9, 3, 7]
    assert not any(t.metadata.tags for t in result.trajectories)


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_command_says_so_and_has_its_exit_status(
    broken_at: Callable[..., str], service: Any, capsys: Any, words: list[str]
) -> None:
    """The run, its error, the output and the status tell the same; the score is complete."""
    where = ["--env", broken_at(1, 2), "--random", "--episodes", "5", "--envs", "2"]
    where += ["--url", service.url]
    given = [*where, *words, "--dataset", f"broken-{len(words)}", "--run", f"broken-{len(words)}"]
    assert main(given) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "failed in" in printed and "asked to fail" in printed
    with service.client() as client:
        run = client.run(f"broken-{len(words)}")
        assert run.status == "finished" and "played again" in run.error
        scored = client.trajectories(f"broken-{len(words)}", purpose="eval").items
        assert len(scored) == 5 and not any(info.tags for info in scored)


def test_a_failing_environment_gives_no_score(broken_at: Callable[..., str]) -> None:
    """A mean over the episodes that happened to survive would be a lie."""
    with pytest.raises(BrokenEnv, match="failed 3 times with 5 seeds of 5 .*asked to fail.*holes"):
        evaluate_policy(random_actor, broken_at(0, 2), range(5), envs=2)


def test_a_policy_of_another_environment_is_refused_before_it_plays() -> None:
    with pytest.raises(InvalidSpace, match="cannot play Pendulum-v1"):
        evaluate_policy(policy_for("CartPole-v1"), "Pendulum-v1", range(2))


def test_the_command_needs_no_service_without_upload(capsys: pytest.CaptureFixture[str]) -> None:
    """--json is the whole result and nothing but JSON."""
    arguments = ["--random", "--env", "Pendulum-v1", "--episodes", "3", "--no-upload", "--json"]
    assert main([*arguments, "--url", "http://127.0.0.1:9"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["returns"]) == 3 and printed["policy"] == "random"
    assert set(EvaluationResult.__dataclass_fields__) - {"trajectories"} == set(printed)


def test_exactly_one_policy_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--random", "--policy", "p"]):
        assert main(["--env", "Pendulum-v1", *arguments]) == 2
        assert "policy: give" in capsys.readouterr().err


def remembers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user: a policy for Recall with memory, and one that fails."""
    (tmp_path / "my_policies.py").write_text(
        "import numpy as np\n"
        "class Remembers:\n"
        "    def __init__(self):\n"
        "        self.cue = None\n"
        "    def __call__(self, observation):\n"
        "        if self.cue is None:\n"
        "            self.cue = int(np.argmax(observation[:4]))\n"
        "        return self.cue\n"
        "def fails(observation):\n"
        "    return observation['position']\n"
        "number = 3\n"
        "class Broken:\n"
        "    def __init__(self):\n"
        "        raise OSError('no table')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_policy_in_python_is_evaluated(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function, or a class of which each episode has its own instance."""
    remembers(tmp_path, monkeypatch)
    arguments = ["--no-upload", "--json", "--episodes", "12", "--envs", "3"]
    scripted = ["--scripted", "my_policies:Remembers", "--env", f"collector.builtin:{RECALL_ID}"]
    assert main([*arguments, *scripted]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["policy"], printed["returns"]) == ("scripted", [1.0] * 12)
    torque = "collector.builtin.generate_pendulum:expert_torque"
    assert main([*arguments, "--scripted", torque, "--env", "Pendulum-v1"]) == 0
    assert -250 < json.loads(capsys.readouterr().out)["mean"] < -50


def test_a_policy_in_python_that_is_none_says_so(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remembers(tmp_path, monkeypatch)
    for reference, status, said in (
        ("my_policies", 2, "expected MODULE:FUNCTION"),
        ("no_such_module:f", 2, "No module named 'no_such_module'"),
        ("my_policies:missing", 2, "my_policies has no function 'missing'"),
        ("my_policies:number", 2, "my_policies has no function 'number'"),
        ("my_policies:Broken", 1, "the scripted policy failed: no table (OSError"),
        ("my_policies:fails", 1, "the scripted policy failed"),
    ):
        words = ["--scripted", reference, "--env", "Pendulum-v1", "--no-upload"]
        assert main(words) == status
        error = " ".join(capsys.readouterr().err.split())
        assert said in error, reference
    assert "my_policies.py, line 10" in error
    assert main(["--scripted", "a:b", "--random", "--env", "Pendulum-v1"]) == 2
    assert main(["--scripted", "a:b", "--target-return", "3", "--env", "Pendulum-v1"]) == 2
    assert "no effect with --scripted" in capsys.readouterr().err


CHOICE, INTEGERS = spaces.Discrete(3), spaces.Box(0, 9, (2,), np.int8)
FLOATS = spaces.Box(-1, 1, (2,), np.float32)
NO_LIMITS = spaces.Box(-np.inf, np.inf, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (CHOICE, 1.9),
        (CHOICE, 3),
        (CHOICE, -1),
        (CHOICE, math.nan),
        (spaces.MultiDiscrete([2, 2]), [0, 2]),
        (spaces.MultiBinary(2), [0, 2]),
        (INTEGERS, [1, 10]),
        (INTEGERS, [1, 0.5]),
        (FLOATS, [0, math.nan]),
        (NO_LIMITS, [0, math.inf]),
        (spaces.Dict(a=FLOATS, b=CHOICE), {"a": [0, 0], "b": 70}),
    ],
    ids=str,
)
def test_an_action_of_a_scripted_policy_outside_its_space_is_refused(
    space: spaces.Space[Any], action: Any
) -> None:
    with pytest.raises(ActorError, match=r"scripted policy failed: actions\[.*expected an action"):
        played(space, action)


def test_floats_of_a_scripted_policy_are_clipped() -> None:
    assert played(FLOATS, [5, -math.inf])["action"].tolist() == [[1, -1]]
    assert played(CHOICE, np.array([2.0]))["action"].tolist() == [2]


def played(space: spaces.Space[Any], action: Any) -> dict[str, Any]:
    env = FakeEnv()
    env.action_space = space  # type: ignore[assignment]
    interface = interface_of(env, "Fake-v0")
    inputs = ActorInputs.zeros(interface.spec, 1)
    inputs.playing[:] = True
    return PythonActor(interface, 1, lambda _: action).act(inputs)


def test_a_policy_in_python_is_compared_with_a_published_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluate_policy(random_actor, "CartPole-v1", range(3))
    played: list[tuple[str, str]] = []

    def play(config: Any, *_: Any, **__: Any) -> tuple[EvaluationResult, dict[str, Any]]:
        played.append((config.scripted, config.policy))
        return result, {}

    monkeypatch.setattr("collector.evaluate.run_evaluation", play)
    words = ["--scripted", "mine:policy", "--against", "run/7", "--env", "CartPole-v1", "--json"]
    assert main(words) == 0
    assert played == [("mine:policy", ""), ("", "run/7")]
    assert "paired" in json.loads(capsys.readouterr().out)


ROW = re.compile(r"^\| ([\w-]+) \| `(generate_\w+:[\w.]+)` \|$", re.MULTILINE)
GUIDE = Path(__file__).parents[2] / "docs" / "reference" / "collecting.md"
LEAST = {
    "Pendulum-v1": -250.0,
    "CartPole-v1": 500.0,
    "MountainCar-v0": -150.0,
    "MountainCarContinuous-v0": 90.0,
    "Acrobot-v1": -150.0,
    "InvertedDoublePendulum-v5": 9300.0,
}
"""Mean returns far above those of the generated data (docs/reference/own_data.md)."""


@pytest.mark.parametrize(("env", "policy"), ROW.findall(GUIDE.read_text()))
def test_scripted_policies_of_the_guide_are_good(
    env: str, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {one for one, _ in ROW.findall(GUIDE.read_text())} == set(LEAST)
    if env.endswith("-v5"):
        pytest.importorskip("mujoco")
    words = ["--env", env, "--episodes", "5", "--no-upload", "--json"]
    assert main(["--scripted", f"collector.builtin.{policy}", *words]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] >= LEAST[env]
