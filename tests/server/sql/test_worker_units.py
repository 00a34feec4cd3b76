"""The parts of the SQL worker, called here in this process: frames, tables, answers, the guard."""

from __future__ import annotations

import base64
import datetime
import decimal
import io
import json
import math
import os
import resource
import signal
import struct
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from server.pipe_frames import read_frame, write_frame
from server.sql import catalog, guard, query_tables, selected_rows, worker
from server.sql.checked_files import CheckedFileSystem
from server.sql.guard import NotAllowed
from server.sql.worker import ArrowStream
from server.storage.checksums import BLOCK, CheckedFile, Corrupt, checksums_of
from stepwell._sql import literal, quoted
from stepwell.testing import make_spec, make_trajectory
from tests.shard_reading import write_trajectories

LONG = 60.0
ENDLESS = "select count(*) from range(100000000000) a, range(1000000) b"
ENDLESS_STREAM = "select i from range(100000000000) t(i) where hash(i) = 1"
LOST = {"ok": False, "code": "query_timeout", "detail": "stopped at its deadline"}
REFUSED = {"expected": "", "got": ""}

TRAJECTORIES = [
    *(["id", "VARCHAR"], ["dataset", "VARCHAR"], ["env", "VARCHAR"], ["length", "BIGINT"]),
    *(["tags", "VARCHAR[]"], ["traj_idx", "INTEGER"], ["_file", "VARCHAR"], ["_pk", "BIGINT"]),
]
METRICS = [["run", "VARCHAR"], ["value", "DOUBLE"]]
EVALUATIONS = [["id", "VARCHAR"], ["dataset", "VARCHAR"]]
HEAD = [["dataset", "VARCHAR", "t.dataset"], ["trajectory_id", "VARCHAR", "t.id"]]
TIME = ["t", "INTEGER", "s.t"]
KNOWN = ["dataset", "env", "length", "tags"]
FLOATS, SIGNED = ("float16", "float32", "float64"), ("int8", "int16", "int32", "int64")
DTYPES = ("bool", *FLOATS, *SIGNED, "uint8", "uint16", "uint32")


