"""`stepwell dash`: runs the Streamlit app on 127.0.0.1, with the address of the service."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stepwell import terminal
from stepwell._extras import require
from stepwell._hosts import HOSTS, ORIGINS, allowed_names, from_environment
from stepwell._ports import LOOPBACK, free_port

APP = Path(__file__).with_name("web.py")


def command(port: int) -> list[str]:
    """The command line to execute. Other options are in .streamlit/config.toml beside the app;
    these are repeated because a config.toml in the user's folder would override that file."""
    options = {
        "server.address": LOOPBACK,
        "server.port": str(port),
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    # Streamlit guards its websocket a second time, behind HostGuard: with the same names.
    hosts = sorted(allowed_names(LOOPBACK, from_environment(HOSTS)))
    flags += [f"--server.allowedHosts={name}" for name in hosts]
    flags += [f"--server.corsAllowedOrigins={name}" for name in from_environment(ORIGINS)]
    return [sys.executable, "-m", "streamlit", "run", str(APP), *flags]


def main(argv: list[str] | None = None) -> int:
    parser = terminal.parser(
        "dash",
        "The dashboard, in your browser. It listens on this machine only, and answers to no other"
        f" name than localhost, 127.0.0.1 and [::1]. Behind a proxy, {HOSTS} allows the name that"
        " browsers use, as it does for the service.",
        "  stepwell dash\n  stepwell dash --port 0 --url http://10.0.0.5:8000\n"
        f"  {HOSTS}='[\"dash.example.org\"]' stepwell dash",
    )
    add = parser.add_argument
    add("--port", type=int, default=8501, help="0 takes any free port (default 8501)")
    add("--url", help="address of the service (default: STEPWELL_URL, or port 8000)")
    add("--token", help="token for the service (default: STEPWELL_TOKEN)")
    options = parser.parse_args(argv)
    require("streamlit")  # before this process is replaced
    port = free_port(options.port)
    words = command(port)
    if options.url:
        os.environ["STEPWELL_URL"] = options.url
    if options.token:
        os.environ["STEPWELL_TOKEN"] = options.token
    print(f"Stepwell dashboard: http://{LOOPBACK}:{port}", flush=True)
    # Replaces this process, so that stopping it stops the dashboard.
    os.execv(sys.executable, words)


if __name__ == "__main__":
    sys.exit(main())
