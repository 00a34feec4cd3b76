"""A TCP port of this machine to listen on."""

from __future__ import annotations

import socket

from stepwell.errors import InvalidData

LOOPBACK = "127.0.0.1"


def free_port(wanted: int = 0) -> int:
    """`wanted`, or any free one for 0. Raises `InvalidData` where nothing can listen on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, wanted))
        except (OSError, OverflowError) as error:
            raise InvalidData(f"port {wanted} is taken ({error}); --port 0 takes any") from None
        return int(probe.getsockname()[1])
