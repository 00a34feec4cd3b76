"""The list of jobs, newest first, on the pages Datasets and Admin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dashboard import api, components


def draw(key: str, below: Callable[[list[Any]], None]) -> None:
    """The table of jobs, refreshed while one is open. `below`: draws what follows it, from the jobs
    of the page that is shown. `key`: of the table, one per page of the dashboard."""

    def part() -> None:
        pages = components.Pages(key)
        listed, following = api.jobs(pages.cursor)
        if not listed:
            components.empty("No job has run yet.")
            return
        rows = [
            {
                "job": job.id,
                "kind": job.kind,
                "dataset": job.dataset,
                "state": components.mark(job.state),
                "progress": job.progress,
                "message": job.error.detail if job.error else job.message,
                "warnings": warnings(job),
                "created": job.created_at,
            }
            for job in listed
        ]
        shown = {"progress": components.SHARE}
        components.table(rows, key, columns=shown, most_height=280, times=["created"])
        pages.draw(len(listed), following)
        below(listed)

    components.live(part, lambda: bool(api.open_jobs()))


def warnings(job: Any) -> list[str]:
    return [str(warning) for warning in (job.result or {}).get("warnings", [])]
