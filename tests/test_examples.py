"""Every example answers --help, has settings that fit its environment, and is in the README; those
whose packages are installed run."""

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import types
import warnings
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from amago_model.acting import ActingPolicy
from amago_model.config import Spaces
from collector.builtin.attempts import Attempts
from collector.envs import make, parse_pairs
from collector.interface import interface_of
from examples.many_tasks import PaddedGame, procgen
from tests.run_words import settings
from tests.scripts import run_script
from workbench.run import main as run_command

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text()
PROGRAMS = {
    "18_own_data.py": "mean reward",
    "19_record_environment.py": "200 steps",
    "24_own_learner.py": "update  40",
    "25_plain_policy.py": "episodes that fell",
    "relabel_template.py": "relabeled    mean return 1.00",
    "own_environment.py": "return of the best policy -",
}
"""What each prints; all but the last take a dataset."""
NEEDS = {"11_xland_rulesets.py": "xminigrid", "many_tasks.py": "minigrid"}
"""Programs for packages that are not installed for development."""
TESTED_BELOW = {"battles.py"}
TINY, SMALL = EXAMPLES / "tiny.toml", EXAMPLES / "battles_small.toml"
"""Second files."""
FILES = sorted(set(EXAMPLES.glob("*.toml")) - {TINY, SMALL})
PACKAGES = {
    "02_gymnax": "gymnax",
    "03_popgym": "popgym",
    "07_meta_world": "metaworld",
    "08_multi_game_atari": "ale_py",
    "09_multi_game_procgen": "procgen",
    "10_babyai": "minigrid",
    "11_xland_minigrid": "xminigrid",
}
"""Of files whose environment is not installed for development; examples/README.md says when each
was run."""


def run(words: Sequence[str], tmp_path: Path, url: str = "") -> str:
    """The output of a program in Python, which ends well."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=variables(tmp_path, url),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def variables(tmp_path: Path, url: str = "") -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("STEPWELL_")}
    own = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": "."}
    own |= {"STEPWELL_URL": url, "STEPWELL_OUTBOX": str(tmp_path / "outbox")} if url else {}
    return {**inherited, **own}


def tiny(name: str, *words: str) -> list[str]:
    """The command of examples/README.md that shows an example at work."""
    command = ["-m", "stepwell.cli", "run", f"examples/{name}.toml", "examples/tiny.toml"]
    return [*command, *words]


# --- all of them ------------------------------------------------------------------------------


def test_the_list_is_complete() -> None:
    """A new example is a tested example, and stands in the README."""
    programs = {path.name for path in EXAMPLES.glob("*.py")}
    assert programs == {*PROGRAMS, *NEEDS, *TESTED_BELOW}
    present = programs | {path.name for path in (*FILES, TINY, SMALL, *EXAMPLES.glob("*.ipynb"))}
    assert not {name for name in present if f"`{name}`" not in README}
    named = set(re.findall(r"`(\w+\.(?:py|toml|ipynb))`", README))
    assert named == present


@pytest.mark.parametrize("name", sorted({*PROGRAMS, *NEEDS, *TESTED_BELOW}))
def test_a_program_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.setattr(gymnasium.envs.registration, "registry", {**gymnasium.registry})
    with warnings.catch_warnings(), pytest.raises(SystemExit) as ended:
        warnings.simplefilter("ignore")  # its environments are registered once more
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"examples/{name}" in said


@pytest.mark.parametrize("file", [*FILES, TINY, SMALL], ids=lambda file: file.stem)
def test_a_file_explains_itself(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command.main([str(file), "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert file.read_text().splitlines()[0].removeprefix("# ") in said
    assert re.search(rf"^    stepwell run .*examples/{file.stem}\.toml", said, re.MULTILINE)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_settings_of_a_file_are_accepted(file: Path) -> None:
    """By each part, before anything is started; and they fit the environment, if it is there."""
    _, small = settings(str(file), str(TINY))
    assert (small.updates, small.data.batch, small.data.window) == (6, 2, 8)
    args, config = settings(str(file))
    if config.derive == "off" and config.agent.trajectory_encoder.kind == "transformer":
        context = config.agent.trajectory_encoder.context
        assert context >= config.data.window + (args.recipe != "online"), "all of it is seen"
    package = PACKAGES.get(file.stem)
    if package and (importlib.util.find_spec(package) is None or "xland" in file.stem):
        return  # XLand's needs a file of rulesets, too
    env = make(args.env, parse_pairs(args.env_args, "--env-args"))
    spaces = Spaces.of_spec(interface_of(env, args.env).spec.to_json())
    env.close()
    if config.derive == "off":
        ActingPolicy(config.agent, spaces)


# --- programs ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("default:rewards. float64 stored as float32")
@pytest.mark.parametrize("example", PROGRAMS)
def test_an_example_runs(
    example: str, service, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends well and prints what it promises."""
    words = [] if example == "own_environment.py" else [name]
    before = ["18_own_data.py"] if example == "24_own_learner.py" else []
    for each in (*before, example):
        said = run_script(EXAMPLES / each, words, monkeypatch, folder=tmp_path, url=service.url)
    assert PROGRAMS[example] in said


