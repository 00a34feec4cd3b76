"""Programs of ours started as forks of a process that has imported them already.

Most of what a test waits for when it starts a service or a trainer is imports: two seconds of CPU
for a service, six for a trainer. A fork has them done. From `main` on it is the program as a
command starts it, in a process of its own, with its own environment variables and output; tests of
the commands themselves start commands.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from stepwell.testing import wait_until

SERVICE = ["stepwell.cli", "stepwell.terminal", "server.main", "server.app"]
SERVICE += ["server.http_protocol", "uvicorn", "uvicorn.lifespan.on", "uvicorn.loops.auto"]
TRAINER = ["torch._dynamo", "trainer.main", "trainer.loop", "collector.main", "collector.collect"]
_CONTEXT = multiprocessing.get_context("forkserver")


class Fork:
    """`main(words)` of a module in a fork of its own; used like a `subprocess.Popen`."""

    def __init__(self, module: str, words: Sequence[str], *, env: Mapping[str, str], output: Path):
        """Start it; what it prints is appended to the file `output`."""
        # What the first fork's server imports counts for all; without tests of torch, spare it.
        _CONTEXT.set_forkserver_preload(SERVICE + (TRAINER if "torch" in sys.modules else []))
        output.touch()
        self.output = output
        self._start = output.stat().st_size
        arguments = (module, list(words), dict(env), str(output))
        self._process = _CONTEXT.Process(target=_run, args=arguments, daemon=True)
        # The fork would run the main program of this process again: pytest's, or a page in a test.
        with mock.patch.dict(sys.modules, {"__main__": types.ModuleType("__main__")}):
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal; `subprocess.TimeoutExpired` after `timeout`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.output), timeout or 0)
        return self._process.exitcode

    def said(self) -> str:
        """What it has printed so far."""
        return self.output.read_bytes()[self._start :].decode(errors="replace")

    def wait_for(self, pattern: str, timeout: float) -> None:
        """Wait until it has printed something that matches the regular expression `pattern`."""

        def there() -> bool:
            ended = self.poll() is not None
            found = re.search(pattern, self.said()) is not None
            assert found or not ended, f"ended without {pattern!r}:\n{self.said()}"
            return found

        wait_until(there, timeout, what=pattern)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for its end; what it printed."""
        self.wait(timeout)
        return self.said(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(module: str, words: list[str], env: dict[str, str], output: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    for target, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, output, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, target)
        os.close(opened)
    os.dup2(1, 2)
    sys.argv = [module, *words]
    importlib.reload(importlib.import_module("stepwell.failpoints"))  # reads its variable once
    sys.exit(importlib.import_module(module).main(words))
