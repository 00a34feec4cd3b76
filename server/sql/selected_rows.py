"""Selections, in the worker: which rows of `trajectories` a snapshot's SELECT returns.

The response is an Arrow stream of numbers, never of ids as text:

    row       the trajectory's `pk` in the index; for changes, its number among them
    weight    if the selection has this column
    unknown   an id that is not a living trajectory's, else NULL; where this can occur

A selection that depends on one row at a time (`columns_of`) can run on changed rows alone: the
request then has these rows as its payload, and nothing else is read.
"""

from __future__ import annotations

from typing import Any

from server.sql.guard import NotAllowed, tree_of
from server.sql.query_tables import where_dataset

_HARMLESS = frozenset(
    {
        *("+", "-", "*", "/", "//", "%", "**", "^", "||", "~~", "!~~", "~~*", "!~~*", "^@"),
        *("like_escape", "ilike_escape", "not_like_escape", "not_ilike_escape", "regexp_matches"),
        *("regexp_full_match", "contains", "starts_with", "prefix", "suffix", "ends_with"),
        *("lower", "upper", "length", "len", "strlen", "split_part", "substring", "substr"),
        *("list_contains", "list_has", "array_contains", "array_has", "list_has_any"),
        *("list_has_all", "list_value", "array_length", "cardinality", "element_at"),
        *("map_extract", "map_extract_value", "map_contains", "array_extract", "list_extract"),
        *("abs", "ln", "log", "log2", "log10", "exp", "sqrt", "pow", "power", "floor", "ceil"),
        *("round", "greatest", "least", "isnan", "isinf", "isfinite", "sign", "ifnull"),
    }
)
"""Functions of their arguments alone. A selection with another one always reads the whole table."""
_CLASSES = frozenset(
    {
        *("COLUMN_REF", "CONSTANT", "COMPARISON", "CONJUNCTION", "BETWEEN", "OPERATOR", "CASE"),
        *("CAST", "FUNCTION", "TYPE"),
    }
)
_CASTS = frozenset(
    {
        *("double", "float", "real", "integer", "int", "bigint", "smallint", "tinyint", "boolean"),
        *("bool", "varchar", "text", "ubigint", "uinteger"),
    }
)
_EMPTY = ("group_expressions", "group_sets", "having", "sample", "qualify", "cte_map")


def columns_of(text: str, parser: Any, known: frozenset[str]) -> frozenset[str] | None:
    """The columns that a selection reads, if it depends on one row of `trajectories` at a time.

    None for all others: subqueries, joins, windows, DISTINCT, LIMIT, time and random functions; and
    those that read `id`, which is a number here.
    """
    node = tree_of(text, parser)["node"]
    if node.get("type") != "SELECT_NODE" or any(_full(node.get(name)) for name in _EMPTY):
        return None
    if node.get("aggregate_handling", "STANDARD_HANDLING") != "STANDARD_HANDLING":
        return None
    modifiers = node.get("modifiers", [])
    if any(m.get("type") != "ORDER_MODIFIER" for m in modifiers):
        return None
    table = node.get("from_table", {})
    named = (table.get("type"), table.get("table_name", "").lower())
    schema = table.get("schema_name", "").lower()
    if named != ("BASE_TABLE", "trajectories") or schema not in ("", "main"):
        return None
    if any(_full(table.get(name)) for name in ("sample", "column_name_alias", "at_clause")):
        return None
    ids = [column for column in node["select_list"] if _is_id(column)]
    if len(ids) != 1:
        return None
    found: set[str] = set()
    stack: list[Any] = [c for c in node["select_list"] if c is not ids[0]]
    stack += [node.get("where_clause")]
    # An ORDER BY changes nothing, but its columns must exist.
    orders = [order["expression"] for m in modifiers for order in m.get("orders", [])]
    stack += [order for order in orders if not _is_id(order)]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            if "class" in part and not _allowed(part, found, known):
                return None
            stack += part.values()
    return frozenset(found)


def make_changes(connection: Any, payload: bytes, only: str | None) -> None:
    """Create `trajectories` from the payload's rows, and no other table."""
    import pyarrow as pa

    connection.register("_changes", pa.ipc.open_stream(payload).read_all())
    connection.execute(f"CREATE VIEW trajectories AS SELECT * FROM _changes{where_dataset(only)}")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def relation_of(text: str, numbered: bool, only: str | None, connection: Any) -> Any:
    """The response's rows, not yet fetched, for the checked SELECT `text`.

    Its tables exist already. `numbered`: `id` is the row's number in them instead of a text.
    """
    names = [name.lower() for name in connection.sql(text).columns]
    if names not in (["id"], ["id", "weight"], ["weight", "id"]):
        raise NotAllowed(
            "a selection has the wrong columns",
            expected="SELECT id FROM trajectories …, or SELECT id, weight FROM trajectories …",
            got=", ".join(names),
        )
    weight = ", CAST(s.weight AS DOUBLE) AS weight" if "weight" in names else ""
    if numbered:
        return connection.sql(f"SELECT s.id AS row{weight} FROM ({text}) AS s")
    # A selected NULL is unknown too.
    return connection.sql(
        f"SELECT t._pk AS row{weight}, CASE WHEN t._pk IS NULL"
        " THEN coalesce(CAST(s.id AS VARCHAR), 'NULL') END AS unknown"
        f" FROM ({text}) AS s LEFT JOIN"
        f" (SELECT id, _pk FROM _all_trajectories{where_dataset(only)})"
        " AS t ON t.id = CAST(s.id AS VARCHAR)"
    )


def _is_id(column: dict[str, Any]) -> bool:
    names = [str(name).lower() for name in column.get("column_names", [])]
    alias = str(column.get("alias", "")).lower()
    return column.get("class") == "COLUMN_REF" and names[-1:] == ["id"] and alias in ("", "id")


def _allowed(part: dict[str, Any], found: set[str], known: frozenset[str]) -> bool:
    """Whether an expression's value depends on its row alone; collects the columns it reads."""
    kind = part["class"]
    if kind not in _CLASSES:
        return False
    if kind == "COLUMN_REF":
        names = [str(name).lower() for name in part["column_names"]]
        if len(names) > 2 or names[-1] not in known:
            return False
        found.update(name for name in names if name in known)
    elif kind == "FUNCTION":
        name = str(part.get("function_name", "")).lower()
        special = _full(part.get("filter")) or part.get("distinct") or part.get("schema")
        ordered = _full(part.get("order_bys", {}).get("orders"))
        if name not in _HARMLESS or special or ordered:
            return False
    elif kind == "CAST":
        # Casting a text to a time depends on the clock if the text is "now".
        to = part.get("type_expr") or part.get("cast_type") or {}
        name = str(to.get("type_name") or to.get("id") or "").lower()
        return name in _CASTS
    return True


def _full(value: Any) -> bool:
    """Whether a part of the tree contains anything."""
    if isinstance(value, dict):
        return any(_full(child) for child in value.values())
    return bool(value)
