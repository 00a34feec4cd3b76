"""Minari's HDF5 layout: one group per episode, T+1 observations, spaces in metadata.json.

data/metadata.json      spaces, counts; stepwell_spec, which Minari ignores
data/main_data.hdf5     episode_0/{observations, actions, rewards, terminations, truncations,
                        infos/…}; named observations and actions are nested groups
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.errors import InvalidData
from stepwell.spaces import (
    DEFAULT_ACTION,
    DEFAULT_OBSERVATION,
    Array,
    Box,
    Discrete,
    MultiBinary,
    Space,
)
from stepwell.trajectory import Trajectory
from workbench.export.flat import import_h5py
from workbench.export.selection import Selection, count_metadata, refuse_unknown_actions

MINARI_VERSION = "0.5.4"
"""The version whose layout this is."""
PACKED_BYTES = 4096
"""Larger arrays are compressed."""


def write(folder: Path, chosen: Selection, trajectories: Iterable[Trajectory]) -> None:
    """Write `data/`, of which Minari's `MinariDataset` reads the path."""
    h5py = import_h5py("minari")
    spec = chosen.spec
    spaces = {
        "observation_space": _nested(spec.observations, DEFAULT_OBSERVATION, "observations"),
        "action_space": _nested(spec.actions, DEFAULT_ACTION, "actions"),
    }
    data = folder / "data"
    data.mkdir(parents=True)
    main, losses = data / "main_data.hdf5", chosen.losses
    with h5py.File(main, "w", track_order=True) as file:
        for number, trajectory in enumerate(trajectories):
            refuse_unknown_actions(trajectory, "minari")
            steps = len(trajectory)
            group = file.create_group(f"episode_{number}")
            group.attrs.update({"id": number, "total_steps": steps})
            if trajectory.metadata.seed is not None:
                group.attrs["seed"] = trajectory.metadata.seed
            terminations, truncations = np.zeros((2, steps), np.bool_)
            terminations[-1], truncations[-1] = trajectory.terminated, trajectory.truncated
            arrays: dict[str, Array] = {
                "rewards": trajectory.rewards,
                "terminations": terminations,
                "truncations": truncations,
            }
            for what, named, default in (
                ("observations", trajectory.obs, DEFAULT_OBSERVATION),
                ("actions", trajectory.actions, DEFAULT_ACTION),
            ):
                alone = list(named) == [default]
                arrays |= {what if alone else f"{what}/{k}": a for k, a in named.items()}
            arrays |= {f"infos/{key}": array for key, array in trajectory.infos.items()}
            for name, array in arrays.items():
                packed = {"compression": "gzip", "shuffle": True, "chunks": True}
                options: Any = packed if array.nbytes > PACKED_BYTES else {}
                group.create_dataset(name, data=array, **options)
            if not trajectory.final_obs_valid:
                group.attrs["final_obs_valid"] = False
                losses.counts["which final observations are unknown, for other readers"] += 1
            count_metadata(trajectory, chosen, kept=("seed",))
    losses.always.append("the trajectories' ids")
    if spec.vocabularies:
        losses.always.append("the words of texts, which are token ids, for other readers")
    metadata = {
        "total_episodes": chosen.trajectories,
        "total_steps": chosen.steps,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        **{name: json.dumps(space) for name, space in spaces.items()},
        "dataset_size": round(main.stat().st_size / 1e6, 1),
        "dataset_id": dataset_id(chosen.dataset),
        "minari_version": MINARI_VERSION,
        **({"license": chosen.licence} if chosen.licence else {}),
        **({"citation": chosen.citation} if chosen.citation else {}),
        "stepwell_spec": spec.to_json() | {"action_known": False},
    }
    (data / "metadata.json").write_text(json.dumps(metadata))


def dataset_id(name: str) -> str:
    """namespace/name-vN, as Minari parses it: hopper@v3 → stepwell/hopper-v3, others end in -v0."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    return f"stepwell/{plain if re.search(r'-v[0-9]+$', plain) else f'{plain}-v0'}"


def _nested(spaces: Any, default: str, what: str) -> dict[str, Any]:
    """The space as Minari writes it. Raises `InvalidData` if names cannot be nested."""
    if list(spaces) == [default]:
        return _space(spaces[default])
    root: dict[str, Any] = {"type": "Dict", "subspaces": {}}
    for key, space in spaces.items():
        node, parts = root, key.split("/")
        for part in parts[:-1]:
            node = node["subspaces"].setdefault(part, {"type": "Dict", "subspaces": {}})
            if node["type"] != "Dict":
                raise InvalidData(
                    f"minari nests {what} by /, so {key} has no place below an array",
                    expected="--format parquet",
                    got=", ".join(spaces),
                )
        node["subspaces"][parts[-1]] = _space(space)
    return root


def _space(space: Space) -> dict[str, Any]:
    if isinstance(space, Discrete):
        return {"type": "Discrete", "dtype": "int64", "start": space.start, "n": space.n}
    if isinstance(space, MultiBinary):
        return {"type": "MultiBinary", "n": space.n}
    if isinstance(space, Box):
        low, high = space.held_bounds()
        return {
            "type": "Box",
            "dtype": space.dtype,
            "shape": list(space.shape),
            "low": low.tolist(),
            "high": high.tolist(),
        }
    nvec, start = list(space.nvec), list(space.start)
    return {"type": "MultiDiscrete", "dtype": "int64", "nvec": nvec, "start": start}
