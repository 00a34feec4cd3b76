"""Stepwell: the contract and the SDK. `import stepwell` is all that an outsider needs."""

from stepwell.errors import InvalidTrajectory, ServiceError, StepwellError
from stepwell.spaces import Box, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from stepwell.trajectory import About, Trajectory, new_id

__all__ = [
    "About",
    "Box",
    "Discrete",
    "EnvSpec",
    "InvalidTrajectory",
    "MultiBinary",
    "MultiDiscrete",
    "ServiceError",
    "StepwellError",
    "Trajectory",
    "new_id",
]
