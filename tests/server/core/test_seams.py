"""What another object store or another database would have to replace stands in one place each."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOCAL_PATHS = {"server/ingest/segments.py", "server/imports/importer.py"}
"""Who needs a path and cannot read a `Source`; each says why."""


def matching(pattern: str) -> dict[str, list[str]]:
    """File of the service → its lines that match."""
    found = {}
    for path in sorted((ROOT / "server").rglob("*.py")):
        lines = [line for line in path.read_text().splitlines() if re.search(pattern, line, re.I)]
        if lines:
            found[str(path.relative_to(ROOT))] = lines
    return found


def test_files_are_asked_of_the_store_by_folder_and_name() -> None:
    used = matching(r"\blocal_path\(")
    assert used.keys() - {"server/storage/store.py"} == LOCAL_PATHS
    assert all(len(used[file]) == 1 for file in LOCAL_PATHS)
    assert not matching(r"store\.(path|root|_root)\b")
