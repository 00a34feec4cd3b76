"""`stream`: batches for any learner, without Stepwell's agent and without accelerate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from amago_model.data.batch import LOSS_MASKS, Batch
from stepwell.client import Client
from trainer.config import DataConfig, SourceConfig, TrainConfig, default_cache
from trainer.data.cache import Cache
from trainer.data.fields import fields_of
from trainer.data.loader import Loader, open_view
from trainer.data.sampler import WindowSampler
from trainer.data.snapshot import LeaseKeeper, create_snapshot, load_manifest

Padding = Literal["none", "both", "left", "right", "center"]


def stream(
    select: str,
    *,
    window: int,
    batch: int,
    numpy: bool = False,
    seed: int = 0,
    padding: Padding = "right",
    draw: Literal["trajectories", "steps", "windows"] = "steps",
    relabel: Sequence[str] = (),
    actor_mask: str = "",
    critic_mask: str = "",
    mask_row: Literal["arrival", "departure"] = "arrival",
    batches: int | None = None,
    start: int = 0,
    client: Client | None = None,
    cache: Path | None = None,
) -> Iterator[Any]:
    """Batches of random windows of the trajectories that a SQL query selects, endless or `batches`.

        for b in stream("SELECT id FROM trajectories WHERE env = 'Hopper-v5'", window=8, batch=256):
            b.obs["observation"]      # [256, 9, 11]: one observation more than transitions
            b.action, b.reward        # [256, 8, 3], [256, 8]
            b.terminated, b.mask      # [256, 8] bool; mask is False after a trajectory's end

    Args:
        select: SELECT id[, weight] FROM trajectories WHERE …
        numpy: yield dicts of numpy arrays, {"obs": {…}, "action", "reward", …}, instead of Batches.
        seed, start: the same values give the same batches; `start` skips that many batches.
        padding, draw, relabel, actor_mask, critic_mask, mask_row: see trainer.config.DataConfig.
        client: client of the service (default: STEPWELL_URL).
        cache: folder of this node's columns (default: the same as for a trainer).

    Raises `stepwell.errors.StepwellError`; in particular `DataError` if nothing is selected.
    """
    data = DataConfig(
        batch=batch,
        window=window,
        padding=padding,
        draw=draw,
        relabel=tuple(relabel),
        actor_mask=actor_mask,
        critic_mask=critic_mask,
        mask_row=mask_row,
        cache=cache or default_cache(),
    )
    config = TrainConfig(sources=(SourceConfig(select=select),), data=data, seed=seed)
    client, owned = client or Client(), client is None
    holder = "trainer.data.stream"  # shown to users
    leases = LeaseKeeper(client, holder)
    try:
        snapshot = create_snapshot(client, config, holder)
        leases.hold(snapshot)
        with TemporaryDirectory() as folder:
            manifest = load_manifest(client, snapshot, Path(folder))
        fields = fields_of(manifest.spec, data)
        columns = Cache(data.cache, data.cache_gb * 1e9, client)
        manifest = manifest.without(list(columns.ensure(manifest, fields)))
        view = open_view(columns, fields, WindowSampler(manifest, data, seed))
        with closing(Loader([view], data, step=start)) as loader:
            for loaded in islice(loader, batches):
                yield _as_numpy(loaded.batch) if numpy else loaded.batch
    finally:
        leases.close()
        if owned:
            client.close()


def _as_numpy(batch: Batch) -> dict[str, Any]:
    names = ("action", "reward", "terminated", "truncated", "next_obs_valid", "mask", "time_idx")
    arrays: dict[str, Any] = {name: getattr(batch, name).numpy() for name in names}
    arrays |= {
        name: mask.numpy() for name in LOSS_MASKS if (mask := getattr(batch, name)) is not None
    }
    arrays["obs"] = {key: value.numpy() for key, value in batch.obs.items()}
    return arrays
