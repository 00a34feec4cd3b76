"""Where the service can be made to die; stepwell/failpoints.py says how.

tests/faults visits every name in ALL. A name that nobody has is refused at the start.
"""

from __future__ import annotations

from stepwell.failpoints import ALL as ELSEWHERE
from stepwell.failpoints import failpoint, wanted

__all__ = ["ALL", "failpoint"]

ON_DAMAGE: tuple[str, ...] = (
    "quarantine.before_commit",
    "quarantine.after_commit",
    "policy.after_replace",
)
"""Reached only where a file is damaged (integrity.py, policies.py)."""

ALL: tuple[str, ...] = (
    # the write path, in order (ingest/spool.py, ingest/commit.py)
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

if wanted and wanted not in (*ALL, *ELSEWHERE):
    raise SystemExit(f"STEPWELL_FAILPOINT={wanted}: expected one of {', '.join(ALL)}")
