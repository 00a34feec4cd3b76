"""The processes of a run, and the values that they exchange besides gradients.

Values are sent as JSON in tensors, never as pickles.
"""

from __future__ import annotations

import json
import platform
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from stepwell.errors import StepwellError
from trainer.errors import ElsewhereError

PACKAGES = ("accelerate", "numpy", "stepwell", "torch")
"""Packages whose versions a run records, beside Python's."""


def package_versions() -> dict[str, str]:
    """The version of Python and of each of `PACKAGES` that is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def hardware(device: torch.device, processes: int = 1) -> str:
    """What computes: the model of the GPU or CPU, and of how many processes each has one."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_cpu_model()} ({device.type})"
    return name if processes == 1 else f"{processes} x {name}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


class World:
    """All processes of the run, and which one this is."""

    def __init__(self, accelerator: Accelerator):
        self.size, self.rank = accelerator.num_processes, accelerator.process_index
        self.is_main = accelerator.is_main_process
        """Global rank 0, the only process that reports the run to the service."""
        self.is_node_main = accelerator.is_local_main_process
        """Local rank 0, the only process that fills this node's cache."""
        self.device = accelerator.device
        self.host = socket.gethostname()

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return rank `source`'s JSON value on every rank."""
        if self.size == 1:
            return value
        data = json.dumps(value).encode() if self.rank == source else b""
        size = torch.tensor([len(data)], device=self.device)
        dist.broadcast(size, source)
        body = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == source:
            body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(body, source)
        return json.loads(bytes(body.cpu().tolist()))

    def all_gather(self, value: Any) -> list[Any]:
        """Return a list of all ranks' JSON values, on every rank."""
        return [self.broadcast(value, rank) for rank in range(self.size)]

    def maximum(self, numbers: Sequence[int]) -> list[int]:
        """The elementwise maximum over all ranks."""
        if self.size == 1:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [int(number) for number in tensor.tolist()]

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        self.maximum([0])

    def on_main(self, make: Callable[[], Any]) -> Any:
        """Call `make` on rank 0 and return its result, as JSON, on every rank.

        If it raises a `StepwellError`, rank 0 raises that error and all other ranks raise
        `ElsewhereError`.
        """
        value, raised = None, None
        if self.is_main:
            try:
                value = make()
            except StepwellError as error:
                raised = error
        value, failed = self.broadcast([value, raised.exit_status if raised else 0])
        if raised is not None:
            raise raised
        if failed:
            raise ElsewhereError(failed)
        return value
