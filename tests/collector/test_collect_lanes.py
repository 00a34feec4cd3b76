"""Collectors on one machine never share an outbox, and take up what a crashed one left."""

import subprocess
import sys
from pathlib import Path

import pytest

from collector.config import CollectConfig
from collector.envs import EnvError
from collector.lanes import free_lane
from collector.session import make_env, prepare
from stepwell.outbox import Outbox
from stepwell.testing import make_spec, make_trajectory


class Nobody:
    """A service that never answers."""

    def post(self, *_: object, **__: object) -> None:
        raise ConnectionError("nobody there")


def test_the_first_directory_that_nobody_holds(tmp_path: Path) -> None:
    """A held lane is passed over, a left one (with what waits in it) is taken first."""
    spec = make_spec()
    assert free_lane(tmp_path) == tmp_path / "0"
    first = Outbox(tmp_path / "0", Nobody(), "d", spec)  # type: ignore[arg-type]
    assert free_lane(tmp_path) == tmp_path / "1"
    second = Outbox(tmp_path / "1", Nobody(), "d", spec)  # type: ignore[arg-type]
    assert free_lane(tmp_path) == tmp_path / "2"
    first.put(make_trajectory(spec))
    first.close(0)
    assert free_lane(tmp_path) == tmp_path / "0"
    again = Outbox(free_lane(tmp_path), Nobody(), "d", spec)  # type: ignore[arg-type]
    assert again.pending == 1
    again.close(0)
    second.close(0)


def test_a_plugin_registers_what_it_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--plugin imports a module from where the person stands; its environments are known."""
    (tmp_path / "my_plugin.py").write_text(
        "import gymnasium\n"
        "from collector.testing import FakeEnv\n"
        "gymnasium.register('FromPlugin-v0', lambda **kw: FakeEnv(**kw))\n"
    )
    code = (
        "from collector.config import CollectConfig\n"
        "from collector.session import make_env, prepare\n"
        "c = CollectConfig(env='FromPlugin-v0', dataset='d', random=True, plugin=('my_plugin',),\n"
        "                  env_args=('lengths=[7]',))\n"
        "prepare(c); print(make_env(c).unwrapped.lengths)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "(7,)"


def test_a_plugin_that_is_not_there_is_named() -> None:
    config = CollectConfig(env="X-v0", dataset="d", random=True, plugin=("no_such_plugin",))
    with pytest.raises(EnvError, match="--plugin no_such_plugin"):
        prepare(config)
    with pytest.raises(EnvError, match="--plugin my.module"):
        make_env(config)
