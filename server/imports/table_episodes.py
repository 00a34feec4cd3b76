"""Rows of a table → episodes (episodes.py: Episodes). Untrusted: runs only in the sandbox.

    one row a step       episodes by the columns `episode`, else by flags, else one of each file
                         (episode_ids.py, ends.py); in an episode by `step`, else in the order of
                         the file
    one row an episode   where `reward` is a list in each row; observations have T or T+1 elements

The last observation is that of `next_observation`, or of T+1 elements; else it is unknown, and the
one before is repeated. The last row tells how an episode ended; without a flag it was cut off.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from server.imports.column_map import FILE, USUAL, ColumnMap, Columns, element_names
from server.imports.ends import (
    ROLES,
    blank,
    check_final,
    check_inside,
    check_rlds,
    cure_of_step_type,
    jumps,
    out_of_order,
    read_flags,
    said_blank,
    split_by_flags,
    terminated_at,
    warn_of_both,
    warn_of_done,
    warn_of_final_rows,
)
from server.imports.episode_ids import Split, split_by_ids
from server.imports.episodes import About, Declared, Episodes, Layout, Leaf
from server.imports.images import JPEG, PNG, pixels
from server.imports.parquet_table import (
    Table,
    as_numbers,
    as_scalars,
    image_bytes,
    is_list,
    kind_of,
)
from server.imports.raw_file import (
    Array,
    ImportOptions,
    ImportRefused,
    as_flags,
    why_dropped,
)
from stepwell._wording import pluralize, shown
from stepwell.spaces import Discrete
from stepwell.trajectory import TrajectoryMetadata

BLOCK = 1 << 16
BOUNDARIES = 100
"""Ends of episodes that show whether next observations are the shifted rows."""


class TableEpisodes(Episodes):
    """Raises `ImportRefused`."""

    own: tuple[str, ...] = ()
    """Columns of the format itself, of which nobody need be told that they are not read."""

    def __init__(self, table: Table, columns: ColumnMap, options: ImportOptions, memory: int):
        self.table, self.columns, self._memory = table, columns, memory
        self.layout = Layout()
        self._leaves: dict[str, Columns] = {}
        for role in ("observation", "action"):
            if not columns.arrays[role]:
                raise missing(role, table)
        reward = columns.one("reward")
        if reward is None and not any(o.startswith("reward=") for o in options.columns):
            raise missing("reward", table)
        if reward is None:
            listed = _lists_of_actions(table, columns)
        else:
            listed = reward if _is_nested(table, columns, reward) else None
        self._nested = listed is not None
        self._rows_of = np.arange(table.rows)
        """Where rows are episodes, that of each."""
        if listed is not None:
            lengths = self._lengths(listed)
            self._ends = np.cumsum(lengths.astype(np.int64)) - 1
            self._names = [str(number) for number in self.table.file_order(0, len(lengths))]
        else:
            self._split()
        self._starts = np.concatenate([[0], self._ends[:-1] + 1])
        self._steps = int(self._ends[-1]) + 1
        self._flags = read_flags(columns, self._steps_of)
        if self._nested:
            self._check_nested_flags()
        elif columns.episode:
            check_inside(self._flags, columns, Split(self._ends, self._names))
        self._terminated = terminated_at(self._flags, self._ends)
        warn_of_both(self._flags, self._ends, self.layout.warnings)
        self._extra = self._omit_final_rows()
        unread = self._unread()
        self._successes = self._success()
        self.layout.warnings[:0] = [*columns.taken(), *unread]
        warn_of_done(self._flags, columns, self.layout.warnings)
        self._rewards = np.zeros(self._steps) if reward is None else self._steps_of(reward)
        if reward is None:
            self.layout.warnings.append("there is no reward: all are 0")
        lengths = self._ends - self._starts + 1
        self.layout.episodes = [(i, int(steps)) for i, steps in enumerate(lengths)]
        self._find_leaves(options)
        self._final = self._final_known()
        self._whole = self._has_final_rows()
        if not self._final and not self._whole.all():
            some = bool(self._whole.any())
            count = int(np.count_nonzero(~self._whole))
            of = f" of {pluralize(count, 'trajectory', 'trajectories')}" if some else ""
            self.layout.warnings.append(f"final observations{of} are unknown (no next_observation)")

    def _omit_final_rows(self) -> int:
        """Rows after each episode with its final observation: 1 in RLDS's tables, else 0."""
        if not self.columns.is_rlds:
            return 0
        reward = self.columns.one("reward")
        rewards = None if reward is None else self._steps_of(reward)
        acted = [
            self._read(names, "numbers", number)
            for names in self.columns.arrays["action"].values()
            if kind_of(self._type(names[0])) == "numbers"
            for number in range(len(self._ends))
        ]
        every = [array[:1] for array in acted]
        every += [] if rewards is None else [rewards[self._starts]]
        check_rlds(every, (array[-1:] for array in acted))
        warn_of_final_rows(self._flags, rewards, self._ends, self.layout.warnings)
        kept = self._ends > self._starts
        self._starts, self._ends = self._starts[kept], self._ends[kept] - 1
        self._terminated = self._terminated[kept]
        self._rows_of = self._rows_of[: len(kept)][kept]
        self._names = [name for name, has in zip(self._names, kept, strict=True) if has]
        self.layout.skipped = int((~kept).sum())
        self.layout.episodes = [(0, 1)] * int(kept.sum())
        self.layout.check_skipped()
        return 1

    # --- what episodes.py asks for ----------------------------------------------------------------

    def declared(self, what: str) -> Mapping[str, Declared]:
        """Classes of Hugging Face's features are a Discrete."""
        found: dict[str, Declared] = {}
        for key, columns in self.columns.arrays[what].items():
            feature = self.table.features.get(columns[0]) if len(columns) == 1 else None
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
                names = feature.get("names")
                if isinstance(names, list) and names:
                    found[key] = Discrete(len(names))
        return found

    def rows(self, number: int, leaf: Leaf) -> Array:
        columns, role = self._leaves[leaf.path], leaf.path.partition("/")[0]
        extra = self._extra if role != "action" else 0
        array = self._read(columns, leaf.kind, number, extra)
        steps = self.layout.episodes[number][1]
        if role == "action" and self._nested and self._extra:
            array = array[:-1]
        nested = self._nested and role == "observation"
        whole = (nested or extra > 0) and len(array) == steps + 1
        if len(array) != steps and not whole:
            raise ImportRefused(
                f"episode {self._names[number]}/{leaf.path} has the wrong length",
                expected=steps,
                got=len(array),
            )
        if role == "action" or whole:
            return array
        last = array[-1:]
        if role == "observation" and self._final:
            last = self._last(leaf, number)
            given = self.columns.arrays["next_observation"].get(leaf.path.partition("/")[2])
            if given:  # LeRobot's are in a table of their own
                check_final(given[0], last, f"episode {self._names[number]}")
        return np.concatenate([array, last])

    def about(self, number: int) -> About:
        start, end = int(self._starts[number]), int(self._ends[number])
        terminated, success = bool(self._terminated[number]), self._successes
        return About(
            name=f"episode {self._names[number]}"[:200],
            rewards=self._rewards[start : end + 1],
            terminated=terminated,
            truncated=not terminated,
            final_obs_valid=self._final or bool(self._whole[number]),
            rows=None if self._nested else self.table.file_order(start, end + 1),
            metadata=TrajectoryMetadata(success=None if success is None else bool(success[end])),
        )

    # --- episodes ---------------------------------------------------------------------------------

    def _split(self) -> None:
        """Finds the episodes of a table with one row a step, and puts its rows in their order."""
        table, columns, warnings = self.table, self.columns, self.layout.warnings
        flags = {} if columns.episode else read_flags(columns, table.numbers_of)
        if not columns.episode and not flags and len(table.file_rows) > 1:
            columns.keys = (FILE,)
            warnings.append("no column tells episodes apart: each file is one")
        if columns.episode:
            has_flags = any(columns.one(role) for role in ROLES)
            split = split_by_ids(table, columns, warnings, lengths=not has_flags)
            if split.order is not None:
                table.sort(split.order)
            self._ends, self._names = split.ends, split.names
            return
        if not flags:
            raise missing("episode (or terminated, truncated, done, first)", table)
        self._ends = np.flatnonzero(split_by_flags(flags, table, columns, warnings))
        self._names = [str(number) for number in range(len(self._ends))]

    def _lengths(self, column: str) -> NDArray[np.int64]:
        """Steps of each row, by a column of lists; rows without any are left out."""
        listed = self.table.whole(column)
        if listed.null_count:
            raise ImportRefused(
                f"column {column[:100]} has empty cells",
                expected="a list of steps in each row",
                got=f"row {pc.index(listed.is_null(), True).as_py()}",
            )
        lengths = pc.list_value_length(listed).to_numpy(zero_copy_only=False).astype(np.int64)
        kept = np.flatnonzero(lengths > 0)
        self.layout.skipped = len(lengths) - len(kept)
        self.layout.episodes = [(0, 1)] * len(kept)
        self.layout.check_skipped()
        if self.layout.skipped:
            self.table.sort(kept)
        return np.asarray(lengths[kept])

    def _check_nested_flags(self) -> None:
        """A flag of a whole row is that of the last step."""
        split, listed = Split(self._ends, self._names), dict(self._flags)
        for role in self._flags:
            name = self.columns.flag(role) or ""
            if not is_list(self.table.types[name]):
                del listed[role]
        check_inside(listed, self.columns, split)

    def _unread(self) -> list[str]:
        used = self.columns.used()
        unread = [n for n in self.table.columns if n not in used and n not in self.own]
        return [f"not read: {shown(unread, 20)}"] if unread else []

    def _steps_of(self, column: str) -> Array:
        """[all steps] of a column, in the order of the episodes."""
        whole = self.table.whole(column)
        if self._nested and is_list(whole.type):
            whole = whole.flatten()
        elif self._nested:  # one value an episode
            return np.repeat(as_scalars(column, whole), self._ends - self._starts + 1)
        array = as_scalars(column, whole)
        if len(array) != self._steps:
            raise ImportRefused(
                f"column {column[:100]} has the wrong length", expected=self._steps, got=len(array)
            )
        return array

    def _success(self) -> NDArray[np.bool_] | None:
        """No more than a label: a column that nobody named and that cannot be read is left out."""
        name = self.columns.one("success")
        if name is None:
            return None
        try:
            return as_flags(f"column {name}", self._steps_of(name))
        except ImportRefused as error:
            if "success" in self.columns.given:
                raise
            del self.columns.single["success"]
            guess = f"success={name}"
            self.columns.guessed[:] = [one for one in self.columns.guessed if one != guess]
            got = f" ({error.got})" if error.got else ""
            self.layout.warnings.append(f"not used as success: {error.detail}{got}")
            return None

    # --- columns ----------------------------------------------------------------------------------

    def _find_leaves(self, options: ImportOptions) -> None:
        layout = self.layout
        for role, leaves in (("observation", layout.observations), ("action", layout.actions)):
            for key, columns in self.columns.arrays[role].items():
                leaves[key] = self._leaf(role, key, columns)
        for key, columns in self.columns.arrays["info"].items():
            if why := why_dropped(key, options.drop_infos):
                layout.dropped[key] = why
                continue
            try:
                leaf = self._leaf("info", key, columns)
            except ImportRefused as error:
                layout.dropped[key] = f"{error.detail} ({error.got})"
                continue
            if leaf.kind == "numbers":
                layout.infos[key] = leaf
            else:
                layout.dropped[key] = "not plain numbers"

    def _leaf(self, role: str, key: str, columns: Columns) -> Leaf:
        path = f"{role}/{key}"
        types = [self._type(column) for column in columns]
        kinds = {kind_of(type_) for type_ in types}
        if role == "action" and kinds == {"texts"}:
            code = "" if self._nested else ': df[…].astype("category").cat.codes'
            raise ImportRefused(
                f"{path} is made of texts: {shown(columns)}",
                expected=f"numbers of the choices, the same in every file{code}",
                got=", ".join(map(str, types))[:200],
            )
        kind = kinds.pop() if len(kinds) == 1 else ""
        if not kind or (kind != "numbers" and len(columns) > 1):
            raise ImportRefused(
                f"{path} cannot be made of the columns {shown(columns)}",
                expected="numbers, lists of numbers, one column of images, or one of texts"
                + "; decimals as floats: df[…].astype(float)"
                * any(map(pa.types.is_decimal, types)),
                got=", ".join(str(self.table.types[c])[:60] for c in columns)[:200],
            )
        self._leaves[path] = columns
        if kind == "texts":
            return Leaf(path, None, np.dtype(object), "texts")
        if kind == "frames":
            if jpeg := self._count_jpeg(columns[0]):
                self.layout.warnings.append(
                    f"{path}: {pluralize(jpeg, 'image')} stored as JPEG, which changes pixels: what"
                    " is stored here is what the JPEG shows"
                )
            return Leaf(path, None, np.dtype(np.uint8), "frames")
        first_rows = self._read(columns, "numbers", 0)
        names = self._names_of(role, key, columns) if role != "info" else ()
        return Leaf(path, first_rows.shape[1:], first_rows.dtype, names=names)

    def _count_jpeg(self, column: str) -> int:
        """Images that are JPEG. Raises `ImportRefused` for bytes that are no image."""
        count = 0
        for number, name in enumerate(self._names):
            cells = self._cells(column, number, self._extra)
            for row, frame in enumerate(image_bytes(column, cells)):
                if not frame.startswith((JPEG, PNG)):
                    raise ImportRefused(
                        f"column {column[:100]} has bytes that are no image",
                        expected="PNG or JPEG",
                        got=f"{frame[:8]!r} in row {row} of episode {name}",
                    )
                count += frame.startswith(JPEG)
        return count

    def _names_of(self, role: str, key: str, columns: Columns) -> Columns:
        """Return the names of a vector's elements, if they have names."""
        if not self.columns.named_elements(role, key):
            return self.columns.element_names.get(columns[0], ())
        widths = [self._read((column,), "numbers", 0)[:1].size for column in columns]
        return element_names(columns, widths)

    def _type(self, column: str) -> pa.DataType:
        type_ = self.table.types[column]
        return type_.value_type if self._nested and is_list(type_) else type_

    def _cells(self, column: str, number: int, extra: int = 0) -> pa.Array:
        """The cells of one episode, and `extra` more."""
        if not self._nested:
            stop = int(self._ends[number]) + 1 + extra
            return self.table.slice(column, int(self._starts[number]), stop)
        row = int(self._rows_of[number])
        cell = self.table.slice(column, row, row + 1)
        if not is_list(cell.type):
            raise ImportRefused(
                f"column {column[:100]} is no list", expected="a list of steps in each row"
            )
        return cell.flatten()

    def _read(self, columns: Columns, kind: str, number: int, extra: int = 0) -> Array:
        cells = [self._cells(column, number, extra) for column in columns]
        return self._decoded(columns, kind, cells, f"episode {self._names[number]}/{columns[0]}")

    def _decoded(self, columns: Columns, kind: str, cells: list[pa.Array], name: str) -> Array:
        if kind == "texts":
            return np.asarray([text or "" for text in cells[0].to_pylist()], object)
        if kind == "frames":
            encoded = image_bytes(columns[0], cells[0])
            found = pixels(name[:200], encoded, ("PNG", "JPEG"), self._memory)
            return found if found.ndim == 4 else found[..., None]
        arrays = [as_numbers(c, cell) for c, cell in zip(columns, cells, strict=True)]
        if len(arrays) == 1:
            return arrays[0]
        return np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)

    # --- final observations -----------------------------------------------------------------------

    def _final_known(self) -> bool:
        following = self.columns.arrays["next_observation"]
        if not following:
            return False
        if following.keys() != self.layout.observations.keys():
            raise ImportRefused(
                "next_observation and observation have other names",
                expected=", ".join(self.layout.observations),
                got=", ".join(following),
            )
        count = min(len(self._ends) - 1, BOUNDARIES)
        leaves = [leaf for leaf in self.layout.observations.values() if leaf.kind == "numbers"]
        shifted = count > 0 and all(
            np.array_equal(
                self._last(leaf, n)[0], self._read(self._leaves[leaf.path], "numbers", n + 1)[0]
            )
            for leaf in leaves
            for n in range(count)
        )
        if shifted and leaves:
            self.layout.warnings.append("next_observation is the shifted rows")
            return False
        every = range(len(self._ends))
        if leaves and "next_observation" not in self.columns.given:
            kind = blank(
                ([self._last(leaf, n) for leaf in leaves] for n in every),
                (
                    [self._read(self._leaves[leaf.path], "numbers", n) for leaf in leaves]
                    for n in every
                ),
            )
            if kind:
                name = ",".join(next(iter(following.values())))
                self.layout.warnings.append(said_blank(name, kind))
                return False
        self._warn_of_jumps(leaves)
        return True

    def _warn_of_jumps(self, leaves: list[Leaf]) -> None:
        """Looks at the first episodes."""
        broken = 0
        for number in range(min(len(self._ends), BOUNDARIES)):
            apart = np.zeros(int(self._ends[number] - self._starts[number]), np.bool_)
            for leaf in leaves:
                rows = self._read(self._leaves[leaf.path], "numbers", number)[1:][: len(apart)]
                led_to = self._following(leaf, number)[:-1]
                differ = ~np.isclose(rows, led_to, rtol=1e-6, atol=1e-6)
                apart |= differ.any(axis=tuple(range(1, differ.ndim)))
            broken += int(apart.sum())
        if broken:
            self.layout.warnings.append(jumps(broken, out_of_order(self.columns)))

    def _has_final_rows(self) -> NDArray[np.bool_]:
        """[episodes]: whether all observations of one have T+1 elements."""
        found = np.full(len(self._ends), self._nested or self._extra > 0)
        if not self._nested or self._final:
            return found
        lengths = self._ends - self._starts + 1
        for leaf in self.layout.observations.values():
            column = self._leaves[leaf.path][0]
            for number in range(len(found)):
                found[number] &= len(self._cells(column, number)) == lengths[number] + 1
        return found

    def _last(self, leaf: Leaf, number: int) -> Array:
        return self._following(leaf, number)[-1:]

    def _following(self, leaf: Leaf, number: int) -> Array:
        columns = self.columns.arrays["next_observation"][leaf.path.partition("/")[2]]
        found = self._read(columns, leaf.kind, number)
        if leaf.shape is not None and found.shape[1:] != leaf.shape:
            raise ImportRefused(
                "next_observation has another shape than observation",
                expected=list(leaf.shape),
                got=list(found.shape[1:]),
            )
        return found


