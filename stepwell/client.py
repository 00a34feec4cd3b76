"""`Client`: one method per endpoint of the service (docs/http.md), typed and safe to repeat.

from stepwell import Client

with Client("http://127.0.0.1:8000") as client:
    client.upload("hopper", "hopper-medium-v2.hdf5", env="Hopper-v5")
    print(client.sql("select count(*), avg(return) from trajectories").rows)

health · datasets · trajectories · uploads and jobs · SQL · snapshots and shards
runs and metrics · policies · evaluations · workers · launches · tokens
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import orjson

from stepwell import messages
from stepwell._files import whole_file
from stepwell._transport import Transport, as_service_error, request, route, sending
from stepwell.codec import decode, encode
from stepwell.errors import (
    CodecError,
    Conflict,
    InvalidData,
    JobFailed,
    ServiceError,
    ServiceUnreachable,
)
from stepwell.messages import (
    ARROW,
    PROBLEM,
    Dataset,
    Evaluation,
    Health,
    IngestItem,
    IngestResult,
    Job,
    Launch,
    MetricPoint,
    Policy,
    Run,
    RunPage,
    Series,
    Snapshot,
    Token,
    Worker,
)
from stepwell.spaces import EnvSpec
from stepwell.sql_result import SqlResult, read_table
from stepwell.trajectory import Trajectory

GROUP_BYTES = 16 << 20
CHUNK = 1 << 20
FORMATS = {".hdf5": "d4rl", ".h5": "d4rl", ".npz": "npz"}
CONTENT_TYPES = {"d4rl": "application/x-hdf5", "npz": "application/x-npz"}
JOB_ENDS = ("succeeded", "failed", "cancelled")
PARQUET = "application/vnd.apache.parquet"
_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_METADATA = 16 * 1024
MAX_POINTS = 10_000
ROLES = ("train", "collect", "evaluate")


@dataclass(frozen=True, slots=True)
class DownloadedPolicy:
    """A policy file as it was published, its digest checked."""

    data: bytes
    version: int
    sha256: str
    etag: str
    """Pass it to `download_policy(…, etag=…)`, which then returns None if nothing has changed."""


class Client(Transport):
    """A service's client. Thread-safe; close it, or use it in a `with` block.

    `url` and `token` default to STEPWELL_URL (http://127.0.0.1:8000) and STEPWELL_TOKEN. `timeout`
    is how many seconds one answer may take. Calls that can be repeated are, for up to `retry_for`
    seconds, when the service does not answer or asks for patience. `transport` replaces the
    network (tests). Every method raises errors of `stepwell.errors` only.
    """

    @functools.cached_property
    def _specs(self) -> dict[str, EnvSpec]:
        """By dataset, as far as they are known."""
        return {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def with_options(
        self, *, timeout: float | None = None, retry_for: float | None = None
    ) -> Client:
        """A client over the same connections with other patience; closing either closes both."""
        other = copy.copy(self)
        other.timeout = self.timeout if timeout is None else timeout
        other.retry_for = self.retry_for if retry_for is None else retry_for
        return other

    def health(self) -> Health:
        """Version, database revision, and why it is degraded if it is."""
        response = self.call("GET", "/healthz", fine=(503,))
        if response.headers.get("Content-Type", "").startswith(PROBLEM):
            self.raise_for(response)
        return self.parse(Health, response)

    def ready(self) -> bool:
        """Whether the service answers and is ready; False rather than an error."""
        try:
            return self.with_options(timeout=5.0, retry_for=0.0).call("GET", "/readyz").is_success
        except (ServiceUnreachable, ServiceError):
            return False

    def wait_ready(self, seconds: float = 30.0) -> None:
        """Wait until the service is ready. Raises `ServiceUnreachable` after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.ready():
            if time.monotonic() > deadline:
                raise ServiceUnreachable(
                    f"{self.url} was not ready within {seconds:g} s; "
                    "start a service with: stepwell serve"
                )
            time.sleep(0.05)

    # --- datasets ---------------------------------------------------------------------------

    def create_dataset(
        self,
        name: str,
        spec: EnvSpec,
        *,
        capacity: messages.Capacity | dict[str, int] | None = None,
        description: str = "",
        tags: Sequence[str] = (),
        exist_ok: bool = False,
    ) -> Dataset:
        """Register a dataset: every trajectory in it will have the layout of `spec`.

        `capacity` limits the fifo partition, for instance {"trajectories": 10_000}. With
        `exist_ok`, a dataset of the same layout is returned as it is. Raises `Conflict` where one
        of that name exists.
        """
        body = request(
            messages.CreateDataset,
            name=name,
            spec=spec.to_json(),
            capacity=capacity,
            description=description,
            tags=tags,
        )
        try:
            made = self.ask(Dataset, "POST", "/v1/datasets", body=body, idempotent=exist_ok)
        except Conflict as error:
            if not exist_ok or error.code != "dataset_exists":
                raise
            made = self.dataset(name)
            if made.spec_digest != spec.digest:
                raise Conflict(
                    {
                        **error.problem,
                        "detail": f"dataset {name} exists with another layout",
                        "expected": made.spec,
                        "got": spec.to_json(),
                    }
                ) from None
        self._remember(name, made)
        return made

    def datasets(self) -> list[Dataset]:
        """All datasets, by name."""
        return self.items(Dataset, "/v1/datasets")

    def dataset(self, name: str) -> Dataset:
        """One dataset with its numbers. Raises `NotFound`."""
        return self.ask(Dataset, "GET", route("datasets", name))

    def spec(self, name: str) -> EnvSpec:
        """The EnvSpec of a dataset, asked for once and remembered."""
        return self._specs.get(name) or self._remember(name, self.dataset(name))

    def _remember(self, name: str, dataset: Dataset) -> EnvSpec:
        spec = self._specs[name] = EnvSpec.from_json(dataset.spec)
        return spec

    def patch_dataset(
        self,
        name: str,
        *,
        capacity: messages.Capacity | Mapping[str, int | None] | None = None,
        description: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> Dataset:
        """Change the given fields; a new `capacity` replaces the old one and applies at once."""
        body = request(messages.PatchDataset, capacity=capacity, description=description, tags=tags)
        return self.ask(Dataset, "PATCH", route("datasets", name), body=body)

    def delete_dataset(self, name: str) -> None:
        """Remove a dataset. Raises `Conflict` while protected trajectories are in it."""
        self.call("DELETE", route("datasets", name), idempotent=False)
        self._specs.pop(name, None)

    def flush(self, name: str) -> messages.FlushResult:
        """Seal now: whatever was acknowledged before is in SQL `steps` afterwards."""
        return self.ask(
            messages.FlushResult,
            "POST",
            route("datasets", name, "flush"),
            idempotent=True,
            timeout=max(self.timeout, 120.0),
        )

    # --- trajectories in --------------------------------------------------------------------

    def post(
        self,
        dataset: str,
        trajectories: Sequence[Trajectory],
        *,
        spec: EnvSpec | None = None,
        partition: str = "fifo",
        wait_sealed: bool = False,
    ) -> IngestResult:
        """Store trajectories; returns once they are durable, with one item for each, in order.

        Safe to repeat: ids make it exactly once. An item may be `refused` or `conflict`; that does
        not raise and does not stop the others. Large sequences travel in several bodies of about
        16 MB; an error then leaves earlier ones stored. Raises `InvalidTrajectory` before
        anything is sent where one does not fit `spec` (default: the dataset's).
        """
        trajectories = list(trajectories)
        if not trajectories:
            raise InvalidData("nothing to post", expected="at least one trajectory", got="none")
        spec = spec or self.spec(dataset)
        for trajectory in trajectories:
            trajectory.check(spec)
        results = [
            self.post_stream(
                dataset, encode(group, spec), partition=partition, wait_sealed=wait_sealed
            )
            for group in groups(trajectories)
        ]
        items = [item for result in results for item in result.items]
        return results[-1].model_copy(update={"items": items})

    def post_stream(
        self, dataset: str, stream: bytes, *, partition: str = "fifo", wait_sealed: bool = False
    ) -> IngestResult:
        """`post` for trajectories that `stepwell.codec.encode` has encoded already, in one body."""
        return self.ask(
            IngestResult,
            "POST",
            route("datasets", dataset, "trajectories"),
            params={"partition": partition, "wait": "sealed" if wait_sealed else None},
            content=stream,
            headers={"Content-Type": ARROW},
            idempotent=True,
            timeout=max(self.timeout, 120.0) if wait_sealed else None,
        )

    def add(
        self,
        dataset: str,
        *,
        obs: Any,
        actions: Any,
        rewards: Any,
        terminated: Any = False,
        truncated: Any = False,
        partition: str = "fifo",
        **metadata: Any,
    ) -> IngestItem:
        """Store one trajectory given as plain lists or arrays (see `Trajectory.from_arrays`).

            client.add("my-data", obs=o, actions=a, rewards=r, terminated=True, env="Maze-v1")

        obs [T+1, …] (or [T, …] where the last is unknown), actions [T, …], rewards [T]. Raises
        `InvalidTrajectory`, or `BadRequest` / `Conflict` where the service refuses it.
        """
        spec = self.spec(dataset)
        metadata.setdefault("env", spec.env)
        trajectory = Trajectory.from_arrays(
            obs=obs,
            actions=actions,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            spec=spec,
            **metadata,
        )
        item = self.post(dataset, [trajectory], spec=spec, partition=partition).items[0]
        if item.status in ("refused", "conflict"):
            problem = item.problem or messages.Problem(
                title=item.status, status=409 if item.status == "conflict" else 422, code="conflict"
            )
            raise as_service_error(problem)
        return item

    # --- uploads and jobs -------------------------------------------------------------------

    def upload(
        self,
        dataset: str,
        path: str | Path,
        *,
        format: str | None = None,  # noqa: A002 - the word of the API
        partition: str = "protected",
        create: bool = True,
        env: str = "",
        progress: Callable[[int, int], None] | None = None,
        wait: bool = True,
        timeout: float = 600.0,
        **options: Any,
    ) -> Job:
        """Upload an offline dataset file, all or nothing; the service parses it as a job.

        `format` ("d4rl" or "npz") follows from the suffix .hdf5, .h5 or .npz. `create` makes the
        dataset from what the file holds. `progress(done, total)` counts bytes sent. With `wait`,
        returns the finished job (its `result` counts what was stored) or raises `JobFailed`; else
        the queued job. Further options go to the importer (docs/own_data.md lists them).
        """
        file = Path(path)
        kind = format or FORMATS.get(file.suffix.lower())
        if kind is None:
            raise InvalidData(
                f"unknown kind of file {file.name}",
                expected=f"a suffix of {', '.join(FORMATS)}, or format=d4rl or npz",
                got=repr(file.suffix),
            )
        try:
            size = file.stat().st_size
            file.open("rb").close()
        except OSError as error:
            raise InvalidData(f"cannot read {file}: {error.strerror}") from None
        accepted = self.ask(
            messages.JobAccepted,
            "POST",
            route("datasets", dataset, "imports"),
            params={
                **options,
                "format": kind,
                "partition": partition,
                "create": create,
                "env": env or None,
            },
            content=lambda: _chunks(file, size, progress),
            headers={
                "Content-Type": CONTENT_TYPES.get(kind, "application/octet-stream"),
                "Content-Length": str(size),
            },
            idempotent=False,
            timeout=max(self.timeout, 120.0),
        )
        job = accepted.job
        return self.wait_job(job.id, timeout) if wait else job

    def job(self, job_id: str) -> Job:
        """A job as it stands."""
        return self.ask(Job, "GET", route("jobs", job_id))

    def jobs(self) -> list[Job]:
        """All jobs the service remembers, newest first."""
        return self.items(Job, "/v1/jobs")

    def wait_job(
        self,
        job_id: str,
        timeout: float = 600.0,
        progress: Callable[[Job], None] | None = None,
    ) -> Job:
        """Wait until a job ends. Raises `JobFailed` if it failed, was cancelled or takes longer."""
        deadline = time.monotonic() + timeout
        pause = 0.02
        while True:
            job = self.job(job_id)
            if progress is not None:
                progress(job)
            if job.state == "succeeded":
                return job
            if job.state in JOB_ENDS:
                reason = str(as_service_error(job.error)) if job.error else job.message
                raise JobFailed(f"job {job.kind} {job.state}: {reason}", job)
            if time.monotonic() + pause > deadline:
                raise JobFailed(f"job {job.kind} is still {job.state} after {timeout:g} s", job)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)

    def cancel_job(self, job_id: str) -> None:
        """Ask a job to end; what it began is undone."""
        self.call("DELETE", route("jobs", job_id))

    # --- trajectories out -------------------------------------------------------------------

    def trajectories(
        self,
        dataset: str,
        *,
        partition: str | None = None,
        env: str | None = None,
        policy: str | None = None,
        run: str | None = None,
        purpose: str | None = None,
        state: str | None = None,
        tag: str | None = None,
        order: str = "-seq",
        limit: int = 100,
        cursor: str | None = None,
    ) -> messages.Page[messages.TrajectoryInfo]:
        """One page of the index, `limit` rows of it.

        `order` is a column, with - for descending; `cursor` is `next` of the previous page.
        """
        filters = {"partition": partition, "env": env, "policy": policy, "run": run}
        filters |= {"purpose": purpose, "state": state, "tag": tag, "order": order}
        params = {**filters, "limit": limit, "cursor": cursor}
        page = messages.Page[messages.TrajectoryInfo]
        return self.ask(page, "GET", route("datasets", dataset, "trajectories"), params=params)

    def trajectory(self, trajectory_id: str) -> messages.TrajectoryInfo:
        """What the index knows of one trajectory. Raises `NotFound`, or `Gone` if evicted."""
        return self.ask(messages.TrajectoryInfo, "GET", route("trajectories", trajectory_id))

    def steps(self, trajectory_id: str) -> Trajectory:
        """One whole trajectory, bit by bit as it was posted."""
        response = self.call("GET", route("trajectories", trajectory_id, "steps"), accept=ARROW)
        _, decoded = decode(response.content)
        if len(decoded) != 1 or decoded[0].id != trajectory_id:
            raise CodecError(
                "the service answered with something else",
                expected=f"the one trajectory {trajectory_id}",
                got=", ".join(t.id for t in decoded) or "none",
            )
        return decoded[0]

    def patch_trajectory(
        self,
        trajectory_id: str,
        *,
        tags: Sequence[str] | None = None,
        flags: Sequence[str] | None = None,
        notes: str | None = None,
        partition: str | None = None,
    ) -> messages.TrajectoryInfo:
        """Label it, or protect it with partition="protected". Lists replace the old ones."""
        body = request(
            messages.PatchTrajectory, tags=tags, flags=flags, notes=notes, partition=partition
        )
        path = route("trajectories", trajectory_id)
        return self.ask(messages.TrajectoryInfo, "PATCH", path, body=body)

    # --- SQL --------------------------------------------------------------------------------------

    def sql(
        self,
        query: str,
        params: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        dataset: str | None = None,
        limit: int = 1000,
        timeout: float = 5.0,
    ) -> SqlResult:
        """One SELECT over what the service knows; docs/sql.md lists tables and columns.

        `params` are the values of ? (a sequence) or $name (a mapping) placeholders. `dataset` says
        which dataset's steps bare `steps` means. At most `limit` rows come (then `truncated` is
        True); the service kills the query after `timeout` seconds. Raises `BadRequest` with the
        database's own message.
        """
        values = dict(params) if isinstance(params, Mapping) else params and list(params)
        body = request(
            messages.Query, sql=query, params=values, dataset=dataset, limit=limit, timeout=timeout
        )
        response = self.call(
            "POST",
            "/v1/query",
            body=body,
            accept=ARROW,
            idempotent=True,
            timeout=max(self.timeout, timeout + 10.0),
        )
        table = read_table(response.content, "the answer to the query")
        metadata = table.schema.metadata or {}
        return SqlResult(
            table.replace_schema_metadata(None),
            truncated=metadata.get(b"truncated", b"false").lower() in (b"true", b"1"),
            elapsed_ms=float(metadata.get(b"elapsed_ms", b"0")),
            excluded=[
                messages.Excluded.model_validate(one)
                for one in orjson.loads(metadata.get(b"excluded", b"[]"))
            ],
        )

    def query_schema(self) -> messages.QuerySchema:
        """Tables and columns that SQL can see, as they are now."""
        return self.ask(messages.QuerySchema, "GET", "/v1/query/schema")

    # --- snapshots, leases, manifests and shards --------------------------------------------------

    def create_snapshot(
        self,
        *,
        dataset: str | None = None,
        where: str | None = None,
        sources: Sequence[messages.Source | Mapping[str, Any]] | None = None,
        since: str | None = None,
        include_eval: bool = False,
        holder: str = "",
    ) -> Snapshot:
        """Freeze a selection of everything acknowledged so far, and lease it for 120 s to `holder`.

        Either `dataset` (and `where`, a SQL condition over `trajectories`), or `sources`, a mixture
        like [{"select": "SELECT id FROM trajectories WHERE …", "share": 0.8}, …].

        `since`, an earlier snapshot's id, makes a refresh: the service looks at what changed since
        then, and `added` and `removed` count it. When nothing did, the answer is that snapshot
        itself (same `id`), leased to `holder` anew. `manifest(new.id, since=old.id)` then brings
        only the rows that differ.
        """
        body = request(
            messages.CreateSnapshot,
            dataset=dataset,
            where=where,
            sources=sources,
            since=since,
            include_eval=include_eval or None,
            holder=holder or None,
        )
        # Repeating it makes another snapshot of the same selection: wasteful, never wrong.
        seconds = max(self.timeout, 120.0)
        return self.ask(
            Snapshot, "POST", "/v1/snapshots", body=body, idempotent=True, timeout=seconds
        )

    def snapshot(self, snapshot_id: str) -> Snapshot:
        return self.ask(Snapshot, "GET", route("snapshots", snapshot_id))

    def snapshots(self) -> list[Snapshot]:
        return self.items(Snapshot, "/v1/snapshots")

    def manifest(self, snapshot_id: str, *, since: str | None = None) -> Any:
        """pyarrow.Table, one row per selected trajectory, in an order that never changes.

        id (16 bytes; `stepwell.manifest.id_texts` writes them out), dataset, seq, component,
        weight, shard, traj_idx, row_start (row in the shard), length (T), first_step, return,
        terminated, truncated, final_obs_valid, env, content. Schema metadata carries the snapshot's
        id and digest and the components' shares. Raises `Gone`.

        With `since`, another snapshot's id: what differs, for `stepwell.manifest.apply(table of
        that snapshot, changes)`.
        """
        response = self.call(
            "GET",
            route("snapshots", snapshot_id, "manifest"),
            params=None if since is None else {"since": since},
            accept=ARROW,
        )
        return read_table(response.content, f"the manifest of {snapshot_id}")

    def lease(self, snapshot_id: str, holder: str = "", ttl: float = 120.0) -> messages.Lease:
        """Promise of `ttl` more seconds in which nothing of the snapshot is deleted."""
        return self.ask(
            messages.Lease,
            "PUT",
            route("snapshots", snapshot_id, "lease"),
            body=request(messages.PutLease, holder=holder, ttl=ttl),
        )

    def release(self, snapshot_id: str, holder: str = "") -> None:
        """Give a lease back before it ends."""
        self.call("DELETE", route("snapshots", snapshot_id, "lease"), params={"holder": holder})

    def download_shard(self, shard_id: str, path: str | Path, *, sha256: str | None = None) -> Path:
        """Fetch a shard to `path`: streamed, its digest checked, there whole or not at all.

        The digest is `sha256`, or what the service says (ETag). Raises `CodecError` for bytes
        that do not have it, `Gone` for a shard that is no more.
        """
        target = Path(path)

        def attempt() -> None:
            with (
                sending(self.url, self.timeout),
                self._http.stream(
                    "GET",
                    route("shards", shard_id),
                    headers={"Accept": f"{PARQUET}, */*", "Accept-Encoding": "identity"},
                    timeout=self._timeout(self.timeout),
                ) as response,
            ):
                if not response.is_success:
                    response.read()
                self.raise_for(response)
                self._receive(response, shard_id, target, sha256)

        self.retrying(attempt, repeatable=True)
        return target

    def _receive(
        self, response: httpx2.Response, shard_id: str, target: Path, sha256: str | None
    ) -> None:
        wanted = sha256 or etag_of(response)
        if not _SHA256.fullmatch(wanted):
            raise CodecError(
                f"shard {shard_id} came without a digest",
                expected="an ETag with the sha256",
                got=repr(wanted),
            )
        digest = hashlib.sha256()
        with whole_file(target) as file:
            for chunk in response.iter_bytes(CHUNK):
                digest.update(chunk)
                file.write(chunk)
            if digest.hexdigest() != wanted:
                raise CodecError(
                    f"shard {shard_id} arrived damaged", expected=wanted, got=digest.hexdigest()
                )

    # --- runs and metrics -------------------------------------------------------------------------

    def create_run(self, name: str, kind: str, **fields: Any) -> Run:
        """Register one execution of a trainer, collector or evaluator; `fields` of CreateRun.

        Raises `Conflict` where the name is taken, unless exist_ok=True resumes it.
        """
        body = request(messages.CreateRun, name=name, kind=kind, **fields)
        return self.ask(Run, "POST", "/v1/runs", body=body, idempotent=body.exist_ok)

    def run(self, name: str) -> Run:
        return self.ask(Run, "GET", route("runs", name))

    def runs(self, kind: str | None = None, status: str | None = None) -> list[Run]:
        """All runs, newest first."""
        return self.items(Run, "/v1/runs", kind=kind, status=status)

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

        `search`: text in the name or a tag. `since`: reported at that Unix time or later. `brief`:
        without config and newest metrics. `cursor`: `next` of the previous page.
        """
        filters = {"kind": kind, "status": status, "tag": tag, "parent": parent}
        filters |= {"search": search or None, "cursor": cursor}
        params = {**filters, "alive": alive, "since": since, "brief": brief, "limit": limit}
        return self.ask(RunPage, "GET", "/v1/runs", params=params)

    def patch_run(self, name: str, **fields: Any) -> Run:
        """Change or only keep alive (no fields: a heartbeat); `fields` of PatchRun."""
        body = request(messages.PatchRun, **fields)
        # Appending to the log twice is the one thing here that cannot be repeated.
        return self.ask(Run, "PATCH", route("runs", name), body=body, idempotent=body.log is None)

    def delete_run(self, name: str) -> None:
        self.call("DELETE", route("runs", name))

    def log_metrics(self, run: str, points: Sequence[MetricPoint]) -> int:
        """Store metric points; repeating (key, step) overwrites. Returns how many were stored."""
        stored = 0
        for start in range(0, len(points), MAX_POINTS):
            body = request(messages.PostMetrics, points=points[start : start + MAX_POINTS])
            accepted = self.ask(
                messages.MetricsAccepted,
                "POST",
                route("runs", run, "metrics"),
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
            route("runs", run, "metrics"),
            params={
                "keys": ",".join(keys) if keys is not None else None,
                "after": ",".join(map(str, after)) if after is not None else None,
                "points": points,
            },
        )
        return {series.key: series for series in answer.series}

    def run_log(self, name: str) -> str:
        """The run's log as text."""
        return self.call("GET", route("runs", name, "log"), accept="text/plain").text

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
        """Publish the bytes of a policy file as run/version, immutable. `latest` then means it.

        Safe to repeat with the same bytes; raises `Conflict` with others.
        """
        described = {**(metadata or {}), **({} if step is None else {"step": step})}
        try:
            header = json.dumps(described, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidData(f"metadata cannot be written as JSON: {error}") from None
        if len(header) > MAX_METADATA:
            raise InvalidData(
                "metadata is too long", expected=f"≤ {MAX_METADATA} bytes", got=str(len(header))
            )
        return self.ask(
            Policy,
            "PUT",
            route("runs", run, "policies", int(version)),
            content=data,
            headers={
                "Content-Type": "application/octet-stream",
                **({"X-Stepwell-Metadata": header} if described else {}),
            },
        )

    def policies(self, run: str) -> list[Policy]:
        return self.items(Policy, route("runs", run, "policies"))

    def download_policy(
        self, run: str, which: str | int = "latest", *, etag: str | None = None
    ) -> DownloadedPolicy | None:
        """A policy file by version or alias; None where `etag` is still what it is.

        Raises `NotFound`, or `CodecError` for bytes that do not have the promised digest.
        """
        response = self.call(
            "GET",
            route("runs", run, "policies", which),
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
        return DownloadedPolicy(response.content, int(version), digest, f'"{digest}"')

    def set_alias(self, run: str, alias: str, version: int) -> None:
        """Let `alias` (for instance "best") mean a version. `latest` is kept by the service."""
        self.call(
            "PUT",
            route("runs", run, "aliases", alias),
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
        return self.items(Evaluation, "/v1/evaluations", env=env, run=run, policy=policy)

    # --- workers ----------------------------------------------------------------------------------

    def heartbeat(self, worker_id: str, **fields: Any) -> Worker:
        """Report as a worker; the response's `command` is what it is asked to do.

        `fields` of PutWorker. Not retried: the next heartbeat is the retry.
        """
        body = request(messages.PutWorker, **fields)
        once = self.with_options(retry_for=0.0)
        return once.ask(Worker, "PUT", route("workers", worker_id), body=body)

    def workers(self) -> list[Worker]:
        return self.items(Worker, "/v1/workers")

    def command(self, worker_id: str, command: str) -> Worker:
        """pause, resume, drain or stop: picked up with the worker's next heartbeat."""
        return self.ask(
            Worker,
            "POST",
            route("workers", worker_id, "command"),
            body=request(messages.PostCommand, command=command),
            idempotent=True,
        )

    # --- launches ---------------------------------------------------------------------------

    def create_launch(
        self,
        role: str,
        recipe: str = "",
        args: dict[str, Any] | None = None,
        count: int = 1,
    ) -> Launch:
        """Ask for work to be started by a launcher on some machine."""
        body = request(
            messages.CreateLaunch, role=role, recipe=recipe, args=args or {}, count=count
        )
        return self.ask(Launch, "POST", "/v1/launches", body=body)

    def launches(self, *, role: str | None = None, state: str | None = None) -> list[Launch]:
        """All, or those of one role or state; newest first."""
        return self.items(Launch, "/v1/launches", role=role, state=state)

    def launch(self, launch_id: str) -> Launch:
        return self.ask(Launch, "GET", route("launches", launch_id))

    def cancel_launch(self, launch_id: str) -> None:
        self.call("DELETE", route("launches", launch_id))

    def claim_launch(self, worker: str, roles: Sequence[str] = ROLES) -> Launch | None:
        """Take the oldest waiting launch of these roles, or None."""
        body = request(messages.ClaimLaunch, worker=worker, roles=roles)
        return self.ask(messages.Claimed, "POST", "/v1/launches/claim", body=body).launch

    def patch_launch(self, launch_id: str, **fields: Any) -> Launch:
        """The claiming launcher's report; `fields` of PatchLaunch."""
        body = request(messages.PatchLaunch, **fields)
        return self.ask(Launch, "PATCH", route("launches", launch_id), body=body)

    # --- tokens -----------------------------------------------------------------------------

    def create_token(
        self, name: str, scopes: Sequence[str], expires_in: float | None = None
    ) -> Token:
        """A new token; its secret is in `token`, now and never again."""
        body = request(messages.CreateToken, name=name, scopes=scopes, expires_in=expires_in)
        return self.ask(Token, "POST", "/v1/tokens", body=body)

    def tokens(self) -> list[Token]:
        return self.items(Token, "/v1/tokens")

    def revoke_token(self, token_id: str) -> None:
        self.call("DELETE", route("tokens", token_id))


def groups(trajectories: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
    """Neighbours together, in bodies of about GROUP_BYTES."""
    group: list[Trajectory] = []
    size = 0
    for trajectory in trajectories:
        if group and size + trajectory.nbytes > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(trajectory)
        size += trajectory.nbytes
    if group:
        yield group


def _chunks(path: Path, size: int, progress: Callable[[int, int], None] | None) -> Iterator[bytes]:
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk
            done += len(chunk)
            if progress is not None:
                progress(done, size)


def etag_of(response: httpx2.Response) -> str:
    """The ETag without its quotes, or nothing."""
    return str(response.headers.get("ETag", "")).removeprefix("W/").strip('"')
