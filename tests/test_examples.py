"""Every example runs, as its first line says, against a real service."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collector.config import CollectConfig, parse
from collector.envs import make, parse_pairs
from stepwell._processes import read_train_config
from stepwell._run.parts import growing_data
from stepwell.run import _parse, _split

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {
    "own_data.py": "mean reward",
    "record_environment.py": "200 steps",
    "any_learner.py": "update  40",
    "relabel_template.py": "relabeled    mean return 1.00",
    "own_environment.py": "return of the best policy -",
    "scripted_policy.py": "episodes that fell",
}
FILES = sorted((ROOT / "examples").glob("*.toml"))
TINY = [
    *("--envs", "2", "--episodes", "2", "--train.updates", "6", "--train.data.batch", "2"),
    *("--train.data.window", "8", "--train.data.ratio.min-size", "20"),
    *("--train.schedule.publish-every", "3"),
]
"""As examples/README.md says."""


def run(example: str, url: str, dataset: str, tmp_path: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), dataset],
        cwd=ROOT,
        env={**os.environ, "STEPWELL_URL": url, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_list_is_complete() -> None:
    """A new example is a tested example, and stands in the table."""
    present = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert present == set(EXAMPLES)
    present |= {path.name for path in FILES}
    table = (ROOT / "examples" / "README.md").read_text()
    assert all(f"`{name}`" in table for name in present)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: str, service, name: str, tmp_path: Path) -> None:
    """It ends well and prints what it promises."""
    if example == "any_learner.py":
        run("own_data.py", service.url, name, tmp_path)
    assert EXAMPLES[example] in run(example, service.url, name, tmp_path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_settings_of_a_file_are_accepted(file: Path) -> None:
    """By the trainer and the collector, before anything is started."""
    own, sections = _split([str(file)])
    args = _parse(own, sections)
    base = read_train_config([args.recipe])["config"]
    growing = growing_data(
        base,
        collectors=args.collectors,
        updates_per_step=args.updates_per_step,
        warm_up_steps=args.warm_up_steps,
        min_size=args.min_size,
    )
    words = ["--run", "r", "--dataset", "d", *growing]
    config = read_train_config([args.recipe, *words, *sections["train"]])["config"]
    if config["derive"] == "off":
        context = config["agent"]["trajectory_encoder"]["context"]
        assert context == config["data"]["window"] + 1, "all of a window is seen"
    words = ["--env", args.env, "--env-args", *args.env_args, "--dataset", "d", "--policy", "p"]
    parse(CollectConfig, [*words, *sections["collect"]], "stepwell collect")
    make(args.env, parse_pairs(args.env_args, "--env-args")).close()


@pytest.mark.parametrize(
    "words", [["examples/00_meta_frozen_lake.toml"], ["examples.own_environment:Thermostat-v0"]]
)
def test_a_run_ends_with_scores(words: list[str], tmp_path: Path) -> None:
    """The whole loop, tiny."""
    done = subprocess.run(
        [sys.executable, "-m", "stepwell.cli", "run", *words, *TINY]
        + ["--data", str(tmp_path), "--port", "0"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("STEPWELL_")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " finished, " in done.stdout and "--policy" in done.stdout
