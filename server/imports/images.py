"""Encoded images of an uploaded file → pixels. Untrusted: runs only in the sandbox."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from server.imports.raw_file import Array, ImportRefused, check_size

JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG"
MAX_PIXELS = 1 << 24
MODES = ("1", "L", "LA", "RGB", "RGBA")
"""Pillow's. Others, such as a palette, would be other numbers as bytes; 1 is black and white."""
DEPTH = 24
"""The byte of a PNG that has the bits of a channel. Of 16 Pillow drops 8, except of grey ones."""


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
    images: list[Array] = []
    for row, frame in enumerate(frames):
        try:
            with Image.open(io.BytesIO(frame), formats=formats) as image:
                _check_mode(f"{name}, row {row},", image, frame)
                images.append(np.asarray(image.convert("L") if image.mode == "1" else image))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            words = " or ".join(formats)
            raise ImportRefused(
                f"{name} has damaged {words} frames: {str(error)[:100]}", got=f"row {row}"
            ) from None
        first, last = images[0], images[-1]
        if last.shape != first.shape:
            raise ImportRefused(
                f"{name} has images of several sizes",
                expected=f"{list(first.shape)} (height, width, channels), as row 0 has: "
                "image.convert('RGB') gives all three channels, image.resize((W, H)) one size",
                got=f"{list(last.shape)} in row {row}",
            )
        if (held := first.nbytes * len(images)) > memory:
            check_size(held, held, memory)
    return np.stack(images)


def _check_mode(where: str, image: Any, frame: bytes) -> None:
    """Raises `ImportRefused` for pixels that bytes of L, RGB … cannot hold."""
    if image.width * image.height > MAX_PIXELS:
        raise ImportRefused(
            f"{where} has too many pixels",
            expected=f"at most {MAX_PIXELS}",
            got=f"{image.width} x {image.height}",
        )
    if frame.startswith(PNG) and frame[DEPTH] == 16:
        raise ImportRefused(
            f"{where} has 16 bits a channel",
            expected="8 bits, (pixels >> 8).astype('uint8'), or the numbers as lists instead of "
            "images, pixels.tolist()",
            got=f"an image of the mode {image.mode}",
        )
    if image.mode not in MODES:
        lists = ", or its numbers as lists instead of images, numpy.asarray(image).tolist()"
        raise ImportRefused(
            f"{where} is an image of the mode {image.mode}",
            expected=f"one of {', '.join(MODES)}: image.convert('RGB') for its colours"
            + (lists if image.mode == "P" else ""),
            got=image.mode,
        )
