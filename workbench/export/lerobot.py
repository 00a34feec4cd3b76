"""LeRobot's format v3.0: one row a step, many episodes a file, and beside it what it cannot hold.

data/chunk-000/file-000.parquet            observation.*, action, next.*, info.*, timestamp, …
meta/info.json                             features, counts, steps a second
meta/tasks.parquet                         task_index by text: the first tag, else the environment
meta/episodes/chunk-000/file-000.parquet   where each episode is in the data, and its statistics
meta/stats.json                            those of all frames
meta/stepwell/                             spec.json; episodes.parquet with final observations,
                                           ends and metadata. LeRobot does not look here
README.md                                  tells Hugging Face's `load_dataset(FOLDER)` where data is

Observations of uint8 [H, W, 1 | 3 | 4] are images, as PNG; all else is numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stepwell.errors import InvalidData
from stepwell.metadata import TrajectoryMetadata
from stepwell.spaces import (
    DEFAULT_ACTION,
    DEFAULT_OBSERVATION,
    Array,
    EnvSpec,
)
from stepwell.trajectory import Trajectory
from workbench.export import licence
from workbench.export.lerobot_features import STATISTICS, Feature, Moments, is_image
from workbench.export.selection import Selection, count_metadata, refuse_unknown_actions

VERSION = "v3.0"
FPS = 10
"""Steps a second, where nobody says: timestamps need one."""
FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA, EPISODES, TASKS = f"data/{FILE}", f"meta/episodes/{FILE}", "meta/tasks.parquet"
SPEC, KEPT = "meta/stepwell/spec.json", "meta/stepwell/episodes.parquet"
CHUNK_FILES, FILE_BYTES, GROUP_BYTES = 1000, 100 << 20, 16 << 20
VIDEO_MB = 200
"""LeRobot's default; there are no videos."""
MAX_DIMENSIONS = 4
CARD = """\
---
{header}tags:
- LeRobot
task_categories:
- robotics
configs:
- config_name: default
  data_files: data/*/*.parquet
---

{trajectories} trajectories of {dataset}, {steps} steps, exported by Stepwell in the format v3.0.
"""


class Rows:
    """A Parquet file that is written one row group at a time."""

    def __init__(self, path: Path, schema: pa.Schema):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(path, schema)
        self._group: list[pa.RecordBatch] = []
        self._held = self.bytes = 0
        self.schema = schema

    def add(self, columns: Iterable[pa.Array]) -> None:
        batch = pa.RecordBatch.from_arrays(list(columns), schema=self.schema)
        self._group.append(batch)
        self.bytes += batch.nbytes
        self._held += batch.nbytes
        if self._held >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._group:
            self._writer.write_table(pa.Table.from_batches(self._group))
            self._group, self._held = [], 0

    def close(self) -> None:
        if self._writer.is_open:
            self._flush()
            self._writer.close()


