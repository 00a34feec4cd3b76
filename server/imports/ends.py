"""Where episodes begin and end, from what a table or a flat file says of its rows. Untrusted: runs
only in the sandbox.

    episode                     rows with one id are one episode, by `step` or in the file's order
    first, done                 without ids: an episode begins, or ends, exactly there
    terminated, truncated       without those, too: it ends at each of them

What contradicts itself, or could be read in two ways, is refused with the options that decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from server.imports.column_map import FILE, ColumnMap, shown
from server.imports.raw_file import Array, ImportRefused, as_flags
from stepwell._plural import pluralize

Flags = dict[str, NDArray[np.bool_]]
"""terminated, truncated, done, first → [rows]."""
ROLES = ("terminated", "not_terminated", "truncated", "done", "not_done", "first")
INNER = ("terminated", "truncated", "done")
"""Flags that only the last row of an episode may have."""
MASKS = ("mask", "masks")
"""Some files have 0 here where an episode ends; in others these are of actions or of padding."""
TIMES = ("timestamp", "timestamps", "time", "times", "wall_time", "datetime")
SOURCE = re.compile(
    r"(.*[._/ ])?(worker|actor|env|environment|process|proc|pid|rank|thread|run|seed|collector|"
    r"robot|agent|player|host|node|replica|user|session|subject|instance|lane|slot|sim|simulator|"
    r"shard|client|machine)s?([._ ]?(id|ids|idx|index|indices|num|number|no|name|rank|uuid))?",
    re.IGNORECASE,
)
"""Names of what may count episodes of its own, so that an id is unique only together with it."""
JUMP = 10
"""A time between rows of this many usual ones is a jump."""
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


class Rows(Protocol):
    """A table, or a file's arrays, in the order of the file."""

    rows: int

    @property
    def columns(self) -> list[str]: ...

    @property
    def file_rows(self) -> list[int]:
        """Of each file."""

    def numbers_of(self, name: str) -> Array:
        """[rows]. Raises `ImportRefused`."""

    def ids(self, name: str) -> tuple[NDArray[np.int64], list[str]]:
        """The number of each row's value among the values, and these. Raises `ImportRefused`."""

    def is_scalar(self, name: str) -> bool:
        """Whether the column has one number or text in each row, and can be read."""


@dataclass(slots=True)
class Split:
    """The rows as episodes."""

    ends: NDArray[np.int64]
    """Last row of each, in the new order."""
    names: list[str]
    order: NDArray[np.int64] | None = None
    """The rows in their new order; None: they stay."""


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


def split_by_ids(rows: Rows, columns: ColumnMap, warnings: list[str], *, lengths: bool) -> Split:
    """Rows of one id are one episode; `lengths` that are odd are told. Raises `ImportRefused` where
    ids may not be unique."""
    keys, step = columns.episode, columns.one("step")
    codes, names = _ids(rows, keys)
    steps = np.arange(rows.rows) if step is None else rows.numbers_of(step)
    order = np.lexsort((steps, codes))
    sources = _sources(rows, columns, codes)
    if step is not None:
        doubled = (np.diff(codes[order]) == 0) & (np.diff(steps[order]) == 0)
        if bool(doubled.any()):
            at = order[int(doubled.argmax())]
            raise ImportRefused(
                f"a step occurs twice in episode {names[codes[at]]}",
                expected=f"each {step[:100]} once in an episode{_keys_hint(sources, keys)}",
                got=f"{steps[at]}",
            )
    if sources:
        _refuse_or_warn(rows, columns, sources, codes, names, warnings)
    _check_rivals(rows, columns, codes, names)
    places = 1 + np.flatnonzero(np.diff(codes))
    apart = len(places) + 1 - len(names)
    if apart and step is None and not sources and len(keys) == 1:
        first = codes[np.concatenate([[0], places])]
        seen, counts = np.unique(first, return_counts=True)
        back = seen[counts > 1]
        warnings.append(
            f"the rows of {pluralize(len(back), 'episode')} are not together: those of episode "
            f"{names[back[0]]} are in {int(counts.max())} places, and are joined in the order of "
            f"the file. If the id repeats for each worker or file, give both: "
            f"columns=episode=WORKER,{','.join(keys)[:100]}"
        )
    moved = not bool((order == np.arange(rows.rows)).all())
    ordered = codes[order]
    ends = np.flatnonzero(np.append(np.diff(ordered) != 0, True))
    if step is not None:
        _warn_of_gaps(step, steps[order], ordered, names, warnings)
    else:
        _warn_of_times(rows, columns, order, ordered, names, warnings)
        if lengths:
            _warn_of_lengths(ends, [names[code] for code in ordered[ends]], warnings)
    return Split(ends, [names[code] for code in ordered[ends]], order if moved else None)


