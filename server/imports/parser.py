"""The process that parses uploaded files: `python -m server.imports.parser FD`.

Started by parser_process.py. It gets one open file, drops all other rights (sandbox.py), and sends
frames over stdout:

    → {memory, seconds, max_rows, options}                        the request, on stdin
    ← {kind: "plan", format, spec, trajectories, steps, warnings, dropped, metadata, confined}
    ← {kind: "data", rows} + Arrow stream (stepwell.codec)        repeated
    ← {kind: "end"}      or, at any point,      {kind: "refused", code, status, detail, …}

The parent validates the output like any upload.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO

from server.pipe_frames import read_frame, write_frame
from server.sandbox import confine, libraries

if TYPE_CHECKING:
    from server.imports.raw_file import ImportOptions, Reading
    from stepwell.spaces import EnvSpec
    from stepwell.trajectory import Trajectory

GROUP_BYTES = 4 << 20


def main(argv: list[str]) -> int:
    frame = read_frame(sys.stdin.buffer)
    assert frame is not None
    request = frame[0]
    layers = confine(
        libraries(),
        address_space=int(request["memory"]),
        cpu_seconds=int(request["seconds"]) + 5,
        open_files=64,
    )
    out = sys.stdout.buffer
    # h5py and numpy are imported in the sandbox, so that it applies to the threads they start.
    from server.imports.raw_file import ImportRefused

    try:
        with os.fdopen(int(argv[0]), "rb", buffering=0) as file:
            _convert(file, request, layers, out)
        write_frame(out, {"kind": "end"})
    except ImportRefused as error:
        refusal = {"code": error.code, "status": error.status, "detail": error.detail}
        refusal |= {"expected": error.expected, "got": error.got}
        write_frame(out, {"kind": "refused", **refusal})
    except MemoryError:
        detail = "the file needs more memory than an import may have (STEPWELL_IMPORT_MEMORY)"
        write_frame(
            out, {"kind": "refused", "code": "body_too_large", "status": 413, "detail": detail}
        )
    return 0


FORMATS = {
    "d4rl": "flat",
    "npz": "flat",
    "minari": "minari",
    "amago": "amago",
    "rlds": "rlds",
    "lerobot": "lerobot",
    "parquet": "parquet",
}
"""Format → module of this package with its `opened` (episodes.py: Episodes)."""


@contextmanager
def reading(
    file: BinaryIO, options: ImportOptions, memory: int, max_rows: int
) -> Iterator[Reading]:
    """An open file of any format. Raises `ImportRefused`, also where its trajectories are read."""
    from server.imports.plan import plan

    module = import_module(f"server.imports.{FORMATS[options.format]}")
    with module.opened(file, options, memory, max_rows) as source:
        yield plan(source, options, memory, max_rows)


def _convert(file: BinaryIO, request: dict[str, Any], layers: dict[str, bool], out: Any) -> None:
    from server.imports.raw_file import ImportOptions, ImportRefused
    from stepwell.spaces import EnvSpec

    given = dict(request["options"])
    if given["spec"] is not None:
        given["spec"] = EnvSpec.from_json(given["spec"])
    lists: dict[str, Any] = {k: tuple(v) for k, v in given.items() if isinstance(v, list)}
    options = ImportOptions(**(given | lists))
    # A third: the file's arrays, their converted copies, and what is being sent.
    memory, max_rows = int(request["memory"]) // 3, int(request["max_rows"])
    options = replace(options, format=recognised(file, options, memory))
    if options.keep_last_step and options.format != "rlds":
        raise ImportRefused(
            "?keep_last_step=: only in RLDS does the last step of an episode need it",
            expected="a folder of RLDS",
            got=f"format {options.format}",
        )
    with reading(file, options, memory, max_rows) as found:
        head = {
            "kind": "plan",
            "format": found.format,
            "spec": found.spec.to_json(),
            "trajectories": found.count,
            "steps": found.steps,
            "warnings": found.warnings[:100],
            "dropped": dict(sorted(found.dropped.items())[:100]),
            "metadata": found.metadata,
            "confined": layers,
        }
        write_frame(out, head)
        _send(found.trajectories, found.spec, out)


def recognised(file: BinaryIO, options: ImportOptions, memory: int) -> str:
    """The format by the content, for d4rl (any HDF5 file, and the default) and zip (any folder).

    Raises `ImportRefused`.
    """
    from server.imports import minari
    from server.imports.archive import Archive
    from server.imports.raw_file import ImportRefused
    from stepwell.import_options import LANDMARKS, format_of_names

    asked = options.format
    if asked not in ("d4rl", "zip"):
        return asked
    if not zipfile.is_zipfile(file):
        file.seek(0)
        return "minari" if minari.is_minari(file) else "d4rl"
    names = Archive(file, options.size, memory).names
    file.seek(0)
    if (found := format_of_names(names)) is not None:
        return found
    if asked == "d4rl":
        return asked
    if names and all(name.endswith(".npy") for name in names):
        return "npz"
    raise ImportRefused(
        "the zip is not of a known dataset",
        expected=f"a folder of {', '.join(sorted({*LANDMARKS.values()}))}, or of Arrow files",
        got=", ".join(names[:20])[:200],
    )


def _send(trajectories: Iterator[Trajectory], spec: EnvSpec, out: Any) -> None:
    # Imported here: a refusal need not wait for Arrow.
    from stepwell.codec import EncodedStream, encode

    group, size, rows = [], 0, 0
    for trajectory in trajectories:
        group.append(trajectory)
        size += trajectory.nbytes
        rows += len(trajectory)
        del trajectory  # a long one is gone before the next is read
        if size >= GROUP_BYTES or len(group) == 1024:
            # Short ones are small together, and many writes take longer than a copy.
            made = EncodedStream if size >= GROUP_BYTES else encode
            write_frame(out, {"kind": "data", "rows": rows}, made(group, spec))
            group, size = [], 0
    if group:
        write_frame(out, {"kind": "data", "rows": rows}, EncodedStream(group, spec))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
