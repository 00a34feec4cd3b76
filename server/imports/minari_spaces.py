"""The spaces of a Minari dataset: those that its metadata.json declares, as ours.

    Box, Discrete, MultiDiscrete, MultiBinary    the same
    Dict, Tuple                                  one key each: "arm/angle", "arm/0"
    Text                                         `TEXT`: the vocabulary comes from the data
Names are those that a collector gives the same space (collector/envs.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from server.imports.episodes import TEXT, Declared, join
from server.imports.raw_file import ImportRefused
from stepwell.errors import InvalidSpace
from stepwell.spaces import Box, Discrete, MultiBinary, MultiDiscrete

MAX_LEVELS = 8


def declared_spaces(text: Any, what: str, default: str) -> dict[str, Declared]:
    """By key. `text` is JSON in JSON, as Minari writes it. Raises `ImportRefused`."""
    try:
        written = json.loads(text)
        top = "" if written["type"] == "Dict" else default
        return dict(_leaves(written, top, 0))
    except ImportRefused:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ImportRefused(
            f"{what} in metadata.json cannot be read: {type(error).__name__} {error}"[:300],
            expected="a space as Minari writes it",
            got=str(text)[:200],
        ) from None


def _leaves(written: dict[str, Any], key: str, level: int) -> Iterator[tuple[str, Declared]]:
    kind = written["type"]
    if kind not in ("Dict", "Tuple"):
        try:
            yield key, _space(written)
        except InvalidSpace as error:
            raise ImportRefused(
                f"the space of {key[:200]} in metadata.json: {error}",
                expected=error.expected,
                got=error.got,
            ) from None
        return
    if level == MAX_LEVELS:
        raise ValueError(f"spaces nested deeper than {MAX_LEVELS}")
    below = written["subspaces"]
    for part, child in below.items() if kind == "Dict" else enumerate(below):
        yield from _leaves(child, join(key, str(part)), level + 1)


def _space(written: dict[str, Any]) -> Declared:
    match written["type"]:
        case "Text":
            return TEXT
        case "Discrete":
            return Discrete(written["n"], written.get("start", 0))
        case "MultiDiscrete":
            # Flat, as a collector has it; spec.py:cast reshapes the values.
            nvec = np.asarray(written["nvec"])
            start = np.broadcast_to(np.asarray(written.get("start", 0)), nvec.shape)
            return MultiDiscrete(tuple(nvec.ravel().tolist()), tuple(start.ravel().tolist()))
        case "MultiBinary":
            n = written["n"]
            return MultiBinary(n if isinstance(n, int) else math.prod(n))
        case "Box":
            low, high = (np.asarray(written[name], np.float64) for name in ("low", "high"))
            return _box(tuple(written["shape"]), str(written["dtype"]), low, high)
        case other:
            raise ValueError(f"unknown space {str(other)[:60]!r}")


def _box(shape: tuple[int, ...], dtype: str, low: Any, high: Any) -> Box:
    # As in a D4RL file, float64 becomes float32: agents compute in it.
    kind = "float32" if dtype == "float64" else dtype
    bounds = (tuple(np.broadcast_to(b, shape).ravel().tolist()) for b in (low, high))
    return Box(shape, kind, *bounds)
