"""The parent's side of SQL: few confined worker processes, and limits that hold whatever is asked.

    query → fair_queue.py, or 429 → a worker → the worker interrupts itself at the deadline
                                             → GRACE later: SIGKILL, another takes its place

    deadline   from the moment the query is here: waiting counts, and so does bringing the tables up
               to date. The answer leaves GRACE after it at the latest.
    memory     one bound for everything: each worker has its share, which the kernel holds it to
               (worker.py), and so have the answers in this process until they are delivered
    CPU        workers are niced, and niced more when a query goes on (worker_process.py)

The service's own queries (snapshots) have a worker to themselves, started when first needed.
Nothing of a query runs in this process; what comes back is a frame of bytes. Workers are started
ahead of need, because a Python process with DuckDB takes a third of a second to be ready.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import structlog
from numpy.typing import NDArray

from server.index.mirror import Mirror, MirrorState
from server.index.sql_tables import TABLES
from server.problems import ProblemError, not_found
from server.sql.catalog import catalog
from server.sql.fair_queue import FairQueue
from server.sql.worker_process import START_SECONDS, DeadlineExceeded, MemoryExceeded, WorkerProcess
from stepwell.messages import Column, Excluded

Form = Literal["json", "arrow"]
GRACE = 0.2
"""Seconds between a query's deadline and the SIGKILL of the process that did not notice."""
MAX_SELECTION = 50_000_000
OWN = "the service"
"""The caller of the service's own queries."""
BASE_MEMORY = 112 << 20
"""What a worker holds before its first query: Python, DuckDB and Arrow."""
_PLACE = {"id", "shard", "traj_idx", "_file", "_pk"}
_SELECTABLE = sorted({name for name, _ in TABLES["trajectories"]} - _PLACE)
"""Columns by which a selection may look at one row at a time. Not where it lies: that moves."""

log = structlog.get_logger("stepwell.sql")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Result:
    """The answer to a query, as the worker wrote it. Its bytes count while this object lives."""

    columns: list[Column]
    rows: int
    truncated: bool
    elapsed_ms: float
    payload: bytearray
    """A JSON list of rows, or an Arrow IPC stream."""
    excluded: list[Excluded]
    """Damaged files whose rows are not in the steps that it read."""


@dataclass(frozen=True, slots=True)
class Memory:
    """How one bound is divided. Its parts never sum to more."""

    caller: int
    """Resident memory of a worker for callers."""
    own: int
    """Of the service's own worker: selections for snapshots are large."""
    answers: int
    """Answers in this process, from the worker's pipe until the client has them."""

    @classmethod
    def of(cls, total: int, workers: int) -> Memory:
        """Raises ValueError where too little is left for queries."""
        answers = total // 8
        unit = (total - answers - (workers + 1) * BASE_MEMORY) // (workers + 2)
        if workers and unit < 16 << 20:
            least = ((workers + 1) * BASE_MEMORY + (workers + 2) * (16 << 20)) * 8 // 7
            raise ValueError(
                f"STEPWELL_SQL_MEMORY={total} is too little for {workers} workers and the service's"
                f" own: at least {least // (1 << 20) + 1} MiB, or fewer STEPWELL_SQL_WORKERS"
            )
        return cls(BASE_MEMORY + unit, BASE_MEMORY + 2 * unit, answers)


@dataclass(frozen=True, slots=True)
class Selected:
    """What a snapshot's selection names."""

    rows: NDArray[np.int64]
    """Each trajectory's `pk`, ascending; of changes, its number among them."""
    weights: NDArray[np.float64] | None
    reads: tuple[str, ...] | None
    """The columns it reads, where it looks at one row at a time: else None."""
    state: MirrorState | None
    """What it was asked of."""


