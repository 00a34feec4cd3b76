"""Which datasets a query of bare `steps` can return rows of, as its syntax tree says.

    FROM steps WHERE dataset = 'a' AND t > 3                           {a}
    FROM steps AS s JOIN trajectories … WHERE s.dataset IN ('a', $1)   {a, the first parameter}
    FROM steps WHERE dataset = 'a' OR t > 3                            None: any

A view opens all its files, whatever the condition, so with thousands of datasets the rows of one
would cost thousands of files. Only what is certain counts: a condition that every row of a SELECT
fulfils, on a table whose other rows cannot change what the SELECT returns. All else is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Params = Sequence[Any] | Mapping[str, Any] | None
_JOINS = ("INNER", "LEFT", "RIGHT", "OUTER")
"""Where rows of other datasets are missing, these add at most rows with a NULL for the dataset,
which the condition removes."""


def named_datasets(tree: Any, params: Params) -> frozenset[str] | None:
    """The datasets of which the query with this syntax tree (guard.py) can return steps."""
    found: set[str] = set()
    restricted: set[int] = set()
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        elif isinstance(node, dict):
            if node.get("type") == "SELECT_NODE":
                for table, names in _restricted_tables(node, params):
                    restricted.add(id(table))
                    found |= names
            elif _is_steps(node) and id(node) not in restricted:
                return None
            stack += node.values()
    return frozenset(found)


def _restricted_tables(
    node: dict[str, Any], params: Params
) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """Bare `steps` in the FROM of a SELECT, with the datasets that its WHERE allows."""
    if node.get("sample"):  # it is taken before the WHERE
        return
    tables = list(_joined(node.get("from_table")))
    names = [_name_of(table) for table in tables]
    for table, name in zip(tables, names, strict=True):
        if not _is_steps(table) or names.count(name) > 1 or table.get("column_name_alias"):
            continue
        columns = [[name, "dataset"]]
        # A name alone may be another table's column, or the SELECT's own.
        selected = (str(one.get("alias", "")).lower() for one in node.get("select_list", []))
        if len(tables) == 1 and "dataset" not in selected:
            columns.append(["dataset"])
        if (allowed := _allowed(node.get("where_clause"), columns, params)) is not None:
            yield table, allowed


def _joined(table: Any) -> Iterator[dict[str, Any]]:
    """The tables of a FROM, without those below a join or a sample that may lose rows."""
    if not isinstance(table, dict) or table.get("sample"):
        return
    if table.get("type") != "JOIN":
        yield table
    elif table.get("ref_type") in ("REGULAR", "CROSS") and table.get("join_type") in _JOINS:
        yield from _joined(table.get("left"))
        yield from _joined(table.get("right"))
    else:
        yield {}  # so that no other table is the only one


def _is_steps(table: dict[str, Any]) -> bool:
    return (
        table.get("type") == "BASE_TABLE"
        and str(table.get("schema_name", "")).lower() in ("", "main")
        and str(table.get("table_name", "")).lower() == "steps"
    )


def _name_of(table: dict[str, Any]) -> str:
    return str(table.get("alias") or table.get("table_name") or "").lower()


def _allowed(node: Any, columns: list[list[str]], params: Params) -> set[str] | None:
    """The values of one of `columns` with which a condition can be true."""
    if not isinstance(node, dict):
        return None
    kind = node.get("type")
    if kind in ("CONJUNCTION_AND", "CONJUNCTION_OR"):
        found = [_allowed(child, columns, params) for child in node["children"]]
        known = [one for one in found if one is not None]
        if kind == "CONJUNCTION_AND":
            return set.intersection(*known) if known else None
        return set().union(*known) if len(known) == len(found) else None
    if kind == "COMPARE_EQUAL":
        column, *others = sorted((node["left"], node["right"]), key=lambda n: not _is_column(n))
    elif kind == "COMPARE_IN":
        column, *others = node["children"]
    else:
        return None
    if not _is_column(column) or [n.lower() for n in column["column_names"]] not in columns:
        return None
    texts = [_text(other, params) for other in others]
    return None if None in texts else {text for text in texts if text is not None}


def _is_column(node: dict[str, Any]) -> bool:
    return node.get("class") == "COLUMN_REF"


def _text(node: dict[str, Any], params: Params) -> str | None:
    """A constant or a parameter that is a text; None for anything else."""
    value: Any = None
    if node.get("class") == "CONSTANT":
        literal = node.get("literal") or {}
        value = literal.get("text") if literal.get("kind") == "STRING" else None
    elif node.get("class") == "PARAMETER":
        name = str(node.get("identifier", ""))
        if isinstance(params, Mapping):
            value = params.get(name)
        elif params and name.isdigit() and 0 < int(name) <= len(params):
            value = params[int(name) - 1]
    return value if isinstance(value, str) else None
