"""The memory in which batches are assembled, and their copies to a GPU.

On the CPU a field of a batch is fresh memory where it is small, else one of a ring of buffers.

On a GPU nobody waits for a copy:

    prefetch thread   gathers into page-locked memory ─▶ GpuCopies.send
    copy stream                                          batch ──▶ device, event
    reader            GpuCopies.receive ─▶ the compute stream waits for the event

torch's allocators of page-locked and of device memory reuse neither before the streams that use it
are done with it. The reader never synchronises: the CPU may run ahead of the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amago_model.data.batch import Batch
from trainer.data.fields import Field

SMALL = 4 << 20
"""Bytes of a field in a batch up to which fresh memory is no slower than a buffer."""


class Buffers:
    """Memory for one batch at a time, used again and again: one flat tensor per large field."""

    def __init__(self, fields: Sequence[Field], windows: int, n_rows: int):
        self._memory = {
            field.name: torch.zeros(windows * n_rows * field.size, dtype=_dtype(field))
            for field in fields
            if windows * n_rows * field.row_bytes > SMALL
        }

    def allocate(self, field: Field, windows: int, n_rows: int) -> Tensor | None:
        """Memory for [windows, n_rows, *shape]; None where fresh memory will do."""
        memory = self._memory.get(field.name)
        if memory is None:
            return None
        shape = (windows, n_rows, *field.shape)
        return memory[: math.prod(shape)].reshape(shape)


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

    def pinned(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, tensor: Tensor) -> Tensor:
        """The same tensor in page-locked memory; itself if it is there."""
        return tensor.pin_memory()

    def copy(self, tensor: Tensor) -> Tensor:
        """On the device, by the stream that is current; returns before it is done."""
        return tensor.to(self.device, non_blocking=True)

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        """The allocator must not hand out its memory again before the stream is done with it."""
        tensor.record_stream(stream)


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch whose copy was asked for; not to be read before `GpuCopies.receive`."""

    batch: Batch
    event: Any


class GpuCopies:
    """Copies batches to a GPU on a stream of their own. `allocate` and `send` are called by one
    thread, `receive` by another. Not measured on a GPU."""

    def __init__(self, cuda: Cuda):
        self._cuda, self._stream = cuda, cuda.new_stream()

    def allocate(self, field: Field, windows: int, n_rows: int) -> Tensor | None:
        """Page-locked memory for [windows, n_rows, *shape]; None where `send` may copy it there."""
        if windows * n_rows * field.row_bytes <= SMALL:
            return None
        return self._cuda.pinned(_dtype(field), (windows, n_rows, *field.shape))

    def send(self, batch: Batch) -> Sent:
        event = self._cuda.new_event()
        with self._cuda.on(self._stream):
            there = batch._map(lambda tensor: self._cuda.copy(self._cuda.pin(tensor)))
            event.record(self._stream)
        return Sent(there, event)

    def receive(self, sent: Sent) -> Batch:
        """The batch, for whatever the reader's stream does next. Does not wait."""
        stream = self._cuda.current_stream()
        stream.wait_event(sent.event)
        # Allocated on the copy stream, read on this one.
        sent.batch._map(lambda tensor: self._cuda.used_by(tensor, stream))
        return sent.batch


def _dtype(field: Field) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, field.dtype)).dtype
