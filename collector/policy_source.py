"""The policy to play: fetched from a run, and updated by a thread that polls with an ETag.

    run         the newest version, polled               run/best    an alias, polled
    run/7       that version, fetched once

Acting never waits for the network: it reads `current`. After any error (service down, damaged
bytes, a policy for another environment), the last policy stays in use, and `last_error` contains
the reason. policy_actor.py switches to a newer policy at the start of an episode.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from amago_model.acting import ActingPolicy
from amago_model.errors import AmagoError
from amago_model.policy_file import load_policy
from collector.config import parse_reference
from collector.policy_actor import ActorError, LoadedPolicy
from stepwell._background import BackgroundLoop
from stepwell.client import Client
from stepwell.errors import Busy, NotFound, ServiceUnreachable, StepwellError

FIRST_EVERY = 0.2
"""Seconds between two looks for the first policy, at most: nothing can be played before."""


class PolicySource:
    """Holds the newest policy of `reference`.

    `accept` is called with every policy before it is used, and raises to reject it. After `start`,
    a thread polls every `every` seconds.
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
        self._current: LoadedPolicy | None = None
        self._etag: str | None = None
        self._waited_for = ""
        self._stop = threading.Event()
        self._loop: BackgroundLoop | None = None

    @property
    def last_error(self) -> str:
        """Why the last attempt failed; empty after a successful one."""
        return (self._loop.trouble if self._loop is not None else "") or self._waited_for

    @property
    def current(self) -> LoadedPolicy:
        """The newest policy that was fetched. Raises `ActorError` before there is one."""
        if self._current is None:
            raise ActorError(self.last_error or f"no policy {self.reference} yet")
        return self._current

    @property
    def ready(self) -> bool:
        return self._current is not None

    def lag(self, policy_id: str) -> int | None:
        """How many updates older a version of this run is than the newest one that was fetched;
        None for other policies, and where versions are fixed."""
        run, _, version = policy_id.rpartition("/")
        known = self._current is not None and run == self.run and version.isdecimal()
        if self._current is None or not known or self.which.isdigit():
            return None
        return max(0, self._current.version - int(version))  # an alias may go back

    def poll(self) -> bool:
        """Poll once; True if there is a new policy. Raises errors of service and `load_policy`."""
        found = self._client.download_policy(self.run, self.which, etag=self._etag)
        if found is None:
            return False
        # Stored before loading, so that unusable bytes are not fetched repeatedly.
        self._etag = found.etag
        policy: ActingPolicy = load_policy(found.data, device=self._device)
        policy.eval()
        if self._accept is not None:
            self._accept(policy)
        step = policy.metadata.get("step")
        step = int(step) if isinstance(step, int | float) else 0
        self._current = LoadedPolicy(f"{self.run}/{found.version}", policy, step)
        return True

    def wait(self, should_stop: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until there is a policy (True), `should_stop`, or `timeout` seconds have passed.

        Waits for the run and its first policy to exist and for the service to respond. Other errors
        (no permission, unusable bytes) do not resolve without intervention and are raised.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not should_stop():
            try:
                if self.poll() or self.ready:
                    self._waited_for = ""
                    return True
            except NotFound as error:
                self._waited_for = self._absent(error)
            except (Busy, ServiceUnreachable) as error:
                self._waited_for = str(error)
            if deadline is not None and time.monotonic() > deadline:
                return False
            self._stop.wait(min(FIRST_EVERY, self._every))
        return False

    def start(self) -> None:
        """Start polling. A numbered version never changes and is not polled."""
        if self.which.isdigit() or self._loop is not None:
            return
        self._loop = BackgroundLoop(
            "policy",
            self._look,
            every=self._every,
            at_once=False,
            expected=(StepwellError, AmagoError),
        ).start()

    def _look(self) -> None:
        """Poll. A missing first policy is reported, and is not a failure."""
        try:
            self.poll()
        except NotFound as error:
            if self.ready:
                raise
            self._waited_for = self._absent(error)
        else:
            self._waited_for = ""

    def _absent(self, error: NotFound) -> str:
        return f"no policy {self.reference} yet: {error.detail}"

    def close(self) -> None:
        self._stop.set()
        if self._loop is not None:
            self._loop.stop(1.0)
