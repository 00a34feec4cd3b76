"""Copies of batches to a GPU, for which nobody waits.

    prefetch thread   gathers, page-locks ─▶ GpuCopies.send
    copy stream                              batch ──▶ device, event
    reader            GpuCopies.receive ─▶   the compute stream waits for the event

torch's allocators of page-locked and of device memory reuse neither before the streams that use it
are done with it. The reader never synchronises: the CPU may run ahead of the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, cuda

from amago_model.data.batch import Batch


class GpuCopies:
    """Copies batches to a GPU on a stream of their own. `send` is called by one thread, `receive`
    by another. Not measured on a GPU."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, cuda.Stream(device)

    def send(self, batch: Batch) -> tuple[Batch, Any]:
        """The batch on the device, not to be read before `receive`, and the event of its copy."""
        event = cuda.Event()
        with cuda.stream(self._stream):
            there = batch._map(lambda tensor: copy_later(tensor, self._device))
            event.record(self._stream)
        return there, event

    def receive(self, batch: Batch, event: Any) -> None:
        """Let the reader's stream use the batch, once it has arrived. Does not wait."""
        stream = cuda.current_stream(self._device)
        stream.wait_event(event)
        # Allocated on the copy stream, read on this one: its memory must not be handed out again
        # before both are done with it.
        batch._map(lambda tensor: tensor.record_stream(stream))


def copy_later(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, by the stream that is current; returns before it is done."""
    return tensor.pin_memory().to(device, non_blocking=True)
