"""Folders of other libraries' datasets: which files of them an import needs, and their zip."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from stepwell.errors import InvalidData

Files = dict[str, Path]
"""Name in the zip → file."""
EXPORT = ("spec.json", "trajectories.parquet")
"""What only a folder of `stepwell export --format parquet` has."""
PART = re.compile(r"\d+/part-\d+\.(arrow|parquet)")
PICKLE = (
    "a .traj file of AMAGO is a pickle, which can run code, so it is not read: save it as .npz "
    'where AMAGO is installed, load_traj_from_disk(path).save_to_disk(path[:-5], save_as="npz")'
)


def _minari(folder: Path) -> Files | None:
    data = folder / "data" if (folder / "data").is_dir() else folder
    about, main = data / "metadata.json", data / "main_data.hdf5"
    if not about.is_file():
        return None
    if main.is_file():
        return {about.name: about, main.name: main}
    parts = [p for p in data.glob("*/part-*") if PART.fullmatch(f"{p.parent.name}/{p.name}")]
    files = {f"{p.parent.name}/{p.name}": p for p in sorted(parts)}
    for name in sorted({part.parent.name for part in parts}):
        if (said := data / name / about.name).is_file():
            files[f"{name}/{said.name}"] = said
    return {about.name: about, **files} if files else None


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


def _rlds(folder: Path) -> Files | None:
    """A version's folder of TFDS, or the folder of a dataset with one version."""
    versions = [p.parent for p in (*folder.glob("features.json"), *folder.glob("*/features.json"))]
    if len(versions) > 1:
        raise InvalidData(
            f"{folder} has several versions", expected="one, for instance " + str(versions[0])
        )
    found: Files = {}
    for version in versions:
        names = ("features.json", "dataset_info.json")
        about = [version / name for name in names if (version / name).is_file()]
        found |= {path.name: path for path in (*about, *sorted(version.glob("*.tfrecord-*")))}
    return found or None


def _has_member(path: Path, member: str) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return member in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def _lerobot(folder: Path) -> Files | None:
    if not (folder / "meta/info.json").is_file():
        return None
    names = ("README.md", "meta/info.json", "meta/stepwell/spec.json")
    about = {name: folder / name for name in names if (folder / name).is_file()}
    videos = {f"videos/{name}": path for name, path in _all(folder / "videos", "*.mp4").items()}
    return {**about, **_all(folder, "*.parquet"), **videos}


def _parquet(folder: Path) -> Files | None:
    """Every Parquet file in it, as datasets on the Hugging Face Hub have them; if there is none,
    every Arrow file, with what says which of them are a dataset that was saved to disk."""
    found = _all(folder, "*.parquet") or _all(folder, "*.arrow")
    if not found:
        return None
    readme = folder / "README.md"
    says = {readme.name: readme} if _has_header(readme) else {}
    return {**says, **found, **_all(folder, "state.json")}


def _has_header(readme: Path) -> bool:
    """Whether a README may say which files are which split, or a licence; others do not change the
    zip."""
    if not readme.is_file():
        return False
    with readme.open("rb") as file:
        head = file.read(1 << 20)
    starts = head.lstrip(b"\xef\xbb\xbf").startswith(b"---")
    return starts and (b"data_files" in head or b"license" in head)


def _all(folder: Path, pattern: str) -> Files:
    found = sorted(path for path in folder.rglob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in found}


FOLDERS: Mapping[str, tuple[str, Callable[[Path], Files | None]]] = {
    "minari": (
        "Minari's data/metadata.json with data/main_data.hdf5 or data/0/part-0.arrow, …",
        _minari,
    ),
    "amago": ("AMAGO's trajectories (*.npz with rl2s), in it, in fifo/ or in protected/", _amago),
    "rlds": ("TFDS's features.json, dataset_info.json and *.tfrecord-*", _rlds),
    "lerobot": ("LeRobot's meta/info.json and data/chunk-000/file-000.parquet", _lerobot),
    # The last: folders of other formats have some, too.
    "parquet": ("Parquet or Arrow files", _parquet),
}
"""Format → what its folder has, and its files (None: another kind of folder)."""


def is_export(folder: Path) -> bool:
    """Whether `stepwell export --format parquet` wrote it (_export/parquet.py)."""
    return all((folder / name).is_file() for name in EXPORT)


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
