"""Small files beside the index: written whole or not at all, and JSON with a checksum.

sealed      sha256 of the rest, as hex | newline | JSON
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from server.storage.store import sync_directory
from stepwell.failpoints import failpoint


def sealed(document: Any) -> bytes:
    """A JSON document with its checksum."""
    content = json.dumps(document).encode()
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unsealed(content: bytes) -> Any:
    """The document. Raises ValueError if it is not what was written."""
    digest, _, document = content.partition(b"\n")
    if hashlib.sha256(document).hexdigest().encode() != digest:
        raise ValueError("the document is not what was written")
    return json.loads(document)


def replace_file(path: Path, content: bytes | bytearray, points: tuple[str, str]) -> None:
    """Give a file another content, durably; a crash leaves the old one or the new one. `points`:
    failpoints before and after the rename."""
    new = path.with_name(f"{path.name}.tmp")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # the path is new, or another user's
            old = path.stat()
            os.fchmod(file.fileno(), old.st_mode & 0o777)
            os.fchown(file.fileno(), old.st_uid, old.st_gid)
    failpoint(points[0])
    os.replace(new, path)
    sync_directory(path.parent)
    failpoint(points[1])
