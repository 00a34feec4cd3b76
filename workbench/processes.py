"""Child processes of `run`, `compare`, `demo` and the launcher.

Each has a log and a process group of its own. A child holds its lock file open, so one that
survived its killed parent is recognised by the next parent, which does not start it twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stepwell._compat import OWN_GROUP
from stepwell._locks import held_by, take_lock
from stepwell.errors import InvalidData, StepwellError

STEPWELL = (sys.executable, "-m", "stepwell.cli")
PROGRAM = re.compile(r"^stepwell( \w+)?: ")
"""Before the message of a command that failed."""
MOST_REASON = 300
"""Characters of a reason: an environment may raise whole pages."""
STOP_GRACE = 60.0
"""Seconds that a child may take to stop: a trainer writes a checkpoint and sends its metrics."""


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path | None,
    lock: IO[str] | None = None,
    shown: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start a child process. Raises OSError, ValueError.

    Its process group is its own, so that Ctrl-C reaches only the parent, which stops its children
    in order. It has no session of its own: Linux gives each session an equal share of the machine
    (autogroup), so that nice would mean nothing between them.

    Args:
        log: its output is appended to it, after `shown`; None for the parent's own output.
        lock: a locked file that it holds open until it ends.
    """
    with contextlib.nullcontext() if log is None else log.open("ab") as output:
        if output is not None:
            output.write(f"$ {shlex.join(shown)}\n".encode())
            output.flush()
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            pass_fds=() if lock is None else (lock.fileno(),),
            **OWN_GROUP,
        )


def end_of_log(log: Path, most: int = 16_384) -> list[str]:
    """The lines at the end of a log that are not blank, at most so many bytes. Raises OSError."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - most))
        text = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]


@dataclass
class Job:
    """A running command."""

    process: subprocess.Popen[bytes]
    log: Path
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def reason(self) -> str:
        """Why it has failed, in one line: its last error in the log, or how it ended."""
        status = self.process.returncode
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        last = next(reversed(end_of_log(self.log)), "").strip()[:MOST_REASON]
        if last.startswith("$ "):  # the command itself
            last = ""
        if status not in (1, 2) or not last:  # not one of a command that says why
            return f"exit status {status}" + (f", after: {last}" if last else "")
        return PROGRAM.sub("", last)


class Processes:
    """Starts `stepwell` commands with a log and a lock each, in one folder."""

    def __init__(self, folder: Path, variables: Mapping[str, str]):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.variables = {"OMP_NUM_THREADS": "1", **os.environ, **variables}

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def is_running(self, name: str) -> bool:
        """Whether an earlier parent's process is still at this job."""
        return held_by(self.folder / f"{name}.lock") is not None

    def start(self, name: str, words: Sequence[str]) -> Job:
        """Start `stepwell WORDS`; its output is appended to the job's log."""
        path = self.folder / f"{name}.lock"
        lock = take_lock(path, lambda _: StepwellError(f"another process is at the job {name}"))
        with lock:
            process = spawn(
                [*STEPWELL, *words],
                env=self.variables,
                log=self.log(name),
                lock=lock,
                shown=["stepwell", *words],
            )
        return Job(process, self.log(name), time.monotonic())


def read_train_config(words: Sequence[str]) -> dict[str, Any]:
    """The "config" and "origins" of `stepwell train WORDS`, without training.

    Raises `InvalidData` for what it refuses, such as an unknown recipe, with the nearest name.
    """
    process = subprocess.run(
        [*STEPWELL, "train", *words, "--print-config"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        raise InvalidData(PROGRAM.sub("", lines[-1]))
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def stop(jobs: Sequence[Job], grace: float = STOP_GRACE) -> None:
    """Ask all of them to stop, and kill those that have not after `grace` seconds."""
    for job in jobs:
        job.process.terminate()
    deadline = time.monotonic() + grace
    for job in jobs:
        try:
            job.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()
