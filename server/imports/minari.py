"""A genuine Minari dataset → trajectories. Untrusted: runs only in the sandbox.

Either `main_data.hdf5` alone, whose spaces are derived from the data, or the zip of the dataset's
folder: `metadata.json` with `main_data.hdf5` (minari_hdf5.py), or with a folder of Arrow or Parquet
files per episode (minari_arrow.py).
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import h5py

from server.imports import hdf5, minari_hdf5
from server.imports.archive import Archive
from server.imports.episodes import Episodes
from server.imports.minari_arrow import PART, ArrowEpisodes
from server.imports.minari_metadata import METADATA, Metadata
from server.imports.raw_file import ImportOptions, ImportRefused

MAIN = "main_data.hdf5"


def is_minari(file: BinaryIO) -> bool:
    """Whether an HDF5 file is one of a Minari dataset; a damaged file is not."""
    try:
        file.seek(0)
        with h5py.File(file, "r") as h5:
            return minari_hdf5.EPISODE.fullmatch(next(iter(h5), "")) is not None
    except (OSError, RuntimeError, ValueError):
        return False
    finally:
        file.seek(0)


@contextmanager
def opened(file: BinaryIO, options: ImportOptions, memory: int, _: int) -> Iterator[Episodes]:
    """Errors of h5py inside are an `ImportRefused`, too."""
    metadata = Metadata({})
    main: BinaryIO = file
    if zipfile.is_zipfile(file):
        archive = Archive(file, options.size, memory)
        entered = archive.enter(METADATA)
        metadata = Metadata(archive.json(METADATA) if entered else {})
        if entered and any(PART.fullmatch(name) for name in archive.names):
            yield _checked(ArrowEpisodes(archive, metadata, options, memory), metadata)
            return
        if not entered or not archive.has(MAIN):
            raise ImportRefused(
                "not the zip of a Minari dataset",
                expected=f"{METADATA} and {MAIN}, or <episode>/part-0.arrow or .parquet "
                "(stepwell import FOLDER makes it)",
                got=", ".join(archive.names[:20])[:200],
            )
        if (kind := metadata.written.get("data_format", "hdf5")) != "hdf5":
            raise ImportRefused(
                f"{METADATA} describes another format",
                expected=f'"data_format": "hdf5", as there is {MAIN}',
                got=str(kind)[:100],
            )
        main = archive.open(MAIN)
    file.seek(0)
    with hdf5.opened(main, options.size, "Minari's main_data.hdf5") as h5:
        yield _checked(minari_hdf5.Hdf5Episodes(h5, metadata, options, memory), metadata)


def _checked(source: Episodes, metadata: Metadata) -> Episodes:
    metadata.check_counts(source.layout)
    source.metadata = dict(metadata.shown)
    if any(leaf.kind == "frames" for leaf in source.layout.observations.values()):
        source.layout.warnings.append(
            "images were stored as JPEG, which changes pixels: what is stored "
            "here is what the JPEG shows"
        )
    return source
