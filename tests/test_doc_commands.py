"""Every command of the documentation is run as it is written there, or says why it is not.

Commands are the indented lines of docs/, examples/README.md and CONTRIBUTING.md (README.md has
tests/test_readme.py). They run page by page, in their order, in one folder, against one service
that holds what the pages name. A line with the comment `# not run by the tests` is not run. Others
run with the numbers of SHORT: the pages train and play for minutes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amago_model import registry
from collector.builtin.__main__ import main as generate
from collector.envs import make
from collector.interface import interface_of
from stepwell import Box, EnvSpec, cli
from stepwell.testing import make_trajectory
from tests.conftest import ServiceProcess, service_process
from tests.scripts import status_of
from tests.server.imports import test_imports_amago as amago
from tests.server.imports import test_imports_rlds as rlds

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    **{path.name: path for path in sorted((ROOT / "docs").rglob("*.md"))},
    **{name: ROOT / name for name in ("examples/README.md", "CONTRIBUTING.md")},
}
COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\S+/bin/)?(?:stepwell|python3?|pip|curl|accelerate|make|cd|git) \S"
)
NOT_RUN = re.compile(r" # .*\bnot run by the tests\b")
SHORT = {
    "python -m collector.builtin pendulum-mixed": "--steps 4000",
    "stepwell collect": "--episodes 4",
    "stepwell collect --config": "",
    "stepwell collect --env Pendulum-v1 --dataset live --random": "",
    "stepwell evaluate": "--episodes 2",
    "stepwell evaluate --policy first --env Pendulum-v1 --videos 3": "--episodes 1 --videos 1",
    "stepwell train": "--updates 3 --device cpu",
}
"""What is added to lines that begin so; the last of an option counts."""
README = "tests/test_readme.py:test_every_command_of_the_readme_works_as_it_is_pasted"
BATTLES = "tests/test_examples.py:test_battles_are_mixed_and_no_illegal_action_is_played"
APART = "tests/test_examples.py:test_one_collects_and_another_learns"
ELSEWHERE = {
    "accelerate launch -m trainer.main": README,
    "python examples/battles.py": BATTLES,
    "stepwell compare hopper": "tests/test_compare.py:test_table_json_sql_and_picture_agree",
    "stepwell dash": "tests/browser/conftest.py:Dashboard",
    "stepwell estimate first": README,
    "stepwell launcher --data": (
        "tests/workbench/test_launcher.py:test_launches_become_processes_or_errors"
    ),
    "stepwell reproduce first --name": README,
    "stepwell run examples/15_battles.toml": BATTLES,
    "stepwell run examples/21_collect_only.toml": APART,
    "stepwell run examples/22_learn_only.toml": APART,
    "stepwell runs export": (
        "tests/workbench/test_runs_export.py:test_a_real_tool_gets_each_point_once"
    ),
    "stepwell serve": "tests/conftest.py:ServiceProcess",
    "stepwell train offline --dataset pendulum --run two": README,
}
"""Beginnings of lines that another test runs, with other names or numbers, and that test."""
PAGES_ELSEWHERE = {
    "maintenance.md": "tests/test_maintenance_doc.py:test_the_commands_do_what_the_page_says"
}
FINDS = "stepwell doctor my-data"
"""Ends with 1: it has found the duplicate that is there (docs/reference/doctor.md)."""
SAYS = {
    "stepwell annotate hopper --policy first:best": "annotated 6 trajectories of hopper",
    "stepwell collect --config collect.toml": "4 episodes",
    "stepwell datasets ratio maze": "memory",
    "stepwell doctor my-data": "duplicate",
    "stepwell doctor my-data --repair clean": "my-data@clean",
    "stepwell evaluate --scripted my_policies:Remembers": "1.00",
    "stepwell evaluate first:best --episodes 30": "first/500",
    "stepwell outbox list": "runs/first/outbox",
    "stepwell recommend pendulum": "agent.losses.gamma",
    "stepwell run examples/00_meta_frozen_lake.toml --help": "frozen",
    "stepwell runs metrics first --keys": "value/q_mean",
    "stepwell sql --saved long-ones": "id",
    "stepwell versions show halfcheetah@v2 --card": "halfcheetah@v2",
    "stepwell workers list": "train-first",
}  # fmt: skip
"""What lines that begin so print."""


# --- the lines --------------------------------------------------------------------------------


def commands(page: str) -> list[str]:
    """The commands of a page, each with its continuation lines and its comment.

    A line that begins with $ is a transcript, not something to paste.
    """
    text = PAGES[page].read_text()
    fenced = re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"(?:^ {4,}\S.*\n)+", text, re.MULTILINE)
    found = []
    for block in (*fenced, *indented):
        command = ""
        for line in textwrap.dedent(block).replace("\\\n", " ").splitlines():
            command = f"{command}\n{line}" if command else line
            if not COMMAND.match(command):
                command = ""
            elif not quote_is_open(command):
                found.append(command)
                command = ""
        assert not command, f"{page}: {command}"
    return found


def quote_is_open(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def fate(page: str, line: str) -> str:
    """What the tests do with a line: run it, leave it out, or run it elsewhere."""
    fates = {
        "leave out": bool(NOT_RUN.search(line)),
        "elsewhere": page in PAGES_ELSEWHERE or line.startswith(tuple(ELSEWHERE)),
    }
    found = [name for name, true in fates.items() if true] or ["run"]
    assert len(found) == 1, f"{page}: more than one of {found}: {line}"
    return found[0]


def test_every_line_has_one_fate_and_the_tables_are_true() -> None:
    lines = [(page, line) for page in PAGES for line in commands(page)]
    fates = [fate(page, line) for page, line in lines]
    assert len(lines) > 150 and fates.count("run") > 100
    for beginning in (*ELSEWHERE, *SAYS, *SHORT, FINDS):
        assert any(line.startswith(beginning) for _, line in lines), f"no page has {beginning}"
    for test in (*ELSEWHERE.values(), *PAGES_ELSEWHERE.values()):
        file, name = test.split(":")
        source = (ROOT / file).read_text()
        assert re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE), test


# --- the world --------------------------------------------------------------------------------

PENDULUM = EnvSpec.of(Box((3,)), Box((1,), low=-2.0, high=2.0), env="Hopper-v5")
"""So that the policy of `first` fits."""
CHEETAH = EnvSpec.of(Box((17,)), Box((6,), low=-1.0, high=1.0), env="HalfCheetah-v5")
ROBOT = EnvSpec.of(Box((2,)), Box((2,), low=-1.0, high=1.0), env="my-robot")
GOALS = EnvSpec(
    observations={"observation": Box((2,)), "goal": Box((2,)), "achieved": Box((2,))},
    actions={"action": Box((2,), low=-1.0, high=1.0)},
)
MY_ENVS = """
import gymnasium
from gymnasium.envs.classic_control import PendulumEnv


