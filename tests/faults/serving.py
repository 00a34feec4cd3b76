"""A service on a real socket in this process, which does nothing that it is not asked for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from server import http_protocol
from server.app import create_app
from server.service import Service
from server.settings import Settings
from stepwell.testing import wait_until


@contextmanager
def serving(data: Path, token: str | None = None) -> Iterator[tuple[str, Service]]:
    """Its address, and the service. Raises what refuses the start."""
    settings = Settings(
        data=data,
        token=token,
        sql_workers=1,
        maintenance_interval=0,
        scrub_rate=0,
        seal_idle=1000,
        seal_age=1000,
    )
    service = Service(settings)
    app = create_app(settings, service)
    server = uvicorn.Server(
        uvicorn.Config(app, http=http_protocol.HttpProtocol, ws="none", log_config=None, port=0)
    )
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive(), what="the service to start")
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join(60)
