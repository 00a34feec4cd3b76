"""HDF5 and npz files of flat arrays → episodes: finds the ends in one long table of N steps.

    row  | observations actions rewards terminals timeouts [next_observations]
    i    | s_i          a_i     r_i     0         0         s_i+1
    e    | s_e          a_e     r_e     1         0         true s_e+1       the episode ends here
    e+1  | s_0 of the next episode …

Ids, lists of ends, `done` and `first` say exactly where episodes end (ends.py). A D4RL file has
terminals and timeouts only, and a rule for each quirk of real files
(tests/server/imports/test_imports_d4rl.py has one of each):
- an episode ends at terminals or timeouts; with both in one row it is terminated, with a warning;
- the last observation is next_observations[e] where the file has it (and did not compute it by
  shifting the rows); else it is unknown (`final_obs_valid` false) and the one before is repeated;
- an unfinished tail is kept, as truncated; consecutive ends make one-step trajectories;
- terminals that no reset follows are not ends (antmaze flags every step near the goal): decided by
  next_observations where they exist, else see `_flags_only`. They are kept as info `terminals`;
- without timeouts (kitchen, minigrid) only terminals end episodes, and `max_steps` if given;
- a file that `stepwell export` wrote lists the ends, so flags and observations need no reading;
- flags and rewards may be floats or [N, 1]; float64 observations and actions become float32;
- infos with N rows of plain numbers are stored with their observation, whatever their rank; others
  are dropped, each with a warning that gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from server.imports import hdf5, npz
from server.imports.column_map import ColumnMap, element_names
from server.imports.ends import (
    Flags,
    blank,
    check_final,
    check_inside,
    check_masks,
    end_tail,
    ends_of_list,
    jumps,
    listed_ends,
    out_of_order,
    read_flags,
    said_blank,
    split_by_flags,
    terminated_at,
    warn_of_both,
    warn_of_done,
    with_restarts,
)
from server.imports.episode_ids import Split, check_sources, split_by_ids
from server.imports.episodes import (
    About,
    Declared,
    Episodes,
    Layout,
    Leaf,
    parsed_spec,
)
from server.imports.flat_arrays import D4RL, ENDS, SPEC, RawFile, missing, native
from server.imports.raw_file import (
    Array,
    ImportOptions,
    ImportRefused,
    check_dtype,
)
from server.imports.spec import MAX_DISCRETE, fit_to
from stepwell._wording import pluralize
from stepwell.spaces import DTYPES, MAX_NAMES, Discrete, EnvSpec, Space, all_finite

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(/[A-Za-z0-9_]{1,64}){0,4}")
"""Names that an env spec allows (stepwell/spaces.py)."""
MAX_SPEC = 4 << 20
"""Bytes of a file's own spec."""


