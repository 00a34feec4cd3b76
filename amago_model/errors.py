"""What can go wrong with the agent, as a tree to catch from.

    AmagoError
    ├── ConfigError       a setting is unknown, of the wrong type, or contradicts another
    │   └── UnregisteredError   it names a custom class whose module was not imported
    ├── SpaceError        an observation or action space that the agent cannot take
    ├── BatchError        a batch whose tensors do not fit the spaces or each other
    └── PolicyFileError   bytes that are not a policy this version can load

All but the last are also `ValueError`s: the caller gave a wrong value. Each message says what was
expected, what came, and what to do.
"""


class AmagoError(Exception):
    """Base of everything this package raises on purpose."""

    exit_status = 1
    """Of a command that ends by it: 2 where its settings are wrong."""


class ConfigError(AmagoError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another setting."""

    exit_status = 2


class UnregisteredError(ConfigError):
    """A setting names a custom class that is not registered: see registry.py."""


class SpaceError(AmagoError, ValueError):
    """A space the agent cannot take, such as an action without finite bounds."""


class BatchError(AmagoError, ValueError):
    """A batch whose tensors do not fit the spaces or one another."""


class PolicyFileError(AmagoError):
    """Bytes that are not a policy file, are damaged, or come from a newer format."""
