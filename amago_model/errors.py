"""The exceptions of this package.

    AmagoError
    ├── ConfigError       a setting is unknown, has a wrong type, or contradicts another setting
    │   └── UnregisteredError   a setting names a custom module that is not registered
    ├── SpaceError        the agent does not support an observation or action space
    ├── BatchError        the tensors of a batch do not match the spaces or each other
    └── PolicyFileError   a policy file cannot be loaded

All but the last are also `ValueError`s. Each message contains the expected value, the actual value
and a remedy.
"""


class AmagoError(Exception):
    """Base class of the exceptions of this package."""

    exit_status = 1
    """Exit status of a command that fails with this error; 2 means wrong settings
    or spaces, for which a retry does not help."""


class ConfigError(AmagoError, ValueError):
    """A setting is unknown, has a wrong type, or contradicts another setting."""

    exit_status = 2


class UnregisteredError(ConfigError):
    """A setting names a custom module that is not registered; see registry.py."""


class SpaceError(AmagoError, ValueError):
    """The agent does not support a space, such as continuous actions without finite bounds."""

    exit_status = 2


class BatchError(AmagoError, ValueError):
    """The tensors of a batch do not match the spaces or each other."""


class PolicyFileError(AmagoError):
    """A policy file is damaged, has another format version, or is not a policy file."""
