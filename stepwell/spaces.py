"""Observation and action spaces of an environment, as plain data and as JSON.

Box, Discrete, MultiDiscrete and MultiBinary, in flat dicts of named arrays, without gymnasium: the
collector converts gymnasium spaces into these, and the trainer converts these into the agent's.
Every dataset has one `EnvSpec`; trajectories can share a dataset if their specs are equal.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from stepwell._wording import pluralize, shown
from stepwell.errors import InvalidSpace
from stepwell.vocabulary import Vocabulary

Role = Literal["policy", "critic", "mask", "relabel", "log"]
ROLES: tuple[str, ...] = get_args(Role)
DEFAULT_OBSERVATION = "observation"
DEFAULT_ACTION = "action"
DTYPES = (
    *("float16", "float32", "float64", "bool"),
    *("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64"),
)
MAX_ELEMENTS = 1 << 24
MAX_KEYS = 1024
MAX_NAMES, MAX_NAME = 4096, 256
"""Most names of a vector's elements, and characters in one."""
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(/[A-Za-z0-9_]{1,64}){0,4}")
_KEY_RULE = (
    "a letter or _ first, then letters, digits and _; / between at most 5 parts, each of at most 64"
)

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Box:
    """Arrays of one shape and dtype, bounded element by element.

    `low` and `high` are numbers (for all elements) or flat tuples in C order; a tuple of equal
    numbers becomes that number, so that equal spaces are equal. Infinite bounds are spelt "-inf"
    and "inf" in JSON.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float | tuple[float, ...] = -math.inf
    high: float | tuple[float, ...] = math.inf

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidSpace("unknown dtype", expected=" | ".join(DTYPES), got=str(self.dtype))
        shape = _integers("shape", self.shape)
        if any(n < 1 for n in shape) or len(shape) > 8:
            raise InvalidSpace(
                "bad shape", expected="at most 8 positive sizes", got=str(self.shape)
            )
        object.__setattr__(self, "shape", shape)
        if self.size > MAX_ELEMENTS:
            raise InvalidSpace(
                "too large", expected=f"≤ {MAX_ELEMENTS} elements", got=str(self.size)
            )
        for name in ("low", "high"):
            object.__setattr__(self, name, _bound(name, getattr(self, name), self.size))
        if bool(np.any(np.asarray(self.low) > np.asarray(self.high))):
            raise InvalidSpace(
                "low exceeds high", expected="low ≤ high", got=f"{self.low}, {self.high}"[:120]
            )

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(low, high), each float64 of `shape`."""
        low = np.broadcast_to(np.asarray(self.low, np.float64).reshape(-1), (self.size,))
        high = np.broadcast_to(np.asarray(self.high, np.float64).reshape(-1), (self.size,))
        return low.reshape(self.shape), high.reshape(self.shape)

    def held_bounds(self) -> tuple[Array, Array]:
        """(low, high) in the dtype of the space: those of an integer or bool are never infinite."""
        kind = np.dtype(self.dtype)
        low, high = self.bounds()
        if kind.kind == "f":
            return low.astype(kind), high.astype(kind)
        least, most = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)

        def held(bounds: Array) -> Array:
            # As Python's integers: float64 does not have 2^63 - 1.
            whole = [int(min(max(bound, least), most)) for bound in bounds.ravel().tolist()]
            return np.array(whole, kind).reshape(self.shape)

        return held(low), held(high)


@dataclass(frozen=True, slots=True)
class Discrete:
    """One integer out of `start … start + n - 1`."""

    shape: ClassVar[tuple[int, ...]] = ()
    dtype: ClassVar[str] = "int64"
    n: int
    start: int = 0

    def __post_init__(self) -> None:
        for name in ("n", "start"):
            object.__setattr__(self, name, _integers(name, (getattr(self, name),))[0])
        if self.n < 1:
            raise InvalidSpace("n must be positive", expected="n ≥ 1", got=str(self.n))
        if not -(2**63) <= self.start <= self.start + self.n - 1 < 2**63:
            raise InvalidSpace("too wide", expected="64-bit integers", got=f"{self.start}+{self.n}")


