"""Stepwell: the data types and the SDK. `import stepwell` is all that a user needs.

Trajectories, specs and errors are imported at once. `Client`, `Outbox` and `load_policy`, which
need Arrow, an HTTP library or torch, are imported on first use.
"""

from typing import TYPE_CHECKING, Any

from stepwell.errors import (
    BadRequest,
    Busy,
    CodecError,
    Conflict,
    Gone,
    InvalidData,
    InvalidSpace,
    InvalidTrajectory,
    JobFailed,
    NotFound,
    OutboxError,
    OutboxInUse,
    ServiceError,
    ServiceFault,
    ServiceUnreachable,
    StepwellError,
    StorageFull,
    TooLarge,
    Unauthorized,
    Undelivered,
)
from stepwell.spaces import Box, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from stepwell.trajectory import Trajectory, TrajectoryMetadata, new_id
from stepwell.vocabulary import Vocabulary

if TYPE_CHECKING:
    from stepwell.client import Client
    from stepwell.outbox import Outbox
    from stepwell.policies import load_policy

__all__ = [
    "BadRequest",
    "Box",
    "Busy",
    "Client",
    "CodecError",
    "Conflict",
    "Discrete",
    "EnvSpec",
    "Gone",
    "InvalidData",
    "InvalidSpace",
    "InvalidTrajectory",
    "JobFailed",
    "MultiBinary",
    "MultiDiscrete",
    "NotFound",
    "Outbox",
    "OutboxError",
    "OutboxInUse",
    "ServiceError",
    "ServiceFault",
    "ServiceUnreachable",
    "StepwellError",
    "StorageFull",
    "TooLarge",
    "Trajectory",
    "TrajectoryMetadata",
    "Unauthorized",
    "Undelivered",
    "Vocabulary",
    "load_policy",
    "new_id",
]

_LAZY = {
    "Client": "stepwell.client",
    "Outbox": "stepwell.outbox",
    "load_policy": "stepwell.policies",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("stepwell")
    if name not in _LAZY:
        raise AttributeError(f"module 'stepwell' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
