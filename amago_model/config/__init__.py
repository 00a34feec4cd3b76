"""All settings of the agent, as frozen pydantic models, and the spaces.

A config is validated on construction; an error names the field. The docstring under a field is its
help text. A section with several kinds is a union of models, selected by their field `kind`, so
settings of other kinds are errors. Configs convert to JSON and back: `to_dict`, `from_dict`.
Defaults are those of the published agent (AMAGO, Grigsby et al., ICLR 2024; AMAGO-2, NeurIPS 2024).
This package does not import torch.

timestep.py, encoders.py, heads.py and losses.py contain the sections, agent.py the complete config,
base.py the base class.
"""

from amago_model.config.agent import AgentConfig, CustomConfig, ReturnConditioningConfig
from amago_model.config.base import Settings
from amago_model.config.encoders import (
    FeedForwardConfig,
    GRUConfig,
    IdentityConfig,
    LearnablePositionConfig,
    MambaConfig,
    PositionConfig,
    TrajectoryEncoderConfig,
    TransformerConfig,
)
from amago_model.config.heads import (
    ActorConfig,
    BetaConfig,
    BinnedCriticConfig,
    ContinuousConfig,
    CriticConfig,
    DeterministicConfig,
    GaussianConfig,
    GMMConfig,
    HLGaussCriticConfig,
    MLPActorConfig,
    PopArtConfig,
    ResidualActorConfig,
    ScalarCriticConfig,
    TanhGaussianConfig,
    TwoHotCriticConfig,
)
from amago_model.config.losses import (
    BehaviorCloningConfig,
    BinaryFilterConfig,
    ExpFilterConfig,
    FilterConfig,
    LeakyReLUFilterConfig,
    LossConfig,
)
from amago_model.config.names import Activation, Norm
from amago_model.config.spaces import ActionSpace, ObsSpace, Role, Spaces
from amago_model.config.timestep import (
    AugmentConfig,
    GoalConfig,
    ImageConfig,
    ImageTimestepEncoderConfig,
    ImpalaImageConfig,
    InputNormConfig,
    PlainImageConfig,
    TimestepEncoderConfig,
    TokenConfig,
)

__all__ = [
    "ActionSpace",
    "Activation",
    "ActorConfig",
    "AgentConfig",
    "AugmentConfig",
    "BehaviorCloningConfig",
    "BetaConfig",
    "BinaryFilterConfig",
    "BinnedCriticConfig",
    "ContinuousConfig",
    "CriticConfig",
    "CustomConfig",
    "DeterministicConfig",
    "ExpFilterConfig",
    "FeedForwardConfig",
    "FilterConfig",
    "GMMConfig",
    "GaussianConfig",
    "GRUConfig",
    "GoalConfig",
    "HLGaussCriticConfig",
    "IdentityConfig",
    "ImageConfig",
    "ImageTimestepEncoderConfig",
    "ImpalaImageConfig",
    "InputNormConfig",
    "LeakyReLUFilterConfig",
    "LearnablePositionConfig",
    "LossConfig",
    "MLPActorConfig",
    "MambaConfig",
    "Norm",
    "ObsSpace",
    "PlainImageConfig",
    "PopArtConfig",
    "PositionConfig",
    "ResidualActorConfig",
    "ReturnConditioningConfig",
    "Role",
    "ScalarCriticConfig",
    "Settings",
    "Spaces",
    "TanhGaussianConfig",
    "TimestepEncoderConfig",
    "TokenConfig",
    "TrajectoryEncoderConfig",
    "TransformerConfig",
    "TwoHotCriticConfig",
]
