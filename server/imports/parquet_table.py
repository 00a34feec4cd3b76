"""Parquet or Arrow files as one table, read one row group (or record batch) at a time. Untrusted:
runs only in the sandbox.

A column of scalars or of lists of one length is an array [rows, …]. Fields of structs are columns
of their own, with dotted names; a struct with `bytes` is an image. Folders named KEY=VALUE are
columns, too, as partitioned datasets have them (Hive). Sizes that a footer claims are
checked before anything is read; extension types are what they are stored as.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from server.imports.arrow_file import ArrowFile, is_arrow
from server.imports.episode_ids import factorized
from server.imports.raw_file import Array, ImportRefused, check_size
from stepwell._wording import pluralize, shown
from stepwell.table_columns import MAX_DIMENSIONS, flattened, is_image

PARTITION = re.compile(r"(?:^|/)([A-Za-z_]\w{0,63})=([^/]{0,256})(?=/)")
MAX_COLUMNS = 4096
MAX_FILES = 20_000
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8}
"""Bytes of a value by physical type."""


class Table:
    """Files of equal columns, one after another. Raises `ImportRefused`."""

    def __init__(self, files: list[tuple[str, BinaryIO]], size: int, memory: int, max_rows: int):
        self._files: list[pq.ParquetFile | ArrowFile] = []
        self._starts: list[tuple[int, int, int]] = []
        """(first row, file, row group) of each row group."""
        self.file_rows: list[int] = []
        self.types: dict[str, pa.DataType] = {}
        self.features: dict[str, Any] = {}
        """Hugging Face's description of the columns, where the file has one."""
        self._doubled: set[str] = set()
        """Names of several columns."""
        self._of_path: dict[str, list[str]] = {}
        """Columns in the names of folders: the value of each file."""
        self._cache: dict[str, tuple[int, pa.Array]] = {}
        self._order: NDArray[np.int64] | None = None
        self.rows = logical = 0
        if not 1 <= len(files) <= MAX_FILES:
            raise ImportRefused("no or too many files", expected=f"1 … {MAX_FILES}", got=len(files))
        for name, file in files:
            logical += self._add(name, file, memory)
            if self.rows > max_rows:
                raise ImportRefused("too many rows", expected=f"≤ {max_rows}", got=self.rows)
        check_size(logical, size, 1 << 62)
        self._add_partitions([name for name, _ in files])
        self._memory = memory
        if self.rows == 0:
            raise ImportRefused("the table is empty", expected="one row for each step", got=0)

    def _add(self, name: str, file: BinaryIO, memory: int) -> int:
        """One more file; returns the bytes it claims to hold."""
        try:
            start = file.read(6)
            file.seek(0)
            opened = (
                ArrowFile(file)
                if is_arrow(start)
                else pq.ParquetFile(pa.PythonFile(file, mode="r"), pre_buffer=False)
            )
        except (pa.ArrowException, OSError, ValueError, EOFError) as error:
            raise damaged(f"{name[:200]}: {error}") from None
        schema = opened.schema if isinstance(opened, ArrowFile) else opened.schema_arrow
        named = [one for field in schema for one in flattened(field.name, field.type)]
        types = dict(named)
        times = Counter(name for name, _ in named)
        self._doubled |= {name for name, count in times.items() if count > 1}
        if len(types) > MAX_COLUMNS:
            raise ImportRefused(
                f"{name[:200]} has too many columns",
                expected=f"≤ {MAX_COLUMNS}",
                got=len(types),
            )
        if not self.types:
            self.types = types
            self.features = _features(schema)
        elif types != self.types:
            differ = sorted({k for k in {*types, *self.types} if types.get(k) != self.types.get(k)})
            raise ImportRefused(
                f"{name[:200]} has other columns than the files before it",
                expected=_shown(differ, self.types),
                got=_shown(differ, types),
            )
        logical, before = 0, self.rows
        for group, (rows, here) in enumerate(_groups(opened)):
            if rows < 0 or here < 0:
                raise damaged(f"{name[:200]}: a negative size")
            if here > memory:
                check_size(here, here, memory)
            if rows:
                self._starts.append((self.rows, len(self._files), group))
            self.rows += rows
            logical += here
        self.file_rows.append(self.rows - before)
        self._files.append(opened)
        return logical

    def _add_partitions(self, names: list[str]) -> None:
        """Columns from folders KEY=VALUE that every file is in."""
        found = [dict(PARTITION.findall(name)) for name in names]
        for key in found[0]:
            if key in self.types or not all(key in one for one in found):
                continue
            values = [unquote(one[key]) for one in found]
            whole = all(re.fullmatch(r"-?\d{1,18}", value) for value in values)
            self.types[key] = pa.int64() if whole else pa.string()
            self._of_path[key] = values

    @property
    def columns(self) -> list[str]:
        return list(self.types)

    def sort(self, order: NDArray[np.int64]) -> None:
        """Rows come in this order from now on. Columns are then read whole."""
        self._order = order
        self._cache.clear()

    def file_order(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where rows `start … stop` are in the files."""
        return np.arange(start, stop) if self._order is None else self._order[start:stop]

    def whole(self, column: str) -> pa.Array:
        """Every row of one column."""
        pieces = [self._group(column, number) for number in range(len(self._starts))]
        self._cache.pop(column, None)
        if (held := sum(piece.nbytes for piece in pieces)) > self._memory:
            check_size(held, held, self._memory)
        joined = pa.concat_arrays(pieces)
        if len(joined) != self.rows:
            raise damaged(f"{column[:100]} has {len(joined)} of {self.rows} rows")
        return joined if self._order is None else joined.take(pa.array(self._order))

    def slice(self, column: str, start: int, stop: int) -> pa.Array:
        """Rows `start … stop` of one column; cheap where they follow those of the last call."""
        if self._order is not None:
            held = self._cache.get(column)
            if held is None:
                held = self._cache[column] = (-1, self.whole(column))
            return held[1].slice(start, stop - start)
        pieces = []
        number = int(np.searchsorted([first for first, _, _ in self._starts], start, "right")) - 1
        while start < stop:
            group, first = self._group(column, number), self._starts[number][0]
            if not 0 <= start - first < len(group):
                raise damaged(f"{column[:100]}: rows are missing")
            pieces.append(group.slice(start - first, stop - start))
            start += len(pieces[-1])
            number += 1
        return pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)

    def numbers(self, column: str, start: int, stop: int) -> Array:
        return as_numbers(column, self.slice(column, start, stop))

    # --- what episode_ids.py asks for -------------------------------------------------------------

    def numbers_of(self, name: str) -> Array:
        return as_scalars(name, self.whole(name))

    def ids(self, name: str) -> tuple[NDArray[np.int64], list[str]]:
        array = self.whole(name)
        if array.null_count:
            raise ImportRefused(
                f"column {name[:100]} has empty cells",
                expected="ids",
                got=f"row {pc.index(array.is_null(), True).as_py()}",
            )
        if is_list(array.type) or pa.types.is_floating(array.type):
            return factorized(name, as_scalars(name, array))
        encoded = array.dictionary_encode()
        names = [str(value)[:100] for value in encoded.dictionary.to_pylist()]
        return encoded.indices.to_numpy().astype(np.int64), names

    def is_scalar(self, name: str) -> bool:
        type_ = _storage(self.types[name]) if name in self.types else pa.null()
        if pa.types.is_dictionary(type_):
            type_ = type_.value_type
        checks = (pa.types.is_primitive, pa.types.is_string, pa.types.is_large_string)
        return any(check(type_) for check in (*checks, pa.types.is_decimal))

    def _group(self, column: str, number: int) -> pa.Array:
        if number >= len(self._starts):
            raise damaged(f"{column[:100]}: rows are missing")
        if column in self._doubled:
            raise ImportRefused(
                f"several columns are called {column[:100]}",
                expected="a name for each: pyarrow.parquet.ParquetFile(FILE).read()"
                ".rename_columns(NAMES); .flatten() before it for fields of a struct",
                got=shown(self.columns, 20),
            )
        held = self._cache.get(column)
        if held is not None and held[0] == number:
            return held[1]
        first, file, group = self._starts[number]
        if column in self._of_path:
            after = self._starts[number + 1][0] if number + 1 < len(self._starts) else self.rows
            text = pa.repeat(pa.scalar(self._of_path[column][file]), after - first)
            return text.cast(self.types[column])
        opened = self._files[file]
        table = (
            pa.Table.from_batches([opened.read(group)])
            if isinstance(opened, ArrowFile)
            else opened.read_row_group(group, columns=[column], use_threads=False)
        )
        every = zip(table.column_names, table.columns, strict=True)
        found = (_reached(name, array, column) for name, array in every)
        if (chunked := next((one for one in found if one is not None), None)) is None:
            raise damaged(f"column {column[:100]} is missing")
        chunks = [_plain(chunk) for chunk in chunked.chunks]
        array = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
        self._cache[column] = (number, array)
        return array


def _groups(opened: pq.ParquetFile | ArrowFile) -> Iterator[tuple[int, int]]:
    """Rows, and bytes unpacked as the file claims, of each row group or batch."""
    if isinstance(opened, ArrowFile):
        yield from zip(opened.batch_rows, opened.batch_bytes, strict=True)
        return
    for number in range(opened.metadata.num_row_groups):
        group, size = opened.metadata.row_group(number), 0
        for index in range(group.num_columns):
            chunk = group.column(index)
            width = WIDTHS.get(chunk.physical_type, 0)
            size += max(chunk.total_uncompressed_size, chunk.num_values * width)
        yield group.num_rows, size


def kind_of(type_: pa.DataType) -> str:
    """What a column holds: "numbers", "texts", "frames", or "" for anything else."""
    if is_image(type_) or pa.types.is_binary(type_) or pa.types.is_large_binary(type_):
        return "frames"
    if pa.types.is_dictionary(type_):
        return kind_of(type_.value_type)
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return "texts"
    for _ in range(MAX_DIMENSIONS + 1):
        type_ = _storage(type_)
        if not is_list(type_):
            break
        type_ = type_.value_type
    plain = pa.types.is_boolean(type_) or pa.types.is_integer(type_) or pa.types.is_floating(type_)
    return "numbers" if plain else ""


def is_list(type_: pa.DataType) -> bool:
    type_ = _storage(type_)
    return bool(
        pa.types.is_list(type_)
        or pa.types.is_large_list(type_)
        or pa.types.is_fixed_size_list(type_)
    )


def as_numbers(column: str, array: pa.Array) -> Array:
    """[rows, …], in the column's own type. Raises `ImportRefused`."""
    rows, array = len(array), _plain(array)
    if pa.types.is_decimal(array.type):
        array = _from_decimal(array)
    shape: list[int] = []
    while is_list(array.type):
        if array.null_count or len(shape) == MAX_DIMENSIONS:
            raise ImportRefused(
                f"column {column[:100]} cannot be an array",
                expected=f"no empty cells, ≤ {MAX_DIMENSIONS} dimensions",
                got=pluralize(array.null_count, "empty cell"),
            )
        lengths = pc.min_max(pc.list_value_length(array)).as_py()
        if lengths["min"] != lengths["max"]:
            raise ImportRefused(
                f"the lists of column {column[:100]} differ in length",
                expected="the same in every row",
                got=f"{lengths['min']} … {lengths['max']}",
            )
        shape.append(int(lengths["min"] or 0))
        array = _plain(array.flatten())
    if array.null_count and not pa.types.is_floating(array.type):
        raise ImportRefused(
            f"column {column[:100]} has no value in some rows",
            expected="a number in every row",
            got=pluralize(array.null_count, "empty cell"),
        )
    if not (
        pa.types.is_boolean(array.type)
        or pa.types.is_integer(array.type)
        or pa.types.is_floating(array.type)
    ):
        raise ImportRefused(
            f"column {column[:100]} does not hold numbers",
            expected="integers, floats, booleans, or lists of them",
            got=str(array.type)[:100],
        )
    found = np.asarray(array.to_numpy(zero_copy_only=False)).reshape(rows, *shape)
    if found.dtype == np.uint64 and int(found.max(initial=0)) < 2**63:
        return found.astype(np.int64)
    return found


def as_scalars(column: str, array: pa.Array) -> Array:
    """[rows], of a column of numbers or of lists of one number."""
    found = as_numbers(column, array)
    if found.shape[1:] not in ((), (1,)):
        raise ImportRefused(
            f"column {column[:100]} is not one number a row",
            expected="a scalar",
            got=list(found.shape[1:]),
        )
    found = found.reshape(-1)
    if found.dtype.kind == "f" and not bool(np.isfinite(found).all()):
        invalid = np.flatnonzero(~np.isfinite(found))
        raise ImportRefused(
            f"column {column[:100]} contains invalid numbers",
            expected="finite",
            got=f"{len(invalid)} NaN, infinite or empty, the first in row {invalid[0]}",
        )
    return found


def image_bytes(column: str, array: pa.Array) -> list[bytes]:
    """The encoded image of every row. Raises `ImportRefused` for one that is elsewhere."""
    if pa.types.is_struct(array.type):
        array = pc.struct_field(array, "bytes")
    if array.null_count:
        raise ImportRefused(
            f"column {column[:100]} has rows without an image",
            expected="the bytes of the image in the table",
            got=pluralize(array.null_count, "empty cell"),
        )
    found: list[bytes] = array.to_pylist()
    return found


def damaged(why: object) -> ImportRefused:
    return ImportRefused(
        f"the file is damaged or cut short: {str(why).splitlines()[0][:300]}",
        expected="a file that pyarrow can read to its end",
    )


def _reached(name: str, array: pa.ChunkedArray, column: str) -> pa.ChunkedArray | None:
    """The column of this name, as `flattened` names them, in the one called `name`."""
    if name == column or not column.startswith(f"{name}."):
        return array if name == column else None
    fields = range(array.type.num_fields if pa.types.is_struct(array.type) else 0)
    below = ((f"{name}.{array.type.field(i).name}", pc.struct_field(array, [i])) for i in fields)
    every = (_reached(full, values, column) for full, values in below)
    return next((found for found in every if found is not None), None)


def _plain(array: pa.Array) -> pa.Array:
    """Without extension types and dictionaries; times as integers."""
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_temporal(array.type) and not pa.types.is_interval(array.type):
        wide = array.type.bit_width == 64
        array = array.cast(pa.int64() if wide else pa.int32())
    return array


def _from_decimal(array: pa.Array) -> pa.Array:
    """Whole numbers as integers, as far as 64 bits go, others as floats."""
    if array.type.scale <= 0:
        try:
            return array.cast(pa.int64())
        except pa.ArrowInvalid:
            pass
    return array.cast(pa.float64())


def _storage(type_: pa.DataType) -> pa.DataType:
    return type_.storage_type if isinstance(type_, pa.BaseExtensionType) else type_


def _features(schema: pa.Schema) -> dict[str, Any]:
    try:
        written = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        found = written["info"]["features"]
        return found if isinstance(found, dict) else {}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}


def _shown(names: list[str], types: dict[str, pa.DataType]) -> str:
    return ", ".join(f"{n[:60]}: {types.get(n, 'missing')}" for n in names[:10])[:300]
