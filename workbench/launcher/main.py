"""`stepwell launcher`: run launches from the dashboard or the API on this machine.

It claims launches, starts their processes and reports how they ended. The launcher is itself a
worker that can be paused, drained and stopped. It runs only `stepwell train|collect|evaluate`, with
options that workbench/launcher/launch_permissions.py allows. Operators read
docs/reference/workers.md.

    DATA/launcher.json   its name     launches/   records of launches     logs/   of each process
    DATA/runs/  cache/  outbox/       output of trainers and collectors
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import secrets
import socket
import sys
from pathlib import Path

from stepwell import terminal
from stepwell._exit_message import fail
from stepwell._files import whole_file
from stepwell._locks import take_lock
from stepwell._signals import stop_signals
from stepwell.client import ROLES, Client
from stepwell.errors import InvalidData, StepwellError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
# Short, because the loop repeats failed calls and an unresponsive service must not delay processes.
TIMEOUT = 5.0

EXAMPLES = """\
  stepwell launcher --url http://10.0.0.5:8000 --data ./launcher
  stepwell launcher --roles collect evaluate --capacity 4 --plugin my_envs
  stepwell launcher --roles train --name gpu-box --plugin my_encoders --grace 120"""


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    try:
        import fcntl  # noqa: F401 - identifies processes after a restart
    except ImportError:
        raise StepwellError("stepwell launcher needs Linux or macOS: it locks files") from None
    from workbench.launcher.launch_permissions import LauncherFolder
    from workbench.launcher.loop import Launcher, Options

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr, force=True
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    folder = LauncherFolder(args.data.resolve())
    folder.make()
    in_use = StepwellError(f"another launcher uses {folder.data}; give this one another --data")
    with (
        take_lock(folder.data / "lock", lambda _: in_use),
        Client(args.url, args.token, timeout=TIMEOUT, retry_for=0.0) as client,
    ):
        options = Options(
            name=_name(folder.data, args.name),
            folder=folder,
            roles=tuple(args.roles),
            capacity=args.capacity,
            plugins=tuple(args.plugin),
            poll=args.poll,
            grace=args.grace,
        )
        launcher = Launcher(options, client, args.token)
        with stop_signals(lambda: launcher.request("stop"), lambda: launcher.request("kill")):
            launcher.run()
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = terminal.parser(
        "launcher", "Claim launches and start their processes on this machine.", EXAMPLES
    )
    add = parser.add_argument
    add("--url", help="address of the service (default: STEPWELL_URL, http://127.0.0.1:8000)")
    add("--token", help="with the scopes train and ingest (default: STEPWELL_TOKEN)")
    add("--roles", nargs="+", choices=ROLES, default=ROLES, help="what to start (default: all)")
    add("--capacity", type=int, default=1, help="processes at the same time (default: 1)")
    add("--data", type=Path, default=Path("stepwell-launcher"), help="where everything is kept")
    add("--name", default="", help="how the service knows it (default: made up once per --data)")
    add("--plugin", action="append", default=[], metavar="MODULE",
        help="module that registers environments, encoders or other parts: its processes load it, "
        "and no launch can name another; repeatable")  # fmt: skip
    add("--poll", type=float, default=2.0, help="seconds between two looks for work (default: 2)")
    add("--grace", type=float, default=60.0,
        help="seconds that a process may take to end when told to (default: 60)")  # fmt: skip
    args = parser.parse_args(argv)
    if args.capacity < 1:
        parser.error(f"--capacity: expected at least 1, got {args.capacity}")
    for name in ("poll", "grace"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name}: expected more than 0 seconds, got {getattr(args, name)}")
    if args.name and not NAME.fullmatch(args.name):
        parser.error(f"--name: expected letters, digits and . _ : @ -, got {args.name!r}")
    for module in args.plugin:
        if not all(part.isidentifier() for part in module.split(".")):
            parser.error(f"--plugin: expected a module like my.module, got {module!r}")
    return args


def _name(data: Path, given: str) -> str:
    """Return a unique name that stays the same after a restart, so that it finds its launches."""
    path = data / "launcher.json"
    try:
        known = str(json.loads(path.read_text())["name"])
    except FileNotFoundError:
        host = re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname()).strip("-.")[:40]
        known = f"launcher-{host or 'host'}-{secrets.token_hex(3)}"
    except (ValueError, KeyError, TypeError):
        raise InvalidData(f"{path} does not read", expected='{"name": …}; remove it') from None
    name = given or known
    if not NAME.fullmatch(name):
        raise InvalidData(f"bad name in {path}", expected="letters and digits", got=name)
    with whole_file(path) as file:
        file.write(json.dumps({"name": name}).encode())
    return name


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StepwellError as error:
        sys.exit(fail("stepwell launcher", error))
