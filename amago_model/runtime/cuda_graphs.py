"""CUDA graphs of whole updates: the kernels of an update are recorded once and replayed.

A small update starts about 2,400 kernels, which takes the CPU longer than the GPU needs to run
them. A recorded update is one call. Unlike torch.compile this takes no longer than a few updates.

A graph repeats its kernels on the same memory. So there is one for each shape of a batch, what
differs between updates is copied to fixed tensors first, and all other state changes in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor

from amago_model.data.batch import Batch
from amago_model.errors import ConfigError

Metrics = dict[str, Tensor]
Step = Callable[[Batch, bool], Metrics]
WARM_UP = 3
"""Updates that are made without a graph first, so that all lazily created state exists."""


class Recorder(Protocol):
    """Where updates run and how they are recorded; `CudaRecorder`, or a substitute in tests."""

    def run(self, step: Callable[[], Metrics]) -> Metrics:
        """Run a step, as it would be recorded."""
        ...

    def record(self, step: Callable[[], Metrics]) -> Callable[[], Metrics]:
        """Record a step without running it; returns what replays it."""
        ...


class CudaRecorder:
    """Runs steps on a separate stream and records them. All graphs share memory, because nothing
    that one leaves there is read after the next has begun."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def run(self, step: Callable[[], Metrics]) -> Metrics:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            out = step()
        current.wait_stream(self._stream)
        return out

    def record(self, step: Callable[[], Metrics]) -> Callable[[], Metrics]:
        # Frees the memory of the updates before, which the graph's own takes the place of.
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._stream.device.index]
        before = generator.clone_state()
        try:
            # Other threads, such as the loader's, may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
            ):
                out = step()
        except RuntimeError:
            # It would wait for the end of the recording for ever.
            generator.graphsafe_set_state(before)
            raise

        def replay() -> Metrics:
            graph.replay()
            return out

        return replay


class GraphedUpdates:
    """Calls an update, recorded once for each shape of a batch.

    Args:
        step: (batch, detailed) -> metrics. It must not read the device, must change state only in
            place, and must take what differs between updates from the batch and from tensors that
            stay where they are.
        recorder: records the updates.
        required: raise an error if an update cannot be recorded; else such updates run as they are.
        say: called once with the reason if an update cannot be recorded.
    """

    def __init__(
        self,
        step: Step,
        recorder: Recorder,
        *,
        required: bool,
        say: Callable[[str], None],
    ) -> None:
        self._step, self._recorder = step, recorder
        self._required, self._say = required, say
        self._graphs: dict[Hashable, _Graph | None] = {}
        self._warm_up, self._said = WARM_UP, False

    def __call__(self, batch: Batch, detailed: bool) -> Metrics:
        """One update. Raises `ConfigError` if it cannot be recorded and `required` is set."""
        if self._warm_up:
            self._warm_up -= 1
            return self._plain(batch, detailed)
        shapes = ((name, x.shape, x.dtype) for name, x in _tensors(batch).items())
        key = (detailed, *shapes)
        if key not in self._graphs:
            # Once without a graph: shapes may create state of their own, such as masks.
            self._graphs[key] = _Graph()
            return self._plain(batch, detailed)
        graph = self._graphs[key]
        if graph is None:
            return self._plain(batch, detailed)
        if graph.replay is None:
            self._record(graph, batch, detailed)
            if graph.replay is None:
                self._graphs[key] = None
                return self._plain(batch, detailed)
        graph.fill(batch)
        # The next replay writes its results to the same memory.
        return {name: value.clone() for name, value in graph.replay().items()}

    def _plain(self, batch: Batch, detailed: bool) -> Metrics:
        return self._recorder.run(lambda: self._step(batch, detailed))

    def _record(self, graph: _Graph, batch: Batch, detailed: bool) -> None:
        static = graph.hold(batch)
        try:
            graph.replay = self._recorder.record(lambda: self._step(static, detailed))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()
            why = (
                "an update cannot be recorded as a CUDA graph, because it reads from the device or"
                f" has no fixed shape: {reason[0] if reason else type(error).__name__}"
            )
            if self._required:
                raise ConfigError(f"compile: {why}. Set compile to 'off'") from error
            if not self._said:
                self._say(f"{why}. It runs without one")
            self._said = True


@dataclasses.dataclass(slots=True)
class _Graph:
    """A recorded update and the tensors that it reads its batch from."""

    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    replay: Callable[[], Metrics] | None = None

    def hold(self, batch: Batch) -> Batch:
        """A copy of the batch in memory that stays, for `fill`."""
        static = batch._map(lambda x: torch.empty_like(x).copy_(x))
        self.inputs = _tensors(static)
        return static

    def fill(self, batch: Batch) -> None:
        for name, x in _tensors(batch).items():
            self.inputs[name].copy_(x, non_blocking=True)


def _tensors(batch: Batch) -> dict[str, Tensor]:
    """All tensors of a batch by name, in alphabetical order."""
    named = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "obs"}
    named |= {f"obs/{key}": x for key, x in batch.obs.items()}
    return {name: x for name, x in sorted(named.items()) if x is not None}
