"""Collectors on one machine never share an outbox, and take over what dead ones left."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collector.config import CollectConfig
from collector.envs import EnvError
from collector.outbox_slots import open_outbox
from collector.registered_run import configured_env, prepare
from stepwell._outbox_folder import entries
from stepwell.errors import ServiceUnreachable
from stepwell.outbox import Outbox
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec()


class Nobody:
    """A service that knows its datasets and takes nothing."""

    def __init__(self, url: str = "http://a", created_at: float = 1.0):
        self.url, self.created_at = url, created_at

    def with_options(self, **_: object) -> "Nobody":
        return self

    def dataset(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(created_at=self.created_at)

    def ready(self) -> bool:
        return False

    def post_stream(self, *_: object, **__: object) -> None:
        raise ServiceUnreachable("nobody there")


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Outbox]]:
    """open_outbox in an empty folder; all are closed at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPWELL_OUTBOX")
    boxes: list[Outbox] = []

    def open_(client: Nobody | None = None, **options: Any) -> Outbox:
        boxes.append(open_outbox(client or Nobody(), "d", SPEC, **options))  # type: ignore[arg-type]
        return boxes[-1]

    yield open_
    for box in boxes:
        box.close(0)


def leave(box: Outbox, count: int) -> list[str]:
    """Put so many and die: the ids."""
    made = [make_trajectory(SPEC, seed=i) for i in range(count)]
    for trajectory in made:
        box.put(trajectory)
    box.close(0)
    return [t.id for t in made]


def waiting(folder: Path) -> list[str]:
    return [e.id for e in entries(folder)]


def test_each_collector_has_a_slot_of_its_own(
    opened: Callable[..., Outbox], tmp_path: Path
) -> None:
    """The first free one, also where somebody took it since we looked."""
    root = tmp_path / "stepwell-outbox" / "d"
    boxes = [opened() for _ in range(3)]
    assert [b.directory.resolve() for b in boxes] == [root / "0", root / "1", root / "2"]
    boxes[1].close(0)
    assert opened().directory.resolve() == root / "1"


def test_the_root_may_lie_elsewhere(
    opened: Callable[..., Outbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_OUTBOX", str(tmp_path / "all"))
    assert opened().directory == tmp_path / "all" / "d" / "0"


def test_what_dead_collectors_left_is_taken_over_in_order(
    opened: Callable[..., Outbox], tmp_path: Path
) -> None:
    """Behind the own rest; theirs are empty then, and free. What living ones hold stays."""
    said: list[str] = []
    own, alive, dead, elsewhere = opened(), opened(), opened(), opened(directory=tmp_path / "x")
    alive.put(make_trajectory(SPEC))
    ids = [*leave(own, 2), *leave(dead, 3)]
    ids += leave(elsewhere, 2)
    box = opened(directory=own.directory, say=said.append)
    assert waiting(box.directory) == ids[:5] and box.pending == 5
    assert box.pending_bytes == sum(e.size for e in entries(box.directory))
    assert not waiting(dead.directory) and alive.pending == 1
    (line,) = said
    assert "took over 3 items" in line and str(dead.directory.resolve()) in line
    box.close(0)
    # Beside a directory of one's own, and where all are by default.
    box = opened(directory=tmp_path / "mine")
    assert waiting(box.directory) == [*ids[5:], *ids[:5]]


@pytest.mark.parametrize(
    ("client", "options"),
    [
        (Nobody("http://b", created_at=2.0), {}),
        (Nobody(), {"partition": "protected"}),
    ],
    ids=["another service", "another partition"],
)
def test_what_is_meant_for_others_is_left_to_them(
    opened: Callable[..., Outbox], client: Nobody, options: dict[str, Any]
) -> None:
    """Also in the first slot: that one is not taken either."""
    first, second = opened(), opened()
    ids = leave(first, 1), leave(second, 2)
    box = opened(client, **options)
    assert box.directory.name == "2" and box.pending == 0
    assert (waiting(first.directory), waiting(second.directory)) == ids


def test_a_service_that_moved_is_the_same_one(opened: Callable[..., Outbox]) -> None:
    first, second = opened(), opened()
    ids = [*leave(first, 1), *leave(second, 1)]
    assert waiting(opened(Nobody("http://moved", created_at=1.0)).directory) == ids


def test_what_strangers_left_is_not_sent_in_our_name(
    opened: Callable[..., Outbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = opened(), opened()
    first.close(0)
    leave(second, 1)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(".").st_uid + 1)
    assert opened().pending == 0


def test_an_outbox_that_does_not_read_stops_nobody(
    opened: Callable[..., Outbox], tmp_path: Path
) -> None:
    for number, text in enumerate(("", "[]", '{"dataset": "d"}')):
        folder = tmp_path / "stepwell-outbox" / "d" / f"bad{number}"
        folder.mkdir(parents=True)
        (folder / "outbox.json").write_text(text)
    (tmp_path / "stepwell-outbox" / "d" / "a file").write_text("")
    assert opened().pending == 0


def test_the_end_of_a_dead_collector_s_run_is_told_by_the_next(
    opened: Callable[..., Outbox],
) -> None:
    """Once: it is an item of the outbox that it left."""
    told: list[tuple[str, dict[str, Any]]] = []
    run = SimpleNamespace(name="r", status="running", heartbeat_at=0.0)

    class Hears(Nobody):
        def run(self, _: str) -> SimpleNamespace:
            return run

        def patch_run(self, name: str, **fields: Any) -> None:
            told.append((name, fields))

    first, second = opened(), opened()
    first.close(0)
    second.end_run("r", "failed", "8 wait")
    second.close(0)
    for _ in range(2):
        assert opened(Hears()).close(60)
    assert told == [("r", {"status": "failed", "error": "8 wait"})]


def test_a_plugin_registers_what_it_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--plugin imports a module from where the person stands; its environments are known."""
    (tmp_path / "my_plugin.py").write_text(
        "import gymnasium\n"
        "from collector.builtin.recall import Recall\n"
        "gymnasium.register('FromPlugin-v0', lambda **kw: Recall(**kw))\n"
    )
    code = (
        "from collector.config import CollectConfig\n"
        "from collector.registered_run import configured_env, prepare\n"
        "c = CollectConfig(env='FromPlugin-v0', dataset='d', random=True, plugin=('my_plugin',),\n"
        "                  env_args=('delay=7',))\n"
        "prepare(c); print(configured_env(c).unwrapped.delay)\n"
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
    assert done.stdout.strip() == "7"


def test_a_plugin_that_is_not_there_is_named() -> None:
    config = CollectConfig(env="X-v0", dataset="d", random=True, plugin=("no_such_plugin",))
    with pytest.raises(EnvError, match="--plugin no_such_plugin"):
        prepare(config)
    with pytest.raises(EnvError, match="--plugin my.module"):
        configured_env(config)
