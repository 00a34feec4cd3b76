"""Videos show the episodes that they are stored with, and are made only where that is possible."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from collector import video
from collector.interface import BrokenEnv
from collector.main import evaluate
from collector.video import GifEncoder, Mp4Encoder, RenderedEnv, open_encoder, scaled
from stepwell import Client
from stepwell.errors import TooLarge
from stepwell.messages import GIF, MP4
from tests.collector.fake_env import FakeEnv

FRAME = (48, 64)


class DrawnEnv(FakeEnv):
    """FakeEnv that draws t: the frame's brightness is 10 t. `fault`: what is wrong with it."""

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 25}
    made = 0

    def __init__(self, render_mode: str | None = None, fault: str = "", steps: int = 4) -> None:
        # Each environment after the first has longer episodes: they do not follow from the seed.
        type(self).made += 1
        super().__init__((steps + (fault == "grows") * (type(self).made - 1),))
        self.render_mode, self.fault, self.frames = render_mode, fault, 0

    def render(self) -> NDArray[np.uint8]:
        assert self.render_mode == "rgb_array"
        self.frames += 1
        if self.fault == "no driver":
            raise RuntimeError("no driver to draw with")
        if self.fault == "late" and self.frames > 3:
            raise RuntimeError("out of paint")
        if self.fault == "floats":
            return np.zeros((*FRAME, 3), np.float32)  # type: ignore[return-value]
        height = FRAME[0] + 100 * (self.fault == "resized") * self.t
        return np.full((height, FRAME[1], 3), min(255, 10 * self.t), np.uint8)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(DrawnEnv, "made", 0)
    gymnasium.register("Drawn-v0", DrawnEnv, disable_env_checker=True)
    gymnasium.register("Blind-v0", FakeEnv, disable_env_checker=True)
    yield
    for name in ("Drawn-v0", "Blind-v0"):
        del gymnasium.registry[name]


