"""Datasets, trajectories into and out of them, uploads and jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepwell import messages
from stepwell._client.transport import Transport, as_service_error, request, segment
from stepwell.codec import decode, encode
from stepwell.errors import CodecError, Conflict, InvalidData, JobFailed
from stepwell.messages import ARROW, Dataset, IngestItem, IngestResult, Job
from stepwell.spaces import EnvSpec
from stepwell.trajectory import Trajectory

GROUP_BYTES = 16 << 20
CHUNK = 1 << 20
FORMATS = {".hdf5": "d4rl", ".h5": "d4rl", ".npz": "npz"}
CONTENT_TYPES = {"d4rl": "application/x-hdf5", "npz": "application/x-npz"}
JOB_ENDS = ("succeeded", "failed", "cancelled")


class Datasets(Transport):
    """Part of `Client`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._specs: dict[str, EnvSpec] = {}
        self._specs_lock = threading.Lock()

    # --- datasets ---------------------------------------------------------------------------

    def create_dataset(
        self,
        name: str,
        spec: EnvSpec,
        *,
        capacity: messages.Capacity | Mapping[str, int] | None = None,
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
            capacity=dict(capacity) if isinstance(capacity, Mapping) else capacity,
            description=description or None,
            tags=list(tags) or None,
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
        pages = self.pages(messages.DatasetPage, "/v1/datasets")
        return [dataset for page in pages for dataset in page.items]

    def dataset(self, name: str) -> Dataset:
        """One dataset with its numbers. Raises `NotFound`."""
        return self.ask(Dataset, "GET", _dataset(name))

    def spec(self, name: str) -> EnvSpec:
        """The EnvSpec of a dataset, asked for once and remembered."""
        with self._specs_lock:
            known = self._specs.get(name)
        return known or self._remember(name, self.dataset(name))

    def _remember(self, name: str, dataset: Dataset) -> EnvSpec:
        spec = EnvSpec.from_json(dataset.spec)
        with self._specs_lock:
            self._specs[name] = spec
        return spec

    def patch_dataset(
        self,
        name: str,
        *,
        capacity: messages.Capacity | Mapping[str, int | None] | None = None,
        description: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> Dataset:
        """Change what is given; a new `capacity` replaces the old one whole and works at once."""
        body = request(
            messages.PatchDataset,
            capacity=dict(capacity) if isinstance(capacity, Mapping) else capacity,
            description=description,
            tags=None if tags is None else list(tags),
        )
        return self.ask(Dataset, "PATCH", _dataset(name), body=body)

    def delete_dataset(self, name: str) -> None:
        """Remove a dataset. Raises `Conflict` while protected trajectories are in it."""
        self.call("DELETE", _dataset(name), idempotent=False)
        with self._specs_lock:
            self._specs.pop(name, None)

    def flush(self, name: str) -> messages.FlushResult:
        """Seal now: whatever was acknowledged before is in SQL `steps` afterwards."""
        return self.ask(
            messages.FlushResult,
            "POST",
            f"{_dataset(name)}/flush",
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
        retry: bool = True,
    ) -> IngestResult:
        """Store trajectories; returns once they are durable, with one item for each, in order.

        Safe to repeat: ids make it exactly once. An item may be `refused` or `conflict`; that does
        not raise and does not stop the others. Large sequences travel in several bodies of about
        16 MB; an error then leaves earlier ones stored. Raises `InvalidTrajectory` before
        anything is sent where one does not fit `spec` (default: the dataset's). `retry`=False
        makes one attempt, for whoever tries again by himself.
        """
        trajectories = list(trajectories)
        if not trajectories:
            raise InvalidData("nothing to post", expected="at least one trajectory", got="none")
        spec = spec or self.spec(dataset)
        params = {"partition": partition, "wait": "sealed" if wait_sealed else None}
        for trajectory in trajectories:
            trajectory.check(spec)
        results = [
            self.ask(
                IngestResult,
                "POST",
                f"{_dataset(dataset)}/trajectories",
                params=params,
                content=encode(group, spec),
                headers={"Content-Type": ARROW},
                idempotent=True,
                retry=retry,
                timeout=max(self.timeout, 120.0) if wait_sealed else None,
            )
            for group in groups(trajectories)
        ]
        items = [item for result in results for item in result.items]
        return results[-1].model_copy(update={"items": items})

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
        """Store one trajectory given as plain lists or arrays (see `Trajectory.of`).

            client.add("my-data", obs=o, actions=a, rewards=r, terminated=True, env="Maze-v1")

        obs [T+1, …] (or [T, …] where the last is unknown), actions [T, …], rewards [T]. Raises
        `InvalidTrajectory`, or `BadRequest` / `Conflict` where the service refuses it.
        """
        spec = self.spec(dataset)
        metadata.setdefault("env", spec.env)
        trajectory = Trajectory.of(
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
            f"{_dataset(dataset)}/imports",
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
        return self.ask(Job, "GET", f"/v1/jobs/{segment(job_id)}")

    def jobs(self) -> list[Job]:
        """All jobs the service remembers, newest first."""
        pages = self.pages(messages.JobPage, "/v1/jobs")
        return [job for page in pages for job in page.items]

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
        self.call("DELETE", f"/v1/jobs/{segment(job_id)}")

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
        tag: str | None = None,
        order: str = "-seq",
        limit: int = 100,
        cursor: str | None = None,
    ) -> messages.TrajectoryPage:
        """One page of the index; `order` is a column, with - for descending."""
        return self.ask(
            messages.TrajectoryPage,
            "GET",
            f"{_dataset(dataset)}/trajectories",
            params={
                "partition": partition,
                "env": env,
                "policy": policy,
                "run": run,
                "purpose": purpose,
                "tag": tag,
                "order": order,
                "limit": limit,
                "cursor": cursor,
            },
        )

    def trajectory(self, trajectory_id: str) -> messages.TrajectoryInfo:
        """What the index knows of one trajectory. Raises `NotFound`, or `Gone` if evicted."""
        return self.ask(messages.TrajectoryInfo, "GET", _trajectory(trajectory_id))

    def steps(self, trajectory_id: str) -> Trajectory:
        """One whole trajectory, bit by bit as it was posted."""
        response = self.call("GET", f"{_trajectory(trajectory_id)}/steps", accept=ARROW)
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
            messages.PatchTrajectory,
            tags=None if tags is None else list(tags),
            flags=None if flags is None else list(flags),
            notes=notes,
            partition=partition,
        )
        return self.ask(messages.TrajectoryInfo, "PATCH", _trajectory(trajectory_id), body=body)


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


def _dataset(name: str) -> str:
    return f"/v1/datasets/{segment(name)}"


def _trajectory(trajectory_id: str) -> str:
    return f"/v1/trajectories/{segment(trajectory_id)}"


def _chunks(path: Path, size: int, progress: Callable[[int, int], None] | None) -> Iterator[bytes]:
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk
            done += len(chunk)
            if progress is not None:
                progress(done, size)
