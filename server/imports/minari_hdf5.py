"""Minari's HDF5 file: groups episode_0, episode_1, … Untrusted: runs only in the sandbox.

    episode_<i>/observations     T+1 rows; nested groups for Dict, `_index_<k>` for Tuple; where an
                                 array has only T rows, the final observation is unknown
                actions          T rows, nested alike
                rewards, terminations, truncations    T rows
                infos/…          T+1 rows
    attributes of an episode     total_steps, seed, …

Every link is checked before it is followed. Arrays are read one episode at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import h5py
import numpy as np

from server.imports.episodes import About, Declared, Episodes, Layout, Leaf, Leaves, array_name
from server.imports.hdf5 import check_flat, check_place, members, unknown_filter
from server.imports.images import JPEG, pixels
from server.imports.minari_metadata import COLUMNS, ROLES, Metadata, end_of
from server.imports.raw_file import (
    Array,
    ImportOptions,
    ImportRefused,
    check_size,
    plain,
)
from stepwell._wording import pluralize
from stepwell.spaces import DTYPES, EnvSpec
from stepwell.trajectory import TrajectoryMetadata

EPISODE = re.compile(r"episode_(\d{1,9})")
MAX_EPISODES = 2_000_000
MAX_LEAVES = 512
MAX_LEVELS = 8


class Hdf5Episodes(Episodes):
    """An opened file (episodes.py: Episodes)."""

    def __init__(
        self, h5: h5py.File, metadata: Metadata, options: ImportOptions, memory: int
    ) -> None:
        self._h5, self._metadata, self.env = h5, metadata, metadata.env
        self._short: set[int] = set()
        self.layout = self._survey(options, memory)

    def declared(self, what: str) -> Mapping[str, Declared]:
        return self._metadata.declared(what)

    def written_spec(self) -> EnvSpec | None:
        return self._metadata.written_spec()

    def rows(self, number: int, leaf: Leaf) -> Array:
        group = self._h5[f"episode_{number}"]
        dataset = group[leaf.path]
        if leaf.kind == "texts":
            found = np.asarray(dataset.asstr(errors="replace")[()], object)
        elif leaf.kind == "frames":
            frames = (frame.tobytes() for frame in dataset[()])
            found = pixels(f"episode_{number}/{leaf.path}", frames)
        else:
            found = np.asarray(dataset[()])
        if number in self._short and leaf.path.split("/")[0] != "actions":
            steps = len(group["rewards"])
            return np.concatenate([found[:steps], found[steps - 1 : steps]])
        return found

    def about(self, number: int) -> About:
        group, name = self._h5[f"episode_{number}"], f"episode_{number}"
        rewards, *flags = (np.asarray(group[column][()]).reshape(-1) for column in COLUMNS)
        terminated, truncated = end_of(name, *flags, exported=self._metadata.exported)
        return About(
            name=name,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            final_obs_valid=bool(group.attrs.get("final_obs_valid", True))
            and number not in self._short,
            metadata=TrajectoryMetadata(seed=_seed(group)),
        )

    def _survey(self, options: ImportOptions, memory: int) -> Layout:
        """Check every episode's arrays without reading them. Raises `ImportRefused`."""
        layout, h5 = Layout(), self._h5
        if len(h5) > MAX_EPISODES:
            raise ImportRefused("too many episodes", expected=f"≤ {MAX_EPISODES}", got=len(h5))
        numbers, others = [], []
        for name in h5:
            match = EPISODE.fullmatch(name)
            if match is None or name != f"episode_{int(match[1])}":
                others.append(str(name)[:80])
            else:
                numbers.append(int(match[1]))
        if not numbers:
            raise ImportRefused(
                "not a Minari file",
                expected="groups episode_0, episode_1, …",
                got=", ".join(others),
            )
        if others:
            layout.warnings.append("not read: " + ", ".join(sorted(others)[:20]))
        logical = 0
        for number in sorted(numbers):
            name = f"episode_{number}"
            link = h5.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink) or not isinstance(h5[name], h5py.Group):
                raise ImportRefused(f"{name} is not a group of the file itself")
            logical += self._episode(h5[name], number, layout, memory, options)
        layout.check_skipped()
        if self._short:
            count = pluralize(len(self._short), "episode")
            layout.warnings.append(f"{count} without a final observation: it is unknown")
        check_size(logical, options.size, 1 << 62)
        return layout

    def _episode(
        self, group: h5py.Group, number: int, layout: Layout, memory: int, options: ImportOptions
    ) -> int:
        """Check one episode against those before it; returns its bytes unpacked."""
        name = f"episode_{number}"
        for member in ("observations", "actions", *COLUMNS):
            if member not in group:
                if member == "observations":
                    check_flat(group.file)  # another tool's, by other names
                raise ImportRefused(
                    f"{name} lacks {member}",
                    expected=", ".join(("observations", "actions", *COLUMNS)),
                    got=", ".join(sorted(map(str, group)))[:200],
                )
        found = dict(_datasets(group, name))
        for column in COLUMNS:
            dataset = found.get(column)
            if dataset is None or not _is_column(dataset):
                raise ImportRefused(
                    f"{name}/{column} is no column of numbers",
                    expected="[T] or [T, 1]",
                    got=None if dataset is None else f"{dataset.dtype} {list(dataset.shape)}",
                )
        steps = len(found["rewards"])
        said = group.attrs.get("total_steps", steps)
        if said != steps:
            raise ImportRefused(
                f"{name} has a wrong number of steps", expected=f"total_steps = {said}", got=steps
            )
        if not steps:
            layout.skipped += 1
            return 0
        if _lacks_final(found, steps):
            self._short.add(number)
        here: Leaves = {}
        logical = 0
        for path, dataset in found.items():
            top, *parts = path.split("/")
            role = ROLES.get(top)
            rows = steps + 1 if role in ("observation", "info") else steps
            fits = (rows, steps) if rows > steps and number in self._short else (rows,)
            why = ""
            if not dataset.shape or len(dataset) not in fits:
                why = f"shape {dataset.shape}, not {rows} rows"
            elif (code := unknown_filter(dataset)) is not None:
                why = f"unknown filter {code}"
            logical += dataset.nbytes
            if role is not None:
                key = array_name(role, [part.removeprefix("_index_") for part in parts])
                leaf = why or _leaf(path, dataset)
                layout.place(here, role, key, leaf, f"{name}/{path}", options.drop_infos)
            elif why:
                raise ImportRefused(f"{name}/{path}: {why}", expected=f"{rows} rows of numbers")
        if logical > memory:
            check_size(logical, logical, memory)
        layout.add(number, steps, name, here)
        return logical


