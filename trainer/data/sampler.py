"""Which windows are drawn: sample k of a run is a pure function of (seed, snapshot, k).

    k ─▶ four random words ─▶ component ─▶ trajectory ─▶ start ─▶ window [start, start + length)
         Philox(key = (seed, digest), counter = k)

Samples are the same for any number of processes and threads and after any restart. Rank r of W
takes its slice of the global batch [s·B, (s+1)·B). The sampler has no state and uses no file or
clock. Components of a mixture are stratified: each batch contains share·B samples of each, rounded
up or down. Variable shares are functions of the step, k div B.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepwell._wording import pluralize
from trainer.config import DataConfig, SourceConfig
from trainer.data.snapshot import DataError, Manifest
from trainer.errors import SettingError

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
GOLDEN = 0.6180339887498949
AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a batch, one array element per window."""

    component: Ints
    trajectory: Ints
    """Row of the manifest."""
    start: Ints
    """First row of the window in its trajectory."""
    length: Ints
    """Transitions in the window, 1 … T of the config."""

    def __len__(self) -> int:
        return len(self.trajectory)

    def __getitem__(self, part: slice) -> Windows:
        return Windows(
            self.component[part], self.trajectory[part], self.start[part], self.length[part]
        )


_NONE = np.zeros(0, np.int64)
_NO_WINDOWS = Windows(_NONE, _NONE, _NONE, _NONE)


