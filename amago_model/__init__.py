"""The agent: encoders, memory, heads and losses. Tensors and a config in, a loss or an action out.

Knows no files of data, no network and no environments. Start at agent.py (the algorithm), batch.py
(the data, drawn) and config (every setting).
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("stepwell")
except PackageNotFoundError:  # a bare checkout, as on a machine that only runs the benchmark
    __version__ = "0+unknown"

from amago_model.acting import ActingPolicy
from amago_model.agent import Agent, MultiTaskAgent, make_agent
from amago_model.batch import Batch, decode_action, encode_action, previous_features
from amago_model.config import (
    ActionSpace,
    ActorConfig,
    AgentConfig,
    BetaConfig,
    BinsConfig,
    CriticConfig,
    CustomConfig,
    FeedForwardConfig,
    GMMConfig,
    GoalConfig,
    GRUConfig,
    ImageConfig,
    LeakyFilterConfig,
    LossConfig,
    MambaConfig,
    ObsSpace,
    ResidualActorConfig,
    Spaces,
    TimestepEncoderConfig,
    TokenConfig,
    TrajectoryEncoderConfig,
    TransformerConfig,
)
from amago_model.errors import (
    AmagoError,
    BatchError,
    ConfigError,
    PolicyFileError,
    SpaceError,
    UnregisteredError,
    UnusedError,
)
from amago_model.loss_inputs import LossInputs
from amago_model.policy_file import load_policy, save_policy
from amago_model.presets import multitask, published_v3
from amago_model.registry import register
from amago_model.unused import fitting
from amago_model.values import Values

__all__ = [
    "ActingPolicy",
    "ActionSpace",
    "ActorConfig",
    "Agent",
    "AgentConfig",
    "AmagoError",
    "Batch",
    "BatchError",
    "BetaConfig",
    "BinsConfig",
    "ConfigError",
    "CriticConfig",
    "CustomConfig",
    "FeedForwardConfig",
    "GMMConfig",
    "GRUConfig",
    "GoalConfig",
    "ImageConfig",
    "LeakyFilterConfig",
    "LossConfig",
    "LossInputs",
    "MambaConfig",
    "MultiTaskAgent",
    "ObsSpace",
    "PolicyFileError",
    "ResidualActorConfig",
    "SpaceError",
    "Spaces",
    "TimestepEncoderConfig",
    "TokenConfig",
    "TrajectoryEncoderConfig",
    "TransformerConfig",
    "UnregisteredError",
    "UnusedError",
    "Values",
    "__version__",
    "decode_action",
    "encode_action",
    "fitting",
    "load_policy",
    "make_agent",
    "multitask",
    "previous_features",
    "published_v3",
    "register",
    "save_policy",
]
