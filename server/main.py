"""`stepwell serve` and `stepwell db`: one process that serves one data directory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError
from sqlalchemy.exc import DatabaseError

from server.index.db import IndexUnusable, has_admin_token, revision, upgrade
from server.index.index_file import refuse_wrong_index
from server.index.tables import REVISION
from server.settings import Settings
from server.storage.store import DirectoryInUse, DirectoryLock
from stepwell import terminal
from stepwell._exit_message import fail

SERVE = """\
The dataset service: one process, one directory that holds everything, HTTP.

It serves until Ctrl-C or SIGTERM; then it finishes open requests, seals all segments, and exits.
Every other setting (listed in server/settings.py) is an environment variable: STEPWELL_ and the
name of the setting, for instance STEPWELL_SQL_WORKERS."""
SERVE_EXAMPLES = """\
  stepwell serve --data ./data
  stepwell serve --data ./data --port 0 --log-level warning
  export STEPWELL_TOKEN=$(openssl rand -hex 32); stepwell serve --data ./data --host 0.0.0.0
  stepwell tokens create me admin; stepwell serve --data ./data --host 0.0.0.0
  STEPWELL_DATA=./data STEPWELL_SQL_WORKERS=4 stepwell serve"""
DB = """\
Show or migrate the schema of the index. `stepwell serve` migrates when it starts; this command
migrates at another time. Stop the service on that directory first."""
DB_EXAMPLES = """\
  stepwell db current --data ./data
  stepwell db upgrade --data ./data"""


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; then finish requests, seal, and return 0."""
    parser = terminal.parser("serve", SERVE, SERVE_EXAMPLES)
    parser.add_argument("--data", type=Path, help="directory that holds everything (STEPWELL_DATA)")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8000; 0: a free one)")
    parser.add_argument("--token", help="the operator's token; better: STEPWELL_TOKEN")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"))
    options = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    try:
        settings = Settings(**options)
    except ValidationError as error:
        return _fail(_explain(error), status=2)
    if not settings.loopback and not _has_keys(settings):
        return _fail(
            f"refusing to listen on {settings.host}: no token or issuer would let anyone in. Set"
            " STEPWELL_TOKEN (for instance to the output of: openssl rand -hex 32); or start the"
            " service on loopback and create an admin's token, which it keeps: stepwell tokens"
            " create me admin; or set STEPWELL_OIDC_ISSUER",
            status=2,
        )
    configure_logging(settings.log_level)
    _return_memory()
    try:
        listener = socket.create_server(
            (settings.host, settings.port),
            family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET,
        )
    except OSError as error:
        return _fail(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror};"
            " choose another with --port, or 0 for a free one"
        )
    return _serve(settings, listener)


def _has_keys(settings: Settings) -> bool:
    """Whether somebody could manage a service that lets nobody in without a token."""
    if settings.token is not None or settings.oidc_issuer:
        return True
    try:
        return has_admin_token(settings.index_file)
    except IndexUnusable:
        return False


def _serve(settings: Settings, listener: socket.socket) -> int:
    # Imported here: `stepwell serve --help` and invalid options do not need the web framework.
    import uvicorn

    from server.app import create_app
    from server.http_protocol import HttpProtocol
    from server.service import Service

    try:
        service = Service(settings)
    except (DirectoryInUse, IndexUnusable) as error:
        listener.close()
        return _fail(str(error))
    except OSError as error:
        listener.close()
        return _fail(
            f"{settings.data} cannot hold the data ({error.strerror or error}); expected a"
            " directory that this user can make and write to: --data DIR"
        )
    except DatabaseError as error:
        listener.close()
        return _fail(
            f"the index cannot be used ({getattr(error, 'orig', None) or error}); check it with:"
            f" stepwell fsck --data {settings.data}, rebuild it with: stepwell fsck --rebuild"
        )

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            # The collector leaves the modules alone: walking them stops all threads for 0.1 s.
            gc.collect()
            gc.freeze()
            if not self.should_exit:
                host, port = listener.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                print(f"stepwell serves {settings.data} at http://{shown}:{port}", flush=True)

    config = uvicorn.Config(
        create_app(settings, service),
        http=HttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=30,
        lifespan="on",
    )
    server = Server(config)

    # uvicorn raises a captured signal again after its shutdown, which would kill the process before
    # everything is sealed. This handler replaces uvicorn's.
    def stop(_signal: int, _frame: Any) -> None:
        if server.should_exit:
            server.force_exit = True
        server.should_exit = True

    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    server.run(sockets=[listener])
    return 0 if server.started else 1


def _return_memory() -> None:
    """Make the C library return large freed blocks to the system.

    By default glibc raises the size from which it does so to 32 MB once blocks of that size were
    freed, and keeps a heap for each of some sixteen threads: the memory of released bodies would
    stay allocated. Does nothing on systems without glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        trim_threshold, mmap_threshold, arena_max = -1, -3, -8
        mallopt(mmap_threshold, 1 << 20)
        mallopt(trim_threshold, 8 << 20)
        mallopt(arena_max, 4)


def db_main(argv: list[str] | None = None) -> int:
    """`stepwell db upgrade | current`: show or migrate the schema of the index."""
    parser = terminal.parser("db", DB, DB_EXAMPLES)
    parser.add_argument(
        "command", choices=("upgrade", "current"), help="migrate, or print the current revision"
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("STEPWELL_DATA"),
        help="the service's directory (STEPWELL_DATA)",
    )
    options = parser.parse_args(argv)
    if options.data is None:
        return _fail("missing data directory: set --data DIR or STEPWELL_DATA", status=2)
    path = Path(options.data) / "index.sqlite"
    try:
        if options.command == "current":
            print(f"{path}: revision {revision(path) or 'none'}, this program needs {REVISION}")
            return 0
        with contextlib.closing(DirectoryLock(Path(options.data))):
            refuse_wrong_index(Path(options.data), path)
            print(f"{path}: revision {upgrade(path)}")
    except (DirectoryInUse, IndexUnusable) as error:
        return _fail(str(error))
    return 0


def configure_logging(level: str) -> None:
    """One line per event on stderr, `key=value`."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    for other in ("uvicorn.error", "asyncio"):
        # Their warnings are about clients: invalid HTTP, or disconnected during the response.
        logging.getLogger(other).setLevel(logging.ERROR)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        # Looked up for each line, so that a replaced sys.stderr receives the log too.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        name = "_".join(str(part) for part in item["loc"]).upper()
        lines.append(f"--{name.lower()} or STEPWELL_{name}: {item['msg']}")
    return "; ".join(lines)


def _fail(message: str, *, status: int = 1) -> int:
    return fail("stepwell", message, status=status)


if __name__ == "__main__":
    sys.exit(main())
