"""The schema of the first release. `stepwell fsck --rebuild` converts an older index.

A new index is created from tables.py at the newest revision (server/index/db.py), so this migration
does nothing; later migrations bring an existing index to the current tables.py.
"""

from __future__ import annotations

revision = "0009"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Do nothing: see the module docstring."""
