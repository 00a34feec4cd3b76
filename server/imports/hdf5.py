"""A D4RL HDF5 file → Source. Untrusted: runs only in the confined child, from an open descriptor.

Walks every link without following any before it is judged: only hard links inside the file, plain
numbers, known filters, sane sizes. Then reads the arrays it knows by name, whole (D4RL's chunks are
column-shaped, so slices of rows would decompress everything again and again).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import h5py
import numpy as np

from server.imports.source import (
    MAX_MEMBERS,
    OPTIONAL,
    REQUIRED,
    Refused,
    Source,
    check_dtype,
    check_size,
    sniff,
)

MAGIC = b"\x89HDF\r\n\x1a\n"
FILTERS = {1: "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
MAX_DEPTH = 8


def read(file: BinaryIO, size: int, memory: int) -> Source:
    """The whole file. Raises `Refused`."""
    head = file.read(8)
    if head != MAGIC:
        raise Refused(
            "this is not an HDF5 file", expected="a D4RL-layout .hdf5 file", got=sniff(head)
        )
    file.seek(0)
    try:
        with h5py.File(file, "r") as h5:
            found = dict(_walk(h5))
            needed = sum(int(d.nbytes) for name, d in found.items() if _wanted(name))
            check_size(sum(int(d.nbytes) for d in found.values()), size, 1 << 62)
            check_size(needed, size, memory)
            return _load(found)
    except Refused:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise Refused(
            f"the HDF5 file is damaged or cut short: {_first_line(error)}",
            expected="a file that h5py can read to its end",
            got=f"{size} bytes",
        ) from None


def _walk(group: h5py.Group, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every dataset below `group`, each link judged before it is followed."""
    seen = 0
    stack: list[tuple[str, h5py.Group, int]] = [(prefix, group, depth)]
    visited = {h5py.h5o.get_info(group.id).addr}
    while stack:
        path, node, level = stack.pop()
        if level > MAX_DEPTH:
            raise Refused("groups are nested too deep", expected=f"≤ {MAX_DEPTH}", got=path[:200])
        if len(node) > MAX_MEMBERS:
            raise Refused("too many members", expected=f"≤ {MAX_MEMBERS}", got=len(node))
        for name in node:
            full = f"{path}/{name}" if path else str(name)
            seen += 1
            if seen > MAX_MEMBERS:
                raise Refused(
                    "too many members", expected=f"≤ {MAX_MEMBERS}", got=f"{seen} or more"
                )
            link = node.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise Refused(
                    f"{full[:200]} is a link out of its place",
                    expected="arrays inside the file itself (hard links)",
                    got=type(link).__name__,
                )
            child = node[name]
            if isinstance(child, h5py.Group):
                address = h5py.h5o.get_info(child.id).addr
                if address in visited:
                    raise Refused(
                        f"{full[:200]} is a loop of groups", expected="a tree", got="loop"
                    )
                visited.add(address)
                stack.append((full, child, level + 1))
            elif isinstance(child, h5py.Dataset):
                if _readable(full, child):
                    yield full, child
            else:
                raise Refused(
                    f"{full[:200]} is no array", expected="groups and arrays", got="a named type"
                )


def _readable(name: str, dataset: h5py.Dataset) -> bool:
    """Judge one dataset; False for what is harmless and left alone (texts in metadata)."""
    if dataset.is_virtual or dataset.external is not None:
        raise Refused(
            f"{name[:200]} keeps its data in another file",
            expected="data inside the file",
            got="a virtual dataset" if dataset.is_virtual else "external storage",
        )
    kind = dataset.dtype
    described = name.startswith("metadata/")
    if described and (kind.kind == "S" or h5py.check_string_dtype(kind) is not None):
        return bool(kind.kind == "S" and dataset.shape == () and kind.itemsize <= 4096)
    check_dtype(name[:200], kind)
    plist = dataset.id.get_create_plist()
    for number in range(plist.get_nfilters()):
        code = plist.get_filter(number)[0]
        if code not in FILTERS:
            raise Refused(
                f"{name[:200]} is packed with an unknown filter",
                expected=", ".join(FILTERS.values()),
                got=f"filter {code}",
            )
    return True


def _wanted(name: str) -> bool:
    return name in REQUIRED or name in OPTIONAL or name.split("/")[0] == "infos"


def _load(found: dict[str, Any]) -> Source:
    source = Source()
    ignored: list[str] = []
    for name, dataset in found.items():
        if name in REQUIRED or name in OPTIONAL:
            source.arrays[name] = np.asarray(dataset[()])
        elif name == "infos" or name.startswith("infos/"):
            source.infos[name.removeprefix("infos/")] = np.asarray(dataset[()])
        elif name.startswith("metadata/"):
            if len(source.metadata) < 64:
                source.metadata[name.removeprefix("metadata/")] = _scalar(dataset)
        else:
            ignored.append(name)
    if ignored:
        source.warnings.append("not read: " + ", ".join(sorted(ignored)[:20]))
    return source


def _scalar(dataset: Any) -> Any:
    if dataset.shape != ():
        return f"{dataset.dtype} {list(dataset.shape)}"
    value = dataset[()]
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")[:1024]
    return value.item()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
