"""The trajectory. This diagram defines how observations, actions and rewards align.

A trajectory of T transitions has T+1 observations, so T+1 rows:

    row t | obs    action   reward   terminated  truncated | is_last   info
    0     | o0     a0       r0       F           F         | F         i0
    1     | o1     a1       r1       F           F         | F         i1       r1 is what a1 earned
    ...   |
    T-1   | oT-1   aT-1     rT-1     x           y         | F         iT-1     at most one of x, y
    T     | oT     -        -        -           -         | T         iT       observation only

x = terminated: the task ended, nothing lies beyond oT. y = truncated: the episode was cut off, for
instance by a time limit, and the value of oT still counts. Neither: the episode continues in
another trajectory. oT may be unknown (D4RL does not store it): then `final_obs_valid` is False, row
T repeats the one before, and learners mask it. `infos` belong to the observation they came with.
There is no next_obs column.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uuid_utils
from numpy.typing import NDArray

from stepwell._wording import pluralize
from stepwell.errors import InvalidTrajectory
from stepwell.flags import as_bool, as_bools, describe
from stepwell.metadata import TrajectoryMetadata
from stepwell.rounding import rounded, warn
from stepwell.spaces import (
    DEFAULT_ACTION,
    DEFAULT_OBSERVATION,
    Array,
    EnvSpec,
    Space,
    all_finite,
    why_outside,
)

__all__ = ["Trajectory", "TrajectoryMetadata", "new_id"]

_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def new_id() -> str:
    """A fresh UUIDv7: globally unique, ordered by time."""
    return str(uuid_utils.uuid7())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """A contiguous piece of one episode, validated on construction; see the diagram above.

    Raises `InvalidTrajectory` with the array, the expected and the actual value.
    Arrays are referenced, not copied, and must not be changed afterwards.
    """

    obs: Mapping[str, Array]
    """Observations by name, each [T+1, *shape]."""
    actions: Mapping[str, Array]
    """Actions by name (usually the one key "action"), each [T, *shape]."""
    rewards: NDArray[np.float32]
    """[T] float32; rewards[t] is what actions[t] earned."""
    terminated: bool = False
    """The task ended with the last transition."""
    truncated: bool = False
    """The episode was cut off after the last transition, for instance by a time limit."""
    final_obs_valid: bool = True
    """False where the last observation is unknown and only repeats the one before."""
    action_known: NDArray[np.bool_] | None = None
    """[T] bool, False where the action is unknown (in human data); None if all are known."""
    infos: Mapping[str, Array] = field(default_factory=dict)
    """Extra arrays beside the observations, each [T+1, *shape]."""
    metadata: TrajectoryMetadata = field(default_factory=TrajectoryMetadata)
    """Where it came from."""
    id: str = field(default_factory=new_id)
    """UUID; the idempotency key of the whole trajectory."""

    def __post_init__(self) -> None:
        try:
            canonical = str(uuid_utils.UUID(self.id))
        except (ValueError, TypeError, AttributeError):
            raise InvalidTrajectory(
                "id", expected="a UUID (stepwell.new_id())", got=repr(self.id)[:80]
            ) from None
        if canonical != self.id:
            raise InvalidTrajectory(
                "id", expected=f"the canonical form {canonical}", got=repr(self.id)[:80]
            )
        for what, named in (("obs", self.obs), ("actions", self.actions), ("infos", self.infos)):
            if not isinstance(named, Mapping):
                raise InvalidTrajectory(
                    what,
                    expected="arrays by name, {name: array}; Trajectory.from_arrays names a single"
                    " one itself",
                    got=_describe(named),
                )
            for key, array in named.items():
                refuse_masked(f"{what}[{key}]", array)
        refuse_masked("rewards", self.rewards)
        refuse_masked("action_known", self.action_known)
        if not self.obs:
            raise InvalidTrajectory("obs", expected="at least one named array", got="none")
        if not self.actions:
            raise InvalidTrajectory("actions", expected="at least one named array", got="none")
        if not isinstance(self.rewards, np.ndarray) or self.rewards.ndim != 1:
            raise InvalidTrajectory("rewards", expected="an array [T]", got=_describe(self.rewards))
        if self.rewards.dtype != np.float32:
            raise InvalidTrajectory("rewards", expected="float32", got=str(self.rewards.dtype))
        steps = len(self.rewards)
        if steps < 1:
            raise InvalidTrajectory("rewards", expected="at least one transition", got="none")
        if not all_finite(self.rewards):
            raise InvalidTrajectory("rewards", expected="finite numbers", got="NaN or infinity")
        for what, arrays, rows in (
            ("obs", self.obs, steps + 1),
            ("actions", self.actions, steps),
            ("infos", self.infos, steps + 1),
        ):
            for key, array in arrays.items():
                if (
                    not isinstance(array, np.ndarray)
                    or array.ndim < 1
                    or array.dtype.kind not in "biuf"
                ):
                    raise InvalidTrajectory(
                        f"{what}[{key}]", expected="an array of numbers", got=_describe(array)
                    )
                if len(array) != rows:
                    count = "T+1" if rows > steps else "T"
                    count += f"; T={pluralize(steps, 'reward')}"
                    raise InvalidTrajectory(
                        f"{what}[{key}]",
                        expected=f"{pluralize(rows, 'row')} ({count})",
                        got=pluralize(len(array), "row"),
                    )
                # Infos may contain NaN; arrays that an agent reads may not.
                if what != "infos" and array.dtype.kind == "f" and not all_finite(array):
                    raise InvalidTrajectory(
                        f"{what}[{key}]", expected="finite numbers", got="NaN or infinity"
                    )
        # Environments and numpy return other types than bool, of which JSON and digests know none.
        for name in ("terminated", "truncated"):
            object.__setattr__(self, name, as_bool(name, getattr(self, name), end=True))
        valid = as_bool("final_obs_valid", self.final_obs_valid)
        object.__setattr__(self, "final_obs_valid", valid)
        if self.terminated and self.truncated:
            raise InvalidTrajectory(
                "terminated and truncated",
                expected="at most one (a task that ended was not cut short)",
                got="both",
            )
        known = self.action_known
        if known is not None and (
            not isinstance(known, np.ndarray) or known.dtype != np.bool_ or known.shape != (steps,)
        ):
            raise InvalidTrajectory(
                "action_known", expected=f"bool [{steps}]", got=_describe(known)
            )

    @classmethod
    def checked(cls, **values: Any) -> Trajectory:
        """One of values that follow all rules, as its caller knows; every field must be given."""
        made = object.__new__(cls)
        for name in cls.__slots__:
            object.__setattr__(made, name, values[name])
        return made

    @classmethod
    def from_arrays(
        cls,
        *,
        obs: Any,
        actions: Any,
        rewards: Any,
        terminated: Any = False,
        truncated: Any = False,
        spec: EnvSpec | None = None,
        action_known: Any = None,
        infos: Mapping[str, Any] | None = None,
        final_obs_valid: bool | None = None,
        id: str | None = None,  # noqa: A002 - the word of the API
        **metadata: Any,
    ) -> Trajectory:
        """Create a trajectory from lists or arrays, or from dicts of them.

        `terminated` and `truncated` may be booleans (in any form that `stepwell.flags` reads) or
        per-step sequences [T] with True only at the end. With a `spec`, arrays are cast to its
        dtypes if only precision is lost; a Python warning says where that changes a value.
        Observations may have T rows; the last one is then repeated and marked as not valid. Other
        keywords are passed to `TrajectoryMetadata`. Raises `InvalidTrajectory`.
        """
        given = _array("rewards", rewards)
        with np.errstate(over="ignore"):
            reward_array = given.astype(np.float32, copy=False).reshape(-1)
        steps = len(reward_array)
        spaces = (spec.observations, spec.actions, spec.infos) if spec else ({}, {}, {})
        obs_arrays = _named("observations", obs, DEFAULT_OBSERVATION, spaces[0])
        action_arrays = _named("actions", actions, DEFAULT_ACTION, spaces[1])
        info_arrays = _named("infos", {} if infos is None else infos, "", spaces[2])
        missing_last = all(len(a) == steps for a in obs_arrays.values()) and steps > 0
        if missing_last:
            obs_arrays = {k: _repeat_last(a) for k, a in obs_arrays.items()}
            info_arrays = {
                k: _repeat_last(a) if len(a) == steps else a for k, a in info_arrays.items()
            }
        if final_obs_valid is None:
            final_obs_valid = not missing_last
        refuse_masked("action_known", action_known)
        try:
            description = TrajectoryMetadata(**metadata)
        except TypeError as error:
            raise InvalidTrajectory(f"metadata: {error}") from None
        made = cls(
            obs=obs_arrays,
            actions=action_arrays,
            rewards=reward_array,
            terminated=_end_flag("terminated", terminated, steps),
            truncated=_end_flag("truncated", truncated, steps),
            final_obs_valid=final_obs_valid,
            action_known=None if action_known is None else as_bools("action_known", action_known),
            infos=info_arrays,
            metadata=description,
            id=id or new_id(),
        )
        warn(rounded("rewards", given, np.float32))  # infinity has been refused
        return made

    def __len__(self) -> int:
        """T, the number of transitions."""
        return len(self.rewards)

    @property
    def total_reward(self) -> float:
        """Sum of rewards in float64: the SQL column `return`."""
        return float(self.rewards.sum(dtype=np.float64))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, uncompressed."""
        groups = (self.obs, self.actions, self.infos)
        return int(self.rewards.nbytes + sum(a.nbytes for group in groups for a in group.values()))

    def check(self, spec: EnvSpec) -> None:
        """Raise `InvalidTrajectory` unless this trajectory fits `spec`, key by key.

        Names, shapes and dtypes must be equal; actions must lie in their space; integers too.
        """
        for what, arrays, spaces in (
            ("obs", self.obs, spec.observations),
            ("actions", self.actions, spec.actions),
            ("infos", self.infos, spec.infos),
        ):
            if arrays.keys() != spaces.keys():
                raise InvalidTrajectory(
                    f"{what} have other names",
                    expected=str(sorted(spaces)),
                    got=str(sorted(arrays)),
                )
            for key, space in spaces.items():
                array = arrays[key]
                if array.shape[1:] != space.shape:
                    raise InvalidTrajectory(
                        f"{what}[{key}] shape", expected=str(space.shape), got=str(array.shape[1:])
                    )
                if array.dtype != np.dtype(space.dtype):
                    raise InvalidTrajectory(
                        f"{what}[{key}] dtype", expected=space.dtype, got=str(array.dtype)
                    )
                bounded = what == "actions" or (what == "obs" and array.dtype.kind != "f")
                if bounded and (why := why_outside(space, array)):
                    raise InvalidTrajectory(
                        f"{what}[{key}]", expected="values inside the space", got=why
                    )
        if (self.action_known is not None) and not spec.action_known:
            raise InvalidTrajectory(
                "action_known",
                expected="none (the dataset's spec has action_known = false)",
                got="an array",
            )

    def header(self) -> dict[str, Any]:
        """Return everything except the arrays as JSON."""
        return {
            "id": self.id,
            "length": len(self),
            "terminated": self.terminated,
            "truncated": self.truncated,
            "final_obs_valid": self.final_obs_valid,
            "about": self.metadata.to_json(),  # its name in format 1, which digests cover
        }

    @property
    def digest(self) -> str:
        """sha256 over header and arrays: equal digests mean equal content, in any encoding."""
        sha = hashlib.sha256(_canonical(self.header()).encode())
        columns: list[tuple[str, Array]] = [("rewards", self.rewards)]
        for what, arrays in (("obs", self.obs), ("actions", self.actions), ("infos", self.infos)):
            columns += [(f"{what}/{key}", array) for key, array in sorted(arrays.items())]
        if self.action_known is not None:
            columns.append(("action_known", self.action_known))
        for name, array in columns:
            sha.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
            sha.update(np.ascontiguousarray(array).data)
        return sha.hexdigest()


