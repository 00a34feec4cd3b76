"""Parquet files of anybody → trajectories. Untrusted: runs only in the sandbox.

One file, or the zip of a folder of them, such as a dataset on the Hugging Face Hub. The roles of
columns are given or guessed (column_map.py); rows become episodes in table_episodes.py.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa

from server.imports import named
from server.imports.archive import Archive
from server.imports.column_map import column_map
from server.imports.parquet_table import Table, damaged
from server.imports.raw_file import ImportOptions, ImportRefused, Reading, check_magic
from server.imports.table_episodes import TableEpisodes

SPLIT = re.compile(r"(?:.*/)?([^/]+?)-\d+-of-\d+\.parquet")
"""Hugging Face's names of files."""


@contextmanager
def reading(
    file: BinaryIO, options: ImportOptions, memory: int, max_rows: int
) -> Iterator[Reading]:
    """Errors of pyarrow inside are an `ImportRefused`, too."""
    with reported():
        table = Table(_files(file, options, memory), options.size, memory, max_rows)
        columns = column_map(table.columns, options.columns)
        source = TableEpisodes(table, columns, options, memory)
        yield named.reading(source, options, memory, max_rows)


@contextmanager
def reported() -> Iterator[None]:
    try:
        yield
    except ImportRefused:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise damaged(str(error) or type(error).__name__) from None


def _files(file: BinaryIO, options: ImportOptions, memory: int) -> list[tuple[str, BinaryIO]]:
    if not zipfile.is_zipfile(file):
        file.seek(0)
        check_magic(file, b"PAR1", "a Parquet file", "a .parquet file, or a folder of them")
        return [("the file", file)]
    archive = Archive(file, options.size, memory)
    names = [name for name in archive.names if name.endswith(".parquet")]
    splits = {name: m[1] for name in names if (m := SPLIT.fullmatch(name))}
    known = sorted(set(splits.values()))
    if options.split:
        names = [name for name in names if splits.get(name) == options.split]
        if not names:
            raise ImportRefused(
                "there is no such split",
                expected=", ".join(known) or "no split=",
                got=options.split,
            )
    elif len(known) > 1:
        raise ImportRefused(
            "the folder has several splits", expected="split=NAME", got=", ".join(known)[:300]
        )
    return [(name, archive.open(name)) for name in names]
