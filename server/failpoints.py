"""Places where the process can be made to die, to prove that dying there loses nothing.

`STEPWELL_FAILPOINT=seal.after_rename` (or `name:3` for the third hit) kills this process with
SIGKILL at that point. tests/faults visits every name in ALL. Unset, a failpoint costs one compare.
"""

from __future__ import annotations

import os
import signal

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
    # upkeep
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
    # imports (imports/, ingest/bulk.py) and policies (policies.py)
    "import.after_parse",
    "import.before_commit",
    "import.after_commit",
    "policy.after_rename",
)

_name, _, _count = os.environ.get("STEPWELL_FAILPOINT", "").partition(":")
_left = int(_count or 1)

if _name and _name not in ALL:
    raise SystemExit(f"STEPWELL_FAILPOINT={_name}: expected one of {', '.join(ALL)}")


def failpoint(name: str) -> None:
    """Die here, without a goodbye, if the environment says so."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
