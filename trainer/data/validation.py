"""Trajectories held back from training, whose losses show overfitting.

A trajectory is held back if a hash of its id falls into the share, so it stays held back when data
is added; if no hash does, the trajectory with the smallest hash is. The fixed windows of validation
are the first samples of the held-back trajectories.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainer.config import DataConfig, ScheduleConfig
from trainer.data.sampler import WindowSampler, mix
from trainer.data.snapshot import Manifest

FEWEST = 20
"""Nothing is held back from a source with fewer trajectories."""
BATCHES = 2
"""Number of batches of windows that a validation computes the losses of."""

MIN_INTERVAL = 25
"""Default minimum of updates between validations, each of which costs about one update."""


def validation_interval(schedule: ScheduleConfig) -> int:
    """Updates between validations; 0 if metrics are logged only at the end."""
    if schedule.validate_every or not schedule.log_every:
        return schedule.validate_every
    return schedule.log_every * -(-MIN_INTERVAL // schedule.log_every)


def hold_back(manifest: Manifest, share: float) -> tuple[Manifest, Manifest | None]:
    """The manifests of the trajectories to train on and of those held back; None if there are none.

    A trajectory that is also in a source with fewer than FEWEST trajectories is not held back. Of
    the others at least one is. The result depends on the ids in each source only, so it is the same
    in all processes and after a resume.

    When data is added, no earlier trajectory becomes held back; one that was held back only because
    its hash is the smallest is trained on if a new one has a smaller hash. This cannot be promised
    in two cases, in which a run may have trained on what it holds back later: a source grows to
    FEWEST trajectories (or one leaves the few best ones of data.best_share), and the only held-back
    trajectory is deleted.
    """
    hashes = _hashes(manifest.ids)
    small = np.bincount(manifest.component, minlength=len(manifest.shares)) < FEWEST
    free = ~np.isin(hashes, hashes[small[manifest.component]])
    if not share or not free.any():
        return manifest, None
    held = hashes < np.uint64(min(share, 1.0) * 2.0**64)
    held = free & (held | (hashes == hashes[free].min()))
    return manifest.only(~held, f"without {share}"), manifest.only(held, f"only {share}")


def validation_sampler(manifest: Manifest, config: DataConfig) -> WindowSampler:
    """The sampler of held-back windows: the same for each run with these window settings."""
    # All sources as one, because small ones have no held-back trajectory.
    merged = replace(manifest, component=np.zeros_like(manifest.component), shares=(1.0,))
    return WindowSampler(merged, config.replace(epochs=False, ramp_updates=0), seed=0)


def _hashes(ids: NDArray[np.void]) -> NDArray[np.uint64]:
    """A hash of each 16-byte id. Ids that begin with a time are mixed as well as random ones."""
    words = np.frombuffer(ids.tobytes(), np.uint64).reshape(-1, 2)
    out: NDArray[np.uint64] = mix(words[:, 0] ^ mix(words[:, 1]))
    return out
