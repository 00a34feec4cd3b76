"""What a check is: a query for what is wrong, and how to say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stepwell._sql import literal, quoted
from stepwell.spaces import Box, EnvSpec, Space

Severity = Literal["error", "warning", "note"]
LEAVE_OUT = "leave out"
MOST_NUMBERS = 64
"""Of a step, that are looked at one by one."""


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
        ordered steps they look back to the last row of another trajectory."""
        return "()" if self.ordered else "(partition by trajectory_id order by t)"

    def numbers(self) -> list[tuple[str, str]]:
        """(name, SQL of a DOUBLE) of single numbers of an observation; images have none."""
        found = []
        for key, space in self.spec.observations.items():
            if self.spec.roles.get(key) != "mask" and not is_blob(space):
                found += _elements(f"obs.{quoted(key)}", key, space)
        return found[:MOST_NUMBERS]

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


def changes(s: Subject) -> str:
    """A FROM item: steps with |change| since the one before of each number, as d1, d2 …; without
    first steps."""
    columns = ", ".join(
        f"abs({sql} - lag({sql}) over {s.over}) as d{i}"
        for i, (_, sql) in enumerate(s.numbers(), 1)
    )
    return f"""(select * from (
  select trajectory_id as id, t, is_last, {columns} from {s.steps}) where t > 0)"""


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


def named(conditions: list[tuple[str, str]]) -> str:
    """SQL of the first name whose condition is true, else NULL."""
    cases = " ".join(f"when {condition} then {name}" for name, condition in conditions)
    return f"case {cases} end"


def is_blob(space: Space) -> bool:
    """Whether SQL has it as raw bytes."""
    return space.dtype == "uint8" and space.shape != ()


def _elements(column: str, name: str, space: Space) -> list[tuple[str, str]]:
    if space.shape == ():
        return [(name, f"cast({column} as double)")]
    size = 1
    for n in space.shape:
        size *= n
    return [
        (f"{name}[{i}]", f"cast({column}[{i + 1}] as double)")
        for i in range(min(size, MOST_NUMBERS))
    ]
