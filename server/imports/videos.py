"""Videos of a LeRobot dataset → pixels, with PyAV. Untrusted: runs only in the sandbox.

    meta/episodes/…                                   by episode: file, and the second it begins at
    videos/FEATURE/chunk-000/file-000.mp4             several episodes, one after another

A frame of the table is the frame of the video that is nearest in time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from server.imports.archive import Archive
from server.imports.images import MAX_PIXELS
from server.imports.parquet_table import Table
from server.imports.raw_file import Array, ImportOptions, ImportRefused

FILE = "videos/{feature}/chunk-{chunk:03d}/file-{file:03d}.mp4"
PLACE = ("chunk_index", "file_index", "from_timestamp")
MICROSECONDS = 1_000_000
FAR_SECONDS = 10.0
"""A frame that is so far ahead is looked for from the key frame before it."""


class Videos:
    """The video features of a dataset. Raises `ImportRefused`."""

    def __init__(
        self,
        archive: Archive,
        features: list[str],
        fps: float,
        options: ImportOptions,
        memory: int,
        max_rows: int,
    ):
        self._archive, self._memory, self._fps = archive, memory, fps
        size = re.fullmatch(r"(\d+)x(\d+)", options.videos)
        self.size = (int(size[1]), int(size[2])) if size else None
        """Width and height that frames are scaled to; None: as they are."""
        names = [n for n in archive.names if re.fullmatch(r"meta/episodes/.*\.parquet", n)]
        files = [(name, archive.open(name)) for name in names]
        table = Table(files, options.size, memory, max_rows)
        needed = ["episode_index", *(f"videos/{f}/{part}" for f in features for part in PLACE)]
        if absent := [name for name in needed if name not in table.columns]:
            raise ImportRefused(
                "meta/episodes does not say where videos are",
                expected=", ".join(absent)[:300],
                got=", ".join(table.columns)[:300],
            )
        episodes, *columns = (_scalars(table, name) for name in needed)
        self._places = {
            feature: dict(zip(episodes, zip(*columns[3 * i : 3 * i + 3], strict=True), strict=True))
            for i, feature in enumerate(features)
        }
        self._open: dict[str, tuple[str, Video]] = {}

    def __contains__(self, feature: str) -> bool:
        return feature in self._places

    def frames(self, feature: str, episode: int, seconds: NDArray[np.float64]) -> Array:
        """[T, H, W, 3] uint8: of an episode, at times from its begin."""
        place = self._places[feature].get(episode)
        if place is None:
            raise ImportRefused(f"meta/episodes has no episode {episode}", got=feature[:100])
        name = FILE.format(feature=feature, chunk=place[0], file=place[1])
        held = self._open.get(feature)
        if held is None or held[0] != name:
            held = self._open[feature] = (name, Video(name, self._archive.open(name), self.size))
        video = held[1]
        height, width = video.shape
        wanted = len(seconds) * height * width * 3
        if wanted > self._memory:
            raise ImportRefused(
                f"the frames of episode {episode} need more memory than an import may have",
                expected=f"at most {self._memory} bytes (STEPWELL_IMPORT_MEMORY), or videos=96x96, "
                "which scales frames",
                got=f"{len(seconds)} frames of {width} x {height}, {wanted} bytes",
                code="body_too_large",
                status=413,
            )
        return video.frames(place[2] + seconds, 0.5 / self._fps)


def _scalars(table: Table, name: str) -> list[Any]:
    """One number of each row: a place in time is a float, all else is whole."""
    array = table.numbers(name, 0, table.rows)
    kinds = "iuf" if name.endswith(PLACE[2]) else "iu"
    if array.size != table.rows or array.dtype.kind not in kinds:
        raise ImportRefused(
            f"meta/episodes: {name[:100]} is not one number of each episode",
            expected="a number" if "f" in kinds else "an integer",
            got=f"{array.dtype} {list(array.shape)}",
        )
    found: list[Any] = array.reshape(-1).tolist()
    return found


class Video:
    """One file, mostly read from begin to end. Raises `ImportRefused`."""

    def __init__(self, name: str, file: BinaryIO, size: tuple[int, int] | None):
        try:
            import av
        except ModuleNotFoundError:
            raise ImportRefused(
                f"{name[:200]} is a video",
                expected="PyAV in the service: pip install av; or videos=no, which leaves them out",
            ) from None
        self._name, self._errors = name[:200], (av.FFmpegError, ValueError, OverflowError)
        try:
            # The format is named, so that no other demuxer sees the bytes.
            self._container = av.open(file, "r", format="mp4")
            self._stream = self._container.streams.video[0]
        except (*self._errors, IndexError) as error:
            raise self._damaged(error) from None
        self._stream.thread_type = "NONE"
        self._stream.codec_context.thread_count = 1
        width, height = self._stream.width, self._stream.height
        if not 0 < width * height <= MAX_PIXELS:
            raise self._damaged(f"{width} x {height} pixels")
        self._size = size or (width, height)
        self._decoded: Iterator[Any] = self._container.decode(self._stream)
        self._now: Any = None
        """The newest frame: the first one after the last time asked for, or the last one."""
        self._before: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of frames."""
        return self._size[1], self._size[0]

    def frames(self, seconds: NDArray[np.float64], tolerance: float) -> Array:
        """[T, H, W, 3] uint8: those nearest to `seconds` [T], which ascend."""
        found = np.empty((len(seconds), *self.shape, 3), np.uint8)
        try:
            for row, second in enumerate(seconds.tolist()):
                frame = self._at(second)
                if frame is None or not abs(frame.time - second) <= tolerance:  # or it is NaN
                    raise ImportRefused(
                        f"{self._name} lacks a frame",
                        expected=f"one at {second:.3f} s",
                        got="none" if frame is None else f"the nearest at {frame.time:.3f} s",
                    )
                found[row] = frame.to_ndarray(
                    format="rgb24", width=self._size[0], height=self._size[1], interpolation="AREA"
                )
        except self._errors as error:
            raise self._damaged(error) from None
        return found

    def _at(self, second: float) -> Any:
        first = self._before if self._before is not None else self._now
        if first is not None and not first.time <= second <= self._now.time + FAR_SECONDS:
            self._container.seek(max(0, int(second * MICROSECONDS)), backward=True)
            self._decoded = self._container.decode(self._stream)
            self._before = self._now = None
        while self._now is None or self._now.time < second:
            following = next(self._decoded, None)
            if following is None:
                break
            if following.time is None:
                raise ValueError("a frame without a time")
            self._before, self._now = self._now, following
        pair = [frame for frame in (self._before, self._now) if frame is not None]
        return min(pair, key=lambda frame: abs(frame.time - second), default=None)

    def _damaged(self, why: object) -> ImportRefused:
        return ImportRefused(
            f"{self._name} is no video, or damaged: {str(why)[:200]}",
            expected="MP4 that PyAV can decode to its end; or videos=no, which leaves videos out",
        )
