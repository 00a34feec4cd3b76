"""Videos of evaluations: each shows the episode of one seed. Immutable, addressed by that seed.

    PUT  body → file → one index row → 201 (files.py)
         the same bytes again → 200; another video of that seed → 409

Whoever opens a video in a browser opens a stranger's file: its type is one of two, is checked
against the first bytes, and browsers are told not to guess another one, nor to run anything in it.
"""

from __future__ import annotations

import time
from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Header, Path, Query, Request, Response
from sqlalchemy.engine import Connection, RowMapping
from starlette.concurrency import run_in_threadpool

from server.checksums import Source
from server.index.db import first_rows
from server.index.tables import evaluations, videos
from server.problems import ProblemError, not_found
from server.routes.files import StoredFile, insert_row, matches, media_type_of, receive
from server.service import Cursor, Limit, Service, ServiceDep, raw_body
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
    writer = await run_in_threadpool(_open_writer, service, evaluation_id, seed, media_type)
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

        def insert(c: Connection, stored: Stored) -> tuple[int, Video, bool]:
            episode = {"return": total_reward, "length": length, "media_type": media_type}
            return _insert(c, evaluation_id, seed, stored, episode)

        points = ("video.after_rename", "video.after_replace")
        video, new = await run_in_threadpool(
            insert_row, service, videos, writer, insert, points=points
        )
    if not new:
        response.status_code = 200
    return video


def _is(media_type: str, head: bytes) -> bool:
    return head[4:8] == b"ftyp" if media_type == MP4 else head[:6] in (b"GIF87a", b"GIF89a")


def _open_writer(service: Service, evaluation_id: str, seed: int, media_type: str) -> Writer:
    """The file for the body of a PUT. Raises before reading it: 404 for an unknown evaluation, 422
    for a seed that is not one of its seeds."""
    with service.db.read() as c:
        row = _evaluation(c, evaluation_id)
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
    c: Connection, evaluation_id: str, seed: int, stored: Stored, episode: dict[str, object]
) -> tuple[int, Video, bool]:
    """(pk, video, whether it is new)"""
    pk = _evaluation(c, evaluation_id)["pk"]
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
                file=stored.path.name,
                bytes=stored.bytes,
                checksums=stored.checksums,
                verified_at=now,
                created_at=now,
            )
        )
    row = _row(c, pk, seed)
    assert row is not None, "just written in this transaction"
    return row["pk"], Video(evaluation=evaluation_id, **row), found is None


@router.get("")
def list_videos(
    service: ServiceDep, evaluation_id: str, limit: Limit = 100, cursor: Cursor = None
) -> Page[Video]:
    """In the order in which they were stored."""
    with service.db.read() as c:
        query = sa.select(videos).where(
            videos.c.evaluation_pk == _evaluation(c, evaluation_id)["pk"],
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
    known: Annotated[str | None, Header(alias="If-None-Match")] = None,
) -> Response:
    """The bytes. The ETag is the sha256."""
    with service.db.read() as c:
        row = _existing(c, evaluation_id, seed)
    headers = {
        "etag": f'"{row["sha256"]}"',
        "cache-control": "private, max-age=31536000, immutable",
        **SAFE,
    }
    if matches(known, headers["etag"]):
        return Response(status_code=304, headers=headers)

    def unreadable() -> ProblemError:
        return service.integrity.damaged_file(f"videos/{row['file']}")

    source = Source(service.store.path("videos", row["file"]), row["bytes"], row["checksums"])
    return StoredFile(
        request, service, source, headers=headers, media_type=row["media_type"], damaged=unreadable
    )


@router.delete("/{seed}", status_code=204)
def delete_video(service: ServiceDep, evaluation_id: str, seed: Seed) -> None:
    """Delete a video; the evaluation stays."""
    with service.db.write() as c:
        row = _existing(c, evaluation_id, seed)
        c.execute(sa.delete(videos).where(videos.c.pk == row["pk"]))
    service.store.delete("videos", row["file"])
    service.integrity.damaged_files.discard(f"videos/{row['file']}")


def _evaluation(c: Connection, evaluation_id: str) -> RowMapping:
    """Raises 404."""
    query = sa.select(evaluations.c.pk, evaluations.c.seeds).where(
        evaluations.c.id == evaluation_id
    )
    row = c.execute(query).mappings().first()
    if row is None:
        raise not_found("evaluation", evaluation_id[:64])
    return row


def _row(c: Connection, evaluation_pk: int, seed: int) -> RowMapping | None:
    v = videos.c
    query = sa.select(videos).where(v.evaluation_pk == evaluation_pk, v.seed == seed)
    return c.execute(query).mappings().first()


def _existing(c: Connection, evaluation_id: str, seed: int) -> RowMapping:
    """Raises 404."""
    row = _row(c, _evaluation(c, evaluation_id)["pk"], seed)
    if row is None:
        raise ProblemError(
            404,
            "not_found",
            f"evaluation {evaluation_id} has no video of seed {seed};"
            " stepwell evaluate --videos N records the first N seeds",
        )
    return row
