"""D4RL's flat arrays, as HDF5 or npz: one row per transition, flags where episodes end.

Beside D4RL's names the files have two small arrays, which D4RL's own reader skips:
    metadata/episode_ends    [E] int64: last row of each trajectory; flags alone are ambiguous
    metadata/stepwell_spec   [bytes] uint8: the env spec as JSON; arrays alone do not tell bounds
With them `stepwell import` gives the same arrays under the same spec.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from stepwell.errors import InvalidData
from stepwell.spaces import Array
from stepwell.trajectory import Trajectory
from workbench.export import licence
from workbench.export.selection import (
    Selection,
    count_metadata,
    only_key,
    refuse_unknown_actions,
)

CHUNK_BYTES = 256 * 1024
Layout = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype by name."""


def write_npz(path: Path, chosen: Selection, trajectories: Iterable[Trajectory]) -> None:
    """An uncompressed archive, as numpy.savez writes it, but with no array whole in memory."""
    with (
        TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder,
        ExitStack() as all_,
    ):
        files = {}
        for number, (name, (shape, dtype)) in enumerate(_layout(chosen, "npz").items()):
            file = all_.enter_context(open(Path(folder) / f"{number}.npy", "wb"))
            header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            files[name] = file

        def append(name: str, rows: Array, _: int) -> None:
            files[name].write(np.ascontiguousarray(rows).data)

        ends = _fill(chosen, trajectories, append, "npz")
        all_.close()
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, file in files.items():
                archive.write(file.name, f"{name}.npy")
            for name, array in _described(chosen, ends).items():
                with archive.open(f"{name}.npy", "w") as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
            for name, said in licence.texts(chosen).items():
                with archive.open(f"metadata/{name}.npy", "w") as member:
                    np.lib.format.write_array(member, np.array(said), allow_pickle=False)


def write_d4rl(path: Path, chosen: Selection, trajectories: Iterable[Trajectory]) -> None:
    """An HDF5 file as D4RL's generators write it: flat, gzip, no attributes."""
    h5py = import_h5py("d4rl")
    with h5py.File(path, "w") as file:
        datasets = {}  # open until the end: closing one compresses its last chunk
        for name, (shape, dtype) in _layout(chosen, "d4rl").items():
            row = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
            rows = max(1, min(shape[0], CHUNK_BYTES // row))
            datasets[name] = file.create_dataset(
                name, shape, dtype, chunks=(rows, *shape[1:]), compression="gzip", shuffle=True
            )

        def append(name: str, rows: Array, start: int) -> None:
            datasets[name][start : start + len(rows)] = rows

        ends = _fill(chosen, trajectories, append, "d4rl")
        for name, array in _described(chosen, ends).items():
            file.create_dataset(name, data=array)
        for name, said in licence.texts(chosen).items():
            file.create_dataset(f"metadata/{name}", data=np.bytes_(said.encode()))


def import_h5py(target: str) -> Any:
    try:
        import h5py
    except ModuleNotFoundError:
        raise InvalidData(
            f"--format {target} needs h5py", expected="pip install 'h5py>=3.12'"
        ) from None
    return h5py


def _layout(chosen: Selection, target: str) -> Layout:
    observation, action = only_key(chosen, target)
    spec, steps = chosen.spec, chosen.steps
    spaces: dict[str, Any] = {
        "observations": spec.observations[observation],
        "actions": spec.actions[action],
    }
    if chosen.final_obs:
        spaces["next_observations"] = spaces["observations"]
    else:
        chosen.losses.always.append("next_observations, as no final observation is known")
    spaces |= {f"infos/{key}": space for key, space in spec.infos.items()}
    layout = {k: ((steps, *s.shape), np.dtype(s.dtype)) for k, s in spaces.items()}
    layout["rewards"] = ((steps,), np.dtype(np.float32))
    layout |= {name: ((steps,), np.dtype(np.bool_)) for name in ("terminals", "timeouts")}
    chosen.losses.always.append("the trajectories' ids")
    if spec.infos:
        chosen.losses.always.append("infos of the final observations")
    return layout


def _fill(
    chosen: Selection,
    trajectories: Iterable[Trajectory],
    append: Callable[[str, Array, int], None],
    target: str,
) -> list[int]:
    """Append every trajectory's rows; returns the last row of each."""
    observation, action = only_key(chosen, target)
    losses, ends, start = chosen.losses, [], 0
    for trajectory in trajectories:
        refuse_unknown_actions(trajectory, target)
        steps, obs = len(trajectory), trajectory.obs[observation]
        terminals, timeouts = np.zeros((2, steps), np.bool_)
        terminals[-1], timeouts[-1] = trajectory.terminated, trajectory.truncated
        rows = {
            "observations": obs[:-1],
            "actions": trajectory.actions[action],
            "rewards": trajectory.rewards,
            "terminals": terminals,
            "timeouts": timeouts,
        }
        if chosen.final_obs:
            rows["next_observations"] = obs[1:]
            if not trajectory.final_obs_valid:
                losses.counts["which final observations are unknown"] += 1
        rows |= {f"infos/{key}": array[:-1] for key, array in trajectory.infos.items()}
        for name, array in rows.items():
            append(name, array, start)
        if not trajectory.terminated and not trajectory.truncated:
            losses.counts["ends that are neither, for other readers"] += 1
        count_metadata(trajectory, chosen)
        start += steps
        ends.append(start - 1)
    return ends


def _described(chosen: Selection, ends: list[int]) -> dict[str, Array]:
    spec = json.dumps(chosen.spec.to_json() | {"action_known": False}, separators=(",", ":"))
    return {
        "metadata/episode_ends": np.asarray(ends, np.int64),
        "metadata/stepwell_spec": np.frombuffer(spec.encode(), np.uint8),
    }