class FlatEpisodes(Episodes):
    """The arrays of one file as episodes (episodes.py). Raises `ImportRefused`."""

    def __init__(self, source: RawFile, options: ImportOptions, max_rows: int):
        columns, warnings = source.map, list(source.warnings)
        self._written = _read_spec(source.arrays[SPEC]) if SPEC in source.arrays else None
        if (spec := options.spec or self._written) is not None:
            _rename(columns, spec)
        for role in ("observation", "action", "reward"):
            known = columns.arrays.get(role) or columns.one(role) is not None
            if not known and role not in columns.given:
                raise missing(role, source)
        obs = {k: _joined(source, names) for k, names in columns.arrays["observation"].items()}
        if not obs or not columns.arrays["action"]:
            raise missing("action" if obs else "observation", source)
        if not 1 <= source.rows <= max_rows:
            raise ImportRefused(
                "observations has an invalid length", expected=f"1 … {max_rows}", got=source.rows
            )
        if {*columns.guessed} - D4RL or columns.matched:
            warnings[:0] = columns.taken()
        reward = columns.one("reward")
        if reward is None:
            warnings.append("there is no reward: all are 0")
        self._rewards = np.zeros(source.rows) if reward is None else source.numbers_of(reward)
        lists = {} if source.ends is not None else _lists(source, warnings)
        self._sure = source.ends is not None or ENDS in lists
        self._flags = read_flags(columns, source.numbers_of)
        self._arrays = {
            "observations": obs,
            "actions": {k: _joined(source, n) for k, n in columns.arrays["action"].items()},
            "infos": _infos(source, source.rows),
            "next": _next(source, obs),
        }
        self._order: NDArray[np.int64] | None = None
        ends = self._find_ends(source, options, next(iter(lists.values()), source.ends), warnings)
        if self._arrays["next"] and not self._sure:
            self._check_finals(columns, ends, warnings)
        flags = self._flags
        warn_of_both(flags, ends, warnings)
        warn_of_done(flags, columns, warnings)
        if "terminated" not in flags and "done" not in flags and flags:
            warnings.append("nothing says that an episode was terminated: all are truncated")
        self.metadata = source.metadata
        self._starts, self._ends = np.concatenate([[0], ends[:-1] + 1]), ends
        self._terminated = terminated_at(flags, ends)
        exported = ENDS in lists and "truncated" in flags
        self._truncated = flags["truncated"][ends] if exported else np.ones(len(ends), np.bool_)
        self._leaves: dict[str, tuple[str, str]] = {}
        self.layout = Layout(
            [*enumerate((ends - self._starts + 1).tolist())],
            self._named("observations", source),
            self._named("actions", source),
            self._named("infos", source),
            dropped=source.dropped,
            warnings=warnings,
        )

    def _find_ends(
        self,
        source: RawFile,
        options: ImportOptions,
        ends: NDArray[np.int64] | None,
        warnings: list[str],
    ) -> NDArray[np.int64]:
        """The last row of each episode, if these are not known; puts rows of one id together."""
        columns, flags = source.map, self._flags
        if ends is None and columns.episode:
            split = split_by_ids(source, columns, warnings, lengths=not flags)
            ends, self._order = split.ends, split.order
            if split.order is not None:
                self._arrays = {k: _taken(a, split.order) for k, a in self._arrays.items()}
                self._flags = flags = _taken(flags, split.order)
                self._rewards = self._rewards[split.order]
        obs, next_obs = self._arrays["observations"], self._arrays["next"]
        if next_obs and not self._sure and not _informative(_every(flags, ends), obs, next_obs):
            warnings.append(
                "next_observations are the shifted rows: final observations are unknown"
            )
            self._arrays["next"] = next_obs = {}
        if ends is not None or {"done", "first"} & flags.keys():
            if ends is None:
                ends = np.flatnonzero(split_by_flags(flags, source, columns, warnings))
            check_inside(flags, columns, Split(ends, []))
            if next_obs and not self._sure:
                _warn_of_jumps(obs, next_obs, ends, warnings, out_of_order(columns))
            return ends
        if not _says_ends(flags, columns) and not (options.max_steps and not flags):
            raise missing("terminated", source)
        terminals = flags.get("terminated", np.zeros(source.rows, np.bool_))
        timeouts = flags.get("truncated", np.zeros(source.rows, np.bool_))
        check_masks(source, columns, terminals | timeouts, flags)
        marks, in_flags = _split(terminals, timeouts, obs, next_obs, options.max_steps, warnings)
        marks = with_restarts(source, columns, marks, flags, warnings)
        check_sources(source, columns, marks)
        if in_flags:
            self._arrays["infos"]["terminals"] = terminals
        return np.flatnonzero(marks)

    def _check_finals(
        self, columns: ColumnMap, ends: NDArray[np.int64], warnings: list[str]
    ) -> None:
        """Final observations are finite, and no gap that a shift left."""
        obs, finals = self._arrays["observations"], self._arrays["next"].values()
        names = ",".join(next(iter(columns.arrays["next_observation"].values())))
        kind = ""
        if "next_observation" not in columns.given:
            known = ends[:-1] if len(ends) > 2 else ends
            kind = blank(
                [[array[known] for array in finals]],
                ([array[a:b] for array in obs.values()] for a, b in _blocks(len(self._rewards))),
            )
        if kind:
            warnings.append(said_blank(names, kind))
            self._arrays["next"] = {}
        for array in self._arrays["next"].values():
            check_final(names, array[ends], "the last row of an episode")

    def _named(self, what: str, source: RawFile) -> dict[str, Leaf]:
        arrays, found = self._arrays[what], {}
        for key, array in arrays.items():
            path = what if len(arrays) == 1 and what != "infos" else f"{what}/{key}"
            names = () if what == "infos" else self._names_of(source, what.removesuffix("s"), key)
            self._leaves[path] = (what, key)
            found[key] = Leaf(path, array.shape[1:], array.dtype, names=names)
        return found

    def _names_of(self, source: RawFile, what: str, key: str) -> tuple[str, ...]:
        """The names of a vector's elements in the file: of its columns, or in its own spec."""
        found = source.map.arrays[what].get(key, ())
        if source.map.named_elements(what, key):
            widths = [source.arrays[name][:1].size for name in found]
            return element_names(found, widths) if sum(widths) <= MAX_NAMES else ()
        if self._written is None or what in source.map.given:
            return ()
        return self._written.names.get(f"{what}/{key}", ())

    def declared(self, what: str) -> Mapping[str, Declared]:
        """As many states as the file says."""
        states = self.metadata.get("discrete_observations")
        if what == "action" or states is None:
            return {}
        if type(states) is not int or not 1 <= states <= MAX_DISCRETE:
            raise ImportRefused(
                "metadata/discrete_observations",
                expected=f"an integer in 1 … {MAX_DISCRETE}",
                got=str(states)[:50],
            )
        return dict.fromkeys(self.layout.observations, Discrete(states))

    def written_spec(self) -> EnvSpec | None:
        return self._written

    def rows(self, number: int, leaf: Leaf) -> Array:
        what, key = self._leaves[leaf.path]
        array, stop = self._arrays[what][key], self._ends[number] + 1
        part = array[self._starts[number] : stop]
        if what == "actions":
            return part
        last = self._arrays["next"].get(key, array) if what == "observations" else array
        return np.concatenate([part, last[stop - 1 : stop]])

    def fit_whole(self, leaf: Leaf, space: Space, role: str) -> bool:
        what, key = self._leaves[leaf.path]
        held = [self._arrays[what]]
        if what == "observations" and self._arrays["next"]:
            held.append(self._arrays["next"])
        try:
            fitted = [fit_to(space, role, leaf.path, arrays[key]) for arrays in held]
        except ImportRefused:
            return False
        if any(array.dtype.kind == "f" and not all_finite(array) for array in fitted):
            return False  # too large for the type, or not finite in the file: said of its episode
        for arrays, array in zip(held, fitted, strict=True):
            arrays[key] = array
        return True

    def every(self, leaf: Leaf) -> Iterator[Array]:
        what, key = self._leaves[leaf.path]
        yield self._arrays[what][key]
        if what == "observations" and self._arrays["next"]:
            yield self._arrays["next"][key][self._ends]

    def about(self, number: int) -> About:
        start, stop = int(self._starts[number]), int(self._ends[number]) + 1
        terminated = bool(self._terminated[number])
        return About(
            name=f"episode {number} (rows {start} … {stop - 1})",
            rewards=self._rewards[start:stop],
            terminated=terminated,
            truncated=bool(self._truncated[number]) and not terminated,
            final_obs_valid=bool(self._arrays["next"]),
            rows=np.arange(start, stop) if self._order is None else self._order[start:stop],
        )


