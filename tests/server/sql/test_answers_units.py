"""What the pool makes of a worker's answers, without a worker: selections, refusals, checksums."""

from __future__ import annotations

import base64
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from server.index.mirror import MirrorState
from server.problems import ProblemError
from server.sql import pool
from server.sql.memory import BASE_MEMORY, Memory
from server.sql.selected import read_selected


def answer(**columns: Any) -> bytearray:
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytearray(sink.getvalue())


def selected(reads: list[str] | None = None, dataset: str | None = None, **columns: Any) -> Any:
    return read_selected({"reads": reads}, answer(**columns), None, dataset)


def problem(error: ProblemError) -> tuple[Any, ...]:
    return error.status, error.code, error.detail, error.expected, error.got


def test_rows_come_in_order_with_their_weights() -> None:
    found = selected(["length"], row=[5, 2, 9], weight=[0.5, 2.0, 1.5])
    assert found.rows.tolist() == [2, 5, 9] and found.rows.dtype == np.int64
    assert found.weights.tolist() == [2.0, 0.5, 1.5] and found.reads == ("length",)
    found = selected(row=[1, 2], weight=[3, 4])
    assert (found.rows.tolist(), found.weights.tolist(), found.reads) == ([1, 2], [3.0, 4.0], None)


def test_no_weight_at_all_is_none() -> None:
    assert selected(row=[3, 1]).weights is None
    assert selected(row=[3, 1], weight=pa.array([None, None], pa.float64())).weights is None
    empty = selected(row=pa.array([], pa.int64()), weight=pa.array([], pa.float64()))
    assert (empty.rows.tolist(), empty.weights) == ([], None)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, None])
def test_a_bad_weight_is_named(weight: float | None) -> None:
    with pytest.raises(ProblemError) as caught:
        selected(row=[2, 1], weight=pa.array([1.0, weight], pa.float64()))
    shown = "nan" if weight is None else str(weight)
    wanted = (422, "sql_error", "a bad weight", "finite numbers > 0", shown)
    assert problem(caught.value) == wanted


def test_repeats_are_counted() -> None:
    with pytest.raises(ProblemError) as caught:
        selected(row=[4, 1, 4, 4, 1])
    wanted = (422, "sql_error", "a trajectory is selected twice", "each id once (SELECT DISTINCT)")
    assert problem(caught.value) == (*wanted, "3 repeats among 5 rows")


@pytest.mark.parametrize(("dataset", "of"), [(None, ""), ("maze", " of dataset maze")])
def test_unknown_ids_are_counted_and_one_is_named(dataset: str | None, of: str) -> None:
    with pytest.raises(ProblemError) as caught:
        selected(
            None, dataset, row=pa.array([1, None, None]), unknown=pa.array([None, "who", "what"])
        )
    detail = f"2 selected ids are not living trajectories{of}"
    wanted = (422, "sql_error", detail, "ids of the table trajectories", "who")
    assert problem(caught.value) == wanted
    known = selected(None, dataset, row=[1, 2], unknown=pa.array([None, None], pa.string()))
    assert known.rows.tolist() == [1, 2]


def test_a_refusal_says_what_the_worker_said() -> None:
    header = {"code": "sql_not_allowed", "detail": "no", "expected": "a SELECT", "got": "COPY"}
    wanted = (422, "sql_not_allowed", "no", "a SELECT", "COPY")
    assert problem(pool._refused(header, 2.5)) == wanted
    header = {"code": "sql_error", "detail": "no", "expected": "", "got": ""}
    assert problem(pool._refused(header, 2.5)) == (422, "sql_error", "no", None, None)
    late = pool._refused({"code": "query_timeout", "detail": "stopped"}, 2.5)
    detail = "stopped after 2.5 s, including waiting; request less, or set a longer timeout"
    assert problem(late)[:3] == (422, "query_timeout", detail)


def test_damage_that_goes_on_is_asked_about_again() -> None:
    error = pool._still_damaged(["shards/fifo/a.parquet", "b" * 300])
    assert (error.status, error.code) == (503, "damaged")
    assert error.headers == {"Retry-After": "1"}
    assert error.got == ("shards/fifo/a.parquet, " + "b" * 300)[:200]


def test_a_worker_is_told_of_new_files_and_of_those_to_forget() -> None:
    """What is the same object is not sent again."""
    old, new = b"old", b"new"
    state = MirrorState(1, {}, {}, {}, checksums={"a": old, "b": new, "c": new})
    worker = SimpleNamespace(checksums={"a": old, "b": old, "gone": old})
    coded = base64.b64encode(new).decode()
    told = pool._checksums_for(worker, state)  # type: ignore[arg-type]
    assert told == {"checksums": {"b": coded, "c": coded}, "forget": ["gone"]}


def test_the_least_memory_is_told_and_enough() -> None:
    """So much is refused, and one MiB above the least that is named is taken."""
    for workers in (1, 2, 5):
        least = ((workers + 1) * BASE_MEMORY + (workers + 2) * (16 << 20)) * 8 // 7
        with pytest.raises(ValueError, match=f"at least {least // (1 << 20) + 1} MiB"):
            Memory.of(least - (1 << 20), workers)
        parts = Memory.of((least // (1 << 20) + 1) << 20, workers)
        assert parts.caller >= BASE_MEMORY + (16 << 20)
        assert parts.own - BASE_MEMORY == 2 * (parts.caller - BASE_MEMORY)
    total = 896 << 20
    assert Memory.of(total, 2) == Memory(
        BASE_MEMORY + (112 << 20), BASE_MEMORY + (224 << 20), 112 << 20
    )
    needed = 3 * BASE_MEMORY + 4 * (16 << 20)
    exact = next(t for t in range(needed * 8 // 7 - 16, 2 * needed) if t - t // 8 >= needed)
    assert Memory.of(exact, 2).caller == BASE_MEMORY + (16 << 20)
    with pytest.raises(ValueError, match="is too little for 2 workers"):
        Memory.of(exact - 1, 2)
    Memory.of(1 << 20, 0)
