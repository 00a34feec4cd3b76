"""Metrics of runs: points of named series.

Idempotent on (key, step): the last value wins, so a learner that resumes from step 100 overwrites
the points that the killed one logged after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Response

from server.answer_memory import Answer
from server.problems import ProblemError
from server.registry import run_metrics
from server.service import AccessDep, ServiceDep
from stepwell.messages import MetricsAccepted, MetricSeries, PostMetrics

router = APIRouter(prefix="/v1/runs", tags=["runs"])

MAX_POINTS = 10_000
"""Most points of one series in one response."""
POINT_BYTES = 1024
"""Memory of a point while its series is read and written."""


@router.post("/{name}/metrics")
def post_metrics(
    service: ServiceDep, name: str, body: PostMetrics, access: AccessDep
) -> MetricsAccepted:
    """Idempotent on (key, step): a point that is sent again replaces the stored one."""
    return MetricsAccepted(stored=run_metrics.add(service.db, name, body, access))


@router.get("/{name}/metrics", response_model=MetricSeries)
def get_metrics(
    service: ServiceDep,
    name: str,
    access: AccessDep,
    keys: str | None = None,
    after: Annotated[str | None, Query(pattern=r"^-?\d{1,18}(,-?\d{1,18})*$")] = None,
    points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 500,
) -> Response:
    """Series of `keys` (comma-separated; default: all), down-sampled to `points` each.

    `after`: a step for each key (comma-separated); returns only later points.
    """
    wanted = None if keys is None else [key for key in keys.split(",") if key]
    steps = None if after is None else [int(step) for step in after.split(",")]
    if steps is not None and (wanted is None or len(steps) != len(wanted)):
        raise ProblemError(
            422,
            "validation_error",
            "`after` has a step for each of `keys`",
            expected=f"{len(wanted or ())} steps",
            got=f"{len(steps)}",
        )
    pk, wanted = run_metrics.find(service.db, name, wanted, access)
    beyond = {} if steps is None else dict(zip(wanted, steps, strict=True))

    def parts() -> Iterator[bytes]:
        """A `MetricSeries`, one series at a time."""
        yield b'{"run":' + orjson.dumps(name) + b',"series":['
        comma = b""
        for key in dict.fromkeys(wanted):
            series = run_metrics.series(service.db, pk, key, beyond.get(key), points)
            if series.total:
                yield comma + series.model_dump_json().encode()
                comma = b","
        yield b"]}"

    memory = POINT_BYTES * points
    return Answer(service.answers, memory, parts, media_type="application/json")
