"""Statements made to write, to read what is not theirs, or to hurt. Each gets a typed error.

The corpus runs against a service with data: afterwards not one file of it has changed, nothing
foreign was read, no answer names where the data lies, and the next honest query works.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.problems import ProblemError
from server.sandbox import environment
from stepwell.testing import make_spec, make_trajectory, wait_until

PROMISE = 0.5
"""Seconds after its deadline by which a query is answered; the test gives it five times as long."""
SECRET = "the-secret-that-nobody-may-read"

# {shard}, {data} and {secret} are real paths of the service under test.
WRITES = [
    "drop table trajectories",
    "drop view trajectories",
    "delete from trajectories",
    "update trajectories set env = 'x'",
    "insert into trajectories select * from trajectories",
    "create table x as select 1",
    "create or replace view trajectories as select 1",
    "create macro f(a) as a + 1",
    "create secret (type s3, key_id 'a', secret 'b')",
    "alter table trajectories add column x int",
    "truncate trajectories",
    "merge into trajectories using (select 1) on true when matched then delete",
    "copy trajectories to '{data}/x.csv'",
    "copy (select 1) to '{shard}' (format parquet, use_tmp_file false)",
    "copy (select 1) to '/dev/stdout'",
    "copy trajectories from '/etc/passwd'",
    "copy from database memory to other",
    "export database '{data}'",
    "import database '{data}'",
    "attach '{data}/x.db' as x",
    "attach '{data}/index.sqlite' as x (type sqlite)",
    "detach memory",
    "use memory",
    "checkpoint",
    "vacuum",
    "install httpfs",
    "load httpfs",
    "force install sqlite from community",
    "set enable_external_access = true",
    "set lock_configuration = false",
    "set threads = 64",
    "set memory_limit = '64GB'",
    "set allowed_paths = ['/etc/passwd']",
    "set variable x = 1",
    "reset memory_limit",
    "pragma database_list",
    "pragma memory_limit = '1TB'",
    "pragma enable_profiling",
    "call pragma_version()",
    "call enable_logging()",
    "begin",
    "begin; select 1; commit",
    "select 1; drop table trajectories",
    "select 1; select 2",
    "select 1) ; drop table trajectories; select * from (select 1",
    "select 1) as q limit 1; drop view trajectories; --",
    "with x as (insert into trajectories select * from trajectories returning *) select * from x",
    "with x as (delete from trajectories returning *) select * from x",
    "select * from (with x as (update trajectories set env='' returning *) select * from x)",
    "explain analyze copy (select 1) to '{data}/x.csv'",
    "explain analyze select 1",
    "explain select 1",
    "prepare p as select 1",
    "execute p",
    "deallocate p",
    "comment on view trajectories is 'x'",
    "",
    ";",
    "-- nothing",
    "select",
    "selec 1",
    "\x00",
]

READS = [
    "select * from read_csv('/etc/passwd')",
    "select * from read_csv_auto('/etc/passwd')",
    "select * from read_text('{secret}')",
    "select * from read_blob('{secret}')",
    "select * from read_json('{secret}')",
    "select * from read_parquet('{shard}')",
    "select * from read_parquet('{data}/shards/fifo/*.parquet')",
    "select * from parquet_metadata('{shard}')",
    "select * from parquet_file_metadata('{shard}')",
    "select * from parquet_schema('{shard}')",
    "select * from parquet_scan('{shard}')",
    "select * from glob('{data}/*')",
    "select * from sniff_csv('/etc/passwd')",
    "select * from '{secret}'",
    "select * from '{shard}'",
    "select * from '/etc/passwd'",
    'select * from "{secret}"',
    "select content from read_text('{data}/mirror/../../secret')",
    "select * from trajectories, lateral (select * from read_text('{secret}'))",
    "select (select content from read_text('{secret}'))",
    "select exists(from read_csv('/etc/passwd'))",
    "from read_text('{secret}')",
    "select * from query('select * from read_text(''{secret}'')')",
    "select * from query_table('/etc/passwd')",
    "select * from query_table(['trajectories', '{secret}'])",
    "select getenv('HOME')",
    "select current_setting('allowed_paths')",
    "select system.main.current_setting('allowed_paths')",
    "select 'allowed_paths'.current_setting()",
    "select * from duckdb_settings()",
    "select * from system.main.duckdb_settings()",
    "select * from duckdb_secrets()",
    "select * from duckdb_extensions()",
    "select * from pragma_database_size()",
    "select * from arrow_scan(1, 2, 3)",
    "select * from pandas_scan(140000000000)",
    "select * from arrow_scan_dumb(1::pointer, 2::pointer, 3::pointer)",
    "select * from python_map_function()",
    "select json_execute_serialized_sql('{{}}')",
    "select * from json_execute_serialized_sql(json_serialize_sql('select 1'))",
    "select write_log('x')",
    "select nextval('s')",
    "select * from sqlite_scan('{data}/index.sqlite', 'tokens')",
    "select * from postgres_scan('host=127.0.0.1', 'a', 'b')",
    "select * from read_csv('https://127.0.0.1/x.csv')",
    "select * from tokens",
    "select * from audit",
    "select * from jobs",
    "select * from memory.main.tokens",
    "select * from os",
    "select * from request",
    "pivot trajectories on env using count(*)",
    "select * from enable_logging('QueryLog', storage_path = '{data}')",
    "select * from test_vector_types(null)",
]

HURTS = [
    "select count(*) from range(100000000000) a, range(1000000) b",
    "with recursive r(n) as (select 1 union all select n + 1 from r) select count(*) from r",
    "select list(i) from range(10000000000) t(i)",
    "select string_agg(i::varchar, '') from range(10000000000) t(i)",
    "select length(repeat('x', 10000000000))",
    "select levenshtein(repeat('a', 200000), repeat('b', 200000))",
    "select " + "(" * 3000 + "1" + ")" * 3000,
    "select " + "+".join(["1"] * 40_000),
    "select range(10000000000)",
    "select count(*) from (select unnest(range(10000000)) from range(1000000))",
    "select i, random() from range(10000000000) t(i) order by 2",
    "select count(distinct hash(i)) from range(10000000000) t(i)",
]


@pytest.fixture(scope="module")
def target(make_world: Callable[..., Any]) -> Iterator[Any]:
    world = make_world()
    spec = make_spec()
    world.create("plain", spec)
    world.post("plain", [make_trajectory(spec, seed=s) for s in range(3)])
    (world.service.settings.data.parent / "secret").write_text(SECRET)
    world.rows("select * from trajectories, runs, metrics, policies, evaluations, videos, workers")
    world.rows("select * from steps")
    before = fingerprint(world)
    yield world
    assert fingerprint(world) == before, "a hostile statement changed a file"
    assert world.rows("select count(*) from trajectories") == [[3]]
    assert world.rows("select count(*) from steps", dataset="plain") == [[18]]


def fingerprint(world: Any) -> dict[str, tuple[int, int]]:
    """Sizes and times of all files but those that the service itself writes from time to time."""
    root: Path = world.service.settings.data.parent
    own = {"mark", "base.json"}
    files = [p for p in root.rglob("*") if p.is_file() and "index.sqlite" not in p.name]
    files = [p for p in files if p.name not in own]
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in files}


def refused(world: Any, template: str, **options: Any) -> ProblemError:
    data: Path = world.service.settings.data
    locations = {
        "{data}": str(data),
        "{shard}": str(next((data / "shards/fifo").iterdir())),
        "{secret}": str(data.parent / "secret"),
    }
    sql = template
    for name, path in locations.items():
        sql = sql.replace(name, path)
    with pytest.raises(ProblemError) as caught:
        rows = world.rows(sql, **options)
        raise AssertionError(f"answered: {str(rows)[:300]}")
    error = caught.value
    told = f"{error.detail} {error.expected} {error.got}"
    assert SECRET not in told
    assert str(data) in sql or str(data) not in told, "the answer names where the data lies"
    return error


@pytest.mark.parametrize("sql", WRITES)
def test_writing_is_refused(target: Any, sql: str) -> None:
    error = refused(target, sql)
    assert error.status == 422
    assert error.code in ("sql_not_allowed", "sql_error")


@pytest.mark.parametrize("sql", READS)
def test_foreign_reading_is_refused(target: Any, sql: str) -> None:
    error = refused(target, sql)
    assert error.status == 422
    assert error.code in ("sql_not_allowed", "sql_error")


@pytest.mark.parametrize("sql", HURTS, ids=lambda sql: sql[:50])
def test_harm_ends_at_the_deadline(target: Any, sql: str) -> None:
    wait_until(lambda: target.service.sql._callers._idle, what="an idle worker")
    began = time.monotonic()
    error = refused(target, sql, timeout=0.5)
    took = time.monotonic() - began
    assert error.status == 422
    assert error.code in ("query_timeout", "sql_error", "sql_not_allowed")
    assert took < 0.5 + 5 * PROMISE
    assert target.rows("select 7") == [[7]]


def test_no_result_names_where_the_data_lies(target: Any) -> None:
    """Everything that may be asked of DuckDB about itself, without one path in it."""
    for sql in (
        "show all tables",
        "select * from information_schema.tables",
        "select * from information_schema.columns",
        "select * from sqlite_master",
        "select * from pg_catalog.pg_class",
        "describe trajectories",
        "summarize trajectories",
        "select * from trajectories",
        "select * from duckdb_views",
        "select * from pragma_database_list",
    ):
        try:
            rows = target.rows(sql)
        except ProblemError as error:
            rows = [[error.detail]]
        assert str(target.service.settings.data) not in str(rows), sql


def test_without_the_guard_the_worker_still_cannot_write_or_read(target: Any) -> None:
    """The second line holds alone: a connection as the worker makes it, statements unchecked."""
    data = target.service.settings.data
    shard = next((data / "shards/fifo").iterdir())
    program = f"""
