"""LeRobot v3 folders: features by name, several episodes a file, tasks as tags; lies refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from server.imports import lerobot
from server.imports.parser import recognised
from server.imports.raw_file import ImportOptions, ImportRefused, Reading
from stepwell._folders import files_of, zipped
from stepwell.trajectory import Trajectory

LENGTHS = (3, 2, 4)
ROWS = sum(LENGTHS)


def made(folder: Path, **changes: Any) -> Path:
    """A dataset of two files; a change to None takes a feature away."""
    last = np.cumsum(LENGTHS) - 1
    table: dict[str, Any] = {
        "observation.state": list(np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 2)),
        "observation.gripper": np.arange(ROWS, dtype=np.float32),
        "action": list(np.linspace(-1, 1, ROWS * 2, dtype=np.float32).reshape(ROWS, 2)),
        "next.reward": np.arange(ROWS, dtype=np.float32),
        "next.done": np.isin(np.arange(ROWS), last),
        "next.success": np.isin(np.arange(ROWS), last[:1]),
        "heat": np.arange(ROWS, dtype=np.float32),
        "timestamp": np.concatenate([np.arange(n) / 10 for n in LENGTHS]).astype(np.float32),
        "frame_index": np.concatenate([np.arange(n) for n in LENGTHS]),
        "episode_index": np.repeat(np.arange(len(LENGTHS)), LENGTHS),
        "index": np.arange(ROWS),
        "task_index": np.repeat([1, 0, 1], LENGTHS),
    } | changes
    table = {name: column for name, column in table.items() if column is not None}
    frame = pd.DataFrame({name: list(column) for name, column in table.items()})
    data = folder / "data/chunk-000"
    data.mkdir(parents=True)
    frame[: LENGTHS[0]].to_parquet(data / "file-000.parquet", index=False)
    frame[LENGTHS[0] :].to_parquet(data / "file-001.parquet", index=False)
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    episodes = pd.DataFrame({"episode_index": range(len(LENGTHS)), "length": LENGTHS})
    episodes.to_parquet(folder / "meta/episodes/chunk-000/file-000.parquet")
    tasks = pd.DataFrame({"task_index": [0, 1]}, index=["push it", "lift it"])
    tasks.to_parquet(folder / "meta/tasks.parquet")
    features = {name: {"dtype": "float32", "shape": [1], "names": None} for name in table}
    write_info(folder, {
        "codebase_version": "v3.0", "robot_type": "arm", "fps": 10, "features": features,
        "total_episodes": len(LENGTHS), "total_frames": ROWS,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    })  # fmt: skip
    return folder


def write_info(folder: Path, info: Any) -> None:
    (folder / "meta/info.json").write_text(json.dumps(info))


def edited(folder: Path, **changes: Any) -> Path:
    info = json.loads((folder / "meta/info.json").read_text())
    write_info(folder, info | changes)
    return folder


def read(folder: Path, *given: str, **options: Any) -> tuple[Reading, list[Trajectory]]:
    kind, files = files_of(folder)
    assert kind == "lerobot"
    with zipped(files) as packed, open(packed, "rb", buffering=0) as file:
        chosen = ImportOptions(
            dataset="d",
            format="zip",
            sha256="ab" * 32,
            size=packed.stat().st_size,
            columns=given,
            **options,
        )
        assert recognised(file, chosen, 1 << 28) == "lerobot"
        with lerobot.reading(file, chosen, 1 << 28, 10**6) as found:
            return found, list(found.trajectories)


def test_features_become_arrays_and_tasks_tags(tmp_path: Path) -> None:
    found, got = read(made(tmp_path / "set"))
    assert [len(t) for t in got] == list(LENGTHS)
    assert {k: s.shape for k, s in found.spec.observations.items()} == {
        "state": (2,),
        "gripper": (1,),
    }
    assert got[1].obs["state"].tolist() == [[6, 7], [8, 9], [8, 9]]
    assert not got[1].final_obs_valid
    assert got[1].rewards.tolist() == [3, 4]
    assert got[2].infos["heat"].tolist() == [5, 6, 7, 8, 8]
    assert [t.metadata.tags for t in got] == [("lift it",), ("push it",), ("lift it",)]
    assert [t.metadata.success for t in got] == [True, False, False]
    assert all(t.terminated for t in got)
    assert found.metadata == {"robot_type": "arm", "fps": "10"}


def test_a_demonstration_has_no_reward_and_no_end(tmp_path: Path) -> None:
    gone = ("observation.gripper", "next.reward", "next.done", "next.success", "heat")
    found, got = read(made(tmp_path / "set", **dict.fromkeys(gone)))
    assert list(found.spec.observations) == ["observation"]
    assert not any(t.rewards.any() or t.terminated for t in got)
    assert all(t.truncated for t in got)
    assert "there is no reward" in " ".join(found.warnings)


def test_columns_replace_what_is_taken(tmp_path: Path) -> None:
    _, got = read(made(tmp_path / "set"), "reward=heat", "truncated=next.done", "done=")
    assert all(t.truncated for t in got)
    assert got[0].rewards.tolist() == [0, 1, 2]


def test_videos_are_refused_or_left_out(tmp_path: Path) -> None:
    folder = made(tmp_path / "set")
    features = json.loads((folder / "meta/info.json").read_text())["features"]
    edited(folder, features=features | {"observation.images.top": {"dtype": "video"}})
    with pytest.raises(ImportRefused, match="videos") as error:
        read(folder)
    assert "videos=no" in error.value.expected
    assert len(read(folder, videos="no")[1]) == 3


LIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a path that leaves": (lambda f: edited(f, data_path="../../etc/{x}"), "out of the folder"),
    "an absolute path": (lambda f: edited(f, video_path="/etc/passwd"), "out of the folder"),
    "an old version": (lambda f: edited(f, codebase_version="v2.1"), "another version"),
    "more frames": (lambda f: edited(f, total_frames=10**12), "data are missing"),
    "more episodes": (lambda f: edited(f, total_episodes=4), "data are missing"),
    "no features": (lambda f: edited(f, features=[1]), "no features"),
    "a feature without data": (lambda f: edited(f, features={"x": {}}), "missing in the data"),
    "not an object": (lambda f: write_info(f, [1]), "JSON object"),
    "a missing file": (
        lambda f: (f / "data/chunk-000/file-001.parquet").unlink(),
        "data are missing",
    ),
    "no data": (lambda f: [p.unlink() for p in f.glob("data/*/*")], "too many files"),
    "a cut file": (
        lambda f: (f / "data/chunk-000/file-000.parquet").write_bytes(b"PAR1cut"),
        "damaged",
    ),
    "tasks that are none": (lambda f: (f / "meta/tasks.parquet").write_bytes(b"PAR1"), "damaged"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused(tmp_path: Path, name: str) -> None:
    change, why = LIES[name]
    folder = made(tmp_path / "set")
    change(folder)
    with pytest.raises(ImportRefused, match=why):
        read(folder)


def test_through_the_service(importing: Any, tmp_path: Path) -> None:
    _, files = files_of(made(tmp_path / "set"))
    with zipped(files) as packed:
        job = importing.run(packed, "robots", format="zip")
    assert job.state == "succeeded", job
    assert (job.result["format"], job.result["trajectories"]) == ("lerobot", 3)
