"""Batches of the stand-in for the service, and small runs on it: what many tests begin with."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from amago_model import TimestepEncoderConfig
from trainer.config import DataConfig, ScheduleConfig, TrainConfig
from trainer.data.cache import Cache
from trainer.data.fields import fields_of
from trainer.data.loader import Loader, SnapshotView, open_view
from trainer.data.sampler import WindowSampler
from trainer.data.snapshot import Manifest, create_snapshot, load_manifest
from trainer.recipes import recipe


def manifest_of(service: Any, folder: Path, config: TrainConfig | None = None) -> Manifest:
    """The manifest of what a config selects now: by default, of everything."""
    snapshot = create_snapshot(service, config or TrainConfig(dataset="fake"), "test")
    return load_manifest(service, snapshot, folder / "manifests")


def view_of(
    service: Any,
    folder: Path,
    data: DataConfig,
    *,
    manifest: Manifest | None = None,
    seed: int = 0,
    world: int = 1,
    **options: Any,
) -> SnapshotView:
    """The columns and the sampler of a manifest; by default of everything there is now."""
    manifest = manifest or manifest_of(service, folder)
    cache, fields = Cache(folder / "cache", 1e9, service), fields_of(manifest.spec, data)
    assert cache.ensure(manifest, fields) == {}
    return open_view(cache, fields, WindowSampler(manifest, data, seed, world), **options)


def loader_of(
    service: Any, folder: Path, data: DataConfig, *, step: int = 0, rank: int = 0, **options: Any
) -> Loader:
    """A loader of one view; `options` are those of `view_of`."""
    return Loader([view_of(service, folder, data, **options)], data, step=step, rank=rank)


def small_clone(folder: Path, run: str, *, data: DataConfig, **changes: Any) -> TrainConfig:
    """Behaviour cloning by a small network, which publishes and keeps nothing of its own accord."""
    plain = recipe("bc").replace(derive="off")
    rows = TimestepEncoderConfig(n_layers=1, d_hidden=8, d_output=8)
    schedule = ScheduleConfig(log_every=1, checkpoint_every=0, publish_every=0, drain_timeout=5)
    settings = {
        "agent": plain.agent.replace(timestep_encoder=rows),
        "data": data.replace(cache=folder / "cache"),
        "schedule": schedule,
    }
    return plain.replace(
        dataset="fake", run=run, device="cpu", output=folder, **(settings | changes)
    )


def curves(folder: Path, run: str) -> dict[str, dict[int, float]]:
    """By metric and update, the last value that a run has logged."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in (folder / run / "metrics.jsonl").read_text().splitlines():
        point = json.loads(line)
        found[point["key"]][point["step"]] = point["value"]
    return found
