"""What a snapshot selects, as blocks of columns (stepwell/manifest.py). No Python object per row.

    select_all      SQL selects rows → masks over the mirror's locations → blocks
    select_changed  the same for the rows changed since, merged into the previous blocks: unchanged
                    blocks are neither read nor copied

Both return the same blocks; `digest_of` hashes blocks, so an unchanged block costs nothing there.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from server.index import mirror as pieces
from server.index.changes import Changes
from server.index.mirror import Mirror
from server.problems import ProblemError
from server.sql.selected import Selected
from stepwell._sql import version_condition
from stepwell.manifest import BLOCK, SCHEMA, Key
from stepwell.messages import CreateSnapshot, split_version

Flags = NDArray[np.bool_]


class Block:
    """Rows of one component and dataset, in order of seq; never empty."""

    def __init__(self, batch: pa.RecordBatch):
        self.batch = batch

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @cached_property
    def digest(self) -> bytes:
        """Digest of its trajectories with their weights and contents."""
        sha = hashlib.sha256()
        for name in ("seq", "id", "weight", "content"):
            sha.update(_bytes_of(self.batch[name]))
        return sha.digest()

    @cached_property
    def shards(self) -> frozenset[str]:
        """Names of the shards that contain its trajectories."""
        column = self.batch["shard"]
        used = np.unique(column.indices.to_numpy())
        return frozenset(column.dictionary.take(pa.array(used)).to_pylist())

    @cached_property
    def steps(self) -> int:
        return int(pc.sum(self.batch["length"]).as_py())

    def same(self, other: Block) -> bool:
        """Whether content and locations are equal."""
        if self is other:
            return True
        if len(self) != len(other) or self.digest != other.digest:
            return False
        return all(
            _plain(self.batch.column(i)).equals(_plain(other.batch.column(i)))
            for i in range(len(SCHEMA))
        )


def all_of(dataset: str | None, locations: pa.RecordBatch) -> Selected:
    """The result of a selection of a whole dataset from these rows."""
    chosen = _flags(pc.equal(_plain(locations["dataset"]), dataset))
    return Selected(np.flatnonzero(chosen), None, (), None)


Damaged = Counter[tuple[str, str]]
"""(dataset, shard) → rows."""
Blocks = dict[Key, Block]
"""Sorted by key."""


@dataclass(frozen=True, slots=True)
class Component:
    """One component of a mixture."""

    select: str
    dataset: str | None
    share: float
    all: bool = False
    """Selects every trajectory of `dataset`, so no SQL is run."""


@dataclass(frozen=True, slots=True)
class SelectionRules:
    """What is left out of every snapshot unless it is requested."""

    include_eval: bool
    quarantined: frozenset[str]
    """Damaged shards."""


def sources_of(body: CreateSnapshot) -> list[Component]:
    """The components; `dataset` + `where` becomes one SELECT."""
    if (body.sources is None) == (body.dataset is None):
        raise ProblemError(
            422,
            "validation_error",
            "a snapshot needs either `from` or `dataset` (with or without `where`)",
            expected="one of from, dataset",
            got="both" if body.sources is not None else "neither",
        )
    if body.dataset is None:
        assert body.sources is not None
        if not body.sources or body.where is not None:
            raise ProblemError(
                422,
                "validation_error",
                "`from` needs at least one SELECT, and `where` is valid only with `dataset`",
            )
        return [Component(source.select, None, source.share) for source in body.sources]
    # On its own line: a comment at the end of `where` must not hide the parenthesis.
    where = f" AND (\n{body.where}\n)" if body.where else ""
    dataset, version = split_version(body.dataset)
    if version:
        where = f" AND {version_condition(body.dataset)}{where}"
    select = f"SELECT id FROM trajectories WHERE dataset = '{dataset}'{where}"
    return [Component(select, dataset, 1.0, all=not where)]


def digest_of(blocks: Blocks, shares: Sequence[float]) -> str:
    """sha256 of the selection and its weights, independent of the locations."""
    sha = hashlib.sha256(json.dumps(list(shares)).encode())
    for key, block in blocks.items():
        sha.update(json.dumps(key).encode() + block.digest)
    return sha.hexdigest()


# --- full selection -------------------------------------------------------------------------------


def select_all(
    mirror: Mirror, component: int, selected: Selected, rules: SelectionRules
) -> tuple[Blocks, Damaged]:
    """One component's blocks; and the rows left out because their shards are damaged."""
    assert selected.state is not None
    found: dict[str, list[pa.RecordBatch]] = {}
    damaged: Damaged = Counter()
    numbers = selected.rows // pieces.PIECE
    for number, path in selected.state.locations.items():
        low, high = np.searchsorted(numbers, (number, number + 1))
        if low == high:
            continue
        locations = mirror.read_locations(selected.state, path)
        at = np.searchsorted(locations["pk"].to_numpy(), selected.rows[low:high])
        weights = None if selected.weights is None else selected.weights[low:high]
        batch, keep, spoiled = _usable(locations, at, rules)
        damaged += spoiled
        made = _with_selection(batch, component, None if weights is None else weights[keep])
        for name, rows in _by_dataset(made):
            found.setdefault(name, []).append(rows)
    blocks: Blocks = {}
    for name in sorted(found):
        blocks |= _blocks_of(component, name, _ordered(found[name]))
    return blocks, damaged