@contextmanager
def opened(
    file: BinaryIO, options: ImportOptions, memory: int, max_rows: int
) -> Iterator[Episodes]:
    """Raises `ImportRefused`."""
    read = npz.read if options.format == "npz" else hdf5.read
    # Only what the episodes hold of the file's arrays stays in memory.
    yield FlatEpisodes(
        read(file, options.size, memory, options.drop_infos, options.columns), options, max_rows
    )


def _read_spec(array: Array) -> EnvSpec:
    """The spec in a file that `stepwell export` wrote. Raises `ImportRefused`."""
    if array.dtype != np.uint8 or array.ndim != 1 or len(array) > MAX_SPEC:
        raise ImportRefused(
            f"{SPEC} cannot be read",
            expected="an env spec as JSON",
            got=f"{array.dtype} {list(array.shape)}",
        )
    return parsed_spec(SPEC, array.tobytes())


# --- where episodes end ---------------------------------------------------------------------------


def _split(
    terminals: NDArray[np.bool_],
    timeouts: NDArray[np.bool_],
    obs: dict[str, Array],
    next_obs: dict[str, Array],
    max_steps: int,
    warnings: list[str],
) -> tuple[NDArray[np.bool_], bool]:
    """([rows]: where episodes end, whether some terminals are not ends)."""
    ends = terminals | timeouts
    inside = np.flatnonzero(terminals[:-1] & ~timeouts[:-1])
    if next_obs:
        inside = inside[_same(obs, inside + 1, next_obs, inside)]
    elif not timeouts.any() or not _flags_only(terminals, timeouts, obs, inside):
        inside = inside[:0]
    ends[inside] = False
    if max_steps and not bool(timeouts.any()):
        _cut(ends, max_steps)
    end_tail(ends, warnings)
    if len(inside):
        warnings.append(
            f"{pluralize(len(inside), 'terminal')} kept as info 'terminals', not as ends: no reset"
            " follows"
        )
    if next_obs:
        why = "timeouts may not match resets"
        _warn_of_jumps(obs, next_obs, np.flatnonzero(ends), warnings, why)
    return ends, len(inside) > 0


