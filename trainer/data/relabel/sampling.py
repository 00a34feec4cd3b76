"""Relabeled samples: k ─▶ trajectory ─▶ its whole columns ─▶ relabelers ─▶ window ─▶ rows.

The relabeling of sample k has a separate random generator, Philox with the key of the sample
order and a counter made of k and the relabeler's place in the config. So a sample depends on
(seed, snapshot, k) alone, and a relabeler's draws do not depend on those before it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amago_model.data.batch import LOSS_MASKS
from trainer.data.alignment import Ends, cut_window, undiscounted
from trainer.data.columns import MappedColumns
from trainer.data.fields import RETURN_TO_GO, Field
from trainer.data.relabel.episode import Array, Episode
from trainer.data.relabel.registry import Relabeler
from trainer.data.sampler import Windows, WindowSampler
from trainer.data.snapshot import DataError, Manifest


class Relabeling:
    """Applies relabelers to one snapshot."""

    def __init__(
        self, relabelers: Sequence[Relabeler], manifest: Manifest, columns: Sequence[MappedColumns]
    ):
        self._manifest = manifest
        self._columns = {c.field.name: c for c in columns}
        for relabeler in relabelers:
            relabeler.check(manifest.spec)
        self._relabelers = [r.fit(map(self.episode, range(len(manifest)))) for r in relabelers]

    def draw(
        self, sampler: WindowSampler, step: int, rank: int
    ) -> tuple[list[Episode], Windows, dict[str, float]]:
        """The samples of `rank` in the batch of a step: one episode per window, the windows cut
        from these episodes (`trajectory` is still the manifest's row), and metrics."""
        began = time.thread_time()
        windows = sampler.batch(step, rank)
        first = sampler.first_sample(step, rank)
        recorded = [self.episode(row) for row in windows.trajectory.tolist()]
        episodes = [
            self._relabel(sampler.key, first + place, episode)
            for place, episode in enumerate(recorded)
        ]
        lengths = np.array([len(e) for e in episodes], np.int64)
        windows = sampler.resample_starts(step, rank, windows, lengths)
        changed = [new is not old for new, old in zip(episodes, recorded, strict=True)]
        metrics = {
            "relabel/changed": float(np.mean(changed)),
            "relabel/goals_replaced": float(np.mean([e.goals_replaced for e in episodes])),
            "relabel/steps_kept": float(lengths.sum() / sum(map(len, recorded))),
            "relabel/cpu_ms": 1e3 * (time.thread_time() - began),
        }
        return episodes, windows, metrics

    def episode(self, row: int) -> Episode:
        """A recorded trajectory of the manifest, read-only."""
        known = self._columns.get("action_known")
        masks: dict[str, Any] = {
            name: self._columns[name].trajectory(row) > 0
            for name in LOSS_MASKS
            if name in self._columns
        }
        manifest = self._manifest
        return Episode(
            obs={
                name[4:]: column.trajectory(row)
                for name, column in self._columns.items()
                if name.startswith("obs.")
            },
            action=self._columns["action"].trajectory(row),
            reward=self._columns["reward"].trajectory(row),
            terminated=bool(manifest.terminated[row]),
            truncated=bool(manifest.truncated[row]),
            final_obs_valid=bool(manifest.final_obs_valid[row]),
            first_step=int(manifest.first_step[row]),
            action_known=None if known is None else known.trajectory(row),
            id=manifest.trajectory_ids([row])[0],
            **masks,
        )

    def _relabel(self, key: NDArray[np.uint64], sample: int, episode: Episode) -> Episode:
        for place, relabeler in enumerate(self._relabelers):
            before = episode
            episode = relabeler(episode, generator(key, sample, place))
            if episode is not before:
                _check(type(relabeler).__name__, episode, before)
        return episode


def ends_of(episodes: Sequence[Episode]) -> Ends:
    """The ends of relabeled episodes."""
    lengths = np.array([len(episode) for episode in episodes])
    rest = [field.name for field in fields(Ends)[1:]]
    return Ends(lengths, *(np.array([getattr(e, name) for e in episodes]) for name in rest))


def gather_episodes(
    episodes: Sequence[Episode], windows: Windows, columns: Sequence[Field]
) -> dict[str, Tensor]:
    """Like `columns.gather`, but from relabeled episodes, and with the relabelers' loss masks."""
    shown = {field.name: field for field in columns if not field.relabel_only}
    for name in LOSS_MASKS:
        if any(getattr(episode, name) is not None for episode in episodes):
            shown.setdefault(name, Field(name, "", "bool", ()))
    n_rows = int(windows.length.max()) + 1
    spans = [*zip(windows.start.tolist(), windows.length.tolist(), strict=True)]
    found: dict[str, Tensor] = {}
    for name, field in shown.items():
        rows = np.empty((len(spans), n_rows, *field.shape), field.dtype)
        fill = field.fill_array
        for out, episode, (start, length) in zip(rows, episodes, spans, strict=True):
            cut_window(column(episode, name), field.of_step, start, length, fill, out)
        found[name] = torch.from_numpy(rows)
    return found


def generator(key: NDArray[np.uint64], sample: int, place: int) -> np.random.Generator:
    """The random generator of one relabeler for one sample. Its random words are used by no other
    sample or relabeler."""
    # The sample order uses the counters whose last word is 0.
    counter = np.array([0, sample, place, 1], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def column(episode: Episode, field: str) -> Array:
    """An episode's column by the name of its field: obs.<key>, action, reward, action_known,
    return_to_go (of the relabeled rewards), or a loss mask."""
    if field == RETURN_TO_GO.name:
        return undiscounted(episode.reward)
    if field.startswith("obs."):
        return episode.obs[field[4:]]
    values: Array | None = getattr(episode, field)
    if values is None and field in LOSS_MASKS:
        return np.ones(len(episode), np.bool_)
    assert values is not None
    return values


def _check(name: str, new: Episode, old: Episode) -> None:
    """Raise `DataError` if a relabeler returned an invalid episode."""
    if not isinstance(new, Episode):
        raise DataError(
            f"relabeler {name}: expected an Episode for trajectory {old.id}, got {new!r}; return "
            "the one that came where nothing changes"
        )
    if new.obs.keys() != old.obs.keys():
        raise DataError(
            f"relabeler {name}: expected the observations {sorted(old.obs)}, got {sorted(new.obs)}"
        )
    steps = len(new) if isinstance(new.reward, np.ndarray) else len(old)
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
    ours, theirs = _arrays(new), _arrays(old)
    wanted = {
        what: [_form(array, steps + what.startswith("obs"))] for what, array in theirs.items()
    }
    wanted |= {mask: ["None", f"bool ({steps},)"] for mask in LOSS_MASKS}
    for what, forms in wanted.items():
        if _form(ours[what]) not in forms:
            raise DataError(
                f"relabeler {name}: {what} of trajectory {old.id}: expected {' or '.join(forms)}, "
                f"got {_form(ours[what])}"
            )


def _arrays(episode: Episode) -> dict[str, Array | None]:
    names = ("reward", "action", "action_known", *LOSS_MASKS)
    found = {name: getattr(episode, name) for name in names}
    return found | {f"obs[{key!r}]": value for key, value in episode.obs.items()}


def _form(array: Array | None, rows: int | None = None) -> str:
    """Dtype and shape as text, with `rows` rows if given; for other values the value itself."""
    if not isinstance(array, np.ndarray):
        return repr(array)
    return f"{array.dtype} {array.shape if rows is None else (rows, *array.shape[1:])}"
