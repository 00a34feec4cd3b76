"""The process that reads strangers' files: `python -m server.imports.parser FD`; see parse.py.

Gets one open file, gives up every other right (sandbox.py), and answers in frames over stdout:

    → {format, size, memory, max_rows, options}                  the request, on stdin
    ← {kind: "plan", spec, trajectories, steps, warnings, metadata, confined}
    ← {kind: "data", rows} + Arrow stream (stepwell.codec)        again and again
    ← {kind: "end"}      or, at any point,      {kind: "refused", code, status, detail, …}

What comes out is checked by the parent like anybody's upload.
"""

from __future__ import annotations

import os
import sys
from typing import Any, BinaryIO

from server.sandbox import confine, libraries
from server.sql.worker import read_frame, write_frame

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
    # h5py and numpy load under confinement, so that the threads they start are bound by it.
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
    from server.imports.raw_file import Options
    from stepwell.spaces import EnvSpec

    options = dict(request["options"])
    if options.get("spec") is not None:
        options["spec"] = EnvSpec.from_json(options["spec"])
    for name in ("action_low", "action_high", "drop_infos"):
        options[name] = tuple(options.get(name, ()))
    chosen = Options(**options)
    # A third: the file's arrays, what they are cast to, and what is being sent.
    memory = int(request["memory"]) // 3
    if request["format"] == "npz":
        from server.imports.npz import read
    else:
        from server.imports.hdf5 import read
    source = read(file, int(request["size"]), memory, chosen.drop_infos)
    found = plan(source, chosen, int(request["max_rows"]))
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
    # Only now: a refusal need not wait for Arrow to load.
    from stepwell.codec import encode

    group, size, rows = [], 0, 0
    for trajectory in trajectories(found, chosen):
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
