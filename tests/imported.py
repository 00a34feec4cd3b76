"""Reading a file as an import's child process does, in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from server.imports.parser import reading, recognised
from server.imports.raw_file import ImportOptions, Reading
from stepwell._folders import files_of, zipped
from stepwell.trajectory import Trajectory


def read_file(
    path: Path, *columns: str, kind: str = "d4rl", memory: int = 1 << 30, **options: Any
) -> tuple[Reading, list[Trajectory]]:
    """A file of this kind, or a folder, whose format its zip tells; every trajectory is checked.

    Raises `ImportRefused`.
    """
    if path.is_dir():
        kind, files = files_of(path)
        with zipped(files) as packed:
            with open(packed, "rb", buffering=0) as file:
                size = packed.stat().st_size
                unknown = ImportOptions(dataset="d", format="zip", size=size)
                assert recognised(file, unknown, memory) == kind
            return read_file(packed, *columns, kind=kind, memory=memory, **options)
    chosen = ImportOptions(dataset="d", format=kind, sha256="ab" * 32, columns=columns)
    chosen = replace(chosen, size=path.stat().st_size, **options)
    with (
        open(path, "rb", buffering=0) as file,
        reading(file, chosen, memory, 10**7) as found,
    ):
        made = []
        for trajectory in found.trajectories:
            trajectory.check(found.spec)
            made.append(trajectory)
    return found, made
