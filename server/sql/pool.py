"""The parent's side of SQL: a few confined worker processes, each query killed at its deadline.

    query → a free worker (or 429) → the worker interrupts itself at the deadline
                                   → half a second later, or when it grows too fat: SIGKILL, respawn

Nothing of a query runs in this process; what comes back is a frame of bytes. Workers are started
ahead of need, because a Python process with DuckDB takes a third of a second to be ready.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
import pyarrow as pa
import structlog

from server.index.mirror import Mirror, MirrorState
from server.problems import ProblemError
from server.sql.catalog import catalog
from server.sql.child import START_SECONDS, Fat, Late, Worker
from stepwell.messages import Column

Form = Literal["json", "arrow", "selection"]
GRACE = 0.5
"""Seconds between a query's deadline and the SIGKILL of the process that did not notice."""
MAX_SELECTION = 50_000_000
_FAT = 768 << 20
"""A worker that holds more than this after its query is replaced."""

log = structlog.get_logger("stepwell.sql")


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a query, as the worker wrote it."""

    columns: list[Column]
    rows: int
    truncated: bool
    elapsed_ms: float
    payload: bytes
    """A JSON list of rows, or an Arrow IPC stream."""


class SqlPool:
    """Runs queries over the mirror. Thread-safe; one per process."""

    def __init__(
        self,
        data: Path,
        mirror: Mirror,
        *,
        workers: int = 2,
        waiting: int = 8,
        per_user: int = 4,
        memory: int = 512 << 20,
        max_timeout: float = 60.0,
        max_bytes: int = 256 << 20,
    ):
        self._data = data.resolve()
        self._mirror = mirror
        self._workers = workers
        self._waiting = waiting
        self._per_user = per_user
        self._memory = memory
        self._max_timeout = max_timeout
        self._max_bytes = max_bytes
        self._idle: queue.Queue[Worker] = queue.Queue()
        self._all: set[Worker] = set()
        self._lock = threading.Lock()
        self._active: Counter[str] = Counter()
        self._closed = False

    def start(self) -> None:
        """Begin to start workers; queries that come meanwhile wait for the first."""
        for _ in range(self._workers):
            self._spawn()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            workers = list(self._all)
            self._all.clear()
        for worker in workers:
            worker.kill()

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
        only: str | None = None,
    ) -> Result:
        """Run one SELECT. Raises `ProblemError`: 422 sql_error, sql_not_allowed, query_timeout;
        404 for an unknown dataset; 429 too_many_queries."""
        seconds = min(timeout, self._max_timeout)
        _check_json(sql, params)
        with self._turn(user):
            state = self._mirror.state(f"{sql} trajectories" if form == "selection" else sql)
            self._known(dataset, state)
            request = {
                "sql": sql,
                "params": params,
                "limit": limit,
                "max_bytes": self._max_bytes,
                "seconds": seconds,
                "form": form,
                "dataset": dataset,
                "only": only,
            }
            began = time.monotonic()
            header, payload = self._ask(request, state, seconds)
            log.info(
                "query",
                user=user,
                ms=round((time.monotonic() - began) * 1e3, 1),
                rows=header.get("rows"),
                code=header.get("code", "ok"),
            )
        if not header["ok"]:
            raise ProblemError(
                422,
                header["code"],
                header["detail"],
                expected=header.get("expected") or None,
                got=header.get("got") or None,
            )
        return Result(
            [Column(**column) for column in header["columns"]],
            header["rows"],
            header["truncated"],
            header["elapsed_ms"],
            payload,
        )

    def select_ids(
        self, select: str, dataset: str | None = None, *, timeout: float = 60.0
    ) -> list[tuple[str, float | None]]:
        """The trajectories that a selection names, in its order, with their weights if it has any.

        `select` yields the column `id` and, if wanted, `weight` (finite, > 0). With `dataset`, it
        sees only that dataset's trajectories, and bare `steps` is that dataset's. Raises
        `ProblemError` 422 `sql_error` for wrong columns, unknown ids, repeats and bad weights.
        """
        result = self.query(
            select,
            dataset=dataset,
            only=dataset,
            limit=MAX_SELECTION,
            timeout=timeout,
            form="selection",
            user="snapshots",
        )
        if result.truncated:
            raise ProblemError(422, "sql_error", "the selection is too large for one snapshot")
        table = pa.ipc.open_stream(result.payload).read_all()
        ids: list[str | None] = table.column("id").to_pylist()
        weights: list[float | None] = table.column("weight").to_pylist()
        known: list[bool] = table.column("known").to_pylist()
        if unknown := [i for i, k in zip(ids, known, strict=True) if not k]:
            raise _bad_selection(
                f"{len(unknown)} selected ids are not living trajectories"
                + (f" of dataset {dataset}" if dataset else ""),
                "ids of the table trajectories",
                str(unknown[0]),
            )
        if len(set(ids)) != len(ids):
            twice = next(i for i, n in Counter(ids).items() if n > 1)
            raise _bad_selection(
                "a trajectory is selected twice", "each id once (SELECT DISTINCT)", str(twice)
            )
        weighted = any(column.name.lower() == "weight" for column in result.columns) and any(
            weight is not None for weight in weights
        )
        if weighted:
            for weight in weights:
                if weight is None or not math.isfinite(weight) or weight <= 0:
                    raise _bad_selection("a bad weight", "finite numbers > 0", str(weight))
        return [(str(i), w) for i, w in zip(ids, weights, strict=True)]

    def _known(self, dataset: str | None, state: MirrorState) -> None:
        if dataset is None or dataset in state.specs:
            return
        # The specs are refreshed only for queries that look at steps: ask again, with those.
        if dataset not in self._mirror.state("steps").specs:
            raise ProblemError(404, "not_found", f"there is no dataset {dataset!r}")

    @contextlib.contextmanager
    def _turn(self, user: str) -> Iterator[None]:
        with self._lock:
            total = sum(self._active.values())
            if total >= self._workers + self._waiting or self._active[user] >= self._per_user:
                raise ProblemError(
                    429,
                    "too_many_queries",
                    "too many queries at once; try again in a moment",
                    expected=f"at most {self._per_user} of one caller,"
                    f" {self._workers + self._waiting} of all",
                    headers={"retry-after": "1"},
                )
            self._active[user] += 1
        try:
            yield
        finally:
            with self._lock:
                self._active[user] -= 1
                if not self._active[user]:
                    del self._active[user]

    def _ask(
        self, request: dict[str, Any], state: MirrorState, seconds: float
    ) -> tuple[dict[str, Any], bytes]:
        worker = self._take(seconds)
        header: dict[str, Any] | None = None
        try:
            if worker.catalog_version != state.version:
                request = {**request, "catalog": catalog(state)}
            header, payload = worker.ask(
                request, seconds + GRACE, self._memory + 2 * self._max_bytes + (256 << 20)
            )
            worker.catalog_version = state.version
            return header, payload
        except Late:
            return _failure(
                "query_timeout",
                f"killed after {seconds:g} s; ask for less, or give a longer timeout",
            ), b""
        except Fat:
            return _failure("sql_error", "the query needed more memory than it may have"), b""
        except (EOFError, OSError):
            return _failure("sql_error", "the query ended its process (memory, most often)"), b""
        finally:
            self._give(worker, reusable=header is not None and worker.resident() < _FAT)

    def _take(self, seconds: float) -> Worker:
        """A worker that is alive; the dead ones that turn up are replaced."""
        deadline = time.monotonic() + max(seconds, START_SECONDS / 2)
        while True:
            try:
                worker = self._idle.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ProblemError(
                    429,
                    "too_many_queries",
                    "no SQL worker became free in time",
                    headers={"retry-after": "2"},
                ) from None
            if worker.alive():
                return worker
            self._give(worker, reusable=False)

    def _give(self, worker: Worker, *, reusable: bool) -> None:
        with self._lock:
            keep = reusable and not self._closed
            if not keep:
                self._all.discard(worker)
        if keep:
            self._idle.put(worker)
            return
        worker.kill()
        self._spawn()

    def _spawn(self) -> None:
        threading.Thread(target=self._start_worker, name="sql-start", daemon=True).start()

    def _start_worker(self) -> None:
        for attempt in range(5):
            with self._lock:
                if self._closed:
                    return
                worker = Worker(self._data, self._memory)
                self._all.add(worker)
            try:
                worker.wait_ready()
                self._idle.put(worker)
                return
            except (Late, EOFError, OSError) as error:
                with self._lock:
                    self._all.discard(worker)
                worker.kill()
                if self._stopped():
                    return
                log.error("a SQL worker did not start", attempt=attempt, error=repr(error))
                time.sleep(min(0.2 * 2**attempt, 2.0))

    def _stopped(self) -> bool:
        with self._lock:
            return self._closed


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


def _failure(code: str, detail: str) -> dict[str, Any]:
    return {"ok": False, "code": code, "detail": detail}


def _bad_selection(detail: str, expected: str, got: str) -> ProblemError:
    return ProblemError(422, "sql_error", detail, expected=expected, got=got)


def build(service: Any) -> SqlPool:
    """The part of the service that deps.py asks for."""
    settings = service.settings
    return SqlPool(
        settings.data,
        service.mirror,
        workers=settings.sql_workers,
        waiting=settings.sql_queue,
        memory=settings.sql_memory,
        max_timeout=settings.sql_max_timeout,
        max_bytes=settings.sql_max_bytes,
    )