def missing(role: str, table: Table) -> ImportRefused:
    steps = [name for name, type_ in table.types.items() if _is_list_of_steps(type_)]
    if steps and role in ("observation", "action", "reward"):
        return ImportRefused(
            f"no column is known to be the {role}; {steps[0][:100]} is a list of steps, as in RLDS",
            expected="one row a step; in DuckDB: copy (select row_number() over () as episode, "
            f"unnest({steps[0][:100]}, max_depth := 2) from 'FILE.parquet') to 'steps.parquet'",
            got=shown(table.columns),
        )
    none = "; columns=reward= if there is none" if role == "reward" else ""
    none += cure_of_step_type(table.columns) if role.startswith("episode") else ""
    return ImportRefused(
        f"no column is known to be the {role}",
        expected=f"columns={role.split()[0]}=NAME, of the columns of the file{none}",
        got=shown(table.columns),
    )


def _is_list_of_steps(type_: pa.DataType) -> bool:
    if not is_list(type_) or not pa.types.is_struct(type_.value_type):
        return False
    return any(name.lower() in USUAL["action"] for name in type_.value_type.names)


def _lists_of_actions(table: Table, columns: ColumnMap) -> str | None:
    """Without rewards: the column of actions, if its lists are those of episodes. They are if they
    differ in length; lists of one length are a vector if those of the observations are. Raises
    `ImportRefused` for what can be read in two ways."""
    observed, acted = (
        [name for names in columns.arrays[role].values() for name in names]
        for role in ("observation", "action")
    )
    if not all(is_list(table.types[name]) for name in (*observed, *acted)):
        return None
    lengths: set[int | None] = set()
    for start in range(0, table.rows, BLOCK):
        block = table.slice(acted[0], start, min(start + BLOCK, table.rows))
        lengths |= {*pc.unique(pc.list_value_length(block)).to_pylist()}
    if len(lengths - {0, None}) > 1:
        return acted[0]
    steps, *more = (
        pc.list_value_length(table.slice(name, 0, 1))[0].as_py() or 0
        for name in (acted[0], *observed)
    )
    lists_of_lists = {name for name in (*observed, *acted) if is_list(table.types[name].value_type)}
    if columns.episode or not lists_of_lists.issuperset(observed) or {*more} - {steps, steps + 1}:
        return None
    if lists_of_lists.issuperset(acted) and {*more} == {steps + 1}:
        return acted[0]
    raise ImportRefused(
        "a row can be a step or an episode",
        expected="a column of rewards: where rows are episodes "
        f"[[0.0] * len(a) for a in table[{acted[0][:60]!r}]], where they are steps 0.0",
        got=f"lists of {steps} actions and {more[0]} observations in every row",
    )


def _is_nested(table: Table, columns: ColumnMap, reward: str) -> bool:
    """Whether the rewards of a row are those of an episode. Where all rows have one, they are if
    its observations and actions are lists of T + 1 and T vectors."""
    if not is_list(table.types[reward]):
        return False
    if bool(pc.any(pc.not_equal(pc.list_value_length(table.whole(reward)), 1)).as_py()):
        return True
    for role, count in (("observation", 2), ("action", 1)):
        for column in (c for group in columns.arrays[role].values() for c in group):
            type_ = table.types[column]
            if not is_list(type_) or not is_list(type_.value_type):
                return False
            lengths = pc.list_value_length(table.whole(column))
            if not bool(pc.all(pc.equal(lengths, count)).as_py()):
                return False
    return True
