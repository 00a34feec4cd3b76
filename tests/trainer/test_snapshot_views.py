"""Data that grows: looked for in the background, switched to by all at one step, and forgotten."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from stepwell.errors import Gone, ServiceUnreachable, from_problem
from stepwell.testing import make_trajectory, wait_until
from tests.trainer.small_runs import small_clone
from trainer.config import DataConfig, TrainConfig
from trainer.data.columns import MappedColumns
from trainer.data.loader import Loader
from trainer.data.sampler import WindowSampler
from trainer.data.snapshot import LONGEST_CHAIN, DataError, Manifest, create_snapshot
from trainer.data.snapshot_views import SnapshotViews
from trainer.loop import RunInfo, train

CPU = torch.device("cpu")


class Together:
    """Ranks in threads of this process: each collective waits for all, as in a real world."""

    def __init__(self, size: int):
        self.size, self.barrier = size, threading.Barrier(size, timeout=120)
        self.values: list = [None] * size

    def rank(self, rank: int) -> SimpleNamespace:
        def gather(value):
            self.values[rank] = value
            self.barrier.wait()
            found = list(self.values)
            self.barrier.wait()
            return found

        return SimpleNamespace(
            size=self.size,
            rank=rank,
            is_main=rank == 0,
            is_node_main=True,
            host=f"node-{rank}",
            all_gather=gather,
            broadcast=lambda value: gather(value)[0],
            maximum=lambda numbers: [max(c) for c in zip(*gather(numbers), strict=True)],
        )


@pytest.fixture
def service(fake):
    return fake(None, [[9, 4], [6]])


def grow(service, seed: int = 100) -> None:
    service.add_shard([make_trajectory(service.spec, length=5, seed=seed, terminated=True)])


def config_of(folder: Path, **data: object) -> TrainConfig:
    settings = DataConfig(batch=12, window=4, refresh_every=1, cache=folder / "cache", **data)
    return TrainConfig(dataset="fake", run="r", data=settings)


def data_of(service, folder: Path, world=None, config=None, echo=lambda _: None) -> SnapshotViews:
    world = world or Together(1).rank(0)
    return SnapshotViews(config or config_of(folder), service, world, folder / "home", "me", echo)


@pytest.fixture
def begun(service, tmp_path):
    with ExitStack() as closing_:

        def begin(**options):
            data = data_of(service, tmp_path, **options)
            closing_.callback(data.close)
            data.begin(create_snapshot(service, data.config, "me"))
            loader = data.loader(0, CPU)
            closing_.callback(loader.close)
            return data, loader

        yield begin


def train_on(
    data: SnapshotViews, loader: Loader, update: int, until: Callable[[], bool]
) -> tuple[int, bool]:
    """Batch after batch, with an agreement each; the update reached, and whether they switched."""
    while True:
        next(loader)
        update += 1
        _, switched = data.sync(loader, update, 0, update)
        if switched or until():
            return update, switched


# ----------------------------------------------------------------------------------------- memory

REFRESHES, TRACED = 1000, 150


def alive() -> Counter[type]:
    kinds = (Manifest, WindowSampler, MappedColumns)
    return Counter(type(x) for x in gc.get_objects() if type(x) in kinds)


@pytest.mark.long
def test_a_thousand_refreshes_keep_memory_flat(fake, tmp_path, monkeypatch):
    """Manifests, samplers, columns, leases, files: those of the newest views, and no more."""
    service = fake(None, [[3] * 40, [4] * 40])
    freeze, number = service.create_snapshot, count()

    def another(**options):
        """The same trajectories but one, which is another one each time."""
        whole = service._snapshots[freeze(**options).id]
        keep = np.arange(80) != (n := next(number)) % 80
        table = whole.filter(pa.array(keep)).replace_schema_metadata(
            {**whole.schema.metadata, b"snapshot": b"sn_%d" % n, b"digest": b"d%d" % n}
        )
        service._snapshots.pop(f"sn_{n - 3}", None)
        service._snapshots[f"sn_{n}"] = table
        return service.snapshot(f"sn_{n}")

    def at_once(task) -> Future:
        future: Future = Future()
        future.set_result(task())
        return future

    service.create_snapshot = another
    monkeypatch.setattr("trainer.data.snapshot_views.in_background", at_once)
    monkeypatch.setattr("stepwell._files.os.fsync", lambda _: None)  # not what is tried here
    gc.collect()
    before = alive()
    data = data_of(service, tmp_path)
    sizes: list[int] = []
    try:
        data.begin(create_snapshot(service, data.config, "me"))
        loader = data.loader(0, CPU)
        update = 0
        for refresh in range(REFRESHES):
            if refresh == REFRESHES - TRACED:
                tracemalloc.start()
            data.refresh()
            update, switched = train_on(data, loader, update, lambda: False)
            assert switched
            if refresh >= REFRESHES - TRACED and refresh % 25 == 24:
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        more = alive() - before
        service.leases.clear()
        loader.close()
    finally:
        tracemalloc.stop()
        data.close()
    fields = 3
    assert more[WindowSampler] <= 5 and more[Manifest] <= 6, more
    assert more[MappedColumns] <= 5 * fields, more
    # Of each refresh its line in the history stays, an id and a step; a view is 30 times that. All
    # intervals but one, in which another thread of the process may import something.
    growth = sorted(np.diff(sizes))[:-1]
    assert sum(growth) / (25 * len(growth)) < 1500, sizes
    assert len(data.history) == REFRESHES + 1
    assert len(list((tmp_path / "home/snapshots").glob("*.arrow"))) <= 5 + LONGEST_CHAIN
    assert len(data.leases._held) <= 5


def test_shards_that_no_view_holds_may_be_deleted(service, tmp_path, begun):
    """A replay buffer forgets its old shards, and so does this node's cache."""
    data, loader = begun()
    old = set(service.shards)
    service.shards = {name: [] for name in "abcde"}  # names go on
    grow(service)
    data.refresh()
    update, switched = train_on(data, loader, 0, lambda: False)
    assert switched and set(data.cache._in_use) == old | {"sh_0005"}
    for _ in range(loader.lookahead + 1):
        next(loader)
    assert set(data.cache._in_use) == {"sh_0005"}
    assert not {path.parent.name for path in data.cache._checked} & old
    columns = data.cache.root / "columns"
    evicted = {shard for shard in (*old, "sh_0005") if data.cache._evict(columns / shard)}
    assert evicted == old


