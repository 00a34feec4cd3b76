"""A D4RL HDF5 file → RawFile. Untrusted: runs only in the sandbox, from an open descriptor.

Checks every link before following it: only hard links inside the file, limited sizes. What has a
role (flat_arrays.py) has plain numbers and known filters, and is read whole (D4RL's chunks are
column-shaped, so slices of rows would decompress everything repeatedly); other arrays are listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

import h5py
import numpy as np

from server.imports.column_map import USUAL
from server.imports.flat_arrays import ENDS, SPEC, RawFile, info_name, read_arrays
from server.imports.raw_file import (
    MAX_MEMBERS,
    Array,
    ImportRefused,
    check_dtype,
    check_magic,
    check_size,
    plain,
    why_dropped,
)

MAGIC = b"\x89HDF\r\n\x1a\n"
FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
MAX_DEPTH = 8
NUMBERED = re.compile(r"\D*\d+")
"""The name of a group that is one of many."""


@dataclass(frozen=True, slots=True)
class Member:
    """One array of the file (flat_arrays.py)."""

    name: str
    dataset: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.dataset.shape or ())

    @property
    def dtype(self) -> np.dtype[Any]:
        found: np.dtype[Any] = self.dataset.dtype
        return found

    @property
    def nbytes(self) -> int:
        return 0 if self.dataset.shape is None else int(self.dataset.nbytes)

    def read(self, *, texts: bool = False) -> Array:
        if self.dataset.shape is None:
            raise ImportRefused(f"{self.name[:200]} is empty", expected="an array", got="no shape")
        if (code := unknown_filter(self.dataset)) is not None:
            raise ImportRefused(
                f"{self.name[:200]} uses an unknown filter",
                expected=", ".join(FILTERS.values()),
                got=f"filter {code}",
            )
        if texts and h5py.check_string_dtype(self.dataset.dtype) is not None:
            return np.asarray(self.dataset.asstr(errors="replace")[()])
        check_dtype(self.name[:200], self.dataset.dtype)
        array = np.asarray(self.dataset[()])
        if why := _packed(self.dataset, array):
            raise ImportRefused(
                f"{self.name[:200]} is packed, as netCDF does it: the attribute {why} changes its "
                "numbers",
                expected="the numbers themselves, as xarray.open_dataset(FILE) has them (it calls "
                "decode_cf); without this attribute if it means something else",
                got=f"{array.dtype} {list(array.shape)}",
            )
        return array


def read(
    file: BinaryIO,
    size: int,
    memory: int,
    drop: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> RawFile:
    """Read what has a role. Raises `ImportRefused`."""
    with opened(file, size, "a D4RL-layout .hdf5 file") as h5:
        source = RawFile()
        if not columns:
            check_flat(h5)
        found = {name: Member(name, dataset) for name, dataset in _walk(h5, source, drop)}
        check_size(sum(member.nbytes for member in found.values()), size, 1 << 62)
        for name in [n for n in found if n.startswith("metadata/") and n not in (ENDS, SPEC)]:
            dataset = found.pop(name).dataset
            if _described(dataset) and len(source.metadata) < 64:
                source.metadata[name.removeprefix("metadata/")] = _scalar(dataset)
        read_arrays(source, found, columns, size, memory)
        return source


@contextmanager
def opened(file: BinaryIO, size: int, expected: str) -> Iterator[h5py.File]:
    """The file; h5py's errors inside are an `ImportRefused`, too."""
    check_magic(file, MAGIC, "an HDF5 file", expected)
    try:
        with h5py.File(file, "r") as h5:
            yield h5
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ImportRefused(
            f"the HDF5 file is damaged or cut short: {first_line(error)}",
            expected="a file that h5py can read to its end",
            got=f"{size} bytes",
        ) from None


def check_flat(h5: h5py.File) -> None:
    """Refuse a file with a group for each episode, such as robomimic's data/demo_0, with the lines
    that send them."""
    if any(name in h5 for name in USUAL["action"]):
        return
    for parent in (h5, *_groups(h5)):
        group = next(_groups(parent), None)
        if group is None or NUMBERED.fullmatch(group.name.rpartition("/")[2]) is None:
            continue
        obs, action, reward, done = (
            next((name for name in USUAL[role] if name in group), "")
            for role in ("observation", "action", "reward", "done")
        )
        if not obs or not action:
            continue
        values = f"g[{obs!r}][()]"
        if any(child.name == f"{group.name}/{obs}" for child in _groups(group)):
            values = f"{{k: a[()] for k, a in g[{obs!r}].items()}}"
        rewards = f"g[{reward!r}][()]" if reward else f"[0.0] * len(g[{action!r}])"
        ends = f"terminated=g[{done!r}][-1]" if done else "truncated=True"
        raise ImportRefused(
            "each episode is a group of its own",
            expected="flat arrays [N, …]; or client.create_dataset(NAME, spec), and for g in "
            f"h5py.File(FILE)[{parent.name!r}].values(): client.add(NAME, obs={values}, "
            f"actions=g[{action!r}][()], rewards={rewards}, {ends})",
            got=f"{group.name[:100]}: {', '.join(map(str, group))}"[:300],
        )