def _listed_ends(ends: Array, rows: int) -> NDArray[np.int64]:
    """The last row of each episode, as an exported file lists them. Raises `ImportRefused`."""
    if (
        ends.dtype.kind not in "iu"
        or ends.ndim != 1
        or not len(ends)
        or int(ends[0]) < 0
        or int(ends[-1]) != rows - 1
        or not bool((ends[1:] > ends[:-1]).all())
    ):
        raise ImportRefused(
            f"{ENDS} is not a list of last rows",
            expected=f"ascending integers, the last of them {rows - 1}",
            got=f"{ends.dtype} {list(ends.shape)}",
        )
    return ends.astype(np.int64)


def _lists(source: RawFile, warnings: list[str]) -> dict[str, NDArray[np.int64]]:
    """Where arrays list the ends, starts or lengths of episodes, the last row of each; all must
    agree. Raises `ImportRefused`."""
    found: dict[str, NDArray[np.int64]] = {}
    if ENDS in source.arrays and "episode" not in source.map.given:
        found[ENDS] = _listed_ends(source.arrays[ENDS], source.rows)
    for name in listed_ends(source.map, source.arrays, source.rows):
        ends = ends_of_list(name, source.arrays[name], source.rows)
        if ends is None:
            warnings.append(f"not read: {name}, which does not add up to {source.rows}")
            continue
        for other, known in found.items():
            if not np.array_equal(ends, known):
                raise ImportRefused(
                    f"{name[:100]} and {other[:100]} list other episodes",
                    expected="the same, or columns=episode=, done= or first= for what counts",
                    got=f"{len(ends)} and {len(known)}",
                )
        found[name] = ends
        warnings.append(f"episodes are those of {name}")
    return found


