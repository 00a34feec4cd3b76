"""What a worker tells the service about itself, and what it is told: heartbeats and commands.

    pause   stop acting, keep heart beating        resume  go on
    drain   finish the running episodes, then end  stop    end now; what runs is cut and kept

A heartbeat that does not arrive is no trouble: the work goes on, the next one brings the numbers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from stepwell._background import BackgroundLoop
from stepwell.client import Client
from stepwell.errors import StepwellError
from stepwell.messages import MetricPoint

State = Literal["starting", "running", "paused", "draining", "stopped", "failed"]
MAX_POINTS = 10_000
log = logging.getLogger(__name__)


class Control:
    """What somebody wants of this process: a command from the service, or a signal."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state: State = "starting"

    @property
    def state(self) -> State:
        return self._state

    @property
    def stopping(self) -> bool:
        return self._state == "stopped"

    def go(self) -> None:
        """Preparations are over."""
        self._move("running", only=("starting",))

    def command(self, word: str) -> None:
        """pause, resume, drain or stop; anything else, "none" among it, changes nothing."""
        if word == "pause":
            self._move("paused", only=("starting", "running"))
        elif word == "resume":
            self._move("running", only=("paused",))
        elif word == "drain":
            self._move("draining", only=("starting", "running", "paused"))
        elif word == "stop":
            self._move("stopped", only=("starting", "running", "paused", "draining"))

    def wait_while_paused(self) -> None:
        with self._changed:
            while self._state == "paused":
                self._changed.wait(0.5)

    def _move(self, state: State, only: tuple[State, ...]) -> None:
        with self._changed:
            if self._state in only:
                self._state = state
            self._changed.notify_all()


@contextlib.contextmanager
def signals(control: Control) -> Iterator[None]:
    """SIGINT and SIGTERM stop cleanly; the second one of them does not wait for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(*_: object) -> None:
        if control.stopping:
            raise KeyboardInterrupt
        control.command("stop")  # its lock is reentrant: the signal may find this thread inside

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Heartbeat:
    """A thread that reports every `every` seconds, and hands commands to `control`.

    `counters()` gives the numbers, `trouble()` the last error or "". Numbers named in `series` also
    become metrics of the run, at the step `counters()["env_steps"]`.
    """

    def __init__(
        self,
        client: Client,
        control: Control,
        *,
        worker: str,
        run: str,
        every: float,
        counters: Callable[[], Mapping[str, float]],
        policy: Callable[[], str],
        trouble: Callable[[], str],
        series: Callable[[], Mapping[str, float]],
        token: str | None = None,
    ):
        # A connection of its own, impatient: a service that is down must not stall the heart.
        self._client = Client(client.url, token, timeout=5.0, retry_for=0.0)
        self._control, self.worker, self.run = control, worker, run
        self._counters, self._policy, self._trouble = counters, policy, trouble
        self._series = series
        self._points: list[MetricPoint] = []
        self._ending: State | None = None
        self._spoilt = False
        self._loop = BackgroundLoop(
            "heartbeat", self.beat, every=every, longest_wait=every, expected=(StepwellError,)
        ).start()

    def beat(self) -> None:
        """Report now. Raises errors of the service."""
        counters, defect = self._numbers()
        state, ending = self._control.state, self._ending
        if state == "stopped":
            state = "draining"  # it sends the last episodes; how it ended comes with the end
        answer = self._client.heartbeat(
            self.worker,
            role="collect",
            run=self.run,
            host=socket.gethostname(),
            pid=os.getpid(),
            policy=self._policy(),
            state=ending or state,
            counters=counters,
            last_error=(defect or self._trouble())[:20_000],
        )
        self._control.command(answer.command)
        if self._points:
            self._client.log_metrics(self.run, self._points)
            self._points = []
        if ending is None:
            self._client.patch_run(self.run)

    def _numbers(self) -> tuple[dict[str, float], str]:
        """(counters, why there are none); a defect of ours must not silence the worker."""
        try:
            counters = dict(self._counters())
            step = int(counters.get("env_steps", 0))
            self._points += [
                MetricPoint(key=key, step=step, value=value, time=time.time())
                for key, value in self._series().items()
            ]
            self._points = self._points[-MAX_POINTS:]
        except Exception as error:
            if not self._spoilt:
                log.exception("a defect in the numbers of the heartbeat")
            self._spoilt = True
            return {}, f"a defect in the numbers of the heartbeat: {error}"
        return counters, ""

    def close(self, ending: State) -> None:
        """The last heartbeat says how it ended."""
        self._loop.stop(6.0)
        self._ending = ending
        with contextlib.suppress(StepwellError):
            self.beat()
        self._client.close()
