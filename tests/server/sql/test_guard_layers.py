"""Each layer of the SQL guard with the others off: what it refuses, it refuses alone.

    1 one statement    2 SELECT    3 as a subquery    4 table functions by name (an allow list)
    5 functions by name (what is denied)    6 DuckDB's settings    7 the process (test_sandbox.py)

A layer whose removal no test notices is not there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

from server.sql import guard, query_tables, worker
from server.sql.guard import TABLE_FUNCTIONS, CheckedQuery, NotAllowed, check


@pytest.fixture(scope="module")
def parser() -> Any:
    return duckdb.connect(":memory:", config={"threads": 1})


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers 4 and 5 off."""
    monkeypatch.setattr(guard, "_check_function", lambda _name, _as_table: None)


@pytest.fixture
def no_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 5 off."""
    monkeypatch.setattr(guard, "_FORBIDDEN", frozenset())
    monkeypatch.setattr(guard, "_FORBIDDEN_PREFIXES", ())


@pytest.fixture
def any_table_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 4 off."""

    class Everything(frozenset[str]):
        def __contains__(self, _name: object) -> bool:
            return True

    monkeypatch.setattr(guard, "TABLE_FUNCTIONS", Everything())


def refusal(sql: str, parser: Any) -> NotAllowed:
    with pytest.raises(NotAllowed) as caught:
        check(sql, parser)
    assert caught.value.expected
    return caught.value


# --- 1 and 2: one statement, and a SELECT ---------------------------------------------------------


class Scripted:
    """A parser that answers what it is told: each branch of `check`, whatever DuckDB says."""

    def __init__(self, *answers: list[tuple[str, Any]], tree: Any = None):
        self.answers = list(answers)
        self.asked: list[str] = []
        self.tree = tree

    def extract_statements(self, sql: str) -> list[Any]:
        self.asked.append(sql)
        kind = type("Statement", (), {})
        made = []
        for query, statement_type in self.answers.pop(0):
            one = kind()
            one.query, one.type = query, statement_type
            made.append(one)
        return made

    def execute(self, _sql: str, _params: list[str]) -> Any:
        tree = self.tree
        return type("Row", (), {"fetchone": lambda _self: tree})()


SELECT = duckdb.StatementType.SELECT
PLAIN = (json.dumps({"error": False, "statements": [{}]}),)


@pytest.mark.parametrize(
    ("answers", "got"),
    [
        ([[]], "0 statements"),
        ([[("a", SELECT), ("b", SELECT)]], "2 statements"),
        ([[("a", duckdb.StatementType.INSERT)]], "INSERT statement"),
        ([[("a", SELECT)], []], "several"),
        ([[("a", SELECT)], [("a", SELECT), ("b", SELECT)]], "several"),
        ([[("a", SELECT)], [("a", duckdb.StatementType.DELETE)]], "several"),
    ],
)
def test_every_branch_of_the_first_three_layers(answers: Any, got: str) -> None:
    assert got in refusal("select 1", Scripted(*answers, tree=PLAIN)).got


def test_what_passes_them_is_the_statement_itself() -> None:
    parser = Scripted([("select 1 ;", SELECT)], [("x", SELECT)], tree=PLAIN)
    assert check("select 1 ;", parser).text == "select 1 "  # type: ignore[arg-type]
    assert parser.asked[1].startswith("SELECT * FROM (\nselect 1 \n)")


@pytest.mark.parametrize(
    "tree",
    [
        None,
        (json.dumps({"error": True, "error_message": "no"}),),
        (json.dumps({"error": False, "statements": []}),),
        (json.dumps({"error": False, "statements": [{}, {}]}),),
        (json.dumps({"error": False}),),
    ],
)
def test_a_statement_without_one_tree_is_refused(tree: Any) -> None:
    scripted = Scripted([("select 1", SELECT)], [("select 1", SELECT)], tree=tree)
    assert "not supported" in str(refusal("select 1", scripted))


