"""Where episodes begin and end, from what a table or a flat file says of its rows. Untrusted: runs
only in the sandbox.

    episode                     rows with one id are one episode (episode_ids.py)
    first, done                 without ids: an episode begins, or ends, exactly there
    terminated, truncated       without those, too: it ends at each of them

What contradicts itself, or could be read in two ways, is refused with the options that decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from server.imports.column_map import ColumnMap
from server.imports.episode_ids import Rows, Split, check_sources
from server.imports.raw_file import Array, ImportRefused, as_flags
from stepwell._wording import pluralize

Flags = dict[str, NDArray[np.bool_]]
"""terminated, truncated, done, first → [rows]."""
ROLES = ("terminated", "not_terminated", "truncated", "done", "not_done", "first")
INNER = ("terminated", "truncated", "done")
"""Flags that only the last row of an episode may have."""
MASKS = ("mask", "masks")
"""Some files have 0 here where an episode ends; in others these are of actions or of padding."""
VALID = ("valid", "valids")
"""0 in the row of a final observation, in OGBench's compact files."""
LISTS = {
    **dict.fromkeys(
        ("episode_ends", "episode_end", "ends", "ep_ends", "meta/episode_ends"), "ends"
    ),
    **dict.fromkeys(("episode_starts", "episode_start", "starts", "ep_starts"), "starts"),
    **dict.fromkeys(
        (
            *("episode_lengths", "episode_lens", "episode_length", "ep_lengths", "ep_lens"),
            *("traj_lengths", "traj_lens", "trajectory_lengths", "lengths"),
        ),
        "lengths",
    ),
}
"""Names of lists with one number for each episode."""


def read_flags(columns: ColumnMap, read: Callable[[str], Array]) -> Flags:
    """The flags of all rows; two columns that say the same thing must agree."""
    found: Flags = {}
    said: dict[str, str] = {}
    for role in ROLES:
        name, into = columns.one(role), role.removeprefix("not_")
        for column in () if name is None else (name, *columns.rivals.get(role, ())):
            try:
                marks = as_flags(column, read(column))
            except ImportRefused as error:
                if column != name:
                    continue  # no flags, so something else
                expected = f"{error.expected}; or columns={role}= (not to use it)"
                expected += cure_of_step_type([column])
                raise ImportRefused(error.detail, expected=expected, got=error.got) from None
            marks = ~marks if role != into else marks
            if into in found and not np.array_equal(found[into], marks):
                row = int((found[into] != marks).argmax())
                raise ImportRefused(
                    f"{said[into][:100]} and {column[:100]} differ about where episodes are {into}",
                    expected=f"columns={into}={said[into][:100]} or columns={role}={column[:100]}"
                    + ("" if role == into else f" with the other empty ({into}= or {role}=)"),
                    got=f"row {row}",
                )
            found[into] = marks
            said.setdefault(into, column)
    return found


def check_inside(flags: Flags, columns: ColumnMap, split: Split) -> None:
    """Flags (in the new order) are at the ends of episodes, or the file contradicts itself."""
    for role, marks in flags.items():
        name = columns.flag(role) or role
        if role == "first":
            starts = np.concatenate([[0], split.ends[:-1] + 1])
            inside = int(np.count_nonzero(marks)) - int(np.count_nonzero(marks[starts]))
            where = "after the first row"
        else:
            inside = int(np.count_nonzero(marks)) - int(np.count_nonzero(marks[split.ends]))
            where = "before the last step"
        if inside:
            given = ",".join(columns.episode)
            raise ImportRefused(
                f"{name[:100]} is set {where} of an episode",
                expected=f"flags at ends; columns={role}= (not to use it), columns=episode= "
                "(episodes end where flags are)"
                + (f", or columns=episode=KEY,{given[:100]} if ids repeat" if given else ""),
                got=pluralize(inside, "step"),
            )


def split_by_flags(
    flags: Flags, rows: Rows, columns: ColumnMap, warnings: list[str]
) -> NDArray[np.bool_]:
    """[rows]: where episodes end. The last row is one, whatever the flags say."""
    marks = _marks(flags, rows.rows, columns)
    check_masks(rows, columns, marks, flags)
    marks = with_restarts(rows, columns, marks, flags, warnings)
    check_sources(rows, columns, marks)
    end_tail(marks, [] if "first" in flags else warnings)
    return marks


