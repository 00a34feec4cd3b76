"""Runs SQL in a few sandboxed worker processes, with limits on time, memory and CPU.

    query → fair_queue.py, or 429 → a worker → the worker interrupts itself at the deadline
                                             → GRACE later: SIGKILL, another replaces it

    deadline   counted from the arrival of the query, including waiting and the refresh of the
               tables. The response is sent at most GRACE after it.
    memory     one bound for everything: each worker has a share, which the kernel enforces
               (worker.py), and so have the results in this process until they are delivered
    CPU        workers are niced, and niced more during a long query (worker_handle.py)

The service's own queries (snapshots) have a separate worker, started when first needed. No part of
a query runs in this process; the result is a frame of bytes. Two workers are started in advance,
because a Python process with DuckDB takes a third of a second to start.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import orjson
import pyarrow as pa
import structlog

from server.index.lost_rows import NOTHING_LOST, LostRows
from server.index.mirror import Mirror, MirrorState
from server.index.sql_tables import TABLES
from server.problems import ProblemError, index_damaged, not_found
from server.settings import Settings
from server.sql.catalog import catalog
from server.sql.fair_queue import FairQueue
from server.sql.memory import OWN, AnswerMemory, Memory
from server.sql.selected import Selected, read_selected
from server.sql.worker_handle import START_SECONDS, DeadlineExceeded, MemoryExceeded, WorkerProcess
from stepwell.messages import Column, Excluded

Form = Literal["json", "arrow"]
AT_START = 2
"""Workers that are started in advance."""
GRACE = 0.2
"""Seconds from a query's deadline to the SIGKILL of a process that does not respond."""
SHORT = 5.0
"""Seconds that a query may take at most without being one of its user's long ones. To the queue
these are another caller: whoever waits for one can still look at pages, which ask short ones."""
MAX_SELECTION = 50_000_000
_PLACE = {"id", "shard", "traj_idx", "_file", "_pk"}
_SELECTABLE = sorted({name for name, _ in TABLES["trajectories"]} - _PLACE)
"""Columns that an incremental selection may read. Not the locations, which compaction changes."""

log = structlog.get_logger("stepwell.sql")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Result:
    """The result of a query, as the worker wrote it. Its memory is counted while it exists."""

    columns: list[Column]
    rows: int
    truncated: bool
    elapsed_ms: float
    payload: bytearray
    """A JSON list of rows, or an Arrow IPC stream."""
    excluded: list[Excluded]
    """Damaged files whose rows are missing from the steps that it read."""


