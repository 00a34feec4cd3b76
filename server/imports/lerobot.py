"""A LeRobot v3 dataset → trajectories. Untrusted: runs only in the sandbox.

    meta/info.json                     features: name → dtype, shape
    meta/tasks.parquet                 task_index, and the texts as index
    data/chunk-000/file-000.parquet    one row a frame, several episodes a file
    videos/FEATURE/…                   videos.py
    meta/stepwell/                     what `stepwell export` put beside it: Kept

Files are those of the archive; paths that info.json has are never opened. Rows become episodes in
table_episodes.py.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from server.imports.archive import Archive
from server.imports.column_map import (
    PADDING,
    ColumnMap,
    Columns,
    array_key,
    column_map,
    put,
)
from server.imports.episodes import About, Episodes, Leaf
from server.imports.hf_card import read_about
from server.imports.parquet import reported
from server.imports.parquet_table import Table
from server.imports.raw_file import Array, ImportOptions, ImportRefused
from server.imports.table_episodes import TableEpisodes
from server.imports.videos import Videos
from stepwell._wording import shown
from stepwell.errors import InvalidData
from stepwell.metadata import MAX_NAME, MAX_TAGS, TrajectoryMetadata
from stepwell.spaces import DEFAULT_ACTION, DEFAULT_OBSERVATION, EnvSpec

INFO, TASKS = "meta/info.json", "meta/tasks.parquet"
SPEC, KEPT = "meta/stepwell/spec.json", "meta/stepwell/episodes.parquet"
OWN = ("timestamp", "frame_index", "episode_index", "index", "task_index", "subtask_index")
"""Columns that every dataset has."""
ROLES = {
    "reward": "next.reward",
    "done": "next.done",
    "truncated": "next.truncated",
    "success": "next.success",
    "episode": "episode_index",
    "step": "frame_index",
}


@contextmanager
def opened(
    file: BinaryIO, options: ImportOptions, memory: int, max_rows: int
) -> Iterator[Episodes]:
    """Raises `ImportRefused`."""
    if not zipfile.is_zipfile(file):
        raise ImportRefused("not a LeRobot dataset", expected="the zip of its folder")
    archive = Archive(file, options.size, memory)
    if not archive.enter(INFO):
        raise ImportRefused(f"{INFO} is missing", got=", ".join(archive.names[:20])[:300])
    info = archive.json(INFO)
    features = _features(info)
    filmed = [name for name, feature in features.items() if feature.get("dtype") == "video"]
    if options.videos == "no":
        features, filmed = {n: f for n, f in features.items() if n not in filmed}, []
    names = [n for n in archive.names if n.startswith("data/") and n.endswith(".parquet")]
    with reported():
        files = [(name, archive.open(name)) for name in names]
        table = Table(files, options.size, memory, max_rows)
        if absent := [n for n in features if n not in table.columns and n not in filmed]:
            raise ImportRefused(
                f"features of {INFO} are missing in the data", got=", ".join(absent)[:300]
            )
        kept = videos = None
        if filmed:
            videos = Videos(archive, filmed, _fps(info), options, memory, max_rows)
        elif SPEC in archive.names and not options.columns:
            kept = Kept(archive, options, memory, max_rows)
        preset = (
            _columns(list(features), options.columns)
            if kept is None
            else kept.columns(list(features))
        )
        preset.element_names = {name: _names(feature) for name, feature in features.items()}
        if "reward" not in preset.single:
            options = replace(options, columns=("reward=", *options.columns))
        columns = column_map([*table.columns, *filmed], options.columns, preset)
        source = LeRobotEpisodes(table, columns, options, memory, kept, videos)
        source.tasks = _tasks(archive, options, memory, max_rows)
        _check_counts(info, source)
        source.metadata = {k: str(info[k])[:1024] for k in ("robot_type", "fps") if info.get(k)}
        source.metadata |= read_about(archive).metadata
        yield source


class Kept:
    """What LeRobot cannot hold and `stepwell export` has written beside it: one row an episode.

    Raises `ImportRefused`.
    """

    def __init__(self, archive: Archive, options: ImportOptions, memory: int, max_rows: int):
        written = archive.json(SPEC)
        try:
            self.spec = EnvSpec.from_json(written["spec"])
            self._columns = {
                role: {key: str(written["columns"][role][key]) for key in spaces}
                for role, spaces in (
                    ("observation", self.spec.observations),
                    ("action", self.spec.actions),
                    ("info", self.spec.infos),
                )
            }
        except (InvalidData, LookupError, TypeError) as error:
            raise ImportRefused(f"{SPEC} cannot be read: {str(error)[:300]}") from None
        if KEPT not in archive.names:
            raise ImportRefused(f"{KEPT} is missing", expected=f"it, or no {SPEC}")
        self.table = Table([(KEPT, archive.open(KEPT))], options.size, memory, max_rows)
        names = ("terminated", "truncated", "final_obs_valid", "episode_index", "length")
        finals = (*self._columns["observation"].values(), *self._columns["info"].values())
        if absent := [n for n in (*names, "metadata", *finals) if n not in self.table.columns]:
            raise ImportRefused(f"{KEPT} lacks columns", expected=", ".join(absent)[:300])
        self.numbers = {n: self.table.numbers(n, 0, self.table.rows) for n in names}
        self._metadata = self.table.whole("metadata").to_pylist()

    def columns(self, features: list[str]) -> ColumnMap:
        """The roles as the spec has them."""
        found = _columns(features)
        for role, columns in self._columns.items():
            if absent := [name for name in columns.values() if name not in features]:
                raise ImportRefused(
                    f"{SPEC} names features that {INFO} lacks", expected=", ".join(absent)[:300]
                )
            found.arrays[role] = {key: (name,) for key, name in columns.items()}
        return found

    def metadata(self, number: int) -> TrajectoryMetadata:
        try:
            return TrajectoryMetadata.from_json(json.loads(self._metadata[number]))
        except (InvalidData, ValueError, TypeError, RecursionError) as error:
            raise ImportRefused(
                f"metadata of episode {number} in {KEPT} cannot be read: {str(error)[:300]}"
            ) from None


class LeRobotEpisodes(TableEpisodes):
    """Rows of a LeRobot dataset, with the frames of its videos, and the tasks of each episode as
    tags."""

    tasks: Mapping[int, str] = MappingProxyType({})
    own = OWN

    def __init__(
        self,
        table: Table,
        columns: ColumnMap,
        options: ImportOptions,
        memory: int,
        kept: Kept | None,
        videos: Videos | None,
    ):
        self._kept, self._videos = kept, videos
        super().__init__(table, columns, options, memory)
        if kept is None:
            return
        lengths = [steps for _, steps in self.layout.episodes]
        for name, expected in (("episode_index", self._names), ("length", map(str, lengths))):
            if [*expected] != [str(value) for value in kept.numbers[name].tolist()]:
                raise ImportRefused(
                    f"{KEPT} is of other data",
                    expected=f"the {name} of each episode of the data; without {SPEC} the "
                    "dataset is read as any of LeRobot",
                )

    def written_spec(self) -> EnvSpec | None:
        return None if self._kept is None else self._kept.spec

    def rows(self, number: int, leaf: Leaf) -> Array:
        array = super().rows(number, leaf)
        if self._kept is not None and leaf.path.startswith("info/"):
            array = np.concatenate([array[:-1], self._last(leaf, number)])
        return array

    def _leaf(self, role: str, key: str, columns: Columns) -> Leaf:
        if self._videos is None or not any(column in self._videos for column in columns):
            return super()._leaf(role, key, columns)
        path = f"{role}/{key}"
        if role != "observation" or len(columns) > 1:
            raise ImportRefused(
                f"{path} cannot be made of videos",
                expected="an observation of one video",
                got=shown(columns),
            )
        if self.columns.one("episode") != ROLES["episode"]:
            raise ImportRefused(
                "videos are found by episode_index",
                expected="it as the episode, or videos=no",
                got=f"columns=episode={self.columns.one('episode') or ''}"[:200],
            )
        scaled = "" if self._videos.size is None else "scaled frames of "
        self.layout.warnings.append(f"{path}: {scaled}a video, whose coding changes pixels")
        self._leaves[path] = columns
        return Leaf(path, None, np.dtype(np.uint8), "frames")

    def _read(self, columns: Columns, kind: str, number: int, extra: int = 0) -> Array:
        if self._videos is None or columns[0] not in self._videos:
            return super()._read(columns, kind, number, extra)
        start, steps = int(self._starts[number]), self.layout.episodes[number][1] + extra
        seconds = self.table.numbers("timestamp", start, start + steps).astype(np.float64)
        return self._videos.frames(columns[0], int(self._names[number]), seconds.reshape(-1))

    def _final_known(self) -> bool:
        return self._kept is not None or super()._final_known()

    def _last(self, leaf: Leaf, number: int) -> Array:
        """[1, *shape]."""
        if self._kept is None:
            return super()._last(leaf, number)
        (column,) = self._leaves[leaf.path]
        cells = self._kept.table.slice(column, number, number + 1)
        found = self._decoded((column,), leaf.kind, [cells], f"{KEPT}/{column}")
        if leaf.shape is not None and found.shape[1:] != leaf.shape:
            raise ImportRefused(
                f"{column[:100]} has another shape in {KEPT} than in the data",
                expected=list(leaf.shape),
                got=list(found.shape[1:]),
            )
        return found

    def about(self, number: int) -> About:
        about = super().about(number)
        if self._kept is not None:
            numbers = self._kept.numbers
            return replace(
                about,
                terminated=bool(numbers["terminated"][number]),
                truncated=bool(numbers["truncated"][number]),
                final_obs_valid=bool(numbers["final_obs_valid"][number]),
                metadata=self._kept.metadata(number),
            )
        start, steps = int(self._starts[number]), self.layout.episodes[number][1]
        if self.tasks:
            codes = np.unique(self.table.numbers("task_index", start, start + steps))
            texts = [self.tasks.get(int(code), "") for code in codes[:MAX_TAGS]]
            tags = tuple(dict.fromkeys(text[:MAX_NAME] for text in texts if text))
            about = replace(about, metadata=replace(about.metadata, tags=tags))
        return about


def _features(info: dict[str, Any]) -> dict[str, Any]:
    """Name → what it is. Raises `ImportRefused` for another version."""
    version = str(info.get("codebase_version", ""))
    if not version.startswith("v3."):
        raise ImportRefused(
            "another version of LeRobot's format",
            expected="codebase_version v3.0, which LeRobot's convert_dataset_v21_to_v30 makes; "
            "or stepwell import FOLDER --format parquet, which reads the data without videos",
            got=version[:50] or "none",
        )
    for name in ("data_path", "video_path"):
        path = str(info.get(name) or "")
        if path.startswith("/") or ".." in path.split("/"):
            raise ImportRefused(
                f"{name} in {INFO} leads out of the folder", expected="data/…", got=path[:200]
            )
    features = info.get("features")
    if not isinstance(features, dict) or not all(isinstance(f, dict) for f in features.values()):
        raise ImportRefused(f"{INFO} has no features", got=str(features)[:100])
    return features


def _fps(info: dict[str, Any]) -> float:
    fps = info.get("fps")
    if not isinstance(fps, int | float) or not 0 < fps < 1e6:
        raise ImportRefused(f"fps in {INFO} is no rate", expected="frames a second", got=fps)
    return float(fps)


def _names(feature: dict[str, Any]) -> Columns:
    """Return the names of a vector's elements: a list, or one below "motors", "axes", …"""
    names = feature.get("names")
    if isinstance(names, dict) and len(names) == 1:
        (names,) = names.values()
    elif isinstance(names, dict) and all(isinstance(group, list) for group in names.values()):
        names = [f"{group}.{name}" for group, members in names.items() for name in members]
    if not isinstance(names, list) or feature.get("shape") != [len(names)]:
        return ()
    return tuple(names) if all(isinstance(name, str) for name in names) else ()


