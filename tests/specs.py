"""Specs and comparisons for our own tests."""

from __future__ import annotations

from collections.abc import Mapping

from stepwell.spaces import Array, Box, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from stepwell.trajectory import Trajectory


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


def assert_same(got: Trajectory, wanted: Trajectory) -> None:
    """Fail, naming the part, unless both are the same trajectory bit by bit."""
    assert got.header() == wanted.header(), f"{got.header()} is not {wanted.header()}"
    groups: list[tuple[str, Mapping[str, Array], Mapping[str, Array]]] = [
        ("obs", got.obs, wanted.obs),
        ("actions", got.actions, wanted.actions),
        ("infos", got.infos, wanted.infos),
        ("", {"rewards": got.rewards}, {"rewards": wanted.rewards}),
    ]
    for what, mine, theirs in groups:
        assert mine.keys() == theirs.keys(), f"{what}: {sorted(mine)} is not {sorted(theirs)}"
        for key, array in mine.items():
            other = theirs[key]
            assert (array.dtype, array.shape) == (other.dtype, other.shape), f"{what}[{key}]"
            assert array.tobytes() == other.tobytes(), f"{what}[{key}] differs"
    assert got.digest == wanted.digest, "digests differ"
