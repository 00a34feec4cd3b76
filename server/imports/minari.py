"""A genuine Minari dataset → trajectories. Untrusted: runs only in the sandbox.

Either `main_data.hdf5` alone, whose spaces are derived from the data, or a zip of the dataset's
`metadata.json` and `main_data.hdf5`, stored and not deflated, as `stepwell import FOLDER` sends it:

    episode_<i>/observations     T+1 rows; nested groups for Dict, `_index_<k>` for Tuple
                actions          T rows, nested alike
                rewards, terminations, truncations    T rows
                infos/…          T+1 rows
    attributes of an episode     total_steps, seed, …

Episodes are read one at a time. Texts (missions) become ids of their words, JPEG frames pixels.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import h5py
import numpy as np

from server.imports.hdf5 import check_place, first_line, unknown_filter
from server.imports.minari_spaces import join
from server.imports.raw_file import (
    Array,
    ImportOptions,
    ImportRefused,
    check_magic,
    check_size,
    plain,
    why_dropped,
)
from stepwell._plural import pluralize
from stepwell.spaces import DEFAULT_ACTION, DEFAULT_OBSERVATION, DTYPES

EPISODE = re.compile(r"episode_(\d{1,9})")
METADATA, MAIN = "metadata.json", "main_data.hdf5"
MAX_METADATA = 16 << 20
MAX_EPISODES = 2_000_000
MAX_LEAVES = 512
MAX_LEVELS = 8
JPEG = b"\xff\xd8\xff"
COLUMNS = ("rewards", "terminations", "truncations")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of every episode."""

    path: str
    """Below the episode's group."""
    shape: tuple[int, ...] | None
    """Of one row; None for texts and JPEG frames."""
    dtype: np.dtype[Any]
    kind: str = "numbers"
    """"numbers", "texts" or "frames"."""


@dataclass(slots=True)
class Layout:
    """What a dataset has."""

    metadata: dict[str, Any]
    episodes: list[tuple[int, int]] = field(default_factory=list)
    """(number, T), in order."""
    observations: dict[str, Leaf] = field(default_factory=dict)
    actions: dict[str, Leaf] = field(default_factory=dict)
    infos: dict[str, Leaf] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    """Infos that are not read: name → reason."""
    warnings: list[str] = field(default_factory=list)


def is_minari(file: BinaryIO) -> bool:
    """Whether the file is one of a Minari dataset; a damaged file is not."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                return MAIN in archive.namelist()
        file.seek(0)
        with h5py.File(file, "r") as h5:
            return EPISODE.fullmatch(next(iter(h5), "")) is not None
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile):
        return False
    finally:
        file.seek(0)


@contextmanager
def opened(file: BinaryIO, size: int) -> Iterator[tuple[h5py.File, dict[str, Any]]]:
    """The HDF5 file and what metadata.json says. Errors of h5py inside are an `ImportRefused`."""
    try:
        metadata: dict[str, Any] = {}
        head = file.read(8)
        file.seek(0)
        main: Any = file
        if head.startswith(b"PK\x03\x04"):
            metadata, main = _unpacked(file)
        check_magic(main, b"\x89HDF\r\n\x1a\n", "an HDF5 file", f"Minari's {MAIN}")
        with h5py.File(main, "r") as h5:
            yield h5, metadata
    except ImportRefused:
        raise
    except zipfile.BadZipFile as error:
        raise ImportRefused(f"the zip archive is damaged: {error}", got=f"{size} bytes") from None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ImportRefused(
            f"the HDF5 file is damaged or cut short: {first_line(error)}",
            expected="a file that h5py can read to its end",
            got=f"{size} bytes",
        ) from None


class _Part(io.RawIOBase):
    """Bytes `start … start + size` of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int):
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._size - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _unpacked(file: BinaryIO) -> tuple[dict[str, Any], io.RawIOBase]:
    """metadata.json and main_data.hdf5 of a zip, wherever in it they lie."""
    with zipfile.ZipFile(file) as archive:
        found = {info.filename: info for info in archive.infolist()[:16]}
        if set(found) != {METADATA, MAIN}:
            raise ImportRefused(
                "not the zip of a Minari dataset",
                expected=f"{METADATA} and {MAIN} (stepwell import FOLDER makes it)",
                got=", ".join(found)[:200],
            )
        main, about = found[MAIN], found[METADATA]
        if main.compress_type != zipfile.ZIP_STORED or main.flag_bits & 1:
            raise ImportRefused(
                f"{MAIN} is compressed or encrypted in the zip", expected="stored as it is"
            )
        if about.file_size > MAX_METADATA:
            raise ImportRefused(
                f"{METADATA} is too large",
                expected=f"at most {MAX_METADATA} bytes",
                got=about.file_size,
            )
        try:
            metadata = json.loads(archive.read(about))
        except (ValueError, RecursionError) as error:
            raise ImportRefused(f"{METADATA} is not JSON: {error}") from None
        if not isinstance(metadata, dict) or metadata.get("data_format", "hdf5") != "hdf5":
            raise ImportRefused(
                f"{METADATA} describes another format",
                expected='"data_format": "hdf5"',
                got=str(metadata)[:100],
            )
    # The local header has lengths of its own before the data.
    file.seek(main.header_offset)
    header = file.read(30)
    if len(header) != 30:
        raise zipfile.BadZipFile("cut short")
    name, extra = struct.unpack("<HH", header[26:30])
    start = main.header_offset + 30 + name + extra
    return metadata, _Part(file, start, main.file_size)