@dataclass(frozen=True, slots=True)
class MultiDiscrete:
    """A vector of integers, element i in `start[i] … start[i] + nvec[i] - 1`.

    `start` may be given as one number for all; without it they begin at 0, and JSON has no start.
    """

    dtype: ClassVar[str] = "int64"
    nvec: tuple[int, ...]
    start: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        nvec = _integers("nvec", self.nvec)
        if not 1 <= len(nvec) <= MAX_ELEMENTS or any(not 1 <= n < 2**63 for n in nvec):
            raise InvalidSpace(
                "nvec needs positive sizes", expected="n ≥ 1", got=str(self.nvec)[:120]
            )
        given: Any = self.start
        alone = isinstance(given, int | np.integer)
        start = _integers("start", (given,) * len(nvec) if alone else given)
        start = start or (0,) * len(nvec)
        if len(start) != len(nvec):
            raise InvalidSpace(
                "start has the wrong length", expected=str(len(nvec)), got=str(len(start))
            )
        if any(not -(2**63) <= s <= s + n - 1 < 2**63 for s, n in zip(start, nvec, strict=True)):
            raise InvalidSpace("too wide", expected="64-bit integers", got=f"{start}+{nvec}"[:120])
        object.__setattr__(self, "nvec", nvec)
        object.__setattr__(self, "start", start)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    @property
    def last(self) -> tuple[int, ...]:
        """The largest value of each element."""
        return tuple(s + n - 1 for s, n in zip(self.start, self.nvec, strict=True))


@dataclass(frozen=True, slots=True)
class MultiBinary:
    """A vector of n zeros and ones."""

    dtype: ClassVar[str] = "int8"
    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _integers("n", (self.n,))[0])
        if not 1 <= self.n <= MAX_ELEMENTS:
            raise InvalidSpace(
                "n must be positive", expected=f"1 … {MAX_ELEMENTS}", got=str(self.n)
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n,)


Space = Box | Discrete | MultiDiscrete | MultiBinary


def env_name(env_id: str) -> str:
    """The name that data and scores give an environment: its Gymnasium id without the module that
    registers it, "my.module:Name-v0" → "Name-v0"."""
    return env_id.rpartition(":")[2]


def unnamed(where: str, names: tuple[str, ...], source: str) -> str:
    """The warning for a vector that comes without names of its elements, of which a dataset has
    some. `source`: "this file", for instance."""
    return (
        f"{where} has no names of its elements in {source}: taken as {shown(names, 20)}, the "
        "dataset's"
    )


def why_outside(space: Space, values: Array) -> str | None:
    """Return why `values` [N, *shape] are not all in `space`, or None. Ignores dtype and shape.

    Floats must be finite. The bounds of observations are often wrong in environments, so callers
    decide for which arrays bounds are checked.
    """
    if values.dtype.kind == "f" and not all_finite(values):
        bad = int(np.count_nonzero(~np.isfinite(values)))
        return f"{pluralize(bad, 'value is', 'values are')} NaN or infinite"
    if isinstance(space, Discrete):
        low, high = space.start, space.start + space.n - 1
    elif isinstance(space, MultiBinary):
        low, high = 0, 1
    elif isinstance(space, MultiDiscrete):
        first, last = space.start, space.last
        if bool((values < np.asarray(first)).any()) or bool((values > np.asarray(last)).any()):
            if any(first):
                return f"values outside start … start+nvec-1 = {first} … {last}"
            return f"values outside 0 … nvec-1 = {space.nvec}"
        return None
    else:
        return _outside_box(space, values)
    if values.size and (int(values.min()) < low or int(values.max()) > high):
        return f"range {int(values.min())} … {int(values.max())} leaves {low} … {high}"
    return None


