"""Observations, actions, rewards, infos and ends of one environment, checked and converted to what
is recorded, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces as gym_spaces
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from amago_model.config import ActionSpace, ObsSpace, Spaces
from amago_model.config.names import join_key
from collector.env_spaces import (
    Arrays,
    Leaf,
    check_whole,
    decoded,
    flattened,
    layout_of,
    leaves,
    named_spaces,
    narrower,
    numbers_of,
    root_key,
    same_kind,
    sizes_of,
    undeclared,
)
from collector.texts import vocabulary_of
from stepwell._plugins import describe_error
from stepwell._wording import shown
from stepwell.errors import InvalidSpace, InvalidTrajectory, StepwellError
from stepwell.flags import as_bool, as_bools, describe
from stepwell.rounding import rounded
from stepwell.spaces import (
    DEFAULT_ACTION,
    DEFAULT_OBSERVATION,
    Array,
    Box,
    EnvSpec,
    env_name,
    unnamed,
    why_outside,
)
from stepwell.trajectory import refuse_masked

_MALFORMED = (KeyError, IndexError, TypeError, ValueError, OverflowError)


class BrokenEnv(StepwellError):
    """An environment raised an exception, or returned a value outside its spaces."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Converts observations and actions of one environment; made by `interface_of`."""

    env_id: str
    observation_space: gym_spaces.Space[Any]
    action_space: gym_spaces.Space[Any]
    spec: EnvSpec
    """The spec of recorded data; its env is `env_id`."""
    partially_observable: bool = False
    """The environment declares it, in metadata["partially_observable"]."""
    refuses_outside: bool = False
    """Whether observations beyond the bounds of their Box are refused, too."""
    note: Callable[[str], object] = lambda _: None
    """Called with what recording changes: once for observations, actions, rewards and each info."""
    _noted: set[str] = field(default_factory=set, repr=False, compare=False)
    _reported: set[str] = field(default_factory=set, repr=False, compare=False)
    """Names of all infos that came, if the spec has any."""

    def encode_observation(self, raw: Any) -> Arrays:
        """Convert one observation to owned arrays by key, in the spec's dtypes.

        Copies, because many environments return the same buffer every step. Raises `BrokenEnv` for
        NaN, infinity, a wrong shape, a missing key, or a value outside its space.
        """
        found: Arrays = {}
        for key, path, leaf in self._observed:
            space = self.spec.observations[key]
            value = raw
            try:
                for part in path:
                    value = value[part]
                if vocabulary := self.spec.vocabularies.get(key):
                    if not isinstance(value, str):
                        raise TypeError(f"expected a text, got {value!r:.80}")
                    value = vocabulary.encode(value, *space.shape)
                value = flattened(leaf, value)
                array = numbers_of(value, space.dtype)
                if array.dtype.kind != "f":
                    check_whole(value, array, space)
            except (*_MALFORMED, RuntimeError) as error:  # of a tensor that needs gradients
                raise BrokenEnv(
                    f"observation {key!r} is not what its space says: {describe_error(error)}"
                ) from None
            if array.shape != space.shape:
                raise BrokenEnv(
                    f"observation {key!r} has shape {array.shape}, its space says {space.shape}"
                )
            if array.dtype.kind == "f":
                if not np.isfinite(array).all():
                    raise BrokenEnv(f"observation {key!r} holds NaN or infinity")
                self._note_rounding("observations", value, array.dtype)
            found[key] = array
        if self.refuses_outside and (why := self.outside(found)):
            raise BrokenEnv(why)
        self.note_undeclared("observations", self.observation_space, raw)
        return found

    def note_undeclared(self, what: str, space: gym_spaces.Space[Any], raw: Any) -> None:
        """Say which members of a Dict or Tuple are not in its space, and so are not recorded."""
        names = undeclared(space, raw)
        if names and (key := f"{what}: undeclared") not in self._noted:
            self._noted.add(key)
            self.note(
                f"{what} have members that their space does not declare, which are not recorded: "
                f"{shown(names, 20)}; declare them in the environment's space"
            )

    def outside(self, obs: Mapping[str, Array]) -> str:
        """Which observation is beyond the bounds that the environment declares, in words; "" if
        none is. Such values are recorded: many environments exceed their bounds."""
        for key, (low, high) in self._bounds.items():
            array = obs[key]
            beyond = (array < low) | (array > high)
            if beyond.any():
                at = int(np.argmax(beyond))
                leaf = next(
                    leaf
                    for name, _, leaf in self._observed
                    if name == key and isinstance(leaf, gym_spaces.Box)
                )
                value, least, most = (a.reshape(-1)[at] for a in (array, leaf.low, leaf.high))
                place = f"[{at}]" if array.ndim else ""
                says = f"its space says {least:g} to {most:g}"
                return f"observation {key!r}{place} is {value:g}, {says}"
        return ""

    def encode_reward(self, reward: Any) -> float:
        """Convert the reward, a number or an array of one, to a float. Raises `BrokenEnv` unless it
        is a finite float32."""
        try:
            number = float(numbers_of(reward, np.float64).reshape(()))
        except (TypeError, ValueError, OverflowError):
            raise BrokenEnv(f"the reward is {reward!r:.80}; one number is needed") from None
        if not abs(number) <= np.finfo(np.float32).max:
            raise BrokenEnv(f"the reward is {number}; a finite float32 is needed")
        self._note_rounding("rewards", reward, np.dtype(np.float32))
        return number

    def encode_info(self, info: Mapping[str, Any]) -> Arrays:
        """The infos of the spec that came with one observation, as owned arrays by key.

        NaN for an info that is missing or None, and for one that is no number, or an array of
        another shape than the spec's: the first of these is noted. array([1.0]) is a number.
        """
        row: Arrays = {}
        if self.spec.infos:
            self._reported.update(map(str, info))
        for key, space in self.spec.infos.items():
            row[key] = np.full(space.shape, np.nan, space.dtype)
            if (value := info.get(key)) is None:
                continue
            try:
                array = numbers_of(value, space.dtype)
            except (*_MALFORMED, RuntimeError):
                array = None
            if array is not None and sizes_of(array) == sizes_of(row[key]):
                self._note_rounding(f"infos/{key}", value, array.dtype)
                row[key] = array.reshape(space.shape)
            elif (what := f"infos/{key}: NaN") not in self._noted:
                self._noted.add(what)
                wanted = f"numbers of shape {list(space.shape)}" if space.shape else "one number"
                text = f"infos/{key}: expected {wanted}, got {describe(value)}; stored as NaN"
                if array is not None and array.size:
                    place = f"infos={{{key!r}: Box({array.shape})}}"
                    text += f" (a dataset created with {place} in its spec stores it)"
                self.note(text)
        return row

    def note_missing_infos(self) -> None:
        """Say which infos of the spec the environment has never reported."""
        if missing := sorted(self.spec.infos.keys() - self._reported):
            self.note(
                f"no step had the infos {', '.join(missing)}, which are NaN in every row; the "
                f"environment's are {shown(sorted(self._reported), 20)}"
            )

    def encode_end(self, terminated: Any, truncated: Any) -> tuple[bool, bool]:
        """Convert the flags of one step, whatever gymnasium lets pass, to bools. Raises
        `BrokenEnv`."""
        try:
            refuse_masked("terminated or truncated", [terminated, truncated])
            ends = [
                as_bool(name, flag, end=True)
                for name, flag in (("terminated", terminated), ("truncated", truncated))
            ]
        except InvalidTrajectory as error:
            raise BrokenEnv(f"{error}; the environment's step must return one bool") from None
        return ends[0], ends[1]

    def encode_ends(self, name: str, flags: Any, n: int) -> NDArray[np.bool_]:
        """`terminated` or `truncated` of one step of a vector environment: [n]. Raises
        `BrokenEnv`."""
        if flags is None:
            flags = np.zeros(n, np.bool_)
        try:
            refuse_masked(name, flags)
            found = as_bools(name, flags, end=True)
            if found.size != n:
                raise InvalidTrajectory(name, expected=f"{n} flags", got=describe(flags))
        except InvalidTrajectory as error:
            raise BrokenEnv(
                f"{error}; the vector environment's step must return an array of {n} bools"
            ) from None
        return found.reshape(n)

    def decode_action(self, arrays: Mapping[str, Array]) -> Any:
        """Convert named arrays of one action to the argument of the environment's `step`."""
        return decoded(self.action_space, root_key(self.action_space, DEFAULT_ACTION), arrays)

    def encode_action(self, action: Any, *, executed: bool = False) -> Arrays:
        """Inverse of `decode_action`: convert an argument of `step` to owned arrays by key.

        `executed`: the environment gets `action` itself, so that rounding is noted. Raises
        `InvalidTrajectory` for an action of another form than the action space.
        """
        found: Arrays = {}
        for key, path, leaf in self._acted:
            space, value = self.spec.actions[key], action
            try:
                for part in path:
                    value = value[part]
                found[key] = numbers_of(flattened(leaf, value), space.dtype).reshape(space.shape)
                if executed:
                    self._note_rounding("actions", value, np.dtype(space.dtype))
            except (*_MALFORMED, RuntimeError) as error:
                raise InvalidTrajectory(
                    f"actions[{key}]",
                    expected=f"an action of the form {str(self.action_space)[:200]}",
                    got=f"{describe(action)}: {describe_error(error)}",
                ) from None
        self.note_undeclared("actions", self.action_space, action)
        return found

    def check_action(self, action: Any, recorded: Mapping[str, Array]) -> None:
        """Raise `InvalidTrajectory` if an argument of `step` is not what `encode_action` made of
        it, or is outside of the dataset's space: its whole episode would be refused."""
        for key, path, leaf in self._acted:
            space, array, value = self.spec.actions[key], recorded[key], action
            for part in path:
                value = value[part]
            given = np.asarray(flattened(leaf, value))
            why = why_outside(space, array[None])
            if array.dtype.kind != "f" and not np.array_equal(given.reshape(-1), array.reshape(-1)):
                why = describe(value)
            if why:
                raise InvalidTrajectory(
                    f"actions[{key}]",
                    expected=f"an action inside {str(space)[:200]}; clip or round it first, so "
                    "that the recorded action is the executed one",
                    got=why,
                )

    def clip_actions(self, actions: Mapping[str, Array]) -> Arrays:
        """Actions [N, *shape] by key, in the recorded dtype, clipped to the action space.

        Clipped here and not by the environment: the recorded action must be the executed one.
        """
        kept: Arrays = {}
        for key, array in actions.items():
            array = np.asarray(array, self.spec.actions[key].dtype)
            limits = self._limits.get(key)
            kept[key] = array if limits is None else np.clip(array, *limits)
        return kept

    def _note_rounding(self, what: str, raw: Any, dtype: np.dtype[Any]) -> None:
        if what not in self._noted and (text := rounded(what, raw, dtype)):
            self._noted.add(what)
            self.note(text)

    @cached_property
    def _observed(self) -> list[Leaf]:
        return list(leaves(self.observation_space, DEFAULT_OBSERVATION))

    @cached_property
    def _acted(self) -> list[Leaf]:
        return list(leaves(self.action_space, DEFAULT_ACTION))

    @cached_property
    def _limits(self) -> dict[str, tuple[Array, Array]]:
        """The limits (low, high) of every float Box action, in the recorded dtype."""
        limits: dict[str, tuple[Array, Array]] = {}
        for key, _, leaf in self._acted:
            space = self.spec.actions[key]
            if isinstance(leaf, gym_spaces.Box) and isinstance(space, Box):
                dtype = np.dtype(space.dtype)
                if dtype.kind == "f":
                    low, high = space.bounds()
                    low, high = np.maximum(low, leaf.low), np.minimum(high, leaf.high)
                    limits[key] = low.astype(dtype), high.astype(dtype)
        return limits

    @cached_property
    def _bounds(self) -> dict[str, tuple[Array, Array]]:
        """The bounds (low, high) of every observed Box that has some, with room for rounding."""
        bounds: dict[str, tuple[Array, Array]] = {}
        for key, _, leaf in self._observed:
            if not isinstance(leaf, gym_spaces.Box):
                continue
            low, high = leaf.low, leaf.high
            if leaf.dtype is not None and leaf.dtype.kind == "f":
                low = np.nextafter(low.astype(np.float32), np.float32(-np.inf))
                high = np.nextafter(high.astype(np.float32), np.float32(np.inf))
                if np.isfinite(low).any() or np.isfinite(high).any():
                    bounds[key] = low, high
            elif leaf.dtype is not None and leaf.dtype.kind in "iu":
                limits = np.iinfo(leaf.dtype)
                if (low > limits.min).any() or (high < limits.max).any():
                    bounds[key] = low, high
        return bounds

    def for_dataset(self, spec: EnvSpec, name: str) -> Interface:
        """The same interface, recording under the spec of an existing dataset.

        An imported dataset has no observation bounds, and its env may have another name: keys,
        shapes and kinds must agree, and the dataset's dtypes are used. Infos of the dataset that
        the environment does not report become NaN, so they must be floats. Raises `InvalidSpace`.
        """

        def misfit(why: str, expected: object, got: object) -> InvalidSpace:
            return InvalidSpace(
                f"{self.env_id} does not fit dataset {name}: {why}; collect into a dataset of its "
                "own (--dataset NEW-NAME)",
                expected=str(expected),
                got=str(got),
            )

        if strange := sorted(self.spec.infos.keys() - spec.infos.keys()):
            why = f"it has no place for the infos {strange}"
            raise misfit(why, f"some of {sorted(spec.infos)}", sorted(self.spec.infos))
        for key, space in spec.infos.items():
            if np.dtype(space.dtype).kind != "f":
                why = f"the type of its info {key!r} has no word for unknown"
                raise misfit(why, "infos of floats, or none", space.dtype)
        for what in ("observations", "actions"):
            ours, theirs = getattr(self.spec, what), getattr(spec, what)
            if ours.keys() != theirs.keys():
                raise misfit(f"other {what}", sorted(theirs), sorted(ours))
            for key, space in theirs.items():
                if not same_kind(ours[key], space):
                    raise misfit(f"{what} {key!r}", space, ours[key])
                if what == "actions" and (why := narrower(ours[key], space)):
                    self.note(
                        f"actions end at the bounds of dataset {name}, which are narrower: {why}; "
                        "collect into a dataset of its own for all actions (--dataset NEW-NAME)"
                    )
        ours, theirs = self.spec.vocabularies, spec.vocabularies
        if other := [k for k in sorted({*ours, *theirs}) if ours.get(k) != theirs.get(k)]:
            why = f"the texts {other} have other vocabularies"
            sizes = [{k: v.n for k, v in texts.items()} for texts in (theirs, ours)]
            raise misfit(f"{why}, of so many ids", *sizes)
        for key, names in spec.names.items():
            self.note(unnamed(key, names, "this environment"))
        return replace(self, spec=replace(spec, env=self.env_id))

    def check_policy(self, spaces: Spaces, policy_id: str) -> None:
        """Raise `InvalidSpace` unless a policy with `spaces` can play this environment."""
        try:
            ours = Spaces.of_spec(self.spec.to_json())
        except ValueError as error:
            raise InvalidSpace(f"{policy_id} cannot play {self.env_id}: {error}") from None
        pairs: list[tuple[str, ObsSpace | ActionSpace, ObsSpace | ActionSpace | None]] = [
            (f"observation {key!r}", wanted, ours.observations.get(key))
            for key, wanted in spaces.observations.items()
            if wanted.role in ("policy", "mask")
        ]
        for what, wanted, here in [*pairs, ("actions", spaces.action, ours.action)]:
            if here is None or layout_of(here) != layout_of(wanted):
                raise InvalidSpace(
                    f"{policy_id} cannot play {self.env_id}: other {what}",
                    expected=str(layout_of(wanted)),
                    got="none of that name" if here is None else str(layout_of(here)),
                )


