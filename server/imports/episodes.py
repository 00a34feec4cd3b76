"""The protocol of all formats: a dataset as episodes of named arrays. The module of a format makes
an `Episodes` object; plan.py makes trajectories of it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.imports.raw_file import (
    Array,
    ImportRefused,
    same_name,
    why_dropped,
)
from server.imports.spec import (
    REWARDS,
    cast,
)
from stepwell._wording import pluralize
from stepwell.spaces import (
    DEFAULT_ACTION,
    DEFAULT_OBSERVATION,
    EnvSpec,
    Space,
    all_finite,
)
from stepwell.trajectory import TrajectoryMetadata

DEFAULTS = {"observation": DEFAULT_OBSERVATION, "action": DEFAULT_ACTION, "info": ""}
"""Keys of arrays without a name."""
TEXT = "text"
Declared = Space | str
"""A space that the file declares, or `TEXT`: its vocabulary comes from the data."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of every episode."""

    path: str
    """In its episode, as the format calls it."""
    shape: tuple[int, ...] | None
    """Shape of one row; None for texts and encoded images."""
    dtype: np.dtype[Any]
    kind: str = "numbers"
    """"numbers", "texts" or "frames" (encoded images)."""
    names: tuple[str, ...] = ()
    """Names of a vector's elements, if the file has them."""


Leaves = dict[str, dict[str, Leaf]]
"""By role ("observation", "action", "info") and key."""


@dataclass(slots=True)
class Layout:
    """What a dataset has."""

    episodes: list[tuple[int, int]] = field(default_factory=list)
    """(number, T), in order."""
    observations: dict[str, Leaf] = field(default_factory=dict)
    actions: dict[str, Leaf] = field(default_factory=dict)
    infos: dict[str, Leaf] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    """Infos that are not read: name → reason."""
    warnings: list[str] = field(default_factory=list)
    skipped: int = 0
    """Episodes without a step."""
    orders: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Path → the elements of its vectors in the order of the dataset's names."""

    def check_skipped(self) -> None:
        """Tell of episodes without a step; raises `ImportRefused` if there are no others."""
        if self.skipped and not self.episodes:
            raise ImportRefused(
                "no episode has a step",
                expected="an episode with at least one",
                got=pluralize(self.skipped, "episode"),
            )
        if self.skipped:
            self.warnings.append(f"{pluralize(self.skipped, 'episode')} without a step left out")

    def place(
        self, here: Leaves, role: str, key: str, leaf: Leaf | str, where: str, drop: Sequence[str]
    ) -> None:
        """Put an array of an episode into `here`; a text says why it cannot be read. An info that
        is not kept is dropped. Raises `ImportRefused` for others."""
        why = leaf if isinstance(leaf, str) else ""
        if role == "info":
            texts = isinstance(leaf, Leaf) and leaf.kind != "numbers"
            why = why_dropped(key, drop) or why or ("not plain numbers" if texts else "")
        if isinstance(leaf, Leaf) and not why:
            put(here.setdefault(role, {}), key, leaf, self.dropped if role == "info" else None)
        elif role == "info":
            self.dropped[key] = why
        else:
            raise ImportRefused(f"{where[:250]}: {why}", expected="numbers or texts")

    def add(self, number: int, steps: int, name: str, here: Leaves) -> None:
        """One more episode; raises `ImportRefused` if its arrays differ from those before it."""
        observations, actions = here.get("observation", {}), here.get("action", {})
        infos = {k: leaf for k, leaf in here.get("info", {}).items() if k not in self.dropped}
        if not observations or not actions:
            raise ImportRefused(
                f"{name} has no {'actions' if observations else 'observations'}",
                expected="numbers, images or texts",
                got=_words(observations | actions | infos),
            )
        if not self.episodes:
            self.observations, self.actions, self.infos = observations, actions, infos
        for what, known, found in (
            ("observations", self.observations, observations),
            ("actions", self.actions, actions),
        ):
            if found != known:
                raise ImportRefused(
                    f"{what} of {name} differ from those of the episodes before",
                    expected=_words(known),
                    got=_words(found),
                )
        for key in [k for k in self.infos if infos.get(k) != self.infos[k]]:
            self.dropped[key] = f"missing or different in {name}"
            del self.infos[key]
        for key in infos.keys() - self.infos.keys() - self.dropped.keys():
            self.dropped[key] = f"not in the episodes before {name}"
        self.episodes.append((number, steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """One episode without its named arrays."""

    name: str
    """For messages."""
    rewards: Array
    """[T]."""
    terminated: bool
    truncated: bool
    final_obs_valid: bool = True
    metadata: TrajectoryMetadata = TrajectoryMetadata()
    """env, source and an empty episode_id are filled in."""
    rows: NDArray[np.int64] | None = None
    """[T]: where the file is a table, the row of each step."""


class Episodes(ABC):
    """An opened dataset; each format has a class of its own, and in its module a context manager
    `opened(file, options, memory, max_rows)` that gives one and raises `ImportRefused`."""

    layout: Layout
    env = ""
    metadata: Mapping[str, Any] = MappingProxyType({})
    """Of the whole file, for the job's result and the description of a new dataset."""

    def declared(self, what: str) -> Mapping[str, Declared]:  # noqa: ARG002
        """Spaces by key; `what` is "observation" or "action"."""
        return {}

    def written_spec(self) -> EnvSpec | None:
        """The spec that `stepwell export` wrote into it. Raises `ImportRefused` if it is broken."""
        return None

    @abstractmethod
    def rows(self, number: int, leaf: Leaf) -> Array:
        """One array of one episode: numbers [rows, …] (images as pixels), texts as objects."""

    @abstractmethod
    def about(self, number: int) -> About:
        """Rewards, ends and metadata of one episode."""

    def fit_whole(self, leaf: Leaf, space: Space, role: str) -> bool:  # noqa: ARG002
        """Convert a whole array by `fit_to`, if the format holds it whole and every value fits;
        else `rows` are converted with their episode, and a refusal names it."""
        return False

    def every(self, leaf: Leaf) -> Iterator[Array]:
        """All rows of an array of numbers, in parts; those of one episode each."""
        return (self.numbers(n, leaf, f"episode {n}") for n, _ in self.layout.episodes)

    def numbers(self, number: int, leaf: Leaf, name: str) -> Array:
        """`rows` of an array of numbers, elements in the dataset's order; `name` of the episode is
        for messages."""
        if leaf.kind == "texts":
            raise ImportRefused(f"{name}/{leaf.path} is a text", expected="numbers", got="texts")
        array = self.rows(number, leaf)
        if (order := self.layout.orders.get(leaf.path)) is not None:
            if array.shape[1:] != order.shape:
                raise ImportRefused(
                    f"{name}/{leaf.path} has another shape than its names",
                    expected=list(order.shape),
                    got=list(array.shape[1:]),
                )
            array = array[:, order]
        return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))

    def check_finite(self, number: int) -> None:
        """Refuse an episode with NaN or infinite numbers, with the row of the first."""
        about, layout = self.about(number), self.layout
        leaves = [*layout.observations.values(), *layout.actions.values()]
        arrays = {
            leaf.path: self.numbers(number, leaf, about.name)
            for leaf in leaves
            if leaf.kind != "texts"
        }
        arrays["rewards"] = cast("rewards", np.asarray(about.rewards), REWARDS)
        for path, array in arrays.items():
            if array.dtype.kind != "f" or all_finite(array):
                continue
            invalid = ~np.isfinite(array.reshape(len(array), -1))
            step = int(invalid.any(axis=1).argmax())
            where = f"step {step}"
            if about.rows is not None and step < len(about.rows):
                where = f"row {about.rows[step]}"
            raise ImportRefused(
                f"{about.name}/{path} contains invalid numbers",
                expected="finite",
                got=f"{int(invalid.sum())} NaN or infinite, the first in {where}",
            )


