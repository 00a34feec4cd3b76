"""Rows of policies and videos from their descriptions, and descriptions from their rows.

A policy without a description, of an earlier version, may name its run and version itself: those of
`stepwell train` do, in their header.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.engine import Connection, RowMapping

from server.index.db import Database, find_row
from server.index.tables import evaluations, policies, runs, videos
from server.storage.descriptions import FOLDER, describe, description_of, name_of
from server.storage.store import Store
from stepwell.messages import CreateEvaluation, CreateRun

LONGEST_HEADER = 100_000_000
MAX_NUMBER = 2**53
RUN = ("name", "kind", "config", "parent", "seed", "git_commit", "snapshots", "tags")
EVALUATION = tuple(column.name for column in evaluations.c if column.name != "pk")
EPISODE = ("return", "length", "media_type")


def policy_description(
    connection: Connection, run: str, version: int, metadata: dict[str, Any], created_at: float
) -> dict[str, Any]:
    """Raises nothing for an unknown run: its policy is refused later."""
    columns = [runs.c[name] for name in RUN]
    row = connection.execute(sa.select(*columns).where(runs.c.name == run)).mappings().first()
    return {
        "run": _plain(row or {"name": run, "kind": "train"}),
        "version": version,
        "metadata": metadata,
        "created_at": created_at,
    }


def video_description(
    connection: Connection, evaluation: str, seed: int, episode: dict[str, Any], created_at: float
) -> dict[str, Any]:
    columns = [evaluations.c[name] for name in EVALUATION]
    found = sa.select(*columns).where(evaluations.c.id == evaluation)
    row = connection.execute(found).mappings().first()
    return {
        "evaluation": _plain(row or {"id": evaluation}),
        "seed": seed,
        **{name: episode[name] for name in EPISODE},
        "created_at": created_at,
    }


def _plain(row: RowMapping | dict[str, Any]) -> dict[str, Any]:
    """With names that are plain texts, as orjson wants."""
    return {str(name): value for name, value in row.items()}


def describe_undescribed(db: Database, store: Store) -> int:
    """Describe the files that have a row and no description; returns their number."""
    there, count = set(store.names(FOLDER)), 0
    with db.read() as connection:
        for table, of, description in (
            (policies, runs.c.name, _of_policy),
            (videos, evaluations.c.id, _of_video),
        ):
            query = sa.select(table, of.label("of")).join(of.table)
            for row in connection.execute(query).mappings().all():
                if name_of(row["file"]) not in there:
                    describe(store, row["file"], row["sha256"], description(connection, row))
                    count += 1
    return count


def _of_policy(connection: Connection, row: RowMapping) -> dict[str, Any]:
    given = (row["of"], row["version"], row["metadata"], row["created_at"])
    return policy_description(connection, *given)


def _of_video(connection: Connection, row: RowMapping) -> dict[str, Any]:
    return video_description(connection, row["of"], row["seed"], dict(row), row["created_at"])


def add_policy(connection: Connection, store: Store, name: str, counts: dict[str, int]) -> bool:
    """Insert the policy of a file that says which it is, and its run if missing; returns whether
    the policy exists now."""
    file = store.examine("policies", name)
    said = description_of(store, name, file.sha256) or _trainers_description(store, name)
    if said is None:
        return False
    try:
        run = CreateRun.model_validate(said["run"])
        version, metadata = int(said["version"]), dict(said["metadata"])
    except (KeyError, ValueError, TypeError):
        return False
    made = float(said.get("created_at", store.modified_at("policies", name)))
    which = {"run_pk": _run_pk(connection, run, made, counts), "version": version}
    columns = {"step": metadata.get("step"), "metadata": metadata, **file.columns}
    return _insert(connection, policies, which, made, columns, counts)


def _insert(
    connection: Connection,
    table: sa.Table,
    which: dict[str, Any],
    made: float,
    columns: dict[str, Any],
    counts: dict[str, int],
) -> bool:
    """Insert the row of a file; returns False if another file is `which` already."""
    if find_row(connection, table, **which) is not None:
        return False
    values = {**which, **columns, "created_at": made, "verified_at": made}
    connection.execute(sa.insert(table).values(values))
    counts[table.name] += 1
    return True


def _run_pk(connection: Connection, run: CreateRun, made: float, counts: dict[str, int]) -> int:
    r = runs.c
    pk = connection.execute(sa.select(r.pk).where(r.name == run.name)).scalar()
    if pk is None:
        values = {
            **run.model_dump(exclude={"exist_ok"}),
            "status": "stopped",
            "notes": "rebuilt from its policy files",
            "created_at": made,
            "heartbeat_at": made,
            "finished_at": made,
        }
        pk = connection.execute(sa.insert(runs).values(values).returning(r.pk)).scalar_one()
        counts["runs"] += 1
    return int(pk)


def add_video(connection: Connection, store: Store, name: str, counts: dict[str, int]) -> bool:
    """Insert the video of a file that says which it is, and its evaluation if missing; returns
    whether the video exists now."""
    file = store.examine("videos", name)
    said = description_of(store, name, file.sha256)
    if said is None:
        return False
    try:
        given = said["evaluation"]
        evaluation = {key: given[key] for key in EVALUATION if key in given}
        fields = CreateEvaluation.model_fields.keys() & evaluation.keys()
        CreateEvaluation.model_validate({key: evaluation[key] for key in fields})
        episode = {key: said[key] for key in EPISODE}
        seed, made = int(said["seed"]), float(said["created_at"])
    except (KeyError, ValueError, TypeError, ValidationError):
        return False
    e = evaluations.c
    pk = connection.execute(sa.select(e.pk).where(e.id == evaluation["id"])).scalar()
    if pk is None:
        made_row = sa.insert(evaluations).values(evaluation).returning(e.pk)
        pk = connection.execute(made_row).scalar_one()
        counts["evaluations"] += 1
    which = {"evaluation_pk": pk, "seed": seed}
    return _insert(connection, videos, which, made, {**episode, **file.columns}, counts)


def _trainers_description(store: Store, name: str) -> dict[str, Any] | None:
    """From the header of a policy file of `stepwell train` (safetensors); None for other files."""
    try:
        with store.source("policies", name).open() as file:
            size = int.from_bytes(file.read(8), "little")
            if size > min(LONGEST_HEADER, store.size("policies", name)):
                return None
            document = json.loads(json.loads(file.read(size))["__metadata__"]["policy"])
        step, extra = document["step"], document["extra"]
        if not (type(step) is int and 0 <= step <= MAX_NUMBER and isinstance(extra, dict)):
            return None
        said = {key: extra[key] for key in ("run", "snapshot", "git_commit") if key in extra}
        run = {
            "name": extra["run"],
            "kind": "train",
            "config": extra.get("training") or {},
            "git_commit": extra.get("git_commit") or "",
            "snapshots": [extra["snapshot"]] if extra.get("snapshot") else [],
        }
        return {"run": run, "version": step, "metadata": {**said, "step": step}}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
