"""`stepwell sql`: one SELECT, answered as a table, JSON, CSV or an Arrow file; saved queries."""

from __future__ import annotations

import argparse
import base64
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from stepwell import terminal
from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import InvalidData
from stepwell.sql_result import SqlResult

ABOUT = """\
Query the service's data with one SELECT, in the dialect of DuckDB.

Tables: trajectories, steps, annotations, datasets, versions, version_trajectories, runs,
metrics, policies, evaluations, videos, workers."""
EXAMPLES = """\
  stepwell sql "select env, count(*), avg(return) from trajectories group by env"
  stepwell sql --dataset hopper "select t, avg(reward) from steps group by t order by t"
  stepwell sql --param low=50 'select id from trajectories where return > $low'
  stepwell sql --csv --limit 100000 < query.sql > answer.csv
  stepwell sql --schema
  stepwell sql --save best --description "Best episodes" --param low=50 'select … $low'
  stepwell sql --saved best --param low=100
  stepwell sql --list

Tables and columns: docs/reference/sql.md."""


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("sql", ABOUT, EXAMPLES)
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
    saved = parser.add_argument_group(
        "saved queries", "kept by the service for everybody; --param gives what they start with"
    ).add_mutually_exclusive_group()
    saved.add_argument("--save", metavar="NAME", help="keep the query under a name; do not run it")
    saved.add_argument("--saved", metavar="NAME", help="run the query of that name")
    saved.add_argument("--list", action="store_true", help="print all saved queries")
    saved.add_argument("--delete", metavar="NAME", help="delete a saved query")
    parser.add_argument("--description", default="", help="of the query, with --save")
    terminal.add_connection(parser)
    parser.set_defaults(call=_answer)
    return terminal.dispatch(parser, argv)


def _answer(client: Client, args: argparse.Namespace) -> terminal.Answer | int:
    if args.csv and args.json:
        raise InvalidData("--csv and --json", expected="one of them", got="both")
    if args.schema:
        return _schema(client)
    if args.list:
        return _list(client)
    if args.delete:
        client.delete_saved_query(args.delete)
        return {"removed": args.delete}, lambda: print(f"saved query {args.delete} deleted")
    if args.saved and args.query is not None:
        raise InvalidData(
            "--saved runs the query of that name", expected="no other", got=args.query
        )
    query, params, dataset = _query(args, client)
    if args.save:
        kept = client.save_query(
            args.save, query, description=args.description, params=params, dataset=dataset
        )
        return kept, lambda: print(f"saved; run it: stepwell sql --saved {kept.name}")
    result = client.sql(query, params, dataset=dataset, limit=args.limit, timeout=args.timeout)
    if args.arrow:
        _write_arrow(result, args.arrow)
    elif args.csv:
        _write_csv(result)
    elif args.json:
        # Rows as arrays, like the service's own JSON: two columns may bear the same name.
        terminal.print_json(
            {
                "columns": result.columns,
                "rows": result.rows,
                "truncated": result.truncated,
                "elapsed_ms": result.elapsed_ms,
                "excluded": [one.model_dump() for one in result.excluded],
            }
        )
    else:
        terminal.print_table(result.columns, result.rows, empty="no rows", exact=True)
    cells = [] if args.arrow else (cell for row in result.rows for cell in row)
    if any(
        (args.json or (args.csv and isinstance(cell, list | dict))) and _not_finite(cell)
        for cell in cells
    ):
        print(
            "stepwell: null in JSON may also be NaN or infinity; isnan(x) and isinf(x) say which",
            file=sys.stderr,
        )
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


def _query(
    args: argparse.Namespace, client: Client
) -> tuple[str, dict[str, Any] | None, str | None]:
    """The SQL, its parameters and the dataset of `steps`: as given, else as saved."""
    params = _params(args.param)
    if args.saved:
        kept = client.saved_query(args.saved)
        return kept.sql, {**kept.params, **(params or {})} or None, args.dataset or kept.dataset
    query = args.query if args.query is not None and args.query != "-" else sys.stdin.read()
    if not query.strip():
        raise InvalidData("no query", expected="a SELECT as argument or on stdin")
    return query, params, args.dataset


def _list(client: Client) -> terminal.Answer:
    found = client.saved_queries()
    rows = [
        (q.name, q.description, ", ".join(f"{k}={v}" for k, v in q.params.items()), q.owner,
         terminal.ago(q.updated_at))
        for q in found
    ]  # fmt: skip
    return found, lambda: terminal.print_table(
        ["name", "description", "parameters", "owner", "saved"], rows, empty="no saved queries"
    )


def _params(words: list[str]) -> dict[str, Any] | None:
    """["NAME=VALUE", …] as values of placeholders; None without any."""
    pairs = [word.partition("=") for word in words]
    for word, (name, equals, _) in zip(words, pairs, strict=True):
        if not (name and equals):
            raise InvalidData("--param", expected="NAME=VALUE", got=word)
    return {name: terminal.value_of(text) for name, _, text in pairs} or None


def _schema(client: Client) -> terminal.Answer:
    schema = client.query_schema()

    def show() -> None:
        for table in schema.tables:
            head = f"{terminal.printable(table.name)}  {terminal.printable(table.description)}"
            print(head.rstrip())
            names = [terminal.printable(column.name) for column in table.columns]
            width = max(map(len, names), default=0)
            for name, column in zip(names, table.columns, strict=True):
                print(f"    {name:<{width}}  {terminal.printable(column.type)}")

    return schema, show


AS_TEXT = (
    *(pa.types.is_nested, pa.types.is_decimal, pa.types.is_binary, pa.types.is_large_binary),
    *(pa.types.is_fixed_size_binary, pa.types.is_interval),
)


def _text(value: Any) -> str:
    if isinstance(value, list | dict):
        return terminal.json_text(value)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else terminal.cell(value)


def _not_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_not_finite, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_not_finite, value))
    return isinstance(value, float) and not math.isfinite(value)


def _write_csv(result: SqlResult) -> None:
    table = result.to_arrow()
    # Arrow writes none of these to CSV: lists and structs become JSON, others the text in it.
    columns = [
        pa.array([None if v is None else _text(v) for v in column.to_pylist()], pa.string())
        if any(is_kind(column.type) for is_kind in AS_TEXT)
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