# ------------------------------------------------------------------------------------- background


def test_no_update_waits_for_new_data(service, begun):
    """Neither for the question, nor for the download: the run trains on until all is there."""
    data, loader = begun()
    asked, answer, fetched, fetch = (threading.Event() for _ in range(4))
    freeze, download = service.create_snapshot, service.download_shard

    def slow_freeze(**options):
        asked.set()
        assert answer.wait(120)
        return freeze(**options)

    def slow_download(shard, path, **options):
        fetched.set()
        assert fetch.wait(120)
        return download(shard, path, **options)

    service.create_snapshot, service.download_shard = slow_freeze, slow_download
    grow(service)
    data.refresh()
    assert asked.wait(120)
    update, switched = train_on(data, loader, 0, iter([False] * 50 + [True]).__next__)
    assert not switched and update == 51
    data.refresh()  # one look at a time
    answer.set()
    update, switched = train_on(data, loader, update, fetched.is_set)
    assert not switched
    update, switched = train_on(data, loader, update, iter([False] * 50 + [True]).__next__)
    assert not switched
    fetch.set()
    update, switched = train_on(data, loader, update, lambda: False)
    assert switched and data.history[-1]["start"] == update + loader.lookahead
    seen = [(loaded.step, len(loaded.manifest)) for loaded in (next(loader) for _ in range(9))]
    assert seen == [(s, 3 if s < update + loader.lookahead else 4) for s, _ in seen]


