"""A recorded environment as an agent's spaces."""

from __future__ import annotations

import numpy as np

from amago_model.config import ActionSpace, ObsSpace, Spaces
from stepwell.errors import InvalidSpace
from stepwell.spaces import Discrete, EnvSpec, MultiBinary, MultiDiscrete


def agent_spaces(spec: EnvSpec) -> Spaces:
    """The agent's view of a spec. Raises ValueErrors of amago_model, or `InvalidSpace`."""
    observations: dict[str, ObsSpace] = {}
    for key, space in spec.observations.items():
        n = None
        if isinstance(space, Discrete):
            if space.start < 0:
                raise InvalidSpace(
                    f"observation {key!r}", expected="categories from 0 up", got=str(space)
                )
            n = space.start + space.n
        elif isinstance(space, MultiDiscrete):
            n = max(space.nvec)
        observations[key] = ObsSpace(
            shape=space.shape,
            dtype=space.dtype,
            n=n,
            role=spec.role(key),  # type: ignore[arg-type]
        )
    if len(spec.actions) != 1:
        raise InvalidSpace(
            "the agent plays one action array", expected="one", got=str(sorted(spec.actions))
        )
    (space,) = spec.actions.values()
    if isinstance(space, Discrete):
        return Spaces(
            observations=observations,
            action=ActionSpace(kind="discrete", n=space.n, start=space.start),
        )
    if isinstance(space, MultiDiscrete):
        action = ActionSpace(kind="multi_discrete", nvec=space.nvec)
        return Spaces(observations=observations, action=action)
    if isinstance(space, MultiBinary):
        action = ActionSpace(kind="multi_binary", n=space.n)
        return Spaces(observations=observations, action=action)
    if np.dtype(space.dtype).kind != "f":
        raise InvalidSpace(
            "the agent cannot play this action space yet",
            expected="Discrete, MultiDiscrete, MultiBinary, or a Box of floats",
            got=str(space),
        )
    low, high = (tuple(b.reshape(-1).tolist()) for b in space.bounds())
    return Spaces(
        observations=observations,
        action=ActionSpace(kind="continuous", shape=space.shape, low=low, high=high),
    )