@pytest.mark.parametrize(
    ("sql", "got"),
    [
        ("select 1; select 2", "2 statements"),
        ("", "0 statements"),
        (";", "0 statements"),
        ("drop table t", "DROP statement"),
        ("delete from t", "DELETE statement"),
        ("update t set a = 1", "UPDATE statement"),
        ("insert into t select 1", "INSERT statement"),
        ("create table t as select 1", "CREATE statement"),
        ("copy (select 1) to 'x'", "COPY statement"),
        ("attach 'x' as y", "ATTACH statement"),
        ("set threads = 4", "SET statement"),
        ("pragma database_list", "PRAGMA statement"),
        ("explain select 1", "EXPLAIN statement"),
        ("load httpfs", "LOAD statement"),
        ("begin", "TRANSACTION statement"),
    ],
)
def test_statements_are_refused_by_their_kind(
    parser: Any, no_names: None, sql: str, got: str
) -> None:
    assert refusal(sql, parser).got == got


# --- 3: as a subquery -----------------------------------------------------------------------------


def test_wrapping_alone_keeps_a_query_from_writing() -> None:
    """Nothing is checked and DuckDB may do everything: what runs wrapped still changes nothing."""
    connection = duckdb.connect(":memory:")
    connection.execute("create table t as select 1 as a")
    for sql in (
        "drop table t",
        "delete from t",
        "insert into t values (2)",
        "with x as (delete from t returning *) select * from x",
        "with x as (insert into t values (2) returning *) select * from x",
        "update t set a = 5 returning *",
        "copy t to '/dev/null'",
        "set threads = 1",
        "create table u as select 1",
    ):
        with pytest.raises(duckdb.Error):
            connection.execute(CheckedQuery(sql, frozenset()).wrapped(10))
        assert connection.execute("select * from t").fetchall() == [(1,)]
    assert connection.execute("show tables").fetchall() == [("t",)]


def test_wrapping_limits_rows() -> None:
    connection = duckdb.connect(":memory:")
    wrapped = CheckedQuery("select * from range(100) -- all", frozenset()).wrapped(7)
    assert len(connection.execute(wrapped).fetchall()) == 7


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("select ';' as \"a;b\" ; -- c;", "select ';' as \"a;b\" "),
        ("select 1", "select 1"),
        ("select /* ; é */ 'é;' ; ", "select /* ; é */ 'é;' "),
    ],
)
def test_the_semicolon_goes_and_nothing_else(parser: Any, sql: str, text: str) -> None:
    assert check(sql, parser).text == text


# --- 4: table functions ---------------------------------------------------------------------------


def test_of_all_table_functions_only_those_on_the_list_are_allowed(
    parser: Any, no_denied: None
) -> None:
    """Every one that this DuckDB has, by its own account; the other lists are off."""
    names = {
        str(row[0]).lower()
        for row in parser.execute(
            "select distinct function_name from duckdb_functions()"
            " where function_type in ('table', 'table_macro', 'pragma')"
        ).fetchall()
    }
    names |= {"read_csv", "read_text", "glob", "query", "sqlite_scan", "not_known_yet"}
    assert len(names) > 60
    for name in sorted(names - TABLE_FUNCTIONS):
        found = refusal(f"""select * from "{name}"('x')""", parser)
        assert found.got == name and "table function" in str(found), name
    for name in TABLE_FUNCTIONS:
        assert check(f"select * from {name}(3)", parser).tables == frozenset()


@pytest.mark.parametrize(
    "sql",
    [
        "select * from READ_TEXT('x')",
        "from read_text('x')",
        "select * from system.main.read_text('x')",
        "select * from range(3) r, lateral (select * from read_text('x'))",
        "select (select content from read_text('x'))",
        "select 1 where exists (from read_text('x'))",
        "with a as (from read_text('x')) select * from a",
        "select * from range(3) union all select content from read_text('x')",
        "select * from (select * from (select * from read_text('x')))",
        "select 1 in (select content from read_text('x'))",
        "select * from range(1) join read_text('x') on true",
    ],
)
def test_table_functions_are_found_wherever_they_stand(
    parser: Any, no_denied: None, sql: str
) -> None:
    assert refusal(sql, parser).got == "read_text"


def test_a_function_of_values_is_no_table_function(parser: Any, no_denied: None) -> None:
    check("select read_text, md5('x'), range(3) from (select 1 as read_text)", parser)


