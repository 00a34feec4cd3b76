"""The words and files of `stepwell run`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from stepwell import Client
from stepwell.errors import InvalidData
from workbench.run import command_line
from workbench.run.main import _remember, _require_data
from workbench.run.parts import Plan, collect_words, growing_data


def parse(*words: str) -> tuple[Any, dict[str, list[str]]]:
    return command_line.parse(words)


def test_settings_of_a_part_follow_its_name() -> None:
    args, sections = parse(
        *("Pendulum-v1", "--train.data.batch", "4", "--envs", "2", "--collect.tags", "a", "b"),
        *("--evaluate.sample", "--train.agent.losses.gamma=0.5"),
    )
    assert (args.env, args.envs) == ("Pendulum-v1", 2)
    assert sections == {
        "train": ["--data.batch", "4", "--agent.losses.gamma=0.5"],
        "collect": ["--tags", "a", "b"],
        "evaluate": ["--sample"],
    }


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(
        'envs = 3\nseed = 7\nenv-args = ["delay=3"]\nevaluate = false\n'
        "[train]\ndata.batch = 4\ndata.epochs = false\n[collect]\ntags = ['x', 'y']\n"
    )
    args, sections = parse("Recall-v0", str(file), "--envs", "5", "--train.data.batch", "9")
    assert (args.envs, args.seed, args.env_args, args.evaluate) == (5, 7, ["delay=3"], False)
    assert args.run == "recall-v0"
    assert sections["train"] == ["--data.batch=4", "--data.epochs=false", "--data.batch", "9"]
    assert sections["collect"] == ["--tags", "x", "y"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("evns = 3", "unknown setting 'evns'; the nearest known one is 'envs'"),
        ("envs = [3]", "envs; expected a number or a text"),
        ("env_args = 'delay=3'", "env_args; expected a list"),
        ("envs = true", "envs; expected a number or a text; got True"),
        ("[trainer]\nx = 1", "unknown setting 'trainer'; the nearest known one is 'train'"),
        ("envs =", "not TOML"),
    ],
)
def test_a_wrong_file_is_named_with_the_setting(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "my.toml"
    file.write_text(text)
    with pytest.raises(InvalidData) as caught:
        parse("Recall-v0", str(file))
    assert reason in str(caught.value) and str(file) in str(caught.value)


def test_a_value_of_the_wrong_type_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text("envs = 'many'")
    with pytest.raises(SystemExit):
        parse("Recall-v0", str(file))
    assert "--envs: invalid int value: 'many'" in capsys.readouterr().err


def test_a_run_has_one_task(tmp_path: Path) -> None:
    """Another environment, other arguments or another recipe under its name are refused."""
    path = tmp_path / "task.json"

    def plan(env: str, *env_args: str) -> Plan:
        none: dict[str, list[str]] = {}
        return Plan(env, env_args, "online", "r", "d", tmp_path, 0, 1, 1, True, True, 1, [], None,
                    [], none)  # fmt: skip

    _remember(plan("A-v0", "size=3"), path)
    _remember(plan("A-v0", "size=3"), path)
    for other in (plan("A-v0", "size=4"), plan("B-v0", "size=3")):
        with pytest.raises(InvalidData, match="give this one a name"):
            _remember(other, path)


def test_settings_are_derived_from_the_whole_warm_up() -> None:
    """Unless `--min-size` says when the first update is made, or the settings are the recipe's."""
    data = {"wait_for_data": 0, "refresh_every": 0, "ratio": None}

    def words(derive: str, warm_up_steps: int | None, min_size: int | None = None) -> list[str]:
        return growing_data(
            {"derive": derive, "data": data},
            collectors=1,
            updates_per_step=None,
            warm_up_steps=warm_up_steps,
            min_size=min_size,
        )

    def size_in(words: list[str]) -> str:
        return words[words.index("--data.ratio.min-size") + 1]

    assert size_in(words("all", 700)) == "700"
    assert size_in(words("all", 700, min_size=50)) == "50"
    assert "--data.ratio.min-size" not in words("off", 700)


@pytest.mark.parametrize(
    ("warm_up", "refused"), [(0, True), (4999, True), (5000, False), (None, False)]
)
def test_fewer_random_steps_than_the_trainer_waits_for_are_refused(
    client: Client, name: str, tmp_path: Path, warm_up: int | None, refused: bool
) -> None:
    """Else collectors would wait for a policy, and the trainer for their steps."""
    parts: dict[str, list[str]] = {"train": []}
    plan = Plan("A-v0", [], "online", name, name, tmp_path, 0, 1, 1, True, True, 1, [], warm_up,
                [], parts)  # fmt: skip
    with pytest.raises(InvalidData, match="warm-up-steps") if refused else nullcontext():
        _require_data(plan, client, 5000)


def test_collectors_explore_at_first(tmp_path: Path) -> None:
    """During the first half of the updates, or where settings are derived online over many steps;
    not if the user's words explore otherwise, or the first steps are random anyway."""

    def words(derive: str, *more: str, updates: int = 5000) -> list[str]:
        none: list[str] = []
        plan = Plan("A-v0", none, "r", "r", "d", tmp_path, 0, 1, 1, True, True, 1, none, None, none,
                    {"collect": more})  # fmt: skip
        data = {"ratio": {"min_size": 700}}
        return collect_words(plan, 0, {"derive": derive, "updates": updates, "data": data})

    def exploration(words: list[str]) -> list[str]:
        first = words.index("--epsilon.kind")
        return words[first : first + 6]

    greedy = ["--epsilon.kind", "greedy", "--epsilon.clock", "policy", "--epsilon.steps"]
    assert exploration(words("off")) == [*greedy, "2500"]
    assert exploration(words("off", updates=1)) == [*greedy, "1"]
    assert words("off", "--epsilon.kind", "none").count("--epsilon.kind") == 1
    assert "--epsilon.steps" not in words("off", "--epsilon.kind=none")
    assert "--epsilon.kind" not in words("off", "--config", "mine.toml")
    assert "--epsilon.kind" not in words("all")
    assert exploration(words("online"))[:3] == ["--epsilon.kind", "repeat", "--epsilon.clock"]
    assert words("online", "--epsilon.kind", "none").count("--epsilon.kind") == 1
    warm_up = words("online").index("--warm-up-steps")
    assert words("online")[warm_up + 1] == "700" and "--warm-up-steps" not in words("off")