def _columns(features: list[str], options: Sequence[str] = ()) -> ColumnMap:
    """The roles that LeRobot's names of features have, without arrays that `options` choose."""
    given = {text.partition("=")[0].partition("/")[0] for text in options}
    found = ColumnMap()
    known = {*OWN, *ROLES.values()}
    for role, default in (("observation", DEFAULT_OBSERVATION), ("action", DEFAULT_ACTION)):
        names = [n for n in features if n == role or n.startswith(f"{role}.")]
        names = [name for name in names if not name.endswith(PADDING)]
        known |= {*names}
        for name in names:
            key = array_key(name.partition(".")[2]) if len(names) > 1 else default
            if role not in given:
                put(found.arrays[role], role, key or default, (name,))
    for name in (n for n in features if n not in known and "info" not in given):
        put(found.arrays["info"], "info", array_key(name), (name,))
    found.single = {role: name for role, name in ROLES.items() if name in features}
    return found


def _tasks(archive: Archive, options: ImportOptions, memory: int, max_rows: int) -> dict[int, str]:
    if TASKS not in archive.names:
        return {}
    table = Table([(TASKS, archive.open(TASKS))], options.size, memory, max_rows)
    texts = next((name for name in table.columns if name != "task_index"), None)
    if texts is None or "task_index" not in table.columns:
        raise ImportRefused(f"{TASKS} has no tasks", expected="task_index and its text")
    codes = table.numbers("task_index", 0, table.rows).reshape(-1)
    return {int(c): str(t) for c, t in zip(codes, table.whole(texts).to_pylist(), strict=True)}


def _check_counts(info: dict[str, Any], source: TableEpisodes) -> None:
    for name, count in (
        ("total_frames", source.table.rows),
        ("total_episodes", len(source.layout.episodes)),
    ):
        if info.get(name, count) != count:
            raise ImportRefused(
                "data are missing", expected=f"{name} = {info[name]} of {INFO}"[:200], got=count
            )
