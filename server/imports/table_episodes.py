"""Rows of a table → episodes (named.py: Episodes). Untrusted: runs only in the sandbox.

    one row a step       episodes by the column `episode`, else up to a row with a flag, else one of
                         each file; in an episode by `step`, else in the order of the file
    one row an episode   where `reward` is a list in each row; observations have T or T+1 elements

The last observation is that of `next_observation`, or of T+1 elements; else it is unknown, and the
one before is repeated. The last row tells how an episode ended; without a flag it was cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from server.imports.column_map import ColumnMap, Columns, shown
from server.imports.images import JPEG, PNG, pixels
from server.imports.named import About, Declared, Layout, Leaf
from server.imports.parquet_table import Table, as_numbers, image_bytes, is_list, kind_of
from server.imports.raw_file import (
    Array,
    ImportOptions,
    ImportRefused,
    as_flags,
    plain,
    why_dropped,
)
from stepwell._plural import pluralize
from stepwell.spaces import DTYPES, Discrete, EnvSpec
from stepwell.trajectory import TrajectoryMetadata

ENDS = ("terminated", "truncated", "done")
BOUNDARIES = 100
"""Ends of episodes that show whether next observations are the shifted rows."""


class TableEpisodes:
    """Raises `ImportRefused`."""

    def __init__(self, table: Table, columns: ColumnMap, options: ImportOptions, memory: int):
        self.table, self.columns, self._memory = table, columns, memory
        self.layout = Layout()
        self._env = options.env
        self._leaves: dict[str, Columns] = {}
        for role in ("observation", "action"):
            if not columns.arrays[role]:
                raise missing(role, table.columns)
        reward = columns.one("reward")
        if reward is None and not any(o.startswith("reward=") for o in options.columns):
            raise missing("reward", table.columns)
        self._nested = reward is not None and _differ(table, reward)
        if self._nested:
            assert reward is not None
            lengths = pc.list_value_length(table.whole(reward)).to_numpy(zero_copy_only=False)
            if not np.isfinite(lengths).all() or int(lengths.min()) < 1:
                raise ImportRefused("an episode has no steps", expected="≥ 1", got=0)
            self._ends = np.cumsum(lengths.astype(np.int64)) - 1
            self._names = [str(number) for number in range(len(lengths))]
        else:
            self._ends, self._names = self._split()
        self._starts = np.concatenate([[0], self._ends[:-1] + 1])
        self._steps = int(self._ends[-1]) + 1
        self._flags = {role: self._flag(role) for role in ENDS}
        self._flags["success"] = self._success()
        if columns.guessed:
            self.layout.warnings.insert(0, "columns by their names: " + " ".join(columns.guessed))
        self._check_flags()
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

    # --- what named.py asks for -------------------------------------------------------------------

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

    def written_spec(self) -> EnvSpec | None:
        return None

    @property
    def env(self) -> str:
        return self._env

    def rows(self, number: int, leaf: Leaf) -> Array:
        columns, role = self._leaves[leaf.path], leaf.path.partition("/")[0]
        array = self._read(columns, leaf.kind, number)
        steps = self.layout.episodes[number][1]
        whole = self._nested and role == "observation" and len(array) == steps + 1
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
        return np.concatenate([array, last])

    def about(self, number: int) -> About:
        start, end = int(self._starts[number]), int(self._ends[number])
        flags = {role: flag is not None and bool(flag[end]) for role, flag in self._flags.items()}
        terminated = flags["terminated"] or (flags["done"] and not flags["truncated"])
        success = self._flags["success"]
        return About(
            name=f"episode {self._names[number]}"[:200],
            rewards=self._rewards[start : end + 1],
            terminated=terminated,
            truncated=not terminated,
            final_obs_valid=self._final or bool(self._whole[number]),
            metadata=TrajectoryMetadata(success=None if success is None else flags["success"]),
        )

    # --- episodes ---------------------------------------------------------------------------------

    def _split(self) -> tuple[NDArray[np.int64], list[str]]:
        """(last row of each episode, names), after the table has been sorted."""
        table, rows = self.table, self.table.rows
        step, episode = self.columns.one("step"), self.columns.one("episode")
        names: list[str] = []
        codes: NDArray[np.int64] | None = None
        if episode is not None:
            encoded = table.whole(episode).dictionary_encode()
            if encoded.null_count:
                raise ImportRefused(f"column {episode[:100]} has empty cells", expected="ids")
            names = [str(value)[:100] for value in encoded.dictionary.to_pylist()]
            codes = encoded.indices.to_numpy().astype(np.int64)
        elif not any(self.columns.one(role) for role in ENDS) and len(table.file_rows) > 1:
            kept = [count for count in table.file_rows if count]
            codes, names = np.repeat(np.arange(len(kept)), kept), [str(i) for i in range(len(kept))]
            self.layout.warnings.append("no column tells episodes apart: each file is one")
        if codes is not None:
            steps = np.arange(rows) if step is None else _scalars(step, table.whole(step))
            order = np.lexsort((steps, codes))
            if step is not None:
                doubled = (np.diff(codes[order]) == 0) & (np.diff(steps[order]) == 0)
                if bool(doubled.any()):
                    at = order[int(doubled.argmax())]
                    raise ImportRefused(
                        f"a step occurs twice in episode {names[codes[at]]}",
                        expected=f"each {step[:100]} once in an episode",
                        got=f"{steps[at]}",
                    )
            if not bool((order == np.arange(rows)).all()):
                table.sort(order)
                codes = codes[order]
            ends = np.flatnonzero(np.append(np.diff(codes) != 0, True))
            if step is not None:
                self._warn_of_gaps(step, steps[order], codes, names)
            return ends, [names[code] for code in codes[ends]]
        marks = np.zeros(rows, np.bool_)
        for role in ENDS:
            if (name := self.columns.one(role)) is not None:
                marks |= _as_flags(name, _scalars(name, table.whole(name)))
        if not bool(marks.any()) and not any(self.columns.one(role) for role in ENDS):
            raise missing("episode (or terminated, truncated, done)", table.columns)
        if not marks[-1]:
            tail = rows - 1 - int(np.flatnonzero(marks)[-1]) if bool(marks.any()) else rows
            self.layout.warnings.append(
                f"the last {pluralize(tail, 'step')} have no end: kept as a truncated trajectory"
            )
            marks[-1] = True
        ends = np.flatnonzero(marks)
        return ends, [str(number) for number in range(len(ends))]

    def _warn_of_gaps(
        self, column: str, steps: Array, codes: NDArray[np.int64], names: list[str]
    ) -> None:
        """Whole numbers count the steps of an episode, so one that is left out was a step."""
        if steps.dtype.kind == "f" and not bool((steps == np.rint(steps)).all()):
            return  # a time
        apart = np.diff(steps.astype(np.float64))
        gaps = np.flatnonzero((np.diff(codes) == 0) & (apart != 1))
        if not len(gaps):
            return
        episodes, first = np.unique(codes[gaps]), int(gaps[0])
        more = f" and {pluralize(len(episodes) - 1, 'other')}" if len(episodes) > 1 else ""
        self.layout.warnings.append(
            f"steps are missing in episode {names[codes[first]]}{more}: {column[:100]} goes from "
            f"{int(steps[first])} to {int(steps[first + 1])}; the rows are stored one after another"
        )

    def _steps_of(self, column: str) -> Array:
        """[all steps] of a column, in the order of the episodes."""
        whole = self.table.whole(column)
        if self._nested and is_list(whole.type):
            whole = whole.flatten()
        elif self._nested:  # one value an episode
            return np.repeat(_scalars(column, whole), self._ends - self._starts + 1)
        array = _scalars(column, whole)
        if len(array) != self._steps:
            raise ImportRefused(
                f"column {column[:100]} has the wrong length", expected=self._steps, got=len(array)
            )
        return array

    def _flag(self, role: str) -> NDArray[np.bool_] | None:
        name = self.columns.one(role)
        return None if name is None else _as_flags(name, self._steps_of(name))

    def _success(self) -> NDArray[np.bool_] | None:
        """No more than a label: a column that nobody named and that cannot be read is left out."""
        try:
            return self._flag("success")
        except ImportRefused as error:
            if "success" in self.columns.given:
                raise
            name = self.columns.single.pop("success")
            guess = f"success={name}"
            self.columns.guessed[:] = [one for one in self.columns.guessed if one != guess]
            got = f" ({error.got})" if error.got else ""
            self.layout.warnings.append(f"not used as success: {error.detail}{got}")
            return None

    def _check_flags(self) -> None:
        """Flags are at the ends of episodes, or the file contradicts itself."""
        for role in ENDS:
            flags, name = self._flags[role], self.columns.one(role)
            if flags is None or name is None:
                continue
            whole = self._nested and not is_list(self.table.types[name])
            inside = 0 if whole else int(np.count_nonzero(flags)) - int(flags[self._ends].sum())
            if inside:
                raise ImportRefused(
                    f"{name[:100]} is set before the last step of an episode",
                    expected=f"flags at ends, columns={role}= (not to use it), or columns=episode= "
                    "(episodes end where flags are)",
                    got=pluralize(inside, "step"),
                )
        alone = self._flags["terminated"] is None and self._flags["truncated"] is None
        if self._flags["done"] is not None and alone:
            name = self.columns.one("done")
            self.layout.warnings.append(
                f"{name} does not tell ends from time-outs: stored as terminated; if they are "
                f"time-outs: columns=truncated={name} done="
            )

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
        kinds = {kind_of(self._type(column)) for column in columns}
        kind = kinds.pop() if len(kinds) == 1 else ""
        if not kind or (kind != "numbers" and len(columns) > 1):
            raise ImportRefused(
                f"{path} cannot be made of the columns {shown(columns)}",
                expected="numbers, lists of numbers, one column of images, or one of texts",
                got=", ".join(str(self.table.types[c])[:60] for c in columns)[:200],
            )
        self._leaves[path] = columns
        if kind == "texts":
            return Leaf(path, None, np.dtype(object), "texts")
        if kind == "frames":
            first = image_bytes(columns[0], self._cells(columns[0], 0))[0]
            if not first.startswith((JPEG, PNG)):
                raise ImportRefused(
                    f"column {columns[0][:100]} has bytes that are no image",
                    expected="PNG or JPEG",
                    got=f"{first[:8]!r}",
                )
            if first.startswith(JPEG):
                self.layout.warnings.append(
                    f"{path}: images were stored as JPEG, which changes pixels: what is stored "
                    "here is what the JPEG shows"
                )
            return Leaf(path, None, np.dtype(np.uint8), "frames")
        first_rows = self._read(columns, "numbers", 0)
        if not plain(first_rows.dtype) or first_rows.dtype.name not in (*DTYPES, "float64"):
            raise ImportRefused(
                f"{path} has an unsupported type",
                expected=", ".join(DTYPES),
                got=str(first_rows.dtype),
            )
        return Leaf(path, first_rows.shape[1:], first_rows.dtype)

    def _type(self, column: str) -> pa.DataType:
        type_ = self.table.types[column]
        return type_.value_type if self._nested and is_list(type_) else type_

    def _cells(self, column: str, number: int) -> pa.Array:
        """The cells of one episode."""
        if not self._nested:
            return self.table.slice(column, int(self._starts[number]), int(self._ends[number]) + 1)
        cell = self.table.slice(column, number, number + 1)
        if not is_list(cell.type):
            raise ImportRefused(
                f"column {column[:100]} is no list", expected="a list of steps in each row"
            )
        return cell.flatten()

    def _read(self, columns: Columns, kind: str, number: int) -> Array:
        cells = [self._cells(column, number) for column in columns]
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
        return not (shifted and leaves)

    def _has_final_rows(self) -> NDArray[np.bool_]:
        """[episodes]: whether all observations of one have T+1 elements."""
        found = np.full(len(self._ends), self._nested)
        if not self._nested or self._final:
            return found
        lengths = self._ends - self._starts + 1
        for leaf in self.layout.observations.values():
            column = self._leaves[leaf.path][0]
            for number in range(len(found)):
                found[number] &= len(self._cells(column, number)) == lengths[number] + 1
        return found

    def _last(self, leaf: Leaf, number: int) -> Array:
        columns = self.columns.arrays["next_observation"][leaf.path.partition("/")[2]]
        found = self._read(columns, leaf.kind, number)[-1:]
        if leaf.shape is not None and found.shape[1:] != leaf.shape:
            raise ImportRefused(
                "next_observation has another shape than observation",
                expected=list(leaf.shape),
                got=list(found.shape[1:]),
            )
        return found


def missing(role: str, columns: list[str]) -> ImportRefused:
    return ImportRefused(
        f"no column is known to be the {role}",
        expected=f"columns={role.split()[0]}=NAME, of the columns of the file",
        got=shown(columns),
    )


def _differ(table: Table, reward: str) -> bool:
    """Whether the rewards of a row are those of an episode."""
    if not is_list(table.types[reward]) or pa.types.is_fixed_size_list(table.types[reward]):
        return False
    lengths = pc.list_value_length(table.whole(reward))
    return bool(pc.any(pc.not_equal(lengths, 1)).as_py())


def _scalars(column: str, array: pa.Array) -> Array:
    """[rows], of a column of numbers or of lists of one number."""
    found = as_numbers(column, array)
    if found.shape[1:] not in ((), (1,)):
        raise ImportRefused(
            f"column {column[:100]} is not one number a row",
            expected="a scalar",
            got=list(found.shape[1:]),
        )
    found = found.reshape(-1)
    if found.dtype.kind == "f" and not bool(np.isfinite(found).all()):
        bad = int(np.count_nonzero(~np.isfinite(found)))
        raise ImportRefused(
            f"column {column[:100]} contains invalid numbers",
            expected="finite",
            got=f"{bad} NaN, infinite or empty",
        )
    return found


def _as_flags(column: str, array: Array) -> NDArray[np.bool_]:
    return as_flags(f"column {column[:100]}", array)


def describe(found: TableEpisodes) -> dict[str, Any]:
    """For the job's result."""
    return {"files": len(found.table.file_rows), "columns": shown(found.table.columns)}
