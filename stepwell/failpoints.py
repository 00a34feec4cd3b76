"""Places where a process can be made to die, to prove that dying there loses nothing.

`STEPWELL_FAILPOINT=checkpoint.after_rename` (or `name:3` for the third hit) kills this process with
SIGKILL at that point. Tests visit every name in CLIENTS and SERVICE; an unknown name is refused at
the start. Unset, a failpoint costs one compare.
"""

from __future__ import annotations

import os
import signal

CLIENTS: tuple[str, ...] = (
    # the outbox (stepwell/outbox.py)
    "outbox.before_rename",
    "outbox.after_put",
    "outbox.after_answer",
    "outbox.after_unlink",
    "outbox.after_reason",
    "outbox.after_reject",
    "outbox.after_requeue",
    # taking over what a dead process left in its own
    "adopt.after_lock",
    "adopt.after_rename",
    "adopt.after_sync",
    # a collector's clock (collector/stats.py)
    "clock.before_rename",
    "clock.after_rename",
    # a trainer's checkpoints (trainer/checkpoint.py)
    "checkpoint.before_rename",
    "checkpoint.after_rename",
    "checkpoint.after_rotation",
    # a node's columns (trainer/data/cache.py), and the manifests beside them (snapshot.py)
    "manifest.before_rename",
    "cache.after_download",
    "cache.after_column",
    "cache.before_list",
    "cache.after_list",
    "cache.after_eviction",
    # a run's row and policies (trainer/report.py, publish.py)
    "run.after_create",
    "run.after_note",
    "policy.after_put",
    "policy.after_copy",
)

ON_DAMAGE: tuple[str, ...] = (
    "quarantine.before_commit",
    "quarantine.after_commit",
    "policy.after_replace",
)
"""Of the service, reached only where a file is damaged (integrity.py, policies.py)."""

SERVICE: tuple[str, ...] = (
    # the write path, in order (ingest/segments.py, ingest/commit.py)
    "segment.after_create",
    "append.before_write",
    "append.after_write",
    "append.after_fsync",
    "index.before_commit",
    "index.after_commit",
    # sealing (ingest/seal.py, storage/store.py)
    "seal.before_tmp",
    "seal.after_tmp_fsync",
    "seal.after_rename",
    "seal.before_commit",
    "seal.after_commit",
    "seal.after_unlink",
    # maintenance
    "delete.after_mark",
    "delete.after_unlink",
    "compact.before_tmp",
    "compact.after_tmp_fsync",
    "compact.after_rename",
    "compact.before_commit",
    "compact.after_commit",
    # snapshots
    "snapshot.after_rename",
    "snapshot.before_commit",
    "snapshot.after_commit",
    # imports (imports/, ingest/bulk_insert.py) and policies (policies.py)
    "import.after_parse",
    "import.before_commit",
    "import.after_commit",
    "policy.after_rename",
    *ON_DAMAGE,
)

wanted, _, _count = os.environ.get("STEPWELL_FAILPOINT", "").partition(":")
_left = int(_count or 1)
if wanted and wanted not in (*CLIENTS, *SERVICE):
    raise SystemExit(f"STEPWELL_FAILPOINT={wanted}: expected one of {', '.join(CLIENTS + SERVICE)}")


def failpoint(name: str) -> None:
    """Die here, without a goodbye, if the environment says so."""
    global _left
    if name != wanted:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