def _says_ends(flags: Flags, columns: ColumnMap) -> bool:
    """Whether flags say where all episodes end: terminals, or time-outs that somebody named."""
    named = "truncated" in flags and "truncated" in columns.given
    return named or "terminated" in flags or "terminated" in columns.given


def _every(flags: Flags, ends: NDArray[np.int64] | None) -> NDArray[np.bool_]:
    """Rows that are known to be ends."""
    marks = np.zeros(max((len(f) for f in flags.values()), default=0), np.bool_)
    if ends is not None:
        marks = np.zeros(int(ends[-1]) + 1, np.bool_)
        marks[ends] = True
    elif "done" in flags:
        marks = flags["done"]
    elif "first" in flags:
        marks = np.append(flags["first"][1:], True)
    else:
        for flag in flags.values():
            marks = marks | flag
    return marks


def _informative(
    marks: NDArray[np.bool_], obs: dict[str, Array], next_obs: dict[str, Array]
) -> bool:
    """Whether next_observations differ from the next row anywhere.

    Where they never do, they were computed by shifting the rows: at an end they are the next
    episode's first observation, which is wrong. Where they differ, but not at an end, the ends are
    marked at wrong rows (antmaze v0), which is another mistake.
    """
    ends = np.flatnonzero(marks[:-1])
    if len(ends) == 0 or not bool(_same(obs, ends + 1, next_obs, ends).all()):
        return True
    return any(
        not bool(_same(obs, slice(start + 1, stop + 1), next_obs, slice(start, stop)).all())
        for start, stop in _blocks(len(next(iter(obs.values()))) - 1)
    )


def _flags_only(
    terminals: NDArray[np.bool_],
    timeouts: NDArray[np.bool_],
    obs: dict[str, Array],
    candidates: NDArray[np.int64],
) -> bool:
    """Whether this file's terminals are mere flags, decided without next_observations.

    They are if most occur in runs of three or more (antmaze, near the goal), or if the data is
    smooth and at almost no terminal the distance to the next row exceeds the largest step (diverse
    antmaze: one flag per success). If the data is not smooth, terminals are ends.
    """
    alone = terminals & ~timeouts
    triple = alone[:-2] & alone[1:-1] & alone[2:]
    in_run = np.zeros(len(alone), np.bool_)
    for shift in range(3):
        in_run[shift : len(alone) - 2 + shift] |= triple
    if int(np.count_nonzero(in_run)) * 2 > int(np.count_nonzero(alone)):
        return True
    vectors = [array.reshape(len(array), -1) for array in obs.values() if array.dtype.kind == "f"]
    if not len(candidates) or not vectors or sum(array.shape[1] for array in vectors) > 512:
        return False
    flat = vectors[0] if len(vectors) == 1 else np.concatenate(vectors, axis=1)
    moves = np.abs(np.diff(flat, axis=0))
    within = moves[~(terminals | timeouts)[:-1]]
    if len(within) < 100:
        return False
    spread = flat.max(axis=0) - flat.min(axis=0)
    usual = np.quantile(within, 0.99, axis=0)
    smooth = (usual > 0) & (usual < 0.1 * spread)
    if not bool(smooth.any()):
        return False
    jumped = (moves[candidates][:, smooth] > 2 * within[:, smooth].max(axis=0)).any(axis=1)
    return float(jumped.mean()) < 0.1


def _cut(ends: NDArray[np.bool_], max_steps: int) -> None:
    count = 0
    for row in range(len(ends)):
        count += 1
        if ends[row]:
            count = 0
        elif count == max_steps:
            ends[row] = True
            count = 0


