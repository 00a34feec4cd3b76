"""A copy of the pages that hold the schema, beside the index: without the schema no row is found.

    index.sqlite.schema     sha256 of the rest, then page size and pages as JSON

The pages change with a migration and never otherwise. Where a few bits of one differ from the copy,
the copy is right; where more do, it is of another schema and is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import structlog

from server.index.wal import absorb_log
from server.storage.sealed import replace_file, sealed, unsealed
from stepwell.failpoints import failpoint

log = structlog.get_logger("stepwell.schema_copy")
MOST_BITS = 8
CHANGING = ((24, 44), (92, 100))
"""Bytes of the first page that other transactions change: counters, sizes, the free list."""
LEAF, INTERIOR = 13, 5


def mend_schema(index: Path) -> None:
    """Put back flipped bits in the pages of the schema. Only while nothing has the index open."""
    kept = _kept(index)
    if kept is None or not index.exists():
        return
    size, pages = kept
    # In place: of an index that is mended in part, the next start mends the rest.
    with open(index, "r+b", buffering=0) as file:
        differs = 0
        for number, page in pages.items():
            found = _masked(number, os.pread(file.fileno(), size, (number - 1) * size))
            if len(found) != size:
                return
            differs += (int.from_bytes(found, "big") ^ int.from_bytes(page, "big")).bit_count()
        if not 0 < differs <= MOST_BITS:
            return
        log.error("bits of the index's schema were flipped and are put back", bits=differs)
        for number, page in pages.items():
            for start, end in _stable(number, size):
                os.pwrite(file.fileno(), page[start:end], (number - 1) * size + start)
                failpoint("schema.after_write")
        os.fsync(file.fileno())


def keep_schema(index: Path) -> None:
    """Make the copy agree with an index that is known to be intact."""
    absorb_log(index)
    with open(index, "rb") as file:
        size = _page_size(file.read(100))
        pages = {n: _masked(n, page) for n, page in _pages(file.fileno(), size)}
    if _kept(index) == (size, pages):
        return
    content = sealed([size, {number: page.hex() for number, page in pages.items()}])
    replace_file(_copy_of(index), content, ("schema.before_rename", "schema.after_rename"))


def _copy_of(index: Path) -> Path:
    return index.with_name(f"{index.name}.schema")


def _kept(index: Path) -> tuple[int, dict[int, bytes]] | None:
    """Page size and pages of the copy; None without a whole one."""
    try:
        size, pages = unsealed(_copy_of(index).read_bytes())
    except (OSError, ValueError):
        return None
    return size, {int(number): bytes.fromhex(page) for number, page in pages.items()}


def _stable(number: int, size: int) -> list[tuple[int, int]]:
    if number > 1:
        return [(0, size)]
    edges = [0, *(edge for span in CHANGING for edge in span), size]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _masked(number: int, page: bytes) -> bytes:
    masked = bytearray(page)
    for start, end in CHANGING if number == 1 else ():
        masked[start:end] = bytes(end - start)
    return bytes(masked)


def _page_size(header: bytes) -> int:
    size = int.from_bytes(header[16:18], "big")
    return 65536 if size == 1 else size


def _pages(fd: int, size: int) -> Iterator[tuple[int, bytes]]:
    """All pages of the table `sqlite_master`, whose root is the first page."""
    todo = [1]
    while todo:
        number = todo.pop()
        page = os.pread(fd, size, (number - 1) * size)
        yield number, page
        start = 100 if number == 1 else 0
        kind, cells = page[start], int.from_bytes(page[start + 3 : start + 5], "big")
        first = start + (12 if kind == INTERIOR else 8)
        places = [
            int.from_bytes(page[first + 2 * i : first + 2 * i + 2], "big") for i in range(cells)
        ]
        if kind == INTERIOR:
            todo += [int.from_bytes(page[place : place + 4], "big") for place in places]
            todo.append(int.from_bytes(page[start + 8 : start + 12], "big"))
        elif kind == LEAF:
            for place in places:
                yield from _overflow(fd, size, page, place)


def _overflow(fd: int, size: int, page: bytes, place: int) -> Iterator[tuple[int, bytes]]:
    """The pages that hold the rest of a cell."""
    payload, place = _varint(page, place)
    _, place = _varint(page, place)
    most, least = size - 35, (size - 12) * 32 // 255 - 23
    if payload <= most:
        return
    local = least + (payload - least) % (size - 4)
    local = local if local <= most else least
    number = int.from_bytes(page[place + local : place + local + 4], "big")
    while number:
        rest = os.pread(fd, size, (number - 1) * size)
        yield number, rest
        number = int.from_bytes(rest[:4], "big")


def _varint(page: bytes, place: int) -> tuple[int, int]:
    """The number there, and the place behind it."""
    value = 0
    for _ in range(9):
        byte = page[place]
        place += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            break
    return value, place