def interface_of(
    env: gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any],
    env_id: str,
    *,
    roles: Mapping[str, str] | None = None,
    infos: Sequence[str] = (),
    keep_float64: bool = False,
) -> Interface:
    """The interface of `env`, or of one sub-environment of a vector environment. Raises
    `InvalidSpace` for a space that a spec does not support.

    `roles` override those that the environment declares in metadata["roles"]. `infos` are the names
    of the scalar infos to record.
    """
    if isinstance(env, VectorEnv):
        observation_space, action_space = env.single_observation_space, env.single_action_space
    else:
        observation_space, action_space = env.observation_space, env.action_space
    declared = env.metadata or {}
    texts = {
        key: found
        for key, _, leaf in leaves(observation_space, DEFAULT_OBSERVATION)
        if (found := vocabulary_of(leaf)) is not None
    }
    spec = EnvSpec.of(
        named_spaces(observation_space, DEFAULT_OBSERVATION, keep_float64, env_id, texts),
        named_spaces(action_space, DEFAULT_ACTION, keep_float64, env_id, {}),
        env=env_name(env_id),
        infos={key: Box(()) for key in infos},
        roles={
            join_key("", k): r for k, r in {**declared.get("roles", {}), **(roles or {})}.items()
        },
        vocabularies={key: vocabulary for key, (vocabulary, _) in texts.items()},
    )
    return Interface(
        env_id=env_name(env_id),
        observation_space=observation_space,
        action_space=action_space,
        spec=spec,
        partially_observable=bool(declared.get("partially_observable", False)),
    )
