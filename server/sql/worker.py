"""The process that runs clients' SQL: `python -m server.sql.worker DATA`, started by pool.py.

Standard library, DuckDB and pyarrow only. It drops its rights first (sandbox.py), then serves
requests over stdin and stdout (pipe_frames.py), each in a fresh in-memory DuckDB that can read only
the query's files and is closed after the query. It interrupts itself at the deadline;
worker_handle.py kills it if that fails.

    request   {sql, params, limit, max_bytes, seconds, form: json|arrow|rows, dataset, catalog?,
              checksums?}
              form rows: a snapshot's selection (selected_rows.py), on the payload's rows if any
    answer    {ok: true, columns, rows, truncated, elapsed_ms, excluded} + JSON rows, or an Arrow
              stream
              {ok: false, code, detail, expected, got}
              {ok: false, damaged: [files]}           no result: some bytes fail their checksums

`catalog` describes the tables that changed since the last one (server/sql/catalog.py), `checksums`
those of new files. DuckDB does not verify Parquet checksums, so it reads through checked_files.py.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import os
import resource
import signal
import sys
import threading
import time
from typing import Any, TypeAlias

from server.pipe_frames import read_frame, write_frame
from server.sandbox import confine, libraries
from server.sql import query_tables
from server.sql.dataset_filter import named_datasets
from stepwell._sql import quoted

ADDRESS_SPACE = 3 << 30
"""Besides the worker's share: libraries and stacks are mapped, and mostly unused."""
ORPHAN_SECONDS = 2.0
"""A query ends this long after its deadline even if the service died and cannot kill it."""
THREADS: dict[str, Any] = {"threads": 1, "async_threads": 1}
"""Few threads leave CPU to writers and trainers; and each thread costs memory."""
_CONNECTION = 8 << 20
"""Memory that a DuckDB connection adds before its first query."""
_BATCH = 2048