def write(
    folder: Path, chosen: Selection, trajectories: Iterable[Trajectory], fps: int | None = None
) -> None:
    """Holds one row group of each table, and the texts of the tasks."""
    spec = chosen.spec
    columns = names_of(spec)
    features = _features(spec, columns)
    schema = pa.schema([(f.name, f.arrow_type()) for f in features.values()])
    tasks: dict[str, int] = {}
    moments: dict[str, Moments] = {}
    chunk = file = frames = 0
    with ExitStack() as opened:

        def table(path: str, schema: pa.Schema) -> Rows:
            return opened.enter_context(closing(Rows(folder / path, schema)))

        data = table(DATA.format(chunk_index=0, file_index=0), schema)
        episodes = table(EPISODES.format(chunk_index=0, file_index=0), _about_schema(features))
        kept = table(KEPT, _kept_schema(features, columns))
        for number, trajectory in enumerate(trajectories):
            refuse_unknown_actions(trajectory, "lerobot")
            if data.bytes >= FILE_BYTES:
                data.close()
                chunk, file = (chunk, file + 1) if file + 1 < CHUNK_FILES else (chunk + 1, 0)
                data = table(DATA.format(chunk_index=chunk, file_index=file), schema)
            steps, task = len(trajectory), _task(trajectory, chosen)
            arrays = _arrays(trajectory, columns) | {
                "timestamp": (np.arange(steps) / (fps or FPS)).astype(np.float32),
                "frame_index": np.arange(steps),
                "episode_index": np.full(steps, number),
                "index": np.arange(frames, frames + steps),
                "task_index": np.full(steps, tasks.setdefault(task, len(tasks))),
            }
            data.add(feature.arrow(arrays[name]) for name, feature in features.items())
            here = {name: feature.moments(arrays[name]) for name, feature in features.items()}
            for name, found in here.items():
                moments[name] = moments[name].joined(found) if name in moments else found
            about = {
                "episode_index": number,
                "tasks": [task],
                "length": steps,
                "dataset_from_index": frames,
                "dataset_to_index": frames + steps,
                "data/chunk_index": chunk,
                "data/file_index": file,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
            for name, feature in features.items():
                if feature.of_episodes:
                    stats = feature.statistics(here[name])
                    about |= {f"stats/{name}/{key}": value for key, value in stats.items()}
            episodes.add(pa.array([about[f.name]], f.type) for f in episodes.schema)
            kept.add(_kept(number, trajectory, features, columns))
            if not trajectory.terminated and not trajectory.truncated:
                chosen.losses.counts["ends that are neither, for other readers"] += 1
            count_metadata(trajectory, chosen, kept=_KEPT_METADATA)
            frames += steps
    _name_losses(chosen, fps)
    _write_tasks(folder / TASKS, tasks)
    finite = {k: features[k].statistics(found) for k, found in moments.items() if found.finite}
    _write_json(folder / "meta/stats.json", finite)
    described = spec.to_json() | {"action_known": False}
    _write_json(folder / SPEC, {"spec": described, "columns": columns})
    info = {
        "codebase_version": VERSION,
        "robot_type": None,
        "total_episodes": chosen.trajectories,
        "total_frames": frames,
        "total_tasks": len(tasks),
        "chunks_size": CHUNK_FILES,
        "data_files_size_in_mb": FILE_BYTES >> 20,
        "video_files_size_in_mb": VIDEO_MB,
        "fps": fps or FPS,
        "splits": {"train": f"0:{chosen.trajectories}"},
        "data_path": DATA,
        "video_path": None,
        "features": {name: feature.described() for name, feature in features.items()},
    }
    _write_json(folder / "meta/info.json", info)
    counts = {"trajectories": chosen.trajectories, "steps": chosen.steps}
    card = CARD.format(dataset=chosen.dataset, header=licence.header(chosen), **counts)
    card += licence.text(chosen)
    (folder / "README.md").write_text(card)


def names_of(spec: EnvSpec) -> dict[str, dict[str, str]]:
    """Columns of "observation", "action" and "info", by key."""
    found: dict[str, dict[str, str]] = {"observation": {}, "action": {}, "info": {}}
    for key, space in spec.observations.items():
        part = key.replace("/", ".")
        if key == DEFAULT_OBSERVATION or len(spec.observations) == 1:
            usual = "image" if is_image(space) else "state"
            part = part if usual in spec.observations.keys() - {key} else usual
        found["observation"][key] = f"observation.{part}"
    for key in spec.actions:
        alone = len(spec.actions) == 1
        found["action"][key] = DEFAULT_ACTION if alone else f"action.{key.replace('/', '.')}"
    found["info"] = {key: f"info.{key.replace('/', '.')}" for key in spec.infos}
    return found


_KEPT_METADATA = tuple(n for n in TrajectoryMetadata.__dataclass_fields__ if n != "source")
_OWN = {
    "next.reward": "float32",
    "next.done": "bool",
    "next.truncated": "bool",
    "timestamp": "float32",
    **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64"),
}


def _features(spec: EnvSpec, columns: Mapping[str, Mapping[str, str]]) -> dict[str, Feature]:
    """By name, in the order of the file. Raises `InvalidData` for too many dimensions."""
    groups = {"observation": spec.observations, "action": spec.actions, "info": spec.infos}
    found = [
        Feature(
            columns[what][key],
            space.shape,
            space.dtype,
            what == "observation" and is_image(space),
            spec.names.get(f"{what}/{key}", ()),
        )
        for what, spaces in groups.items()
        for key, space in spaces.items()
    ]
    for feature in found:
        if len(feature.shape) > MAX_DIMENSIONS:
            raise InvalidData(
                f"lerobot holds arrays of at most {MAX_DIMENSIONS} dimensions; "
                f"{feature.name} has {len(feature.shape)}",
                expected="--format minari or parquet",
                got=str(list(feature.shape)),
            )
    found += [Feature(name, (), dtype) for name, dtype in _OWN.items()]
    return {feature.name: feature for feature in found}


def _arrays(trajectory: Trajectory, columns: Mapping[str, Mapping[str, str]]) -> dict[str, Array]:
    """The T frames by column; the final observation is none of them."""
    done, truncated = np.zeros((2, len(trajectory)), np.bool_)
    done[-1] = trajectory.terminated or trajectory.truncated
    truncated[-1] = trajectory.truncated
    found = {columns["observation"][k]: array[:-1] for k, array in trajectory.obs.items()}
    found |= {columns["action"][k]: array for k, array in trajectory.actions.items()}
    found |= {columns["info"][k]: array[:-1] for k, array in trajectory.infos.items()}
    return found | {
        "next.reward": trajectory.rewards,
        "next.done": done,
        "next.truncated": truncated,
    }


def _task(trajectory: Trajectory, chosen: Selection) -> str:
    metadata = trajectory.metadata
    return metadata.tags[0] if metadata.tags else metadata.env or chosen.spec.env or chosen.dataset


def _about_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Return the schema of meta/episodes."""
    plain = ("dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index")
    fields = [
        ("episode_index", pa.int64()),
        ("tasks", pa.list_(pa.string())),
        ("length", pa.int64()),
        *((name, pa.int64()) for name in plain),
        *((f"meta/episodes/{name}", pa.int64()) for name in ("chunk_index", "file_index")),
    ]
    for name, feature in features.items():
        if feature.of_episodes:
            type_ = pa.list_(pa.float64())
            if feature.is_image:
                type_ = pa.list_(pa.list_(type_))
            fields += [(f"stats/{name}/{key}", type_) for key in STATISTICS]
            fields.append((f"stats/{name}/count", pa.list_(pa.int64())))
    return pa.schema(fields)


def _kept_schema(
    features: Mapping[str, Feature], columns: Mapping[str, Mapping[str, str]]
) -> pa.Schema:
    names = (*columns["observation"].values(), *columns["info"].values())
    return pa.schema(
        [
            ("episode_index", pa.int64()),
            ("length", pa.int64()),
            *((name, pa.bool_()) for name in ("terminated", "truncated", "final_obs_valid")),
            ("metadata", pa.string()),
            *((name, features[name].arrow_type()) for name in names),
        ]
    )


def _kept(
    number: int,
    trajectory: Trajectory,
    features: Mapping[str, Feature],
    columns: Mapping[str, Mapping[str, str]],
) -> list[pa.Array]:
    metadata = json.dumps(trajectory.metadata.to_json())
    flags = (trajectory.terminated, trajectory.truncated, trajectory.final_obs_valid)
    found = [pa.array([value]) for value in (number, len(trajectory), *flags, metadata)]
    for what, arrays in (("observation", trajectory.obs), ("info", trajectory.infos)):
        # In the order of the spec, which is that of `columns`.
        found += [features[n].arrow(arrays[key][-1:]) for key, n in columns[what].items()]
    return found


def _name_losses(chosen: Selection, fps: int | None) -> None:
    spec, always = chosen.spec, chosen.losses.always
    always.append("the trajectories' ids")
    always.append("final observations, and metadata but the first tag, for other readers")
    if fps is None:
        always.append(
            f"when steps were: timestamps are of {FPS} steps a second (--fps), for other readers"
        )
    always.append("bounds, and which numbers are choices (Discrete), for other readers")
    if spec.vocabularies:
        always.append("the words of texts, which are token ids, for other readers")


def _write_tasks(path: Path, tasks: Mapping[str, int]) -> None:
    """Write the tasks in the form of pandas, with the texts as index."""
    described = [
        {"name": n, "field_name": n, "pandas_type": p, "numpy_type": d, "metadata": None}
        for n, p, d in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": described}
    table = pa.table(
        {
            "task_index": pa.array(list(tasks.values()), pa.int64()),
            "task": pa.array(list(tasks), pa.string()),
        }
    )
    metadata = {"pandas": json.dumps(pandas | {"pandas_version": "2.0.0"})}
    pq.write_table(table.replace_schema_metadata(metadata), path)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
