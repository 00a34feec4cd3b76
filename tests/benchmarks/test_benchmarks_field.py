"""The table of datasets: every command works, and some of each kind are held out."""

import json
from collections import Counter
from pathlib import Path

import h5py
import pytest

from benchmarks.field import BY_NAME, FIELD, FIT, arguments, make
from collector.builtin.__main__ import parser
from collector.envs import make as make_env

QUICK = [
    "pendulum-loud",
    "lunarlander-constant-action",
    "gridworld-10",
    "tmaze-100",
    "find-block-4",
    "bandit-continuous",
    "maze2d-10",
    "frozen-lake",
    "cliff-walking",
]


def test_names_are_unique_and_at_most_half_of_the_datasets_fit_a_rule() -> None:
    """No more datasets to fit a rule than to report it, and some for both in every kind."""
    assert len(BY_NAME) == len(FIELD)
    every = Counter(dataset.kind for dataset in FIELD)
    fit = Counter(dataset.kind for dataset in FIELD if dataset.group == FIT)
    assert all(0 < fit[kind] < number for kind, number in every.items())
    assert 2 * sum(fit.values()) <= len(FIELD)
    assert len({dataset.command for dataset in FIELD}) == len(FIELD)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_command_is_understood(name: str, tmp_path: Path) -> None:
    """The generator's own parser accepts the command, and writes where `make` looks."""
    args = parser().parse_args(arguments(BY_NAME[name], tmp_path))
    assert args.out == tmp_path / f"{name}.hdf5"


@pytest.mark.parametrize("name", BY_NAME)
def test_every_environment_can_be_made(name: str) -> None:
    """The evaluation's environment accepts its arguments."""
    dataset = BY_NAME[name]
    make_env(dataset.environment, dataset.env_args).close()


@pytest.mark.parametrize("name", QUICK)
def test_a_missing_file_is_made_once_for_the_named_environment(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's metadata name the table's environment; a second call makes nothing."""
    dataset = BY_NAME[name]
    short = arguments(dataset, tmp_path)
    for option in ("--episodes", "--steps"):
        if option in short:
            del short[short.index(option) : short.index(option) + 2]
    monkeypatch.setattr("benchmarks.field.arguments", lambda *_: [*short, "--steps", "50"])
    path = make(dataset, tmp_path)
    with h5py.File(path) as h5:
        assert h5["metadata/environment"][()].decode() == dataset.environment
        kwargs = h5["metadata"].get("environment_kwargs")
        assert (json.loads(kwargs[()]) if kwargs else {}) == dataset.env_args
    written = path.stat().st_mtime_ns
    assert make(dataset, tmp_path).stat().st_mtime_ns == written


def test_a_failed_generator_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file and exit status 2: the name of the dataset is in the message."""
    monkeypatch.setattr(
        "benchmarks.field.arguments", lambda *_: ["recall-random", str(tmp_path / "no" / "x")]
    )
    with pytest.raises(RuntimeError, match="recall: the generator failed with exit status 2"):
        make(BY_NAME["recall"], tmp_path)
