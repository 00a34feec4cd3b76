"""Files to import: their format, its options, the columns of tables, and the way to the service."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dashboard import api
from stepwell.client import SUFFIXES as FORMAT_OF
from stepwell.import_options import (
    ARRAY_ROLES,
    COLUMN_ROLES,
    FORMATS,
    TABLES,
    ImportOption,
    format_of_names,
    options_of,
)
from stepwell.messages import Job

__all__ = ["ARRAY_ROLES", "COLUMN_ROLES", "TABLES", "ImportOption", "options_of"]

SUFFIXES = tuple(FORMAT_OF)
SECONDS = 15.0
"""For the names of columns."""
NONE = "(no column)"
"""A role that is not to be guessed."""


def formats_of(file: Any) -> tuple[str, ...]:
    """What an uploaded file may be, as far as its name says, and the names of files in a zip. The
    service looks closer."""
    found = FORMAT_OF.get(Path(file.name).suffix.lower(), "zip")
    if found == "d4rl":
        return "d4rl", "minari"
    if found != "zip":
        return (found,)
    try:
        with zipfile.ZipFile(file) as archive:
            known = format_of_names(archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        known = None
    finally:
        file.seek(0)
    return (known,) if known else FORMATS


def columns_of(file: Any) -> list[str]:
    """Names of a table's columns, read in a process of its own; none if they cannot be read."""
    with _stored(file) as path:
        command = [sys.executable, "-m", "stepwell.table_columns", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
            return [str(name) for name in json.loads(done.stdout)]
        except (subprocess.SubprocessError, OSError, ValueError):
            return []


def column_map(roles: Mapping[str, str | list[str] | None], others: str) -> list[str]:
    """Roles with their columns, and lines of ROLE=COLUMN, as the service takes them."""
    found = []
    for role, chosen in roles.items():
        names = [chosen] if isinstance(chosen, str) else chosen or []
        if names:
            found.append(f"{role}={','.join(name for name in names if name != NONE)}")
    return found + [line.strip() for line in others.splitlines() if line.strip()]


def send(
    dataset: str,
    file: Any,
    *,
    partition: str,
    env: str,
    options: Mapping[str, Any],
    progress: Callable[[int, int], None],
) -> Job:
    """Send a file; returns the job that imports it. `progress(bytes sent, of)` is called."""
    with _stored(file) as path:
        return api.client().upload(
            dataset, path, partition=partition, env=env, create=True, progress=progress,
            wait=False, **options,
        )  # fmt: skip


@contextmanager
def _stored(file: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stepwell-dash-") as folder:
        path = Path(folder) / f"upload{Path(file.name).suffix.lower()}"
        path.write_bytes(file.getbuffer())
        yield path
