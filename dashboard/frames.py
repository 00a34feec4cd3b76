"""Observations that are images: single frames, strips of frames, and moving pictures."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

MOST_FRAMES = 200
"""In a moving picture; a longer episode is shown with steps left out."""
STRIP = 8
"""Frames in a strip."""


def is_image(array: Any) -> bool:
    """Whether observations [T+1, …] are grey [H, W] or coloured [H, W, 1, 3 or 4] bytes."""
    return is_picture(array.shape[1:], str(array.dtype))


def is_picture(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether one observation of this shape and type is an image."""
    return dtype == "uint8" and (len(shape) == 2 or (len(shape) == 3 and shape[-1] in (1, 3, 4)))


def data_url(image: Any, size: int) -> str:
    """A small picture [H, W(, C)] of at most `size` pixels a side, as the address of an image."""
    picture = Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image)
    picture.thumbnail((size, size))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def enlarged(image: Any, size: int = 280) -> Any:
    """A small image with sharp pixels: the browser would blur it."""
    factor = max(1, size // max(image.shape[0], image.shape[1]))
    image = image.repeat(factor, axis=0).repeat(factor, axis=1)
    return image.squeeze(-1) if image.ndim == 3 and image.shape[-1] == 1 else image


def strip(frames: Any) -> list[int]:
    """Up to `STRIP` steps, evenly spaced from the first to the last."""
    chosen = np.linspace(0, len(frames) - 1, min(STRIP, len(frames)))
    return [int(t) for t in chosen.round()]


def gif(frames: Any, per_second: float = 15.0) -> bytes:
    """All frames [T+1, H, W(, C)] as a GIF, which a browser plays without more."""
    stride = -(-len(frames) // MOST_FRAMES)
    if frames.ndim == 4 and frames.shape[-1] == 4:
        frames = frames[..., :3]  # what is transparent in one frame would show the one before
    images = [Image.fromarray(enlarged(frame)) for frame in frames[::stride]]
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=1000 / per_second,
        loop=0,
    )
    return buffer.getvalue()
