"""Which SQL may run: exactly one SELECT, wrapped, without functions that reach outside the query.

Runs in the worker process, next to DuckDB. No single check is sufficient (a data-modifying CTE has
type SELECT; a parser can be wrong), so three follow one another, and the connection below them can
neither write nor open files other than those of the query (worker.py, sandbox.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import duckdb

TABLE_FUNCTIONS = frozenset(
    {"range", "generate_series", "unnest", "repeat", "repeat_row", "json_each", "json_tree"}
)
"""Functions that are allowed as tables. All others read files, memory or settings."""

_FORBIDDEN = frozenset(
    {
        *("current_setting", "getenv", "query", "query_table", "write_log", "nextval", "currval"),
        *("json_execute_serialized_sql", "json_serialize_plan", "glob", "force_checkpoint"),
        *("from_substrait", "from_substrait_json", "getvariable", "which_secret"),
    }
)
_FORBIDDEN_PREFIXES = (
    *("read_", "parquet_", "arrow_", "pandas_", "python_", "sniff_", "duckdb_", "pragma_"),
    *("seq_scan", "index_scan", "load_", "export_", "copy_", "enable_", "disable_", "truncate_"),
)


class NotAllowed(Exception):
    """The statement was refused before execution. `got` names what was found."""

    def __init__(self, detail: str, *, expected: str = "one SELECT statement", got: str = ""):
        super().__init__(detail)
        self.expected = expected
        self.got = got


@dataclass(frozen=True, slots=True)
class CheckedQuery:
    """A statement that may run."""

    text: str
    """The statement without its semicolon."""
    tables: frozenset[tuple[str, str]]
    """(schema, table) of every table reference, in lower case."""
    tree: Any = None
    """DuckDB's syntax tree."""

    def wrapped(self, limit: int) -> str:
        """Return the query wrapped as a subquery, where anything but a query is a syntax error."""
        return f"SELECT * FROM (\n{self.text}\n) AS q LIMIT {int(limit)}"


def check(sql: str, parser: duckdb.DuckDBPyConnection) -> CheckedQuery:
    """The one SELECT in `sql`. Raises `NotAllowed`, or DuckDB's error if it does not parse.

    `parser` is a bare in-memory connection, used only for DuckDB's syntax tree.
    """
    statements: list[Any] = list(parser.extract_statements(sql))
    if len(statements) != 1:
        raise NotAllowed("exactly one statement can be run", got=f"{len(statements)} statements")
    kind = statements[0].type
    if kind != duckdb.StatementType.SELECT:
        raise NotAllowed("only SELECT can be run", got=f"{kind.name} statement")
    text = _without_semicolon(statements[0].query)
    again: list[Any] = list(parser.extract_statements(f"SELECT * FROM (\n{text}\n) AS q LIMIT 1"))
    if len(again) != 1 or again[0].type != duckdb.StatementType.SELECT:
        raise NotAllowed("only a plain SELECT can be run", got="several statements in one")
    tree = tree_of(text, parser)
    return CheckedQuery(text, frozenset(_tables(tree)), tree)


def _without_semicolon(sql: str) -> str:
    raw = sql.encode()
    for offset, _ in duckdb.tokenize(sql):
        if raw[offset : offset + 1] == b";":
            return raw[:offset].decode()
    return sql


def tree_of(text: str, parser: duckdb.DuckDBPyConnection) -> Any:
    """DuckDB's syntax tree of one SELECT. Raises `NotAllowed` if it has none."""
    row = parser.execute("SELECT json_serialize_sql(?::VARCHAR)", [text]).fetchone()
    document: Any = json.loads(row[0]) if row else {"error": True}
    if document.get("error") or len(document.get("statements", [])) != 1:
        raise NotAllowed(
            "this form of SELECT is not supported",
            got=str(document.get("error_message", "no statement"))[:200],
        )
    return document["statements"][0]


def _tables(tree: Any) -> set[tuple[str, str]]:
    """Walk the syntax tree: refuse functions by name, collect tables."""
    found: set[tuple[str, str]] = set()
    stack: list[tuple[Any, bool]] = [(tree, False)]
    while stack:
        node, as_table = stack.pop()
        if isinstance(node, list):
            stack += [(child, False) for child in node]
        elif isinstance(node, dict):
            kind = node.get("type")
            if "function_name" in node:
                _check_function(str(node["function_name"]).lower(), as_table)
            if kind == "BASE_TABLE":
                found.add((str(node["schema_name"]).lower(), str(node["table_name"]).lower()))
            for key, child in node.items():
                stack.append((child, kind == "TABLE_FUNCTION" and key == "function"))
    return found


def _check_function(name: str, as_table: bool) -> None:
    if as_table and name not in TABLE_FUNCTIONS:
        raise NotAllowed(
            f"the table function {name}() is not allowed",
            expected="tables of GET /v1/query/schema, or " + ", ".join(sorted(TABLE_FUNCTIONS)),
            got=name,
        )
    if name in _FORBIDDEN or name.startswith(_FORBIDDEN_PREFIXES):
        raise NotAllowed(
            f"the function {name}() is not allowed",
            expected="functions of values",
            got=name,
        )
