"""Workers, and launches: what launchers start on request."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from stepwell.messages.base import Int64, Json, Request, Response, RunName, Text, sayable

WorkerRole = Literal["collect", "train", "eval", "launcher"]
Command = Literal["none", "pause", "resume", "drain", "stop"]


class PutWorker(Request):
    """A heartbeat."""

    role: WorkerRole
    run: RunName | None = None
    host: Text = ""
    pid: Int64 | None = None
    policy: Text = ""
    state: Literal["starting", "running", "paused", "draining", "stopped", "failed"] = "running"
    counters: dict[str, float] = {}
    """Named numbers: env_steps, episodes, steps_per_second, outbox, …"""
    last_error: Annotated[str, StringConstraints(max_length=20_000)] = ""


class Worker(PutWorker):
    model_config = ConfigDict(extra="ignore")

    id: str
    command: Command = "none"
    """What somebody asked of it; picked up with the answer to the next heartbeat."""
    started_at: float
    heartbeat_at: float
    alive: bool = True


class WorkerPage(Response):
    items: list[Worker]
    next: str | None = None


class PostCommand(Request):
    command: Command


LaunchRole = Literal["train", "collect", "evaluate"]


class CreateLaunch(Request):
    """What "start" in the dashboard does: a launcher on some machine claims it."""

    role: LaunchRole
    recipe: Annotated[str, StringConstraints(max_length=128, pattern=r"^[A-Za-z0-9._-]*$")] = ""
    args: Annotated[dict[str, str | int | float | bool], AfterValidator(sayable)] = {}
    """Option → value, for instance {"agent.losses.gamma": 0.99}; never a shell string."""
    count: Annotated[int, Field(ge=1, le=64)] = 1


class ClaimLaunch(Request):
    worker: Text
    roles: list[LaunchRole] = ["train", "collect", "evaluate"]


class PatchLaunch(Request):
    """The claiming launcher's report."""

    state: Literal["running", "finished", "failed", "cancelled"]
    error: Annotated[str, StringConstraints(max_length=20_000)] = ""
    run: Text = ""


class Launch(Response):
    id: str
    role: LaunchRole
    recipe: str = ""
    args: Json = {}
    count: int = 1
    state: Literal["queued", "claimed", "running", "finished", "failed", "cancelled"] = "queued"
    claimed_by: str = ""
    error: str = ""
    run: str = ""
    created_at: float


class LaunchPage(Response):
    items: list[Launch]
    next: str | None = None


class Claimed(Response):
    launch: Launch | None = None
