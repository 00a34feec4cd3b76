"""The modality of each observation: detected from its space, or set by key in the config.

uint8, [height, width] or with a channel axis shorter than both, at least 5 pixels     image
texts, and categories whose one-hot encoding is wider than 128                         tokens
all others: numbers, few categories (as one-hots), binary values                       vector
only if named in goals.keys                                                            goals
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from amago_model.config import (
    AgentConfig,
    ImageConfig,
    ObsSpace,
    Settings,
    Spaces,
    TimestepEncoderConfig,
)
from amago_model.errors import ConfigError

Kind = Literal["vector", "image", "tokens", "goals"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SMALLEST_SIDE = 5
"""Minimum side in pixels of a uint8 array that is detected as an image."""
MOST_ONE_HOTS = 128
"""Maximum width of a one-hot encoding of categories."""


@dataclass(frozen=True)
class Layout:
    """The axes of an image array."""

    height: int
    width: int
    channels: int
    axis: Literal["none", "first", "last"]
    """Position of the channel axis; none: there is no such axis, and one channel."""


def image_layout(shape: tuple[int, ...], channels: Literal["auto", "first", "last"]) -> Layout:
    """The layout of an image array.

    Raises:
        ConfigError: the shape is not that of an image, or the channel axis is ambiguous.
    """
    if len(shape) == 2:
        return Layout(shape[0], shape[1], 1, "none")
    if len(shape) != 3:
        raise ConfigError(
            f"expected an image [height, width], or one with a channel axis, not shape {shape}; "
            "name it in TimestepEncoderConfig.vector_keys instead of ImageConfig.keys"
        )
    if channels == "auto":
        first, last = shape[0] < min(shape[1:]), shape[2] < min(shape[:2])
        if first == last:
            raise ConfigError(
                f"the channel axis of an image of shape {shape} is ambiguous; set "
                "ImageConfig.channels to 'first' or 'last'"
            )
        channels = "first" if first else "last"
    if channels == "first":
        return Layout(shape[1], shape[2], shape[0], "first")
    return Layout(shape[0], shape[1], shape[2], "last")


def modalities_of(
    config: TimestepEncoderConfig, spaces: Spaces, role: Literal["policy", "critic"] = "policy"
) -> dict[str, Kind]:
    """The kind of each observation with this role, sorted by key.

    Role 'policy' returns the observations that the agent uses; 'critic' those that only critics
    use.

    Raises:
        ConfigError: a setting names a key that is not used.
    """
    kinds, used = _recognised(config, spaces)
    return {key: kind for key, kind in kinds.items() if (key in used) == (role == "policy")}


def _recognised(config: TimestepEncoderConfig, spaces: Spaces) -> tuple[dict[str, Kind], list[str]]:
    """(kinds of all observations that agent or critics use, keys that the agent uses)."""
    usable = spaces.keys("policy")
    _require_known("keys", config.keys, usable, "an observation with the role 'policy'")
    used = sorted(set(config.keys or usable))
    all_keys = sorted({*used, *spaces.keys("critic")})
    named: dict[str, Kind] = {}
    for name, keys, kind in (
        ("vector_keys", config.vector_keys, "vector"),
        ("images.keys", config.images.keys, "image"),
        ("tokens.keys", config.tokens.keys, "tokens"),
        ("goals.keys", config.goals.keys, "goals"),
    ):
        _require_known(name, keys, all_keys, "an observation that the agent uses")
        named |= dict.fromkeys(keys, kind)  # type: ignore[arg-type]
    _require_known("hide_keys", config.hide_keys, used, "an observation that the agent uses")
    kinds = {key: named.get(key) or _kind(config, spaces.observations[key]) for key in all_keys}
    return kinds, used


def sees_one_image(config: TimestepEncoderConfig, spaces: Spaces) -> bool:
    """Whether a single image is the agent's only observation."""
    return list(modalities_of(config, spaces).values()) == ["image"]


def has_numbers(config: TimestepEncoderConfig, spaces: Spaces) -> bool:
    """Whether the agent reads numbers, which have differences; categories have none."""
    kinds = modalities_of(config, spaces).items()
    return any(kind == "vector" and spaces.observations[key].n is None for key, kind in kinds)


def unused_settings(config: AgentConfig, spaces: Spaces) -> list[str]:
    """Settings that differ from their defaults but have no effect with these spaces, for a warning.
    Each is a string like "actor.continuous.kind='beta'".

    Raises:
        ConfigError: a setting names an observation that is not used.
    """
    action, encoder = spaces.action.kind, config.timestep_encoder
    kinds = {*_recognised(encoder, spaces)[0].values()}
    sampled = action != "discrete" or config.algorithm == "multitask"
    used = {
        "algorithm": action == "discrete",
        "losses.n_actions_in_actor_loss": sampled,
        "losses.n_actions_in_critic_loss": sampled,
        "actor.prob_low": action in ("discrete", "multi_discrete"),
        "actor.prob_high": action in ("discrete", "multi_discrete"),
        "timestep_encoder.kind": sees_one_image(encoder, spaces),
        "timestep_encoder.differences": has_numbers(encoder, spaces),
    }
    plain = AgentConfig()
    found = [
        path for path, use in used.items() if not use and _at(config, path) != _at(plain, path)
    ]
    if action != "continuous" and config.actor.continuous.kind != "tanh_gaussian":
        found.append("actor.continuous.kind")
    of_kinds = {"images": "image", "tokens": "tokens", "goals": "goals"}
    for name, kind in of_kinds.items():
        path = f"timestep_encoder.{name}"
        if kind not in kinds and _at(config, path) != _at(plain, path):
            found.append(path)
    return [
        path if isinstance(value := _at(config, path), Settings) else f"{path}={value!r}"
        for path in found
    ]


def _at(config: AgentConfig, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def hint(space: ObsSpace, kind: Kind) -> str:
    """A suggested setting for a vector that may be an image or tokens; else an empty string."""
    if kind != "vector" or space.n is not None:
        return ""
    if len(space.shape) == 3 and sorted(space.shape)[1] >= SMALLEST_SIDE:
        return "if it is an image, name it in images.keys"
    if space.shape and space.dtype in ("int16", "int32", "int64", "uint16", "uint32"):
        return "if these are token numbers, name it in tokens.keys and set tokens.vocabulary"
    return ""


def _kind(config: TimestepEncoderConfig, space: ObsSpace) -> Kind:
    if space.vocabulary:
        return "tokens"
    if space.n is not None:
        many = space.features > MOST_ONE_HOTS and not config.raw_numbers
        return "tokens" if many else "vector"
    return (
        "image" if space.dtype == "uint8" and _looks_like_image(config.images, space) else "vector"
    )


def _looks_like_image(config: ImageConfig, space: ObsSpace) -> bool:
    try:
        layout = image_layout(space.shape, config.channels)
    except ConfigError:
        return False
    return min(layout.height, layout.width) >= SMALLEST_SIDE


def _require_known(name: str, keys: tuple[str, ...], known: list[str], what: str) -> None:
    for key in keys:
        if key not in known:
            raise ConfigError(
                f"TimestepEncoderConfig.{name}: {key!r} is not {what}; those are {known}"
            )
