"""`Client`: the endpoints of the service (docs/reference/http.md) as typed methods.

from stepwell import Client

with Client("http://127.0.0.1:8000") as client:
    client.upload("hopper", "hopper-medium-v2.hdf5", env="Hopper-v5")
    print(client.sql("select count(*), avg(return) from trajectories").rows)

health · datasets · versions · annotations · trajectories · uploads and jobs · SQL · snapshots and
shards · runs and metrics · policies · evaluations · videos · workers · launches · tokens
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import orjson
from pydantic import ValidationError

from stepwell import messages, step_values
from stepwell._files import whole_file
from stepwell._folders import files_of, is_export, zipped
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
    JOB_ENDS,
    PROBLEM,
    AnnotateResult,
    Annotation,
    Consumer,
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
    SavedQuery,
    Series,
    Snapshot,
    Token,
    Version,
    VersionDiff,
    Video,
    Worker,
)
from stepwell.rounding import warn
from stepwell.spaces import EnvSpec, unnamed
from stepwell.sql_result import SqlResult, read_table
from stepwell.trajectory import Trajectory

GROUP_BYTES, GROUP_MOST = 16 << 20, 1000
COPIES = uuid.UUID("0d0c4c1e-8a2f-5f0e-b3a5-6a9c3fb7a922")
"""Namespace of the ids of copied trajectories: same dataset and original → same id."""
CHUNK = 1 << 20
SUFFIXES = {
    ".hdf5": "d4rl", ".h5": "d4rl", ".npz": "npz", ".parquet": "parquet", ".arrow": "parquet",
    ".zip": "zip",
}  # fmt: skip
CONTENT_TYPES = {"d4rl": "application/x-hdf5", "npz": "application/x-npz"}
PARQUET = "application/vnd.apache.parquet"
_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_METADATA = 16 * 1024
MAX_POINTS = 10_000
LABELLED_AT_ONCE = 10_000
MATCHING = 1_000_000
ROLES = ("train", "collect", "evaluate")


@dataclass(frozen=True, slots=True)
class DownloadedPolicy:
    """The bytes of a published policy file, with a verified digest."""

    data: bytes
    version: int
    sha256: str
    etag: str
    """Pass it to `download_policy(…, etag=…)`, which then returns None if nothing has changed."""


class Client(Transport):
    """A client of the service. Thread-safe; close it, or use it in a `with` block.

    `url` and `token` default to STEPWELL_URL (http://127.0.0.1:8000) and STEPWELL_TOKEN. `timeout`
    limits one response, in seconds. Repeatable calls are retried for up to `retry_for` seconds when
    the service does not answer or is busy. `transport` replaces the network in tests. Every method
    raises only the errors in `stepwell.errors`.
    """

    @functools.cached_property
    def _specs(self) -> dict[str, EnvSpec]:
        """Cached specs by dataset name."""
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
        """Return a client with other timeouts that shares these connections.

        Closing either client closes both.
        """
        other = copy.copy(self)
        other.timeout = self.timeout if timeout is None else timeout
        other.retry_for = self.retry_for if retry_for is None else retry_for
        return other

    def health(self) -> Health:
        """Return version, database revision, and the reason if the service is degraded."""
        response = self.call("GET", "/healthz", fine=(503,))
        if response.headers.get("Content-Type", "").startswith(PROBLEM):
            self.raise_for(response)
        return self.parse(Health, response)

    def ready(self) -> bool:
        """Whether the service is ready. Returns False instead of raising an error."""
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
        """Create a dataset whose trajectories all have the layout of `spec`.

        `capacity` limits the fifo partition, for instance {"trajectories": 10_000}. Raises
        `Conflict` if a dataset of that name exists. With `exist_ok`, an existing dataset of the
        same layout is returned unchanged instead.
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
            other = made.spec_digest != spec.digest
            if other or EnvSpec.from_json(made.spec).other_names(spec) is not None:
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
        """Return all datasets, sorted by name."""
        return self.items(Dataset, "/v1/datasets")

    def dataset(self, name: str) -> Dataset:
        """Return one dataset with its statistics. Raises `NotFound`."""
        return self.ask(Dataset, "GET", route("datasets", name))

    def spec(self, name: str) -> EnvSpec:
        """Return the EnvSpec of a dataset. It is requested once and then cached."""
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

    def delete_dataset(self, name: str, *, protected: bool = False) -> None:
        """Remove a dataset. Raises `Conflict` if protected trajectories are in it, unless
        `protected`, which removes these, too."""
        params = {"protected": "true"} if protected else {}
        self.call("DELETE", route("datasets", name), idempotent=False, params=params)
        self._specs.pop(name, None)

    def flush(self, name: str) -> messages.FlushResult:
        """Seal now: move all acknowledged trajectories into shards, so that they are in `steps`."""
        where, seconds = route("datasets", name, "flush"), max(self.timeout, 120.0)
        return self.ask(messages.FlushResult, "POST", where, idempotent=True, timeout=seconds)

    def report_samples(
        self,
        name: str,
        consumer: str,
        samples: int,
        ratio: messages.SampleRatio | Mapping[str, float] | None = None,
    ) -> Consumer:
        """Report that `consumer` has drawn `samples` windows from a dataset; the response says up
        to which total it may draw now (`samples_until`).

        With `ratio` it is registered, or its ratio changes. Not retried, because the next report
        replaces it. Raises `NotFound` for a consumer that is not registered.
        """
        body = request(messages.PutConsumer, samples=samples, ratio=ratio)
        once = self.with_options(retry_for=0.0)
        return once.ask(Consumer, "PUT", route("datasets", name, "consumers", consumer), body=body)

    def consumers(self, name: str) -> list[Consumer]:
        """Return who samples from a dataset, how much, and whether it may draw more now."""
        return self.items(Consumer, route("datasets", name, "consumers"))

    def set_ratio(self, name: str, consumer: str, **changes: float) -> Consumer:
        """Change the ratio of a consumer while it runs: samples_per_insert, buffer, min_size,
        min_samples_per_insert; see `SampleRatio`."""
        body = request(messages.PatchConsumer, **changes)
        where = route("datasets", name, "consumers", consumer)
        return self.ask(Consumer, "PATCH", where, body=body)

    def delete_consumer(self, name: str, consumer: str) -> None:
        """Unregister a consumer, so that collectors no longer wait for it."""
        self.call("DELETE", route("datasets", name, "consumers", consumer), idempotent=False)

    # --- versions ---------------------------------------------------------------------------

    def create_version(
        self,
        dataset: str,
        name: str,
        *,
        where: str | None = None,
        description: str = "",
        licence: str = "",
        parent: str | None = None,
        include_eval: bool = False,
    ) -> Version:
        """Freeze the trajectories of a dataset that `where` selects, a SQL condition over
        `trajectories` (None: all), as the version dataset@name.

        They become protected, and stay as they are while the version exists. `parent`: the name of
        the version from which this one was made. Raises `Conflict` if the name is or was taken.
        """
        body = request(
            messages.CreateVersion,
            name=name,
            where=where,
            description=description,
            licence=licence,
            parent=parent,
            include_eval=include_eval,
        )
        path, seconds = route("datasets", dataset, "versions"), max(self.timeout, 120.0)
        return self.ask(Version, "POST", path, body=body, idempotent=False, timeout=seconds)

    def versions(self, dataset: str) -> list[Version]:
        """Return all versions of a dataset, newest first."""
        return self.items(Version, route("datasets", dataset, "versions"))

    def version(self, version: str) -> Version:
        """Return a version by its full name, such as "hopper@v3"; `select` is its SQL selection.

        Raises `NotFound`.
        """
        return self.ask(Version, "GET", _version_route(version))

    def diff_versions(self, before: str, after: str) -> VersionDiff:
        """Return what `after` has and `before` has not, and the reverse: statistics, and SQL that
        selects them. Both are versions of one dataset, by their full names."""
        path = f"{_version_route(after)}/diff"
        dataset, name = messages.split_version(before)
        if dataset != messages.split_version(after)[0]:
            raise InvalidData(
                "two versions of one dataset can be compared", got=f"{before} and {after}"
            )
        return self.ask(VersionDiff, "GET", path, params={"before": name})

    def delete_version(self, version: str) -> None:
        """Delete a version, which needs the scope admin. Its trajectories stay, and stay
        protected; its name is not given again."""
        self.call("DELETE", _version_route(version), idempotent=False)

    # --- annotations ------------------------------------------------------------------------------

    def annotate(
        self, dataset: str, name: str, policy: str, values: Sequence[Mapping[str, Any]]
    ) -> AnnotateResult:
        """Store a critic's values of steps under a name; each of `values` is a TrajectoryValues.

        Safe to repeat: a trajectory is annotated once under a name. Raises `Conflict` if the name
        is another policy's.
        """
        return self.ask(
            AnnotateResult,
            "POST",
            route("datasets", dataset, "annotations", "values"),
            params={"annotation": name, "policy": policy},
            content=step_values.encode(values),
            headers={"Content-Type": ARROW},
            idempotent=True,
        )

    def annotations(self, dataset: str) -> list[Annotation]:
        """Return the annotations of a dataset; their values are in the SQL table `annotations`."""
        return self.items(Annotation, route("datasets", dataset, "annotations"))

    def delete_annotations(self, dataset: str, name: str) -> None:
        """Delete the annotations of a name, which needs the scope admin."""
        path = route("datasets", dataset, "annotations")
        self.call("DELETE", path, params={"annotation": name}, idempotent=False)

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
        """Store trajectories. Returns once they are durable, with one item for each, in order.

        Safe to repeat: the service stores each id once. An item may be `refused` or `conflict`;
        this does not raise and does not affect the other items. Large sequences are sent in several
        requests of about 16 MB; if one fails, the earlier ones remain stored. Raises
        `InvalidTrajectory` before anything is sent if a trajectory does not fit `spec` (default:
        the spec of the dataset).
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
        """Like `post`, for a body already encoded by `stepwell.codec.encode`."""
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

        obs [T+1, …] (or [T, …] if the last observation is unknown), actions [T, …], rewards [T].
        Raises `InvalidTrajectory`, or `BadRequest` / `Conflict` if the service refuses it.
        """
        spec = self.spec(dataset)
        for key, names in spec.names.items():
            warn(unnamed(key, names, "these arrays"))
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
        """Upload an offline dataset file, all or nothing; the service parses it in a job.

        `format` (of `messages.FORMATS`) defaults to that of the suffix, or of the folder; what an
        HDF5 file or a zip contains is recognised (docs/reference/formats.md lists what). `create`
        creates the dataset with the layout of the file. `progress(done, total)` is called with the
        bytes sent. With `wait`, returns the finished job (its `result` counts what was stored) or
        raises `JobFailed`; otherwise returns the queued job. Other options are passed to the
        importer (docs/reference/own_data.md lists them).

        A folder of `stepwell export --format parquet` is sent trajectory by trajectory before this
        returns, without a job of the service: the job returned has no id.
        """
        source = Path(path)
        if not source.exists():
            raise InvalidData(f"cannot read {source}: No such file or folder")
        kind, files = format or SUFFIXES.get(source.suffix.lower()), None
        if source.is_dir() and format in (None, "parquet") and is_export(source):
            return self._send_export(dataset, source, partition, create, env, progress, options)
        if source.is_dir():
            kind, files = files_of(source, format)
        if kind is None:
            text = source.name.removesuffix(".gz").endswith((".csv", ".tsv", ".json", ".jsonl"))
            raise InvalidData(
                f"unknown kind of file {source.name}",
                expected="a Parquet file, such as duckdb's `copy (from '"
                f"{source.name}') to 'data.parquet'` writes"
                if text
                else f"a suffix of {', '.join(SUFFIXES)}, or a format of "
                + ", ".join(messages.FORMATS),
                got=repr(source.suffix),
            )
        with zipped(files) if files else nullcontext(source) as file:
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

    def _send_export(
        self,
        dataset: str,
        folder: Path,
        partition: str,
        create: bool,
        env: str,
        progress: Callable[[int, int], None] | None,
        options: dict[str, Any],
    ) -> Job:
        # Imported here: few programs need Parquet.
        from stepwell import _exported

        if options:
            raise InvalidData(
                f"{folder} is a folder of stepwell export, which has its own spec",
                expected="no further options",
                got=", ".join(options),
            )
        began = time.time()
        spec, count, trajectories = _exported.read(folder)
        if create:
            spec = replace(spec, env=env or spec.env)
            said = _exported.licence_of(folder)
            about = f"Imported (parquet): licence={said}"[:4096] if said else ""
            self.create_dataset(dataset, spec, description=about, exist_ok=True)
        else:
            self.spec(dataset)
        stored, steps, size, done = Counter[str](), 0, 0, 0
        group: list[Trajectory] = []
        for trajectory in trajectories:
            steps += len(trajectory)
            size += trajectory.nbytes
            metadata = replace(trajectory.metadata, env=env or trajectory.metadata.env)
            name = str(uuid.uuid5(COPIES, f"{dataset}/{trajectory.id}"))
            group.append(replace(trajectory, id=name, metadata=metadata))
            done += 1
            if size < GROUP_BYTES and len(group) < GROUP_MOST and done < count:
                continue
            answer = self.post(dataset, group, spec=spec, partition=partition)
            for item in answer.items:
                stored[item.status] += 1
                if item.status in ("refused", "conflict"):
                    why = item.problem.detail if item.problem else "no reason given"
                    raise InvalidData(f"trajectory {item.id} was not stored ({item.status}): {why}")
            group, size = [], 0
            if progress is not None:
                progress(done, count)
        return Job(
            id="",
            kind="import",
            dataset=dataset,
            state="succeeded",
            progress=1.0,
            result={
                "dataset": dataset,
                "partition": partition,
                "trajectories": stored["stored"],
                "steps": steps,
                "duplicates": stored["duplicate"],
            },
            created_at=began,
            finished_at=time.time(),
        )

    def job(self, job_id: str) -> Job:
        """Return the current state of a job."""
        return self.ask(Job, "GET", route("jobs", job_id))

    def jobs(self) -> list[Job]:
        """Return all jobs that the service still lists, newest first."""
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
        """Request that a job stop. The service undoes its partial work."""
        self.call("DELETE", route("jobs", job_id))

    def check_index(self) -> Job:
        """Check the index while the service runs; the report is the job's result."""
        return self.ask(messages.JobAccepted, "POST", "/v1/jobs/check_index").job

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
        """Return one page of the index with up to `limit` rows.

        `order` is a column name; a leading - means descending. `cursor` is `next` of the previous
        page.
        """
        filters = {"partition": partition, "env": env, "policy": policy, "run": run}
        filters |= {"purpose": purpose, "state": state, "tag": tag, "order": order}
        params = {**filters, "limit": limit, "cursor": cursor}
        page = messages.Page[messages.TrajectoryInfo]
        return self.ask(page, "GET", route("datasets", dataset, "trajectories"), params=params)

    def trajectory(self, trajectory_id: str) -> messages.TrajectoryInfo:
        """Return the index row of one trajectory. Raises `NotFound`, or `Gone` if evicted."""
        return self.ask(messages.TrajectoryInfo, "GET", route("trajectories", trajectory_id))

    def steps(self, trajectory_id: str) -> Trajectory:
        """Return one whole trajectory, bit for bit as it was posted."""
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
        """Change labels, or protect with partition="protected". New lists replace the old ones."""
        body = request(
            messages.PatchTrajectory, tags=tags, flags=flags, notes=notes, partition=partition
        )
        path = route("trajectories", trajectory_id)
        return self.ask(messages.TrajectoryInfo, "PATCH", path, body=body)

    def demote_trajectory(self, trajectory_id: str) -> messages.TrajectoryInfo | None:
        """Move it from protected to fifo; needs the scope admin. None: fifo was full, and it was
        evicted at once."""
        path = route("trajectories", trajectory_id, "demote")
        response = self.call("POST", path, idempotent=True)
        if response.status_code == 204:
            return None
        return messages.TrajectoryInfo.model_validate_json(response.content)

    def matching_trajectories(self, where: str) -> list[str]:
        """Ids of all trajectories that satisfy a condition on the table `trajectories`, by dataset
        and seq; at most a million. Raises `BadRequest` with the message of the database."""
        query = f"select id from trajectories where {where}\norder by dataset, seq"
        found = self.sql(query, limit=MATCHING, timeout=60.0)
        if found.truncated:
            raise InvalidData("where: too many match", expected=f"at most {MATCHING:,}")
        return [str(row[0]) for row in found.rows]

    def label_trajectories(
        self,
        ids: Sequence[str],
        *,
        add_tags: Sequence[str] = (),
        remove_tags: Sequence[str] = (),
        add_flags: Sequence[str] = (),
        remove_flags: Sequence[str] = (),
        protect: bool = False,
    ) -> int:
        """Add and remove labels of many trajectories; the number of those that changed.

        10,000 change together or not at all; more are sent in parts.
        """
        labels = {"add_tags": list(add_tags), "remove_tags": list(remove_tags)}
        labels |= {"add_flags": list(add_flags), "remove_flags": list(remove_flags)}
        changed = 0
        for start in range(0, len(ids), LABELLED_AT_ONCE):
            some = list(ids[start : start + LABELLED_AT_ONCE])
            body = request(messages.LabelTrajectories, ids=some, protect=protect, **labels)
            path = "/v1/trajectories/labels"
            answer = self.ask(messages.Labelled, "POST", path, body=body, idempotent=True)
            changed += answer.changed
        return changed

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
        """Run one SELECT on the service; docs/reference/sql.md lists tables and columns.

        `params` are the values of ? (a sequence) or $name (a mapping) placeholders. `dataset` is
        the dataset to which the unqualified table `steps` refers. The result has at most `limit`
        rows; `truncated` is True if there were more. The service cancels the query after `timeout`
        seconds. Raises `BadRequest` with the message of the database.
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
        """Return the tables and columns that are currently available in SQL."""
        return self.ask(messages.QuerySchema, "GET", "/v1/query/schema")

    def save_query(
        self,
        name: str,
        sql: str,
        *,
        description: str = "",
        params: Mapping[str, Any] | None = None,
        dataset: str | None = None,
    ) -> SavedQuery:
        """Keep a query under a name, for everybody, or replace it. `params`: values of its $name
        placeholders where a caller gives none. Raises `Unauthorized` if it is another token's."""
        values = {"sql": sql, "description": description, "params": dict(params or {})}
        body = request(messages.SaveQuery, **values, dataset=dataset)
        return self.ask(SavedQuery, "PUT", route("queries", name), body=body)

    def saved_queries(self) -> list[SavedQuery]:
        """Return all saved queries, newest first."""
        return self.items(SavedQuery, "/v1/queries")

    def saved_query(self, name: str) -> SavedQuery:
        """Return a saved query. Raises `NotFound`."""
        return self.ask(SavedQuery, "GET", route("queries", name))

    def delete_saved_query(self, name: str) -> None:
        """Delete a saved query, which only its owner or an admin may."""
        self.call("DELETE", route("queries", name), idempotent=False)

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

        Pass either `dataset`, or a version of it such as "hopper@v3" (and `where`, a SQL condition
        over `trajectories`), or `sources`, a mixture like
        [{"select": "SELECT id FROM trajectories WHERE …", "share": 0.8}, …].

        With `since`, the id of an earlier snapshot, `added` and `removed` count the changes since
        that snapshot. If nothing changed, the service returns the earlier snapshot itself (same
        `id`) and renews its lease for `holder`. `manifest(new.id, since=old.id)` returns only the
        rows that differ.
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
        # A repeated request creates a second snapshot of the same selection, which is harmless.
        seconds = max(self.timeout, 120.0)
        return self.ask(
            Snapshot, "POST", "/v1/snapshots", body=body, idempotent=True, timeout=seconds
        )

    def snapshot(self, snapshot_id: str) -> Snapshot:
        return self.ask(Snapshot, "GET", route("snapshots", snapshot_id))

    def snapshots(self) -> list[Snapshot]:
        return self.items(Snapshot, "/v1/snapshots")

    def manifest(self, snapshot_id: str, *, since: str | None = None) -> Any:
        """Return a pyarrow.Table with one row per selected trajectory, in a fixed order.

        Columns: id (16 bytes; `stepwell.manifest.id_texts` converts them to text), dataset, seq,
        component, weight, shard, traj_idx, row_start (row in the shard), length (T), first_step,
        return, terminated, truncated, final_obs_valid, env, content. Schema metadata contains the
        id and digest of the snapshot and the shares of its components. Raises `Gone`.

        With `since`, the id of another snapshot, returns only the changes from that snapshot, for
        `stepwell.manifest.apply(table of that snapshot, changes)`.
        """
        response = self.call(
            "GET",
            route("snapshots", snapshot_id, "manifest"),
            params=None if since is None else {"since": since},
            accept=ARROW,
        )
        return read_table(response.content, f"the manifest of {snapshot_id}")

    def lease(self, snapshot_id: str, holder: str = "", ttl: float = 120.0) -> messages.Lease:
        """Prevent deletion of anything in the snapshot for the next `ttl` seconds."""
        body = request(messages.PutLease, holder=holder, ttl=ttl)
        return self.ask(messages.Lease, "PUT", route("snapshots", snapshot_id, "lease"), body=body)

    def release(self, snapshot_id: str, holder: str = "") -> None:
        """End a lease before it expires."""
        self.call("DELETE", route("snapshots", snapshot_id, "lease"), params={"holder": holder})

    def download_shard(self, shard_id: str, path: str | Path, *, sha256: str | None = None) -> Path:
        """Stream a shard to `path` and verify its digest. Writes the whole file or nothing.

        The expected digest is `sha256`, or by default the ETag of the response. Raises `CodecError`
        if the digest differs, `Gone` if the shard has been deleted.
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

        Raises `Conflict` if the name exists; with exist_ok=True, the existing run is resumed.
        """
        body = request(messages.CreateRun, name=name, kind=kind, **fields)
        return self.ask(Run, "POST", "/v1/runs", body=body, idempotent=body.exist_ok)

    def run(self, name: str) -> Run:
        return self.ask(Run, "GET", route("runs", name))

    def runs(
        self, kind: str | None = None, status: str | None = None, *, where: str | None = None
    ) -> list[Run]:
        """Return all runs, newest first. `where`: as of `runs_page`."""
        return self.items(Run, "/v1/runs", kind=kind, status=status, where=where or None)

    def runs_page(
        self,
        *,
        kind: str | None = None,
        status: str | None = None,
        tag: str | None = None,
        parent: str | None = None,
        search: str | None = None,
        where: str | None = None,
        alive: bool | None = None,
        since: float | None = None,
        without_tag: str | None = None,
        names: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        brief: bool = False,
        limit: int = 100,
        cursor: str | None = None,
    ) -> RunPage:
        """Return one page of the runs that match, newest first, and the total number of matches.

        `search`: text in the name, the title or a tag. `where`: conditions over settings and newest
        metrics, such as `agent.discount = 0.99 and eval/return > 200`. `since`: last heartbeat at
        this Unix time or later. `names`: only these, at most 100. `keys`: newest metrics of these
        keys only, at most 100. `brief`: omit config, and newest metrics but those of `keys`.
        `cursor`: `next` of the previous page.
        """
        filters: dict[str, Any] = {"kind": kind, "status": status, "tag": tag, "parent": parent}
        filters |= {"search": search or None, "where": where or None, "cursor": cursor}
        filters |= {"without_tag": without_tag, "name": names, "key": keys}
        params = {**filters, "alive": alive, "since": since, "brief": brief, "limit": limit}
        return self.ask(RunPage, "GET", "/v1/runs", params=params)

    def patch_run(self, name: str, **fields: Any) -> Run:
        """Change `fields` of PatchRun. Without fields, the call is only a heartbeat of the run."""
        body = request(messages.PatchRun, **fields)
        # Every change is idempotent except appending to the log.
        return self.ask(Run, "PATCH", route("runs", name), body=body, idempotent=body.log is None)

    def delete_run(self, name: str) -> None:
        self.call("DELETE", route("runs", name))

    def log_metrics(self, run: str, points: Sequence[MetricPoint]) -> int:
        """Store metric points and return their number. An existing (key, step) is overwritten."""
        stored = 0
        for start in range(0, len(points), MAX_POINTS):
            body = request(messages.PostMetrics, points=points[start : start + MAX_POINTS])
            where = route("runs", run, "metrics")
            kind = messages.MetricsAccepted
            stored += self.ask(kind, "POST", where, body=body, idempotent=True).stored
        return stored

    def metrics(
        self,
        run: str,
        keys: Sequence[str] | None = None,
        points: int = 500,
        *,
        after: Sequence[int] | None = None,
    ) -> dict[str, Series]:
        """Return series by key, each down-sampled to about `points`. `keys` defaults to all keys.

        `after`: a step for each of `keys`; only points with a greater step are returned.
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
        """Return the log of a run as text."""
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
        """Publish the bytes of a policy file as the immutable run/version, and as `latest`.

        Safe to repeat with the same bytes; raises `Conflict` if the bytes differ.
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
        """Download a policy file by version or alias; return None if its ETag is still `etag`.

        Raises `NotFound`, or `CodecError` if the bytes do not match their digest.
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
        digest = _digest_of(response, f"policy {run}/{which}")
        version = response.headers.get("X-Stepwell-Version", "")
        if not version.isdigit():
            raise CodecError(
                f"policy {run}/{which} came without its version",
                expected="header X-Stepwell-Version",
                got=repr(version),
            )
        return DownloadedPolicy(response.content, int(version), digest, f'"{digest}"')

    def set_alias(self, run: str, alias: str, version: int) -> None:
        """Point `alias` (for instance "best") to a version. The service itself sets `latest`."""
        body = request(messages.PutAlias, version=version)
        self.call("PUT", route("runs", run, "aliases", alias), body=body)

    # --- evaluations ------------------------------------------------------------------------

    def create_evaluation(self, **fields: Any) -> Evaluation:
        """Record the scores of a policy; `fields` of CreateEvaluation."""
        body = request(messages.CreateEvaluation, **fields)
        return self.ask(Evaluation, "POST", "/v1/evaluations", body=body)

    def evaluations(
        self, env: str | None = None, run: str | None = None, policy: str | None = None
    ) -> list[Evaluation]:
        """Return the matching evaluations, newest first."""
        return self.items(Evaluation, "/v1/evaluations", env=env, run=run, policy=policy)

    def put_video(
        self,
        evaluation: str,
        seed: int,
        data: bytes,
        *,
        media_type: str,
        total_reward: float,
        length: int,
    ) -> Video:
        """Store a video of the episode of `seed` with an evaluation (its id).

        `media_type` is "video/mp4" or "image/gif". `total_reward` and `length` (steps) are those of
        the episode that the video shows. Safe to repeat; raises `Conflict` if the evaluation has
        another video of that seed.
        """
        return self.ask(
            Video,
            "PUT",
            route("evaluations", evaluation, "videos", int(seed)),
            params={"return": total_reward, "length": length},
            content=data,
            headers={"Content-Type": media_type},
        )

    def videos(self, evaluation: str) -> list[Video]:
        """Return the videos of an evaluation (its id), without their bytes."""
        return self.items(Video, route("evaluations", evaluation, "videos"))

    def video(self, evaluation: str, seed: int) -> bytes:
        """Return the bytes of a video.

        Raises `NotFound`, `Gone` if it is damaged, or `CodecError` if the bytes do not match their
        digest.
        """
        path = route("evaluations", evaluation, "videos", int(seed))
        response = self.call("GET", path, accept="*/*")
        _digest_of(response, f"the video of seed {seed} of {evaluation}")
        return response.content

    def delete_video(self, evaluation: str, seed: int) -> None:
        self.call("DELETE", route("evaluations", evaluation, "videos", int(seed)))

    # --- workers ----------------------------------------------------------------------------------

    def heartbeat(self, worker_id: str, **fields: Any) -> Worker:
        """Send a heartbeat of a worker; `command` of the response is the pending command.

        `fields` of PutWorker. The call is not retried, because the next heartbeat replaces it.
        """
        body = request(messages.PutWorker, **fields)
        once = self.with_options(retry_for=0.0)
        return once.ask(Worker, "PUT", route("workers", worker_id), body=body)

    def workers(self) -> list[Worker]:
        return self.items(Worker, "/v1/workers")

    def command(self, worker_id: str, command: str) -> Worker:
        """Send pause, resume, drain or stop. The worker receives it with its next heartbeat."""
        body = request(messages.PostCommand, command=command)
        where = route("workers", worker_id, "command")
        return self.ask(Worker, "POST", where, body=body, idempotent=True)

    def put_program(self, launcher: str, role: str, program: messages.Program) -> None:
        """Say what a launcher's program of this role can be told."""
        self.call("PUT", route("workers", launcher, "programs", role), body=program)

    def program(self, launcher: str, role: str) -> messages.Program:
        """What can be set when a launcher starts "train", "collect" or "evaluate"."""
        return self.ask(messages.Program, "GET", route("workers", launcher, "programs", role))

    # --- launches ---------------------------------------------------------------------------

    def create_launch(
        self,
        role: str,
        recipe: str = "",
        args: dict[str, Any] | None = None,
        count: int = 1,
    ) -> Launch:
        """Request `count` processes. A launcher on any machine claims and starts them."""
        body = request(
            messages.CreateLaunch, role=role, recipe=recipe, args=args or {}, count=count
        )
        return self.ask(Launch, "POST", "/v1/launches", body=body)

    def launches(self, *, role: str | None = None, state: str | None = None) -> list[Launch]:
        """Return launches, newest first, optionally filtered by role or state."""
        return self.items(Launch, "/v1/launches", role=role, state=state)

    def launch(self, launch_id: str) -> Launch:
        return self.ask(Launch, "GET", route("launches", launch_id))

    def launch_log(self, launch_id: str) -> str:
        """The end of the output of a launch's processes."""
        return self.call("GET", route("launches", launch_id, "log"), accept="text/plain").text

    def cancel_launch(self, launch_id: str) -> None:
        self.call("DELETE", route("launches", launch_id))

    def claim_launch(self, worker: str, roles: Sequence[str] = ROLES) -> Launch | None:
        """Claim the oldest waiting launch of these roles; return None if there is none."""
        body = request(messages.ClaimLaunch, worker=worker, roles=roles)
        return self.ask(messages.Claimed, "POST", "/v1/launches/claim", body=body).launch

    def patch_launch(self, launch_id: str, **fields: Any) -> Launch:
        """Report the state of a claimed launch; `fields` of PatchLaunch."""
        body = request(messages.PatchLaunch, **fields)
        return self.ask(Launch, "PATCH", route("launches", launch_id), body=body)

    # --- tokens -----------------------------------------------------------------------------

    def create_token(
        self,
        name: str,
        scopes: Sequence[str],
        expires_in: float | None = None,
        *,
        bytes_per_day: int | None = None,
        requests_per_minute: int | None = None,
    ) -> Token:
        """Create a token. Its secret, in `token`, is returned only by this call."""
        body = request(
            messages.CreateToken,
            name=name,
            scopes=scopes,
            expires_in=expires_in,
            bytes_per_day=bytes_per_day,
            requests_per_minute=requests_per_minute,
        )
        return self.ask(Token, "POST", "/v1/tokens", body=body)

    def change_token(self, token_id: str, **quotas: int | None) -> Token:
        """Set the quotas of a token: `bytes_per_day`, `requests_per_minute`; None takes one
        away."""
        try:
            body = messages.PatchToken(**quotas)
        except ValidationError as error:
            raise InvalidData(str(error.errors()[0]["msg"]), got=repr(quotas)) from None
        return self.ask(Token, "PATCH", route("tokens", token_id), body=body)

    def tokens(self) -> list[Token]:
        return self.items(Token, "/v1/tokens")

    def revoke_token(self, token_id: str) -> None:
        self.call("DELETE", route("tokens", token_id))

    def audit(
        self, *, limit: int = 100, cursor: str | None = None
    ) -> messages.Page[messages.AuditEntry]:
        """One page of what was changed by whom, newest first; needs the scope admin."""
        params = {"limit": limit, "cursor": cursor}
        return self.ask(messages.Page[messages.AuditEntry], "GET", "/v1/audit", params=params)


def groups(trajectories: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
    """Split into consecutive groups of about GROUP_BYTES."""
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
    """Return the ETag without its quotes, or "" if there is none."""
    return str(response.headers.get("ETag", "")).removeprefix("W/").strip('"')


def _digest_of(response: httpx2.Response, what: str) -> str:
    """The sha256 of the body. Raises `CodecError` if it is not the ETag."""
    promised, digest = etag_of(response), hashlib.sha256(response.content).hexdigest()
    if promised != digest:
        raise CodecError(f"{what} arrived damaged", expected=promised or "an ETag", got=digest)
    return digest


def _version_route(version: str) -> str:
    """The path of "dataset@name"."""
    dataset, name = messages.split_version(version)
    if not name:
        raise InvalidData("not a version", expected="DATASET@VERSION", got=repr(version))
    return route("datasets", dataset, "versions", name)
