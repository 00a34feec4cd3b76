"""Videos of episodes: an environment that renders, and files that browsers play.

    env.render() after reset and after each step → frames, scaled → MP4 (H.264), or an animated GIF

MP4 needs imageio-ffmpeg (the extra `video`). Frames are encoded as they come, never all in memory
at full size. evaluate.py plays the episodes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

import gymnasium
import numpy as np

from collector.config import EvaluateConfig, UsageError
from collector.envs import Env, EnvError, make, parse_pairs
from collector.interface import BrokenEnv
from stepwell._plugins import describe_error
from stepwell.messages import GIF, MP4

if TYPE_CHECKING:
    from PIL.Image import Image

RENDER_MODE = "rgb_array"
DEFAULT_FPS = 30.0
SMALL = 160
"""Small frames are enlarged by a whole factor, to at most this: pixels stay pixels."""


class Encoder(Protocol):
    """Makes a file of frames."""

    media_type: str
    side: int
    """Longest side of a frame, in pixels."""
    max_frames: int

    def add(self, frame: Image) -> None:
        """Append a frame; all have the same size, with even sides."""
        ...

    def finish(self) -> bytes:
        """The file. Raises OSError if it could not be written."""
        ...


class Mp4Encoder:
    """H.264 in yuv420p, which every browser plays."""

    media_type, side, max_frames = MP4, 480, 2000

    def __init__(self, fps: float, folder: Path):
        self._fps, self._path = fps, folder / "episode.mp4"
        self._frames: Generator[None, bytes | None, None] | None = None

    def add(self, frame: Image) -> None:
        if self._frames is None:
            import imageio_ffmpeg

            self._frames = imageio_ffmpeg.write_frames(
                str(self._path),
                frame.size,
                fps=self._fps,
                macro_block_size=2,
                ffmpeg_log_level="error",
                # The index at the beginning: a browser plays before it has the whole file.
                output_params=["-movflags", "+faststart"],
            )
            self._frames.send(None)
        self._frames.send(frame.tobytes())

    def finish(self) -> bytes:
        self.close()
        return self._path.read_bytes()

    def close(self) -> None:
        """End ffmpeg, which writes what it has."""
        if self._frames is not None:
            self._frames.close()


class GifEncoder:
    """An animated GIF: larger, and of at most 256 colours, but Pillow alone writes it."""

    media_type, side, max_frames = GIF, 320, 300

    def __init__(self, fps: float):
        # In steps of 10 ms. Browsers show frames of less than 20 ms for 100 ms.
        self._milliseconds = max(20, round(100 / fps) * 10)
        self._frames: list[Image] = []

    def add(self, frame: Image) -> None:
        self._frames.append(frame.quantize(256))

    def finish(self) -> bytes:
        file, (first, *others) = io.BytesIO(), self._frames
        first.save(
            file,
            "GIF",
            save_all=True,
            append_images=others,
            duration=self._milliseconds,
            loop=0,
        )
        return file.getvalue()


@contextlib.contextmanager
def open_encoder(fps: float) -> Iterator[Encoder]:
    """An encoder for one episode, as MP4 if imageio-ffmpeg is installed."""
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        yield GifEncoder(fps)
        return
    with (
        tempfile.TemporaryDirectory(prefix="stepwell-video-") as folder,
        contextlib.closing(Mp4Encoder(fps, Path(folder))) as encoder,
    ):
        yield encoder


class RenderedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives the frames of an episode to an encoder, if one is set."""

    def __init__(self, env: Env):
        super().__init__(env)
        self.fps = float((env.metadata or {}).get("render_fps") or DEFAULT_FPS)
        self._encoder: Encoder | None = None
        self._size = (0, 0)
        self._every = 1
        self._seen = self._kept = 0

    @contextlib.contextmanager
    def recording(self, length: int) -> Iterator[Encoder]:
        """Record the episode that is played meanwhile. `length`: how many steps it will have; of a
        long one every k-th frame is kept, so that it has at most `max_frames`."""
        with open_encoder(self.fps) as encoder:
            self._encoder, self._seen, self._kept = encoder, 0, 0
            self._every = -(-(length + 1) // encoder.max_frames)
            try:
                yield encoder
            finally:
                self._encoder = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        answer = self.env.reset(seed=seed, options=options)
        self._record()
        return answer

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        answer = self.env.step(action)
        self._record()
        return answer

    def _record(self) -> None:
        encoder = self._encoder
        if encoder is None:
            return
        if self._seen % self._every == 0 and self._kept < encoder.max_frames:
            frame = scaled(self.render(), encoder.side)
            self._size = self._size if self._kept else frame.size
            if frame.size != self._size:
                raise BrokenEnv(
                    f"render() returned a frame that is {frame.size} as scaled, after frames that "
                    f"are {self._size}; all frames of an episode need the same size"
                )
            encoder.add(frame)
            self._kept += 1
        self._seen += 1


@contextlib.contextmanager
def open_rendered_env(config: EvaluateConfig, metadata: dict[str, Any]) -> Iterator[RenderedEnv]:
    """The environment with render_mode="rgb_array", whose class has `metadata`; closed at the end.

    Raises `UsageError` if it does not render: nothing has been played yet.
    """
    modes = list(metadata.get("render_modes") or ())
    if RENDER_MODE not in modes:
        raise UsageError(
            f"--videos: {config.env} does not render images; expected {RENDER_MODE!r} in its "
            f"metadata['render_modes'], got {modes}: leave out --videos"
        )
    try:
        env_args = parse_pairs(config.env_args, "--env-args")
        env = RenderedEnv(make(config.env, {**env_args, "render_mode": RENDER_MODE}))
    except EnvError as error:
        raise UsageError(f"--videos: {error}") from None
    with contextlib.closing(env):
        try:
            env.reset(seed=config.seeds)
            scaled(env.render(), SMALL)
        except Exception as error:  # an environment may raise anything; it needs what it draws with
            raise UsageError(
                f"--videos: {config.env} cannot render: {describe_error(error)}"
            ) from error
        yield env


def scaled(frame: Any, side: int) -> Image:
    """A frame [H, W, 3] of uint8 as an image with even sides of at most `side` pixels. Raises
    `BrokenEnv` for anything else."""
    from PIL.Image import Resampling, fromarray

    array = np.asarray(frame)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        what = f"{array.dtype} {array.shape}" if array.ndim else repr(frame)[:80]
        raise BrokenEnv(f"render() returned {what}, expected uint8 (height, width, 3)")
    height, width = array.shape[:2]
    longest = max(height, width)
    scale = side / longest if longest > side else max(1, SMALL // longest)
    even_width, even_height = (max(2, round(n * scale / 2) * 2) for n in (width, height))
    resampling = Resampling.BICUBIC if longest > side else Resampling.NEAREST
    return fromarray(np.ascontiguousarray(array)).resize((even_width, even_height), resampling)
