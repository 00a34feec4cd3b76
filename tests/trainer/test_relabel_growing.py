"""Relabeling while the data grows: every sample is relabeled by what its own snapshot holds."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, wait
from contextlib import closing

import numpy as np
import pytest
import torch

from stepwell.testing import make_trajectory
from tests.trainer import small_runs
from trainer.config import DataConfig, ScheduleConfig
from trainer.data.loader import Loaded, Loader, SnapshotView
from trainer.data.relabel import Episode, Relabeler, register
from trainer.data.snapshot import Manifest
from trainer.data.snapshot_views import in_background
from trainer.loop import RunInfo, train

FIRST, MORE = [[9, 4, 6], [5]], [7, 3]
CONFIG = DataConfig(batch=16, window=20, padding="none", relabel=("test_census",))


@register("test_census")
class Census(Relabeler):
    """Pay at the end what the snapshot holds, and a bit of chance."""

    found: int = 0

    def fit(self, episodes: Iterable[Episode]) -> Relabeler:
        return self.replace(found=sum(1 for _ in episodes))

    def __call__(self, episode: Episode, rng: np.random.Generator) -> Episode:
        reward = episode.reward.copy()
        reward[-1] = self.found + 0.5 * rng.random()
        return episode.replace(reward=reward)


@pytest.fixture
def service(fake):
    return fake(None, FIRST)


def grow(service) -> None:
    seeds = range(100, 100 + len(MORE))
    service.add_shard(
        [
            make_trajectory(service.spec, length=length, seed=seed, terminated=True)
            for seed, length in zip(seeds, MORE, strict=True)
        ]
    )


def view_of(service, folder, start: int, manifest: Manifest) -> SnapshotView:
    return small_runs.view_of(service, folder, CONFIG, manifest=manifest, seed=3, start=start)


def loader_of(service, folder, *views: tuple[int, Manifest], step: int = 0) -> Loader:
    return Loader([view_of(service, folder, *view) for view in views], CONFIG, step=step)


def same(one: Loaded, other: Loaded) -> bool:
    return one.ids == other.ids and torch.equal(one.batch.prev_reward, other.batch.prev_reward)


def paid(loaded: Loaded) -> set[int]:
    """What the windows, all of them whole trajectories, were paid at their ends."""
    ends = loaded.batch.mask.sum(1, keepdim=True)
    return set(loaded.batch.prev_reward.gather(1, ends).int().flatten().tolist())


def test_a_snapshot_added_on_the_way_is_relabeled_by_what_it_holds_from_its_first_step_on(
    service, tmp_path
):
    """And by no step before; as by a loader that knew it from the beginning, or is begun there."""
    old = small_runs.manifest_of(service, tmp_path)
    with closing(loader_of(service, tmp_path, (0, old))) as loader:
        seen = [next(loader) for _ in range(3)]
        grow(service)
        new = small_runs.manifest_of(service, tmp_path)
        start = 3 + loader.lookahead
        loader.add_view(view_of(service, tmp_path, start, new))
        seen += [next(loader) for _ in range(start + 6 - 3)]
    assert [paid(loaded) for loaded in seen] == [{4}] * start + [{6}] * 6
    added = set(new.trajectory_ids(np.arange(len(old), len(new))))
    assert added & {name.split("@")[0] for loaded in seen[start:] for name in loaded.ids}
    with closing(loader_of(service, tmp_path, (0, old), (start, new))) as known:
        assert all(same(next(known), loaded) for loaded in seen)
    with closing(loader_of(service, tmp_path, (0, old), (start, new), step=start + 2)) as resumed:
        assert same(next(resumed), seen[start + 2])
    with closing(loader_of(service, tmp_path, (0, old))) as undisturbed:
        assert all(same(undisturbed.load(step), seen[step]) for step in range(start))
        assert not same(undisturbed.load(start), seen[start])


def test_a_run_whose_data_grows_is_resumed_bit_by_bit(service, tmp_path, monkeypatch):
    """Trajectories arrive while it trains; resumed without a service it sees what it saw."""

    def at_once(task) -> Future:
        wait([future := in_background(task)])
        return future

    # So that the step of the switch is known here.
    monkeypatch.setattr("trainer.data.snapshot_views.in_background", at_once)
    schedule = ScheduleConfig(
        log_every=1, checkpoint_every=9, keep_checkpoints=9, publish_every=0, drain_timeout=0.1
    )
    config = small_runs.small_clone(
        tmp_path, "grow", data=CONFIG.replace(refresh_every=5), updates=30, schedule=schedule
    )
    said: list[str] = []

    def hear(text: str) -> None:
        said.append(text)
        if text.startswith("observations: "):  # the first snapshot is taken
            grow(service)

    train(config, service, RunInfo(), hear)
    assert "from update 11 on: 6 trajectories, 34 steps (before: 4 trajectories, 24 steps)" in said
    whole = small_runs.curves(tmp_path, "grow")
    seen = whole["data/trajectories"]
    assert [seen[update] for update in (1, 11, 12, 30)] == [4, 4, 6, 6]

    checkpoints = sorted((tmp_path / "grow" / "checkpoints").iterdir())
    for path in checkpoints[1:]:  # back to update 9: the new snapshot is known, and not yet drawn
        path.unlink()
    (tmp_path / "grow" / "metrics.jsonl").unlink()
    service.down = True
    train(config.replace(resume="must"), service, RunInfo(), said.append)
    again = small_runs.curves(tmp_path, "grow")
    for key in ("loss/total", "data/sample_checksum"):
        assert again[key] == {update: whole[key][update] for update in range(10, 31)}
