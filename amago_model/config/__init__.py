"""Every setting of the agent as plain frozen dataclasses; the spaces too can be had from here.

A config is complete when constructed and refuses contradictions by field name. The docstring under
a field is its help text. Everything survives JSON: `to_dict` / `from_dict`. Defaults are those of
the published agent (AMAGO, Grigsby et al., ICLR 2024; AMAGO-2, NeurIPS 2024). No tensor lives here.

timestep.py, encoders.py, heads.py and losses.py hold the parts; agent.py the whole.
"""

from amago_model.config.agent import AgentConfig, CustomConfig
from amago_model.config.encoders import (
    FeedForwardConfig,
    GRUConfig,
    MambaConfig,
    TrajectoryEncoderConfig,
    TransformerConfig,
)
from amago_model.config.heads import (
    ActorConfig,
    BetaConfig,
    BinsConfig,
    CriticConfig,
    GMMConfig,
    ResidualActorConfig,
)
from amago_model.config.losses import LeakyFilterConfig, LossConfig
from amago_model.config.names import Activation, Norm
from amago_model.config.spaces import ActionSpace, ObsSpace, Role, Spaces
from amago_model.config.timestep import (
    GoalConfig,
    ImageConfig,
    TimestepEncoderConfig,
    TokenConfig,
)

__all__ = [
    "ActionSpace",
    "Activation",
    "ActorConfig",
    "AgentConfig",
    "BetaConfig",
    "BinsConfig",
    "CriticConfig",
    "CustomConfig",
    "FeedForwardConfig",
    "GMMConfig",
    "GRUConfig",
    "MambaConfig",
    "GoalConfig",
    "ImageConfig",
    "LeakyFilterConfig",
    "LossConfig",
    "Norm",
    "ObsSpace",
    "ResidualActorConfig",
    "Role",
    "Spaces",
    "TimestepEncoderConfig",
    "TokenConfig",
    "TrajectoryEncoderConfig",
    "TransformerConfig",
]
