"""Imports of offline datasets: upload a file, run a job, and store everything or nothing of it.

    POST … /imports → uploads/<upload> (streamed, counted, hashed, fsynced) → 202 and a job
      → child parses (parser.py, sandboxed) → validated like a POST → shards not yet in the index
      → one transaction makes all of it visible (ingest/bulk_insert.py) → the upload is deleted

A file is recognised by its content: uploading it again stores nothing twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from starlette.concurrency import run_in_threadpool

from server.body_memory import STREAM_CHUNK
from server.imports.jobs import JobContext, Jobs
from server.imports.parser_process import frames
from server.imports.raw_file import ImportOptions
from server.index.db import Database
from server.ingest.bulk_insert import BulkInsert, check_room, sweep_pending
from server.ingest.dataset_registry import DatasetRegistry, RegisteredDataset, insert_dataset
from server.ingest.validate import ValidTrajectory, read_body
from server.problems import ProblemError
from server.settings import Settings
from server.storage.store import Store, new_name
from stepwell.errors import InvalidData
from stepwell.failpoints import failpoint
from stepwell.messages import FORMATS, PARTIALLY_OBSERVABLE, CreateDataset, Job
from stepwell.schema import arrow_schema
from stepwell.spaces import EnvSpec

log = structlog.get_logger("stepwell.imports")
FOLDER, SUFFIX = "uploads", ".part"
MAX_ROWS = 200_000_000
"""Most transitions in one file."""
_PARSE_SHARE = 0.9
"""Parsing's share of the progress bar; the rest is the commit."""


