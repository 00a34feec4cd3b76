"""The rows of files of annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.deleted_files import give_up_files
from server.index.dialect import elements_sql
from server.index.tables import annotated, annotation_files

_INSERT = sa.text(f"INSERT INTO annotated SELECT :name, value, :pk FROM {elements_sql('ids')}")


def insert_annotation(c: Connection, annotates: Sequence[str], **columns: Any) -> None:
    """Insert a file, and the ids of the trajectories that it annotates."""
    pk = c.execute(
        sa.insert(annotation_files).values(**columns).returning(annotation_files.c.pk)
    ).scalar_one()
    ids = orjson.dumps(annotates).decode()
    c.execute(_INSERT, {"name": columns["name"], "pk": pk, "ids": ids})


def drop_annotations(c: Connection, which: sa.ColumnElement[bool] | sa.TextClause) -> list[str]:
    """Delete the rows of some files, and give the files up; returns them."""
    a = annotation_files.c
    rows = c.execute(sa.select(a.pk, a.file).where(which)).all()
    for row in rows:
        c.execute(sa.delete(annotated).where(annotated.c.annotation_pk == row.pk))
        c.execute(sa.delete(annotation_files).where(a.pk == row.pk))
    files = [row.file for row in rows]
    give_up_files(c, "annotations", files)
    return files