@pytest.fixture
def as_gif(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without imageio-ffmpeg. Quick, and its frames are exact."""
    monkeypatch.setattr(video.importlib.util, "find_spec", lambda _: None)


def frames_of(data: bytes) -> list[int]:
    """The brightness of each frame of a GIF; one that is shown for longer counts once."""
    with Image.open(io.BytesIO(data)) as image:
        found = []
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            found.append(int(np.asarray(image.convert("RGB")).mean().round()))
    return found


def describe(data: bytes, tmp_path: Path) -> str:
    """What ffmpeg says of a file."""
    path = tmp_path / "described.mp4"
    path.write_bytes(data)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-i", str(path), "-f", "null", "-"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def record(env: RenderedEnv, length: int) -> bytes:
    """A whole episode."""
    with env.recording(length) as encoder:
        env.reset(seed=1)
        over = False
        while not over:
            _, _, terminated, truncated, _ = env.step(np.int64(0))
            over = terminated or truncated
        return encoder.finish()


# --- files ----------------------------------------------------------------------------------------


def test_an_mp4_is_what_every_browser_plays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with open_encoder(25) as encoder:
        assert isinstance(encoder, Mp4Encoder)
        for _ in range(50):
            encoder.add(scaled(rng.integers(0, 255, (51, 91, 3), np.uint8), encoder.side))
        data = encoder.finish()
    assert data[4:8] == b"ftyp"
    assert data.index(b"moov") < data.index(b"mdat"), "it plays before it has arrived"
    said = describe(data, tmp_path)
    assert "h264" in said and "yuv420p" in said and "92x52" in said and "25 fps" in said
    assert re.findall(r"frame= *(\d+)", said)[-1] == "50"


def test_a_gif_has_the_frames_and_their_time() -> None:
    encoder = GifEncoder(25)
    for value in (0, 100, 200):
        encoder.add(scaled(np.full((20, 30, 3), value, np.uint8), encoder.side))
    data = encoder.finish()
    assert frames_of(data) == [0, 100, 200]
    with Image.open(io.BytesIO(data)) as image:
        assert (image.info["duration"], image.info["loop"], image.size) == (40, 0, (150, 100))


@pytest.mark.parametrize("fps", [60, 1000])
def test_a_gif_has_no_frames_that_browsers_slow_down(fps: float) -> None:
    encoder = GifEncoder(fps)
    for value in (0, 100):
        encoder.add(scaled(np.full((20, 30, 3), value, np.uint8), encoder.side))
    with Image.open(io.BytesIO(encoder.finish())) as image:
        assert image.info["duration"] == 20


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((400, 600), (480, 320)),
        ((1000, 500), (240, 480)),
        ((480, 480), (480, 480)),
        ((210, 160), (160, 210)),
        ((211, 161), (160, 212)),
        ((8, 8), (160, 160)),
        ((1, 5000), (480, 2)),
    ],
)
def test_frames_are_bounded_and_even(shape: tuple[int, int], size: tuple[int, int]) -> None:
    """(height, width) of a frame → (width, height) of the image."""
    assert scaled(np.zeros((*shape, 3), np.uint8), 480).size == size


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (None, "None"),
        (np.zeros((4, 4), np.uint8), "uint8 (4, 4)"),
        (np.zeros((4, 4, 3), np.float32), "float32 (4, 4, 3)"),
        (np.zeros((0, 4, 3), np.uint8), "uint8 (0, 4, 3)"),
        ([np.zeros((4, 4, 3), np.uint8)], "uint8 (1, 4, 4, 3)"),
    ],
    ids=str,
)
def test_what_is_no_frame_is_named(frame: Any, said: str) -> None:
    with pytest.raises(BrokenEnv, match=re.escape(f"render() returned {said}, expected uint8")):
        scaled(frame, 480)


# --- episodes -------------------------------------------------------------------------------------


def test_a_video_begins_with_the_reset_and_ends_with_the_last_step(as_gif: None) -> None:
    env = RenderedEnv(DrawnEnv("rgb_array"))
    assert env.fps == 25
    for _ in range(2):
        assert frames_of(record(env, 4)) == [0, 10, 20, 30, 40]
    env.reset(seed=1)  # not recorded


@pytest.mark.parametrize(
    ("length", "kept"),
    [(9, range(0, 10)), (10, range(0, 11, 2)), (30, range(0, 31, 4)), (3, range(0, 10))],
)
def test_a_long_episode_is_shown_by_every_kth_frame(
    as_gif: None, monkeypatch: pytest.MonkeyPatch, length: int, kept: range
) -> None:
    """Of one that is longer than announced, the beginning."""
    monkeypatch.setattr(GifEncoder, "max_frames", 10)
    steps = length if length != 3 else 20
    assert (
        frames_of(record(RenderedEnv(DrawnEnv("rgb_array", steps=steps)), length))
        == [min(255, 10 * t) for t in kept][: len(kept)]
    )


def test_frames_of_another_size_are_an_error(as_gif: None) -> None:
    """An MP4 would be torn from there on."""
    with pytest.raises(BrokenEnv, match=r"is \(64, 148\) as scaled, after .* \(128, 96\)"):
        record(RenderedEnv(DrawnEnv("rgb_array", "resized")), 4)


def test_the_folder_of_a_video_that_fails_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    env = RenderedEnv(DrawnEnv("rgb_array", "late"))
    with pytest.raises(RuntimeError, match="out of paint"):
        record(env, 4)
    assert list(tmp_path.iterdir()) == []


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def run(service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """run(arguments) → (exit status, its JSON, stderr)"""

    def call(*arguments: str) -> tuple[int, dict[str, Any], str]:
        places = ["--url", service.url, "--outbox", str(tmp_path / "outbox"), "--json"]
        status = evaluate([*places, *arguments])
        printed = capsys.readouterr()
        return status, json.loads(printed.out or "{}"), " ".join(printed.err.split())

    return call


def test_the_first_seeds_are_recorded_with_the_score(run: Any, client: Client) -> None:
    """Real episodes, of random actions: the same are played again."""
    fixed = ["--random", "--env", "CartPole-v1", "--episodes", "3", "--seeds", "40"]
    status, said, err = run(*fixed, "--videos", "2", "--envs", "3")
    assert (status, said["videos"]) == (0, 2), err
    assert "shows another episode" not in err
    stored = client.videos(said["evaluation"])
    assert [v.seed for v in stored] == [40, 41]
    assert [v.total_reward for v in stored] == said["returns"][:2]
    assert [v.length for v in stored] == said["lengths"][:2]
    assert {v.media_type for v in stored} == {MP4}
    assert client.video(said["evaluation"], 40)[4:8] == b"ftyp"


def test_by_default_there_are_none(run: Any, client: Client) -> None:
    status, said, _ = run("--random", "--env", "Blind-v0", "--episodes", "2")
    assert (status, "videos" in said) == (0, False)
    assert client.videos(said["evaluation"]) == []


def test_an_episode_that_does_not_repeat_has_the_return_that_is_shown(
    as_gif: None, run: Any, client: Client
) -> None:
    fixed = ["--random", "--env", "Drawn-v0", "--episodes", "2", "--envs", "1", "--videos", "1"]
    status, said, err = run(*fixed, "--env-args", "fault=grows")
    assert status == 0, err
    assert "the video of seed 0 shows another episode than the score" in err
    (stored,) = client.videos(said["evaluation"])
    assert (said["lengths"], stored.length, stored.media_type) == ([4, 4], 5, GIF)
    assert stored.total_reward != said["returns"][0]
    assert frames_of(client.video(said["evaluation"], 0)) == [0, 10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "Blind-v0"], "--videos: Blind-v0 does not render images; expected 'rgb_array'"),
        (["--env-args", "fault=no driver"], "--videos: Drawn-v0 cannot render: no driver"),
        (["--env-args", "fault=floats"], "cannot render: render() returned float32 (48, 64, 3)"),
        (["--episodes", "1"], "videos: at most one for each of 1 episodes"),
        (["--no-upload"], "videos: are kept with the score at the service"),
    ],
)
def test_what_cannot_be_recorded_is_an_error_before_anything_is_played(
    run: Any, client: Client, arguments: list[str], message: str
) -> None:
    before = len(client.runs())
    env = [] if "--env" in arguments else ["--env", "Drawn-v0"]
    status, said, err = run("--random", *env, "--videos", "2", *arguments)
    assert (status, said) == (2, {})
    assert message in err
    assert len(client.runs()) == before


def test_an_environment_whose_constructor_takes_no_render_mode_is_named(run: Any) -> None:
    def blind() -> FakeEnv:
        env = FakeEnv()
        env.metadata = {"render_modes": ["rgb_array"]}
        return env

    gymnasium.register("Stubborn-v0", blind, disable_env_checker=True)
    try:
        status, _, err = run("--random", "--env", "Stubborn-v0", "--videos", "1")
    finally:
        del gymnasium.registry["Stubborn-v0"]
    assert status == 2 and "--videos: Stubborn-v0 does not accept {'render_mode'" in err


@pytest.mark.parametrize("fault", ["environment", "service", "disk"])
def test_a_video_that_fails_leaves_the_score_and_fails_the_command(
    as_gif: None, run: Any, client: Client, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        if fault == "disk":
            raise OSError(28, "No space left on device")
        raise TooLarge({"status": 413, "code": "body_too_large", "detail": "out of paint"})

    if fault == "service":
        monkeypatch.setattr(Client, "put_video", refuse)
    if fault == "disk":
        monkeypatch.setattr(GifEncoder, "finish", refuse)
    fixed = ["--random", "--env", "Drawn-v0", "--episodes", "2", "--videos", "2"]
    status, said, err = run(*fixed, "--env-args", *(["fault=late"] * (fault == "environment")))
    assert (status, said["videos"]) == (1, 0)
    assert "the video of seed 0 was not recorded" in err
    assert ("No space" if fault == "disk" else "out of paint") in err
    assert client.run(said["run"]).status == "failed"
    (stored,) = client.evaluations(run=said["run"])
    assert (stored.id, client.videos(stored.id)) == (said["evaluation"], [])
