"""Datasets for the write path: inserting a row, and cached specs and Arrow schemas."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.db import Database, next_dataset_pk, write_audit
from server.index.lost_rows import refuse_if_lost
from server.index.tables import datasets
from server.problems import ProblemError, not_found
from stepwell.messages import Capacity, CreateDataset
from stepwell.schema import arrow_schema
from stepwell.spaces import EnvSpec


@dataclass(frozen=True, slots=True)
class RegisteredDataset:
    """A dataset's spec never changes; its name refers to it until it is deleted."""

    pk: int
    name: str
    spec: EnvSpec
    spec_digest: str
    schema: pa.Schema


class DatasetRegistry:
    """A cache of datasets by name. Call `forget` when one is deleted."""

    def __init__(self, db: Database):
        self._db = db
        self._known: dict[str, RegisteredDataset] = {}

    def get(self, name: str) -> RegisteredDataset:
        """Raises 404."""
        found = self._known.get(name)
        if found is None:
            with self._db.read() as connection:
                row = connection.execute(
                    sa.select(datasets.c.pk, datasets.c.spec, datasets.c.spec_digest).where(
                        datasets.c.name == name
                    )
                ).one_or_none()
            if row is None:
                with self._db.read() as connection:
                    refuse_if_lost(connection, datasets, name)
                raise not_found("dataset", name)
            spec = EnvSpec.from_json(row.spec)
            found = RegisteredDataset(row.pk, name, spec, row.spec_digest, arrow_schema(spec))
            self._known[name] = found
        return found

    def forget(self, name: str) -> None:
        self._known.pop(name, None)


def insert_dataset(connection: Connection, body: CreateDataset, spec: EnvSpec, who: str) -> int:
    """Insert an empty dataset in the caller's transaction (an import creates it with its data).

    Returns its key. Raises 409 if the name is taken.
    """
    taken = connection.execute(
        sa.select(datasets.c.spec).where(datasets.c.name == body.name)
    ).scalar()
    if taken is not None:
        known = EnvSpec.from_json(taken)
        same = known.digest == spec.digest and known.other_names(spec) is None
        raise ProblemError(
            409,
            "dataset_exists",
            f"dataset {body.name!r} already exists, with "
            + ("the same layout" if same else "another layout"),
            expected="another name"
            + (", or exist_ok=True (--exist-ok) to use the dataset as it is" if same else ""),
        )
    refuse_if_lost(connection, datasets, body.name)
    pk = next_dataset_pk(connection)
    connection.execute(
        sa.insert(datasets).values(
            pk=pk,
            name=body.name,
            spec=spec.to_json(),
            spec_digest=spec.digest,
            description=body.description,
            tags=body.tags,
            created_at=time.time(),
            created_by=who,
            **capacity_columns(body.capacity),
        )
    )
    write_audit(connection, who, "dataset.create", body.name)
    return pk


def capacity_columns(capacity: Capacity) -> dict[str, int | None]:
    return {f"capacity_{what}": value for what, value in capacity.model_dump().items()}