# --- 5: functions by name -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("current_setting", "getenv", "query", "query_table", "write_log", "nextval", "currval"),
        *("json_execute_serialized_sql", "json_serialize_plan", "glob", "force_checkpoint"),
        *("from_substrait", "from_substrait_json", "getvariable", "which_secret"),
        *("read_csv", "read_x", "parquet_metadata", "arrow_scan", "pandas_scan", "python_x"),
        *("sniff_csv", "duckdb_settings", "pragma_version", "seq_scan", "index_scan", "load_x"),
        *("export_x", "copy_x", "enable_logging", "disable_logging", "truncate_duckdb_logs"),
    ],
)
def test_functions_are_refused_by_name(parser: Any, any_table_function: None, name: str) -> None:
    for sql in (f"select {name}('x')", f"select * from {name}('x')", f"select {name.upper()}(1)"):
        found = refusal(sql, parser)
        assert found.got == name and "not allowed" in str(found)


def test_functions_of_values_are_fine(parser: Any) -> None:
    check(
        "select sum(a), upper('x'), regexp_replace('a', 'b', 'c'), copyx(1), reader(2) from t",
        parser,
    )


# --- what it reads --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("select 1", set()),
        ("select * from Trajectories", {("", "trajectories")}),
        ('select * from "My-Data".Steps s', {("my-data", "steps")}),
        ("select * from a join b using (x), c", {("", "a"), ("", "b"), ("", "c")}),
        (
            "select (select 1 from x.steps) from a where 1 in (from b)",
            {("x", "steps"), ("", "a"), ("", "b")},
        ),
        ("with q as (select * from a) select * from q", {("", "a"), ("", "q")}),
        ("select * from a union (select * from b)", {("", "a"), ("", "b")}),
    ],
)
def test_the_tables_it_names(parser: Any, sql: str, tables: set[tuple[str, str]]) -> None:
    assert check(sql, parser).tables == tables


# --- 6: DuckDB's settings -------------------------------------------------------------------------


@pytest.fixture
def closed(tmp_path: Path) -> Any:
    """A connection as the worker makes it, its door closed; no guard, no sandbox."""
    (tmp_path / "secret").write_text("secret")
    connection = worker._connect(64 << 20)
    entry = {"columns": [["a", "INTEGER"]], "files": []}
    query_tables.make_tables(
        connection,
        frozenset({("", "t")}),
        {"tables": {"t": entry}, "datasets": {}, "lost": {}, "common": []},
        {"dataset": None, "form": "json"},
    )
    return connection


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_text('{folder}/secret')",
        "select * from read_csv('/etc/passwd')",
        "select * from glob('{folder}/*')",
        "select * from '{folder}/secret'",
        "copy (select 1) to '{folder}/new.csv'",
        "attach '{folder}/new.db' as x",
        "export database '{folder}/new'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "set lock_configuration = false",
        "set allowed_paths = ['/']",
        "set memory_limit = '64GB'",
        "reset memory_limit",
        "set temp_directory = '{folder}'",
        "create persistent secret s (type s3)",
        "select * from folder_in_python",
    ],
)
def test_settings_alone_refuse(closed: Any, tmp_path: Path, sql: str) -> None:
    folder_in_python = {"a": [1]}  # replacement scans look for such names in our frames
    before = sorted(tmp_path.iterdir())
    with pytest.raises(duckdb.Error):
        closed.execute(sql.replace("{folder}", str(tmp_path))).fetchall()
    assert sorted(tmp_path.iterdir()) == before and folder_in_python
    assert closed.execute("select * from t").fetchall() == []


def test_the_settings_are_what_they_should_be(closed: Any) -> None:
    wanted = {
        "enable_external_access": "false",
        "lock_configuration": "true",
        "allow_persistent_secrets": "false",
        "allow_community_extensions": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "python_enable_replacements": "false",
        "enable_progress_bar": "false",
        "max_expression_depth": "250",
        "temp_directory": "",
        "memory_limit": "64.0 MiB",
        "threads": "1",
        "async_threads": "1",
        "TimeZone": "UTC",
    }
    rows = closed.execute("select name, value from duckdb_settings()").fetchall()
    found = {name: str(value) for name, value in rows if name in wanted}
    assert found == wanted


def test_settings_alone_hold_the_memory(closed: Any) -> None:
    with pytest.raises(duckdb.Error, match="Memory"):
        closed.execute("select list(i) from range(100000000) t(i)").fetchall()