def _same(
    a: dict[str, Array],
    rows: slice | NDArray[np.int64],
    b: dict[str, Array],
    others: slice | NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Row by row: equal up to rounding, in every array."""
    equal: list[NDArray[np.bool_]] = []
    for key in a:
        x, y = a[key][rows], b[key][others]
        near = x == y if x.dtype.kind != "f" else np.abs(x - y) <= 1e-6 * np.maximum(1.0, np.abs(x))
        equal.append(np.asarray(near.all(axis=tuple(range(1, near.ndim)))))
    return np.asarray(np.logical_and.reduce(equal))


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + 65_536, rows)) for start in range(0, rows, 65_536))


def _warn_of_jumps(
    obs: dict[str, Array],
    next_obs: dict[str, Array],
    ends: NDArray[np.int64],
    warnings: list[str],
    why: str,
) -> None:
    """Warn of rows in an episode that do not follow from the row before (antmaze v0's timeouts)."""
    broken, inside = 0, np.ones(int(ends[-1]) + 1, np.bool_)
    inside[ends] = False
    for start, stop in _blocks(len(inside) - 1):
        apart = ~_same(obs, slice(start + 1, stop + 1), next_obs, slice(start, stop))
        broken += int(np.count_nonzero(apart & inside[start:stop]))
    if broken:
        warnings.append(jumps(broken, why))


# --- the arrays -----------------------------------------------------------------------------------


def _joined(source: RawFile, names: Sequence[str]) -> Array:
    """An array [N, …]; several are one vector."""
    arrays = [_table(source, name) for name in names]
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([array.reshape(source.rows, -1) for array in arrays], axis=1)


def _table(source: RawFile, name: str) -> Array:
    array, rows = source.arrays[name], source.rows
    check_dtype(name, array.dtype)
    if array.ndim < 1:
        raise ImportRefused(name, expected="an array [N, …]", got="a scalar")
    if len(array) != rows:
        raise ImportRefused(
            f"{name} has the wrong length",
            expected=f"{pluralize(rows, 'row')}, as observations has",
            got=f"shape {array.shape}",
        )
    return native(array)


def _next(source: RawFile, obs: dict[str, Array]) -> dict[str, Array]:
    """The next observations, in the shapes and types of the observations."""
    columns = source.map.arrays["next_observation"]
    if columns and columns.keys() != obs.keys():
        raise ImportRefused(
            "next_observation and observation have other names",
            expected=f"{', '.join(obs)}; or columns=next_observation=",
            got=", ".join(columns),
        )
    found = {}
    for key, names in columns.items():
        array = _joined(source, names)
        if array.shape != obs[key].shape:
            raise ImportRefused(
                f"{names[0]} has the wrong shape",
                expected=str(obs[key].shape),
                got=str(array.shape),
            )
        found[key] = array.astype(obs[key].dtype, copy=False)
    return found


def _rename(columns: ColumnMap, spec: EnvSpec) -> None:
    """A lone array has the name of the lone one of the spec."""
    for role, spaces in (
        ("observation", spec.observations),
        ("next_observation", spec.observations),
        ("action", spec.actions),
    ):
        arrays = columns.arrays[role]
        if len(arrays) == len(spaces) == 1:
            columns.arrays[role] = dict(zip(spaces, arrays.values(), strict=True))


def _taken(arrays: dict[str, Array], order: NDArray[np.int64]) -> dict[str, Array]:
    return {key: array[order] for key, array in arrays.items()}


def _infos(source: RawFile, rows: int) -> dict[str, Array]:
    """The infos that are kept; `source.dropped` gets the reasons for all others."""
    kept: dict[str, Array] = {}
    for name, array in source.infos.items():
        if why := _unkeepable(name, array, rows):
            source.dropped[name] = why
        else:
            kept[name] = native(array)
    return kept


def _unkeepable(name: str, array: Array, rows: int) -> str:
    if KEY.fullmatch(name) is None:
        return "its name has invalid characters"
    if array.ndim < 1 or len(array) != rows:
        return f"not one row per step (shape {array.shape}, {pluralize(rows, 'step')})"
    if array.dtype.name not in DTYPES:
        return f"unsupported type ({array.dtype})"
    return ""
