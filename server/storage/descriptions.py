"""What a policy or a video is, beside its file: `fsck --rebuild` needs no index to know it.

    policies/pol_x.bin   descriptions/pol_x.json   {"run", "version", "metadata", …, "sha256"}
    videos/vid_x.mp4     descriptions/vid_x.json   {"evaluation": {…}, "seed", …, "sha256"}

Shards, versions and annotations describe themselves. `sha256` is that of the described file, and
`crc` that of the description: a damaged one describes nothing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from server.storage.store import Store

FOLDER = "descriptions"
DESCRIBED = ("policies", "videos")


def name_of(file: str) -> str:
    """The description of a file, which has its name but for the suffix."""
    return PurePath(file).stem + ".json"


def describe(store: Store, file: str, sha256: str, description: Mapping[str, Any]) -> None:
    """Write the description of a file of that content. Raises OSError."""
    # Not orjson: a run's config may hold integers beyond 64 bits.
    body = json.dumps({**description, "sha256": sha256})
    text = json.dumps({"crc": zlib.crc32(body.encode()), "of": body})
    store.put(FOLDER, name_of(file), text.encode())


def description_of(store: Store, file: str, sha256: str) -> dict[str, Any] | None:
    """What was said of a file with this content; None if nothing, or not of these bytes."""
    try:
        found = json.loads(store.source(FOLDER, name_of(file)).read())
        if zlib.crc32(found["of"].encode()) != found["crc"]:
            return None
        document = json.loads(found["of"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return dict(document) if document.get("sha256") == sha256 else None
