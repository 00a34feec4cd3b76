"""Validates a worker's response to a snapshot's selection (selected_rows.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from server.index.mirror import MirrorState
from server.problems import ProblemError


@dataclass(frozen=True, slots=True)
class Selected:
    """The result of a snapshot's selection."""

    rows: NDArray[np.int64]
    """Each trajectory's `pk`, ascending; for changes, its number among them."""
    weights: NDArray[np.float64] | None
    reads: tuple[str, ...] | None
    """The columns it reads if it depends on one row at a time, else None."""
    state: MirrorState | None
    """The state of the mirror that it read."""


def read_selected(
    header: dict[str, Any], payload: bytearray, state: MirrorState | None, dataset: str | None
) -> Selected:
    """A worker's response, validated: ids exist and are unique, weights are finite and positive."""
    table = pa.ipc.open_stream(payload).read_all()
    names = table.column_names
    if "unknown" in names and (unknown := table.num_rows - table["unknown"].null_count):
        raise _bad_selection(
            f"{unknown} selected ids are not living trajectories"
            + (f" of dataset {dataset}" if dataset else ""),
            "ids of the table trajectories",
            table["unknown"].drop_null()[0].as_py(),
        )
    rows = np.array(table["row"].to_numpy(), np.int64)
    order = None if bool((np.diff(rows) > 0).all()) else np.argsort(rows, kind="stable")
    rows = rows if order is None else rows[order]
    if twice := int((np.diff(rows) == 0).sum()):
        raise _bad_selection(
            "a trajectory is selected twice",
            "each id once (SELECT DISTINCT)",
            f"{twice} repeats among {len(rows)} rows",
        )
    reads = None if header["reads"] is None else tuple(header["reads"])
    if "weight" not in names or table["weight"].null_count == len(rows):
        return Selected(rows, None, reads, state)
    values = np.array(table["weight"].to_numpy(), np.float64)
    values = values if order is None else values[order]
    bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        raise _bad_selection("a bad weight", "finite numbers > 0", str(values[bad][0]))
    return Selected(rows, values, reads, state)


def _bad_selection(detail: str, expected: str, got: str) -> ProblemError:
    return ProblemError(422, "sql_error", detail, expected=expected, got=got)
