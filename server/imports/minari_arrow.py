"""Minari's Arrow and Parquet files: a folder per episode. Untrusted: runs only in the sandbox.

    <i>/part-0.arrow or .parquet    columns observations, actions, rewards, terminations,
                                    truncations, infos; T+1 rows
    <i>/metadata.json               total_steps, seed, …

The last row of actions, rewards and flags is padding: only observations and infos have T+1 rows.
Dict and Tuple spaces are structs, boxes lists of their elements in C order, texts strings, images
JPEG in binary. The files are read whole, one episode at a time, never through Minari: its reader
gives the batches of an Arrow file as episodes, so that those over 32,767 steps are cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet

from server.imports.archive import Archive
from server.imports.episodes import About, Declared, Episodes, Layout, Leaf, Leaves, array_name
from server.imports.images import pixels
from server.imports.minari_metadata import COLUMNS, METADATA, ROLES, Metadata, end_of
from server.imports.parquet_table import as_numbers, kind_of
from server.imports.raw_file import (
    Array,
    ImportOptions,
    ImportRefused,
    check_size,
    same_name,
)
from stepwell._wording import pluralize
from stepwell.spaces import EnvSpec, Space
from stepwell.trajectory import TrajectoryMetadata

PART = re.compile(r"(?P<episode>\d{1,9})/part-(?P<part>\d{1,9})\.(?P<kind>arrow|parquet)")
MAX_LEVELS = 8
MAX_LEAVES = 512
SHAPE = re.compile(r"\d{1,6}(,\d{1,6}){0,4}")


@dataclass(frozen=True, slots=True)
class Column:
    """One leaf of an episode."""

    values: pa.Array
    shape: str
    """"2,3" where the file says it beside the column."""


class ArrowEpisodes(Episodes):
    """An opened folder (episodes.py: Episodes)."""

    def __init__(
        self, archive: Archive, metadata: Metadata, options: ImportOptions, memory: int
    ) -> None:
        self._archive, self._metadata, self._memory = archive, metadata, memory
        self.env = metadata.env
        self._parts: dict[int, list[str]] = {}
        self._last: tuple[int, dict[str, Column]] = (-1, {})
        self._declared: dict[str, Mapping[str, Declared]] = {
            "observation": metadata.declared("observation"),
            "action": metadata.declared("action"),
            "info": {},
        }
        self.layout = Layout()
        found = []
        for name in archive.names:
            if match := PART.fullmatch(name):
                found.append((int(match["episode"]), int(match["part"]), name))
        for number, _, name in sorted(found):
            self._parts.setdefault(number, []).append(name)
        for number in self._parts:
            self._survey(number, options)
        self.layout.check_skipped()

    def declared(self, what: str) -> Mapping[str, Declared]:
        return self._declared[what]

    def written_spec(self) -> EnvSpec | None:
        return self._metadata.written_spec()

    def rows(self, number: int, leaf: Leaf) -> Array:
        column = self._columns(number)[leaf.path]
        name = f"episode {number}/{leaf.path}"
        length = len(column.values)
        rows = length - (leaf.path.split("/")[0] == "actions")
        if leaf.kind == "texts":
            return np.array(column.values.to_pylist()[:rows], object)
        if leaf.kind == "frames":
            frames = (value.as_py() for value in column.values[:rows])
            return pixels(name, frames, memory=self._memory)
        assert leaf.shape is not None
        return as_numbers(name, column.values).reshape(length, *leaf.shape)[:rows]

    def about(self, number: int) -> About:
        columns, name = self._columns(number), f"episode {number}"
        rewards, *flags = (as_numbers(key, columns[key].values)[:-1] for key in COLUMNS)
        terminated, truncated = end_of(name, *flags, exported=self._metadata.exported)
        seed = self._said(number).get("seed")
        fits = type(seed) is int and -(2**63) <= seed < 2**63
        return About(
            name=name,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            metadata=TrajectoryMetadata(seed=seed if fits else None),
        )

    def _said(self, number: int) -> dict[str, Any]:
        """The episode's own metadata, if it has some."""
        folder = self._parts[number][0].rpartition("/")[0]
        name = f"{folder}/{METADATA}"
        return self._archive.json(name) if self._archive.has(name) else {}

    def _survey(self, number: int, options: ImportOptions) -> None:
        """Check one episode against those before it."""
        name, columns = f"episode {number}", self._columns(number)
        for wanted in COLUMNS:
            leaf = _leaf(columns[wanted], wanted, None) if wanted in columns else ""
            if not isinstance(leaf, Leaf) or leaf.shape != ():
                raise ImportRefused(
                    f"{name} has no column {wanted} of numbers",
                    expected=", ".join(("observations", "actions", *COLUMNS)),
                    got=", ".join(sorted(columns))[:200],
                )
        steps = len(columns["rewards"].values) - 1
        said = self._said(number).get("total_steps", steps)
        if steps == said == 0:
            self.layout.skipped += 1
            return
        if steps < 1 or said != steps:
            raise ImportRefused(
                f"{name} has a wrong number of rows",
                expected=f"{said} + 1, as its {METADATA} says",
                got=pluralize(steps + 1, "row"),
            )
        here: Leaves = {}
        for path, column in columns.items():
            top, *parts = path.split("/")
            if (role := ROLES.get(top)) is not None:
                key = array_name(role, parts)
                leaf = _leaf(column, path, self._declared[role].get(key))
                self.layout.place(here, role, key, leaf, f"{name}/{path}", options.drop_infos)
        self.layout.add(number, steps, name, here)

    def _columns(self, number: int) -> dict[str, Column]:
        """The columns of one episode by path, structs taken apart; the last one is kept."""
        if self._last[0] != number:
            table = pa.concat_tables([self._table(name) for name in self._parts[number]])
            columns: dict[str, Column] = {}
            for field in table.schema:
                columns |= _flat(field.name, field, table[field.name].combine_chunks(), 0)
                if len(columns) > MAX_LEAVES:
                    raise ImportRefused("too many columns", expected=f"≤ {MAX_LEAVES}")
            self._last = (number, columns)
        return self._last[1]

    def _table(self, name: str) -> pa.Table:
        size = self._archive.size(name)
        try:
            with self._archive.open(name) as file:
                table = _read(file, name, size, self._memory)
            # Offsets and lengths in a file are claims.
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            first = (str(error).splitlines() or [""])[0][:200]
            raise ImportRefused(
                f"{name} is damaged or cut short: {first}", got=f"{size} bytes"
            ) from None
        check_size(table.nbytes, size, self._memory)
        return table


