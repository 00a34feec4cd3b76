"""Annotations: a critic's values of the steps of trajectories (docs/reference/annotations.md).

    values of some trajectories → DIR/annotations/<file>.parquet (immutable)
      → one transaction: the file, and which trajectories it annotates

A trajectory has one annotation of a name. Annotations can be made again, so a damaged file is given
up (integrity.py), and its trajectories count as not annotated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.annotation_rows import drop_annotations, insert_annotation
from server.index.db import Database, count_audit, find_pk, write_audit
from server.index.deleted_files import delete_given_up
from server.index.dialect import elements_sql
from server.index.tables import annotation_files, datasets
from server.problems import ProblemError, not_found
from server.storage.annotation_file import AnnotationHeader, write_annotation
from server.storage.store import Store
from stepwell.failpoints import failpoint
from stepwell.messages import AnnotateResult, Annotation, Page
from stepwell.step_values import VALUES

_LENGTHS = sa.text(
    f"SELECT t.id, t.length FROM {elements_sql('ids')} AS j"
    " CROSS JOIN trajectories AS t ON t.id = j.value"
    " WHERE t.dataset_pk = :dataset AND t.state <> 'evicted'"
)
_KNOWN = sa.text(
    f"SELECT a.trajectory FROM {elements_sql('ids')} AS j CROSS JOIN annotated AS a"
    " ON a.name = :name AND a.trajectory = j.value"
)


class Annotations:
    """Thread-safe."""

    def __init__(self, db: Database, store: Store):
        self._db, self._store = db, store
        self._lock = threading.Lock()
        """Held from the look-up of known trajectories to the insertion of the others."""

    def add(
        self, dataset: str, name: str, policy: str, values: pa.Table, caller: str = "local"
    ) -> AnnotateResult:
        """Store the values of trajectories that have none of this name, as stepwell/step_values.py
        has them.

        Raises 404, 409 (the name is another policy's), 422 (not one value per step).
        """
        ids = values["trajectory"].to_pylist()
        if len(set(ids)) < len(ids):
            raise _invalid("a trajectory occurs twice", "each id once", f"{len(ids)} ids")
        given = {"ids": orjson.dumps(ids).decode(), "name": name}
        with self._lock:
            with self._db.read() as c:
                pk = find_pk(c, datasets, dataset)
                _refuse_other_policy(c, pk, name, policy)
                rows = c.execute(_LENGTHS, {"ids": given["ids"], "dataset": pk})
                lengths = {row.id: row.length for row in rows}
                known = set(c.execute(_KNOWN, given).scalars())
            alive = [i for i, one in enumerate(ids) if one in lengths]
            _check_lengths(values, {i: lengths[ids[i]] for i in alive})
            fresh = [i for i in alive if ids[i] not in known]
            if fresh:
                chosen = values if len(fresh) == len(ids) else values.take(fresh)
                self._insert(dataset, pk, name, policy, chosen, caller)
        return AnnotateResult(
            stored=len(fresh), known=len(alive) - len(fresh), gone=len(ids) - len(alive)
        )

    def _insert(
        self, dataset: str, pk: int, name: str, policy: str, found: pa.Table, caller: str
    ) -> None:
        header = AnnotationHeader(
            dataset=dataset,
            name=name,
            policy=policy,
            trajectories=found.num_rows,
            steps=pc.sum(pc.list_value_length(found["q"])).as_py(),
            created_at=time.time(),
        )
        stored = write_annotation(self._store, header, found)
        try:
            with self._db.write() as c:
                if find_pk(c, datasets, dataset) != pk:
                    raise not_found("dataset", dataset)  # deleted, and created again
                insert_annotation(
                    c,
                    found["trajectory"].to_pylist(),
                    dataset_pk=pk,
                    **header.model_dump(exclude={"dataset"}),
                    **stored.columns,
                    verified_at=header.created_at,
                )
                counted = {"trajectories": header.trajectories, "steps": header.steps}
                count_audit(c, caller, "annotation.add", f"{dataset}/{name}", **counted)
                failpoint("annotation.before_commit")
        except BaseException:
            self._store.delete("annotations", stored.name)
            raise
        failpoint("annotation.after_commit")

    def page(self, dataset: str) -> Page[Annotation]:
        """One for each name, in alphabetical order."""
        a = annotation_files.c
        sums = (sa.func.sum(a[name]).label(name) for name in ("trajectories", "steps", "bytes"))
        query = sa.select(
            a.name,
            sa.func.min(a.policy).label("policy"),
            *sums,
            sa.func.min(a.created_at).label("created_at"),
        )
        with self._db.read() as c:
            mine = a.dataset_pk == find_pk(c, datasets, dataset)
            rows = c.execute(query.where(mine).group_by(a.name).order_by(a.name)).mappings().all()
        return Page[Annotation](items=[Annotation(dataset=dataset, **row) for row in rows])

    def delete(self, dataset: str, name: str, caller: str) -> None:
        """Raises 404."""
        a = annotation_files.c
        with self._lock, self._db.write() as c:
            mine = a.dataset_pk == find_pk(c, datasets, dataset)
            files = drop_annotations(c, sa.and_(mine, a.name == name))
            if not files:
                raise not_found("annotation", name[:200])
            write_audit(c, caller, "annotation.delete", dataset, name=name)
            failpoint("annotation.before_delete")
        failpoint("annotation.after_delete")
        delete_given_up(self._db, self._store)


def _refuse_other_policy(c: Connection, pk: int, name: str, given: str) -> None:
    a = annotation_files.c
    mine = sa.and_(a.dataset_pk == pk, a.name == name)
    policy = c.execute(sa.select(a.policy).where(mine).limit(1)).scalar()
    if policy not in (None, given):
        raise ProblemError(
            409,
            "conflict",
            f"the annotations {name!r} of this dataset are by another policy; choose another"
            " name, or delete them",
            expected=policy,
            got=given,
        )


def _check_lengths(found: pa.Table, expected: Mapping[int, int]) -> None:
    """`expected`: steps by row."""
    given = [pc.list_value_length(found[name]).to_pylist() for name in VALUES]
    for row, length in expected.items():
        lengths = {column[row] for column in given}
        if lengths != {length}:
            raise _invalid(
                f"the values of trajectory {found['trajectory'][row].as_py()}",
                f"{length} of each kind, one per step",
                ", ".join(map(str, sorted(lengths))),
            )


def _invalid(detail: str, expected: str, got: str) -> ProblemError:
    return ProblemError(422, "validation_error", detail, expected=expected, got=got)