class Store:
    """A data directory with a few small files, and what a worker knows of it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = CheckedFileSystem()
        self.checksums: dict[str, str] = {}

    def put(self, path: str, content: bytes) -> str:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(content)
        self.checksums[path] = base64.b64encode(checksums_of(content)).decode()
        self.files.learn({path: self.checksums[path]})
        return path

    def parquet(self, path: str, columns: dict[str, pa.Array]) -> str:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table(columns), sink)
        return self.put(path, sink.getvalue().to_pybytes())

    def shard(self, path: str, locations: list[tuple[int, int]], speed: pa.DataType) -> str:
        """A row for each (traj_idx, t); its speed is ten times the one and the other."""
        return self.parquet(
            path,
            {
                "traj_idx": pa.array([i for i, _ in locations], pa.int32()),
                "t": pa.array([t for _, t in locations], pa.int32()),
                "obs.speed": pa.array([10 * i + t for i, t in locations], speed),
            },
        )


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.chdir(tmp_path)
    return Store(tmp_path)


@pytest.fixture
def tables(store: Store) -> dict[str, Any]:
    """A catalog: `plain` and `wide` have steps of other types, `empty` has none, `main` is a name
    that DuckDB keeps; the trajectory with number 1 in the shard of `plain` is dead."""
    p, w, m = (f"shards/fifo/{name}.parquet" for name in "pwm")
    rows: list[tuple[Any, ...]] = [
        ("a1", "plain", "E", 2, ["x"], 0, p, 11),
        ("a2", "plain", "E", 3, [], 2, p, 12),
        ("a3", "plain", "F", 4, [], None, None, 13),
        ("b1", "wide", "E", 5, ["x", "y"], 0, w, 21),
        ("m1", "main", "E", 6, [], 0, m, 31),
    ]
    kinds = {"BIGINT": pa.int64(), "INTEGER": pa.int32(), "VARCHAR[]": pa.list_(pa.string())}
    columns = dict(zip([n for n, _ in TRAJECTORIES], zip(*rows, strict=True), strict=True))
    columns["_file"] = tuple(f and f"stored://{f}" for f in columns["_file"])
    listed = store.parquet(
        "mirror/trajectories.parquet",
        {n: pa.array(columns[n], kinds.get(k, pa.string())) for n, k in TRAJECTORIES},
    )
    store.shard(p, [(0, 0), (0, 1), (1, 0), (2, 0)], pa.float64())
    store.shard(w, [(0, 0), (2, 0)], pa.float32())
    store.shard(m, [(0, 0)], pa.float64())
    metrics = {"run": pa.array(["r", "r"]), "value": pa.array([1.0, 2.0])}
    other = {"id": pa.array(["e1", "e2"]), "dataset": pa.array(["plain", "wide"])}
    speed = 'CAST(s."obs.speed" AS DOUBLE)'
    return {
        "tables": {
            "trajectories": {"columns": TRAJECTORIES, "files": [listed]},
            "metrics": {
                "columns": METRICS,
                "files": [store.parquet("mirror/it's.parquet", metrics)],
            },
            "evaluations": {
                "columns": EVALUATIONS,
                "files": [store.parquet("mirror/evaluations.parquet", other)],
            },
            "runs": {"columns": [["name", "VARCHAR"], ["_pk", "BIGINT"]], "files": []},
        },
        "datasets": {
            "empty": {"columns": [*HEAD], "files": [], "most_rows": 0, "excluded": [["e1", 4]]},
            "main": {
                "columns": [*HEAD, TIME, ["speed", "DOUBLE", speed]],
                "files": [m],
                "most_rows": 1,
                "excluded": [],
            },
            "plain": {
                "columns": [*HEAD, TIME, ["speed", "DOUBLE", speed]],
                "files": [p],
                "most_rows": 4,
                "excluded": [["lost", 7], ["gone", 1]],
            },
            "wide": {
                "columns": [
                    *HEAD,
                    ["speed", "FLOAT", 's."obs.speed"'],
                    TIME,
                    ["more", "INTEGER", "1"],
                ],
                "files": [w],
                "most_rows": 2,
                "excluded": [["bad", 2]],
            },
        },
        "whole": True,
        "lost": {},
        "common": [["dataset", "VARCHAR"], ["t", "INTEGER"], ["reward", "FLOAT"]],
    }


@pytest.fixture
def connect(store: Store) -> Iterator[Callable[[], Any]]:
    """Connections as the worker makes them, closed when the test ends."""
    made: list[Any] = []

    def make() -> Any:
        made.append(worker._connect(256 << 20, store.files))
        return made[-1]

    yield make
    for connection in made:
        connection.close()


def box(shape: list[int], dtype: str = "float32", **bounds: Any) -> dict[str, Any]:
    return {"type": "Box", "shape": shape, "dtype": dtype, **bounds}


def request(sql: str, **fields: Any) -> dict[str, Any]:
    values = {"params": None, "limit": 1000, "max_bytes": 1 << 20, "seconds": LONG}
    return {"sql": sql, "form": "json", "dataset": None, "only": None, **values, **fields}


NOTHING: dict[str, Any] = {
    **{"tables": {}, "datasets": {}, "whole": True},
    "lost": {},
    "common": [["t", "INTEGER"]],
}
Ask = Callable[..., tuple[dict[str, Any], Any]]


class Instead:
    """Something with a few of its attributes replaced, for those alone who are given this."""

    def __init__(self, thing: Any, **attributes: Any):
        self._thing = thing
        self.__dict__ |= attributes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, name)


@pytest.fixture
def ask(parser: Any, connect: Callable[[], Any]) -> Ask:
    def ask(sql: str, catalog: Any = NOTHING, rows: bytes = b"", **fields: Any) -> Any:
        return worker._answer(request(sql, **fields), rows, catalog, parser, connect())

    return ask


def loaded(payload: ArrowStream) -> pa.Table:
    return pa.ipc.open_stream(raw_of(payload)).read_all()


def raw_of(payload: ArrowStream) -> bytes:
    sink = io.BytesIO()
    payload.write_to(sink)
    return sink.getvalue()


def rows_of(answer: tuple[dict[str, Any], Any]) -> Any:
    """Of an answer in JSON or Arrow, which must be one."""
    header, payload = answer
    assert header["ok"], header
    if isinstance(payload, ArrowStream):
        return [list(row.values()) for row in loaded(payload).to_pylist()]
    return json.loads(bytes(payload))


# --- frames ---------------------------------------------------------------------------------------


class Sink(io.BytesIO):
    """Counts how often it is flushed."""

    flushed = 0

    def flush(self) -> None:
        self.flushed += 1


def small_table() -> pa.Table:
    return pa.table({"a": pa.array([1, 2, 3]), "b": ["x", "y", "z"]}).replace_schema_metadata(
        {"k": "v"}
    )


@pytest.mark.parametrize("payload", [b"", b"abc", memoryview(b"abcd")])
def test_a_frame_is_written_as_the_description_says(payload: Any) -> None:
    sink = Sink()
    write_frame(sink, {"ok": True}, payload)
    head = json.dumps({"ok": True, "bytes": len(payload)}).encode()
    assert sink.getvalue() == len(head).to_bytes(4, "big") + head + bytes(payload)
    assert sink.flushed == 1


def test_a_frame_has_no_payload_unless_one_is_given() -> None:
    sink = Sink()
    write_frame(sink, {"a": [1]})
    sink.seek(0)
    assert read_frame(sink) == ({"a": [1], "bytes": 0}, b"")
    assert read_frame(sink) is None


def test_frames_follow_one_another() -> None:
    sink = Sink()
    table = ArrowStream(small_table())
    write_frame(sink, {"n": 1, "bytes": 77}, b"12345")
    write_frame(sink, {"n": 2}, table)
    write_frame(sink, {"n": 3}, memoryview(b"678"))
    sink.seek(0)
    assert read_frame(sink) == ({"n": 1, "bytes": 5}, b"12345")
    assert read_frame(sink) == ({"n": 2, "bytes": len(table)}, raw_of(table))
    assert read_frame(sink) == ({"n": 3, "bytes": 3}, b"678")
    assert read_frame(sink) is None


def test_a_header_that_names_no_bytes_has_no_payload() -> None:
    source = io.BytesIO(struct.pack(">I", 8) + b'{"a": 1}' + b"rest")
    assert read_frame(source) == ({"a": 1}, b"")
    assert source.read() == b"rest"


def test_an_end_inside_a_frame_is_no_end() -> None:
    sink = Sink()
    write_frame(sink, {"n": 1}, b"12345")
    whole = sink.getvalue()
    for end in range(1, len(whole)):
        with pytest.raises(EOFError, match="^the stream ended inside a frame$"):
            read_frame(io.BytesIO(whole[:end]))
    assert read_frame(io.BytesIO(whole)) == ({"n": 1, "bytes": 5}, b"12345")


def test_a_stream_of_arrow_knows_its_length() -> None:
    for table in (small_table(), small_table().slice(0, 0), pa.table({"a": range(100_000)})):
        stream = ArrowStream(table)
        raw = raw_of(stream)
        assert len(stream) == len(raw) > 0
        assert type(len(stream)) is int
        found = loaded(stream)
        assert found.equals(table) and found.schema.metadata == table.schema.metadata
        assert raw_of(stream) == raw, "it can be written again"


def test_an_error_shows_no_path_of_the_installation() -> None:
    """What our own file system raises inside DuckDB comes with its traceback."""
    text = 'Traceback (most recent call last):\n  File "/opt/x.py", line 1\nOSError: a is damaged\n'
    assert worker._clean(RuntimeError(text)) == "OSError: a is damaged"


# --- the process ----------------------------------------------------------------------------------


def test_memory_is_what_the_kernel_says() -> None:
    page = resource.getpagesize()
    statm = io.BytesIO(b"100 21 32 43 54 65 76\n")
    assert worker._memory(statm) == (21 * page, 65 * page)
    assert worker._memory(statm) == (21 * page, 65 * page), "from the beginning each time"
    assert worker._memory(None) == (96 * 1024 * 1024, 0)


@pytest.mark.parametrize(
    ("hard", "most", "wanted"),
    [(resource.RLIM_INFINITY, 100, 100), (50, 100, 50), (200, 100, 100)],
)
def test_the_limit_never_grows(
    monkeypatch: pytest.MonkeyPatch, hard: int, most: int, wanted: int
) -> None:
    asked: list[Any] = []

    def getrlimit(which: int) -> tuple[int, int]:
        asked.append(which)
        return (7, hard)

    fake = Instead(resource, getrlimit=getrlimit, setrlimit=lambda *given: asked.append(given))
    monkeypatch.setattr(worker, "resource", fake)
    worker._limit_data(most)
    assert asked == [resource.RLIMIT_DATA, (resource.RLIMIT_DATA, (wanted, wanted))]


MIB = 1 << 20
ROOM = 200 * MIB


class Played:
    """`main` with everything faked that would change this process; what it did, in order."""

    platform = "linux"

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.did: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.catalogs: list[Any] = []
        self.closed = 0
        self.out = Sink()
        self.folder = folder
        self.confined = {"files": True, "calls": False}
        patch = monkeypatch.setattr
        monkeypatch.chdir(folder.parent)  # and back, when the test ends
        patch(worker, "open", self._open, raising=False)
        patch(worker, "confine", self._confine)
        patch(worker, "libraries", lambda: ["/one", "/two"])
        patch(worker, "_memory", self._memory)
        patch(worker, "_limit_data", lambda most: self.did.append(("limit", most)))
        patch(worker, "_connect", self._connect)
        patch(worker, "_answer", self._answer)
        did = self.did.append
        fakes = {
            "dup": lambda number: did(("dup", number)) or 77,
            "dup2": lambda *given: did(("dup2", *given)),
            "fdopen": self._fdopen,
        }
        patch(worker, "os", Instead(os, **fakes))
        timer = Instead(signal, setitimer=lambda *given: did(("timer", *given)))
        patch(worker, "signal", timer)
        self._patch = patch

    def run(self, *frames: tuple[dict[str, Any], bytes]) -> list[tuple[dict[str, Any], bytes]]:
        source, memory = io.BytesIO(), 10 * MIB + 8 * MIB + ROOM
        for header, payload in frames:
            write_frame(source, header, payload)
        source.seek(0)
        stdin = SimpleNamespace(buffer=source)
        self._patch(worker, "sys", Instead(sys, stdin=stdin, platform=self.platform))
        assert worker.main([str(self.folder), str(memory)]) == 0
        self.out.seek(0)
        answers = []
        while (frame := read_frame(self.out)) is not None:
            answers.append(frame)
        return answers

    def _open(self, *given: Any, **options: Any) -> Any:
        self.did.append(("open", *given, options))
        return "statm"

    def _confine(self, *given: Any, **options: Any) -> Any:
        self.did.append(("confine", *given, options, os.getcwd()))
        return self.confined

    def _memory(self, statm: Any) -> tuple[int, int]:
        assert statm == "statm"
        return 10 * MIB, 7 * MIB

    def _connect(self, memory: int, files: Any = None) -> Any:
        self.did.append(("connect", memory))
        connection = REAL_CONNECT(memory, files)

        def close() -> None:
            self.closed += 1
            connection.close()

        return Instead(connection, close=close)

    def _answer(self, asked: Any, rows: Any, known: Any, parser: Any, connection: Any) -> Any:
        self.requests.append({**asked, "rows": rows})
        self.catalogs.append(known)
        self.did.append("answer")
        return REAL_ANSWER(asked, rows, known, parser, connection)

    def _fdopen(self, *given: Any) -> Any:
        self.did.append(("fdopen", *given))
        return self.out


REAL_CONNECT, REAL_ANSWER = worker._connect, worker._answer


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    (tmp_path / "data").mkdir()
    return Played(tmp_path / "data", monkeypatch)


def test_the_program_gives_up_its_rights_first(played: Played) -> None:
    data = str(played.folder)
    answers = played.run((request("select 1", seconds=5), b""))
    header, payload = answers[1]
    assert answers[0] == ({"ok": True, "confined": played.confined, "bytes": 0}, b"")
    assert header["ok"] and payload == b"[[1]]" and len(answers) == 2
    locations = ["/one", "/two", f"{data}/shards", f"{data}/mirror", f"{data}/annotations"]
    locations += ["/proc/self/cgroup", "/sys/fs/cgroup"]
    limits = {"address_space": (3 << 30) + 218 * MIB, "cpu_seconds": 3600}
    assert played.did == [
        ("open", "/proc/self/statm", "rb", {"buffering": 0}),
        ("confine", locations, limits, data),
        *(("dup", 1), ("fdopen", 77, "wb"), ("dup2", 2, 1)),
        *(("connect", 140 * MIB), ("limit", 207 * MIB)),
        *(("timer", signal.ITIMER_REAL, 7.0), "answer", ("timer", signal.ITIMER_REAL, 0)),
        ("connect", 140 * MIB),
    ]
    assert played.closed == 1


def test_without_proc_nothing_is_opened(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    played.platform = "other"
    asked: list[Any] = []
    monkeypatch.setattr(worker, "_memory", lambda statm: asked.append(statm) or (10 * MIB, 0))
    assert played.run() == [({"ok": True, "confined": played.confined, "bytes": 0}, b"")]
    assert played.did[0][0] == "confine" and asked == [None, None]


def test_the_program_remembers_tables_and_checksums(
    tables: dict[str, Any], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until others come. Each answer is cut at half of the room that there is."""
    played = Played(store.folder, monkeypatch)
    sql = "select id from trajectories order by id"
    frames = [
        request(sql, catalog=tables, checksums=store.checksums, max_bytes=1 << 40),
        request(sql, max_bytes=500),
        request(sql, forget=["mirror/trajectories.parquet"]),
        request("select count(*) from metrics", max_bytes=ROOM // 2 + 1),
        request("select * from nothing", catalog=NOTHING),
        request(sql, form="rows", known=KNOWN, catalog=tables, checksums=store.checksums),
    ]
    changed = stream_of({"id": pa.array([4])})
    answers = played.run(*[(one, changed if one["form"] == "rows" else b"") for one in frames])[1:]
    ids = [["a1"], ["a2"], ["a3"], ["b1"], ["m1"]]
    assert [json.loads(payload) for _, payload in answers[:2]] == [ids, ids]
    assert answers[2][0]["code"] == "sql_error"
    assert answers[3][1] == b"[[2]]"
    assert answers[4][0]["code"] == "sql_error"
    assert pa.ipc.open_stream(answers[5][1]).read_all().to_pydict() == {"row": [4]}
    assert [one["max_bytes"] for one in played.requests] == [
        *(ROOM // 2, 500, 1 << 20, ROOM // 2, 1 << 20, 1 << 20)
    ]
    assert [one["rows"] for one in played.requests] == [b""] * 5 + [changed]
    assert played.catalogs == [tables] * 4 + [NOTHING, tables]
    assert played.closed == 6


def test_before_any_catalog_there_is_no_table(played: Played) -> None:
    assert played.run((request("select 1"), b""))[1][1] == b"[[1]]"
    assert played.catalogs == [{"tables": {}, "datasets": {}, "lost": {}}]


def test_the_program_names_damaged_files_and_goes_on(
    tables: dict[str, Any], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no answer then, not even half of one; the next query starts afresh."""
    for path in ("mirror/trajectories.parquet", "mirror/evaluations.parquet"):
        file = store.folder / path
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    played = Played(store.folder, monkeypatch)
    sqls = ["select * from trajectories", "select * from evaluations", "select 5"]
    frames = [(request(sql), b"") for sql in sqls]
    frames[0][0].update(catalog=tables, checksums=store.checksums)
    answers = played.run(*frames)[1:]
    assert answers[:2] == [
        ({"ok": False, "damaged": ["mirror/trajectories.parquet"], "bytes": 0}, b""),
        ({"ok": False, "damaged": ["mirror/evaluations.parquet"], "bytes": 0}, b""),
    ]
    assert answers[2][1] == b"[[5]]"


def test_a_connection_is_made_with_these_settings(store: Store) -> None:
    store.files.damaged.add("earlier")
    connection = worker._connect((77 << 20) + 5, store.files)
    wanted = {
        "memory_limit": "77.0 MiB",
        "temp_directory": "",
        "allow_persistent_secrets": "false",
        "allow_community_extensions": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "python_enable_replacements": "false",
        "max_expression_depth": "250",
        "enable_progress_bar": "false",
        "TimeZone": "UTC",
        "threads": "1",
        "async_threads": "1",
    }
    rows = connection.execute("select name, value from duckdb_settings()").fetchall()
    assert {name: str(value) for name, value in rows if name in wanted} == wanted
    assert store.files.damaged == set()
    assert connection.list_filesystems() == ["stored"]
    assert connection.execute("select current_database()").fetchall() == [("memory",)]
    connection.close()
    bare = worker._connect(77 << 20)
    assert bare.list_filesystems() == []
    bare.close()


# --- answers --------------------------------------------------------------------------------------


def test_an_answer_in_json(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "time", ticking())
    header, payload = ask("select 1 as a, 'x' as \"b c\", 2::hugeint as h from range(2)")
    assert header == {
        "ok": True,
        "columns": [
            {"name": "a", "type": "INTEGER"},
            {"name": "b c", "type": "VARCHAR"},
            {"name": "h", "type": "HUGEINT"},
        ],
        "rows": 2,
        "truncated": False,
        "excluded": [],
        "elapsed_ms": 250.0,
    }
    assert bytes(payload) == b'[[1, "x", 2],[1, "x", 2]]'


def ticking() -> SimpleNamespace:
    """A clock that is a quarter of a second further each time it is asked."""
    times = iter([100.0 + tick / 4 for tick in range(100)])
    return SimpleNamespace(perf_counter=lambda: next(times))


def test_an_answer_in_arrow(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "time", ticking())
    header, payload = ask("select i, i * 2 as j from range(3) t(i)", form="arrow", limit=2)
    assert header == {
        "ok": True,
        "columns": [{"name": "i", "type": "BIGINT"}, {"name": "j", "type": "BIGINT"}],
        "rows": 2,
        "truncated": True,
        "excluded": [],
        "elapsed_ms": 500.0,
    }
    table = loaded(payload)
    assert table.to_pydict() == {"i": [0, 1], "j": [0, 2]}
    assert table.schema.metadata == {
        b"truncated": b"true",
        b"elapsed_ms": b"250.000",
        b"excluded": b"[]",
    }


def test_the_metadata_of_arrow_tells_what_was_left_out(ask: Ask, tables: dict[str, Any]) -> None:
    left_out = [
        {"dataset": "plain", "file": "lost", "trajectories": 7},
        {"dataset": "plain", "file": "gone", "trajectories": 1},
    ]
    header, payload = ask("select * from steps", tables, form="arrow", dataset="plain")
    assert header["excluded"] == left_out
    metadata = loaded(payload).schema.metadata
    assert metadata[b"truncated"] == b"false"
    assert json.loads(metadata[b"excluded"]) == left_out


@pytest.mark.parametrize("form", ["json", "arrow"])
@pytest.mark.parametrize(
    ("count", "limit", "rows", "cut"),
    [
        *((10, 11, 10, False), (10, 10, 10, False), (10, 9, 9, True), (11, 10, 10, True)),
        *((1, 0, 0, True), (0, 0, 0, False), (0, 5, 0, False), (5000, 5000, 5000, False)),
        *((2048, 2048, 2048, False), (2049, 2048, 2048, True), (4097, 4096, 4096, True)),
        *((5000, 2049, 2049, True), (5000, 2047, 2047, True), (5000, 3, 3, True)),
    ],
)
def test_exactly_the_limit_is_all(
    ask: Ask, form: str, count: int, limit: int, rows: int, cut: bool
) -> None:
    answer = ask(f"select * from range({count})", form=form, limit=limit)
    assert (answer[0]["rows"], answer[0]["truncated"]) == (rows, cut)
    assert rows_of(answer) == [[i] for i in range(rows)]


def test_json_is_cut_where_it_would_grow_too_long(ask: Ask) -> None:
    one = "select 'é' || repeat('x', 90)"
    size = len(rows_bytes(ask(one)))
    assert ask(one, max_bytes=size)[0]["truncated"] is False
    header, payload = ask(one, max_bytes=size - 1)
    assert (header["rows"], header["truncated"], bytes(payload)) == (0, True, b"[]")
    many = "select i from range(10, 30) t(i)"
    whole = rows_bytes(ask(many))
    assert len(whole) == 20 * 5 + 1
    for most in (30, 50, 102):
        header, payload = ask(many, max_bytes=most)
        assert bytes(payload)[:-1] == whole[: len(payload) - 1] and bytes(payload)[-1:] == b"]"
        assert most - 5 <= len(payload) <= most + 1
        assert header["truncated"] is (most < 102)
        assert header["rows"] == len(json.loads(bytes(payload))) == (len(payload) - 1) // 5


def rows_bytes(answer: tuple[dict[str, Any], Any]) -> bytes:
    assert answer[0]["ok"] and not answer[0]["truncated"]
    return bytes(answer[1])


def test_arrow_is_cut_by_whole_batches(ask: Ask, connect: Callable[[], Any]) -> None:
    sql = "select i from range(6000) t(i)"
    sizes = [batch.nbytes for batch in connect().sql(sql).to_arrow_reader(2048)]
    assert len(sizes) == 3
    for most, rows, cut in (
        (sum(sizes), 6000, False),
        (sum(sizes) - 1, 4096, True),
        (sizes[0] + sizes[1], 4096, True),
        (sizes[0] + sizes[1] - 1, 2048, True),
        (sizes[0] - 1, 0, True),
    ):
        answer = ask(sql, form="arrow", limit=10_000, max_bytes=most)
        assert (answer[0]["rows"], answer[0]["truncated"]) == (rows, cut)
        assert rows_of(answer) == [[i] for i in range(rows)]
    batches = list(pa.ipc.open_stream(raw_of(ask(sql, form="arrow", limit=10_000)[1])))
    assert [batch.num_rows for batch in batches] == [2048, 2048, 1904]


@pytest.mark.parametrize("form", ["json", "arrow"])
@pytest.mark.parametrize(
    ("sql", "params", "row"),
    [
        ("select ?::int + ?::int, ?", [4, 5, "x"], [9, "x"]),
        ("select $2::int, $1::int", [1, 2], [2, 1]),
        ("select $name || '!', $n::int", {"name": "a'b", "n": 3}, ["a'b!", 3]),
        ("select 1", [], [1]),
        ("select 1", {}, [1]),
        ("select ?::int is null", [None], [True]),
    ],
)
def test_parameters(ask: Ask, form: str, sql: str, params: Any, row: list[Any]) -> None:
    assert rows_of(ask(sql, form=form, params=params)) == [row]


def test_parameters_also_where_times_have_a_zone(ask: Ask) -> None:
    sql = "select timestamptz '2026-02-01 03:04:05+02' + to_hours($h::int) as a, $h::int as b"
    assert rows_of(ask(sql, params={"h": 2})) == [["2026-02-01 03:04:05+00", 2]]


def test_a_request_without_parameters(parser: Any, connect: Callable[[], Any]) -> None:
    asked = request("select 3")
    del asked["params"], asked["dataset"], asked["only"]
    assert rows_of(worker._answer(asked, b"", NOTHING, parser, connect())) == [[3]]


@pytest.mark.parametrize("form", ["json", "arrow"])
@pytest.mark.parametrize(
    ("sql", "code", "detail"),
    [
        ("select nope", "sql_error", "nope"),
        ("selec 1", "sql_error", "syntax error"),
        ("select error('my words')", "sql_error", "my words"),
        ("select ?", "sql_error", "arameter"),
        ("select 'x'::int", "sql_error", "Conversion"),
        ("select * from 'x.parquet'", "sql_not_allowed", 'Cannot access file "x.parquet"'),
        (
            "with x as (delete from t returning *) select * from x",
            "sql_not_allowed",
            "data-modifying",
        ),
    ],
)
def test_what_duckdb_says(ask: Ask, form: str, sql: str, code: str, detail: str) -> None:
    header, payload = ask(sql, form=form)
    assert detail in header.pop("detail")
    assert header == {"ok": False, "code": code, **REFUSED}
    assert payload == b""


@pytest.mark.parametrize("table", ["nope", "trajectory", "nope.steps", "main.trajectorie"])
def test_only_tables_of_the_catalog_are_suggested(
    ask: Ask, tables: dict[str, Any], table: str
) -> None:
    """DuckDB would suggest its own, such as pg_enum."""
    header, _ = ask(f"select * from {table}", tables)
    assert (header["code"], "Did you mean" in header["detail"]) == ("sql_error", False)
    assert table.split(".")[-1] in header["detail"]
    known = "evaluations, metrics, runs, steps, trajectories"
    assert header["expected"] == f'one of {known}, "DATASET".steps'


def test_functions_are_suggested_by_duckdb(ask: Ask) -> None:
    header, _ = ask("select summ(1)")
    assert 'Did you mean "sum"' in header["detail"] and header["expected"] == ""


def test_what_the_guard_says(ask: Ask) -> None:
    assert ask("drop table t") == (
        {
            "ok": False,
            "code": "sql_not_allowed",
            "detail": "only SELECT can be run",
            "expected": "one SELECT statement",
            "got": "DROP statement",
        },
        b"",
    )
    header, payload = ask("select getenv('HOME')", form="arrow")
    assert (header["expected"], header["got"]) == ("functions of values", "getenv")
    assert (header["code"], payload) == ("sql_not_allowed", b"")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NotAllowed("no", expected="that", got="this"), ("sql_not_allowed", "no", "that", "this")),
        (duckdb.PermissionException("{cwd}/f"), ("sql_not_allowed", "f", "", "")),
        (duckdb.InterruptException("x"), ("query_timeout", "stopped at its deadline", "", "")),
        (duckdb.Error("{cwd}/f is bad"), ("sql_error", "f is bad", "", "")),
        (duckdb.Error("INTERRUPT Error"), ("query_timeout", "stopped at its deadline", "", "")),
        (OSError("an INTERRUPT"), ("query_timeout", "stopped at its deadline", "", "")),
        (OSError("in {cwd}"), ("sql_error", "in ", "", "")),
        (RuntimeError("r"), ("sql_error", "r", "", "")),
        (OverflowError("o"), ("sql_error", "o", "", "")),
        (ValueError("v"), ("sql_error", "v", "", "")),
        (ValueError("is data-modifying"), ("sql_not_allowed", "is data-modifying", "", "")),
        (MemoryError("{cwd}"), ("sql_error", "out of memory", "", "")),
    ],
)
def test_every_error_has_a_code(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, error: Exception, told: tuple[str, ...]
) -> None:
    error.args = tuple(str(arg).replace("{cwd}", os.getcwd()) for arg in error.args)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(guard, "check", fail)
    names = ("code", "detail", "expected", "got")
    assert ask("select 1") == ({"ok": False, **dict(zip(names, told, strict=True))}, b"")


def test_an_error_of_ours_is_not_hidden(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("a slip")

    monkeypatch.setattr(guard, "check", fail)
    with pytest.raises(KeyError):
        ask("select 1")


def test_nothing_tells_where_the_data_lies(store: Store, ask: Ask) -> None:
    place = str(store.folder)
    assert worker._clean(ValueError(f"{place}/shards/x or {place}, {place}/")) == "shards/x or , "
    header, _ = ask(f"select * from '{place}/index.parquet'")
    assert header["code"] == "sql_not_allowed"
    assert place not in header["detail"] and '"index.parquet"' in header["detail"]


def test_words_of_duckdb_have_an_end(store: Store, ask: Ask) -> None:
    assert worker._clean(ValueError(f"{store.folder}/" + "x" * 3000)) == "x" * 2000
    assert worker._clean(ValueError("y" * 2000)) == "y" * 2000
    header, _ = ask("select error(repeat('z', 5000))")
    assert len(header["detail"]) == 2000 and header["detail"].endswith("z" * 1900)


class Insistent:
    """A connection whose interruption is not lost when the query had not yet begun."""

    def __init__(self, connection: Any):
        self._connection = connection
        self.answered = threading.Event()
        self.interrupted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def interrupt(self) -> None:
        self.interrupted = True
        while not self.answered.wait(0.02):
            self._connection.interrupt()


@pytest.mark.parametrize(
    ("sql", "form"),
    [
        *((ENDLESS, "json"), (ENDLESS, "arrow"), (ENDLESS_STREAM, "json")),
        *((ENDLESS_STREAM, "arrow"), (f"select 1 as id from ({ENDLESS})", "rows")),
    ],
)
def test_a_query_stops_at_its_deadline(
    parser: Any, connect: Callable[[], Any], tables: dict[str, Any], sql: str, form: str
) -> None:
    connection = Insistent(connect())
    asked = request(sql, form=form, seconds=0.05, known=KNOWN)
    try:
        found = worker._answer(asked, b"", tables, parser, connection)
    finally:
        connection.answered.set()
    assert found == ({**LOST, **REFUSED}, b"") and connection.interrupted


@pytest.mark.parametrize("sql", ["select 1", "nonsense", "drop table t"])
def test_the_deadline_is_over_with_the_answer(
    parser: Any, connect: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    class Timer:
        def __init__(self, *given: Any):
            self.given = given
            self.daemon = False
            self.did: list[str] = []
            made.append(self)

        def start(self) -> None:
            self.did.append(f"started, daemon {self.daemon}")

        def cancel(self) -> None:
            self.did.append("cancelled")

    made: list[Timer] = []
    monkeypatch.setattr(worker, "threading", SimpleNamespace(Timer=Timer))
    connection = Instead(connect(), interrupt="its interrupt")
    worker._answer(request(sql, seconds="7.5"), b"", NOTHING, parser, connection)
    (timer,) = made
    assert timer.given == (7.5, "its interrupt")
    assert timer.did == ["started, daemon True", "cancelled"]


# --- values ---------------------------------------------------------------------------------------


NESTED = {"a": [{"b": None}], "c": "2026-02-01"}


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("null", None),
        ("true", True),
        ("12345678901234", 12345678901234),
        ("170141183460469231731687303715884105727::hugeint", (1 << 127) - 1),
        ("'é\"'", 'é"'),
        ("1.5::double", 1.5),
        ("'nan'::float", None),
        ("'inf'::double", None),
        ("'-inf'::double", None),
        ("2.25::decimal(9, 2)", 2.25),
        ("'ab'::blob", "YWI="),
        ("date '2026-02-01'", "2026-02-01"),
        ("time '03:04:05'", "03:04:05"),
        ("timestamp '2026-02-01 03:04:05'", "2026-02-01T03:04:05"),
        ("timestamptz '2026-02-01 03:04:05+02'", "2026-02-01 01:04:05+00"),
        ("time with time zone '01:02:03+01'", "01:02:03+01"),
        ("interval 90 second", "00:01:30"),
        ("interval '14 months 3 days'", "1 year 2 months 3 days"),
        ("[interval 90500 millisecond]", [90.5]),
        ("[1, null, 3]", [1, None, 3]),
        ("[1.5, 'nan'::double]", [1.5, None]),
        ("[1, 2]::int[2]", [1, 2]),
        ("{'a': [{'b': 'inf'::float}], 'c': date '2026-02-01'}", NESTED),
        ("map {'k': 2.5, 'l': null}", {"k": 2.5, "l": None}),
        ("map {1: [2]}", {"1": [2]}),
        (
            "uuid '00000000-0000-0000-0000-000000000001'",
            "00000000-0000-0000-0000-000000000001",
        ),
    ],
)
def test_values_in_json(ask: Ask, sql: str, value: Any) -> None:
    found = rows_of(ask(f"select {sql} as a, 7 as b"))
    assert found == [[value, 7]]
    assert type(found[0][0]) is type(value)


def test_times_with_a_zone_keep_their_names_and_neighbours(ask: Ask) -> None:
    header, payload = ask(
        "select 1 as a, timestamptz '2026-02-01 03:04:05+00' as \"q\"\"x\", 2 as a, 'z'"
        " from range(3)",
        limit=2,
    )
    assert json.loads(bytes(payload)) == [[1, "2026-02-01 03:04:05+00", 2, "z"]] * 2
    assert [c["name"] for c in header["columns"]][:2] == ["a", 'q"x']
    assert header["columns"][1]["type"] == "TIMESTAMP WITH TIME ZONE"
    assert (header["rows"], header["truncated"]) == (2, True)


def test_a_time_as_text() -> None:
    zone = "TIMESTAMP WITH TIME ZONE"
    assert worker._time_as_text(3, 'a"b', zone) == 'CAST(c3 AS VARCHAR) AS "a""b"'
    assert worker._time_as_text(1, "n", "INTERVAL") == 'CAST(c1 AS VARCHAR) AS "n"'
    assert worker._time_as_text(0, "n", "TIMESTAMP") == 'c0 AS "n"'


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        *((None, None), (True, True), (False, False), (0, 0), (-3, -3), ("", ""), ("é", "é")),
        *((1.5, 1.5), (math.nan, None), (math.inf, None), (-math.inf, None), (0.0, 0.0)),
        *((decimal.Decimal("2.5"), 2.5), (decimal.Decimal("NaN"), None)),
        *((decimal.Decimal("Infinity"), None), (decimal.Decimal("3"), 3.0)),
        *((b"ab", "YWI="), (bytearray(b"ab"), "YWI="), (memoryview(b"ab"), "YWI="), (b"", "")),
        (datetime.datetime(2026, 2, 1, 3, 4, 5), "2026-02-01T03:04:05"),
        (datetime.datetime(2026, 2, 1, tzinfo=datetime.UTC), "2026-02-01T00:00:00+00:00"),
        (datetime.date(2026, 2, 1), "2026-02-01"),
        (datetime.time(3, 4, 5), "03:04:05"),
        (datetime.timedelta(days=1, seconds=1, microseconds=500_000), 86401.5),
        ({1: math.nan, "b": {"c": b"ab"}}, {"1": None, "b": {"c": "YWI="}}),
        ([1, [math.inf, (2,)]], [1, [None, [2]]]),
        ((decimal.Decimal(1), "x"), [1.0, "x"]),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (complex(1, 2), "(1+2j)"),
    ],
)
def test_what_json_can_say(value: Any, plain: Any) -> None:
    found = worker._plain(value)
    assert found == plain and type(found) is type(plain)


def test_sums_of_integers_are_ordinary_numbers(ask: Ask) -> None:
    header, payload = ask(
        "select 'x' as a, sum(i) as b, 1 as c, sum(i + 9223372036854775807) as d, 2.5::decimal(5,1)"
        " as e from range(5) t(i)",
        form="arrow",
    )
    assert header["ok"], header
    assert [c["type"] for c in header["columns"]] == [
        *("VARCHAR", "HUGEINT", "INTEGER", "HUGEINT", "DECIMAL(5,1)")
    ]
    table = loaded(payload)
    assert table.schema.names == ["a", "b", "c", "d", "e"]
    assert table.schema.types[:3] == [pa.string(), pa.int64(), pa.int32()]
    assert pa.types.is_decimal(table.schema.types[3])
    assert pa.types.is_decimal(table.schema.types[4])
    row = table.to_pylist()[0]
    assert row["d"] == 10 + 5 * (2**63 - 1)
    del row["d"]
    assert row == {"a": "x", "b": 10, "c": 1, "e": decimal.Decimal("2.5")}


@pytest.mark.parametrize(
    ("sql", "value"),
    [
        ("18446744073709551617::hugeint", 2**64 + 1),
        ("9223372036854775807::hugeint", 2**63 - 1),
        ("-9223372036854775808::hugeint", -(2**63)),
        ("-18446744073709551617::hugeint", -(2**64) - 1),
        ("170141183460469231731687303715884105727::hugeint", 2**127 - 1),
        ("340282366920938463463374607431768211455::uhugeint", 2**128 - 1),
        ("5::uhugeint", 5),
        ("null::uhugeint", None),
        ("18446744073709551615::ubigint", 2**64 - 1),
    ],
)
def test_whole_numbers_are_exact_in_arrow(ask: Ask, sql: str, value: int | None) -> None:
    _, payload = ask(f"select {sql} as a", form="arrow")
    assert loaded(payload)["a"].to_pylist() == [value]


# --- tables ---------------------------------------------------------------------------------------


def make(
    connection: Any, tables: dict[str, Any], *wanted: tuple[str, str], **fields: Any
) -> list[dict[str, Any]]:
    asked = {"dataset": None, "only": None, "form": "json", **fields}
    return query_tables.make_tables(connection, frozenset(wanted), tables, asked)


def views(connection: Any) -> set[str]:
    return {
        f"{schema}.{name}"
        for schema, name in connection.execute(
            "select schema_name, view_name from duckdb_views() where not internal"
        ).fetchall()
    }


TRAJECTORY_VIEWS = {"main._all_trajectories", "main.trajectories"}


@pytest.mark.parametrize(
    ("wanted", "fields", "made"),
    [
        ([], {}, set()),
        ([("", "metrics")], {}, {"main._all_metrics", "main.metrics"}),
        ([("main", "metrics")], {}, {"main._all_metrics", "main.metrics"}),
        ([("other", "metrics")], {}, set()),
        ([("", "nothing")], {}, set()),
        (
            [("", "trajectories"), ("", "runs")],
            {},
            {*TRAJECTORY_VIEWS, "main._all_runs", "main.runs"},
        ),
        ([], {"form": "rows"}, TRAJECTORY_VIEWS),
        (
            [("plain", "steps")],
            {},
            {*TRAJECTORY_VIEWS, "main._steps_0", "plain.steps"},
        ),
        ([("plain", "trajectories")], {}, set()),
        (
            [("plain", "steps")],
            {"dataset": "wide"},
            {*TRAJECTORY_VIEWS, "main._steps_0", "plain.steps"},
        ),
        (
            [("", "steps")],
            {"dataset": "wide"},
            {*TRAJECTORY_VIEWS, "main._steps_0", "main.steps"},
        ),
        (
            [("", "steps"), ("plain", "steps")],
            {"dataset": "wide"},
            {*TRAJECTORY_VIEWS, "main._steps_0", "main._steps_1", "main.steps", "plain.steps"},
        ),
        (
            [("", "steps")],
            {},
            {*TRAJECTORY_VIEWS, "main.steps"},
        ),
        (
            [("main", "steps")],
            {},
            {*TRAJECTORY_VIEWS, "main.steps"},
        ),
        ([("", "steps")], {"dataset": "nobody"}, {"main.steps"}),
    ],
)
def test_only_what_is_named_is_made(
    connect: Callable[[], Any],
    tables: dict[str, Any],
    wanted: list[tuple[str, str]],
    fields: dict[str, Any],
    made: Any,
) -> None:
    connection = connect()
    make(connection, tables, *wanted, **fields)
    assert views(connection) == made


def test_tables_show_their_columns_and_hide_those_of_ours(
    connect: Callable[[], Any], tables: dict[str, Any]
) -> None:
    connection = connect()
    assert make(connection, tables, ("", "trajectories"), ("", "runs"), ("", "metrics")) == []
    found = connection.sql("select * from trajectories order by id")
    assert found.columns == ["id", "dataset", "env", "length", "tags", "traj_idx"]
    assert found.fetchall()[3] == ("b1", "wide", "E", 5, ["x", "y"], 0)
    assert len(connection.execute("select * from trajectories").fetchall()) == 5
    assert connection.execute("select run, value from metrics").fetchall() == [
        ("r", 1.0),
        ("r", 2.0),
    ]
    runs = connection.sql("select * from runs")
    assert (runs.columns, [str(t) for t in runs.types]) == (["name"], ["VARCHAR"])
    assert runs.fetchall() == []
    assert connection.sql("select * from _all_runs").columns == ["name", "_pk"]


def test_one_selection_sees_one_dataset(connect: Callable[[], Any], tables: dict[str, Any]) -> None:
    connection = connect()
    make(connection, tables, ("", "trajectories"), ("", "evaluations"), only="wide", form="rows")
    assert connection.execute("select id from trajectories").fetchall() == [("b1",)]
    assert len(connection.execute("select * from evaluations").fetchall()) == 2
    assert len(connection.execute("select * from _all_trajectories").fetchall()) == 5
    strange = connect()
    make(strange, tables, ("", "trajectories"), only="it's")
    assert strange.execute("select id from trajectories").fetchall() == []


def test_steps_of_one_dataset(connect: Callable[[], Any], tables: dict[str, Any]) -> None:
    """The living rows of its own shards, whichever way they are named."""
    rows = [("plain", "a1", 0, 0.0), ("plain", "a1", 1, 1.0), ("plain", "a2", 0, 20.0)]
    left_out = [
        {"dataset": "plain", "file": "lost", "trajectories": 7},
        {"dataset": "plain", "file": "gone", "trajectories": 1},
    ]
    for schema, dataset in (("", "plain"), ("plain", None), ("main", "plain")):
        connection = connect()
        assert make(connection, tables, (schema, "steps"), dataset=dataset) == left_out
        name = f"{schema or 'main'}.steps"
        assert connection.sql(f"select * from {name}").columns == [
            *("dataset", "trajectory_id", "t", "speed")
        ]
        found = connection.execute(f"select * from {name} order by trajectory_id, t").fetchall()
        assert found == rows


def test_steps_of_a_selection_are_not_cut_to_one_dataset(
    connect: Callable[[], Any], tables: dict[str, Any]
) -> None:
    connection = connect()
    make(connection, tables, ("plain", "steps"), dataset="wide", only="wide", form="rows")
    assert connection.execute("select count(*) from plain.steps").fetchall() == [(3,)]


def test_steps_of_several_datasets(connect: Callable[[], Any], tables: dict[str, Any]) -> None:
    """Columns of one name and type in all that have data, in the order of the first."""
    connection = connect()
    left_out = make(connection, tables, ("", "steps"))
    assert [(one["dataset"], one["file"]) for one in left_out] == [
        *(("empty", "e1"), ("plain", "lost"), ("plain", "gone"), ("wide", "bad"))
    ]
    found = connection.sql("select * from steps order by all")
    assert found.columns == ["dataset", "trajectory_id", "t"]
    assert found.fetchall() == [
        *(("main", "m1", 0), ("plain", "a1", 0), ("plain", "a1", 1), ("plain", "a2", 0)),
        ("wide", "b1", 0),
    ]


def test_bare_steps_beside_those_of_a_dataset(
    connect: Callable[[], Any], tables: dict[str, Any]
) -> None:
    connection = connect()
    left_out = make(connection, tables, ("", "steps"), ("plain", "steps"), dataset="wide")
    assert [one["dataset"] for one in left_out] == ["plain", "plain", "wide"]
    sql = "select distinct dataset from"
    assert connection.execute(f"{sql} steps").fetchall() == [("wide",)]
    assert connection.execute(f"{sql} plain.steps").fetchall() == [("plain",)]


def test_names_that_duckdb_keeps(connect: Callable[[], Any], tables: dict[str, Any]) -> None:
    assert query_tables.RESERVED == {
        *("main", "memory", "temp", "system", "information_schema", "pg_catalog", "q")
    }
    for name in sorted(query_tables.RESERVED):
        tables["datasets"][name] = tables["datasets"]["main"]
        connection = connect()
        make(connection, tables, (name, "steps"), ("", "steps"), dataset=name)
        assert views(connection) == {*TRAJECTORY_VIEWS, "main._steps_0", "main.steps"}
        # They all lie in the same shard here.
        assert connection.execute("select trajectory_id from steps").fetchall() == [("m1",)]


def test_names_that_must_be_quoted(connect: Callable[[], Any], tables: dict[str, Any]) -> None:
    tables["datasets"] = {'a.b-"c': tables["datasets"]["plain"]}
    tables["datasets"]['a.b-"c']["columns"].append(['sp"eed', "DOUBLE", 's."obs.speed"'])
    connection = connect()
    make(connection, tables, ('a.b-"c', "steps"), ("", "steps"))
    sql = 'select "sp""eed" from "a.b-""c".steps order by 1'
    assert connection.execute(sql).fetchall() == [(0.0,), (1.0,), (20.0,)]
    assert connection.execute('select max("sp""eed") from steps').fetchall() == [(20.0,)]


def test_a_dataset_without_files_is_empty(
    connect: Callable[[], Any], tables: dict[str, Any]
) -> None:
    connection = connect()
    make(connection, tables, ("empty", "steps"))
    found = connection.sql("select * from empty.steps")
    assert (found.columns, found.fetchall()) == (["dataset", "trajectory_id"], [])
    tables["datasets"] = {"empty": tables["datasets"]["empty"]}
    bare = connect()
    left_out = make(bare, tables, ("", "steps"))
    assert left_out == [{"dataset": "empty", "file": "e1", "trajectories": 4}]
    shown = bare.sql("select * from steps")
    assert shown.columns == ["dataset", "t", "reward"]
    assert [str(t) for t in shown.types] == ["VARCHAR", "INTEGER", "FLOAT"]
    assert shown.fetchall() == []


def test_the_door_is_closed_behind_the_tables(
    connect: Callable[[], Any], tables: dict[str, Any], store: Store
) -> None:
    """A file that a query was not given stays closed, also one that the service knows."""
    connection = connect()
    make(connection, tables, ("", "metrics"))
    given = "select count(*) from read_parquet('stored://mirror/it''s.parquet')"
    assert connection.execute(given).fetchall() == [(2,)]
    (store.folder / "other.csv").write_text("a")
    for path in (
        *("stored://mirror/trajectories.parquet", "stored://shards/fifo/p.parquet"),
        *("mirror/trajectories.parquet", f"{store.folder}/mirror/trajectories.parquet"),
    ):
        with pytest.raises(duckdb.PermissionException):
            connection.execute(f"select * from read_parquet('{path}')")
    for sql in ("select * from 'other.csv'", "copy (select 1) to 'new.csv'"):
        with pytest.raises(duckdb.PermissionException):
            connection.execute(sql)
    for sql in (
        "set enable_external_access = true",
        "set lock_configuration = false",
        "set memory_limit = '1GB'",
        "reset threads",
    ):
        with pytest.raises(duckdb.Error, match="locked"):
            connection.execute(sql)
    settings = "select current_setting('enable_external_access'), current_setting('{}')"
    assert connection.execute(settings.format("lock_configuration")).fetchall() == [(False, True)]
    assert not (store.folder / "new.csv").exists()


def test_the_statements_that_make_tables() -> None:
    columns = [["a", "BIGINT"], ['b"c', "VARCHAR[]"]]
    assert query_tables._table_sql({"columns": columns, "files": ["m/x.parquet", "it's"]}) == (
        "SELECT \"a\", \"b\"\"c\" FROM read_parquet(['stored://m/x.parquet', 'stored://it''s'])"
    )
    empty = 'SELECT CAST(NULL AS BIGINT) AS "a", CAST(NULL AS VARCHAR[]) AS "b""c" WHERE false'
    assert query_tables._table_sql({"columns": columns, "files": []}) == empty
    assert query_tables._empty(columns) == empty
    triples = [["a", "BIGINT", "s.x + 1"], ['b"c', "VARCHAR[]", "t.y"]]
    assert query_tables._steps_sql({"columns": triples, "files": []}) == empty
    assert query_tables._steps_sql({"columns": triples, "files": ["f", "g"]}) == (
        'SELECT s.x + 1 AS "a", t.y AS "b""c" FROM read_parquet(['
        "'stored://f', 'stored://g'], filename = '_file') AS s"
        " JOIN _all_trajectories AS t ON s._file = t._file AND s.traj_idx = t.traj_idx"
    )


def test_the_statement_of_bare_steps() -> None:
    a, b, c = ["a", "INTEGER", "x"], ["b", "FLOAT", "y"], ["c", "FLOAT", "z"]
    chosen = {
        "one": {"columns": [a, b, c], "files": ["f"], "most_rows": 5},
        "two": {
            "columns": [c, ["b", "DOUBLE", "y"], ["a", "INTEGER", "other"]],
            "files": ["g"],
            "most_rows": 5,
        },
        "none": {"columns": [], "files": [], "most_rows": 0},
    }
    known = {"lost": {}, "common": [["k", "INTEGER"]]}

    def made(of: dict[str, Any], read: dict[str, Any] | None = None) -> str:
        rows = list((of if read is None else read).values())
        return query_tables._bare_steps(rows, {**known, "datasets": of})

    assert made(chosen) == " UNION ALL ".join(
        (
            query_tables._steps_sql({"columns": [a, c], "files": ["f"]}),
            query_tables._steps_sql({"columns": [["a", "INTEGER", "other"], c], "files": ["g"]}),
        )
    )
    again = {**chosen, "three": {"columns": [c, a], "files": ["h", "i"], "most_rows": 6}}
    assert made(again) == " UNION ALL ".join(
        (
            query_tables._steps_sql({"columns": [c, a], "files": ["h", "i", "f"]}),
            query_tables._steps_sql({"columns": [c, ["a", "INTEGER", "other"]], "files": ["g"]}),
        )
    )
    one = {"one": chosen["one"]}
    assert made(one) == query_tables._steps_sql({"columns": [a, b, c], "files": ["f"]})
    # Of one of several, with the columns of all.
    assert made(again, one) == query_tables._steps_sql({"columns": [c, a], "files": ["f"]})
    assert made(again, {}) == (
        'SELECT CAST(NULL AS FLOAT) AS "c", CAST(NULL AS INTEGER) AS "a" WHERE false'
    )
    nothing = 'SELECT CAST(NULL AS INTEGER) AS "k" WHERE false'
    assert made({}) == nothing
    assert made({"none": chosen["none"]}) == nothing


def test_many_datasets_are_grouped_in_little_memory(store: Store) -> None:
    """A scan for each would take memory of its own for every GROUP BY: 60 of them, in 20 MiB."""
    count, shards = 60, []
    for number in range(count):
        shards.append(f"shards/fifo/{number}.parquet")
        store.parquet(
            shards[-1],
            {
                "traj_idx": pa.array([0, 0], pa.int32()),
                "t": pa.array([0, 1], pa.int32()),
                "reward": pa.array([float(number), None], pa.float32()),
                f"obs.{number % 3}": pa.array([1.0, 2.0]),
            },
        )
    listed = store.parquet(
        "mirror/trajectories.parquet",
        {
            "id": pa.array([str(n) for n in range(count)]),
            "_file": pa.array([f"stored://{name}" for name in shards]),
            "traj_idx": pa.array([0] * count, pa.int32()),
        },
    )
    own = [["id", "VARCHAR", "t.id"], ["t", "INTEGER", "s.t"], ["reward", "FLOAT", "s.reward"]]
    trajectories = [["id", "VARCHAR"], ["_file", "VARCHAR"], ["traj_idx", "INTEGER"]]
    asked = {
        "tables": {"trajectories": {"columns": trajectories, "files": [listed]}},
        "datasets": {
            f"d{n}": {
                "columns": [*own, [f"obs.{n % 3}", "DOUBLE", f's."obs.{n % 3}"']],
                "files": [name],
                "most_rows": 2,
                "excluded": [],
            }
            for n, name in enumerate(shards)
        },
        "lost": {},
        "common": [],
    }
    connection = worker._connect(20 << 20, store.files)
    try:
        query_tables.make_tables(connection, frozenset({("", "steps")}), asked, {"form": "json"})
        query = "SELECT t, avg(reward), count(*) FROM steps GROUP BY t ORDER BY t"
        assert connection.execute(query).fetchall() == [
            (0, (count - 1) / 2, count),
            (1, None, count),
        ]
        columns = [row[0] for row in connection.execute("DESCRIBE steps").fetchall()]
        assert columns == ["id", "t", "reward"]
    finally:
        connection.close()


def test_quoting() -> None:
    assert quoted('a"b""') == '"a""b"""""'
    assert literal("it's ''") == "'it''s '''''"
    assert query_tables._stored("a'b/c") == "'stored://a''b/c'"


def test_the_columns_of_a_spec_can_be_selected(connect: Callable[[], Any], store: Store) -> None:
    """Every kind of column, read back from a shard as it was written."""
    spec = json.dumps(
        {
            "observations": {
                **{name: box([2], name, low=0, high=1) for name in DTYPES},
                **{f"one_{name}": box([], name, low=0, high=1) for name in DTYPES},
            },
            "actions": {"action": box([2])},
            "env": "",
        }
    )
    arrow = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}
    columns: dict[str, pa.Array] = {}
    for name in DTYPES:
        kind = arrow.get(name) or getattr(pa, {"bool": "int8"}.get(name, name))()
        flags = pa.array([True]) if name == "bool" else pa.array([1], pa.int64()).cast(kind)
        columns[f"obs.one_{name}"] = flags
        columns[f"obs.{name}"] = pa.FixedSizeListArray.from_arrays(
            pa.array([0, 1], pa.int64()).cast(kind), 2
        )
    columns["obs.uint8"] = pa.array([b"\x00\x01"], pa.binary(2))
    columns["action"] = pa.array([[0.5, 0.25]], pa.list_(pa.float32(), 2))
    for name in ("traj_idx", "t"):
        columns[name] = pa.array([0], pa.int32())
    columns["reward"] = pa.array([1.5], pa.float32())
    for name in ("terminated", "truncated", "is_last"):
        columns[name] = pa.array([name == "is_last"])
    file = store.parquet("shards/fifo/every.parquet", columns)
    row = {"id": "x1", "dataset": "every", "traj_idx": 0, "_file": f"stored://{file}", "_pk": 1}
    listed = store.parquet("mirror/t.parquet", {k: pa.array([v]) for k, v in row.items()})
    kinds = [[k, "VARCHAR" if isinstance(v, str) else "BIGINT"] for k, v in row.items()]
    tables = {
        "tables": {"trajectories": {"columns": kinds, "files": [listed]}},
        "datasets": {
            "every": {
                "columns": catalog.step_columns(spec),
                "files": [file],
                "most_rows": 1,
                "excluded": [],
            }
        },
        "lost": {},
        "common": catalog.COMMON,
    }
    connection = connect()
    make(connection, tables, ("every", "steps"))
    found = connection.sql("select * from every.steps")
    wanted = [(name, kind.replace('"', "")) for name, kind, _ in catalog.step_columns(spec)]
    types = [str(kind).replace('"', "") for kind in found.types]
    assert list(zip(found.columns, types, strict=True)) == wanted
    values = dict(zip(found.columns, found.fetchall()[0], strict=True))
    obs = values.pop("obs")
    assert values.pop("action") == (0.5, 0.25)
    assert values == {
        **{"dataset": "every", "trajectory_id": "x1", "t": 0, "reward": 1.5},
        **{"terminated": False, "truncated": False, "is_last": True},
    }
    assert obs.pop("uint8") == b"\x00\x01"
    for name in DTYPES:
        assert obs[f"one_{name}"] == 1
        assert name == "uint8" or obs[name] == (0, 1)


# --- selections -----------------------------------------------------------------------------------


def stream_of(columns: dict[str, pa.Array]) -> bytes:
    return raw_of(ArrowStream(pa.table(columns)))


def select(ask: Ask, sql: str, tables: Any, rows: bytes = b"", **fields: Any) -> Any:
    return ask(sql, tables, rows, form="rows", **{"known": KNOWN, **fields})


def test_a_selection_of_one_row_at_a_time(ask: Ask, tables: dict[str, Any]) -> None:
    header, payload = select(ask, "select id from trajectories where length < 5", tables)
    assert header == {"ok": True, "rows": 3, "truncated": False, "reads": ["length"]}
    table = loaded(payload)
    assert table.schema.types == [pa.int64()]
    assert {name: sorted(v) for name, v in table.to_pydict().items()} == {"row": [11, 12, 13]}
    assert set(table.schema.metadata) == {b"truncated", b"elapsed_ms", b"excluded"}
    assert table.schema.metadata[b"excluded"] == b"[]"


@pytest.mark.parametrize("columns", ["id, length as Weight", "length as weight, ID"])
def test_a_selection_with_weights(ask: Ask, tables: dict[str, Any], columns: str) -> None:
    sql = f"select {columns} from trajectories where env = 'E' order by length desc"
    header, payload = select(ask, sql, tables)
    assert (header["rows"], header["reads"]) == (4, ["env", "length"])
    table = loaded(payload)
    assert table.schema.types == [pa.int64(), pa.float64()]
    assert table.to_pydict() == {"row": [31, 21, 12, 11], "weight": [6.0, 5.0, 3.0, 2.0]}


def test_a_selection_for_one_dataset(ask: Ask, tables: dict[str, Any]) -> None:
    """Whichever way it is answered; what it names of another dataset is unknown."""
    _, payload = select(ask, "select id from trajectories", tables, dataset="plain", only="plain")
    assert sorted(loaded(payload)["row"].to_pylist()) == [11, 12, 13]
    sql = "select distinct id from trajectories"
    _, payload = select(ask, sql, tables, dataset="plain", only="plain")
    assert sorted(loaded(payload)["row"].to_pylist()) == [11, 12, 13]
    _, payload = select(ask, "select 'b1' as id", tables, only="plain")
    assert loaded(payload).to_pydict() == {"row": [None], "unknown": ["b1"]}
    _, payload = select(ask, "select id from trajectories", tables, only="it's")
    assert loaded(payload).num_rows == 0


def test_a_selection_of_the_whole_table(ask: Ask, tables: dict[str, Any]) -> None:
    """It names ids as text; each is looked up, and told where it is nobody's."""
    sql = "select unnest(['a2', 'nobody', null, 'm1']) as id, 2 as weight"
    header, payload = select(ask, sql, tables)
    assert header == {"ok": True, "rows": 4, "truncated": False, "reads": None}
    table = loaded(payload)
    assert table.schema.names == ["row", "weight", "unknown"]
    assert table.schema.types == [pa.int64(), pa.float64(), pa.string()]
    found = {(r["row"], r["unknown"]) for r in table.to_pylist()}
    assert found == {(12, None), (None, "nobody"), (None, "NULL"), (31, None)}
    assert table["weight"].to_pylist() == [2.0] * 4
    header, payload = select(ask, "select 7 as id", tables)
    assert loaded(payload).to_pydict() == {"row": [None], "unknown": ["7"]}


def test_a_selection_of_steps(ask: Ask, tables: dict[str, Any]) -> None:
    sql = "select distinct trajectory_id as id from steps where speed >= 1"
    header, payload = select(ask, sql, tables, dataset="plain", only="plain")
    assert header["reads"] is None
    assert sorted(loaded(payload)["row"].to_pylist()) == [11, 12]


def test_a_selection_of_changed_rows(ask: Ask) -> None:
    """Of these alone: there is not a table beside them."""
    rows = stream_of(
        {
            "id": pa.array([0, 1, 2]),
            "length": pa.array([5, 1, 7]),
            "dataset": pa.array(["plain", "plain", "wide"]),
        }
    )
    sql = "select id from trajectories where length > 1"
    header, payload = select(ask, sql, {}, rows)
    assert header == {"ok": True, "rows": 2, "truncated": False, "reads": ["length"]}
    assert loaded(payload).to_pydict() == {"row": [0, 2]}
    _, payload = select(ask, sql, {}, rows, only="plain")
    assert loaded(payload).to_pydict() == {"row": [0]}
    _, payload = select(ask, "select length as weight, id from trajectories", {}, rows)
    assert loaded(payload).to_pydict() == {"row": [0, 1, 2], "weight": [5.0, 1.0, 7.0]}


def test_only_a_selection_of_one_row_at_a_time_can_be_asked_of_changes(ask: Ask) -> None:
    rows = stream_of({"id": pa.array([0])})
    header, payload = select(ask, "select distinct id from trajectories", {}, rows)
    assert header == {
        "ok": False,
        "code": "sql_not_allowed",
        "detail": "this selection depends on more than one row at a time",
        "expected": "one SELECT statement",
        "got": "",
    }
    assert payload == b""


def test_the_door_is_closed_behind_changed_rows(parser: Any, connect: Callable[[], Any]) -> None:
    connection = connect()
    rows = stream_of({"id": pa.array([3])})
    asked = request("select id from trajectories", form="rows", known=KNOWN)
    assert worker._answer(asked, rows, {}, parser, connection)[0]["ok"]
    with pytest.raises(duckdb.PermissionException):
        connection.execute("select * from read_text('x')")
    with pytest.raises(duckdb.Error, match="locked"):
        connection.execute("set enable_external_access = true")
    with pytest.raises(duckdb.Error, match="locked"):
        connection.execute("set memory_limit = '1GB'")


@pytest.mark.parametrize(
    ("sql", "got"),
    [
        ("select length from trajectories", "length"),
        ("select id, length from trajectories", "id, length"),
        ("select id, 1 as weight, 2 as more from trajectories", "id, weight, more"),
        ("select distinct id, 1 as Nope from trajectories", "id, nope"),
        ("select 1 as weight", "weight"),
    ],
)
def test_a_selection_with_the_wrong_columns(
    ask: Ask, tables: dict[str, Any], sql: str, got: str
) -> None:
    header, payload = select(ask, sql, tables)
    assert payload == b"" and header == {
        "ok": False,
        "code": "sql_not_allowed",
        "detail": "a selection has the wrong columns",
        "expected": "SELECT id FROM trajectories …, or SELECT id, weight FROM trajectories …",
        "got": got,
    }


@pytest.mark.parametrize(
    ("limit", "most", "rows", "cut"),
    [
        *((5, 1 << 20, 5, False), (4, 1 << 20, 4, True), (0, 1 << 20, 0, True)),
        *((5, 64, 5, False), (5, 39, 0, True)),
    ],
)
def test_selections_have_limits(
    ask: Ask, tables: dict[str, Any], limit: int, most: int, rows: int, cut: bool
) -> None:
    header, payload = select(
        ask, "select id from trajectories", tables, limit=limit, max_bytes=most
    )
    assert (header["rows"], header["truncated"]) == (rows, cut)
    table = loaded(payload)
    assert table.num_rows == rows
    assert table.schema.metadata[b"truncated"] == (b"true" if cut else b"false")


def test_selections_come_in_large_batches(ask: Ask) -> None:
    rows = stream_of({"id": pa.array(range(70_000))})
    header, payload = select(ask, "select id from trajectories", {}, rows, limit=100_000)
    assert header["rows"] == 70_000
    batches = list(pa.ipc.open_stream(raw_of(payload)))
    assert [batch.num_rows for batch in batches] == [65_536, 4464]


COLUMNS = frozenset(
    {"length", "env", "seq", "tags", "metrics", "seed", "success", "return", "policy", "created_at"}
)


@pytest.mark.parametrize(
    ("sql", "columns"),
    [
        ("select id from trajectories", ""),
        ("select ID from Main.Trajectories", ""),
        ('select "id" as id from "trajectories" as t', ""),
        ("select t.id from trajectories as t where t.ENV = 'a'", "env"),
        ("from trajectories select id", ""),
        ("select length as weight, id from trajectories", "length"),
        ("select id, 1 + length / 2 - seq * 3 % 5 as weight from trajectories", "length seq"),
        ("select id, length // 2 ^ 2 as weight from trajectories", "length"),
        ("select id, length ** 2 as weight from trajectories", "length"),
        ("select id from trajectories where env || policy = 'x'", "env policy"),
        ("select id from trajectories where env like 'a%' and policy not like 'b'", "env policy"),
        ("select id from trajectories where env ilike 'a' or policy not ilike 'b'", "env policy"),
        ("select id from trajectories where env like 'a' escape '$'", "env"),
        ("select id from trajectories where env not like 'a' escape '$'", "env"),
        ("select id from trajectories where env ilike 'a' escape '$'", "env"),
        ("select id from trajectories where env not ilike 'a' escape '$'", "env"),
        ("select id from trajectories where env ^@ 'a'", "env"),
        ("select id from trajectories where env ~ 'a' and env similar to 'b'", "env"),
        ("select id from trajectories where length between 1 and seed", "length seed"),
        ("select id from trajectories where env in ('a', policy)", "env policy"),
        ("select id from trajectories where not success and return is not null", "return success"),
        ("select id from trajectories where coalesce(length, seq) = 1", "length seq"),
        ("select id from trajectories where case when length > 2 then seq > 1 end", "length seq"),
        ("select id from trajectories where metrics['a'] > 1 and tags[1] = 'x'", "metrics tags"),
        ("select id from trajectories where metrics.success > 1", "metrics success"),
        ("select id from trajectories where [seed] = [1]", "seed"),
        *(
            (f"select id from trajectories where seed::{kind} is null", "seed")
            for kind in (
                *("double", "float", "real", "integer", "int", "bigint", "smallint", "tinyint"),
                *("boolean", "bool", "varchar", "text", "ubigint", "uinteger"),
            )
        ),
        ("select id from trajectories where try_cast(env as integer) = 1", "env"),
        *(
            (f"select id from trajectories where {name}(env, length) is null", "env length")
            for name in (
                *("regexp_matches", "regexp_full_match", "contains", "starts_with", "prefix"),
                *("suffix", "ends_with", "lower", "upper", "length", "len", "strlen"),
                *("split_part", "substring", "substr", "list_contains", "list_has"),
                *("array_contains", "array_has", "list_has_any", "list_has_all", "list_value"),
                *("array_length", "cardinality", "element_at", "map_extract"),
                *("map_extract_value", "map_contains", "array_extract", "list_extract", "abs"),
                *("ln", "log", "log2", "log10", "exp", "sqrt", "pow", "power", "floor", "ceil"),
                *("round", "greatest", "least", "isnan", "isinf", "isfinite", "sign", "ifnull"),
                "UPPER",
            )
        ),
    ],
)
def test_what_a_selection_reads(parser: Any, sql: str, columns: str) -> None:
    assert selected_rows.columns_of(sql, parser, COLUMNS) == frozenset(columns.split())


@pytest.mark.parametrize(
    "sql",
    [
        "select id from trajectories where seq = (select max(seq) from trajectories)",
        "select id from trajectories where env in (select 'a')",
        "select id from trajectories where exists (select 1)",
        "select id from (select id from trajectories)",
        "select t.id from trajectories t, trajectories u",
        "select t.id from trajectories t join trajectories u on t.seq = u.seq",
        "select id from trajectories, range(2)",
        "select id from range(3) t(id)",
        "select id from trajectories union all select id from trajectories",
        "values (1)",
        "select 1 as id",
        "select id, row_number() over () as weight from trajectories",
        "select distinct id from trajectories",
        "select distinct on (env) id from trajectories",
        "select id from trajectories limit 1",
        "select id from trajectories offset 1",
        "select id from trajectories order by seq limit 1",
        "select id from trajectories limit 10%",
        "select id from trajectories group by id",
        "select id from trajectories group by grouping sets ((id))",
        "select id from trajectories having length > 1",
        "select id from trajectories qualify length > 1",
        "select id from trajectories using sample 10",
        "select id from trajectories tablesample 10%",
        "with t as (select 1) select id from trajectories",
        "select id from trajectories where created_at < epoch(now())",
        "select id from trajectories where random() < 2",
        "select id, random() as weight from trajectories",
        "select id from trajectories where current_date is null",
        "select id from trajectories where current_timestamp is null",
        "select id from trajectories where date '2020-01-01' is null",
        "select id from trajectories where env::timestamp is null",
        "select id from trajectories where 'now'::timestamptz is null",
        "select id from trajectories where try_cast(env as date) is null",
        "select id from trajectories where length::hugeint > 1",
        "select id from trajectories where my_function(env) is null",
        "select id from trajectories where md5(env) is null",
        "select id from trajectories where env glob 'a'",
        "select id, sum(length) as weight from trajectories",
        "select id, abs(length) filter (length > 1) as weight from trajectories",
        "select id, abs(distinct length) as weight from trajectories",
        "select id, abs(length order by seq) as weight from trajectories",
        "select id, main.abs(length) as weight from trajectories",
        "select id from trajectories where list_transform(tags, lambda x: x) = []",
        "select id from trajectories where length > ?",
        "select id from trajectories where length > $1",
        "select id from trajectories where env collate nocase = 'a'",
        "select id from trajectories where id > '0'",
        "select id, length(id) as weight from trajectories",
        "select id as name from trajectories",
        "select id as weight from trajectories",
        "select lower(id) as id from trajectories",
        "select length as id from trajectories",
        "select id, id from trajectories",
        "select id, t.id from trajectories t",
        "select length from trajectories",
        "select * from trajectories",
        "select id, * from trajectories",
        "select columns('id') from trajectories",
        "select id from runs",
        "select id from plain.trajectories",
        "select id from trajectories as t(id)",
        "select id from trajectories as t(a, b, c)",
        "select id from trajectories where nope = 1",
        "select id from trajectories where shard = 'x'",
        "select id from trajectories where t.nope = 1",
        "select id from trajectories where main.trajectories.env = 'a'",
        "select id from trajectories where trajectories.metrics.success > 1",
        "select id from trajectories where env = 'a' and (length > 1 or nope > 1)",
        "select id, case when nope then 1 else length end as weight from trajectories",
    ],
)
def test_a_selection_that_looks_at_more_than_one_row(parser: Any, sql: str) -> None:
    assert selected_rows.columns_of(sql, parser, COLUMNS) is None


def test_what_may_be_read_is_told_by_the_caller(parser: Any) -> None:
    sql = "select id from trajectories where length > 1 and env = 'a'"
    assert selected_rows.columns_of(sql, parser, frozenset({"length", "env"})) == {"length", "env"}
    assert selected_rows.columns_of(sql, parser, frozenset({"length"})) is None
    assert selected_rows.columns_of(sql, parser, frozenset()) is None
    own = "select id from trajectories t where env.length = 1"
    assert selected_rows.columns_of(own, parser, frozenset({"length"})) == {"length"}


def test_the_order_of_a_selection_does_not_matter(parser: Any) -> None:
    sql = "select id from trajectories order by seq desc, env, id"
    assert selected_rows.columns_of(sql, parser, COLUMNS) == {"seq", "env"}
    assert selected_rows.columns_of("from trajectories select id", parser, COLUMNS) == set()
    for sql in ("group by all", "at (version => 1)"):
        assert (
            selected_rows.columns_of(f"select id from trajectories {sql}", parser, COLUMNS) is None
        )
    sql = "select id from trajectories where length > 1 order by length"
    assert selected_rows.columns_of(sql, parser, COLUMNS) == {"length"}


def test_a_selection_without_a_tree_is_refused(parser: Any) -> None:
    with pytest.raises(NotAllowed):
        selected_rows.columns_of("drop table t", parser, COLUMNS)


@pytest.mark.parametrize(
    ("value", "full"),
    [
        *((None, False), ("", False), ([], False), ({}, False), ({"map": []}, False), (0, False)),
        *(({"a": {"b": []}}, False), ({"a": {"b": [0]}}, True), ([None], True), ("x", True)),
        *(({"a": None, "b": 1}, True), (True, True)),
    ],
)
def test_whether_a_part_of_the_tree_holds_anything(value: Any, full: bool) -> None:
    assert selected_rows._full(value) is full


@pytest.mark.parametrize(
    ("column", "found"),
    [
        ({"class": "COLUMN_REF", "column_names": ["id"], "alias": ""}, True),
        ({"class": "COLUMN_REF", "column_names": ["T", "ID"], "alias": "Id"}, True),
        ({"class": "COLUMN_REF", "column_names": ["id"]}, True),
        ({"class": "COLUMN_REF", "column_names": ["id", "env"], "alias": ""}, False),
        ({"class": "COLUMN_REF", "column_names": ["id"], "alias": "x"}, False),
        ({"class": "CONSTANT", "column_names": ["id"], "alias": ""}, False),
        ({"class": "COLUMN_REF"}, False),
        ({}, False),
    ],
)
def test_which_column_is_the_id(column: dict[str, Any], found: bool) -> None:
    assert selected_rows._is_id(column) is found


def test_parts_of_older_trees(parser: Any) -> None:
    """A cast names its type in one of two ways; what has none of them is not harmless."""
    found: set[str] = set()
    for part, harmless in (
        ({"class": "CAST", "type_expr": {"type_name": "DOUBLE"}}, True),
        ({"class": "CAST", "cast_type": {"id": "BIGINT"}}, True),
        ({"class": "CAST", "cast_type": {"id": "DATE"}}, False),
        ({"class": "CAST", "type_expr": {"type_name": "date", "id": "bigint"}}, False),
        ({"class": "CAST", "type_expr": {"type_name": "int"}, "cast_type": {"id": "date"}}, True),
        ({"class": "CAST"}, False),
        ({"class": "FUNCTION", "function_name": "ABS"}, True),
        ({"class": "FUNCTION", "function_name": "abs", "filter": {"class": "CONSTANT"}}, False),
        ({"class": "FUNCTION", "function_name": "abs", "distinct": True}, False),
        ({"class": "FUNCTION", "function_name": "abs", "schema": "main"}, False),
        ({"class": "FUNCTION", "function_name": "abs", "order_bys": {"orders": [1]}}, False),
        ({"class": "FUNCTION", "function_name": "abs", "order_bys": {"orders": []}}, True),
        ({"class": "FUNCTION"}, False),
        ({"class": "WINDOW"}, False),
        ({"class": "TYPE"}, True),
    ):
        assert selected_rows._allowed(part, found, COLUMNS) is harmless, part
    assert found == set()
    reference = {"class": "COLUMN_REF", "column_names": ["Length", "ENV"]}
    assert selected_rows._allowed(reference, found, COLUMNS) is True
    assert found == {"length", "env"}


# --- files ----------------------------------------------------------------------------------------


def test_a_stored_file_is_read_under_either_name(store: Store) -> None:
    content = os.urandom(BLOCK + 100)
    store.put("shards/a.bin", content)
    files = store.files
    for path in ("shards/a.bin", "stored://shards/a.bin"):
        with files.open(path) as file:
            assert file.size == len(content)
            assert file.read() == content
            file.seek(BLOCK - 5)
            assert file.read(10) == content[BLOCK - 5 : BLOCK + 5]
        with files.open(path, "rb", block_size=5, cache_options=None) as file:
            assert file.read(3) == content[:3]
        assert files.info(path, refresh=True) == {
            "name": "stored://shards/a.bin",
            "size": BLOCK + 100,
            "type": "file",
        }
        assert files.exists(path, anything=1) is True and files.isfile(path) is True
        assert files.glob(path, maxdepth=1) == ["stored://shards/a.bin"]
    assert files.damaged == set()


def test_duckdb_reads_rows_and_footer_and_not_the_table_of_trajectories(
    store: Store, connect: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory would have no room for the tables of 100,000 trajectories."""
    spec = make_spec(observation=3, action=2)
    made = [make_trajectory(spec, length=1, seed=i, source="a" * 1000) for i in range(200)]
    write_trajectories(store.folder / "a", spec, made)
    store.put("a", (store.folder / "a").read_bytes())
    real, read = CheckedFile.read_at, []

    def read_at(file: CheckedFile, start: int, count: int) -> bytes:
        read.append(count)
        return real(file, start, count)

    monkeypatch.setattr(CheckedFile, "read_at", read_at)
    sql = "select count(*), sum(t) from read_parquet('stored://a')"
    assert connect().execute(sql).fetchall() == [(400, 200)]
    sql = "select max(octet_length(value)) from parquet_kv_metadata('stored://a')"
    assert connect().execute(sql).fetchall()[0][0] < 10_000
    assert sum(read) < 100_000 < 200_000 < store.files.info("a")["size"]


def test_stored_files_never_change(store: Store) -> None:
    never = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    assert store.files.modified("x") == store.files.created("y") == never


def test_each_worker_has_files_of_its_own() -> None:
    one, other = CheckedFileSystem(), CheckedFileSystem()
    one.learn({"a": ""})
    assert one is not other and one.exists("a") and not other.exists("a")
    assert one.damaged is not other.damaged
    assert (CheckedFileSystem.protocol, CheckedFileSystem.cachable) == ("stored", False)


@pytest.mark.parametrize("path", ["other", "stored://other", "/etc/passwd", "stored://../x", ""])
def test_a_file_that_is_not_known(store: Store, path: str) -> None:
    """Whether it is there or not."""
    store.put("known", b"x")
    (store.folder / "other").write_bytes(b"secret")
    files = store.files
    assert not files.exists(path) and not files.isfile(path)
    name = path.removeprefix("stored://")
    for ask in (files.open, files.info, files.glob):
        with pytest.raises(PermissionError) as caught:
            ask(path)
        assert str(caught.value) == f"{name} is not a file of this query"
    assert files.damaged == set()


@pytest.mark.parametrize("mode", ["wb", "ab", "r+b", "r", "w", "xb"])
def test_stored_files_are_only_read(store: Store, mode: str) -> None:
    store.put("a", b"content")
    with pytest.raises(PermissionError) as caught:
        store.files.open("stored://a", mode)
    assert str(caught.value) == "a is read-only"
    assert (store.folder / "a").read_bytes() == b"content" and store.files.damaged == set()


def test_learning_and_forgetting() -> None:
    files = CheckedFileSystem()
    files.learn({"a": "", "b": base64.b64encode(b"1234").decode()})
    assert (files._checksums["a"], files._checksums["b"]) == (b"", b"1234")
    files.learn({}, forget=["a", "never"])
    assert not files.exists("a") and files.exists("b")
    files.learn({"b": "", "c": ""}, forget=["b"])
    assert files.exists("b") and files.exists("c") and files._checksums["b"] == b""


def test_bytes_that_are_not_as_written_are_reported(store: Store) -> None:
    content = bytes(3 * BLOCK)
    store.put("a", content)
    store.put("b", content)
    (store.folder / "a").write_bytes(content[: BLOCK + 5] + b"!" + content[BLOCK + 6 :])
    with store.files.open("stored://a") as file:
        assert file.read(BLOCK) == content[:BLOCK], "what is sound can be read"
        assert store.files.damaged == set()
        with pytest.raises(Corrupt, match="block 1"):
            file.read(1)
    assert store.files.damaged == {"a"}
    with store.files.open("b") as file:
        assert file.read() == content
    assert store.files.damaged == {"a"}


@pytest.mark.parametrize("size", [0, BLOCK, 2 * BLOCK - 1, 2 * BLOCK + 1])
def test_a_file_of_another_size_is_reported(store: Store, size: int) -> None:
    store.put("a", bytes(2 * BLOCK))
    (store.folder / "a").write_bytes(bytes(size))
    with pytest.raises(OSError) as caught:
        store.files.open("stored://a")
    assert str(caught.value) == "a is damaged: Corrupt" and caught.value.__cause__ is None
    assert store.files.damaged == {"a"}


def test_a_missing_file_is_reported(store: Store) -> None:
    for ask, said in (
        (store.files.open, "a is damaged: FileNotFoundError"),
        (store.files.info, ""),
    ):
        store.put("a", b"x")
        (store.folder / "a").unlink()
        store.files.damaged.clear()
        with pytest.raises(OSError) as caught:
            ask("stored://a")
        assert said in str(caught.value)
        assert store.files.damaged == {"a"}


def test_a_folder_in_place_of_a_file_has_no_bytes(store: Store) -> None:
    store.put("a", b"x")
    (store.folder / "a").unlink()
    (store.folder / "a").mkdir()
    assert store.files.info("a") == {"name": "stored://a", "size": 0, "type": "file"}


def test_damage_in_a_query(ask: Ask, tables: dict[str, Any], store: Store) -> None:
    """Whatever DuckDB makes of it, the name of the file is kept."""
    path = store.folder / "shards/fifo/p.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
    header, _ = ask("select count(*) from plain.steps", tables)
    assert not header["ok"] and str(store.folder) not in header["detail"]
    assert store.files.damaged == {"shards/fifo/p.parquet"}
