"""The memory in which batches are put together, and their way to a GPU.

On the CPU a field of a batch is fresh memory where it is small, else one of a ring of buffers.

On a GPU nobody waits for a copy but the thread that prepares batches:

    prefetch thread   wait(slot) ─▶ gather into the slot's block ─▶ send(slot)
    copy stream                                                     block ──▶ device, event
    reader                              receive ─▶ the compute stream waits for the event

All fields of a batch lie in one page-locked block, so that one copy moves it; on the device they
are views of one allocation. The event of a slot is both what the compute stream waits for and what
the block waits for before it is written again. The reader never synchronises: the CPU may run ahead
of the GPU, and the time spent in the loader is time without data.
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
"""Bytes of a field in a batch up to which fresh memory is no slower than memory used in turn."""
ALIGNMENT = 256
"""Of a tensor in a block: what a fresh allocation on a GPU has."""
SLOTS = 2
"""Blocks on the way to a GPU: one is copied while the other is filled."""


class Buffers:
    """Room for one batch in turn: per field a flat tensor, or None where fresh memory will do."""

    def __init__(self, fields: Sequence[Field], batch: int, rows: int):
        self._of: dict[str, Tensor] = {}
        for field in fields:
            if batch * rows * field.row_bytes > SMALL:
                self._of[field.name] = torch.zeros(batch * rows * field.size, dtype=_dtype(field))

    def room(self, field: Field, windows: int, rows: int) -> Tensor | None:
        """Memory for [windows, rows, *shape]; None: take fresh one."""
        buffer = self._of.get(field.name)
        if buffer is None:
            return None
        shape = (windows, rows, *field.shape)
        return buffer[: math.prod(shape)].reshape(shape)


class Block:
    """One stretch of page-locked memory for all of a batch, handed out from its beginning on."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.used = 0

    def clear(self) -> None:
        self.used = 0

    def room(self, field: Field, windows: int, rows: int) -> Tensor | None:
        """Memory for [windows, rows, *shape]; None: take fresh one, `pack` copies it here."""
        if windows * rows * field.row_bytes <= SMALL:
            return None
        return self.take(_dtype(field), (windows, rows, *field.shape))

    def take(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        extent = Extent(self.used, dtype, tuple(shape))
        if extent.end > len(self.memory):
            raise AssertionError(f"a batch of more than {len(self.memory)} bytes")
        self.used = -(-extent.end // ALIGNMENT) * ALIGNMENT
        return extent.of(self.memory)

    def holds(self, tensor: Tensor) -> bool:
        same = tensor.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()
        return same and tensor.is_contiguous()

    def pack(self, batch: Batch) -> list[Extent]:
        """Where each of a batch's tensors lies here; what lay elsewhere is copied."""
        extents: list[Extent] = []
        known: dict[int, Extent] = {}  # a batch may hold the same tensor twice

        def put(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                inside = tensor
                if not self.holds(tensor):
                    inside = self.take(tensor.dtype, tensor.shape)
                    inside.copy_(tensor)
                at = inside.data_ptr() - self.memory.data_ptr()
                known[id(tensor)] = Extent(at, tensor.dtype, tuple(tensor.shape))
            extents.append(known[id(tensor)])
            return tensor

        batch._map(put)
        return extents


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor lies in a block."""

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.at + math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """The tensor there, in this memory or a copy of it on a device."""
        return memory[self.at : self.end].view(self.dtype).reshape(self.shape)


def block_bytes(fields: Sequence[Field], batch: int, rows: int) -> int:
    """Enough for a batch: its fields, its times and masks, and whatever of them is made anew."""
    made = 2 * 8 + 4 + 10  # times and masks, wide enough for all that collate may add
    anew = sum(f.row_bytes for f in fields if not f.name.startswith("obs."))
    each = sum(field.row_bytes for field in fields) + anew + made
    return batch * rows * each + (2 * len(fields) + 16) * ALIGNMENT


class Cuda:
    """What of CUDA the transfer uses, in one place: tests put a stand-in here that is late, and
    wrong wherever CUDA may be."""

    def __init__(self, device: torch.device):
        self.device = device

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def new_event(self) -> Any:
        return torch.cuda.Event(blocking=True)  # who waits for it sleeps, and does not spin

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def empty(self, size: int) -> Tensor:
        """On the device, for the stream that is current."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """From page-locked memory, on the stream that is current; returns before it is done."""
        target.copy_(source, non_blocking=True)

    def used_by(self, memory: Tensor, stream: Any) -> None:
        """Its allocator must not hand out `memory` again before the stream is done with it."""
        memory.record_stream(stream)


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch whose copy has been asked for."""

    batch: Batch
    """Its tensors lie on the device; not to be read before `Transfer.receive`."""
    memory: Tensor
    event: Any


class Transfer:
    """Batches on their way to a GPU; see the picture above. `wait` and `send` are called by one
    thread, `receive` by another."""

    def __init__(self, cuda: Cuda, size: int, slots: int = SLOTS):
        self._cuda = cuda
        self.blocks = [Block(cuda.pinned(size)) for _ in range(slots)]
        self._stream = cuda.new_stream()
        self._events = [cuda.new_event() for _ in range(slots)]

    def wait(self, slot: int) -> Block:
        """The block of a slot, to be written: what lay there has been copied."""
        self._events[slot].synchronize()
        self.blocks[slot].clear()
        return self.blocks[slot]

    def send(self, slot: int, batch: Batch) -> Sent:
        """Ask for the copy of a batch that was put together in this slot's block."""
        block, event = self.blocks[slot], self._events[slot]
        extents = block.pack(batch)
        with self._cuda.on(self._stream):
            memory = self._cuda.empty(block.used)
            self._cuda.copy(memory, block.memory[: block.used])
            event.record(self._stream)
        there = iter(extents)
        return Sent(batch._map(lambda _: next(there).of(memory)), memory, event)

    def receive(self, sent: Sent) -> Batch:
        """The batch, for whatever the reader's stream does next. Does not wait."""
        stream = self._cuda.current_stream()
        stream.wait_event(sent.event)
        # Allocated on the copy stream, read on this one.
        self._cuda.used_by(sent.memory, stream)
        return sent.batch


def _dtype(field: Field) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, field.dtype)).dtype
