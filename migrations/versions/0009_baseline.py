"""The schema of the first release; `stepwell fsck --rebuild` takes over an index from before it.

A new index is made from tables.py, at the newest revision (server/index/db.py). So there is nothing
to do here; later migrations bring an existing index to what tables.py says by then.
"""

from __future__ import annotations

revision = "0009"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing: see above."""