def check_inside(flags: Flags, columns: ColumnMap, split: Split) -> None:
    """Flags (in the new order) are at the ends of episodes, or the file contradicts itself."""
    for role, marks in flags.items():
        name = columns.one(role) or columns.one(f"not_{role}") or role
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
    if not marks[-1]:
        if "first" not in flags:
            tail = rows.rows - 1 - int(np.flatnonzero(marks)[-1]) if marks.any() else rows.rows
            warnings.append(
                "the last step has no end: kept as a truncated trajectory"
                if tail == 1
                else f"the last {tail:,} steps have no end: kept as a truncated trajectory"
            )
        marks[-1] = True
    return marks


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
        name = exact and (columns.one(exact) or columns.one(f"not_{exact}"))
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


def check_sources(rows: Rows, columns: ColumnMap, marks: NDArray[np.bool_]) -> None:
    """Episodes that end at `marks` have one value of what may count episodes of its own."""
    if "episode" in columns.given:
        return
    numbers = np.concatenate([[0], np.cumsum(marks[:-1])])
    for source, number in _sources(rows, columns, numbers):
        start = int((numbers == number).argmax())
        raise ImportRefused(
            f"rows of the episode that begins at row {start} have several values of "
            f"{source[:100]}, which was not read",
            expected="a column with the id of the episode, or rows in order of "
            f"{source[:60]}; columns=episode= to go by the flags in the order of the rows",
            got=f"columns {shown(rows.columns)}"[:300],
        )


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
    """What is said where the last rows of episodes, `finals`, are no steps; rewards of all rows."""
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


# --- ids ------------------------------------------------------------------------------------------


