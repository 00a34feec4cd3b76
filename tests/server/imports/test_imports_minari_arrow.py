"""Minari's Arrow and Parquet layouts, as its own writer (0.5.4) leaves them, made small.

Genuine files of Minari 0.5.4 with the same spaces were read, too, and equalled its HDF5.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from server.imports.raw_file import ImportRefused, Reading
from stepwell._folders import files_of, zipped
from stepwell.spaces import Box, Discrete, EnvSpec, MultiBinary
from stepwell.trajectory import Trajectory
from tests.imported import read_file

from .test_imports_minari import TEXT, jpeg

KINDS = ("arrow", "parquet")
Read = Callable[..., tuple[Reading, list[Trajectory]]]


def lists(array: np.ndarray) -> pa.Array:
    """A Box: the elements of each row in C order."""
    flat = array.reshape(len(array), -1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])


def struct(**columns: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


def episode(steps: int, seed: int = 0) -> dict[str, Any]:
    """Columns of T+1 rows; the last row of all but observations and infos is padding."""
    rng = np.random.default_rng(seed)
    ends = np.arange(steps + 1) == steps - 1
    return {
        "observations": lists(rng.normal(size=(steps + 1, 2))),
        "actions": lists(np.append(rng.uniform(-1, 1, (steps, 1)), [[0.0]], 0).astype("f4")),
        "rewards": pa.array(np.append(rng.normal(size=steps), 0.0)),
        "terminations": pa.array(ends),
        "truncations": pa.array(np.zeros(steps + 1, np.bool_)),
    }


def write(folder: Path, kind: str, episodes: list[dict[str, Any]], **metadata: Any) -> Path:
    data = folder / "data"
    steps = 0
    for number, columns in enumerate(episodes):
        place = data / str(number)
        place.mkdir(parents=True)
        rows = len(columns["rewards"]) if "rewards" in columns else 2
        about = {"id": number, "total_steps": rows - 1, "seed": 7 + number}
        (place / "metadata.json").write_text(json.dumps(about))
        steps += rows - 1
        fields = [pa.field(k, v.type) for k, v in columns.items()]
        table = pa.table(list(columns.values()), schema=pa.schema(fields))
        if kind == "parquet":
            pa.parquet.write_table(table, place / "part-0.parquet")
        else:
            with pa.ipc.new_file(place / "part-0.arrow", table.schema) as out:
                out.write_table(table, max_chunksize=1000)
    said = {"total_episodes": len(episodes), "total_steps": steps, "data_format": kind, **metadata}
    (data / "metadata.json").write_text(json.dumps(said))
    return folder


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Read a dataset back as the child does, in this process."""

    def read_(kind: str, episodes: list[dict[str, Any]], **metadata: Any) -> Any:
        folder = write(tmp_path / f"d{len(list(tmp_path.iterdir()))}", kind, episodes, **metadata)
        return read_folder(folder)

    return read_


read_folder = read_file


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_row_is_only_an_observation(read: Read, kind: str) -> None:
    episodes = [episode(n, seed=n) for n in (3, 1, *[2] * 9)]
    found, made = read(kind, episodes, env_spec=json.dumps({"id": "Maze-v3"}))
    assert found.spec == EnvSpec.of(Box((2,)), Box((1,), low=-1, high=1), env="Maze-v3")
    assert len(made) == 11, "episode 10 comes after 9, not after 1"
    for number, (columns, trajectory) in enumerate(zip(episodes, made, strict=True)):
        steps = len(columns["rewards"]) - 1
        rows = np.array(columns["observations"].to_pylist(), np.float32)
        assert trajectory.obs["observation"].tolist() == rows.tolist()
        taken = np.array(columns["actions"].to_pylist(), np.float32)[:steps]
        assert trajectory.actions["action"].tolist() == taken.tolist()
        rewards = columns["rewards"].to_numpy()[:steps].astype(np.float32)
        assert trajectory.rewards.tolist() == rewards.tolist()
        assert (trajectory.terminated, trajectory.truncated) == (True, False)
        assert trajectory.metadata.seed == 7 + number


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_of_many_batches_is_one(read: Read, kind: str) -> None:
    """Minari's own reader makes an episode of every batch, of 32,767 steps at most."""
    _, made = read(kind, [episode(33_000), episode(10)])
    assert [len(t) for t in made] == [33_000, 10]


@pytest.mark.parametrize("kind", KINDS)
def test_nested_spaces(read: Read, kind: str) -> None:
    rows = np.arange(3.0)
    shaped = pa.field("v", pa.list_(pa.float64(), 4), metadata={"shape": "2,2"})
    infos = pa.StructArray.from_arrays(
        [
            lists(np.arange(12.0).reshape(3, 4)),
            struct(**{"z z": pa.array(rows)}),
            pa.array(["a"] * 3),
            pa.array([1.0, None, 2.0]),
        ],
        fields=[
            shaped,
            pa.field("n", pa.struct([("z z", pa.float64())])),
            pa.field("note", pa.string()),
            pa.field("gaps", pa.float64()),
        ],
    )
    columns = episode(2) | {
        "observations": struct(
            pos=lists(np.arange(18.0).reshape(3, 6)),
            image=pa.array([jpeg(n).tobytes() for n in (0, 9, 99)]),
            mission=pa.array(["go to it", "open", "go"]),
            tup=struct(**{"0": pa.array([0, 1, 2]), "1": lists(np.ones((3, 2), np.int8))}),
        ),
        "actions": struct(**{"0": pa.array([1, 3, 0]), "1": lists(np.ones((3, 2), np.int8))}),
        "infos": infos,
    }
    box = {"type": "Box", "dtype": "float64", "shape": [2, 3], "low": -50, "high": 50}
    pair = [{"type": "Discrete", "n": 4, "start": 0}, {"type": "MultiBinary", "n": 2}]
    spaces = {"pos": box, "mission": TEXT, "tup": {"type": "Tuple", "subspaces": pair}}
    found, (made,) = read(
        kind,
        [columns],
        observation_space=json.dumps({"type": "Dict", "subspaces": spaces}),
        action_space=json.dumps({"type": "Tuple", "subspaces": pair}),
    )
    observations = dict(found.spec.observations)
    assert observations.pop("mission").shape == (3,)
    assert observations == {
        "pos": Box((2, 3), "float32", -50, 50),
        "image": Box((40, 36, 3), "uint8", 0, 255),
        "tup/0": Discrete(4),
        "tup/1": MultiBinary(2),
    }
    assert found.spec.actions == {"action/0": Discrete(4), "action/1": MultiBinary(2)}
    assert made.actions["action/0"].tolist() == [1, 3]
    assert made.obs["pos"][1].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert made.obs["image"].mean(axis=(1, 2, 3)).tolist() == [0, 9, 99]
    assert made.infos["v"][2].tolist() == [[8, 9], [10, 11]]
    assert made.infos["n/z_z"].tolist() == [0, 1, 2]
    assert found.dropped == {"note": "not plain numbers", "gaps": "it has empty values"}
    assert any("JPEG" in warning for warning in found.warnings)


