"""HDF5 and npz files of flat arrays → trajectories: one long table each (episodes.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from server.imports import episodes, hdf5, npz
from server.imports.raw_file import ImportOptions, Reading


@contextmanager
def reading(
    file: BinaryIO, options: ImportOptions, memory: int, max_rows: int
) -> Iterator[Reading]:
    """Raises `ImportRefused`."""
    reader = npz.read if options.format == "npz" else hdf5.read
    source = reader(file, options.size, memory, options.drop_infos, options.columns)
    plan = episodes.plan(source, options, max_rows)
    found = Reading(
        format=options.format,
        spec=plan.spec,
        steps=plan.steps,
        count=len(plan.ends),
        warnings=plan.warnings,
        dropped=source.dropped,
        metadata=source.metadata,
        trajectories=episodes.trajectories(plan, options),
    )
    del source  # its arrays are in the plan, converted
    yield found