def join(key: str, part: str) -> str:
    """A name that a spec allows: other characters, such as spaces, become "_"."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", part)
    return f"{key}/{name}" if key else name


def array_name(role: str, parts: Sequence[str]) -> str:
    """The key of an array in the groups `parts` below those of its role: the members of a Tuple are
    numbered, as a collector numbers them."""
    key = DEFAULTS[role] if not parts or parts[0].isdecimal() else ""
    for part in parts:
        key = join(key, part)
    return key


def put(leaves: dict[str, Any], key: str, leaf: Any, dropped: dict[str, str] | None = None) -> None:
    """Add a leaf by its name. Of infos that have one name all go into `dropped`; others raise
    `ImportRefused`."""
    if key in leaves:
        error = same_name(key, leaves[key].path, leaf.path, "other names in the file")
        if dropped is None:
            raise error
        dropped[key] = error.detail
    leaves[key] = leaf


def parsed_spec(where: str, written: Any) -> EnvSpec:
    """The spec that `stepwell export` wrote, or its JSON. Raises `ImportRefused`."""
    try:
        return EnvSpec.from_json(json.loads(written) if isinstance(written, bytes) else written)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ImportRefused(
            f"{where} cannot be read: {str(error)[:200]}", expected="an env spec as JSON"
        ) from None


def _words(leaves: Mapping[str, Leaf]) -> str:
    shown = (f"{k} {leaf.dtype} {leaf.shape or leaf.kind}" for k, leaf in sorted(leaves.items()))
    return ", ".join(shown)[:300] or "none"
