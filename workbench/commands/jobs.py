"""`stepwell jobs`: imports and checks that the service works on; list, follow, cancel them."""

from __future__ import annotations

import argparse

from rich.progress import BarColumn, TaskProgressColumn, TextColumn

from stepwell import terminal
from stepwell._progress import CommandProgress
from stepwell.client import Client
from stepwell.errors import NotFound
from stepwell.messages import JOB_ENDS, Job

ABOUT = """\
List the jobs of the service (imports and checks of the index), follow one to its end, or cancel
one. A cancelled import leaves nothing behind."""
EXAMPLES = """\
  stepwell jobs
  stepwell jobs follow                  (the newest one)
  stepwell jobs cancel job_019f…"""


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser("jobs", ABOUT, EXAMPLES)
    actions = terminal.subcommands(parser)
    listed = terminal.add_action(actions, "list", list_jobs, "all jobs, newest first")
    listed.add_argument("--running", action="store_true", help="only those that have not ended")
    follow = terminal.add_action(
        actions, "follow", follow_job, "show a job's progress until it ends; 1 if it fails"
    )
    follow.add_argument("id", nargs="?", help="default: the newest one that has not ended")
    follow.add_argument("--timeout", type=float, default=3600.0, help="seconds to wait")
    cancel = terminal.add_action(actions, "cancel", cancel_job, "stop a job; its work is undone")
    cancel.add_argument("id")
    return terminal.dispatch(parser, argv)


def list_jobs(client: Client, args: argparse.Namespace) -> terminal.Answer:
    jobs = [job for job in client.jobs() if not args.running or job.state not in JOB_ENDS]
    return jobs, lambda: terminal.print_table(
        ["job", "kind", "dataset", "state", "progress", "", "began"],
        [
            (
                job.id,
                job.kind,
                job.dataset,
                job.state,
                f"{job.progress:.0%}",
                job.error.detail if job.error is not None else job.message,
                terminal.ago(job.created_at),
            )
            for job in jobs
        ],
        empty="no jobs",
    )


def follow_job(client: Client, args: argparse.Namespace) -> terminal.Answer:
    job = client.job(args.id) if args.id else _newest(client)
    bar = CommandProgress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), quiet=args.json
    )
    with bar:
        task = bar.add_task(terminal.printable(job.message), total=1.0)
        job = client.wait_job(
            job.id,
            args.timeout,
            lambda now: bar.update(
                task, completed=now.progress, description=terminal.printable(now.message)
            ),
        )
    return job, lambda: _show(job)


def cancel_job(client: Client, args: argparse.Namespace) -> terminal.Answer:
    client.cancel_job(args.id)
    job = client.job(args.id)
    return job, lambda: _show(job)


def _newest(client: Client) -> Job:
    jobs = client.jobs()
    for job in jobs:
        if job.state not in JOB_ENDS:
            return job
    if not jobs:
        raise NotFound({"status": 404, "code": "not_found", "detail": "there are no jobs"})
    return jobs[0]


def _show(job: Job) -> None:
    of = f" → {job.dataset}" if job.dataset else ""
    print(terminal.printable(f"{job.id}: {job.kind}{of}: {job.state}"))
