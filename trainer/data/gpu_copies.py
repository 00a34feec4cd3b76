"""Copies of batches to a GPU, for which nobody waits.

    prefetch thread   gathers, page-locks ─▶ GpuCopies.send
    copy stream                              batch ──▶ device, event
    reader            GpuCopies.receive ─▶   the compute stream waits for the event

torch's allocators of page-locked and of device memory reuse neither before the streams that use it
are done with it. The reader never synchronises: the CPU may run ahead of the GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from amago_model.data.batch import Batch


class Cuda:
    """What of CUDA `GpuCopies` uses; tests put a stand-in here whose copies are late."""

    def __init__(self, device: torch.device):
        self.device = device

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def new_event(self) -> Any:
        return torch.cuda.Event()

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def copy(self, tensor: Tensor) -> Tensor:
        """On the device, by the stream that is current; returns before it is done."""
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        """The allocator must not hand out its memory again before the stream is done with it."""
        tensor.record_stream(stream)


class GpuCopies:
    """Copies batches to a GPU on a stream of their own. `send` is called by one thread, `receive`
    by another. Not measured on a GPU."""

    def __init__(self, cuda: Cuda):
        self._cuda, self._stream = cuda, cuda.new_stream()

    def send(self, batch: Batch) -> tuple[Batch, Any]:
        """The batch on the device, not to be read before `receive`, and the event of its copy."""
        event = self._cuda.new_event()
        with self._cuda.on(self._stream):
            there = batch._map(self._cuda.copy)
            event.record(self._stream)
        return there, event

    def receive(self, batch: Batch, event: Any) -> None:
        """Let the reader's stream use the batch, once it has arrived. Does not wait."""
        stream = self._cuda.current_stream()
        stream.wait_event(event)
        # Allocated on the copy stream, read on this one.
        batch._map(lambda tensor: self._cuda.used_by(tensor, stream))
