"""The files of AMAGO's buffers (.npz) → trajectories. Untrusted: runs only in the sandbox.

The zip of a folder with one .npz per trajectory, below any folders (buffer/fifo, buffer/protected).
Of L observations and T = L-1 actions:

    _OBS_KEY_<key>   [L, …]     observation i
    rl2s             [L, 1+A]   row i: reward and action that led to observation i; zeros at a reset
    time_idxs        [L, 1]     step of observation i in its episode
    rews, actions    [T, 1], [T, A]   row i: those that led to observation i+1, so of step i
    dones            [T, 1]     terminated only: AMAGO stores no truncation

So rews[i] and actions[i] are the reward and the action in row i of ours, and rl2s must repeat them.
Actions that are one-hot in every file become Discrete, other zeros and ones MultiBinary. An episode
that AMAGO cut into files is put in relation again: a file that begins where another ends, with the
same observation, step and rl2, continues it, and the one before is not marked as truncated.
"""

from __future__ import annotations

import hashlib
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from server.imports import npz
from server.imports.archive import DAMAGE, Archive
from server.imports.episodes import About, Declared, Episodes, Layout, Leaf, join, put
from server.imports.raw_file import (
    Array,
    ImportOptions,
    ImportRefused,
    check_size,
    last_flag,
)
from stepwell._folders import PICKLE
from stepwell._wording import pluralize
from stepwell.spaces import (
    DEFAULT_ACTION,
    DEFAULT_OBSERVATION,
    Box,
    Discrete,
    MultiBinary,
)
from stepwell.trajectory import TrajectoryMetadata

OBS = "_OBS_KEY_"
REQUIRED = ("rl2s", "time_idxs", "rews", "dones", "actions")
STEM = re.compile(r"(?P<env>[^_]*)_(?P<id>[^_]*)_(?P<time>[0-9.]{1,30})")


@dataclass(frozen=True, slots=True)
class _File:
    """One trajectory as surveyed."""

    name: str
    env: str
    steps: int
    first_step: int
    terminated: bool
    begins: bytes
    """Digests of everything that AMAGO knows at its first and its last timestep."""
    ends: bytes


class AmagoEpisodes(Episodes):
    """The files in the order of their times (episodes.py: Episodes)."""

    def __init__(self, archive: Archive, options: ImportOptions, memory: int):
        self._archive, self._memory = archive, memory
        self.layout = Layout()
        self._last: tuple[str, dict[str, Array]] = ("", {})
        wanted = next(iter(options.spec.actions.values())) if options.spec else None
        as_they_are = options.action == "box" or isinstance(wanted, Box)
        self._one_hot = self._binary = not as_they_are
        self._width = 0
        names = archive.names
        if pickles := [name for name in names if name.endswith(".traj")]:
            raise ImportRefused(
                PICKLE, expected=".npz files", got=f"{pluralize(len(pickles), '.traj file')}"
            )
        files = [name for name in names if name.endswith(".npz")]
        if not files:
            raise ImportRefused(
                "no trajectories of AMAGO", expected=".npz files", got=", ".join(names[:20])[:200]
            )
        if others := sorted(set(names) - set(files)):
            self.layout.warnings.append("not read: " + ", ".join(others[:20]))
        self._files = [self._survey(name, number) for number, name in enumerate(_by_time(files))]
        if self._one_hot:
            action = Leaf("actions", (), np.dtype(np.int64), "numbers")
            self.layout.actions = {DEFAULT_ACTION: action}
        self._follows = _linked(self._files)
        self._warn(options)

    def declared(self, what: str) -> Mapping[str, Declared]:
        if what == "action" and self._one_hot:
            return {DEFAULT_ACTION: Discrete(self._width)}
        if what == "action" and self._binary:
            return {DEFAULT_ACTION: MultiBinary(self._width)}
        return {}

    def rows(self, number: int, leaf: Leaf) -> Array:
        found = self._read(self._files[number].name)[leaf.path]
        if leaf.path == "actions" and self._one_hot:
            return np.asarray(found.argmax(axis=1), np.int64)
        return found

    def about(self, number: int) -> About:
        file = self._files[number]
        arrays = self._read(file.name)
        first = number
        while first in self._follows:
            first = self._follows[first]
        goes_on = number in self._follows.values()
        episode = self._files[first]
        return About(
            name=file.name,
            rewards=arrays["rews"][:, 0],
            terminated=file.terminated,
            truncated=not file.terminated and not goes_on,
            metadata=TrajectoryMetadata(
                env=file.env,
                episode_id=episode.name.rpartition("/")[2].removesuffix(".npz")[:200],
                first_step=file.first_step,
            ),
        )

    def _warn(self, options: ImportOptions) -> None:
        goes_on = set(self._follows.values())
        open_ends = sum(not f.terminated and n not in goes_on for n, f in enumerate(self._files))
        if self._binary and not self._one_hot:
            self.layout.warnings.append(
                "actions are zeros and ones: stored as MultiBinary; for amounts, ?action=box"
            )
        if open_ends:
            self.layout.warnings.append(
                f"{pluralize(open_ends, 'trajectory', 'trajectories')} without a terminal: AMAGO "
                "stores no truncation, so stored as truncated"
            )
        envs = sorted({file.env for file in self._files})
        if envs != [""] and not options.env:
            self.layout.warnings.append(
                "environments are named as in the file names, from which AMAGO removes '_': "
                + ", ".join(envs[:10])
            )

    def _survey(self, name: str, number: int) -> _File:
        """Check one file against those before it."""
        arrays = self._read(name)
        steps = len(arrays["rews"])
        observations: dict[str, Leaf] = {}
        for path, array in arrays.items():
            if path.startswith(OBS):
                key = DEFAULT_OBSERVATION
                for place, part in enumerate(path.removeprefix(OBS).split("/")):
                    key = join(key if place else "", part)
                put(observations, key, Leaf(path, array.shape[1:], array.dtype))
        actions, width = arrays["actions"], arrays["actions"].shape[1]
        if number and width != self._width:
            raise ImportRefused(
                f"actions of {name} have another width", expected=self._width, got=width
            )
        self._width = width
        self._binary = self._binary and bool(((actions == 0) | (actions == 1)).all())
        self._one_hot = self._one_hot and self._binary and bool((actions.sum(axis=1) == 1).all())
        leaf = Leaf("actions", actions.shape[1:], actions.dtype)
        here = {"observation": observations, "action": {DEFAULT_ACTION: leaf}}
        self.layout.add(number, steps, name, here)
        stem = STEM.fullmatch(name.rpartition("/")[2].removesuffix(".npz"))
        times = arrays["time_idxs"][:, 0]
        return _File(
            name=name,
            env=stem["env"][:256] if stem else "",
            steps=steps,
            first_step=int(times[0]),
            terminated=bool(arrays["dones"][-1, 0]),
            begins=_timestep(arrays, 0),
            ends=_timestep(arrays, -1),
        )

    def _read(self, name: str) -> dict[str, Array]:
        """The checked arrays of one file; the last one is kept."""
        if self._last[0] != name:
            file = self._archive.open(name)
            self._last = (name, _checked(name, _arrays(name, file, self._archive, self._memory)))
        return self._last[1]