def _usable(
    locations: pa.RecordBatch, at: NDArray[np.int64], rules: SelectionRules
) -> tuple[pa.RecordBatch, Flags, Damaged]:
    """The rows `at` without those left out; which of `at` remain; which are damaged."""
    whole = len(at) == locations.num_rows and bool((np.diff(at) == 1).all())
    rows = locations if whole else locations.take(pa.array(at))
    keep = _flags(rows["usable"])
    if not rules.include_eval:
        keep &= _flags(rows["train"])
    damaged: Damaged = Counter()
    if rules.quarantined:
        bad = _flags(pc.is_in(_plain(rows["shard"]), pa.array(sorted(rules.quarantined))))
        lost = rows.filter(pa.array(keep & bad))
        names = (_plain(lost[name]).to_pylist() for name in ("dataset", "shard"))
        damaged.update(zip(*names, strict=True))
        keep &= ~bad
    return rows if keep.all() else rows.filter(pa.array(keep)), keep, damaged


def _with_selection(
    rows: pa.RecordBatch, component: int, weights: NDArray[np.float64] | None
) -> pa.RecordBatch:
    """Locations as rows of a manifest."""
    count = rows.num_rows
    given = {
        "component": pa.array(np.full(count, component, np.int16)),
        "weight": pa.array(np.ones(count) if weights is None else weights),
    }
    arrays = [given[name] if name in given else rows[name] for name in SCHEMA.names]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _by_dataset(rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    names = rows["dataset"].dictionary.to_pylist()
    if len(names) == 1:
        if rows.num_rows:
            yield names[0], rows
        return
    codes = rows["dataset"].indices.to_numpy()
    for code in np.unique(codes):
        yield names[code], rows.filter(pa.array(codes == code))


def _ordered(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Sorted by seq: already so, unless `pk` and `seq` do not increase together."""
    ends = [(b["seq"][0].as_py(), b["seq"][-1].as_py()) for b in batches]
    rising = all(bool((np.diff(b["seq"].to_numpy()) > 0).all()) for b in batches)
    if rising and all(a[1] < b[0] for a, b in zip(ends, ends[1:], strict=False)):
        return batches
    table = pa.Table.from_batches(batches)
    return [_sorted(table)]


def _sorted(table: pa.Table) -> pa.RecordBatch:
    batch = _one(table)
    return batch.take(pa.array(np.argsort(batch["seq"].to_numpy(), kind="stable")))


def _blocks_of(component: int, name: str, batches: Iterable[pa.RecordBatch]) -> Blocks:
    """Split where seq // BLOCK changes; a block that two batches share is joined."""
    cut: list[tuple[int, pa.RecordBatch]] = []
    for batch in batches:
        number = batch["seq"].to_numpy() // BLOCK
        edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(number)]
        cut += [
            (int(number[a]), batch.slice(a, b - a)) for a, b in zip(edges, edges[1:], strict=False)
        ]
    blocks: Blocks = {}
    for key, members in groupby(cut, key=lambda piece: piece[0]):
        parts = [part for _, part in members]
        blocks[(component, name, key)] = Block(_compact(parts))
    return blocks


def _compact(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch whose dictionaries contain only used names, in order of appearance."""
    batch = parts[0] if len(parts) == 1 else _one(pa.Table.from_batches(parts))
    dictionaries = [pa.types.is_dictionary(field.type) for field in SCHEMA]
    arrays = [
        _shrunk(array) if encoded else array
        for array, encoded in zip(batch.columns, dictionaries, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _shrunk(column: pa.DictionaryArray) -> pa.DictionaryArray:
    used = pc.unique(column.indices)
    rank = np.zeros(len(column.dictionary), np.int32)
    rank[used.to_numpy()] = np.arange(len(used), dtype=np.int32)
    codes = rank[column.indices.to_numpy()]
    return pa.DictionaryArray.from_arrays(pa.array(codes), column.dictionary.take(used))


# --- incremental selection ------------------------------------------------------------------------


def select_changed(
    before: Blocks,
    changes: Changes,
    components: int,
    among: Callable[[int], Selected],
    rules: SelectionRules,
) -> Blocks:
    """The current blocks, from the previous blocks and all rows that changed since.

    `among` runs a component's selection on the changed rows.
    """
    touched: dict[str, NDArray[np.int64]] = dict(changes.dead)
    for name, rows in _by_dataset(changes.locations) if changes.locations.num_rows else ():
        seqs = rows["seq"].to_numpy()
        touched[name] = np.concatenate([touched[name], seqs]) if name in touched else seqs
    merged = dict(before)
    for component in range(components):
        fresh: dict[tuple[str, int], pa.RecordBatch] = {}
        if changes.locations.num_rows:
            chosen = among(component)
            batch, keep, _ = _usable(changes.locations, chosen.rows, rules)
            weights = None if chosen.weights is None else chosen.weights[keep]
            for name, rows in _by_dataset(_with_selection(batch, component, weights)):
                made = _blocks_of(component, name, [_sorted(pa.Table.from_batches([rows]))])
                fresh |= {(name, key[2]): block.batch for key, block in made.items()}
        for name, seqs in touched.items():
            for number in np.unique(seqs // BLOCK).tolist():
                key = (component, name, number)
                block = _replaced(merged.get(key), seqs, fresh.get((name, number)))
                if block is None:
                    merged.pop(key, None)
                else:
                    merged[key] = block
    return dict(sorted(merged.items()))


def _replaced(
    old: Block | None, touched: NDArray[np.int64], fresh: pa.RecordBatch | None
) -> Block | None:
    """A block without the changed rows, and with those of them that are selected now."""
    parts = []
    if old is not None:
        keep = ~np.isin(old.batch["seq"].to_numpy(), touched)
        if keep.all() and fresh is None:
            return old
        parts.append(old.batch.filter(pa.array(keep)))
    if fresh is not None:
        parts.append(fresh)
    parts = [part for part in parts if part.num_rows]
    if not parts:
        return None
    batch = _compact(_ordered(parts))
    made = Block(batch)
    return old if old is not None and made.same(old) else made


# --- difference of two selections -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two selections."""

    changed: Blocks
    """Blocks that are new, or whose content or locations differ."""
    gone: list[Key]
    added: int
    removed: int
    """Number of rows."""


def difference(before: Blocks, now: Blocks) -> Difference:
    changed = {
        key: block for key, block in now.items() if key not in before or not block.same(before[key])
    }
    gone = [key for key in before if key not in now]
    added, removed = 0, sum(len(before[key]) for key in gone)
    for key, block in changed.items():
        if key not in before:
            added += len(block)
            continue
        old = before[key]
        both = int(pc.sum(pc.is_in(block.batch["id"], old.batch["id"])).as_py() or 0)
        added, removed = added + len(block) - both, removed + len(old) - both
    return Difference(changed, gone, added, removed)


def _bytes_of(column: pa.Array) -> memoryview:
    """The values in memory of a fixed-width column without nulls."""
    width = column.type.bit_width // 8
    buffer = column.buffers()[1]
    return memoryview(buffer)[column.offset * width : (column.offset + len(column)) * width]


def _plain(column: pa.Array) -> pa.Array:
    return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column


def _flags(column: pa.Array) -> Flags:
    return np.array(column.to_numpy(zero_copy_only=False), bool)


def _one(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if len(batches) == 1 else pa.RecordBatch.from_pylist([], schema=SCHEMA)