def all_finite(values: Array) -> bool:
    """Whether no value is NaN or infinite; allocates no mask for large arrays."""
    if values.size < 1 << 16:
        return bool(np.isfinite(values).all())
    # Both min and max propagate NaN.
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))


def _outside_box(space: Box, values: Array) -> str | None:
    if not values.size or (space.low == -math.inf and space.high == math.inf):
        return None
    # Extremes first, then one comparison: with one bound for all elements that is all of the work.
    axis = 0 if isinstance(space.low, tuple) or isinstance(space.high, tuple) else None
    flat = values.reshape(len(values), -1)
    least, most, low, high = flat.min(axis=axis), flat.max(axis=axis), *_loose_bounds(space)
    if bool((least < low).any()) or bool((most > high).any()):
        allowed = (np.min(space.low), np.max(space.high))
        return f"range {least.min():g} … {most.max():g} leaves {allowed[0]:g} … {allowed[1]:g}" + (
            " (bounds differ by element)" if axis == 0 else ""
        )
    return None


@functools.lru_cache(maxsize=256)
def _loose_bounds(space: Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bounds [size] or [] with slack: a float32 rendering of a float64 bound may land one rounding
    beyond it."""
    low, high = np.asarray(space.low, np.float64), np.asarray(space.high, np.float64)
    slack = 1e-5 * np.maximum(1.0, np.where(np.isfinite(high), np.abs(high), 1.0))
    return low - slack, high + slack


SPACES = {kind.__name__: kind for kind in (Box, Discrete, MultiDiscrete, MultiBinary)}


def space_to_json(space: Space) -> dict[str, Any]:
    """{"type": "Box", …}: the fields of the space, with tuples as lists and infinity as text."""
    values = {f.name: getattr(space, f.name) for f in fields(space)}
    if isinstance(space, MultiDiscrete) and not any(space.start):
        del values["start"]  # as before there was one: digests stay
    return {"type": type(space).__name__, **{k: _to_json(v) for k, v in values.items()}}


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else "-inf"
    return value


def space_from_json(data: Any) -> Space:
    """Inverse of `space_to_json`; refuses anything else with `InvalidSpace`."""
    if not isinstance(data, Mapping):
        raise InvalidSpace("a space is an object with a type", got=type(data).__name__)
    kind = data.get("type")
    if not isinstance(kind, str) or kind not in SPACES:
        raise InvalidSpace("unknown space", expected=" | ".join(SPACES), got=repr(kind))
    known = {f.name for f in fields(SPACES[kind])}
    if unknown := set(data) - known - {"type"}:
        raise InvalidSpace(
            f"{kind} has unknown fields", expected=str(sorted(known)), got=str(sorted(unknown))
        )
    try:
        return SPACES[kind](**{k: _from_json(k, v) for k, v in data.items() if k != "type"})
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InvalidSpace):
            raise
        raise InvalidSpace(f"{kind} is incomplete or of the wrong type: {error}") from None


def _named_space(what: str, key: str, data: Any) -> Space:
    try:
        return space_from_json(data)
    except InvalidSpace as error:
        raise error.within(f"{what}[{key[:100]}]") from None


def _from_json(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(name, v) for v in value)
    return float(value) if name in ("low", "high") else value


def _integers(name: str, values: Any) -> tuple[int, ...]:
    """Convert to plain ints, so that values from numpy compare, hash and print the same."""
    try:
        return tuple(operator.index(n) for n in values)
    except TypeError:
        raise InvalidSpace(f"bad {name}", expected="integers", got=repr(values)[:120]) from None


def _bound(name: str, bound: Any, size: int) -> float | tuple[float, ...]:
    """A float, or `size` of them that are not all the same; no -0.0, which prints otherwise."""
    try:
        flat = np.asarray(bound, np.float64).reshape(-1) + 0.0
    except (TypeError, ValueError):
        raise InvalidSpace(f"bad {name}", expected="numbers", got=repr(bound)[:120]) from None
    if bool(np.isnan(flat).any()):
        raise InvalidSpace("a bound is NaN", expected="a number, 'inf' or '-inf'")
    single = isinstance(bound, int | float | np.number) or np.ndim(bound) == 0
    if not single and len(flat) != size:
        raise InvalidSpace(f"{name} has the wrong length", expected=str(size), got=str(len(flat)))
    if single or bool((flat == flat[0]).all()):
        return float(flat[0])
    return tuple(flat.tolist())


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """The schema of a dataset: named observation and action spaces, roles, and named infos.

    `observations` and `actions` are flat dicts (default keys "observation" and "action").
    `roles` states how an observation is used: `policy` (default), `critic` (privileged), `mask`
    (legal actions), `relabel` (achieved goals), `log`. `infos` are extra arrays stored with the
    observations for inspection and SQL; agents do not receive them. `vocabularies` are those of the
    observations that are texts: a MultiDiscrete of token ids. `names` are those of the elements of
    vectors, by "observation/KEY" and "action/KEY": an import puts the columns of a file in this
    order. Specs that differ in `env` only, or of which one has no names, have the same layout.

        Example: EnvSpec.of(Box((3,)), Box((1,), low=-2.0, high=2.0), env="Pendulum-v1")
    """

    observations: Mapping[str, Space]
    actions: Mapping[str, Space]
    roles: Mapping[str, str] = field(default_factory=dict)
    infos: Mapping[str, Space] = field(default_factory=dict)
    action_known: bool = False
    env: str = ""
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, spaces in (
            ("observations", self.observations),
            ("actions", self.actions),
            ("infos", self.infos),
        ):
            if len(spaces) > MAX_KEYS:
                raise InvalidSpace(
                    f"too many {what}", expected=f"≤ {MAX_KEYS} names", got=str(len(spaces))
                )
            if not spaces and what != "infos":
                raise InvalidSpace(f"{what} are empty", expected="at least one named space")
            for key in spaces:
                if not isinstance(key, str) or not _KEY.fullmatch(key):
                    raise InvalidSpace(f"bad name in {what}", expected=_KEY_RULE, got=repr(key))
        for key, role in self.roles.items():
            if key not in self.observations:
                raise InvalidSpace("a role for an unknown observation", got=repr(key))
            if role not in ROLES:
                raise InvalidSpace(f"unknown role of {key}", expected=" | ".join(ROLES), got=role)
        for key, vocabulary in self.vocabularies.items():
            space = self.observations.get(key)
            if (
                not isinstance(space, MultiDiscrete)
                or set(space.nvec) != {vocabulary.n}
                or any(space.start)
            ):
                raise InvalidSpace(
                    f"a vocabulary of {vocabulary.n} ids for {key!r}, which is no such text",
                    expected=f"MultiDiscrete([{vocabulary.n}, …])",
                    got=str(space)[:120],
                )
        for key, names in self.names.items():
            self._check_names(key, names)
        # One order everywhere, whatever order the caller's dicts had.
        for name in ("observations", "actions", "roles", "infos", "vocabularies", "names"):
            mapping = getattr(self, name)
            object.__setattr__(self, name, {k: mapping[k] for k in sorted(mapping)})

    def _check_names(self, key: str, names: tuple[str, ...]) -> None:
        what, _, name = key.partition("/")
        space = {"observation": self.observations, "action": self.actions}.get(what, {}).get(name)
        good = isinstance(names, tuple) and all(
            isinstance(one, str) and 0 < len(one) <= MAX_NAME for one in names
        )
        if space is None or not good or len(names) > MAX_NAMES or space.shape != (len({*names}),):
            raise InvalidSpace(
                f"names of {key!r}",
                expected="observation/KEY or action/KEY of a vector → a tuple with one text for "
                f"each element, each once, at most {MAX_NAMES}",
                got=f"{names!r} for {space}"[:200],
            )

    @classmethod
    def of(
        cls,
        observation: Space | Mapping[str, Space],
        action: Space | Mapping[str, Space],
        *,
        env: str = "",
        roles: Mapping[str, str] | None = None,
        infos: Mapping[str, Space] | None = None,
        action_known: bool = False,
        vocabularies: Mapping[str, Vocabulary] | None = None,
        names: Mapping[str, tuple[str, ...]] | None = None,
    ) -> EnvSpec:
        """A spec from single spaces or dicts of them."""
        return cls(
            observation if isinstance(observation, Mapping) else {DEFAULT_OBSERVATION: observation},
            action if isinstance(action, Mapping) else {DEFAULT_ACTION: action},
            roles or {},
            infos or {},
            action_known,
            env,
            vocabularies or {},
            names or {},
        )

    def __hash__(self) -> int:
        """Equal specs hash equal, so that a spec can be a key although it holds dicts."""
        groups = (self.observations, self.actions, self.roles, self.infos, self.vocabularies)
        return hash((self.env, self.action_known, *(tuple(group.items()) for group in groups)))

    def role(self, key: str) -> str:
        return self.roles.get(key, "policy")

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "observations": {k: space_to_json(s) for k, s in self.observations.items()},
            "actions": {k: space_to_json(s) for k, s in self.actions.items()},
            "env": self.env,
        }
        if self.roles:
            data["roles"] = dict(self.roles)
        if self.infos:
            data["infos"] = {k: space_to_json(s) for k, s in self.infos.items()}
        if self.action_known:
            data["action_known"] = True
        if self.vocabularies:
            data["vocabularies"] = {k: v.to_json() for k, v in self.vocabularies.items()}
        if self.names:
            data["names"] = {k: list(names) for k, names in self.names.items()}
        return data

    @classmethod
    def from_json(cls, data: Any) -> EnvSpec:
        if not isinstance(data, Mapping):
            raise InvalidSpace("an env spec is an object", got=type(data).__name__)
        known = {"observations", "actions", "env", "roles", "infos", "action_known"}
        known |= {"vocabularies", "names"}
        if unknown := set(data) - known:
            raise InvalidSpace(
                "an env spec has unknown fields",
                expected=str(sorted(known)),
                got=str(sorted(unknown)),
            )
        parts: dict[str, dict[str, Space]] = {}
        for name in ("observations", "actions", "infos"):
            part = data.get(name, {})
            if not isinstance(part, Mapping):
                raise InvalidSpace(f"{name} is an object of named spaces", got=type(part).__name__)
            parts[name] = {str(k): _named_space(name, str(k), v) for k, v in part.items()}
        roles, vocabularies = data.get("roles", {}), data.get("vocabularies", {})
        names = data.get("names", {})
        for name, part in (("roles", roles), ("vocabularies", vocabularies), ("names", names)):
            if not isinstance(part, Mapping):
                raise InvalidSpace(f"{name} is an object", got=type(part).__name__)
        return cls(
            parts["observations"],
            parts["actions"],
            {str(k): str(v) for k, v in roles.items()},
            parts["infos"],
            bool(data.get("action_known", False)),
            str(data.get("env", "")),
            {str(k): Vocabulary.from_json(v) for k, v in vocabularies.items()},
            {str(k): tuple(v) if isinstance(v, list) else v for k, v in names.items()},
        )

    def other_names(self, other: EnvSpec) -> str | None:
        """The key of a vector whose elements both specs name, but not alike; None if there is
        none."""
        both = self.names.keys() & other.names.keys()
        return next((k for k in sorted(both) if self.names[k] != other.names[k]), None)

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON without `env` and `names`: equal digests mean equal layouts,
        as long as no element has two names (`other_names`)."""
        layout = {k: v for k, v in self.to_json().items() if k not in ("env", "names")}
        return hashlib.sha256(
            json.dumps(layout, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()