class SqlPool:
    """Runs queries over the mirror. Thread-safe; one per process."""

    def __init__(
        self,
        data: Path,
        mirror: Mirror,
        *,
        workers: int = 2,
        waiting: int = 8,
        per_caller: int = 4,
        memory: int = 1 << 30,
        max_timeout: float = 60.0,
        max_bytes: int = 64 << 20,
        on_damage: Callable[[list[str]], object] = lambda _files: None,
    ):
        self._data = data.resolve()
        self._mirror = mirror
        self._workers = workers
        self.memory = Memory.of(memory, workers)
        self._max_timeout = max_timeout
        self._max_bytes = min(max_bytes, self.memory.answers // 2)
        self._on_damage = on_damage
        self.most_at_once = workers + waiting
        """Queries of callers that are admitted at one time."""
        self._callers = FairQueue[WorkerProcess](
            running=max(1, workers - 1), waiting=waiting, per_caller=per_caller
        )
        self._own = FairQueue[WorkerProcess](running=1, waiting=waiting, per_caller=waiting + 1)
        self._own_started = False
        self._all: set[WorkerProcess] = set()
        self._held: Counter[str] = Counter()
        """Bytes of answers in this process, by caller."""
        self._lock = threading.Lock()
        self._warm = threading.Event()
        """Set when the first worker was ready."""
        self._tables = ThreadPoolExecutor(workers + 2 * waiting + 2, "sql-tables")
        self._closed = False

    def start(self) -> None:
        """Begin to start workers; queries that come meanwhile wait for the first."""
        for _ in range(self._workers):
            self._spawn(self._callers)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            workers = list(self._all)
            self._all.clear()
        self._callers.close()
        self._own.close()
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()
        self._tables.shutdown(wait=False, cancel_futures=True)

    @property
    def confinement(self) -> dict[str, bool]:
        """Which layers hold in the workers; empty before the first has started."""
        with self._lock:
            return next((dict(w.layers) for w in self._all if w.layers), {})

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
        came: float | None = None,
    ) -> Result:
        """Run one SELECT for `user`, who came at that time of the monotonic clock.

        Raises `ProblemError`: 422 sql_error, sql_not_allowed, query_timeout; 404 for an unknown
        dataset; 429 too_many_queries; 503 while the service stops.
        """
        seconds = min(timeout, self._max_timeout)
        _check_json(sql, params)
        with self._admitted(user):
            deadline = self._deadline(time.monotonic() if came is None else came, seconds)
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
            header, payload = self._sound(user, request, sql, dataset, state, deadline)
            log.info(
                "query",
                user=user,
                ms=round((time.monotonic() - began) * 1e3, 1),
                rows=header.get("rows"),
                code=header.get("code", "ok"),
            )
        if not header["ok"]:
            raise _refused(header, seconds)
        result = Result(
            [Column(**column) for column in header["columns"]],
            header["rows"],
            header["truncated"],
            header["elapsed_ms"],
            payload,
            [Excluded(**one) for one in header["excluded"]],
        )
        weakref.finalize(result, self._release, user, len(payload))
        return result

    def select_rows(
        self, select: str, dataset: str | None = None, *, timeout: float = 60.0
    ) -> Selected:
        """The trajectories that a selection names, by their `pk`, with weights if it has any.

        `select` yields the column `id` and, if wanted, `weight` (finite, > 0). With `dataset`, it
        sees only that dataset's trajectories, and bare `steps` is that dataset's. Raises
        `ProblemError` 422 `sql_error` for wrong columns, unknown ids, repeats and bad weights.
        """
        _check_json(select, None)
        with self._admitted(OWN):
            self._start_own()  # while the tables are brought up to date
            deadline = self._deadline(time.monotonic(), timeout)
            state = self._state(f"{select} trajectories", dataset, deadline)
            return self._select(select, dataset, state, deadline, timeout)

    def select_among(
        self, select: str, rows: pa.Table, dataset: str | None = None, *, timeout: float = 60.0
    ) -> Selected:
        """The same of these rows alone; `rows` has an `id`, their number, and what is read of them.

        Only for a selection whose `reads` is not None.
        """
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        body = sink.getvalue().to_pybytes()
        with self._admitted(OWN):
            deadline = self._deadline(time.monotonic(), timeout)
            return self._select(select, dataset, None, deadline, timeout, body)

    def _select(
        self,
        select: str,
        dataset: str | None,
        state: MirrorState | None,
        deadline: float,
        seconds: float,
        rows: bytes = b"",
    ) -> Selected:
        request = {
            "sql": select,
            "form": "rows",
            "limit": MAX_SELECTION,
            "max_bytes": 24 * MAX_SELECTION,
            "dataset": dataset,
            "only": dataset,
            "known": _SELECTABLE,
        }
        if state is None:  # of `rows` alone: no file is read
            header, payload = self._ask(OWN, request, None, deadline, rows)
        else:
            text = f"{select} trajectories"
            header, payload = self._sound(OWN, request, text, dataset, state, deadline)
        try:
            if not header["ok"]:
                raise _refused(header, seconds)
            if header["truncated"]:
                raise ProblemError(422, "sql_error", "the selection is too large for one snapshot")
            return _selected(header, payload, state, dataset)
        finally:
            if header["ok"]:
                self._release(OWN, len(payload))

    @contextlib.contextmanager
    def _admitted(self, user: str) -> Iterator[None]:
        """From admission to the end of the query."""
        queue = self._queue_of(user)
        queue.admit(user)
        try:
            yield
        finally:
            queue.leave(user)

    def _queue_of(self, user: str) -> FairQueue[WorkerProcess]:
        return self._own if user == OWN else self._callers

    def _deadline(self, came: float, seconds: float) -> float:
        """Counted from when the query came, or from when the service has its first worker."""
        if self._workers and not self._warm.is_set():
            self._warm.wait(START_SECONDS / 2)
            came = time.monotonic()
        return came + seconds

    def _state(self, text: str, dataset: str | None, deadline: float) -> MirrorState:
        """The tables as they are now, by the deadline; 404 for an unknown dataset."""
        state = self._refreshed(text, deadline)
        if dataset is not None and dataset not in state.specs:
            # The specs are refreshed only for queries that look at steps: ask again, with those.
            specs = self._refreshed("steps", deadline).specs
            if dataset not in specs:
                raise not_found("dataset", dataset, specs)
        return state

    def _refreshed(self, text: str, deadline: float) -> MirrorState:
        try:
            asked = self._tables.submit(self._mirror.state, text)
        except RuntimeError:
            raise ProblemError(503, "shutting_down", "the service is stopping") from None
        try:
            return asked.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            asked.cancel()
            raise ProblemError(
                422,
                "query_timeout",
                "the tables were not up to date by the query's deadline; try again, or give it"
                " more time",
            ) from None

    def _sound(
        self,
        user: str,
        request: dict[str, Any],
        text: str,
        dataset: str | None,
        state: MirrorState,
        deadline: float,
    ) -> tuple[dict[str, Any], bytearray]:
        """`_ask`, and again without the files that turn out to be damaged. Raises 503."""
        header, payload = self._ask(user, request, state, deadline)
        while damaged := header.get("damaged"):
            # Taken out of circulation, or made anew: then the same question once more.
            self._on_damage(damaged)
            if time.monotonic() >= deadline:
                raise _still_damaged(damaged)
            state = self._state(text, dataset, deadline)
            header, payload = self._ask(user, request, state, deadline)
        return header, payload

    def _ask(
        self,
        user: str,
        request: dict[str, Any],
        state: MirrorState | None,
        deadline: float,
        rows: bytes = b"",
    ) -> tuple[dict[str, Any], bytearray]:
        """What a worker answers. The answer's bytes are held for the user: see `_release`."""
        queue = self._queue_of(user)
        if queue is self._own:
            self._start_own()
        worker = self._take(queue, user, deadline)
        held = 0

        def room(size: int) -> None:
            nonlocal held
            self._hold(user, size)
            held = size

        header: dict[str, Any] | None = None
        kept = False
        try:
            if state is not None and worker.catalog_version != state.version:
                request = {**request, "catalog": catalog(state)}
                request |= _checksums_for(worker, state)
            seconds = max(0.0, deadline - time.monotonic())
            request = {**request, "seconds": seconds}
            header, payload = worker.ask(request, deadline + GRACE, room, rows)
            if state is not None:
                worker.catalog_version = state.version
                worker.checksums = state.checksums
            kept = bool(header["ok"])
            return header, payload
        except DeadlineExceeded:
            return _failure("query_timeout", ""), bytearray()
        except MemoryExceeded:
            return _failure("sql_error", "the query needed more memory than it may have"), _NONE
        except (EOFError, OSError):
            return _failure("sql_error", "the query ended its process (memory, most often)"), _NONE
        except ProblemError:
            header = {}  # the answer was refused, the worker is as good as before
            raise
        finally:
            if not kept:
                self._release(user, held)
            if header is not None and worker.reusable():
                queue.give(user, worker)
            else:
                self._replace(worker, queue)
                queue.give(user, None)

    def _hold(self, user: str, size: int) -> None:
        """Count an answer's bytes, or raise 429: others that were not yet delivered take the room.

        A caller has half of it; all callers together leave a quarter to the service itself.
        """
        most = self.memory.answers
        with self._lock:
            total = sum(self._held.values())
            callers = total - self._held[OWN]
            own = user == OWN
            if (
                total + size > most
                or (not own and callers + size > most * 3 // 4)
                or (not own and self._held[user] + size > most // 2)
            ):
                raise ProblemError(
                    429,
                    "too_many_queries",
                    "there is no room for the answer while earlier ones are being delivered; read"
                    " those, ask for less, or try again in a moment",
                    expected=f"answers of at most {most // 2} bytes, all of a caller together",
                    got=f"{size} bytes, beside {total} on their way",
                    headers={"Retry-After": "2"},
                )
            self._held[user] += size

    def _release(self, user: str, size: int) -> None:
        with self._lock:
            self._held[user] -= size
            if self._held[user] <= 0:
                del self._held[user]

    def _take(self, queue: FairQueue[WorkerProcess], user: str, deadline: float) -> WorkerProcess:
        """A worker that is alive; the dead ones that turn up are replaced."""
        while True:
            worker = queue.take(user, deadline)
            if worker.alive():
                return worker
            self._replace(worker, queue)
            queue.give(user, None)

    def _start_own(self) -> None:
        with self._lock:
            if self._own_started or not self._workers:
                return
            self._own_started = True
        self._spawn(self._own)

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
        """Until one is ready. One that replaces another is niced from the start: queries that are
        killed one after another must not keep the machine busy with restarts."""
        if instead_of is not None:
            instead_of.wait()  # its memory is in use until then
        wait = 0.2
        while True:
            with self._lock:
                if self._closed:
                    return
            try:
                if self._started(queue, nice=instead_of is not None):
                    return
            except BaseException as error:  # without workers no query can run
                log.error("a SQL worker did not start", error=repr(error), again_in=wait)
            time.sleep(wait)
            wait = min(2 * wait, 10.0)

    def _started(self, queue: FairQueue[WorkerProcess], *, nice: bool) -> bool:
        share = self.memory.own if queue is self._own else self.memory.caller
        worker = WorkerProcess(self._data, share, nice=nice)
        with self._lock:
            closed = self._closed
            if not closed:
                self._all.add(worker)
        try:
            if closed:
                return True
            worker.wait_ready()
        except BaseException:
            with self._lock:
                self._all.discard(worker)
                stopping = self._closed
            if stopping:  # close() has killed it
                return True
            raise
        finally:
            if closed or worker not in self._all:
                worker.kill()
                worker.wait()
        self._warm.set()
        queue.put(worker)
        return True


_NONE = bytearray()


def _check_json(sql: str, params: Any) -> None:
    """What cannot travel to the worker is refused before one is taken."""
    try:
        orjson.dumps([sql, params])
    except TypeError as error:
        raise ProblemError(
            422,
            "sql_error",
            f"the query or a parameter cannot be passed on: {error}",
            expected="text in Unicode and integers of at most 64 bits",
        ) from None


def _checksums_for(worker: WorkerProcess, state: MirrorState) -> dict[str, Any]:
    """Of files that are new to the worker, and names of those that it can forget."""
    known, wanted = worker.checksums, state.checksums
    fresh = {file: sums for file, sums in wanted.items() if known.get(file) is not sums}
    return {
        "checksums": {file: base64.b64encode(sums).decode() for file, sums in fresh.items()},
        "forget": [file for file in known if file not in wanted],
    }


def _still_damaged(files: list[str]) -> ProblemError:
    return ProblemError(
        503,
        "damaged",
        "damaged files were found and taken out of circulation; ask again, and the answer will say"
        " which are left out",
        got=", ".join(files)[:200],
        headers={"Retry-After": "1"},
    )


def _timeout(seconds: float) -> ProblemError:
    return ProblemError(
        422,
        "query_timeout",
        f"stopped after {seconds:g} s, waiting included; ask for less, or give a longer timeout",
    )


def _failure(code: str, detail: str) -> dict[str, Any]:
    return {"ok": False, "code": code, "detail": detail}


def _refused(header: dict[str, Any], seconds: float) -> ProblemError:
    if header["code"] == "query_timeout":
        return _timeout(seconds)
    return ProblemError(
        422,
        header["code"],
        header["detail"],
        expected=header.get("expected") or None,
        got=header.get("got") or None,
    )


def _selected(
    header: dict[str, Any], payload: bytearray, state: MirrorState | None, dataset: str | None
) -> Selected:
    """A worker's answer, checked: everything it names is there, once, and weighs something."""
    table = pa.ipc.open_stream(payload).read_all()
    names = table.column_names
    if "unknown" in names and (unknown := table.num_rows - table["unknown"].null_count):
        raise _bad_selection(
            f"{unknown} selected ids are not living trajectories"
            + (f" of dataset {dataset}" if dataset else ""),
            "ids of the table trajectories",
            table["unknown"].drop_null()[0].as_py(),
        )
    rows = np.array(table["row"].to_numpy(), np.int64)
    order = None if bool((np.diff(rows) > 0).all()) else np.argsort(rows, kind="stable")
    rows = rows if order is None else rows[order]
    if twice := int((np.diff(rows) == 0).sum()):
        raise _bad_selection(
            "a trajectory is selected twice",
            "each id once (SELECT DISTINCT)",
            f"{twice} repeats among {len(rows)} rows",
        )
    reads = None if header["reads"] is None else tuple(header["reads"])
    if "weight" not in names or table["weight"].null_count == len(rows):
        return Selected(rows, None, reads, state)
    values = np.array(table["weight"].to_numpy(), np.float64)
    values = values if order is None else values[order]
    bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        raise _bad_selection("a bad weight", "finite numbers > 0", str(values[bad][0]))
    return Selected(rows, values, reads, state)


def _bad_selection(detail: str, expected: str, got: str) -> ProblemError:
    return ProblemError(422, "sql_error", detail, expected=expected, got=got)
