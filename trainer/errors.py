"""The exceptions of the trainer. Each message contains a remedy."""

from __future__ import annotations

from stepwell.errors import StepwellError


class TrainerError(StepwellError):
    """Base class of the trainer's exceptions."""


class ElsewhereError(TrainerError):
    """Process 0 failed and reports the reason itself; this process exits with the same status."""

    def __init__(self, exit_status: int) -> None:
        super().__init__("process 0 failed")
        self.exit_status = exit_status


class SettingError(TrainerError, ValueError):
    """A setting is unknown, has a wrong type, or contradicts another setting."""

    exit_status = 2