def main(argv: list[str]) -> int:
    """`argv`: the data directory, and the memory limit of this process."""
    data, share = argv[0], int(argv[1])
    os.chdir(data)
    statm = open("/proc/self/statm", "rb", buffering=0) if sys.platform == "linux" else None
    layers = confine(
        [
            *libraries(),
            *(os.path.join(data, folder) for folder in ("shards", "mirror", "annotations")),
            *("/proc/self/cgroup", "/sys/fs/cgroup"),  # without its limits there DuckDB aborts
        ],
        address_space=ADDRESS_SPACE + share,
        cpu_seconds=3600,
    )
    stdin = sys.stdin.buffer
    # Only frames are written to the pipe: output of libraries goes to stderr.
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # Imported in the sandbox, so that it applies to the threads that libraries start.
    import duckdb
    import pyarrow  # noqa: F401 - loaded now, so that no query waits for it

    from server.sql.checked_files import CheckedFileSystem

    parser = duckdb.connect(":memory:", config=THREADS)
    parser.execute("SELECT json_serialize_sql('SELECT 1')")
    available = share - _memory(statm)[0] - _CONNECTION
    # DuckDB enforces its limit in tables and sorts, not in every function; the kernel does.
    memory = available * 7 // 10
    write_frame(stdout, {"ok": True, "confined": layers})
    catalog: dict[str, Any] = {"tables": {}, "datasets": {}, "lost": {}}
    files = CheckedFileSystem()
    # Created in advance, like the process: this is half the cost of a small query.
    connection = _connect(memory, files)
    _limit_data(_memory(statm)[1] + available)
    while (frame := read_frame(stdin)) is not None:
        request, rows = frame
        if (changes := request.get("catalog")) is not None:
            catalog = query_tables.merged(catalog, changes)
        files.learn(request.get("checksums") or {}, forget=request.get("forget") or ())
        request["max_bytes"] = min(int(request["max_bytes"]), available // 2)
        signal.setitimer(signal.ITIMER_REAL, float(request["seconds"]) + ORPHAN_SECONDS)
        header, payload = _answer(request, rows, catalog, parser, connection)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if files.damaged:  # whatever the result
            header, payload = {"ok": False, "damaged": sorted(files.damaged)}, b""
        write_frame(stdout, header, payload)
        del payload
        connection.close()
        connection = _connect(memory, files)
    return 0


def _memory(statm: Any) -> tuple[int, int]:
    """Resident bytes of this process, and bytes of its private writable mappings."""
    if statm is None:
        return 96 << 20, 0
    statm.seek(0)
    fields = statm.read().split()
    page = resource.getpagesize()
    return int(fields[1]) * page, int(fields[5]) * page


def _limit_data(most: int) -> None:
    """Make the kernel refuse further memory, whatever the query calls."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


Payload: TypeAlias = "bytes | memoryview | ArrowStream"


def _answer(
    request: dict[str, Any], rows: bytes, catalog: dict[str, Any], parser: Any, connection: Any
) -> tuple[dict[str, Any], Payload]:
    import duckdb

    from server.sql.guard import NotAllowed, check

    began = time.perf_counter()
    timer = threading.Timer(float(request["seconds"]), connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        allowed = check(request["sql"], parser)
        if request["form"] == "rows":
            return _select(request, rows, allowed, catalog, parser, connection, began)
        only = named_datasets(allowed.tree, request.get("params"))
        excluded = query_tables.make_tables(
            connection, allowed.tables, catalog, request, only_steps=only
        )
        header, payload = _run(connection, allowed, request, excluded, began)
        header["excluded"] = excluded
        header["elapsed_ms"] = (time.perf_counter() - began) * 1e3
        return header, payload
    except NotAllowed as error:
        return _refusal("sql_not_allowed", str(error), error.expected, error.got), b""
    except duckdb.PermissionException as error:
        return _refusal("sql_not_allowed", _clean(error)), b""
    except duckdb.InterruptException:
        return _refusal("query_timeout", "stopped at its deadline"), b""
    except duckdb.CatalogException as error:
        detail = _clean(error)
        if "Table with name" not in detail:
            return _refusal("sql_error", detail), b""
        # DuckDB suggests tables of its own: of ours it knows only those that the query names.
        tables = ", ".join(sorted({*catalog["tables"], "steps"}))
        detail = detail.partition("\nDid you mean")[0]
        return _refusal("sql_error", detail, f'one of {tables}, "DATASET".steps'), b""
    except (duckdb.Error, RuntimeError, OverflowError, ValueError, OSError) as error:
        # Arrow streams convert DuckDB's errors to OSError.
        if "INTERRUPT" in str(error):
            return _refusal("query_timeout", "stopped at its deadline"), b""
        code = "sql_not_allowed" if "data-modifying" in str(error) else "sql_error"
        return _refusal(code, _clean(error)), b""
    except MemoryError:
        return _refusal("sql_error", "out of memory"), b""
    finally:
        timer.cancel()


def _refusal(code: str, detail: str, expected: str = "", got: str = "") -> dict[str, Any]:
    return {"ok": False, "code": code, "detail": detail, "expected": expected, "got": got}


def _clean(error: BaseException) -> str:
    """DuckDB's message without paths of the data; for our file system's errors, the last line."""
    text = str(error)
    if "Traceback (most recent call last)" in text:
        text = text.strip().splitlines()[-1]
    return text.replace(os.getcwd() + "/", "").replace(os.getcwd(), "")[:2000]


def _connect(memory: int, files: Any = None) -> Any:
    import duckdb

    # Passed on construction: DuckDB would start threads for every core first.
    connection = duckdb.connect(":memory:", config=THREADS)
    for setting in (
        f"memory_limit = '{memory // (1 << 20)}MiB'",
        "temp_directory = ''",  # set before external access is disabled: it would stay writable
        "allow_persistent_secrets = false",
        "allow_community_extensions = false",
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        "python_enable_replacements = false",
        "max_expression_depth = 250",
        "enable_progress_bar = false",  # it would be written into the response of a slow query
        "TimeZone = 'UTC'",
    ):
        connection.execute(f"SET {setting}")
    if files is not None:
        files.damaged.clear()
        connection.register_filesystem(files)
    return connection


# --- results --------------------------------------------------------------------------------------


def _run(
    connection: Any, allowed: Any, request: dict[str, Any], excluded: list[Any], began: float
) -> tuple[dict[str, Any], Payload]:
    limit, params = int(request["limit"]), request.get("params")
    text: str = allowed.wrapped(limit + 1)
    relation = connection.sql(text, params=params or None)
    columns = [
        {"name": name, "type": str(kind)}
        for name, kind in zip(relation.columns, relation.types, strict=True)
    ]
    most = int(request["max_bytes"])
    payload: Payload
    if request["form"] == "json":
        payload, rows, cut = _json(connection, text, relation, request)
    else:
        payload, rows, cut = _arrow(relation, limit, most, excluded, began)
    return {"ok": True, "columns": columns, "rows": rows, "truncated": cut}, payload


def _select(
    request: dict[str, Any],
    rows: bytes,
    allowed: Any,
    catalog: dict[str, Any],
    parser: Any,
    connection: Any,
    began: float,
) -> tuple[dict[str, Any], Payload]:
    """A snapshot's selection; see selected_rows.py."""
    from server.sql import selected_rows
    from server.sql.guard import NotAllowed

    columns = selected_rows.columns_of(allowed.text, parser, frozenset(request["known"]))
    only, numbered = request.get("only"), columns is not None
    if not rows:
        query_tables.make_tables(
            connection,
            allowed.tables,
            catalog,
            request,
            numbered=numbered,
            only_steps=named_datasets(allowed.tree, None),
        )
    elif numbered:
        selected_rows.make_changes(connection, rows, only)
    else:
        raise NotAllowed("this selection depends on more than one row at a time")
    limit, most = int(request["limit"]), int(request["max_bytes"])
    text = allowed.wrapped(limit + 1)
    relation = selected_rows.relation_of(text, numbered, only, connection)
    payload, count, cut = _arrow(relation, limit, most, [], began, at_once=65_536)
    reads = None if columns is None else sorted(columns)
    return {"ok": True, "rows": count, "truncated": cut, "reads": reads}, payload


def _json(
    connection: Any, text: str, relation: Any, request: dict[str, Any]
) -> tuple[memoryview, int, bool]:
    """A JSON list of rows, as many as fit."""
    limit, max_bytes = int(request["limit"]), int(request["max_bytes"])
    names, kinds = relation.columns, [str(kind) for kind in relation.types]
    if any(map(_needs_text, kinds)):
        text = (
            f"SELECT {', '.join(map(_time_as_text, range(len(kinds)), names, kinds))} FROM ({text})"
        )
        text += f" AS q({', '.join(f'c{i}' for i in range(len(kinds)))})"
    connection.execute(text, request.get("params") or None)
    text_of = bytearray(b"[")
    rows, cut = 0, False
    while not cut and (batch := connection.fetchmany(_BATCH)):
        for row in batch:
            raw = json.dumps([_plain(value) for value in row], allow_nan=False).encode()
            if rows == limit or len(text_of) + bool(rows) + len(raw) + 1 > max_bytes:
                cut = True
                break
            if rows:
                text_of += b","
            text_of += raw
            rows += 1
    text_of += b"]"
    return memoryview(text_of), rows, cut


def _time_as_text(number: int, name: str, kind: str) -> str:
    value = f"CAST(c{number} AS VARCHAR)" if _needs_text(kind) else f"c{number}"
    return f"{value} AS {quoted(name)}"


def _needs_text(kind: str) -> bool:
    """Python would need a time zone library for these, and has no months; text is equivalent."""
    return "TIME ZONE" in kind or kind == "INTERVAL"


def _arrow(
    relation: Any,
    limit: int,
    max_bytes: int,
    excluded: list[Any],
    began: float,
    at_once: int = _BATCH,
) -> tuple[ArrowStream, int, bool]:
    """An Arrow IPC stream of rows, as many as fit; its schema's metadata describes the query."""
    import pyarrow as pa

    reader = relation.to_arrow_reader(at_once)
    batches: list[Any] = []
    rows = size = 0
    cut = False
    for batch in reader:
        if rows + batch.num_rows > limit:
            batch, cut = batch.slice(0, limit - rows), True
        size += batch.nbytes
        if size > max_bytes:
            cut = True
            break
        batches.append(batch)
        rows += batch.num_rows
    elapsed = (time.perf_counter() - began) * 1e3
    query_metadata = {"truncated": "true" if cut else "false", "elapsed_ms": f"{elapsed:.3f}"}
    query_metadata["excluded"] = json.dumps(excluded)
    table = pa.Table.from_batches(batches, reader.schema)
    for place, kind in enumerate(relation.types):
        if str(kind) in ("HUGEINT", "UHUGEINT"):
            found = _narrowed(table[place], unsigned=str(kind) == "UHUGEINT")
            table = table.set_column(place, table.column_names[place], found)
    return ArrowStream(table.replace_schema_metadata(query_metadata)), rows, cut


class ArrowStream:
    """A table as an IPC stream, encoded while it is written: a result is held once."""

    def __init__(self, table: Any):
        import pyarrow as pa

        self._table = table
        size = pa.MockOutputStream()
        self.write_to(size)
        self._size = int(size.size())

    def __len__(self) -> int:
        return self._size

    def write_to(self, sink: Any) -> None:
        import pyarrow as pa

        with pa.ipc.new_stream(sink, self._table.schema) as writer:
            writer.write_table(self._table)


def _narrowed(column: Any, *, unsigned: bool = False) -> Any:
    """A 128-bit integer column as an ordinary one, if all of it fits.

    sum() of integers is a HUGEINT, which Arrow represents as a decimal: a count of steps would
    arrive as Decimal('4000'). A column with values beyond 64 bits stays one of decimals, which are
    exact. The upper half of unsigned ones arrives as negative numbers.
    """
    import pyarrow as pa
    import pyarrow.compute

    try:
        narrow = column.cast(pa.int64())
        if not unsigned or (
            narrow.null_count == len(narrow) or pa.compute.min(narrow).as_py() >= 0
        ):
            return narrow
    except pa.ArrowInvalid:
        if not unsigned:
            return column
    values = (None if v is None else int(v) % (1 << 128) for v in column.to_pylist())
    exact = [None if v is None else decimal.Decimal(v) for v in values]
    return pa.chunked_array([pa.array(exact, pa.decimal256(39, 0))])


def _plain(value: Any) -> Any:
    """A JSON value. NaN and infinity become null, times ISO 8601, bytes base64."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, decimal.Decimal):
        return float(value) if value.is_finite() else None
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