def test_nothing_new_changes_nothing(service, begun):
    """Also where the service answers with the snapshot that is in use, or has forgotten it."""
    data, loader = begun()
    freeze = service.create_snapshot

    def forgetful(since=None, **options):
        if since is not None:
            raise Gone({"status": 410, "title": "gone", "code": "gone"})
        return freeze(**options)

    def anew(**options):
        """Another id for the same trajectories."""
        found = freeze(**options)
        service._snapshots["sn_other"] = service._snapshots[found.id]
        return SimpleNamespace(id="sn_other")

    update = 0
    for service.create_snapshot in (freeze, forgetful, anew):
        data.refresh()
        update, switched = train_on(data, loader, update, lambda: not data._phase)
        assert not switched and len(data.history) == 1 and not data.trouble
    service.create_snapshot = forgetful
    grow(service)
    data.refresh()
    assert train_on(data, loader, update, lambda: False)[1] and len(data.manifest) == 4


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "error", [ServiceUnreachable("odd"), MemoryError("odd"), SystemExit("odd"), KeyError("odd")]
)
@pytest.mark.parametrize("where", ["create_snapshot", "snapshot", "manifest", "download_shard"])
def test_trouble_with_new_data_is_shown_and_the_run_goes_on(
    service, begun, where, error, monkeypatch, caplog
):
    """With the data that it has; the next look finds the new one."""
    data, loader = begun()
    grow(service)
    real = getattr(service, where)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(service, where, fail)
    data.refresh()
    update, switched = train_on(data, loader, 0, lambda: "continues with the last" in caplog.text)
    assert not switched and "odd" in data.trouble
    monkeypatch.setattr(service, where, real)
    data.refresh()
    update, switched = train_on(data, loader, update, lambda: False)
    assert switched and not data.trouble and len(data.manifest) == 4


def test_a_lease_that_cannot_be_given_back_is_trouble_and_no_more(service, begun, monkeypatch):
    data, loader = begun()
    monkeypatch.setattr(service, "release", lambda *_: 1 / 0)
    data._release("sn")
    wait_until(lambda: "ZeroDivisionError" in data.trouble)
    grow(service)
    data.refresh()
    assert train_on(data, loader, 0, lambda: False)[1]


# ------------------------------------------------------------------------------------ many ranks


def run_ranks(service, tmp_path, until, *, spoil=lambda rank, data: None, size: int = 3):
    """Each rank's data some updates after `until(data)` on one of them, and where its batches came
    from."""
    together, found, failed = Together(size), [None] * size, []

    def live(rank: int) -> None:
        data = data_of(service, tmp_path / f"node-{rank}", together.rank(rank))
        try:
            name = data.world.broadcast(
                create_snapshot(service, data.config, "me") if rank == 0 else ""
            )
            data.begin(name)
            loader = data.loader(0, CPU)
            if rank == 0:
                grow(service)
            spoil(rank, data)
            sizes = []
            update, last = 0, 100_000
            while update < last:
                sizes.append(len(next(loader).manifest))
                update += 1
                if update == 3:
                    data.refresh()
                if update % 2 == 0:
                    over, _ = data.sync(loader, update, int(until(data)), 0)
                    if over and last == 100_000:
                        last = update + 20
            loader.close()
            found[rank] = data.history, sizes, data.trouble
        except BaseException as error:
            failed.append(error)
            together.barrier.abort()
        finally:
            data.close()

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    if failed:
        raise failed[0]
    assert all(found)
    return found


