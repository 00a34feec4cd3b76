"""Programs and commands that people run, run in this process: it has imported torch already."""

from __future__ import annotations

import contextlib
import io
import runpy
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from amago_model import registry as parts
from stepwell import Client
from trainer.data.relabel import registry as relabelers


def run_script(
    path: Path, words: Sequence[str], patch: pytest.MonkeyPatch, *, folder: Path, url: str
) -> str:
    """What a program prints, which ends well, in `folder` and with a service. As in every test,
    warnings are errors; what it registers is forgotten, and its clients are closed."""
    patch.chdir(folder)
    patch.setenv("STEPWELL_URL", url)
    patch.setenv("STEPWELL_OUTBOX", str(folder / "outbox"))
    patch.setenv("XDG_CACHE_HOME", str(folder))
    patch.setattr(gymnasium.envs.registration, "registry", {**gymnasium.registry})
    patch.setattr(parts, "_registered", {kind: {**of} for kind, of in parts._registered.items()})
    patch.setattr(relabelers, "_registered", {**relabelers._registered})
    patch.setattr(sys, "argv", [str(path), *words])
    clients: list[Client] = []

    def remembered(self: Client, *args: Any, **options: Any) -> None:
        clients.append(self)
        start(self, *args, **options)

    start = Client.__init__
    patch.setattr(Client, "__init__", remembered)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings():
        # An earlier test of this process may have imported the module that the program is.
        warnings.filterwarnings("ignore", ".*Overriding environment")
        runpy.run_path(str(path), run_name="__main__")
    for client in clients:
        client.close()
    return said.getvalue()


def status_of(command: Callable[[list[str]], int], args: list[str]) -> int:
    """The exit status of a command that is called here, which gives its signals back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return command(args)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 2 * bool(ended.code)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
