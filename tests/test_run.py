"""`stepwell run`: the whole loop by one command, whatever is killed."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepwell import Client, cli
from stepwell._locks import take_lock
from stepwell.errors import InvalidData
from stepwell.testing import wait_until
from tests.scripts import status_of
from trainer.options import resolve
from workbench.run.command_line import parse

RUN = ["run", "stepwell/Recall-v0", "--port", "0", "--run", "cue"]
COMMAND = [sys.executable, "-m", "stepwell.cli"]
SMALL = """
envs = 2
episodes = 3
updates_per_step = 0.5

[train]
data.window = 10
data.ratio.min_size = 50
data.ratio.buffer = 2000
schedule.publish_every = 20
schedule.checkpoint_every = 20

[collect]
heartbeat_every = 0.5
"""


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Starts `stepwell run` in a folder; what still runs at the end is killed."""
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    started: list[subprocess.Popen[str]] = []

    def go(*words: str) -> subprocess.Popen[str]:
        with (tmp_path / f"{len(started)}.txt").open("w") as log:
            process = subprocess.Popen(
                [*COMMAND, *RUN, str(file), "--data", str(tmp_path / "loop"), *words],
                stdout=log,
                stderr=log,
                text=True,
                env={k: v for k, v in os.environ.items() if not k.startswith("STEPWELL_")},
            )
        started.append(process)
        return process

    yield go
    for process in started:
        for one in [*_children(process), process]:
            if isinstance(one, subprocess.Popen) or one.is_running():
                one.kill()
        process.wait()


def refused(tmp_path: Path, *words: str) -> int:
    """The exit status of a `stepwell run` that ends before it starts anything, in this process."""
    return status_of(cli.main, [*RUN, "--data", str(tmp_path / "loop"), *words])