def end_tail(marks: NDArray[np.bool_], warnings: list[str]) -> None:
    """Make the last row an end."""
    if marks[-1]:
        return
    tail = len(marks) - 1 - int(np.flatnonzero(marks)[-1]) if marks.any() else len(marks)
    marks[-1] = True
    warnings.append(
        "the last step has no end: kept as a truncated trajectory"
        if tail == 1
        else f"the last {tail:,} steps have no end: kept as a truncated trajectory"
    )


def with_restarts(
    rows: Rows,
    columns: ColumnMap,
    marks: NDArray[np.bool_],
    flags: Flags,
    warnings: list[str],
) -> NDArray[np.bool_]:
    """The ends, and those where the column of steps begins again. Raises `ImportRefused` where
    rows are not in its order, or where `done` or `first` says that there is no end."""
    step = columns.one("step")
    if step is None or not rows.is_scalar(step):
        return marks
    try:
        steps = rows.numbers_of(step)
    except ImportRefused:
        if "step" in columns.given:
            raise
        return marks
    back = ~marks[:-1] & (steps[1:] <= steps[:-1])
    if not bool(back.any()):
        return marks
    row = int(back.argmax())
    exact = next((role for role in ("done", "first") if role in flags), None)
    if exact is not None or bool((steps[1:][back] != steps.min()).any()):
        check_sources(rows, columns, marks)  # says more
        name = exact and columns.flag(exact)
        raise ImportRefused(
            f"{step[:100]} does not increase within an episode"
            + (f" of {name[:100]}" if name else ""),
            expected=f"rows in the order of {step[:100]}, columns=episode= with their ids, or "
            "columns=step= (not to use it)"
            + (
                f", or columns=terminated={name[:100]} {exact}=" if exact == "done" and name else ""
            ),
            got=f"{steps[row]}, then {steps[row + 1]} in row {row + 1}",
        )
    warnings.append(
        f"an episode ends wherever {step} begins again: {pluralize(int(back.sum()), 'end')} "
        "without a flag, stored as truncated; columns=step= goes by the flags alone"
    )
    every: NDArray[np.bool_] = marks | np.append(back, False)
    return every


def listed_ends(columns: ColumnMap, arrays: dict[str, Array], rows: int) -> list[str]:
    """Names of arrays that list ends, starts or lengths of episodes, taken out of the roles that
    their names have; none where somebody has said what tells episodes apart."""
    if {"episode", "done", "not_done", "first"} & columns.given:
        return []
    found = [n for n, a in arrays.items() if n.lower() in LISTS and _is_list(a, rows)]
    for role in ("done", "first"):
        every = (columns.one(role), *columns.rivals.get(role, ()))
        flags = [name for name in every if name is not None and name not in found]
        columns.rivals[role] = tuple(flags[1:])
        if flags:
            columns.single[role] = flags[0]
        else:
            columns.single.pop(role, None)
    return found


def _is_list(array: Array, rows: int) -> bool:
    return array.ndim == 1 and array.dtype.kind in "iu" and 0 < len(array) != rows


def ends_of_list(name: str, array: Array, rows: int) -> NDArray[np.int64] | None:
    """The last row of each episode; None for lengths of something else. Raises `ImportRefused`."""
    numbers, kind = array.astype(np.int64), LISTS[name.lower()]
    if kind == "lengths":
        numbers = numbers[numbers != 0]
        if bool((numbers < 0).any()) or int(numbers.sum()) != rows:
            return None
        return np.cumsum(numbers) - 1
    rising = bool((np.diff(numbers) > 0).all()) and int(numbers[0]) >= 0
    if kind == "ends" and rising and int(numbers[-1]) in (rows - 1, rows):
        ends = numbers - (int(numbers[-1]) == rows)
        if int(ends[0]) >= 0:
            return ends
    if kind == "starts" and rising and int(numbers[0]) == 0 and int(numbers[-1]) < rows:
        return np.append(numbers[1:], rows) - 1
    raise ImportRefused(
        f"{name[:100]} is no list of {kind} of episodes",
        expected=f"ascending numbers, the last {rows - 1}, or {rows} if it is the row after each; "
        "columns=done= (not to use it)"
        if kind == "ends"
        else f"ascending numbers from 0, below {rows}; columns=first= (not to use it)",
        got=f"{numbers[:3].tolist()} … {int(numbers[-1])}",
    )


