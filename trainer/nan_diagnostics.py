"""Find the cause of a non-finite gradient: the samples of the batch, and the first number in them
that is NaN, infinite or too large."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from trainer.data.loader import Loaded
from trainer.distributed import World
from trainer.learner import TrainingDiverged

log = logging.getLogger(__name__)

LARGEST = 1e15
"""From this magnitude, the sum of squares over a batch may overflow float32."""


def explain_skip(
    update: int, loaded: Loaded, world: World, ending: TrainingDiverged | None
) -> None:
    """Log the samples of a skipped update, and raise an error if the run must end.

    All processes call this, each with its part of the batch, and all raise the same error.
    """
    names = ", ".join(loaded.ids[:64])
    log.error("update %d skipped: its gradient is not finite; its windows: %s", update, names)
    found = [number for number in world.all_gather(bad_number(loaded)) if number]
    if found:
        what, trajectory = found[0]
        if world.is_main:
            log.error("update %d: %s", update, what)
        if ending is not None:
            raise TrainingDiverged(
                f"update {update}: {what}; expected a finite number below {LARGEST:g}. Mend the "
                "data, or the relabeler if data.relabel names one; or begin a new run without that "
                f"trajectory: --where \"id <> '{trajectory}'\""
            ) from ending
    if ending is not None:
        raise ending


def bad_number(loaded: Loaded) -> tuple[str, str] | None:
    """The first number of a batch that is NaN, infinite or too large, as (position, trajectory
    id)."""
    batch = loaded.batch
    exists = torch.cat((batch.mask[:, :1], batch.mask), dim=1)  # [B, L]
    numbers: dict[str, tuple[Tensor, Tensor, int]] = {
        f"observation {key!r}": (x, batch.timestep_mask, 0) for key, x in sorted(batch.obs.items())
    }
    # These belong to the step before the row.
    numbers["the reward"] = (batch.prev_reward, exists, -1)
    numbers["the action"] = (batch.prev_action, batch.previous_known, -1)
    for what, (x, known, shift) in numbers.items():
        rows = x.reshape(*known.shape, -1)
        if not rows.is_floating_point():
            continue  # every integer value is valid
        bad = known.unsqueeze(-1) & ~(rows.abs() < LARGEST)  # True for NaN too
        if bool(bad.any()):
            window, row, element = bad.nonzero()[0].tolist()
            trajectory = loaded.manifest.trajectory_ids([loaded.windows.trajectory[window]])[0]
            step = int(loaded.windows.start[window]) + row + shift
            value = float(rows[window, row, element])
            return f"{what} is {value:g} at step {step} of trajectory {trajectory}", trajectory
    return None
