"""`stepwell sql`: one SELECT, answered as a table, JSON, CSV or an Arrow file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from stepwell._plural import pluralize
from stepwell.commands import common
from stepwell.errors import InvalidData
from stepwell.sql_result import SqlResult

ABOUT = """\
Query the service's data with one SELECT, in the dialect of DuckDB.

Tables: trajectories, steps, datasets, versions, version_trajectories, runs, metrics, policies,
evaluations, videos, workers."""
EXAMPLES = """\
  stepwell sql "select env, count(*), avg(return) from trajectories group by env"
  stepwell sql --dataset hopper "select t, avg(reward) from steps group by t order by t"
  stepwell sql --param low=50 'select id from trajectories where return > $low'
  stepwell sql --csv --limit 100000 < query.sql > answer.csv
  stepwell sql --schema

Tables and columns: docs/sql.md."""


def main(argv: list[str] | None = None) -> int:
    parser = common.parser("sql", ABOUT, EXAMPLES)
    parser.add_argument("query", nargs="?", help="one SELECT; read from stdin if not given")
    parser.add_argument("--dataset", help="the dataset whose steps the table `steps` contains")
    parser.add_argument("--limit", type=int, default=1000, help="rows at most (default 1000)")
    parser.add_argument(
        "--timeout", type=float, default=5.0, help="seconds (default 5, at most 60)"
    )
    parser.add_argument(
        "--param", action="append", default=[], metavar="NAME=VALUE", help="the value of $NAME"
    )
    parser.add_argument("--csv", action="store_true", help="print CSV (not with --json)")
    parser.add_argument("--arrow", type=Path, metavar="FILE", help="write an Arrow IPC file")
    parser.add_argument("--schema", action="store_true", help="print tables and columns")
    common.add_connection(parser)
    args = parser.parse_args(argv)
    if args.csv and args.json:
        parser.error("--csv and --json: give one of them")
    if args.schema:
        return _schema(args)
    query = args.query if args.query is not None and args.query != "-" else sys.stdin.read()
    if not query.strip():
        raise InvalidData("no query", expected="a SELECT as argument or on stdin")
    params = _params(args.param)
    with common.connect(args) as client:
        result = client.sql(
            query, params, dataset=args.dataset, limit=args.limit, timeout=args.timeout
        )
    if args.arrow:
        _write_arrow(result, args.arrow)
    elif args.csv:
        _write_csv(result)
    elif args.json:
        # Rows as arrays, like the service's own JSON: two columns may bear the same name.
        common.print_json(
            {
                "columns": result.columns,
                "rows": result.rows,
                "truncated": result.truncated,
                "elapsed_ms": result.elapsed_ms,
                "excluded": [one.model_dump() for one in result.excluded],
            }
        )
    else:
        common.print_table(result.columns, result.rows, empty="no rows")
    if result.truncated:
        rows = pluralize(len(result), "row")
        print(f"stepwell: only the first {rows}; raise --limit", file=sys.stderr)
    for one in result.excluded:
        print(
            f"stepwell: warning: {pluralize(one.trajectories, 'trajectory', 'trajectories')} of "
            f"{one.dataset} left out: {one.file} is damaged; see stepwell fsck",
            file=sys.stderr,
        )
    return 0


def _params(words: list[str]) -> dict[str, Any] | None:
    """["NAME=VALUE", …] as values of placeholders; None without any."""
    pairs = [word.partition("=") for word in words]
    for word, (name, equals, _) in zip(words, pairs, strict=True):
        if not (name and equals):
            raise InvalidData("--param", expected="NAME=VALUE", got=word)
    return {name: common.value_of(text) for name, _, text in pairs} or None


def _schema(args: object) -> int:
    with common.connect(args) as client:  # type: ignore[arg-type]
        schema = client.query_schema()
    if getattr(args, "json", False):
        common.print_json(schema)
        return 0
    for table in schema.tables:
        print(f"{common.printable(table.name)}  {common.printable(table.description)}".rstrip())
        width = max((len(common.printable(column.name)) for column in table.columns), default=0)
        for column in table.columns:
            print(f"    {common.printable(column.name):<{width}}  {common.printable(column.type)}")
    return 0


def _write_csv(result: SqlResult) -> None:
    table = result.to_arrow()
    # Arrow writes no nested values to CSV: they become their text.
    columns = [
        pa.array([None if v is None else str(v) for v in column.to_pylist()])
        if pa.types.is_nested(column.type) or pa.types.is_decimal(column.type)
        else column
        for column in table.columns
    ]
    flat = pa.Table.from_arrays(columns, names=table.column_names)
    sys.stdout.flush()
    pyarrow.csv.write_csv(flat, sys.stdout.buffer)


def _write_arrow(result: SqlResult, path: Path) -> None:
    table = result.to_arrow()
    try:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    except OSError as error:
        raise InvalidData(f"cannot write {path}: {error}") from None
    print(f"{pluralize(len(result), 'row')} written to {path}", file=sys.stderr)