def _ids(rows: Rows, keys: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    """Codes in the order of their first rows, and names; several columns are one id together."""
    parts = [_id(rows, key) for key in keys]
    if len(parts) == 1:
        return parts[0]
    together = np.zeros(rows.rows, np.int64)
    for codes, _ in parts:
        together = _compact(together)[0] * (int(codes.max()) + 1) + codes
    found, first = _compact(together)
    return found, ["/".join(names[codes[row]] for codes, names in parts)[:100] for row in first]


def _id(rows: Rows, key: str) -> tuple[NDArray[np.int64], list[str]]:
    if key == FILE and key not in rows.columns:
        kept = [count for count in rows.file_rows if count]
        return np.repeat(np.arange(len(kept)), kept), [f"file {i}" for i in range(len(kept))]
    return rows.ids(key)


def _compact(values: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Values as 0, 1, … in the order of their first rows, and these rows."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)], np.sort(first)


def factorized(name: str, values: Array) -> tuple[NDArray[np.int64], list[str]]:
    """Ids of any type as codes and names. Raises `ImportRefused` for those that are none."""
    if values.dtype.kind == "f":
        if not bool(np.isfinite(values).all()):
            row = int((~np.isfinite(values)).argmax())
            raise ImportRefused(
                f"{name[:100]} has no id in some rows", expected="ids", got=f"row {row}"
            )
        bits = np.finfo(values.dtype).nmant + 1  # larger floats do not have every whole number
        if float(np.abs(values).max()) >= 2**bits:
            raise ImportRefused(
                f"{name[:100]} has floats of 2^{bits} or more, of which several ids can be one",
                expected="ids as integers or texts",
                got=str(values.dtype),
            )
    codes, first = _compact(values)
    return codes, [_text(value) for value in values[first].tolist()]


def _text(value: object) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text[:100]


def _sources(rows: Rows, columns: ColumnMap, codes: NDArray[np.int64]) -> list[tuple[str, int]]:
    """Columns that were not read and may be a part of the id, as they vary within an episode; with
    the number of the first such episode."""
    found = []
    for name in _candidates(rows, columns):
        try:
            values = rows.ids(name)[0]
        except ImportRefused:
            continue  # empty cells
        if (episode := _varies(values, codes)) is not None:
            found.append((name, episode))
    several_files = sum(count > 0 for count in rows.file_rows) > 1
    if columns.episode and several_files and FILE not in columns.episode:
        files = _id(rows, FILE)[0] if FILE not in rows.columns else None
        step = columns.one("step")
        # A row group of an episode may go on in the next file; one that comes back does not.
        if files is not None and step is None and (back := _returns(files, codes)) is not None:
            found.append((FILE, back))
    return found


def _candidates(rows: Rows, columns: ColumnMap) -> Iterator[str]:
    used = columns.used()
    rivals = columns.rivals.get("episode", ())
    for name in rows.columns:
        fits = name in rivals or SOURCE.fullmatch(name)
        if fits and name not in used and rows.is_scalar(name):
            yield name


def _varies(values: NDArray[np.int64], codes: NDArray[np.int64]) -> int | None:
    """The first episode that has several values."""
    first = np.zeros(int(codes.max()) + 1, np.int64)
    first[codes[::-1]] = values[::-1]
    differ = first[codes] != values
    return int(codes[int(differ.argmax())]) if bool(differ.any()) else None


def _returns(files: NDArray[np.int64], codes: NDArray[np.int64]) -> int | None:
    """The first episode whose id comes back in a later file, after others."""
    begins = np.concatenate([[0], 1 + np.flatnonzero(np.diff(codes))])
    seen: dict[int, int] = {}
    for row in begins:
        code, file = int(codes[row]), int(files[row])
        if seen.setdefault(code, file) != file:
            return code
    return None


def _refuse_or_warn(
    rows: Rows,
    columns: ColumnMap,
    sources: list[tuple[str, int]],
    codes: NDArray[np.int64],
    names: list[str],
    warnings: list[str],
) -> None:
    source, episode = sources[0]
    keys = columns.episode
    text = (
        f"rows of episode {names[episode]} are in several files"
        if source == FILE
        else f"rows of episode {names[episode]} have several values of {source[:100]}"
    )
    if "episode" in columns.given:
        warnings.append(f"{text}, and are one trajectory, as {','.join(keys)[:100]} was given")
        return
    values, labels = _id(rows, source)
    held = [labels[code] for code in np.unique(values[codes == episode])[:5]]
    raise ImportRefused(
        f"{text}: the id may be unique only together with it",
        expected=f"columns=episode={source[:100]},{','.join(keys)[:100]} (together), or "
        f"columns=episode={','.join(keys)[:100]} (one episode)",
        got=f"{source[:60]}: {', '.join(held)}"[:200],
    )


def _check_rivals(
    rows: Rows, columns: ColumnMap, codes: NDArray[np.int64], names: list[str]
) -> None:
    """A further column with a usual name of an id has the same episodes."""
    for rival in columns.rivals.get("episode", ()):
        if not rows.is_scalar(rival):
            continue
        try:
            values, known = rows.ids(rival)
        except ImportRefused:
            continue  # empty cells
        if len(known) != len(names) or _varies(codes, values) is not None:
            key = columns.episode[0]
            raise ImportRefused(
                f"{key[:100]} and {rival[:100]} tell other episodes apart",
                expected=f"columns=episode={key[:100]} or columns=episode={rival[:100]}",
                got=f"{len(names)} and {len(known)}",
            )


def _keys_hint(sources: list[tuple[str, int]], keys: Sequence[str]) -> str:
    name = sources[0][0] if sources else "KEY"
    hint = f"; columns=episode={name[:100]},{','.join(keys)[:100]}"
    return hint + (" takes both for the id" if sources else " if ids repeat for each KEY")


# --- what looks odd -------------------------------------------------------------------------------


def _warn_of_gaps(
    column: str, steps: Array, codes: NDArray[np.int64], names: list[str], warnings: list[str]
) -> None:
    """Whole numbers count the steps of an episode, so one that is left out was a step."""
    if steps.dtype.kind == "f" and not bool((steps == np.rint(steps)).all()):
        _warn_of_jumps(column, steps, codes, names, warnings)
        return
    apart = np.diff(steps.astype(np.float64))
    gaps = np.flatnonzero((np.diff(codes) == 0) & (apart != 1))
    if not len(gaps):
        return
    episodes, first = np.unique(codes[gaps]), int(gaps[0])
    more = f" and {pluralize(len(episodes) - 1, 'other')}" if len(episodes) > 1 else ""
    warnings.append(
        f"steps are missing in episode {names[codes[first]]}{more}: {column[:100]} goes from "
        f"{int(steps[first])} to {int(steps[first + 1])}; the rows are stored one after another"
    )


def _warn_of_jumps(
    column: str, times: Array, codes: NDArray[np.int64], names: list[str], warnings: list[str]
) -> None:
    """Times that go back, stand still, or jump within an episode."""
    within = np.diff(codes) == 0
    apart = np.diff(times.astype(np.float64))
    forward = apart[within & (apart > 0)]
    usual = float(np.median(forward)) if len(forward) else 0.0
    odd = np.flatnonzero(within & ((apart <= 0) | (apart > JUMP * usual)))
    if not len(odd):
        return
    first = int(odd[0])
    how = "jumps" if apart[first] > 0 else "does not increase"
    warnings.append(
        f"{column[:100]} {how} in episode {names[codes[first]]}, from {times[first]} to "
        f"{times[first + 1]} (in {pluralize(len(odd), 'place')}): are these rows of one episode?"
    )


def _warn_of_times(
    rows: Rows,
    columns: ColumnMap,
    order: NDArray[np.int64],
    codes: NDArray[np.int64],
    names: list[str],
    warnings: list[str],
) -> None:
    """Without a step, a column of times that is not read tells whether the order is right."""
    used = columns.used()
    for name in rows.columns:
        if name.lower() not in TIMES or name in used or not rows.is_scalar(name):
            continue
        try:
            _warn_of_jumps(name, rows.numbers_of(name)[order], codes, names, warnings)
        except ImportRefused:
            continue  # texts, or empty cells


def _warn_of_lengths(ends: NDArray[np.int64], names: list[str], warnings: list[str]) -> None:
    """All episodes have one length, but a few a multiple of it: two may have one id."""
    lengths = np.diff(np.concatenate([[-1], ends]))
    usual = int(lengths.min())
    longer = np.flatnonzero(lengths != usual)
    if usual < 2 or not 0 < len(longer) * 2 < len(lengths) or bool((lengths % usual).any()):
        return
    at = int(longer[0])
    warnings.append(
        f"episode {names[at]} has {int(lengths[at])} steps, others {usual}: are these several "
        "episodes with one id?"
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
        name = columns.one(role) or columns.one(f"not_{role}")
        other = columns.one(decides) or columns.one(f"not_{decides}")
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
        if name.lower() not in MASKS or name in used or not rows.is_scalar(name):
            continue
        if {"not_done", "not_terminated"} & columns.given:
            continue
        try:
            zero = ~as_flags(name, rows.numbers_of(name))
        except ImportRefused:
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
