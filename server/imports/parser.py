"""The process that parses uploaded files: `python -m server.imports.parser FD`.

Started by parser_process.py. It gets one open file, drops all other rights (sandbox.py), and sends
frames over stdout:

    → {memory, seconds, max_rows, options}                        the request, on stdin
    ← {kind: "plan", format, spec, trajectories, steps, warnings, metadata, confined}
    ← {kind: "data", rows} + Arrow stream (stepwell.codec)        repeated
    ← {kind: "end"}      or, at any point,      {kind: "refused", code, status, detail, …}

The parent validates the output like any upload.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

from server.pipe_frames import read_frame, write_frame
from server.sandbox import confine, libraries

if TYPE_CHECKING:
    from stepwell.spaces import EnvSpec
    from stepwell.trajectory import Trajectory

GROUP_BYTES = 4 << 20
DESCRIBING = ("dataset_id", "algorithm_name", "author", "code_permalink", "description")
"""What Minari's metadata.json says of a dataset, for the job's result and the description."""


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


def _convert(file: BinaryIO, request: dict[str, Any], layers: dict[str, bool], out: Any) -> None:
    from server.imports import episodes, hdf5, minari, minari_episodes, npz
    from server.imports.raw_file import ImportOptions
    from stepwell.spaces import EnvSpec

    given = dict(request["options"])
    if given["spec"] is not None:
        given["spec"] = EnvSpec.from_json(given["spec"])
    lists: dict[str, Any] = {k: tuple(v) for k, v in given.items() if isinstance(v, list)}
    options = ImportOptions(**(given | lists))
    # A third: the file's arrays, their converted copies, and what is being sent.
    memory, max_rows = int(request["memory"]) // 3, int(request["max_rows"])
    if options.format == "minari" or (options.format == "d4rl" and minari.is_minari(file)):
        options = replace(options, format="minari")
        with minari.opened(file, options.size) as (h5, about):
            found = minari_episodes.plan(h5, about, options, memory, max_rows)
            layout = found.layout
            head = _head(found, options.format, len(layout.episodes), layout.dropped, layers)
            shown = {k: str(about[k])[:1024] for k in DESCRIBING if about.get(k)}
            write_frame(out, head | {"metadata": shown})
            _send(minari_episodes.trajectories(h5, found, options), found.spec, out)
        return
    reader = npz.read if options.format == "npz" else hdf5.read
    source = reader(file, options.size, memory, options.drop_infos)
    flat = episodes.plan(source, options, max_rows)
    head = _head(flat, options.format, len(flat.ends), source.dropped, layers)
    write_frame(out, head | {"metadata": source.metadata})
    del source
    _send(episodes.trajectories(flat, options), flat.spec, out)


def _head(
    found: Any, kind: str, count: int, dropped: dict[str, str], layers: dict[str, bool]
) -> dict[str, Any]:
    return {
        "kind": "plan",
        "format": kind,
        "spec": found.spec.to_json(),
        "trajectories": count,
        "steps": found.steps,
        "warnings": found.warnings[:100],
        "dropped": dict(sorted(dropped.items())[:100]),
        "confined": layers,
    }


def _send(trajectories: Iterator[Trajectory], spec: EnvSpec, out: Any) -> None:
    # Imported here: a refusal need not wait for Arrow.
    from stepwell.codec import encode

    group, size, rows = [], 0, 0
    for trajectory in trajectories:
        group.append(trajectory)
        size += trajectory.nbytes
        rows += len(trajectory)
        if size >= GROUP_BYTES or len(group) == 1024:
            write_frame(out, {"kind": "data", "rows": rows}, encode(group, spec))
            group, size = [], 0
    if group:
        write_frame(out, {"kind": "data", "rows": rows}, encode(group, spec))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
