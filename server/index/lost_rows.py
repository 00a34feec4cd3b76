"""The rows of the index that were damaged and are left out, from the table `lost_rows`.

maintenance/index_repair.py fills it on startup; what referred to a lost row `pk` refers to `-pk`.
Until `stepwell fsck --rebuild` every answer says what it may lack: a header on each, `excluded`
where the format has it, and what is not found only because its row is lost is `index_damaged`.
Nothing is deleted until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.tables import lost_rows, trajectories
from server.problems import index_damaged

FILE = "index.sqlite"
HEADER = "Stepwell-Index-Damaged"
_PARENTS = {
    "trajectories": ("datasets", "shards"),
    "versions": ("datasets",),
    "version_trajectories": ("versions", "datasets", "trajectories"),
    "annotations": ("annotated", "datasets", "trajectories"),
    "consumers": ("datasets",),
    "datasets": ("partition_stats",),
    "steps": ("trajectories", "datasets", "shards"),
    "snapshots": ("snapshot_shards", "leases"),
    "metrics": ("runs",),
    "policies": ("runs", "policy_aliases"),
    "videos": ("evaluations",),
}
"""Table or kind of route → tables without whose rows its own rows are not shown."""


@dataclass(frozen=True, slots=True)
class LostRow:
    table: str
    name: str
    """Its public id or name: that of a policy is run/version; "" if it has none."""
    dataset: str
    """The dataset to which it belongs, or which it is."""
    trajectories: int
    """Trajectories that are left out because of it."""


@dataclass(frozen=True, slots=True)
class LostRows:
    rows: tuple[LostRow, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)

    def of(self, *tables: str) -> list[LostRow]:
        return [row for row in self.rows if row.table in tables]

    def summary(self) -> str:
        """For example: 1 of trajectories (kitchen), 2 of runs (demo, eval)"""
        named: dict[str, list[str]] = {}
        for row in self.rows:
            named.setdefault(row.table, []).append(row.dataset or row.name)
        return ", ".join(
            f"{len(names)} of {table}" + _in_brackets(sorted({*names} - {""}))
            for table, names in sorted(named.items())
        )

    def sentence(self) -> str:
        """For people: what is lost, and what to do."""
        return (
            f"rows of the index are damaged and left out: {self.summary()}; nothing is deleted"
            " until it is rebuilt: stop the service, run stepwell fsck --rebuild --data DIR"
        )

    def header(self) -> str:
        return self.summary().encode("ascii", "replace").decode()[:500]

    def excluded(self, table: str) -> list[tuple[str, str, int]]:
        """(dataset, file, trajectories) of what is missing from a table of the SQL surface."""
        found: Counter[tuple[str, str]] = Counter()
        for row in self.of(table, *_PARENTS.get(table, ())):
            what = "" if row.dataset else f" ({row.table}{': ' if row.name else ''}{row.name})"
            found[row.dataset, FILE + what] += row.trajectories
        return [(dataset, file, count) for (dataset, file), count in sorted(found.items())]

    def hides(self, path: str) -> bool:
        """Whether what a route does not find may be a lost row, or in one."""
        parts = path.strip("/").split("/")
        for kind in parts:
            for row in self.of(kind.replace("-", "_"), *_PARENTS.get(kind, ())):
                inside = row.table != kind and row.table != "partition_stats"
                names = {row.name, row.dataset, row.name.rpartition("/")[0]} - {""}
                if not names or inside or names & set(parts):
                    return True
        return False


NOTHING_LOST = LostRows()


def _in_brackets(names: list[str]) -> str:
    return f" ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})" if names else ""


def read_lost_rows(connection: Connection) -> LostRows:
    """All of them; the trajectories of a lost dataset are counted."""
    t = trajectories.c
    found = []
    for row in connection.execute(sa.select(lost_rows).order_by(lost_rows.c.pk)):
        count = int(row.table_name == "trajectories")
        if row.table_name in ("datasets", "shards"):
            key = t.dataset_pk if row.table_name == "datasets" else t.shard_pk
            alive = sa.select(sa.func.count()).where(key == -_number(row.key), t.state != "evicted")
            count = connection.execute(alive).scalar_one()
        found.append(LostRow(row.table_name, row.name, row.dataset, count))
    return LostRows(tuple(found))


def _number(key: str) -> int:
    text = key.strip("[]")
    return int(text) if text.isdecimal() else 0


def refuse_if_lost(connection: Connection, table: sa.Table, name: str) -> None:
    """Raise `index_damaged` if a row of that name is lost: it is there again after a rebuild."""
    lost = sa.select(sa.true()).where(
        lost_rows.c.table_name == table.name, lost_rows.c.name.in_((name, ""))
    )
    if connection.execute(lost.limit(1)).scalar():
        raise index_damaged(
            f"{table.name}: the row of {name!r} in the index is damaged, so it cannot be made anew;"
            " stop the service and run: stepwell fsck --rebuild --data DIR"
        )


def as_documents(found: Iterable[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """Convert to the form of `messages.Excluded`."""
    return [{"dataset": d, "file": f, "trajectories": n} for d, f, n in found]
