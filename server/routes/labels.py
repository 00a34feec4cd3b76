"""Labels of many trajectories at once: all of them change, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import sqlalchemy as sa
from fastapi import APIRouter
from sqlalchemy.engine import Connection

from server.index.db import next_change_id, write_audit
from server.index.tables import trajectories
from server.ingest.index_rows import chunks
from server.routes.trajectories import get_row, recount
from server.service import Caller, ServiceDep
from stepwell.messages import Labelled, LabelTrajectories

_NAME = sa.text("SELECT name FROM datasets WHERE pk = :pk")

router = APIRouter(prefix="/v1", tags=["trajectories"])


@router.post("/trajectories/labels")
def label_trajectories(service: ServiceDep, body: LabelTrajectories, caller: Caller) -> Labelled:
    """Add and remove tags and flags of up to 10,000 trajectories, and protect them."""
    with service.db.write() as connection:
        rows = _rows(connection, body.ids)
        change_id, changed = next_change_id(connection), []
        datasets: Counter[int] = Counter()
        for row in rows:
            values = _labels(row, body)
            if body.protect and row["partition"] == "fifo":
                values["partition"] = "protected"
                recount(connection, row, "protected")
            kept = {name: row[name] for name in ("tags", "flags", "partition")}
            if kept | values != kept:
                changed.append({**kept, **values, "key": row["pk"], "change": change_id})
                datasets[row["dataset_pk"]] += 1
        if changed:
            names = ("tags", "flags", "partition")
            connection.execute(
                sa.update(trajectories)
                .where(trajectories.c.pk == sa.bindparam("key"))
                .values(change_id=sa.bindparam("change"), **{n: sa.bindparam(n) for n in names}),
                changed,
            )
        labels = body.model_dump(exclude={"ids"}, exclude_defaults=True)
        for pk, count in datasets.items():
            name = connection.execute(_NAME, {"pk": pk}).scalar_one()
            write_audit(
                connection, caller, "trajectories.label", name, trajectories=count, **labels
            )
    return Labelled(changed=len(changed))


def _rows(connection: Connection, ids: Sequence[str]) -> list[Mapping[str, Any]]:
    """Their rows. Raises 404 or 410 for the first that is not there."""
    t = trajectories.c
    found: dict[str, Mapping[str, Any]] = {}
    for some in chunks(ids):
        statement = sa.select(trajectories).where(t.id.in_(some), t.state != "evicted")
        found |= {row["id"]: row for row in connection.execute(statement).mappings()}
    for one in ids:
        if one not in found:
            get_row(connection, one)
    return list(found.values())


def _labels(row: Mapping[str, Any], body: LabelTrajectories) -> dict[str, str]:
    """Columns with the new labels: without the removed ones, then the added ones."""
    values = {}
    for name, add, remove in (
        ("tags", body.add_tags, body.remove_tags),
        ("flags", body.add_flags, body.remove_flags),
    ):
        now = orjson.loads(row[name])
        labels = list(dict.fromkeys([*(x for x in now if x not in remove), *add]))
        if labels != now:
            values[name] = orjson.dumps(labels).decode()
    return values
