"""Asynchronous copies of batches to a GPU.

    prefetch thread   gathers, page-locks ─▶ GpuCopies.send
    copy stream                              batch ──▶ device, event
    reader            GpuCopies.receive ─▶   the compute stream waits for the event

torch's allocators reuse page-locked and device memory only after the streams that use it are done
with it. The reader never synchronises: the CPU may run ahead of the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, cuda

from amago_model.data.batch import Batch


class GpuCopies:
    """Copies batches to a GPU on a separate stream. One thread calls `send`, another `receive`."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, cuda.Stream(device)

    def send(self, batch: Batch) -> tuple[Batch, Any]:
        """Start the copy. Returns the batch on the device, which must not be read before
        `receive`, and the event of its copy."""
        event = cuda.Event()
        with cuda.stream(self._stream):
            there = batch._map(lambda tensor: copy_later(tensor, self._device))
            event.record(self._stream)
        return there, event

    def receive(self, batch: Batch, event: Any) -> None:
        """Make the reader's stream wait for the copy. The calling thread does not wait."""
        stream = cuda.current_stream(self._device)
        stream.wait_event(event)
        # Allocated on the copy stream and read on this one: its memory must not be reused before
        # both are done with it.
        batch._map(lambda tensor: tensor.record_stream(stream))


def copy_later(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device on the current stream; returns before the copy is complete."""
    return tensor.pin_memory().to(device, non_blocking=True)
