"""The agent: encoders, memory, heads and losses. Input: tensors and a config; output: a loss or an
action.

This package does not read data files, open connections or step environments. Start at agent.py (the
algorithm), data/batch.py (a picture of the data) and config (all settings). Settings, presets and
errors are imported immediately; names that need torch are imported on first access, so that a
command line can reject a wrong option without importing torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("stepwell")
except PackageNotFoundError:  # a checkout without installation, e.g. to run only the benchmarks
    __version__ = "0+unknown"

from amago_model import config
from amago_model.config import *  # noqa: F403 - its __all__
from amago_model.encoders.modalities import unused_settings
from amago_model.errors import (
    AmagoError,
    BatchError,
    ConfigError,
    PolicyFileError,
    SpaceError,
    UnregisteredError,
)
from amago_model.presets import multitask, published_v3
from amago_model.registry import register

if TYPE_CHECKING:
    from amago_model.acting import ActingPolicy
    from amago_model.agent import Agent, make_agent
    from amago_model.data.batch import Batch, decode_action, encode_action, previous_features
    from amago_model.losses.loss_inputs import LossInputs
    from amago_model.policy_file import load_agent, load_policy, save_policy
    from amago_model.values import Values, get_values

__all__ = [
    "ActingPolicy",
    "Agent",
    "AmagoError",
    "Batch",
    "BatchError",
    "ConfigError",
    "LossInputs",
    "PolicyFileError",
    "SpaceError",
    "UnregisteredError",
    "Values",
    "__version__",
    "decode_action",
    "encode_action",
    "get_values",
    "load_agent",
    "load_policy",
    "make_agent",
    "multitask",
    "previous_features",
    "published_v3",
    "register",
    "save_policy",
    "unused_settings",
]
__all__ += config.__all__

_WITH_TORCH = {
    "acting": ("ActingPolicy",),
    "agent": ("Agent", "make_agent"),
    "data.batch": ("Batch", "decode_action", "encode_action", "previous_features"),
    "losses.loss_inputs": ("LossInputs",),
    "policy_file": ("load_agent", "load_policy", "save_policy"),
    "values": ("Values", "get_values"),
}
_MODULE = {name: module for module, names in _WITH_TORCH.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
