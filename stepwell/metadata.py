"""Where a trajectory came from: everything that is not an array. All of it is visible in SQL.

Values are normalised on construction, because a trajectory's digest covers this record as JSON:
what numpy has in place of a number, a text or a flag (a scalar, an array of one) becomes Python's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from stepwell.errors import InvalidTrajectory
from stepwell.flags import as_bool

Purpose = Literal["train", "eval"]
MAX_TAGS = 64
MAX_TEXT = 1024
MAX_NAME = 128
MAX_METRICS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryMetadata:
    """Where a trajectory came from: everything that is not an array. All of it is SQL-visible."""

    env: str = ""
    """Environment name, for instance "Hopper-v5"; may differ between trajectories of a dataset."""
    episode_id: str = ""
    """The episode this is a piece of; empty means the trajectory is the whole episode."""
    first_step: int = 0
    """Episode step of row 0: 0 unless the trajectory is a later piece of its episode."""
    seed: int | None = None
    """Seed that the episode was reset with."""
    policy: str = ""
    """Who acted, as run/version (for instance "demo/7"), or a free name for a scripted actor."""
    collector: str = ""
    """Worker that collected it."""
    run: str = ""
    """Collect or evaluation run to which it belongs."""
    purpose: Purpose = "train"
    """"eval" trajectories are excluded from training snapshots unless explicitly included."""
    success: bool | None = None
    """Whether the environment reported success; None if it reports nothing."""
    tags: tuple[str, ...] = ()
    """User-defined labels, available in SQL."""
    source: str = ""
    """Where imported data came from, for instance the file name and its sha256."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Named numbers that the environment reported for the episode, as float64: integers beyond 2^53
    are rounded."""
    started_at: float | None = None
    """Unix time of row 0 in seconds, as reported by the collector."""

    def __post_init__(self) -> None:
        for name in ("env", "episode_id", "policy", "collector", "run", "source", "purpose"):
            value = getattr(self, name)
            if type(value) is str and not value:
                continue
            value = _plain(value)
            if not _is_text(value, MAX_TEXT):
                raise InvalidTrajectory(
                    f"metadata.{name}",
                    expected=f"text of at most {MAX_TEXT} characters",
                    got=repr(value)[:80],
                )
            self._set(name, value)
        if self.purpose not in ("train", "eval"):
            raise InvalidTrajectory(
                "metadata.purpose", expected="train | eval", got=repr(self.purpose)[:80]
            )
        self._set("first_step", _integer("first_step", self.first_step, 0))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, -(2**63)))
        if self.success is not None:
            self._set("success", as_bool("metadata.success", self.success))
        tags: Any = self.tags
        if isinstance(tags, np.ndarray):
            tags = tags.tolist()
        if isinstance(tags, tuple | list):
            tags = [_plain(tag) for tag in tags]
        if (
            not isinstance(tags, list)
            or len(tags) > MAX_TAGS
            or any(not tag or not _is_text(tag, MAX_NAME) for tag in tags)
        ):
            raise InvalidTrajectory(
                "metadata.tags",
                expected=f"≤ {MAX_TAGS} labels of 1 to {MAX_NAME} characters",
                got=repr(tags)[:80],
            )
        self._set("tags", tuple(tags))
        metrics: Any = self.metrics
        if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
            raise InvalidTrajectory(
                "metadata.metrics",
                expected=f"≤ {MAX_METRICS} named numbers",
                got=repr(metrics)[:80],
            )
        self._set("metrics", dict(_metric(*item) for item in metrics.items()))
        if self.started_at is not None:
            self._set("started_at", _finite("metadata.started_at", "Unix seconds", self.started_at))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def to_json(self) -> dict[str, Any]:
        """Return only the values that differ from the defaults."""
        data: dict[str, Any] = {}
        for name, default in _METADATA_DEFAULTS:
            value = getattr(self, name)
            if value is not default and value != default:
                data[name] = value
        if self.tags:
            data["tags"] = list(self.tags)
        if self.metrics:
            data["metrics"] = dict(self.metrics)
        return data

    @classmethod
    def from_json(cls, data: Any) -> TrajectoryMetadata:
        if not isinstance(data, Mapping):
            raise InvalidTrajectory("metadata", expected="an object", got=type(data).__name__)
        if unknown := set(data) - _METADATA_NAMES:
            raise InvalidTrajectory(
                "metadata", expected=f"fields {sorted(_METADATA_NAMES)}", got=str(sorted(unknown))
            )
        return cls(**data)


_METADATA_NAMES = frozenset(f.name for f in fields(TrajectoryMetadata))
_METADATA_DEFAULTS = tuple(
    (f.name, f.default) for f in fields(TrajectoryMetadata) if f.name not in ("tags", "metrics")
)


def _is_text(value: Any, longest: int) -> bool:
    """Whether every database can store the text: no NUL, and encodable as UTF-8."""
    if not isinstance(value, str) or len(value) > longest or "\0" in value:
        return False
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def _plain(value: Any) -> Any:
    """Python's value of a numpy scalar, or of an array (numpy's, torch's, …) of one element; others
    as they are."""
    if not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    return array.item() if array.size == 1 and array.dtype.kind in "biufU" else value


def _integer(name: str, value: Any, least: int) -> int:
    plain = _plain(value)
    try:
        number = operator.index(plain)
    except TypeError:
        number = int(plain) if isinstance(plain, float) and plain.is_integer() else least - 1
    if isinstance(plain, bool) or not least <= number < 2**63:
        raise InvalidTrajectory(
            f"metadata.{name}", expected=f"an integer, {least} ≤ n < 2**63", got=repr(value)[:80]
        )
    return number


def _metric(key: Any, value: Any) -> tuple[str, float]:
    name = _plain(key)
    if not _is_text(name, MAX_NAME):
        raise InvalidTrajectory(
            "metadata.metrics",
            expected=f"names of at most {MAX_NAME} characters",
            got=repr(key)[:80],
        )
    return name, _finite(f"metadata.metrics[{name}]", "a finite number", value)


def _finite(name: str, expected: str, value: Any) -> float:
    plain = _plain(value)
    try:
        number = math.nan if isinstance(plain, str) else float(plain)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidTrajectory(name, expected=expected, got=repr(value)[:80])
    return number
