"""Observation and action spaces of an environment, as settings models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import Self

from amago_model.config.base import Settings
from amago_model.errors import SpaceError

Size = Annotated[int, Field(ge=0)]
Role = Literal["policy", "critic", "mask", "relabel", "log"]
USED_ROLES = ("policy", "critic", "mask")
MOST_CATEGORIES = 1 << 16


class ObsSpace(Settings):
    """One named observation array."""

    error: ClassVar[type[Exception]] = SpaceError

    shape: tuple[Size, ...]
    """Shape of one observation, without batch or time."""
    dtype: str
    """numpy name of the stored dtype, such as 'float32' or 'uint8'."""
    n: int | None = Field(None, ge=1)
    """Number of categories if the array contains category indices 0..n-1 (see `starts`). They are
    encoded as one-hots if n is small, else embedded (see encoders/modalities.py)."""
    starts: tuple[int, ...] = ()
    """The first category of each element, flattened, if they do not begin at 0; empty if they do.
    """
    vocabulary: tuple[str, ...] = ()
    """Tokens of a text: the array contains their indices + 2, 1 for an unknown token, and 0 for
    padding. It is always encoded as tokens."""
    role: Role = "policy"
    """How the array is used: policy (input of the agent), critic (privileged, input of critics
    only), mask (legal actions), relabel, log (neither is an input of a network)."""

    @property
    def features(self) -> int:
        """Width of this array when flattened (and one-hot encoded, if it contains categories)."""
        return math.prod(self.shape) * (self.n or 1)


_FIELDS_OF_KINDS = {
    "n": ("discrete", "multi_binary"),
    "start": ("discrete",),
    **dict.fromkeys(("nvec", "starts"), ("multi_discrete",)),
    **dict.fromkeys(("shape", "low", "high"), ("continuous",)),
}


class ActionSpace(Settings):
    """The action space of an environment."""

    model_config = ConfigDict(allow_inf_nan=True)  # _check_box rejects them with advice
    error: ClassVar[type[Exception]] = SpaceError

    kind: Literal["discrete", "continuous", "multi_binary", "multi_discrete"]
    """discrete: one of n integers; continuous: an array between low and high; multi_binary: n
    binary values; multi_discrete: one of nvec[i] integers for each part i."""
    n: int = 0
    """discrete: number of actions; multi_binary: number of binary values."""
    nvec: tuple[int, ...] = ()
    """multi_discrete: number of choices of each part."""
    start: int = 0
    """discrete: index of the first action."""
    starts: tuple[int, ...] = ()
    """multi_discrete: the first choice of each part; empty if all begin at 0."""
    shape: tuple[int, ...] = ()
    """continuous: shape of one action."""
    low: tuple[float, ...] = ()
    """continuous: lower bounds, flattened."""
    high: tuple[float, ...] = ()
    """continuous: upper bounds, flattened."""

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        for name, kinds in _FIELDS_OF_KINDS.items():
            if self.kind not in kinds and getattr(self, name):
                default = type(self).model_fields[name].default
                raise SpaceError(
                    f"{name}: only a {' or '.join(kinds)} space has it; leave it {default!r}"
                )
        if self.starts and len(self.starts) != len(self.nvec):
            raise SpaceError(
                f"starts: expected {len(self.nvec)} numbers, as nvec has, got {self.starts}"
            )
        if self.kind in _FIELDS_OF_KINDS["n"] and self.n < 1:
            raise SpaceError(f"n: a {self.kind} space needs at least 1, got {self.n}")
        if self.kind == "multi_discrete" and not (self.nvec and all(n >= 1 for n in self.nvec)):
            raise SpaceError(f"nvec: expected parts of at least 1 choice each, got {self.nvec}")
        if self.kind == "continuous":
            self._check_box()
        return self

    def _check_box(self) -> None:
        size = math.prod(self.shape)
        for name, bounds in (("low", self.low), ("high", self.high)):
            if len(bounds) != size:
                raise SpaceError(
                    f"{name}: expected {size} numbers for shape {self.shape}, got {len(bounds)}"
                )
            for i, bound in enumerate(bounds):
                if not math.isfinite(bound):
                    raise SpaceError(
                        f"{name}[{i}] is {bound}: continuous actions need finite bounds. "
                        "Register the environment with the actual range of its actions "
                        "(a rescaling action wrapper, or the range found in the data)."
                    )
        for i, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if not low < high:
                raise SpaceError(
                    f"low: low[{i}]={low} is not below high[{i}]={high}. An action that never "
                    "changes may be left out of the action space, or gets bounds around its value."
                )

    @property
    def width(self) -> int:
        """A: width of an encoded action (one-hots or flattened)."""
        match self.kind:
            case "discrete" | "multi_binary":
                return self.n
            case "multi_discrete":
                return sum(self.nvec)
            case "continuous":
                return math.prod(self.shape)

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Shape of one action in the environment's format."""
        match self.kind:
            case "discrete":
                return ()
            case "multi_binary":
                return (self.n,)
            case "multi_discrete":
                return (len(self.nvec),)
            case "continuous":
                return self.shape