def _named(what: str, value: Any, default: str, spaces: Mapping[str, Space]) -> dict[str, Array]:
    if not default and not isinstance(value, Mapping):
        raise InvalidTrajectory("infos", expected="named arrays", got=_describe(value))
    named = value if isinstance(value, Mapping) else {default: value}
    result: dict[str, Array] = {}
    warning = ""
    for key, raw in named.items():
        array = _array(str(key), raw)
        if array.ndim < 1:
            raise InvalidTrajectory(str(key), expected="an array with rows", got=_describe(array))
        space = spaces.get(key)
        result[str(key)] = array if space is None else _cast(str(key), array, space)
        if space is not None and not warning:
            warning = rounded(what, array, np.dtype(space.dtype))
    warn(warning, 3)
    return result


def _cast(key: str, array: Array, space: Space) -> Array:
    target = np.dtype(space.dtype)
    # D4RL stores scalars as [T, 1] and discrete actions as floats; the values are the same.
    if array.shape[1:] == (1,) and space.shape == ():
        array = array[:, 0]
    if array.dtype == target or not array.size:
        return array.astype(target, copy=False)
    if target.kind in "iub":
        if array.dtype.kind == "f" and not bool((array == np.rint(array)).all()):
            raise InvalidTrajectory(key, expected=f"whole numbers ({target})", got=str(array.dtype))
        least, most = (0, 1) if target.kind == "b" else _limits(target)
        if int(array.min()) < least or int(array.max()) > most:
            raise InvalidTrajectory(
                key,
                expected=f"{least} … {most} ({target})",
                got=f"{array.min():g} … {array.max():g}",
            )
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(target)


