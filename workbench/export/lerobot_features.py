"""Columns of LeRobot's format: their types in info.json, Arrow arrays, and statistics."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from stepwell.errors import InvalidData
from stepwell.spaces import Array, Space

MAX_EPISODE_STATS = 1024
"""Larger arrays have statistics of all frames only."""
STATISTICS = ("min", "max", "mean", "std")
SLICE = 1 << 20
"""Numbers that are float64 at once."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One column."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_image: bool = False
    names: tuple[str, ...] = ()
    """Names of a vector's elements."""

    def described(self) -> dict[str, Any]:
        """Return the entry for info.json."""
        if self.is_image:
            axes = ["height", "width", "channels"]
            return {"dtype": "image", "shape": list(self.shape), "names": axes}
        names = list(self.names) or None
        return {"dtype": self.dtype, "shape": list(self.shape) or [1], "names": names}

    def arrow_type(self) -> pa.DataType:
        if self.is_image:
            return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        type_ = pa.from_numpy_dtype(np.dtype(self.dtype))
        if math.prod(self.shape) == 1 and len(self.shape) < 2:
            return type_
        if len(self.shape) == 1:
            return pa.list_(type_, self.shape[0])
        for _ in self.shape:
            type_ = pa.list_(type_)
        return type_

    def arrow(self, rows: Array) -> pa.Array:
        """A column of [rows, *shape]."""
        type_ = self.arrow_type()
        if self.is_image:
            return pa.array([{"bytes": png(row), "path": None} for row in rows], type_)
        column = pa.array(np.ascontiguousarray(rows).reshape(-1))
        if pa.types.is_fixed_size_list(type_):
            return pa.FixedSizeListArray.from_arrays(column, self.shape[0])
        if pa.types.is_list(type_):
            for size in reversed(self.shape):
                offsets = np.arange(0, len(column) + 1, size, dtype=np.int32)
                column = pa.ListArray.from_arrays(pa.array(offsets), column)
        return column

    # --- statistics -------------------------------------------------------------------------------

    @property
    def of_episodes(self) -> bool:
        """Whether each episode has statistics of it."""
        return self.is_image or (len(self.shape) < 2 and math.prod(self.shape) <= MAX_EPISODE_STATS)

    def moments(self, rows: Array) -> Moments:
        """Compute moments of [rows, *shape]; of images by channel, 0 … 1, as LeRobot has them."""
        if self.is_image:
            rows = rows.reshape(-1, self.shape[2])
        step = max(1, SLICE // max(1, math.prod(rows.shape[1:])))
        found = Moments.of(rows[:step], self.is_image)
        for start in range(step, len(rows), step):
            found = found.joined(Moments.of(rows[start : start + step], self.is_image))
        return found

    def statistics(self, moments: Moments) -> dict[str, Any]:
        shape = (self.shape[2], 1, 1) if self.is_image else self.shape or (1,)
        pixels = math.prod(self.shape[:2]) if self.is_image else 1
        std = np.sqrt(moments.squares / moments.count)
        arrays = zip(STATISTICS, (moments.low, moments.high, moments.mean, std), strict=True)
        found: dict[str, Any] = {name: array.reshape(shape).tolist() for name, array in arrays}
        return found | {"count": [moments.count // pixels]}


@dataclass(frozen=True, slots=True)
class Moments:
    """Running statistics, each [*shape] float64. `squares` are of the distances to the mean."""

    count: int
    low: Array
    high: Array
    mean: Array
    squares: Array

    @classmethod
    def of(cls, rows: Array, is_image: bool) -> Moments:
        with np.errstate(all="ignore"):  # infos may be NaN or infinite
            values = rows.astype(np.float64) / (255 if is_image else 1)
            mean = values.mean(axis=0)
            squares = ((values - mean) ** 2).sum(axis=0)
            return cls(len(rows), values.min(axis=0), values.max(axis=0), mean, squares)

    def joined(self, more: Moments) -> Moments:
        count = self.count + more.count
        with np.errstate(all="ignore"):
            apart = more.mean - self.mean
            mean = self.mean + apart * (more.count / count)
            squares = self.squares + more.squares
            squares = squares + apart**2 * (self.count * more.count / count)
            low, high = np.minimum(self.low, more.low), np.maximum(self.high, more.high)
        return Moments(count, low, high, mean, squares)

    @property
    def finite(self) -> bool:
        arrays = (self.low, self.high, self.mean, self.squares)
        return all(bool(np.isfinite(array).all()) for array in arrays)


def is_image(space: Space) -> bool:
    """Whether an observation is stored as PNG."""
    return space.dtype == "uint8" and len(space.shape) == 3 and space.shape[2] in (1, 3, 4)


def png(pixels: Array) -> bytes:
    """[H, W, 1 | 3 | 4] uint8 as PNG. Raises `InvalidData` without pillow."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise InvalidData(
            "--format lerobot needs pillow for images", expected="pip install 'pillow>=11.0'"
        ) from None
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return file.getvalue()
