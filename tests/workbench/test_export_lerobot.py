"""Folders in LeRobot's format v3.0: what its readers find in them, and what is beside it.

That they are imported bit for bit is a column of the table in test_export.py. Folders of these
arrays were read by LeRobot 0.4.4 (`LeRobotDataset`), too.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from server.imports.raw_file import ImportRefused, Reading
from stepwell import Box, Discrete, EnvSpec, Trajectory
from stepwell.errors import InvalidData
from stepwell.testing import make_spec, make_trajectory
from tests.imported import read_file
from workbench.export import lerobot
from workbench.export.selection import Losses, Selection

PUSH = EnvSpec.of(
    {
        "state": Box((2,)),
        "width": Box((1,)),
        "cam/top": Box((5, 4, 3), "uint8", 0, 255),
        "grey": Box((5, 4, 1), "uint8", 0, 255),
        "alpha": Box((5, 4, 4), "uint8", 0, 255),
        "grid": Box((2, 3), "float64"),
    },
    Discrete(3),
    infos={"map": Box((2, 2, 3), "uint8", 0, 255)},
    env="Push-v0",
)


def made(spec: EnvSpec = PUSH, count: int = 3, **options: Any) -> list[Trajectory]:
    return [make_trajectory(spec, length=2 + i, seed=i, **options) for i in range(count)]


def written(
    folder: Path, trajectories: list[Trajectory], spec: EnvSpec = PUSH, fps: int | None = None
) -> Selection:
    lengths = {("shard", i): len(t) for i, t in enumerate(trajectories)}
    chosen = Selection("push", spec, "s", "h", {}, lengths, True, Losses())
    lerobot.write(folder, chosen, trajectories, fps)
    return chosen


def read(folder: Path, **options: Any) -> tuple[Reading, list[Trajectory]]:
    return read_file(folder, **options)


def test_the_layout_is_that_of_lerobot(tmp_path: Path) -> None:
    sent = made(tags=("push it",)) + made(truncated=True)
    written(tmp_path / "out", sent, fps=50)
    out, steps = tmp_path / "out", sum(len(t) for t in sent)
    info = json.loads((out / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["video_path"]) == ("v3.0", 50, None)
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (6, steps, 2)
    features = info["features"]
    assert features["observation.cam.top"] == {
        "dtype": "image",
        "shape": [5, 4, 3],
        "names": ["height", "width", "channels"],
    }
    assert features["observation.width"] == {"dtype": "float32", "shape": [1], "names": None}
    assert features["info.map"]["dtype"] == "uint8"
    frames = pd.read_parquet(
        out / info["data_path"].format(chunk_index=0, file_index=0), dtype_backend="pyarrow"
    )
    assert list(frames) == list(features)
    assert frames["index"].tolist() == list(range(steps))
    assert frames["frame_index"].tolist() == [i for t in sent for i in range(len(t))]
    np.testing.assert_allclose(frames["timestamp"], frames["frame_index"] / 50)
    ends = frames.groupby("episode_index").last()
    assert ends["next.done"].tolist() == [True] * 6
    assert ends["next.truncated"].tolist() == [False] * 3 + [True] * 3
    assert frames["next.done"].sum() == 6
    actions = np.concatenate([t.actions["action"] for t in sent])
    assert frames["action"].tolist() == actions.tolist()
    assert frames["observation.cam.top"][0]["bytes"].startswith(b"\x89PNG")
    tasks = pd.read_parquet(out / "meta/tasks.parquet")
    assert tasks.index.tolist() == ["push it", "Push-v0"]
    assert frames["task_index"].tolist() == [0] * (steps // 2) + [1] * (steps // 2)


def test_statistics_are_those_of_the_frames(tmp_path: Path) -> None:
    """Of all frames and of each episode; images by channel, 0 … 1."""
    sent = made()
    written(tmp_path / "out", sent)
    stats = json.loads((tmp_path / "out/meta/stats.json").read_text())
    episodes = pd.read_parquet(tmp_path / "out/meta/episodes/chunk-000/file-000.parquet")
    state = np.concatenate([t.obs["state"][:-1] for t in sent]).astype(float)
    top = np.concatenate([t.obs["cam/top"][:-1] for t in sent]) / 255
    for name, array, axes, shape in (
        ("observation.state", state, 0, (2,)),
        ("observation.cam.top", top, (0, 1, 2), (3, 1, 1)),
    ):
        for key, of in (("min", np.min), ("max", np.max), ("mean", np.mean), ("std", np.std)):
            np.testing.assert_allclose(stats[name][key], of(array, axes).reshape(shape))
        assert stats[name]["count"] == [len(array)]
    assert np.shape(stats["observation.grid"]["mean"]) == (2, 3)
    first = sent[0].obs["state"][:-1]
    np.testing.assert_allclose(episodes["stats/observation.state/mean"][0], first.mean(0))
    assert episodes["stats/observation.cam.top/count"].tolist() == [[2], [3], [4]]
    assert "stats/observation.grid/mean" not in episodes


def test_infos_that_are_not_finite_have_no_statistics(tmp_path: Path) -> None:
    spec = make_spec(infos=True)
    one = make_trajectory(spec, length=3)
    one.infos["position"][1] = np.nan
    written(tmp_path / "out", [one], spec)
    stats = json.loads((tmp_path / "out/meta/stats.json").read_text())
    assert "info.position" not in stats
    assert "info.room" in stats


def test_files_and_chunks_end_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode is never in two files."""
    monkeypatch.setattr(lerobot, "FILE_BYTES", 300)
    monkeypatch.setattr(lerobot, "GROUP_BYTES", 200)
    monkeypatch.setattr(lerobot, "CHUNK_FILES", 2)
    spec, out = make_spec(), tmp_path / "out"
    sent = made(spec, 9)
    written(out, sent, spec)
    about = pd.read_parquet(out / "meta/episodes/chunk-000/file-000.parquet")
    assert about["data/chunk_index"].max() > 1
    assert about["data/file_index"].max() == 1
    for (chunk, file), rows in about.groupby(["data/chunk_index", "data/file_index"]):
        frames = pd.read_parquet(out / f"data/chunk-{chunk:03d}/file-{file:03d}.parquet")
        assert frames["episode_index"].unique().tolist() == rows["episode_index"].tolist()
        assert frames["index"].iloc[0] == rows["dataset_from_index"].iloc[0]
        assert frames["index"].iloc[-1] + 1 == rows["dataset_to_index"].iloc[-1]
    assert [t.rewards.tolist() for t in read(out)[1]] == [t.rewards.tolist() for t in sent]


