"""RLDS datasets as TFDS stores them → trajectories. Untrusted: runs only in the sandbox.

The zip of a folder with features.json, dataset_info.json and TFRecord files. One record is one
episode; "steps/<path>" has the values of all its L steps. Step i holds

    observation_i    action_i    reward_i, of action_i    is_first    is_last    is_terminal

and of the last step, is_last, only the observation counts, so T = L-1. Many datasets of robots have
an action there, too, and their only reward: with `keep_last_step` T = L, and the observation after
the last step is unknown. is_terminal at the last step is a terminated episode; without it the
episode was truncated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from server.imports.archive import Archive
from server.imports.episodes import TEXT, About, Declared, Episodes, Layout, Leaf, join, put
from server.imports.images import JPEG, pixels
from server.imports.raw_file import (
    Array,
    ImportOptions,
    ImportRefused,
    as_flags,
    last_flag,
    why_dropped,
)
from server.imports.tfrecord import Features, parse, records
from stepwell._wording import pluralize
from stepwell.spaces import DEFAULT_ACTION, DEFAULT_OBSERVATION, DTYPES, Discrete
from stepwell.trajectory import TrajectoryMetadata

FEATURES, INFO = "features.json", "dataset_info.json"
SHARD = re.compile(r"[^/]+-(?P<split>[^-/]+)\.tfrecord-(?P<number>\d{5,8})-of-(?P<of>\d{5,8})")
FLAGS = ("is_first", "is_last", "is_terminal")
MAX_LEVELS = 8
MAX_FEATURES = 512


@dataclass(frozen=True, slots=True)
class Feature:
    """One array of every step, as features.json declares it."""

    path: str
    kind: str
    """"numbers", "texts" or "frames"."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    encoded: bool = False
    """Whether each row is the bytes of its numbers."""
    classes: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the record of one episode lies."""

    file: str
    split: str
    offset: int
    length: int


class RldsEpisodes(Episodes):
    """The episodes of all splits (episodes.py: Episodes)."""

    def __init__(self, archive: Archive, options: ImportOptions, memory: int):
        self._archive, self._memory = archive, memory
        self._keep_last = options.keep_last_step
        self._steps, unread = _declared_steps(archive.json(FEATURES))
        self._info = archive.json(INFO) if archive.has(INFO) else {}
        wanted = ("name", "version", "description")
        self.metadata = {k: str(self._info[k])[:1024] for k in wanted if self._info.get(k)}
        self._places: list[_Place] = []
        self._last: tuple[int, Features] = (-1, {})
        self._file: tuple[str, BinaryIO] | None = None
        self._has_jpeg = False
        self.layout = Layout()
        self.layout.dropped |= unread
        self._named = self._choose(options)
        short = last_rewards = 0
        for file, split in _shards(archive, self._info):
            with archive.open(file) as opened:
                for offset, length in records(opened, file):
                    self._places.append(_Place(file, split, offset, length))
                    number = len(self._places) - 1
                    steps = self._survey(number)
                    if steps < 1:
                        short += 1
                        self._places.pop()
                        self._last = (-1, {})  # its number is the next one's
                    else:
                        last_rewards += bool(self._values(number, self._steps["reward"])[-1])
        self._check_counts(short)
        self._warn(short, last_rewards)

    def declared(self, what: str) -> Mapping[str, Declared]:
        found: dict[str, Declared] = {}
        for key, feature in self._named[what].items():
            if feature.kind == "texts":
                found[key] = TEXT
            elif feature.classes:
                found[key] = Discrete(feature.classes)
        return found

    def rows(self, number: int, leaf: Leaf) -> Array:
        array = self._values(number, self._steps[leaf.path])
        if leaf.path.split("/")[0] == "action":
            return self._of_transitions(array)
        # Nothing is known of the observation after a last step that counts.
        return np.concatenate([array, array[-1:]]) if self._keep_last else array

    def _of_transitions(self, array: Array) -> Array:
        """Return the values of the steps that count, out of all L steps."""
        return array if self._keep_last else array[:-1]

    def about(self, number: int) -> About:
        place = self._places[number]
        terminated = bool(self._values(number, self._steps["is_terminal"])[-1])
        return About(
            name=f"episode {number}",
            rewards=self._of_transitions(self._values(number, self._steps["reward"])),
            terminated=terminated,
            truncated=not terminated,
            final_obs_valid=not self._keep_last,
            metadata=TrajectoryMetadata(tags=(f"split:{place.split}"[:128],)),
        )

    def _choose(self, options: ImportOptions) -> dict[str, dict[str, Feature]]:
        """The features by their roles: observation, action and info, by key."""
        found: dict[str, dict[str, Feature]] = {"observation": {}, "action": {}, "info": {}}
        defaults = {"observation": DEFAULT_OBSERVATION, "action": DEFAULT_ACTION}
        for path, feature in self._steps.items():
            top, *parts = path.split("/")
            role = top if top in defaults else "info"
            if path in ("reward", *FLAGS):
                continue
            key = "" if parts else defaults.get(top, "")
            for part in parts if role != "info" and parts else [] if key else [top, *parts]:
                key = join(key, part)
            why = why_dropped(key, options.drop_infos) if role == "info" else ""
            if role == "info" and feature.kind != "numbers":
                why = why or "not plain numbers"
            if why:
                self.layout.dropped[key] = why
            else:
                put(found[role], key, feature, self.layout.dropped if role == "info" else None)
        for role in defaults:
            if not found[role]:
                raise ImportRefused(
                    f"steps have no {role} of numbers, images or texts",
                    expected="observation, action, reward, is_first, is_last, is_terminal",
                    got=", ".join(self._steps)[:200] or "nothing that can be read",
                )
        return found

    def _survey(self, number: int) -> int:
        """Check one episode; returns its T."""
        name = f"episode {number}"
        rows = len(self._features(number).get("steps/is_last", ()))
        if rows == 0:
            raise ImportRefused(f"{name} has no steps/is_last", expected="steps in every record")
        places = np.arange(rows)
        for flag, wanted in (("is_last", places == rows - 1), ("is_first", places == 0)):
            marks = as_flags(f"{name}/{flag}", self._values(number, self._steps[flag]))
            if not np.array_equal(marks, wanted):
                raise ImportRefused(
                    f"{name}: {flag} is not set at the {flag[3:]} step only",
                    expected="one episode a record",
                )
        last_flag(f"{name}/is_terminal", self._values(number, self._steps["is_terminal"]))
        transitions = rows if self._keep_last else rows - 1
        if not transitions:
            return 0
        here = {
            role: {key: self._leaf(number, feature) for key, feature in features.items()}
            for role, features in self._named.items()
        }
        self.layout.add(number, transitions, name, here)
        return transitions

    def _leaf(self, number: int, feature: Feature) -> Leaf:
        self._values(number, feature, check=True)
        shape = feature.shape if feature.kind == "numbers" else None
        return Leaf(feature.path, shape, feature.dtype, feature.kind)

    def _features(self, number: int) -> Features:
        """One parsed record; the last one is kept."""
        if self._last[0] != number:
            place = self._places[number]
            if self._file is None or self._file[0] != place.file:
                self._file = (place.file, self._archive.open(place.file))
            self._file[1].seek(place.offset)
            data = self._file[1].read(place.length)
            self._last = (number, parse(data, f"episode {number}"))
        return self._last[1]

    def _values(self, number: int, feature: Feature, *, check: bool = False) -> Array:
        """Rows of all L steps; with `check`, texts and images are only counted."""
        name, features = f"episode {number}/{feature.path}", self._features(number)
        values = features.get(f"steps/{feature.path}", [])
        rows = len(features.get("steps/is_last", ()))
        in_bytes = feature.kind != "numbers" or feature.encoded
        each = 1 if in_bytes else math.prod(feature.shape)
        if isinstance(values, list) != in_bytes or len(values) != rows * each:
            raise ImportRefused(
                f"{name} is not what {FEATURES} declares",
                expected=f"{rows} rows of {feature.kind} {list(feature.shape)}",
                got=f"{len(values)} {'byte strings' if isinstance(values, list) else 'numbers'}",
            )
        if check and feature.kind != "numbers":
            # Whatever features.json says: TFDS stores images that were given as bytes as they are.
            is_image = feature.kind == "frames" and isinstance(values, list)
            self._has_jpeg |= is_image and any(value.startswith(JPEG) for value in values)
            return np.zeros(0)
        if isinstance(values, list):
            return self._decoded(name, values, feature)
        limits = np.iinfo(feature.dtype) if feature.dtype.kind in "iu" else None
        if limits and bool(((values < limits.min) | (values > limits.max)).any()):
            raise ImportRefused(f"{name} has numbers that {feature.dtype} cannot hold")
        if feature.dtype == np.bool_:
            values = as_flags(name, values)
        return values.astype(feature.dtype).reshape(rows, *feature.shape)

    def _decoded(self, name: str, values: list[bytes], feature: Feature) -> Array:
        if feature.kind == "texts":
            return np.array([value.decode(errors="replace") for value in values], object)
        if feature.kind == "frames":
            found = pixels(name, values, ("JPEG", "PNG"), self._memory)
            if found.shape[1:] != feature.shape and math.prod(found.shape[1:]) != math.prod(
                feature.shape
            ):
                raise ImportRefused(
                    f"{name} has images of another size",
                    expected=list(feature.shape),
                    got=list(found.shape[1:]),
                )
            return found.reshape(len(values), *feature.shape)
        size = math.prod(feature.shape) * feature.dtype.itemsize
        if any(len(value) != size for value in values):
            raise ImportRefused(f"{name} has rows of a wrong size", expected=f"{size} bytes each")
        return np.frombuffer(b"".join(values), feature.dtype).reshape(-1, *feature.shape)

    def _check_counts(self, short: int) -> None:
        try:
            lengths = [int(n) for s in _splits(self._info) for n in s.get("shardLengths", [])]
        except (TypeError, ValueError, AttributeError):
            raise ImportRefused(f"splits in {INFO} cannot be read") from None
        found = len(self._places) + short
        if not found or (lengths and sum(lengths) != found):
            raise ImportRefused(
                "episodes are missing",
                expected=f"{sum(lengths)}, as {INFO} says" if lengths else "at least one",
                got=pluralize(found, "episode"),
            )
        if not self._places:
            raise ImportRefused("no episode has two steps", got=pluralize(found, "episode"))

    def _warn(self, short: int, last_rewards: int) -> None:
        warn = self.layout.warnings.append
        splits = sorted({place.split for place in self._places})
        if len(splits) > 1:
            warn(f"the splits {', '.join(splits)} are one dataset; tags name them (split:…)")
        if short:
            warn(f"{pluralize(short, 'episode')} of a single step left out: no transition")
        if last_rewards and not self._keep_last:
            warn(
                f"the last step of {pluralize(last_rewards, 'episode')} has a reward: in RLDS only "
                "its observation counts, so it is omitted; keep_last_step=true keeps it, in "
                "another dataset"
            )
        if self._has_jpeg:
            warn("images were stored as JPEG, which changes pixels: stored is what it shows")
        every = [f for role in ("observation", "action") for f in self._named[role].values()]
        if any(f.dtype == np.float64 and not f.encoded for f in every):
            warn("TFDS itself stores float64 as float32")


@contextmanager
def opened(file: BinaryIO, options: ImportOptions, memory: int, _: int) -> Iterator[Episodes]:
    """Raises `ImportRefused`."""
    archive = Archive(file, options.size, memory)
    if not archive.enter(FEATURES):
        raise ImportRefused(
            "not the zip of a TFDS dataset",
            expected=f"{FEATURES}, {INFO} and TFRecord files",
            got=", ".join(archive.names[:20])[:200],
        )
    yield RldsEpisodes(archive, options, memory)


# --- what the folder declares ---------------------------------------------------------------------


def _shards(archive: Archive, info: dict[str, Any]) -> list[tuple[str, str]]:
    """(file, split) in order; every shard must be there. Raises `ImportRefused`."""
    kind = info.get("fileFormat", "tfrecord")
    if kind != "tfrecord":
        raise ImportRefused(
            "the dataset is not stored in TFRecord files",
            expected="TFDS's file format tfrecord (its default)",
            got=str(kind)[:60],
        )
    found: dict[tuple[str, int], dict[int, str]] = {}
    for name in archive.names:
        if match := SHARD.fullmatch(name):
            shards = found.setdefault((match["split"], int(match["of"])), {})
            shards[int(match["number"])] = name
    if not found:
        raise ImportRefused(
            "no TFRecord files",
            expected="NAME-SPLIT.tfrecord-00000-of-00001",
            got=archive.names[:9],
        )
    ordered = []
    for (split, of), shards in sorted(found.items()):
        if sorted(shards) != list(range(of)):
            raise ImportRefused(
                f"files of the split {split[:60]} are missing", expected=of, got=len(shards)
            )
        ordered += [(shards[number], split) for number in range(of)]
    return ordered


def _splits(info: dict[str, Any]) -> list[dict[str, Any]]:
    splits = info.get("splits")
    return [s for s in splits if isinstance(s, dict)] if isinstance(splits, list) else []


def _declared_steps(written: dict[str, Any]) -> tuple[dict[str, Feature], dict[str, str]]:
    """The features of a step by path, and of those that cannot be read the reasons."""
    try:
        top = written["featuresDict"]["features"]
        steps = top["steps"]["sequence"]["feature"]["featuresDict"]["features"]
        found: dict[str, Feature] = {}
        unread: dict[str, str] = {}
        _collect(steps, "", found, unread, 0)
    except ImportRefused:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ImportRefused(
            f"{FEATURES} does not describe episodes: {type(error).__name__} {error}"[:200],
            expected="a feature steps, of tfds.features.Dataset (RLDS)",
            got=str(written)[:200],
        ) from None
    for name in ("reward", *FLAGS):
        feature = found.get(name)
        if feature is None or feature.kind != "numbers" or feature.shape not in ((), (1,)):
            raise ImportRefused(
                f"steps have no scalar {name}",
                expected="observation, action, reward, is_first, is_last, is_terminal",
                got=", ".join(found)[:200],
            )
        found[name] = Feature(name, "numbers", (), feature.dtype, feature.encoded)
    for path in [p for p in unread if p.split("/")[0] in ("observation", "action")]:
        raise ImportRefused(f"{path[:200]} in {FEATURES}: {unread[path]}")
    return found, unread


def _collect(
    features: dict[str, Any],
    prefix: str,
    found: dict[str, Feature],
    unread: dict[str, str],
    level: int,
) -> None:
    for name, written in features.items():
        path = f"{prefix}{name}"
        if "featuresDict" in written:
            if level == MAX_LEVELS:
                raise ValueError(f"features nested deeper than {MAX_LEVELS}")
            below = written["featuresDict"]["features"]
            _collect(below, f"{path}/", found, unread, level + 1)
            continue
        if len(found) + len(unread) >= MAX_FEATURES:
            raise ValueError(f"more than {MAX_FEATURES} features")
        feature, why = _feature(path, written)
        if feature is None:
            unread[path] = why
        else:
            found[path] = feature


def _feature(path: str, written: dict[str, Any]) -> tuple[Feature | None, str]:
    if "text" in written:
        return Feature(path, "texts", (), np.dtype(object)), ""
    if "classLabel" in written:
        count = int(written["classLabel"].get("numClasses", 0))
        return Feature(path, "numbers", (), np.dtype(np.int64), classes=max(count, 0)), ""
    image = written.get("image")
    said: dict[str, Any] | None = image if image is not None else written.get("tensor")
    if said is None:
        return None, f"an unknown kind of feature ({', '.join(sorted(written))[:80]})"
    dimensions = [int(n) for n in said.get("shape", {}).get("dimensions", [])]
    dtype = str(said.get("dtype", ""))
    if min(dimensions, default=1) < 1 or len(dimensions) > 4:
        return None, f"its shape {dimensions} differs between steps, or is too large"
    if image is not None:
        if dtype != "uint8":
            return None, f"images of {dtype}"
        return Feature(path, "frames", tuple(dimensions), np.dtype(np.uint8)), ""
    if dtype == "string":
        return (
            (None, "lists of texts")
            if dimensions
            else (
                Feature(path, "texts", (), np.dtype(object)),
                "",
            )
        )
    encoding = said.get("encoding", "none")
    if dtype not in DTYPES or encoding not in ("none", "bytes"):
        return None, f"unsupported type ({dtype[:40]}, encoding {str(encoding)[:40]})"
    return Feature(path, "numbers", tuple(dimensions), np.dtype(dtype), encoding == "bytes"), ""
