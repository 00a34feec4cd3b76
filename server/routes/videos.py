"""Videos of evaluations: each shows the episode of one seed. Immutable, addressed by that seed.

    PUT  body → file → one index row → 201 (files.py)
         the same bytes again → 200; another video of that seed → 409

Whoever opens a video in a browser opens a stranger's file: its type is one of two, is checked
against the first bytes, and browsers are told not to guess another one, nor to run anything in it.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from server.problems import ProblemError
from server.registry import videos
from server.routes.files import StoredFile, matches, receive, require_media_type
from server.service import AccessDep, Cursor, Limit, ServiceDep, raw_body
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
    what = "a video is sent as MP4 or as an animated GIF"
    media_type = require_media_type(request, what, *SUFFIXES)
    files, suffix = service.stored_files, SUFFIXES[media_type]
    writer = await run_in_threadpool(videos.open_writer, files, evaluation_id, seed, suffix, access)
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
            videos.save, files, evaluation_id, seed, writer, episode, access
        )
    if not new:
        response.status_code = 200
    return video


def _is(media_type: str, head: bytes) -> bool:
    return head[4:8] == b"ftyp" if media_type == MP4 else head[:6] in (b"GIF87a", b"GIF89a")


@router.get("")
def list_videos(
    service: ServiceDep,
    evaluation_id: str,
    access: AccessDep,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Page[Video]:
    """In the order in which they were stored."""
    return videos.page(service.db, evaluation_id, access, limit, cursor)


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
    row = videos.get(service.db, evaluation_id, seed, access)
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
    videos.delete(service.stored_files, evaluation_id, seed, access)
