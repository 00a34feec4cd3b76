"""Command lines and config files: what comes later wins, mistakes are named."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from collector.collect import FIRST_SEED, LAST_SEED, episode_seeds
from collector.config import CollectConfig, EvaluateConfig, UsageError, parse
from collector.control import Control
from collector.main import evaluate, main
from collector.registered_run import resolved, slug
from stepwell._settings import options

BASE = ["--env", "E-v0", "--dataset", "d"]


def collect(*argv: str) -> CollectConfig:
    return parse(CollectConfig, list(argv), "stepwell collect")


def test_files_and_flags_later_wins(tmp_path: Path) -> None:
    """Nested tables, lists, booleans and numbers of TOML all have their flag."""
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text(
        'env = "A"\ndataset = "d"\nrandom = true\nenvs = 3\ntags = ["x", "y"]\n'
        'sample = false\n[epsilon]\nkind = "greedy"\nrandomize = false\nstart = 0.3\n'
    )
    b.write_text('env = "B"\n')
    config = collect("--config", str(a), f"--config={b}", "--epsilon.start", "0.2")
    assert (config.env, config.envs, config.tags, config.sample) == ("B", 3, ("x", "y"), False)
    assert (config.epsilon.kind, config.epsilon.randomize, config.epsilon.start) == (
        "greedy",
        False,
        0.2,
    )
    assert collect("--envs", "5", "--config", str(a)).envs == 5, "flags win"


def test_a_key_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[epsilon]\nstrat = 0.3\n")
    with pytest.raises(UsageError, match=r"'epsilon\.strat'.*'epsilon\.start'"):
        collect(*BASE, "--random", "--config", str(path))
    with pytest.raises(UsageError, match=r"nothing\.toml"):
        collect(*BASE, "--random", "--config", "nothing.toml")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--random", "--policy", "p"], "--policy"),
        ([], "--random"),
        (["--random", "--wait-for-policy"], "wait_for_policy"),
        (["--random", "--envs", "0"], "envs: expected greater than or equal to 1, got 0"),
        (["--random", "--episodes", "-1"], "episodes"),
        (["--random", "--max-steps", "0"], "max_steps"),
        (["--random", "--heartbeat-every", "0"], "heartbeat_every"),
        (["--random", "--epsilon.kind", "greedy", "--epsilon.start", "7"], "epsilon.start"),
        (["--random", "--epsilon.start", "0.7"], "epsilon.start: the chosen kind has no such"),
        (["--random", "--epsilon.kind", "bilevel"], "epsilon.horizon: expected a value"),
    ],
)
def test_contradictions_are_refused_by_the_name_of_the_setting(argv: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        collect(*BASE, *argv)


@pytest.mark.parametrize(
    ("program", "name"), [(main, "stepwell collect"), (evaluate, "stepwell evaluate")]
)
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--envs", "three"], "--envs: expected a valid integer, got 'three'"),
        (["--device"], "--device: expected a value after it"),
        (["--devize", "cpu"], "unknown setting '--devize'.*'device'"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    program: Callable[[list[str]], int],
    name: str,
    argv: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert program(["--env", "E", "--policy", "p", "--dataset", "d", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"{name}: {says}", line)


def test_nothing_given_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and evaluate([]) == 2 and evaluate(["--random"]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert re.match("stepwell collect: missing --env.*; see stepwell collect --help", first)
    assert second.startswith("stepwell evaluate: policy: give one of --policy")
    assert third.startswith("stepwell evaluate: env: required without --policy")


def test_every_option_has_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """The docstring under a field is the help: a field without one teaches nobody."""
    for kind in (CollectConfig, EvaluateConfig):
        with pytest.raises(SystemExit):
            parse(kind, ["--help"], "x")
        text = capsys.readouterr().out
        for option in options(kind).values():
            assert option.help and f"  {option.flag} " in text, option.name
        assert " e.g. Pendulum-v1 " in " ".join(text.split()), "cut within the sentence"


def test_the_schema_of_a_command_loads_no_torch() -> None:
    code = (
        "import sys, contextlib, collector.main as m\n"
        "with contextlib.suppress(SystemExit): m.main(['--schema'])\n"
        "assert not {'torch', 'gymnasium'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    schema = json.loads(done.stdout)
    assert schema["properties"].keys() == options(CollectConfig).keys()
    assert schema["required"] == ["env", "dataset"]


def test_the_stored_config_keeps_no_token() -> None:
    config = collect(*BASE, "--random", "--token", "stw_secret", "--outbox", "x/y")
    stored = resolved(config, run="r")
    assert "token" not in stored and "stw_secret" not in repr(stored)
    assert stored["run"] == "r" and stored["outbox"] == "x/y"
    assert stored["epsilon"]["kind"] == "none"


def test_names_are_made_of_what_services_accept() -> None:
    assert slug("stepwell/Recall-v0") == "stepwell-recall-v0"
    assert slug("ÄÖ") == "x" and len(slug("a" * 99)) == 40


def test_collected_seeds_stay_clear_of_evaluation_seeds() -> None:
    """Distinct, repeatable, as many as asked for, and never among the small ones."""
    seeds = list(episode_seeds(3, 1000))
    assert seeds == list(episode_seeds(3, 1000)) and len(set(seeds)) > 990
    assert all(FIRST_SEED <= s < LAST_SEED for s in seeds) and FIRST_SEED > 1_000_000
    assert next(episode_seeds(4)) != seeds[0]


def test_commands_move_between_states_that_allow_them() -> None:
    """pause persists until resume; nothing revives what was stopped; "none" changes nothing."""
    control = Control()
    control.go()
    strip = []
    for word in ("none", "pause", "pause", "none", "resume", "drain", "resume", "stop", "drain"):
        control.command(word)
        strip.append(control.state)
    assert strip == [
        "running",
        "paused",
        "paused",
        "paused",
        "running",
        "draining",
        "draining",
        "stopped",
        "stopped",
    ]
    assert control.stopping