@pytest.mark.parametrize("example", NEEDS)
def test_an_example_for_another_package_runs(example: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[example])
    words = {"many_tasks.py": "BabyAITasks-v0"}.get(example, str(tmp_path / "rulesets.bz2"))
    run([f"examples/{example}", words], tmp_path)


def test_the_notebook_runs(service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells one after the other; it is stored without outputs."""
    notebook = json.loads((EXAMPLES / "26_tour.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    program = tmp_path / "tour.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in cells))
    said = run_script(program, [], monkeypatch, folder=tmp_path, url=service.url)
    learned = float(re.findall(r"'learned': ([\d.]+)", said)[0])
    assert learned >= 400, said


# --- files, tiny ------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_ends_with_scores(tmp_path: Path) -> None:
    """The whole loop, in an environment of one's own."""
    said = run(tiny("20_own_environment", "--data", str(tmp_path), "--port", "0"), tmp_path)
    assert " finished, " in said and "--policy" in said


def test_one_collects_and_another_learns(service, tmp_path: Path) -> None:
    """Each by a command of its own, at one service; both end with the last update."""
    learn = tiny(
        "22_learn_only", "--data", str(tmp_path / "learn"), "--run", "apart", "--no-evaluate"
    )
    collect = tiny("21_collect_only", "--data", str(tmp_path / "collect"), "--run", "apart")
    with (tmp_path / "learn.txt").open("w") as log:
        learner = subprocess.Popen(
            [sys.executable, *learn, "--dataset", "apart"],
            cwd=ROOT,
            env=variables(tmp_path / "learner", service.url),
            stdout=log,
            stderr=log,
        )
        run([*collect, "--dataset", "apart"], tmp_path, service.url)
        assert learner.wait(300) == 0, (tmp_path / "learn.txt").read_text()
    assert "run apart finished" in (tmp_path / "learn.txt").read_text()


@pytest.mark.long
def test_battles_are_mixed_and_no_illegal_action_is_played(service, tmp_path: Path) -> None:
    """Each batch has the shares of the file; the policy gives illegal actions no probability."""
    data = ["examples/battles.py", "--dataset", "battles"]
    table = run([*data, "--battles", "20"], tmp_path, service.url)
    assert [line.split()[0] for line in table.splitlines()] == [
        "ladder-high",
        "ladder-low",
        "self-play",
    ]
    files = [f"examples/{name}.toml" for name in ("15_battles", "battles_small", "tiny")]
    more = ["--train.data.batch", "4", "--data", str(tmp_path)]
    run(["-m", "stepwell.cli", "run", *files, *more], tmp_path, service.url)
    with service.client() as client:
        metrics = client.run("battle-small").latest
        assert [metrics[f"data/share_{i}"] for i in range(3)] == [0.5, 0.25, 0.25]
        unknown = client.sql("select count(*) from battles.steps where not action_known").one()
        assert unknown > 20
    said = run([*data, "--check", "battle-small"], tmp_path, service.url)
    assert "0 illegal actions" in said


# --- many tasks -------------------------------------------------------------------------------


class Cards(gymnasium.Env):
    """Shows whether the deck is empty and a suit; has three actions, of which it keeps the last."""

    observation_space = gymnasium.spaces.Tuple(
        [gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(4)]
    )
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return (0, 3), {}

    def step(self, action):
        self.action = action
        return (1, 2), 0.5, True, False, {}


def test_a_game_is_padded_and_has_the_actions_of_all() -> None:
    game = PaddedGame(Cards())
    obs, _ = game.reset(seed=0)
    assert obs.tolist() == [1, 0, 0, 0, 0, 1] + 20 * [0] + [1] and obs in game.observation_space
    obs, reward, terminated, truncated, _ = game.step(2)
    assert obs.tolist() == [0, 1, 0, 0, 1, 0] + 20 * [0] + [1]
    assert (reward, terminated, truncated, game.unwrapped.action) == (0.5, True, False, 2)
    taken = set()
    for _ in range(50):
        obs, *_ = game.step(29)
        assert obs[-1] == 0
        taken.add(game.unwrapped.action)
    assert taken == {0, 1, 2}


class Levels:
    """In the place of Procgen: frame k is k, the third step ends a level, and with its reward comes
    the first frame of the next one."""

    made: list[dict[str, object]] = []
    open = 0

    def __init__(self, **settings: object) -> None:
        Levels.made.append(settings)
        Levels.open += 1
        self._step = 0

    def act(self, actions: np.ndarray) -> None:
        assert actions.tolist() == [7]
        self._step += 1

    def observe(self) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
        ended = self._step == 3
        frames = np.full((1, 64, 64, 3), 255 if ended else self._step, np.uint8)
        return np.array([10.0 * ended]), {"rgb": frames}, np.array([ended])

    def get_info(self) -> list[dict[str, int]]:
        return [{"prev_level_complete": 1}]  # of the level before, too

    def close(self) -> None:
        Levels.open -= 1


def test_attempts_at_a_level_of_procgen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "procgen", types.SimpleNamespace(ProcgenGym3Env=Levels))
    monkeypatch.setattr(Levels, "made", [])
    env = Attempts(procgen("coinrun maze", "easy-rescaled", levels=50), attempts=2)
    for seed, game, scale in ((0, "coinrun", 100), (1, "maze", 1)):
        obs, info = env.reset(seed=seed)
        assert (info["env_name"], obs["observation"].max()) == (game, 0)
        steps = [env.step(7) for _ in range(7)]  # the fourth begins the second attempt
        frames = [int(obs["observation"].max()) for obs, *_ in steps]
        assert frames == [1, 2, 2, 0, 1, 2, 2], "never one of the next level"
        assert [s[1] for s in steps] == [0, 0, 10 * scale, 0, 0, 0, 10 * scale]
        assert [s[2] for s in steps] == 6 * [False] + [True]
        assert steps[2][4]["log/success_0"] == steps[6][4]["log/success_1"] == 1
        assert not steps[1][4]["success"]
        first, second = Levels.made[-2:]
        assert first["start_level"] == second["start_level"] and first["start_level"] < 50
        assert first["rand_seed"] != second["rand_seed"], "luck is not repeated"
    assert {made["distribution_mode"] for made in Levels.made} == {"easy"}
    assert Levels.made[0]["start_level"] != Levels.made[2]["start_level"]
    env.close()
    assert Levels.open == 0
    env = Attempts(procgen("coinrun maze", "memory-hard"), attempts=2)
    env.reset(seed=0)
    env.reset(seed=1)
    assert [made["distribution_mode"] for made in Levels.made[-2:]] == ["hard", "memory"]
    env.close()