def test_all_ranks_switch_at_the_same_step_though_one_node_is_slow(service, tmp_path):
    slow = []

    def spoil(rank: int, data: SnapshotViews) -> None:
        if rank == 1:
            ensure = data.cache.ensure

            def later(*args, **options):
                slow.append(threading.Event().wait(0.3))
                return ensure(*args, **options)

            data.cache.ensure = later

    found = run_ranks(service, tmp_path, lambda data: len(data.history) == 2, spoil=spoil)
    assert slow
    histories, sizes = [f[0] for f in found], [f[1] for f in found]
    assert len(histories[0]) == 2 and histories[0] == histories[1] == histories[2]
    start = histories[0][1]["start"]
    assert sizes[0] == sizes[1] == sizes[2] == [3] * start + [4] * (len(sizes[0]) - start)
    assert sizes[0][-1] == 4


def test_where_one_node_fails_none_switches(service, tmp_path, caplog):
    def spoil(rank: int, data: SnapshotViews) -> None:
        def fail(*args, **options):
            raise problem

        if rank == 2:
            data.cache.ensure = fail

    problem = from_problem({"status": 500, "title": "odd", "code": "odd"})
    told = "training continues with the last snapshot"
    found = run_ranks(service, tmp_path, lambda _: told in caplog.text, spoil=spoil)
    assert [len(history) for history, _, _ in found] == [1, 1, 1]
    assert all(set(sizes) == {3} for _, sizes, _ in found)
    assert "cannot be fetched on node-2" in caplog.text and "odd" in found[2][2]


def test_a_shard_that_one_node_cannot_read_is_left_out_on_all(service, tmp_path):
    def spoil(rank: int, data: SnapshotViews) -> None:
        if rank == 1:
            ensure = data.cache.ensure
            data.cache.ensure = lambda *args, **o: {**ensure(*args, **o), "sh_0001": "odd"}

    found = run_ranks(service, tmp_path, lambda data: len(data.history) == 2, spoil=spoil)
    for history, sizes, _ in found:
        assert history == found[0][0] and history[1]["left_out"] == ["sh_0001"]
        assert sizes[-1] == 3  # of four


# ---------------------------------------------------------------------------------- damaged shards


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    return small_clone(tmp_path, "hurt", data=DataConfig(batch=4, window=4), updates=6)


HARM = {
    "damaged": lambda service: service.path("sh_0001").write_bytes(b"not parquet"),
    "of other content": lambda service: service.path("sh_0001").write_bytes(
        service.path("sh_0000").read_bytes()[:-100]
    ),
    "unknown": lambda service: _answer(service, 404, "not_found"),
    "quarantined": lambda service: _answer(service, 410, "damaged"),
    "found out on the way": lambda service: _answer(service, 410, "damaged", cut_off=True),
}


def _answer(service, status: int, code: str, *, cut_off: bool = False) -> None:
    """What the service says of one shard; with `cut_off` it first ends a connection."""
    download, asked = service.download_shard, []

    def refuse(shard: str, path: Path, **options: object) -> Path:
        if shard == "sh_0001":
            asked.append(shard)
            if cut_off and len(asked) == 1:
                raise ServiceUnreachable("peer closed connection")
            raise from_problem({"status": status, "title": code, "code": code})
        return download(shard, path, **options)

    service.download_shard = refuse


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_shard_that_cannot_be_had_is_named_the_run_marked_and_the_rest_trained_on(
    service, config, harm, caplog
):
    harm(service)
    assert train(config, service, RunInfo(), lambda _: None) == "finished"
    wait_until(lambda: service.runs["hurt"].get("tags"))
    row = service.runs["hurt"]
    assert row["tags"] == ["unreadable-shards"] and "sh_0001" in row["notes"]
    assert "sh_0001" in caplog.text and "left out" in caplog.text
    assert service.metrics["data/trajectories", 6] == 2


def test_a_service_that_is_away_is_no_damage(service, config):
    """Nothing is left out then: a run that cannot get its data does not begin."""
    download = service.download_shard

    def die(shard: str, path: Path, **options: object) -> Path:
        if shard == "sh_0001":
            service.down = True
        return download(shard, path, **options)

    service.download_shard = die
    with pytest.raises(DataError, match="cannot be fetched"):
        train(config, service, RunInfo(), lambda _: None)
