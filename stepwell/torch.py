"""Selected trajectories as torch datasets, for a DataLoader and a training script of your own.

    from torch.utils.data import DataLoader
    from stepwell.torch import Trajectories, Windows, pad_trajectories

    windows = Windows("pendulum", length=64, where='"return" > -300', seed=0)
    for batch in DataLoader(windows, batch_size=32, num_workers=2):  # endless
        batch["obs"], batch["actions"], batch["rewards"], batch["mask"]

    episodes = Trajectories("pendulum")
    loader = DataLoader(episodes, batch_size=8, shuffle=True, collate_fn=pad_trajectories)

What both give, of T steps (docs/reference/torch.md):

    obs, time_idx                                   [T+1, …]  one observation more than steps
    actions, rewards, terminated, truncated         [T, …]    rewards[t] is what actions[t] earned
    next_obs_valid, mask                            [T]       False: obs[t+1] is not known; padding

`obs` and `actions` are tensors, or dicts of tensors where the dataset names several arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Unpack

try:
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "stepwell.torch needs torch: pip install 'stepwell[agent]'", name="torch"
    ) from None

from stepwell._selection import Arrays, Chosen, Selection
from stepwell.errors import InvalidData

__all__ = ["Trajectories", "Windows", "pad_trajectories"]

Tensors = dict[str, Any]
"""Tensors by name, or dicts of them."""
DRAWN_AT_ONCE = 1024


class Trajectories(Dataset[Tensors]):
    """Each selected trajectory once: `len()` of them, [i] as tensors of its own length."""

    def __init__(self, dataset: str | None = None, **chosen: Unpack[Chosen]):
        """Select, download what is not here yet, and check it.

        Args:
            dataset: name of a dataset.
            where: SQL condition over the table `trajectories` of the dataset.
            select: instead of a dataset: SELECT id[, weight] FROM trajectories WHERE …
            snapshot: instead of both: id of a snapshot.
            include_eval: also trajectories of evaluations.
            url, token: the service (default: STEPWELL_URL, STEPWELL_TOKEN).
            folder: where shards are kept (default: ~/.cache/stepwell/shards).

        Raises `stepwell.errors.StepwellError`: `NotFound`, `BadRequest` for an empty selection or
        wrong SQL, `Gone`, `Unauthorized`, `ServiceUnreachable`.
        """
        self._selected = Selection(dataset, **chosen)
        self.spec = self._selected.spec
        """The spaces of observations and actions."""
        self.snapshot = self._selected.snapshot
        """The id of the frozen selection, to select the same again."""
        # Several components of a mixture may have the same trajectory.
        first = np.sort(np.unique(self._selected.ids, return_index=True)[1])
        self._rows: NDArray[np.intp] = first

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensors:
        row = int(self._rows[index])
        length = int(self._selected.length[row])
        return _tensors(self._selected.cut(row, 0, length, length))

    @property
    def ids(self) -> list[str]:
        """The id of each trajectory."""
        found = self._selected.ids
        return [found[row] for row in self._rows]

    def close(self) -> None:
        """Give the lease of the snapshot back; also done when the dataset is deleted."""
        self._selected.close()


class Windows(IterableDataset[Tensors]):
    """Endless random windows of `length` steps, padded with zeros at the end and masked.

    Windows are those of `data.padding = right` in docs/reference/training.md: they begin anywhere,
    and may be short at the end. Worker w of a DataLoader has a stream of its own, determined by the
    selection, seed, epoch and w. Every pass begins the same streams again, unless `set_epoch` is
    called.
    """

    def __init__(
        self,
        dataset: str | None = None,
        *,
        length: int,
        draw: Literal["steps", "trajectories"] = "steps",
        seed: int = 0,
        **chosen: Unpack[Chosen],
    ):
        """Select, download what is not here yet, and check it.

        Args:
            length: steps of a window.
            draw: what is uniform: "steps" (a long trajectory is drawn more often) or
                "trajectories". Weights and shares of a `select` or `snapshot` multiply it.
            seed: of the drawing; processes of a distributed training need different ones.

        The other arguments, and what is raised: see `Trajectories`.
        """
        if length < 1:
            raise InvalidData("length", expected="at least 1 step", got=str(length))
        if seed < 0:
            raise InvalidData("seed", expected="0 or more", got=str(seed))
        if draw not in ("steps", "trajectories"):
            raise InvalidData("draw", expected="'steps' or 'trajectories'", got=repr(draw))
        self.length, self.draw, self.seed = length, draw, seed
        self._selected = Selection(dataset, **chosen)
        self.spec = self._selected.spec
        """The spaces of observations and actions."""
        self.snapshot = self._selected.snapshot
        """The id of the frozen selection, to select the same again."""
        total = self._selected.length
        size = self._selected.weight * (total if draw == "steps" else 1)
        components, share = self._selected.component, self._selected.share
        of_component = np.bincount(components, size, len(share))
        self._edges = np.cumsum(share[components] * size / of_component[components])
        self._starts = np.where(total <= length, 1, np.maximum(total - 1, 1))
        """Per trajectory: how many first steps a window may have."""
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # seen by all workers

    def __iter__(self) -> Iterator[Tensors]:
        info = get_worker_info()
        rng = np.random.default_rng([self.seed, int(self._epoch), 0 if info is None else info.id])
        while True:
            point = rng.random(DRAWN_AT_ONCE) * self._edges[-1]
            rows = np.searchsorted(self._edges[:-1], point, side="right")
            starts = rng.integers(0, self._starts[rows])
            for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
                length = min(self.length, int(self._selected.length[row]) - start)
                yield _tensors(self._selected.cut(row, start, length, self.length))

    def set_epoch(self, epoch: int) -> None:
        """Other windows from the next pass on, as with torch's `DistributedSampler`."""
        self._epoch.fill_(epoch)

    def close(self) -> None:
        """Give the lease of the snapshot back; also done when the dataset is deleted."""
        self._selected.close()


def pad_trajectories(items: Sequence[Tensors]) -> Tensors:
    """A DataLoader's `collate_fn` for `Trajectories`: [B, longest, …], zeros and `mask` False after
    the end of each."""

    def join(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: join([value[key] for value in values]) for key in values[0]}
        return pad_sequence(list(values), batch_first=True)

    return {key: join([item[key] for item in items]) for key in items[0]}


def _tensors(arrays: Arrays) -> Tensors:
    found: Tensors = {}
    for name, value in arrays.items():
        if isinstance(value, dict):
            found[name] = {key: torch.from_numpy(array) for key, array in value.items()}
        else:
            found[name] = torch.from_numpy(value)
    return found
