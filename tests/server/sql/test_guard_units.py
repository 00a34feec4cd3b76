"""Which SQL may run: every refusal of the guard, with what it expected and what came."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest

from server.sql import guard
from server.sql.guard import CheckedQuery, NotAllowed, check


def refusal(parser: Any, sql: str) -> tuple[str, str, str]:
    with pytest.raises(NotAllowed) as caught:
        check(sql, parser)
    return str(caught.value), caught.value.expected, caught.value.got


ONE = "one SELECT statement"


@pytest.mark.parametrize(
    ("sql", "said", "got"),
    [
        ("", "exactly one statement can be run", "0 statements"),
        (" ; -- nothing", "exactly one statement can be run", "0 statements"),
        ("select 1; select 2", "exactly one statement can be run", "2 statements"),
        ("select 1; drop table t; select 3", "exactly one statement can be run", "3 statements"),
        ("drop table t", "only SELECT can be run", "DROP statement"),
        ("insert into t select 1", "only SELECT can be run", "INSERT statement"),
        ("delete from t", "only SELECT can be run", "DELETE statement"),
        ("copy (select 1) to 'x'", "only SELECT can be run", "COPY statement"),
        ("set threads = 4", "only SELECT can be run", "SET statement"),
        ("attach 'x' as y", "only SELECT can be run", "ATTACH statement"),
        ("explain select 1", "only SELECT can be run", "EXPLAIN statement"),
    ],
)
def test_one_select_and_nothing_else(parser: Any, sql: str, said: str, got: str) -> None:
    assert refusal(parser, sql) == (said, ONE, got)


class Scripted:
    """A parser that answers what it is told."""

    def __init__(self, *answers: list[Any], row: Any = None):
        self.answers, self.row, self.asked = list(answers), row, []

    def extract_statements(self, sql: str) -> list[Any]:
        self.asked.append(sql)
        kinds = self.answers.pop(0)
        return [SimpleNamespace(query="select 1 ; --", type=kind) for kind in kinds]

    def execute(self, sql: str, params: list[str]) -> Any:
        self.asked.append((sql, params))
        return SimpleNamespace(fetchone=lambda: self.row)


SELECT, DROP = duckdb.StatementType.SELECT, duckdb.StatementType.DROP


@pytest.mark.parametrize("again", [[], [SELECT, SELECT], [DROP]])
def test_what_is_not_one_select_inside_another(again: list[Any]) -> None:
    scripted: Any = Scripted([SELECT], again)
    assert refusal(scripted, "x") == (
        "only a plain SELECT can be run",
        ONE,
        "several statements in one",
    )
    assert scripted.asked == ["x", "SELECT * FROM (\nselect 1 \n) AS q LIMIT 1"]


@pytest.mark.parametrize(
    ("row", "got"),
    [
        (None, "no statement"),
        ((json.dumps({"error": True, "error_message": "m" * 300}),), "m" * 200),
        ((json.dumps({"error": True}),), "no statement"),
        ((json.dumps({"error": True, "statements": [{"a": 1}]}),), "no statement"),
        ((json.dumps({"error": False, "statements": []}),), "no statement"),
        ((json.dumps({"error": False, "statements": [{}, {}]}),), "no statement"),
        ((json.dumps({}),), "no statement"),
    ],
)
def test_a_select_without_a_tree(row: Any, got: str) -> None:
    scripted: Any = Scripted([SELECT], [SELECT], row=row)
    said = "this form of SELECT is not supported"
    assert refusal(scripted, "x") == (said, ONE, got)
    assert scripted.asked[2] == ("SELECT json_serialize_sql(?::VARCHAR)", ["select 1 "])
    with pytest.raises(NotAllowed):
        guard.tree_of("select 1", scripted)


def test_a_tree() -> None:
    scripted: Any = Scripted(row=(json.dumps({"error": False, "statements": [{"node": 5}]}),))
    assert guard.tree_of("select 1", scripted) == {"node": 5}
    assert scripted.asked == [("SELECT json_serialize_sql(?::VARCHAR)", ["select 1"])]


def test_a_statement_that_duckdb_does_not_parse(parser: Any) -> None:
    with pytest.raises(duckdb.ParserException):
        check("selec 1", parser)


def test_a_refusal_has_words() -> None:
    plain = NotAllowed("why")
    assert (str(plain), plain.expected, plain.got) == ("why", ONE, "")


def test_a_statement_is_wrapped_on_lines_of_its_own() -> None:
    allowed = CheckedQuery("select 1 -- x", frozenset())
    assert allowed.wrapped(7) == "SELECT * FROM (\nselect 1 -- x\n) AS q LIMIT 7"
    assert allowed.wrapped(True).endswith("LIMIT 1")


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("select 1", "select 1"),
        ("select 1;", "select 1"),
        ("select 1 ; ; -- c;", "select 1 "),
        ("select ';' as \"a;b\" ; -- c;", "select ';' as \"a;b\" "),
        ("select /* ; é */ 'é;' ; ", "select /* ; é */ 'é;' "),
        ("select 1 -- é ; \n", "select 1 -- é ; \n"),
    ],
)
def test_semicolons_and_comments(parser: Any, sql: str, text: str) -> None:
    found = check(sql, parser)
    assert (found.text, found.tables) == (text, frozenset())
    assert parser.execute(found.wrapped(1)).fetchall()
    assert guard._without_semicolon(sql) == text


A_AND_B = {("", "a"), ("", "b")}


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("select 1", set()),
        ("select * from Trajectories", {("", "trajectories")}),
        ('from "My-Data".Steps s', {("my-data", "steps")}),
        ("select * from a join b using (x), c", {("", "a"), ("", "b"), ("", "c")}),
        ("select (select 1 from X.y) from a where 1 in (from b)", {("x", "y"), *A_AND_B}),
        ("with q as (from a) select * from q", {("", "a"), ("", "q")}),
        ("from a union (from b)", A_AND_B),
        ("select * from range(3), generate_series(2), unnest([1])", set()),
        ("select * from repeat(1, 2), repeat_row(1, 2), json_each('{}'), json_tree('{}')", set()),
        ("select * from RANGE(abs(3)), a", {("", "a")}),
    ],
)
def test_the_tables_that_it_names(parser: Any, sql: str, tables: set[tuple[str, str]]) -> None:
    found = check(sql, parser)
    assert found.tables == tables and isinstance(found.tables, frozenset)


FORBIDDEN = [
    *("current_setting", "getenv", "query", "query_table", "write_log", "nextval", "currval"),
    *("json_execute_serialized_sql", "json_serialize_plan", "glob", "force_checkpoint"),
    *("from_substrait", "from_substrait_json", "getvariable", "which_secret"),
    *("read_csv", "read_", "parquet_metadata", "arrow_scan", "pandas_scan", "python_x"),
    *("sniff_csv", "duckdb_settings", "pragma_version", "seq_scan", "seq_scan_x", "index_scan"),
    *("index_scan_x", "load_x", "export_x", "copy_x", "enable_logging", "disable_logging"),
    "truncate_duckdb_logs",
]
TABLE_FUNCTIONS = [
    *("generate_series", "json_each", "json_tree", "range", "repeat", "repeat_row", "unnest")
]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_functions_that_reach_out_of_a_query(parser: Any, name: str) -> None:
    wanted = (f"the function {name}() is not allowed", "functions of values", name)
    for sql in (
        f"select {name}('x')",
        f"select 1 where 1 in (select {name.upper()}('x') from a)",
        f"select * from range({name}('x'))",
        f"select * from (select [{name}('x')])",
    ):
        assert refusal(parser, sql) == wanted
    as_table = (
        f"the table function {name}() is not allowed",
        "tables of GET /v1/query/schema, or generate_series, json_each, json_tree, range, repeat,"
        " repeat_row, unnest",
        name,
    )
    assert refusal(parser, f"select * from {name}('x')") == as_table


@pytest.mark.parametrize("name", ["read_text", "glob", "duckdb_views", "sqlite_scan", "md5", "x"])
def test_table_functions_that_are_not_on_the_list(parser: Any, name: str) -> None:
    for sql in (f"from {name}('x')", f"select (select 1 from range(2), {name.upper()}('x'))"):
        said, expected, got = refusal(parser, sql)
        assert said == f"the table function {name}() is not allowed"
        assert expected.startswith("tables of GET /v1/query/schema, or generate_series, ")
        assert got == name


def test_functions_that_are_allowed(parser: Any) -> None:
    assert sorted(guard.TABLE_FUNCTIONS) == TABLE_FUNCTIONS
    for name in TABLE_FUNCTIONS:
        guard._check_function(name, True)
        guard._check_function(name, False)
    check("select sum(a), md5('x'), copyx(1), reader(2), readx(3), sequence(4), loads(5)", parser)
    guard._check_function("md5", False)
    with pytest.raises(NotAllowed):
        guard._check_function("md5", True)
