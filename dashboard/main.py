"""`stepwell dash`: runs the Streamlit app on 127.0.0.1, with the address of the service."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

APP = Path(__file__).with_name("app.py")
HOST = "127.0.0.1"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="stepwell dash",
        description="The dashboard, in your browser. It listens on this machine only.",
        epilog="examples:\n  stepwell dash\n  stepwell dash --port 0 --url http://10.0.0.5:8000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--port", type=int, default=8501, help="0 takes any free port (default 8501)")
    made.add_argument("--url", help="address of the service (default: STEPWELL_URL, or port 8000)")
    made.add_argument("--token", help="token for the service (default: STEPWELL_TOKEN)")
    return made


def free_port(port: int) -> int | None:
    """The port itself if it is free, any free one for 0, None if it is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            return None
        return int(probe.getsockname()[1])


def command(port: int) -> list[str]:
    """What is executed. The other options are in .streamlit/config.toml beside the app; these
    are repeated because a config.toml in the user's own folder would win over that one."""
    options = {
        "server.address": HOST,
        "server.port": str(port),
        "server.headless": "true",
        "browser.gatherUsageStats": "false",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "streamlit", "run", str(APP), *flags]


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    port = free_port(options.port)
    if port is None:
        print(
            f"port {options.port} is taken, or none that can be listened on; choose another: "
            "stepwell dash --port 0",
            file=sys.stderr,
        )
        return 1
    if options.url:
        os.environ["STEPWELL_URL"] = options.url
    if options.token:
        os.environ["STEPWELL_TOKEN"] = options.token
    print(f"Stepwell dashboard: http://{HOST}:{port}", flush=True)
    # Replaces this process, so that stopping it stops the dashboard.
    os.execv(sys.executable, command(port))


if __name__ == "__main__":
    sys.exit(main())