class Robot(PendulumEnv):
    def step(self, action):
        *result, info = super().step(action)
        return *result, info | {"by_policy": 1.0, "reward_ok": 1.0}


gymnasium.register("Robot-v0", Robot, max_episode_steps=20)
"""
"""The environment with infos that docs/reference/training.md takes for granted."""


class World:
    """A service, a folder, and what the pages take for granted."""

    def __init__(self, service: ServiceProcess, folder: Path, patch: pytest.MonkeyPatch):
        self.service, self.folder, self.client = service, folder, service.client()
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        (folder / "examples").symlink_to(ROOT / "examples")
        patch.setenv("STEPWELL_URL", service.url)
        patch.setenv("HOME", str(folder / "home"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        patch.delenv("STEPWELL_OUTBOX", raising=False)  # ./stepwell-outbox, as the pages say
        # The modules of the pages register parts of the agent; those of other tests stay apart.
        patch.setattr(registry, "_registered", {kind: {} for kind in registry._registered})
        self.job = ""
        """The import that a page has just started."""

    def run(self, line: str) -> int:
        """The exit status of a line. Most run in this process, which has torch loaded already."""
        added = of_beginning(SHORT, line) or ""
        line = line.replace("http://127.0.0.1:8000", self.service.url).replace("JOB_ID", self.job)
        words = [*shlex.split(line, comments=True), *added.split()]
        name, *args = map(os.path.expanduser, words)
        if not {"|", "&&"} & set(args):
            if name == "stepwell":
                return status_of(cli.main, args)
            if [name, *args[:2]] == ["python", "-m", "collector.builtin"]:
                return status_of(generate, args[2:])
        done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=900)
        print(done.stdout)
        print(done.stderr, file=sys.stderr)
        return done.returncode

    def fill(self, name: str, spec: EnvSpec, number: int = 6) -> None:
        """Trajectories of 5, 10, … steps with returns of 500, 1000, …, once."""
        if name in [dataset.name for dataset in self.client.datasets()]:
            return
        self.client.create_dataset(name, spec)
        made = [make_trajectory(spec, length=5 * (i + 1), seed=i) for i in range(number)]
        made = [replace(one, rewards=np.full_like(one.rewards, 100.0)) for one in made]
        self.client.post(name, made, spec=spec, wait_sealed=True)


def of_beginning(table: dict[str, str], line: str) -> str | None:
    """The entry of the longest beginning of `line` in `table`, in whole words."""
    beginnings = [words for words in table if f"{line} ".startswith(f"{words} ")]
    return table[max(beginnings, key=len)] if beginnings else None


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """With the dataset `pendulum` and the run `first`, which many pages name."""
    service = service_process(tmp_path_factory)
    modules = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        made = World(service, tmp_path_factory.mktemp("pages"), patch)
        assert made.run("python -m collector.builtin pendulum-mixed pendulum.hdf5") == 0
        for line in (
            "stepwell import pendulum.hdf5 --dataset pendulum --env Pendulum-v1",
            "stepwell collect --env Pendulum-v1 --dataset pendulum --random --episodes 20",
            "stepwell train offline --dataset pendulum --run first --updates 500",
        ):
            assert made.run(line) == 0, line
            made.client.flush("pendulum")
        Path("pendulum.hdf5").unlink()
        trained = made.client.download_policy("first", 3).data
        for version in (500, 2000):
            made.client.publish_policy("first", version, trained)
        Path("runs/first/policies/500.safetensors").write_bytes(trained)
        made.client.set_alias("first", "best", 500)
        yield made
        for name in {path.stem for path in made.folder.glob("my_*.py")} - modules:
            sys.modules.pop(name, None)
    service.close()


def prepare_annotations(world: World) -> None:
    """The critic likes one trajectory, so that there is one to train on."""
    world.fill("hopper", PENDULUM)
    world.client.create_version("hopper", "v2")
    liked = world.client.matching_trajectories("dataset = 'hopper' and length = 5")
    values = {name: [1.0] * 5 for name in ("q", "v", "advantage", "weight")}
    world.client.annotate("hopper", "critic", "first/2000", [{"trajectory": liked[0], **values}])


def prepare_collecting(world: World) -> None:
    """The guide's page has evaluated all versions, which moves the alias."""
    world.client.set_alias("first", "best", 500)