import os
os.chdir({str(data)!r})
from server.sandbox import confine, libraries
more = ["/proc/self/cgroup", "/sys/fs/cgroup", {str(data / "shards")!r}]
layers = confine([*libraries(), *more], address_space=3 << 30, cpu_seconds=60)
from server.sql import worker
connection = worker._connect(512 << 20)
connection.execute("SET allowed_paths = [{str(shard)!r}]")
connection.execute("SET enable_external_access = false")
connection.execute("SET lock_configuration = true")
done = []
for sql in (
    "copy (select 1) to {str(shard)!r} (format parquet, use_tmp_file false)",
    "copy (select 1) to {str(data / "new.csv")!r}",
    "attach {str(data / "new.db")!r} as x",
    "select * from read_text({str(data.parent / "secret")!r})",
    "set lock_configuration = false",
    "set allowed_paths = ['/']",
):
    try:
        connection.execute(sql).fetchall()
        done.append(sql)
    except Exception as error:
        assert "ermission" in str(error) or "annot" in str(error) or "ailed" in str(error), error
import sys
sys.stdout.write(repr((layers["files"], done)))
"""
    out = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.returncode == 0, out.stderr[-2000:]
    landlocked, succeeded = ast.literal_eval(out.stdout)
    # DuckDB alone lets a shard in allowed_paths be destroyed: that is what the kernel is for.
    assert succeeded == [] or (not landlocked and len(succeeded) == 1)