class Spaces(Settings):
    """The observation and action spaces of one environment."""

    error: ClassVar[type[Exception]] = SpaceError

    observations: dict[str, ObsSpace]
    """Observation arrays by name."""
    action: ActionSpace
    """The action space."""

    @model_validator(mode="after")
    def _roles(self) -> Self:
        if not self.keys("policy"):
            raise SpaceError(
                "observations: no key has the role 'policy', so the agent would have no input; "
                f"keys are {sorted(self.observations)}"
            )
        masks = self.keys("mask")
        if len(masks) > 1:
            raise SpaceError(f"observations: more than one key has the role 'mask': {masks}")
        for key in masks:
            shape, kind = self.observations[key].shape, self.action.kind
            if kind not in ("discrete", "multi_discrete") or shape != (self.action.width,):
                raise SpaceError(
                    f"observations[{key!r}]: a mask of legal actions needs a discrete or "
                    f"multi_discrete action space and shape ({self.action.width},), got {kind} "
                    f"and {shape}"
                )
        return self

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """Build from an environment's spec (JSON), without arrays that no network reads.

        Args:
            spec: {"observations": {key: space}, "actions": {key: space}, "roles": {key: role},
                "vocabularies": {key: {"tokens": [...]}}}; a space is
                {"type": "Box" | "Discrete" | "MultiDiscrete" | "MultiBinary", ...}.

        Raises:
            SpaceError: the agent does not support a space.
        """
        roles, texts = spec.get("roles", {}), spec.get("vocabularies", {})
        observations = {
            key: _observation(
                key,
                space,
                role=roles.get(key, "policy"),
                vocabulary=tuple(texts[key]["tokens"]) if key in texts else (),
            )
            for key, space in spec["observations"].items()
            if roles.get(key, "policy") in USED_ROLES
        }
        if len(spec["actions"]) != 1:
            raise SpaceError(
                f"the agent supports one action array, got {sorted(spec['actions'])}; flatten them "
                "into one array when collecting"
            )
        return cls(observations=observations, action=_action(*spec["actions"].values()))

    def keys(self, role: Role) -> list[str]:
        """Names of the arrays with this role, in the order of concatenation (sorted)."""
        return sorted(k for k, space in self.observations.items() if space.role == role)


def _observation(
    key: str, space: Mapping[str, Any], *, role: Role, vocabulary: tuple[str, ...]
) -> ObsSpace:
    n: int | None = None
    shape, starts = tuple[int, ...](), tuple[int, ...]()
    match space["type"]:
        case "Discrete":
            low, n, dtype = space["start"], space["n"], "int64"
            if low < 0 or low + n > MOST_CATEGORIES:
                starts = (low,)
            else:
                n += low  # categories below `low` stay unused
        case "MultiDiscrete":
            n, shape, dtype = max(space["nvec"]), (len(space["nvec"]),), "int64"
            starts = _starts(space)
        case "MultiBinary":
            shape, dtype = (space["n"],), "int8"
        case _:
            shape, dtype = tuple(space["shape"]), space["dtype"]
    if n is not None and n > MOST_CATEGORIES:
        raise SpaceError(
            f"observation {key!r} has {n} categories, but the agent supports {MOST_CATEGORIES}; "
            "divide them into several numbers when collecting"
        )
    return ObsSpace(shape=shape, dtype=dtype, n=n, starts=starts, vocabulary=vocabulary, role=role)


def _action(space: Mapping[str, Any]) -> ActionSpace:
    match space["type"]:
        case "Discrete":
            return ActionSpace(kind="discrete", n=space["n"], start=space["start"])
        case "MultiDiscrete":
            return ActionSpace(
                kind="multi_discrete", nvec=tuple(space["nvec"]), starts=_starts(space)
            )
        case "MultiBinary":
            return ActionSpace(kind="multi_binary", n=space["n"])
        case "Box" if space["dtype"].startswith("float"):
            shape = tuple(space["shape"])
            low, high = (_bounds(space[name], math.prod(shape)) for name in ("low", "high"))
            return ActionSpace(kind="continuous", shape=shape, low=low, high=high)
    raise SpaceError(
        "the agent does not support this action space: expected Discrete, MultiDiscrete, "
        f"MultiBinary or a Box of floats, got {dict(space)}"
    )


def _starts(space: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the starts of a MultiDiscrete; empty if all are 0, as in specs without starts."""
    starts = tuple(space.get("start", ()))
    return starts if any(starts) else ()


def _bounds(bound: Any, size: int) -> tuple[float, ...]:
    """Expand a bound, one number for all elements or a list of one each, to `size` numbers."""
    return tuple(map(float, bound)) if isinstance(bound, list) else (float(bound),) * size
