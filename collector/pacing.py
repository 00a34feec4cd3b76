"""Whether collectors are ahead of the trainers that keep a ratio with their dataset.

A thread asks the service every second for the consumers of the dataset (`Consumer` in
stepwell/messages.py), and from then on counts the steps that are played. While a living consumer is
behind, no episode begins; running ones end first, so neither side can wait for the other for ever.
"""

from __future__ import annotations

from collections.abc import Callable

from stepwell._background import BackgroundLoop
from stepwell.client import Client
from stepwell.errors import StepwellError
from stepwell.messages import Consumer

POLL = 1.0
"""Seconds between two questions."""


class Pacing:
    """Says whether to wait. `steps()` is the number of steps that this collector has played.

    While the service is unreachable, its last answer counts.
    """

    def __init__(self, client: Client, dataset: str, steps: Callable[[], int]) -> None:
        self._client, self._dataset = client.with_options(timeout=5.0, retry_for=0.0), dataset
        self._steps = steps
        self._slowest: tuple[Consumer, int] | None = None
        """The living consumer that permits the fewest steps, and the number of steps until which
        it does."""
        self._loop = BackgroundLoop(
            "pacing", self._ask, every=POLL, longest_wait=5.0, expected=(StepwellError,)
        ).start()

    @property
    def full(self) -> bool:
        """Whether the dataset had as many steps as it may have, when it was last asked for."""
        slowest = self._slowest  # another thread replaces it
        return slowest is not None and not slowest[0].may_insert

    @property
    def ahead(self) -> str:
        """The trainer to wait for, with the steps played since, and why; empty if there is none."""
        slowest = self._slowest
        if slowest is None or self._steps() < slowest[1]:
            return ""
        c, _ = slowest
        return (
            f"{c.name} has drawn {c.samples:,} samples of {c.inserted:,} steps, and keeps "
            f"{c.ratio.least:g} per step"
        )

    def close(self) -> None:
        self._loop.stop(1.0)

    def _ask(self) -> None:
        played = self._steps()
        living = [c for c in self._client.consumers(self._dataset) if c.alive]
        rooms = [(c, played + c.inserts_until - c.inserted) for c in living]
        self._slowest = min(rooms, key=lambda room: room[1], default=None)
