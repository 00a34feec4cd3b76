"""What another object store or another database would have to replace stands in one place each."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOCAL_PATHS = {"server/ingest/segments.py", "server/imports/importer.py"}
"""Who needs a path and cannot read a `Source`; each says why."""

SQLITE = {
    f"server/index/{name}.py"
    for name in ("dialect", "row_checksums", "schema_copy", "table_reader", "wal")
}
ITS_WORDS = "|".join(
    (
        r"sqlite|pragma_|pragma (?!: no cover)|exec_driver_sql|driver_connection|begin immediate",
        r"\bjson_(each|extract|set|type|group_array)|group_concat|\binstr\b|\"glob\"|\browid",
        r"or (ignore|replace) into|\bor ignore\"|indexed by|not indexed|-wal\b|-shm\b",
    )
)


def matching(pattern: str) -> dict[str, list[str]]:
    """File of the service → its lines that match, whatever the name of the index says."""
    found = {}
    for path in sorted((ROOT / "server").rglob("*.py")):
        text = path.read_text().replace("index.sqlite", "index")
        lines = [line for line in text.splitlines() if re.search(pattern, line, re.I)]
        if lines:
            found[str(path.relative_to(ROOT))] = lines
    return found


def test_routes_hold_http_only() -> None:
    """`pyproject.toml` refuses their imports of SQLAlchemy and the index; nor do they open
    transactions of others."""
    assert not [
        file for file in matching(r"sqlalchemy|\b(read|write)\(\) as") if "/routes/" in file
    ]


def test_what_is_sqlites_stands_in_its_modules() -> None:
    found = matching(ITS_WORDS)
    del found["server/sql/guard.py"]  # it refuses functions of DuckDB
    assert {file: lines for file, lines in found.items() if file not in SQLITE} == {}
    assert found.keys() == SQLITE


def test_files_are_asked_of_the_store_by_folder_and_name() -> None:
    used = matching(r"\blocal_path\(")
    assert used.keys() - {"server/storage/store.py"} == LOCAL_PATHS
    assert all(len(used[file]) == 1 for file in LOCAL_PATHS)
    assert not matching(r"store\.(path|root|_root)\b")
