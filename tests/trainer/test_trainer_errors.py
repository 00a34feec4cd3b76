"""What a person sees when training cannot begin: one line that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stepwell.errors import NotFound
from stepwell.testing import make_spec
from trainer import accelerate_launch, main
from trainer.config import TrainConfig
from trainer.distributed import World
from trainer.errors import ElsewhereError


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("STEPWELL_DEBUG", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--dataset NAME"),
        (["no_such_recipe"], "unknown recipe 'no_such_recipe'"),
        (["offline", "--bogus", "1"], "unknown setting '--bogus'"),
        (["offline", "--config", "nowhere.toml"], "there is no file nowhere.toml"),
    ],
)
def test_a_mistake_is_one_line_and_debug_shows_where(words, says, capsys, monkeypatch):
    assert main.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("stepwell train: ") and says in err and err.count("\n") == 1
    monkeypatch.setenv("STEPWELL_DEBUG", "1")
    assert main.main(words) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    def broken(words):
        raise ZeroDivisionError

    monkeypatch.setattr(main, "resolve", broken)
    with pytest.raises(ZeroDivisionError):
        main.main(["offline"])


def test_a_killed_process_is_reported_by_accelerate_launch(monkeypatch, capsys):
    """It cannot print a reason itself; any other failure has printed its own."""
    failed = type("F", (), {"timestamp": 0, "exitcode": -9, "local_rank": 1, "pid": 7})()

    def launch():
        raise accelerate_launch.ChildFailedError("trainer.main", {1: failed})

    monkeypatch.setattr(accelerate_launch.ChildFailedError, "format_msg", lambda *_: "")
    monkeypatch.setattr(accelerate_launch.launch, "main", launch)
    assert accelerate_launch.main() == 137
    assert "process 1 was killed by SIGKILL" in capsys.readouterr().err
    failed.exitcode = 3
    assert accelerate_launch.main() == 3
    assert capsys.readouterr().err == ""


def test_what_fails_on_the_first_process_ends_the_others(monkeypatch):
    """`on_main` returns its answer on all ranks, or raises on the first and otherwise elsewhere."""
    world = World.__new__(World)
    world.size, world.rank, world.is_main = 2, 1, False
    monkeypatch.setattr(world, "broadcast", lambda value: ["answer", 0])
    assert world.on_main(lambda: "not asked") == "answer"
    monkeypatch.setattr(world, "broadcast", lambda value: [None, 2])
    with pytest.raises(ElsewhereError) as failed:
        world.on_main(lambda: "not asked")
    assert failed.value.exit_status == 2


def test_a_missing_dataset_is_said_before_anything_is_made(
    client, name, tmp_path, capsys, monkeypatch
):
    """One line with the nearest name and the words that would have waited for it; exit 1."""
    monkeypatch.setenv("STEPWELL_URL", client.url)
    client.create_dataset(name, make_spec())
    words = ["offline", "--dataset", f"{name}x", "--run", "r", "--output", str(tmp_path)]
    assert main.main([*words, "--processes", "2"]) == 1
    err = capsys.readouterr().err
    assert f"{name}x" in err and f"did you mean {name!r}" in err
    assert "--data.wait-for-data" in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_missing_dataset_is_said_before_torch_loads(service, name, tmp_path):
    """Whatever the recipe: all are read, one is asked for."""
    words = ["pendulum_stitch", "--dataset", name, "--run", "r", "--output", str(tmp_path)]
    code = (
        "import sys; from trainer.main import main; from trainer.options import resolve\n"
        "from trainer.recipes import ABLATIONS, RECIPES\n"
        "for recipe in (*RECIPES, *ABLATIONS): resolve([recipe])\n"
        f"print(main({words!r}), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"STEPWELL_URL": service.url},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1 False\n"
    assert f"there is no dataset {name!r}" in done.stderr


def test_a_run_that_may_be_resumed_does_not_need_its_dataset(client, name, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPWELL_URL", client.url)
    config = TrainConfig(dataset=name, run="r", output=tmp_path)
    with pytest.raises(NotFound):
        main.require_dataset(config)
    (tmp_path / "r").mkdir()
    main.require_dataset(config)
    with pytest.raises(NotFound):
        main.require_dataset(config.replace(resume="never"))
    monkeypatch.setenv("STEPWELL_URL", "http://127.0.0.1:1")
    main.require_dataset(config.replace(run="s"))  # what is wrong there is said by what needs it