def _children(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _part(process: "subprocess.Popen[str]", command: str) -> psutil.Process:
    """The process of `stepwell COMMAND`."""
    found: list[psutil.Process] = []

    def look() -> bool:
        found.clear()
        for child in _children(process):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found.extend([child] * (child.cmdline()[3:4] == [command]))
        return bool(found)

    wait_until(look, 60, what=f"stepwell {command}")
    return found[0]


def _said(tmp_path: Path, number: int = 0) -> str:
    return (tmp_path / f"{number}.txt").read_text()


def _url(tmp_path: Path, number: int = 0) -> str:
    wait_until(lambda: "service http" in _said(tmp_path, number), 60, what="the service")
    return _said(tmp_path, number).split("service ", 1)[1].split()[0]


def test_from_nothing_to_evaluated_policies(
    start: Any, tmp_path: Path, start_service: Callable[..., Any]
) -> None:
    """No data, no service, no policy at the start; whatever is killed once comes back."""
    process = start("--train.updates", "200")
    with Client(_url(tmp_path)) as client:
        wait_until(lambda: _versions(client) >= 3, 120, what="a few versions")
    for number, command in enumerate(("train", "collect", "evaluate", "serve"), 1):
        _part(process, command).kill()
        wait_until(
            lambda number=number: _said(tmp_path).count("broke (killed by SIGKILL)") >= number,
            30,
            what=f"{command} is missed",
        )
    assert process.wait(180) == 0, _said(tmp_path)
    assert "run cue finished" in _said(tmp_path)
    with start_service(tmp_path / "loop").client() as client:
        assert client.run("cue").status == "finished"
        scored = {e.policy for e in client.evaluations(env="stepwell/Recall-v0")}
        assert {"cue/0", "cue/200"} <= scored
        assert any("best" in policy.aliases for policy in client.policies("cue"))
        rows = client.sql(
            "select count(*), count(distinct id) from trajectories "
            "where dataset = 'cue' and purpose = 'train'"
        ).rows
        assert rows[0][0] == rows[0][1] >= 20
        ratio = client.run("cue").latest["ratio/samples_per_insert"]
        assert ratio == pytest.approx(0.5 * 16)


@pytest.mark.long
def test_killed_or_interrupted_the_same_command_continues(
    start: Any, tmp_path: Path, start_service: Callable[..., Any]
) -> None:
    """Its parts end with it, also when it is killed. At the end the last version is scored, too,
    although the run is "stopped" when it continues."""
    process = start("--train.updates", "400")
    with Client(_url(tmp_path)) as client:
        wait_until(lambda: _versions(client) >= 2, 120, what="a few versions")
    children = _children(process)
    assert len(children) >= 4
    process.kill()
    process.wait()
    wait_until(lambda: not [p for p in children if _lives(p)], 60, what="the end of the parts")

    again = start("--train.updates", "400", "--no-evaluate")
    with Client(_url(tmp_path, 1)) as client:
        before = _versions(client)  # the first may have got further than to its second
        wait_until(lambda: _versions(client) > before, 120, what="more versions")
        assert [run.name for run in client.runs("train")] == ["cue"]
    children = _children(again)
    again.send_signal(signal.SIGINT)
    assert again.wait(240) == 130, _said(tmp_path, 1)
    assert "the same command continues" in _said(tmp_path, 1)
    assert not [p for p in children if p.is_running()]

    last = start("--train.updates", "400")
    assert last.wait(180) == 0, _said(tmp_path, 2)
    assert "run cue finished" in _said(tmp_path, 2)
    log = (tmp_path / "loop" / "logs" / "cue" / "train.log").read_text()
    assert log.count("resumed after ") >= 2
    with start_service(tmp_path / "loop").client() as client:
        scored = {e.policy for e in client.evaluations(env="stepwell/Recall-v0")}
    assert "cue/400" in scored


def test_a_part_that_is_called_wrongly_ends_it_with_the_reason(start: Any, tmp_path: Path) -> None:
    process = start("--collect.envs-per-worker", "4")
    assert process.wait(90) == 1
    assert "collect-0: " in _said(tmp_path) and "unknown setting" in _said(tmp_path)
    assert not _children(process)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--train.gamma", "3"], "agent.losses.gamma"),
        (["--recipe", "onlin"], "'online'"),
        (["--envs", "0"], "--envs: expected at least 1, got 0"),
        (["--url", "http://127.0.0.1:9"], "no service answers at http://127.0.0.1:9"),
        (["--recipe", "offline", "--warm-up-steps", "0"], "the first steps must be random"),
        (["--no-train", "--no-evaluate", "--collectors", "0"], "nothing to do"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    tmp_path: Path, words: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert refused(tmp_path, *words) in (1, 2)
    assert reason in capfd.readouterr().err


@pytest.mark.parametrize(
    ("folder", "said"), [("", "is used by another"), ("logs/cue", "run cue is run by another")]
)
def test_two_at_once_are_refused_at_once(
    tmp_path: Path, service: Any, folder: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The parts of one that was killed are waited for; those of one that runs will not stop."""
    used = tmp_path / "loop" / folder
    used.mkdir(parents=True)
    with take_lock(used / "run.lock", lambda _: AssertionError("nobody else")):
        assert refused(tmp_path, *(["--url", service.url] if folder else [])) == 2
    assert f"{said} `stepwell run`, process {os.getpid()}" in capfd.readouterr().err


def test_later_files_win_and_flags_win_over_files(tmp_path: Path) -> None:
    """Arguments of the environment and plug-ins add up."""
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text(
        'env = "A-v0"\nenvs = 4\nenv_args = ["size=5", "slip=0"]\nplugin = ["mine"]\n'
        "[train]\nupdates = 1\ndata.batch = 1\n"
    )
    two.write_text('envs = 3\nmin-size = 7\nenv_args = ["size=6"]\n[train]\nupdates = 2\n')
    args, sections = parse([str(one), str(two), "--train.updates", "3", "--env-args", "slip=1"])
    assert (args.env, args.envs, args.min_size, args.plugin) == ("A-v0", 3, 7, ["mine"])
    assert args.env_args == ["size=6", "slip=1"]
    assert sections["train"] == [
        *("--updates=1", "--data.batch=1", "--updates=2"),
        *("--updates", "3"),
    ]
    assert parse(["B-v0", str(one), "--envs", "9"])[0].env == "B-v0"
    with pytest.raises(InvalidData, match="two.toml: unknown setting 'episode'.*'episodes'"):
        two.write_text("episode = 3")
        parse([str(one), str(two)])


def test_the_tables_of_a_mixture_reach_the_trainer_whole(tmp_path: Path) -> None:
    file = tmp_path / "mixture.toml"
    select = "SELECT id FROM trajectories WHERE dataset = 'a \\\\ b'"
    table = f'[[train.sources]]\nselect = "{select}"\nshare = '
    file.write_text(f'env = "A-v0"\n{table}0.5\n{table}0.5\n')
    _, sections = parse([str(file)])
    config = resolve(["offline", *sections["train"]]).config
    assert [source.select for source in config.sources] == [select.replace("\\\\", "\\")] * 2


def test_the_help_of_a_file_begins_with_its_comment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And shows its values as the defaults."""
    file = tmp_path / "robot.toml"
    file.write_text("# A robot.\n#\n#     stepwell run robot.toml\nenvs = 33\n# not this\n")
    with pytest.raises(SystemExit) as ended:
        parse([str(file), "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "A robot.\n\n    stepwell run robot.toml\n\nCollect" in said
    assert "(default: 33)" in said and "not this" not in said


@pytest.mark.parametrize("words", [[], ["A-v0", "B-v0"]])
def test_one_environment_is_needed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert f"expected one ENV, or FILE.toml with env = …, got {' '.join(words) or 'none'}" in (
        capsys.readouterr().err
    )


def _versions(client: Client) -> int:
    return sum(len(client.policies(run.name)) for run in client.runs("train"))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
