"""Publish policies: the weights for acting and of the critics, as immutable versions.

    outbox/…-<version>-….policy        waits for the service (stepwell/outbox.py)
    policies/50.safetensors            a copy; the newest three stay

The version is the number of updates made, so a resumed run that publishes an update again publishes
the same bytes under the same name.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from amago_model.agent import Agent
from amago_model.policy_file import save_policy
from stepwell._files import whole_file
from stepwell.errors import OutboxError
from stepwell.failpoints import failpoint
from stepwell.outbox import Outbox
from trainer.errors import TrainerError

log = logging.getLogger(__name__)
KEPT = 3
"""Number of copies kept in policies/."""


def publish(
    home: Path,
    outbox: Outbox,
    run: str,
    agent: Agent,
    update: int,
    metadata: dict[str, Any],
    extra: dict[str, Any],
) -> None:
    """Queue the policy after `update` updates as run/update. It is on disk when this returns.

    `metadata` (small) is shown in the service's list; `extra` (the full config) is stored in the
    file.
    Raises `TrainerError` where the disk is full or broken.
    """
    data = save_policy(agent, step=update, extra={**metadata, **extra})
    try:
        for version in outbox.put_policy(run, update, data, metadata):
            log.error(
                "policy %s/%d is dropped undelivered: more than %d bytes wait for the service",
                *(run, version, outbox.max_bytes),
            )
        failpoint("policy.after_put")
        copies = copy_path(home, update).parent
        copies.mkdir(exist_ok=True)
        with whole_file(copy_path(home, update)) as file:
            file.write(data)
        failpoint("policy.after_copy")
    except (OutboxError, OSError) as error:
        raise TrainerError(
            f"policy {run}/{update} cannot be written to {home}: {error}; make room, then run the "
            "same command again: it resumes from its newest checkpoint"
        ) from error
    # Sorted by version, not by time: after a clock was set back, the newest would look oldest.
    published = [path for path in copies.glob("*.safetensors") if path.stem.isdigit()]
    for old in sorted(published, key=lambda path: int(path.stem))[:-KEPT]:
        old.unlink(missing_ok=True)


def copy_path(home: Path, version: int) -> Path:
    """The path of a published policy's copy, which exists once the version is queued."""
    return home / "policies" / f"{version}.safetensors"
