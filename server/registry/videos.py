"""Videos of evaluations: each shows the episode of one seed (routes/videos.py)."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from server.index.db import Database, find_row, read_page, write_audit
from server.index.deleted_files import delete_given_up, give_up_files
from server.index.tables import evaluations, videos
from server.maintenance.described_files import video_description
from server.problems import ProblemError, not_found
from server.registry.stored_files import StoredFiles, insert_row
from server.rights import Access
from server.storage.store import Stored, Writer, new_name
from stepwell.messages import Page, Video


def open_writer(
    files: StoredFiles, evaluation_id: str, seed: int, suffix: str, access: Access
) -> Writer:
    """The file for the bytes of a video. Raises before they are read: 404 for an unknown
    evaluation, 422 for a seed that is not one of its seeds."""
    with files.db.read() as c:
        row = _evaluation(c, evaluation_id, access)
    if seed not in row["seeds"]:
        raise ProblemError(
            422,
            "validation_error",
            "a video shows an episode of the evaluation",
            expected=f"one of its {len(row['seeds'])} seeds",
            got=str(seed),
        )
    return files.store.new("videos", new_name("vid", suffix))


def save(
    files: StoredFiles,
    evaluation_id: str,
    seed: int,
    writer: Writer,
    episode: dict[str, Any],
    access: Access,
) -> tuple[Video, bool]:
    """Store a written body as the video of that seed; returns whether it is new."""

    def insert(c: Connection, stored: Stored) -> tuple[int, Video, bool]:
        return _insert(c, evaluation_id, seed, stored, episode, access)

    with files.db.read() as c:
        description = video_description(c, evaluation_id, seed, episode, time.time())
    points = ("video.after_rename", "video.after_replace")
    return insert_row(files, videos, writer, insert, description=description, points=points)


def _insert(
    c: Connection,
    evaluation_id: str,
    seed: int,
    stored: Stored,
    episode: dict[str, object],
    access: Access,
) -> tuple[int, Video, bool]:
    """(pk, video, whether it is new)"""
    pk = _evaluation(c, evaluation_id, access)["pk"]
    found = find_row(c, videos, evaluation_pk=pk, seed=seed)
    content = {"sha256": stored.sha256, **episode}
    if found is not None and any(found[name] != value for name, value in content.items()):
        raise ProblemError(
            409,
            "conflict",
            f"evaluation {evaluation_id} has another video of seed {seed}; videos are immutable",
            expected={name: found[name] for name in content},
            got=content,
        )
    if found is None:
        now = time.time()
        c.execute(
            sa.insert(videos).values(
                **(content | stored.columns),
                evaluation_pk=pk,
                seed=seed,
                verified_at=now,
                created_at=now,
            )
        )
        write_audit(c, access.who, "video.create", f"{evaluation_id}/{seed}", bytes=stored.bytes)
    row = find_row(c, videos, evaluation_pk=pk, seed=seed)
    assert row is not None, "just written in this transaction"
    return row["pk"], _message(evaluation_id, row), found is None


def _message(evaluation_id: str, row: RowMapping) -> Video:
    return Video(evaluation=evaluation_id, **row)


def page(
    db: Database, evaluation_id: str, access: Access, limit: int, cursor: int | None
) -> Page[Video]:
    """In the order in which they were stored. Raises 404, 403."""
    with db.read() as c:
        pk, by = _evaluation(c, evaluation_id, access)["pk"], videos.c.pk
        query = sa.select(videos).where(videos.c.evaluation_pk == pk)
        make = partial(_message, evaluation_id)
        return read_page(c, Video, query, by, limit, cursor, ascending=True, make=make)


def get(db: Database, evaluation_id: str, seed: int, access: Access) -> RowMapping:
    """Raises 404, 403."""
    with db.read() as c:
        return _existing(c, evaluation_id, seed, access)


def delete(files: StoredFiles, evaluation_id: str, seed: int, access: Access) -> None:
    """Raises 404, 403."""
    with files.db.write() as c:
        row = _existing(c, evaluation_id, seed, access)
        c.execute(sa.delete(videos).where(videos.c.pk == row["pk"]))
        give_up_files(c, "videos", [row["file"]])
        write_audit(c, access.who, "video.delete", f"{evaluation_id}/{seed}")
    delete_given_up(files.db, files.store)
    files.integrity.damaged_files.discard(f"videos/{row['file']}")


def _evaluation(c: Connection, evaluation_id: str, access: Access) -> RowMapping:
    """Raises 404, or 403 if the caller may not do to its videos what its request says."""
    e = evaluations.c
    query = sa.select(e.pk, e.seeds, e.owner).where(e.id == evaluation_id)
    row = c.execute(query).mappings().first()
    if row is None:
        raise not_found("evaluation", evaluation_id[:64])
    access.require(row["owner"], f"evaluation {evaluation_id}")
    return row


def _existing(c: Connection, evaluation_id: str, seed: int, access: Access) -> RowMapping:
    """Raises 404, 403."""
    pk = _evaluation(c, evaluation_id, access)["pk"]
    row = find_row(c, videos, evaluation_pk=pk, seed=seed)
    if row is None:
        raise ProblemError(
            404,
            "not_found",
            f"evaluation {evaluation_id} has no video of seed {seed};"
            " stepwell evaluate --videos N records the first N seeds",
        )
    return row
