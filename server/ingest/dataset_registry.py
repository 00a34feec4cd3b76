"""The datasets as the write path needs them: spec and Arrow schema, parsed once."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass

import pyarrow as pa
import sqlalchemy as sa

from server.index.db import Database
from server.index.tables import datasets
from server.problems import not_found
from stepwell.schema import arrow_schema
from stepwell.spaces import EnvSpec


@dataclass(frozen=True, slots=True)
class RegisteredDataset:
    """A dataset's spec never changes; its name is bound to it until it is deleted."""

    pk: int
    name: str
    spec: EnvSpec
    spec_digest: str
    schema: pa.Schema


class DatasetRegistry:
    """Datasets by name, remembered. `forget` when one is deleted."""

    def __init__(self, db: Database):
        self._db = db
        self._known: dict[str, RegisteredDataset] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> RegisteredDataset:
        """Raises 404."""
        with self._lock:
            found = self._known.get(name)
        if found is None:
            with self._db.read() as connection:
                row = connection.execute(
                    sa.select(datasets.c.pk, datasets.c.spec, datasets.c.spec_digest).where(
                        datasets.c.name == name
                    )
                ).one_or_none()
            if row is None:
                raise not_found("dataset", name)
            spec = EnvSpec.from_json(json.loads(row.spec))
            found = RegisteredDataset(row.pk, name, spec, row.spec_digest, arrow_schema(spec))
            with self._lock:
                self._known[name] = found
        return found

    def forget(self, name: str) -> None:
        with self._lock:
            self._known.pop(name, None)
