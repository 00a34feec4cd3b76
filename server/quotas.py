"""Quotas of a token: requests per minute and bytes of bodies per day, in constant memory.

Both are leaky buckets: a token may use its quota at once, and what it used is forgiven evenly, a
whole quota in a minute or in a day. So a refusal says after how many seconds the same request
passes. Requests are forgotten in a restart; bytes are saved with the token's last use (auth.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.problems import ProblemError

MINUTE, DAY = 60.0, 86_400.0


@dataclass(slots=True)
class Bucket:
    """What was used of a quota, as it was at `at`."""

    seconds: float
    """After which a whole quota is forgiven."""
    limit: int | None = None
    """None: no quota."""
    used: float = 0.0
    at: float = 0.0

    def now(self) -> float:
        """What counts now."""
        if self.limit is None:
            return 0.0
        return max(0.0, self.used - (time.monotonic() - self.at) * self.limit / self.seconds)

    def wait(self, amount: float) -> float:
        """Seconds until `amount` more fits; 0 if it does now."""
        if self.limit is None:
            return 0.0
        over = self.now() + amount - self.limit
        return 0.0 if over <= 0 else over * self.seconds / self.limit

    def add(self, amount: float) -> None:
        """Count an amount; a negative one gives back."""
        if self.limit is None:
            return
        self.used, self.at = max(0.0, self.now() + amount), time.monotonic()


@dataclass(slots=True)
class Quotas:
    """Request and byte quotas of one token."""

    requests: Bucket
    bytes: Bucket

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Quotas:
        """Load the quotas from a row of `tokens`. What recovered while no service ran follows from
        the wall clock; one that was set back recovers nothing."""
        made = cls(Bucket(MINUTE, row["requests_per_minute"]), Bucket(DAY, row["bytes_per_day"]))
        past = max(0.0, time.time() - (row["bytes_used_at"] or 0.0))
        made.bytes.add(max(0.0, row["bytes_used"] - past * (made.bytes.limit or 0) / DAY))
        return made

    def admit(self, length: int | None) -> None:
        """Count a request with a body of this declared length. Raises 429, 413 or 411."""
        if wait := self.requests.wait(1):
            raise _exceeded(f"{self.requests.limit} requests per minute", wait)
        limit = self.bytes.limit
        if limit is not None:
            if length is None:
                raise ProblemError(
                    411,
                    "length_required",
                    "a token with a quota of bytes declares the length of each body",
                    expected="a Content-Length header",
                    got="a chunked body",
                )
            if length > limit:
                raise ProblemError(
                    413,
                    "quota_exceeded",
                    "the body is larger than all that the token may send in a day; send less in"
                    " one request, or ask an admin for more",
                    expected=f"at most {limit} bytes",
                    got=f"{length} bytes",
                )
            if wait := self.bytes.wait(length):
                raise _exceeded(f"{limit} bytes per day", wait)
        self.requests.add(1)
        if length:
            self.bytes.add(length)


def _exceeded(quota: str, wait: float) -> ProblemError:
    return ProblemError(
        429,
        "quota_exceeded",
        "the token has used its quota; wait, or ask an admin for more: stepwell tokens set",
        expected=quota,
        got=f"more; the same request passes in {math.ceil(wait)} s",
        headers={"Retry-After": str(math.ceil(wait))},
    )
