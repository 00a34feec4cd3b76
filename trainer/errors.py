"""What can go wrong with a training run; every message says what to do."""

from __future__ import annotations

from stepwell.errors import StepwellError


class TrainerError(StepwellError):
    """Something about this training run is wrong; the message says what to do."""


class ElsewhereError(TrainerError):
    """The run's first process cannot go on, and says itself why; it ends with this status."""

    def __init__(self, exit_status: int) -> None:
        super().__init__("process 0 failed")
        self.exit_status = exit_status


class SettingError(TrainerError, ValueError):
    """A setting is unknown, of the wrong type, or contradicts another."""

    exit_status = 2
