"""Restores versions of datasets from their files, for rebuild.py.

Before the trajectories are inserted, `protect` marks those of versions, so that no capacity evicts
them; afterwards `insert_versions` inserts the versions with the trajectories that still exist.
"""

from __future__ import annotations

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.dialect import elements_sql
from server.index.tables import datasets, versions
from server.maintenance.index_recovery import Recovered, set_aside
from server.storage.store import Store
from server.storage.version_file import VersionDamaged, VersionFile, read_version

_MEMBERS = sa.text(
    f"SELECT t.pk, t.id, t.digest FROM {elements_sql('ids')} AS j"
    " CROSS JOIN trajectories AS t ON t.id = j.value"
    " WHERE t.dataset_pk = :dataset AND t.state <> 'evicted'"
)
_INSERT = sa.text(
    f"INSERT INTO version_trajectories SELECT :version, value FROM {elements_sql('pks')}"
)


def protect(store: Store, recovered: Recovered) -> dict[str, VersionFile]:
    """Name → content of every readable file; its trajectories are labelled as protected."""
    found: dict[str, VersionFile] = {}
    for name in store.names("versions"):
        try:
            file = found[name] = read_version(store.source("versions", name))
        except VersionDamaged as error:
            recovered.lost.append(f"a version: {error}")
            continue
        for trajectory in file.members:
            labels = recovered.labels.get(trajectory, {})
            recovered.labels[trajectory] = labels | {"partition": "protected"}
    return found


def insert_versions(
    connection: Connection, store: Store, files: dict[str, VersionFile], recovered: Recovered
) -> int:
    """Insert the versions; files that are of no dataset, damaged or older than another of the same
    name are set aside. Returns the number inserted."""
    inserted: set[str] = set()
    known: set[tuple[str, str]] = set()
    for name, file in sorted(files.items(), reverse=True):  # the newest of a name wins
        header = file.header
        which = sa.select(datasets.c.pk).where(datasets.c.name == header.dataset)
        pk = connection.execute(which).scalar()
        if pk is None or (header.dataset, header.name) in known:
            continue
        known.add((header.dataset, header.name))
        ids = orjson.dumps(list(file.members)).decode()
        rows = connection.execute(_MEMBERS, {"ids": ids, "dataset": pk}).all()
        there = [row.pk for row in rows if file.members[row.id] == row.digest]
        missing = len(file.members) - len(there)
        stored = store.examine("versions", name)
        version = connection.execute(
            sa.insert(versions)
            .values(
                dataset_pk=pk,
                **header.model_dump(exclude={"dataset"}),
                missing=missing,
                **stored.columns,
            )
            .returning(versions.c.pk)
        ).scalar_one()
        pks = orjson.dumps(there).decode()
        connection.execute(_INSERT, {"version": version, "pks": pks})
        inserted.add(name)
        if missing:
            recovered.lost.append(
                f"{missing} of {len(file.members)} trajectories of version"
                f" {header.dataset}@{header.name}"
            )
    aside = [name for name in store.names("versions") if name not in inserted]
    set_aside(store, "versions", aside, "the dataset or the content", recovered)
    return len(inserted)