class SqlPool:
    """Runs queries over the mirror. Thread-safe; one per process."""

    def __init__(
        self,
        settings: Settings,
        mirror: Mirror,
        on_damage: Callable[[list[str]], object] = lambda _files: None,
        lost: LostRows = NOTHING_LOST,
    ):
        workers, waiting = settings.sql_workers, settings.sql_queue
        self._data = settings.data.resolve()
        self._mirror = mirror
        self._lost = lost
        self._workers = workers
        self.memory = Memory.of(settings.sql_memory, workers)
        self._max_timeout = settings.sql_max_timeout
        self._max_bytes = min(settings.sql_max_bytes, self.memory.answers // 2)
        self._on_damage = on_damage
        self.most_at_once = workers + waiting
        """Most admitted queries of callers at one time."""
        # Of one caller, as many short and as many long ones: one worker stays free for others.
        running = max(1, (workers - 1) // 2)
        self._callers = FairQueue[WorkerProcess](
            running=running,
            waiting=waiting,
            per_caller=settings.sql_per_caller,
            on_demand=self._start_caller_workers,
        )
        self._service = FairQueue[WorkerProcess](running=1, waiting=waiting, per_caller=waiting + 1)
        self._own_started = False
        self._started = 0
        """Workers for callers, those that are still starting among them."""
        self._all: set[WorkerProcess] = set()
        self.answers = AnswerMemory(self.memory.answers)
        self._lock = threading.Lock()
        self._warm = threading.Event()
        """Set when the first worker is ready."""
        self._tables = ThreadPoolExecutor(workers + 2 * waiting + 2, "sql-tables")
        self._closed = False

    def start(self) -> None:
        """Start two workers in the background; queries wait for the first."""
        self._start_caller_workers(AT_START)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            workers = list(self._all)
            self._all.clear()
        self._callers.close()
        self._service.close()
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()
        self._tables.shutdown(wait=False, cancel_futures=True)

    def query(
        self,
        sql: str,
        params: list[Any] | dict[str, Any] | None = None,
        *,
        dataset: str | None = None,
        limit: int = 1000,
        timeout: float = 5.0,
        form: Form = "json",
        user: str = "",
        received: float | None = None,
    ) -> Result:
        """Run one SELECT for `user`, received at `received` on the monotonic clock.

        Raises `ProblemError`: 422 sql_error, sql_not_allowed, query_timeout; 404 for an unknown
        dataset; 429 too_many_queries; 503 while the service stops.
        """
        seconds = min(timeout, self._max_timeout)
        _check_json(sql, params)
        caller = user if seconds <= SHORT else f"{user} (long)"
        with self._admitted(caller):
            deadline = self._deadline(time.monotonic() if received is None else received, seconds)
            state = self._state(sql, dataset, deadline)
            request = {
                "sql": sql,
                "params": params,
                "limit": limit,
                "max_bytes": self._max_bytes,
                "form": form,
                "dataset": dataset,
            }
            began = time.monotonic()
            header, payload = self._ask_again(caller, user, request, sql, dataset, state, deadline)
            log.info(
                "query",
                user=user,
                ms=round((time.monotonic() - began) * 1e3, 1),
                rows=header.get("rows"),
                code=header.get("code", "ok"),
            )
        if not header["ok"]:
            if any(row.name in sql for row in self._lost.of("datasets")):
                raise index_damaged(self._lost.sentence())
            raise _refused(header, seconds)
        result = Result(
            [Column(**column) for column in header["columns"]],
            header["rows"],
            header["truncated"],
            header["elapsed_ms"],
            payload,
            [Excluded(**one) for one in header["excluded"]],
        )
        weakref.finalize(result, self.answers.release, user, len(payload))
        return result

    def select_rows(
        self,
        select: str,
        dataset: str | None = None,
        *,
        among: pa.Table | None = None,
        timeout: float = 60.0,
    ) -> Selected:
        """The trajectories that a selection returns, by their `pk`, with optional weights.

        `select` yields the column `id` and, optionally, `weight` (finite, > 0). With `dataset`, it
        reads only that dataset's trajectories, and bare `steps` is that dataset's. With `among`, it
        reads only these rows, which have an `id` (their number) and the columns that it reads: only
        for a selection whose `reads` is not None. Raises `ProblemError` 422 `sql_error` for wrong
        columns, unknown ids, repeats and bad weights.
        """
        _check_json(select, None)
        request = {
            "sql": select,
            "form": "rows",
            "limit": MAX_SELECTION,
            "max_bytes": 24 * MAX_SELECTION,
            "dataset": dataset,
            "only": dataset,
            "known": _SELECTABLE,
        }
        with self._admitted(OWN):
            self._start_service_worker()  # while the tables are refreshed
            deadline = self._deadline(time.monotonic(), timeout)
            state = None
            if among is None:
                text = f"{select} trajectories"
                state = self._state(text, dataset, deadline)
                header, payload = self._ask_again(OWN, OWN, request, text, dataset, state, deadline)
            else:
                header, payload = self._ask(OWN, OWN, request, None, deadline, _stream_of(among))
            if not header["ok"]:
                raise _refused(header, timeout)
            try:
                if header["truncated"]:
                    raise ProblemError(
                        422, "sql_error", "the selection is too large for one snapshot"
                    )
                return read_selected(header, payload, state, dataset)
            finally:
                self.answers.release(OWN, len(payload))

    @contextlib.contextmanager
    def _admitted(self, caller: str) -> Iterator[None]:
        """The time from admission to the end of a query."""
        queue = self._queue_of(caller)
        queue.admit(caller)
        try:
            yield
        finally:
            queue.leave(caller)

    def _queue_of(self, caller: str) -> FairQueue[WorkerProcess]:
        return self._service if caller == OWN else self._callers

    def _deadline(self, received: float, seconds: float) -> float:
        """Counted from the arrival of the query, or from when the first worker is ready."""
        if self._workers and not self._warm.is_set():
            self._warm.wait(START_SECONDS / 2)
            received = time.monotonic()
        return received + seconds

    def _state(self, text: str, dataset: str | None, deadline: float) -> MirrorState:
        """The current tables, by the deadline; 404 for an unknown dataset."""
        try:
            future = self._tables.submit(self._mirror.state, text)
        except RuntimeError:
            raise ProblemError(503, "shutting_down", "the service is stopping") from None
        try:
            state = future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            future.cancel()
            raise ProblemError(
                422,
                "query_timeout",
                "the tables were not refreshed by the query's deadline; try again, or set a longer"
                " timeout",
            ) from None
        if dataset is None or dataset in state.specs:
            return state
        if "steps" not in text:  # specs are refreshed only for queries of steps
            return self._state(f"{text} steps", dataset, deadline)
        if any(row.name == dataset for row in self._lost.of("datasets")):
            raise index_damaged(self._lost.sentence())
        raise not_found("dataset", dataset, state.specs)

    def _ask_again(
        self,
        caller: str,
        user: str,
        request: dict[str, Any],
        text: str,
        dataset: str | None,
        state: MirrorState,
        deadline: float,
    ) -> tuple[dict[str, Any], bytearray]:
        """`_ask`, repeated without files that turn out to be damaged. Raises 503."""
        header, payload = self._ask(caller, user, request, state, deadline)
        while damaged := header.get("damaged"):
            # Quarantine or rewrite the damaged files, then run the same query again.
            self._on_damage(damaged)
            if time.monotonic() >= deadline:
                raise _still_damaged(damaged)
            state = self._state(text, dataset, deadline)
            header, payload = self._ask(caller, user, request, state, deadline)
        return header, payload

    def _ask(
        self,
        caller: str,
        user: str,
        request: dict[str, Any],
        state: MirrorState | None,
        deadline: float,
        rows: bytes = b"",
    ) -> tuple[dict[str, Any], bytearray]:
        """A worker's response. Its bytes are counted for the user: see `AnswerMemory`."""
        queue = self._queue_of(caller)
        if queue is self._service:
            self._start_service_worker()
        worker = self._take(queue, caller, deadline)
        held = 0

        def count_bytes(size: int) -> None:
            nonlocal held
            self.answers.hold(user, size)
            held = size

        header: dict[str, Any] | None = None
        kept = False
        try:
            known, worker.known = worker.known, None  # unknown until it has answered
            if state is not None and (known is None or known.version != state.version):
                request = {**request, "catalog": catalog(state, known, self._lost)}
                request |= _checksums_for(known, state)
            seconds = max(0.0, deadline - time.monotonic())
            request = {**request, "seconds": seconds}
            header, payload = worker.ask(request, deadline + GRACE, count_bytes, rows)
            worker.known = known if state is None else state
            kept = bool(header["ok"])
            return header, payload
        except DeadlineExceeded:
            return _failure("query_timeout", ""), bytearray()
        except MemoryExceeded:
            return _failure("sql_error", "the query exceeded its memory limit"), _NONE
        except (EOFError, OSError):
            return _failure("sql_error", "the query crashed its process (usually memory)"), _NONE
        except ProblemError:
            header = {}  # the response was refused, the worker is reusable
            raise
        finally:
            if not kept:
                self.answers.release(user, held)
            if header is not None and worker.reusable():
                queue.give(caller, worker)
            else:
                self._replace(worker, queue)
                queue.give(caller, None)

    def _take(self, queue: FairQueue[WorkerProcess], caller: str, deadline: float) -> WorkerProcess:
        """A live worker; replaces dead ones."""
        while True:
            worker = queue.take(caller, deadline)
            if worker.alive():
                return worker
            self._replace(worker, queue)
            queue.give(caller, None)

    def _start_caller_workers(self, wanted: int) -> None:
        """Start as many as are missing, at most `sql_workers` in all."""
        with self._lock:
            missing = max(0, min(wanted, self._workers) - self._started)
            self._started += missing
        for _ in range(missing):
            self._spawn(self._callers)

    def _start_service_worker(self) -> None:
        with self._lock:
            if self._own_started or not self._workers:
                return
            self._own_started = True
        self._spawn(self._service)

    def _replace(self, worker: WorkerProcess, queue: FairQueue[WorkerProcess]) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.kill()
        self._spawn(queue, worker)

    def _spawn(
        self, queue: FairQueue[WorkerProcess], instead_of: WorkerProcess | None = None
    ) -> None:
        threading.Thread(
            target=self._start_worker, args=(queue, instead_of), name="sql-start", daemon=True
        ).start()

    def _start_worker(
        self, queue: FairQueue[WorkerProcess], instead_of: WorkerProcess | None
    ) -> None:
        """Retry until one is ready. A replacement is niced from the start: queries that are killed
        one after another must not load the machine with restarts."""
        if instead_of is not None:
            instead_of.wait()  # its memory is in use until then
        share = self.memory.own if queue is self._service else self.memory.caller
        wait = 0.2
        while self._is_open():
            worker: WorkerProcess | None = None
            try:
                worker = WorkerProcess(self._data, share, nice=instead_of is not None)
                with self._lock:
                    self._all.add(worker)
                if self._is_open():  # else close() has not seen it
                    worker.wait_ready()
                    self._warm.set()
                    queue.put(worker)
                    if self._is_open():
                        return
                self._end(worker)
            except BaseException as error:  # without workers no query can run
                if worker is not None:
                    self._end(worker)
                if self._is_open():
                    log.error("a SQL worker did not start", error=repr(error), again_in=wait)
                    time.sleep(wait)
                    wait = min(2 * wait, 10.0)

    def _is_open(self) -> bool:
        with self._lock:
            return not self._closed

    def _end(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.kill()
        worker.wait()


_NONE = bytearray()


def _check_json(sql: str, params: Any) -> None:
    """Refuse requests that cannot be sent to a worker before taking one."""
    try:
        orjson.dumps([sql, params])
    except TypeError as error:
        raise ProblemError(
            422,
            "sql_error",
            f"the query or a parameter cannot be encoded: {error}",
            expected="text in Unicode and integers of at most 64 bits",
        ) from None


def _checksums_for(known: MirrorState | None, state: MirrorState) -> dict[str, Any]:
    """Checksums of files new to a worker that has `known`, and the files that it can drop."""
    old = {} if known is None else known.checksums
    fresh = {file: sums for file, sums in state.checksums.items() if old.get(file) is not sums}
    return {
        "checksums": {file: base64.b64encode(sums).decode() for file, sums in fresh.items()},
        "forget": [file for file in old if file not in state.checksums],
    }


def _still_damaged(files: list[str]) -> ProblemError:
    return ProblemError(
        503,
        "damaged",
        "damaged files were found and quarantined; repeat the query, and the response names the"
        " files that are left out",
        got=", ".join(files)[:200],
        headers={"Retry-After": "1"},
    )


def _failure(code: str, detail: str) -> dict[str, Any]:
    return {"ok": False, "code": code, "detail": detail}


def _refused(header: dict[str, Any], seconds: float) -> ProblemError:
    detail = header["detail"]
    if header["code"] == "query_timeout":
        detail = f"stopped after {seconds:g} s, including waiting"
        detail += "; request less, or set a longer timeout"
    return ProblemError(
        422,
        header["code"],
        detail,
        expected=header.get("expected") or None,
        got=header.get("got") or None,
    )


def _stream_of(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    content: bytes = sink.getvalue().to_pybytes()
    return content
