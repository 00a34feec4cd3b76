"""What a check is: a query for what is wrong, and how to say it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from stepwell._sql import literal, quoted
from stepwell.spaces import Box, EnvSpec, Space

Severity = Literal["error", "warning", "note"]
LEAVE_OUT = "leave out"
MOST_NUMBERS = 512
"""Maximum number per step that are checked one by one; the report says if there are more."""
NUMBERS_AT_ONCE = 32
"""Values checked in one query, whose memory grows with their number."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A dataset under examination."""

    name: str
    spec: EnvSpec
    chosen: str = ""
    """A condition over `trajectories`, such as that of a version; empty: all of the dataset."""
    one_in: int = 1
    """Steps of one in so many trajectories are read."""
    part: int = 0
    """Which of these parts, from 0."""
    row_count: int = 0
    """Steps that are read, about."""
    ordered: bool = False
    """Whether `steps` comes trajectory by trajectory, each by t, as the service writes it. Then a
    query looks back by a row without sorting, which the memory of a query allows for any size."""
    only: tuple[int, int] | None = None
    """Which numbers of an observation are read, from and to; None: all."""

    @property
    def trajectories(self) -> str:
        """A FROM item: its living trajectories."""
        return "chosen" if self.chosen else self.all_trajectories

    @property
    def all_trajectories(self) -> str:
        """A FROM item: those of the dataset, also where a part of it is examined."""
        return f"(select * from trajectories where dataset = {literal(self.name)})"

    @property
    def steps(self) -> str:
        """A FROM item: the steps that are read."""
        return self._steps("trajectory_id in (select id from chosen)")

    @property
    def steps_and_eval(self) -> str:
        """The same, with those of all evaluation episodes of the dataset."""
        evaluated = f"select id from {self.all_trajectories} where purpose = 'eval'"
        return self._steps(f"trajectory_id in (select id from chosen union all {evaluated})")

    @property
    def steps_table(self) -> str:
        return f"{quoted(self.name)}.steps"

    def _steps(self, chosen: str) -> str:
        sampled = f"hash(trajectory_id) % {self.one_in} = {self.part}"
        conditions = [chosen] * bool(self.chosen) + [sampled] * (self.one_in > 1)
        where = f" where {' and '.join(conditions)}" if conditions else ""
        return f"(select * from {self.steps_table}{where})"

    def scoped(self, query: str) -> str:
        """A query of a check with the table `chosen`, where a part of the dataset is examined."""
        if not self.chosen:
            return query
        # On its own line, as it may end with a comment.
        head = f"""with chosen as not materialized (
  select * from trajectories where dataset = {literal(self.name)} and (
{self.chosen}
))"""
        if query.startswith("with "):
            return f"{head},\n{query.removeprefix('with ')}"
        return f"{head}\n{query}"

    @property
    def over(self) -> str:
        """The window of a trajectory's steps. Values of its first row are not to be used: in
        ordered steps they look back to the last row of another trajectory. It is over all of
        `steps`: after a further filter DuckDB's `lag over ()` returned values of wrong rows."""
        return "()" if self.ordered else "(partition by trajectory_id order by t)"

    def vectors(self) -> list[tuple[str, Space, int]]:
        """(key, space, how many of its numbers are looked at) of an observation; images have no
        numbers."""
        found, left = [], MOST_NUMBERS
        for key, space in self.spec.observations.items():
            if self.spec.roles.get(key) != "mask" and not is_blob(space):
                found.append((key, space, min(size_of(space), left)))
                left -= found[-1][2]
        return found

    def numbers(self) -> list[tuple[str, str]]:
        """(name, SQL of a DOUBLE in `numbered`) of single numbers of an observation."""
        found = []
        for key, space, first, last in self._slices():
            column = quoted(f"_{key}")
            if space.shape == ():
                found.append((key, column))
            else:
                found += [(f"{key}[{i}]", f"{column}[{i - first + 1}]") for i in range(first, last)]
        return found

    @property
    def numbered(self) -> str:
        """A FROM item: the steps that are read, with columns for the numbers, and o and a, the
        hashes of observation and action. Of vectors the columns are short: to read an element takes
        time and memory for all of its vector. A query looks back at a hash, not at images."""
        columns = []
        for key, space, first, last in self._slices():
            column = f"obs.{quoted(key)}"
            if space.shape == ():
                columns.append(f"cast({column} as double) as {quoted(f'_{key}')}")
            else:
                part = f"[{first + 1}:{last}]" if last - first < size_of(space) else ""
                columns.append(f"({column}::double[]){part} as {quoted(f'_{key}')}")
        head = ["trajectory_id", "t", "is_last", "reward", "hash(obs) as o", "hash(action) as a"]
        columns = [*head, *columns]
        return f"(select {', '.join(columns)} from {self.steps})"

    def _slices(self) -> list[tuple[str, Space, int, int]]:
        """(key, space, from, to): which elements of a vector are read."""
        found, before = [], 0
        low, high = self.only or (0, MOST_NUMBERS)
        for key, space, count in self.vectors():
            first, last = max(0, low - before), min(count, high - before)
            if first < last:
                found.append((key, space, first, last))
            before += count
        return found

    def groups(self) -> list[Subject]:
        """The same with a few numbers each: as many in one as in another, or one more."""
        count = len(self.numbers())
        parts = -(-count // NUMBERS_AT_ONCE)
        bounds = [count * i // parts for i in range(parts + 1)] if parts > 1 else []
        groups = [replace(self, only=bound) for bound in pairwise(bounds)]
        return groups or [self]

    def halves(self) -> list[Subject]:
        """The same with half of its numbers each; empty, if that is less than two."""
        count = len(self.numbers())
        if count < 4:
            return []
        first, last = self.only or (0, count)
        bounds = (first, first + count // 2, last)
        return [replace(self, only=bound) for bound in pairwise(bounds)]

    def has_floats(self) -> bool:
        """Whether observations are real numbers or images, which hardly ever repeat by chance."""
        return any(
            is_blob(space) or (isinstance(space, Box) and space.dtype.startswith("float"))
            for space in self.spec.observations.values()
        )

    def actions(self) -> list[tuple[str, str, Space]]:
        """(name, SQL, space) of each action."""
        if list(self.spec.actions) == ["action"]:
            return [("action", "action", self.spec.actions["action"])]
        return [(key, f"action.{quoted(key)}", space) for key, space in self.spec.actions.items()]


def action_numbers(name: str, sql: str, space: Space) -> list[tuple[str, str]]:
    """(name, SQL of a DOUBLE) of the numbers of an action, at most `MOST_NUMBERS`."""
    if space.shape == ():
        return [(name, f"cast({sql} as double)")]
    count = min(size_of(space), MOST_NUMBERS)
    return [(f"{name}[{i}]", f"cast({sql}[{i + 1}] as double)") for i in range(count)]


def changes(s: Subject) -> str:
    """A FROM item: steps with |change| since the one before of each number, as d1, d2 …, and its
    value, as x1, x2 …; without first steps."""
    columns = ", ".join(
        f"abs({sql} - lag({sql}) over {s.over}) as d{i}, {sql} as x{i}"
        for i, (_, sql) in enumerate(s.numbers(), 1)
    )
    return f"""(select * from (
  select trajectory_id as id, t, is_last, o <> lag(o) over {s.over} as changed,
    {columns} from {s.numbered}) where t > 0)"""


def hashed(s: Subject, steps: str = "") -> str:
    """A common table: the steps with o, a and r, the hashes of observation, action and reward.
    Images are read once, for which a query has just enough memory; of other data there may be too
    many steps to keep their hashes."""
    kept = "materialized" if images(s) else "not materialized"
    return f"""hashed as {kept} (
  select trajectory_id, t, is_last, hash(obs) as o, hash(action) as a, hash(reward) as r
  from {steps or s.steps})"""


def each_number(s: Subject) -> str:
    """A FROM item: key, i (from 0; NULL for a number that is no element) and value, for every
    number of every step: the memory for it does not grow with the numbers."""
    parts = []
    for key, space, count in s.vectors():
        column, name = f"obs.{quoted(key)}", literal(key)
        if space.shape == ():
            parts.append(f"select {name} as key, null as i, cast({column} as double) as value "
                         f"from {s.steps}")  # fmt: skip
        else:
            parts.append(f"""select {name} as key, i - 1 as i, value from (
  select generate_subscripts({column}, 1) as i, unnest({column}::double[]) as value
  from {s.steps}) where i <= {count}""")
    return f"({' union all '.join(parts)})"


Query = Callable[[Subject], str | None]
"""The SQL of a check: rows of (id, what) for each trajectory that is concerned, or one row with
NULL as id for the whole dataset. None: the check does not apply to these spaces."""


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of defect."""

    kind: str
    severity: Severity
    says: str
    """In plain words; `{n}` stands for how many trajectories, `{what}` for the first one's."""
    query: Query
    repair: str = LEAVE_OUT
    """A version without them, or a sentence."""
    in_groups: bool = False
    """Whether it is asked for a few numbers of the observation at a time (`Subject.groups`)."""


def named(conditions: list[tuple[str, str]]) -> str:
    """SQL of the first name whose condition is true, else NULL."""
    cases = " ".join(f"when {condition} then {name}" for name, condition in conditions)
    return f"case {cases} end"


def is_blob(space: Space) -> bool:
    """Whether SQL has it as raw bytes."""
    return space.dtype == "uint8" and space.shape != ()


def images(s: Subject) -> list[tuple[str, Space]]:
    """(key, space) of what an observation has as raw bytes."""
    return [(k, space) for k, space in s.spec.observations.items() if is_blob(space)]


def size_of(space: Space) -> int:
    """How many numbers it has."""
    return math.prod(space.shape)
