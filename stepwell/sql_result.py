"""The result of a SQL query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from stepwell import messages
from stepwell._wording import pluralize
from stepwell.errors import CodecError
from stepwell.messages import ARROW
from stepwell.spaces import Array


class SqlResult:
    """The result of a query: an Arrow table, whether it is truncated, and excluded files.

    for row in result: …           rows as tuples of Python values; also `result.rows`
    result.to_arrow() · .to_pandas() · .to_numpy()
    """

    def __init__(
        self,
        table: Any,
        *,
        truncated: bool = False,
        elapsed_ms: float = 0.0,
        excluded: Sequence[messages.Excluded] = (),
    ):
        self._table = table
        self.excluded = list(excluded)
        """Damaged files of the service whose rows are not in `steps`, if the query reads it."""
        self.truncated = truncated
        """There were more rows than the limit."""
        self.elapsed_ms = elapsed_ms

    @property
    def columns(self) -> list[str]:
        return list(self._table.column_names)

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        columns = [column.to_pylist() for column in self._table.columns]
        return list(zip(*columns, strict=True)) if columns else []

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __repr__(self) -> str:
        more = ", truncated" if self.truncated else ""
        if self.excluded:
            more += f", without {pluralize(len(self.excluded), 'damaged file')}"
        rows = pluralize(len(self), "row")
        return f"SqlResult({rows} × {self.columns}{more}, {self.elapsed_ms:.0f} ms)"

    def one(self) -> Any:
        """Return the single value of a result with one row and one column."""
        if len(self) != 1 or len(self.columns) != 1:
            raise CodecError("not a single value", expected="1 row × 1 column", got=repr(self))
        return self._table.column(0)[0].as_py()

    def to_arrow(self) -> Any:
        """A pyarrow.Table."""
        return self._table

    def to_pandas(self) -> Any:
        """A pandas.DataFrame; pandas must be installed."""
        return self._table.to_pandas()

    def to_numpy(self) -> dict[str, Array]:
        """Column → array; a column of equally long lists (an observation) becomes [rows, n]."""
        return {
            name: _to_numpy(column)
            for name, column in zip(self.columns, self._table.columns, strict=True)
        }


def read_table(data: bytes, what: str) -> Any:
    """An Arrow IPC stream as a table. Raises `CodecError`."""
    try:
        with pa.ipc.open_stream(data) as reader:
            table = reader.read_all()
            table.validate()
            return table
    except (pa.ArrowException, OSError) as error:
        raise CodecError(
            f"{what} is not an Arrow stream: {str(error).splitlines()[0][:200]}",
            expected=ARROW,
            got=repr(data[:16]),
        ) from None


def _to_numpy(column: Any) -> Array:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.nulls(0, array.type)
    kind = array.type
    nested = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if (nested or pa.types.is_fixed_size_list(kind)) and not array.null_count and len(array):
        values = array.flatten().to_numpy(zero_copy_only=False)
        lengths = np.unique(array.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) == 1:
            return np.asarray(values.reshape(len(array), int(lengths[0])))
    return np.asarray(array.to_numpy(zero_copy_only=False))
