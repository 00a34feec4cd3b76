"""`stepwell train RECIPE …`; `accelerate launch -m trainer.main RECIPE …` takes the same arguments.

With --processes N the first process only starts the N that train.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from amago_model.errors import AmagoError
from stepwell._failure import fail
from stepwell._git import git_commit
from stepwell._settings import Resolved
from stepwell.client import Client
from stepwell.errors import NotFound, StepwellError
from trainer.config import TrainConfig
from trainer.errors import ElsewhereError, TrainerError
from trainer.options import resolve

log = logging.getLogger("trainer")
LAUNCHED = ("RANK", "WORLD_SIZE")


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit status. 0 also when it was told to stop and wrote a checkpoint."""
    words = list(sys.argv[1:] if argv is None else argv)
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    try:
        resolved = resolve(words)
        if not resolved.config.run:
            name = f"{resolved.config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
            words += ["--run", name]
            resolved = resolve(words)
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
        return error.exit_status  # process 0 says what it was
    except (StepwellError, AmagoError) as error:
        return fail("stepwell train", error)


def require_dataset(config: TrainConfig) -> None:
    """Raise `NotFound` for a dataset that does not exist, before a process, folder or run is made.

    A run that may be resumed has its data already, and one with data.wait_for_data waits for it.
    Any other trouble with the service is left to the run itself.
    """
    resumable = config.resume != "never" and (config.output / config.run).exists()
    if not config.dataset or config.data.wait_for_data or resumable:
        return
    try:
        with Client(timeout=5.0, retry_for=0.0) as client:
            client.dataset(config.dataset)
    except NotFound as error:
        hint = "--data.wait-for-data SECONDS would wait for it"
        raise NotFound({**error.problem, "detail": f"{error.detail}; {hint}"}) from None
    except StepwellError:
        pass


def run(resolved: Resolved[TrainConfig], words: Sequence[str], *, quiet: bool = False) -> int:
    """Train in this process, one of however many."""
    # After the help and the errors of the command line: torch takes seconds to load.
    import torch
    import torch.distributed as dist

    from trainer.loop import RunInfo, train

    def echo(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    for line in resolved.lines():
        echo(f"  {line}")
    try:
        with Client() as client:
            info = RunInfo(
                origins=resolved.origins,
                git_commit=git_commit(),
                command=shlex.join(["stepwell", "train", *words])[:4096],
            )
            status = train(resolved.config, client, info, echo)
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
    echo(f"run {resolved.config.run} {status}")
    return 0


def launch(config: TrainConfig, words: Sequence[str]) -> int:
    """Start config.processes processes on this machine and wait for them; the exit status of the
    first that failed, 128 + N where signal N killed it.

    These variables are all that torch and accelerate read. `accelerate launch --cpu
    --num_processes 2` silently starts one process (seen with 1.15).
    """
    size = str(config.processes)
    env = {**os.environ, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    env.setdefault("OMP_NUM_THREADS", str(config.threads))
    if config.device == "cpu":
        env["ACCELERATE_USE_CPU"] = "true"
    # Sessions of their own: Ctrl-C in a terminal reaches them through `forward` alone.
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer.main", *words],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(config.processes)
    ]

    def forward(number: int, frame: object) -> None:
        del frame
        for worker in workers:
            worker.send_signal(number)

    old = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return wait_for(workers)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def wait_for(workers: Sequence[subprocess.Popen[bytes]], grace: float = 60.0) -> int:
    """Wait until all have ended; `grace` seconds after one has failed the others are killed."""
    status, deadline = 0, math.inf
    running = dict(enumerate(workers))
    while running:
        for rank, worker in list(running.items()):
            with suppress(subprocess.TimeoutExpired):
                code = worker.wait(timeout=0.1)
                del running[rank]
                if code and not status:
                    status, deadline = code if code > 0 else 128 - code, time.monotonic() + grace
                    if code < 0:  # any other failure has said itself what it was
                        print(
                            f"stepwell train: process {rank} was killed by "
                            f"{signal.Signals(-code).name}; if nobody did that, the system did, "
                            "for want of memory",
                            file=sys.stderr,
                            flush=True,
                        )
        if time.monotonic() > deadline:
            for worker in running.values():
                worker.kill()
    return status


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
