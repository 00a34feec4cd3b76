"""The process that parses uploaded files: `python -m server.imports.parser FD`.

Started by parser_process.py. It gets one open file, drops all other rights (sandbox.py), and sends
frames over stdout:

    → {memory, seconds, max_rows, options}                        the request, on stdin
    ← {kind: "plan", spec, trajectories, steps, warnings, metadata, confined}
    ← {kind: "data", rows} + Arrow stream (stepwell.codec)        repeated
    ← {kind: "end"}      or, at any point,      {kind: "refused", code, status, detail, …}

The parent validates the output like any upload.
"""

from __future__ import annotations

import os
import sys
from typing import Any, BinaryIO

from server.pipe_frames import read_frame, write_frame
from server.sandbox import confine, libraries

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


def _convert(file: BinaryIO, request: dict[str, Any], layers: dict[str, bool], out: Any) -> None:
    from server.imports.episodes import plan, trajectories
    from server.imports.raw_file import ImportOptions
    from stepwell.spaces import EnvSpec

    given = dict(request["options"])
    if given["spec"] is not None:
        given["spec"] = EnvSpec.from_json(given["spec"])
    lists: dict[str, Any] = {k: tuple(v) for k, v in given.items() if isinstance(v, list)}
    options = ImportOptions(**(given | lists))
    # A third: the file's arrays, their converted copies, and what is being sent.
    memory = int(request["memory"]) // 3
    if options.format == "npz":
        from server.imports.npz import read
    else:
        from server.imports.hdf5 import read
    source = read(file, options.size, memory, options.drop_infos)
    found = plan(source, options, int(request["max_rows"]))
    metadata, dropped = source.metadata, source.dropped
    del source
    write_frame(
        out,
        {
            "kind": "plan",
            "spec": found.spec.to_json(),
            "trajectories": len(found.ends),
            "steps": found.steps,
            "warnings": found.warnings[:100],
            "metadata": metadata,
            "dropped": dict(sorted(dropped.items())[:100]),
            "confined": layers,
        },
    )
    # Imported here: a refusal need not wait for Arrow.
    from stepwell.codec import encode

    group, size, rows = [], 0, 0
    for trajectory in trajectories(found, options):
        group.append(trajectory)
        size += trajectory.nbytes
        rows += len(trajectory)
        if size >= GROUP_BYTES or len(group) == 1024:
            write_frame(out, {"kind": "data", "rows": rows}, encode(group, found.spec))
            group, size = [], 0
    if group:
        write_frame(out, {"kind": "data", "rows": rows}, encode(group, found.spec))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
