"""Flat arrays of N steps → trajectories: finds the ends of episodes and the spec.

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

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import uuid_utils
from numpy.typing import NDArray

from server.imports.column_map import ColumnMap
from server.imports.ends import (
    Flags,
    blank,
    check_final,
    check_inside,
    check_masks,
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
from server.imports.flat_arrays import D4RL, ENDS, SPEC, RawFile, missing, native
from server.imports.raw_file import (
    Array,
    ImportOptions,
    ImportRefused,
    check_dtype,
)
from server.imports.spec import choose_spec, fit, in_order, written_spec
from stepwell._wording import pluralize
from stepwell.errors import InvalidTrajectory
from stepwell.rounding import rounded
from stepwell.spaces import (
    DTYPES,
    MAX_ELEMENTS,
    EnvSpec,
    all_finite,
)
from stepwell.trajectory import Trajectory, TrajectoryMetadata

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(/[A-Za-z0-9_]{1,64}){0,4}")
"""Names that an env spec allows (stepwell/spaces.py)."""
MOST_LINES = 40
"""Most warnings about single infos."""
NAMESPACE = uuid_utils.UUID("5b0f8f0e-6f6e-5c1c-9d0a-3c9d4b1f7a10")
"""Namespace of the ids of imported trajectories: same dataset, file and place → same id."""


@dataclass(slots=True)
class Plan:
    """The plan of an import: spec, arrays, and where its episodes start and end."""

    spec: EnvSpec
    obs: dict[str, Array]
    actions: dict[str, Array]
    rewards: NDArray[np.float32]
    next_obs: dict[str, Array] | None
    infos: dict[str, Array]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    """Last row of each episode, inclusive."""
    terminated: NDArray[np.bool_]
    """Per episode."""
    truncated: NDArray[np.bool_]
    """Per episode; only one that goes on in another trajectory is neither."""
    warnings: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.rewards)


def plan(source: RawFile, options: ImportOptions, max_rows: int) -> Plan:
    """Check the arrays and find the episodes. Raises `ImportRefused`."""
    columns, warnings = source.map, list(source.warnings)
    if options.spec is not None or SPEC in source.arrays:
        _rename(columns, options.spec or written_spec(source))
    for role in ("observation", "action", "reward"):
        if not columns.arrays.get(role) and columns.one(role) is None and role not in columns.given:
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
    rewards = np.zeros(source.rows) if reward is None else source.numbers_of(reward)
    lists = {} if source.ends is not None else _lists(source, warnings)
    flags = read_flags(columns, source.numbers_of)
    actions = {k: _joined(source, names) for k, names in columns.arrays["action"].items()}
    next_obs = _next(source, obs)
    infos = _infos(source, source.rows)
    split = None if lists or source.ends is not None else _split_by_ids(source, flags, warnings)
    if split is not None and split.order is not None:
        obs, actions = _taken(obs, split.order), _taken(actions, split.order)
        next_obs = None if next_obs is None else _taken(next_obs, split.order)
        infos, flags = _taken(infos, split.order), _taken(flags, split.order)
        rewards = rewards[split.order]
    ends = split.ends if split is not None else source.ends
    if ends is None and lists:
        ends = next(iter(lists.values()))
    sure = source.ends is not None or ENDS in lists
    if next_obs is not None and not sure and not _informative(_every(flags, ends), obs, next_obs):
        warnings.append("next_observations are the shifted rows: final observations are unknown")
        next_obs = None
    if ends is not None:
        check_inside(flags, columns, Split(ends, []))
        if next_obs is not None and not sure:
            _warn_of_jumps(obs, next_obs, ends, warnings, out_of_order(columns))
    elif {"done", "first"} & flags.keys():
        ends = np.flatnonzero(split_by_flags(flags, source, columns, warnings))
        if next_obs is not None:
            _warn_of_jumps(obs, next_obs, ends, warnings, out_of_order(columns))
    elif not _says_ends(flags, columns) and not (options.max_steps and not flags):
        raise missing("terminated", source)
    else:
        terminals = flags.get("terminated", np.zeros(source.rows, np.bool_))
        timeouts = flags.get("truncated")
        marks = terminals if timeouts is None else terminals | timeouts
        check_masks(source, columns, marks, flags)
        ends, in_flags = _split(terminals, timeouts, obs, next_obs, options.max_steps, warnings)
        final = np.zeros(source.rows, np.bool_)
        final[ends] = True
        final = with_restarts(source, columns, final, flags, warnings)
        ends = np.flatnonzero(final)
        check_sources(source, columns, final)
        if in_flags:
            infos["terminals"] = terminals
    if next_obs is not None and not sure:
        names = ",".join(next(iter(columns.arrays["next_observation"].values())))
        if "next_observation" not in columns.given and (
            kind := blank(
                [[array[ends[:-1] if len(ends) > 2 else ends] for array in next_obs.values()]],
                ([array[a:b] for array in obs.values()] for a, b in _blocks(source.rows)),
            )
        ):
            warnings.append(said_blank(names, kind))
            next_obs = None
        else:
            for array in next_obs.values():
                check_final(names, array[ends], "the last row of an episode")
    warn_of_both(flags, ends, warnings)
    warn_of_done(flags, columns, warnings)
    if "terminated" not in flags and "done" not in flags and flags:
        warnings.append("nothing says that an episode was terminated: all are truncated")
    rounding = rounded("rewards", rewards, np.float32)
    with np.errstate(over="ignore"):
        stored = rewards.astype(np.float32)
    finite("rewards", stored, split)
    obs = in_order(options.spec, source, "observation", obs, warnings)
    actions = in_order(options.spec, source, "action", actions, warnings)
    if next_obs is not None:
        next_obs = in_order(options.spec, source, "observation", next_obs, [])
    for name, arrays in (("observations", obs), ("actions", actions)):
        for key, array in arrays.items():
            finite(name if len(arrays) == 1 else f"{name}/{key}", array, split)
    spec = choose_spec(obs, actions, next_obs, infos, source, options, warnings)
    # Converted one by one, so that the file's arrays go as theirs come.
    source.arrays.clear()
    obs, actions, next_obs, infos = fit(
        spec, obs, actions, next_obs, infos, source.dropped, warnings
    )
    warnings += [rounding] if rounding else []
    warnings += _left_out(source, options)
    starts = np.concatenate([[0], ends[:-1] + 1])
    terminated = terminated_at(flags, ends)
    exported = ENDS in lists and "truncated" in flags
    cut = flags["truncated"][ends] if exported else np.ones(len(ends), np.bool_)
    return Plan(
        spec,
        obs,
        actions,
        stored,
        next_obs,
        infos,
        starts,
        ends,
        terminated,
        cut & ~terminated,
        warnings,
    )


def trajectories(found: Plan, options: ImportOptions) -> Iterator[Trajectory]:
    """The episodes in file order. Raises `ImportRefused` for an invalid one."""
    source = f"{options.format}:{options.sha256}"
    for index, (start, end) in enumerate(zip(found.starts, found.ends, strict=True)):
        stop = end + 1
        finals = found.obs if found.next_obs is None else found.next_obs
        try:
            yield Trajectory(
                obs={
                    key: np.concatenate([array[start:stop], finals[key][end:stop]])
                    for key, array in found.obs.items()
                },
                actions={key: array[start:stop] for key, array in found.actions.items()},
                rewards=found.rewards[start:stop],
                terminated=bool(found.terminated[index]),
                truncated=bool(found.truncated[index]),
                final_obs_valid=found.next_obs is not None,
                infos={
                    key: np.concatenate([a[start:stop], a[end:stop]])
                    for key, a in found.infos.items()
                },
                metadata=TrajectoryMetadata(
                    env=options.env or found.spec.env,
                    episode_id=f"{options.sha256[:12]}/{index}",
                    source=source,
                ),
                id=trajectory_id(options, index),
            )
        except InvalidTrajectory as error:
            raise ImportRefused(
                f"episode {index} (rows {start} … {end}): {error}",
                expected=error.expected,
                got=error.got,
            ) from None


def trajectory_id(options: ImportOptions, index: int) -> str:
    return str(uuid_utils.uuid5(NAMESPACE, f"{options.dataset}/{options.sha256}/{index}"))


# --- where episodes end ---------------------------------------------------------------------------


def _split(
    terminals: NDArray[np.bool_],
    timeouts: NDArray[np.bool_] | None,
    obs: dict[str, Array],
    next_obs: dict[str, Array] | None,
    max_steps: int,
    warnings: list[str],
) -> tuple[NDArray[np.int64], bool]:
    """(last row of each episode, whether some terminals are not ends)."""
    rows = len(terminals)
    outs = np.zeros(rows, np.bool_) if timeouts is None else timeouts
    ends = terminals | outs
    candidates = np.flatnonzero(terminals[:-1] & ~outs[:-1])
    inside = np.zeros(0, np.int64)
    if next_obs is not None:
        inside = candidates[_same(obs, candidates + 1, next_obs, candidates)]
    elif len(candidates) and bool(outs.any()) and _flags_only(terminals, outs, obs, candidates):
        inside = candidates
    ends[inside] = False
    if max_steps and not bool(outs.any()):
        _cut(ends, max_steps)
    if not bool(ends[-1]):
        tail = rows - 1 - int(np.flatnonzero(ends)[-1]) if bool(ends.any()) else rows
        warnings.append(
            "the last step has no end: kept as a truncated trajectory"
            if tail == 1
            else f"the last {tail:,} steps have no end: kept as a truncated trajectory"
        )
        ends[-1] = True
    if len(inside):
        warnings.append(
            f"{pluralize(len(inside), 'terminal')} kept as info 'terminals', not as ends: no reset"
            " follows"
        )
    if next_obs is not None:
        why = "timeouts may not match resets"
        _warn_of_jumps(obs, next_obs, np.flatnonzero(ends), warnings, why)
    return np.flatnonzero(ends), len(inside) > 0


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


def _split_by_ids(source: RawFile, flags: Flags, warnings: list[str]) -> Split | None:
    if not source.map.episode:
        return None
    return split_by_ids(source, source.map, warnings, lengths=not flags)


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
    if not vectors or sum(array.shape[1] for array in vectors) > 512:
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
    if array.ndim > 5:
        raise ImportRefused(f"{name} has too many dimensions", expected="≤ 5", got=str(array.shape))
    if array.size == 0 and rows:
        raise ImportRefused(
            f"{name} has no elements", expected="at least one in each row", got=str(array.shape)
        )
    return native(array)


def _next(source: RawFile, obs: dict[str, Array]) -> dict[str, Array] | None:
    """The next observations, in the shapes and types of the observations."""
    columns = source.map.arrays["next_observation"]
    if not columns:
        return None
    if columns.keys() != obs.keys():
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
    if array.ndim > 5:
        return f"too many dimensions (shape {array.shape})"
    if array.size == 0 or array.size // rows > MAX_ELEMENTS:
        return f"rows of an invalid size (shape {array.shape})"
    if array.dtype.name not in DTYPES:
        return f"unsupported type ({array.dtype})"
    return ""


def _left_out(source: RawFile, options: ImportOptions) -> list[str]:
    """A warning for each info that is dropped, and for each unknown name in drop_infos."""
    lines = [f"info {name[:80]!r} left out: {why}" for name, why in sorted(source.dropped.items())]
    if more := len(lines) - MOST_LINES:
        lines = [*lines[:MOST_LINES], f"… and {more} more infos"] if more > 0 else lines
    known = [*source.dropped, *source.infos]
    for requested in options.drop_infos:
        if requested != "*" and not any(
            n == requested or n.startswith(f"{requested}/") for n in known
        ):
            near = difflib.get_close_matches(requested, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            lines.append(f"drop_infos: the file has no info {requested[:80]!r}{hint}")
    return lines


def finite(name: str, array: Array, split: Split | None) -> None:
    """Refuse NaN and infinity, with the row of the file."""
    if array.dtype.kind == "f" and not all_finite(array):
        invalid = ~np.isfinite(array.reshape(len(array), -1))
        row = int(invalid.any(axis=1).argmax())
        if split is not None and split.order is not None:
            row = int(split.order[row])
        raise ImportRefused(
            f"{name} contains invalid numbers",
            expected="finite",
            got=f"{int(invalid.sum())} NaN or infinite, the first in row {row}",
        )