def _is_column(dataset: Any) -> bool:
    shape = dataset.shape
    return len(shape) in (1, 2) and shape[1:] in ((), (1,)) and plain(dataset.dtype)


def _lacks_final(found: Mapping[str, Any], steps: int) -> bool:
    """Whether an observation has T rows, and all have T or T+1."""
    observations = [d for path, d in found.items() if path.split("/")[0] == "observations"]
    lengths = {len(dataset) if dataset.shape else 0 for dataset in observations}
    return steps in lengths and lengths <= {steps, steps + 1}


def _datasets(group: h5py.Group, name: str) -> Iterator[tuple[str, Any]]:
    """Every dataset below an episode."""
    for path, child in members(group, f"{name}/"):
        check_place(f"{name}/{path}", child)
        if child.shape is None:
            raise ImportRefused(f"{name}/{path[:200]} is empty", expected="an array")
        yield path, child


def _leaf(path: str, dataset: Any) -> Leaf | str:
    """What an array holds, or why it cannot be read."""
    dtype = dataset.dtype
    if h5py.check_string_dtype(dtype) is not None and dataset.ndim == 1:
        return Leaf(path, None, np.dtype(object), "texts")
    if h5py.check_vlen_dtype(dtype) == np.uint8 and dataset.ndim == 1:
        return Leaf(path, None, np.dtype(np.uint8), "frames")
    if not plain(dtype) or dtype.name not in (*DTYPES, "float64"):
        return f"unsupported type ({str(dtype)[:60]})"
    if dataset.ndim == 2 and dtype == np.uint8 and _starts_as_jpeg(dataset):
        return Leaf(path, None, np.dtype(np.uint8), "frames")
    return Leaf(path, dataset.shape[1:], dtype)


def _starts_as_jpeg(dataset: Any) -> bool:
    """Frames of one length are rows of bytes."""
    return bool(len(dataset) and dataset.shape[1] > 16 and dataset[0, :3].tobytes() == JPEG)


def _seed(group: h5py.Group) -> int | None:
    seed = group.attrs.get("seed")
    fits = isinstance(seed, int | np.integer) and -(2**63) <= int(seed) < 2**63
    return int(seed) if fits else None
