"""What `stepwell annotate` and `stepwell estimate` share: options, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from amago_model.errors import AmagoError
from stepwell import terminal
from stepwell._exit_message import fail
from stepwell._plugins import import_plugins
from stepwell.client import Client
from stepwell.errors import StepwellError
from trainer.errors import SettingError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that load policies and data, as `cache`, `plugin` and those of the
    connection."""
    add = parser.add_argument
    add("--cache", type=Path, default=None,
        help="folder of this node's columns (default: as for training, data.cache)")  # fmt: skip
    add("--plugin", action="append", default=[], metavar="MODULE",
        help="module to import first, for policies with custom modules")  # fmt: skip
    terminal.add_connection(parser)


def run(
    command: str, action: Callable[[Client, argparse.Namespace], int], args: argparse.Namespace
) -> int:
    """Call `action` with a client; the exit status. The same command continues a stopped one."""
    try:
        import_plugins(args.plugin, SettingError)
        with terminal.connect(args) as client:
            return action(client, args)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues", file=sys.stderr)
        return 130
    except (StepwellError, AmagoError) as error:
        return fail(f"stepwell {command}", error)