def _array(name: str, raw: Any) -> Array:
    """Convert numbers to an array. Raises `InvalidTrajectory` if numpy cannot."""
    refuse_masked(name, raw)
    try:
        array = np.asarray(raw)
        if array.dtype.kind not in "biuf":
            raise ValueError
        return array
    except (ValueError, TypeError, OverflowError):
        raise InvalidTrajectory(
            name, expected="numbers in rows of equal shape", got=_describe(raw)
        ) from None
    except RuntimeError as error:  # of a tensor that needs gradients
        raise InvalidTrajectory(
            name, expected="numbers without gradients (tensor.detach())", got=str(error)
        ) from None


def refuse_masked(name: str, raw: Any) -> None:
    """Raise `InvalidTrajectory` for an array with masked elements, or a list that has one: numpy
    converts them to the values beneath the mask."""
    for array in raw if isinstance(raw, list | tuple) else (raw,):
        if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
            raise InvalidTrajectory(
                name,
                expected="no masked elements (array.filled(value) gives them a value)",
                got=describe(array),
            )


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def _repeat_last(array: Array) -> Array:
    return np.concatenate([array, array[-1:]])


def _end_flag(name: str, value: Any, steps: int) -> bool:
    refuse_masked(name, value)
    flags = as_bools(name, value, end=True).reshape(-1)
    if len(flags) == 1:  # of the last step, or of the whole
        return bool(flags[0])
    if len(flags) != steps:
        raise InvalidTrajectory(
            name,
            expected=f"a boolean or {pluralize(steps, 'flag')}",
            got=pluralize(len(flags), "flag"),
        )
    if bool(flags[:-1].any()):
        raise InvalidTrajectory(
            name,
            expected="True at the last step only (cut the data into episodes first)",
            got=f"True at step {int(flags.argmax())} of {steps}",
        )
    return bool(flags[-1])


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__