def _read(file: BinaryIO, name: str, size: int, memory: int) -> pa.Table:
    if name.endswith(".arrow"):
        return pa.ipc.open_file(file).read_all()
    parquet = pa.parquet.ParquetFile(file)
    groups = (parquet.metadata.row_group(n) for n in range(parquet.metadata.num_row_groups))
    check_size(sum(max(group.total_byte_size, 0) for group in groups), size, memory)
    return parquet.read(use_threads=False)


def _flat(path: str, field: pa.Field, values: Any, level: int) -> dict[str, Column]:
    """The leaves below one column, by path."""
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks else pa.array([], values.type)
    if not pa.types.is_struct(values.type):
        said = (field.metadata or {}).get(b"shape", b"").decode(errors="replace")
        return {path: Column(values, said)}
    if level == MAX_LEVELS:
        raise ImportRefused(f"{path[:200]} is nested too deep", expected=f"≤ {MAX_LEVELS} levels")
    found: dict[str, Column] = {}
    for child, below in zip(values.type, values.flatten(), strict=True):
        members = _flat(f"{path}/{child.name.replace('/', '_')}", child, below, level + 1)
        for name in found.keys() & members.keys():
            raise same_name(name, f"{path}/{child.name}", name, "other names in the file")
        found |= members
    return found


def _leaf(column: Column, path: str, declared: Declared | None) -> Leaf | str:
    """What a column holds, or why it cannot be read."""
    if column.values.null_count:
        return "it has empty values"
    kind = kind_of(column.values.type)
    if kind in ("texts", "frames"):
        return Leaf(path, None, np.dtype(object if kind == "texts" else np.uint8), kind)
    if not kind:
        return f"unsupported type ({str(column.values.type)[:60]})"
    try:
        values = as_numbers(path, column.values)
    except ImportRefused as error:
        return f"{error.detail.removeprefix(f'column {path} ')} ({error.got})"
    shape = values.shape[1:] and (math.prod(values.shape[1:]),)
    said = [int(n) for n in column.shape.split(",")] if SHAPE.fullmatch(column.shape) else None
    for wanted in (said, declared.shape if isinstance(declared, Space) else None):
        if wanted is not None and math.prod(wanted) == math.prod(shape):
            return Leaf(path, tuple(wanted), values.dtype)
    return Leaf(path, shape, values.dtype)
