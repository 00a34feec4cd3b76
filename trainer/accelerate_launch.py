"""`python -m trainer.accelerate_launch …`: `accelerate launch` without its page about processes.

A trainer that fails prints its own reason. Only a death by a signal, of which the trainer could
print nothing, is reported here.
"""

from __future__ import annotations

import logging
import signal
import sys

from accelerate.commands import launch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

# These loggers set levels of their own, so their parents' level does not silence them.
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
            f"stepwell train: process {rank} was killed by {signal.Signals(number).name}; if "
            "nobody sent it, the system did, because memory ran out",
            file=sys.stderr,
            flush=True,
        )
        return 128 + number
    return 0


if __name__ == "__main__":
    sys.exit(main())
