"""`python -m trainer.launcher …`: accelerate's launcher, quiet where a trainer has spoken.

A trainer that fails says itself why; the launcher would add a page about processes. Only a death
that the trainer could not tell of, by a signal, is told here.
"""

from __future__ import annotations

import logging
import signal
import sys

from accelerate.commands import launch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# They have levels of their own, so nothing above them would quieten them.
CHATTY = ("multiprocessing.api", "agent.server.api")


def main() -> int:
    """Exit status of the process that failed first; 128 + N where signal N killed it."""
    for name in CHATTY:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        launch.main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        number = -failure.exitcode
        print(
            f"stepwell train: process {rank} was killed by {signal.Signals(number).name}; where "
            "nobody did that, the system did, for want of memory",
            file=sys.stderr,
            flush=True,
        )
        return 128 + number
    return 0


if __name__ == "__main__":
    sys.exit(main())