@contextmanager
def opened(file: BinaryIO, options: ImportOptions, memory: int, _: int) -> Iterator[Episodes]:
    """Raises `ImportRefused`."""
    yield AmagoEpisodes(Archive(file, options.size, memory), options, memory)


def _arrays(name: str, file: BinaryIO, archive: Archive, memory: int) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(file) as members:
            found = npz.members_of(members)
            size = sum(info.file_size for info in found.values())
            check_size(size, archive.size(name), memory)
            return {
                key: npz.array_of(members, info, f"{name}/{key}") for key, info in found.items()
            }
    except (*DAMAGE, RuntimeError) as error:
        raise ImportRefused(
            f"{name} is damaged or cut short: {str(error)[:200]}",
            expected="an .npz that AMAGO wrote",
            got=f"{archive.size(name)} bytes",
        ) from None


def _checked(name: str, arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays, if their shapes and their alignment are AMAGO's. Raises `ImportRefused`."""
    missing = [key for key in REQUIRED if key not in arrays]
    if missing or not any(key.startswith(OBS) for key in arrays):
        raise ImportRefused(
            f"{name} lacks {', '.join(missing) or 'observations'}",
            expected=", ".join((*REQUIRED, f"{OBS}…")),
            got=", ".join(sorted(arrays))[:200],
        )
    rows, steps = len(arrays["time_idxs"]), len(arrays["rews"])
    width = arrays["actions"].shape[-1] if arrays["actions"].ndim == 2 else 0
    shapes = {
        "rews": (steps, 1),
        "dones": (steps, 1),
        "actions": (steps, width),
        "time_idxs": (rows, 1),
        "rl2s": (rows, 1 + width),
    }
    for key, array in arrays.items():
        good = array.shape == shapes.get(key, (rows, *array.shape[1:]))
        if not good or 0 in array.shape or rows != steps + 1 or not width:
            raise ImportRefused(
                f"{name}/{key} has the wrong shape",
                expected="L observations, rl2s and time_idxs, L-1 rews, dones and actions",
                got=f"{list(array.shape)}; rews {list(arrays['rews'].shape)}",
            )
    last_flag(f"{name}/dones", arrays["dones"])
    times = arrays["time_idxs"][:, 0]
    if times.dtype.kind not in "iu" or int(times[0]) < 0 or bool((np.diff(times) != 1).any()):
        raise ImportRefused(
            f"{name}/time_idxs do not count the steps", expected="integers n, n+1, n+2, …"
        )
    repeated = np.concatenate([arrays["rews"], arrays["actions"]], axis=1)
    if not np.allclose(arrays["rl2s"][1:], repeated, rtol=1e-5, atol=1e-6):
        raise ImportRefused(
            f"{name}/rl2s are not the rewards and actions of one step before",
            expected="rl2s[i+1] = rews[i], actions[i]",
            got="other numbers",
        )
    return arrays


def _timestep(arrays: dict[str, Array], row: int) -> bytes:
    digest = hashlib.sha256()
    for key in sorted(arrays):
        if key.startswith(OBS) or key in ("rl2s", "time_idxs"):
            digest.update(np.ascontiguousarray(arrays[key][row]).tobytes())
    return digest.digest()


def _linked(files: list[_File]) -> dict[int, int]:
    """Number of a file → that of the file it continues.

    Where two fit, as in a deterministic environment, which one it continues is unknown.
    """
    ends: dict[tuple[str, bytes], list[int]] = {}
    begins: dict[tuple[str, bytes], list[int]] = {}
    for number, file in enumerate(files):
        if not file.terminated:
            ends.setdefault((file.env, file.ends), []).append(number)
        if file.first_step > 0:
            begins.setdefault((file.env, file.begins), []).append(number)
    return {
        after[0]: ends[key][0]
        for key, after in begins.items()
        if len(after) == 1 and len(ends.get(key, ())) == 1
    }


def _by_time(names: list[str]) -> list[str]:
    """Oldest first, as AMAGO's buffer counts age; by name where the name has no time."""

    def age(name: str) -> tuple[float, str]:
        stem = STEM.fullmatch(name.rpartition("/")[2].removesuffix(".npz"))
        return (_seconds(stem["time"]) or 0.0 if stem else 0.0), name

    return sorted(names, key=age)


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
