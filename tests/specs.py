"""Specs for our own tests."""

from __future__ import annotations

from stepwell.spaces import Box, Discrete, EnvSpec, MultiBinary, MultiDiscrete


def make_rich_spec(env: str = "Rich-v0") -> EnvSpec:
    """One of everything: each kind of space, image, mask, scalar, several actions, infos."""
    return EnvSpec.of(
        {
            "arm/angles": Box((2, 3), "float64"),
            "camera": Box((4, 5, 3), "uint8", 0.0, 255.0),
            "contacts": MultiBinary(4),
            "legal": Box((3,), "bool", 0.0, 1.0),
            "room": Discrete(5, start=-2),
            "speed": Box((), "float16"),
        },
        {"grip": MultiDiscrete((2, 3)), "move": Box((2,), low=(-1.0, -2.0), high=(1.0, 2.0))},
        roles={"legal": "mask", "room": "critic"},
        infos={"distance": Box(()), "lidar": Box((3,), "int16", -100.0, 100.0)},
        action_known=True,
        env=env,
    )
