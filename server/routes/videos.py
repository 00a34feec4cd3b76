"""Videos of evaluations: each shows the episode of one seed. Immutable, addressed by that seed.

    PUT  body → file → one index row → 201 (files.py)
         the same bytes again → 200; another video of that seed → 409

Whoever opens a video in a browser opens a stranger's file: its type is one of two, is checked
against the first bytes, and browsers are told not to guess another one, nor to run anything in it.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Header, Path, Query, Request, Response
from sqlalchemy.engine import Connection, RowMapping
from starlette.concurrency import run_in_threadpool

from server.index.db import first_rows, write_audit
from server.index.deleted_files import delete_given_up, give_up_files
from server.index.tables import evaluations, videos
from server.maintenance.described_files import video_description
from server.problems import ProblemError, not_found
from server.rights import Access
from server.routes.files import StoredFile, insert_row, matches, media_type_of, receive
from server.service import AccessDep, Cursor, Limit, Service, ServiceDep, raw_body
from server.storage.store import Stored, Writer, new_name
from stepwell.messages import GIF, MP4, Page, Video

router = APIRouter(prefix="/v1/evaluations/{evaluation_id}/videos", tags=["videos"])
SUFFIXES = {MP4: ".mp4", GIF: ".gif"}
SAFE = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    # Nothing but the file itself, and the browser's player around it.
    "content-security-policy": "default-src 'none'; img-src 'self'; media-src 'self';"
    " style-src 'unsafe-inline'",
}
Seed = Annotated[int, Path(ge=-(2**63), lt=2**63)]


@router.put(
    "/{seed}",
    status_code=201,
    responses={200: {"model": Video}},
    openapi_extra=raw_body(MP4, GIF),
)
async def put_video(
    service: ServiceDep,
    evaluation_id: str,
    seed: Seed,
    request: Request,
    response: Response,
    access: AccessDep,
    total_reward: Annotated[
        float, Query(alias="return", allow_inf_nan=False, description="of the episode shown")
    ],
    length: Annotated[int, Query(ge=1, le=2**53, description="steps of the episode shown")],
) -> Video:
    """Store (201). The same video again: 200. Another one of that seed: 409."""
    media_type = media_type_of(request)
    if media_type not in SUFFIXES:
        raise ProblemError(
            415,
            "unsupported_media_type",
            "a video is sent as MP4 or as an animated GIF",
            expected=" or ".join(SUFFIXES),
            got=media_type or "none",
        )
    writer = await run_in_threadpool(_open_writer, service, evaluation_id, seed, media_type, access)
    with writer:
        head = await receive(request, writer)
        if not _is(media_type, head):
            raise ProblemError(
                422,
                "invalid_video",
                f"the body does not begin like {media_type}",
                expected="ftyp at byte 4" if media_type == MP4 else "GIF87a or GIF89a",
                got=head.hex(" ") or "an empty body",
            )

        episode = {"return": total_reward, "length": length, "media_type": media_type}
        video, new = await run_in_threadpool(
            _store, service, evaluation_id, seed, writer, episode, access
        )
    if not new:
        response.status_code = 200
    return video


def _store(
    service: Service,
    evaluation_id: str,
    seed: int,
    writer: Writer,
    episode: dict[str, Any],
    access: Access,
) -> tuple[Video, bool]:
    """Store a written body as the video of that seed; returns whether it is new."""

    def insert(c: Connection, stored: Stored) -> tuple[int, Video, bool]:
        return _insert(c, evaluation_id, seed, stored, episode, access)

    with service.db.read() as c:
        description = video_description(c, evaluation_id, seed, episode, time.time())
    points = ("video.after_rename", "video.after_replace")
    return insert_row(service, videos, writer, insert, description=description, points=points)


def _is(media_type: str, head: bytes) -> bool:
    return head[4:8] == b"ftyp" if media_type == MP4 else head[:6] in (b"GIF87a", b"GIF89a")


def _open_writer(
    service: Service, evaluation_id: str, seed: int, media_type: str, access: Access
) -> Writer:
    """The file for the body of a PUT. Raises before reading it: 404 for an unknown evaluation, 422
    for a seed that is not one of its seeds."""
    with service.db.read() as c:
        row = _evaluation(c, evaluation_id, access)
    if seed not in row["seeds"]:
        raise ProblemError(
            422,
            "validation_error",
            "a video shows an episode of the evaluation",
            expected=f"one of its {len(row['seeds'])} seeds",
            got=str(seed),
        )
    return service.store.new("videos", new_name("vid", SUFFIXES[media_type]))


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
    found = _row(c, pk, seed)
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
                **content,
                evaluation_pk=pk,
                seed=seed,
                file=stored.name,
                bytes=stored.bytes,
                checksums=stored.checksums,
                verified_at=now,
                created_at=now,
            )
        )
        write_audit(c, access.who, "video.create", f"{evaluation_id}/{seed}", bytes=stored.bytes)
    row = _row(c, pk, seed)
    assert row is not None, "just written in this transaction"
    return row["pk"], Video(evaluation=evaluation_id, **row), found is None


@router.get("")
def list_videos(
    service: ServiceDep,
    evaluation_id: str,
    access: AccessDep,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Page[Video]:
    """In the order in which they were stored."""
    with service.db.read() as c:
        query = sa.select(videos).where(
            videos.c.evaluation_pk == _evaluation(c, evaluation_id, access)["pk"],
            videos.c.pk > (cursor or 0),
        )
        rows, last = first_rows(c, query.order_by(videos.c.pk), limit)
    items = [Video(evaluation=evaluation_id, **row) for row in rows]
    return Page[Video](items=items, next=None if last is None else str(last["pk"]))


@router.get(
    "/{seed}",
    response_class=StoredFile,
    responses={200: {"content": {MP4: {}, GIF: {}}}, 304: {"description": "not modified"}},
)
@router.head("/{seed}", response_class=StoredFile, include_in_schema=False)
def get_video(
    service: ServiceDep,
    evaluation_id: str,
    seed: Seed,
    request: Request,
    access: AccessDep,
    known: Annotated[str | None, Header(alias="If-None-Match")] = None,
) -> Response:
    """The bytes. The ETag is the sha256."""
    with service.db.read() as c:
        row = _existing(c, evaluation_id, seed, access)
    headers = {
        "etag": f'"{row["sha256"]}"',
        "cache-control": "private, max-age=31536000, immutable",
        **SAFE,
    }
    if matches(known, headers["etag"]):
        return Response(status_code=304, headers=headers)

    def unreadable() -> ProblemError:
        return service.integrity.damaged_file(f"videos/{row['file']}")

    source = service.store.source("videos", row["file"], row["bytes"], row["checksums"])
    return StoredFile(
        request, service, source, headers=headers, media_type=row["media_type"], damaged=unreadable
    )


@router.delete("/{seed}", status_code=204)
def delete_video(service: ServiceDep, evaluation_id: str, seed: Seed, access: AccessDep) -> None:
    """Delete a video; the evaluation stays."""
    with service.db.write() as c:
        row = _existing(c, evaluation_id, seed, access)
        c.execute(sa.delete(videos).where(videos.c.pk == row["pk"]))
        give_up_files(c, "videos", [row["file"]])
        write_audit(c, access.who, "video.delete", f"{evaluation_id}/{seed}")
    delete_given_up(service.db, service.store)
    service.integrity.damaged_files.discard(f"videos/{row['file']}")


def _evaluation(c: Connection, evaluation_id: str, access: Access) -> RowMapping:
    """Raises 404, or 403 if the caller may not do to its videos what its request says."""
    e = evaluations.c
    query = sa.select(e.pk, e.seeds, e.owner).where(e.id == evaluation_id)
    row = c.execute(query).mappings().first()
    if row is None:
        raise not_found("evaluation", evaluation_id[:64])
    access.require(row["owner"], f"evaluation {evaluation_id}")
    return row


def _row(c: Connection, evaluation_pk: int, seed: int) -> RowMapping | None:
    v = videos.c
    query = sa.select(videos).where(v.evaluation_pk == evaluation_pk, v.seed == seed)
    return c.execute(query).mappings().first()


def _existing(c: Connection, evaluation_id: str, seed: int, access: Access) -> RowMapping:
    """Raises 404, 403."""
    row = _row(c, _evaluation(c, evaluation_id, access)["pk"], seed)
    if row is None:
        raise ProblemError(
            404,
            "not_found",
            f"evaluation {evaluation_id} has no video of seed {seed};"
            " stepwell evaluate --videos N records the first N seeds",
        )
    return row
