"""Which rows are of one episode, by the ids in a table or a flat file. Untrusted: runs only in the
sandbox.

Rows with one id are one episode, by `step` or in the file's order. An id that may be unique only
together with another column (a worker) is refused with the option that decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from server.imports.column_map import FILE, ColumnMap
from server.imports.raw_file import Array, ImportRefused
from stepwell._wording import pluralize, shown

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
TICKS = 10
"""Whole numbers that usually go up by as many from row to row are times, and count no steps."""


class Rows(Protocol):
    """A table, or a file's arrays, in the order of the file."""

    rows: int

    @property
    def columns(self) -> list[str]: ...

    @property
    def file_rows(self) -> list[int]:
        """Number of rows of each file."""

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


def split_by_ids(rows: Rows, columns: ColumnMap, warnings: list[str], *, lengths: bool) -> Split:
    """Group rows of one id into one episode; warn of odd `lengths`. Raises `ImportRefused` where
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


# --- columns that may be a part of the id ---------------------------------------------------------


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
    """Whole numbers count the steps of an episode, so one that is left out was a step; those that
    go up by many from row to row are times."""
    if steps.dtype.kind == "f" and not bool((steps == np.rint(steps)).all()):
        _warn_of_jumps(column, steps, codes, names, warnings)
        return
    whole = steps if steps.dtype.kind == "f" else steps.astype(np.int64)
    apart, within = np.diff(whole), np.diff(codes) == 0
    gaps = np.flatnonzero(within & (apart != 1))
    if not len(gaps):
        return
    if (usual := float(np.median(apart[within]))) >= TICKS:
        warnings.append(
            f"{column[:100]} goes up by {usual:,.0f} from row to row, so it is taken for times, "
            "which put the rows in order; if it counts steps, those between are missing"
        )
        _warn_of_jumps(column, steps, codes, names, warnings)
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
