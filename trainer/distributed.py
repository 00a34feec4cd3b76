"""Several processes as one: what they tell each other beside gradients. One is the easy case.

Texts travel as bytes in tensors, never as pickles.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs

from amago_model.config import CustomConfig
from amago_model.runtime.host_memory import keep_freed_memory
from stepwell.errors import StepwellError
from trainer.config import TrainConfig
from trainer.errors import ElsewhereError, TrainerError


class WorldError(TrainerError):
    """More or fewer processes run than were asked for."""


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The accelerator for this process. Raises `WorldError` unless the world is as asked for."""
    cpu = config.device == "cpu" or not torch.cuda.is_available()
    if cpu:
        keep_freed_memory()
    # The agent's statistics are those of all ranks' batches together, so equal everywhere already:
    # to broadcast them again in every forward pass would cost time, and hide it if they were not.
    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        # An agent of somebody's own may leave weights out of its loss, which has to be looked for.
        find_unused_parameters=config.agent.custom != CustomConfig(),
    )
    accelerator = Accelerator(cpu=cpu, mixed_precision=config.precision, kwargs_handlers=[ddp])
    world = accelerator.num_processes
    if config.processes and world != config.processes:
        raise WorldError(
            f"--processes {config.processes} was asked for, but {world} run; start them with: "
            f"stepwell train … --processes {config.processes} (some forms of `accelerate launch` "
            "on CPU silently start one)"
        )
    return accelerator


class World:
    """All processes of the run, and which one this is."""

    def __init__(self, accelerator: Accelerator):
        self.size, self.rank = accelerator.num_processes, accelerator.process_index
        self.is_main = accelerator.is_main_process
        """Global rank 0: the one that talks with the service."""
        self.is_node_main = accelerator.is_local_main_process
        """Local rank 0: the one that fills this node's cache."""
        self.device = accelerator.device
        self.host = socket.gethostname()

    def share(self, value: Any, source: int = 0) -> Any:
        """The JSON value that rank `source` has, on every rank."""
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

    def once(self, make: Callable[[], Any]) -> Any:
        """What `make` gives on rank 0, as JSON, on every rank.

        Its `StepwellError` ends all of them: as itself there, as `ElsewhereError` here.
        """
        value, trouble = None, None
        if self.is_main:
            try:
                value = make()
            except StepwellError as error:
                trouble = error
        value, failed = self.share([value, trouble.exit_status if trouble else 0])
        if trouble is not None:
            raise trouble
        if failed:
            raise ElsewhereError(failed)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, on every rank."""
        return [self.share(value, rank) for rank in range(self.size)]

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        if self.size == 1:
            return number
        tensor = torch.tensor([number], device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def largest_of(self, numbers: list[int]) -> list[int]:
        """The same for each of several numbers, at once."""
        if self.size == 1:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [int(number) for number in tensor.tolist()]

    def numbers(self, values: dict[str, float]) -> list[dict[str, float]]:
        """Every rank's numbers, of the same keys, on every rank."""
        if self.size == 1 or not values:
            return [values]
        names = sorted(values)
        table = torch.zeros(self.size, len(names), dtype=torch.float64, device=self.device)
        table[self.rank] = torch.tensor([values[n] for n in names], dtype=torch.float64)
        dist.all_reduce(table)
        return [dict(zip(names, row, strict=True)) for row in table.tolist()]

    def wait(self) -> None:
        """Until all are here."""
        self.largest(0)
