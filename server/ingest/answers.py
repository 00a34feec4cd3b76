"""What is said of one trajectory that came, beside "stored": it is known, or it cannot be."""

from __future__ import annotations

from server.ingest.rows import Known
from server.problems import title_of
from server.storage.shards import Entry
from stepwell.messages import IngestItem, Problem


def answer_known(item: IngestItem, entry: Entry, dataset_pk: int, before: Known) -> None:
    """The id was here before: the same again, or another trajectory."""
    if before.digest != entry.digest or before.dataset_pk != dataset_pk:
        conflict(item, before.digest, entry.digest)
        if before.digest == entry.digest and item.problem is not None:
            item.problem.detail = "the same trajectory is already in another dataset"
        return
    item.seq = before.seq
    item.status = "evicted" if before.evicted else "duplicate"


def conflict(item: IngestItem, there: str, here: str) -> None:
    """Other content came under an id: `there` and `here` are the digests."""
    item.status = "conflict"
    item.problem = Problem(
        title=title_of(409),
        status=409,
        code="conflict",
        detail="another trajectory was stored under this id; ids are never reused",
        expected=f"content of sha256 {there}",
        got=here,
    )


def too_large(entry: Entry, limits: tuple[int | None, int | None]) -> Problem | None:
    """A trajectory that alone exceeds the capacity of fifo could never stay."""
    if entry.partition != "fifo":
        return None
    sizes = (entry.rows - 1, entry.bytes)
    for what, limit, size in zip(("steps", "bytes"), limits, sizes, strict=True):
        if limit is not None and size > limit:
            return Problem(
                title=title_of(422),
                status=422,
                code="exceeds_capacity",
                detail="this trajectory alone exceeds the dataset's fifo capacity",
                expected=f"at most {limit} {what}",
                got=size,
            )
    return None
