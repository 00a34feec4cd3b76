"""AMAGO's trajectory files, made by hand in its layout: what is known on arrival somewhere."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.imports.raw_file import ImportRefused, Reading
from stepwell import InvalidData
from stepwell._folders import files_of, zipped
from stepwell.spaces import Box, Discrete, EnvSpec, MultiBinary
from stepwell.trajectory import Trajectory
from tests.imported import read_file

Arrays = dict[str, np.ndarray]


def frozen(
    rewards: Any, actions: Any, *, first: int = 0, seed: int = 0, done: bool = True
) -> Arrays:
    """One file of T = len(rewards) actions; `first` is the step of its first observation."""
    rews = np.asarray(rewards, np.float32)[:, None]
    taken = np.asarray(actions, np.float32)
    rng = np.random.default_rng(seed)
    arrived = np.concatenate([rews, taken], axis=1)
    return {
        "_OBS_KEY_observation": rng.normal(size=(len(rews) + 1, 2)).astype(np.float32),
        "rl2s": np.concatenate([np.zeros_like(arrived[:1]), arrived]),
        "time_idxs": np.arange(first, first + len(rews) + 1)[:, None],
        "rews": rews,
        "dones": (np.arange(len(rews)) == len(rews) - 1)[:, None] & done,
        "actions": taken,
    }


def pieces(arrays: Arrays, at: int) -> tuple[Arrays, Arrays]:
    """As AMAGO cuts a long episode: both files have observation `at`, with what led to it."""
    before = {k: v[: at + (len(v) > len(arrays["rews"]))] for k, v in arrays.items()}
    return before, {k: v[at:] for k, v in arrays.items()}


def write(folder: Path, *files: Arrays, env: str = "DarkKey") -> Path:
    """A buffer, whose files have AMAGO's names."""
    place = folder / "buffer/fifo"
    place.mkdir(parents=True)
    for number, arrays in enumerate(files):
        # Later files sort before earlier ones by name, but not by time.
        np.savez(place / f"{env}_{99 - number:08x}_{1_700_000_000.25 + number}.npz", **arrays)
    return folder


