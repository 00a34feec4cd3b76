"""Relabeled samples: k ─▶ trajectory ─▶ its whole columns ─▶ relabelers ─▶ window ─▶ rows.

The chance in sample k's relabeling is a generator of its own, Philox with the key of the sample
order and a counter made of k and the relabeler's place in the config. So a sample depends on
(seed, snapshot, k) alone, and a relabeler's draws do not depend on those before it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amago_model.data.batch import LOSS_MASKS
from trainer.data.alignment import first_row
from trainer.data.columns import Columns
from trainer.data.fields import Field
from trainer.data.relabel.episode import Array, Episode
from trainer.data.relabel.registry import Relabeler
from trainer.data.sampler import Ints, Windows, WindowSampler
from trainer.data.snapshot import DataError, Manifest


@dataclass(frozen=True, slots=True)
class Endings:
    """What collate wants to know of trajectories, here for one relabeled episode per window."""

    length: Ints
    first_step: Ints
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    final_obs_valid: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Relabeled:
    """The samples of a batch after relabeling."""

    episodes: list[Episode]
    """One for each window."""
    windows: Windows
    """Cut from the relabeled episodes; `trajectory` still is the manifest's row."""
    metrics: dict[str, float]

    @property
    def for_collate(self) -> tuple[Endings, Windows]:
        """Endings by window, and the windows counted so."""
        found = self.episodes
        endings = Endings(
            length=np.array([len(e) for e in found], np.int64),
            first_step=np.array([e.first_step for e in found], np.int64),
            terminated=np.array([e.terminated for e in found], np.bool_),
            truncated=np.array([e.truncated for e in found], np.bool_),
            final_obs_valid=np.array([e.final_obs_valid for e in found], np.bool_),
        )
        return endings, replace(self.windows, trajectory=np.arange(len(found)))

    @property
    def masks(self) -> list[str]:
        """The loss masks that any of the episodes has."""
        return [m for m in LOSS_MASKS if any(getattr(e, m) is not None for e in self.episodes)]

    def fill(self, field: Field, rows: Array) -> None:
        """Write a field's windows into rows [n, longest + 1, *shape]; zeros behind their ends."""
        shift = first_row(field)
        nothing = np.broadcast_to(np.asarray(field.fill), field.size).reshape(field.shape)
        for row, episode, start, length in zip(
            rows, self.episodes, self.windows.start, self.windows.length, strict=True
        ):
            values, begin = column(episode, field.name), int(start) + shift
            skip = max(-begin, 0)
            row[:skip] = nothing
            row[skip : length + 1] = values[begin + skip : begin + length + 1]
            row[length + 1 :] = 0


class Relabeling:
    """Relabelers at work on one snapshot."""

    def __init__(
        self, relabelers: Sequence[Relabeler], manifest: Manifest, columns: Sequence[Columns]
    ):
        self._manifest = manifest
        self._columns = {c.field.name: c for c in columns}
        for relabeler in relabelers:
            relabeler.check(manifest.spec)
        self._relabelers = [r.prepared(self._all()) for r in relabelers]

    def draw(self, sampler: WindowSampler, step: int, rank: int) -> Relabeled:
        """The relabeled samples of `rank` in the batch of a step."""
        began = time.thread_time()
        windows = sampler.batch(step, rank)
        first = sampler.first_sample(step, rank)
        recorded = [self.episode(row) for row in windows.trajectory.tolist()]
        episodes = [
            self._relabel(sampler.key, first + place, episode)
            for place, episode in enumerate(recorded)
        ]
        lengths = np.array([len(e) for e in episodes], np.int64)
        windows = sampler.recut(step, rank, windows, lengths)
        changed = [new is not old for new, old in zip(episodes, recorded, strict=True)]
        metrics = {
            "relabel/changed": float(np.mean(changed)),
            "relabel/goals_swapped": float(np.mean([e.swapped for e in episodes])),
            "relabel/steps_kept": float(lengths.sum() / sum(map(len, recorded))),
            "relabel/cpu_ms": 1e3 * (time.thread_time() - began),
        }
        return Relabeled(episodes, windows, metrics)

    def episode(self, row: int) -> Episode:
        """A trajectory of the manifest as it was recorded, read-only."""
        known = self._columns.get("action_known")
        masks: dict[str, Any] = {
            name: self._columns[name].whole(row) > 0 for name in LOSS_MASKS if name in self._columns
        }
        manifest = self._manifest
        return Episode(
            obs={
                name[4:]: column.whole(row)
                for name, column in self._columns.items()
                if name.startswith("obs.")
            },
            action=self._columns["action"].whole(row),
            reward=self._columns["reward"].whole(row),
            terminated=bool(manifest.terminated[row]),
            truncated=bool(manifest.truncated[row]),
            final_obs_valid=bool(manifest.final_obs_valid[row]),
            first_step=int(manifest.first_step[row]),
            action_known=None if known is None else known.whole(row),
            id=manifest.names([row])[0],
            **masks,
        )

    def _all(self) -> Iterator[Episode]:
        for row in range(len(self._manifest)):
            yield self.episode(row)

    def _relabel(self, key: NDArray[np.uint64], sample: int, episode: Episode) -> Episode:
        for place, relabeler in enumerate(self._relabelers):
            before = episode
            episode = relabeler(episode, generator(key, sample, place))
            if episode is not before:
                _check(type(relabeler).__name__, episode, before)
        return episode


