"""D4RL's flat arrays → trajectories: finds the ends of episodes and the spec.

A D4RL file is one long table of N steps; only flags separate episodes:

    row  | observations actions rewards terminals timeouts [next_observations]
    i    | s_i          a_i     r_i     0         0         s_i+1
    e    | s_e          a_e     r_e     1         0         true s_e+1       the episode ends here
    e+1  | s_0 of the next episode …

Rules, each for a quirk of real files (tests/server/test_imports_d4rl.py has one of each):
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uuid_utils
from numpy.typing import NDArray

from server.imports.raw_file import (
    ENDS,
    REQUIRED,
    Array,
    ImportOptions,
    ImportRefused,
    RawFile,
    as_flags,
    check_dtype,
)
from server.imports.spec import choose_spec, fit
from stepwell._plural import pluralize
from stepwell.errors import InvalidTrajectory
from stepwell.rounding import rounded
from stepwell.spaces import (
    DTYPES,
    MAX_ELEMENTS,
    EnvSpec,
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
    obs: Array
    actions: Array
    rewards: NDArray[np.float32]
    next_obs: Array | None
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
    for name in REQUIRED:
        if name not in source.arrays:
            raise ImportRefused(
                f"{name} is missing",
                expected=", ".join(REQUIRED),
                got=", ".join(sorted(source.arrays)) or "none of them",
            )
    rows = _rows(source.arrays["observations"])
    if not 1 <= rows <= max_rows:
        raise ImportRefused(
            "observations has an invalid length", expected=f"1 … {max_rows}", got=rows
        )
    warnings = list(source.warnings)
    rewards = _column(source, "rewards", rows)
    terminals = _flags(source, "terminals", rows)
    timeouts = _flags(source, "timeouts", rows) if "timeouts" in source.arrays else None
    obs = _table(source, "observations", rows)
    actions = _table(source, "actions", rows)
    next_obs = _table(source, "next_observations", rows, like=obs)
    listed = ENDS in source.arrays
    if next_obs is not None and not listed and not _informative(terminals, timeouts, obs, next_obs):
        warnings.append("next_observations are the shifted rows: final observations are unknown")
        next_obs = None
    infos = _infos(source, rows)
    rounding = rounded("rewards", rewards, np.float32)
    with np.errstate(over="ignore"):
        rewards = rewards.astype(np.float32)
    _finite("rewards", rewards)
    if listed:
        ends, in_flags = _listed_ends(source, terminals, timeouts), False
    else:
        ends, in_flags = _split(terminals, timeouts, obs, next_obs, options.max_steps, warnings)
    if in_flags:
        infos["terminals"] = terminals
    spec = choose_spec(obs, actions, next_obs, infos, source, options, warnings)
    obs, actions, next_obs, infos = fit(
        spec, obs, actions, next_obs, infos, source.dropped, warnings
    )
    warnings += [rounding] if rounding else []
    warnings += _left_out(source, options)
    for name, array in (("observations", obs), ("actions", actions)):
        _finite(name, array)
    starts = np.concatenate([[0], ends[:-1] + 1])
    terminated = terminals[ends]
    cut = timeouts[ends] if listed and timeouts is not None else np.ones(len(ends), np.bool_)
    return Plan(
        spec,
        obs,
        actions,
        rewards,
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
    observation, action = next(iter(found.spec.observations)), next(iter(found.spec.actions))
    for index, (start, end) in enumerate(zip(found.starts, found.ends, strict=True)):
        stop = end + 1
        obs = found.obs[start:stop]
        last = obs[-1:] if found.next_obs is None else found.next_obs[end:stop]
        try:
            yield Trajectory(
                obs={observation: np.concatenate([obs, last])},
                actions={action: found.actions[start:stop]},
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
    obs: Array,
    next_obs: Array | None,
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
        inside = candidates[_same(obs[candidates + 1], next_obs[candidates])]
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
    if both := int(np.count_nonzero(terminals & outs)):
        warnings.append(
            f"{pluralize(both, 'step')} {'is' if both == 1 else 'are'} both terminal and timeout:"
            " treated as terminated"
        )
    if len(inside):
        warnings.append(
            f"{pluralize(len(inside), 'terminal')} kept as info 'terminals', not as ends: no reset"
            " follows"
        )
    _warn_of_jumps(obs, next_obs, ends, warnings)
    return np.flatnonzero(ends), len(inside) > 0


def _listed_ends(
    source: RawFile, terminals: NDArray[np.bool_], timeouts: NDArray[np.bool_] | None
) -> NDArray[np.int64]:
    """The last row of each episode, as the file lists them. Raises `ImportRefused`."""
    ends, rows = source.arrays[ENDS], len(terminals)
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
    ends = ends.astype(np.int64)
    inside = terminals if timeouts is None else terminals | timeouts
    if int(np.count_nonzero(inside)) != int(np.count_nonzero(inside[ends])):
        raise ImportRefused(
            f"terminals or timeouts are set where {ENDS} has no end",
            expected="flags at ends only",
            got=f"row {int(np.setdiff1d(np.flatnonzero(inside), ends)[0])}",
        )
    return ends


def _informative(
    terminals: NDArray[np.bool_], timeouts: NDArray[np.bool_] | None, obs: Array, next_obs: Array
) -> bool:
    """Whether next_observations differ from the next row anywhere.

    Where they never do, they were computed by shifting the rows: at an end they are the next
    episode's first observation, which is wrong. Where they differ, but not at an end, the ends are
    marked at wrong rows (antmaze v0), which is another mistake.
    """
    ends = np.flatnonzero((terminals if timeouts is None else terminals | timeouts)[:-1])
    if len(ends) == 0 or not bool(_same(obs[ends + 1], next_obs[ends]).all()):
        return True
    return any(
        not bool(_same(obs[start + 1 : stop + 1], next_obs[start:stop]).all())
        for start, stop in _blocks(len(obs) - 1)
    )


def _flags_only(
    terminals: NDArray[np.bool_],
    timeouts: NDArray[np.bool_],
    obs: Array,
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
    flat = obs.reshape(len(obs), -1)
    if flat.shape[1] > 512 or flat.dtype.kind != "f":
        return False
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


def _same(a: Array, b: Array) -> NDArray[np.bool_]:
    """Row by row: equal up to rounding."""
    near = a == b if a.dtype.kind != "f" else np.abs(a - b) <= 1e-6 * np.maximum(1.0, np.abs(a))
    return np.asarray(near.all(axis=tuple(range(1, near.ndim))))


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + 65_536, rows)) for start in range(0, rows, 65_536))


def _warn_of_jumps(
    obs: Array, next_obs: Array | None, ends: NDArray[np.bool_], warnings: list[str]
) -> None:
    """Warn of rows in an episode that do not follow from the row before (antmaze v0's timeouts)."""
    if next_obs is None:
        return
    broken = 0
    for start, stop in _blocks(len(ends) - 1):
        apart = ~_same(obs[start + 1 : stop + 1], next_obs[start:stop])
        broken += int(np.count_nonzero(apart & ~ends[start:stop]))
    if broken:
        warnings.append(
            f"after {pluralize(broken, 'step')} inside trajectories the next row is not what the"
            " step led to: timeouts may not match resets"
        )


# --- the arrays -----------------------------------------------------------------------------------


def _rows(array: Array) -> int:
    if array.ndim < 1:
        raise ImportRefused("observations", expected="an array [N, …]", got="a scalar")
    return len(array)


def _native(array: Array) -> Array:
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))


