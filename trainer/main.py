"""`stepwell train RECIPE …`; `accelerate launch -m trainer.main RECIPE …` takes the same arguments.

With --processes N, this process only starts N training processes.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from amago_model.errors import AmagoError
from stepwell._exit_message import fail
from stepwell._git import git_commit
from stepwell._ports import free_port
from stepwell._settings import Resolved
from stepwell._signals import stop_signals
from stepwell.client import Client
from stepwell.errors import NotFound, StepwellError
from trainer.config import TrainConfig
from trainer.errors import ElsewhereError, TrainerError
from trainer.options import resolve, without_effect
from trainer.recipes import speeds

log = logging.getLogger("trainer")
LAUNCHED = ("RANK", "WORLD_SIZE")
PRINT_CONFIG = "--print-config"
VERBOSE = "--verbose"


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit status, which is 0 also after a requested stop with a checkpoint."""
    words = list(sys.argv[1:] if argv is None else argv)
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    try:
        asked = [word for word in words if word != VERBOSE]
        if PRINT_CONFIG in asked:
            resolved = resolve([word for word in asked if word != PRINT_CONFIG])
            found = {"config": resolved.config.to_dict(), "origins": resolved.origins}
            print(json.dumps({**found, **speeds().get(resolved.config.recipe, {})}))
            return 0
        resolved = resolve(asked)
        if not resolved.config.run:
            name = f"{resolved.config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
            words += ["--run", name]
            resolved = resolve([*asked, "--run", name])
        config = resolved.config
        if not config.snapshot:
            config.require_data()
        launched = all(name in os.environ for name in LAUNCHED)
        if not launched:
            require_dataset(config)
        if config.processes > 1 and not launched:
            return launch(config, words)
        return run(resolved, words, quiet=rank != 0)
    except ElsewhereError as error:
        return error.exit_status  # process 0 reports the error
    except (StepwellError, AmagoError) as error:
        return fail("stepwell train", error)


def require_dataset(config: TrainConfig) -> None:
    """Raise `NotFound` for a dataset or version that does not exist, before a process, folder or
    run is made.

    A run that may be resumed has its data already, and one with data.wait_for_data waits for it.
    Any other trouble with the service is left to the run itself.
    """
    resumable = config.resume != "never" and (config.output / config.run).exists()
    if not config.dataset or config.data.wait_for_data or resumable:
        return
    try:
        with Client(timeout=5.0, retry_for=0.0) as client:
            if "@" in config.dataset:
                client.version(config.dataset)
            else:
                client.dataset(config.dataset)
    except NotFound as error:
        if "@" in config.dataset:
            raise
        hint = "--data.wait-for-data SECONDS would wait for it"
        raise NotFound({**error.problem, "detail": f"{error.detail}; {hint}"}) from None
    except StepwellError:
        pass


def run(resolved: Resolved[TrainConfig], words: Sequence[str], *, quiet: bool = False) -> int:
    """Train in this process, which may be one of several."""

    def echo(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    if VERBOSE in words:
        for line in resolved.lines():
            echo(f"  {line}")
    else:
        count = len(resolved.lines())
        echo(
            f"recipe {resolved.config.recipe}, {count} settings that are not the default; "
            f"{VERBOSE} prints them"
        )
    if unused := without_effect(resolved):
        echo(f"warning: settings without effect, because agent.critic is off: {', '.join(unused)}")
    command = ["stepwell", "train", *words]
    with Client() as client:
        return train_here(
            resolved.config,
            client,
            echo,
            origins=resolved.origins,
            command=command,
            verbose=VERBOSE in words,
        )


def train_here(
    config: TrainConfig,
    client: Client,
    echo: Callable[[str], None],
    *,
    origins: dict[str, str],
    command: Sequence[str],
    **info: Any,
) -> int:
    """Train in this process by `command`; returns the exit status. `info`: fields of `RunInfo`."""
    # Imported after --help and command-line errors are handled: torch takes seconds to load.
    import torch
    import torch.distributed as dist

    from trainer.loop import RunInfo, train

    words = shlex.join(command)[:4096]
    about = RunInfo(origins=origins, git_commit=git_commit(), command=words, **info)
    try:
        train(config, client, about, echo)
    except KeyboardInterrupt:
        echo("stopped at once; the last checkpoint stands")
        return 130
    except torch.OutOfMemoryError as error:
        raise TrainerError(
            f"{error} The device is full: raise optimizer.accumulate (the same update in smaller "
            "parts), or lower data.batch or data.window"
        ) from error
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    return 0


def launch(config: TrainConfig, words: Sequence[str]) -> int:
    """Start config.processes processes on this machine by `accelerate launch` and wait for them.

    `accelerate launch --cpu --num_processes 2` silently starts one process (seen with 1.15), so on
    a CPU the form is --multi_gpu with ACCELERATE_USE_CPU; loop.py checks the world in any case.
    """
    command = [
        *(sys.executable, "-m", "trainer.accelerate_launch", "--multi_gpu"),
        *("--num_machines", "1", "--num_processes", str(config.processes)),
        *("--mixed_precision", config.precision, "--dynamo_backend", "no"),
        *("--main_process_port", str(free_port()), "-m", "trainer.main", *words),
    ]
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(config.threads))
    if config.device == "cpu":
        env["ACCELERATE_USE_CPU"] = "1"
    # A process group of its own: Ctrl-C in a terminal would signal launcher and workers together.
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, process_group=0)

    def forward() -> None:
        """Signal the workers, which save and stop cleanly. The launcher would only kill them."""
        try:
            for worker in psutil.Process(process.pid).children() or [process]:
                worker.terminate()
        except psutil.NoSuchProcess:
            pass  # the process has already ended

    with stop_signals(forward, forward):
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
