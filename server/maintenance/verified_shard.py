"""Reads a shard that the index does not know: its content against the digests in its footer."""

from __future__ import annotations

from server.storage.shards import Footer, check_digest, read_batches, read_footer
from server.storage.store import Store, Stored


def verified_shard(store: Store, folder: str, name: str) -> tuple[Stored, Footer]:
    """The file as read, and its footer. Raises `ShardDamaged`, `InvalidData`, OSError."""
    stored = store.examine(folder, name)
    source = store.source(folder, name, stored.bytes, stored.checksums)
    footer = read_footer(source)
    for entry, batch in read_batches(source):
        check_digest(entry, batch, footer.spec)
    return stored, footer
