"""Episodes whose environment failed: how many for each cause, and the first of each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MOST_CAUSES = 20
"""Further ones are counted together."""
OTHERS = "other causes"
_NUMBER = re.compile(r"0x[0-9a-f]+|[-+]?\d[\d_]*(\.\d*)?(e[-+]?\d+)?", re.IGNORECASE)


@dataclass(slots=True)
class _Cause:
    first: str
    count: int = 0


@dataclass(slots=True)
class BrokenEpisodes:
    """Errors that differ in their numbers only have one cause."""

    total: int = 0
    last: str = ""
    """The error of the last one."""
    _causes: dict[str, _Cause] = field(default_factory=dict)

    def add(self, error: str, *, seed: int | None, step: int) -> None:
        """`step`: transitions of the episode before the error."""
        self.total, self.last = self.total + 1, error
        key = _NUMBER.sub("N", error)
        if key not in self._causes and len(self._causes) >= MOST_CAUSES:
            key = OTHERS
        place = f"step {step}" if seed is None else f"seed {seed}, step {step}"
        cause = self._causes.setdefault(key, _Cause(f"{error} (first: {place})"))
        cause.count += 1

    def lines(self) -> list[str]:
        """`COUNT x ERROR (first: seed S, step T)` for each cause, the most frequent first."""
        causes = sorted(self._causes.items(), key=lambda item: -item[1].count)
        return [
            f"{cause.count} x {f'{OTHERS}, as {cause.first}' if key == OTHERS else cause.first}"
            for key, cause in causes
        ]

    def summary(self, complete: int) -> str:
        """What a run keeps of them; empty without any."""
        if not self.total:
            return ""
        verb = "1 episode was" if self.total == 1 else f"{self.total} episodes were"
        head = f"{verb} broken off by an error of the environment, {complete} ended"
        return "\n".join((f"{head}:", *self.lines()))