def _groups(node: h5py.Group) -> Iterator[h5py.Group]:
    """Those in a group, without following a link out of it."""
    for name in islice(node, MAX_MEMBERS):
        if isinstance(node.get(name, getlink=True), h5py.HardLink):
            child = node[name]
            if isinstance(child, h5py.Group):
                yield child


def _walk(h5: h5py.File, source: RawFile, drop: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Every array of the file; dropped infos go into `source.dropped`."""
    for name, child in members(h5):
        if (info := info_name(name)) is not None and (why := _unfit(name, child, drop)):
            source.dropped[info] = why
        else:
            check_place(name, child)
            yield name, child


def members(group: h5py.Group, where: str = "") -> Iterator[tuple[str, Any]]:
    """All that is below `group` but groups, by path; checks each link before following it. `where`:
    path of the group, for messages."""
    seen = 0
    stack: list[tuple[str, h5py.Group, int]] = [("", group, 0)]
    visited = {h5py.h5o.get_info(group.id).addr}
    while stack:
        path, node, level = stack.pop()
        if level > MAX_DEPTH:
            raise ImportRefused(
                "groups are nested too deep", expected=f"≤ {MAX_DEPTH}", got=where + path[:200]
            )
        for name in node:
            full = f"{path}/{name}" if path else str(name)
            seen += 1
            if seen > MAX_MEMBERS:
                raise ImportRefused(
                    f"too many members{' of ' * bool(where)}{where.rstrip('/')}",
                    expected=f"≤ {MAX_MEMBERS}",
                    got=f"{seen} or more",
                )
            link = node.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise ImportRefused(
                    f"{where}{full[:200]} is not a hard link",
                    expected="arrays inside the file itself (hard links)",
                    got=type(link).__name__,
                )
            child = node[name]
            if not isinstance(child, h5py.Group):
                yield full, child
                continue
            address = h5py.h5o.get_info(child.id).addr
            if address in visited:
                raise ImportRefused(
                    f"{where}{full[:200]} is a loop of groups", expected="a tree", got="loop"
                )
            visited.add(address)
            stack.append((full, child, level + 1))


def _unfit(name: str, child: Any, drop: Sequence[str]) -> str:
    """Why an info is not read; "" for one that is. Raises `ImportRefused` for a harmful one."""
    info = name.removeprefix("infos/")
    if not isinstance(child, h5py.Dataset):
        return "no array"
    check_place(name, child)
    try:
        kind = child.dtype
    except TypeError:
        return "of a type that numpy does not know"
    if child.shape is None:
        return "empty"
    code = unknown_filter(child)
    return why_dropped(info, drop, kind) or ("" if code is None else f"unknown filter {code}")


def check_place(name: str, child: Any) -> None:
    """Refuse what is no array of the file itself."""
    if not isinstance(child, h5py.Dataset):
        raise ImportRefused(
            f"{name[:200]} is not an array", expected="groups and arrays", got="a named type"
        )
    if child.is_virtual or child.external is not None:
        raise ImportRefused(
            f"{name[:200]} stores its data in another file",
            expected="data inside the file",
            got="a virtual dataset" if child.is_virtual else "external storage",
        )


def unknown_filter(dataset: h5py.Dataset) -> int | None:
    plist = dataset.id.get_create_plist()
    codes = (plist.get_filter(number)[0] for number in range(plist.get_nfilters()))
    return next((int(code) for code in codes if code not in FILTERS), None)


def _packed(dataset: h5py.Dataset, array: Array) -> str:
    """The attribute of netCDF by which the numbers are others than those stored; "" for none."""
    for name, neutral in (("scale_factor", 1), ("add_offset", 0)):
        if name in dataset.attrs and not bool(np.all(dataset.attrs[name] == neutral)):
            return name
    for name in ("_FillValue", "missing_value"):
        if name in dataset.attrs and bool(np.isin(array, dataset.attrs[name]).any()):
            return name
    return ""


def _described(dataset: h5py.Dataset) -> bool:
    """Whether something in metadata can be said: numbers, and short texts of a fixed length."""
    try:
        kind = dataset.dtype
    except TypeError:
        return False
    if dataset.shape is None or unknown_filter(dataset) is not None:
        return False
    text = kind.kind == "S" and dataset.shape == () and kind.itemsize <= 4096
    return bool(text) or plain(kind)


def _scalar(dataset: Any) -> Any:
    if dataset.shape != ():
        return f"{dataset.dtype} {list(dataset.shape)}"
    value = dataset[()]
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")[:1024]
    return value.item()


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
