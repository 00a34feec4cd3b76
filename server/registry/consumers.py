"""Who samples from a dataset, and how far either side may go (routes/consumers.py)."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.engine import Connection, RowMapping

from server.index.db import (
    Database,
    count_audit,
    equal,
    find_pk,
    find_row,
    get_row,
    read_page,
    set_row,
    write_audit,
)
from server.index.tables import consumers, datasets
from server.problems import ProblemError
from stepwell.messages import Consumer, Page, PatchConsumer, PutConsumer, SampleRatio

ALIVE_SECONDS = 45.0
"""Uptime after which a consumer that does not report no longer makes collectors wait."""


def report(db: Database, name: str, consumer: str, body: PutConsumer, caller: str) -> Consumer:
    """Raises 404 for one that is not registered, if the body has no ratio."""
    with db.write() as c:
        pk = find_pk(c, datasets, name)
        mine = {"dataset_pk": pk, "name": consumer}
        row = find_row(c, consumers, **mine) if body.ratio else get_row(c, consumers, **mine)
        values: dict[str, Any] = {"samples": body.samples, **_seen(db)}
        ratio = body.ratio
        if ratio is not None and (
            row is None or ratio != _ratio(row) or body.samples < row["samples"]
        ):
            values |= _begin(c, pk, ratio, body.samples)
            _note_ratio(c, caller, name, consumer, ratio)
        else:
            count_audit(c, caller, "consumer.report", f"{name}/{consumer}")
        if row is None:
            c.execute(sa.insert(consumers).values(**mine, created_at=time.time(), **values))
        else:
            set_row(c, consumers, mine, **values)
        return _message(c, db, name, get_row(c, consumers, **mine))


def change(db: Database, name: str, consumer: str, body: PatchConsumer, caller: str) -> Consumer:
    """Change the ratio from here on. Raises 404, 422."""
    with db.write() as c:
        mine = {"dataset_pk": find_pk(c, datasets, name), "name": consumer}
        row = get_row(c, consumers, **mine)
        changes = body.model_dump(exclude_none=True)
        try:
            ratio = SampleRatio(**{**_ratio(row).model_dump(), **changes})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ProblemError(
                422,
                "validation_error",
                f"{where}: {first['msg']}".removeprefix(": "),
                got=repr(changes)[:200],
            ) from None
        if ratio != _ratio(row):
            set_row(c, consumers, mine, **_begin(c, row["dataset_pk"], ratio, row["samples"]))
            _note_ratio(c, caller, name, consumer, ratio)
        return _message(c, db, name, get_row(c, consumers, **mine))


def page(db: Database, name: str, limit: int, cursor: str | None) -> Page[Consumer]:
    """Sorted by name."""
    by = consumers.c.name
    with db.read() as c:
        query = sa.select(consumers).where(consumers.c.dataset_pk == find_pk(c, datasets, name))
        make = partial(_message, c, db, name)
        return read_page(c, Consumer, query, by, limit, cursor, ascending=True, make=make)


def delete(db: Database, name: str, consumer: str, caller: str) -> None:
    """Raises 404."""
    with db.write() as c:
        mine = {"dataset_pk": find_pk(c, datasets, name), "name": consumer}
        get_row(c, consumers, **mine)
        c.execute(sa.delete(consumers).where(*equal(consumers, **mine)))
        write_audit(c, caller, "consumer.delete", f"{name}/{consumer}")


def _note_ratio(c: Connection, who: str, dataset: str, consumer: str, ratio: SampleRatio) -> None:
    write_audit(c, who, "consumer.ratio", f"{dataset}/{consumer}", **ratio.model_dump())


def _begin(c: Connection, dataset_pk: int, ratio: SampleRatio, samples: int) -> dict[str, Any]:
    """The columns of a ratio that holds from now on, with neither side ahead."""
    inserted = _inserted(c, dataset_pk)
    begun = inserted - min(inserted, ratio.min_size)
    return {
        **ratio.model_dump(),
        "base": begun - samples / ratio.samples_per_insert,
        "min_base": begun - samples / ratio.least,
    }


def _inserted(c: Connection, dataset_pk: int) -> int:
    query = sa.select(datasets.c.inserted_steps).where(datasets.c.pk == dataset_pk)
    return int(c.execute(query).scalar_one())


def _seen(db: Database) -> dict[str, float]:
    return {"updated_at": time.time(), "updated_uptime": db.uptime()}


def _ratio(row: RowMapping) -> SampleRatio:
    return SampleRatio(**{name: row[name] for name in SampleRatio.model_fields})


def limits(row: dict[str, Any], samples: int, inserted: int) -> tuple[int, int]:
    """`samples_until` and `inserts_until` of a consumer that has drawn `samples`."""
    per_insert, min_size, buffer = row["samples_per_insert"], row["min_size"], row["buffer"]
    begun, full = row["base"] + min_size, inserted >= min_size
    samples_until = math.floor((inserted - begun) * per_insert + buffer) if full else 0
    if (low := row["min_samples_per_insert"]) is not None:
        begun, per_insert = row["min_base"] + min_size, low
    inserts_until = math.ceil(begun + (samples + buffer) / per_insert)
    # Integers that every JSON parser represents exactly.
    return min(max(0, samples_until), 2**53), min(max(min_size, inserts_until), 2**53)


def _message(c: Connection, db: Database, dataset: str, row: RowMapping) -> Consumer:
    samples, inserted = row["samples"], _inserted(c, row["dataset_pk"])
    samples_until, inserts_until = limits(dict(row), samples, inserted)
    return Consumer(
        dataset=dataset,
        name=row["name"],
        ratio=_ratio(row),
        samples=samples,
        inserted=inserted,
        samples_until=samples_until,
        inserts_until=inserts_until,
        may_sample=samples < samples_until,
        may_insert=inserted < inserts_until,
        alive=db.uptime() - row["updated_uptime"] < ALIVE_SECONDS,
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
