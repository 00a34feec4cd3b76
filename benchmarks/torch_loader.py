"""Windows per second of a torch DataLoader over `stepwell.torch.Windows`, beside the trainer's.

    python -m benchmarks.torch_loader [--trajectories 400] [--workers 2] [--print]

A service in a separate process stores trajectories of 1000 steps (17 + 6 floats). Each round
measures in turn, for batches of 32 windows of 64 steps:

    stream      `trainer.data.stream`, whose thread prepares whole batches
    windows     a DataLoader over Windows in this process
    workers     the same with --workers worker processes

The result is the median over rounds; the files are in the page cache. Writes
benchmarks/results/torch_loader.json.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.report import write
from stepwell import Box, Client, EnvSpec
from stepwell.testing import make_trajectory, wait_until
from stepwell.torch import Windows
from trainer.data import stream

SPEC = EnvSpec.of(Box((17,)), Box((6,), low=-1.0, high=1.0))
STEPS, BATCH, WINDOW = 1000, 32, 64
ROUNDS, BATCHES = 7, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--print", action="store_true", help="print the result, do not write it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        service = subprocess.Popen(
            [sys.executable, "-m", "stepwell.cli", "serve", "--data", f"{folder}/data"]
            + ["--port", str(port)],
            env=os.environ | {"STEPWELL_MAINTENANCE_INTERVAL": "0"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with Client(f"http://127.0.0.1:{port}", timeout=120.0) as client:
                wait_until(client.ready, seconds=60)
                result = measure(client, Path(folder), options.trajectories, options.workers)
        finally:
            service.terminate()
            service.wait(60)
    print(result)
    if not options.print:
        print(write("torch_loader", result))


def measure(client: Client, folder: Path, trajectories: int, workers: int) -> dict[str, Any]:
    client.create_dataset("d", SPEC)
    for first in range(0, trajectories, 100):
        seeds = range(first, min(first + 100, trajectories))
        sent = [make_trajectory(SPEC, length=STEPS, seed=seed) for seed in seeds]
        client.post("d", sent, spec=SPEC, wait_sealed=True)
    began = time.perf_counter()
    windows = Windows("d", length=WINDOW, url=client.url, folder=folder / "shards")
    fetched = time.perf_counter() - began
    query = "SELECT id FROM trajectories WHERE dataset = 'd'"
    with ExitStack() as stack:
        ours = stream(query, window=WINDOW, batch=BATCH, client=client, cache=folder / "columns")
        stack.enter_context(closing(ours))  # type: ignore[type-var]
        contenders: dict[str, Iterator[Any]] = {
            "stream": ours,
            "windows": iter(DataLoader(windows, batch_size=BATCH)),
            "workers": iter(DataLoader(windows, batch_size=BATCH, num_workers=workers)),
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for round_ in range(ROUNDS + 1):
            for name, batches in contenders.items():
                began = time.perf_counter()
                for _ in islice(batches, BATCHES):
                    pass
                if round_:  # the first is a warm-up
                    times[name].append(time.perf_counter() - began)
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        "trajectories": trajectories,
        "batch": BATCH,
        "window": WINDOW,
        "workers": workers,
        "seconds_to_fetch": round(fetched, 2),
        "windows_per_second": {n: round(BATCHES * BATCH / t) for n, t in middle.items()},
    }


if __name__ == "__main__":
    main()
