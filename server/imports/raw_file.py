"""What an uploaded file is read with: the options of its upload, refusals, and checks of types and
sizes. Runs in the sandbox. Nothing here opens a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stepwell.errors import InvalidTrajectory
from stepwell.flags import as_bools
from stepwell.spaces import EnvSpec
from stepwell.trajectory import Trajectory

Array = NDArray[Any]

MAX_RATIO = 200
"""Unpacked bytes per stored byte beyond which a file is treated as a decompression bomb …"""
FREE_BYTES = 64 << 20
"""… unless it is at most this large unpacked: flags that are all false compress very well."""
MAX_MEMBERS = 512


class ImportRefused(Exception):
    """The file cannot be imported. Has `expected` and `got`; nothing was stored."""

    def __init__(
        self,
        detail: str,
        *,
        expected: Any = None,
        got: Any = None,
        code: str = "import_refused",
        status: int = 422,
    ):
        super().__init__(detail)
        self.detail, self.expected, self.got = detail, expected, got
        self.code, self.status = code, status


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Options from an upload's URL, its bytes and its dataset. Stored in the job's row."""

    dataset: str
    format: str = "d4rl"
    partition: str = "protected"
    create: bool = False
    """Create the dataset from the file if it does not exist."""
    env: str = ""
    observation: str = ""
    """"" (derived from the data), "box" or "discrete:N"."""
    action: str = ""
    """"" (derived from the data), "box", "discrete:N" or "discrete:N:START"."""
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    max_steps: int = 0
    """Where the file has no timeouts: an episode is cut after this many steps (0: never)."""
    columns: tuple[str, ...] = ()
    """Columns of tables and flat files: "role=column,column" (column_map.py); or guessed."""
    split: str = ""
    """Split to read from a folder with several, such as "train"."""
    videos: str = ""
    """"no" leaves videos out, "96x96" scales frames to this width and height."""
    keep_last_step: bool = False
    """RLDS only: the last step of an episode counts as a transition (rlds.py)."""
    drop_infos: tuple[str, ...] = ()
    """Infos to drop; a group's name means all below it, * means all."""
    sha256: str = ""
    """sha256 of the uploaded file."""
    size: int = 0
    """Bytes of the uploaded file."""
    spec: EnvSpec | None = None
    """Spec of the dataset, if it exists already."""


@dataclass(slots=True, kw_only=True)
class Reading:
    """What a file holds; while it is open, `trajectories` can be read."""

    format: str
    spec: EnvSpec
    steps: int
    count: int
    """Trajectories."""
    warnings: list[str]
    dropped: dict[str, str]
    """Infos that are not read: name → reason."""
    metadata: dict[str, Any]
    """Metadata of the whole file, for the job's result."""
    trajectories: Iterator[Trajectory]


def check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    """Refuse types other than plain numbers: objects, references, compounds, strings."""
    if not plain(dtype):
        cure = ""
        if dtype.names:
            cure = f"; each field as an array of its own: array[{dtype.names[0][:50]!r}]"
        elif dtype.kind == "f":
            cure = "; array.astype(np.float64)"
        elif dtype.kind in "SU":
            cure = "; choices as numbers, the same in every file: "
            cure += "np.unique(array, return_inverse=True)[1]"
        raise ImportRefused(
            f"{name} does not contain plain numbers",
            expected=f"integers, floats of at most 64 bits, or booleans{cure}",
            got=str(dtype)[:100],
        )


def plain(dtype: np.dtype[Any]) -> bool:
    """Whether the type is one that `check_dtype` accepts."""
    return dtype.kind in "biuf" and dtype.itemsize <= 8 and not dtype.hasobject


def as_flags(name: str, array: Array) -> NDArray[np.bool_]:
    """Flags, of any type of number: some writers have floats. Raises `ImportRefused`."""
    try:
        return as_bools(name, array)
    except InvalidTrajectory:
        got = str(array.dtype)
        if array.dtype.kind in "iuf":
            row, *_ = np.argwhere((array != 0) & (array != 1))[0].tolist()
            got = f"{array[row].reshape(-1)[0]:g} in row {row}"
        raise ImportRefused(
            f"{name[:100]} does not contain flags", expected="0 or 1", got=got
        ) from None


def last_flag(name: str, array: Array) -> bool:
    """A flag of an episode that only its last step may have. Raises `ImportRefused`."""
    marks = as_flags(name, array).reshape(-1)
    if bool(marks[:-1].any()):
        raise ImportRefused(
            f"{name} is set before the last step",
            expected="one episode in each group, file or record",
            got=f"step {int(marks.argmax())} of {len(marks)}",
        )
    return bool(marks[-1])


def why_dropped(name: str, drop: Sequence[str], dtype: np.dtype[Any] | None = None) -> str:
    """Why the info `name` is not read; "" for one that is. Infos that cannot be kept are dropped
    without refusing the file, because no agent learns from them."""
    for requested in drop:
        if requested in ("*", name) or name.startswith(f"{requested}/"):
            return "listed in drop_infos"
    if dtype is not None and not plain(dtype):
        return f"not plain numbers ({str(dtype)[:60]})"
    return ""


def same_name(key: str, first: str, second: str, cure: str) -> ImportRefused:
    """The refusal of two arrays whose names become one in a spec."""
    return ImportRefused(
        f"{first[:100]} and {second[:100]} would both be named {key[:100]}",
        expected=f"{cure}; characters other than A-Z, a-z, 0-9 and _ become _",
    )


def check_magic(file: BinaryIO, magic: bytes, what: str, expected: str) -> None:
    """Refuse a file that does not start with `magic`."""
    head = file.read(8)
    if not head.startswith(magic):
        raise ImportRefused(f"this is not {what}", expected=expected, got=describe_content(head))
    file.seek(0)


def check_size(logical: int, stored: int, memory: int) -> None:
    """Refuse a file that would unpack to a suspicious size, or to more than the memory limit."""
    if logical > FREE_BYTES and logical > MAX_RATIO * max(stored, 1):
        raise ImportRefused(
            "the file claims to unpack to far more than it holds",
            expected=f"at most {MAX_RATIO} times its {stored} bytes",
            got=f"{logical} bytes",
        )
    if logical > memory:
        raise ImportRefused(
            "the file needs more memory than an import may have (STEPWELL_IMPORT_MEMORY)",
            expected=f"at most {memory} bytes unpacked",
            got=f"{logical} bytes",
            code="body_too_large",
            status=413,
        )


def describe_content(head: bytes) -> str:
    """The likely type of a file, for a message."""
    known = {
        b"\x89HDF\r\n\x1a\n": "an HDF5 file",
        b"PK\x03\x04": "a zip archive (or .npz)",
        b"PK\x05\x06": "an empty zip archive",
        b"\x93NUMPY": "a single .npy array",
        b"PAR1": "a Parquet file",
        b"ARROW1": "an Arrow file",
        b"\x1f\x8b": "a gzip file",
        b"CDF": "a NetCDF file",
    }
    for magic, name in known.items():
        if head.startswith(magic):
            return name
    if head[:1] == b"\x80" and len(head) > 1 and head[1] <= 5:
        return "a pickle (not supported: a pickle can run code)"
    if head.lstrip()[:1] == b"<":
        return "a web page or XML"
    if not head:
        return "an empty file"
    return f"a file that starts with {head[:8]!r}"
