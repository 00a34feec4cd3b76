"""Checks that all built-in environments share: invalid arguments and invalid steps."""

from typing import Any

import gymnasium
from gymnasium.error import InvalidAction, ResetNeeded

from stepwell.errors import InvalidData


def require(fine: bool, what: str, expected: str, got: object) -> None:
    """Raise `InvalidData` about the argument `what` if `fine` is false."""
    if not fine:
        raise InvalidData(what, expected=expected, got=str(got))


def require_step(env: gymnasium.Env[Any, Any], action: object, over: bool) -> None:
    """Raise if the episode is over, or if the action is not in the action space."""
    if over:
        raise ResetNeeded("The episode is over; call reset() before step().")
    if not env.action_space.contains(action):
        raise InvalidAction(f"action: expected a member of {env.action_space}, got {action}.")