def test_images_and_infos_come_back(tmp_path: Path) -> None:
    sent = made()
    written(tmp_path / "out", sent)
    found, back = read(tmp_path / "out")
    assert found.spec == PUSH
    assert (found.warnings, found.dropped) == ([], {})
    for before, after in zip(sent, back, strict=True):
        for what in ("obs", "infos"):
            for key, array in getattr(before, what).items():
                np.testing.assert_array_equal(getattr(after, what)[key], array, strict=True)


def test_one_array_of_another_name_comes_back(tmp_path: Path) -> None:
    """Alone it is LeRobot's `observation.state`, or its `observation.image`, and `action`."""
    for space, column in ((Box((2,)), "state"), (Box((3, 3, 3), "uint8", 0, 255), "image")):
        spec = EnvSpec.of({"wheel": space}, {"turn": Box((1,), low=-1, high=1)})
        out = tmp_path / column
        written(out, made(spec, 2), spec)
        features = json.loads((out / "meta/info.json").read_text())["features"]
        assert {f"observation.{column}", "action"} < features.keys()
        assert read(out)[0].spec == spec


def test_without_what_is_beside_it_it_is_a_dataset_of_lerobot(tmp_path: Path) -> None:
    spec = make_spec()
    sent = made(spec, 2, tags=("push", "fast")) + made(spec, 1, truncated=True)
    sent.append(make_trajectory(spec, terminated=False))
    chosen = written(tmp_path / "out", sent, spec)
    assert "ends that are neither, for other readers (1 trajectory)" in chosen.losses.lines()
    shutil.rmtree(tmp_path / "out/meta/stepwell")
    _, back = read(tmp_path / "out")
    assert [(t.terminated, t.truncated) for t in back] == [(True, False)] * 2 + [(False, True)] * 2
    assert [t.metadata.tags for t in back] == [("push",)] * 2 + [("Test-v0",)] * 2
    assert not any(t.final_obs_valid for t in back)
    assert back[0].obs["observation"][:-1].tolist() == sent[0].obs["observation"][:-1].tolist()


