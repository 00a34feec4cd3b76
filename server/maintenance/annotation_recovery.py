"""Restores annotations from their files, for rebuild.py."""

from __future__ import annotations

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.annotation_rows import insert_annotation
from server.index.dialect import elements_sql
from server.index.tables import datasets
from server.maintenance.index_recovery import Recovered, set_aside
from server.storage.annotation_file import AnnotationDamaged, read_annotation
from server.storage.store import Store

_TAKEN = sa.text(
    f"SELECT count(*) FROM {elements_sql('ids')} AS j CROSS JOIN annotated AS a"
    " ON a.name = :name AND a.trajectory = j.value"
)


def insert_annotations(connection: Connection, store: Store, recovered: Recovered) -> int:
    """Insert the files that can be read; returns their number. Others are set aside, and those of
    no dataset, or of trajectories that a newer file annotates under the same name."""
    aside: list[str] = []
    names = store.names("annotations")
    for name in reversed(names):
        try:
            file = read_annotation(store.source("annotations", name))
        except AnnotationDamaged:
            aside.append(name)
            continue
        header = file.header
        which = sa.select(datasets.c.pk).where(datasets.c.name == header.dataset)
        pk = connection.execute(which).scalar()
        ids = orjson.dumps(file.trajectories).decode()
        taken = connection.execute(_TAKEN, {"ids": ids, "name": header.name}).scalar_one()
        if pk is None or taken:
            aside.append(name)
            continue
        stored = store.examine("annotations", name)
        insert_annotation(
            connection,
            file.trajectories,
            dataset_pk=pk,
            **header.model_dump(exclude={"dataset"}),
            **stored.columns,
        )
    set_aside(store, "annotations", sorted(aside), "the dataset or the content", recovered)
    return len(names) - len(aside)