def terminated_at(flags: Flags, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[episodes]; those that are not are truncated. `done` alone is taken for terminated."""
    if "terminated" in flags:
        return flags["terminated"][ends]
    if "done" not in flags:
        return np.zeros(len(ends), np.bool_)
    cut = flags["truncated"][ends] if "truncated" in flags else np.zeros(len(ends), np.bool_)
    return flags["done"][ends] & ~cut


def blank(finals: Iterable[Sequence[Array]], observations: Iterable[Sequence[Array]]) -> str:
    """Whether all final observations (two or more) are "NaN", or are "0" though no other is: rows
    were shifted and the gap was filled. "" if not. Each item has the arrays of some rows."""
    kinds: set[str] = set()
    count = 0
    for arrays in finals:
        rows = _flat(arrays)
        kinds.add("NaN" if np.isnan(rows).all() else "" if rows.any() else "0")
        count += len(rows)
        if kinds not in ({"NaN"}, {"0"}):
            return ""
    if count < 2 or (kinds == {"0"} and any(not _flat(a).any(axis=1).all() for a in observations)):
        return ""
    return kinds.pop()


def _flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)


def said_blank(name: str, kind: str) -> str:
    return (
        f"{name} is {kind} at the end of every episode, as a shift leaves it: final observations "
        "are unknown"
        + (f"; columns=next_observation={name} takes them as they are" if kind == "0" else "")
    )


def check_final(name: str, final: Array, where: str) -> None:
    """Raises `ImportRefused` for next observations at ends that are not finite."""
    if final.dtype.kind == "f" and not np.isfinite(final).all():
        raise ImportRefused(
            f"{name[:100]} contains invalid numbers at the end of an episode",
            expected="finite; or columns=next_observation= (final observations are unknown)",
            got=f"NaN or infinite in {where}",
        )


def cure_of_step_type(names: Iterable[str]) -> str:
    """What makes flags of dm_env's step_type; "" if none of the names is that."""
    if "step_type" not in [name.lower() for name in names]:
        return ""
    return (
        "; of dm_env's step_type: is_first = step_type == 0, is_last = step_type == 2, is_terminal "
        "= is_last & (discount == 0)"
    )


def jumps(broken: int, why: str) -> str:
    """The warning that the next observation of `broken` steps is not the next row's."""
    return (
        f"after {pluralize(broken, 'step')} inside trajectories the next row is not what the step "
        f"led to: {why}"
    )


def out_of_order(columns: ColumnMap) -> str:
    """Why that may be, where something else than flags tells where episodes end."""
    step = columns.one("step")
    return "are the rows in order?" if step is None else f"does {step[:100]} count their order?"


def warn_of_final_rows(
    flags: Flags, rewards: Array | None, finals: NDArray[np.int64], warnings: list[str]
) -> None:
    """Warn where the last rows of episodes, `finals`, are no steps; `rewards` has all rows."""
    warnings.append(
        "rows with is_last are final observations, as in RLDS, and no steps; columns=first= makes "
        "them steps"
    )
    if rewards is not None and (given := int(np.count_nonzero(rewards[finals]))):
        warnings.append(f"{pluralize(given, 'reward')} of such rows left out")
    if unmarked := int(np.count_nonzero(~flags["done"][finals])):
        warnings.append(
            f"{pluralize(unmarked, 'episode')} without is_last: the last row is taken for its "
            "final observation"
        )


def check_rlds(firsts: Iterable[Array], lasts: Iterable[Array]) -> None:
    """Refuse steps of Dreamer and dm_env, where action and reward of a row led to it. `firsts` has
    actions and rewards of the first rows of episodes, `lasts` actions of the last."""
    if any(array.any() for array in firsts) or not any(array.any() for array in lasts):
        return
    raise ImportRefused(
        "an action may have led to the observation of its row (Dreamer, dm_env) or be taken after "
        "it (RLDS): those of first rows are 0, those of rows with is_last are not",
        expected="RLDS's order: numpy.roll(a, -1, axis=0) of actions and rewards if they led to "
        "the row; action[is_last] = 0 if they are in this order already",
        got="is_first, is_last and is_terminal",
    )


def warn_of_both(flags: Flags, ends: NDArray[np.int64], warnings: list[str]) -> None:
    """Ends that are terminated and truncated are taken for terminated."""
    if not {"terminated", "truncated"} <= flags.keys():
        return
    if both := int(np.count_nonzero((flags["terminated"] & flags["truncated"])[ends])):
        warnings.append(
            f"{pluralize(both, 'step')} {'is' if both == 1 else 'are'} both terminal and timeout:"
            " treated as terminated"
        )


def warn_of_done(flags: Flags, columns: ColumnMap, warnings: list[str]) -> None:
    if "done" in flags and not {"terminated", "truncated"} & flags.keys():
        name, role = columns.one("done"), "done"
        if name is None:
            name, role = columns.one("not_done"), "not_done"
        warnings.append(
            f"{name} does not tell ends from time-outs: stored as terminated; if they are "
            f"time-outs: columns=truncated={name} {role}="
            if role == "done"
            else f"{name} does not tell ends from time-outs: stored as terminated"
        )


# --- flags ----------------------------------------------------------------------------------------


def _marks(flags: Flags, count: int, columns: ColumnMap) -> NDArray[np.bool_]:
    """Where episodes end. `first` and `done` say it exactly, so other flags are among theirs."""
    every = np.zeros(count, np.bool_)
    for role in INNER:
        every |= flags.get(role, False)
    marks = every
    decides = next((role for role in ("first", "done") if role in flags), None)
    if decides == "first":
        marks = np.append(flags["first"][1:], every[-1])
    elif decides == "done":
        marks = flags["done"].copy()
    beyond = every & ~marks
    if decides and bool(beyond.any()):
        role = next(r for r in INNER if bool((flags.get(r, every & False) & ~marks).any()))
        name = columns.flag(role)
        other = columns.flag(decides)
        raise ImportRefused(
            f"{name} is set where {other} has no end of an episode",
            expected=f"columns={decides}= or columns={role}= (not to use one of them)",
            got=f"{pluralize(int(beyond.sum()), 'row')}, such as {int(beyond.argmax())}",
        )
    return marks


def check_masks(rows: Rows, columns: ColumnMap, marks: NDArray[np.bool_], flags: Flags) -> None:
    """A mask that is 0 in other rows than those known to be ends may say where more are, or which
    of the known ones are terminations."""
    used, exact = columns.used(), bool({"done", "first"} & flags.keys())
    for name in rows.columns:
        if name.lower() not in (*MASKS, *VALID) or name in used or not rows.is_scalar(name):
            continue
        if {"not_done", "not_terminated"} & columns.given:
            continue
        try:
            zero = ~as_flags(name, rows.numbers_of(name))
        except ImportRefused:
            continue
        if name.lower() in VALID:
            if bool(zero.any()) and not bool((zero & ~marks).any()):
                raise ImportRefused(
                    f"rows where {name} is 0 seem to be final observations, which are no steps",
                    expected=f"flags of RLDS: is_last = {name} == 0, is_first = "
                    "numpy.roll(is_last, 1), is_terminal = is_last where the episode terminated; "
                    f"without {name} and {', '.join(columns.one(role) or '' for role in flags)}",
                    got=f"{pluralize(int(zero.sum()), 'row')}, such as {int(zero.argmax())}",
                )
            continue
        same = any(np.array_equal(zero, known) for known in (marks, *flags.values()))
        if exact and ("terminated" in flags or bool((zero & ~marks).any())):
            continue  # of something else
        if exact and bool(zero.any()) and not same:
            raise ImportRefused(
                f"{name} is 0 in {pluralize(int(zero.sum()), 'row')} where episodes end, and not in"
                " others, which may tell terminations from time-outs",
                expected=f"columns=not_terminated={name} (only those are terminated), or "
                "columns=not_terminated= (it says something else)",
                got=f"row {int(zero.argmax())}",
            )
        if bool(zero.any()) and not same:
            raise ImportRefused(
                f"{name} is 0 in {pluralize(int(zero.sum()), 'row')}, which may be ends of "
                "episodes",
                expected=f"columns=not_done={name} (an episode ends there), "
                f"columns=not_terminated={name} (it ends there, terminated), or columns=not_done= "
                "(they are none)",
                got=f"row {int(zero.argmax())}",
            )
