"""Folders of other libraries' datasets: which files of them an import needs, and their zip."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from stepwell.errors import InvalidData

Files = dict[str, Path]
"""Name in the zip → file."""
PICKLE = (
    "a .traj file of AMAGO is a pickle, which can run code, so it is not read: save it as .npz "
    'where AMAGO is installed, load_traj_from_disk(path).save_to_disk(path[:-5], save_as="npz")'
)


def _minari(folder: Path) -> Files | None:
    data = folder / "data" if (folder / "data").is_dir() else folder
    files = {name: data / name for name in ("metadata.json", "main_data.hdf5")}
    return files if all(file.is_file() for file in files.values()) else None


def _amago(folder: Path) -> Files | None:
    """A buffer, its folder, or a folder with trajectories."""
    found: Files = {}
    for place in ("", "fifo", "protected", "buffer/fifo", "buffer/protected"):
        for path in sorted((folder / place).glob("*")):
            if path.suffix == ".traj":
                raise InvalidData(PICKLE, expected=".npz files", got=str(path))
            if path.suffix == ".npz" and _has_member(path, "rl2s.npy"):
                found[f"{place}/{path.name}".lstrip("/")] = path
    return found or None


def _has_member(path: Path, member: str) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return member in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


FOLDERS: Mapping[str, tuple[str, Callable[[Path], Files | None]]] = {
    "minari": ("Minari's data/metadata.json and data/main_data.hdf5", _minari),
    "amago": ("AMAGO's trajectories (*.npz with rl2s), in it, in fifo/ or in protected/", _amago),
}
"""Format → what its folder has, and its files (None: another kind of folder)."""


def files_of(folder: Path, format_: str | None = None) -> tuple[str, Files]:
    """The format of a folder, and the files to send. Raises `InvalidData` for an unknown one."""
    wanted = {k: v for k, v in FOLDERS.items() if format_ in (None, "zip", k)}
    for name, (_, find) in wanted.items():
        if files := find(folder):
            return name, files
    held = sorted(path.name for path in folder.iterdir())[:10]
    kinds = [kind for kind, _ in wanted.values()] or [f"a file, for format={format_}"]
    raise InvalidData(
        f"{folder} is not a known dataset, nor a folder of stepwell export",
        expected="; or ".join(kinds),
        got=", ".join(held) or "an empty folder",
    )


@contextmanager
def zipped(files: Files) -> Iterator[Path]:
    """A temporary zip, always of the same bytes, in which the files are as they are."""
    with TemporaryDirectory(prefix="stepwell-zip-") as temporary:
        packed = Path(temporary) / "folder.zip"
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
            for name, file in files.items():
                entry = zipfile.ZipInfo(name)  # its time is always 1980
                entry.file_size = file.stat().st_size
                with file.open("rb") as source, archive.open(entry, "w") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
        yield packed