def prepare_doctor(world: World) -> None:
    """The same trajectory twice."""
    world.fill("my-data", ROBOT)
    one = make_trajectory(ROBOT, length=30, seed=6)
    twice = [one, replace(one, id=make_trajectory().id)]
    world.client.post("my-data", twice, spec=ROBOT, wait_sealed=True)
    world.client.create_version("my-data", "v3")


def prepare_formats(world: World) -> None:
    """Files of each format, where the page has them."""
    world.fill("hopper", PENDULUM)
    world.fill("push", PENDULUM)
    world.client.create_version("push", "v1")
    home = world.folder / "home"
    door = home / ".minari/datasets/D4RL/door/human-v2"
    for folder, form in ((door, "minari"), (home / "lerobot/pusht", "lerobot --fps 10")):
        folder.parent.mkdir(parents=True)
        assert world.run(f"stepwell export push --format {form} {folder}") == 0
    shutil.copy(door / "data/main_data.hdf5", world.folder)
    amago.write(home / "amago_run/dataset_name", amago.frozen([0, 1, 0], amago.ONE_HOT))
    rlds.write(home / "tensorflow_datasets/my_robot/1.0.0", [[rlds.episode(5)]])
    rows = np.random.default_rng(0).normal(size=(8, 4))
    x, y, push_x, push_y = rows.T
    ends = {"reward": x, "episode": np.repeat([0, 1], 4)}
    one = {"observation": list(rows[:, :2]), "action": list(rows[:, 2:]), **ends}
    pq.write_table(pa.table(one), "plays.parquet")
    Path("plays").mkdir()
    several = {"x": x, "y": y, "push_x": push_x, "push_y": push_y}
    several |= {"gain": ends["reward"], "run": ends["episode"]}
    pq.write_table(pa.table(several), "plays/part.parquet")