def survey(
    h5: h5py.File, metadata: dict[str, Any], size: int, memory: int, options: ImportOptions
) -> Layout:
    """Check every episode's arrays without reading them. Raises `ImportRefused`."""
    layout = Layout(metadata)
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
            "not a Minari file", expected="groups episode_0, episode_1, …", got=", ".join(others)
        )
    if others:
        layout.warnings.append("not read: " + ", ".join(sorted(others)[:20]))
    logical = 0
    for number in sorted(numbers):
        name = f"episode_{number}"
        link = h5.get(name, getlink=True)
        if not isinstance(link, h5py.HardLink) or not isinstance(h5[name], h5py.Group):
            raise ImportRefused(f"{name} is not a group of the file itself")
        logical += _episode(h5[name], number, layout, memory, options)
    check_size(logical, size, 1 << 62)
    counted = metadata.get("total_episodes", len(numbers))
    if counted != len(numbers):
        raise ImportRefused(
            "episodes are missing",
            expected=f"total_episodes = {counted} in {METADATA}",
            got=pluralize(len(numbers), "episode"),
        )
    return layout


def _episode(
    group: h5py.Group, number: int, layout: Layout, memory: int, options: ImportOptions
) -> int:
    """Check one episode against those before it; returns its bytes unpacked."""
    name = f"episode_{number}"
    for member in ("observations", "actions", *COLUMNS):
        if member not in group:
            raise ImportRefused(
                f"{name} lacks {member}",
                expected=", ".join(("observations", "actions", *COLUMNS)),
                got=", ".join(sorted(map(str, group)))[:200],
            )
    found = dict(_datasets(group, name))
    for column in COLUMNS:
        dataset = found.get(column)
        if dataset is None or len(dataset.shape) != 1 or not plain(dataset.dtype):
            raise ImportRefused(f"{name}/{column}", expected="an array [T] of numbers")
    steps = len(found["rewards"])
    said = group.attrs.get("total_steps", steps)
    if steps < 1 or said != steps:
        raise ImportRefused(
            f"{name} has a wrong number of steps", expected=f"total_steps = {said}", got=steps
        )
    kinds: tuple[tuple[str, dict[str, Leaf], str], ...] = (
        ("observations", layout.observations, DEFAULT_OBSERVATION),
        ("actions", layout.actions, DEFAULT_ACTION),
        ("infos", layout.infos, ""),
    )
    first = not layout.episodes
    here: dict[str, dict[str, Leaf]] = {what: {} for what, _, _ in kinds}
    logical = 0
    for path, dataset in found.items():
        top, *parts = path.split("/")
        rows = steps + 1 if top in ("observations", "infos") else steps
        why = ""
        if not dataset.shape or len(dataset) != rows:
            why = f"shape {dataset.shape}, not {rows} rows"
        elif (code := unknown_filter(dataset)) is not None:
            why = f"unknown filter {code}"
        logical += dataset.nbytes
        if top in here:
            default = next(d for what, _, d in kinds if what == top)
            tuple_member = parts[:1] and parts[0].startswith("_index_")
            key = default if not parts or tuple_member else ""
            for part in parts:
                key = join(key, part.removeprefix("_index_"))
            if top == "infos":
                why = why_dropped(key, options.drop_infos) or why
            leaf, problem = _leaf(path, dataset)
            why = why or problem
            if top == "infos" and leaf is not None and leaf.kind != "numbers":
                why = why or "not plain numbers"
            if leaf is not None and not why:
                here[top][key] = leaf
                continue
            if top == "infos":
                layout.dropped[key] = why
                continue
        if why:
            raise ImportRefused(f"{name}/{path}: {why}", expected=f"{rows} rows of numbers")
    if logical > memory:
        check_size(logical, logical, memory)
    for what, known, _ in kinds:
        if first:
            known |= here[what]
        elif what == "infos":
            for key in [k for k in known if here[what].get(k) != known[k]]:
                layout.dropped[key] = f"missing or different in {name}"
                del known[key]
            for key in here[what].keys() - known.keys() - layout.dropped.keys():
                layout.dropped[key] = f"not in the episodes before {name}"
        elif here[what] != known:
            raise ImportRefused(
                f"{what} of {name} differ from those of the episodes before",
                expected=_words(known),
                got=_words(here[what]),
            )
    layout.episodes.append((number, steps))
    return logical