class Imports:
    """Receives uploads and runs import jobs."""

    def __init__(
        self, settings: Settings, db: Database, store: Store, registry: DatasetRegistry, jobs: Jobs
    ):
        self._settings, self._db, self._store = settings, db, store
        self._registry, self._jobs = registry, jobs
        self._sweep()

    def _sweep(self) -> None:
        """Remove remains of the last process: uncommitted shards, unfinished uploads."""
        removed = sweep_pending(self._db, self._store)
        for name in self._store.names(FOLDER):
            if name.endswith(SUFFIX):
                self._store.delete(FOLDER, name)
                removed += 1
        if removed:
            log.info("remains of imports removed", files=removed)

    def check(self, options: ImportOptions, may_create: bool = True) -> None:
        """Before the body is read: raise 404 if the dataset is missing and not to be created."""
        try:
            self._registry.get(options.dataset)
        except ProblemError as error:
            if not options.create:
                if may_create:
                    error.detail += "; add create=true to create it from the file"
                raise
            CreateDataset(name=options.dataset, spec={})

    async def receive(self, body: AsyncIterator[bytes]) -> tuple[str, str, int]:
        """Stream a body to disk; returns (upload, sha256, size). Removes the file on failure."""
        upload = new_name("up", SUFFIX)
        sha, pending, complete = hashlib.sha256(), bytearray(), False
        file = await run_in_threadpool(self._store.append_to, FOLDER, upload)

        def write() -> None:
            nonlocal pending
            check_room(self._settings, self._store)
            sha.update(pending)
            file.append(memoryview(pending))
            pending = bytearray()

        try:
            async for chunk in body:
                pending += chunk
                if (size := file.size + len(pending)) > self._settings.max_upload:
                    raise ProblemError(
                        413,
                        "body_too_large",
                        "the upload is larger than the limit (STEPWELL_MAX_UPLOAD)",
                        expected=f"at most {self._settings.max_upload} bytes",
                        got=f"{size} bytes or more",
                    )
                if len(pending) >= STREAM_CHUNK:
                    await run_in_threadpool(write)
            await run_in_threadpool(write)
            await run_in_threadpool(file.sync)
            if not file.size:
                raise ProblemError(
                    422,
                    "import_refused",
                    "the body is empty",
                    expected="the file's bytes (curl -T FILE -X POST …)",
                    got="0 bytes",
                )
            complete = True
        except OSError as error:
            raise ProblemError(
                507, "storage_full", "the upload could not be stored", got=error.strerror
            ) from None
        finally:
            file.close()
            if not complete:
                self._store.delete(FOLDER, upload)
        return upload, sha.hexdigest(), file.size

    def submit(
        self, options: ImportOptions, upload: str, sha256: str, size: int, who: str = "local"
    ) -> Job:
        """Queue the job that imports an upload; `who` owns it."""
        options = replace(options, sha256=sha256, size=size)
        payload = {"upload": upload, **asdict(options)}
        work = partial(self._run, options, upload, who)
        try:
            return self._jobs.submit("import", work, payload, "waiting for a free thread", who=who)
        except BaseException:
            self._store.delete(FOLDER, upload)
            raise

    # --- the job, in order of execution ---------------------------------------------------------

    def _run(
        self, options: ImportOptions, upload: str, who: str, context: JobContext
    ) -> dict[str, Any]:
        try:
            # The child process that parses it may open this path and nothing else.
            path = self._store.local_path(FOLDER, upload)
            return self._import(options, path, who, context)
        except OSError as error:
            log.error(
                "an import could not be written and was undone: free disk space",
                error=str(error),
            )
            raise ProblemError(
                507,
                "storage_full",
                "the disk is full; nothing was stored: free disk space and upload again",
                got=error.strerror,
            ) from None
        finally:
            self._store.delete(FOLDER, upload)

    def _import(
        self, options: ImportOptions, path: Path, who: str, context: JobContext
    ) -> dict[str, Any]:
        context.report(0.0, "reading the file")
        existing = self._existing(options)
        stream = frames(
            path,
            self._child_request(options, existing),
            self._store.scratch,
            seconds=self._settings.import_seconds,
            resident=self._settings.import_memory,
            check=context.check,
        )
        plan, _ = next(stream)
        spec, steps, count = _plan_of(plan)
        dataset = existing or RegisteredDataset(
            0, options.dataset, spec, spec.digest, arrow_schema(spec)
        )
        bulk = BulkInsert(
            self._settings, self._db, self._store, dataset, options.partition, count, who
        )
        try:
            done = 0
            for header, payload in stream:
                items = list(read_body(payload, dataset))
                if header.get("kind") != "data" or not all(
                    isinstance(item, ValidTrajectory) for item in items
                ):
                    raise _foreign()
                checked = [item for item in items if isinstance(item, ValidTrajectory)]
                bulk.add(checked)
                done += sum(len(item.trajectory) for item in checked)
                context.report(_PARSE_SHARE * done / steps, f"{done:,} of {steps:,} steps read")
                del payload, items, checked  # before the next is read
            if done != steps:
                raise _foreign()
            failpoint("import.after_parse")
            context.report(_PARSE_SHARE, "storing")
            metadata = plan.get("metadata") or {}
            if plan.get("format") in FORMATS:  # recognised by its content
                options = replace(options, format=plan["format"])
            stored = bulk.commit(None if existing else self._creator(options, spec, metadata, who))
        except BaseException:
            bulk.abandon()
            raise
        finally:
            stream.close()
        result: dict[str, Any] = {
            "dataset": options.dataset,
            "format": options.format,
            "partition": options.partition,
            "trajectories": stored.stored,
            "steps": stored.steps,
            "duplicates": stored.duplicates,
            "evicted": stored.evicted,
            "sha256": options.sha256,
            "created": existing is None,
            "warnings": [str(w)[:1000] for w in plan.get("warnings", [])],
            "infos_left_out": _texts(plan.get("dropped")),
            "metadata": metadata,
        }
        if stored.duplicates and not stored.stored:
            result["warnings"].append("this file was imported before: nothing new was stored")
        return result

    def _existing(self, options: ImportOptions) -> RegisteredDataset | None:
        try:
            return self._registry.get(options.dataset)
        except ProblemError:
            if not options.create:
                raise
            return None

    def _child_request(
        self, options: ImportOptions, existing: RegisteredDataset | None
    ) -> dict[str, Any]:
        spec = existing.spec if existing else None
        env = options.env or (spec.env if spec else "")
        return {
            "memory": self._settings.import_memory,
            "seconds": self._settings.import_seconds,
            "max_rows": MAX_ROWS,
            "options": asdict(options) | {"env": env, "spec": spec.to_json() if spec else None},
        }

    def _creator(
        self, options: ImportOptions, spec: EnvSpec, metadata: dict[str, Any], who: str
    ) -> Any:
        described = ", ".join(f"{k}={v}" for k, v in metadata.items() if "/" not in k)
        text = f"Imported ({options.format}){': ' + described if described else ''}"[:4096]
        tags = [options.format]
        if metadata.get("partially_observable") in (1, "1", "true", "True"):
            tags.append(PARTIALLY_OBSERVABLE)
        body = CreateDataset(name=options.dataset, spec=spec.to_json(), description=text, tags=tags)
        return lambda connection: insert_dataset(connection, body, spec, who)


def _plan_of(header: dict[str, Any]) -> tuple[EnvSpec, int, int]:
    """(spec, steps, trajectories) from the child; validated, because the child is untrusted."""
    try:
        spec = EnvSpec.from_json(header["spec"])
        steps, count = int(header["steps"]), int(header["trajectories"])
    except (KeyError, TypeError, ValueError, InvalidData):
        raise _foreign() from None
    if header.get("kind") != "plan" or not 1 <= count <= steps:
        raise _foreign()
    return spec, steps, count


def _texts(found: Any) -> dict[str, str]:
    """The child's messages about single infos; ignores anything else."""
    items = found.items() if isinstance(found, dict) else ()
    return {str(k)[:200]: str(v)[:200] for k, v in list(items)[:100]}


def _foreign() -> ProblemError:
    return ProblemError(
        422, "import_refused", "the file was read with an invalid result; it is probably damaged"
    )