def flags(steps: int, at: int) -> pa.Array:
    return pa.array(np.arange(steps + 1) == at)


def test_ends(read: Read) -> None:
    none = flags(2, 9)
    _, made = read(
        "arrow",
        [
            episode(2) | {"truncations": flags(2, 1)},
            episode(2) | {"terminations": none, "truncations": flags(2, 1)},
            episode(2) | {"terminations": none},
        ],
    )
    ends = [(t.terminated, t.truncated) for t in made]
    assert ends == [(True, False), (False, True), (False, True)]


def without(name: str) -> dict[str, Any]:
    return {k: v for k, v in episode(2).items() if k != name}


BAD: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "an early end": ([episode(2) | {"terminations": flags(2, 0)}], {}, "before the last step"),
    "no rewards": ([without("rewards")], {}, "no column rewards"),
    "no actions": ([without("actions")], {}, "no actions"),
    "texts for rewards": ([episode(2) | {"rewards": pa.array(["a"] * 3)}], {}, "no column rewards"),
    "empty values": ([episode(2) | {"actions": pa.array([1.0, None, 0])}], {}, "empty values"),
    "empty in lists": (
        [episode(2) | {"observations": pa.array([[1.0], [None], [0.0]])}],
        {},
        "invalid numbers",
    ),
    "ragged": (
        [episode(2) | {"observations": pa.array([[1.0], [1, 2], [3]])}],
        {},
        "differ in length",
    ),
    "dates": ([episode(2) | {"actions": pa.array([1, 2, 3], pa.date32())}], {}, "unsupported"),
    "missing steps": ([episode(2)], {"total_steps": 3}, "steps are missing"),
    "missing episodes": ([episode(2)], {"total_episodes": 2}, "episodes are missing"),
    "other arrays": (
        [episode(2), episode(2) | {"observations": pa.array([1.0, 2.0, 3.0])}],
        {},
        "differ from those",
    ),
    "no image": (
        [episode(2) | {"observations": pa.array([b"no", b"jpeg", b"at all"])}],
        {},
        "damaged JPEG",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_name(read: Read, name: str) -> None:
    episodes, metadata, says = BAD[name]
    with pytest.raises(ImportRefused, match=says):
        read("arrow", episodes, **metadata)


def test_an_episode_that_says_another_length_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", "arrow", [episode(2)])
    (folder / "data/0/metadata.json").write_text(json.dumps({"total_steps": 3}))
    with pytest.raises(ImportRefused, match="wrong number of rows"):
        read_folder(folder)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def overwritten(path: Path) -> None:
    """Offsets, lengths and names of another world."""
    data = bytearray(path.read_bytes())
    data[40 : len(data) - 40] = b"\xff" * (len(data) - 80)
    path.write_bytes(data)


def hollow(path: Path) -> None:
    path.write_bytes(b"ARROW1\0\0")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", [cut, overwritten, hollow])
def test_a_damaged_file_is_refused(tmp_path: Path, harm: Any, kind: str) -> None:
    folder = write(tmp_path / "d", kind, [episode(2), episode(2)])
    harm(folder / f"data/1/part-0.{kind}")
    with pytest.raises(ImportRefused, match="damaged or cut short"):
        read_file(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_goes_through_the_sandbox(importing: Any, tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "d", kind, [episode(2), episode(4)])
    with zipped(files_of(folder)[1]) as packed:
        job = importing.run(packed, f"from-{kind}", format="minari")
    assert job.state == "succeeded", job
    assert (job.result["trajectories"], job.result["steps"]) == (2, 6)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_an_episode_of_zero_steps_is_left_out_and_counted(read: Read, kind: str) -> None:
    empty = {name: column.slice(0, 1) for name, column in episode(1).items()}
    found, got = read(kind, [episode(2), empty, episode(3)])
    assert [len(t) for t in got] == [2, 3]
    assert "1 episode without a step left out" in found.warnings
    with pytest.raises(ImportRefused, match="no episode has a step"):
        read(kind, [empty])


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
@pytest.mark.parametrize("names", [("joint-1", "joint_1"), ("joint/1", "joint_1")])
def test_names_that_become_one_are_refused_with_both(
    read: Read, kind: str, names: tuple[str, str]
) -> None:
    two = episode(2) | {"observations": struct(**dict.fromkeys(names, pa.array([0.0, 1, 2])))}
    with pytest.raises(ImportRefused, match="would both be named"):
        read(kind, [two])
