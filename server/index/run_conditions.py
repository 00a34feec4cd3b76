"""Conditions over the settings and metrics of runs: `agent.discount = 0.99 and eval/return > 200`.

A name is a setting of the config, or else a metric, of which the newest value counts.
"""

from __future__ import annotations

import difflib
import operator
import re
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from server.index.dialect import json_kind, json_value
from server.index.tables import metrics, runs
from server.problems import ProblemError
from stepwell._settings import flatten

EXPECTED = "conditions like: agent.discount = 0.99 and eval/return > 200"
MOST = 20
"""Conditions in one list."""
_CONDITION = re.compile(
    r"""\s*(?:"(?P<quoted>[^"]+)"|(?P<name>[^\s<>=!,"']+))
        \s*(?P<operator>==|=|!=|<>|<=|>=|<|>)
        \s*(?P<value>'(?:[^']|'')*'|"[^"]*"|[^\s<>=!,"']+)
        \s*(?:,|\band\b|$)""",
    re.VERBOSE | re.IGNORECASE,
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_OPERATORS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SAME = {"==": "=", "<>": "!="}
_SAMPLE = 20
"""Newest runs whose names are proposed in place of one that no run has."""

# Keys of a run's metrics. Seeks in the primary key: as many as there are keys, however many points.
KEYS = """
    WITH RECURSIVE keys(key) AS (
        SELECT min(key) FROM metrics WHERE run_pk = :run
        UNION ALL
        SELECT (SELECT min(m.key) FROM metrics m WHERE m.run_pk = :run AND m.key > keys.key)
        FROM keys WHERE keys.key IS NOT NULL
    )
"""
METRICS = sa.text(f"{KEYS} SELECT key FROM keys WHERE key IS NOT NULL")


@dataclass(frozen=True, slots=True)
class Condition:
    name: str
    operator: str
    value: float | bool | str

    def sql(self) -> sa.ColumnElement[bool]:
        """Whether it is true of a row of `runs`; never of one that has no such value."""
        compare = _OPERATORS[self.operator]
        newest = (
            sa.select(metrics.c.value)
            .where(metrics.c.run_pk == runs.c.pk, metrics.c.key == self.name)
            .order_by(metrics.c.step.desc())
            .limit(1)
            .correlate(runs)
            .scalar_subquery()
        )
        number = isinstance(self.value, float)
        of_metric = compare(newest, self.value) if number else sa.false()
        own = [self._of_setting(keys) for keys in self._keys()]
        return sa.or_(*own, sa.and_(sa.not_(self.is_setting()), of_metric))

    def is_setting(self) -> sa.ColumnElement[bool]:
        return sa.or_(*(_kind(keys).is_not(None) for keys in self._keys()))

    def is_metric(self) -> sa.ColumnElement[bool]:
        mine = sa.and_(metrics.c.run_pk == runs.c.pk, metrics.c.key == self.name)
        return sa.exists(sa.select(1).select_from(metrics).where(mine)).correlate(runs)

    def _of_setting(self, keys: tuple[str, ...]) -> sa.ColumnElement[bool]:
        """A setting of another type than the value differs from it, and is not more or less."""
        kinds, value = ["text"], self.value
        if isinstance(value, bool):
            kinds, value = ["true", "false"], int(value)
        elif isinstance(value, float):
            kinds = ["integer", "real"]
        found = json_value(runs.c.config, *keys)
        if self.operator == "!=":
            same = sa.and_(_kind(keys).in_(kinds), found == value)
            return sa.and_(_kind(keys).is_not(None), sa.not_(same))
        return sa.and_(_kind(keys).in_(kinds), _OPERATORS[self.operator](found, value))

    def _keys(self) -> list[tuple[str, ...]]:
        """In tables within tables, and as one key with dots."""
        return list(dict.fromkeys([tuple(self.name.split(".")), (self.name,)]))


def _kind(keys: tuple[str, ...]) -> sa.ColumnElement[Any]:
    return json_kind(runs.c.config, *keys)


def parse(text: str) -> list[Condition]:
    """Conditions that are joined by `and` or commas. Raises `ProblemError` (422)."""
    found: list[Condition] = []
    place = 0
    while place < len(text.rstrip()):
        match = _CONDITION.match(text, place)
        if match is None:
            raise _wrong(f"cannot read {text[place:].strip()!r}", text)
        found.append(_condition(match, text))
        place = match.end()
    if not found or len(found) > MOST:
        raise _wrong(f"there are {len(found)} conditions; 1 to {MOST} are allowed", text)
    return found


def _condition(match: re.Match[str], text: str) -> Condition:
    name = match["quoted"] or match["name"]
    sign = _SAME.get(match["operator"], match["operator"])
    value = _value(match["value"])
    if sign not in ("=", "!=") and not isinstance(value, float):
        raise _wrong(f"{sign} compares numbers, and {match['value']} is none", text)
    return Condition(name, sign, value)


def _value(word: str) -> float | bool | str:
    if word[0] in "'\"":
        return word[1:-1].replace("''", "'") if word[0] == "'" else word[1:-1]
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    return float(word) if _NUMBER.fullmatch(word) else word


def _wrong(why: str, text: str) -> ProblemError:
    return ProblemError(422, "validation_error", f"where: {why}", expected=EXPECTED, got=text)


def check_names(c: Connection, conditions: list[Condition]) -> None:
    """Raises `ProblemError` (422) for a name that no run has: it is misspelt, not rare."""
    if c.execute(sa.select(runs.c.pk).limit(1)).first() is None:
        return
    for one in conditions:
        having = sa.select(runs.c.pk).where(sa.or_(one.is_setting(), one.is_metric())).limit(1)
        if c.execute(having).first() is None:
            raise ProblemError(
                422,
                "validation_error",
                f"where: no run has a setting or a metric {one.name!r}",
                expected=_like(c, one.name),
                got=one.name,
            )


def _like(c: Connection, name: str) -> str:
    """Names of the newest runs that are like this one."""
    newest = sa.select(runs.c.pk, runs.c.config).order_by(runs.c.pk.desc()).limit(_SAMPLE)
    known: set[str] = set()
    for pk, config in c.execute(newest).all():
        known |= flatten(config).keys()
        known |= {*c.execute(METRICS, {"run": pk}).scalars()}
    last = re.split(r"[./]", name.lower())[-1]
    same = sorted(one for one in known if re.split(r"[./]", one.lower())[-1] == last)
    near = same[:3] or difflib.get_close_matches(name, known, n=3)
    return f"for example {' or '.join(near)}" if near else "the whole name, as in the config"
