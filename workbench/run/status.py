"""What the parts of `stepwell run` are doing, one line each, as the service knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepwell._wording import pluralize
from stepwell.client import Client
from stepwell.errors import NotFound, StepwellError
from stepwell.messages import Evaluation, Run, Worker
from stepwell.spaces import env_name
from workbench.run.parts import Plan
from workbench.run.supervisor import Part


@dataclass(frozen=True, slots=True)
class Line:
    """One part of the run."""

    part: str
    state: str
    text: str


def read_status(client: Client, plan: Plan, parts: Sequence[Part]) -> list[Line]:
    """The lines of all parts; while the service is unreachable, those of the processes alone."""
    lines = []
    for part in parts:
        try:
            state, text = _of(client, plan, part)
        except NotFound:
            state, text = part.state, "not begun yet"
        except StepwellError as error:
            state, text = part.state, str(error).splitlines()[0]
        if part.state == "waiting":
            text = f"broke: {part.last_reason}; starts again soon"
        lines.append(Line(part.name, state if part.state == "running" else part.state, text))
    return lines


def _of(client: Client, plan: Plan, part: Part) -> tuple[str, str]:
    kind = part.name.partition("-")[0]
    if kind == "service":
        d = client.dataset(plan.dataset)
        episodes = d.fifo.trajectories + d.protected.trajectories
        steps = d.fifo.steps + d.protected.steps
        size = f"{pluralize(episodes, 'episode')}, {pluralize(steps, 'step')}"
        return "running", f"{client.url}, {size}"
    if kind == "train":
        return _train(client.run(plan.run), client.workers())
    if kind == "evaluate":
        text = _evaluate(scores(client, plan.run, plan.env))
        errors = [w.last_error for w in client.workers() if w.pid == part.pid and w.alive]
        return "running", ", ".join([text, *filter(None, errors)])
    mine = [w for w in client.workers() if w.pid == part.pid and w.role == "collect"]
    if part.state == "running":
        mine = [w for w in mine if w.alive]
    if not mine:
        return part.state, "starting" if part.state == "running" else ""
    return _collect(client, max(mine, key=lambda w: w.started_at))


def _train(run: Run, workers: Sequence[Worker]) -> tuple[str, str]:
    mine = [w for w in workers if w.role == "train" and w.run == run.name and w.alive]
    latest = run.latest
    done, total = latest.get("progress/updates", 0.0), latest.get("progress/total", 0.0)
    rate = latest.get("progress/updates_per_second", 0.0)
    parts = [f"update {done:,.0f}" + (f" of {total:,.0f}" if total else "")]
    if rate > 0 and run.status == "running":
        parts.append(f"{rate:.1f}/s")
    if run.alarms:
        parts.append(f"alarm: {run.alarm_summary}")
    if mine and mine[0].last_error:
        parts.append(mine[0].last_error)
    return (mine[0].state if mine else run.status), ", ".join(parts)


def _collect(client: Client, worker: Worker) -> tuple[str, str]:
    c = worker.counters
    parts = [pluralize(int(c.get("episodes", 0)), "episode")]
    parts.append(pluralize(int(c.get("env_steps", 0)), "step"))
    if worker.alive:
        parts.append(f"{c.get('steps_per_second', 0):,.0f}/s")
    returns = client.run(worker.run).latest.get("collect/return") if worker.run else None
    if returns is not None:
        parts.append(f"return {returns:.4g}")
    if worker.policy:
        parts.append(worker.policy)
    if worker.last_error:
        parts.append(worker.last_error)
    return worker.state, ", ".join(parts)


def scores(client: Client, run: str, env: str) -> dict[int, Evaluation]:
    """The newest evaluation of each version of a run, by version."""
    found: dict[int, Evaluation] = {}
    for e in client.evaluations(env=env_name(env)):  # newest first
        name, _, version = e.policy.rpartition("/")
        if name == run and version.isdecimal():
            found.setdefault(int(version), e)
    return dict(sorted(found.items()))


def _evaluate(found: dict[int, Evaluation]) -> str:
    if not found:
        return "no version scored yet"
    last = max(found)
    best = max(found, key=lambda v: (found[v].mean, v))
    e = found[last]
    text = f"version {last}: {e.mean:.4g} ({e.ci_low:.4g} … {e.ci_high:.4g})"
    return text if best == last else f"{text}, best {best}: {found[best].mean:.4g}"