def _datasets(group: h5py.Group, name: str) -> Iterator[tuple[str, Any]]:
    """Every dataset below an episode; checks each link before following it."""
    seen = 0
    stack: list[tuple[str, h5py.Group, int]] = [("", group, 0)]
    while stack:
        path, node, level = stack.pop()
        for member in node:
            full = f"{path}/{member}" if path else str(member)
            seen += 1
            if seen > MAX_LEAVES or level > MAX_LEVELS:
                raise ImportRefused(
                    f"{name} has too many or too deep members",
                    expected=f"≤ {MAX_LEAVES} arrays, {MAX_LEVELS} levels",
                )
            if not isinstance(node.get(member, getlink=True), h5py.HardLink):
                raise ImportRefused(
                    f"{name}/{full[:200]} is not a hard link",
                    expected="arrays inside the file itself (hard links)",
                )
            child = node[member]
            if isinstance(child, h5py.Group):
                stack.append((full, child, level + 1))
            elif isinstance(child, h5py.Dataset):
                check_place(f"{name}/{full}", child)
                if child.shape is None:
                    raise ImportRefused(f"{name}/{full[:200]} is empty", expected="an array")
                yield full, child
            else:
                raise ImportRefused(f"{name}/{full[:200]} is not an array")


def _leaf(path: str, dataset: Any) -> tuple[Leaf | None, str]:
    """What an array holds, or why it cannot be read."""
    dtype = dataset.dtype
    if h5py.check_string_dtype(dtype) is not None and dataset.ndim == 1:
        return Leaf(path, None, np.dtype(object), "texts"), ""
    if h5py.check_vlen_dtype(dtype) == np.uint8 and dataset.ndim == 1:
        return Leaf(path, None, np.dtype(np.uint8), "frames"), ""
    if not plain(dtype) or dtype.name not in (*DTYPES, "float64"):
        return None, f"unsupported type ({str(dtype)[:60]})"
    if dataset.ndim == 2 and dtype == np.uint8 and _starts_as_jpeg(dataset):
        return Leaf(path, None, np.dtype(np.uint8), "frames"), ""
    return Leaf(path, dataset.shape[1:], dtype), ""


def _starts_as_jpeg(dataset: Any) -> bool:
    """Frames of one length are rows of bytes."""
    return bool(len(dataset) and dataset.shape[1] > 16 and dataset[0, :3].tobytes() == JPEG)


def read_leaf(group: h5py.Group, leaf: Leaf) -> Array:
    """Numbers [rows, …], pixels [rows, H, W, C], or texts [rows] as objects."""
    dataset = group[leaf.path]
    if leaf.kind == "texts":
        return np.asarray(dataset.asstr(errors="replace")[()], object)
    if leaf.kind == "frames":
        return _pixels(f"{group.name}/{leaf.path}".strip("/"), dataset[()])
    return np.asarray(dataset[()])


def _pixels(name: str, frames: Any) -> Array:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise ImportRefused(
            f"{name} has JPEG frames", expected="pillow in the service: pip install pillow"
        ) from None
    try:
        images = []
        for frame in frames:
            with Image.open(io.BytesIO(frame.tobytes()), formats=("JPEG",)) as image:
                if image.width * image.height > 1 << 24:
                    raise ValueError(f"{image.width} x {image.height} pixels")
                images.append(np.asarray(image, np.uint8))
        return np.stack(images)
    except (OSError, ValueError, SyntaxError) as error:
        raise ImportRefused(f"{name} has damaged JPEG frames: {str(error)[:100]}") from None


def _words(leaves: dict[str, Leaf]) -> str:
    shown = (f"{k} {leaf.dtype} {leaf.shape or leaf.kind}" for k, leaf in sorted(leaves.items()))
    return ", ".join(shown)[:300] or "none"