ONE_HOT = np.eye(4)[[2, 0, 3]]
Read = Callable[..., tuple[Reading, list[Trajectory]]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Read files back as the child does, in this process."""

    def read_(*files: Arrays, **fields: Any) -> tuple[Reading, list[Trajectory]]:
        folder = write(tmp_path / f"d{len(list(tmp_path.iterdir()))}", *files)
        return read_file(folder, **fields)

    return read_


def test_reward_and_action_are_those_of_the_observation_before(read: Read) -> None:
    """rews[i] and actions[i] led to observation i+1, as in row i here; rl2s repeats them later."""
    arrays = frozen([1.0, 2.0, 4.0], ONE_HOT)
    found, (made,) = read(arrays)
    assert found.spec == EnvSpec.of(Box((2,)), Discrete(4))
    assert made.obs["observation"].tobytes() == arrays["_OBS_KEY_observation"].tobytes()
    assert made.actions["action"].tolist() == [2, 0, 3]
    assert made.rewards.tolist() == [1.0, 2.0, 4.0]
    assert (made.terminated, made.truncated, made.final_obs_valid) == (True, False, True)
    assert (made.metadata.env, made.metadata.first_step) == ("DarkKey", 0)


def test_kinds_of_actions(read: Read) -> None:
    continuous = np.array([[0.5, -1.0], [0.25, 1.0]])
    binary = np.array([[1, 1, 0], [0, 0, 0]])
    one_hot_but_once = np.array([[1, 0], [1, 1]])
    for actions, space in (
        (continuous, Box((2,), "float32", -1.0, 1.0)),
        (binary, MultiBinary(3)),
        (one_hot_but_once, MultiBinary(2)),
    ):
        found, (made,) = read(frozen([0, 0], actions))
        assert found.spec.actions == {"action": space}
        assert made.actions["action"].tolist() == actions.tolist()
    found, _ = read(frozen([0, 0, 0], ONE_HOT), action="box")
    assert found.spec.actions == {"action": Box((4,), "float32", -1.0, 1.0)}
    wanted = EnvSpec.of(Box((2,)), Box((4,), "float32", 0.0, 1.0))
    _, (made,) = read(frozen([0, 0, 0], ONE_HOT), spec=wanted)
    assert made.actions["action"].tolist() == ONE_HOT.tolist()


def test_an_episode_in_pieces_is_put_in_relation(read: Read) -> None:
    """AMAGO cuts a long episode; the pieces share an observation, and nothing names the other."""
    actions = np.linspace(-1, 1, 6)[:, None]
    early, rest = pieces(frozen(range(6), actions, seed=1), 2)
    middle, late = pieces(rest, 3)
    other = frozen([7.0], [[0.5]], seed=2, done=False)
    found, made = read(late, early, other, middle)
    assert [len(t) for t in made] == [1, 2, 1, 3], "in the order of the times in the names"
    last, first, alone, second = made
    assert [t.metadata.first_step for t in (first, second, last)] == [0, 2, 5]
    assert len({t.metadata.episode_id for t in (first, second, last)}) == 1
    assert alone.metadata.episode_id != first.metadata.episode_id
    ends = [(t.terminated, t.truncated) for t in (first, second, last, alone)]
    assert ends == [(False, False), (False, False), (True, False), (False, True)]
    assert [t.rewards.tolist() for t in (first, second, last)] == [[0, 1], [2, 3, 4], [5]]
    assert any("1 trajectory without a terminal" in w for w in found.warnings)


def test_a_piece_that_could_continue_two_is_left_alone(read: Read) -> None:
    early, late = pieces(frozen(range(4), np.zeros((4, 1))), 2)
    _, made = read(early, early, late)
    assert [t.truncated for t in made] == [True, True, False]


def test_observations_have_their_names(read: Read) -> None:
    arrays = frozen([1.0, 2.0], [[0.5], [0.5]])
    arrays["_OBS_KEY_image"] = np.full((3, 4, 4, 3), 9, np.uint8)
    arrays["_OBS_KEY_goal/is here"] = np.ones((3, 1))
    found, _ = read(arrays)
    assert found.spec.observations == {
        "observation": Box((2,)),
        "image": Box((4, 4, 3), "uint8", 0, 255),
        "goal/is_here": Box((1,)),
    }


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Arrays:
    arrays = frozen([1.0, 2.0, 3.0], ONE_HOT)
    return arrays | {name: change(arrays[name])}


def without(name: str) -> Arrays:
    return {k: v for k, v in frozen([1.0], [[0.5]]).items() if k != name}


BAD: dict[str, tuple[Callable[[], tuple[Arrays, ...]], str]] = {
    "not shifted": (lambda: (changed("rl2s", lambda a: np.roll(a, -1, 0)),), "one step before"),
    "gap in time": (lambda: (changed("time_idxs", lambda a: a * 2),), "count the steps"),
    "no flag": (lambda: (changed("dones", lambda d: d * 2.0),), "dones does not contain flags"),
    "early end": (lambda: (changed("dones", np.ones_like),), "before the last step"),
    "no rewards": (lambda: (without("rews"),), "lacks rews"),
    "no observations": (lambda: (without("_OBS_KEY_observation"),), "lacks observations"),
    "short": (lambda: (changed("_OBS_KEY_observation", lambda a: a[:-1]),), "wrong shape"),
    "flat": (lambda: (changed("actions", lambda a: a[:, 0]),), "wrong shape"),
    "texts": (lambda: (changed("actions", lambda a: a.astype("U3")),), "plain numbers"),
    "objects": (lambda: (changed("rews", lambda a: a.astype(object)),), "plain numbers"),
    "other width": (
        lambda: (frozen([1.0], [[0.5]]), frozen([1.0], [[0.5, 0.5]])),
        "another width",
    ),
    "other observations": (
        lambda: (frozen([1.0], [[0.5]]), frozen([1.0], [[0.5]]) | {"_OBS_KEY_x": np.ones((2, 1))}),
        "differ from those",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_name(read: Read, name: str) -> None:
    make, says = BAD[name]
    with pytest.raises(ImportRefused, match=says):
        read(*make())


def test_a_pickle_is_refused_with_what_to_do(importing: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", frozen([1.0], [[0.5]]))
    path = folder / "buffer/fifo/x_1_2.0.traj"
    path.write_bytes(pickle.dumps([1]))
    with pytest.raises(InvalidData, match="save_to_disk"):
        files_of(folder)
    with zipped({"a.traj": path}) as packed:
        job = importing.run(packed, "amago-pickle", format="zip")
    assert (job.state, job.error.code) == ("failed", "import_refused")
    assert "save_to_disk" in job.error.detail


def test_a_buffer_is_stored_once_or_not_at_all(importing: Any, tmp_path: Path) -> None:
    good = [frozen([1.0, 2.0, 3.0], ONE_HOT, seed=n) for n in range(2)]
    _, files = files_of(write(tmp_path / "good", *good))
    with zipped(files) as packed:
        for expected in (2, 0):
            job = importing.run(packed, "from-amago", format="zip")
            assert (job.state, job.result["format"]) == ("succeeded", "amago"), job
            assert job.result["trajectories"] == expected
    _, files = files_of(write(tmp_path / "bad", *good))
    cut = sorted(files.values())[-1]
    cut.write_bytes(cut.read_bytes()[:-90])
    before = importing.files()
    with zipped(files) as packed:
        job = importing.run(packed, "from-bad-amago", format="amago")
    assert (job.state, job.error.code) == ("failed", "import_refused"), job
    assert importing.files() == before
    assert importing.rows("select count(*) from datasets where name = 'from-bad-amago'") == [[0]]
