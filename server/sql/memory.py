"""The memory of queries: one bound, divided among the workers and the results in this process."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from server.problems import ProblemError

OWN = "the service"
"""The caller name of the service's own queries."""
BASE_MEMORY = 112 << 20
"""Memory of a worker before its first query: Python, DuckDB and Arrow."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The parts of one bound; their sum never exceeds it."""

    caller: int
    """Resident memory of a worker for callers."""
    own: int
    """Resident memory of the service's own worker, whose selections for snapshots are large."""
    answers: int
    """Results in this process, from the worker's pipe until the client has read them."""

    @classmethod
    def of(cls, total: int, workers: int) -> Memory:
        """Raises ValueError if too little remains for queries."""
        answers = total // 8
        unit = (total - answers - (workers + 1) * BASE_MEMORY) // (workers + 2)
        if workers and unit < 16 << 20:
            least = ((workers + 1) * BASE_MEMORY + (workers + 2) * (16 << 20)) * 8 // 7
            raise ValueError(
                f"STEPWELL_SQL_MEMORY={total} is too little for {workers} workers and the service's"
                f" own: at least {least // (1 << 20) + 1} MiB, or fewer STEPWELL_SQL_WORKERS"
            )
        return cls(BASE_MEMORY + unit, BASE_MEMORY + 2 * unit, answers)


class AnswerMemory:
    """Counts results in this process, from the worker's pipe until the client has read them."""

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self.held: Counter[str] = Counter()
        """Bytes by caller."""

    def hold(self, user: str, size: int) -> None:
        """Count a result's bytes. Raises 429 if undelivered results use the memory.

        A caller may use half of it; all callers together leave a quarter to the service itself.
        """
        most = self._most
        with self._lock:
            total = sum(self.held.values())
            full = total + size > most
            if user != OWN:
                full |= total - self.held[OWN] + size > most * 3 // 4
                full |= self.held[user] + size > most // 2
            if full:
                raise ProblemError(
                    429,
                    "too_many_queries",
                    "no memory for the result while earlier ones are being delivered; read those,"
                    " request less, or try again in a moment",
                    expected=f"results of at most {most // 2} bytes, all of a caller together",
                    got=f"{size} bytes, and {total} undelivered",
                    headers={"Retry-After": "2"},
                )
            self.held[user] += size

    def release(self, user: str, size: int) -> None:
        """Release bytes of the user's results, delivered or discarded."""
        with self._lock:
            self.held[user] -= size
            if self.held[user] <= 0:
                del self.held[user]