class WindowSampler:
    """Draws the windows of one snapshot.

    `sources` are those of the manifest's components, needed only if their shares change. Raises
    `SettingError` for a batch that `world` does not divide, `DataError` for an empty component.
    """

    def __init__(
        self,
        manifest: Manifest,
        config: DataConfig,
        seed: int,
        world: int = 1,
        sources: Sequence[SourceConfig] = (),
    ):
        if config.batch % world:
            raise SettingError(
                f"data.batch: {pluralize(config.batch, 'window')} cannot be shared by {world} "
                f"processes; choose a multiple of {world}"
            )
        self.manifest, self.config, self.world = manifest, config, world
        self.key = philox_key(seed, manifest.digest)
        self.first_shares = self.last_shares = np.asarray(manifest.shares)
        if config.ramp_updates and sources:
            self.first_shares = np.asarray([source.share for source in sources])
            self.last_shares = np.asarray([source.last_share for source in sources])
        self.stride = _coprime_stride(config.batch)
        low, high = start_range(manifest.length, config.window, config.padding)
        self.low, self.span = low, high - low + 1
        self.total_length = manifest.length
        self._chunk: tuple[int, Windows] = (-AT_ONCE, _NO_WINDOWS)
        self.members: list[Ints] = []
        """Per component: rows of the manifest."""
        self.edges: list[NDArray[np.float64] | Ints | None] = []
        """Per component: cumulative weight after each member; None if all weights are equal."""
        for component in range(len(manifest.shares)):
            rows = np.flatnonzero((manifest.component == component) & (manifest.weight > 0))
            if not len(rows):
                raise DataError(
                    f"component {component} of the mixture has no trajectory left; "
                    "widen its select, or take it out"
                )
            self.members.append(rows)
            self.edges.append(self._cumulated(manifest, rows))

    def batch(self, step: int, rank: int = 0) -> Windows:
        """The windows of `rank` in the global batch of this step."""
        # Drawn for many steps at once: a numpy call costs as much as hundreds of samples.
        at, chunk = self._chunk
        if not at <= step < at + AT_ONCE:
            at = step - step % AT_ONCE
            chunk = self.samples(at * self.config.batch, AT_ONCE * self.config.batch)
            self._chunk = at, chunk
        each = self.config.batch // self.world
        first = (step - at) * self.config.batch + rank * each
        return chunk[first : first + each]

    def first_sample(self, step: int, rank: int = 0) -> int:
        """k of the first sample that `rank` draws in this step."""
        return step * self.config.batch + rank * (self.config.batch // self.world)

    def resample_starts(self, step: int, rank: int, windows: Windows, length: Ints) -> Windows:
        """The windows of a batch whose trajectories have these lengths after relabeling. Windows of
        trajectories with unchanged length are the same."""
        low, high = start_range(length, self.config.window, self.config.padding)
        words = philox(self.key, self.first_sample(step, rank), len(windows))
        start = low + uniform_int(words[:, 1], high - low + 1)
        return self._clip(windows.component, windows.trajectory, start, length)

    def checksum(self, step: int) -> int:
        """crc32 of a step's global batch: runs with equal checksums drew the same samples.

        It includes the settings of relabeling, which is a pure function of them and the sample.
        """
        whole = self.samples(step * self.config.batch, self.config.batch)
        samples = zlib.crc32(np.stack([whole.trajectory, whole.start, whole.length]).tobytes())
        return zlib.crc32("\n".join(self.config.relabel).encode(), samples)

    def shares(self, step: int) -> list[float]:
        """The share of each component in the whole batch of a step."""
        whole = self.samples(step * self.config.batch, self.config.batch)
        counts = np.bincount(whole.component, minlength=len(self.members))
        return [float(share) for share in counts / self.config.batch]

    def metrics(self, step: int) -> dict[str, float]:
        """The checksum of a step's batch; of growing data also their staleness: how many steps
        were stored after the sampled trajectories, on average; of a mixture the share of each
        component in it."""
        values: dict[str, float] = {"data/sample_checksum": self.checksum(step)}
        if self.config.refresh_every:
            drawn = self.samples(step * self.config.batch, self.config.batch).trajectory
            values["data/staleness"] = float(self.manifest.later_steps[drawn].mean())
        if len(self.members) > 1:
            values |= {f"data/share_{c}": share for c, share in enumerate(self.shares(step))}
        return values

    def samples(self, first: int, count: int) -> Windows:
        """The samples first … first + count - 1."""
        words = philox(self.key, first, count)
        k = np.arange(first, first + count, dtype=np.int64)
        component = self._component(k)
        trajectory = np.empty(count, np.int64)
        start = np.empty(count, np.int64)
        for c, members in enumerate(self.members):
            mine = slice(None) if len(self.members) == 1 else np.flatnonzero(component == c)
            if self.config.epochs:
                trajectory[mine], start[mine] = self._epoch_sample(c, k[mine], words[mine])
                continue
            edges = self.edges[c]
            if edges is None:
                chosen = members[uniform_int(words[mine, 0], len(members))]
            elif edges.dtype == np.int64:  # integer weights: exact at any size
                point = uniform_int(words[mine, 0], int(edges[-1]))
                chosen = members[np.searchsorted(edges, point, side="right")]
            else:
                place = np.searchsorted(edges, uniform(words[mine, 0]) * edges[-1], side="right")
                chosen = members[np.minimum(place, len(members) - 1)]
            trajectory[mine] = chosen
            start[mine] = self.low[chosen] + uniform_int(words[mine, 1], self.span[chosen])
        return self._clip(component, trajectory, start, self.total_length[trajectory])

    def _clip(self, component: Ints, trajectory: Ints, start: Ints, total: Ints) -> Windows:
        window = self.config.window
        if self.config.padding == "center":
            start = np.clip(start, 0, np.maximum(total - window, 0))
        stop = np.minimum(start + window, total)
        start = np.maximum(start, 0)
        return Windows(component, trajectory, start, stop - start)

    def _component(self, k: Ints) -> Ints:
        """Systematic sampling: B points at distance 1/B, shifted a little further in each batch."""
        if len(self.first_shares) == 1:
            return np.zeros(len(k), np.int64)
        b = self.config.batch
        step, place = np.divmod(k, b)
        shift = ((step + 0.5) * GOLDEN) % 1.0
        # The stride spreads components over the batch, so that every rank's slice is a mixture.
        point = ((place * self.stride) % b + shift) / b
        edges = np.cumsum(self._shares(step), axis=-1)[..., :-1]
        component: Ints = np.sum(edges <= point[:, None], axis=-1, dtype=np.int64)
        return component

    def _shares(self, step: Ints) -> NDArray[np.float64]:
        """Share of each component at each of these steps [n], as [n, components] or one for all."""
        if not self.config.ramp_updates:
            return self.first_shares
        way = np.minimum(step / self.config.ramp_updates, 1.0)[:, None]
        shares: NDArray[np.float64] = (1.0 - way) * self.first_shares + way * self.last_shares
        return shares

    def _cumulated(self, manifest: Manifest, rows: Ints) -> NDArray[np.float64] | Ints | None:
        size = {
            "trajectories": np.ones(len(rows), np.int64),
            "steps": manifest.length[rows],
            "windows": self.span[rows],
        }[self.config.draw]
        weight = manifest.weight[rows]
        if bool((weight == weight[0]).all()):
            return None if bool((size == size[0]).all()) else np.cumsum(size)
        return np.cumsum(size * weight)

    def _epoch_sample(self, c: int, k: Ints, words: Words) -> tuple[Ints, Ints]:
        """Epoch mode: item k mod M of a permutation that is never stored."""
        members = self.members[c]
        if self.config.draw == "trajectories":
            epoch, place = np.divmod(k, len(members))
            chosen = members[permute(place, len(members), self.key, epoch)]
            return chosen, self.low[chosen] + uniform_int(words[:, 1], self.span[chosen])
        edges = np.cumsum(self.span[members])
        epoch, place = np.divmod(k, int(edges[-1]))
        item = permute(place, int(edges[-1]), self.key, epoch)
        which = np.searchsorted(edges, item, side="right")
        chosen = members[which]
        before = edges[which] - self.span[chosen]
        return chosen, self.low[chosen] + item - before


def start_range(length: Ints, window: int, padding: str) -> tuple[Ints, Ints]:
    """First and last start (inclusive) of windows in trajectories of `length` transitions.

    If a window extends past the trajectory at either end, it is cut there. For trajectories
    no longer than the window it is always 0. AMAGO's four modes, and center:

        none    0 … T-window            full windows; steps near both ends are drawn less often
        both    1-window … T-2          every step equally often; many short windows
        left    1-window … T-window     may be short at the beginning
        right   0 … T-2                 may be short at the end
        center  middle uniform over the trajectory, then moved inside: never short
    """
    first, last = {
        "none": (0, length - window),
        "both": (1 - window, length - 2),
        "left": (1 - window, length - window),
        "right": (0, length - 2),
        "center": (-(window // 2), length - 1 - window // 2),
    }[padding]
    short = length <= window
    return np.where(short, 0, first), np.where(short, 0, last)


# ----------------------------------------------------------------------------------- random words


def philox_key(seed: int, digest: str) -> NDArray[np.uint64]:
    """The 128-bit key of a run on a snapshot."""
    sha = hashlib.sha256(f"{seed}:{digest}".encode()).digest()
    return np.frombuffer(sha[:16], np.uint64)


def philox(key: NDArray[np.uint64], first: int, count: int) -> Words:
    """Words [count, 4] of samples first … : only sample k uses block k of the generator."""
    return np.random.Philox(key=key, counter=first).random_raw(4 * count).reshape(count, 4)


def uniform(words: Words) -> NDArray[np.float64]:
    """Words as numbers in [0, 1)."""
    return np.asarray((words >> np.uint64(11)) * 2.0**-53, np.float64)


def uniform_int(words: Words, n: Ints | int) -> Ints:
    """Words as integers in 0 … n-1; n up to 2^53, and up to 2^32 without noticeable bias."""
    return np.minimum((uniform(words) * n).astype(np.int64), np.asarray(n, np.int64) - 1)


def permute(place: Ints, n: int, key: NDArray[np.uint64], epoch: Ints) -> Ints:
    """A permutation of 0 … n-1 for each epoch, computed elementwise.

    A four-round Feistel network over the next even power of two. A value outside the range is
    permuted again (cycle walking; Black and Rogaway, 2002), less than four times on average.
    """
    half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    rounds = [mix(epoch.astype(np.uint64) + key[r % 2] + np.uint64(r)) for r in range(4)]
    value = place.astype(np.uint64)
    outside = np.ones(len(value), np.bool_)
    while bool(outside.any()):
        left, right = value >> shift, value & mask
        for r in rounds:
            left, right = right, left ^ (mix(right + r) & mask)
        walked = (left << shift) | right
        value = np.where(outside, walked, value)
        outside &= value >= np.uint64(n)
    return value.astype(np.int64)


def mix(x: Words) -> Words:
    """splitmix64's finaliser (Steele et al. 2014): each input bit affects all output bits."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _coprime_stride(n: int) -> int:
    stride = max(1, round(n * GOLDEN))
    while np.gcd(stride, n) != 1:
        stride += 1
    return stride