def generator(key: NDArray[np.uint64], sample: int, place: int) -> np.random.Generator:
    """The chance of a sample's relabeler: no other sample or relabeler has any of its words."""
    # The order itself uses the counters whose last word is 0.
    counter = np.array([0, sample, place, 1], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def column(episode: Episode, field: str) -> Array:
    """An episode's column by the name of its field: obs.<key>, action, reward, action_known, or a
    loss mask."""
    if field.startswith("obs."):
        return episode.obs[field[4:]]
    values: Array | None = getattr(episode, field)
    if values is None and field in LOSS_MASKS:
        return np.ones(len(episode), np.bool_)
    assert values is not None
    return values


def _check(name: str, new: Episode, old: Episode) -> None:
    """Raise `DataError` where a relabeler gave what cannot be learned from."""
    if not isinstance(new, Episode):
        raise DataError(
            f"relabeler {name}: expected an Episode for trajectory {old.id}, got {new!r}; return "
            "the one that came where nothing changes"
        )
    _same_keys(name, new.obs, old.obs)
    for mask in LOSS_MASKS:
        allowed = getattr(new, mask)
        form = _form((allowed.dtype, allowed.shape)) if isinstance(allowed, np.ndarray) else allowed
        if form is not None and form != f"bool ({len(new)},)":
            raise DataError(
                f"relabeler {name}: {mask} of trajectory {old.id}: expected None or "
                f"bool ({len(new)},), got {form}"
            )
    arrays = {"action": new.action, "reward": new.reward}
    for what, array in (arrays | {f"obs[{k!r}]": v for k, v in new.obs.items()}).items():
        if not isinstance(array, np.ndarray):
            raise DataError(
                f"relabeler {name}: {what} of trajectory {old.id}: expected an array, got {array!r}"
            )
    steps = len(new)
    if not 1 <= steps <= len(old):
        raise DataError(
            f"relabeler {name}: expected 1 to {len(old)} transitions of trajectory {old.id}, "
            f"got {steps}"
        )
    if new.terminated and new.truncated:
        raise DataError(
            f"relabeler {name}: trajectory {old.id} both terminated and was truncated; expected at "
            "most one"
        )
    pairs: dict[str, tuple[Array | None, Array | None, int]] = {
        "action": (new.action, old.action, steps),
        "reward": (new.reward, old.reward, steps),
        "action_known": (new.action_known, old.action_known, steps),
    }
    pairs |= {f"obs[{k!r}]": (new.obs[k], old.obs[k], steps + 1) for k in old.obs}
    for what, (got, was, rows) in pairs.items():
        form = None if got is None else (got.dtype, got.shape)
        wanted = None if was is None else (was.dtype, (rows, *was.shape[1:]))
        if form != wanted:
            raise DataError(
                f"relabeler {name}: {what} of trajectory {old.id}: expected {_form(wanted)}, "
                f"got {_form(form)}"
            )


def _same_keys(name: str, new: Mapping[str, Array], old: Mapping[str, Array]) -> None:
    if new.keys() != old.keys():
        raise DataError(
            f"relabeler {name}: expected the observations {sorted(old)}, got {sorted(new)}"
        )


def _form(form: tuple[np.dtype[np.generic], tuple[int, ...]] | None) -> str:
    return "none" if form is None else f"{form[0]} {form[1]}"