def test_columns_that_are_given_replace_what_is_beside_it(tmp_path: Path) -> None:
    written(tmp_path / "out", made(make_spec(), 2), make_spec())
    _, back = read(tmp_path / "out", columns=("truncated=next.done", "done="))
    assert all(t.truncated and not t.final_obs_valid for t in back)


def test_what_it_cannot_hold_is_named_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_trajectory(make_spec(), source="here", seed=3)
    lines = written(tmp_path / "out", [one], make_spec()).losses.lines()
    assert "source (1 trajectory)" in lines
    assert not any(line.startswith("seed") for line in lines)
    assert any("timestamps are of 10 steps a second (--fps)" in line for line in lines)
    assert not any(
        "--fps" in line for line in written(tmp_path / "b", [one], make_spec(), 5).losses.lines()
    )
    deep = EnvSpec.of(Box((1, 1, 1, 1, 2)), Discrete(2))
    with pytest.raises(InvalidData, match="at most 4 dimensions; observation.state has 5") as error:
        written(tmp_path / "c", [make_trajectory(deep)], deep)
    assert error.value.expected == "--format minari or parquet"
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InvalidData, match="needs pillow for images") as error:
        written(tmp_path / "d", made())
    assert "pip install" in error.value.expected


def _spec(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / lerobot.SPEC
    described = json.loads(path.read_text())
    change(described)
    path.write_text(json.dumps(described))


def _kept(folder: Path, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    path = folder / lerobot.KEPT
    change(pd.read_parquet(path)).to_parquet(path)


LIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no spec": (lambda f: (f / lerobot.SPEC).write_text("{}"), "spec.json cannot be read"),
    "a wrong space": (
        lambda f: _spec(f, lambda d: d["spec"]["actions"].update(action={"type": "Box"})),
        "spec.json cannot be read",
    ),
    "no columns": (lambda f: _spec(f, lambda d: d.pop("columns")), "spec.json cannot be read"),
    "another column": (
        lambda f: _spec(f, lambda d: d["columns"]["action"].update(action="steer")),
        "names features that",
    ),
    "no rows beside it": (lambda f: (f / lerobot.KEPT).unlink(), "is missing"),
    "a missing column": (
        lambda f: _kept(f, lambda t: t.drop(columns=["observation.state"])),
        "lacks columns",
    ),
    "fewer episodes": (lambda f: _kept(f, lambda t: t[:1]), "of other data"),
    "other lengths": (
        lambda f: _kept(f, lambda t: t.assign(length=[2, 4])),
        "of other data",
    ),
    "another shape": (
        lambda f: _kept(f, lambda t: t.assign(**{"observation.state": [1.0, 2.0]})),
        "another shape",
    ),
    "wrong metadata": (
        lambda f: _kept(f, lambda t: t.assign(metadata=["{}", '{"colour": 1}'])),
        "metadata of episode 1",
    ),
    "both ends": (lambda f: _kept(f, lambda t: t.assign(truncated=True)), "at most one"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_beside_it_is_refused(tmp_path: Path, name: str) -> None:
    change, why = LIES[name]
    sent = [replace(t, truncated=False) for t in made(make_spec(), 2)]
    written(tmp_path / "out", sent, make_spec())
    change(tmp_path / "out")
    with pytest.raises(ImportRefused) as error:
        read(tmp_path / "out")
    assert why in f"{error.value.detail} {error.value.expected}"
