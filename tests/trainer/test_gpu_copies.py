"""A batch's memory is its own, and batches reach a GPU without anybody waiting.

There is no GPU here. A stand-in runs what is put on its streams as late as it may and in any order
that events allow: a copy that nobody waited for has then not happened yet.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from amago_model.data.batch import Batch
from stepwell.testing import make_spec
from tests.trainer.small_runs import view_of
from trainer.config import DataConfig
from trainer.data import gpu_copies
from trainer.data.loader import Loader
from trainer.data.relabel import Episode, Relabeler, register

LENGTHS = [[5, 40, 1, 17], [64, 3, 9], [2]]
STEPS = 40


def tensors(batch: Batch) -> dict[str, Tensor]:
    found = {name: getattr(batch, name) for name in Batch.__slots__ if name not in ("obs", "noise")}
    return {k: v for k, v in found.items() if v is not None} | batch.obs


def copied(batch: Batch) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors(batch).items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        x.dtype == other[name].dtype and torch.equal(x, other[name]) for name, x in one.items()
    )


@pytest.fixture
def make_loader(fake, tmp_path) -> Callable[..., Loader]:
    services = {}

    def make(spec=None, config=None, **options) -> Loader:
        spec = spec or make_spec(action_known=True)
        if spec.digest not in services:
            services[spec.digest] = fake(spec, LENGTHS)
        service = services[spec.digest]
        config = config or DataConfig(batch=8, window=8, prefetch=2, padding="both")
        return Loader([view_of(service, tmp_path, config)], config, **options)

    return make


# ------------------------------------------------------------------------------------------- CPU


def test_a_batch_stays_as_it_came(make_loader):
    """Whoever keeps batches has what they held when they came, whatever is loaded later."""
    with closing(make_loader()) as loader:
        kept = [next(loader).batch for _ in range(12)]
        for step, batch in enumerate(kept):
            assert equal(copied(batch), copied(loader.load(step).batch)), step


def test_a_loader_that_failed_says_so_again_and_does_not_hang(make_loader, monkeypatch):
    with closing(make_loader()) as loader:
        next(loader)

        def fail(step: int) -> None:
            raise SystemExit("odd")

        monkeypatch.setattr(loader, "_prepare", fail)
        with pytest.raises(SystemExit, match="odd"):
            for _ in range(9):
                next(loader)
        with pytest.raises(RuntimeError, match="has ended"):
            next(loader)


def test_a_step_before_the_first_view_is_refused(make_loader):
    with closing(make_loader()) as loader, pytest.raises(IndexError, match="before the first"):
        loader.load(-1)


# -------------------------------------------------------------------------------------------- GPU


class Late:
    """A stand-in for CUDA: streams are queues of work, done only when somebody must wait for it, or
    when it pleases."""

    def __init__(self, seed: int = 0):
        self.random, self.lock = random.Random(seed), threading.RLock()
        self.copying, self.computing = Stream(self, "copy"), Stream(self, "compute")
        self.local = threading.local()
        self.used: set[int] = set()

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802 - as torch.cuda has it
        return self.copying

    def Event(self) -> Event:  # noqa: N802
        return Event()

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self.local, "stream", self.computing)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.local.stream = stream
        yield
        del self.local.stream

    def copy_later(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Until the copy is due, the memory on the GPU holds something else."""
        there = torch.full_like(tensor, True if tensor.dtype == torch.bool else 0x55)
        page_locked = tensor.clone()
        self.current_stream().add(lambda: there.copy_(page_locked))
        return there

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        assert stream is self.computing and self.local.__dict__.get("stream") is None
        self.used.add(tensor.data_ptr())

    def some_work(self) -> None:
        """What is due happens sometime, or does not yet."""
        with self.lock:
            for stream in self.random.sample([self.copying, self.computing], 2):
                stream.run(self.random.randint(0, 2))


class Stream:
    def __init__(self, gpu: Late, name: str):
        self.gpu, self.name, self.work, self.done = gpu, name, [], 0

    def add(self, work: Callable[[], object]) -> int:
        with self.gpu.lock:
            self.work.append(work)
            return len(self.work)

    def run(self, count: int) -> None:
        until = min(len(self.work), self.done + count)
        while self.done < until:
            work, self.work[self.done] = self.work[self.done], None
            work()
            self.done += 1

    def run_to(self, place: int) -> None:
        self.run(place - self.done)

    def wait_event(self, event: Event) -> None:
        stream, place = event.recorded
        self.add(lambda: stream.run_to(place))

    def synchronize(self) -> None:
        raise AssertionError(f"the {self.name} stream was synchronised")


class Event:
    def record(self, stream: Stream) -> None:
        self.recorded = stream, stream.add(lambda: None)

    def synchronize(self) -> None:
        raise AssertionError("an event was synchronised")


@pytest.fixture(params=[0, 1])
def gpu(request, monkeypatch) -> Late:
    late = Late(request.param)
    monkeypatch.setattr(gpu_copies, "cuda", late)
    monkeypatch.setattr(gpu_copies, "copy_later", late.copy_later)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: late.record_stream(tensor, stream)
    )
    return late


SPECS = {
    "vector, gaps": make_spec(action_known=True),
    "image": make_spec(discrete=4, image=(2, 3, 3)),
}


@register("test_gpu_copies_mask")
class Masked(Relabeler):
    """A loss mask that nobody recorded."""

    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:
        return episode.replace(actor_mask=np.arange(len(episode)) % 2 == 0)


@pytest.mark.parametrize("relabel", [(), ("test_gpu_copies_mask",)], ids=["plain", "relabeled"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_batches_on_a_late_gpu_are_those_of_the_cpu(make_loader, gpu, spec, relabel):
    """Every byte, whenever the GPU gets round to it; and nobody waits for it."""
    config = DataConfig(batch=8, window=8, prefetch=2, padding="both", relabel=relabel)
    seen: dict[int, dict[str, Tensor]] = {}
    with (
        closing(make_loader(spec, config, device="cuda")) as loader,
        closing(make_loader(spec, config)) as plain,
    ):
        for step in range(STEPS):
            batch = next(loader).batch
            assert {tensor.data_ptr() for tensor in tensors(batch).values()} <= gpu.used
            gpu.computing.add(lambda batch=batch, step=step: seen.update({step: copied(batch)}))
            gpu.some_work()
        gpu.computing.run(10**9)
        for step in range(STEPS):
            assert equal(seen[step], copied(plain.load(step).batch)), step


def test_the_reader_runs_ahead_of_a_gpu_that_does_nothing(make_loader, gpu):
    """It gets batch after batch though none has been computed on."""
    with closing(make_loader(device="cuda")) as loader:
        for _ in range(STEPS):
            next(loader)
            gpu.computing.add(lambda: None)
    assert gpu.computing.done == 0


def test_the_stand_in_sees_what_it_is_there_for(make_loader, monkeypatch, gpu):
    """If compute does not wait for the copy, some batch is wrong."""
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    with closing(make_loader(device="cuda")) as loader, closing(make_loader()) as plain:
        seen: dict[int, dict[str, Tensor]] = {}
        for step in range(STEPS):
            batch = next(loader).batch
            gpu.computing.add(lambda batch=batch, step=step: seen.update({step: copied(batch)}))
            gpu.computing.run(1)
        gpu.computing.run(10**9)
        assert not all(equal(seen[step], copied(plain.load(step).batch)) for step in range(STEPS))
