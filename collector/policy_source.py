"""Which policy to play: fetched from a run, and kept fresh by a thread that asks with an ETag.

    run         the newest version, again and again      run/best    an alias, again and again
    run/7       that version, once

Acting never waits for the network: it takes `current`. Any trouble (service down, damaged bytes, a
policy for another environment) leaves the policy in play and is told in `last_error`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from amago_model.acting import ActingPolicy
from amago_model.errors import AmagoError
from amago_model.policy_file import load_policy
from collector.actor import ActorError, Authored
from collector.config import parse_reference
from stepwell._background import BackgroundLoop
from stepwell.client import Client
from stepwell.errors import Busy, NotFound, ServiceUnreachable, StepwellError


@dataclass(frozen=True, slots=True)
class Published(Authored):
    """A policy as the service knows it."""

    version: int = 0
    sha256: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The learner's step that it was published at; 0 where the file does not say."""
        step = self.metadata.get("step")
        return int(step) if isinstance(step, int | float) else 0


def load_published(
    run: str, data: bytes, version: int, sha256: str, device: str = "cpu"
) -> Published:
    """The policy in `data`. Raises `AmagoError` for bytes that are none."""
    policy: ActingPolicy = load_policy(data, device=device)
    policy.eval()
    return Published(
        author=f"{run}/{version}",
        policy=policy,
        version=version,
        sha256=sha256,
        metadata=dict(policy.metadata),
    )


class PolicySource:
    """Keeps the newest policy of `reference` at hand.

    `accept` is called with every policy before it is taken, and refuses by raising. With `every`,
    a thread asks again after that many seconds.
    """

    def __init__(
        self,
        client: Client,
        reference: str,
        *,
        device: str = "cpu",
        every: float = 5.0,
        accept: Callable[[ActingPolicy], None] | None = None,
    ):
        self.reference = reference
        self.run, self.which = parse_reference(reference)
        self._client, self._device, self._every, self._accept = client, device, every, accept
        self._current: Published | None = None
        self._etag: str | None = None
        self._waited_for = ""
        self._stop = threading.Event()
        self._loop: BackgroundLoop | None = None

    @property
    def last_error(self) -> str:
        """Why the last attempt brought nothing; empty after one that worked."""
        return (self._loop.trouble if self._loop is not None else "") or self._waited_for

    @property
    def current(self) -> Published:
        """The newest policy that could be had. Raises `ActorError` before there is one."""
        if self._current is None:
            raise ActorError(f"no policy {self.reference} yet: {self.last_error}")
        return self._current

    @property
    def ready(self) -> bool:
        return self._current is not None

    def poll(self) -> bool:
        """Ask once; True if a new policy was taken. Raises what went wrong."""
        found = self._client.policy_bytes(self.run, self.which, etag=self._etag)
        if found is None:
            return False
        # Noted before it is read: bytes that cannot be used are not fetched again and again.
        self._etag = found.etag
        published = load_published(self.run, found.data, found.version, found.sha256, self._device)
        if self._accept is not None:
            self._accept(published.policy)  # type: ignore[arg-type]
        self._current = published
        return True

    def wait(self, should_stop: Callable[[], bool], timeout: float | None = None) -> bool:
        """Until there is a policy (True), or `should_stop`, or `timeout` seconds have passed.

        Waits for the run and its first policy to appear and for the service to answer; other
        trouble (no rights, unusable bytes) will not pass by itself and is raised.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not should_stop():
            try:
                if self.poll() or self.ready:
                    self._waited_for = ""
                    return True
            except (NotFound, Busy, ServiceUnreachable) as error:
                self._waited_for = str(error)
            if deadline is not None and time.monotonic() > deadline:
                return False
            self._stop.wait(min(1.0, self._every))
        return False

    def start(self) -> None:
        """Begin to ask again and again; a numbered version never changes and is not asked for."""
        if self.which.isdigit() or self._loop is not None:
            return
        self._loop = BackgroundLoop(
            "policy",
            self.poll,
            every=self._every,
            at_once=False,
            expected=(StepwellError, AmagoError),
        ).start()

    def close(self) -> None:
        self._stop.set()
        if self._loop is not None:
            self._loop.stop(1.0)
