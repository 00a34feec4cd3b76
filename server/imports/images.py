"""Encoded images of an uploaded file → pixels. Untrusted: runs only in the sandbox."""

from __future__ import annotations

import io
from collections.abc import Iterable

import numpy as np

from server.imports.raw_file import Array, ImportRefused

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG"
MAX_PIXELS = 1 << 24
MODES = ("L", "RGB", "RGBA")
"""Others, such as 16 bits or a palette, would be other numbers as bytes."""


def pixels(
    name: str, frames: Iterable[bytes], formats: tuple[str, ...] = ("JPEG",), memory: int = 1 << 62
) -> Array:
    """[rows, H, W, C] of images of one size; grey ones [rows, H, W]. Raises `ImportRefused`."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ImportRefused(
            f"{name} has encoded images", expected="pillow in the service: pip install pillow"
        ) from None
    try:
        images: list[Array] = []
        for frame in frames:
            with Image.open(io.BytesIO(frame), formats=formats) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels")
                if image.mode not in MODES:
                    raise ValueError(f"pixels of the mode {image.mode}, not one of {MODES}")
                images.append(np.asarray(image, np.uint8))
            if images[0].nbytes * len(images) > memory:
                raise ValueError("they need more memory than an import may have")
        return np.stack(images)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        words = " or ".join(formats)
        raise ImportRefused(f"{name} has damaged {words} frames: {str(error)[:100]}") from None
