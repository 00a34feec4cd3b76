"""Runs, their metrics and policies, and evaluations."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepwell import messages
from stepwell._client.snapshots import etag_of
from stepwell._client.transport import Transport, request, segment
from stepwell.errors import CodecError, InvalidData
from stepwell.messages import Evaluation, MetricPoint, Policy, Run, RunPage, Series

MAX_METADATA = 16 * 1024
MAX_POINTS = 10_000


@dataclass(frozen=True, slots=True)
class PolicyBytes:
    """A policy file as it was published, its digest checked."""

    data: bytes
    version: int
    sha256: str
    etag: str
    """Hand it back to `policy_bytes(…, etag=…)` to be told "nothing new" cheaply."""


class Runs(Transport):
    """Part of `Client`."""

    def create_run(self, name: str, kind: str, **fields: Any) -> Run:
        """Register one execution of a trainer, collector or evaluator; `fields` of CreateRun.

        Raises `Conflict` where the name is taken, unless exist_ok=True resumes it.
        """
        body = request(messages.CreateRun, name=name, kind=kind, **fields)
        return self.ask(Run, "POST", "/v1/runs", body=body, idempotent=body.exist_ok)

    def run(self, name: str) -> Run:
        return self.ask(Run, "GET", _run(name))

    def runs(self, kind: str | None = None, status: str | None = None) -> list[Run]:
        """All runs, newest first."""
        pages = self.pages(messages.RunPage, "/v1/runs", {"kind": kind, "status": status})
        return [run for page in pages for run in page.items]

    def runs_page(
        self,
        *,
        kind: str | None = None,
        status: str | None = None,
        tag: str | None = None,
        parent: str | None = None,
        search: str | None = None,
        alive: bool | None = None,
        since: float | None = None,
        brief: bool = False,
        limit: int = 100,
        cursor: str | None = None,
    ) -> RunPage:
        """One page of the runs that match, newest first, and how many match in all.

        `search`: text in the name or a tag. `since`: heard of at that Unix time or later. `brief`:
        without config and newest metrics. `cursor`: `next` of the page before.
        """
        params = {
            "kind": kind,
            "status": status,
            "tag": tag,
            "parent": parent,
            "search": search or None,
            "alive": alive,
            "since": since,
            "brief": brief or None,
            "limit": limit,
            "cursor": cursor,
        }
        return self.ask(RunPage, "GET", "/v1/runs", params=params)

    def patch_run(self, name: str, **fields: Any) -> Run:
        """Change or only keep alive (no fields: a heartbeat); `fields` of PatchRun."""
        body = request(messages.PatchRun, **fields)
        # Appending to the log twice is the one thing here that cannot be repeated.
        return self.ask(Run, "PATCH", _run(name), body=body, idempotent=body.log is None)

    def delete_run(self, name: str) -> None:
        self.call("DELETE", _run(name))

    def log_metrics(self, run: str, points: Sequence[MetricPoint]) -> int:
        """Store metric points; repeating (key, step) overwrites. Returns how many were stored."""
        stored = 0
        for start in range(0, len(points), MAX_POINTS):
            finite = [_finite(point) for point in points[start : start + MAX_POINTS]]
            body = request(messages.PostMetrics, points=finite)
            accepted = self.ask(
                messages.MetricsAccepted,
                "POST",
                f"{_run(run)}/metrics",
                body=body,
                idempotent=True,
            )
            stored += accepted.stored
        return stored

    def metrics(
        self,
        run: str,
        keys: Sequence[str] | None = None,
        points: int = 500,
        *,
        after: Sequence[int] | None = None,
    ) -> dict[str, Series]:
        """Series by key, each down-sampled to about `points`; all keys unless some are named.

        `after`: a step for each of `keys`; only points beyond it come.
        """
        answer = self.ask(
            messages.MetricSeries,
            "GET",
            f"{_run(run)}/metrics",
            params={
                "keys": ",".join(keys) if keys is not None else None,
                "after": ",".join(map(str, after)) if after is not None else None,
                "points": points,
            },
        )
        return {series.key: series for series in answer.series}

    def run_log(self, name: str) -> str:
        """The run's log as text."""
        return self.call("GET", f"{_run(name)}/log", accept="text/plain").text

    # --- policies ---------------------------------------------------------------------------

    def publish_policy(
        self,
        run: str,
        version: int,
        data: bytes,
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Policy:
        """Publish the bytes of a policy file as run/version, for ever. `latest` then means it.

        Safe to repeat with the same bytes; raises `Conflict` with others.
        """
        described = {**(metadata or {}), **({} if step is None else {"step": step})}
        try:
            header = json.dumps(described, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidData(f"metadata cannot be said in JSON: {error}") from None
        if len(header) > MAX_METADATA:
            raise InvalidData(
                "metadata is too long", expected=f"≤ {MAX_METADATA} bytes", got=str(len(header))
            )
        return self.ask(
            Policy,
            "PUT",
            f"{_run(run)}/policies/{int(version)}",
            content=data,
            headers={
                "Content-Type": "application/octet-stream",
                **({"X-Stepwell-Metadata": header} if described else {}),
            },
        )

    def policies(self, run: str) -> list[Policy]:
        pages = self.pages(messages.PolicyPage, f"{_run(run)}/policies")
        return [policy for page in pages for policy in page.items]

    def policy_bytes(
        self, run: str, which: str | int = "latest", *, etag: str | None = None
    ) -> PolicyBytes | None:
        """A policy file by version or alias; None where `etag` is still what it is.

        Raises `NotFound`, or `CodecError` for bytes that do not have the promised digest.
        """
        response = self.call(
            "GET",
            f"{_run(run)}/policies/{segment(str(which))}",
            headers={"If-None-Match": etag} if etag else None,
            accept="*/*",
            fine=(304,),
        )
        if response.status_code == 304:
            return None
        promised, digest = etag_of(response), hashlib.sha256(response.content).hexdigest()
        if promised != digest:
            raise CodecError(
                f"policy {run}/{which} arrived damaged", expected=promised or "an ETag", got=digest
            )
        version = response.headers.get("X-Stepwell-Version", "")
        if not version.isdigit():
            raise CodecError(
                f"policy {run}/{which} came without its version",
                expected="header X-Stepwell-Version",
                got=repr(version),
            )
        return PolicyBytes(response.content, int(version), digest, f'"{digest}"')

    def set_alias(self, run: str, alias: str, version: int) -> None:
        """Let `alias` (for instance "best") mean a version. `latest` is kept by the service."""
        self.call(
            "PUT",
            f"{_run(run)}/aliases/{segment(alias)}",
            body=request(messages.PutAlias, version=version),
        )

    # --- evaluations ------------------------------------------------------------------------

    def create_evaluation(self, **fields: Any) -> Evaluation:
        """Record what a policy scored; `fields` of CreateEvaluation."""
        body = request(messages.CreateEvaluation, **fields)
        return self.ask(Evaluation, "POST", "/v1/evaluations", body=body)

    def evaluations(
        self, env: str | None = None, run: str | None = None, policy: str | None = None
    ) -> list[Evaluation]:
        """Evaluations, newest first."""
        pages = self.pages(
            messages.EvaluationPage, "/v1/evaluations", {"env": env, "run": run, "policy": policy}
        )
        return [evaluation for page in pages for evaluation in page.items]


def _run(name: str) -> str:
    return f"/v1/runs/{segment(name)}"


def _finite(point: MetricPoint) -> MetricPoint:
    if point.value is None or math.isfinite(point.value):
        return point
    return point.model_copy(update={"value": None})