def _table(source: RawFile, name: str, rows: int, *, like: Array | None = None) -> Any:
    """An array [N, …]; with `like`, of the same shape and type, or None if it is missing."""
    if name not in source.arrays:
        return None
    array = source.arrays.pop(name)
    check_dtype(name, array.dtype)
    if array.ndim < 1 or len(array) != rows:
        raise ImportRefused(
            f"{name} has the wrong length",
            expected=f"{pluralize(rows, 'row')}, as observations has",
            got=f"shape {array.shape}",
        )
    if array.ndim > 5:
        raise ImportRefused(f"{name} has too many dimensions", expected="≤ 5", got=str(array.shape))
    if like is not None and (array.shape != like.shape):
        raise ImportRefused(
            f"{name} has the wrong shape", expected=str(like.shape), got=str(array.shape)
        )
    if like is not None and array.dtype != like.dtype:
        array = array.astype(like.dtype)
    return _native(array)


def _column(source: RawFile, name: str, rows: int) -> Array:
    """An array [N], or [N, 1]."""
    array = source.arrays[name]
    check_dtype(name, array.dtype)
    if array.shape == (rows, 1):
        array = array[:, 0]
    if array.shape != (rows,):
        raise ImportRefused(
            f"{name} has the wrong length",
            expected=f"[{rows}] or [{rows}, 1], as observations has {pluralize(rows, 'row')}",
            got=f"shape {array.shape}",
        )
    return _native(array)


def _flags(source: RawFile, name: str, rows: int) -> NDArray[np.bool_]:
    return as_flags(name, _column(source, name, rows))


def _infos(source: RawFile, rows: int) -> dict[str, Array]:
    """The infos that are kept; `source.dropped` gets the reasons for all others."""
    kept: dict[str, Array] = {}
    for name, array in source.infos.items():
        if why := _unkeepable(name, array, rows):
            source.dropped[name] = why
        else:
            kept[name] = _native(array)
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


def _finite(name: str, array: Array) -> None:
    if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
        bad = int(np.count_nonzero(~np.isfinite(array)))
        raise ImportRefused(
            f"{name} contains invalid numbers", expected="finite", got=f"{bad} NaN or infinite"
        )
