"""LeRobot v3 folders: features by name, several episodes a file, tasks as tags; lies refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from server.imports.raw_file import ImportRefused
from stepwell._folders import files_of, zipped
from tests.imported import read_file

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


read = read_file


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


def test_names_in_groups_are_matched_in_a_later_folder(tmp_path: Path) -> None:
    def named(folder: Path, *groups: str) -> Path:
        state = [np.array([int(group == "hand") for group in groups], np.float32)] * ROWS
        folder = made(folder, **{"observation.state": state})
        info = json.loads((folder / "meta/info.json").read_text())
        feature = {"shape": [2], "names": {group: ["x"] for group in groups}}
        info["features"]["observation.state"] |= feature
        write_info(folder, info)
        return folder

    spec = read(named(tmp_path / "a", "arm", "hand"))[0].spec
    assert spec.names["observation/state"] == ("arm.x", "hand.x")
    _, got = read(named(tmp_path / "b", "hand", "arm"), spec=spec)
    assert got[0].obs["state"][0].tolist() == [0, 1]


def test_columns_replace_what_is_taken(tmp_path: Path) -> None:
    _, got = read(made(tmp_path / "set"), "reward=heat", "truncated=next.done", "done=")
    assert all(t.truncated for t in got)
    assert got[0].rewards.tolist() == [0, 1, 2]


# --- videos ---------------------------------------------------------------------------------------

TOP = "observation.images.top"
CODECS = {
    "mpeg4": {"b": "4000000"},
    "libx264": {"crf": "15", "bf": "2"},
    "libsvtav1": {"crf": "20", "preset": "10"},
}
FPS, WIDTH, HEIGHT = 10, 64, 48


def film(path: Path, pictures: np.ndarray, codec: str = "mpeg4") -> None:
    """[N, H, W, 3] as MP4, with a key frame every 5 frames."""
    av = pytest.importorskip("av")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=FPS, options=CODECS[codec] | {"g": "5"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def pictures() -> np.ndarray:
    """One a row of the table: its left half is as bright as its number, its right half is not."""
    bright = (20 + 25 * np.arange(ROWS)).astype(np.uint8)
    found = np.empty((ROWS, HEIGHT, WIDTH, 3), np.uint8)
    found[:] = bright[:, None, None, None]
    found[:, :, WIDTH // 2 :] = 255 - found[:, :, WIDTH // 2 :]
    return found


def filmed(folder: Path, codec: str = "mpeg4") -> Path:
    """Episodes 0 and 2 in one file, 2 first, after a frame of nothing; episode 1 in another."""
    made(folder)
    known = pictures()
    first, second, third = np.split(known, np.cumsum(LENGTHS)[:-1])
    nothing = np.zeros((1, HEIGHT, WIDTH, 3), np.uint8)
    videos = folder / "videos" / TOP / "chunk-000"
    film(videos / "file-000.mp4", np.concatenate([nothing, third, first]), codec)
    film(videos / "file-001.mp4", second, codec)
    write_places(folder)
    info = json.loads((folder / "meta/info.json").read_text())
    feature = {"dtype": "video", "shape": [HEIGHT, WIDTH, 3], "names": ["height", "width", "c"]}
    return edited(folder, features=info["features"] | {TOP: feature})


def write_places(folder: Path, **changes: Any) -> None:
    columns: dict[str, Any] = {
        "episode_index": [0, 1, 2],
        "length": LENGTHS,
        f"videos/{TOP}/chunk_index": [0, 0, 0],
        f"videos/{TOP}/file_index": [0, 1, 0],
        f"videos/{TOP}/from_timestamp": [(1 + LENGTHS[2]) / FPS, 0.0, 1 / FPS],
    }
    columns |= {f"videos/{TOP}/{name}": values for name, values in changes.items()}
    columns = {name: values for name, values in columns.items() if values is not None}
    pd.DataFrame(columns).to_parquet(folder / "meta/episodes/chunk-000/file-000.parquet")


@pytest.mark.parametrize("codec", CODECS)
def test_each_step_has_its_frame_of_the_video(tmp_path: Path, codec: str) -> None:
    found, got = read(filmed(tmp_path / "set", codec))
    assert found.spec.observations["images/top"].shape == (HEIGHT, WIDTH, 3)
    frames = np.concatenate([t.obs["images/top"][:-1] for t in got])
    assert frames.dtype == np.uint8
    assert np.abs(frames.astype(int) - pictures()).mean() < 6
    assert np.array_equal(got[1].obs["images/top"][-1], got[1].obs["images/top"][-2])
    assert "images/top: a video, whose coding changes pixels" in " ".join(found.warnings)


def test_frames_are_scaled(tmp_path: Path) -> None:
    found, got = read(filmed(tmp_path / "set"), videos="32x24")
    assert found.spec.observations["images/top"].shape == (24, 32, 3)
    frames = np.concatenate([t.obs["images/top"][:-1] for t in got])
    assert np.abs(frames.astype(int) - pictures()[:, ::2, ::2]).mean() < 6
    assert "scaled frames of a video" in " ".join(found.warnings)


def test_videos_can_be_left_out(tmp_path: Path) -> None:
    found, got = read(filmed(tmp_path / "set"), videos="no")
    assert "images/top" not in found.spec.observations
    assert len(got) == 3


def test_frames_that_need_too_much_memory_can_be_scaled(tmp_path: Path) -> None:
    folder = filmed(tmp_path / "set")
    memory = LENGTHS[0] * HEIGHT * WIDTH * 3 - 1
    with pytest.raises(ImportRefused, match="memory") as error:
        read(folder, memory=memory)
    assert (error.value.status, "videos=" in error.value.expected) == (413, True)
    assert len(read(folder, memory=memory, videos="32x24")[1]) == len(LENGTHS)


def test_without_a_decoder_a_refusal_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = filmed(tmp_path / "set")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportRefused, match="is a video") as error:
        read(folder)
    assert "pip install av" in error.value.expected and "videos=no" in error.value.expected


def video(folder: Path, number: int = 0) -> Path:
    return folder / f"videos/{TOP}/chunk-000/file-{number:03d}.mp4"


VIDEO_LIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a video that ends early": (lambda f: film(video(f), pictures()[:3]), "lacks a frame"),
    "a place behind the end": (lambda f: write_places(f, from_timestamp=[900.0, 0, 0.1]), "lacks"),
    "a place that is none": (lambda f: write_places(f, from_timestamp=[np.nan, 0, 0]), "lacks"),
    "a file that is none": (lambda f: write_places(f, file_index=[7, 1, 0]), "file-007.mp4 is mis"),
    "a half number": (lambda f: write_places(f, file_index=[0.5, 1, 0]), "not one number"),
    "no places": (lambda f: write_places(f, file_index=None), "does not say where videos are"),
    "no video": (lambda f: video(f).unlink(), "missing"),
    "another kind of file": (lambda f: video(f).write_bytes(b"PAR1" * 99), "no video"),
    "a playlist": (lambda f: video(f).write_text("#EXTM3U\nfile:///etc/passwd"), "no video"),
    "a cut video": (lambda f: video(f).write_bytes(video(f).read_bytes()[:-900]), "no video|lacks"),
    "no rate": (lambda f: edited(f, fps="fast"), "no rate"),
    "an endless rate": (lambda f: edited(f, fps=float("inf")), "no rate"),
}


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (f"action={TOP}", "cannot be made of videos"),
        (f"observation={TOP},observation.state", "cannot be made of videos"),
        ("episode=", "found by episode_index"),
    ],
)
def test_what_cannot_be_a_video_is_refused(tmp_path: Path, columns: str, why: str) -> None:
    with pytest.raises(ImportRefused, match=why):
        read(filmed(tmp_path / "set"), columns)


def test_videos_through_the_service(importing: Any, tmp_path: Path) -> None:
    """In the sandbox: the decoder starts threads and reads its libraries there."""
    _, files = files_of(filmed(tmp_path / "set", "libsvtav1"))
    with zipped(files) as packed:
        job = importing.run(packed, "films", format="zip", videos="32x24")
    assert job.state == "succeeded", job
    assert (job.result["format"], job.result["trajectories"]) == ("lerobot", 3)


# --- lies -----------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("name", [*LIES, *VIDEO_LIES])
def test_a_lie_is_refused(tmp_path: Path, name: str) -> None:
    change, why = (LIES | VIDEO_LIES)[name]
    folder = (filmed if name in VIDEO_LIES else made)(tmp_path / "set")
    change(folder)
    with pytest.raises(ImportRefused, match=why):
        read(folder)


def test_through_the_service(importing: Any, tmp_path: Path) -> None:
    _, files = files_of(made(tmp_path / "set"))
    with zipped(files) as packed:
        job = importing.run(packed, "robots", format="zip")
    assert job.state == "succeeded", job
    assert (job.result["format"], job.result["trajectories"]) == ("lerobot", 3)


@pytest.mark.parametrize("role", ["observation", "info"])
def test_names_that_become_one_are_refused_with_the_cure(tmp_path: Path, role: str) -> None:
    before = "observation." if role == "observation" else ""
    first, second = f"{before}joint-1", f"{before}joint_1"
    folder = made(tmp_path / "set", **{first: np.zeros(ROWS), second: np.ones(ROWS)})
    with pytest.raises(ImportRefused, match=f"{first} and {second} would both be named") as caught:
        read(folder)
    assert f"columns={role}/NAME=COLUMN for each" in caught.value.expected
    found, (got, *_) = read(folder, f"{role}/a={first}", f"{role}/b={second}")
    assert {*(found.spec.observations if role == "observation" else found.spec.infos)} == {"a", "b"}
    assert (got.obs if role == "observation" else got.infos)["b"].all()
