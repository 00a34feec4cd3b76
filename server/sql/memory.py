"""How much memory queries may take: one bound, divided among the workers and the answers here."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from server.problems import ProblemError

OWN = "the service"
"""The caller of the service's own queries."""
BASE_MEMORY = 112 << 20
"""What a worker holds before its first query: Python, DuckDB and Arrow."""


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


class AnswerMemory:
    """Counts answers in this process, from the worker's pipe until the client has them."""

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self.held: Counter[str] = Counter()
        """Bytes by caller."""

    def hold(self, user: str, size: int) -> None:
        """Count an answer's bytes, or raise 429: others that were not yet delivered take the room.

        A caller has half of it; all callers together leave a quarter to the service itself.
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
                    "there is no room for the answer while earlier ones are being delivered; read"
                    " those, ask for less, or try again in a moment",
                    expected=f"answers of at most {most // 2} bytes, all of a caller together",
                    got=f"{size} bytes, beside {total} on their way",
                    headers={"Retry-After": "2"},
                )
            self.held[user] += size

    def release(self, user: str, size: int) -> None:
        """So many bytes of the user's answers are delivered, or thrown away."""
        with self._lock:
            self.held[user] -= size
            if self.held[user] <= 0:
                del self.held[user]
