"""The start of a run whose data does not exist yet (data.wait_for_data).

Collectors may wait for a policy while the trainer waits for their episodes. So as soon as the
dataset exists, the untrained policy is published as version 0: commands may start in any order.
With `derive` the first data must be of another policy, such as random actions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from stepwell.errors import BadRequest, Busy, NotFound, ServiceUnreachable
from trainer.config import TrainConfig
from trainer.distributed import World

log = logging.getLogger(__name__)
POLL, LONGEST_POLL = 0.2, 1.0
"""Seconds between the first two attempts, and later ones: data are often there after seconds."""


def starts_untrained(config: TrainConfig) -> bool:
    """Whether a new run publishes its untrained policy before it looks for data.

    Not with `derive`: then the shape of the networks follows from the data, so the policy is
    published after the first of them.
    """
    waits = config.data.wait_for_data > 0
    return waits and bool(config.dataset) and config.derive == "off"


def wait_for_data(
    attempt: Callable[[], Any], seconds: float, world: World, stopping: Callable[[], bool]
) -> Any:
    """The result of `attempt` on rank 0, which is repeated for `seconds` while the service is
    unreachable, or has no dataset or no trajectory; None if `stopping` becomes true meanwhile.

    All ranks call this. It raises the error of the last attempt.
    """
    deadline, said, pause = time.monotonic() + seconds, "", POLL

    def once() -> Any:
        nonlocal said
        try:
            return attempt()
        except (BadRequest, Busy, NotFound, ServiceUnreachable) as error:
            refused = isinstance(error, BadRequest) and error.code != "empty_selection"
            if refused or time.monotonic() >= deadline:
                raise
            if (reason := getattr(error, "detail", "") or str(error)) != said:
                said = reason
                log.warning("waiting for the first trajectory: %s", reason)
        return None

    while (result := world.on_main(once)) is None:
        if world.maximum([int(stopping())])[0]:
            return None
        time.sleep(min(pause, seconds))
        pause = min(1.3 * pause, LONGEST_POLL)
    return result