def prepare_own_data(world: World) -> None:
    """A small file under the name of D4RL's."""
    world.fill("my-data", ROBOT)
    world.fill("arm", ROBOT)
    world.fill("some-cheetah", CHEETAH)
    file = Path("halfcheetah-medium-v2.hdf5")
    if not file.exists():
        assert world.run(f"stepwell export some-cheetah --format d4rl {file}") == 0


def prepare_relabeling(world: World) -> None:
    world.fill("reach", GOALS)


def prepare_sql(world: World) -> None:
    assert world.run("stepwell train offline --dataset pendulum --run my-first") == 0


def prepare_training(world: World) -> None:
    """More steps of the maze than the run waits for."""
    Path("my_envs.py").write_text(MY_ENVS)
    maze = "stepwell/TMazePassive-v0"
    world.fill("maze", interface_of(make(maze), maze).spec, 20)


def prepare_versions(world: World) -> None:
    world.fill("halfcheetah", CHEETAH)


def prepare_workers(world: World) -> None:
    world.client.heartbeat("collect-box-4711-a1b2c3", role="collect")


PREPARE = {
    "annotations.md": prepare_annotations,
    "bring-data.md": prepare_own_data,
    "collecting.md": prepare_collecting,
    "doctor.md": prepare_doctor,
    "formats.md": prepare_formats,
    "own_data.md": prepare_own_data,
    "relabeling.md": prepare_relabeling,
    "sql.md": prepare_sql,
    "training.md": prepare_training,
    "versions.md": prepare_versions,
    "workers.md": prepare_workers,
}


# --- the pages --------------------------------------------------------------------------------


def write_files(page: str) -> None:
    """The modules and config files that the page shows, as `# name.py` in their first line."""
    named = r"^```\w+\n(# (\w+\.(?:py|toml))\b.*?)^```"
    for block, name in re.findall(named, PAGES[page].read_text(), re.DOTALL | re.MULTILINE):
        Path(name).write_text(block)


RUN = [page for page in PAGES if any(fate(page, x) == "run" for x in commands(page))]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", RUN)
def test_commands_do_what_the_page_says(
    world: World, page: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_files(page)
    PREPARE.get(page, lambda _: None)(world)
    for line in commands(page):
        if fate(page, line) != "run":
            continue
        if line.startswith("stepwell datasets ratio"):  # its trainer has ended
            world.client.report_samples(
                "maze", "memory", 0, {"samples_per_insert": 1, "buffer": 64}
            )
        capfd.readouterr()
        status = world.run(line)
        said = "".join(capfd.readouterr())
        assert status == (line == FINDS), f"{line}\n{said}"
        assert '"status":4' not in said, f"{line}\n{said}"  # curl's exit status is 0
        assert (of_beginning(SAYS, line) or "") in said, f"{line}\n{said}"
        if started := re.search(r'"job":{"id":"(\w+)"', said):
            world.job = started[1]
        if "sha256sum" in line:
            assert world.client.version("halfcheetah@v2").digest in said
        if line == "stepwell lineage my-first --trajectories seen.parquet":
            assert pq.read_table("seen.parquet").num_rows > 40
